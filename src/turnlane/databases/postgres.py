"""PostgreSQL, by psycopg 3. Needs no extension.

**Poolers.** PgBouncer and others may give every transaction another connection to the server. What
belongs to one connection is then lost, or meets another client: statements that the driver
prepared, settings, LISTEN. The server's process number tells: a pooler answers with one of its own
when a client connects. Through a pooler, turnlane uses nothing of the kind.
"""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, LiteralString

import psycopg
from psycopg.conninfo import conninfo_to_dict

from turnlane.databases.connection import ChangeWatcher
from turnlane.databases.dialect import (
    Connection,
    ConnectOptions,
    Dialect,
    ErrorKind,
    Row,
    TlsFiles,
)
from turnlane.errors import ConfigError
from turnlane.logs import get_logger
from turnlane.runtime import Closeable

log = get_logger(__name__)

DEFAULTS: Final = {
    "application_name": "turnlane",
    "connect_timeout": 10,
    # These notice after 25 seconds that a host is gone; the system's own settings take hours.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
"""Connection parameters that the URL may override."""

CANCEL_SECONDS: Final = 5.0

_POLL_SECONDS: Final = 0.1
"""Between two looks at whether a watcher was closed."""

_BY_STATE: Final = {
    "40001": ErrorKind.TRANSIENT,  # serialization failure
    "40P01": ErrorKind.TRANSIENT,  # deadlock detected
    "25P03": ErrorKind.TRANSIENT,  # idle in transaction: ended
    "57014": ErrorKind.TRANSIENT,  # statement timeout
    "55P03": ErrorKind.LOCKED,  # lock not available
    "25006": ErrorKind.READ_ONLY,
    "42P07": ErrorKind.CREATED_CONCURRENTLY,  # the table exists
    "42710": ErrorKind.CREATED_CONCURRENTLY,  # its row type exists
    "23505": ErrorKind.DUPLICATE_KEY,
}
_BY_CLASS: Final = {
    **dict.fromkeys(("08", "53", "57"), ErrorKind.UNAVAILABLE),
    # values, constraints, checks of views, limits on sizes
    **dict.fromkeys(("22", "23", "44", "54"), ErrorKind.REFUSED_DATA),
    # logins, rights, missing tables, states of transactions and objects, the server's disk
    **dict.fromkeys(("25", "28", "3D", "3F", "40", "42", "55", "58"), ErrorKind.NEEDS_OPERATOR),
}
"""By the first two characters of an SQLSTATE."""


class Postgres(Dialect):
    """A PostgreSQL database, version 12 or newer."""

    name = "postgres"
    title = "PostgreSQL"
    now = "((extract(epoch FROM clock_timestamp()) * 1000000000)::bigint)"
    share = "FOR SHARE"
    lock = "FOR UPDATE"
    lock_free = "FOR UPDATE SKIP LOCKED"
    snapshot_query = (
        "SELECT txid_snapshot_xmin(s), txid_snapshot_xmax(s) FROM txid_current_snapshot() AS s"
    )

    def __init__(self, url: str, options: ConnectOptions) -> None:
        try:
            given = conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            # The driver's message may repeat the password.
            raise ConfigError("url", "is not a URL that PostgreSQL's driver can read") from None
        self._arguments: dict[str, Any] = {**DEFAULTS, **given, **_arguments_of(options)}
        # Poolers refuse settings in the parameter `options` of a connection.
        self._limit = None if options.timeout is None else max(1, int(options.timeout * 1000))
        self._has_met_pooler = False

    def connect(self) -> psycopg.Connection:
        with contextlib.ExitStack() as on_error:
            connection = psycopg.connect(**self._arguments, autocommit=True)
            on_error.callback(connection.close)
            found = connection.execute("SELECT pg_backend_pid()").fetchone()
            if found != (connection.info.backend_pid,):
                connection.prepare_threshold = None
                self._report_pooler()
            else:
                self._set_limits(connection, "SESSION")
            on_error.pop_all()
        return connection

    def _set_limits(self, connection: psycopg.Connection, scope: LiteralString) -> None:
        if self._limit is not None:
            connection.execute(
                f"SET {scope} statement_timeout = {self._limit}; "
                f"SET {scope} lock_timeout = {self._limit}"
            )

    def is_pooled(self, connection: psycopg.Connection) -> bool:
        return connection.prepare_threshold is None

    def _report_pooler(self) -> None:
        if not self._has_met_pooler:
            self._has_met_pooler = True
            log.warning(
                "database.pooler_found",
                hint="going on without prepared statements, settings of the planner and LISTEN; "
                "connect to PostgreSQL itself for the shortest delays",
            )

    def connect_for_index_scans(self) -> psycopg.Connection:
        connection = self.connect()
        if self.is_pooled(connection):
            return connection
        # Statistics about a queue are soon wrong; with them, the planner would read and sort all
        # of it to return a page. A vacuum leaves the workers to sessions that need them.
        connection.execute(
            "SET enable_seqscan = off; SET enable_bitmapscan = off; "
            "SET max_parallel_maintenance_workers = 0"
        )
        return connection

    @contextlib.contextmanager
    def transaction(self, connection: psycopg.Connection) -> Iterator[None]:
        with connection.transaction():
            if self.is_pooled(connection):
                self._set_limits(connection, "LOCAL")
            yield

    def cancel(self, connection: psycopg.Connection) -> None:
        connection.cancel_safe(timeout=CANCEL_SECONDS)

    def get_descriptor(self, connection: psycopg.Connection) -> int:
        return connection.fileno()

    def is_alive(self, connection: psycopg.Connection) -> bool:
        if connection.closed:
            return False
        # No statement is under way: the server sends something only when it closes the connection.
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        return not poll.poll(0)

    def watch(self, channel: str, subject: str, on_change: Callable[[], None]) -> Closeable:
        def listen(connection: Connection, closed: threading.Event) -> None:
            if self.is_pooled(connection):
                connection.close()  # the manager polls
                closed.wait()
                return
            connection.execute(f"LISTEN {channel}")
            on_change()
            while not closed.is_set():
                for notice in connection.notifies(timeout=_POLL_SECONDS):
                    if notice.payload == subject:
                        on_change()
                    if closed.is_set():
                        return

        return ChangeWatcher(self, listen)

    @property
    def error(self) -> type[Exception]:
        return psycopg.Error

    def classify_error(self, error: Exception) -> ErrorKind:
        if not isinstance(error, psycopg.Error):
            return ErrorKind.UNKNOWN
        state = error.sqlstate
        if state is None:  # the server said nothing
            if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
                return ErrorKind.UNAVAILABLE
            refused = isinstance(error, psycopg.DataError)
            return ErrorKind.REFUSED_DATA if refused else ErrorKind.NEEDS_OPERATOR
        # IF NOT EXISTS does not wait for others that create the same table or function.
        catalog = state == "23505" and (error.diag.constraint_name or "").startswith("pg_")
        if catalog or (state == "XX000" and "concurrently updated" in str(error)):
            return ErrorKind.CREATED_CONCURRENTLY
        return _BY_STATE.get(state) or _BY_CLASS.get(state[:2], ErrorKind.UNKNOWN)

    def is_unreadable(self, error: Exception) -> bool:
        # An error of the server has a state.
        return isinstance(error, psycopg.DataError) and error.sqlstate is None

    def cast_to_raw(self, column: str) -> str:
        return f"{column}::text"

    def match_ids(self, ids: Sequence[int]) -> tuple[str, Row]:
        # As text: the driver would look at each number by itself.
        return "= ANY(%s::bigint[])", (f"{{{','.join(map(str, ids))}}}",)

    def insert_many(
        self, connection: Connection, table: str, columns: Sequence[str], rows: Iterable[Row]
    ) -> None:
        names = ", ".join(map(self.quote_bare_name, columns))
        statement = f"COPY {self.quote_bare_name(table)} ({names}) FROM STDIN"
        with connection.cursor() as cursor, cursor.copy(statement) as copy:
            for row in rows:
                copy.write_row(row)

    def stream(
        self, connection: Connection, statement: str, parameters: Row, size: int
    ) -> Iterator[list[Row]]:
        # A cursor on the server: else all rows would be in memory before the first is read.
        with connection.transaction(), connection.cursor(name="turnlane") as cursor:
            cursor.execute(statement, parameters)
            while rows := cursor.fetchmany(size):
                yield rows


def _arguments_of(options: ConnectOptions) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if options.password is not None:
        arguments["password"] = options.password
    if options.tls is not None:
        arguments |= _tls_arguments(options.tls)
    if options.connect_timeout is not None:
        # libpq takes 0 for no limit, and 1 for 2.
        arguments["connect_timeout"] = max(2, int(options.connect_timeout))
    if options.timeout is not None:
        arguments["tcp_user_timeout"] = max(1, int(options.timeout * 1000))
    return arguments


def _tls_arguments(tls: TlsFiles) -> dict[str, str]:
    files = {"sslrootcert": tls.ca or "system", "sslcert": tls.cert, "sslkey": tls.key}
    if not tls.verify:
        del files["sslrootcert"]
    given = {name: str(file) for name, file in files.items() if file is not None}
    return {"sslmode": "verify-full" if tls.verify else "require", **given}
