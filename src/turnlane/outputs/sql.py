"""Output ``sql``: events as rows of a table in PostgreSQL, MySQL, MariaDB or SQLite.

Each thread that sends has a writer, which is one connection. A writer writes all rows of a block in
one transaction, together with the record of delivered offsets if the output delivers exactly once.
The databases differ in how they take many rows: PostgreSQL copies CSV that Arrow writes, MySQL and
SQLite insert Python values.
"""

from __future__ import annotations

import abc
import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv
from pydantic import AfterValidator, Field, model_validator

from turnlane.databases import (
    ConnectOptions,
    Dialect,
    check_url_setting,
    execute_statement,
    get_delivery_error,
    get_dialect_name,
    load_dialect,
)
from turnlane.errors import Never, PayloadTooLarge, RetryLater, TurnlaneError
from turnlane.events import Block
from turnlane.formats.lines import join_columns
from turnlane.logs import get_logger
from turnlane.outputs.api import ExactlyOnceSettings, Output, OutputSettings
from turnlane.outputs.connections import ClientTls, ConnectionPool, abort_descriptor
from turnlane.outputs.sql_rows import DeliveryRecord, TableRows, build_rows
from turnlane.outputs.templates import ISO_TIME
from turnlane.runtime import Closeable, read_secret
from turnlane.units import Duration
from turnlane.validation import ConfigIssue, ContradictorySettings

log = get_logger(__name__)

# ── settings ─────────────────────────────────────────────────────────────────────────────────────

_EXAMPLES: Final = ["postgresql://user@host/db", "mysql://user@host/db", "sqlite:///file.db"]


def _check_url(url: str) -> str:
    if get_dialect_name(url) is None:
        raise ValueError(f"must be a URL such as {', '.join(_EXAMPLES)}")
    if get_dialect_name(url) == "sqlite" and not url.startswith("sqlite:///"):
        raise ValueError("write sqlite:///file.db, or sqlite:////tmp/file.db for an absolute path")
    return check_url_setting(url)


Name = Annotated[str, Field(pattern=r"^\w[\w$ -]*$")]
TableName = Annotated[str, Field(pattern=r"^\w[\w$ -]*(\.\w[\w$ -]*)?$")]


class SqlSettings(ExactlyOnceSettings, OutputSettings):
    """The settings of the output ``sql``."""

    url: Annotated[str, AfterValidator(_check_url)] = Field(
        description="The database, without a password.", examples=_EXAMPLES
    )
    password_env: str | None = Field(
        default=None, description="The environment variable that has the password."
    )
    password_file: Path | None = Field(default=None, description="The file that has the password.")
    tls: ClientTls | None = Field(
        default=None,
        description="Require TLS: the authorities to trust, and the certificate to present.",
    )
    table: TableName = Field(description="The table, which must exist.")
    columns: dict[Name, str] = Field(
        min_length=1,
        description="The table's columns, each with its source: a column of the events, "
        "a path such as `headers.team` or `value.user.id` (into JSON), or `event_id`.",
    )
    key: tuple[Name, ...] = Field(
        default=(),
        description="Columns that have a unique index: a row replaces another with the same key.",
    )
    connect_timeout: Duration = Field(
        default=10.0, gt=0, description="How long it may take to connect."
    )
    timeout: Duration = Field(
        default=20.0, gt=0, description="How long a statement, or waiting for a lock, may take."
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        issues = [
            ConfigIssue("key", f"{name} is not one of the columns")
            for name in self.key
            if name not in self.columns
        ]
        issues += self.find_exactly_once_issues()
        if self.tls is not None and get_dialect_name(self.url) == "sqlite":
            issues.append(ConfigIssue("tls", "needs a database server; sqlite is a file"))
        if issues:
            raise ContradictorySettings(issues)
        return self


# ── writers ──────────────────────────────────────────────────────────────────────────────────────


class TableWriter(Closeable):
    """One connection. One thread uses it at a time; only :meth:`cancel` is for another one.

    Raises turnlane's errors, and the driver's error where its meaning is unknown.
    """

    def __init__(self, dialect: Dialect, settings: SqlSettings) -> None:
        self._dialect = dialect
        self.settings = settings
        quote = dialect.quote_name
        self._table = ".".join(map(quote, settings.table.split(".")))
        self._columns = ", ".join(map(quote, settings.columns))
        self._key = ", ".join(map(quote, settings.key))
        self._record: DeliveryRecord | None = None
        name = settings.get_delivery_name(settings.table)
        if name is not None:
            self._record = DeliveryRecord(name, quote, self.execute, self.transaction, dialect.lock)
        with self._translate_errors():
            self._connection = dialect.connect()
            try:
                self._inspect_table()
            except BaseException:
                self.close()
                raise

    @abc.abstractmethod
    def _inspect_table(self) -> None:
        """Set the connection up; fails if the table or a column does not exist."""

    @abc.abstractmethod
    def insert(self, rows: pa.RecordBatch) -> None:
        """Write rows; a row replaces another one with the same key."""

    @property
    def is_open(self) -> bool:
        """Whether the server has not closed the connection."""
        return self._dialect.is_alive(self._connection)

    def cancel(self) -> None:
        """Make the statement of another thread fail; the connection is of no use afterwards."""
        with contextlib.suppress(self._dialect.error):  # it may be closed already
            descriptor = self._dialect.get_descriptor(self._connection)
            if descriptor is None:
                self._dialect.cancel(self._connection)
            else:
                # The thread fails at once, even if the server does not answer.
                abort_descriptor(descriptor)

    def close(self) -> None:
        with contextlib.suppress(self._dialect.error):
            self._connection.close()

    def write(self, rows: TableRows) -> None:
        """Write all rows in one transaction, except the rows that an earlier one wrote."""
        with self._translate_errors():
            record, new = self._record if rows.positions else None, rows.columns
            if record is not None:
                record.prepare(rows.positions)
            with self.transaction():
                if record is not None:
                    new = new.take(record.record(rows.positions))
                if new.num_rows:
                    self.insert(new)
            repeats = rows.columns.num_rows - new.num_rows
            if repeats:
                table = self.settings.table
                log.info("sql.repeated_events_skipped", table=table, events=repeats)

    def execute(self, statement: str, values: Sequence[Any]) -> Sequence[Any]:
        """Run a statement whose parameters are ``?``; returns its rows."""
        placed = statement.replace("?", self._dialect.placeholder)
        return execute_statement(self._connection, placed, values).rows()

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        """Run a transaction; an exception rolls it back."""
        return self._dialect.transaction(self._connection)

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except TurnlaneError:
            raise
        except Exception as error:
            meaning = get_delivery_error(self._dialect, error)
            if meaning is None:
                raise
            raise meaning from error

    def _select_nothing(self) -> str:
        return f"SELECT {self._columns} FROM {self._table} LIMIT 0"  # noqa: S608 - quoted names

    def _insert_values(self) -> str:
        values = ", ".join([self._dialect.placeholder] * len(self.settings.columns))
        return f"INSERT INTO {self._table} ({self._columns}) VALUES ({values})"  # noqa: S608

    def _set_others(self, form: str) -> str:
        """Return the columns outside the key, each in a form such as ``{0} = EXCLUDED.{0}``."""
        names = (name for name in self.settings.columns if name not in self.settings.key)
        return ", ".join(form.format(self._dialect.quote_name(name)) for name in names)

    def _on_conflict(self) -> str:
        others = self._set_others("{0} = EXCLUDED.{0}")
        return f"ON CONFLICT ({self._key}) DO " + (f"UPDATE SET {others}" if others else "NOTHING")


# ── PostgreSQL ───────────────────────────────────────────────────────────────────────────────────

_BYTEA: Final = 17
_INCOMING: Final = "turnlane_incoming"
"""A temporary table, for rows that may replace others: COPY itself only adds."""
_ROW: Final = "turnlane_row"
_HEX: Final = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)


class PostgresWriter(TableWriter):
    """Copies rows."""

    def _inspect_table(self) -> None:
        found = self._connection.execute(self._select_nothing())
        codes = (each.type_code for each in found.description)
        self._types = dict(zip(self.settings.columns, codes, strict=True))
        self._is_pooled = self._dialect.is_pooled(self._connection)
        if self.settings.key and not self._is_pooled:
            self._create_incoming("DELETE ROWS")

    def _create_incoming(self, on_commit: str) -> None:
        rows = f"SELECT {self._columns}, CAST(0 AS bigint) AS {_ROW} FROM {self._table}"  # noqa: S608
        self._connection.execute(
            f"CREATE TEMPORARY TABLE {_INCOMING} ON COMMIT {on_commit} AS {rows} WITH NO DATA"
        )

    def insert(self, rows: pa.RecordBatch) -> None:
        if not self.settings.key:
            self._copy(f"{self._table} ({self._columns})", rows)
            return
        if self._is_pooled:  # the next transaction may be on another connection
            self._create_incoming("DROP")
        numbers = pa.array(np.arange(rows.num_rows))
        self._copy(f"{_INCOMING} ({self._columns}, {_ROW})", rows.append_column(_ROW, numbers))
        # The last row of each key; a row without a whole key is a row by itself.
        key = list(map(self._dialect.quote_name, self.settings.key))
        lacking = " OR ".join(f"{name} IS NULL" for name in key)
        distinct = f"{self._key}, CASE WHEN {lacking} THEN {_ROW} END"
        self._connection.execute(
            f"INSERT INTO {self._table} ({self._columns}) "  # noqa: S608 - all names are quoted
            f"SELECT DISTINCT ON ({distinct}) {self._columns} FROM {_INCOMING} "
            f"ORDER BY {distinct}, {_ROW} DESC {self._on_conflict()}"
        )

    def _copy(self, destination: str, rows: pa.RecordBatch) -> None:
        text = write_csv(rows, self._types)
        statement = f"COPY {destination} FROM STDIN (FORMAT csv, ENCODING 'UTF8')"
        with self._connection.cursor() as cursor, cursor.copy(statement) as copy:
            copy.write(text)


def write_csv(rows: pa.RecordBatch, types: Mapping[str, int]) -> memoryview:
    """Return rows as COPY reads them: an empty field is null, and an empty text has quotes."""
    names = rows.schema.names
    columns = [_to_csv(rows.column(name), is_bytes=types.get(name) == _BYTEA) for name in names]
    file = io.BytesIO()
    options = csv.WriteOptions(include_header=False, quoting_style="needed")
    csv.write_csv(pa.RecordBatch.from_arrays(columns, names=names), file, options)
    return file.getbuffer()


def _to_csv(column: Any, *, is_bytes: bool) -> Any:  # noqa: ANN401
    text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    if is_bytes and (text or _is_binary(column)):
        return _to_hexadecimal(column.cast(pa.binary()))
    return _to_text(column, "a text") if _is_binary(column) else column


def _to_hexadecimal(column: Any) -> Any:  # noqa: ANN401
    """Return bytes as PostgreSQL reads them, without a Python object for any of them."""
    offsets = np.frombuffer(column.buffers()[1], dtype=np.int32)
    bounds = offsets[column.offset : column.offset + len(column) + 1].astype(np.int64)
    data = np.frombuffer(column.buffers()[2] or b"", dtype=np.uint8)[bounds[0] : bounds[-1]]
    digits = np.empty(2 * len(data), dtype=np.uint8)
    digits[0::2], digits[1::2] = _HEX[data >> 4], _HEX[data & 15]
    ends = pa.py_buffer((2 * (bounds - bounds[0])).data)
    buffers = [None, ends, pa.py_buffer(digits.data)]
    texts: Any = pa.Array.from_buffers(pa.large_binary(), len(column), buffers)
    marked = join_columns(pa.scalar(b"\\x", pa.large_binary()), texts).cast(pa.large_string())
    return pc.if_else(column.is_valid(), marked, pa.scalar(None, pa.large_string()))


# ── MySQL and MariaDB ────────────────────────────────────────────────────────────────────────────


class MysqlWriter(TableWriter):
    """Inserts many rows with one statement, which the driver builds."""

    def _inspect_table(self) -> None:
        for setting in (
            # A value that does not fit is an error, not another value.
            "sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')",
            "time_zone = '+00:00'",
            # The server gives up before the driver does.
            f"innodb_lock_wait_timeout = {max(1, int(self.settings.timeout) // 2)}",
        ):
            self.execute(f"SET SESSION {setting}", [])
        ((packet,),) = self.execute("SELECT @@max_allowed_packet", [])
        self._largest = int(packet) // 2  # a byte may take two in a statement
        self.execute(self._select_nothing(), [])

    def insert(self, rows: pa.RecordBatch) -> None:
        if rows.nbytes > self._largest:
            raise PayloadTooLarge(f"{rows.nbytes} bytes are too many for max_allowed_packet")
        statement = self._insert_values()
        if self.settings.key:
            # Without other columns to set, the key is set to its own value.
            same = self._dialect.quote_name(self.settings.key[0])
            others = self._set_others("{0} = VALUES({0})") or f"{same} = {same}"
            statement += f" ON DUPLICATE KEY UPDATE {others}"
        with self._connection.cursor() as cursor:
            cursor.executemany(statement, _to_tuples(map(self._convert, rows.columns)))

    @staticmethod
    def _convert(column: Any) -> Any:  # noqa: ANN401
        """Return bytes as text where they are UTF-8: a JSON column takes no bytes."""
        with contextlib.suppress(Never):
            return _to_text(column, "") if _is_binary(column) else column
        return column


# ── SQLite ───────────────────────────────────────────────────────────────────────────────────────

_LOCAL_TIME: Final = "%Y-%m-%dT%H:%M:%S"


class SqliteWriter(TableWriter):
    """Inserts rows one by one: SQLite has no round trips."""

    def _inspect_table(self) -> None:
        self.execute(self._select_nothing(), [])
        *schema, table = self.settings.table.split(".")
        listed = self.execute(
            "SELECT name, type FROM pragma_table_info(?, ?)", [table, *(schema or ["main"])]
        )
        self._blobs = {str(name) for name, kind in listed if "BLOB" in str(kind).upper()}

    def insert(self, rows: pa.RecordBatch) -> None:
        statement = self._insert_values()
        if self.settings.key:
            statement += f" {self._on_conflict()}"
        columns = map(self._convert, rows.columns, rows.schema.names)
        self._connection.executemany(statement, _to_tuples(columns))

    def _convert(self, column: Any, name: str) -> Any:  # noqa: ANN401
        """Return a column as SQLite stores it: numbers, texts and bytes. Times are ISO 8601."""
        kind = column.type
        if pa.types.is_timestamp(kind):
            return pc.strftime(column, _LOCAL_TIME if kind.tz is None else ISO_TIME)
        if _is_binary(column):
            return column if name in self._blobs else _to_text(column, "not a BLOB")
        if pa.types.is_decimal(kind) or pa.types.is_temporal(kind):
            return column.cast(pa.string())
        return column


WRITERS: Final[Mapping[str, type[TableWriter]]] = {
    "postgres": PostgresWriter,
    "mysql": MysqlWriter,
    "sqlite": SqliteWriter,
}
"""By the names of the dialects."""


def _is_binary(column: Any) -> bool:  # noqa: ANN401
    return pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)


def _to_text(column: Any, kind: str) -> Any:  # noqa: ANN401
    """Return bytes as text, for a table's column of another kind than bytes. Raises ``Never``."""
    try:
        return column.cast(pa.large_string())
    except pa.ArrowInvalid:
        raise Never(f"a value is not UTF-8, and its column in the table is {kind}") from None


def _to_tuples(columns: Iterator[Any]) -> list[tuple[Any, ...]]:
    """Return columns as rows that drivers take."""
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


# ── the output ───────────────────────────────────────────────────────────────────────────────────


class SqlOutput(Output):
    """Writes each block in a transaction."""

    settings_type = SqlSettings
    settings: SqlSettings

    def __init__(self, settings: SqlSettings) -> None:
        super().__init__(settings)
        self._writers: ConnectionPool[TableWriter] = ConnectionPool(self._connect)

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """Return the block's events as rows of the table."""
        return build_rows(block, self.settings.columns, with_positions=self.settings.exactly_once)

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        rows: TableRows = prepared
        with self._writers.borrow() as writer:
            writer.write(rows)

    def check(self) -> None:
        """Connect, which also checks the table and its columns."""
        with self._writers.borrow():
            pass

    def cancel(self) -> None:
        self._writers.cancel()

    def close(self) -> None:
        self._writers.close()

    def _connect(self) -> TableWriter:
        settings = self.settings
        options = ConnectOptions(
            password=read_secret("password", settings.password_env, settings.password_file),
            tls=settings.tls,
            connect_timeout=settings.connect_timeout,
            timeout=settings.timeout,
            sqlite_must_exist=True,
        )
        try:
            dialect = load_dialect(settings.url, options)
        except Never as error:  # about the URL or the driver: a person can correct it
            raise RetryLater(str(error)) from error
        return WRITERS[dialect.name](dialect, settings)
