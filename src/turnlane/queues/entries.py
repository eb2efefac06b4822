"""What stands at a queue's door: one event, or one block of events."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from turnlane.errors import NumbersMissing
from turnlane.events import Block, event_sizes
from turnlane.queues.accepted import MAX_RUNS, Gaps
from turnlane.queues.acks import Ticket
from turnlane.queues.admission import Entry, Rows, important, sampled
from turnlane.queues.contract import Outcome, Published
from turnlane.queues.log.position import Stamp

if TYPE_CHECKING:
    from turnlane.queues.producer import HoldingProducer

Annotations = tuple[str | None, Mapping[str, str] | None, int | None, str | None]


class PublishEntry(Entry):
    """Something a producer publishes; once ``inside``, ``ticket`` is what it has to wait for."""

    def __init__(self, producer: HoldingProducer) -> None:
        self.producer = producer
        self.ticket: Ticket | None = None
        self.inside = False
        self.screened: dict[Outcome, int] = {}
        """What the queue's policies have taken out of it, and the ledger does not know yet."""

    @property
    @abc.abstractmethod
    def largest_event(self) -> int:
        """The size of its largest event."""

    @property
    def is_repeat(self) -> bool:
        """Whether the queue has all of it already."""
        return False

    def drop_repeats(self) -> None:
        """Leave out what the queue has from this producer already."""

    def check_gaps(self) -> None:
        """Raise ``NumbersMissing`` if its producer leaves out too many numbers."""

    def skip(self) -> None:
        """Nothing of it goes in, and it need not be sent again. Under the queue's lock."""
        self._count_screened()

    def _count_screened(self) -> None:
        for outcome, events in self.screened.items():
            self.producer.queue.dropped_at_door(outcome, events)
        self.screened.clear()

    @abc.abstractmethod
    def sample(self, seen: int, interval: int) -> int:
        """Keep one of ``interval`` events; returns how many that drops."""

    @abc.abstractmethod
    def shed(self, severity: int) -> int:
        """Drop events no more important than ``severity``; returns how many."""

    @abc.abstractmethod
    def keep(self, events: int) -> int:
        """Keep only the first ``events``; returns how many that drops."""


class EventEntry(PublishEntry):
    """A single event."""

    def __init__(
        self,
        producer: HoldingProducer,
        value: bytes,
        stamp: int,
        size: int,
        rest: Annotations,
    ) -> None:
        super().__init__(producer)
        self.events = 1
        self.size = size
        self._value = value
        self._stamp = stamp
        self._rest = rest

    @property
    def largest_event(self) -> int:
        return self.size

    def enter(self) -> None:
        queue = self.producer.queue
        first = queue.append_event(self._value, self._stamp, self.size, self._rest)
        self.ticket = self.producer.entered(first, first + 1)
        self.inside = True
        self._count_screened()

    def sample(self, seen: int, interval: int) -> int:
        return self.keep(0 if seen % interval else 1)

    def shed(self, severity: int) -> int:
        own = self._rest[2]
        return self.keep(0 if own is not None and own >= severity else 1)

    def keep(self, events: int) -> int:
        dropped = max(0, self.events - events)
        self.events -= dropped
        return dropped


_PADDING = 64
"""Arrow rounds its buffers up to this."""


def size_of(block: Block) -> int:
    """The bytes of the block. Arrow's ``nbytes`` says the same, at more cost than all the rest."""
    at = block.schema.get_field_index("value")
    values = block.column(max(0, at))
    if at < 0 or values.offset:
        return block.nbytes
    offsets = values.buffers()[1]
    whole = offsets is not None and offsets.size < 4 * (len(values) + 1) + _PADDING
    return block.get_total_buffer_size() if whole else block.nbytes


class BlockEntry(PublishEntry):
    """A block, possibly numbered by its producer so that repeats can be told."""

    def __init__(
        self, producer: HoldingProducer, block: Block, size: int, sequence: int | None
    ) -> None:
        super().__init__(producer)
        self.published = Published(-1, 0, 0, 0)
        self._sequence = sequence
        self._end_sequence = None if sequence is None else sequence + block.num_rows
        self._numbers: Rows | None = None
        """Its events' sequence numbers, where they no longer follow on each other."""
        self._block = block
        self.events = block.num_rows
        self.size = size

    def drop_repeats(self) -> None:
        producer_id = self.producer.hashed_id
        if self._sequence is None or producer_id is None:
            return
        accepted = self.producer.queue.sequences.get(producer_id)
        if accepted is None or self._sequence >= accepted.end:
            return  # in order, as nearly all are
        before = self.events
        if self._numbers is None:
            self._keep_missing(accepted.missing(self._sequence, self._sequence + self.events))
        else:
            new = np.flatnonzero(~accepted.holds(self._numbers))
            if len(new) < self.events:
                self._numbers = self._numbers[new]
                self._replace(self._block.take(new))
        repeated = self.published.repeated + before - self.events
        self.published = self.published._replace(repeated=repeated)

    def _keep_missing(self, missing: list[tuple[int, int]]) -> None:
        """Keep the events with these numbers."""
        assert self._sequence is not None
        start = self._sequence
        if len(missing) > 1:
            self._numbers = np.concatenate([np.arange(first, end) for first, end in missing])
            self._replace(self._block.take(self._numbers - start))
        elif not missing:
            self._replace(self._block.slice(0, 0))
        elif missing[0] != (start, self._end_sequence):
            first, end = missing[0]
            self._sequence, self._end_sequence = first, end
            self._replace(self._block.slice(first - start, end - first))

    def check_gaps(self) -> None:
        producer_id = self.producer.hashed_id
        if self._sequence is None or producer_id is None or self.producer.gaps is not Gaps.KEEP:
            return
        accepted = self.producer.queue.sequences.get(producer_id)
        if accepted is None or len(accepted.runs) < MAX_RUNS:
            return
        if self.events and accepted.is_apart(self._sequence, self._sequence + self.events):
            raise NumbersMissing.of(self.producer.queue.name, accepted.gaps)

    def _replace(self, block: Block) -> None:
        self._block = block
        self.events = block.num_rows
        self.size = size_of(block)

    @property
    def largest_event(self) -> int:
        if self.events == 1:
            return self.size
        return int(event_sizes(self._block).max(initial=0))

    @property
    def is_repeat(self) -> bool:
        return not self.events and self.published.repeated > 0 and not self.published.dropped

    def enter(self) -> None:
        queue = self.producer.queue
        # Again, now that it is this entry's turn: the same block may have come in by another
        # connection while it stood in line.
        self.drop_repeats()
        stamp = self._number()
        first = queue.end
        if self.events:
            consecutive = self._numbers is None
            queue.append_block(self._block, self.size, stamp, consecutive=consecutive)
        self.published = self.published._replace(first=first, accepted=self.events)
        self.ticket = self.producer.entered(first, first + self.events)
        self.inside = True
        self._count_screened()

    def skip(self) -> None:
        super().skip()
        self._number()

    def _number(self) -> Stamp | None:
        producer_id = self.producer.hashed_id
        first, end = self._sequence, self._end_sequence
        if producer_id is None or first is None or end is None:
            return None
        return self.producer.queue.numbered(producer_id, first, end, self.producer.gaps)

    def sample(self, seen: int, interval: int) -> int:
        return self._keep_rows(sampled(self.events, seen, interval))

    def shed(self, severity: int) -> int:
        return self._keep_rows(important(self._block, severity))

    def keep(self, events: int) -> int:
        kept = max(0, events)
        return self._reduce(self._block.slice(0, kept), slice(kept))

    def _keep_rows(self, rows: Rows) -> int:
        return self._reduce(self._block.take(rows), rows) if len(rows) < self.events else 0

    def _reduce(self, block: Block, rows: Rows | slice) -> int:
        dropped = self.events - block.num_rows
        if dropped and self._sequence is not None:
            if self._numbers is None:
                self._numbers = np.arange(self._sequence, self._sequence + self.events)
            self._numbers = self._numbers[rows]
        self._replace(block)
        self.published = self.published._replace(dropped=self.published.dropped + dropped)
        return dropped
