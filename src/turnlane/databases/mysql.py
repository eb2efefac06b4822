"""MySQL and MariaDB, by PyMySQL."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pymysql
from pymysql.constants import CLIENT, ER
from pymysql.cursors import SSCursor

from turnlane.databases.dialect import (
    MYSQL_TIMEOUTS,
    Connection,
    ConnectOptions,
    Dialect,
    ErrorKind,
    Row,
    parse_mysql_options,
)
from turnlane.errors import ConfigError

ROWS_PER_INSERT: Final = 1_000
"""Enough to make round trips cheap, and far below the largest packet."""

_KINDS: Final[dict[int, ErrorKind]] = {
    **dict.fromkeys(
        (
            ER.LOCK_WAIT_TIMEOUT, ER.LOCK_DEADLOCK, ER.CHECKREAD, ER.QUERY_INTERRUPTED,
            1969,  # it took longer than max_statement_time, in MariaDB
            3024,  # it took longer than max_execution_time, in MySQL
        ),
        ErrorKind.TRANSIENT,
    ),
    **dict.fromkeys((ER.OPTION_PREVENTS_STATEMENT, 1792, 1836), ErrorKind.READ_ONLY),
    **dict.fromkeys(
        (
            0,  # the driver has closed the connection
            # connections
            ER.CON_COUNT_ERROR, ER.SERVER_SHUTDOWN, ER.NORMAL_SHUTDOWN, ER.SHUTDOWN_COMPLETE,
            ER.ABORTING_CONNECTION, ER.NEW_ABORTING_CONNECTION, ER.HANDSHAKE_ERROR,
            ER.NET_READ_ERROR, ER.NET_READ_INTERRUPTED, ER.NET_ERROR_ON_WRITE,
            ER.NET_WRITE_INTERRUPTED, 2002, 2003, 2006, 2013, 2014, 2055,
            1927,  # the connection was killed, in MariaDB
            # disk space, memory, limits of a user
            ER.DISK_FULL, ER.OUT_OF_RESOURCES, ER.RECORD_FILE_FULL, ER.CANT_CREATE_THREAD,
            ER.TOO_MANY_USER_CONNECTIONS, ER.USER_LIMIT_REACHED, ER.CANT_LOCK, ER.ERROR_ON_WRITE,
            ER.LOCK_TABLE_FULL,
        ),
        ErrorKind.UNAVAILABLE,
    ),
    ER.DUP_ENTRY: ErrorKind.DUPLICATE_KEY,
    ER.NET_PACKET_TOO_LARGE: ErrorKind.TOO_LARGE,
    **dict.fromkeys(
        (
            ER.BAD_NULL_ERROR, ER.DATA_TOO_LONG, ER.WARN_DATA_OUT_OF_RANGE,
            ER.TRUNCATED_WRONG_VALUE, ER.TRUNCATED_WRONG_VALUE_FOR_FIELD, ER.WARN_DATA_TRUNCATED,
            ER.NO_REFERENCED_ROW, ER.NO_REFERENCED_ROW_2, ER.ILLEGAL_VALUE_FOR_TYPE,
            ER.DIVISION_BY_ZERO, ER.TOO_BIG_ROWSIZE, ER.CANT_CREATE_GEOMETRY_OBJECT,
            3140,  # invalid JSON, in MySQL
            3819,  # a CHECK, in MySQL
            4025,  # a CHECK, in MariaDB: JSON is one there
        ),
        ErrorKind.REFUSED_DATA,
    ),
    **dict.fromkeys(
        (
            ER.ACCESS_DENIED_ERROR, ER.DBACCESS_DENIED_ERROR, ER.TABLEACCESS_DENIED_ERROR,
            ER.COLUMNACCESS_DENIED_ERROR, ER.SPECIFIC_ACCESS_DENIED_ERROR, ER.HOST_IS_BLOCKED,
            ER.HOST_NOT_PRIVILEGED, ER.NO_SUCH_TABLE, ER.BAD_DB_ERROR, ER.NO_DB_ERROR,
            ER.BAD_FIELD_ERROR, ER.NO_DEFAULT_FOR_FIELD,
        ),
        ErrorKind.NEEDS_OPERATOR,
    ),
}  # fmt: skip
_CLIENT_ERRORS: Final = range(2000, 3000)
"""Errors of the driver itself: TLS, authentication, the protocol."""


class Mysql(Dialect):
    """A MySQL 8 or MariaDB 10.6 database, or a newer one."""

    name = "mysql"
    title = "MySQL"
    quote = "`"
    now = "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) * 1000)"
    share = "LOCK IN SHARE MODE"
    lock = "FOR UPDATE"
    lock_free = "FOR UPDATE SKIP LOCKED"
    has_returning = False
    insert_or_ignore = ("INSERT IGNORE INTO", "")

    def __init__(self, url: str, options: ConnectOptions) -> None:
        parts = urlsplit(url)
        self._arguments: dict[str, Any] = {
            "host": parts.hostname or "localhost",
            "port": parts.port or 3306,
            "user": unquote(parts.username or options.mysql_user),
            "password": unquote(parts.password or ""),
            "database": unquote(parts.path.strip("/")),
            "program_name": "turnlane",
            **MYSQL_TIMEOUTS,
        }
        try:
            self._arguments |= parse_mysql_options(url)
        except ValueError as error:
            raise ConfigError("url", str(error)) from None
        if options.password is not None:
            self._arguments["password"] = options.password
        if options.connect_timeout is not None:
            self._arguments["connect_timeout"] = max(1, int(options.connect_timeout))
        if options.timeout is not None:
            seconds = max(1, int(options.timeout))
            self._arguments |= {"read_timeout": seconds, "write_timeout": seconds}
        if options.tls is not None:
            self._arguments.pop("ssl_ca", None)
        self._tls = options.tls

    def connect(self) -> pymysql.Connection[Any]:
        return pymysql.connect(
            **self._arguments,
            ssl=None if self._tls is None else self._tls.make_context(),
            autocommit=True,
            charset="utf8mb4",
            client_flag=CLIENT.FOUND_ROWS,
            # Snapshots are per statement, as in PostgreSQL; locks are on rows, not on gaps.
            init_command="SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
        )

    def connect_for_index_scans(self) -> pymysql.Connection[Any]:
        connection = self.connect()
        # MariaDB would turn a long list of ids into a temporary table; MySQL has no such setting.
        with contextlib.suppress(pymysql.MySQLError), connection.cursor() as cursor:
            cursor.execute("SET SESSION in_predicate_conversion_threshold = 0")
        return connection

    @contextlib.contextmanager
    def transaction(self, connection: pymysql.Connection[Any]) -> Iterator[None]:
        connection.begin()
        try:
            yield
            connection.commit()
        except BaseException:
            with contextlib.suppress(pymysql.MySQLError, OSError):
                connection.rollback()
            raise

    def get_descriptor(self, connection: pymysql.Connection[Any]) -> int | None:
        found = connection._sock  # noqa: SLF001 - the driver has no public name for it
        return None if found is None else int(found.fileno())

    def is_alive(self, connection: pymysql.Connection[Any]) -> bool:
        try:
            connection.ping(reconnect=False)
        except pymysql.MySQLError:
            return False
        return True

    @property
    def error(self) -> type[Exception]:
        root: type[Exception] = pymysql.MySQLError
        return root

    def classify_error(self, error: Exception) -> ErrorKind:
        if not isinstance(error, pymysql.MySQLError):
            return ErrorKind.UNKNOWN
        if isinstance(error, pymysql.InterfaceError):
            return ErrorKind.UNAVAILABLE
        code = error.args[0] if error.args and isinstance(error.args[0], int) else None
        if code is None:  # a value that the driver cannot write, such as NaN
            return ErrorKind.REFUSED_DATA
        if code in _KINDS:
            return _KINDS[code]
        if code in _CLIENT_ERRORS:
            return ErrorKind.NEEDS_OPERATOR
        refused = isinstance(error, pymysql.DataError | pymysql.IntegrityError)
        return ErrorKind.REFUSED_DATA if refused else ErrorKind.UNKNOWN

    def match_ids(self, ids: Sequence[int]) -> tuple[str, Row]:
        # The driver would write each number by itself; int() keeps anything else out.
        return f"IN ({', '.join(str(int(each)) for each in ids)})", ()

    def insert_many(
        self, connection: Connection, table: str, columns: Sequence[str], rows: Iterable[Row]
    ) -> None:
        names = ", ".join(map(self.quote_name, columns))
        marks = f"({', '.join(['%s'] * len(columns))})"
        remaining = iter(rows)
        with connection.cursor() as cursor:
            while chunk := list(itertools.islice(remaining, ROWS_PER_INSERT)):
                values = ", ".join([marks] * len(chunk))
                statement = f"INSERT INTO {self.quote_name(table)} ({names}) VALUES {values}"
                cursor.execute(statement, tuple(itertools.chain.from_iterable(chunk)))

    def stream(
        self, connection: Connection, statement: str, parameters: Row, size: int
    ) -> Iterator[list[Row]]:
        # Unbuffered: else all rows would be in memory before the first is read.
        with connection.cursor(SSCursor) as cursor:
            cursor.execute(statement, parameters)
            while rows := cursor.fetchmany(size):
                yield list(rows)
