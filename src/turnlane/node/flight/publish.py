"""Publishing streams: a client sends blocks, and the node reports progress on the same stream.

One thread reads blocks and publishes them. It waits while the queue is full, and Flight then slows
the client down. Another thread, the *reporter*, sends the progress whenever it changes. The two
threads never wait for each other.

A queue knows how far its offsets are persisted and delivered; a producer counts its own events. A
:class:`SequenceMap` remembers pairs of both. Each pair says that all events below a sequence number
are below an offset of the queue. So an ack can come late but never early, even if others publish to
the queue or the producer sends events again.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import pyarrow as pa
from pyarrow import flight

from turnlane.errors import EventTooLarge, NotAllowed, QueueClosed, QueueFull, TransportDown
from turnlane.events import Block
from turnlane.logs import get_logger
from turnlane.node.flight.messages import BlockMetadata, Chunks, PublishCommand, parse_command
from turnlane.queues.acks import AckWaiter
from turnlane.queues.api import AckLevel, NodeProgress
from turnlane.queues.buffered import BufferedQueue
from turnlane.runtime import start_thread
from turnlane.storage.producer_sequences import GapPolicy

log = get_logger(__name__)

POLL_SECONDS = 0.5
"""How often the reporter checks whether the client is still there."""
MAX_SEQUENCE_MAPS = 10_000
"""How many maps without a stream are remembered. A forgotten map only causes late acks."""
MAX_PAIRS = 4096
NO_OFFSET = 1 << 63
SYNC_REQUEST_BYTES = 16 << 20
"""After this many bytes a stream requests a sync, regardless of the queue's interval: clients keep
events until they are persisted, and have to wait when they keep too many."""

EVENT_BYTES: Final = 64
"""The approximate cost of an event besides its content. Missing columns are filled in, and columns
of type null have no size of their own."""


def read_chunks(reader: flight.MetadataRecordBatchReader, most: int) -> Chunks:
    """Yield the blocks and metadata of a client; each block has at most ``most`` bytes.

    The size is checked after Arrow has unpacked the block.
    """
    while True:
        try:
            with _convert_arrow_errors():
                chunk = reader.read_chunk()
        except StopIteration:
            return
        if chunk.data is not None:
            _check_size(chunk.data, most)
            # Arrow has not checked the content. Invalid offsets or invalid text would crash the
            # process that reads the block later.
            chunk.data.validate(full=True)
        yield chunk.data, chunk.app_metadata


def read_schema(reader: flight.MetadataRecordBatchReader) -> pa.Schema:
    """Return the schema of the blocks that a client will send."""
    with _convert_arrow_errors():
        return reader.schema


@contextlib.contextmanager
def _convert_arrow_errors() -> Iterator[None]:
    """Convert the I/O errors of invalid Arrow data, an error of the client, to ``ValueError``."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"the data of the stream is not valid Arrow data: {error}") from None


def _check_size(block: Block, most: int) -> None:
    # Not nbytes: it follows offsets that are not checked yet.
    size = block.get_total_buffer_size() + EVENT_BYTES * block.num_rows
    if size > most:
        raise EventTooLarge(
            f"a block of {block.num_rows} events takes {size} bytes, {most} are allowed "
            "(max_block_bytes); send it in parts"
        )


class SequenceMap:
    """Maps offsets of a queue to the sequence numbers of one producer. Thread-safe."""

    def __init__(self, queue: BufferedQueue) -> None:
        self.queue = queue
        self.publish_lock = threading.Lock()
        """Held while a stream publishes; a new stream waits here for the stream before."""
        self.leave: Callable[[], None] | None = None
        """Ends the present stream; ``None`` without a stream."""
        self._lock = threading.Lock()
        self._numbers = [0]
        self._offsets = [0]
        self._wake_at = NO_OFFSET

    def record(self, number: int) -> None:
        """Record that all events below ``number`` are in the queue, below its present end."""
        with self._lock:
            if number > self._numbers[-1]:
                self._numbers.append(number)
                self._offsets.append(self.queue.end)
                if len(self._numbers) > MAX_PAIRS:
                    # Drop every other pair of the older half: their acks come with the next pair.
                    half = len(self._numbers) // 2
                    del self._numbers[1:half:2], self._offsets[1:half:2]

    def get_progress(self) -> NodeProgress:
        """Return the progress in sequence numbers of the producer."""
        positions = None
        # Repeated until no watermark moves between reading the positions and setting _wake_at.
        while positions != (positions := self.queue.get_ack_positions()):
            persisted, delivered = positions
            with self._lock:
                progress = NodeProgress(
                    self._numbers[-1],
                    self._get_number_below(persisted),
                    self._get_number_below(delivered),
                )
                # Forget the pairs of delivered events except the last, which is still needed.
                passed = self._numbers.index(progress.delivered)
                del self._numbers[:passed], self._offsets[:passed]
                self._wake_at = min(
                    self._find_next_offset(persisted), self._find_next_offset(delivered)
                )
        return progress

    def has_progress(self, position: int) -> bool:
        """Whether a watermark at ``position`` may change the progress. Needs the queue's lock."""
        return position >= self._wake_at

    def _get_number_below(self, offset: int) -> int:
        return self._numbers[bisect_right(self._offsets, offset) - 1]

    def _find_next_offset(self, offset: int) -> int:
        index = bisect_right(self._offsets, offset)
        return self._offsets[index] if index < len(self._offsets) else NO_OFFSET


class SequenceMaps:
    """The sequence maps of all named producers of a node."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: dict[tuple[str, str], SequenceMap] = {}

    def get(self, queue: BufferedQueue, producer: str) -> SequenceMap:
        """Return the map of a producer and a queue."""
        key = queue.name, producer
        with self._lock:
            found = self._maps.pop(key, None)
            if found is None or found.queue is not queue:  # dropped and created again
                found = SequenceMap(queue)
            self._maps[key] = found
            if len(self._maps) > MAX_SEQUENCE_MAPS:
                oldest = next((key for key, map_ in self._maps.items() if not map_.leave), None)
                if oldest is not None:
                    del self._maps[oldest]
            return found


class Peer(NamedTuple):
    """The client of a stream, independent of the kind of Flight call."""

    chunks: Chunks
    send: Callable[[bytes], None]
    is_gone: Callable[[], bool]
    check: Callable[[], None] = lambda: None
    """Raises ``NotAllowed`` once the client has lost its right."""


class PublishStream:
    """One stream of a client that publishes to a queue; ``run()`` serves it until it ends."""

    def __init__(
        self,
        instance: str,
        queue: BufferedQueue,
        command: PublishCommand,
        maps: SequenceMaps,
        peer: Peer,
    ) -> None:
        self._instance = instance
        self._queue = queue
        self._peer = peer
        self._name = command.producer
        self._level = command.ack or queue.usual_level
        self._sequences = SequenceMap(queue) if self._name is None else maps.get(queue, self._name)
        # A client may drop events and skip their numbers at any time.
        self._producer = queue.producer(producer_id=self._name, gaps=GapPolicy.FORGET)
        timeout = queue.settings.full_timeout
        self._full_timeout = None if timeout is None else max(timeout, POLL_SECONDS)
        """How long one attempt waits for room. With 0 the stream would retry without a pause."""
        self._next = 0
        """The sequence number of the next event."""
        self._highest = 0
        """The highest sequence number that was reported as accepted."""
        self._late_end = 0
        """The offset after the last event whose number is below an earlier reported one."""
        self._unsynced = 0
        self._waiter: AckWaiter | None = None
        self._reported: NodeProgress | None = None
        self._news = threading.Condition()
        self._is_news = True
        self._looked = time.monotonic()
        self._over = False
        self._why = ""

    def run(self) -> None:
        """Serve the client until it has sent everything. Raises the error that ends it early."""
        self._take_over()
        reporter: threading.Thread | None = None
        self._queue.observe_acks(self._on_watermark)
        try:
            durability = self._queue.durability
            self._send(instance=self._instance, resume_at=self._next, durability=durability)
            reporter = start_thread("turnlane-reporter", self._report_all)
            for block, metadata in self._peer.chunks:
                self._take(block, metadata)
            self._wait_for_level()
        finally:
            self._queue.unobserve_acks(self._on_watermark)
            self._queue.cancel_urge(self._waiter)
            self._end("")
            if reporter is not None:
                reporter.join()
            with self._sequences.publish_lock:
                if self._sequences.leave == self._leave_to_newer:
                    self._sequences.leave = None

    def leave(self, why: str) -> None:
        """Make the stream end soon, also if it waits for room in the queue.

        A stream that waits for data of its client ends when the next data arrives.
        """
        self._end(why)
        self._producer.abort()

    # ── one stream at a time ──────────────────────────────────────────────────────────────────────

    def _take_over(self) -> None:
        """End the earlier streams of this producer: this stream repeats their numbers."""
        sequences = self._sequences
        while True:
            leave = sequences.leave
            if leave is not None:
                leave()
            with sequences.publish_lock:
                if sequences.leave in (leave, None):
                    sequences.leave = self._leave_to_newer
                    if self._name is not None:
                        self._next = self._queue.get_known_sequence(self._name) or 0
                    self._highest = self._next
                    sequences.record(self._next)
                    return

    def _leave_to_newer(self) -> None:
        self.leave("a newer stream of this producer has taken over")

    # ── publishing ────────────────────────────────────────────────────────────────────────────────

    def _take(self, block: Block | None, metadata: pa.Buffer | None) -> None:
        about = parse_command(BlockMetadata, metadata)
        number = about.sequence
        if number is not None and self._name is None:
            raise ValueError("a block with a sequence needs a producer: name one in the command")
        if number is not None:
            self._next = number
        if block is not None and block.num_rows:
            self._publish(block)
        if about.urge:
            self._urge()

    def _publish(self, block: Block) -> None:
        size = block.nbytes
        while block.num_rows:
            with self._sequences.publish_lock:
                self._check()
                done = self._publish_some(block)
                self._next += done
                self._highest = max(self._highest, self._next)
                self._sequences.record(self._next)
            self._notify_reporter()
            block = block.slice(done)
        self._unsynced += size
        if self._unsynced >= SYNC_REQUEST_BYTES:
            self._urge()

    def _urge(self) -> None:
        """Request a sync of all present events, as for a publisher that waits for it."""
        self._unsynced = 0
        if self._queue.usual_level is not AckLevel.PERSISTED:
            return  # other kinds do not persist
        self._queue.cancel_urge(self._waiter)
        self._waiter = self._queue.urge(AckLevel.PERSISTED, self._queue.end)

    def _publish_some(self, block: Block) -> int:
        """Publish a block; return how many events the queue took within its full timeout."""
        number = None if self._name is None else self._next
        try:
            published = self._producer.publish_block(
                block, sequence=number, timeout=self._full_timeout
            )
            accepted, done = published.accepted, block.num_rows
            if accepted + published.dropped + published.repeated < block.num_rows:
                self._check()
        except QueueFull as error:
            accepted = done = error.accepted
        except QueueClosed:
            self._check()
            raise
        if accepted and self._next < self._highest:
            self._late_end = self._producer.end
        return done

    def _check(self) -> None:
        if self._over:
            raise TransportDown(self._why or "the stream has ended")

    # ── reporting ─────────────────────────────────────────────────────────────────────────────────

    def _send(self, **message: object) -> None:
        self._peer.send(json.dumps(message).encode())

    def _on_watermark(self, position: int) -> None:
        """Wake the reporter after a watermark has moved. The caller holds the queue's lock."""
        if self._sequences.has_progress(position):
            self._notify_reporter()

    def _notify_reporter(self) -> None:
        with self._news:
            self._is_news = True
            self._news.notify_all()

    def _end(self, why: str) -> None:
        with self._news:
            self._why = self._why or why
            self._over = True
            self._news.notify_all()

    def _report_all(self) -> None:
        try:
            while self._wait_for_news():
                self._report()
            if self._why:
                self._send(ended=self._why)
        except Exception as error:  # noqa: BLE001 - any error of Flight: the client has left
            log.debug("flight.publisher_left", queue=self._queue.name, error=error)
            self.leave("the client has left")

    def _wait_for_news(self) -> bool:
        """Wait until there may be progress to report; false once the stream has ended."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._is_news or self._over, POLL_SECONDS)
                is_news, self._is_news = self._is_news, False
            if time.monotonic() >= self._looked + POLL_SECONDS:
                self._check_client()
            if is_news or self._over:
                return not self._over

    def _check_client(self) -> None:
        """End the stream if the client has left or lost its right, or the queue is closed."""
        self._looked = time.monotonic()
        try:
            self._peer.check()
        except NotAllowed as error:
            self.leave(str(error))
        if self._peer.is_gone():
            self.leave("the client has left")
        elif self._queue.closed:
            self.leave(f"queue {self._queue.name!r} was closed")

    def _report(self) -> None:
        progress = self._sequences.get_progress()
        if progress != self._reported:
            self._send(**progress._asdict())
            with self._news:
                self._reported = progress
                self._news.notify_all()

    def _wait_for_level(self) -> None:
        """Wait, at the end of the data, until all events have reached the requested level."""
        index = list(AckLevel).index(self._level)
        if self._level is AckLevel.PERSISTED:
            self._urge()
        with self._news:
            self._news.wait_for(
                lambda: (
                    self._over
                    or (self._reported is not None and self._reported[index] >= self._next)
                )
            )
        # Late events have higher offsets than the pairs of the sequence map.
        while self._late_end and self._level is not AckLevel.ACCEPTED and not self._over:
            if self._queue.wait_level(self._level, self._late_end, POLL_SECONDS):
                break
        if not self._peer.is_gone():
            self._check()
