"""Measuring side by side: contestants take turns, and what counts is the median of the turns."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")

SHORT_TURNS = 3
"""So many times as many rounds where a turn takes a fraction of a second, much of it the disk's:
one slow sync must not decide a figure."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the collector from walking, again and again, what a measurement was given to work on."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True)
class Series:
    """One quantity, measured once in every round."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        """The value to quote."""
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
        """The series with every value changed."""
        return Series([change(value) for value in self.values])

    def over(self, other: Series) -> Series:
        """The ratio to ``other``, round by round: both saw the same machine at the same time."""
        return Series([own / its for own, its in zip(self.values, other.values, strict=True)])


def alternate(
    contestants: Mapping[str, Callable[[], Result]], rounds: int
) -> dict[str, list[Result]]:
    """Let contestants take turns, A B C, B C A, …; each says how it did.

    Nobody always runs first, or always after the same neighbour, whose dirty pages it would meet.
    """
    names = list(contestants)
    results: dict[str, list[Result]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            results[name].append(contestants[name]())
    return results


def percentile(ordered: Sequence[float], part: float) -> float:
    """The value that ``part`` of the ordered ones are below."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
