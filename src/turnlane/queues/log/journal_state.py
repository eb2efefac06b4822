"""What the journal says of a queue, and how each record changes it: values only, no files.

Apart from the journal so that the memory of a running queue, a snapshot, and the replay of records
after a crash are the same few lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from turnlane.queues.accepted import Accepted
from turnlane.queues.contract import Outcome
from turnlane.queues.log.position import Position, Stamp
from turnlane.queues.ranges import Ranges

MAX_PRODUCERS = 10_000
"""Producers remembered, the most recent: one that was silent for longer may repeat itself."""

MAX_ATTEMPT = 0xFFFF
"""What a record has room for; nobody tells attempt 65,536 from this one."""

ProducerHash = bytes
Returned = tuple[int, int, int]


@dataclass(slots=True)
class JournalState:
    """Which events are settled, and hints for recovery. Not thread-safe."""

    low: int = 0
    """Everything below is settled."""
    ranges: Ranges = field(default_factory=Ranges)
    """What is settled above ``low``."""
    returned: list[Returned] = field(default_factory=list)
    """Unsettled ranges that were given back: first, end, and the attempt they come as. Sorted."""
    totals: dict[Outcome, int] = field(default_factory=dict)
    """Events by how they left, or never entered."""
    bytes: int = 0
    """Size of the unsettled events up to ``position``, less that of events settled beyond it: so
    adding all that the log finds after ``position`` is right, though this may be below zero."""
    position: Position | None = None
    """Where the log ended when last known good: a hint."""
    producers: dict[ProducerHash, Accepted] = field(default_factory=dict)
    """Each producer's numbers that the queue has, least recent first."""
    found: bool = False
    """False if there was no journal to read: then nothing is known, not even what was settled."""

    @property
    def settled(self) -> list[tuple[int, int]]:
        """The settled ranges above ``low``: sorted, disjoint, merged."""
        return list(self.ranges)

    @property
    def floor(self) -> int:
        """The lowest offset that was certainly never used."""
        handed_out = self.returned[-1][1] if self.returned else 0
        written = self.position.end if self.position else 0
        return max(self.low, self.ranges.end, handed_out, written)

    def settled_to(self, offset: int, also: tuple[int, int]) -> int:
        """How far everything from ``offset`` on is settled, if the range ``also`` were so too."""
        first, end = also
        while True:
            reached = self.ranges.end_of_run(max(offset, self.low))
            if first <= reached < end:
                reached = end
            if reached == offset:
                return offset
            offset = reached

    def settle(self, first: int, end: int, size: int, outcome: Outcome) -> None:
        """Settle ``[first, end)``, ``size`` bytes in all; what already was is not counted twice."""
        if first == self.low and first < end and not self.ranges and not self.returned:
            # In order, as nearly all acks are: the same as below in half the time.
            self.low = end
            self.totals[outcome] = self.totals.get(outcome, 0) + end - first
            self.bytes -= size
            return
        fresh = self._fresh(first, end)
        if fresh <= 0:
            return
        self.totals[outcome] = self.totals.get(outcome, 0) + fresh
        self.bytes -= size * fresh // (end - first)
        self._mark(first, end)
        self.returned = _without(self.returned, first, end)

    def give_back(self, first: int, end: int, attempt: int) -> None:
        """Note that ``[first, end)``, settled parts apart, is to be handed out as ``attempt``."""
        pieces = self.ranges.missing(max(first, self.low), end)
        kept = _without(self.returned, first, end)
        kept += [(start, stop, min(attempt, MAX_ATTEMPT)) for start, stop in pieces]
        self.returned = sorted(kept)

    def advance(self, position: Position, unsettled_bytes: int, stamps: Sequence[Stamp]) -> None:
        """Note how far the log has come. Never goes back.

        A write that failed half-way may have left records that replay finds behind newer ones.
        """
        for stamp in stamps:
            self.stamp(stamp)
        if self.position is None or position.end >= self.position.end:
            self.position = position
            self.bytes = unsettled_bytes

    def stamp(self, stamp: Stamp) -> None:
        """Note what a producer has published. Never goes back either."""
        known = self.producers.pop(stamp.producer, None) or Accepted()
        known.add(stamp.first, stamp.next_sequence)
        self.producers[stamp.producer] = known
        if len(self.producers) > MAX_PRODUCERS:
            del self.producers[next(iter(self.producers))]

    def drop(self, outcome: Outcome, events: int) -> None:
        """Count events that were dropped before they got an offset."""
        self.totals[outcome] = self.totals.get(outcome, 0) + events

    def copy(self) -> JournalState:
        """An independent copy."""
        return JournalState(
            self.low,
            self.ranges.copy(),
            self.returned.copy(),
            self.totals.copy(),
            self.bytes,
            self.position,
            {producer: accepted.copy() for producer, accepted in self.producers.items()},
            self.found,
        )

    def _fresh(self, first: int, end: int) -> int:
        start = max(first, self.low)
        return end - start - (self.ranges.overlap(start, end) if self.ranges else 0)

    def _mark(self, first: int, end: int) -> None:
        if first > self.low:
            self.ranges.add(first, end)
            return
        self.low = max(self.low, end)
        if self.ranges:
            self.low = self.ranges.end_of_run(self.low)
            self.ranges.drop_below(self.low)


def _without(returned: list[Returned], first: int, end: int) -> list[Returned]:
    """Cut ``[first, end)`` out of the ranges."""
    kept: list[Returned] = []
    for start, stop, attempt in returned:
        pieces = ((start, min(stop, first)), (max(start, end), stop))
        kept += [(low, high, attempt) for low, high in pieces if low < high]
    return kept
