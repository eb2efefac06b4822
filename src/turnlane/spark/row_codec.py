"""Converts between a queue's blocks and Spark's rows. No I/O.

- :class:`RowBuilder` gives a block exactly the columns that Spark expects; :func:`to_block` makes
  of rows what a queue stores.
- :func:`encode_nulls` and :func:`decode_nulls` replace null lists and maps on the way from Spark to
  a task in Python.
- Rows that a transform made of one event stay together, or none of them is settled. They arrive
  one after another, but Spark cuts its rows into blocks anywhere: :func:`group_rows_by_event` moves
  the cuts, :func:`add_rows_of_same_event` extends a selection to whole events, and
  :func:`number_rows_of_events` numbers the rows, so that outputs can distinguish them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import ArrayType, MapType, StructType

from turnlane.delivery.settings import (
    INTERNAL_COLUMNS,
    NULL_BITS,
    POSITION_COLUMNS,
    ROW_NUMBER_COLUMN,
)
from turnlane.errors import SchemaMismatch
from turnlane.events import BASE_SCHEMA, Block, cast_base_columns, join_blocks
from turnlane.formats.block_parsing import BlockParser, get_parsed_types
from turnlane.formats.parse_settings import ParseSettings
from turnlane.key_hash import count_earlier_equals

Mask = npt.NDArray[np.bool_]

QUEUE_COLUMN: Final = "queue"
"""The column that names the queues into which a row goes."""

# ── blocks and rows ──

_READ_COLUMNS: Final = {
    "key": "string",
    "value": "binary",
    "timestamp": "timestamp",
    "severity": "tinyint",
    "source": "string",
    "queue": "string",
    "partition": "int",
    "offset": "bigint",
}
_HEADERS: Final = {"headers": "map<string,string>"}


def get_read_schema(*, include_headers: bool, parse: ParseSettings | None = None) -> str:
    """Return the columns of an event as DDL, with those that parsing adds."""
    columns = _READ_COLUMNS | (_HEADERS if include_headers else {})
    if parse is not None:
        parsed = get_parsed_types(parse.format)
        columns |= {name: from_arrow_type(kind).simpleString() for name, kind in parsed.items()}
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


def list_read_columns() -> list[str]:
    """Return the names of all columns of an event."""
    return [*_READ_COLUMNS, *_HEADERS]


def build_event_schema(names: Iterable[str]) -> pa.Schema:
    """Build an Arrow schema of some columns of events, without duplicates."""
    types = {
        **{field.name: field.type for field in BASE_SCHEMA},
        "partition": pa.int32(),
        "offset": pa.int64(),
    }
    return pa.schema([(name, types[name]) for name in dict.fromkeys(names)])


class RowBuilder:
    """Builds rows with a given schema from a queue's blocks; parses values if told so."""

    def __init__(
        self, schema: pa.Schema, queue: str, node: int, parse: ParseSettings | None = None
    ) -> None:
        self._schema = schema
        self._queue = queue
        self._node = node
        self._parser = None if parse is None else BlockParser(parse, schema.names)

    @property
    def queue_columns(self) -> frozenset[str]:
        """The columns that are read from the queue."""
        columns = frozenset(self._schema.names) - {"offset", "partition", "queue"}
        if self._parser is not None:
            columns = (columns - self._parser.columns) | self._parser.source_columns
        return columns

    def build(self, block: Block, first: int) -> Block:
        """Return the block with exactly the columns of the schema; missing ones are null."""
        parsed = {} if self._parser is None else self._parser.parse(block)
        arrays = [
            parsed[field.name].cast(field.type)
            if field.name in parsed
            else self._build_column(field, block, first)
            for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _build_column(self, field: pa.Field[Any], block: Block, first: int) -> pa.Array[Any]:
        count = block.num_rows
        match field.name:
            case "offset":
                return pa.array(np.arange(first, first + count, dtype=np.int64))
            case "partition":
                return pa.array(np.full(count, self._node, dtype=np.int32))
            case "queue":
                return pa.repeat(pa.scalar(self._queue), count)
            case name if name not in block.schema.names:
                nulls: pa.Array[Any] = pa.nulls(count, field.type)
                return nulls
        column: pa.Array[Any] = block.column(field.name).cast(field.type)
        return column


def check_writable(schema: StructType, *, needs_route: bool) -> None:
    """Check the columns of rows before any row is written. Raises ``SchemaMismatch``."""
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    allowed = {
        "key": ("string", "binary"),
        "value": ("binary", "string"),
        "headers": ("map<string,string>",),
        "timestamp": ("timestamp",),
        "severity": ("tinyint", "smallint", "int", "bigint"),
        "source": ("string",),
        "queue": ("string", "array<string>"),
    }
    if "value" not in types:
        raise SchemaMismatch(f"there is no column `value`; the columns are {', '.join(types)}")
    if needs_route and "queue" not in types:
        raise SchemaMismatch("there is no queue: give the option `queue`, or a column `queue`")
    for name, kinds in allowed.items():
        if name in types and types[name] not in kinds:
            raise SchemaMismatch(f"column `{name}` is {types[name]}, not {' or '.join(kinds)}")


def to_block(rows: pa.RecordBatch) -> Block:
    """Return rows as a queue stores them: base columns with their types, no offsets."""
    return cast_base_columns(rows, without=INTERNAL_COLUMNS)


# ── routes ──


def split_by_route(rows: pa.RecordBatch, column: str) -> Sequence[tuple[str, pa.RecordBatch]]:
    """Split rows by the names in a column of texts or lists. A row may be in several parts."""
    return [(name, rows.take(index)) for name, index in _find_routes(rows, column)]


def count_unrouted(rows: pa.RecordBatch, column: str) -> int:
    """Return how many rows have no name in a column."""
    names, index = _flatten_routes(rows, column)
    return int(rows.num_rows - len(pc.unique(index.filter(pc.is_valid(names)))))


def get_route_masks(rows: pa.RecordBatch, column: str) -> dict[str, Mask]:
    """Return, for each name in a column, which rows have it."""
    masks = {}
    for name, index in _find_routes(rows, column):
        masks[name] = np.zeros(rows.num_rows, dtype=np.bool_)
        masks[name][np.asarray(index)] = True
    return masks


def _flatten_routes(rows: pa.RecordBatch, column: str) -> tuple[Any, Any]:
    """Return all names in a column, and the row of each."""
    names: Any = rows.column(column)
    if pa.types.is_list(names.type):
        return pc.list_flatten(names), pc.list_parent_indices(names)
    return names, pa.array(np.arange(rows.num_rows))


def _find_routes(rows: pa.RecordBatch, column: str) -> Iterator[tuple[str, Any]]:
    """Yield each name in a column with the numbers of the rows that have it."""
    names, index = _flatten_routes(rows, column)
    for name in pc.unique(names).to_pylist():
        if name is not None:
            yield name, index.filter(pc.equal(names, pa.scalar(name)))


# ── nulls ──
# Spark asks after every row how large the Arrow batch has become. For that it walks over all nulls
# that a column of lists or maps has had since its last value, so events without headers would take
# longer and longer. Therefore nulls travel as empty values, and a number in each row says which
# columns are null.

_MAX_NULL_BITS: Final = 62
"""Only this many columns have a bit; further columns travel as they are."""


def encode_nulls(rows: DataFrame) -> DataFrame:
    """Replace nulls in columns of lists and maps by empty values, and add a column of bits."""
    kinds = {
        field.name: field.dataType
        for field in rows.schema.fields
        if isinstance(field.dataType, (ArrayType, MapType))
    }
    names = list(kinds)[:_MAX_NULL_BITS]
    if not names:
        return rows
    columns = {name: F.col(f"`{name}`") for name in names}
    bits = [
        F.when(column.isNull(), F.lit(1 << at)).otherwise(F.lit(0)).cast("bigint")
        for at, column in enumerate(columns.values())
    ]
    without_nulls = {}
    for name, column in columns.items():
        empty = F.array() if isinstance(kinds[name], ArrayType) else F.create_map()
        without_nulls[name] = F.coalesce(column, empty.cast(kinds[name]))
    # The bits come first: they read the columns before these are replaced.
    return rows.withColumn(NULL_BITS, reduce(Column.bitwiseOR, bits)).withColumns(without_nulls)


def decode_nulls(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows as they were before :func:`encode_nulls`."""
    at = rows.schema.get_field_index(NULL_BITS)
    if at < 0:
        return rows
    bits = np.asarray(rows.column(at))
    any_bits = reduce(or_, np.unique(bits).tolist(), 0)
    rows = rows.remove_column(at)
    kinds = (pa.ListType, pa.MapType)
    indexes = [index for index, field in enumerate(rows.schema) if isinstance(field.type, kinds)]
    for bit, index in enumerate(indexes[:_MAX_NULL_BITS]):
        if any_bits >> bit & 1:
            mask = (bits >> bit & 1).astype(np.bool_)
            field = rows.schema.field(index).with_nullable(nullable=True)
            column: Any = pa.nulls(rows.num_rows, field.type)
            if not mask.all():
                kept: Any = pa.array(np.arange(rows.num_rows), mask=mask)
                column = rows.column(index).take(kept)
            rows = rows.set_column(index, field, column)
    return rows


# ── rows of one event ──


def has_event_refs(rows: Block) -> bool:
    """Whether every row says which event it is of; rows that SQL made of many events do not."""
    columns: list[Any] = [
        rows.column(name) for name in POSITION_COLUMNS if name in rows.schema.names
    ]
    complete = all(pa.types.is_integer(each.type) and not each.null_count for each in columns)
    return complete and len(columns) == len(POSITION_COLUMNS) and bool(rows.num_rows)


def add_rows_of_same_event(rows: Block, mask: Mask) -> Mask:
    """Return the mask with all other rows of the events of its rows."""
    if not mask.any() or not has_event_refs(rows):
        return mask
    partitions, offsets = (np.asarray(rows.column(name)) for name in POSITION_COLUMNS)
    if (np.diff(offsets) > 0).all():
        return mask
    found = np.zeros_like(mask)
    for partition in np.unique(partitions[mask]):
        there = partitions == partition
        found |= there & np.isin(offsets, offsets[there & mask])
    return found


def group_rows_by_event(blocks: Iterator[Block]) -> Iterator[Block]:
    """Yield the same rows, cut so that all rows of an event are in one block.

    A block waits for the next one, which may begin with further rows of its last event. Blocks
    without rows are left out.
    """
    waiting: list[Block] = []
    for block in blocks:
        if not block.num_rows:
            continue
        more = _count_rows_of_last_event(waiting[-1], block) if waiting else block.num_rows
        if more:
            waiting.append(block.slice(0, more))
        if more < block.num_rows:
            yield join_blocks(waiting)
            waiting = [block.slice(more)]
    if waiting:
        yield join_blocks(waiting)


def _count_rows_of_last_event(before: Block, block: Block) -> int:
    """Return how many rows at a block's beginning belong to the last event of the one before."""
    if not has_event_refs(before) or not has_event_refs(block):
        return 0
    others = np.zeros(block.num_rows, dtype=np.bool_)
    for name in POSITION_COLUMNS:
        last, here = before.column(name)[-1].as_py(), block.column(name)
        if here[0].as_py() != last:
            return 0
        others |= np.asarray(here) != last
    return int(others.argmax()) if others.any() else block.num_rows


def number_rows_of_events(rows: Block) -> Block:
    """Add a column with the number of each row among the rows of its event, if any has several.

    A transform works row by row, so an event's rows have the same order and the same numbers each
    time that the event is read. ``checks`` refuses a transform that divides the rows of an event
    among tasks where the numbers matter.
    """
    if not has_event_refs(rows):
        return rows
    partitions, offsets = (np.asarray(rows.column(name)) for name in POSITION_COLUMNS)
    if (np.diff(offsets) > 0).all():
        return rows
    numbers = count_earlier_equals(offsets, partitions)
    return (
        rows.append_column(ROW_NUMBER_COLUMN, pa.array(numbers, pa.int32()))
        if numbers.any()
        else rows
    )
