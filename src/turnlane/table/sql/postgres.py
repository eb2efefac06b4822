"""PostgreSQL, by psycopg 3. Needs no extension."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from turnlane.errors import ConfigError
from turnlane.runtime import Closing
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
from turnlane.table.sql.watch import Watch

CHANNEL = "turnlane"

FAILURES = {
    "40001": Failure.TRANSIENT,  # serialization failure
    "40P01": Failure.TRANSIENT,  # deadlock detected
    "25P03": Failure.TRANSIENT,  # idle in transaction: ended
    "57014": Failure.TRANSIENT,  # statement timeout
    "55P03": Failure.LOCKED,  # lock not available
    "25006": Failure.READ_ONLY,
}

OPTIONS = {
    "application_name": "turnlane",
    "connect_timeout": 10,
    # A host that is gone without a word is noticed after 25 seconds: by itself, the system would
    # wait for hours.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
"""What the driver is told unless the address says otherwise."""

CANCEL_SECONDS = 5.0

_LOOK = 0.1
"""Seconds between looks at whether a watch is to end."""

_KEY = "(('x' || substr(md5({key}), 1, 16))::bit(64)::bigint # (-9223372036854775808)::bigint)"


class Postgres(Dialect):
    """A PostgreSQL database, version 12 or newer."""

    name = "postgres"
    now = "((extract(epoch FROM clock_timestamp()) * 1000000000)::bigint)"
    share = "FOR SHARE"
    lock = "FOR UPDATE"
    lock_free = "FOR UPDATE SKIP LOCKED"
    fenced_in_one = True
    notifies = True
    running = (
        "SELECT txid_snapshot_xmin(s), txid_snapshot_xmax(s) FROM txid_current_snapshot() AS s"
    )
    idle_poll = 1.0

    def __init__(self, url: str) -> None:
        try:
            self._options: dict[str, Any] = {**OPTIONS, **conninfo_to_dict(url)}
        except psycopg.ProgrammingError:
            # Not told why: the driver's words may repeat the password.
            raise ConfigError("url", "is no address that PostgreSQL's driver can read") from None

    @property
    def error(self) -> type[Exception]:
        return psycopg.Error

    def connect(self) -> psycopg.Connection:
        return psycopg.connect(**self._options, autocommit=True)

    def own_connection(self) -> psycopg.Connection:
        connection = self.connect()
        # What the statistics say of a queue is never true for long; by them the planner would
        # read and sort the whole of it for a page.
        connection.execute("SET enable_seqscan = off")
        connection.execute("SET enable_bitmapscan = off")
        return connection

    def cancel(self, connection: psycopg.Connection) -> None:
        connection.cancel_safe(timeout=CANCEL_SECONDS)

    @contextlib.contextmanager
    def transaction(self, connection: psycopg.Connection) -> Iterator[None]:
        with connection.transaction():
            yield

    def failure(self, error: Exception) -> Failure:
        state = getattr(error, "sqlstate", None)
        if state in FAILURES:
            return FAILURES[state]
        if _made_twice(error):
            return Failure.MADE_TWICE
        if state == "23505" and "event_name" in str(error):
            return Failure.NAME_TAKEN
        if state is None:
            # The connection broke before the server could say anything, or the driver refused.
            broke = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
            return Failure.DISCONNECTED if broke else Failure.OTHER
        return Failure.DISCONNECTED if state[:2] in {"08", "53", "57"} else Failure.OTHER

    def is_unreadable(self, error: Exception) -> bool:
        # What the server says of a statement has a state.
        return isinstance(error, psycopg.DataError) and error.sqlstate is None

    def raw(self, column: str) -> str:
        return f"{column}::text"

    def bookkeeping(self) -> list[str]:
        return [
            (
                "CREATE TABLE IF NOT EXISTS turnlane_queue ("
                "name TEXT PRIMARY KEY, definition TEXT NOT NULL)"
            ),
            (
                "CREATE TABLE IF NOT EXISTS turnlane_lease ("
                "queue TEXT PRIMARY KEY, owner TEXT, token BIGINT NOT NULL DEFAULT 0, "
                "expires_at BIGINT NOT NULL DEFAULT 0, listening SMALLINT NOT NULL DEFAULT 0"
                ") WITH (fillfactor = 50)"
            ),
            # Nobody is notified while the manager looks by itself: NOTIFY takes a lock that all
            # commits of the server wait for. SECURITY DEFINER: who inserts need not see the lease.
            (
                "CREATE OR REPLACE FUNCTION turnlane_wake() RETURNS trigger LANGUAGE plpgsql\n"
                "SECURITY DEFINER SET search_path FROM CURRENT AS $$\n"
                "BEGIN\n"
                "    IF EXISTS (SELECT 1 FROM turnlane_lease\n"
                "               WHERE queue = TG_TABLE_NAME AND listening = 1) THEN\n"
                f"        PERFORM pg_notify('{CHANNEL}', TG_TABLE_NAME);\n"
                "    END IF;\n"
                "    RETURN NULL;\n"
                "END $$"
            ),
        ]

    def table(self, definition: Definition) -> list[str]:
        table = self.bare(definition.name)
        key = self.bare(definition.shard_by) if definition.shard_by else "fire_at"
        first = "fire_at" if definition.settings.layout is Layout.TIME else "keyspace_id"
        lines = [
            "event_id BIGINT GENERATED BY DEFAULT AS IDENTITY",
            f"fire_at BIGINT NOT NULL DEFAULT {self.now}",
            f"state TEXT NOT NULL DEFAULT 'to_be_fired' CHECK (state IN ({states()}))",
            "attempts INTEGER NOT NULL DEFAULT 0",
            "priority SMALLINT NOT NULL DEFAULT 0",
            (
                "keyspace_id BIGINT GENERATED ALWAYS AS "
                f"({_KEY.format(key=f'COALESCE({key}::text, {chr(39) * 2})')}) STORED"
            ),
            "event_name VARCHAR(255)",
            "event_group VARCHAR(255)",
            "after_group VARCHAR(255)",
            "last_error TEXT",
            *map(self.own_columns, definition.columns),
            f"PRIMARY KEY ({first}, event_id)",
            "UNIQUE (event_id)",
        ]
        # Rows come and go: vacuum by what changed, not by a share of what is there.
        statements = [
            (
                f"CREATE TABLE {table} (\n{declared(lines)}\n) WITH (\n"
                "    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000\n)"
            )
        ]
        if definition.settings.layout is Layout.KEYSPACE:
            index = self.bare(definition.name + "_fire_at")
            statements.append(f"CREATE INDEX {index} ON {table} (fire_at, event_id)")
        for short, column, unique in (
            ("event_name", "event_name", "UNIQUE "),
            ("group", "event_group", ""),
            ("after", "after_group", ""),
        ):
            index = self.bare(f"{definition.name}_{short}")
            statements.append(
                f"CREATE {unique}INDEX {index} ON {table} ({column}) WHERE {column} IS NOT NULL"
            )
        trigger = self.bare(definition.name + "_wake")
        statements.append(
            f"CREATE TRIGGER {trigger} AFTER INSERT ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION turnlane_wake()"
        )
        return statements

    def number_from(self, table: str, first_id: int) -> list[str]:
        name = self.bare(table).replace("'", "''")
        sequence = f"pg_get_serial_sequence('{name}', 'event_id')"
        return [f"SELECT setval({sequence}, greatest({first_id}, nextval({sequence})), false)"]

    def ids(self, ids: Sequence[int]) -> tuple[str, tuple[Any, ...]]:
        # As text: the driver would look at each number by itself.
        return "= ANY(%s::bigint[])", (f"{{{','.join(map(str, ids))}}}",)

    def put_back(self, table: str, verdicts: Sequence[Verdict]) -> tuple[str, tuple[Any, ...]]:
        return (
            (
                f"UPDATE {table} AS q SET state = r.state, "
                f"attempts = {more_attempts('q.attempts', 'r.more')}, "
                f"fire_at = CASE r.state WHEN 'dead' THEN q.fire_at ELSE {self.now} + r.delay END, "
                "last_error = r.error "
                "FROM unnest(%s::bigint[], %s::text[], %s::bigint[], %s::integer[], %s::text[]) "
                "AS r(event_id, state, delay, more, error) "
                "WHERE q.event_id = r.event_id AND q.state IN ('to_be_fired', 'fired')"
            ),
            tuple(map(list, zip(*verdicts, strict=True))),
        )

    def insert_many(
        self, connection: Connection, table: str, columns: Sequence[str], rows: Iterable[Row]
    ) -> None:
        names = ", ".join(map(self.bare, columns))
        statement = f"COPY {self.bare(table)} ({names}) FROM STDIN"
        with connection.cursor() as cursor, cursor.copy(statement) as copy:
            for row in rows:
                copy.write_row(row)

    def stream(
        self, connection: Connection, statement: str, parameters: Row, size: int
    ) -> Iterator[list[Row]]:
        # A cursor of the server's: else all rows would be in memory before the first is read.
        with connection.transaction(), connection.cursor(name="turnlane") as cursor:
            cursor.execute(statement, parameters)
            while rows := cursor.fetchmany(size):
                yield rows

    def vacuum(self, definition: Definition) -> Sequence[str]:
        # Nobody is to wait for it: not who has the table locked, nor who reads its last pages,
        # nor whoever needs the workers. Who may not do it is told so, and it is no error.
        return (
            "SET max_parallel_maintenance_workers = 0",
            f"VACUUM (SKIP_LOCKED, TRUNCATE false) {self.identifier(definition.name)}",
        )

    def watch(self, queue: str, poke: Callable[[], None]) -> Closing:
        def hear(connection: Connection, over: threading.Event) -> None:
            connection.execute(f"LISTEN {CHANNEL}")
            poke()
            while not over.is_set():
                for notice in connection.notifies(timeout=_LOOK):
                    if notice.payload == queue:
                        poke()
                    if over.is_set():
                        return

        return Watch(self, hear)


def _made_twice(error: Exception) -> bool:
    """Whether two made the same table or function at a time: IF NOT EXISTS does not wait."""
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate == "XX000":
        return "concurrently updated" in str(error)
    if error.sqlstate in {"42P07", "42710"}:  # the table, or its row type, came between
        return True
    return error.sqlstate == "23505" and (error.diag.constraint_name or "").startswith("pg_")
