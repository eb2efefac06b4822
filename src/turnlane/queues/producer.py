"""The producer of the holding kinds, with the one path in turnlane that is per event."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from turnlane.errors import AckPending, EventTooLarge, QueueClosed, QueueFull, StorageFailed
from turnlane.events import EVENT_OVERHEAD, MAX_BLOCK_BYTES, Block, add_timestamps, prepare_block
from turnlane.queues.acks import Follower, Ticket, Watermark
from turnlane.queues.admission import (
    MAX_SEVERITY,
    BlockEntry,
    Calm,
    EventEntry,
    PublishEntry,
    Waiter,
    check_severities,
    size_of,
)
from turnlane.queues.api import AckCallback, AckLevel, FlowControl, Producer, Published
from turnlane.queues.policies import FOR_EVER, Patience
from turnlane.storage.producer_sequences import GapPolicy

if TYPE_CHECKING:
    from turnlane.queues.core import Intake

# ── pieces ──
# A block that goes into a queue piece by piece: how much of it is inside, and how far that is.


class Pieces:
    """The pieces of a block that are inside, in order."""

    def __init__(self) -> None:
        self.published = Published(-1, 0, 0, 0)
        self._tickets: list[Ticket] = []

    def add(self, entry: BlockEntry) -> None:
        """The next piece is inside, or was dropped by the queue's policy."""
        one, other = self.published, entry.published
        self.published = Published(
            one.first if one.first >= 0 else other.first,
            one.accepted + other.accepted,
            one.dropped + other.dropped,
            one.repeated + other.repeated,
        )
        if entry.ticket is not None:
            entry.ticket.leave()  # whoever is woken after it must not wait for the other pieces
            self._tickets.append(entry.ticket)

    @property
    def events(self) -> int:
        """How many events need not come again."""
        return self.published.accepted + self.published.dropped + self.published.repeated

    @property
    def last(self) -> Ticket | None:
        """The ticket that is reached after all others; nobody waits on it."""
        return self._tickets[-1] if self._tickets else None

    @property
    def reached(self) -> bool:
        """Whether all have come as far as their producer wants."""
        return all(ticket.reached for ticket in self._tickets)

    @property
    def lost(self) -> bool:
        """Whether any was dropped instead, of those that were reached."""
        return any(ticket.lost for ticket in self._tickets)


# ── values ──
# One event as a publisher gives it: checked and measured before it goes anywhere.

_MAX_MICROSECONDS = (1 << 63) // 1000
"""Timestamps are carried in nanoseconds, which have to fit 64 bits."""


def as_bytes(value: object) -> bytes:
    """An event's value, which nobody else can change any more."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    msg = f"an event's value is bytes, not {type(value).__name__}; encode it first"
    raise TypeError(msg)


def nanoseconds(timestamp: int) -> int:
    """A timestamp in microseconds as the queue carries it."""
    if not -_MAX_MICROSECONDS < operator.index(timestamp) < _MAX_MICROSECONDS:
        msg = f"timestamp {timestamp} is no number of microseconds since the epoch"
        raise ValueError(msg)
    return timestamp * 1000


def measured(
    key: str | None,
    headers: Mapping[str, str] | None,
    severity: int | None,
    source: str | None,
) -> int:
    """The size of an event's optional columns.

    Encoding here, and not only when the block is sealed, gives a wrong type or a lone surrogate
    back to the publisher who sent it instead of to the thread that seals everybody's events.
    """
    size = 0 if key is None else _encoded("key", key)
    if source is not None:
        size += _encoded("source", source)
    if headers is not None:
        if not isinstance(headers, Mapping):
            msg = f"headers are a mapping of text to text, not {type(headers).__name__}"
            raise TypeError(msg)
        for name, text in headers.items():
            size += _encoded("a header's name", name) + _encoded(f"header {name!r}", text) + 8
    if isinstance(severity, bool):
        msg = "severity is a number, not a bool"
        raise TypeError(msg)
    if severity is not None and not 0 <= operator.index(severity) <= MAX_SEVERITY:
        msg = f"severity {severity} is not between 0 (emergency) and {MAX_SEVERITY} (debug)"
        raise ValueError(msg)
    return size


def _encoded(what: str, text: object) -> int:
    """The bytes that a text takes."""
    if not isinstance(text, str):
        msg = f"{what} is text, not {type(text).__name__}"
        raise TypeError(msg)
    return len(text.encode())


def hashed(producer_id: str) -> bytes:
    """A producer's id as the log keeps it."""
    return hashlib.sha256(producer_id.encode()).digest()[:16]


class HoldingProducer(Producer):
    """Publishes into a queue that holds events. Safe to share between threads."""

    def __init__(
        self,
        queue: Intake,
        level: AckLevel,
        on_ack: AckCallback | None,
        flow: FlowControl,
        producer_id: str | None,
        *,
        gaps: GapPolicy = GapPolicy.KEEP,
    ) -> None:
        self.queue = queue
        # Looked up once, not for every event.
        self._lock, self._gate = queue.lock, queue.gate
        self._tail, self._positions = queue.tail, queue.positions
        self._flow = flow
        self._follower = None if on_ack is None else Follower(on_ack)
        self._waits = level is not AckLevel.ACCEPTED and on_ack is None
        self._mark: Watermark | None = queue.watermarks.get(level)
        self._notify = self._waits or self._follower is not None
        self.hashed_id = None if producer_id is None else hashed(producer_id)
        self.gaps = gaps
        self._largest = queue.settings.max_event_bytes
        self._calm = queue.door.calm_for(flow)
        self._end = 0
        """The offset after the last event this producer published."""
        self._closed = False
        self._schema: pa.Schema | None = None
        """The schema of the last block, which the queue has accepted."""

    def publish(
        self,
        value: bytes,
        key: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timestamp: int | None = None,
        severity: int | None = None,
        source: str | None = None,
        timeout: float | None = None,
    ) -> bool:
        if type(value) is not bytes:
            value = as_bytes(value)
        size = len(value) + EVENT_OVERHEAD
        plain = key is None and headers is None and severity is None and source is None
        if not plain:
            size += measured(key, headers, severity, source)
        queue = self.queue
        gate, calm = self._gate, self._calm
        stamp = queue.time_ns() if timestamp is None else nanoseconds(timestamp)
        # From here to the end of the lock is the hot path: about a microsecond, no calls but
        # appends. Whatever is out of the ordinary makes one of the comparisons false.
        with self._lock:
            if (
                gate.depth < calm.events
                and gate.bytes + size <= calm.bytes
                and size <= self._largest
            ):
                block = self._tail.open
                positions = self._positions
                end = positions.end + 1
                try:
                    block.values.append(value)
                    block.timestamps.append(stamp)
                    if not plain:
                        block.annotate(key, headers, severity, source)
                    positions.end = self._end = end
                except BaseException:  # Ctrl-C, say: half an event would shift all that follow
                    queue.undo(end - 1)
                    raise
                block.size += size
                gate.depth += 1
                gate.bytes += size
                if block.size >= queue.heed_at:
                    queue.heed()
                if not self._notify:
                    return True
                ticket = self._expect(end - 1, end)
            else:
                ticket = None
                end = -1
        if end >= 0:
            return ticket is None or self._await(ticket, Patience.of(timeout))
        entry = EventEntry(self, value, stamp, size, (key, headers, severity, source))
        return self._publish_slowly(entry, timeout, blocking=True)

    def try_publish(
        self,
        value: bytes,
        key: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timestamp: int | None = None,
        severity: int | None = None,
        source: str | None = None,
    ) -> bool:
        value = as_bytes(value)
        size = len(value) + EVENT_OVERHEAD + measured(key, headers, severity, source)
        stamp = self.queue.time_ns() if timestamp is None else nanoseconds(timestamp)
        entry = EventEntry(self, value, stamp, size, (key, headers, severity, source))
        return self._publish_slowly(entry, None, blocking=False)

    def publish_block(
        self, block: Block, *, sequence: int | None = None, timeout: float | None = None
    ) -> Published:
        self.queue.gate.check_open(self.queue.name)
        block = self._checked(block)
        size = size_of(block)
        if sequence is None and (inside := self._enter_calmly(block, size)) is not None:
            first, ticket = inside
            self._await(ticket, Patience.of(timeout))
            return Published(first, block.num_rows, 0, 0)
        entries = self._entries(block, size, sequence)
        if len(entries) > 1:
            return self._publish_pieces(entries, timeout)
        if not entries:
            return Published(-1, 0, 0, 0)
        self._publish_slowly(entries[0], timeout, blocking=True)
        return entries[0].published

    def try_publish_block(self, block: Block, *, sequence: int | None = None) -> Published | None:
        block = self._checked(block)
        entry = self._block_entry(block, size_of(block), sequence)
        if entry.size > self.queue.gate.max_bytes or entry.events > self.queue.gate.size:
            self._too_large(entry)
        self._publish_slowly(entry, None, blocking=False)
        # Shed by policy, or empty, is not the same as refused for the moment.
        return entry.published if entry.inside or not entry.events else None

    def vet(self, block: Block) -> Block:
        """The block, ready to be published later; raises what would then be raised for ever."""
        block = self._checked(block)
        for entry in self._entries(block, size_of(block), None):
            self._check(entry)
        return block

    def flush(self, timeout: float | None = None) -> bool:
        mark = self._mark
        return mark is None or self.queue.reaches(mark.level, self._end, timeout)

    @property
    def end(self) -> int:
        """The offset after the last event that this producer published; 0 if there is none."""
        return self._end

    def close(self) -> None:
        self._closed = True
        self._calm = Calm(-1, -1)

    def _enter_calmly(self, block: Block, size: int) -> tuple[int, Ticket | None] | None:
        """The short cut, for a block: its first offset and what to wait for, or not taken."""
        gate, calm, rows = self._gate, self._calm, block.num_rows
        if not rows or size > self._largest:
            return None
        with self._lock:
            if gate.depth + rows > calm.events or gate.bytes + size > calm.bytes:
                return None
            first = self.queue.append_block(block, size, None, consecutive=True)
            return first, self.entered(first, first + rows)

    def _publish_slowly(
        self, entry: PublishEntry, timeout: float | None, *, blocking: bool
    ) -> bool:
        """Everything that the fast path leaves out: policies, flow control, standing in line."""
        patience = Patience.of(timeout)
        self._let_in(entry, patience, blocking=blocking)
        if entry.inside and blocking:
            return self._await(entry.ticket, patience)
        if entry.ticket is not None:
            entry.ticket.leave()
        return entry.inside

    def _publish_pieces(self, entries: list[BlockEntry], timeout: float | None) -> Published:
        """Let all in, then wait for the last: so ``AckPending`` means that all of it is inside."""
        for entry in entries:
            self._check(entry)  # before any is in
        patience = Patience.of(timeout)
        pieces = Pieces()
        for entry in entries:
            try:
                self._let_in(entry, patience, blocking=True)
            except QueueFull as error:
                self._check_kept(lost=pieces.lost)
                error.accepted, error.pending = pieces.events, not pieces.reached
                raise
            pieces.add(entry)
        if self._mark is not None and pieces.last is not None:
            with self.queue.lock:
                ticket = self._mark.ticket(pieces.last.first, pieces.last.offset)
            self._await(ticket, patience)
            self._check_kept(lost=pieces.lost)
        return pieces.published

    def _let_in(self, entry: PublishEntry, patience: Patience, *, blocking: bool) -> None:
        if patience is FOR_EVER and self.queue.settings.full_timeout is not None:
            patience = Patience.of(self.queue.settings.full_timeout)
        with self.queue.lock:
            self._check(entry)
            flow = self._flow if blocking else FlowControl.NONE
            waiter = self.queue.admit(entry, flow, patience, blocking=blocking)
        if waiter is not None:
            self._stand_in_line(waiter, entry, patience)
        if self.queue.drops_unsynced:
            self.queue.drops_unsynced = False
            self.queue.sync_dropped()

    def _stand_in_line(self, waiter: Waiter, entry: PublishEntry, patience: Patience) -> None:
        queue = self.queue
        try:
            queue.door.stand_in_line(waiter, patience)
        except QueueFull:
            if queue.door.blocks:
                raise
            with queue.lock:
                queue.drop_or_enter(entry)

    def _check(self, entry: PublishEntry) -> None:
        self.queue.gate.check_open(self.queue.name)
        if self._closed:
            msg = f"this producer of queue {self.queue.name!r} is closed"
            raise QueueClosed(msg)
        largest = min(self._largest, self.queue.gate.max_bytes)
        if entry.size > largest and entry.largest_event > largest:
            self._too_large(entry)

    def _too_large(self, entry: PublishEntry) -> None:
        gate = self.queue.gate
        msg = (
            f"{entry.events} events of {entry.size} bytes can never fit queue "
            f"{self.queue.name!r} (max_event_bytes {self._largest}, size {gate.size}, "
            f"max_bytes {gate.max_bytes})"
        )
        raise EventTooLarge(msg)

    def _checked(self, block: Block) -> Block:
        """The block, fit for the queue. Nearly always its schema is that of the one before."""
        if not isinstance(block, pa.RecordBatch):
            msg = f"a block is a pyarrow.RecordBatch, not {type(block).__name__}; see block_of()"
            raise TypeError(msg)
        if self._schema is not None and block.schema.equals(self._schema):
            check_severities(block)
            return add_timestamps(block, self.queue.time_ns)
        ready = prepare_block(block, self.queue.time_ns)
        check_severities(ready)
        self.queue.check_types(ready.schema)
        same = ready.schema.equals(block.schema, check_metadata=True)
        self._schema = ready.schema if same else None
        return ready

    def _entries(self, block: Block, size: int, sequence: int | None) -> list[BlockEntry]:
        entries: list[BlockEntry] = []
        for piece, its_size in self._pieces(block, size):
            entries.append(self._block_entry(piece, its_size, sequence))
            if sequence is not None:
                sequence += piece.num_rows
        return entries

    def _pieces(self, block: Block, size: int) -> Iterator[tuple[Block, int]]:
        """The block, halved until each piece fits the queue; a single event may still not."""
        gate = self.queue.gate
        rows = block.num_rows
        if rows > 1 and (rows > gate.size or size > min(gate.max_bytes, MAX_BLOCK_BYTES)):
            for half in (block.slice(0, rows // 2), block.slice(rows // 2)):
                yield from self._pieces(half, size_of(half))
        elif rows:
            yield block, size

    def _block_entry(self, block: Block, size: int, sequence: int | None) -> BlockEntry:
        if sequence is not None and self.hashed_id is None:
            msg = "a sequence needs a producer made with producer_id"
            raise ValueError(msg)
        return BlockEntry(self, block, size, sequence)

    def entered(self, first: int, end: int) -> Ticket | None:
        """An entry of this producer is inside, as events ``first`` to ``end - 1``."""
        self._end = max(self._end, end)
        return self._expect(first, end) if self._notify else None

    def _expect(self, first: int, end: int) -> Ticket | None:
        """Arrange for acks: a callback, or a ticket to wait on."""
        queue = self.queue
        if self._follower is not None:
            if first == end:
                return None
            if self._mark is None:
                queue.tell_accepted(self._follower, first, end)
            else:
                self._mark.follow(self._follower, first, end)
            return None
        if not self._waits or self._mark is None:
            return None
        ticket = self._mark.ticket(first, end)
        queue.urge(self._mark.level)
        return ticket

    def _await(self, ticket: Ticket | None, patience: Patience) -> bool:
        """Wait for the level; false if the policy dropped the event meanwhile."""
        if ticket is None:
            return True
        if not ticket.wait(patience.left):
            self.queue.gate.check_sound()
            if not self.queue.closed:
                name, seconds = self.queue.name, patience.seconds
                msg = f"the event is in queue {name!r}, not acked within {seconds:g} s"
                raise AckPending(msg)
            msg = f"queue {self.queue.name!r} was closed before the event was acked"
            raise QueueClosed(msg)
        self._check_kept(lost=ticket.lost)
        return not ticket.lost

    def _check_kept(self, *, lost: bool) -> None:
        if lost and self.queue.door.blocks:
            msg = f"queue {self.queue.name!r} lost the event to a failing disk: publish it again"
            raise StorageFailed(msg)
