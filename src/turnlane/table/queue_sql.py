"""The SQL of queue tables.

:class:`QueueSql` has the SQL that differs between databases: their DDL, and what follows from it.
:class:`Statements` has every other statement about a queue by its name. These are the same for all
databases, except for the parts that :class:`Dialect` fills in: the clock, the locks, the
placeholder of a parameter. Neither holds a connection or needs a driver.

An event is *open* while its state is ``to_be_fired`` or ``fired``: it is neither acked nor dead.
"""

from __future__ import annotations

import abc
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import ClassVar, Final, NamedTuple

from turnlane.databases import ConnectOptions, Dialect, Row, load_dialect
from turnlane.table.definition import TYPES, Column, Definition, Layout
from turnlane.table.receiver import EVENT_COLUMNS
from turnlane.table.shards import keyspace_id

STATES: Final = ("to_be_fired", "fired", "acked", "dead")

MOST_ATTEMPTS: Final = 2**31 - 1
"""The largest value of the column; counting ends there."""

CHANNEL: Final = "turnlane"
"""Inserts notify the manager on this channel, with the name of the queue, where they can."""

_STATE_LIST: Final = ", ".join(f"'{state}'" for state in STATES)
_QUEUE_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS turnlane_queue (name TEXT PRIMARY KEY, definition TEXT NOT NULL)"
)
_TEXT_COLUMNS: Final = (
    *(f"{name} VARCHAR(255)" for name in ("event_name", "event_group", "after_group")),
    "last_error TEXT",
)
IS_OPEN: Final = "state IN ('to_be_fired', 'fired')"
"""The condition that an event is open: neither acked nor dead."""


def load_queue_dialect(url: str) -> Dialect:
    """Return the dialect of a database that has queue tables. Opens no connection."""
    options = ConnectOptions(
        mysql_user="root", sqlite_functions={"turnlane_keyspace_id": _hash_sqlite_key}
    )
    return load_dialect(url, options)


def _hash_sqlite_key(key: bytes | None) -> int:
    return keyspace_id(None if key is None else key.decode(errors="replace"))


def get_table_options(dialect: Dialect) -> str:
    """Return the end of a ``CREATE TABLE``: by default, MySQL ignores case in texts."""
    mysql = " ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
    return mysql if dialect.name == "mysql" else ""


class RetryDecision(NamedTuple):
    """What happens to an event that was not acked."""

    event_id: int
    state: str
    """``to_be_fired`` or ``dead``."""
    delay: int
    """Nanoseconds until it fires again."""
    more: int
    """Attempts that its row does not count yet."""
    error: str | None


class QueueSql(abc.ABC):
    """The SQL of queue tables in one database."""

    can_fence_in_one: ClassVar[bool] = False
    """Whether one statement can hold the lease row in place and change other rows."""
    has_wake_trigger: ClassVar[bool] = False
    """Whether inserts notify the manager if its lease row asks for that."""
    idle_poll: ClassVar[float] = 0.5
    """Seconds between two reads of a quiet table; longer where something wakes the manager."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect

    @abc.abstractmethod
    def create_own_tables(self) -> list[str]:
        """Return the statements that create turnlane's own tables where they are missing."""

    @abc.abstractmethod
    def create_table(self, definition: Definition) -> list[str]:
        """Return the statements that create a queue's table."""

    @abc.abstractmethod
    def set_next_id(self, table: str, first_id: int) -> list[str]:
        """Return the statements that make ids start at ``first_id``, unless they are higher."""

    @abc.abstractmethod
    def build_retry(self, table: str, decisions: Sequence[RetryDecision]) -> tuple[str, Row]:
        """Return a statement that applies decisions to the open events."""

    def get_keyspace(self, definition: Definition) -> str:  # noqa: ARG002
        """Return an expression: where an event's key lies in the key space."""
        return "keyspace_id"

    def get_index_hints(self, definition: Definition) -> tuple[str, str]:  # noqa: ARG002
        """Return the texts after the table that make it read by fire time, and by id."""
        return "", ""

    def vacuum(self, definition: Definition) -> Sequence[str]:  # noqa: ARG002
        """Return the statements that make the space of deleted rows usable, if any are needed."""
        return ()

    def declare_column(self, column: Column) -> str:
        """Return the declaration of a user's column."""
        kind = TYPES[column.type].render(self.dialect.name, column.arguments)
        required = " NOT NULL" if column.required else ""
        return f"{self.dialect.quote_bare_name(column.name)} {kind}{required}"

    def _declare(self, lines: Iterable[str]) -> str:
        """Return the inside of a ``CREATE TABLE``, a line for each declaration."""
        return ",\n".join(f"    {line}" for line in lines)

    def _index_names_and_groups(self, table: str, by_name: str) -> list[str]:
        """Return statements that create indexes of the rows with a name, or with a group."""
        quote = self.dialect.quote_bare_name
        return [
            f"CREATE {kind} {quote(f'{table}_{short}')} ON {quote(table)} ({column}) "
            f"WHERE {column} IS NOT NULL"
            for kind, short, column in (
                ("UNIQUE INDEX", by_name, "event_name"),
                ("INDEX", "group", "event_group"),
                ("INDEX", "after", "after_group"),
            )
        ]


class SqliteQueueSql(QueueSql):
    """Queue tables in SQLite."""

    def create_own_tables(self) -> list[str]:
        return [
            _QUEUE_TABLE,
            (
                "CREATE TABLE IF NOT EXISTS turnlane_lease ("
                "queue TEXT PRIMARY KEY, owner TEXT, token INTEGER NOT NULL DEFAULT 0, "
                "expires_at INTEGER NOT NULL DEFAULT 0, listening INTEGER NOT NULL DEFAULT 0)"
            ),
        ]

    def create_table(self, definition: Definition) -> list[str]:
        # Rows are stored by ``event_id`` in either layout; the layout decides about the index.
        name, quote = definition.name, self.dialect.quote_bare_name
        lines = [
            "event_id INTEGER PRIMARY KEY AUTOINCREMENT",
            f"fire_at INTEGER NOT NULL DEFAULT {self.dialect.now} {_check_integer('fire_at')}",
            f"state TEXT NOT NULL DEFAULT 'to_be_fired' CHECK (state IN ({_STATE_LIST}))",
            f"attempts INTEGER NOT NULL DEFAULT 0 {_check_integer('attempts')}",
            f"priority INTEGER NOT NULL DEFAULT 0 {_check_integer('priority')}",
            "keyspace_id INTEGER",
            "event_name TEXT",
            "event_group TEXT",
            "after_group TEXT",
            "last_error TEXT",
            *map(self.declare_column, definition.columns),
        ]
        indexes = [("fire_at", "fire_at")]
        if definition.settings.layout is Layout.KEYSPACE:
            indexes.append(("keyspace", "keyspace_id"))
        return [
            f"CREATE TABLE {quote(name)} (\n{self._declare(lines)}\n)",
            *(
                f"CREATE INDEX {quote(f'{name}_{short}')} ON {quote(name)} ({column}, event_id)"
                for short, column in indexes
            ),
            *self._index_names_and_groups(name, "name"),
        ]

    def set_next_id(self, table: str, first_id: int) -> list[str]:
        name = table.replace("'", "''")
        return [
            (
                f"INSERT INTO sqlite_sequence (name, seq) SELECT '{name}', 0 "
                f"WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = '{name}')"
            ),
            f"UPDATE sqlite_sequence SET seq = max(seq, {first_id - 1}) WHERE name = '{name}'",
        ]

    def build_retry(self, table: str, decisions: Sequence[RetryDecision]) -> tuple[str, Row]:
        columns = ", ".join(
            f"value ->> {at} AS {name}" for at, name in enumerate(RetryDecision._fields)
        )
        fire_at = f"CASE r.state WHEN 'dead' THEN fire_at ELSE {self.dialect.now} + r.delay END"
        statement = (
            f"UPDATE {table} SET state = r.state, attempts = {_add_attempts('attempts')}, "
            f"fire_at = {fire_at}, last_error = r.error "
            f"FROM (SELECT {columns} FROM json_each(?)) AS r "
            f"WHERE {table}.event_id = r.event_id AND {table}.{IS_OPEN}"
        )
        return statement, (json.dumps(decisions),)

    def get_keyspace(self, definition: Definition) -> str:
        key = definition.shard_by
        column = "fire_at" if key is None else self.dialect.quote_bare_name(key)
        # As bytes: a text that is not UTF-8 would not even reach the function.
        return f"turnlane_keyspace_id(CAST({column} AS BLOB))"


class PostgresQueueSql(QueueSql):
    """Queue tables in PostgreSQL."""

    can_fence_in_one = True
    has_wake_trigger = True
    idle_poll = 1.0

    def create_own_tables(self) -> list[str]:
        return [
            _QUEUE_TABLE,
            (
                "CREATE TABLE IF NOT EXISTS turnlane_lease ("
                "queue TEXT PRIMARY KEY, owner TEXT, token BIGINT NOT NULL DEFAULT 0, "
                "expires_at BIGINT NOT NULL DEFAULT 0, listening SMALLINT NOT NULL DEFAULT 0"
                ") WITH (fillfactor = 50)"
            ),
            # It does not notify while the manager polls: NOTIFY takes a lock that all commits of
            # the server wait for. SECURITY DEFINER: a user who inserts need not see the lease.
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

    def create_table(self, definition: Definition) -> list[str]:
        name, quote = definition.name, self.dialect.quote_bare_name
        key = quote(definition.shard_by) if definition.shard_by else "fire_at"
        digits = f"substr(md5(COALESCE({key}::text, '')), 1, 16)"
        hashed = f"('x' || {digits})::bit(64)::bigint # (-9223372036854775808)::bigint"
        by_keyspace = definition.settings.layout is Layout.KEYSPACE
        lines = [
            "event_id BIGINT GENERATED BY DEFAULT AS IDENTITY",
            f"fire_at BIGINT NOT NULL DEFAULT {self.dialect.now}",
            f"state TEXT NOT NULL DEFAULT 'to_be_fired' CHECK (state IN ({_STATE_LIST}))",
            "attempts INTEGER NOT NULL DEFAULT 0",
            "priority SMALLINT NOT NULL DEFAULT 0",
            f"keyspace_id BIGINT GENERATED ALWAYS AS (({hashed})) STORED",
            *_TEXT_COLUMNS,
            *map(self.declare_column, definition.columns),
            f"PRIMARY KEY ({'keyspace_id' if by_keyspace else 'fire_at'}, event_id)",
            "UNIQUE (event_id)",
        ]
        by_time = f"CREATE INDEX {quote(name + '_fire_at')} ON {quote(name)} (fire_at, event_id)"
        return [
            # Rows come and go: vacuum by the number of changes, not by a share of the rows.
            (
                f"CREATE TABLE {quote(name)} (\n{self._declare(lines)}\n) WITH (\n"
                "    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000\n)"
            ),
            *([by_time] if by_keyspace else []),
            *self._index_names_and_groups(name, "event_name"),
            (
                f"CREATE TRIGGER {quote(name + '_wake')} AFTER INSERT ON {quote(name)} "
                "FOR EACH STATEMENT EXECUTE FUNCTION turnlane_wake()"
            ),
        ]

    def set_next_id(self, table: str, first_id: int) -> list[str]:
        name = self.dialect.quote_bare_name(table).replace("'", "''")
        sequence = f"pg_get_serial_sequence('{name}', 'event_id')"
        return [f"SELECT setval({sequence}, greatest({first_id}, nextval({sequence})), false)"]

    def build_retry(self, table: str, decisions: Sequence[RetryDecision]) -> tuple[str, Row]:
        fire_at = f"CASE r.state WHEN 'dead' THEN q.fire_at ELSE {self.dialect.now} + r.delay END"
        statement = (
            f"UPDATE {table} AS q SET state = r.state, "
            f"attempts = {_add_attempts('q.attempts')}, fire_at = {fire_at}, "
            "last_error = r.error "
            "FROM unnest(%s::bigint[], %s::text[], %s::bigint[], %s::integer[], %s::text[]) "
            f"AS r({', '.join(RetryDecision._fields)}) "
            f"WHERE q.event_id = r.event_id AND q.{IS_OPEN}"
        )
        return statement, tuple(map(list, zip(*decisions, strict=True)))

    def vacuum(self, definition: Definition) -> Sequence[str]:
        # It must not block others: sessions that lock the table or read its last pages. A user
        # without the right to vacuum gets a warning, no error.
        return (f"VACUUM (SKIP_LOCKED, TRUNCATE false) {self.dialect.quote_name(definition.name)}",)


class MysqlQueueSql(QueueSql):
    """Queue tables in MySQL and MariaDB."""

    idle_poll = 0.33

    def create_own_tables(self) -> list[str]:
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

    def create_table(self, definition: Definition) -> list[str]:
        quote = self.dialect.quote_bare_name
        key = quote(definition.shard_by) if definition.shard_by else "fire_at"
        hashed = f"CONV(SUBSTR(MD5(COALESCE({key}, '')), 1, 16), 16, 10)"
        shifted = f"(CAST(CAST({hashed} AS UNSIGNED) ^ 9223372036854775808 AS SIGNED))"
        by_keyspace = definition.settings.layout is Layout.KEYSPACE
        # MariaDB allows no generated column in a primary key; a default works as well.
        computed = (
            f"NOT NULL DEFAULT {shifted}"
            if by_keyspace
            else f"GENERATED ALWAYS AS {shifted} STORED"
        )
        lines = [
            "event_id BIGINT NOT NULL AUTO_INCREMENT",
            f"fire_at BIGINT NOT NULL DEFAULT {self.dialect.now}",
            f"state VARCHAR(11) NOT NULL DEFAULT 'to_be_fired' CHECK (state IN ({_STATE_LIST}))",
            "attempts INT NOT NULL DEFAULT 0",
            "priority SMALLINT NOT NULL DEFAULT 0",
            *_TEXT_COLUMNS,
            *map(self.declare_column, definition.columns),
            f"keyspace_id BIGINT {computed}",
            f"PRIMARY KEY ({'keyspace_id' if by_keyspace else 'fire_at'}, event_id)",
            "UNIQUE KEY event_id (event_id)",
            "UNIQUE KEY event_name (event_name)",
            "KEY event_group (event_group)",
            "KEY after_group (after_group)",
            *(["KEY fire_at (fire_at, event_id)"] if by_keyspace else []),
        ]
        return [
            (
                f"CREATE TABLE {quote(definition.name)} (\n{self._declare(lines)}\n)"
                f"{get_table_options(self.dialect)}"
            )
        ]

    def set_next_id(self, table: str, first_id: int) -> list[str]:
        return [f"ALTER TABLE {self.dialect.quote_bare_name(table)} AUTO_INCREMENT = {first_id}"]

    def get_index_hints(self, definition: Definition) -> tuple[str, str]:
        # By its statistics it would use after_group, which is empty in nearly all rows.
        by_time = "PRIMARY" if definition.settings.layout is Layout.TIME else "fire_at"
        return f"FORCE INDEX ({by_time})", "FORCE INDEX (event_id)"

    def build_retry(self, table: str, decisions: Sequence[RetryDecision]) -> tuple[str, Row]:
        first = "SELECT " + ", ".join(f"%s AS {name}" for name in RetryDecision._fields)
        rows = " UNION ALL ".join([first, *["SELECT %s, %s, %s, %s, %s"] * (len(decisions) - 1)])
        fire_at = f"CASE r.state WHEN 'dead' THEN q.fire_at ELSE {self.dialect.now} + r.delay END"
        # MySQL sets columns in their order here: the state comes last.
        statement = (
            f"UPDATE ({rows}) AS r STRAIGHT_JOIN {table} AS q FORCE INDEX (event_id) "
            f"ON q.event_id = r.event_id SET q.fire_at = {fire_at}, "
            f"q.attempts = {_add_attempts('q.attempts')}, q.last_error = r.error, "
            f"q.state = r.state WHERE q.{IS_OPEN}"
        )
        return statement, tuple(itertools.chain.from_iterable(decisions))


def get_queue_sql(dialect: Dialect) -> QueueSql:
    """Return the SQL of queue tables in the database of a dialect."""
    classes: dict[str, type[QueueSql]] = {
        "sqlite": SqliteQueueSql,
        "postgres": PostgresQueueSql,
        "mysql": MysqlQueueSql,
    }
    return classes[dialect.name](dialect)


def _add_attempts(column: str) -> str:
    """Return an expression: the attempts in a row plus the new ones, within the column's range."""
    return f"{column} + CASE WHEN {column} < {MOST_ATTEMPTS} THEN r.more ELSE 0 END"


def _check_integer(column: str) -> str:
    """Return a check: SQLite would store a text, which no manager could read as a number."""
    return f"CHECK (typeof({column}) = 'integer')"


# ── the statements that are the same everywhere ──────────────────────────────────────────────────

_FENCED: Final = "EXISTS (SELECT 1 FROM turnlane_lease WHERE queue = %s AND token = %s)"
_FIREABLE: Final = "state = 'to_be_fired' AND after_group IS NULL"
_FENCE_BEGIN: Final = (
    "WITH fence AS MATERIALIZED (SELECT token, set_config('lock_timeout', '200ms', true) "
    "FROM turnlane_lease WHERE queue = %s AND token = %s {share}), settled AS ("
)
_FENCE_END: Final = "EXISTS (SELECT 1 FROM fence)) SELECT token FROM fence"
"""Around a statement: it changes and returns nothing unless the lease row has the token.

It waits at most 200 ms for a locked row: PostgreSQL has no DELETE that skips locked rows, and to
lock the rows first would cost as much as to delete them."""


class FilteredStatement(NamedTuple):
    """A statement about some events: a condition selects them, between its two halves."""

    before: str
    after: str

    def where(self, condition: str) -> str:
        """Return the whole statement."""
        return f"{self.before}{condition}{self.after}"


class Statements:
    """All statements about one queue, with its names and the SQL of its database."""

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        users = [dialect.quote_name(name) for name in definition.column_names]
        by_time, by_id = get_queue_sql(dialect).get_index_hints(definition)
        self.table = table = dialect.quote_name(definition.name)
        self.columns = ", ".join([*EVENT_COLUMNS, *users])
        names = {
            "table": table,
            "by_time": by_time,
            "by_id": by_id,
            "rows": f"{table} {by_id}",
            "delete": begin_delete(table, by_id),
            "columns": self.columns,
            "peeked": ", ".join([*EVENT_COLUMNS, "last_error", *users]),
        }

        def render(template: str) -> str:
            return dialect.render(template, **names)

        def split(template: str) -> FilteredStatement:
            # Split before the names are filled in: a queue may be named {filter}.
            before, after = template.split("{filter}")
            return FilteredStatement(render(before), render(after))

        def select_ids(condition: str) -> FilteredStatement:
            return split(f"SELECT event_id FROM {{rows}} WHERE event_id {{filter}} AND {condition}")

        # the lease
        self.read_lease = render(
            "SELECT owner, token, expires_at, {now} FROM turnlane_lease WHERE queue = %s {lock}"
        )
        self.take_lease = render(
            "UPDATE turnlane_lease SET owner = %s, token = token + 1, expires_at = %s, "
            "listening = 0 WHERE queue = %s"
        )
        self.renew_lease = render(
            "UPDATE turnlane_lease SET expires_at = {now} + %s WHERE queue = %s AND token = %s"
        )
        self.read_expiry = render("SELECT expires_at FROM turnlane_lease WHERE queue = %s")
        self.release_lease = render(
            "UPDATE turnlane_lease SET owner = NULL, expires_at = 0, listening = 0 "
            "WHERE queue = %s AND token = %s"
        )
        self.set_listening = render(
            "UPDATE turnlane_lease SET listening = %s WHERE queue = %s AND token = %s"
        )
        self.fence = render(
            "SELECT token FROM turnlane_lease WHERE queue = %s AND token = %s {share}"
        )
        # reads of the manager
        self.read_definition = render("SELECT definition FROM turnlane_queue WHERE name = %s")
        self.read_last_id = render("SELECT COALESCE(MAX(event_id), 0) FROM {table}")
        self.read_new = render(
            "SELECT {columns} FROM {table} {by_id} "
            f"WHERE event_id > %s AND state = 'to_be_fired' AND {_FENCED} "
            "ORDER BY event_id LIMIT %s"
        )
        self.read_retried = render(
            f"SELECT {{columns}} FROM {{table}} WHERE {IS_OPEN} AND attempts > 0 AND {_FENCED}"
        )
        self.read_old_fired = render(
            "SELECT event_id, attempts FROM {table} {by_time} "
            "WHERE fire_at >= %s AND fire_at <= %s AND state = 'fired' "
            "ORDER BY fire_at, event_id LIMIT %s"
        )
        self.read_old_acked = render(
            "SELECT event_id FROM {table} {by_time} "
            "WHERE fire_at <= %s AND state = 'acked' ORDER BY fire_at, event_id LIMIT %s"
        )
        # groups
        self.find_done_groups = render(
            "SELECT DISTINCT w.after_group FROM {table} AS w "
            f"WHERE w.after_group IS NOT NULL AND w.{IS_OPEN} AND NOT EXISTS ("
            "SELECT 1 FROM {table} AS m WHERE m.event_group = w.after_group AND m.state <> 'acked')"
        )
        self.find_unacked_member = render(
            "SELECT event_id FROM {table} WHERE event_group = %s AND state <> 'acked' LIMIT 1"
        )
        self.lock_waiting = render(
            f"SELECT event_id FROM {{table}} WHERE after_group = %s AND {IS_OPEN} {{lock_free}}"
        )
        # requests of users
        self.count_by_state = render("SELECT state, COUNT(*) FROM {table} GROUP BY state")
        self.retry_all = render(
            "UPDATE {table} SET state = 'to_be_fired', attempts = 0, fire_at = {now} "
            "WHERE state = 'dead'"
        )
        self.peek_readable = render(
            "SELECT event_id, fire_at, priority, attempts, keyspace_id, NULL, NULL, "
            "last_error FROM {table} WHERE state = %s ORDER BY fire_at, event_id LIMIT %s"
        )
        self.peek = render(
            "SELECT {peeked} FROM {table} WHERE state = %s ORDER BY fire_at, event_id LIMIT %s"
        )

        # The first condition is for databases that find no index range in the second. Bounds are
        # parameters: an index cannot use a clock that moves while the statement runs.
        self.read_due = split(
            "SELECT {columns} FROM {table} {by_time} "
            "WHERE fire_at >= %s AND (fire_at, event_id) > (%s, %s) AND fire_at <= %s AND {filter} "
            f"AND {_FIREABLE} AND {_FENCED} ORDER BY fire_at, event_id LIMIT %s"
        )
        self.read_ids = split(
            "SELECT {columns} FROM {rows} "
            f"WHERE event_id {{filter}} AND state = 'to_be_fired' AND {_FENCED}"
        )
        self.read_open = split(
            f"SELECT {{columns}} FROM {{rows}} WHERE event_id {{filter}} AND {IS_OPEN} "
            f"AND {_FENCED}"
        )
        self.find_unacked = select_ids("state <> 'acked'")
        self.find_open = select_ids(IS_OPEN)
        # These skip locked rows: a user's transaction may hold a row, to ack it, for minutes.
        self.lock_unacked = select_ids("state <> 'acked' {lock_free}")
        self.lock_open = select_ids(f"{IS_OPEN} {{lock_free}}")
        self.lock_fired = select_ids("state = 'fired' {lock_free}")
        # A row whose fire time a user moved into the future must not fire now.
        self.lock_due = select_ids(f"fire_at <= {{now}} AND {_FIREABLE} {{lock_free}}")
        # A user may write any number of attempts: the sum must fit into the column.
        self.mark_fired = split(
            "UPDATE {rows} SET state = 'fired', "
            f"attempts = attempts + CASE WHEN attempts < {MOST_ATTEMPTS} THEN 1 ELSE 0 END "
            "WHERE event_id {filter}"
        )
        self.unmark_fired = split(
            "UPDATE {rows} SET state = 'to_be_fired', "
            "attempts = attempts - CASE WHEN attempts > 0 THEN 1 ELSE 0 END WHERE event_id {filter}"
        )
        self.ack_delete = split("{delete} WHERE event_id {filter}")
        self.ack_keep = split(
            "UPDATE {rows} SET state = 'acked' WHERE event_id {filter} AND state <> 'acked'"
        )
        self.fenced_ack_delete = split(
            f"{_FENCE_BEGIN}{{delete}} WHERE event_id {{filter}} AND {_FENCE_END}"
        )
        self.fenced_ack_keep = split(
            f"{_FENCE_BEGIN}UPDATE {{rows}} SET state = 'acked' "
            f"WHERE event_id {{filter}} AND state <> 'acked' AND {_FENCE_END}"
        )
        self.release_waiting = split(
            "UPDATE {rows} SET after_group = NULL, "
            "fire_at = CASE WHEN fire_at > {now} THEN fire_at ELSE {now} END "
            "WHERE event_id {filter}"
        )
        self.find_fired_before = split(
            "SELECT event_id, event_group FROM {rows} WHERE event_id {filter} "
            "AND (state IN ('fired', 'dead') OR attempts > 0) AND state <> 'acked'"
        )
        self.delete_acked = split("{delete} WHERE event_id {filter} AND state = 'acked'")
        # A fired event keeps its attempts: a late ack of it still counts. MySQL sets the columns in
        # the order of the statement.
        self.retry = split(
            "UPDATE {rows} SET fire_at = {now}, "
            "attempts = CASE state WHEN 'dead' THEN 0 ELSE attempts END, state = 'to_be_fired' "
            "WHERE event_id {filter} AND state IN ('dead', 'fired')"
        )
        self.cancel = split("{delete} WHERE event_id {filter} AND state = 'to_be_fired'")


def begin_delete(table: str, hint: str) -> str:
    """Return the first words of a DELETE; MySQL takes an index hint only with a table list."""
    return f"DELETE {table} FROM {table} {hint}" if hint else f"DELETE FROM {table}"
