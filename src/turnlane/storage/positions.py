"""Which offsets of a queue are new, read, or settled. Pure: no files, no lock.

A disk queue restores its positions from the journal and the log when it is opened.
"""

from __future__ import annotations

from collections.abc import Iterable

from turnlane.intervals import RangeSet


class Positions:
    """All offsets below ``low`` are settled, below ``frontier`` read, below ``end`` published.

    The settled offsets above ``low`` are kept as ranges. Above ``frontier`` nothing was read since
    the queue was opened, but after a restart some of it is already settled.
    """

    __slots__ = ("_skipped", "end", "frontier", "low", "settled")

    def __init__(
        self,
        low: int = 0,
        end: int = 0,
        settled: Iterable[tuple[int, int]] = (),
        skipped: Iterable[tuple[int, int]] = (),
    ) -> None:
        self.low = low
        self.frontier = low
        self.end = max(low, end)
        self.settled = RangeSet(settled)
        self._skipped = RangeSet(skipped)
        self._raise_low()

    @property
    def pending(self) -> int:
        """How many events are published and not settled."""
        return self.end - self.low - self.settled.total

    @property
    def fresh(self) -> int:
        """How many events were not read since the queue was opened."""
        if not self.settled and not self._skipped:
            return self.end - self.frontier
        span = (self.frontier, self.end)
        return self.end - self.frontier - self.settled.overlap(*span) - self._skipped.overlap(*span)

    def next_fresh(self, limit: int) -> tuple[int, int]:
        """Return the next run of at most ``limit`` new offsets; empty if there is none."""
        first = self.frontier
        if not self.settled and not self._skipped:
            return first, min(self.end, first + limit)
        while True:
            after = self._skipped.end_of_run(self.settled.end_of_run(first))
            if after == first:
                break
            first = after
        stops = (self.settled.next_after(first), self._skipped.next_after(first))
        end = min(self.end, first + limit, *(stop for stop in stops if stop is not None))
        return first, max(first, end)

    def take(self, end: int) -> None:
        """Count everything below ``end`` as read."""
        self.frontier = max(self.frontier, end)
        self._skipped.drop_below(self.frontier)

    def leave(self, first: int, end: int) -> bool:
        """Count ``[first, end)`` as new again; false if it was not the last range read."""
        if self.frontier != end:
            return False
        self.frontier = first
        return True

    def settle(self, first: int, end: int) -> int:
        """Settle a range; return how many of its events were not settled before."""
        first = max(first, self.low)
        if first >= end:
            return 0
        if first == self.low and not self.settled and not self._skipped:
            # Nearly all ranges come in order: the same as below in a fraction of the time.
            self.low = end
            self.frontier = max(self.frontier, end)
            self.end = max(self.end, end)
            return end - first
        fresh = end - first - self.settled.overlap(first, end)
        self.settled.add(first, end)
        self._skipped.remove(
            first, end
        )  # otherwise it would be subtracted from the new events twice
        self._raise_low()
        return fresh

    def unsettled(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of a range that are not settled."""
        return self.settled.missing(max(first, self.low), end)

    def is_settled(self, first: int, end: int) -> bool:
        """Whether every offset of the range is settled."""
        return self.settled.covers(max(first, self.low), end)

    def _raise_low(self) -> None:
        self.low = self.settled.end_of_run(self.low)
        self.settled.drop_below(self.low)
        self.frontier = max(self.frontier, self.low)
        self.end = max(self.end, self.low)
