"""The ``proxy`` kind: a buffer in the client, in front of a node that has the real queue.

It holds a few batches. The room of a batch is free again when the node has accepted it. Then the
level of each producer decides. Events at ``accepted`` are the node's from then on: it has promised
no more. The contents of the others are kept, within ``resend_bytes``, until the node says
*persisted*, because a node that dies in between has to get them again; after that only the ack is
outstanding. A queue of the node that is in memory says *persisted* when it has delivered. Every
event has a sequence number of this producer, so that the node drops repeats.

If the node refuses a block for good (a column of another type, a token without the right, no such
queue), it would refuse the block each time, and nothing may overtake it: the queue has *failed*.
Publishers get the error of the node, and events that are not acked stay unacked. Close the queue,
and open it again.

Threads: the *sender* takes batches and sends them, and reconnects with backoff without end. For
each connection a *listener* hears how far the node has come and reports it. Ack callbacks have a
third thread, so that they delay neither. The lock of this storage, ``_lock``, is never held while
the queue is called, and never taken under the lock of the queue.
"""

from __future__ import annotations

import contextlib
import random
import threading
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from turnlane.errors import Never, QueueClosed, QueueEmpty, TransportDown
from turnlane.events import Block
from turnlane.intervals import RangeSet, Span
from turnlane.logs import get_logger
from turnlane.pacing import double_wait, scatter_wait
from turnlane.queues.api import (
    AckLevel,
    Batch,
    FullBehavior,
    NodeConnection,
    NodeProgress,
    Transport,
)
from turnlane.queues.positions import BufferedBatch
from turnlane.queues.settings import QueueSettings
from turnlane.queues.storage_api import Storage, StorageHost, TakeBatch
from turnlane.runtime import create_thread, start_thread

log = get_logger(__name__)

FIRST_RETRY = 0.05
LAST_RETRY = 5.0
"""Seconds between attempts to connect, doubling with jitter from one to the other."""
POLL_SECONDS = 0.2
"""How long to wait for events or news before looking whether the connection still stands."""
CLOSE_SECONDS = 5.0
"""How long a close waits for a transport that hangs."""


def retry_delay(failures: int, jitter: float) -> float:
    """Return the seconds to wait after this many failures in a row; ``jitter`` is 0 to 1."""
    return scatter_wait(double_wait(FIRST_RETRY, LAST_RETRY, failures), jitter)


@dataclass(slots=True)
class SentBatch:
    """A batch that was sent, or is being sent."""

    end: int
    """The sequence number after the last event."""
    batch: BufferedBatch
    awaited: RangeSet
    """The offsets that are kept until they are persisted."""
    spans: list[Span]
    """The sequence numbers of the events in ``block``: all, and once accepted, only those."""
    block: Block | None
    """The contents, as long as they may have to be sent again."""
    size: int
    """The bytes that the awaited events count for."""
    bytes_end: int
    """All such bytes up to here, this batch included."""


class RemoteStorage(Storage):
    """Sends the events of a queue to a node, and reads from the queue of the node."""

    charges_freed = False
    is_remote = True

    def __init__(
        self,
        settings: QueueSettings,
        transport: Transport,
        *,
        producer_id: str | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._name = settings.name
        self._transport = transport
        self._producer_id = producer_id or uuid.uuid4().hex
        self._jitter = jitter
        self._take: TakeBatch
        self._base: int | None = None
        """The sequence number of offset 0: how far the node had this producer at the start."""
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._unaccepted: deque[SentBatch] = deque()
        self._unpersisted: deque[SentBatch] = deque()
        self._undelivered: deque[SentBatch] = deque()
        self._sent = 0
        """The offset up to which events were sent, on this connection or another."""
        self._urged = 0
        """The offset up to which the node was asked, on this connection, to persist them soon."""
        self._awaited_bytes = 0
        """The bytes of all sent events that had to be kept until they were persisted."""
        self._persisted_bytes = 0
        """How many of these bytes are persisted."""
        self._handed_over = RangeSet()
        """Offsets that the node has accepted, and that are not kept. The queue's lock guards it."""
        self._persisted = 0
        """The offset up to which the node has persisted events."""
        self._advances = 0
        """How often the node reported that it has come further."""
        self._is_connected = False
        self._has_logged_down = False
        self._has_logged_closed = False
        self._connection: NodeConnection | None = None
        self._stopping = threading.Event()
        self._sender = create_thread(f"turnlane-proxy-{settings.name}", self._run)

    def start(self, host: StorageHost, take: TakeBatch) -> None:
        self._host = host
        self._take = take
        self._sender.start()

    def get(self, max_events: int | None, timeout: float) -> Batch:
        return self._transport.get(max_events, timeout)

    def close(self) -> None:
        self._stopping.set()
        with self._news:
            self._news.notify_all()
            connection = self._connection
        if connection is not None:
            self._disconnect(connection)  # the sender may be blocked in it, at a busy node
        if threading.current_thread() is not self._sender:
            self._sender.join(CLOSE_SECONDS)
        host = self._host
        with host.lock:
            # The node keeps the events that it has promised; publishers heard of no delivery.
            for first, end in ((0, self._persisted), *self._handed_over):
                host.settle_delivered(first, end, notify=False)
            host.drop_unstored(0)

    def count_undrained(self) -> int:
        host = self._host
        spans = host.positions.find_unsettled(host.persisted.position, host.positions.end)
        return sum(end - first - self._handed_over.overlap(first, end) for first, end in spans)

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            failures = 0 if self._serve() else failures + 1
            if failures:
                self._pause(retry_delay(failures, self._jitter()))

    def _pause(self, seconds: float) -> None:
        self._stopping.wait(seconds)

    def _serve(self) -> bool:
        """Connect and send until the connection breaks; true if the node came any further."""
        before = self._advances
        try:
            self._serve_connection(self._transport.connect(self._producer_id))
        except TransportDown as error:
            self._log_retry("queue.node_unreachable", error, is_known=self._has_logged_down)
            self._has_logged_down = True
        except QueueClosed as error:
            self._log_retry("queue.node_queue_closed", error, is_known=self._has_logged_closed)
            self._has_logged_closed = True
        except Never as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a transport may raise anything
            self._log_transport_failure(error)
        return self._advances > before

    def _log_retry(self, event: str, error: Exception, *, is_known: bool) -> None:
        tell = log.info if is_known or self._stopping.is_set() else log.warning
        tell(event, queue=self._name, error=error, hint="the queue tries again")

    def _log_transport_failure(self, error: Exception) -> None:
        log.error(
            "queue.transport_failed",
            queue=self._name,
            error=error,
            hint="the queue tries again",
            exc_info=error,
        )

    def _fail(self, error: Exception) -> None:
        log.error("queue.refused_by_node", queue=self._name, error=error)
        with self._host.lock:
            self._host.fail(error, AckLevel.PERSISTED, AckLevel.DELIVERED)
        self._stopping.set()
        with self._news:
            self._news.notify_all()

    def _serve_connection(self, connection: NodeConnection) -> None:
        listener: threading.Thread | None = None
        try:
            self._start_connection(connection)
            listener = start_thread(f"turnlane-listener-{self._name}", self._listen, connection)
            self._resend(connection)
            while self._is_usable():
                self._send_next(connection)
                self._request_early_sync(connection)
        finally:
            self._disconnect(connection)
            if listener is not None:
                listener.join()

    def _start_connection(self, connection: NodeConnection) -> None:
        with self._host.lock:
            self._host.set_durability(connection.durability)
        with self._lock:
            self._is_connected = True
            self._has_logged_down = False
            self._connection = connection
            self._urged = 0
            if self._base is None:
                self._base = connection.resume_at
            resume_at = connection.resume_at - self._base
            lost = max(0, self._persisted - resume_at)
        lost += self._give_up_lost(max(0, resume_at))
        if lost:
            log.error("queue.node_lost_events", queue=self._name, events=lost)
        self._handle_progress(NodeProgress(connection.resume_at, 0, 0))

    def _give_up_lost(self, resume_at: int) -> int:
        """Settle events that the node had accepted and lost, and that are not kept here."""
        host = self._host
        with host.lock:
            spans = self._handed_over.within(resume_at, host.positions.end)
            before = host.positions.pending
            for span in spans:
                self._handed_over.remove(*span)
                host.lose(*span)
            return before - host.positions.pending

    def _disconnect(self, connection: NodeConnection) -> None:
        try:
            connection.close()
        except Exception as error:  # noqa: BLE001 - the connection is gone in any case
            log.debug("queue.disconnect_failed", queue=self._name, error=error)

    def _is_usable(self) -> bool:
        """Whether the connection stands and the queue is open. Needs no lock."""
        return self._is_connected and not self._stopping.is_set()

    def _resend(self, connection: NodeConnection) -> None:
        """Send what the node does not have, though it may have said so before."""
        with self._lock:
            lost = [sent for sent in self._unpersisted if sent.end > connection.resume_at]
        for sent in lost:
            self._send(connection, sent)

    def _send_next(self, connection: NodeConnection) -> None:
        if self._settings.full_behavior is FullBehavior.DROP_OLDEST:
            # Events that are on their way cannot be dropped, so some must not be on their way.
            with self._news:
                self._news.wait_for(lambda: not self._unaccepted or not self._is_usable())
        try:
            batch = self._take(self._settings.batch_size, POLL_SECONDS)
        except QueueEmpty:
            # Arrow's pool keeps what this thread has used, which may now be idle for long.
            pa.default_memory_pool().release_unused()
            return
        except QueueClosed:
            # Nothing more to send: stay for the news until the close ends, or the node is gone.
            with self._news:
                self._news.wait_for(lambda: not self._is_usable())
            return
        self._send(connection, self._add_sent(batch))

    def _request_early_sync(self, connection: NodeConnection) -> None:
        """If a publisher waits here, let the node hurry, as a queue of our own would.

        Once the node has everything that is waited for, and once per connection.
        """
        with self._host.lock:
            awaited = self._host.persisted.find_awaited(self._sent)
        if awaited > self._urged:
            connection.urge()
            self._urged = awaited

    def _add_sent(self, batch: BufferedBatch) -> SentBatch:
        base = self._base or 0
        first, end = base + batch.place.first, base + batch.place.end
        block = batch.block
        with self._host.lock:
            awaited = self._host.find_awaited(batch.place.first, batch.place.end)
        size = batch.size * awaited.total // len(batch)
        with self._lock:
            self._sent = batch.place.end
            self._awaited_bytes += size
            spans = [(first, end)]
            sent = SentBatch(end, batch, awaited, spans, block, size, self._awaited_bytes)
            for waiting in (self._unaccepted, self._unpersisted, self._undelivered):
                waiting.append(sent)
        return sent

    def _send(self, connection: NodeConnection, sent: SentBatch) -> None:
        with self._news:
            self._news.wait_for(lambda: self._can_keep(sent) or not self._is_usable())
            block = sent.block if self._is_usable() else None
            spans = sent.spans
        if block is not None:
            at = 0
            for first, end in spans:
                connection.send(first, block.slice(at, end - first))
                at += end - first

    def _can_keep(self, sent: SentBatch) -> bool:
        """Whether this batch, too, can be kept for sending it again; a single one always is."""
        kept = sent.bytes_end - self._persisted_bytes
        return not sent.size or kept <= max(self._settings.resend_bytes, sent.size)

    # ── listening ───────────────────────────────────────────────────────────────────────────────

    def _listen(self, connection: NodeConnection) -> None:
        try:
            while self._is_usable():
                progress = connection.progress(POLL_SECONDS)
                if progress is not None:
                    self._handle_progress(progress)
        except (TransportDown, QueueClosed) as error:
            log.debug("queue.connection_ended", queue=self._name, error=error)
        except Never as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a transport may raise anything
            self._log_transport_failure(error)
        finally:
            with self._news:
                self._is_connected = False
                self._news.notify_all()
            self._disconnect(connection)  # the sender may be blocked in it

    def _handle_progress(self, progress: NodeProgress) -> None:
        # Acceptance frees room only. A persisted or delivered event is accepted in any case.
        safe = max(progress.persisted, progress.delivered)
        with self._news:
            base = self._base or 0
            accepted = _take_reached(self._unaccepted, max(progress.accepted, safe))
            persisted = _take_reached(self._unpersisted, safe)
            delivered = _take_reached(self._undelivered, progress.delivered)
            for sent in persisted:
                sent.block = None
                self._persisted_bytes = sent.bytes_end
            self._persisted = max(self._persisted, safe - base)
            if accepted or persisted or delivered:
                self._advances += 1
                self._has_logged_closed = False
            self._news.notify_all()
        for sent in accepted:
            sent.batch.free()
            if sent.block is not None:
                self._hand_over(sent, base)
        host = self._host
        with host.lock:
            self._handed_over.drop_below(self._persisted)
            host.settle_delivered(0, progress.delivered - base, notify=True)
            # Events that were dropped here need not be persisted there.
            left = host.positions.find_unsettled(self._persisted, host.positions.end)
            host.mark_persisted(left[0][0] if left else host.positions.end)
        for sent in delivered:
            with contextlib.suppress(QueueClosed):  # it is settled by offset
                sent.batch.done()

    def _hand_over(self, sent: SentBatch, base: int) -> None:
        """The node has accepted a batch: keep only the events that were promised more."""
        place, awaited = sent.batch.place, sent.awaited
        if sent.block is None or awaited.covers(place.first, place.end):
            return
        with self._host.lock:
            for span in awaited.missing(place.first, place.end):
                self._handed_over.add(*span)
        rows = [np.arange(first - place.first, end - place.first) for first, end in awaited]
        # A copy: a slice would keep the memory of the whole block.
        block = sent.block.take(np.concatenate(rows)) if rows else None
        with self._lock:
            sent.spans = [(base + first, base + end) for first, end in awaited]
            sent.block = block


def _take_reached(waiting: deque[SentBatch], position: int) -> list[SentBatch]:
    reached = []
    while waiting and waiting[0].end <= position:
        reached.append(waiting.popleft())
    return reached
