"""The ``direct`` kind: publishing calls the consumer, on the thread of the publisher.

An error of the consumer is an error of the publish call. Nothing waits in the queue, so there is
nothing to get and nothing to lose. One lock guards the counters; the consumer is called without it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NoReturn, Unpack

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import BatchFreed, EventTooLarge, NotSupported, QueueClosed, RetryLater
from turnlane.events import EVENT_OVERHEAD, Block, block_of, get_event_sizes, prepare_block
from turnlane.ledger import Outcome, OutcomeTotals
from turnlane.logs import get_logger
from turnlane.queues.acks import AckDispatcher, AckListener, Watermark
from turnlane.queues.admission import check_severities, sample_rows
from turnlane.queues.api import (
    AckCallback,
    AckLevel,
    Consumer,
    Durability,
    EventFields,
    FlowControl,
    Producer,
    Published,
    Queue,
    Stats,
    parse_choice,
)
from turnlane.queues.buffer import BlockRange
from turnlane.queues.positions import BatchState, BufferedBatch, Positions
from turnlane.queues.producer import as_bytes, check_timestamp, measure_annotations
from turnlane.queues.settings import QueueSettings

log = get_logger(__name__)


class DirectQueue(Queue):
    """Calls ``consumer`` for every event or block published, one call per publish."""

    def __init__(
        self, settings: QueueSettings, consumer: Consumer, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.settings = settings
        self.time_ns = clock.time_ns
        self._consumer = consumer
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._positions = Positions()
        self._totals = OutcomeTotals()
        self._marks = {level: Watermark(level, Durability.MEMORY, 0) for level in AckLevel}
        self._acks = AckDispatcher(settings.name)
        self._seen = 0
        self._pushes = 0
        self._releases = 0
        self._failed = 0
        """Events whose consumer failed: their offsets stay unused."""
        self._running = 0
        """Calls of the consumer that have not ended."""
        self._returning = 0
        """Events that the consumer has settled while its call still runs."""
        self._closed = False
        """Whether the queue takes no more events."""
        self._ended = False
        """Whether the queue was closed, and not merely finished or draining."""
        self._forced = 0
        """How often the queue was closed without draining."""
        self._close_ended = threading.Event()

    def producer(
        self,
        *,
        ack: AckLevel | str = AckLevel.ACCEPTED,
        on_ack: AckCallback | None = None,
        flow: FlowControl | str = FlowControl.NONE,
        producer_id: str | None = None,
    ) -> DirectProducer:
        self._check_open()
        parse_choice(FlowControl, "flow", flow)  # without effect here, but it has to be valid
        level = parse_choice(AckLevel, "ack", ack)
        if producer_id is not None:
            raise NotSupported("a direct queue cannot recognize repeats: it takes no producer_id")
        if on_ack is None:
            return DirectProducer(self, level, None)
        self._acks.start()
        return DirectProducer(self, level, AckListener(on_ack))

    def get(self, max_events: int | None = None, timeout: float | None = None) -> NoReturn:
        del max_events, timeout
        with self._lock:
            self._check_open()
        raise NotSupported(
            f"queue {self.name!r} is direct: it calls its consumer and has nothing to get"
        )

    def take_sample(self, block: Block) -> Block:
        """Return the events of a block that sampling keeps."""
        interval = self.settings.sampling_interval
        with self._lock:
            self._check_open()
            seen, self._seen = self._seen, self._seen + block.num_rows
            if interval == 1:
                return block
            kept = block.take(sample_rows(block.num_rows, seen, interval))
            self._totals.add(Outcome.SAMPLED, block.num_rows - kept.num_rows)
        return kept

    def deliver(self, block: Block, level: AckLevel, listener: AckListener | None) -> int:
        """Call the consumer with a block; returns its first offset, or raises the error."""
        with self._lock:
            self._check_open()
            first = self._positions.end
            self._positions.end = first + block.num_rows
            self._pushes += 1
            self._running += 1
        batch = BufferedBatch(self, BlockRange(first, first + block.num_rows, 0, [block]))
        try:
            self._consumer(batch)
            if batch.state is BatchState.RELEASED:
                raise RetryLater(f"the consumer of queue {self.name!r} gave the events back")
            batch.done()
        finally:
            self._settle(batch, level, listener)
        return first

    def _settle(self, batch: BufferedBatch, level: AckLevel, listener: AckListener | None) -> None:
        with self._lock:
            place = batch.place
            self._positions.settle(place.first, place.end)
            if batch.state is not BatchState.SETTLED:
                batch.state = BatchState.RELEASED
                self._failed += len(place)
                self._pushes -= 1
                self._releases += 1
            else:
                self._returning -= len(place)
                if listener is not None:
                    self._marks[level].listen(listener, place.first, place.end)
            for mark in self._marks.values():
                self._acks.send(mark.advance(self._positions.low))
            self._running -= 1
            self._idle.notify_all()
            last = self._closed and not self._running
        if last:
            self._acks.stop(self.settings.shutdown_timeout)

    def free_batch(self, batch: BufferedBatch) -> None:
        """Give up the contents of a batch."""
        batch.is_freed = True
        batch.events.blocks = None

    def settle_batch(self, batch: BufferedBatch, outcome: Outcome) -> None:
        """Count a batch as delivered or dead, once."""
        with self._lock:
            if batch.state is BatchState.IN_FLIGHT:
                batch.state = BatchState.SETTLED
                self._returning += len(batch)
                self._totals.add(outcome, len(batch))

    def release_batch(self, batch: BufferedBatch) -> None:
        """Refuse a batch: the publisher gets ``RetryLater``."""
        if batch.is_freed:
            raise BatchFreed(f"batch {batch.place.first} was freed and cannot be released")
        with self._lock:
            if batch.state is BatchState.IN_FLIGHT:
                batch.state = BatchState.RELEASED

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosed(f"queue {self.name!r} is closed")

    def finish(self) -> None:
        with self._lock:
            self._closed = True

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        self.finish()
        with self._lock:
            if drain:
                self._drain(self.settings.shutdown_timeout if timeout is None else timeout)
            else:
                self._forced += 1
                self._idle.notify_all()
            first, self._ended = not self._ended, True
            running = self._running
        if first:
            if not running:  # otherwise the last call does it, once its own ack is sent
                self._acks.stop(self.settings.shutdown_timeout)
            self._close_ended.set()
        elif not self._acks.is_current_thread():
            self._close_ended.wait()

    def _drain(self, limit: float) -> None:
        """Wait until no consumer runs, or another close does not wait. Under the lock."""
        before = self._forced
        if not self._idle.wait_for(lambda: not self._running or self._forced > before, limit):
            count = self._positions.pending
            log.warning("queue.drain_timed_out", queue=self.name, seconds=limit, events=count)

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def closed(self) -> bool:
        return self._ended

    def stats(self) -> Stats:
        with self._lock:
            # Failed publishes used offsets, but their events were never accepted.
            pending = self._positions.pending - self._returning
            return Stats(
                name=self.name,
                kind=self.settings.kind.value,
                ledger=self._totals.ledger(self._positions.end - self._failed, pending),
                size=pending,
                bytes=0,
                max_size=0,
                max_bytes=None,
                in_flight=pending,
                blocked_publishers=0,
                memory_blocks=0,
                pushes=self._pushes,
                full_waits=0,
                releases=self._releases,
            )


class DirectProducer(Producer):
    """Publishes by calling the consumer. Every level is reached when publish returns."""

    def __init__(self, queue: DirectQueue, level: AckLevel, listener: AckListener | None) -> None:
        self._queue = queue
        self._level = level
        self._listener = listener
        self._closed = False

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
        del timeout  # nothing waits here but the consumer itself
        value = as_bytes(value)
        self._check_size(
            len(value) + EVENT_OVERHEAD + measure_annotations(key, headers, severity, source)
        )
        stamp = self._queue.time_ns() if timestamp is None else check_timestamp(timestamp)
        block = block_of(
            [value],
            timestamps=stamp // 1000,
            keys=[key],
            headers=[headers],
            severities=[severity],
            sources=[source],
        )
        return self._deliver(block).accepted > 0

    def try_publish(
        self, value: bytes, key: str | None = None, **fields: Unpack[EventFields]
    ) -> bool:
        return self.publish(value, key, **fields)

    def publish_block(
        self, block: Block, *, sequence: int | None = None, timeout: float | None = None
    ) -> Published:
        del timeout
        if sequence is not None:
            raise ValueError("a sequence needs a producer made with producer_id")
        block = prepare_block(block, self._queue.time_ns)
        check_severities(block)
        self._check_size(int(get_event_sizes(block).max(initial=0)))
        return self._deliver(block)

    def try_publish_block(self, block: Block, *, sequence: int | None = None) -> Published:
        return self.publish_block(block, sequence=sequence)

    def _check_size(self, largest: int) -> None:
        limit = self._queue.settings.max_event_bytes
        if largest > limit:
            raise EventTooLarge(f"an event of {largest} bytes exceeds max_event_bytes {limit}")

    def _deliver(self, block: Block) -> Published:
        if self._closed:
            raise QueueClosed(f"this producer of queue {self._queue.name!r} is closed")
        kept = self._queue.take_sample(block)
        first = self._queue.deliver(kept, self._level, self._listener) if kept.num_rows else -1
        return Published(first, kept.num_rows, block.num_rows - kept.num_rows, 0)

    def flush(self, timeout: float | None = None) -> bool:
        del timeout
        return True

    def close(self, *, cancel: bool = False) -> None:
        del cancel  # nothing waits in the queue
        self._closed = True
