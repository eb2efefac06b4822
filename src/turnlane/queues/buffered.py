"""The queue that holds events between publish and get: every kind but ``direct``.

A :class:`BufferedQueue` is made of a :class:`turnlane.queues.state.QueueState`, which has the lock
and all that the lock guards; producers, which put events in; a
:class:`turnlane.queues.consumer.ConsumerSide`, which hands them out; and a
:class:`turnlane.queues.storage_api.Storage`, which makes the kind: nothing for ``memory``, a log
for ``disk`` and ``disk_assisted``, a node for ``proxy``. The rules about the lock are in
:mod:`turnlane.queues.state`. No code outside this package takes the lock or looks at the parts.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple
from weakref import WeakSet

import pyarrow as pa

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import AckNotStored, EventsLost, QueueClosed, QueueEmpty, TransportDown
from turnlane.events import Block, conform_block, join_blocks
from turnlane.intervals import (
    RangeSet,
    Span,
    count_offsets,
    is_overlapping,
    take_newest,
    take_oldest,
)
from turnlane.ledger import Outcome
from turnlane.logs import get_logger
from turnlane.queues.acks import AckWaiter, PositionObserver
from turnlane.queues.api import (
    AckCallback,
    AckLevel,
    Batch,
    Durability,
    FlowControl,
    Queue,
    Stats,
    parse_choice,
)
from turnlane.queues.buffer import BlockRange
from turnlane.queues.consumer import ConsumerSide
from turnlane.queues.producer import BufferedProducer, hash_producer_id
from turnlane.queues.settings import Kind, QueueSettings
from turnlane.queues.state import QueueState
from turnlane.queues.storage_api import Storage
from turnlane.storage.producer_sequences import GapPolicy
from turnlane.storage.reader import UnreadableRange

log = get_logger(__name__)

REMOTE_GET_SECONDS = 0.2
"""How long to wait for a batch of the node before looking whether the queue is still open."""

MAX_SPANS: Final = 4096
"""The most ranges of unsettled offsets that a reader gets at a time."""

_OPEN: WeakSet[BufferedQueue] = WeakSet()
"""The open queues whose events survive the process if they are closed."""


@atexit.register
def _close_at_exit() -> None:
    """A program that ends without closing its queues loses nothing that it published."""
    for queue in list(_OPEN):
        if not queue.closed:
            log.warning("queue.closed_at_exit", queue=queue.name)
            try:
                queue.close()
            except EventsLost as error:
                log.exception("queue.close_failed", queue=queue.name, error=error)


os.register_at_fork(after_in_child=_OPEN.clear)  # the parent closes them


class Unsettled(NamedTuple):
    """The events that wait in a queue, for a reader that keeps no position of its own."""

    spans: list[Span]
    """As many of them as the reader asked for, in order."""
    pending: int
    """How many events there are in all."""
    end: int


class BufferedQueue(Queue):
    """A queue that holds events between publish and get. Made by ``open_queue``."""

    def __init__(
        self,
        settings: QueueSettings,
        storage: Storage,
        *,
        clock: Clock = SYSTEM_CLOCK,
        declared: QueueSettings | None = None,
        measure: Callable[[], int] = lambda: 0,
    ) -> None:
        """Start the queue. ``settings`` has numbers for all limits.

        ``declared`` are the settings with ``size: auto`` in place of these numbers, if they differ;
        ``measure`` returns the available bytes that the numbers follow from.
        """
        self.settings = declared or settings
        self._measure = measure
        self._storage = storage
        self._state = QueueState(settings, storage, clock)
        self._consumer = ConsumerSide(self._state, clock)
        self.queue_id = self._state.stored_id or uuid.uuid4().hex
        """Unique id of this queue. A queue that is recreated under the same name gets a new id, so
        old offsets are never mistaken for new ones. A queue without a disk gets a new id each time
        that it is opened."""
        self._closing_thread = 0
        self._close_ended = threading.Event()
        storage.start(self._state, self._consumer.get)
        if self.stored_id:
            _OPEN.add(self)

    # ── the contract ────────────────────────────────────────────────────────────────────────────

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def closed(self) -> bool:
        return self._state.is_closed

    def producer(
        self,
        *,
        ack: AckLevel | str = AckLevel.ACCEPTED,
        on_ack: AckCallback | None = None,
        flow: FlowControl | str = FlowControl.NONE,
        producer_id: str | None = None,
        gaps: GapPolicy = GapPolicy.KEEP,
    ) -> BufferedProducer:
        self.check_open()
        if on_ack is not None:
            self._state.acks.dispatcher.start()
        level = parse_choice(AckLevel, "ack", ack)
        control = parse_choice(FlowControl, "flow", flow)
        return BufferedProducer(self._state, level, on_ack, control, producer_id, gaps=gaps)

    def get(self, max_events: int | None = None, timeout: float | None = None) -> Batch:
        if not self._storage.is_remote:
            return self._consumer.get(max_events, timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._consumer.check_readable()
            left = REMOTE_GET_SECONDS if deadline is None else deadline - time.monotonic()
            wait = min(REMOTE_GET_SECONDS, max(0.0, left))
            try:
                return self._storage.get(max_events, wait)
            except (QueueEmpty, TransportDown) as error:
                if left <= 0:
                    raise
                if isinstance(error, TransportDown):
                    time.sleep(wait)

    def finish(self) -> None:
        state = self._state
        with state.lock:
            state.is_finished = True
            state.admission.close()
            state.readable.notify_all()

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        self.finish()
        state = self._state
        with state.lock:
            if drain:
                self._drain(self.settings.shutdown_timeout if timeout is None else timeout)
            is_first, state.is_closed = not state.is_closed, True
            if is_first:
                self._closing_thread = threading.get_ident()
        if is_first:
            try:
                self._close()
            finally:
                self._close_ended.set()
        elif (
            self._closing_thread != threading.get_ident()
            and not state.acks.dispatcher.is_current_thread()
        ):
            # When any close returns, the queue is closed. But a close from within the first one,
            # or from a callback that the first one may wait for, must not wait.
            self._close_ended.wait()

    def _drain(self, limit: float) -> None:
        """Wait until nothing is left, or another close does not wait. Under the lock."""
        state = self._state
        if not state.changed.wait_for(lambda: state.is_closed or not self._undrained(), limit):
            log.warning(
                "queue.drain_timed_out", queue=self.name, seconds=limit, events=self._undrained()
            )

    def _undrained(self) -> int:
        """Return how many events a drain waits for. Under the lock."""
        failed = self._state.admission.failure is not None
        return 0 if failed and self._storage.is_remote else self._storage.count_undrained()

    def _close(self) -> None:
        state, limit = self._state, self.settings.shutdown_timeout
        with state.lock:
            state.readable.notify_all()
            state.changed.notify_all()
            # A done() that is under way still counts: otherwise it would be both acked and lost.
            state.changed.wait_for(lambda: not state.in_flight.find_settling(), limit)
        try:
            self._storage.close()
        finally:
            with state.lock:
                for mark in state.acks.watermarks:
                    mark.abandon()
            state.acks.dispatcher.stop(limit)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The events of a remote storage are lost with this process unless the node has them.
        self.close(drain=self._storage.is_remote and kind is None)

    def stats(self) -> Stats:
        with self._state.lock:
            stats = self._state.describe()
        return self._storage.describe(stats)

    # ── limits and condition ────────────────────────────────────────────────────────────────────

    def update_bounds(self) -> None:
        """Compute the limits of a ``disk`` queue with ``size: auto`` again; others keep theirs.

        An event that fitted when the queue was opened fits later too, once there is space. Raises
        ``DirectoryUnusable`` if the disk cannot be measured.
        """
        if self.settings.target_utilization is not None and self.settings.kind is Kind.DISK:
            largest = self._state.settings.max_event_bytes
            settings = self.settings.with_bounds(self._measure(), largest)
            with self._state.lock:
                self._state.admission.set_bounds(settings)

    @property
    def time_ns(self) -> Callable[[], int]:
        """The clock that stamps the events."""
        return self._state.time_ns

    @property
    def stored_id(self) -> str:
        """The id that the queue keeps across restarts; empty if nothing survives one."""
        return self._state.stored_id

    @property
    def durability(self) -> Durability:
        """What stands behind an ack of the ``persisted`` level."""
        return self._storage.durability

    @property
    def usual_level(self) -> AckLevel:
        """The highest level that events reach without a consumer.

        Other kinds than ``disk`` persist only when they have to.
        """
        return AckLevel.PERSISTED if self.settings.kind is Kind.DISK else AckLevel.ACCEPTED

    @property
    def blocks_when_full(self) -> bool:
        """Whether publishers wait when the queue is full, and nothing is dropped."""
        return self._state.admission.blocks

    @property
    def can_drop(self) -> bool:
        """Whether a policy may drop events that publishers have to be told of."""
        return self._state.admission.can_drop

    @property
    def max_events(self) -> int:
        """The most events that the queue holds; a very large number if there is no bound."""
        return self._state.admission.max_events

    @property
    def max_bytes(self) -> int:
        """The most bytes that the queue holds; a very large number if there is no bound."""
        return self._state.admission.max_bytes

    @property
    def max_event_bytes(self) -> int:
        """The size of the largest event that the queue takes."""
        return min(self._state.settings.max_event_bytes, self.max_bytes)

    @property
    def room(self) -> int:
        """How many more events fit at this moment, if they are small."""
        with self._state.lock:
            admission = self._state.admission
            return admission.max_events - admission.events if admission.has_room(1, 0) else 0

    @property
    def holds_publishers(self) -> bool:
        """Whether storage keeps every publisher out, even if there is room."""
        return self._state.admission.is_held

    @property
    def storage_failure(self) -> str:
        """Why the queue cannot write to its disk at the moment; empty if it can."""
        return self._storage.failure

    def estimate_size(self, events: int) -> int:
        """Return the bytes of this many events, by the average size."""
        return self._state.admission.estimate_size(events)

    def check_open(self) -> None:
        """Raise ``QueueClosed`` if the queue takes no more events, or why it failed."""
        self._state.admission.check_open()

    # ── columns and producers ───────────────────────────────────────────────────────────────────

    def columns(self) -> dict[str, pa.DataType]:
        """Return the Arrow type of every column that the queue has seen."""
        with self._state.lock:
            return dict(self._state.columns)

    def check_columns(self, schema: pa.Schema) -> None:
        """Add columns to the queue. Raises ``SchemaMismatch`` if a type differs."""
        with self._state.lock:
            self._state.check_columns(schema)

    def get_known_sequence(self, producer_id: str) -> int | None:
        """Return one more than the highest number of a producer; ``None`` if there is none."""
        with self._state.lock:
            accepted = self._state.sequences.get(hash_producer_id(producer_id))
            return None if accepted is None else accepted.end

    @property
    def has_numbered_producers(self) -> bool:
        """Whether the queue knows the sequence numbers of any producer."""
        return bool(self._state.sequences)

    def count_dropped(self, outcome: Outcome, events: int) -> None:
        """Count events that were dropped before they could be published."""
        with self._state.lock:
            self._state.count_drops(outcome, events)

    # ── acks ────────────────────────────────────────────────────────────────────────────────────

    def get_ack_positions(self) -> tuple[int, int]:
        """Return the offsets below which everything is persisted, and delivered."""
        with self._state.lock:
            return self._state.acks.persisted.position, self._state.acks.delivered.position

    def observe_acks(self, observer: PositionObserver) -> None:
        """Call ``observer`` with every new ack position, under the lock: it must be brief."""
        with self._state.lock:
            for mark in self._state.acks.watermarks:
                mark.observers.append(observer)

    def unobserve_acks(self, observer: PositionObserver) -> None:
        """Stop calling ``observer``."""
        with self._state.lock:
            for mark in self._state.acks.watermarks:
                mark.observers.remove(observer)

    def wait_level(self, level: AckLevel, end: int, timeout: float | None) -> bool:
        """Wait until everything below ``end`` has reached a level; false on timeout or close."""
        is_reached = self._state.wait_level(level, end, timeout)
        if not is_reached:
            self._state.admission.check_failure()
        return is_reached

    def urge(self, level: AckLevel, end: int) -> AckWaiter | None:
        """Hurry to bring everything below ``end`` to a level, as for a publisher that waits.

        Returns what :meth:`cancel_urge` takes; ``None`` if the level is reached.
        """
        mark = self._state.acks.watermark_of(level)
        if mark is None:
            return None
        with self._state.lock:
            waiter = mark.add_waiter(end, end)
            if waiter is not None:
                waiter.leave()  # no thread waits on it
                self._storage.urge(level)
        return waiter

    def cancel_urge(self, waiter: AckWaiter | None) -> None:
        """Stop to hurry, unless the level is reached."""
        if waiter is not None:
            with self._state.lock:
                for mark in self._state.acks.watermarks:
                    mark.remove_waiter(waiter)

    # ── reading and settling by offset ──────────────────────────────────────────────────────────

    @property
    def end(self) -> int:
        """The offset that the next event gets."""
        return self._state.positions.end

    @property
    def low(self) -> int:
        """The offset below which everything is settled."""
        return self._state.positions.low

    def read(self, first: int, max_events: int) -> tuple[int, Block] | None:
        """Return events from offset ``first`` on, which stay in the queue; ``None`` if none.

        Events that are settled or handed out may be gone: then the block starts later.
        """
        state = self._state
        while True:
            with state.lock:
                first = max(first, state.positions.low)
                end = min(state.positions.end, first + max_events)
                if first >= end:
                    return None
                if first >= state.buffer.first:
                    first, found_blocks = state.buffer.peek(first, end)
                    if found_blocks:
                        return first, conform_block(join_blocks(found_blocks))
                    continue  # all of them are settled
                end = min(end, state.buffer.first)
            while first < end:
                found = self._storage.read(first, end)
                if found is None:
                    break
                if not isinstance(found, UnreadableRange):
                    return found
                # It can never be read: a reader would wait for it without end.
                self.settle(first, min(found.end, end), found.outcome)
                first = found.end
            first = end

    def settle(self, first: int, end: int, outcome: Outcome = Outcome.DELIVERED) -> None:
        """Settle a range that was read by offset. Raises ``AckNotStored``, ``QueueClosed``."""
        state, settling = self._state, self._state.in_flight.settling
        with state.lock:
            # The thread that settles an event first decides its outcome.
            while any(
                is_overlapping((first, end), span) for span in state.in_flight.find_settling()
            ):
                state.changed.wait()
            if state.is_closed:
                raise QueueClosed(f"queue {self.name!r} is closed")
            estimate = state.admission.estimate_size
            ranges = [
                BlockRange(*span, estimate(span[1] - span[0]), None)
                for span in state.positions.find_unsettled(first, min(end, state.positions.end))
            ]
            settling.append((first, end))
        try:
            for each in ranges:
                self._record_settled(each, outcome)
                with state.lock:
                    # Only events that were recorded, and that no other thread has settled since.
                    recorded = each.is_recorded
                    state.settle_range(each.first, each.end, outcome, is_recorded=recorded)
        finally:
            with state.lock:
                settling.remove((first, end))
                state.changed.notify_all()

    def _record_settled(self, settled: BlockRange, outcome: Outcome) -> None:
        try:
            self._storage.settle(settled, outcome)
            self._storage.sync_settled()
        except OSError as error:
            raise AckNotStored(
                f"could not record that offsets from {settled.first} on are {outcome}: {error}"
            ) from error

    def sync_acks(self) -> None:
        """Make everything that is settled survive a power cut. Raises ``OSError``."""
        self._storage.sync_settled(now=True)

    def is_settled(self, first: int, end: int) -> bool:
        """Whether every offset of the range is settled."""
        with self._state.lock:
            return self._state.positions.is_settled(first, end)

    def find_unsettled(self, events: int, newest: int = 0, first: int = 0) -> Unsettled:
        """Return the oldest unsettled events from ``first`` on, at most ``events``.

        If there are more, ``newest`` of those are the newest ones instead. A reader gets at most
        :data:`MAX_SPANS` ranges at a time.
        """
        with self._state.lock:
            positions = self._state.positions
            end, pending = positions.end, positions.pending
            spans = positions.find_unsettled(first, end)
        if pending <= events:
            newest = 0
        chosen = RangeSet(take_newest(spans[-MAX_SPANS // 2 :], newest))
        room = MAX_SPANS - len(chosen)
        for span in take_oldest(spans[:room], events - count_offsets(chosen)):
            chosen.add(*span)
        return Unsettled(list(chosen), pending, end)

    def filter_unsettled(self, spans: Iterable[Span]) -> list[Span]:
        """Return the parts of these ranges that are not settled."""
        with self._state.lock:
            positions = self._state.positions
            return [
                left
                for first, stop in spans
                for left in positions.find_unsettled(first, min(stop, positions.end))
            ]

    def wait_beyond(self, offset: int, timeout: float) -> int:
        """Wait until the end of the queue is beyond ``offset``; returns the end in any case."""
        deadline = time.monotonic() + timeout
        state = self._state
        with state.lock:
            while state.positions.end <= offset and not state.is_finished:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                state.wait_for_end(offset + 1, left)
            return state.positions.end

    def await_backlog(self, timeout: float) -> int:
        """Wait until events can be taken; returns how many. 0 on timeout or close."""
        state = self._state
        with state.lock:
            if not state.backlog and not state.is_closed:
                state.wait_for_end(state.positions.end + 1, timeout)
            return state.backlog

    def wake_readers(self) -> None:
        """Wake all threads that wait for events, so that they look again."""
        with self._state.lock:
            self._state.readable.notify_all()
