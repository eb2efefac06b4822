"""The results of a benchmark: named figures with their targets, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from benchmarks.measure import Series


@dataclass(frozen=True)
class Figure:
    """A named number, with its target and a description of the measurement."""

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
        """The target as text; empty if there is none."""
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


def make_figure(name: str, series: Series, how: str, **bounds: Any) -> Figure:
    """Make a figure of its rounds: the median, the lowest and the highest."""
    return Figure(name, series.median, series.low, series.high, how, **bounds)


@dataclass(frozen=True)
class Cell:
    """A number in a table, with its lowest and highest round."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, series: Series) -> Self:
        """Make a cell of a series."""
        return cls(series.median, series.low, series.high)


@dataclass(frozen=True)
class Table:
    """A table with a row for each contestant; ``None`` is a cell that was not measured."""

    title: str
    unit: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[Cell | None]]
    note: str = ""


@dataclass
class Outcome:
    """All results of one benchmark module."""

    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Append the results of another part."""
        self.figures += other.figures
        self.tables += other.tables
        self.remarks += other.remarks

    def named(self) -> dict[str, float]:
        """Return the figures by name, for ``--json``."""
        return {each.name: float(f"{each.value:.4g}") for each in self.figures}

    def as_dict(self) -> dict[str, Any]:
        """Return the results for a JSON file that :meth:`from_dict` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Read the results that :meth:`as_dict` returned."""
        return cls(
            [Figure(**each) for each in saved["figures"]],
            [_read_table(each) for each in saved["tables"]],
            list(saved["remarks"]),
        )


def _read_table(saved: Mapping[str, Any]) -> Table:
    rows = {
        name: [None if cell is None else Cell(**cell) for cell in cells]
        for name, cells in saved["rows"].items()
    }
    return Table(**{**saved, "rows": rows})
