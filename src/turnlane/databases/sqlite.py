"""SQLite: one file, one host, one writer at a time.

SQLite's locks are POSIX locks: when a process closes *any* descriptor of a file, all its locks on
the file are gone, and other processes may then delete the write-ahead log under it. So no other
code of this process may open or close the files of :func:`find_database_inodes`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from turnlane.databases.connection import ChangeWatcher
from turnlane.databases.dialect import Connection, ConnectOptions, Dialect, ErrorKind, Row
from turnlane.errors import ConfigError, RetryLater
from turnlane.runtime import Closeable

BUSY_MS = 5_000
"""How long a writer waits for another one, unless the options say otherwise."""

TURN_SECONDS: Final = 0.001
"""Between two attempts to write while another connection does. The pauses of SQLite itself grow to
100 ms, and then a connection that writes all the time is always first."""

POLL_SECONDS: Final = 0.005
"""Between two looks at the file's change counter, which cost microseconds and no statement."""

_KINDS: Final = {
    sqlite3.SQLITE_BUSY: ErrorKind.TRANSIENT,
    sqlite3.SQLITE_LOCKED: ErrorKind.TRANSIENT,
    sqlite3.SQLITE_READONLY: ErrorKind.READ_ONLY,
    sqlite3.SQLITE_IOERR: ErrorKind.UNAVAILABLE,
    sqlite3.SQLITE_CANTOPEN: ErrorKind.UNAVAILABLE,
    sqlite3.SQLITE_FULL: ErrorKind.UNAVAILABLE,
}


_COMPANIONS: Final = ("", "-wal", "-shm", "-journal")
_opened_paths: set[str] = set()
"""The databases that this process has opened. They stay: another connection may be open."""


def get_database_path(url: str) -> str:
    """Return the path in a URL such as ``sqlite:///shop.db`` or ``sqlite:////var/lib/shop.db``."""
    return unquote(url.partition("://")[2].removeprefix("/"))


def list_files_of(path: str) -> list[str]:
    """Return the absolute path of a database, and of the files that SQLite keeps beside it."""
    return [os.path.abspath(path) + companion for companion in _COMPANIONS]  # noqa: PTH100 - text


def find_database_inodes() -> set[tuple[int, int]]:
    """Return device and inode of all files of databases that this process has opened.

    Safe from any thread. A file is known by its inode, because it may have several names.
    """
    found: set[tuple[int, int]] = set()
    for file in [each for path in list(_opened_paths) for each in list_files_of(path)]:
        with contextlib.suppress(OSError):
            status = os.stat(file)  # noqa: PTH116 - a path is text here
            found.add((status.st_dev, status.st_ino))
    return found


class Sqlite(Dialect):
    """A database file. A file of turnlane's own has write-ahead logging: readers never wait."""

    name = "sqlite"
    title = "SQLite"
    placeholder = "?"
    percent = "%"
    now = "(CAST(ROUND((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000000)"

    def __init__(self, url: str, options: ConnectOptions) -> None:
        self._path = get_database_path(url)
        self._options = options
        if not self._path or self._path == ":memory:":
            raise ConfigError("url", "name a file, which several connections can open")

    def connect(self) -> sqlite3.Connection:
        if self._options.sqlite_must_exist and not Path(self._path).exists():
            raise RetryLater(f"SQLite: there is no {self._path}")
        _opened_paths.add(os.path.abspath(self._path))  # noqa: PTH100 - text
        connection = sqlite3.connect(
            self._path,
            timeout=self._busy_ms / 1000,
            isolation_level=None,
            check_same_thread=False,
        )
        for name, function in self._options.sqlite_functions.items():
            connection.create_function(name, 1, function, deterministic=True)
        if not self._options.sqlite_must_exist:
            self._use_write_ahead_log(connection)
        return connection

    def _use_write_ahead_log(self, connection: sqlite3.Connection) -> None:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            pass  # a file that cannot be written keeps its mode; reading it still works
        except sqlite3.DatabaseError as error:
            connection.close()
            if error.sqlite_errorcode != sqlite3.SQLITE_NOTADB:
                raise
            raise ConfigError(self._path, "is not a database of SQLite") from None

    @property
    def _busy_ms(self) -> int:
        timeout = self._options.timeout
        return BUSY_MS if timeout is None else round(timeout * 1000)

    @contextlib.contextmanager
    def transaction(self, connection: sqlite3.Connection) -> Iterator[None]:
        self._begin(connection)
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
            raise

    def _begin(self, connection: sqlite3.Connection) -> None:
        until = time.monotonic() + self._busy_ms / 1000
        connection.execute("PRAGMA busy_timeout = 0")
        try:
            while True:
                last = time.monotonic() >= until
                try:
                    # IMMEDIATE: a transaction that begins by reading cannot wait for its turn.
                    connection.execute("BEGIN IMMEDIATE")
                    return
                except sqlite3.OperationalError as error:
                    if last or error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                        raise
                time.sleep(TURN_SECONDS)
        finally:
            connection.execute(f"PRAGMA busy_timeout = {self._busy_ms}")

    def cancel(self, connection: sqlite3.Connection) -> None:
        connection.interrupt()

    def watch(
        self,
        channel: str,  # noqa: ARG002 - a file has none
        subject: str,  # noqa: ARG002
        on_change: Callable[[], None],
    ) -> Closeable:
        def listen(connection: Connection, closed: threading.Event) -> None:
            last_version = None
            while not closed.wait(POLL_SECONDS):
                # Every commit of another connection changes the counter.
                version = connection.execute("PRAGMA data_version").fetchone()
                if version != last_version:
                    last_version = version
                    on_change()

        return ChangeWatcher(self, listen)

    @property
    def error(self) -> type[Exception]:
        return sqlite3.Error

    def classify_error(self, error: Exception) -> ErrorKind:
        code = getattr(error, "sqlite_errorcode", None)
        if code is not None and code & 0xFF in _KINDS:  # the rest of the code is a detail
            return _KINDS[code & 0xFF]
        if code == sqlite3.SQLITE_CONSTRAINT_UNIQUE:
            return ErrorKind.DUPLICATE_KEY
        # The driver raises OverflowError for integers of more than 64 bits.
        if isinstance(error, sqlite3.IntegrityError | sqlite3.DataError | OverflowError):
            return ErrorKind.REFUSED_DATA
        if isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError:
            return ErrorKind.NEEDS_OPERATOR  # damaged, or without the table
        return ErrorKind.UNKNOWN

    def is_unreadable(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.OperationalError) and "decode to UTF-8" in str(error)

    def cast_to_raw(self, column: str) -> str:
        return f"CAST({column} AS BLOB)"

    def match_ids(self, ids: Sequence[int]) -> tuple[str, Row]:
        return "IN (SELECT value FROM json_each(?))", (json.dumps(list(ids)),)

    def insert_many(
        self, connection: Connection, table: str, columns: Sequence[str], rows: Iterable[Row]
    ) -> None:
        names = ", ".join(map(self.quote_name, columns))
        marks = ", ".join("?" * len(columns))
        connection.executemany(
            f"INSERT INTO {self.quote_name(table)} ({names}) VALUES ({marks})", rows
        )
