"""Where every event of a queue is: unread, in flight, released, or settled.

:class:`Positions` knows which offsets were read and settled. :class:`InFlight` has the batches that
consumers hold, and the ranges that they gave back. A batch keeps the room of its events until they
are settled, by the batch itself or by offset: so no room is given back twice, and a settled event
is never handed out again.

Nothing here is thread-safe: the lock of the queue guards it.
"""

from __future__ import annotations

import enum
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from turnlane.errors import BatchFreed
from turnlane.events import Block, conform_block, join_blocks
from turnlane.intervals import RangeSet, Span, count_offsets
from turnlane.ledger import Outcome
from turnlane.queues.api import Batch, Place
from turnlane.queues.buffer import BlockRange


class Positions:
    """``low`` ≤ ``frontier`` ≤ ``end``: settled below, read below, published below.

    Settled offsets above ``low`` are kept as ranges. Above ``frontier`` nothing was read since the
    queue was opened, though after a restart parts of it are settled already.
    """

    __slots__ = ("_skipped", "end", "frontier", "low", "settled")

    def __init__(
        self, low: int = 0, end: int = 0, settled: Iterable[Span] = (), skipped: Iterable[Span] = ()
    ) -> None:
        self.low = low
        self.frontier = low
        self.end = max(low, end)
        self.settled = RangeSet(settled)
        self._skipped = RangeSet(skipped)
        """Ranges above ``frontier`` that were given back before the queue was opened."""
        self._raise_low()

    @property
    def pending(self) -> int:
        """How many events are published and not settled."""
        return self.end - self.low - self.settled.total

    @property
    def fresh(self) -> int:
        """How many events were not handed out since the queue was opened."""
        if not self.settled and not self._skipped:
            return self.end - self.frontier
        span = (self.frontier, self.end)
        return self.end - self.frontier - self.settled.overlap(*span) - self._skipped.overlap(*span)

    def find_next_fresh(self, limit: int) -> Span:
        """Return the next run of at most ``limit`` fresh offsets; empty if there is none."""
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

    def mark_read(self, end: int) -> None:
        """Count everything below ``end`` as read."""
        self.frontier = max(self.frontier, end)
        self._skipped.drop_below(self.frontier)

    def unread(self, first: int, end: int) -> bool:
        """Count a range as fresh again; false if it was not the range that was read last."""
        if self.frontier != end:
            return False
        self.frontier = first
        return True

    def settle(self, first: int, end: int) -> int:
        """Settle a range; returns how many of its events were not settled before."""
        first = max(first, self.low)
        if first >= end:
            return 0
        if first == self.low and not self.settled and not self._skipped:
            # In order, as nearly always: the same as below in a fraction of the time.
            self.low = end
            self.frontier = max(self.frontier, end)
            self.end = max(self.end, end)
            return end - first
        fresh = end - first - self.settled.overlap(first, end)
        self.settled.add(first, end)
        self._skipped.remove(first, end)  # `fresh` subtracts both sets
        self._raise_low()
        return fresh

    def find_unsettled(self, first: int, end: int) -> list[Span]:
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


class BatchState(enum.Enum):
    """Where a batch is in its life."""

    IN_FLIGHT = enum.auto()
    SETTLING = enum.auto()
    SETTLED = enum.auto()
    RELEASED = enum.auto()


class BatchOwner(Protocol):
    """The queue that a batch goes back to."""

    def free_batch(self, batch: BufferedBatch) -> None:
        """Give up the contents."""

    def settle_batch(self, batch: BufferedBatch, outcome: Outcome) -> None:
        """Settle the events."""

    def release_batch(self, batch: BufferedBatch) -> None:
        """Take the events back."""


class BufferedBatch(Batch):
    """A range that a consumer holds. Its fields change only under the lock of the queue."""

    __slots__ = (
        "_owner",
        "charged_bytes",
        "charged_events",
        "events",
        "is_freed",
        "place",
        "state",
    )

    def __init__(self, owner: BatchOwner, events: BlockRange) -> None:
        self._owner = owner
        self.events = events
        self.place = Place(events.first, events.end, events.attempt)
        self.state = BatchState.IN_FLIGHT
        self.is_freed = False
        self.charged_events, self.charged_bytes = events.charge

    def uncharge(self, events: int, unsettled: int) -> tuple[int, int]:
        """Stop charging ``events`` of its ``unsettled`` events; returns the charge they had."""
        size = self.charged_bytes * events // unsettled
        events = min(events, self.charged_events)
        self.charged_events -= events
        self.charged_bytes -= size
        return events, size

    @property
    def size(self) -> int:
        """The bytes that the events count for."""
        return self.events.size

    @property
    def block(self) -> Block:
        blocks = self._contents()
        if len(blocks) > 1:
            self.events.blocks = blocks = [join_blocks(blocks)]
        return conform_block(blocks[0])

    @property
    def blocks(self) -> Sequence[Block]:
        return [conform_block(block) for block in self._contents()]

    def _contents(self) -> Sequence[Block]:
        blocks = self.events.blocks
        if self.is_freed or blocks is None:
            raise BatchFreed(f"batch {self.place.first} was freed; its contents are gone")
        return blocks

    def free(self) -> None:
        self._owner.free_batch(self)

    def done(self) -> None:
        self._owner.settle_batch(self, Outcome.DELIVERED)

    def dead(self) -> None:
        self._owner.settle_batch(self, Outcome.DEAD)

    def release(self) -> None:
        self._owner.release_batch(self)


class InFlight:
    """The batches that consumers hold, and the ranges that they gave back."""

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        self._batches: dict[int, BufferedBatch] = {}
        self._returned: list[BlockRange] = []
        """Ranges that were given back, oldest first; they are handed out before newer events."""
        self.settling: list[Span] = []
        """The ranges that are being settled by offset at this moment."""

    @property
    def events(self) -> int:
        """How many events are handed out and not settled."""
        return sum(map(self._count_unsettled, self._batches.values()))

    @property
    def returned_events(self) -> int:
        """How many events were given back and wait to be handed out again."""
        return sum(map(len, self._returned))

    def add(self, batch: BufferedBatch) -> None:
        """A consumer holds this batch."""
        self._batches[batch.place.first] = batch

    def remove(self, batch: BufferedBatch) -> None:
        """The consumer settled the batch or gave it back."""
        self._batches.pop(batch.place.first, None)

    def give_back(self, events: BlockRange) -> None:
        """Keep the unsettled parts of a range, to be handed out again before anything newer.

        The other parts were settled by offset, and their room was given back then.
        """
        for span in self._positions.find_unsettled(events.first, events.end):
            insort(self._returned, events.slice(*span), key=lambda each: each.first)

    def take_returned(self, limit: int, before: int | None) -> BlockRange | None:
        """Take the oldest events that were given back, at most ``limit``.

        With ``before``, only if they are older than this offset.
        """
        if not self._returned or (before is not None and before < self._returned[0].first):
            return None
        if len(self._returned[0]) > limit:
            return self._returned[0].cut_head(limit)
        return self._returned.pop(0)

    def find_settling(self) -> list[Span]:
        """Return the ranges that are being settled at this moment, by batch or by offset."""
        places = [
            batch.place for batch in self._batches.values() if batch.state is BatchState.SETTLING
        ]
        return self.settling + [(place.first, place.end) for place in places]

    def list_freed_ranges(self) -> list[Span]:
        """Return the freed batches that storage does not have."""
        return [
            (batch.events.first, batch.events.end)
            for batch in self._batches.values()
            if batch.is_freed and batch.events.is_charged
        ]

    def list_ranges_in_memory(self) -> Iterator[BlockRange]:
        """Iterate over the ranges whose contents are in memory."""
        for batch in self._batches.values():
            if batch.state in (BatchState.IN_FLIGHT, BatchState.SETTLING) and not batch.is_freed:
                yield batch.events
        yield from self._returned

    def release_memory(self, end: int) -> tuple[int, int]:
        """Uncharge what lies below ``end``, which is in storage now; returns its charge."""
        charges: list[tuple[int, int]] = []
        for returned in self._returned:
            if returned.is_charged and returned.end <= end:
                charges.append(returned.charge)
                returned.is_charged, returned.blocks = False, None
        for batch in self._batches.values():
            if batch.events.is_charged and batch.events.end <= end and not batch.is_freed:
                batch.events.is_charged = False
                charges.append((batch.charged_events, batch.charged_bytes))
                batch.charged_events = batch.charged_bytes = 0
        return _add_up(charges)

    def uncharge(self, first: int, end: int) -> tuple[int, int, int]:
        """Stop charging a range, which is about to be settled, as far as it is here.

        Returns how many events of it are here, and the charge that they had.
        """
        here = 0
        charges: list[tuple[int, int]] = []
        for batch in self._batches.values():
            start, stop = max(first, batch.place.first), min(end, batch.place.end)
            if start < stop:
                charges.append(batch.uncharge(stop - start, self._count_unsettled(batch)))
                here += stop - start
        for returned in self._take_out(first, end):
            charges.append(returned.charge)
            here += len(returned)
        return here, *_add_up(charges)

    def _take_out(self, first: int, end: int) -> list[BlockRange]:
        """Take a range out of the returned ranges."""
        taken: list[BlockRange] = []
        rest: list[BlockRange] = []
        for returned in self._returned:
            for cut in (first, end):
                if returned.first < cut < returned.end:
                    head = returned.cut_head(cut - returned.first)
                    (taken if first <= head.first < end else rest).append(head)
            (taken if first <= returned.first < end else rest).append(returned)
        self._returned[:] = rest
        return taken

    def settle_covered(self) -> None:
        """Settle the batches whose events were all settled by offset."""
        for batch in list(self._batches.values()):
            whole = self._positions.is_settled(batch.place.first, batch.place.end)
            if whole and batch.state is BatchState.IN_FLIGHT:
                batch.state = BatchState.SETTLED
                del self._batches[batch.place.first]

    def _count_unsettled(self, batch: BufferedBatch) -> int:
        return count_offsets(self._positions.find_unsettled(batch.place.first, batch.place.end))


def _add_up(charges: Iterable[tuple[int, int]]) -> tuple[int, int]:
    events = size = 0
    for charge in charges:
        events, size = events + charge[0], size + charge[1]
    return events, size
