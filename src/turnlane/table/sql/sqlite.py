"""SQLite: one file, one host, one writer at a time."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from turnlane.errors import ConfigError
from turnlane.runtime import Closing
from turnlane.table.definition import Definition, Layout
from turnlane.table.shards import keyspace_id
from turnlane.table.sql.dialect import (
    Connection,
    Dialect,
    Failure,
    Row,
    Verdict,
    declared,
    more_attempts,
    states,
)
from turnlane.table.sql.watch import Watch

BUSY_MS = 5_000
"""How long a writer waits for another before it counts as a transient failure."""

TURN_SECONDS = 0.001
"""Between two tries to write while another does. SQLite's own pauses grow to 100 ms, and by them a
connection that writes all the time is always first."""

LOOK_SECONDS = 0.005
"""Between two looks at the file's change counter, which cost microseconds and no statement."""


class Sqlite(Dialect):
    """A database file; write-ahead logging, so that readers and the writer do not wait."""

    name = "sqlite"
    mark = "?"
    percent = "%"
    now = "(CAST(ROUND((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000000)"

    def __init__(self, path: str) -> None:
        self._path = path

    @property
    def error(self) -> type[Exception]:
        return sqlite3.Error

    def connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False
        )
        connection.create_function("turnlane_keyspace_id", 1, _keyspace_id, deterministic=True)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            pass  # a file that cannot be written keeps the mode it has; reading it still works
        except sqlite3.DatabaseError as error:
            connection.close()
            if error.sqlite_errorcode != sqlite3.SQLITE_NOTADB:
                raise
            raise ConfigError(self._path, "is not a database of SQLite's") from None
        return connection

    @contextlib.contextmanager
    def transaction(self, connection: sqlite3.Connection) -> Iterator[None]:
        _begin(connection)
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def failure(self, error: Exception) -> Failure:
        code = getattr(error, "sqlite_errorcode", None)
        primary = None if code is None else code & 0xFF
        if primary in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
            return Failure.TRANSIENT
        if primary == sqlite3.SQLITE_READONLY:
            return Failure.READ_ONLY
        if primary in {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL}:
            return Failure.DISCONNECTED
        if code == sqlite3.SQLITE_CONSTRAINT_UNIQUE and "event_name" in str(error):
            return Failure.NAME_TAKEN
        return Failure.OTHER

    def is_unreadable(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.OperationalError) and "decode to UTF-8" in str(error)

    def raw(self, column: str) -> str:
        return f"CAST({column} AS BLOB)"

    def bookkeeping(self) -> list[str]:
        return [
            (
                "CREATE TABLE IF NOT EXISTS turnlane_queue ("
                "name TEXT PRIMARY KEY, definition TEXT NOT NULL)"
            ),
            (
                "CREATE TABLE IF NOT EXISTS turnlane_lease ("
                "queue TEXT PRIMARY KEY, owner TEXT, token INTEGER NOT NULL DEFAULT 0, "
                "expires_at INTEGER NOT NULL DEFAULT 0, listening INTEGER NOT NULL DEFAULT 0)"
            ),
        ]

    def table(self, definition: Definition) -> list[str]:
        """Rows lie by ``event_id`` in either layout; the layout decides about the index."""
        table, by_time = self.bare(definition.name), self.bare(f"{definition.name}_fire_at")
        lines = [
            "event_id INTEGER PRIMARY KEY AUTOINCREMENT",
            f"fire_at INTEGER NOT NULL DEFAULT {self.now} {_whole('fire_at')}",
            f"state TEXT NOT NULL DEFAULT 'to_be_fired' CHECK (state IN ({states()}))",
            f"attempts INTEGER NOT NULL DEFAULT 0 {_whole('attempts')}",
            f"priority INTEGER NOT NULL DEFAULT 0 {_whole('priority')}",
            "keyspace_id INTEGER",
            "event_name TEXT",
            "event_group TEXT",
            "after_group TEXT",
            "last_error TEXT",
            *map(self.own_columns, definition.columns),
        ]
        partial = [
            ("name", "event_name", "UNIQUE "),
            ("group", "event_group", ""),
            ("after", "after_group", ""),
        ]
        statements = [
            f"CREATE TABLE {table} (\n{declared(lines)}\n)",
            f"CREATE INDEX {by_time} ON {table} (fire_at, event_id)",
        ]
        if definition.settings.layout is Layout.KEYSPACE:
            index = self.bare(definition.name + "_keyspace")
            statements.append(f"CREATE INDEX {index} ON {table} (keyspace_id, event_id)")
        statements += [
            f"CREATE {unique}INDEX {self.bare(f'{definition.name}_{short}')} "
            f"ON {table} ({column}) WHERE {column} IS NOT NULL"
            for short, column, unique in partial
        ]
        return statements

    def number_from(self, table: str, first_id: int) -> list[str]:
        name = table.replace("'", "''")
        return [
            (
                f"INSERT INTO sqlite_sequence (name, seq) SELECT '{name}', 0 "
                f"WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = '{name}')"
            ),
            (f"UPDATE sqlite_sequence SET seq = max(seq, {first_id - 1}) WHERE name = '{name}'"),
        ]

    def ids(self, ids: Sequence[int]) -> tuple[str, tuple[Any, ...]]:
        return "IN (SELECT value FROM json_each(?))", (json.dumps(list(ids)),)

    def put_back(self, table: str, verdicts: Sequence[Verdict]) -> tuple[str, tuple[Any, ...]]:
        fields = ("event_id", "state", "delay", "more", "error")
        columns = ", ".join(f"value ->> {at} AS {name}" for at, name in enumerate(fields))
        return (
            (
                f"UPDATE {table} SET state = r.state, "
                f"attempts = {more_attempts('attempts', 'r.more')}, "
                f"fire_at = CASE r.state WHEN 'dead' THEN fire_at ELSE {self.now} + r.delay END, "
                "last_error = r.error "
                f"FROM (SELECT {columns} FROM json_each(?)) AS r "
                f"WHERE {table}.event_id = r.event_id AND {table}.state IN ('to_be_fired', 'fired')"
            ),
            (json.dumps(verdicts),),
        )

    def insert_many(
        self, connection: Connection, table: str, columns: Sequence[str], rows: Iterable[Row]
    ) -> None:
        names = ", ".join(map(self.bare, columns))
        marks = ", ".join("?" * len(columns))
        connection.executemany(f"INSERT INTO {self.bare(table)} ({names}) VALUES ({marks})", rows)

    def keyspace(self, definition: Definition) -> str:
        key = "fire_at" if definition.shard_by is None else self.bare(definition.shard_by)
        # As bytes: a text that is none would not even reach the function.
        return f"turnlane_keyspace_id(CAST({key} AS BLOB))"

    def identifier(self, name: str) -> str:
        return self.bare(name)

    def watch(self, queue: str, poke: Callable[[], None]) -> Closing:  # noqa: ARG002 - a file
        """Look at the counter that every commit of another connection moves."""

        def hear(connection: Connection, over: threading.Event) -> None:
            seen = None
            while not over.wait(LOOK_SECONDS):
                version = connection.execute("PRAGMA data_version").fetchone()
                if version != seen:
                    seen = version
                    poke()

        return Watch(self, hear)


def _keyspace_id(key: bytes | None) -> int:
    return keyspace_id(None if key is None else key.decode(errors="replace"))


def _begin(connection: sqlite3.Connection) -> None:
    """Begin to write, when it is our turn."""
    until = time.monotonic() + BUSY_MS / 1000
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        # IMMEDIATE: a transaction that begins by reading cannot wait for its turn to write.
        while not _began(connection, last=time.monotonic() >= until):
            time.sleep(TURN_SECONDS)
    finally:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")


def _began(connection: sqlite3.Connection, *, last: bool) -> bool:
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if last or error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        return False
    return True


def _whole(column: str) -> str:
    """A check: SQLite would take a text for a number, and every manager would stumble over it."""
    return f"CHECK (typeof({column}) = 'integer')"
