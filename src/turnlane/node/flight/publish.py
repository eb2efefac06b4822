"""A publishing stream: blocks in, and on the same stream back how far they have come.

One thread reads blocks and publishes them, waiting for as long as the queue is full, so that Flight
holds the client back. Another, the *teller*, reports positions whenever they change; it never
waits for the first one, nor the first for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import pyarrow as pa
from pyarrow import flight

from turnlane.errors import EventTooLarge, NotAllowed, QueueClosed, QueueFull, TransportDown
from turnlane.events import Block
from turnlane.node.flight.commands import Numbered, Publish, parsed
from turnlane.queues.acks import AckWaiter
from turnlane.queues.api import AckLevel, Progress
from turnlane.queues.buffered import BufferedQueue
from turnlane.storage.producer_sequences import Gaps

# ── flight_blocks ──
# Blocks as they come over Flight, none of them too large or damaged.

Chunks = Iterator[tuple[Block | None, pa.Buffer | None]]

EVENT_BYTES: Final = 64
"""What an event costs beside its contents, about: columns that a client left out are filled in,
and those it sends may take no room at all, as a column of type null does."""


def chunks_of(reader: flight.MetadataRecordBatchReader, most: int) -> Chunks:
    """What a client sends until it has no more; each block within ``most`` bytes.

    Arrow has unpacked a block by the time that it can be judged here.
    """
    while True:
        try:
            with _readable():
                chunk = reader.read_chunk()
        except StopIteration:
            return
        if chunk.data is not None:
            _check_size(chunk.data, most)
            # Offsets that point elsewhere, text that is none: nobody has looked at it so far, and
            # whoever reads it later must not fall over it.
            chunk.data.validate(full=True)
        yield chunk.data, chunk.app_metadata


def columns_of(reader: flight.MetadataRecordBatchReader) -> pa.Schema:
    """The schema of all blocks that a client will send."""
    with _readable():
        return reader.schema


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """What Arrow cannot make sense of is the client's fault, though to Arrow it is one of I/O."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"what was sent is not Arrow data: {error}") from None


def _check_size(block: Block, most: int) -> None:
    # Not nbytes, which follows offsets that nobody has checked so far.
    size = block.get_total_buffer_size() + EVENT_BYTES * block.num_rows
    if size > most:
        raise EventTooLarge(
            f"a block of {block.num_rows} events takes {size} bytes, {most} are allowed "
            "(max_block_bytes); send it in parts"
        )


# ── routes ──
# Routes: where the numbers of a producer lie in a queue, so that its acks are in its own
# numbers.
#
# A queue knows how far its offsets are persisted and delivered; a producer counts its own
# events. A
# route remembers pairs of both, each of which says: all events below this number lie below that
# offset. So what it reports may come late, never early, whoever else publishes, and however
# often
# the producer sends something again.

MAX_ROUTES = 10_000
"""Routes without a stream that are remembered; a forgotten one costs a late ack, no more."""
MAX_PAIRS = 4096
NEVER = 1 << 63


class Route:
    """One producer's way into one queue. Safe to use from any thread."""

    def __init__(self, queue: BufferedQueue) -> None:
        self.queue = queue
        self.turn = threading.Lock()
        """Held by whoever publishes; a new stream waits here for the one before."""
        self.leave: Callable[[], None] | None = None
        """Has the present stream end."""
        self._lock = threading.Lock()
        self._numbers = [0]
        self._offsets = [0]
        self._wake_at = NEVER

    def reached(self, number: int) -> None:
        """All below ``number`` is in the queue, and so below its end at this moment."""
        with self._lock:
            if number > self._numbers[-1]:
                self._numbers.append(number)
                self._offsets.append(self.queue.end)
                if len(self._numbers) > MAX_PAIRS:
                    self._thin_out()

    def progress(self) -> Progress:
        """How far the producer's events have come."""
        positions = None
        # Until nothing moves between a look at the positions and has_news() knowing of it.
        while positions != (positions := self.queue.ack_positions()):
            persisted, delivered = positions
            with self._lock:
                progress = Progress(
                    self._numbers[-1], self._below(persisted), self._below(delivered)
                )
                self._forget_below(progress.delivered)
                self._wake_at = min(self._next_above(persisted), self._next_above(delivered))
        return progress

    def has_news(self, position: int) -> bool:
        """Whether a watermark's move to ``position`` may matter. Under the queue's lock."""
        return position >= self._wake_at

    def _below(self, offset: int) -> int:
        return self._numbers[bisect_right(self._offsets, offset) - 1]

    def _next_above(self, offset: int) -> int:
        index = bisect_right(self._offsets, offset)
        return self._offsets[index] if index < len(self._offsets) else NEVER

    def _forget_below(self, delivered: int) -> None:
        """Only the last pair of what is delivered is still needed."""
        passed = self._numbers.index(delivered)
        del self._numbers[:passed], self._offsets[:passed]

    def _thin_out(self) -> None:
        """Drop every other pair of the older half: their acks come with the next pair's."""
        half = len(self._numbers) // 2
        for pairs in (self._numbers, self._offsets):
            del pairs[1:half:2]


class Routes:
    """The routes of all producers of a node that have told their names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routes: dict[tuple[str, str], Route] = {}

    def of(self, queue: BufferedQueue, producer: str) -> Route:
        """The route of a producer into a queue."""
        key = queue.name, producer
        with self._lock:
            route = self._routes.pop(key, None)
            if route is None or route.queue is not queue:  # dropped, and made anew
                route = Route(queue)
            self._routes[key] = route
            if len(self._routes) > MAX_ROUTES:
                self._forget_oldest()
            return route

    def _forget_oldest(self) -> None:
        for key, route in self._routes.items():
            if route.leave is None:
                del self._routes[key]
                return


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
        self, instance: str, queue: BufferedQueue, command: Publish, routes: Routes, peer: Peer
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
        self._waiter: AckWaiter | None = None
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
        self._queue.observe_acks(self._moved)
        try:
            self._greet()
            teller.start()
            for block, metadata in self._peer.chunks:
                self._take(block, metadata)
            self._await_level()
        finally:
            self._queue.unobserve_acks(self._moved)
            self._queue.cancel_urge(self._waiter)
            self._end("")
            if teller.ident is not None:
                teller.join()
            self._hand_over()

    def leave(self, why: str) -> None:
        """Have the stream end soon, whatever it is doing, unless it waits for its client."""
        self._end(why)
        self._producer.abort()

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
        if self._name is not None:
            self._next = self._queue.known_sequence(self._name) or 0
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
        if self._queue.usual_level is not AckLevel.PERSISTED:
            return  # no other kind persists by itself
        self._queue.cancel_urge(self._waiter)
        self._waiter = self._queue.urge(AckLevel.PERSISTED, self._queue.end)

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
            if self._queue.wait_level(self._level, self._late_end, LOOK_SECONDS):
                break
        if not self._peer.is_gone():
            self._check()
