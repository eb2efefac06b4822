"""Which columns a chunk stores: all that ever had a value, and no others.

A column of nulls costs bytes and time in every frame and says nothing, so it is left out; a reader
gives it back. Columns are only ever added, and adding one means starting another chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import IOBase
from typing import Any, NamedTuple, cast

import pyarrow as pa

from turnlane.errors import SchemaMismatch
from turnlane.events import BASE_SCHEMA, join
from turnlane.storage.frames import Compression, Data, FrameKind, Stamp, encode, pack_stamps

EMPTY: pa.Schema = pa.schema([])

_LENGTHS = 16
"""Of so many lengths a reader has nulls at hand."""

_FEWEST = 1 << 15
"""So many nulls are made at least."""

_BASE_TYPES = {field.name: field.type for field in BASE_SCHEMA}


def plain(block: pa.RecordBatch) -> pa.RecordBatch:
    """The block without dictionaries: a frame stands alone, so it could not refer to one."""
    for index, kind in enumerate(block.schema.types):
        if isinstance(kind, pa.DictionaryType):
            column = block.column(index).cast(kind.value_type)
            field = block.schema.field(index).with_type(kind.value_type)
            block = block.set_column(index, field, column)
    return block


def grown(schema: pa.Schema, block: pa.RecordBatch) -> pa.Schema:
    """The schema with the columns that have values in the block; the same object if it has all."""
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
            new.append(_storable(field))
    if len(set(block.schema.names)) < len(block.schema.names):
        raise SchemaMismatch(f"two columns have one name: {sorted(block.schema.names)}")
    return pa.schema([*schema, *new]) if new else schema


def _storable(field: pa.Field[Any]) -> pa.Field[Any]:
    if _has_dictionary(field.type):
        raise SchemaMismatch(f"column {field.name!r} has a dictionary inside {field.type}")
    return field.with_nullable(True)  # noqa: FBT003  Arrow's own signature


def _has_dictionary(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.DictionaryType):
        return True
    return any(_has_dictionary(kind.field(i).type) for i in range(kind.num_fields))


class _Shape(NamedTuple):
    """What one block looked like, and how it fitted its chunk."""

    block: pa.Schema
    filled: list[bool]
    chunk: pa.Schema
    places: list[int]
    """Where the chunk's columns are in the block; -1 if it has none."""
    selects: bool
    """Whether selecting them is all there is to do."""


class Fitting:
    """Brings blocks to a chunk's columns; quick as long as blocks look like the one before."""

    def __init__(self) -> None:
        self._shape: _Shape | None = None

    def fit(self, schema: pa.Schema, block: pa.RecordBatch) -> tuple[pa.Schema, pa.RecordBatch]:
        """The schema, grown by the columns that are new, and the block with exactly its columns.

        The schema is the same object if nothing was added. Raises ``SchemaMismatch``.
        """
        shape = self._shape
        if not shape or shape.chunk is not schema or not shape.block.equals(block.schema):
            block = plain(block)
        rows = block.num_rows
        filled = [block.column(i).null_count < rows for i in range(block.num_columns)]
        if not shape or not _same(shape, schema, block, filled):
            shape = self._shape = _shape(schema, block, filled)
        if shape.selects:
            return shape.chunk, block.select(shape.places)
        arrays = [
            block.column(at) if at >= 0 else _nulls(kind, rows)
            for at, kind in zip(shape.places, shape.chunk.types, strict=True)
        ]
        return shape.chunk, pa.RecordBatch.from_arrays(arrays, schema=shape.chunk)


def _same(shape: _Shape, schema: pa.Schema, block: pa.RecordBatch, filled: list[bool]) -> bool:
    known = shape.chunk is schema and shape.filled == filled
    return known and shape.block.equals(block.schema)


def _shape(schema: pa.Schema, block: pa.RecordBatch, filled: list[bool]) -> _Shape:
    chunk = grown(schema, block)
    places = _places(block.schema, chunk)
    selects = min(places, default=0) >= 0 and block.select(places).schema.equals(
        chunk, check_metadata=True
    )
    return _Shape(block.schema, filled, chunk, places, selects)


class Restoring:
    """Gives blocks of one chunk the base columns that it does not store."""

    def __init__(self, stored: pa.Schema) -> None:
        extra = [field for field in stored if field.name not in _BASE_TYPES]
        base = [
            stored.field(field.name) if field.name in stored.names else field
            for field in BASE_SCHEMA
        ]
        self._schema = pa.schema([*base, *extra])
        self._places = _places(stored, self._schema)
        self._missing: dict[int, dict[int, pa.Array[Any]]] = {}
        """By the rows of a block, and by the place of the column."""

    def restored(self, block: pa.RecordBatch) -> pa.RecordBatch:
        """As ``events.conform``, but quicker: the nulls are not made for every block."""
        missing = self._missing_of(block.num_rows)
        arrays = [missing[i] if at < 0 else block.column(at) for i, at in enumerate(self._places)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _missing_of(self, rows: int) -> dict[int, pa.Array[Any]]:
        """The columns that are not stored. Frames have a few lengths only, over and over."""
        known = self._missing.get(rows)
        if known is None:
            if len(self._missing) == _LENGTHS:
                self._missing.clear()
            places = zip(enumerate(self._schema.types), self._places, strict=True)
            known = {i: _NULLS.of(kind, rows) for (i, kind), at in places if at < 0}
            self._missing[rows] = known
        return known


class _Nulls:
    """Columns of nulls, made once for all readers: filling them takes longer than reading a frame.

    Only for the base columns: of a publisher's own type, one value may take a megabyte. None is
    much longer than the longest frame. Safe to use from any thread: at worst two make the same.
    """

    def __init__(self) -> None:
        self._longest: dict[pa.DataType, pa.Array[Any]] = {}

    def of(self, kind: pa.DataType, rows: int) -> pa.Array[Any]:
        """A column of this type."""
        known = self._longest.get(kind)
        if known is None or len(known) < rows:
            known = self._longest[kind] = _nulls(kind, max(rows, _FEWEST))
        return known.slice(0, rows)


_NULLS = _Nulls()


def _nulls(kind: pa.DataType, rows: int) -> pa.Array[Any]:
    return cast("pa.Array[Any]", pa.nulls(rows, cast("Any", kind)))


def _places(here: pa.Schema, wanted: pa.Schema) -> list[int]:
    places = []
    for field in wanted:
        at = here.get_field_index(field.name)
        # A column of another type got this far only because it is all null.
        places.append(at if at >= 0 and here.field(at).type == field.type else -1)
    return places


# ── messages ──
# Record batch messages, without copying the events.
#
# ``batch.serialize()`` copies every byte into one buffer. Arrow's stream writer hands its sink
# the
# very buffers of the batch instead, with a few bytes of metadata before and padding between: the
# same
# message, ready for a vectored write.


class _Sink:
    """What Arrow takes for a file; it keeps what is written."""

    closed = False

    def __init__(self) -> None:
        self.pieces: list[Data] = []

    def write(self, piece: Data) -> int:
        self.pieces.append(piece)
        return len(piece)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing is open."""


class Messages:
    """Turns blocks of one schema into messages. For one thread."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._sink = _Sink()
        self._writer = pa.ipc.new_stream(
            pa.PythonFile(cast("IOBase", self._sink), mode="w"), schema
        )
        # The writer precedes its first batch with the schema, which has a frame of its own.
        self._writer.write_batch(_empty(schema))
        self._sink.pieces = []

    def message(self, block: pa.RecordBatch) -> list[Data]:
        """The block as an encapsulated message, in pieces; they share the block's memory."""
        self._writer.write_batch(block)
        pieces, self._sink.pieces = self._sink.pieces, []
        return _joined(pieces)


def _joined(pieces: list[Data]) -> list[Data]:
    """The same bytes with the small pieces before a large one made one."""
    joined: list[Data] = []
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


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=schema)


# ── encoding ──
# From blocks to frames: which columns, which message, compressed or not.
#
# Kept apart from the log so that nothing here can change what is on disk.

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
