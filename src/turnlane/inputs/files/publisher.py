"""From lines to events in the queue: what a block looks like, and how it is numbered."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from turnlane.errors import QueueFull
from turnlane.events import BASE_SCHEMA, Block
from turnlane.formats.lines import repeated
from turnlane.inputs.files.state import Entry, FilesSettings, Mark
from turnlane.inputs.files.tail import Chunk, Tail
from turnlane.queues.api import Ack, AckLevel, FullBehavior, Published
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.producer import BufferedProducer
from turnlane.queues.settings import Kind
from turnlane.storage.producer_sequences import GapPolicy

PATIENCE = 0.5
"""Seconds to stand in line at a full queue before looking around."""

SHARE = 4
"""A block takes at most this part of the queue: larger ones would wait for it to be empty."""

ROW_BYTES = 64
"""More than a row costs beside its value and its source."""


class LinePublisher:
    """Publishes chunks of files into one queue."""

    def __init__(
        self, queue: BufferedQueue, settings: FilesSettings, on_progress: Callable[[Tail], None]
    ) -> None:
        self.queue = queue
        self._settings = settings
        self._on_progress = on_progress
        self.durable = queue.settings.kind is Kind.DISK
        # On a disk queue a position is saved with the lines; the positions file only follows.
        self._level = AckLevel.PERSISTED if self.durable else settings.ack
        self._drops_are_losses = queue.settings.full_behavior is FullBehavior.BLOCK
        self._producers: dict[Tail, tuple[str, BufferedProducer]] = {}
        self._max_rows = max(1, queue.max_events // SHARE)
        self._max_bytes = max(1, queue.max_bytes // SHARE)

    def longest(self, source: str) -> int:
        """The longest line that an event can hold."""
        largest = self.queue.max_event_bytes
        room = largest - len(source.encode()) - ROW_BYTES
        return max(1, min(self._settings.max_line_bytes, room))

    def position(self, entry: Entry) -> int:
        """Where to continue: the queue's answer, or the saved position if the queue has none."""
        known = self.queue.known_sequence(entry.id)
        if known is None:
            return entry.offset
        return known if self.durable else max(entry.offset, known)

    def publish(self, tail: Tail, chunk: Chunk, go_on: Callable[[], bool]) -> int:
        """Publish a chunk, however long the queue is full; returns how many of its lines went in.

        ``go_on`` is asked now and then whether to wait any longer. Raises ``QueueClosed``.
        """
        block = self._block(tail, chunk)
        producer = self._producer(tail)
        first = 0
        while first < block.num_rows:
            piece = self._piece(block.slice(first, self._max_rows))
            end = first + piece.num_rows
            # The number that the queue keeps is the one after the last event: the byte after the
            # last line. A line has a byte at least, so its number is not below the one kept last.
            sequence = chunk.start + int(chunk.lines.ends[end - 1]) - piece.num_rows
            done = self._put(producer, piece, sequence, go_on)
            if done is None:
                break
            self._note(tail, chunk, end, done)
            first = end
        return first

    def _put(
        self, producer: BufferedProducer, piece: Block, sequence: int, go_on: Callable[[], bool]
    ) -> Published | None:
        while True:
            try:
                return producer.publish_block(piece, sequence=sequence, timeout=PATIENCE)
            except QueueFull:
                if not go_on():
                    return None

    def _note(self, tail: Tail, chunk: Chunk, lines: int, done: Published) -> None:
        tail.advance(chunk, lines)
        end = done.first + done.accepted if done.accepted else None
        tail.progress.published(end, tail.position, Mark.of(tail.before))
        if tail.progress.settled:
            self._on_progress(tail)

    def _piece(self, block: Block) -> Block:
        """As much of the block as the queue takes at once: it must not cut it, nor number it."""
        while block.num_rows > 1 and block.nbytes > self._max_bytes:
            block = block.slice(0, block.num_rows // 2)
        return block

    def _block(self, tail: Tail, chunk: Chunk) -> Block:
        rows = len(chunk.lines.ends)
        stamp = BASE_SCHEMA.field("timestamp").type
        arrays = [
            chunk.lines.values,
            pa.array(np.full(rows, time.time_ns() // 1000)).view(stamp),
            repeated(tail.source, rows),
        ]
        names = ["value", "timestamp", "source"]
        if self._settings.offsets:
            begins = np.concatenate(([0], chunk.lines.ends[:-1])) + chunk.start
            arrays.append(pa.array(begins, pa.int64()))
            names.append("file_offset")
        return pa.RecordBatch.from_arrays(arrays, names=names)

    def _producer(self, tail: Tail) -> BufferedProducer:
        assert tail.id is not None
        known, producer = self._producers.get(tail, ("", None))
        if producer is None or known != tail.id:
            progress = tail.progress

            def on_ack(ack: Ack) -> None:
                progress.acked(ack, drops_are_losses=self._drops_are_losses)
                self._on_progress(tail)

            producer = self.queue.producer(
                ack=self._level,
                on_ack=on_ack,
                flow=self._settings.flow,
                producer_id=tail.id,
                gaps=GapPolicy.SKIP,
            )
            self._producers[tail] = (tail.id, producer)
        return producer

    def flush(self, tail: Tail, timeout: float) -> None:
        """Wait until all that was published up to a tail's last line has reached its level."""
        producer = self._producers.get(tail, ("", None))[1]
        if producer is not None:
            producer.flush(timeout)

    def forget(self, tail: Tail) -> None:
        """Nothing more will come from this file."""
        self._producers.pop(tail, None)
