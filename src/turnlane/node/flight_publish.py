"""A publishing stream: blocks in, and on the same stream back how far they have come.

One thread reads blocks and publishes them, waiting for as long as the queue is full, so that Flight
holds the client back. Another, the *teller*, reports positions whenever they change; it never
waits for the first one, nor the first for it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pyarrow as pa

from turnlane.errors import NotAllowed, QueueClosed, QueueFull, TransportDown
from turnlane.events import Block
from turnlane.node.flight_commands import Numbered, Publish, parsed
from turnlane.node.routes import Route, Routes
from turnlane.queues.accepted import Gaps
from turnlane.queues.acks import Ticket
from turnlane.queues.contract import AckLevel
from turnlane.queues.disk import DiskQueue
from turnlane.queues.holding import HoldingQueue
from turnlane.queues.producer import hashed
from turnlane.queues.transport import Progress

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""How often the teller looks whether the client is still there while nothing happens."""


URGE_BYTES = 16 << 20
"""After so many bytes a stream asks for a sync, whatever the queue's interval: clients keep what is
not persisted to send it again, and have to wait once that is too much for them."""


class Peer(NamedTuple):
    """The client at the other end of a stream, however Flight names its parts."""

    chunks: Iterator[tuple[Block | None, pa.Buffer | None]]
    tell: Callable[[bytes], None]
    is_gone: Callable[[], bool]
    check: Callable[[], None] = lambda: None
    """Raises ``NotAllowed`` once the client may do no more of what it does."""


class PublishStream:
    """One client's publishing into one queue. ``run()`` is its whole life."""

    def __init__(
        self, instance: str, queue: HoldingQueue, command: Publish, routes: Routes, peer: Peer
    ) -> None:
        self._instance = instance
        self._queue = queue
        self._peer = peer
        self._name = command.producer
        self._level = command.ack or queue.usual_level
        self._route = Route(queue) if self._name is None else routes.of(queue, self._name)
        # A client may drop events and leave their numbers out, for as long as it lives.
        self._producer = queue.producer(producer_id=self._name, gaps=Gaps.FORGET)
        patience = queue.settings.full_timeout
        self._patience = None if patience is None else max(patience, LOOK_SECONDS)
        """How long to stand in line at a time: to be refused at once would be to ask for ever."""
        self._next = 0
        """The number of the event that comes next."""
        self._highest = 0
        """The highest number that was reported as accepted."""
        self._late_end = 0
        """The offset after the last event whose number is lower than one reported before."""
        self._unsynced = 0
        self._ticket: Ticket | None = None
        self._told: Progress | None = None
        self._news = threading.Condition()
        self._is_news = True
        self._looked = time.monotonic()
        self._over = False
        self._why = ""

    def run(self) -> None:
        """Serve the client until it has no more, or is gone. Raises what ended it early."""
        self._take_over()
        teller = threading.Thread(target=self._tell_all, name="turnlane-teller", daemon=True)
        marks = self._queue.watermarks.values()
        with self._queue.lock:
            for mark in marks:
                mark.watch(self._moved)
        try:
            self._greet()
            teller.start()
            for block, metadata in self._peer.chunks:
                self._take(block, metadata)
            self._await_level()
        finally:
            with self._queue.lock:
                for mark in marks:
                    mark.unwatch(self._moved)
                self._forget_ticket()
            self._end("")
            if teller.ident is not None:
                teller.join()
            self._hand_over()

    def leave(self, why: str) -> None:
        """Have the stream end soon, whatever it is doing, unless it waits for its client."""
        self._end(why)
        self._producer.close()
        with self._queue.lock:
            line = self._queue.gate.line
            for waiter in [each for each in line if _publisher_of(each) is self._producer]:
                self._queue.gate.leave(waiter)
                waiter.refuse()

    # ── one stream at a time ─────────────────────────────────────────────────────────────────────

    def _take_over(self) -> None:
        """End earlier streams of this producer: they carry numbers that this one gives anew."""
        route = self._route
        while True:
            leave = route.leave
            if leave is not None:
                leave()
            with route.turn:
                if route.leave in (leave, None):
                    route.leave = self._superseded
                    self._resume()
                    return

    def _resume(self) -> None:
        with self._queue.lock:
            if self._name is not None:
                self._next = self._queue.next_sequence(hashed(self._name))
        self._highest = self._next
        self._route.reached(self._next)

    def _superseded(self) -> None:
        self.leave("a newer stream of this producer has taken over")

    def _hand_over(self) -> None:
        with self._route.turn:
            if self._route.leave == self._superseded:
                self._route.leave = None

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def _take(self, block: Block | None, metadata: pa.Buffer | None) -> None:
        about = parsed(Numbered, metadata)
        number = about.sequence
        if number is not None and self._name is None:
            raise ValueError("a sequence needs a producer: name one in the command")
        if number is not None:
            self._next = number
        if block is not None and block.num_rows:
            self._publish(block)
        if about.urge:
            self._urge()

    def _publish(self, block: Block) -> None:
        size = block.nbytes
        while block.num_rows:
            with self._route.turn:
                self._check()
                done = self._publish_some(block)
                self._next += done
                self._highest = max(self._highest, self._next)
                self._route.reached(self._next)
            self._changed()
            block = block.slice(done)
        self._unsynced += size
        if self._unsynced >= URGE_BYTES:
            self._urge()

    def _urge(self) -> None:
        """Have the queue sync all that it has by now, as for a publisher that waits."""
        self._unsynced = 0
        if not isinstance(self._queue, DiskQueue):
            return  # no other kind persists by itself
        with self._queue.lock:
            self._forget_ticket()
            self._ticket = self._queue.hurry(AckLevel.PERSISTED, self._queue.end)

    def _forget_ticket(self) -> None:
        """Under the queue's lock."""
        if self._ticket is not None:
            self._queue.watermarks[AckLevel.PERSISTED].withdraw(self._ticket)
            self._ticket = None

    def _publish_some(self, block: Block) -> int:
        """Publish the block, or what goes in before the queue's own patience is over."""
        number = None if self._name is None else self._next
        try:
            published = self._producer.publish_block(block, sequence=number, timeout=self._patience)
        except QueueFull as error:
            if error.accepted:
                self._note_late()
            return error.accepted
        except QueueClosed:
            self._check()
            raise
        if published.accepted:
            self._note_late()
        if published.accepted + published.dropped + published.repeated < block.num_rows:
            self._check()
        return block.num_rows

    def _note_late(self) -> None:
        if self._next < self._highest:
            self._late_end = self._producer.end

    def _check(self) -> None:
        if self._over:
            raise TransportDown(self._why or "the stream is at an end")

    # ── back ─────────────────────────────────────────────────────────────────────────────────────

    def _greet(self) -> None:
        first = {
            "instance": self._instance,
            "resume_at": self._next,
            "durability": self._queue.durability,
        }
        self._peer.tell(json.dumps(first).encode())

    def _moved(self, position: int) -> None:
        """A watermark of the queue has moved. Under the queue's lock."""
        if self._route.has_news(position):
            self._changed()

    def _changed(self) -> None:
        with self._news:
            self._is_news = True
            self._news.notify_all()

    def _end(self, why: str) -> None:
        with self._news:
            self._why = self._why or why
            self._over = True
            self._news.notify_all()

    def _tell_all(self) -> None:
        try:
            while self._await_news():
                self._tell()
            if self._why:
                self._peer.tell(json.dumps({"ended": self._why}).encode())
        except Exception as error:  # noqa: BLE001 - whatever Flight raises: the client is gone
            log.debug("queue %s: a client is gone: %r", self._queue.name, error)
            self.leave("the client is gone")

    def _await_news(self) -> bool:
        """Wait until there may be something to tell; false once the stream is over."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._is_news or self._over, LOOK_SECONDS)
                is_news, self._is_news = self._is_news, False
            if time.monotonic() >= self._looked + LOOK_SECONDS:
                self._look()
            if is_news or self._over:
                return not self._over

    def _look(self) -> None:
        """Leave if there is no more point in the stream, or no more right to it."""
        self._looked = time.monotonic()
        try:
            self._peer.check()
        except NotAllowed as error:
            self.leave(str(error))
        if self._peer.is_gone():
            self.leave("the client is gone")
        elif self._queue.closed:
            self.leave(f"queue {self._queue.name!r} was closed")

    def _tell(self) -> None:
        progress = self._route.progress()
        if progress != self._told:
            self._peer.tell(json.dumps(progress._asdict()).encode())
            with self._news:
                self._told = progress
                self._news.notify_all()

    def _await_level(self) -> None:
        """The client has no more: stay until all of it is where the client wants it."""
        index = list(AckLevel).index(self._level)
        if self._level is AckLevel.PERSISTED:
            self._urge()
        with self._news:
            self._news.wait_for(
                lambda: self._over or (self._told is not None and self._told[index] >= self._next)
            )
        # What came late lies behind the offsets that the reports go by.
        while self._late_end and self._level is not AckLevel.ACCEPTED and not self._over:
            if self._queue.reaches(self._level, self._late_end, LOOK_SECONDS):
                break
        if not self._peer.is_gone():
            self._check()


def _publisher_of(waiter: object) -> object:
    return getattr(getattr(waiter, "entry", None), "producer", None)
