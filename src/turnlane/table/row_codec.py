"""Between the rows of a queue table and Arrow: which column has which type."""

from __future__ import annotations

import datetime as dt
import enum
import json
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from turnlane.errors import SchemaMismatch
from turnlane.table.definition import INSERT_COLUMNS, Column, Definition
from turnlane.table.sql.dialect import Dialect, Row

TIME_TYPE: Final = pa.timestamp("us", tz="UTC")
NANOSECONDS_PER_MICROSECOND: Final = 1_000
"""In a microsecond."""

_OWN: Final[Mapping[str, pa.DataType]] = {
    "event_id": pa.int64(),
    "fire_at": TIME_TYPE,
    "state": pa.string(),
    "attempts": pa.int32(),
    "priority": pa.int16(),
    "keyspace_id": pa.int64(),
    "event_name": pa.string(),
    "event_group": pa.string(),
    "after_group": pa.string(),
    "last_error": pa.string(),
}
_TYPES: Final[Mapping[str, pa.DataType]] = {
    "BIGINT": pa.int64(),
    "INT": pa.int32(),
    "INTEGER": pa.int32(),
    "SMALLINT": pa.int16(),
    "BOOLEAN": pa.bool_(),
    "REAL": pa.float32(),
    "DOUBLE": pa.float64(),
    "BLOB": pa.binary(),
    "BYTEA": pa.binary(),
    "DATE": pa.date32(),
    "TIMESTAMP": TIME_TYPE,
}
"""Those of the others are texts, but for decimals that say how long they are."""


def get_arrow_type(column: Column) -> pa.DataType:
    """The Arrow type of a user's column."""
    if column.type in {"NUMERIC", "DECIMAL"} and column.arguments:
        return pa.decimal128(*column.arguments)
    return _TYPES.get(column.type, pa.string())


def get_schema(definition: Definition) -> pa.Schema:
    """All columns of a queue's rows, turnlane's own first; fire times in microseconds."""
    own = {column.name: get_arrow_type(column) for column in definition.columns}
    return pa.schema([pa.field(name, kind) for name, kind in {**_OWN, **own}.items()])


# ── out of the table ─────────────────────────────────────────────────────────────────────────────


def build_block(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    """Rows that a database gave, as columns."""
    values = zip(*rows, strict=True) if rows else ([] for _ in schema)
    arrays = [_read(field, column) for field, column in zip(schema, values, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _read(field: pa.Field[Any], values: Iterable[Any]) -> pa.Array[Any]:
    found: pa.Array[Any]
    if field.name == "fire_at" and pa.types.is_timestamp(field.type):
        found = pa.array([each // NANOSECONDS_PER_MICROSECOND for each in values], pa.int64()).cast(
            TIME_TYPE
        )
        return found
    convert = _READERS.get(_kind(field.type))
    if convert is not None:
        values = [None if each is None else convert(each) for each in values]
    found = pa.array(values, field.type)
    return found


def _kind(type_: pa.DataType) -> str:
    return "decimal" if pa.types.is_decimal(type_) else str(type_)


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _time(value: object) -> dt.datetime:
    found = value if isinstance(value, dt.datetime) else dt.datetime.fromisoformat(str(value))
    return found.replace(tzinfo=dt.UTC) if found.tzinfo is None else found


def _date(value: object) -> dt.date:
    return value if isinstance(value, dt.date) else dt.date.fromisoformat(str(value))


_READERS: Final[Mapping[str, Callable[[Any], object]]] = {
    "bool": bool,
    "string": _text,
    "binary": bytes,
    "decimal": lambda value: Decimal(str(value)),
    str(TIME_TYPE): _time,
    "date32[day]": _date,
}
"""What drivers do not give as Arrow takes it: SQLite has texts for times and numbers for truth."""


# ── into the table ───────────────────────────────────────────────────────────────────────────────


def check_columns(names: Collection[str], definition: Definition) -> None:
    """Raise ``SchemaMismatch`` for a column that an insert cannot set, or has to and does not."""
    allowed = (*INSERT_COLUMNS, *definition.names)
    for name in names:
        if name not in allowed:
            there = ", ".join(allowed)
            raise SchemaMismatch(f"{definition.name!r} takes no column {name!r}; it takes {there}")
    for column in definition.columns:
        if column.required and column.name not in names:
            raise SchemaMismatch(f"{definition.name!r}: column {column.name!r} needs a value")


def cast_batch(batch: pa.RecordBatch, definition: Definition) -> pa.RecordBatch:
    """A batch with its columns in the table's types; fire times in nanoseconds.

    Fire times may be times, texts in ISO 8601, or nanoseconds since the epoch. Raises
    ``SchemaMismatch`` if a value does not fit its column.
    """
    check_columns(batch.schema.names, definition)
    schema = get_schema(definition)
    arrays = []
    for name in batch.schema.names:
        try:
            arrays.append(_fitted(batch.column(name), name, schema.field(name).type))
        except (pa.ArrowException, ValueError) as error:
            raise SchemaMismatch(f"column {name!r}: {error}") from None
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _fitted(column: Any, name: str, kind: pa.DataType) -> Any:  # noqa: ANN401 - Arrow's columns
    if name != "fire_at":
        return column.cast(kind)
    if pa.types.is_integer(column.type):
        return column.cast(pa.int64())
    return pc.multiply_checked(
        column.cast(TIME_TYPE, safe=False).cast(pa.int64()), NANOSECONDS_PER_MICROSECOND
    )


def convert_to_rows(batch: pa.RecordBatch, dialect: Dialect) -> list[dict[str, Any]]:
    """A fitted batch as rows that the database takes; what turnlane has defaults for is left out.

    (A null there would not mean the default.)
    """
    names = batch.schema.names
    columns = [_written(batch.column(name), dialect) for name in names]
    return [
        {
            name: value
            for name, value in zip(names, values, strict=True)
            if value is not None or name not in INSERT_COLUMNS
        }
        for values in zip(*columns, strict=True)
    ]


def _written(column: Any, dialect: Dialect) -> list[Any]:  # noqa: ANN401 - Arrow's columns
    kind = column.type
    if pa.types.is_timestamp(kind) and dialect.name == "mysql":
        return list(column.cast(pa.timestamp("us")).to_pylist())  # DATETIME has no zone
    values: list[Any] = column.to_pylist()
    if dialect.name == "sqlite" and (pa.types.is_temporal(kind) or pa.types.is_decimal(kind)):
        return [None if each is None else str(each) for each in values]
    return values


# ── letters ──
# Letters: events on their way from one shard to another. Pure.

TRANSFERRED_COLUMNS: Final = (
    "fire_at",
    "state",
    "attempts",
    "priority",
    "event_name",
    "event_group",
    "after_group",
    "last_error",
)
"""The columns of an event that go with it, beside the user's. It gets another id."""


class TransferFilter(enum.Enum):
    """Which events are taken out of a table, as a condition in SQL."""

    FAR = (
        "fire_at > %s AND state = 'to_be_fired' AND attempts = 0 "
        "AND event_group IS NULL AND after_group IS NULL"
    )
    """Those that no manager has in memory, because they are due later than its window reaches."""
    HISTORY = "state = 'acked'"
    PLAIN = "after_group IS NULL"
    ALL = "1 = 1"
    """Also those that wait for a group, whose members have to be there before them."""


ONLINE_FILTERS: Final = (TransferFilter.FAR, TransferFilter.HISTORY)
"""What can be moved while a manager fires from the same table."""


class TransferBatch(NamedTuple):
    """Events on their way."""

    number: int
    version: int
    """Of the map that says where they go."""
    rows: list[Row]


def get_transferred_columns(definition: Definition) -> tuple[str, ...]:
    """The columns of an event that go with it."""
    return (*TRANSFERRED_COLUMNS, *definition.names)


def prepare_arrivals(
    rows: Sequence[Row], definition: Definition, taken: Container[str]
) -> list[Row]:
    """Rows as the database takes them to which they came; a name that is taken there is left off.

    What was fired is to be fired again: no ack can reach the manager that did it.
    """
    columns = get_transferred_columns(definition)
    at_state, at_name = columns.index("state"), columns.index("event_name")
    booleans = {column.name for column in definition.columns if column.type == "BOOLEAN"}
    at_booleans = [at for at, name in enumerate(columns) if name in booleans]
    found = []
    for row in rows:
        values = list(map(convert_to_portable, row))
        if values[at_state] == "fired":
            values[at_state] = "to_be_fired"
        if values[at_name] in taken:
            values[at_name] = None
        for at in at_booleans:  # MySQL and SQLite have numbers for them
            values[at] = None if values[at] is None else bool(values[at])
        found.append(tuple(values))
    return found


def convert_to_portable(value: Any) -> Any:  # noqa: ANN401 - whatever a column holds
    """A value as any of the databases takes it."""
    if value is None or isinstance(value, int | float | str | bytes):
        return value
    if isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    return str(value)  # numbers, times and the like, in the form that SQL reads
