"""The sequence numbers of a producer that a queue has accepted.

A number below the highest is a repeat only if the queue has accepted it: a request can be refused,
or come later than another one, while a higher number is accepted. So the queue keeps the numbers as
runs: all numbers below ``low``, and separate runs above it. A producer that counts in order has no
runs, and one comparison shows that its next block is new.

The number of runs is limited. At the limit the queue does what the producer chose: see
:class:`GapPolicy`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from turnlane.intervals import RangeSet

MAX_RUNS = 128
"""Runs above ``low`` that a producer may have: more than a client has requests in progress."""

KEPT_RUNS = 1024
"""The hard limit: publishers that were waiting in line may exceed ``MAX_RUNS``."""


class GapPolicy(enum.Enum):
    """What a queue does about numbers that a producer leaves out."""

    KEEP = "keep"
    """A number that was left out may come later. A gap beyond the limit is refused."""
    FORGET = "forget"
    """A number that was left out may come later. Beyond the limit, the lowest gap is closed."""
    SKIP = "skip"
    """Numbers only grow: a number that was left out never comes, and counts as accepted."""


class AcceptedSequences:
    """The numbers of one producer that a queue has accepted. Not thread-safe."""

    __slots__ = ("low", "runs")

    def __init__(self, low: int = 0, runs: Iterable[tuple[int, int]] = ()) -> None:
        self.low = low
        """All numbers below it are accepted."""
        self.runs = RangeSet()
        """The accepted numbers above ``low``."""
        for first, end in runs:
            self.add(first, end)

    @property
    def end(self) -> int:
        """One more than the highest number."""
        return self.runs.end if self.runs else self.low

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The ranges below ``end`` that are missing."""
        return self.runs.missing(self.low, self.end)

    def add(self, first: int, end: int) -> None:
        """Accept ``[first, end)``."""
        if first > self.low:
            self.runs.add(first, end)
            self.close_gaps(KEPT_RUNS)
        elif end > self.low:
            self.low = end
            self._join_low()

    def update(self, other: AcceptedSequences) -> None:
        """Accept all numbers of the other one."""
        for first, end in other:
            self.add(first, end)

    def close_gaps(self, most: int) -> None:
        """Count the lowest gaps as accepted, until at most ``most`` runs are left."""
        while len(self.runs) > most:
            self.low = next(iter(self.runs))[1]
            self._join_low()

    def _join_low(self) -> None:
        if self.runs:
            self.low = self.runs.end_of_run(self.low)
            self.runs.drop_below(self.low)

    def missing(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of ``[first, end)`` that are not accepted."""
        return self.runs.missing(max(first, self.low), end)

    def holds(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return for each number whether it is accepted."""
        held = numbers < self.low
        for first, end in self.runs:
            held |= (numbers >= first) & (numbers < end)
        return held

    def start_of_run(self, number: int) -> int:
        """Return the first number of the run that has ``number``; 0 if ``low`` is above it."""
        return 0 if number < self.low else self.runs.start_of_run(number)

    def is_apart(self, first: int, end: int) -> bool:
        """Whether ``[first, end)`` would be a separate run."""
        return first > self.low and not self.runs.touches(first, end)

    def copy(self) -> AcceptedSequences:
        """Return an independent copy."""
        clone = AcceptedSequences(self.low)
        clone.runs = self.runs.copy()
        return clone

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over all accepted ranges."""
        return iter([(0, self.low), *self.runs] if self.low else list(self.runs))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AcceptedSequences) and list(self) == list(other)

    def __hash__(self) -> int:
        raise TypeError("AcceptedSequences can change and cannot be hashed")

    def __repr__(self) -> str:
        return f"AcceptedSequences({self.low}, {list(self.runs)})"
