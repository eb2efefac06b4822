"""How inputs publish, with and without answers to their senders.

:class:`RequestPublisher` serves senders that get an answer (HTTP, OTLP, Elasticsearch): an event
without room within the time of its request is refused, and the sender sends it again.
:class:`FireAndForgetPublisher` serves senders that hear nothing (syslog, sockets, pipes): it waits
for room, or drops and counts. :class:`ReceiveBuffer` makes the blocks that it publishes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, Field

from turnlane.errors import (
    AckPending,
    ConfigError,
    EventTooLarge,
    Never,
    NoSuchQueue,
    QueueFull,
    RetryLater,
    StorageFailed,
)
from turnlane.events import BASE_SCHEMA, Block, Event, add_timestamps, get_event_sizes
from turnlane.formats.lines import Positions, copy_spans
from turnlane.inputs.api import Host, Input
from turnlane.logs import get_logger
from turnlane.queues.api import AckLevel, FlowControl, Producer, Published
from turnlane.queues.buffered import BufferedQueue
from turnlane.serving.address import Address, check_exposure
from turnlane.serving.auth import TlsSettings, TokenSettings
from turnlane.units import Duration

log = get_logger(__name__)

EventMask = npt.NDArray[np.bool_]
"""True for the chosen events of a block."""

THREADS: Final = 64
"""Requests of one input that are parsed, published or waiting for acks at a time, per queue."""

EVENT_OVERHEAD: Final = 1_024
"""More bytes than the other columns of an event take."""
WAIT_SECONDS: Final = 1.0
"""How long to wait for room before checking whether the input has to stop."""
WARN_SECONDS: Final = 10.0
"""The least time between two warnings: the counters have every dropped event anyway."""
RETRY_SECONDS: Final = 0.1
"""How long to pause after a queue failed for another reason than being full."""


class RequestSettings(BaseModel):
    """The further settings of an input that answers its senders."""

    listen: Address = Field(description="The address to listen on.", examples=["127.0.0.1:8088"])
    tls: TlsSettings | None = Field(None, description="Certificate and key; default: no TLS.")
    flow: FlowControl = Field(
        FlowControl.NONE,
        description="How it slows down before the queue is full; by default it refuses instead.",
    )
    timeout: Duration = Field(
        5.0,
        gt=0,
        description="How long a request waits for room and for its ack before it is refused.",
    )
    tokens: tuple[TokenSettings, ...] = Field((), description="Who may publish; default: all.")
    insecure: bool = Field(
        default=False, description="Listen on a public address without TLS or tokens."
    )

    def check_exposed(self) -> None:
        """Raise ``ConfigError`` if the address is public and unprotected."""
        check_exposure(
            self.listen,
            tls=self.tls is not None,
            tokens=bool(self.tokens),
            insecure=self.insecure,
        )


class PartialPublish(NamedTuple):
    """The result of a block of which some events may not be in the queue."""

    too_large: EventMask
    """The events that never fit the queue."""
    without_room: EventMask
    """The events for which the queue has no room now."""

    @property
    def accepted(self) -> int:
        """How many events have reached the ack level of the input."""
        return int(np.count_nonzero(~(self.too_large | self.without_room)))


class RequestPublisher:
    """Publishes blocks into the queues of the host at an input's ack level. Safe on any thread.

    An event that the queue's own policy drops (sampling, shedding, ``drop_newest``) counts as
    accepted: the queue's ledger has it, and sending it again would change nothing.
    """

    def __init__(self, host: Host, settings: RequestSettings, ack: AckLevel) -> None:
        self._host = host
        self._settings = settings
        self._ack = ack
        self._producers: dict[str, tuple[BufferedQueue, Producer]] = {}

    def check_queue(self, knob: str, name: str) -> None:
        """Raise ``ConfigError`` for the setting ``knob`` if the host has no queue of this name."""
        try:
            self._host.queue(name)
        except NoSuchQueue as error:
            raise ConfigError(knob, str(error)) from None

    def get_deadline(self) -> float:
        """Return by when a request that has just come needs its answer, on the monotonic clock."""
        return time.monotonic() + self._settings.timeout

    @contextlib.contextmanager
    def refuse_costly_request(self) -> Iterator[None]:
        """Raise ``EventTooLarge`` instead of ``RetryLater`` if the request itself takes too long.

        The block uses this thread's processor for longer than the whole timeout of a request, so it
        would fail again each time that the sender sends it.
        """
        began = time.thread_time()
        try:
            yield
        except RetryLater as error:
            if time.thread_time() - began < self._settings.timeout:
                raise
            raise EventTooLarge(
                f"the request takes longer to process than the timeout of this input "
                f"({self._settings.timeout:g} s); send it in parts"
            ) from error

    def publish(self, name: str, block: Block, deadline: float) -> None:
        """Publish all of a block, or raise ``EventTooLarge`` and publish nothing of it.

        Also raises ``QueueFull``, ``QueueClosed`` and other ``RetryLater``, after which the sender
        should send it all again.
        """
        if block.num_rows:
            queue, producer = self._get_producer(name)
            refused = int(np.count_nonzero(_find_too_large(queue, block)))
            if refused:
                raise EventTooLarge(_describe_limit(queue, f"{refused} events of the request"))
            self._publish(queue, producer, block, deadline)

    def publish_one(self, name: str, event: Event, deadline: float) -> None:
        """Publish a single event, which is many times cheaper than a block of one."""
        queue, producer = self._get_producer(name)
        with _raise_storage_failure(queue):
            producer.publish(
                event.value or b"",
                event.key,
                headers=event.headers,
                severity=event.severity,
                source=event.source,
                timeout=_compute_timeout(deadline),
            )

    def publish_fitting(self, name: str, block: Block, deadline: float) -> PartialPublish:
        """Publish as many events as fit, the first events first.

        Raises ``QueueClosed`` and ``RetryLater`` except ``QueueFull``, after which the sender
        should send it all again.
        """
        queue, producer = self._get_producer(name)
        too_large = _find_too_large(queue, block)
        without_room = np.zeros(block.num_rows, dtype=np.bool_)
        fitting = np.flatnonzero(~too_large)
        if len(fitting):
            if len(fitting) < block.num_rows:
                block = block.filter(pa.array(~too_large))
            try:
                self._publish(queue, producer, block, deadline)
            except QueueFull as error:
                if error.pending:
                    raise AckPending(
                        f"queue {name!r} is full, and not all accepted events are safe"
                    ) from None
                without_room[fitting[error.accepted :]] = True
            except EventTooLarge:
                too_large[fitting] = True
        return PartialPublish(too_large, without_room)

    def describe_limit(self, name: str) -> str:
        """Return why events are too large for a queue, as a text."""
        return _describe_limit(self._get_queue(name), "events")

    def _get_producer(self, name: str) -> tuple[BufferedQueue, Producer]:
        queue = self._get_queue(name)
        known = self._producers.get(name)
        if known is not None and known[0] is queue:  # not dropped and created again
            return known
        ends = queue, queue.producer(ack=self._ack, flow=self._settings.flow)
        self._producers[name] = ends
        return ends

    def _get_queue(self, name: str) -> BufferedQueue:
        try:
            return self._host.queue(name)
        except NoSuchQueue as error:
            # It existed when the input started, and may exist again. If senders heard that there is
            # no such queue, they would drop their events.
            raise RetryLater(str(error)) from None

    def _publish(
        self, queue: BufferedQueue, producer: Producer, block: Block, deadline: float
    ) -> None:
        with _raise_storage_failure(queue):
            timeout = _compute_timeout(deadline)
            producer.publish_block(add_timestamps(block, queue.time_ns), timeout=timeout)


def _compute_timeout(deadline: float) -> float:
    timeout = deadline - time.monotonic()
    if timeout <= 0:
        raise RetryLater("there are more requests than can be answered in time")
    return timeout


@contextlib.contextmanager
def _raise_storage_failure(queue: BufferedQueue) -> Iterator[None]:
    """Raise ``StorageFailed`` instead of ``QueueFull`` if the disk of the queue fails."""
    try:
        yield
    except QueueFull as error:
        if queue.holds_publishers:
            raise StorageFailed(f"queue {queue.name!r} cannot write to its disk") from error
        raise


def _find_too_large(queue: BufferedQueue, block: Block) -> EventMask:
    most = queue.max_event_bytes
    if block.nbytes <= most:
        return np.zeros(block.num_rows, dtype=np.bool_)
    mask: EventMask = get_event_sizes(block) > most
    return mask


def _describe_limit(queue: BufferedQueue, events: str) -> str:
    return f"{events} larger than queue {queue.name!r} takes ({queue.max_event_bytes} bytes)"


class FireAndForgetPublisher:
    """Publishes the events of an input; events without room are counted as dropped.

    One thread of the input publishes; :meth:`set_deadline` may be called from any thread.
    """

    def __init__(self, owner: Input, flow: FlowControl | None = None) -> None:
        """Open the queue of the input; ``flow`` replaces the flow control of its settings."""
        settings = owner.settings
        self._owner = owner
        self._label = settings.label
        self._queue = owner.host.queue(settings.queue)
        self._can_wait = (settings.flow if flow is None else flow) is not FlowControl.NONE
        # With a callback, publishing does not wait for the ack. The callback itself does nothing:
        # these senders hear nothing, and flush() waits for the last ack.
        on_ack = None if settings.ack is AckLevel.ACCEPTED else lambda _ack: None
        self._producer = self._queue.producer(
            ack=settings.ack, on_ack=on_ack, flow=settings.flow if flow is None else flow
        )
        self._deadline = float("inf")
        self._next_warning = float("-inf")
        self.has_failed = False
        """Whether the queue accepts no more events and never will."""

    def check_fits(self, longest: int, knob: str) -> None:
        """Raise ``ConfigError`` if messages of ``longest`` bytes can never go into the queue."""
        settings = self._queue.settings
        bounds = (settings.max_event_bytes, settings.max_bytes)
        largest = min(bound for bound in bounds if bound is not None) - EVENT_OVERHEAD
        if longest > largest:
            raise ConfigError(
                knob,
                f"is {longest}, but queue {self._queue.name!r} takes events of {largest} bytes",
            )

    def publish(self, block: Block) -> None:
        """Publish a block; wait for room if the flow control allows it, else drop the rest."""
        while block.num_rows and self._can_wait and not self.has_failed:
            left = self._deadline - time.monotonic()
            if left <= 0:
                break
            try:
                published = self._producer.publish_block(block, timeout=min(WAIT_SECONDS, left))
                self._owner.count(events=published.accepted)
                return
            except QueueFull as error:
                self._owner.count(events=error.accepted)
                block = block.slice(error.accepted)
            except RetryLater as error:
                if self._is_warning_due():
                    log.warning("input.publish_waits", input=self._label, error=error)
                time.sleep(RETRY_SECONDS)
            except Never as error:
                self._fail(error)
        self._publish_without_waiting(block)

    def _publish_without_waiting(self, block: Block) -> None:
        """Publish as many events as fit now and drop the rest."""
        size = block.num_rows
        while size and block.num_rows and not self.has_failed:
            published: Published | None = None
            try:
                published = self._producer.try_publish_block(block.slice(0, size))
            except (EventTooLarge, RetryLater):
                pass
            except Never as error:
                self._fail(error)
            if published is None:
                size //= 2  # more events than the queue has room for; fewer may fit
            else:
                self._owner.count(events=published.accepted)
                block = block.slice(size)
        if block.num_rows:
            self._owner.count(dropped=block.num_rows)
            if self._is_warning_due():
                log.warning(
                    "input.events_dropped",
                    input=self._label,
                    queue=self._queue.name,
                    events=block.num_rows,
                )

    def flush(self, timeout: float) -> bool:
        """Wait until all published events have reached the ack level of the input."""
        return self._producer.flush(max(0.0, timeout))

    def set_deadline(self, deadline: float) -> None:
        """Wait for room only until ``deadline`` (monotonic). Safe from any thread."""
        self._deadline = deadline

    def finish(self, deadline: float) -> None:
        """Wait for the last acks until ``deadline`` (monotonic), and log if some are missing."""
        if not self.has_failed and not self.flush(deadline - time.monotonic()):
            level = self._owner.settings.ack
            hint = "the queue has all events"
            log.warning("input.acks_missing", input=self._label, level=level, hint=hint)

    def _fail(self, error: Never) -> None:
        self.has_failed = True
        log.error("input.publish_failed", input=self._label, error=error)

    def _is_warning_due(self) -> bool:
        now = time.monotonic()
        if now < self._next_warning:
            return False
        self._next_warning = now + WARN_SECONDS
        return True


# ── received messages ────────────────────────────────────────────────────────────────────────────

_BLOCK_SCHEMA: Final = pa.schema(
    [BASE_SCHEMA.field(name) for name in ("value", "timestamp", "severity", "source")]
)


class ReceiveBuffer:
    """Received bytes, and the messages in them, until they become one block. For one thread.

    The bytes of all connections are in one buffer, and messages are positions in it. So a block
    costs the same for one sender as for a thousand.
    """

    def __init__(
        self, size: int, parse_severities: Callable[[pa.BinaryArray], pa.Int8Array] | None = None
    ) -> None:
        """``parse_severities`` finds the severities of messages; default: they have none."""
        self._memory = memoryview(bytearray(size))
        self._parse_severities = parse_severities
        self._reset()
        # The first block of a process takes 100 ms, because Arrow initialises itself: do it now.
        self.add(np.array([0]), np.array([1]), 1, None)
        self.take_block()

    def _reset(self) -> None:
        self._at = 0
        self._starts: list[Positions] = []
        self._ends: list[Positions] = []
        self._sources: list[str | None] = []
        self._counts: list[int] = []

    @property
    def room(self) -> int:
        """How many more bytes can be received."""
        return len(self._memory) - self._at

    def get_space(self, rest: bytes = b"") -> memoryview:
        """Return the free part of the buffer, with ``rest`` at its beginning."""
        free = self._memory[self._at :]
        free[: len(rest)] = rest
        return free

    def add(self, starts: Positions, ends: Positions, used: int, source: str | None) -> None:
        """Add messages in the first ``used`` bytes of the free part, which are then occupied."""
        self.add_from_sources(starts, ends, used, [source], [len(starts)])

    def add_from_sources(
        self,
        starts: Positions,
        ends: Positions,
        used: int,
        sources: Sequence[str | None],
        counts: Sequence[int],
    ) -> None:
        """Add messages as :meth:`add` does, ``counts[n]`` of them from ``sources[n]``."""
        if len(starts):
            self._starts.append(starts + self._at)
            self._ends.append(ends + self._at)
            self._sources += sources
            self._counts += counts
            self._at += used

    def take_block(self) -> Block | None:
        """Return all messages as one block, with the current time, and free the buffer."""
        if not self._starts:
            return None
        values = copy_spans(self._memory, np.concatenate(self._starts), np.concatenate(self._ends))
        count = len(values)
        now = np.full(count, time.time_ns() // 1000)
        names = pa.array(self._sources, pa.string())
        if len(names) == 1:
            sources = pa.repeat(names[0], count)
        else:
            sources = names.take(np.repeat(np.arange(len(names), dtype=np.int32), self._counts))
        parse = self._parse_severities
        arrays = [
            values,
            pa.array(now).view(_BLOCK_SCHEMA.field("timestamp").type),
            pa.nulls(count, pa.int8()) if parse is None else parse(values),
            sources,
        ]
        self._reset()
        return pa.RecordBatch.from_arrays(arrays, schema=_BLOCK_SCHEMA)
