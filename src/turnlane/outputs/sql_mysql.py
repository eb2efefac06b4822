"""MySQL and MariaDB: rows are inserted many at a time."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pymysql
from pymysql.constants import ER

from turnlane.errors import Never, PayloadTooLarge, RetryLater, TurnlaneError
from turnlane.outputs.http_connections import hang_up
from turnlane.outputs.sql_database import Database, python_rows

_DATA: Final = frozenset(
    {
        ER.BAD_NULL_ERROR, ER.DUP_ENTRY, ER.DATA_TOO_LONG, ER.WARN_DATA_OUT_OF_RANGE,
        ER.TRUNCATED_WRONG_VALUE, ER.TRUNCATED_WRONG_VALUE_FOR_FIELD, ER.WARN_DATA_TRUNCATED,
        ER.NO_REFERENCED_ROW, ER.NO_REFERENCED_ROW_2, ER.ILLEGAL_VALUE_FOR_TYPE,
        ER.DIVISION_BY_ZERO, ER.TOO_BIG_ROWSIZE, ER.CANT_CREATE_GEOMETRY_OBJECT,
        3140,  # invalid JSON, in MySQL
        3819,  # a CHECK, in MySQL
        4025,  # a CHECK, in MariaDB: JSON is one there
    }
)  # fmt: skip
"""Errors that lie in the events. What they have in common is no class of the driver's."""
_CLIENT: Final = range(2000, 3000)
"""Errors of the driver itself: the connection."""
_PASSING: Final = frozenset(
    {
        ER.LOCK_WAIT_TIMEOUT, ER.LOCK_DEADLOCK, ER.CON_COUNT_ERROR, ER.TOO_MANY_USER_CONNECTIONS,
        ER.ACCESS_DENIED_ERROR, ER.DBACCESS_DENIED_ERROR, ER.TABLEACCESS_DENIED_ERROR,
        ER.COLUMNACCESS_DENIED_ERROR, ER.SPECIFIC_ACCESS_DENIED_ERROR, ER.NO_SUCH_TABLE,
        ER.BAD_DB_ERROR, ER.NO_DB_ERROR, ER.BAD_FIELD_ERROR, ER.NO_DEFAULT_FOR_FIELD,
        ER.OPTION_PREVENTS_STATEMENT, ER.SERVER_SHUTDOWN, ER.DISK_FULL, ER.RECORD_FILE_FULL,
        ER.QUERY_INTERRUPTED, ER.NEW_ABORTING_CONNECTION, ER.HOST_IS_BLOCKED,
        ER.HOST_NOT_PRIVILEGED, ER.OUT_OF_RESOURCES, ER.CANT_LOCK, ER.ERROR_ON_WRITE,
        ER.LOCK_TABLE_FULL, ER.HANDSHAKE_ERROR, ER.NET_READ_ERROR, ER.NET_WRITE_INTERRUPTED,
        ER.NET_READ_INTERRUPTED, ER.NET_ERROR_ON_WRITE,
        1927,  # the connection was killed, in MariaDB
        1969,  # it took longer than max_statement_time, in MariaDB
        3024,  # it took longer than max_execution_time, in MySQL
    }
)  # fmt: skip
"""Errors that pass, or that a person has to put right."""


class MySql(Database):
    """A connection to MySQL or MariaDB."""

    quote_mark = "`"
    _connection: Any

    def connect(self) -> None:
        target = self.target
        seconds = max(1, int(target.timeout))
        self._connection = pymysql.connect(
            **_place(target.url),
            password=target.password or "",
            ssl=target.tls.context() if target.tls is not None else None,
            charset="utf8mb4",
            connect_timeout=max(1, int(target.connect_timeout)),
            read_timeout=seconds,
            write_timeout=seconds,
            program_name="turnlane",
        )

    def look(self) -> None:
        for setting in (
            # A value that does not fit is an error, not another value.
            "sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')",
            "time_zone = '+00:00'",
            # Heard of before the driver loses patience.
            f"innodb_lock_wait_timeout = {max(1, int(self.target.timeout) // 2)}",
            "TRANSACTION ISOLATION LEVEL READ COMMITTED",
        ):
            self.execute(f"SET SESSION {setting}", [])
        ((packet,),) = self.execute("SELECT @@max_allowed_packet", [])
        self._largest = int(packet) // 2  # in a statement a byte may take two
        self.execute(f"SELECT {self.columns} FROM {self.table} LIMIT 0", [])  # noqa: S608
        self.commit()

    @property
    def is_open(self) -> bool:
        try:
            self._connection.ping(reconnect=False)
        except pymysql.Error:
            return False
        return True

    def cancel(self) -> None:
        connection: socket.socket | None = self._connection._sock  # noqa: SLF001 - it has no name
        if connection is not None:
            hang_up(connection)

    def execute(self, statement: str, values: Sequence[Any]) -> Sequence[Any]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement.replace("?", "%s"), list(values) or None)
            rows: Sequence[Any] = cursor.fetchall()
            return rows

    def insert(self, rows: pa.RecordBatch) -> None:
        if rows.nbytes > self._largest:
            raise PayloadTooLarge(f"{rows.nbytes} bytes are too many for max_allowed_packet")
        texts = {name: _as_text(rows.column(name)) for name in rows.schema.names}
        with self._connection.cursor() as cursor:
            cursor.executemany(self._statement(), python_rows(rows, texts))

    def _statement(self) -> str:
        values = ", ".join(["%s"] * len(self.target.columns))
        insert = f"INSERT INTO {self.table} ({self.columns}) VALUES ({values})"  # noqa: S608
        if not self.target.key:
            return insert
        # With nothing else to set, the key is set to what it is.
        same = self.quoted(self.target.key[0])
        others = self.others("{0} = VALUES({0})") or f"{same} = {same}"
        return f"{insert} ON DUPLICATE KEY UPDATE {others}"

    def begin(self) -> None:
        self._connection.begin()

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        with contextlib.suppress(pymysql.Error):
            self._connection.rollback()

    def understood(self, error: Exception) -> TurnlaneError | None:
        if not isinstance(error, pymysql.Error):
            return None
        number = error.args[0] if error.args and isinstance(error.args[0], int) else None
        return meaning(number, str(error.args[-1] if error.args else error))

    def close(self) -> None:
        with contextlib.suppress(pymysql.Error):
            self._connection.close()


def meaning(number: int | None, text: str) -> TurnlaneError | None:
    """What an error means for the events. Without a number it is a value that cannot be written."""
    said = f"MySQL: {text}"
    if number is None or number in _DATA:
        return Never(said)
    if number == ER.NET_PACKET_TOO_LARGE:
        return PayloadTooLarge(said)
    return RetryLater(said) if number in _PASSING or number in _CLIENT or not number else None


def _as_text(column: Any) -> Any:  # noqa: ANN401
    """Bytes as text where they are: a column of JSON takes no bytes."""
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        return column
    try:
        return column.cast(pa.large_string())
    except pa.ArrowInvalid:
        return column


def _place(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    sockets = parse_qs(parts.query).get("unix_socket")
    return {
        "host": parts.hostname or "localhost",
        "port": parts.port or 3306,
        "user": unquote(parts.username or ""),
        "database": unquote(parts.path.strip("/")),
        "unix_socket": sockets[0] if sockets else None,
    }
