"""MySQL and MariaDB, by PyMySQL."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pymysql
from pymysql.constants import CLIENT
from pymysql.cursors import SSCursor

from turnlane.table.definition import Definition, Layout
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

TRANSIENT = {1205, 1213, 1020}
"""Lock wait timeout, deadlock, a record changed since the snapshot."""
READ_ONLY = {1290, 1792, 1836}
GONE = {1040, 1053, 1077, 1079, 1152, 1927, 2002, 2003, 2006, 2013, 2014, 2055}
EXHAUSTED = {1021, 1041, 1114, 1135, 1203, 1226}
"""The disk, the memory or a table is full; a user has all the connections that he may have."""
DUPLICATE = 1062

OPTIONS = {"connect_timeout": 10, "read_timeout": 60, "write_timeout": 60}
"""Seconds, unless the address says otherwise. A server that is gone without a word is noticed by
them; a statement may wait for a lock for 50 seconds."""

ROWS = 1_000
"""To a statement: enough to make round trips cheap, and far below the largest packet."""


class Mysql(Dialect):
    """A MySQL 8 or MariaDB 10.6 database, or a newer one."""

    name = "mysql"
    quote = "`"
    now = "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) * 1000)"
    share = "LOCK IN SHARE MODE"
    lock = "FOR UPDATE"
    lock_free = "FOR UPDATE SKIP LOCKED"
    returning = False
    skipping = ("INSERT IGNORE INTO", "")
    idle_poll = 0.33

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = {**OPTIONS, **options}

    @property
    def error(self) -> type[Exception]:
        root: type[Exception] = pymysql.MySQLError
        return root

    def connect(self) -> pymysql.Connection[Any]:
        return pymysql.connect(
            **self._options,
            autocommit=True,
            charset="utf8mb4",
            client_flag=CLIENT.FOUND_ROWS,
            # Snapshots are per statement, as in PostgreSQL; locks are on rows, not on gaps.
            init_command="SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
        )

    def own_connection(self) -> pymysql.Connection[Any]:
        connection = self.connect()
        # MariaDB would make a temporary table of a long list of ids; MySQL has no such setting.
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

    def failure(self, error: Exception) -> Failure:
        code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        if code in TRANSIENT:
            return Failure.TRANSIENT
        if code in READ_ONLY:
            return Failure.READ_ONLY
        if code == DUPLICATE and "event_name" in str(error):
            return Failure.NAME_TAKEN
        if code in GONE | EXHAUSTED or isinstance(error, pymysql.InterfaceError):
            return Failure.DISCONNECTED
        return Failure.OTHER

    def bookkeeping(self) -> list[str]:
        binary = "CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
        return [
            (
                "CREATE TABLE IF NOT EXISTS turnlane_queue ("
                f"name VARCHAR(64) {binary} PRIMARY KEY, definition TEXT {binary} NOT NULL)"
            ),
            (
                "CREATE TABLE IF NOT EXISTS turnlane_lease ("
                f"queue VARCHAR(64) {binary} PRIMARY KEY, owner VARCHAR(255), "
                "token BIGINT NOT NULL DEFAULT 0, expires_at BIGINT NOT NULL DEFAULT 0, "
                "listening SMALLINT NOT NULL DEFAULT 0)"
            ),
        ]

    def table(self, definition: Definition) -> list[str]:
        key = self.bare(definition.shard_by) if definition.shard_by else "fire_at"
        first = "fire_at" if definition.settings.layout is Layout.TIME else "keyspace_id"
        hashed = f"CONV(SUBSTR(MD5(COALESCE({key}, '')), 1, 16), 16, 10)"
        shifted = f"(CAST(CAST({hashed} AS UNSIGNED) ^ 9223372036854775808 AS SIGNED))"
        # MariaDB has no generated column in a primary key; a default does as well.
        computed = (
            f"GENERATED ALWAYS AS {shifted} STORED"
            if definition.settings.layout is Layout.TIME
            else f"NOT NULL DEFAULT {shifted}"
        )
        lines = [
            "event_id BIGINT NOT NULL AUTO_INCREMENT",
            f"fire_at BIGINT NOT NULL DEFAULT {self.now}",
            f"state VARCHAR(11) NOT NULL DEFAULT 'to_be_fired' CHECK (state IN ({states()}))",
            "attempts INT NOT NULL DEFAULT 0",
            "priority SMALLINT NOT NULL DEFAULT 0",
            "event_name VARCHAR(255)",
            "event_group VARCHAR(255)",
            "after_group VARCHAR(255)",
            "last_error TEXT",
            *map(self.own_columns, definition.columns),
            f"keyspace_id BIGINT {computed}",
            f"PRIMARY KEY ({first}, event_id)",
            "UNIQUE KEY event_id (event_id)",
            "UNIQUE KEY event_name (event_name)",
            "KEY event_group (event_group)",
            "KEY after_group (after_group)",
        ]
        if definition.settings.layout is Layout.KEYSPACE:
            lines.append("KEY fire_at (fire_at, event_id)")
        return [
            (
                f"CREATE TABLE {self.bare(definition.name)} (\n{declared(lines)}\n) "
                "ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
            )
        ]

    def number_from(self, table: str, first_id: int) -> list[str]:
        return [f"ALTER TABLE {self.bare(table)} AUTO_INCREMENT = {first_id}"]

    def hints(self, definition: Definition) -> tuple[str, str]:
        # By its statistics it would go by after_group, which is empty in nearly all rows.
        by_time = "PRIMARY" if definition.settings.layout is Layout.TIME else "fire_at"
        return f"FORCE INDEX ({by_time})", "FORCE INDEX (event_id)"

    def ids(self, ids: Sequence[int]) -> tuple[str, tuple[Any, ...]]:
        # The driver would write each number by itself; int() keeps anything else out.
        return f"IN ({', '.join(str(int(each)) for each in ids)})", ()

    def stream(
        self, connection: Connection, statement: str, parameters: Row, size: int
    ) -> Iterator[list[Row]]:
        # Unbuffered: else all rows would be in memory before the first is read.
        with connection.cursor(SSCursor) as cursor:
            cursor.execute(statement, parameters)
            while rows := cursor.fetchmany(size):
                yield list(rows)

    def put_back(self, table: str, verdicts: Sequence[Verdict]) -> tuple[str, tuple[Any, ...]]:
        first = "SELECT %s AS event_id, %s AS state, %s AS delay, %s AS more, %s AS error"
        rows = " UNION ALL ".join([first, *["SELECT %s, %s, %s, %s, %s"] * (len(verdicts) - 1)])
        return (
            (
                f"UPDATE ({rows}) AS r STRAIGHT_JOIN {table} AS q FORCE INDEX (event_id) "
                "ON q.event_id = r.event_id "
                "SET q.fire_at = CASE r.state WHEN 'dead' THEN q.fire_at "
                f"ELSE {self.now} + r.delay END, "
                f"q.attempts = {more_attempts('q.attempts', 'r.more')}, "
                "q.last_error = r.error, q.state = r.state "
                "WHERE q.state IN ('to_be_fired', 'fired')"
            ),
            tuple(itertools.chain.from_iterable(verdicts)),
        )

    def insert_many(
        self, connection: Connection, table: str, columns: Sequence[str], rows: Iterable[Row]
    ) -> None:
        names = ", ".join(map(self.identifier, columns))
        marks = f"({', '.join(['%s'] * len(columns))})"
        remaining = iter(rows)
        with connection.cursor() as cursor:
            while chunk := list(itertools.islice(remaining, ROWS)):
                values = ", ".join([marks] * len(chunk))
                statement = f"INSERT INTO {self.identifier(table)} ({names}) VALUES {values}"
                cursor.execute(statement, tuple(itertools.chain.from_iterable(chunk)))
