"""Rows of a queue table: their Arrow types, their conversion both ways, and their insertion.

Every way into a table uses the same checks and the same statement: users' transactions, the
manager, the ``table`` output, Spark, schedules, and rows that another shard sends.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from turnlane.databases import Connection, Dialect, Row, translate_errors
from turnlane.errors import SchemaMismatch
from turnlane.table.definition import INSERT_COLUMNS, SYSTEM_COLUMNS, TIME_TYPE, Definition

NANOSECONDS_PER_MICROSECOND: Final = 1_000


def get_schema(definition: Definition) -> pa.Schema:
    """Return all columns of a queue's rows, the system columns first; times in microseconds."""
    users = {column.name: column.arrow_type for column in definition.columns}
    return pa.schema([pa.field(name, kind) for name, kind in {**SYSTEM_COLUMNS, **users}.items()])


# ── from the table ───────────────────────────────────────────────────────────────────────────────


def build_block(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    """Convert rows of a database to an Arrow batch."""
    values = zip(*rows, strict=True) if rows else ([] for _ in schema)
    arrays = [_build_array(field, column) for field, column in zip(schema, values, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _build_array(field: pa.Field[Any], values: Iterable[Any]) -> pa.Array[Any]:
    array: pa.Array[Any]
    if field.name == "fire_at" and pa.types.is_timestamp(field.type):
        microseconds = [each // NANOSECONDS_PER_MICROSECOND for each in values]
        array = pa.array(microseconds, pa.int64()).cast(TIME_TYPE)
        return array
    kind = "decimal" if pa.types.is_decimal(field.type) else str(field.type)
    convert = _CONVERTERS.get(kind)
    if convert is not None:
        values = [None if each is None else convert(each) for each in values]
    array = pa.array(values, field.type)
    return array


def _convert_to_text(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _convert_to_time(value: object) -> dt.datetime:
    time = value if isinstance(value, dt.datetime) else dt.datetime.fromisoformat(str(value))
    return time.replace(tzinfo=dt.UTC) if time.tzinfo is None else time


def _convert_to_date(value: object) -> dt.date:
    return value if isinstance(value, dt.date) else dt.date.fromisoformat(str(value))


_CONVERTERS: Final[Mapping[str, Callable[[Any], object]]] = {
    "bool": bool,
    "string": _convert_to_text,
    "binary": bytes,
    "decimal": lambda value: Decimal(str(value)),
    str(TIME_TYPE): _convert_to_time,
    "date32[day]": _convert_to_date,
}
"""For values that drivers return in another form than Arrow takes: SQLite returns times as texts
and booleans as numbers."""


def convert_to_portable(value: Any) -> Any:  # noqa: ANN401 - a column of any type
    """Convert a value of one database to a value that every database takes."""
    if value is None or isinstance(value, int | float | str | bytes):
        return value
    if isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    return str(value)  # decimals, times and others, in the form that SQL reads


# ── into the table ───────────────────────────────────────────────────────────────────────────────


def check_columns(names: Collection[str], definition: Definition) -> None:
    """Raise ``SchemaMismatch`` if an insert cannot set a column, or lacks a required one."""
    allowed = (*INSERT_COLUMNS, *definition.column_names)
    for name in names:
        if name not in allowed:
            raise SchemaMismatch(
                f"{definition.name!r} takes no column {name!r}; it takes {', '.join(allowed)}"
            )
    for column in definition.columns:
        if column.required and column.name not in names:
            raise SchemaMismatch(f"{definition.name!r}: column {column.name!r} needs a value")


def cast_batch(batch: pa.RecordBatch, definition: Definition) -> pa.RecordBatch:
    """Return the batch with its columns in the table's types, and fire times in nanoseconds.

    Fire times may be times, texts in ISO 8601, or nanoseconds since the epoch. Raises
    ``SchemaMismatch`` if a value does not fit its column.
    """
    check_columns(batch.schema.names, definition)
    schema = get_schema(definition)
    arrays = []
    for name in batch.schema.names:
        try:
            arrays.append(_cast_column(batch.column(name), name, schema.field(name).type))
        except (pa.ArrowException, ValueError) as error:
            raise SchemaMismatch(f"column {name!r}: {error}") from None
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _cast_column(column: Any, name: str, kind: pa.DataType) -> Any:  # noqa: ANN401 - Arrow's columns
    if name != "fire_at":
        return column.cast(kind)
    if pa.types.is_integer(column.type):
        return column.cast(pa.int64())
    microseconds = column.cast(TIME_TYPE, safe=False).cast(pa.int64())
    return pc.multiply_checked(microseconds, NANOSECONDS_PER_MICROSECOND)


def convert_to_rows(batch: pa.RecordBatch, dialect: Dialect) -> list[dict[str, Any]]:
    """Convert a batch of :func:`cast_batch` to rows for the database.

    Leaves out null system columns: for the database, a null is not the column's default.
    """
    names = batch.schema.names
    columns = [_convert_to_values(batch.column(name), dialect) for name in names]
    return [
        {
            name: value
            for name, value in zip(names, values, strict=True)
            if value is not None or name not in INSERT_COLUMNS
        }
        for values in zip(*columns, strict=True)
    ]


def _convert_to_values(column: Any, dialect: Dialect) -> list[Any]:  # noqa: ANN401 - Arrow's columns
    kind = column.type
    if pa.types.is_timestamp(kind) and dialect.name == "mysql":
        return list(column.cast(pa.timestamp("us")).to_pylist())  # DATETIME has no time zone
    values: list[Any] = column.to_pylist()
    if dialect.name == "sqlite" and (pa.types.is_temporal(kind) or pa.types.is_decimal(kind)):
        return [None if each is None else str(each) for each in values]
    return values


class EventInserter:
    """Inserts events into one queue. Holds no connection. Thread-safe."""

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self.dialect = dialect
        self.definition = definition
        self._name = definition.name

    def enqueue(
        self, connection: Connection, row: Mapping[str, Any], delay: float | None = None
    ) -> int:
        """Insert one event in the open transaction of ``connection``; returns its id."""
        self._check_columns(row)
        names = [self.dialect.quote_name(name) for name in row]
        marks = [self.dialect.placeholder] * len(names)
        values = list(row.values())
        if delay is not None:
            names.append("fire_at")
            marks.append(f"{self.dialect.now} + {self.dialect.placeholder}")
            values.append(round(delay * 1e9))
        cursor = connection.cursor()
        cursor.execute(self.build_statement(names, marks), tuple(values))
        return int(cursor.fetchone()[0] if self.dialect.has_returning else cursor.lastrowid)

    def enqueue_many(self, connection: Connection, rows: Iterable[Mapping[str, Any]]) -> int:
        """Insert events in the open transaction of ``connection``; returns how many."""
        listed = list(rows)
        by_columns: dict[tuple[str, ...], list[Row]] = {}
        for row in listed:
            by_columns.setdefault(tuple(row), []).append(tuple(row.values()))
        for columns in by_columns:
            self._check_columns(columns)
        for columns, values in by_columns.items():
            self.dialect.insert_many(connection, self._name, columns, values)
        return len(listed)

    def insert_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert events in a transaction and a connection of their own."""
        with (
            translate_errors(self.dialect),
            contextlib.closing(self.dialect.connect()) as connection,
            self.dialect.transaction(connection),
        ):
            self.enqueue_many(connection, rows)

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Raise ``ValueError`` if a row has a column that an insert cannot set."""
        for columns in {tuple(row) for row in rows}:
            self._check_columns(columns)

    def build_statement(self, names: Sequence[str], marks: Sequence[str], rows: int = 1) -> str:
        """Return a statement that inserts ``rows`` rows.

        It returns their ids if the database has ``RETURNING``.
        """
        if not names:
            names, marks = ["event_group"], ["NULL"]
        returning = " RETURNING event_id" if self.dialect.has_returning else ""
        values = ", ".join([f"({', '.join(marks)})"] * rows)
        table = self.dialect.quote_name(self._name)
        return f"INSERT INTO {table} ({', '.join(names)}) VALUES {values}{returning}"

    def _check_columns(self, columns: Iterable[str]) -> None:
        allowed = (*self.definition.column_names, *INSERT_COLUMNS)
        for name in columns:
            if name not in allowed:
                raise ValueError(
                    f"{name!r} is not a column that an insert into {self._name!r} can set; "
                    f"it can set {', '.join(allowed)}"
                )
