"""The ``proxy`` kind: in the client, in front of a node that has the real queue.

It holds a few batches. A batch's room is free again the moment the node has accepted it; its
contents are kept aside, within ``resend_bytes``, only until the node says *persisted*, because a
node that dies in between has to be sent them again. From then on nothing but the ack metadata is
left here. Every event has a sequence number of this producer, so that the node drops repeats.

The *sender* thread takes batches and sends them, reconnecting with backoff for as long as it takes.
A *listener* for each connection hears how far the node has come and passes it on; callbacks have a
third thread, so that neither is ever held up by them.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import QueueClosed, QueueEmpty, TransportDown
from turnlane.events import Block
from turnlane.queues.batch import HeldBatch
from turnlane.queues.contract import (
    AckCallback,
    AckLevel,
    Batch,
    FlowControl,
    Outcome,
    Producer,
    Queue,
)
from turnlane.queues.holding import HoldingQueue
from turnlane.queues.settings import QueueSettings
from turnlane.queues.stats import Stats
from turnlane.queues.transport import Connection, Progress, Transport

log = logging.getLogger(__name__)

FIRST_RETRY = 0.05
LAST_RETRY = 5.0
"""Seconds between attempts to connect, doubling with jitter from one to the other."""
LOOK_SECONDS = 0.2
"""How long to wait for events or news before looking whether the connection still stands."""


@dataclass(slots=True)
class _Sent:
    """A batch that was sent, or is being sent."""

    sequence: int
    end: int
    batch: HeldBatch
    block: Block
    size: int


class _Held(HoldingQueue):
    """What has not been accepted by the node yet; offsets are sequence numbers, shifted."""

    free_returns_events = True

    def persisted(self, offset: int) -> None:
        """Everything below ``offset`` is safe with the node."""
        with self.lock:
            mark = self.watermarks[AckLevel.PERSISTED]
            self.acks.send(mark.advance(min(offset, self.positions.end)))

    def entrust(self, end: int) -> None:
        """Count what the node keeps as delivered, without telling anybody so."""
        with self.lock:
            self.totals.add(Outcome.DELIVERED, self.positions.settle(self.positions.low, end))

    def close_storage(self) -> None:
        with self.lock:
            lost = self.positions.settle(self.positions.low, self.positions.end)
            self.totals.add(Outcome.CLOSED, lost)


class ProxyQueue(Queue):
    """Publishes to a node's queue and reads from it; acks are the node's."""

    def __init__(
        self,
        settings: QueueSettings,
        transport: Transport,
        *,
        clock: Clock = SYSTEM_CLOCK,
        producer_id: str | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.settings = settings
        self._transport = transport
        self._producer_id = producer_id or uuid.uuid4().hex
        self._jitter = jitter
        self._held = _Held(settings, clock=clock)
        self._base: int | None = None
        """The sequence number of offset 0: where the node said this producer had got to."""
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._unaccepted: deque[_Sent] = deque()
        self._unpersisted: deque[_Sent] = deque()
        self._undelivered: deque[_Sent] = deque()
        self._resend_bytes = 0
        self._persisted = 0
        self._connected = False
        self._connection: Connection | None = None
        self._stopping = threading.Event()
        self._sender = threading.Thread(
            target=self._run, name=f"turnlane-proxy-{settings.name}", daemon=True
        )
        self._sender.start()

    def producer(
        self,
        *,
        ack: AckLevel | str = AckLevel.ACCEPTED,
        on_ack: AckCallback | None = None,
        flow: FlowControl | str = FlowControl.NONE,
        producer_id: str | None = None,
    ) -> Producer:
        return self._held.producer(ack=ack, on_ack=on_ack, flow=flow, producer_id=producer_id)

    def get(self, max_events: int | None = None, timeout: float | None = None) -> Batch:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._held.check_readable()
            left = LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            try:
                return self._transport.get(max_events, min(LOOK_SECONDS, max(0.0, left)))
            except QueueEmpty:
                if left <= 0:
                    raise

    def finish(self) -> None:
        self._held.finish()

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """As for every queue; drained means here that the node has persisted everything."""
        self._held.finish()
        if drain:
            limit = self.settings.shutdown_timeout if timeout is None else timeout
            with self._news:
                self._news.wait_for(self._is_safe, limit)
        self._stopping.set()
        with self._news:
            self._news.notify_all()
            connection = self._connection
        if connection is not None:
            connection.close()  # the sender may be blocked in it, at a node that is busy
        if threading.current_thread() is not self._sender:
            self._sender.join()
        self._held.entrust(self._persisted)
        self._held.close()

    def _is_safe(self) -> bool:
        return self._persisted >= self._held.end or self._stopping.is_set()

    @property
    def name(self) -> str:
        return self.settings.name

    def stats(self) -> Stats:
        return self._held.stats()

    # ── sending ──────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        retry = FIRST_RETRY
        while not self._stopping.is_set():
            try:
                connection = self._transport.connect(self._producer_id)
            except TransportDown as error:
                log.debug("queue %s: %s", self.name, error)
                self._stopping.wait(retry * (0.5 + self._jitter() / 2))
                retry = min(LAST_RETRY, retry * 2)
            else:
                retry = FIRST_RETRY
                self._serve(connection)

    def _serve(self, connection: Connection) -> None:
        """Send over one connection until it breaks."""
        self._greet(connection)
        listener = threading.Thread(
            target=self._listen,
            args=(connection,),
            name=f"turnlane-listener-{self.name}",
            daemon=True,
        )
        listener.start()
        try:
            self._send_again(connection)
            while self._is_up():
                self._send_next(connection)
        except TransportDown as error:
            log.info("queue %s lost its node: %s", self.name, error)
        except QueueClosed:
            self._wait_for_end()
        finally:
            connection.close()
            listener.join()

    def _greet(self, connection: Connection) -> None:
        with self._lock:
            self._connected = True
            self._connection = connection
            if self._base is None:
                self._base = connection.resume_at
        for mark in self._held.watermarks.values():
            mark.durability = connection.durability

    def _is_up(self) -> bool:
        with self._lock:
            return self._connected and not self._stopping.is_set()

    def _send_again(self, connection: Connection) -> None:
        """Send what the node does not have, though it may once have said so."""
        with self._lock:
            lost = [sent for sent in self._unpersisted if sent.end > connection.resume_at]
        for sent in lost:
            if self._is_up():
                connection.send(sent.sequence, sent.block)

    def _send_next(self, connection: Connection) -> None:
        with self._news:
            self._news.wait_for(self._may_send)
        try:
            batch = self._held.get(self.settings.batch_size, timeout=LOOK_SECONDS)
        except QueueEmpty:
            return
        sent = self._note(batch)
        connection.send(sent.sequence, sent.block)

    def _may_send(self) -> bool:
        return (
            self._resend_bytes < self.settings.resend_bytes
            or not self._connected
            or self._stopping.is_set()
        )

    def _note(self, batch: HeldBatch) -> _Sent:
        base = self._base or 0
        sent = _Sent(
            base + batch.place.first,
            base + batch.place.end,
            batch,
            batch.block,
            batch.portion.size,
        )
        with self._lock:
            for waiting in (self._unaccepted, self._unpersisted, self._undelivered):
                waiting.append(sent)
            self._resend_bytes += sent.size
        return sent

    def _wait_for_end(self) -> None:
        """Nothing more to send: stay for the news until told to stop, or the node is gone."""
        with self._news:
            self._news.wait_for(lambda: self._stopping.is_set() or not self._connected)

    # ── listening ────────────────────────────────────────────────────────────────────────────

    def _listen(self, connection: Connection) -> None:
        try:
            while self._is_up():
                progress = connection.progress(LOOK_SECONDS)
                if progress is not None:
                    self._heard(progress)
        except TransportDown as error:
            log.debug("queue %s: %s", self.name, error)
        finally:
            with self._news:
                self._connected = False
                self._news.notify_all()

    def _heard(self, progress: Progress) -> None:
        # Acceptance frees room only; a persisted or delivered event is accepted, whatever is said.
        persisted = max(progress.persisted, progress.delivered)
        with self._news:
            accepted = _reached(self._unaccepted, max(progress.accepted, persisted))
            safe = _reached(self._unpersisted, persisted)
            delivered = _reached(self._undelivered, progress.delivered)
            self._resend_bytes -= sum(sent.size for sent in safe)
            self._persisted = max(self._persisted, persisted - (self._base or 0))
            self._news.notify_all()
        for sent in accepted:
            sent.batch.free()
        self._held.persisted(self._persisted)
        for sent in delivered:
            sent.batch.done()


def _reached(waiting: deque[_Sent], position: int) -> list[_Sent]:
    reached = []
    while waiting and waiting[0].end <= position:
        reached.append(waiting.popleft())
    return reached
