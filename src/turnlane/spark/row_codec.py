"""Between a queue's blocks and Spark's rows: which columns there are, and of which type."""

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
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import ArrayType, MapType, StructType

from turnlane.delivery.settings import HOLLOWS, PLACES, PRIORITY, ROUTES
from turnlane.errors import SchemaMismatch
from turnlane.events import BASE_SCHEMA, Block, join, typed
from turnlane.key_hash import repeats
from turnlane.outputs.api import NOT_OF_EVENTS, PLACE, ROW

READ_SCHEMA = (
    "key string, value binary, timestamp timestamp, severity tinyint, source string, "
    "queue string, partition int, offset bigint"
)
HEADERS = "headers map<string,string>"


def read_schema(*, include_headers: bool) -> str:
    """The columns of an event, as DDL."""
    return f"{READ_SCHEMA}, {HEADERS}" if include_headers else READ_SCHEMA


def names_read() -> list[str]:
    """The names of all those columns."""
    return [field.split()[0] for field in read_schema(include_headers=True).split(", ")]


def event_schema(names: Iterable[str]) -> pa.Schema:
    """Columns that events have, each of them once, as :class:`RowMaker` makes them for tasks."""
    types = {
        **{field.name: field.type for field in BASE_SCHEMA},
        "partition": pa.int32(),
        "offset": pa.int64(),
    }
    return pa.schema([(name, types[name]) for name in dict.fromkeys(names)])


class RowMaker:
    """Makes of a queue's blocks what Spark has been promised."""

    def __init__(self, schema: pa.Schema, queue: str, node: int) -> None:
        self._schema = schema
        self._queue = queue
        self._node = node

    @property
    def stored(self) -> frozenset[str]:
        """Those of the promised columns that a queue may have."""
        return frozenset(self._schema.names) - {"offset", "partition", "queue"}

    def rows(self, block: Block, first: int) -> Block:
        """The block with exactly the promised columns; one that it lacks is null."""
        arrays = [self._column(field, block, first) for field in self._schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _column(self, field: pa.Field[Any], block: Block, first: int) -> pa.Array[Any]:
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
    """Check what is to be written before any row is. Raises ``SchemaMismatch``."""
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
        raise SchemaMismatch(f"there is no column `value`, only {', '.join(types)}")
    if needs_route and "queue" not in types:
        raise SchemaMismatch("give the option `queue`, or a column `queue` that names it")
    for name, kinds in allowed.items():
        if name in types and types[name] not in kinds:
            raise SchemaMismatch(f"column `{name}` is {types[name]}, not {' or '.join(kinds)}")


def as_block(rows: pa.RecordBatch) -> Block:
    """Spark's rows as a queue takes them: base columns of the right type, no place."""
    return typed(rows, without=NOT_OF_EVENTS)


def by_route(rows: pa.RecordBatch, column: str) -> Sequence[tuple[str, pa.RecordBatch]]:
    """The rows by the name in a column, or by each of several; one without any is in none."""
    names, index = _routes(rows, column)
    return [(name, rows.take(_where(names, name, index))) for name in _each(names)]


def without_route(rows: pa.RecordBatch, column: str) -> int:
    """How many rows have no name in a column."""
    names, index = _routes(rows, column)
    return int(rows.num_rows - len(pc.unique(index.filter(pc.is_valid(names)))))


def routes_of(rows: pa.RecordBatch, column: str) -> dict[str, npt.NDArray[np.bool_]]:
    """The same as masks: which rows have a name in a column."""
    names, index = _routes(rows, column)
    masks = {name: np.zeros(rows.num_rows, dtype=np.bool_) for name in _each(names)}
    for name, mask in masks.items():
        mask[np.asarray(_where(names, name, index))] = True
    return masks


def _routes(rows: pa.RecordBatch, column: str) -> tuple[Any, Any]:
    """All names in a column, and the row of each."""
    names: Any = rows.column(column)
    if pa.types.is_list(names.type):
        return pc.list_flatten(names), pc.list_parent_indices(names)
    return names, pa.array(np.arange(rows.num_rows))


def _where(names: Any, name: str, index: Any) -> Any:  # noqa: ANN401 - columns
    return index.filter(pc.equal(names, pa.scalar(name)))


def _each(names: Any) -> list[str]:  # noqa: ANN401 - a column
    return [name for name in pc.unique(names).to_pylist() if name is not None]


# ── grouping ──
# Events that look the same to all filters, as one row with the places of all of them. No I/O.
#
# Of a million log messages Spark then sees a few hundred rows: one for every severity and source
# in a
# block. What it decides for a row goes for all the places in it.

Numbers = npt.NDArray[np.int64]

FEW_VALUES: Final = frozenset({"severity", "source", PRIORITY})
"""Columns that many events have in common."""
_WIDTH: Final = 4
"""Bytes of a place: its distance from the first offset of its block."""
_MOST_SHORT: Final = 1 << 16
"""So many numbers have room in 16 bits."""


def grouped(rows: Block, schema: pa.Schema) -> Block:
    """A row for each different look of a block's rows; ``offset`` is the first of the block."""
    looks = [name for name in schema.names if name not in ("partition", "offset", PLACES)]
    groups = _groups(rows, looks)
    order = np.argsort(groups, kind="stable")
    counts = np.bincount(groups)
    ends = np.cumsum(counts)
    offsets = np.asarray(rows.column("offset"))
    distances = (offsets[order] - offsets[0]).astype(np.int32)
    bounds = np.concatenate(([0], ends)).astype(np.int32) * _WIDTH
    buffers = [None, pa.py_buffer(bounds.data), pa.py_buffer(distances.data)]
    one_of_each = rows.take(pa.array(order[ends - counts]))
    arrays: list[pa.Array[Any]] = [
        pa.array(np.full(len(counts), offsets[0]))
        if name == "offset"
        else pa.Array.from_buffers(pa.binary(), len(counts), buffers)
        if name == PLACES
        else one_of_each.column(name)
        for name in schema.names
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _groups(rows: Block, names: list[str]) -> npt.NDArray[Any]:
    """A number for each row, the same for those that look the same; all from 0 on occur."""
    numbers: npt.NDArray[Any] = np.zeros(rows.num_rows, dtype=np.int32)
    count = 1
    for name in names:
        values, kinds = _encoded(rows.column(name))
        if count == 1:
            numbers, count = values, kinds
        elif kinds > 1:  # what all have in common tells none of them apart
            both = numbers.astype(np.int64) * kinds + values
            numbers, count = _encoded(pa.array(both))
    # Of numbers as short as that NumPy sorts ten times as many in the same time.
    return numbers.astype(np.uint16) if count <= _MOST_SHORT else numbers


def _encoded(values: Any) -> tuple[npt.NDArray[np.int32], int]:  # noqa: ANN401
    """Numbers instead of values, and how many different ones there are."""
    encoded = values.dictionary_encode(null_encoding="encode")
    return np.asarray(encoded.indices), len(encoded.dictionary)


def ungrouped(rows: Block) -> Iterator[tuple[Numbers, Numbers]]:
    """The offsets and routes of the events that rows stand for, block by block, in order."""
    firsts, routes = np.asarray(rows.column("offset")), np.asarray(rows.column(ROUTES))
    bounds, distances = _places(rows.column(PLACES))
    changes = np.flatnonzero(np.diff(firsts)) + 1
    for start, end in zip([0, *changes], [*changes, len(firsts)], strict=True):
        mine = distances[bounds[start] : bounds[end]]
        by_place = np.zeros(int(mine.max()) + 1, dtype=np.int64)
        by_place[mine] = np.repeat(routes[start:end], np.diff(bounds[start : end + 1]))
        there = np.flatnonzero(by_place)
        yield firsts[start] + there, by_place[there]


def _places(column: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:  # noqa: ANN401
    """Where each row's places begin and end, and the places of all."""
    _, bounds, contents = column.buffers()
    ends = np.frombuffer(bounds, np.int32)[column.offset : column.offset + len(column) + 1]
    return ends // _WIDTH, np.frombuffer(contents, np.int32)


# ── hollows ──
# Lists and maps that are null, on their way from Spark's rows to a task in Python.
#
# Spark asks after every row how large the batch has become, and for that it walks over all the
# nulls
# that a column of lists or maps has had since its last value: events without headers would take
# longer the more of them there are. So nulls travel as empty values, and a number in each row
# says
# which they are.

_MOST: Final = 62
"""Columns that have a bit; others go as they are."""


def filled(rows: DataFrame) -> DataFrame:
    """Rows without nulls in columns of lists and maps."""
    kinds = {
        field.name: field.dataType
        for field in rows.schema.fields
        if isinstance(field.dataType, (ArrayType, MapType))
    }
    names = list(kinds)[:_MOST]
    if not names:
        return rows
    columns = {name: F.col(f"`{name}`") for name in names}
    bits = [
        F.when(column.isNull(), F.lit(1 << at)).otherwise(F.lit(0)).cast("bigint")
        for at, column in enumerate(columns.values())
    ]
    full = {
        name: F.coalesce(column, _empty(kinds[name]).cast(kinds[name]))
        for name, column in columns.items()
    }
    # The bits first: they are of the columns as they were.
    return rows.withColumn(HOLLOWS, reduce(Column.bitwiseOR, bits)).withColumns(full)


def _empty(kind: ArrayType | MapType) -> Column:
    return F.array() if isinstance(kind, ArrayType) else F.create_map()


def emptied(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows as they were before :func:`filled`."""
    at = rows.schema.get_field_index(HOLLOWS)
    if at < 0:
        return rows
    bits = np.asarray(rows.column(at))
    some = reduce(or_, np.unique(bits).tolist(), 0)
    rows = rows.remove_column(at)
    kinds = (pa.ListType, pa.MapType)
    places = [place for place, field in enumerate(rows.schema) if isinstance(field.type, kinds)]
    for bit, place in enumerate(places[:_MOST]):
        if some >> bit & 1:
            column = _with_nulls(rows.column(place), (bits >> bit & 1).astype(np.bool_))
            rows = rows.set_column(
                place, rows.schema.field(place).with_nullable(nullable=True), column
            )
    return rows


def _with_nulls(column: pa.Array[Any], mask: Any) -> pa.Array[Any]:  # noqa: ANN401 - of numpy
    if mask.all():
        nothing: pa.Array[Any] = pa.nulls(len(column), column.type)
        return nothing
    places: pa.Array[Any] = pa.array(np.arange(len(column)), mask=mask)
    return column.take(places)


# ── siblings ──
# The rows that a transform has made of one event: they go on together, or none of them does.
# Pure.
#
# They come one after another in a task, but Spark cuts its rows into blocks wherever it likes.

Mask = npt.NDArray[np.bool_]


def have_places(rows: Block) -> bool:
    """Whether rows say where they come from; those that SQL has made of many do not."""
    columns: list[Any] = [rows.column(name) for name in PLACE if name in rows.schema.names]
    whole = all(pa.types.is_integer(each.type) and not each.null_count for each in columns)
    return whole and len(columns) == len(PLACE) and bool(rows.num_rows)


def with_siblings(rows: Block, mask: Mask) -> Mask:
    """Some rows, and all others of their events."""
    if not mask.any() or not have_places(rows):
        return mask
    partitions, offsets = (np.asarray(rows.column(name)) for name in PLACE)
    if (np.diff(offsets) > 0).all():
        return mask
    found = np.zeros_like(mask)
    for partition in np.unique(partitions[mask]):
        there = partitions == partition
        found |= there & np.isin(offsets, offsets[there & mask])
    return found


def together(blocks: Iterator[Block]) -> Iterator[Block]:
    """The same rows, cut so that all of one event are in one block; blocks without rows left out.

    A block waits for the next one, which may go on with its last event.
    """
    waiting: list[Block] = []
    for block in blocks:
        if not block.num_rows:
            continue
        more = _going_on(waiting[-1], block) if waiting else block.num_rows
        if more:
            waiting.append(block.slice(0, more))
        if more < block.num_rows:
            yield join(waiting)
            waiting = [block.slice(more)]
    if waiting:
        yield join(waiting)


def _going_on(before: Block, block: Block) -> int:
    """How many rows at a block's beginning are of the event that the one before ends with."""
    if not have_places(before) or not have_places(block):
        return 0
    others = np.zeros(block.num_rows, dtype=np.bool_)
    for name in PLACE:
        last, here = before.column(name)[-1].as_py(), block.column(name)
        if here[0].as_py() != last:
            return 0
        others |= np.asarray(here) != last
    return int(others.argmax()) if others.any() else block.num_rows


# ── row_numbers ──
# The rows that a transform has made of one event, numbered, so that they can be told apart.
#
# They come one after another, in the same order whenever the event is read: a transform works
# row by
# row. One that spreads an event's rows over tasks, by ``repartition``, gives them the same
# numbers.


def with_numbers(rows: Block) -> Block:
    """The rows, with a column of numbers if there are several of one event; it has all of those."""
    if not have_places(rows):
        return rows
    partitions, offsets = (np.asarray(rows.column(name)) for name in PLACE)
    if (np.diff(offsets) > 0).all():
        return rows
    numbers = repeats(offsets, partitions)
    return rows.append_column(ROW, pa.array(numbers, pa.int32())) if numbers.any() else rows
