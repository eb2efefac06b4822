"""Sets of offsets, kept as sorted, disjoint, merged ranges.

Offsets settled out of order are few runs of many numbers: there are never more runs than batches
in flight, whatever the number of events.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Ranges:
    """A set of integers as half-open ranges ``[first, end)``."""

    __slots__ = ("_ends", "_firsts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []
        for first, end in ranges:
            self.add(first, end)

    def add(self, first: int, end: int) -> None:
        """Add ``[first, end)``, merging it with what it overlaps or touches."""
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
        """Take ``[first, end)`` out, cutting ranges that reach beyond it."""
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
        """Forget everything below ``offset``."""
        if self._firsts and self._firsts[0] < offset:
            self.remove(self._firsts[0], offset)

    def covers(self, first: int, end: int) -> bool:
        """Whether all of ``[first, end)`` is in the set."""
        if first >= end:
            return True
        index = bisect_right(self._firsts, first) - 1
        return index >= 0 and self._ends[index] >= end

    def overlap(self, first: int, end: int) -> int:
        """How many numbers of ``[first, end)`` are in the set."""
        return sum(stop - start for start, stop in self.within(first, end))

    def within(self, first: int, end: int) -> list[tuple[int, int]]:
        """The ranges of the set, cut to ``[first, end)``."""
        if first >= end:
            return []
        low = bisect_right(self._ends, first)
        high = bisect_left(self._firsts, end)
        return [
            (max(first, self._firsts[index]), min(end, self._ends[index]))
            for index in range(low, high)
        ]

    def missing(self, first: int, end: int) -> list[tuple[int, int]]:
        """The ranges of ``[first, end)`` that are not in the set."""
        gaps: list[tuple[int, int]] = []
        for start, stop in self.within(first, end):
            if first < start:
                gaps.append((first, start))
            first = stop
        if first < end:
            gaps.append((first, end))
        return gaps

    def end_of_run(self, offset: int) -> int:
        """The first number at or after ``offset`` that is not in the set."""
        index = bisect_right(self._firsts, offset) - 1
        if index >= 0 and self._ends[index] > offset:
            return self._ends[index]
        return offset

    def start_of_run(self, offset: int) -> int:
        """The first number of the range that has ``offset``; ``offset`` if none has it."""
        index = bisect_right(self._firsts, offset) - 1
        if index >= 0 and self._ends[index] > offset:
            return self._firsts[index]
        return offset

    def touches(self, first: int, end: int) -> bool:
        """Whether ``[first, end)`` overlaps a range of the set, or adjoins one."""
        return bisect_left(self._ends, first) < bisect_right(self._firsts, end)

    def next_after(self, offset: int) -> int | None:
        """The first number of the set at or after ``offset``."""
        index = bisect_right(self._ends, offset)
        if index == len(self._firsts):
            return None
        return max(offset, self._firsts[index])

    def copy(self) -> Ranges:
        """An independent copy."""
        clone = Ranges()
        clone._firsts = self._firsts.copy()
        clone._ends = self._ends.copy()
        return clone

    @property
    def total(self) -> int:
        """How many numbers the set holds."""
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
        return isinstance(other, Ranges) and list(self) == list(other)

    def __hash__(self) -> int:
        raise TypeError("Ranges can change and cannot be hashed")

    def __repr__(self) -> str:
        return f"Ranges({list(self)})"
