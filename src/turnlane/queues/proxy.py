"""The ``proxy`` kind: in the client, in front of a node that has the real queue.

It holds a few batches. A batch's room is free again the moment the node has accepted it; its
contents are kept aside, within ``resend_bytes``, only until the node says *persisted*, because a
node that dies in between has to be sent them again. From then on nothing but the ack metadata is
left here. Every event has a sequence number of this producer, so that the node drops repeats.

A node that refuses a block for good (a column of another type, a token without the right, no such
queue) would refuse it for ever, and nothing may overtake it: the queue has *failed*. Publishers get
the node's error, and what was not acked stays so. Close the queue, and open it again.

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
from types import TracebackType

import pyarrow as pa

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import Never, QueueClosed, QueueEmpty, TransportDown
from turnlane.events import Block
from turnlane.intervals import count_offsets
from turnlane.ledger import Outcome
from turnlane.queues.api import (
    AckCallback,
    AckLevel,
    Batch,
    Connection,
    FlowControl,
    FullBehavior,
    Producer,
    Progress,
    Queue,
    Stats,
    Transport,
)
from turnlane.queues.buffer import HeldBatch
from turnlane.queues.consumer import HoldingQueue
from turnlane.queues.settings import QueueSettings
from turnlane.retry import doubled, scattered

# ── held ──
# What a proxy queue holds, which its node has not accepted yet.


class Held(HoldingQueue):
    """Events on their way to a node; offsets are sequence numbers, shifted."""

    free_returns_events = True

    def awaited(self, limit: int) -> int:
        """Up to where, and not beyond ``limit``, publishers wait for the node to persist events."""
        with self.lock:
            return self.watermarks[AckLevel.PERSISTED].awaited(limit)

    def reached(self, persisted: int, delivered: int) -> None:
        """Everything below these offsets is safe with the node, or has left it."""
        with self.lock:
            self._settle_below(delivered)
            safe = self.positions.settled.end_of_run(min(persisted, self.positions.end))
            low = self.positions.low
            for level, offset in ((AckLevel.PERSISTED, safe), (AckLevel.DELIVERED, low)):
                self.acks.send(self.watermarks[level].advance(offset))

    def entrust(self, offset: int) -> None:
        """Count what the node keeps as delivered, without telling anybody so."""
        with self.lock:
            self._settle_below(offset)

    def _settle_below(self, offset: int) -> None:
        # No further than the end: another client may go by the same producer id.
        end = min(offset, self.positions.end)
        self.totals.add(Outcome.DELIVERED, self.positions.settle(self.positions.low, end))

    def count_from(self, offset: int) -> int:
        """How many events there are from ``offset`` on, what was dropped left aside."""
        with self.lock:
            return count_offsets(self.positions.unsettled(offset, self.positions.end))

    def fail(self, error: Exception) -> None:
        """Take no more, and tell all publishers why. What is not acked stays so."""
        with self.lock:
            self.gate.fail(error)
            self.door.calm()
            for mark in self.watermarks.values():
                mark.abandon()

    def close_storage(self) -> None:
        with self.lock:
            lost = self.positions.settle(self.positions.low, self.positions.end)
            self.totals.add(Outcome.CLOSED, lost)


log = logging.getLogger(__name__)

FIRST_RETRY = 0.05
LAST_RETRY = 5.0
"""Seconds between attempts to connect, doubling with jitter from one to the other."""
LOOK_SECONDS = 0.2
"""How long to wait for events or news before looking whether the connection still stands."""
LEAVE_SECONDS = 5.0
"""How long a close waits for a transport that hangs."""


def retry_after(failures: int, jitter: float) -> float:
    """Seconds to wait after so many connections in a row that led nowhere; ``jitter`` is 0 to 1."""
    return scattered(doubled(FIRST_RETRY, LAST_RETRY, failures), jitter)


@dataclass(slots=True)
class _Sent:
    """A batch that was sent, or is being sent."""

    sequence: int
    end: int
    batch: HeldBatch
    block: Block | None
    """The contents, until they are persisted."""
    bytes_end: int
    """All bytes sent up to here, this batch included."""


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
        self._held = Held(settings, clock=clock)
        self._base: int | None = None
        """The sequence number of offset 0: where the node said this producer had got to."""
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._unaccepted: deque[_Sent] = deque()
        self._unpersisted: deque[_Sent] = deque()
        self._undelivered: deque[_Sent] = deque()
        self._sent = 0
        """The offset up to which events were sent, on this connection or another."""
        self._urged = 0
        """The offset up to which the node was asked, on this connection, to persist them soon."""
        self._sent_bytes = 0
        self._persisted_bytes = 0
        self._persisted = 0
        self._moves = 0
        """How often the node was heard to have come further."""
        self._connected = False
        self._down = False
        """Whether it was logged that the node cannot be reached."""
        self._refused = False
        """Whether it was logged that the node's queue takes no more."""
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
            except TransportDown:
                if deadline is not None and left <= 0:
                    raise
                time.sleep(min(LOOK_SECONDS, max(0.0, left)))

    def finish(self) -> None:
        self._held.finish()

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """As for every queue; drained means here that the node has persisted everything."""
        self._held.finish()
        if drain:
            limit = self.settings.shutdown_timeout if timeout is None else timeout
            with self._news:
                safe = self._news.wait_for(self._is_safe, limit)
            if not safe:
                left = self._held.count_from(self._persisted)
                log.warning(
                    "queue %s: %d events are left after draining %g s", self.name, left, limit
                )
        self._stopping.set()
        with self._news:
            self._news.notify_all()
            connection = self._connection
        if connection is not None:
            self._let_go(connection)  # the sender may be blocked in it, at a node that is busy
        if threading.current_thread() is not self._sender:
            self._sender.join(LEAVE_SECONDS)
        self._held.entrust(self._persisted)
        self._held.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Drained if the block ends well: nobody who leaves it means to lose what is not sent."""
        self.close(drain=kind is None)

    def _is_safe(self) -> bool:
        return self._stopping.is_set() or not self._held.count_from(self._persisted)

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def closed(self) -> bool:
        """Whether the queue was closed."""
        return self._held.closed

    def stats(self) -> Stats:
        return self._held.stats()

    # ── sending ──────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            failures = 0 if self._serve() else failures + 1
            if failures:
                self._pause(retry_after(failures, self._jitter()))

    def _pause(self, seconds: float) -> None:
        self._stopping.wait(seconds)

    def _serve(self) -> bool:
        """Connect and send until the connection breaks; true if the node came any further."""
        before = self._moves
        try:
            self._use(self._transport.connect(self._producer_id))
        except TransportDown as error:
            self._complain("cannot reach its node", error, again=self._down)
            self._down = True
        except QueueClosed as error:
            self._complain("finds its node's queue closed", error, again=self._refused)
            self._refused = True
        except Never as error:
            self._fail(error)
        except Exception:
            log.exception("queue %s: its transport failed; trying again", self.name)
        return self._moves > before

    def _complain(self, what: str, error: Exception, *, again: bool) -> None:
        level = logging.INFO if again or self._stopping.is_set() else logging.WARNING
        log.log(level, "queue %s %s and tries again: %s", self.name, what, error)

    def _fail(self, error: Exception) -> None:
        log.error("queue %s failed, its node refuses it: %s", self.name, error)
        self._held.fail(error)
        self._stopping.set()
        with self._news:
            self._news.notify_all()

    def _use(self, connection: Connection) -> None:
        listener = threading.Thread(
            target=self._listen,
            args=(connection,),
            name=f"turnlane-listener-{self.name}",
            daemon=True,
        )
        try:
            self._greet(connection)
            listener.start()
            self._send_again(connection)
            while self._is_up():
                self._send_next(connection)
                self._pass_on_urgency(connection)
        finally:
            self._let_go(connection)
            if listener.ident is not None:
                listener.join()

    def _greet(self, connection: Connection) -> None:
        for mark in self._held.watermarks.values():
            mark.durability = connection.durability
        with self._lock:
            self._connected = True
            self._down = False
            self._connection = connection
            self._urged = 0
            if self._base is None:
                self._base = connection.resume_at
            safe = self._base + self._persisted
        if connection.resume_at < safe:
            lost = safe - connection.resume_at
            log.error("queue %s: its node lost %d events that it had persisted", self.name, lost)
        self._heard(Progress(connection.resume_at, 0, 0))

    def _let_go(self, connection: Connection) -> None:
        try:
            connection.close()
        except Exception as error:  # noqa: BLE001 - it is gone, one way or the other
            log.debug("queue %s: closing a connection: %r", self.name, error)

    def _is_up(self) -> bool:
        with self._lock:
            return self._may_use()

    def _may_use(self) -> bool:
        return self._connected and not self._stopping.is_set()

    def _send_again(self, connection: Connection) -> None:
        """Send what the node does not have, though it may once have said so."""
        with self._lock:
            lost = [sent for sent in self._unpersisted if sent.end > connection.resume_at]
        for sent in lost:
            self._send(connection, sent)

    def _send_next(self, connection: Connection) -> None:
        if self.settings.full_behavior is FullBehavior.DROP_OLDEST:
            # What is on its way can no longer be dropped, so it must not be all there is.
            with self._news:
                self._news.wait_for(lambda: not self._unaccepted or not self._may_use())
        try:
            batch = self._held.get(self.settings.batch_size, timeout=LOOK_SECONDS)
        except QueueEmpty:
            # Arrow's pool keeps what this thread has used, which may now be idle for long.
            pa.default_memory_pool().release_unused()
            return
        except QueueClosed:
            self._wait_for_end()
            return
        self._send(connection, self._note(batch))

    def _pass_on_urgency(self, connection: Connection) -> None:
        """A publisher waits here: let the node make haste, as a queue of our own would.

        Once it has all that is waited for, and once on every connection.
        """
        awaited = self._held.awaited(self._sent)
        if awaited > self._urged:
            connection.urge()
            self._urged = awaited

    def _note(self, batch: HeldBatch) -> _Sent:
        base = self._base or 0
        first, end = base + batch.place.first, base + batch.place.end
        block = batch.block
        with self._lock:
            self._sent = batch.place.end
            self._sent_bytes += batch.portion.size
            sent = _Sent(first, end, batch, block, self._sent_bytes)
            for waiting in (self._unaccepted, self._unpersisted, self._undelivered):
                waiting.append(sent)
        return sent

    def _send(self, connection: Connection, sent: _Sent) -> None:
        with self._news:
            self._news.wait_for(lambda: self._has_room(sent) or not self._may_use())
            block = sent.block if self._may_use() else None
        if block is not None:
            connection.send(sent.sequence, block)

    def _has_room(self, sent: _Sent) -> bool:
        """Whether this batch, too, can be kept for sending it again; a single one always is."""
        kept = sent.bytes_end - self._persisted_bytes
        return kept <= self.settings.resend_bytes or self._unpersisted[0] is sent

    def _wait_for_end(self) -> None:
        """Nothing more to send: stay for the news until told to stop, or the node is gone."""
        with self._news:
            self._news.wait_for(lambda: not self._may_use())

    # ── listening ────────────────────────────────────────────────────────────────────────────

    def _listen(self, connection: Connection) -> None:
        try:
            while self._is_up():
                progress = connection.progress(LOOK_SECONDS)
                if progress is not None:
                    self._heard(progress)
        except (TransportDown, QueueClosed) as error:
            log.debug("queue %s: %s", self.name, error)
        except Never as error:
            self._fail(error)
        except Exception:
            log.exception("queue %s: its transport failed; trying again", self.name)
        finally:
            with self._news:
                self._connected = False
                self._news.notify_all()
            self._let_go(connection)  # the sender may be blocked in it

    def _heard(self, progress: Progress) -> None:
        # Acceptance frees room only; a persisted or delivered event is accepted, whatever is said.
        safe = max(progress.persisted, progress.delivered)
        with self._news:
            base = self._base or 0
            accepted = _reached(self._unaccepted, max(progress.accepted, safe))
            persisted = _reached(self._unpersisted, safe)
            delivered = _reached(self._undelivered, progress.delivered)
            for sent in persisted:
                sent.block = None
                self._persisted_bytes = sent.bytes_end
            self._persisted = max(self._persisted, safe - base)
            if accepted or persisted or delivered:
                self._moves += 1
                self._refused = False
            self._news.notify_all()
        for sent in accepted:
            sent.batch.free()
        self._held.reached(self._persisted, progress.delivered - base)
        for sent in delivered:
            sent.batch.done()


def _reached(waiting: deque[_Sent], position: int) -> list[_Sent]:
    reached = []
    while waiting and waiting[0].end <= position:
        reached.append(waiting.popleft())
    return reached
