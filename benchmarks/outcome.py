"""What a benchmark found: named figures beside their targets, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from benchmarks.measure import Series


@dataclass(frozen=True)
class Figure:
    """A named number, with the bound we hold ourselves to and how it was measured."""

    name: str
    value: float
    low: float
    high: float
    how: str
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def target(self) -> str:
        """The bound as text; empty if there is none."""
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return "" if self.at_most is None else f"≤ {self.at_most:g}"

    @property
    def verdict(self) -> str:
        """✓ or ✗; empty if there is no target."""
        if self.at_least is not None:
            return "✓" if self.value >= self.at_least else "✗"
        if self.at_most is not None:
            return "✓" if self.value <= self.at_most else "✗"
        return ""


def figure(name: str, series: Series, how: str, **bounds: Any) -> Figure:
    """A figure from its rounds: the median, with the spread."""
    return Figure(name, series.median, series.low, series.high, how, **bounds)


@dataclass(frozen=True)
class Cell:
    """A number in a table, with its spread."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, series: Series) -> Self:
        """The median and spread of a series."""
        return cls(series.median, series.low, series.high)


@dataclass(frozen=True)
class Table:
    """Contestants against columns of numbers; a missing cell was not measured."""

    title: str
    unit: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[Cell | None]]
    note: str = ""


@dataclass
class Outcome:
    """All that one benchmark module has to say."""

    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Take over what another found."""
        self.figures += other.figures
        self.tables += other.tables
        self.remarks += other.remarks

    def named(self) -> dict[str, float]:
        """The figures by name, for ``--json``."""
        return {each.name: float(f"{each.value:.4g}") for each in self.figures}

    def as_dict(self) -> dict[str, Any]:
        """For a file that :meth:`from_dict` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """What :meth:`as_dict` gave."""
        return cls(
            [Figure(**each) for each in saved["figures"]],
            [_table(each) for each in saved["tables"]],
            list(saved["remarks"]),
        )


def _table(saved: Mapping[str, Any]) -> Table:
    rows = {
        name: [None if cell is None else Cell(**cell) for cell in cells]
        for name, cells in saved["rows"].items()
    }
    return Table(**{**saved, "rows": rows})
