"""From blocks to frames: which columns a frame stores, as which bytes, compressed or not.

Nothing here touches the disk. The parts, in the order of the data:

- ``ColumnFitter`` brings a block to the columns of its segment. A segment stores only columns that
  have had a value: a column of nulls costs bytes and time in every frame. Columns are only ever
  added, and a new column needs a new segment. ``BaseColumnRestorer`` gives readers the columns that
  were left out.
- ``MessageEncoder`` turns a block into an Arrow message without copying it.
- ``CompressionPolicy`` decides whether compressing a frame saves time.
- ``FrameEncoder`` puts these together. ``FrameGroup`` collects frames for one write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from io import IOBase
from time import perf_counter
from typing import Any, Literal, NamedTuple, cast, get_args

import pyarrow as pa

from turnlane.errors import ConfigError, SchemaMismatch
from turnlane.events import BASE_SCHEMA, join_blocks
from turnlane.storage.frames import (
    BufferLike,
    FrameKind,
    ProducerSequence,
    compress,
    encode_frame,
    encode_sequences,
)

EMPTY_SCHEMA: pa.Schema = pa.schema([])

_BASE_TYPES = {field.name: field.type for field in BASE_SCHEMA}

# ── columns ──────────────────────────────────────────────────────────────────────────────────────


class _BlockShape(NamedTuple):
    """The columns of a block, and how they fit a segment."""

    block: pa.Schema
    has_values: list[bool]
    segment: pa.Schema
    columns: list[int]
    """Where the segment's columns are in the block; -1 if the block does not have the column."""
    selects: bool
    """Whether selecting these columns is enough."""


class ColumnFitter:
    """Brings blocks to a segment's columns; fast while blocks have the shape of the one before."""

    def __init__(self) -> None:
        self._shape: _BlockShape | None = None

    def fit(self, schema: pa.Schema, block: pa.RecordBatch) -> tuple[pa.Schema, pa.RecordBatch]:
        """Return the schema with the block's new columns, and the block with exactly its columns.

        The schema is the same object if the block has no new column. Raises ``SchemaMismatch``.
        """
        shape = self._shape
        if not shape or shape.segment is not schema or not shape.block.equals(block.schema):
            block = decode_dictionaries(block)
        rows = block.num_rows
        has_values = [block.column(i).null_count < rows for i in range(block.num_columns)]
        if (
            not shape
            or shape.segment is not schema
            or shape.has_values != has_values
            or not shape.block.equals(block.schema)
        ):
            shape = self._shape = _find_shape(schema, block, has_values)
        if shape.selects:
            return shape.segment, block.select(shape.columns)
        arrays = [
            block.column(at) if at >= 0 else _create_nulls(kind, rows)
            for at, kind in zip(shape.columns, shape.segment.types, strict=True)
        ]
        return shape.segment, pa.RecordBatch.from_arrays(arrays, schema=shape.segment)


def _find_shape(schema: pa.Schema, block: pa.RecordBatch, has_values: list[bool]) -> _BlockShape:
    segment = extend_schema(schema, block)
    columns = _find_columns(block.schema, segment)
    selects = min(columns, default=0) >= 0 and block.select(columns).schema.equals(
        segment, check_metadata=True
    )
    return _BlockShape(block.schema, has_values, segment, columns, selects)


def decode_dictionaries(block: pa.RecordBatch) -> pa.RecordBatch:
    """Return the block with plain values: a frame stands alone and cannot refer to a dictionary."""
    for index, kind in enumerate(block.schema.types):
        if isinstance(kind, pa.DictionaryType):
            column = block.column(index).cast(kind.value_type)
            field = block.schema.field(index).with_type(kind.value_type)
            block = block.set_column(index, field, column)
    return block


def extend_schema(schema: pa.Schema, block: pa.RecordBatch) -> pa.Schema:
    """Return the schema plus the block's columns that have values; the same object if it has all.

    Raises ``SchemaMismatch`` if a column cannot be stored or has a different type.
    """
    rows = block.num_rows
    new: list[pa.Field[Any]] = []
    for index, field in enumerate(block.schema):
        if block.column(index).null_count == rows:
            continue
        at = schema.get_field_index(field.name)
        known = schema.field(at).type if at >= 0 else _BASE_TYPES.get(field.name)
        if known is not None and known != field.type:
            raise SchemaMismatch(f"column {field.name!r} is {known}, not {field.type}")
        if at < 0:
            if _has_dictionary(field.type):
                raise SchemaMismatch(f"column {field.name!r} has a dictionary inside {field.type}")
            new.append(field.with_nullable(True))  # noqa: FBT003  Arrow's own signature
    if len(set(block.schema.names)) < len(block.schema.names):
        raise SchemaMismatch(f"two columns have one name: {sorted(block.schema.names)}")
    return pa.schema([*schema, *new]) if new else schema


def _has_dictionary(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.DictionaryType):
        return True
    return any(_has_dictionary(kind.field(i).type) for i in range(kind.num_fields))


def _find_columns(given: pa.Schema, wanted: pa.Schema) -> list[int]:
    columns = []
    for field in wanted:
        at = given.get_field_index(field.name)
        # A column of a different type came this far only because all its values are null.
        columns.append(at if at >= 0 and given.field(at).type == field.type else -1)
    return columns


class BaseColumnRestorer:
    """Adds to the blocks of one segment the base columns that the segment does not store."""

    _MAX_LENGTHS = 16
    """For this many lengths of blocks, the columns of nulls are cached."""

    def __init__(self, stored: pa.Schema) -> None:
        extra = [field for field in stored if field.name not in _BASE_TYPES]
        base = [
            stored.field(field.name) if field.name in stored.names else field
            for field in BASE_SCHEMA
        ]
        self._schema = pa.schema([*base, *extra])
        self._columns = _find_columns(stored, self._schema)
        self._nulls: dict[int, dict[int, pa.Array[Any]]] = {}
        """By the rows of a block, then by the index of the column."""

    def restore(self, block: pa.RecordBatch) -> pa.RecordBatch:
        """Do the same as ``events.conform_block`` without creating nulls for every block."""
        nulls = self._get_nulls(block.num_rows)
        arrays = [nulls[i] if at < 0 else block.column(at) for i, at in enumerate(self._columns)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _get_nulls(self, rows: int) -> dict[int, pa.Array[Any]]:
        """Return the columns that are not stored. Frames repeat a few lengths."""
        known = self._nulls.get(rows)
        if known is None:
            if len(self._nulls) == self._MAX_LENGTHS:
                self._nulls.clear()
            columns = zip(enumerate(self._schema.types), self._columns, strict=True)
            known = {i: _NULLS.get(kind, rows) for (i, kind), at in columns if at < 0}
            self._nulls[rows] = known
        return known


class _NullCache:
    """Columns of nulls for all readers: creating them takes longer than reading a frame.

    Only for base columns: one value of a publisher's own type may take a megabyte. None is much
    longer than the longest frame. Safe to use from any thread: at worst two create the same.
    """

    _MIN_ROWS = 1 << 15

    def __init__(self) -> None:
        self._longest: dict[pa.DataType, pa.Array[Any]] = {}

    def get(self, kind: pa.DataType, rows: int) -> pa.Array[Any]:
        """Return a column of this type."""
        known = self._longest.get(kind)
        if known is None or len(known) < rows:
            known = self._longest[kind] = _create_nulls(kind, max(rows, self._MIN_ROWS))
        return known.slice(0, rows)


_NULLS = _NullCache()


def _create_nulls(kind: pa.DataType, rows: int) -> pa.Array[Any]:
    return cast("pa.Array[Any]", pa.nulls(rows, cast("Any", kind)))


# ── messages ─────────────────────────────────────────────────────────────────────────────────────
# batch.serialize() copies every byte into one buffer. Arrow's stream writer instead passes the
# batch's own buffers to its sink, with metadata before and padding between them: the same message,
# ready for a vectored write.


class _PieceCollector:
    """A file for Arrow that keeps the pieces written to it."""

    closed = False

    def __init__(self) -> None:
        self.pieces: list[BufferLike] = []

    def write(self, piece: BufferLike) -> int:
        self.pieces.append(piece)
        return len(piece)

    def flush(self) -> None:
        """Do nothing: no piece is held back."""

    def close(self) -> None:
        """Do nothing: no file is open."""


class MessageEncoder:
    """Turns blocks of one schema into Arrow messages. For one thread."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._sink = _PieceCollector()
        self._writer = pa.ipc.new_stream(
            pa.PythonFile(cast("IOBase", self._sink), mode="w"), schema
        )
        # Before the first batch Arrow writes the schema, which has a frame of its own in a segment.
        self._writer.write_batch(pa.RecordBatch.from_pylist([], schema=schema))
        self._sink.pieces = []

    def encode(self, block: pa.RecordBatch) -> list[BufferLike]:
        """Return the block as an encapsulated message, in pieces that share the block's memory."""
        self._writer.write_batch(block)
        pieces, self._sink.pieces = self._sink.pieces, []
        # The small pieces (metadata, padding) before a large one become one piece.
        joined: list[BufferLike] = []
        small = b""
        for piece in pieces:
            if isinstance(piece, bytes):
                small += piece
                continue
            if small:
                joined.append(small)
                small = b""
            joined.append(piece)
        return [*joined, small] if small else joined


# ── compression ──────────────────────────────────────────────────────────────────────────────────
# Compressing costs 1/C seconds per byte and saves the writing of the share 1 - r of it, at 1/W
# seconds per byte. On a fast disk, or for data that does not shrink, this is a loss; so the policy
# measures C, r and W. It is also a loss while the disk has spare time and the processor has none.

CompressionMode = Literal["auto", "snappy", "none"]

MIN_COMPRESSED_BYTES = 512
"""Smaller frames are never compressed: the gain is smaller than the header."""
TRIAL_INTERVAL = 64
"""In the mode ``auto``, every 64th frame is compressed to measure speed and ratio again."""
TRIAL_BYTES = 256 * 1024
"""A trial compresses at most this much: a part of a frame shrinks as the whole does."""
BUSY_SHARE = 0.8
"""Compress only while the writer waits for the disk during at least this share of its time."""
_PAUSE = 2.0
"""Seconds. A writer that wrote nothing for longer had nothing to write; this says nothing about the
disk."""
_WEIGHT = 0.2
"""How much the latest measurement counts in a moving average."""


def is_compression_faster(ratio: float, compress_speed: float, write_speed: float) -> bool:
    """Whether compressing and writing less is faster than writing it all. Speeds in bytes/s."""
    return 1 / compress_speed < (1 - ratio) / write_speed


class CompressionPolicy:
    """Decides which frames of one log are compressed. Used only by the log's writer thread."""

    def __init__(
        self, mode: CompressionMode = "auto", *, timer: Callable[[], float] = perf_counter
    ) -> None:
        if mode not in get_args(CompressionMode):
            raise ConfigError("compression", f"must be auto, snappy or none, not {mode!r}")
        self.mode = mode
        self._timer = timer
        self._frames = 0
        self._ratio: float | None = None
        self._compress_speed: float | None = None
        self._write_speed: float | None = None
        self._last_write = timer()
        self._seconds_writing: float | None = None
        """Moving average of the seconds that a write takes."""
        self._seconds_between: float | None = None
        """Moving average of the seconds from one write to the next."""

    def compress(self, pieces: Sequence[BufferLike]) -> pa.Buffer | None:
        """Return the pieces compressed as one; ``None`` if they are better stored as they are."""
        size = sum(len(piece) for piece in pieces)
        if self.mode == "none" or size < MIN_COMPRESSED_BYTES:
            return None
        if self.mode == "auto" and not self._should_compress(pieces):
            return None
        compressed = self._compress_and_measure(_join_pieces(pieces))
        return compressed if len(compressed) < size else None

    def record_write(self, size: int, seconds: float) -> None:
        """Learn how fast the disk accepts bytes, syncs included, and how busy it is."""
        now = self._timer()
        since = max(seconds, now - self._last_write)
        self._last_write = now
        if since - seconds < _PAUSE:
            self._seconds_writing = _update_average(self._seconds_writing, seconds)
            self._seconds_between = _update_average(self._seconds_between, since)
        if size and seconds > 0:
            self._write_speed = _update_average(self._write_speed, size / seconds)

    def _should_compress(self, pieces: Sequence[BufferLike]) -> bool:
        if self._frames % TRIAL_INTERVAL == 0:
            whole = _join_pieces(pieces)
            self._compress_and_measure(whole.slice(0, min(TRIAL_BYTES, len(whole))))
        self._frames += 1
        if self._ratio is None or self._compress_speed is None or self._write_speed is None:
            return False
        writing, between = self._seconds_writing, self._seconds_between
        if not writing or not between or writing < BUSY_SHARE * between:
            return False
        return is_compression_faster(self._ratio, self._compress_speed, self._write_speed)

    def _compress_and_measure(self, data: pa.Buffer) -> pa.Buffer:
        started = self._timer()
        compressed = compress(data)
        seconds = self._timer() - started
        self._ratio = _update_average(self._ratio, len(compressed) / len(data))
        if seconds > 0:
            self._compress_speed = _update_average(self._compress_speed, len(data) / seconds)
        return compressed


def _join_pieces(pieces: Sequence[BufferLike]) -> pa.Buffer:
    if len(pieces) == 1:
        return pa.py_buffer(pieces[0])
    return pa.py_buffer(b"".join(memoryview(piece) for piece in pieces))


def _update_average(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)


# ── frames ───────────────────────────────────────────────────────────────────────────────────────

_MEASURED_BYTES = 16 << 20
"""This much, written without a sync, is one measurement of the disk's speed."""


class PlannedFrame(NamedTuple):
    """A block to write, with the schema that its segment must have."""

    first: int
    block: pa.RecordBatch
    schema: pa.Schema
    sequences: Sequence[ProducerSequence]
    is_last: bool


class FrameGroup:
    """Frames that go into one segment with one write."""

    def __init__(self) -> None:
        self.buffers: list[BufferLike] = []
        self.size = 0
        self.starts: list[tuple[int, int]] = []
        """Each frame's first offset, and its byte counted from the beginning of the group."""
        self.end = 0
        self.at = 0
        """The byte of the segment at which the group is written."""
        self.seconds = 0.0
        """How long writing the group took."""

    def add(self, frame: list[BufferLike], first: int, count: int) -> None:
        """Add a frame after the others."""
        self.starts.append((first, self.size))
        self.buffers += frame
        self.size += sum(len(piece) for piece in frame)
        self.end = first + count


class FrameEncoder:
    """Encodes frames. For the log's writer thread."""

    def __init__(self, compression: CompressionPolicy) -> None:
        self._compression = compression
        self._fitter = ColumnFitter()
        self._messages = MessageEncoder(EMPTY_SCHEMA)
        self._unmeasured = (0, 0.0)

    def plan_frames(
        self,
        schema: pa.Schema,
        first: int,
        frames: Sequence[Sequence[pa.RecordBatch]],
        sequences: Sequence[ProducerSequence],
        *,
        end: int,
    ) -> Iterator[PlannedFrame]:
        """Yield the frames at or after the offset ``end``, joined and fitted to the schema.

        Joining copies the blocks, but outside the interpreter's lock, and it leaves the bytes in
        the processor's cache for the checksum and the write: this is faster than writing many small
        pieces uncopied. Frames are joined one at a time, so that each reuses the memory of the one
        before: fresh memory would cost more than the joining.

        The sequences go with the last frame. Raises ``SchemaMismatch``.
        """
        for number, blocks in enumerate(frames, 1):
            rows = sum(block.num_rows for block in blocks)
            if rows and first >= end:
                schema, fitted = self._fitter.fit(schema, join_blocks(blocks))
                is_last = number == len(frames)
                yield PlannedFrame(first, fitted, schema, sequences if is_last else (), is_last)
            first += rows

    def encode(self, planned: PlannedFrame) -> list[BufferLike]:
        """Return the frame as buffers, which share the block's memory unless it is compressed."""
        if self._messages.schema is not planned.schema:
            self._messages = MessageEncoder(planned.schema)
        payload = self._messages.encode(planned.block)
        if planned.sequences:
            payload.insert(0, encode_sequences(planned.sequences))
        compressed = self._compression.compress(payload)
        return encode_frame(
            FrameKind.EVENTS,
            planned.first,
            planned.block.num_rows,
            payload if compressed is None else [compressed],
            is_compressed=compressed is not None,
            has_sequences=bool(planned.sequences),
        )

    def record_write(self, size: int, seconds: float, *, synced: bool = False) -> None:
        """Pass on how long a write or sync took, for the decision about compression."""
        size, seconds = self._unmeasured[0] + size, self._unmeasured[1] + seconds
        if synced or size >= _MEASURED_BYTES:
            self._compression.record_write(size, seconds)
            size, seconds = 0, 0.0
        self._unmeasured = (size, seconds)
