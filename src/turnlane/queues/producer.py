"""The publishing end of a buffered queue: the producer and its requests.

Publishing a single event is the only path in turnlane that runs once per event. The fast path in
:meth:`BufferedProducer.publish` therefore does under the lock what several parts of the queue do
otherwise: it compares the fill level with the :class:`FastPathLimits` of its flow control, appends
to the lists of the open block, and counts. It calls nothing but these appends until the open block
reaches ``notify_threshold``. Everything else (policies, flow control, a full queue, large events)
makes one of the comparisons false and goes through a :class:`PublishRequest`.
"""

from __future__ import annotations

import abc
import hashlib
import operator
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from turnlane.errors import (
    AckPending,
    EventTooLarge,
    NumbersMissing,
    QueueClosed,
    QueueFull,
    StorageFailed,
)
from turnlane.events import (
    EVENT_OVERHEAD,
    MAX_BLOCK_BYTES,
    Block,
    add_timestamps,
    get_event_sizes,
    prepare_block,
)
from turnlane.ledger import Outcome
from turnlane.queues.acks import AckListener, AckWaiter
from turnlane.queues.admission import (
    MAX_SEVERITY,
    NO_DEADLINE,
    Deadline,
    FastPathLimits,
    Rows,
    check_severities,
    find_important_rows,
    sample_rows,
)
from turnlane.queues.api import AckCallback, AckLevel, FlowControl, Producer, Published
from turnlane.queues.state import Annotations, QueueState
from turnlane.storage.frames import ProducerSequence
from turnlane.storage.producer_sequences import MAX_RUNS, GapPolicy

_PADDING = 64
"""Arrow rounds the size of its buffers up to a multiple of this."""

_MIN_RUNS = 1_024
"""Up to this many numbers, the runs of a producer are kept, though no event can be cancelled."""

_MAX_MICROSECONDS = (1 << 63) // 1000
"""Timestamps are carried in nanoseconds, which have to fit into 64 bits."""


def hash_producer_id(producer_id: str) -> bytes:
    """Return the key under which the log and the journal keep a producer."""
    return hashlib.sha256(producer_id.encode()).digest()[:16]


def size_of(block: Block) -> int:
    """Return the bytes of a block, as ``nbytes`` does, which costs more than all the rest."""
    at = block.schema.get_field_index("value")
    values = block.column(max(0, at))
    if at < 0 or values.offset:
        return block.nbytes
    offsets = values.buffers()[1]
    is_whole = offsets is not None and offsets.size < 4 * (len(values) + 1) + _PADDING
    return block.get_total_buffer_size() if is_whole else block.nbytes


# ── requests ────────────────────────────────────────────────────────────────────────────────────


class PublishRequest(abc.ABC):
    """One event or one block that a producer publishes.

    :class:`turnlane.queues.admission.Admission` calls all methods, under the lock.
    """

    def __init__(self, producer: BufferedProducer, events: int, size: int) -> None:
        self.producer = producer
        self.events = events
        self.size = size
        self.is_inside = False
        """Whether the request is in the queue."""
        self.waiter: AckWaiter | None = None
        """Once the request is inside: waits for the level of the producer, if needed."""
        self.dropped_by_policy: dict[Outcome, int] = {}
        """Events that policies dropped and the ledger does not count yet."""
        self.has_drops = False
        """Whether the ledger counts drops of this request."""

    @property
    def is_repeat(self) -> bool:
        """Whether the queue has all events of the request already."""
        return False

    @property
    def largest_event(self) -> int:
        """The size of the largest event."""
        return self.size

    def prepare(self) -> None:  # noqa: B027 - a single event has nothing to prepare
        """Leave out repeats. Raises ``NumbersMissing`` if the request leaves too many gaps."""

    @abc.abstractmethod
    def enter(self) -> None:
        """Put the events into the queue. Called once, when there is room."""

    def skip(self) -> None:
        """Finish without entering: nothing is left of the request, and it need not come again."""
        self._count_policy_drops()

    @abc.abstractmethod
    def keep_sample(self, before: int, interval: int) -> int:
        """Keep every ``interval``-th event, counted from ``before`` events on; returns drops."""

    @abc.abstractmethod
    def keep_important(self, severity: int) -> int:
        """Keep events more important than ``severity``; returns how many are dropped."""

    @abc.abstractmethod
    def keep_first(self, events: int) -> int:
        """Keep the first ``events`` events; returns how many are dropped."""

    def _set_inside(self, first: int) -> None:
        self.waiter = self.producer.on_entered(first, first + self.events)
        self.is_inside = True
        self._count_policy_drops()

    def _count_policy_drops(self) -> None:
        for outcome, events in self.dropped_by_policy.items():
            self.producer.state.count_drops(outcome, events)
            self.has_drops = self.has_drops or events > 0
        self.dropped_by_policy.clear()


class EventRequest(PublishRequest):
    """A single event."""

    def __init__(
        self, producer: BufferedProducer, value: bytes, timestamp: int, size: int, rest: Annotations
    ) -> None:
        super().__init__(producer, 1, size)
        self._value = value
        self._timestamp = timestamp
        self._rest = rest

    def enter(self) -> None:
        state = self.producer.state
        first = state.append_event(self._value, self._timestamp, self.size, self._rest)
        self._set_inside(first)

    def keep_sample(self, before: int, interval: int) -> int:
        return self.keep_first(0 if before % interval else 1)

    def keep_important(self, severity: int) -> int:
        own = self._rest[2]
        return self.keep_first(0 if own is not None and own >= severity else 1)

    def keep_first(self, events: int) -> int:
        dropped = max(0, self.events - events)
        self.events -= dropped
        return dropped


class BlockRequest(PublishRequest):
    """A block. If the producer numbers its events, the queue leaves out what it has already."""

    def __init__(
        self, producer: BufferedProducer, block: Block, size: int, sequence: int | None
    ) -> None:
        super().__init__(producer, block.num_rows, size)
        self.published = Published(-1, 0, 0, 0)
        self._block = block
        # The numbers of a producer without an id mean nothing.
        self._sequence = None if producer.key is None else sequence
        self._end_sequence = (sequence or 0) + block.num_rows
        self._numbers: Rows | None = None
        """The sequence numbers of the events, once they are not consecutive any more."""

    @property
    def largest_event(self) -> int:
        if self.events == 1:
            return self.size
        return int(get_event_sizes(self._block).max(initial=0))

    @property
    def is_repeat(self) -> bool:
        return not self.events and self.published.repeated > 0 and not self.published.dropped

    def prepare(self) -> None:
        self._drop_repeats()
        self._check_gaps()

    def _drop_repeats(self) -> None:
        key = self.producer.key
        if self._sequence is None or key is None:
            return
        accepted = self.producer.state.sequences.get(key)
        if accepted is None or self._sequence >= accepted.end:
            return  # in order, as nearly always
        before = self.events
        if self._numbers is None:
            self._keep_ranges(accepted.missing(self._sequence, self._sequence + self.events))
        else:
            new = np.flatnonzero(~accepted.holds(self._numbers))
            if len(new) < self.events:
                self._numbers = self._numbers[new]
                self._replace(self._block.take(new))
        repeated = self.published.repeated + before - self.events
        self.published = self.published._replace(repeated=repeated)

    def _keep_ranges(self, ranges: list[tuple[int, int]]) -> None:
        """Keep the events whose sequence numbers are in these ranges."""
        assert self._sequence is not None
        start = self._sequence
        if len(ranges) > 1:
            self._numbers = np.concatenate([np.arange(first, end) for first, end in ranges])
            self._replace(self._block.take(self._numbers - start))
        elif not ranges:
            self._replace(self._block.slice(0, 0))
        elif ranges[0] != (start, self._end_sequence):
            first, end = ranges[0]
            self._sequence, self._end_sequence = first, end
            self._replace(self._block.slice(first - start, end - first))

    def _check_gaps(self) -> None:
        """Raise ``NumbersMissing`` if the producer leaves out too many numbers."""
        key = self.producer.key
        if self._sequence is None or key is None or self.producer.gaps is not GapPolicy.KEEP:
            return
        accepted = self.producer.state.sequences.get(key)
        if accepted is None or len(accepted.runs) < MAX_RUNS:
            return
        if self.events and accepted.is_apart(self._sequence, self._sequence + self.events):
            raise NumbersMissing.of(self.producer.state.settings.name, accepted.gaps)

    def _replace(self, block: Block) -> None:
        self._block = block
        self.events = block.num_rows
        self.size = size_of(block)

    def enter(self) -> None:
        state = self.producer.state
        # Once more, now that it is the turn of this request: the same block may have come in by
        # another connection while the request was in line.
        self._drop_repeats()
        numbers = self._accept_numbers()
        first = state.positions.end
        if self.events:
            has_positions = self.producer.gaps is GapPolicy.POSITIONS
            is_consecutive = self._numbers is None and not has_positions
            state.append_block(self._block, self.size, numbers, is_consecutive=is_consecutive)
        self.published = self.published._replace(first=first, accepted=self.events)
        self._set_inside(first)

    def skip(self) -> None:
        super().skip()
        self._accept_numbers()

    def _accept_numbers(self) -> ProducerSequence | None:
        key = self.producer.key
        if self._sequence is None or key is None:
            return None
        return self.producer.state.accept_sequences(
            key, self._sequence, self._end_sequence, self.producer.gaps
        )

    def keep_sample(self, before: int, interval: int) -> int:
        return self._keep_rows(sample_rows(self.events, before, interval))

    def keep_important(self, severity: int) -> int:
        return self._keep_rows(find_important_rows(self._block, severity))

    def keep_first(self, events: int) -> int:
        count = max(0, events)
        return self._reduce(self._block.slice(0, count), slice(count))

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


# ── the producer ────────────────────────────────────────────────────────────────────────────────


class BufferedProducer(Producer):
    """Publishes into a buffered queue. Several threads may share it."""

    def __init__(
        self,
        state: QueueState,
        level: AckLevel,
        on_ack: AckCallback | None,
        flow: FlowControl,
        producer_id: str | None,
        *,
        gaps: GapPolicy = GapPolicy.KEEP,
    ) -> None:
        self.state = state
        # Looked up once, not for every event.
        self._lock, self._admission = state.lock, state.admission
        self._buffer, self._positions = state.buffer, state.positions
        self._flow = flow
        self._listener = None if on_ack is None else AckListener(on_ack)
        self._waits = level is not AckLevel.ACCEPTED and on_ack is None
        self._level = level
        self._mark = state.acks.watermark_of(level)
        self._expects_ack = self._waits or self._listener is not None
        self.key = None if producer_id is None else hash_producer_id(producer_id)
        self.gaps = gaps
        self._max_event_bytes = state.settings.max_event_bytes
        self._limits = state.admission.limits[flow]
        self._end = 0
        self._run_first = 0
        """Where the last run of consecutive offsets of this producer begins; it ends at `_end`."""
        self._runs = array("q")
        """The earlier runs of events that can be cancelled: first, end, first, end, and so on."""
        self._keeps_runs = state.storage.can_cancel
        self._max_runs = _MIN_RUNS
        self._is_closed = False
        self.is_cancelled = False
        """Whether the producer was closed and has taken its events back."""
        self._schema: pa.Schema | None = None
        """The schema of the last block, which the queue accepted."""

    @property
    def end(self) -> int:
        """The offset after the last event that this producer published; 0 if there is none."""
        return self._end

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
            size += measure_annotations(key, headers, severity, source)
        state = self.state
        admission = self._admission
        stamp = state.time_ns() if timestamp is None else check_timestamp(timestamp)
        # The fast path, about a microsecond: see the head of the module.
        with self._lock:
            limits = self._limits
            if (
                admission.events < limits.events
                and admission.bytes + size <= limits.bytes
                and size <= self._max_event_bytes
            ):
                block = self._buffer.open
                positions = self._positions
                end = positions.end + 1
                try:
                    if self._end != end - 1:
                        self._begin_run(end - 1)
                    block.values.append(value)
                    block.timestamps.append(stamp)
                    if not plain:
                        block.annotate(key, headers, severity, source)
                    positions.end = self._end = end
                except BaseException:  # Ctrl-C: half an event would shift all that follow
                    self._end = min(self._end, end - 1)
                    state.undo_append(end - 1)
                    raise
                block.size += size
                admission.events += 1
                admission.bytes += size
                if block.size >= state.notify_threshold:
                    state.on_growth()
                if not self._expects_ack:
                    return True
                waiter = self._expect_ack(end - 1, end)
            else:
                waiter = None
                end = -1
        if end >= 0:
            return waiter is None or self._await_ack(waiter, Deadline.after(timeout))
        request = EventRequest(self, value, stamp, size, (key, headers, severity, source))
        return self._publish_request(request, timeout, blocking=True)

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
        size = len(value) + EVENT_OVERHEAD + measure_annotations(key, headers, severity, source)
        stamp = self.state.time_ns() if timestamp is None else check_timestamp(timestamp)
        request = EventRequest(self, value, stamp, size, (key, headers, severity, source))
        return self._publish_request(request, None, blocking=False)

    def publish_block(
        self, block: Block, *, sequence: int | None = None, timeout: float | None = None
    ) -> Published:
        self._admission.check_open()
        block = self._check_block(block)
        size = size_of(block)
        if sequence is None and (entered := self._enter_fast(block, size)) is not None:
            first, waiter = entered
            self._await_ack(waiter, Deadline.after(timeout))
            return Published(first, block.num_rows, 0, 0)
        requests = self._make_requests(block, size, sequence)
        if len(requests) > 1:
            return self._publish_pieces(requests, timeout)
        if not requests:
            return Published(-1, 0, 0, 0)
        self._publish_request(requests[0], timeout, blocking=True)
        return requests[0].published

    def try_publish_block(self, block: Block, *, sequence: int | None = None) -> Published | None:
        block = self._check_block(block)
        request = self._make_request(block, size_of(block), sequence)
        admission = self._admission
        if request.size > admission.max_bytes or request.events > admission.max_events:
            raise self._too_large(request)
        self._publish_request(request, None, blocking=False)
        # Dropped by a policy, or empty, is not the same as refused for the moment.
        return request.published if request.is_inside or not request.events else None

    def check_publishable(self, block: Block) -> Block:
        """Return the block, ready to be published later.

        Raises the errors that publishing it would raise at any time.
        """
        block = self._check_block(block)
        for request in self._make_requests(block, size_of(block), None):
            self._check_request(request)
        return block

    def flush(self, timeout: float | None = None) -> bool:
        is_reached = self.state.wait_level(self._level, self._end, timeout)
        if not is_reached:
            self._admission.check_failure()
        return is_reached

    def close(self, *, cancel: bool = False) -> None:
        self._is_closed = True
        self._limits = FastPathLimits(-1, -1)
        if cancel:
            with self._lock:
                self.is_cancelled = True
                self._admission.refuse_waiting(self)
                runs = [*self._runs, self._run_first, self._end]
                self.state.cancel(zip(runs[::2], runs[1::2], strict=True))

    def check_not_cancelled(self) -> None:
        """Raise ``QueueClosed`` if the producer was closed with ``cancel``."""
        if self.is_cancelled:
            raise QueueClosed(f"this producer of queue {self.state.settings.name!r} was cancelled")

    def abort(self) -> None:
        """Close, and refuse the requests in line: their publish calls return with nothing taken."""
        self.close()
        with self._lock:
            self._admission.refuse_waiting(self)

    # Requests

    def _enter_fast(self, block: Block, size: int) -> tuple[int, AckWaiter | None] | None:
        """Append a block if it is below the fast path limits; ``None`` if it is not."""
        admission, rows = self._admission, block.num_rows
        if not rows or size > self._max_event_bytes:
            return None
        with self._lock:
            limits = self._limits
            if admission.events + rows > limits.events or admission.bytes + size > limits.bytes:
                return None
            first = self.state.append_block(block, size, None, is_consecutive=True)
            return first, self.on_entered(first, first + rows)

    def _publish_request(
        self, request: PublishRequest, timeout: float | None, *, blocking: bool
    ) -> bool:
        deadline = Deadline.after(timeout)
        self._admit(request, deadline, blocking=blocking)
        if request.is_inside and blocking:
            return self._await_ack(request.waiter, deadline)
        if request.waiter is not None:
            request.waiter.leave()
        return request.is_inside

    def _publish_pieces(self, requests: list[BlockRequest], timeout: float | None) -> Published:
        """Put all pieces in, then wait for the last: ``AckPending`` means that all are inside."""
        for request in requests:
            self._check_request(request)  # before any of them is inside
        deadline = Deadline.after(timeout)
        entered: list[Published] = []
        waiters: list[AckWaiter] = []
        for request in requests:
            try:
                self._admit(request, deadline, blocking=True)
            except QueueFull as error:
                self._check_lost(waiters)
                error.accepted = sum(sum(each[1:]) for each in entered)
                error.pending = not all(waiter.is_reached for waiter in waiters)
                raise
            entered.append(request.published)
            if request.waiter is not None:
                # No thread waits on it: the next in its chain must not wait for other pieces.
                request.waiter.leave()
                waiters.append(request.waiter)
        if self._mark is not None and waiters:
            with self._lock:
                self.check_not_cancelled()
                last = self._mark.add_waiter(waiters[-1].first, waiters[-1].offset)
            self._await_ack(last, deadline)
            self._check_lost(waiters)
        first = next((each.first for each in entered if each.first >= 0), -1)
        return Published(first, *(sum(each[at] for each in entered) for at in (1, 2, 3)))

    def _admit(self, request: PublishRequest, deadline: Deadline, *, blocking: bool) -> None:
        state = self.state
        if deadline is NO_DEADLINE and state.settings.full_timeout is not None:
            deadline = Deadline.after(state.settings.full_timeout)
        with self._lock:
            self._check_request(request)
            flow = self._flow if blocking else FlowControl.NONE
            waiting = self._admission.admit(request, flow, deadline, blocking=blocking)
        if waiting is not None:
            self._admission.wait_in_line(waiting, deadline)
            if waiting.is_refused:
                self.check_not_cancelled()
        if request.has_drops or state.has_unsynced_drops:
            state.has_unsynced_drops = False
            state.keep_drops(now=self._waits)

    def _check_request(self, request: PublishRequest) -> None:
        self._admission.check_open()
        if self._is_closed:
            raise QueueClosed(f"this producer of queue {self.state.settings.name!r} is closed")
        largest = min(self._max_event_bytes, self._admission.max_bytes)
        if request.size > largest and request.largest_event > largest:
            raise self._too_large(request)

    def _too_large(self, request: PublishRequest) -> EventTooLarge:
        admission = self._admission
        return EventTooLarge(
            f"{request.events} events of {request.size} bytes can never fit queue "
            f"{self.state.settings.name!r} (max_event_bytes {self._max_event_bytes}, "
            f"size {admission.max_events}, max_bytes {admission.max_bytes})"
        )

    def _check_block(self, block: Block) -> Block:
        """Return the block as the queue takes it. Nearly always the schema is the last one."""
        state = self.state
        if not isinstance(block, pa.RecordBatch):
            raise TypeError(
                f"a block is a pyarrow.RecordBatch, not {type(block).__name__}; see block_of()"
            )
        if self._schema is not None and block.schema.equals(self._schema):
            check_severities(block)
            return add_timestamps(block, state.time_ns)
        ready = prepare_block(block, state.time_ns)
        check_severities(ready)
        with self._lock:
            state.check_columns(ready.schema)
        is_same = ready.schema.equals(block.schema, check_metadata=True)
        self._schema = ready.schema if is_same else None
        return ready

    def _make_requests(self, block: Block, size: int, sequence: int | None) -> list[BlockRequest]:
        requests: list[BlockRequest] = []
        for piece, piece_size in self._split(block, size):
            requests.append(self._make_request(piece, piece_size, sequence))
            if sequence is not None:
                sequence += piece.num_rows
        return requests

    def _split(self, block: Block, size: int) -> Iterator[tuple[Block, int]]:
        """Halve a block until each piece fits into the queue, or is a single event."""
        admission = self._admission
        rows = block.num_rows
        max_bytes = min(admission.max_bytes, MAX_BLOCK_BYTES)
        if rows > 1 and (rows > admission.max_events or size > max_bytes):
            for half in (block.slice(0, rows // 2), block.slice(rows // 2)):
                yield from self._split(half, size_of(half))
        elif rows:
            yield block, size

    def _make_request(self, block: Block, size: int, sequence: int | None) -> BlockRequest:
        if sequence is not None and self.key is None:
            raise ValueError("a sequence needs a producer made with producer_id")
        return BlockRequest(self, block, size, sequence)

    # Acks

    def on_entered(self, first: int, end: int) -> AckWaiter | None:
        """A request is inside, as the events ``first`` to ``end - 1``. Under the lock."""
        if self._end != first or first == end:  # all its events may be repeats
            self._begin_run(first if first < end else max(self._end, end))
        self._end = max(self._end, end)
        return self._expect_ack(first, end) if self._expects_ack else None

    def _begin_run(self, first: int) -> None:
        """Another producer's events came between: keep the last run. Under the lock."""
        runs = self._runs
        if self._keeps_runs and self._run_first < self._end:
            if len(runs) >= self._max_runs:
                start = self.state.find_cancellable()
                del runs[: 2 * bisect_right(range(len(runs) // 2), start, key=self._get_run_end)]
                self._max_runs = max(_MIN_RUNS, 2 * len(runs))
            runs.extend((self._run_first, self._end))
        self._run_first = first

    def _get_run_end(self, number: int) -> int:
        return self._runs[2 * number + 1]

    def _expect_ack(self, first: int, end: int) -> AckWaiter | None:
        """Arrange for the ack: a callback, or a waiter. Under the lock."""
        state, mark = self.state, self._mark
        if self._listener is not None:
            if first < end:
                if mark is None:
                    state.acks.send_accepted(self._listener, first, end)
                else:
                    mark.listen(self._listener, first, end)
            return None
        if not self._waits or mark is None:
            return None
        waiter = mark.add_waiter(first, end)
        state.storage.urge(mark.level)
        return waiter

    def _await_ack(self, waiter: AckWaiter | None, deadline: Deadline) -> bool:
        """Wait for the level; false if a policy dropped the event since."""
        if waiter is None:
            return True
        name = self.state.settings.name
        if not waiter.wait(deadline.left):
            if waiter.is_cancelled:
                self.check_not_cancelled()
            self._admission.check_failure()
            if not self.state.is_closed:
                raise AckPending(
                    f"the event is in queue {name!r}, not acked within {deadline.seconds:g} s"
                )
            raise QueueClosed(f"queue {name!r} was closed before the event was acked")
        self._check_lost([waiter])
        return not waiter.has_lost

    def _check_lost(self, waiters: list[AckWaiter]) -> None:
        if self._admission.blocks and any(waiter.has_lost for waiter in waiters):
            self.check_not_cancelled()
            name = self.state.settings.name
            raise StorageFailed(
                f"queue {name!r} lost the event to a failing disk: publish it again"
            )


# ── one event, checked and measured ─────────────────────────────────────────────────────────────


def as_bytes(value: object) -> bytes:
    """Return the value of an event as bytes that nothing can change."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"an event's value is bytes, not {type(value).__name__}; encode it first")


def check_timestamp(timestamp: int) -> int:
    """Check a timestamp in microseconds; return it in nanoseconds, as the queue carries it."""
    if not -_MAX_MICROSECONDS < operator.index(timestamp) < _MAX_MICROSECONDS:
        raise ValueError(f"timestamp {timestamp} is not a number of microseconds since the epoch")
    return timestamp * 1000


def measure_annotations(
    key: str | None, headers: Mapping[str, str] | None, severity: int | None, source: str | None
) -> int:
    """Return the size of the optional columns of an event.

    Texts are encoded here, and not only when the block is sealed: so the publisher gets the error
    for a wrong type or a lone surrogate, and not the thread that seals the events of all.
    """
    size = 0 if key is None else _measure_text("key", key)
    if source is not None:
        size += _measure_text("source", source)
    if headers is not None:
        if not isinstance(headers, Mapping):
            raise TypeError(f"headers are a mapping of text to text, not {type(headers).__name__}")
        for name, text in headers.items():
            size += _measure_text("a header's name", name)
            size += _measure_text(f"header {name!r}", text) + 8
    if isinstance(severity, bool):
        raise TypeError("severity is a number, not a bool")
    if severity is not None and not 0 <= operator.index(severity) <= MAX_SEVERITY:
        raise ValueError(
            f"severity {severity} is not between 0 (emergency) and {MAX_SEVERITY} (debug)"
        )
    return size


def _measure_text(what: str, text: object) -> int:
    if not isinstance(text, str):
        raise TypeError(f"{what} is text, not {type(text).__name__}")
    return len(text.encode())
