"""SQLite: a file where the task runs."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from turnlane.errors import Never, RetryLater, TurnlaneError
from turnlane.outputs.sql_database import Database, python_rows

PREFIX: Final = "sqlite:///"
_DATA: Final = (sqlite3.IntegrityError, sqlite3.DataError, OverflowError)
_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"
_ZONELESS: Final = "%Y-%m-%dT%H:%M:%S"


class Sqlite(Database):
    """A connection to a file of SQLite."""

    lock_suffix = ""
    """Who writes has locked everything."""
    _connection: sqlite3.Connection

    def connect(self) -> None:
        path = Path(self.target.url.removeprefix(PREFIX))
        if not path.exists():
            raise RetryLater(f"SQLite: there is no {path}")
        self._connection = sqlite3.connect(
            path, timeout=self.target.timeout, isolation_level=None, check_same_thread=False
        )

    def look(self) -> None:
        self.execute(f"SELECT {self.columns} FROM {self.table} LIMIT 0", [])  # noqa: S608
        self._blobs = self._blob_columns()

    def _blob_columns(self) -> set[str]:
        *schema, table = self.target.table.split(".")
        listed = self.execute(
            "SELECT name, type FROM pragma_table_info(?, ?)", [table, *(schema or ["main"])]
        )
        return {str(name) for name, kind in listed if "BLOB" in str(kind).upper()}

    @property
    def is_open(self) -> bool:
        return True

    def cancel(self) -> None:
        self._connection.interrupt()

    def execute(self, statement: str, values: Sequence[Any]) -> Sequence[Any]:
        return self._connection.execute(statement, values).fetchall()

    def insert(self, rows: pa.RecordBatch) -> None:
        names = rows.schema.names
        plain = {name: _stored(rows.column(name), name in self._blobs) for name in names}
        self._connection.executemany(self._statement(), python_rows(rows, plain))

    def _statement(self) -> str:
        values = ", ".join(["?"] * len(self.target.columns))
        insert = f"INSERT INTO {self.table} ({self.columns}) VALUES ({values})"  # noqa: S608
        if not self.target.key:
            return insert
        key = ", ".join(map(self.quoted, self.target.key))
        others = self.others("{0} = excluded.{0}")
        return f"{insert} ON CONFLICT ({key}) DO " + (
            f"UPDATE SET {others}" if others else "NOTHING"
        )

    def begin(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._connection.execute("COMMIT")

    def rollback(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("ROLLBACK")

    def understood(self, error: Exception) -> TurnlaneError | None:
        if isinstance(error, _DATA):
            return Never(f"SQLite: {error}")
        # Locked, full, damaged, or without the table: no event is to blame.
        if isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError:
            return RetryLater(f"SQLite: {error}")
        return None

    def close(self) -> None:
        self._connection.close()


def _stored(column: Any, is_blob: bool) -> Any:  # noqa: ANN401, FBT001
    """A column as SQLite keeps it: numbers, texts and bytes. Times are ISO 8601."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        return pc.strftime(column, _ZONELESS if kind.tz is None else _TIME)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return column if is_blob else _text(column)
    if pa.types.is_decimal(kind) or pa.types.is_temporal(kind):
        return column.cast(pa.string())
    return column


def _text(column: Any) -> Any:  # noqa: ANN401
    try:
        return column.cast(pa.large_string())
    except pa.ArrowInvalid:
        raise Never("a value is no UTF-8, and its column in the table is no BLOB") from None
