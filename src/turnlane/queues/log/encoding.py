"""From blocks to frames: which columns, which message, compressed or not.

Kept apart from the log so that nothing here can change what is on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from turnlane.events import join
from turnlane.queues.log.columns import EMPTY, Fitting
from turnlane.queues.log.compression import Compression
from turnlane.queues.log.frames import Data, FrameKind, encode, pack_stamps
from turnlane.queues.log.messages import Messages
from turnlane.queues.log.position import Stamp

_MEASURE_BYTES = 16 << 20
"""Written without a sync, this much is one measurement of the disk's speed."""


class Planned(NamedTuple):
    """A block that is to be written, with the schema that its chunk must have."""

    first: int
    block: pa.RecordBatch
    schema: pa.Schema
    stamps: Sequence[Stamp]
    is_last: bool


class Group:
    """Frames that go into one chunk with one write."""

    def __init__(self) -> None:
        self.buffers: list[Data] = []
        self.size = 0
        self.starts: list[tuple[int, int]] = []
        """Each frame's first offset, and its byte counted from the group's beginning."""
        self.end = 0
        self.at = 0
        """The byte of the chunk that it is written at."""
        self.seconds = 0.0
        """How long writing it took."""

    def add(self, frame: list[Data], first: int, count: int) -> None:
        """Add a frame behind the others."""
        self.starts.append((first, self.size))
        self.buffers += frame
        self.size += sum(len(piece) for piece in frame)
        self.end = first + count


class Encoder:
    """Makes frames. For the log's writer thread."""

    def __init__(self, compression: Compression) -> None:
        self._compression = compression
        self._fitting = Fitting()
        self._messages = Messages(EMPTY)
        self._unmeasured = (0, 0.0)

    def plan(
        self,
        schema: pa.Schema,
        first: int,
        frames: Sequence[Sequence[pa.RecordBatch]],
        stamps: Sequence[Stamp],
        *,
        end: int,
    ) -> Iterator[Planned]:
        """What of the frames lies at or after ``end``, joined and fitted to ``schema`` as it grows.

        Joining copies, but outside Python's lock, and leaves the bytes in the processor's cache for
        the checksum and the write: that is faster than to write many small pieces uncopied. One
        by one: joined blocks use the memory of those before, fresh memory would cost more than
        the joining. The stamps go with the last frame. Raises ``SchemaMismatch``.
        """
        for number, blocks in enumerate(frames, 1):
            rows = sum(block.num_rows for block in blocks)
            if rows and first >= end:
                schema, fitted = self._fitting.fit(schema, join(blocks))
                last = number == len(frames)
                yield Planned(first, fitted, schema, stamps if last else (), last)
            first += rows

    def frame(self, planned: Planned) -> list[Data]:
        """The frame, as buffers that share the block's memory unless it is compressed."""
        if self._messages.schema is not planned.schema:
            self._messages = Messages(planned.schema)
        payload = self._messages.message(planned.block)
        if planned.stamps:
            payload.insert(0, pack_stamps(planned.stamps))
        packed = self._compression.pack(payload)
        return encode(
            FrameKind.EVENTS,
            planned.first,
            planned.block.num_rows,
            payload if packed is None else [packed],
            snappy=packed is not None,
            stamped=bool(planned.stamps),
        )

    def wrote(self, size: int, seconds: float, *, synced: bool = False) -> None:
        """Learn how long a write or sync took, to judge whether compressing pays."""
        size, seconds = self._unmeasured[0] + size, self._unmeasured[1] + seconds
        if synced or size >= _MEASURE_BYTES:
            self._compression.wrote(size, seconds)
            size, seconds = 0, 0.0
        self._unmeasured = (size, seconds)
