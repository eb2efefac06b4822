"""Between a queue's blocks and Spark's rows: which columns there are, and of which type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from turnlane.errors import SchemaMismatch
from turnlane.events import BASE_SCHEMA, Block, typed
from turnlane.outputs.identity import NOT_OF_EVENTS

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
