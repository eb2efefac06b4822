"""What all kinds that hold events have in common: everything but where the events wait.

One lock guards one queue's state: the gate (bounds, line of publishers), the tail (blocks in
memory), the positions, the watermarks. Disk reads and the callbacks of producers happen outside
it. A kind adds its storage by overriding the hooks at the end of the class; memory has few to add.

The life of an event here: published into the tail's open block → sealed into a portion → handed
out in a batch → settled. Storage sees portions when they are sealed, and is asked for the contents
of portions that have left memory.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import insort
from collections.abc import Mapping

import pyarrow as pa

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import (
    AckNotStored,
    BatchFreed,
    Bug,
    QueueClosed,
    QueueEmpty,
    SchemaMismatch,
)
from turnlane.events import Block, conform, join
from turnlane.queues.acks import Dispatcher, Follower, Notice, Watermark
from turnlane.queues.admission import Gate, Waiter
from turnlane.queues.batch import BatchState, HeldBatch
from turnlane.queues.contract import (
    Ack,
    AckCallback,
    AckLevel,
    Durability,
    FlowControl,
    Outcome,
    Queue,
)
from turnlane.queues.dequeue import Pace
from turnlane.queues.door import Door
from turnlane.queues.entries import Annotations, PublishEntry
from turnlane.queues.ledger import Totals
from turnlane.queues.log.position import Stamp
from turnlane.queues.portion import Portion
from turnlane.queues.positions import Positions
from turnlane.queues.producer import HoldingProducer
from turnlane.queues.settings import QueueSettings
from turnlane.queues.stats import Stats
from turnlane.queues.tail import SEAL_BYTES, Tail

log = logging.getLogger(__name__)

MAX_SEQUENCES = 10_000
"""Numbered producers that are remembered; the longest silent is forgotten first."""


class HoldingQueue(Queue):
    """A queue that holds events between publish and get. See the module's docstring."""

    durability = Durability.MEMORY

    def __init__(
        self,
        settings: QueueSettings,
        *,
        clock: Clock = SYSTEM_CLOCK,
        positions: Positions | None = None,
        totals: Totals | None = None,
        sequences: Mapping[bytes, int] | None = None,
    ) -> None:
        self.settings = settings
        self.time_ns = clock.time_ns
        self.lock = threading.Lock()
        self.positions = positions or Positions()
        self.gate = Gate(settings.size, settings.max_bytes)
        self.tail = Tail(self.positions.end, self.sealed)
        self.door = Door(settings, self.gate, self.lock, self.evict, self.dropped_at_door)
        self.watermarks = {
            level: Watermark(level, self.durability, self.positions.low)
            for level in (AckLevel.PERSISTED, AckLevel.DELIVERED)
        }
        self.sequences: dict[bytes, int] = dict(sequences or {})
        """The next sequence number of every numbered producer, the longest silent first."""
        self.totals = totals or Totals()
        self.pushes = 0
        self.heed_at = SEAL_BYTES
        """Size of the open block from which on a publisher calls :meth:`heed`."""
        self._hunger: dict[int, int] = {}
        """By waiting thread: the queue's end at which to wake it."""
        self.returned: list[Portion] = []
        self.out: dict[int, HeldBatch] = {}
        self._releases = 0
        self.acks = Dispatcher(settings.name)
        self._pace = Pace(settings.dequeue_rate, settings.dequeue_window, clock)
        self._getting = threading.Lock()
        self._readable = threading.Condition(self.lock)
        self._drained = threading.Condition(self.lock)
        self._finished = False
        self._closed = False
        self.types: dict[str, object] = {}

    # ── publishing ───────────────────────────────────────────────────────────────────────────

    def producer(
        self,
        *,
        ack: AckLevel | str = AckLevel.ACCEPTED,
        on_ack: AckCallback | None = None,
        flow: FlowControl | str = FlowControl.NONE,
        producer_id: str | None = None,
    ) -> HoldingProducer:
        if on_ack is not None:
            self.acks.start()
        return HoldingProducer(self, AckLevel(ack), on_ack, FlowControl(flow), producer_id)

    def check_types(self, schema: pa.Schema) -> None:
        """Check columns against those that the queue has seen."""
        with self.lock:
            for field in schema:
                seen = self.types.get(field.name, field.type)
                if seen != field.type:
                    msg = f"column {field.name!r} is {field.type}, but {seen} in {self.name!r}"
                    raise SchemaMismatch(msg)
            self.types.update((field.name, field.type) for field in schema)

    def append_event(self, value: bytes, stamp: int, size: int, rest: Annotations) -> int:
        """Put one event into the open block; returns its offset. Under the lock."""
        block = self.tail.open
        block.values.append(value)
        block.timestamps.append(stamp)
        block.size += size
        block.annotate(*rest)
        first = self._count_in(1, size)
        if block.size >= self.heed_at:
            self.heed()
        return first

    def append_block(self, block: Block, size: int, stamp: Stamp | None) -> int:
        """Put a block at the end; returns its first offset. Under the lock."""
        first = self._count_in(block.num_rows, size)
        stamps = () if stamp is None else (stamp,)
        self.tail.append(Portion(first, first + block.num_rows, size, [block], stamps=stamps))
        self.heed()
        return first

    def _count_in(self, events: int, size: int) -> int:
        first = self.positions.end
        self.positions.end = first + events
        self.gate.charge(events, size)
        self.pushes += 1
        self.grown()
        return first

    def numbered(self, producer: bytes, next_sequence: int) -> None:
        """Remember how far a numbered producer has come: never back. Under the lock."""
        known = self.sequences.pop(producer, 0)
        self.sequences[producer] = max(known, next_sequence)
        if len(self.sequences) > MAX_SEQUENCES:
            del self.sequences[next(iter(self.sequences))]

    def heed(self) -> None:
        """The open block has grown, or somebody waits for events. Under the lock."""
        if self.tail.open.size >= SEAL_BYTES:
            self.tail.seal()
        if self._hunger and self.positions.end >= min(self._hunger.values()):
            self._hunger.clear()
            self.rest_heed()
            self._readable.notify_all()

    def admit(self, entry: PublishEntry, flow: FlowControl, *, blocking: bool) -> Waiter | None:
        """Let an entry in, apply the policies, or put it in line. Under the lock."""
        entry.drop_repeats()
        self.door.screen(entry, flow)
        self.gate.check_open(self.name)
        if not entry.events and not entry.is_repeat:
            entry.skip()
            return None
        free = not self.gate.line and self.gate.fits(entry.events, entry.size)
        if free or entry.is_repeat:
            entry.enter()
            return None
        self.crowded()
        self.door.full_waits += 1
        # A consumer that waits for a fuller batch waits in vain once nobody can come in.
        self._readable.notify_all()
        if blocking and (self.door.blocks or self.makes_room()):
            return self.gate.join(entry)
        if not self.door.blocks:
            self.drop_or_enter(entry)
        return None

    def drop_or_enter(self, entry: PublishEntry) -> None:
        """Let an entry into a full queue at the cost of older events, or drop it."""
        self.gate.check_open(self.name)
        if self.door.make_room(entry):
            entry.enter()
        else:
            entry.skip()

    def tell_accepted(self, follower: Follower, first: int, end: int) -> None:
        """Ack acceptance at once: it has just happened."""
        ack = Ack(end - first, 0, end, AckLevel.ACCEPTED, self.durability)
        self.acks.send([Notice(follower, ack)])

    def evict(self, events: int) -> bool:
        """Drop the oldest unread events; false if there are none. Under the lock."""
        portion = self.next_portion(events)
        if portion is None:
            return False
        try:
            self.record_settled(portion, Outcome.OLDEST)
        except OSError as error:
            log.warning("queue %s cannot drop its oldest events: %s", self.name, error)
            self.give_back(portion)
            return False
        self.settle_portion(portion, Outcome.OLDEST, *portion.charge)
        return True

    # ── consuming ────────────────────────────────────────────────────────────────────────────

    def get(self, max_events: int | None = None, timeout: float | None = None) -> HeldBatch:
        deadline = None if timeout is None else time.monotonic() + timeout
        largest = self.settings.dequeue_batch_size
        limit = self._pace.limit(largest if max_events is None else min(max_events, largest))
        if not self._getting.acquire(timeout=-1 if timeout is None else max(timeout, 0)):
            raise self._nothing_to_read()
        try:
            while True:
                with self.lock:
                    portion = self._await_portion(limit, deadline)
                    if portion.pieces is not None:
                        return self._hand_out(portion)
                found = self.fetch(portion)
                if found is not None:
                    with self.lock:
                        return self._hand_out(found)
        finally:
            self._getting.release()

    def _nothing_to_read(self) -> QueueEmpty:
        return QueueEmpty(f"queue {self.name!r} had nothing to read in the time allowed")

    def _await_portion(self, limit: int, deadline: float | None) -> Portion:
        """The next portion, once there is one and it may be taken. Under the lock."""
        first_seen: float | None = None
        while True:
            self.check_readable()
            ready = self._backlog()
            if ready and first_seen is None:
                first_seen = time.monotonic()
            pause = self._pause(ready, limit, first_seen)
            if ready and not pause:
                portion = self.next_portion(limit)
                if portion is not None:
                    self._pace.took(len(portion))
                    return portion
            self._rest(ready, limit, pause, deadline)

    def _pause(self, ready: int, limit: int, first_seen: float | None) -> float:
        """How long to leave what is ready alone: the pace, or a batch that may yet fill up."""
        pause = self._pace.delay()
        if pause > 0:
            return min(pause, 1.0)  # and look again: the wall clock may jump
        wanted = min(self.settings.minimum_batch_size, limit)
        if first_seen is None or ready >= wanted or self._finished or self.gate.line:
            return 0.0
        return max(0.0, first_seen + self.settings.minimum_batch_timeout - time.monotonic())

    def check_readable(self) -> None:
        """Raise ``QueueClosed`` if there is nothing to read and never will be."""
        if self._closed or (self._finished and not self.positions.pending):
            msg = f"queue {self.name!r} is closed" + ("" if self._closed else " and drained")
            raise QueueClosed(msg)

    def _rest(self, ready: int, limit: int, pause: float, deadline: float | None) -> None:
        """Sleep until there is reason to look again."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise self._nothing_to_read()
        wanted = min(self.settings.minimum_batch_size, limit) if ready else 1
        waits = [seconds for seconds in (pause or None, left) if seconds is not None]
        self._wait_for_end(self.positions.end + max(1, wanted - ready), min(waits, default=None))

    def _wait_for_end(self, end: int, timeout: float | None) -> None:
        """Sleep until the queue reaches ``end``, or anything else of note happens."""
        thread = threading.get_ident()
        self._hunger[thread] = end
        self.rest_heed()
        self._readable.wait(timeout)
        self._hunger.pop(thread, None)
        self.rest_heed()

    def rest_heed(self) -> None:
        """Decide from when on publishers have to call :meth:`heed`. Under the lock."""
        self.heed_at = 0 if self._hunger or self.is_restless() else SEAL_BYTES

    def next_portion(self, limit: int) -> Portion | None:
        """Cut the next portion: what was given back comes first. Under the lock."""
        if self.returned:
            if len(self.returned[0]) > limit:
                return self.returned[0].head(limit)
            return self.returned.pop(0)
        first, end = self.positions.next_fresh(limit)
        if first >= end:
            return None
        if first < self.tail.first:
            end = min(end, self.tail.first)
            portion = self.stored_portion(first, end)
        else:
            portion = self.tail.take(first, end)
        self.positions.take(end)
        return portion

    def average_size(self, events: int) -> int:
        return self.gate.bytes * events // max(1, self.gate.depth)

    def _hand_out(self, portion: Portion) -> HeldBatch:
        batch = HeldBatch(self, portion)
        self.out[portion.first] = batch
        return batch

    def give_back(self, portion: Portion) -> None:
        """Have a portion read again, before anything newer. Under the lock."""
        insort(self.returned, portion, key=lambda each: each.first)
        # All: whoever waits for the end to move would swallow a wake-up meant for a consumer.
        self._readable.notify_all()

    def free_batch(self, batch: HeldBatch) -> None:
        """Give up a batch's contents; their room is free again."""
        with self.lock:
            if batch.state is BatchState.OUT and not batch.freed:
                batch.freed = True
                batch.portion.pieces = None
                events = batch.charged_events if self.free_returns_events else 0
                size, batch.charged_bytes = batch.charged_bytes, 0
                batch.charged_events -= events
                self.refund(events, size)

    def settle_batch(self, batch: HeldBatch, outcome: Outcome) -> None:
        """Settle a batch for good: recorded first, then visible."""
        with self.lock:
            if batch.state is not BatchState.OUT:
                return
            if self._closed:
                msg = f"queue {self.name!r} was closed before this batch was done"
                raise QueueClosed(msg)
            batch.state = BatchState.SETTLING
        try:
            self.record_settled(batch.portion, outcome)
        except BaseException as error:  # also what is raised into the thread from outside
            with self.lock:
                batch.state = BatchState.OUT
                self._drained.notify_all()
            if not isinstance(error, OSError):
                raise
            msg = f"could not record that batch {batch.place.first} is {outcome}: {error}"
            raise AckNotStored(msg) from error
        with self.lock:
            batch.state = BatchState.SETTLED
            self.out.pop(batch.place.first, None)
            self.settle_portion(batch.portion, outcome, batch.charged_events, batch.charged_bytes)
            self._drained.notify_all()

    def _is_settling(self) -> bool:
        return any(batch.state is BatchState.SETTLING for batch in self.out.values())

    def release_batch(self, batch: HeldBatch) -> None:
        """Take a batch back to be read again."""
        with self.lock:
            if batch.state is not BatchState.OUT or self._closed:
                return
            if batch.freed:
                msg = f"batch {batch.place.first} was freed and cannot be released"
                raise BatchFreed(msg)
            batch.state = BatchState.RELEASED
            self.out.pop(batch.place.first, None)
            batch.portion.attempt += 1
            self._releases += 1
            # A copy: a consumer that was given up may still look at its batch.
            self.give_back(batch.portion.copy())
        self.record_returned(batch.portion)

    def settle_portion(self, portion: Portion, outcome: Outcome, events: int, size: int) -> None:
        """Settle offsets, tell who follows, give the room back. Under the lock."""
        fresh = self.positions.settle(portion.first, portion.end)
        self.totals.add(outcome, fresh)
        if outcome.is_drop:
            for mark in self.watermarks.values():
                mark.lose(portion.first, portion.end)
        low = self.positions.low
        for level in (AckLevel.PERSISTED, AckLevel.DELIVERED):
            self.acks.send(self.watermarks[level].advance(low))
        self.refund(events, size)
        self.settled()
        if self._finished and not self.positions.pending:
            self._readable.notify_all()
            self._drained.notify_all()

    def refund(self, events: int, size: int) -> None:
        """Give room back. Under the lock."""
        self.gate.refund(events, size)
        self.door.calm()

    # ── reading by offset, for readers that keep their own place ─────────────────────────────

    def read(self, first: int, max_events: int) -> tuple[int, Block] | None:
        """Events from offset ``first`` on, not taken from the queue; ``None`` if there are none.

        What was settled or handed out may be gone: then the block starts later.
        """
        with self.lock:
            first = max(first, self.positions.low)
            end = min(self.positions.end, first + max_events)
            if first >= end:
                return None
            if first >= self.tail.first:
                return first, conform(join(self.tail.look(first, end)))
            end = min(end, self.tail.first)
        return self.read_stored(first, end)

    def settle(self, first: int, end: int, outcome: Outcome = Outcome.DELIVERED) -> None:
        """Settle a range that was read by offset."""
        with self.lock:
            spans = self.positions.unsettled(first, min(end, self.positions.end))
        for start, stop in spans:
            portion = Portion(start, stop, 0, None)
            self.record_settled(portion, outcome)
            with self.lock:
                events = stop - start
                self.settle_portion(portion, outcome, events, self.average_size(events))
                self.tail.forget_below(self.positions.low)

    def _backlog(self) -> int:
        return sum(map(len, self.returned)) + self.positions.fresh

    def await_backlog(self, timeout: float) -> int:
        """Wait until events are ready to be taken; returns how many. 0 on timeout or close."""
        with self.lock:
            if not self._backlog() and not self._closed:
                self._wait_for_end(self.positions.end + 1, timeout)
            return self._backlog()

    def wake(self) -> None:
        """Have everybody who waits for events look again."""
        with self.lock:
            self._readable.notify_all()

    def wait_beyond(self, offset: int, timeout: float) -> int:
        """Wait until the queue's end is beyond ``offset``; returns the end either way."""
        deadline = time.monotonic() + timeout
        with self.lock:
            while self.positions.end <= offset and not self._finished:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._wait_for_end(offset + 1, left)
            return self.positions.end

    # ── closing ──────────────────────────────────────────────────────────────────────────────

    def finish(self) -> None:
        with self.lock:
            self._finished = True
            self.gate.close()
            self.door.calm()
            self._readable.notify_all()

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        self.finish()
        with self.lock:
            if drain:
                limit = self.settings.shutdown_timeout if timeout is None else timeout
                self._drained.wait_for(lambda: not self.positions.pending or self._closed, limit)
            if self._closed:
                return
            self._closed = True
            self._readable.notify_all()
            self._drained.notify_all()
            # A done() that is under way still counts; without this it would be lost and acked.
            limit = self.settings.shutdown_timeout
            self._drained.wait_for(lambda: not self._is_settling(), limit)
        try:
            self.close_storage()
        finally:
            with self.lock:
                for mark in self.watermarks.values():
                    mark.abandon()
            self.acks.stop()

    # ── looking in ───────────────────────────────────────────────────────────────────────────

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def closed(self) -> bool:
        """Whether the queue was closed; not merely finished."""
        return self._closed

    @property
    def end(self) -> int:
        """The offset that the next event will get."""
        return self.positions.end

    @property
    def low(self) -> int:
        """Everything below this offset is settled."""
        return self.positions.low

    def stats(self) -> Stats:
        with self.lock:
            return self.describe()

    def describe(self) -> Stats:
        """The stats. Under the lock."""
        return Stats(
            name=self.name,
            kind=self.settings.kind.value,
            ledger=self.totals.ledger(self.positions.end, self.positions.pending),
            size=self.gate.depth,
            bytes=self.gate.bytes,
            max_size=self.settings.size,
            max_bytes=self.settings.max_bytes,
            in_flight=sum(map(len, self.out.values())),
            blocked_publishers=len(self.gate.line),
            memory_blocks=self.tail.blocks,
            pushes=self.pushes,
            full_waits=self.door.full_waits,
            releases=self._releases,
        )

    # ── what a kind adds ─────────────────────────────────────────────────────────────────────

    free_returns_events = False
    """Whether ``free()`` gives back room in events too, not only in bytes."""

    def is_restless(self) -> bool:
        """Whether storage wants to hear of the very next event."""
        return False

    def sealed(self, portion: Portion) -> None:
        """A portion joined the tail. Under the lock."""

    def grown(self) -> None:
        """Something came in that was not calm. Under the lock."""

    def crowded(self) -> None:
        """Something does not fit. Under the lock."""

    def makes_room(self) -> bool:
        """Whether room is being made, so that dropping would be rash. Under the lock."""
        return False

    def stored_portion(self, first: int, end: int) -> Portion:
        """A portion whose contents are in storage. Under the lock."""
        return Portion(first, end, self.average_size(end - first), None)

    def urge(self, level: AckLevel) -> None:
        """A publisher waits for this level: make haste. Under the lock."""

    def settled(self) -> None:
        """Something was settled. Under the lock."""

    def record_settled(self, portion: Portion, outcome: Outcome) -> None:
        """Make it last that a portion is settled; ``OSError`` if that cannot be done."""

    def record_returned(self, portion: Portion) -> None:
        """Make it last that a portion was given back."""

    def dropped_at_door(self, outcome: Outcome, events: int) -> None:
        """Events were turned away before they got an offset. Under the lock."""
        self.totals.add(outcome, events)

    def fetch(self, portion: Portion) -> Portion | None:
        """Bring a portion's contents from storage, or as much as lies together."""
        msg = f"queue {self.name!r} lost track of offset {portion.first}"
        raise Bug(msg)

    def read_stored(self, first: int, end: int) -> tuple[int, Block] | None:
        """Events that are no longer in memory, left in place."""
        del first, end
        return None

    def close_storage(self) -> None:
        """Keep or give up what is left. Called once."""
