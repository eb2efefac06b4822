"""Events, and the blocks (Arrow record batches) in which they are stored and moved."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turnlane.errors import SchemaMismatch

Block = pa.RecordBatch

_BASE_FIELDS: list[pa.Field[Any]] = [
    pa.field("key", pa.string()),
    pa.field("value", pa.binary()),
    pa.field("headers", pa.map_(pa.string(), pa.string())),
    pa.field("timestamp", pa.timestamp("us", tz="UTC")),
    pa.field("severity", pa.int8()),
    pa.field("source", pa.string()),
]
BASE_SCHEMA = pa.schema(_BASE_FIELDS)
"""The columns that every event has, with the names that Spark users know."""
_WITHOUT_TIME = [field.name for field in _BASE_FIELDS if field.name != "timestamp"]

EVENT_OVERHEAD = 16
"""The bytes of an event in addition to its text: timestamp, severity and Arrow's offset."""

_HEADER_OVERHEAD = 8
"""The bytes of a header in addition to its name and text."""

MAX_BLOCK_BYTES = 1 << 30
"""Arrow's binary column addresses 2 GiB; half of that leaves room for the other columns."""


class Event(NamedTuple):
    """One event, for consumers that read row by row. Hot paths use blocks instead."""

    value: bytes | None
    key: str | None = None
    headers: dict[str, str] | None = None
    timestamp: int | None = None
    """Microseconds since the epoch."""
    severity: int | None = None
    source: str | None = None
    offset: int | None = None


def build_values(values: Sequence[bytes]) -> pa.Array[Any]:
    """Return a binary column of Python bytes, about ten times faster than ``pa.array``."""
    count = len(values)
    ends = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(np.fromiter(map(len, values), dtype=np.int32, count=count), out=ends[1:])
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(ends.data), pa.py_buffer(b"".join(values))], 0
    )


def block_of(
    values: Sequence[bytes],
    *,
    timestamps: Sequence[int] | npt.NDArray[np.int64] | int | None = None,
    keys: Sequence[str | None] | None = None,
    headers: Sequence[Mapping[str, str] | None] | None = None,
    severities: Sequence[int | None] | None = None,
    sources: Sequence[str | None] | None = None,
) -> Block:
    """Return a block from columns of Python values. Missing columns are null, times are now."""
    count = len(values)
    if timestamps is None:
        timestamps = time.time_ns() // 1000
    if isinstance(timestamps, int):
        timestamps = np.full(count, timestamps)
    columns = {
        "key": keys,
        "headers": None if headers is None else [row and list(row.items()) for row in headers],
        "timestamp": timestamps,
        "severity": severities,
        "source": sources,
    }
    arrays = [
        build_values(values)
        if field.name == "value"
        else _column(columns[field.name], field.type, count)
        for field in BASE_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=BASE_SCHEMA)


def _column(values: Any, kind: Any, count: int) -> pa.Array[Any]:  # noqa: ANN401
    column: pa.Array[Any]
    if values is None:
        column = pa.nulls(count, kind)
    elif pa.types.is_timestamp(kind):
        column = pa.array(np.asarray(values, dtype=np.int64)).view(kind)
    else:
        column = pa.array(values, kind)
    return column


def prepare_block(block: Block, time_ns: Callable[[], int]) -> Block:
    """Return the block ready for a queue: base columns of the right type, a timestamp for all."""
    names = block.schema.names
    if len(set(names)) != len(names):
        msg = f"columns {names} are not unique"
        raise SchemaMismatch(msg)
    for field in BASE_SCHEMA:
        if field.name in names and block.schema.field(field.name).type != field.type:
            given = block.schema.field(field.name).type
            msg = f"column {field.name!r} is {given}, not {field.type}; cast it first"
            raise SchemaMismatch(msg)
    for field in block.schema:
        if not _can_be_kept(field.type):
            msg = f"column {field.name!r} is {field.type}, which a queue cannot keep; cast it first"
            raise SchemaMismatch(msg)
    # Blocks are joined, and a column may be missing from the next: every one can be null.
    plain = pa.schema([pa.field(field.name, field.type) for field in block.schema])
    if not block.schema.equals(plain, check_metadata=True):
        block = pa.RecordBatch.from_arrays(block.columns, schema=plain)
    return add_timestamps(block, time_ns)


def add_timestamps(block: Block, time_ns: Callable[[], int]) -> Block:
    """Return the block with a timestamp for every event: now, where it has none."""
    at = block.schema.get_field_index("timestamp")
    if at >= 0 and not block.column(at).null_count:
        return block
    field = BASE_SCHEMA.field("timestamp")
    now = pa.array(np.full(block.num_rows, time_ns() // 1000)).view(field.type)
    if at < 0:
        return block.append_column(field, now)
    given = block.column(at)
    if given.null_count < block.num_rows:
        now = pc.coalesce(given, now)
    return block.set_column(at, field, now)


def _can_be_kept(kind: pa.DataType) -> bool:
    """Refuse dictionaries, which need other frames to be read, and nulls, which have no type."""
    if pa.types.is_dictionary(kind) or pa.types.is_null(kind):
        return False
    return all(_can_be_kept(kind.field(index).type) for index in range(kind.num_fields))


def conform_block(block: Block, schema: pa.Schema = BASE_SCHEMA) -> Block:
    """Return the block with the columns of the schema first; missing columns are null."""
    if block.schema.equals(schema):
        return block
    names = block.schema.names
    arrays: list[pa.Array[Any]] = []
    fields: list[pa.Field[Any]] = []
    for field in schema:
        if field.name in names:
            arrays.append(block.column(field.name))
            fields.append(block.schema.field(field.name))
        else:
            arrays.append(pa.nulls(block.num_rows, field.type))
            fields.append(field)
    known = set(schema.names)
    for field in block.schema:
        if field.name not in known:
            arrays.append(block.column(field.name))
            fields.append(field)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def cast_base_columns(block: Block, without: Collection[str] = ()) -> Block:
    """Return the block with base columns of the right type, without some of its columns."""
    arrays: list[pa.Array[Any]] = []
    fields: list[pa.Field[Any]] = []
    for name in block.schema.names:
        if name in without:
            continue
        column = block.column(name)
        if name in BASE_SCHEMA.names:
            wanted = BASE_SCHEMA.field(name).type
            column = column if column.type == wanted else pc.cast(column, wanted)
        arrays.append(column)
        fields.append(pa.field(name, column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def join_blocks(blocks: Sequence[Block]) -> Block:
    """Return one block from several; columns are matched by name."""
    if len(blocks) == 1:
        return blocks[0]
    first = blocks[0].schema
    if not all(block.schema.equals(first) for block in blocks[1:]):
        schema = pa.unify_schemas([block.schema for block in blocks])
        blocks = [conform_block(block, schema) for block in blocks]
    joined: Block = pa.concat_batches(blocks)  # type: ignore[attr-defined]
    return joined


def join_consecutive(blocks: Iterator[tuple[int, Block]], rows: int) -> Iterator[tuple[int, Block]]:
    """Return blocks with their offsets; consecutive blocks are joined up to ``rows``."""
    held: list[Block] = []
    first = end = 0
    for at, block in blocks:
        if held and (at != end or end - first + block.num_rows > rows):
            yield first, join_blocks(held)
            held = []
        if not held:
            first = at
        held.append(block)
        end = at + block.num_rows
    if held:
        yield first, join_blocks(held)


def iterate_events(block: Block, first: int = 0) -> Iterator[Event]:
    """Return the rows of a block as events, with offsets from ``first``."""
    block = conform_block(block)
    columns = block.select(_WITHOUT_TIME).to_pydict()
    # As numbers: Arrow has more years than Python.
    stamps = block.column("timestamp").cast(pa.int64()).to_pylist()
    for row in range(block.num_rows):
        pairs = columns["headers"][row]
        yield Event(
            value=columns["value"][row],
            key=columns["key"][row],
            headers=None if pairs is None else dict(pairs),
            timestamp=stamps[row],
            severity=columns["severity"][row],
            source=columns["source"][row],
            offset=first + row,
        )


def get_values(blocks: Iterable[Block]) -> list[bytes]:
    """Return the ``value`` column of the blocks as Python bytes; null is empty."""
    return [value or b"" for block in blocks for value in block.column("value").to_pylist()]


def get_event_sizes(block: Block) -> npt.NDArray[np.int64]:
    """Return the bytes of each event, which count against ``max_event_bytes``."""
    sizes = np.full(block.num_rows, EVENT_OVERHEAD, np.int64)
    for column in block.columns:
        sizes += _lengths(column)
    return sizes


def _lengths(column: pa.Array[Any]) -> npt.NDArray[np.int64] | int:
    """Return the bytes of each value; columns of a fixed width are in the overhead."""
    kind = column.type
    if column.null_count == len(column):
        return 0
    if pa.types.is_map(kind):
        pairs = cast("pa.MapArray[Any, Any]", column)
        offsets = pairs.offsets.to_numpy()
        sizes = _HEADER_OVERHEAD + _lengths(pairs.keys) + _lengths(pairs.items)
        ends = np.concatenate(([0], np.cumsum(np.broadcast_to(sizes, len(pairs.keys)))))
        return cast("npt.NDArray[np.int64]", ends[offsets[1:]] - ends[offsets[:-1]])
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        lengths = pc.binary_length(cast("pa.BinaryArray", column))
        return lengths.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return 0
