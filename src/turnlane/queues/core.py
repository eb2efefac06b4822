"""What the holding kinds know, and the way in: everything up to an event's being in the queue.

One lock guards one queue's state: the gate (bounds, line of publishers), the tail (blocks in
memory), the positions, the watermarks. Disk reads and the callbacks of producers happen outside
it. :class:`turnlane.queues.consumer.Handing` adds the way out.
"""

from __future__ import annotations

import abc
import datetime as dt
import threading
import time
import uuid
from collections.abc import Mapping

import pyarrow as pa

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import Bug, SchemaMismatch
from turnlane.events import Block
from turnlane.intervals import Span
from turnlane.ledger import Outcome, OutcomeTotals
from turnlane.queues.acks import Dispatcher, Follower, Notice, Ticket, Watermark
from turnlane.queues.admission import Annotations, Gate, PublishEntry, Waiter
from turnlane.queues.api import (
    Ack,
    AckCallback,
    AckLevel,
    Durability,
    FlowControl,
    Queue,
    Stats,
    chosen,
)
from turnlane.queues.buffer import SEAL_BYTES, HeldBatch, Portion, Tail
from turnlane.queues.policies import Door, Patience
from turnlane.queues.producer import HoldingProducer
from turnlane.queues.settings import QueueSettings
from turnlane.storage.frames import ProducerSequence
from turnlane.storage.positions import Positions
from turnlane.storage.producer_sequences import MAX_RUNS, AcceptedSequences, GapPolicy
from turnlane.units import TimeWindow

# ── dequeue ──
# When the next batch may be taken: the dequeue rate and the dequeue time window.


class Pace:
    """Decides how long a consumer has to wait, and how much it may take at once."""

    __slots__ = ("_clock", "_not_before", "_rate", "_window")

    def __init__(self, rate: float | None, window: TimeWindow | None, clock: Clock) -> None:
        self._rate = rate
        self._window = window
        self._clock = clock
        self._not_before = 0.0

    def limit(self, events: int) -> int:
        """At most a second's worth, so that a low rate is not one burst and a long silence."""
        return events if self._rate is None else max(1, min(events, int(self._rate)))

    def delay(self) -> float:
        """Seconds until a batch may be taken; 0 if now."""
        return max(self._until_rate(), self._until_window())

    def took(self, events: int) -> None:
        """Events were handed out: the next ones have to wait their share."""
        if self._rate is not None:
            start = max(self._not_before, self._clock.monotonic())
            self._not_before = start + events / self._rate

    def _until_rate(self) -> float:
        return 0.0 if self._rate is None else self._not_before - self._clock.monotonic()

    def _until_window(self) -> float:
        if self._window is None:
            return 0.0
        now = dt.datetime.fromtimestamp(self._clock.time_ns() / 1e9).astimezone()
        return self._window.seconds_until_open(now.time())


MAX_SEQUENCES = 10_000
"""Numbered producers that are remembered; the longest silent is forgotten first."""


class Intake(Queue):
    """The state of a queue that holds events, and how they get in."""

    durability = Durability.MEMORY

    def __init__(
        self,
        settings: QueueSettings,
        *,
        clock: Clock = SYSTEM_CLOCK,
        positions: Positions | None = None,
        totals: OutcomeTotals | None = None,
        sequences: Mapping[bytes, AcceptedSequences] | None = None,
        queue_id: str | None = None,
    ) -> None:
        self.settings = settings
        self.queue_id = queue_id or uuid.uuid4().hex
        """Tells it from others of its name: offsets of one say nothing of another. What is only in
        memory is another queue each time it is opened."""
        # Called for every single event: without the clock's own frame around it.
        self.time_ns = time.time_ns if type(clock) is Clock else clock.time_ns
        self.lock = threading.Lock()
        self.positions = positions or Positions()
        self.gate = Gate(settings.size, settings.max_bytes)
        self.tail = Tail(self.positions.end, self.sealed)
        self.door = Door(settings, self.gate, self.lock, self.evict, self.dropped_at_door)
        self.watermarks = {
            level: Watermark(level, self.durability, self.positions.low)
            for level in (AckLevel.PERSISTED, AckLevel.DELIVERED)
        }
        self.sequences: dict[bytes, AcceptedSequences] = dict(sequences or {})
        """The sequence numbers that it has of every numbered producer, the longest silent first."""
        self.totals = totals or OutcomeTotals()
        self.pushes = 0
        """Blocks that were published; single events are told by the tail."""
        self.heed_at = SEAL_BYTES
        """Size of the open block from which on a publisher calls :meth:`heed`."""
        self._hunger: dict[int, int] = {}
        """By waiting thread: the queue's end at which to wake it."""
        self.drops_unsynced = False
        """Whether oldest events were dropped since :meth:`sync_dropped` was last called."""
        self.returned: list[Portion] = []
        self.out: dict[int, HeldBatch] = {}
        self._releases = 0
        self.acks = Dispatcher(settings.name)
        self._pace = Pace(settings.dequeue_rate, settings.dequeue_window, clock)
        self._getting = threading.Lock()
        self._ready_since: float | None = None
        """Since when events have been waiting for a fuller batch, however often it is asked for."""
        self._readable = threading.Condition(self.lock)
        self._drained = threading.Condition(self.lock)
        self._finished = False
        self._closed = False
        self._closer = 0
        self._close_ended = threading.Event()
        self._settlings: list[Span] = []
        """What is being settled by offset at this moment."""
        self.types: dict[str, object] = {}

    # ── publishing ──────────────────────────────────────────────────────────────────────────────

    def producer(
        self,
        *,
        ack: AckLevel | str = AckLevel.ACCEPTED,
        on_ack: AckCallback | None = None,
        flow: FlowControl | str = FlowControl.NONE,
        producer_id: str | None = None,
        gaps: GapPolicy = GapPolicy.KEEP,
    ) -> HoldingProducer:
        self.gate.check_open(self.name)
        if on_ack is not None:
            self.acks.start()
        level, control = chosen(AckLevel, "ack", ack), chosen(FlowControl, "flow", flow)
        return HoldingProducer(self, level, on_ack, control, producer_id, gaps=gaps)

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
        first = self.positions.end
        try:
            block.values.append(value)
            block.timestamps.append(stamp)
            block.annotate(*rest)
            self.positions.end = first + 1
        except BaseException:
            self.undo(first)
            raise
        block.size += size
        self.gate.charge(1, size)
        self.grown()
        if block.size >= self.heed_at:
            self.heed()
        return first

    def append_block(
        self, block: Block, size: int, stamp: ProducerSequence | None, *, consecutive: bool
    ) -> int:
        """Put a block at the end; returns its first offset. Under the lock.

        ``consecutive`` says whether the numbers of its events, of which ``stamp`` has the end,
        follow on each other.
        """
        first = self.positions.end
        stamps = () if stamp is None else (stamp,)
        end = first + block.num_rows
        portion = Portion(first, end, size, [block], sequences=stamps, consecutive=consecutive)
        self.tail.append(portion)
        self.positions.end = end
        self.gate.charge(block.num_rows, size)
        self.pushes += 1
        self.grown()
        self.heed()
        return first

    def undo(self, end: int) -> None:
        """Forget what was half published beyond ``end``. Under the lock."""
        self.positions.end = end
        self.tail.open.cut(end - self.tail.open.first)

    def next_sequence(self, producer: bytes) -> int:
        """One more than the highest number that the queue has of a producer; 0 if it has none."""
        accepted = self.sequences.get(producer)
        return 0 if accepted is None else accepted.end

    def numbered(self, producer: bytes, first: int, end: int, gaps: GapPolicy) -> ProducerSequence:
        """Remember that numbers ``first`` to ``end - 1`` are taken. Under the lock.

        Returns their stamp. It has the whole run up to ``end``: the events before are in the queue
        at lower offsets, or were dropped, so that they are in the log if this stamp is.
        """
        accepted = self.sequences.pop(producer, None) or AcceptedSequences()
        self.sequences[producer] = accepted
        if len(self.sequences) > MAX_SEQUENCES:
            del self.sequences[next(iter(self.sequences))]
        accepted.add(0 if gaps is GapPolicy.SKIP else first, end)
        if gaps is GapPolicy.FORGET:
            accepted.close_gaps(MAX_RUNS)
        return ProducerSequence(producer, end, accepted.start_of_run(first))

    def heed(self) -> None:
        """The open block has grown, or somebody waits for events. Under the lock."""
        if self.tail.open.size >= SEAL_BYTES:
            self.tail.seal()
        if self._hunger and self.positions.end >= min(self._hunger.values()):
            self._hunger.clear()
            self.rest_heed()
            self._readable.notify_all()

    def admit(
        self, entry: PublishEntry, flow: FlowControl, patience: Patience, *, blocking: bool
    ) -> Waiter | None:
        """Let an entry in, apply the policies, or put it in line. Under the lock."""
        entry.drop_repeats()
        entry.check_gaps()
        self.door.screen(entry, flow, patience)
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
        # Whatever the queue does later: at this moment the event is in memory and nowhere else.
        ack = Ack(end - first, 0, end, AckLevel.ACCEPTED, Durability.MEMORY)
        self.acks.send([Notice(follower, ack)])

    def hurry(self, level: AckLevel, end: int) -> Ticket | None:
        """Make haste with all below ``end`` as if somebody waited for it. Under the lock."""
        ticket = self.watermarks[level].ticket(end, end)
        if ticket is not None:
            ticket.leave()  # nobody does wait on it
            self.urge(level)
        return ticket

    def reaches(self, level: AckLevel, end: int, timeout: float | None) -> bool:
        """Wait until all below ``end`` have come to a level, making haste; false if in vain."""
        mark = self.watermarks[level]
        with self.lock:
            ticket = mark.ticket(end, end)
            if ticket is None:
                return True
            self.urge(level)
        reached = ticket.wait(timeout)
        if not reached:
            with self.lock:
                mark.withdraw(ticket)
            self.gate.check_sound()
        return reached

    def rest_heed(self) -> None:
        """Decide from when on publishers have to call :meth:`heed`. Under the lock."""
        self.heed_at = 0 if self._hunger or self.is_restless() else SEAL_BYTES

    def average_size(self, events: int) -> int:
        return self.gate.bytes * events // max(1, self.gate.depth)

    def refund(self, events: int, size: int) -> None:
        """Give room back. Under the lock."""
        self.gate.refund(events, size)
        self.door.calm()

    @abc.abstractmethod
    def evict(self, events: int) -> bool:
        """Drop the oldest unread events; false if there are none. Under the lock."""

    # ── looking in ──────────────────────────────────────────────────────────────────────────────

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
            in_flight=sum(map(self.pending_of, self.out.values())),
            blocked_publishers=self.gate.blocked,
            memory_blocks=self.tail.blocks,
            pushes=self.pushes + self.tail.singles,
            full_waits=self.door.full_waits,
            releases=self._releases,
        )

    def pending_of(self, batch: HeldBatch) -> int:
        """How many of a batch's events are not settled, by itself or by offset. Under the lock."""
        spans = self.positions.unsettled(batch.place.first, batch.place.end)
        return sum(end - first for first, end in spans)

    # ── what a kind adds ────────────────────────────────────────────────────────────────────────

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

    def sync_settled(self) -> None:
        """Have what was recorded survive a power cut, if durability asks for it at once.

        Not under the lock. Raises ``OSError``.
        """

    def sync_dropped(self) -> None:
        """Likewise, for the oldest events dropped to make room; raises nothing."""

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
