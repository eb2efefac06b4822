"""Measures contestants side by side: they take turns, and the result is the median."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")

SHORT_TURNS = 3
"""The factor for rounds whose turns take a fraction of a second, much of it in the disk: one slow
sync must not decide a figure."""


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Keep the garbage collector from visiting the input of a measurement again and again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True)
class Series:
    """A quantity that is measured once in every round."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        """The value that is reported."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The smallest of the rounds."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest of the rounds."""
        return max(self.values)

    def map(self, change: Callable[[float], float]) -> Series:
        """Return the series with every value converted."""
        return Series([change(value) for value in self.values])

    def over(self, other: Series) -> Series:
        """Return the ratio to ``other``, round by round: both ran at nearly the same time."""
        return Series([own / its for own, its in zip(self.values, other.values, strict=True)])


def alternate(
    contestants: Mapping[str, Callable[[], Result]], rounds: int
) -> dict[str, list[Result]]:
    """Let contestants take turns, A B C, B C A, …; returns the results of each.

    No contestant always runs first, or always after the same one, whose dirty pages it would find.
    """
    names = list(contestants)
    results: dict[str, list[Result]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            results[name].append(contestants[name]())
    return results


def get_percentile(ordered: Sequence[float], part: float) -> float:
    """Return the value below which the share ``part`` of sorted values is."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
