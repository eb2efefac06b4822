"""Publishing for senders that get an answer (HTTP, OTLP, Elasticsearch): taken, or come back later.

What has no room within a request's time is given back to its sender; see ``one_way`` for senders
that hear nothing.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

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
from turnlane.events import Block, Event, add_timestamps, get_event_sizes
from turnlane.inputs.api import Host, Input, InputSettings
from turnlane.queues.api import Ack, AckLevel, FlowControl, Producer, Published
from turnlane.queues.buffered import BufferedQueue
from turnlane.serving.address import Address, check_exposure
from turnlane.serving.auth import TlsSettings, TokenSettings
from turnlane.units import Duration

Mask = npt.NDArray[np.bool_]


THREADS: Final = 64
"""Requests of one input that are cut up, published, or waiting for their acks at one time, for
each of its queues."""


class AnsweringSettings(InputSettings):
    """The settings of an input whose senders can be told to come back later."""

    listen: Address = Field(description="The address to listen on.", examples=["127.0.0.1:8088"])
    tls: TlsSettings | None = Field(None, description="Certificate and key; default: no TLS.")
    flow: FlowControl = Field(
        FlowControl.NONE,
        description="How it yields before the queue is full; its senders can be told, so: not.",
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
        """Refuse a public address without protection. Raises ``ConfigError``."""
        check_exposure(
            self.listen,
            tls=self.tls is not None,
            tokens=bool(self.tokens),
            insecure=self.insecure,
        )


class Taken(NamedTuple):
    """What became of a block."""

    too_large: Mask
    """By event: can never fit the queue."""
    full: Mask
    """By event: there was no room for it."""

    @property
    def inside(self) -> int:
        """How many events were taken, and have come as far as the input's level asks."""
        return int(np.count_nonzero(~(self.too_large | self.full)))


class AnsweringPublisher:
    """Publishes blocks into the host's queues at an input's level. Safe to use from any thread.

    An event that the queue's own policy drops (sampling, shedding, ``drop_newest``) counts as
    taken: the queue's ledger has it, and sending it again would change nothing.
    """

    def __init__(self, host: Host, settings: AnsweringSettings) -> None:
        self._host = host
        self._settings = settings
        self._producers: dict[str, tuple[BufferedQueue, Producer]] = {}

    def check(self, knob: str, name: str) -> None:
        """Raise ``ConfigError`` if the host has no queue of this name."""
        try:
            self._host.queue(name)
        except NoSuchQueue as error:
            raise ConfigError(knob, str(error)) from None

    def deadline(self) -> float:
        """When a request that has just come must have its answer, on the monotonic clock."""
        return time.monotonic() + self._settings.timeout

    def publish(self, name: str, block: Block, deadline: float) -> None:
        """Publish all of a block, or raise ``EventTooLarge`` with nothing of it published.

        Also raises ``QueueFull``, ``QueueClosed`` and other ``RetryLater``, after which the sender
        should send it all again.
        """
        if block.num_rows:
            queue, producer = self._end_of(name)
            refused = np.count_nonzero(_too_large(queue, block))
            if refused:
                raise EventTooLarge(_reason(queue, int(refused)))
            self._publish(queue, producer, block, deadline)

    def publish_one(self, name: str, event: Event, deadline: float) -> None:
        """Publish a single event: a block of one would cost many times as much."""
        queue, producer = self._end_of(name)
        with _held_is_failed(queue):
            producer.publish(
                event.value or b"",
                event.key,
                headers=event.headers,
                severity=event.severity,
                source=event.source,
                timeout=_left(deadline),
            )

    def publish_fitting(self, name: str, block: Block, deadline: float) -> Taken:
        """Publish as many events as fit, the first events first.

        Raises ``QueueClosed`` and ``RetryLater``, ``QueueFull`` excepted, after which the sender
        should send it all again.
        """
        queue, producer = self._end_of(name)
        too_large = _too_large(queue, block)
        full = np.zeros(block.num_rows, dtype=np.bool_)
        fitting = np.flatnonzero(~too_large)
        if len(fitting):
            if len(fitting) < block.num_rows:
                block = block.filter(pa.array(~too_large))
            try:
                self._publish(queue, producer, block, deadline)
            except QueueFull as error:
                if error.pending:
                    raise AckPending(f"queue {name!r} is full, and not all in it is safe") from None
                full[fitting[error.accepted :]] = True
            except EventTooLarge:
                too_large[fitting] = True
        return Taken(too_large, full)

    def limit(self, name: str) -> str:
        """Why events are too large for a queue, in words."""
        return _reason(self._queue(name), None)

    def _end_of(self, name: str) -> tuple[BufferedQueue, Producer]:
        queue = self._queue(name)
        known = self._producers.get(name)
        if known is not None and known[0] is queue:  # not dropped and created again
            return known
        ends = queue, queue.producer(ack=self._settings.ack, flow=self._settings.flow)
        self._producers[name] = ends
        return ends

    def _queue(self, name: str) -> BufferedQueue:
        try:
            return self._host.queue(name)
        except NoSuchQueue as error:
            # It was there when the input began, and may be again. Told that there is none, senders
            # would drop what they hold.
            raise RetryLater(str(error)) from None

    def _publish(
        self, queue: BufferedQueue, producer: Producer, block: Block, deadline: float
    ) -> None:
        with _held_is_failed(queue):
            producer.publish_block(add_timestamps(block, queue.time_ns), timeout=_left(deadline))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise RetryLater("there are more requests than can be answered in time")
    return left


@contextlib.contextmanager
def _held_is_failed(queue: BufferedQueue) -> Iterator[None]:
    """Distinguish a queue whose disk fails from a queue that is full."""
    try:
        yield
    except QueueFull as error:
        if queue.holds_publishers:
            raise StorageFailed(f"queue {queue.name!r} cannot write to its disk") from error
        raise


def _too_large(queue: BufferedQueue, block: Block) -> Mask:
    """By event: larger than the queue ever takes."""
    most = queue.max_event_bytes
    if block.nbytes <= most:
        return np.zeros(block.num_rows, dtype=np.bool_)
    mask: Mask = get_event_sizes(block) > most
    return mask


def _reason(queue: BufferedQueue, refused: int | None) -> str:
    most = queue.max_event_bytes
    events = "events" if refused is None else f"{refused} events of the request"
    return f"{events} larger than queue {queue.name!r} takes ({most} bytes)"


# ── one_way ──
# Publishing for senders that hear nothing (syslog, sockets, pipes): wait for room, or drop.
#
# See ``answering`` for senders that can be told to come back later.

log = logging.getLogger(__name__)

OVERHEAD = 1_024
"""What the other columns of an event may take, amply."""
PATIENCE = 1.0
"""How long to wait for room before checking whether the input has to stop."""
WARN_SECONDS = 10.0
"""How often at most to warn: of dropped events, which are counted anyway, or of waiting."""
PAUSE = 0.1
"""How long to leave a queue alone that failed for another reason than being full."""


class OneWayPublisher:
    """Publishes what an input received. What does not get in is counted as dropped."""

    def __init__(self, owner: Input, flow: FlowControl | None = None) -> None:
        """Open the input's queue; ``flow`` if it is another than in the settings."""
        settings = owner.settings
        self._owner = owner
        self.queue = owner.host.queue(settings.queue)
        self._flow = settings.flow if flow is None else flow
        # With a callback, publishing does not wait for the ack; flush() does.
        on_ack = None if settings.ack is AckLevel.ACCEPTED else _heard
        self._producer = self.queue.producer(ack=settings.ack, on_ack=on_ack, flow=self._flow)
        self._deadline = float("inf")
        self._warned = float("-inf")
        self.failed = False
        """Whether the queue takes no more events and never will."""

    def check_fits(self, longest: int, knob: str) -> None:
        """Raise ``ConfigError`` if messages of ``longest`` bytes can never go into the queue."""
        settings = self.queue.settings
        bounds = (settings.max_event_bytes, settings.max_bytes)
        largest = min(bound for bound in bounds if bound is not None) - OVERHEAD
        if longest > largest:
            raise ConfigError(
                knob, f"is {longest}, but queue {self.queue.name!r} takes events of {largest} bytes"
            )

    def publish(self, block: Block) -> None:
        """Put a block in, waiting for room if the flow control class allows for it."""
        while block.num_rows and self._may_wait():
            try:
                self._count(self._producer.publish_block(block, timeout=self._patience()))
                return
            except QueueFull as error:
                self._owner.count(events=error.accepted)
                block = block.slice(error.accepted)
            except RetryLater as error:
                self._warn(f"it waits: {error}")
                time.sleep(PAUSE)
            except Never as error:
                self._fail(error)
        self._offer(block)

    def _may_wait(self) -> bool:
        if self.failed or self._flow is FlowControl.NONE:
            return False
        return time.monotonic() < self._deadline

    def _offer(self, block: Block) -> None:
        """Publish as many events as fit at this moment; the rest is dropped."""
        size = block.num_rows
        while size and block.num_rows and not self.failed:
            published = self._try(block.slice(0, size))
            if published is None:
                size //= 2
            else:
                self._count(published)
                block = block.slice(size)
        if block.num_rows:
            self._drop(block.num_rows)

    def _try(self, block: Block) -> Published | None:
        try:
            return self._producer.try_publish_block(block)
        except EventTooLarge:
            return None  # more events than the queue holds; fewer will do
        except RetryLater:
            return None
        except Never as error:
            self._fail(error)
            return None

    def _fail(self, error: Never) -> None:
        self.failed = True
        log.error("input %s cannot publish any more: %s", self._owner.settings.label, error)

    def flush(self, timeout: float) -> bool:
        """Wait until all that was published has reached the input's ack level."""
        return self._producer.flush(max(0.0, timeout))

    def finish(self, deadline: float) -> None:
        """The same at the end of the input, until ``deadline`` (monotonic); says what it missed."""
        if not self.failed and not self.flush(deadline - time.monotonic()):
            level, name = self._owner.settings.ack, self._owner.settings.label
            log.warning("input %s: not all its events are %s yet; the queue has them", name, level)

    def close(self, deadline: float) -> None:
        """From ``deadline`` (monotonic) on, nothing waits for room any more."""
        self._deadline = deadline

    def _patience(self) -> float:
        return min(PATIENCE, max(0.0, self._deadline - time.monotonic()))

    def _count(self, published: Published) -> None:
        self._owner.count(events=published.accepted)

    def _drop(self, events: int) -> None:
        self._owner.count(dropped=events)
        self._warn(f"{events} events dropped: no room in queue {self.queue.name!r}")

    def _warn(self, what: str) -> None:
        if time.monotonic() >= self._warned + WARN_SECONDS:
            self._warned = time.monotonic()
            log.warning("input %s: %s", self._owner.settings.label, what)


def _heard(ack: Ack) -> None:
    """Nobody can be told over a plain socket; :meth:`OneWayPublisher.flush` waits for the last."""
