"""Sets of offsets, kept as sorted, disjoint, merged ranges.

Offsets settled out of order are few runs of many numbers: there are never more runs than batches
in flight, whatever the number of events.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa


class RangeSet:
    """A set of integers as half-open ranges ``[first, end)``."""

    __slots__ = ("_ends", "_firsts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []
        for first, end in ranges:
            self.add(first, end)

    def add(self, first: int, end: int) -> None:
        """Add ``[first, end)``; merge it with ranges that it overlaps or touches."""
        if first >= end:
            return
        low = bisect_left(self._ends, first)
        high = bisect_right(self._firsts, end)
        if low < high:
            first = min(first, self._firsts[low])
            end = max(end, self._ends[high - 1])
        self._firsts[low:high] = [first]
        self._ends[low:high] = [end]

    def remove(self, first: int, end: int) -> None:
        """Remove ``[first, end)``; cut ranges that reach beyond it."""
        if first >= end:
            return
        low = bisect_right(self._ends, first)
        high = bisect_left(self._firsts, end)
        if low >= high:
            return
        kept = [
            piece
            for piece in ((self._firsts[low], first), (end, self._ends[high - 1]))
            if piece[0] < piece[1]
        ]
        self._firsts[low:high] = [piece[0] for piece in kept]
        self._ends[low:high] = [piece[1] for piece in kept]

    def drop_below(self, offset: int) -> None:
        """Remove everything below ``offset``."""
        if self._firsts and self._firsts[0] < offset:
            self.remove(self._firsts[0], offset)

    def covers(self, first: int, end: int) -> bool:
        """Whether all of ``[first, end)`` is in the set."""
        if first >= end:
            return True
        index = bisect_right(self._firsts, first) - 1
        return index >= 0 and self._ends[index] >= end

    def overlap(self, first: int, end: int) -> int:
        """Return how many numbers of ``[first, end)`` are in the set."""
        return sum(stop - start for start, stop in self.within(first, end))

    def within(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of the set, cut to ``[first, end)``."""
        if first >= end:
            return []
        low = bisect_right(self._ends, first)
        high = bisect_left(self._firsts, end)
        return [
            (max(first, self._firsts[index]), min(end, self._ends[index]))
            for index in range(low, high)
        ]

    def missing(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of ``[first, end)`` that are not in the set."""
        gaps: list[tuple[int, int]] = []
        for start, stop in self.within(first, end):
            if first < start:
                gaps.append((first, start))
            first = stop
        if first < end:
            gaps.append((first, end))
        return gaps

    def end_of_run(self, offset: int) -> int:
        """Return the first number at or after ``offset`` that is not in the set."""
        index = bisect_right(self._firsts, offset) - 1
        if index >= 0 and self._ends[index] > offset:
            return self._ends[index]
        return offset

    def start_of_run(self, offset: int) -> int:
        """Return the first number of the range with ``offset``; ``offset`` if there is none."""
        index = bisect_right(self._firsts, offset) - 1
        if index >= 0 and self._ends[index] > offset:
            return self._firsts[index]
        return offset

    def touches(self, first: int, end: int) -> bool:
        """Whether ``[first, end)`` overlaps a range of the set, or adjoins one."""
        return bisect_left(self._ends, first) < bisect_right(self._firsts, end)

    def next_after(self, offset: int) -> int | None:
        """Return the first number of the set at or after ``offset``."""
        index = bisect_right(self._ends, offset)
        if index == len(self._firsts):
            return None
        return max(offset, self._firsts[index])

    def copy(self) -> RangeSet:
        """Return an independent copy."""
        clone = RangeSet()
        clone._firsts = self._firsts.copy()
        clone._ends = self._ends.copy()
        return clone

    @property
    def total(self) -> int:
        """The number of numbers in the set."""
        return sum(self._ends) - sum(self._firsts)

    @property
    def end(self) -> int:
        """One more than the largest number, 0 if empty."""
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._firsts, self._ends, strict=True)))

    def __len__(self) -> int:
        return len(self._firsts)

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __contains__(self, offset: int) -> bool:
        return self.covers(offset, offset + 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RangeSet) and list(self) == list(other)

    def __hash__(self) -> int:
        raise TypeError("Ranges can change and cannot be hashed")

    def __repr__(self) -> str:
        return f"Ranges({list(self)})"


# ── spans ──
# Offsets as lists of spans, in order: what readers and queues tell each other. Pure.

MAX_GAP: Final = 4096
"""Spans at most this far apart are read with one call: some extra events cost less."""

COPY_SCHEMA: Final = pa.schema([("offset", pa.int64()), ("routes", pa.int64())])
"""Where events are, and one bit for each queue into which they are copied."""
MAX_COPY_TARGETS: Final = 62
"""The most queues that have a bit, in Arrow and in Spark."""

Span = tuple[int, int]
"""Offsets ``first`` to ``end - 1``."""


def take_oldest(spans: Sequence[Span], events: int) -> list[Span]:
    """Return the spans of the first ``count`` offsets."""
    taken: list[Span] = []
    for first, end in spans:
        if events <= 0:
            break
        taken.append((first, min(end, first + events)))
        events -= end - first
    return taken


def take_newest(spans: Sequence[Span], events: int) -> list[Span]:
    """Return the spans of the last ``count`` offsets."""
    taken: list[Span] = []
    for first, end in reversed(spans):
        if events <= 0:
            break
        taken.append((max(first, end - events), end))
        events -= end - first
    return taken[::-1]


def is_overlapping(one: Span, other: Span) -> bool:
    """Whether two spans have an offset in common."""
    return one[0] < other[1] and other[0] < one[1]


def count_offsets(spans: Iterable[Span]) -> int:
    """Return how many offsets some spans have."""
    return sum(end - first for first, end in spans)


def merge_near_spans(spans: Sequence[Span]) -> Iterator[Span]:
    """Return ranges that cover all spans and few other offsets."""
    first, end = spans[0]
    for start, stop in spans[1:]:
        if start - end > MAX_GAP:
            yield first, end
            first = start
        end = stop
    yield first, end


def find_inside(spans: Sequence[Span], first: int, count: int) -> npt.NDArray[np.bool_]:
    """Return which of ``count`` offsets from ``first`` are in the spans, which are in order."""
    starts, ends = np.asarray(spans, dtype=np.int64).reshape(-1, 2).T
    offsets = np.arange(first, first + count, dtype=np.int64)
    at = np.searchsorted(ends, offsets, side="right")
    found: npt.NDArray[np.bool_] = offsets >= np.append(starts, np.iinfo(np.int64).max)[at]
    return found


def convert_to_spans(offsets: npt.NDArray[np.int64]) -> list[Span]:
    """Return offsets, in any order and perhaps with repeats, as spans."""
    places = np.unique(offsets)
    if not len(places):
        return []
    breaks = np.flatnonzero(np.diff(places) > 1)
    firsts = places[np.concatenate(([0], breaks + 1))]
    ends = places[np.concatenate((breaks, [len(places) - 1]))] + 1
    return list(zip(firsts.tolist(), ends.tolist(), strict=True))
