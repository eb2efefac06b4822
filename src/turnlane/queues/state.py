"""The state of a buffered queue: its one lock and the parts that the lock guards.

The life of an event: a producer appends it to the open block of the :class:`Buffer` → the block is
sealed, and storage hears of it → a consumer gets it in a batch (:class:`InFlight`) → it is settled
(:class:`Positions`), its room is given back (:class:`Admission`) and its publisher is told
(:class:`AckTracker`). Storage may take a sealed block out of memory and bring it back later.

Rules about the lock:

- One lock, ``QueueState.lock``, guards all parts. Everything in this module is under the lock,
  except where a docstring says otherwise.
- Order: the lock of the queue comes first. Under it, code may take the locks of the journal, of
  the pending acks of a disk-assisted queue, and of the ack dispatcher; none of these calls back.
- Under the lock nothing reads from the disk, syncs, or calls an ack callback of a producer. Two
  things are called that must be brief: observers of a watermark, and an append to the journal
  (without a sync) for events that are dropped to make room.
- The conditions ``readable`` and ``changed`` and the writer of a disk wait on this same lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping

import pyarrow as pa

from turnlane.clock import Clock
from turnlane.errors import SchemaMismatch
from turnlane.events import Block
from turnlane.intervals import RangeSet, Span, count_offsets
from turnlane.ledger import Outcome, OutcomeTotals
from turnlane.logs import get_logger
from turnlane.pacing import FlowRates
from turnlane.queues.acks import AckTracker
from turnlane.queues.admission import Admission
from turnlane.queues.api import AckLevel, Durability, Stats
from turnlane.queues.buffer import SEAL_BYTES, BlockRange, Buffer
from turnlane.queues.positions import InFlight, Positions
from turnlane.queues.settings import QueueSettings
from turnlane.queues.storage_api import Storage
from turnlane.storage.frames import ProducerSequence
from turnlane.storage.producer_sequences import MAX_RUNS, AcceptedSequences, GapPolicy

log = get_logger(__name__)

MAX_SEQUENCES = 10_000
"""Numbered producers that are remembered; the producer silent longest is forgotten first."""

Annotations = tuple[str | None, Mapping[str, str] | None, int | None, str | None]
"""Key, headers, severity and source of an event."""


class QueueState:
    """The parts of one queue, and the operations that touch several of them.

    It is the :class:`turnlane.queues.storage_api.StorageHost` of the storage.
    """

    def __init__(self, settings: QueueSettings, storage: Storage, clock: Clock) -> None:
        found = storage.recover()
        self.settings = settings
        self.storage = storage
        self.stored_id = found.queue_id
        """The id that the queue keeps across restarts; empty if nothing survives one."""
        self._clock = clock
        self._flow = FlowRates()
        # Called for every single event: without the frame of the clock around it.
        self.time_ns = time.time_ns if type(clock) is Clock else clock.time_ns
        self.lock = threading.Lock()
        self.readable = threading.Condition(self.lock)
        """Consumers and readers wait here for events."""
        self.changed = threading.Condition(self.lock)
        """Notified when events are settled, or when a settlement ends."""
        returned = [(first, end) for first, end, _ in found.returned]
        self.positions = Positions(found.low, found.end, found.settled, returned)
        self.totals = OutcomeTotals(found.totals)
        # The journal may be lost or be behind: what it does not know was delivered.
        known = self.positions.low + self.positions.settled.total
        self.totals.add(Outcome.DELIVERED, known - self.totals.numbered)
        self.admission = Admission(
            settings,
            self.lock,
            evict=self.evict,
            drop_unwritten=storage.drop_unwritten,
            on_full=self._on_full,
        )
        self.buffer = Buffer(self.positions.end, storage.on_sealed)
        self.in_flight = InFlight(self.positions)
        self.acks = AckTracker(settings.name, storage.durability, self.positions.low)
        self.persisted = self.acks.persisted
        self.columns: dict[str, pa.DataType] = dict(found.columns)
        """The Arrow type of every column that the queue has seen."""
        self.sequences: dict[bytes, AcceptedSequences] = dict(found.sequences)
        """The accepted numbers by producer, the producer that was silent longest first."""
        self.published_blocks = 0
        self.releases = 0
        """How many batches consumers gave back."""
        self.notify_threshold = SEAL_BYTES
        """At this size of the open block a publisher calls :meth:`on_growth`."""
        self.waiting_readers: dict[int, int] = {}
        """By waiting thread: the end of the queue at which to wake it."""
        self.has_unsynced_drops = False
        """Whether oldest events were dropped since this was last reset."""
        self.is_finished = False
        """Whether the queue takes no more events."""
        self.is_closed = False
        pending = self.positions.pending
        if storage.charges_stored and pending:
            self.admission.charge(pending, found.bytes)
        for first, end, attempt in found.returned:
            share = found.bytes * (end - first) // max(1, pending)
            charged = storage.charges_stored
            self.in_flight.give_back(
                BlockRange(first, end, share, None, attempt, is_charged=charged)
            )

    # ── publishing ──────────────────────────────────────────────────────────────────────────────

    def append_event(self, value: bytes, timestamp: int, size: int, rest: Annotations) -> int:
        """Append one event to the open block; returns its offset."""
        block = self.buffer.open
        first = self.positions.end
        try:
            block.values.append(value)
            block.timestamps.append(timestamp)
            block.annotate(*rest)
            self.positions.end = first + 1
        except BaseException:
            self.undo_append(first)
            raise
        block.size += size
        self.admission.charge(1, size)
        self.storage.on_growth()
        if block.size >= self.notify_threshold:
            self.on_growth()
        return first

    def append_block(
        self, block: Block, size: int, numbers: ProducerSequence | None, *, is_consecutive: bool
    ) -> int:
        """Append a block; returns its first offset.

        ``numbers`` are the sequence numbers that are complete with the block; ``is_consecutive``
        says whether the numbers of its events are consecutive.
        """
        first = self.positions.end
        end = first + block.num_rows
        sequences = () if numbers is None else (numbers,)
        self.buffer.append(
            BlockRange(
                first, end, size, [block], sequences=sequences, is_consecutive=is_consecutive
            )
        )
        self.positions.end = end
        self.admission.charge(block.num_rows, size)
        self.published_blocks += 1
        self.on_growth()
        return first

    def undo_append(self, end: int) -> None:
        """Remove an event beyond ``end`` whose append was interrupted."""
        self.positions.end = end
        self.buffer.open.truncate(end - self.buffer.open.first)

    def on_growth(self) -> None:
        """The open block is large, or a thread waits for events: seal, wake, tell storage."""
        if self.buffer.open.size >= SEAL_BYTES:
            self.buffer.seal()
        if self.waiting_readers and self.positions.end >= min(self.waiting_readers.values()):
            self.waiting_readers.clear()
            self.update_threshold()
            self.readable.notify_all()
        self.storage.on_growth()

    def update_threshold(self) -> None:
        """Decide from which size of the open block on publishers call :meth:`on_growth`."""
        notify_now = self.waiting_readers or self.storage.wants_next_event
        self.notify_threshold = 0 if notify_now else SEAL_BYTES

    def check_columns(self, schema: pa.Schema) -> None:
        """Add columns to the queue. Raises ``SchemaMismatch`` if a type differs."""
        for column in schema:
            known = self.columns.get(column.name, column.type)
            if known != column.type:
                raise SchemaMismatch(
                    f"column {column.name!r} is {column.type}, but {known} in "
                    f"{self.settings.name!r}"
                )
        self.columns.update((column.name, column.type) for column in schema)

    def accept_sequences(
        self, producer: bytes, first: int, end: int, gaps: GapPolicy
    ) -> ProducerSequence:
        """Remember that the numbers ``first`` to ``end - 1`` are taken.

        Returns the whole run up to ``end``, for the log: the events before are in the queue at
        lower offsets, or were dropped, so that they are in the log if these are.
        """
        accepted = self.sequences.pop(producer, None) or AcceptedSequences()
        self.sequences[producer] = accepted
        if len(self.sequences) > MAX_SEQUENCES:
            del self.sequences[next(iter(self.sequences))]
        accepted.add(0 if gaps.can_skip else first, end)
        if gaps is GapPolicy.FORGET:
            accepted.close_gaps(MAX_RUNS)
        return ProducerSequence(producer, end, accepted.start_of_run(first))

    def count_drops(self, outcome: Outcome, events: int) -> None:
        """Count events that policies dropped before they got an offset."""
        self.totals.add(outcome, events)
        if events:
            self.storage.on_refused(outcome, events)

    def _on_full(self) -> bool:
        """A request does not fit; true if storage makes room."""
        # A consumer that waits for a fuller batch gets none while no publisher can enter.
        self.readable.notify_all()
        return self.storage.make_room()

    def evict(self, events: int) -> bool:
        """Drop the oldest unread events that take room; false if there are none."""
        if self.storage.charges_stored:
            dropped = self.take_next(events)
        else:
            dropped = self._take_oldest_in_memory(events)
        if dropped is None:
            return False
        try:
            self.storage.settle(dropped, Outcome.OLDEST)
        except OSError as error:
            log.warning("queue.eviction_failed", queue=self.settings.name, error=error)
            self.give_back(dropped)
            return False
        self.settle(dropped, Outcome.OLDEST, *dropped.charge)
        self.has_unsynced_drops = True
        return True

    def _take_oldest_in_memory(self, events: int) -> BlockRange | None:
        buffer = self.buffer
        if buffer.oldest is None:
            buffer.seal()
        while (oldest := buffer.oldest) is not None and not oldest.is_charged:
            buffer.drop_oldest()
        if oldest is None:
            return None
        return buffer.take(oldest.first, min(oldest.end, oldest.first + events))

    def cancel(self, spans: Iterable[Span]) -> None:
        """Drop the events of some ranges, as far as they are unread and only in memory."""
        if self.is_closed or not self.storage.can_cancel:
            return
        start = self.find_cancellable()
        wanted = RangeSet(
            (max(first, start), end) for first, end in spans if max(first, start) < end
        )
        for settling in self.in_flight.find_settling():
            wanted.remove(*settling)  # by offset, at this moment: the first thread decides
        for first, end in wanted:
            for mark in self.acks.watermarks:
                for span in self.positions.find_unsettled(first, end):
                    mark.cancel(*span)  # first: or publishers would hear of a lost event
            self.settle_range(first, end, Outcome.CANCELLED, is_recorded=False)

    def find_cancellable(self) -> int:
        """Return the offset from which on events are unread and only in memory."""
        return max(self.positions.frontier, self.storage.find_unstored())

    def keep_drops(self, *, now: bool) -> None:
        """Make drops durable before their publisher is told of them. Not under the lock.

        Only if the durability demands it, or if the publisher waits until events are durable.
        """
        try:
            self.storage.keep_drops(now=now)
        except OSError as error:
            # The events are gone, and their publisher has to know: the writer tries again.
            log.warning("queue.drops_not_synced", queue=self.settings.name, error=error)

    # ── consuming ───────────────────────────────────────────────────────────────────────────────

    @property
    def backlog(self) -> int:
        """How many events are ready to be handed out."""
        return self.in_flight.returned_events + self.positions.fresh

    def take_next(self, limit: int) -> BlockRange | None:
        """Take the next range of at most ``limit`` events: the oldest that nobody holds.

        Returned ranges are older than fresh events. Only after a restart may older events, which
        were in flight before it, be fresh again.
        """
        first, end = self.positions.find_next_fresh(limit)
        returned = self.in_flight.take_returned(limit, before=first if first < end else None)
        if returned is not None:
            return returned
        if first >= end:
            return None
        if first < self.buffer.first:
            end = min(end, self.buffer.first)
            taken = self._stored_range(first, end)
        else:
            taken = self.buffer.take(first, end)
        self.positions.mark_read(end)
        return taken

    def _stored_range(self, first: int, end: int) -> BlockRange:
        """Return a range whose contents are only in storage."""
        charged = self.storage.charges_stored
        size = self.admission.estimate_size(end - first) if charged else 0
        return BlockRange(first, end, size, None, is_charged=charged)

    def give_back(self, events: BlockRange) -> None:
        """Have the unsettled parts of a range handed out again, before anything newer."""
        self.in_flight.give_back(events)
        # All: a reader that waits for the end to move would take a wake-up meant for a consumer.
        self.readable.notify_all()

    def wait_for_end(self, end: int, timeout: float | None) -> None:
        """Wait until the queue reaches ``end``, or something else happens."""
        thread = threading.get_ident()
        self.waiting_readers[thread] = end
        self.update_threshold()
        self.readable.wait(timeout)
        self.waiting_readers.pop(thread, None)
        self.update_threshold()

    def settle(self, events: BlockRange, outcome: Outcome, charged: int, size: int) -> None:
        """Settle a range that takes ``charged`` events and ``size`` bytes of the bounds."""
        fresh = self.positions.find_unsettled(events.first, events.end)
        self.positions.settle(events.first, events.end)
        self.totals.add(outcome, count_offsets(fresh))
        if outcome.is_drop:
            self.acks.lose(events.first, events.end)
        self.storage.on_settled(events, fresh, outcome)
        for mark in self.acks.watermarks:
            self.acks.advance(mark, self.positions.low)
        self.admission.refund(charged, size)
        if self.is_finished and not self.positions.pending:
            self.readable.notify_all()
            self.changed.notify_all()

    def settle_range(self, first: int, end: int, outcome: Outcome, *, is_recorded: bool) -> None:
        """Settle the unsettled events of a range, in memory, in flight or in storage."""
        for start, stop in self.positions.find_unsettled(first, end):
            charged, size = self._uncharge(start, stop, release=outcome.is_drop)
            events = BlockRange(start, stop, size, None, is_recorded=is_recorded)
            self.settle(events, outcome, charged, size)
        self.in_flight.settle_covered()
        self.buffer.drop_below(self.positions.low)

    def _uncharge(self, first: int, end: int, *, release: bool) -> tuple[int, int]:
        """Stop charging a range that is about to be settled; returns the charge that it had.

        With ``release`` its contents leave the buffer, though an older event may be unsettled;
        without, readers can ask for them.
        """
        events, size = self.buffer.uncharge(first, end, release=release)
        in_flight, flight_events, flight_size = self.in_flight.uncharge(first, end)
        # The rest is only in storage, or a consumer reads it from there at this moment.
        stored = max(0, min(end, self.buffer.first) - first) - in_flight
        stored_events, stored_size = self._stored_range(first, first + stored).charge
        return events + flight_events + stored_events, size + flight_size + stored_size

    # ── for storage: see StorageHost ────────────────────────────────────────────────────────────

    def list_ranges_in_memory(self, first: int) -> list[BlockRange]:
        self.buffer.seal()
        found = [
            events.slice(max(first, events.first), events.end)
            for events in (*self.in_flight.list_ranges_in_memory(), *self.buffer)
            if events.is_charged and events.end > first
        ]
        return sorted(found, key=lambda events: events.first)

    def release_memory(self, end: int) -> None:
        events, size = self.in_flight.release_memory(end)
        while (oldest := self.buffer.oldest) is not None and oldest.end <= end:
            charge = self.buffer.drop_oldest().charge
            events, size = events + charge[0], size + charge[1]
        if events:
            self.admission.refund(events, size)

    def mark_persisted(self, end: int) -> None:
        self.acks.advance(self.acks.persisted, min(end, self.positions.end))
        if self.is_finished:
            self.changed.notify_all()

    def find_awaited(self, first: int, end: int) -> RangeSet:
        found = RangeSet()
        for mark in self.acks.watermarks:
            for span in mark.list_awaited(first, end):
                found.add(*span)
        return found

    def settle_delivered(self, first: int, end: int, *, notify: bool) -> None:
        # Not beyond the end: another client may use the same producer id.
        fresh = self.positions.settle(first, min(end, self.positions.end))
        self.totals.add(Outcome.DELIVERED, fresh)
        if notify:
            self.acks.advance(self.acks.delivered, self.positions.low)

    def wait_level(self, level: AckLevel, end: int, timeout: float | None) -> bool:
        """Wait until everything below ``end`` has reached a level; false on timeout or close.

        Storage hurries, as for a publisher that waits. Not under the lock.
        """
        mark = self.acks.watermark_of(level)
        if mark is None:
            return True
        with self.lock:
            waiter = mark.add_waiter(end, end)
            if waiter is None:
                return True
            self.storage.urge(level)
        is_reached = waiter.wait(timeout)
        if not is_reached:
            with self.lock:
                mark.remove_waiter(waiter)
        return is_reached

    def lose(self, first: int, end: int, outcome: Outcome = Outcome.MISSING) -> None:
        self.settle_range(first, end, outcome, is_recorded=False)

    def drop_unstored(self, first: int) -> list[Span]:
        spans = self.positions.find_unsettled(first, self.positions.end)
        if not self.storage.charges_stored:
            spans += self.in_flight.list_freed_ranges()
        for span in spans:
            self.totals.add(Outcome.CLOSED, self.positions.settle(*span))
        return spans

    def fail(self, error: Exception, *levels: AckLevel) -> None:
        self.admission.fail(error)
        for mark in self.acks.watermarks:
            if mark.level in levels:
                mark.abandon()
        self.changed.notify_all()

    def set_durability(self, durability: Durability) -> None:
        for mark in self.acks.watermarks:
            mark.durability = durability

    # ── looking in ──────────────────────────────────────────────────────────────────────────────

    def describe(self) -> Stats:
        """Return the stats, without the part of the storage."""
        settings = self.settings
        ledger = self.totals.ledger(self.positions.end, self.positions.pending)
        counts = (ledger.accepted, ledger.delivered + ledger.dead, sum(ledger.dropped.values()))
        self._flow.add(self._clock.monotonic(), *counts)
        rate_in, rate_out, rate_dropped = self._flow.get_rates() or (None, None, None)
        return Stats(
            name=settings.name,
            kind=settings.kind.value,
            ledger=ledger,
            rate_in=rate_in,
            rate_out=rate_out,
            rate_dropped=rate_dropped,
            size=self.admission.events,
            bytes=self.admission.bytes,
            max_size=None if settings.size is None else self.admission.max_events,
            max_bytes=None if settings.max_bytes is None else self.admission.max_bytes,
            in_flight=self.in_flight.events,
            blocked_publishers=self.admission.blocked,
            memory_blocks=self.buffer.block_count,
            pushes=self.published_blocks + self.buffer.singles,
            full_waits=self.admission.full_waits,
            releases=self.releases,
        )
