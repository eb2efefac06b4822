"""Publishing for senders that get an answer (HTTP, OTLP, Elasticsearch): taken, or come back later.

What has no room within a request's time is given back to its sender; see ``one_way`` for senders
that hear nothing.
"""

from __future__ import annotations

import contextlib
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
    NoSuchQueue,
    QueueFull,
    RetryLater,
    StorageFailed,
)
from turnlane.events import Block, Event, event_sizes, stamped
from turnlane.inputs.contract import Host, InputSettings
from turnlane.quantities import Duration
from turnlane.queues.contract import FlowControl, Producer
from turnlane.queues.holding import HoldingQueue
from turnlane.serving.address import Address, check_exposed
from turnlane.serving.rights import TokenSettings
from turnlane.serving.tls import TlsSettings

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
        check_exposed(
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
        self._producers: dict[str, tuple[HoldingQueue, Producer]] = {}

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
        """Publish what there is room for, the first events first.

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

    def _end_of(self, name: str) -> tuple[HoldingQueue, Producer]:
        queue = self._queue(name)
        known = self._producers.get(name)
        if known is not None and known[0] is queue:  # not dropped and made anew
            return known
        ends = queue, queue.producer(ack=self._settings.ack, flow=self._settings.flow)
        self._producers[name] = ends
        return ends

    def _queue(self, name: str) -> HoldingQueue:
        try:
            return self._host.queue(name)
        except NoSuchQueue as error:
            # It was there when the input began, and may be again. Told that there is none, senders
            # would drop what they hold.
            raise RetryLater(str(error)) from None

    def _publish(
        self, queue: HoldingQueue, producer: Producer, block: Block, deadline: float
    ) -> None:
        with _held_is_failed(queue):
            producer.publish_block(stamped(block, queue.time_ns), timeout=_left(deadline))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise RetryLater("there are more requests than can be answered in time")
    return left


@contextlib.contextmanager
def _held_is_failed(queue: HoldingQueue) -> Iterator[None]:
    """Tell a queue that lets nobody in because of its disk from one that is full."""
    try:
        yield
    except QueueFull as error:
        if queue.gate.held:
            raise StorageFailed(f"queue {queue.name!r} cannot write to its disk") from error
        raise


def _too_large(queue: HoldingQueue, block: Block) -> Mask:
    """By event: larger than the queue ever takes."""
    most = min(queue.settings.max_event_bytes, queue.gate.max_bytes)
    if block.nbytes <= most:
        return np.zeros(block.num_rows, dtype=np.bool_)
    mask: Mask = event_sizes(block) > most
    return mask


def _reason(queue: HoldingQueue, refused: int | None) -> str:
    most = min(queue.settings.max_event_bytes, queue.gate.max_bytes)
    events = "events" if refused is None else f"{refused} events of the request"
    return f"{events} larger than queue {queue.name!r} takes ({most} bytes)"
