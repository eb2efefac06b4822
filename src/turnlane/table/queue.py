"""Queue tables in one database, as users see them; and scans of a table beside its manager."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from turnlane.databases import Connection, Dialect, Row, execute_statement, translate_errors
from turnlane.errors import NoSuchSchedule
from turnlane.runtime import Closeable
from turnlane.table.catalog import QueueCatalog
from turnlane.table.definition import SYSTEM_COLUMNS, Definition
from turnlane.table.grammar import (
    CreateQueue,
    CreateSchedule,
    DropQueue,
    DropSchedule,
    ScheduleStatement,
    ShowQueues,
    parse,
)
from turnlane.table.manager import Manager
from turnlane.table.queue_sql import STATES, FilteredStatement, get_queue_sql, load_queue_dialect
from turnlane.table.receiver import DEFAULT_PREFETCH, EVENT_COLUMNS, Receiver
from turnlane.table.schedules import Schedule
from turnlane.table.shards import WHOLE_KEYSPACE, KeyRange
from turnlane.table.store import TableStore

if TYPE_CHECKING:
    from turnlane.table.sharded import ShardedQueue

# ── reading a table beside its manager ───────────────────────────────────────────────────────────

SCAN_PAGE_ROWS: Final = 10_000
"""Rows that are in memory at a time."""


@dataclass(frozen=True, slots=True)
class EventSelection:
    """Selects the events that fulfil all conditions; ``None`` is no condition. Pure."""

    states: tuple[str, ...] | None = None
    fire_from: int | None = None
    """Due at this time or later: nanoseconds since the epoch."""
    fire_until: int | None = None
    """Due before this time."""
    keys: tuple[object, ...] | None = None
    """Values of the queue's ``SHARD BY`` column."""
    names: tuple[str, ...] | None = None
    ids: tuple[int, ...] | None = None
    key_range: KeyRange = WHOLE_KEYSPACE

    def build_condition(
        self, dialect: Dialect, definition: Definition
    ) -> tuple[str, tuple[Any, ...]]:
        """Return the condition in SQL, and its parameters."""
        mark = dialect.placeholder
        parts: list[str] = []
        parameters: list[Any] = []
        lists: list[tuple[str, tuple[object, ...] | None]] = [
            ("state", self.states),
            ("event_name", self.names),
            ("event_id", self.ids),
        ]
        if definition.shard_by is not None:
            lists.append((dialect.quote_name(definition.shard_by), self.keys))
        for column, values in lists:
            if values is not None:
                marks = ", ".join([mark] * len(values)) or "NULL"
                parts.append(f"{column} IN ({marks})")
                parameters += values
        for bound, condition in ((self.fire_from, "fire_at >="), (self.fire_until, "fire_at <")):
            if bound is not None:
                parts.append(f"{condition} {mark}")
                parameters.append(bound)
        if not self.key_range.is_whole:
            keyspace = get_queue_sql(dialect).get_keyspace(definition)
            parts.append(f"{keyspace} BETWEEN {mark} AND {mark}")
            parameters += self.key_range.stored_bounds
        return " AND ".join(parts) or "1 = 1", tuple(parameters)


class TableScan:
    """Reads events of one queue in one database, with all their columns, in one statement.

    A scan takes no lock and does not affect the manager.
    """

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self._dialect = dialect
        self._definition = definition
        self.columns: tuple[str, ...] = (*SYSTEM_COLUMNS, *definition.column_names)
        """All columns, the system columns first."""

    def read_pages(
        self,
        selection: EventSelection,
        columns: Sequence[str] | None = None,
        *,
        first: int | None = None,
        size: int = SCAN_PAGE_ROWS,
    ) -> Generator[list[Row], None, None]:
        """Yield pages of the rows, as they are at one moment. Raises ``DatabaseDown``.

        With ``first``, only this many rows, by fire time; otherwise all, in any order.
        """
        dialect = self._dialect
        keyspace = get_queue_sql(dialect).get_keyspace(self._definition)
        expressions = [
            keyspace if name == "keyspace_id" else dialect.quote_name(name)
            for name in columns or self.columns
        ]
        condition, parameters = selection.build_condition(dialect, self._definition)
        table = dialect.quote_name(self._definition.name)
        statement = f"SELECT {', '.join(expressions)} FROM {table} WHERE {condition}"
        if first is not None:
            statement += f" ORDER BY fire_at, event_id LIMIT {int(first)}"
        with translate_errors(dialect), contextlib.closing(dialect.connect()) as connection:
            yield from dialect.stream(connection, statement, parameters, size)

    def read_events(
        self, selection: EventSelection, first: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows as columns by name."""
        for page in self.read_pages(selection, first=first):
            yield from (dict(zip(self.columns, row, strict=True)) for row in page)

    def read_ids(self, selection: EventSelection, first: int | None = None) -> list[int]:
        """Return the ids of the events."""
        pages = self.read_pages(selection, ("event_id",), first=first)
        return [row[0] for page in pages for row in page]


_COUNT_WAITING: Final = (
    "SELECT COUNT(*), COUNT(CASE WHEN fire_at <= {now} THEN 1 END), MIN(fire_at), {now} "
    "FROM {table} WHERE fire_at <= {now} + %s AND state = 'to_be_fired' AND after_group IS NULL"
)
_READ_LEASE: Final = "SELECT owner, token, expires_at, {now} FROM turnlane_lease WHERE queue = %s"


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """A queue at one moment, by the database's clock."""

    counts: dict[str, int]
    """How many events are in each state."""
    due: int
    """Events that are due and not marked as fired."""
    lag: float
    """Seconds since the first of them was due."""
    window: int
    """Events due within the manager's window, including those."""
    leader: str | None
    """The holder of the lease; ``None`` if its time is over."""
    term: int
    """The lease's token: it grows whenever a manager takes the lead."""
    lease: float
    """Seconds until the lease ends unless it is renewed."""


# ── the queue and its database ───────────────────────────────────────────────────────────────────


class TableQueue(Closeable):
    """A queue table in one database. Thread-safe."""

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self.definition = definition
        self._dialect = dialect
        self._store = TableStore(dialect, definition)
        self._session = self._store.session
        self._manager: Manager | None = None
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The table's name."""
        return self.definition.name

    def enqueue(
        self,
        connection: Connection,
        row: Mapping[str, Any],
        *,
        at: datetime | int | None = None,
        delay: float | None = None,
        name: str | None = None,
        priority: int = 0,
        group: str | None = None,
        after_group: str | None = None,
    ) -> int:
        """Insert an event in the open transaction of ``connection``; returns its ``event_id``.

        It fires once that transaction has committed: at once, ``at`` a time (with a time zone, or
        in nanoseconds since the epoch), or ``delay`` seconds from now. ``name`` is unique in the
        table. An event of a ``group`` counts towards its end; one ``after_group`` fires when every
        member of that group is acked. This commits nothing.
        """
        values = dict(row)
        options = {
            "fire_at": None if at is None else convert_to_nanoseconds(at),
            "event_name": name,
            "priority": priority or None,
            "event_group": group,
            "after_group": after_group,
        }
        values.update({key: value for key, value in options.items() if value is not None})
        if delay is not None and "fire_at" in values:
            raise ValueError("give a time or a delay, not both")
        return self._store.inserter.enqueue(connection, values, delay)

    def enqueue_many(self, connection: Connection, rows: Iterable[Mapping[str, Any]]) -> int:
        """Insert many events in the open transaction of ``connection``; returns how many.

        A row may also set ``fire_at`` (nanoseconds), ``event_name``, ``priority``,
        ``event_group`` and ``after_group``.
        """
        return self._store.inserter.enqueue_many(connection, rows)

    def put(self, rows: Sequence[Mapping[str, Any]], timeout: float | None = None) -> bool:
        """Store events in a transaction of the manager; false if the time is over.

        The fastest way to a receiver in this process: events due at once are written as fired.
        """
        return self.manager().enqueue(rows, timeout)

    def insert(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert events in a transaction of their own; rows as in :meth:`enqueue_many`."""
        self._store.inserter.insert_rows(rows)

    def receive(self, key_range: str = "-", prefetch: int = DEFAULT_PREFETCH) -> Receiver:
        """Return a receiver of the events in a key range; starts a manager in this process.

        Events come while that manager leads; of all processes that serve the table, one leads.
        """
        receiver = Receiver(KeyRange.parse(key_range), prefetch)
        self.manager().attach(receiver)
        return receiver

    def ack(self, connection: Connection, ids: Sequence[int]) -> int:
        """Ack events in the open transaction of ``connection``; returns how many it settles."""
        condition, parameters = self._dialect.match_ids(ids)
        statement = self._store.sql.ack_keep.where(condition)
        return execute_statement(connection, statement, parameters).count

    def schedule(self, name: str, every: str, time_zone: str = "UTC", /, **columns: object) -> None:
        """Create a schedule: an event recurs. ``every`` is a cron expression in ``time_zone``.

        It replaces another schedule of this name; an equal one is not changed, so every process
        may call this when it starts. Raises ``ValueError`` for an invalid schedule, and
        ``SchemaMismatch`` if the event does not fit the queue.
        """
        schedule = Schedule(self.name, name, every, time_zone, columns)
        schedule.check()
        self._store.schedules.save(schedule)

    def unschedule(self, name: str) -> bool:
        """Delete a schedule; false if there is none. Events that it inserted stay."""
        return self._store.schedules.remove(name)

    def schedules(self) -> list[Schedule]:
        """Return all schedules, by name."""
        return self._store.schedules.list_all()

    def manager(self) -> Manager:
        """Return this process's manager of the table; starts it if it does not run."""
        with self._lock:
            if self._manager is None:
                self._manager = Manager(TableStore(self._dialect, self.definition))
                self._manager.start()
            return self._manager

    def counts(self) -> dict[str, int]:
        """Return how many events are in each state."""
        found: dict[str, int] = dict(self._session.query(self._store.sql.count_by_state))
        return {state: int(found.get(state, 0)) for state in STATES}

    def status(self) -> QueueStatus:
        """Return how many events wait, how late they are, and who leads.

        Raises ``NoSuchQueue`` and ``DatabaseDown``.
        """
        waiting = self._dialect.render(_COUNT_WAITING, table=self._dialect.quote_name(self.name))
        span = round(self.definition.settings.window * 1e9)
        window, due, first, now = self._session.query(waiting, (span,))[0]
        leases = self._session.query(self._dialect.render(_READ_LEASE), (self.name,))
        if not leases:
            raise self._store.make_missing_error()
        owner, term, expires_at, read_at = leases[0]
        has_leader = owner is not None and expires_at > read_at
        return QueueStatus(
            counts=self.counts(),
            due=due,
            lag=max(0.0, (now - first) / 1e9) if due else 0.0,
            window=window,
            leader=owner if has_leader else None,
            term=term,
            lease=round((expires_at - read_at) / 1e9, 3) if has_leader else 0.0,
        )

    @property
    def scan(self) -> TableScan:
        """Reads the table beside its manager."""
        return TableScan(self._dialect, self.definition)

    def peek(self, state: str = "to_be_fired", limit: int = 10) -> list[dict[str, Any]]:
        """Return the first events in a state by fire time, with every column.

        If a row cannot be read, groups and user's columns are ``None`` in all of them.
        """
        users = self.definition.column_names
        names = (*EVENT_COLUMNS, "last_error", *users)
        try:
            rows = self._session.query(self._store.sql.peek, (state, limit))
        except self._dialect.error as error:
            if not self._dialect.is_unreadable(error):
                raise
            readable = self._session.query(self._store.sql.peek_readable, (state, limit))
            rows = [(*row, *[None] * len(users)) for row in readable]
        return [dict(zip(names, row, strict=True)) for row in rows]

    def retry(self, ids: Sequence[int] | None = None) -> int:
        """Fire all dead letters again, or some dead or fired events; returns how many."""
        if ids is None:
            count = self._session.change(self._store.sql.retry_all)
        else:
            count = self._change(self._store.sql.retry, ids)
        if count and self._manager is not None:
            self._manager.sweep()
        return count

    def cancel(self, ids: Sequence[int]) -> int:
        """Delete events that were not fired; returns how many."""
        return self._change(self._store.sql.cancel, ids)

    def _change(self, statement: FilteredStatement, ids: Sequence[int]) -> int:
        return self._session.transact(lambda execute: self._store.change(execute, statement, ids))

    def close(self) -> None:
        """Stop the manager, if one runs here. The table stays."""
        with self._lock:
            manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()
        self._store.close()


class Database(Closeable):
    """A database with queue tables. Thread-safe."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.catalog = QueueCatalog(dialect)
        self._queues: list[TableQueue] = []

    def sql(self, statement: str, first_id: int = 1) -> list[str]:
        """Run a statement about queues or schedules; returns the names concerned.

        ``SHOW SCHEDULES`` returns the statements that create them. The ids of a new queue begin at
        ``first_id``.
        """
        match parse(statement):
            case CreateQueue(definition, if_not_exists):
                self.catalog.create(definition, if_not_exists=if_not_exists, first_id=first_id)
                return [definition.name]
            case DropQueue(name, if_exists):
                self.catalog.drop(name, if_exists=if_exists)
                return [name]
            case ShowQueues():
                return self.catalog.list_names()
            case other:
                return run_schedule_statement(other, self._open, self.catalog.list_names)

    def ddl(self, statement: str) -> list[str]:
        """Return the SQL that a ``CREATE QUEUE`` would run, for a migration tool."""
        parsed = parse(statement)
        if not isinstance(parsed, CreateQueue):
            raise ValueError("only CREATE QUEUE has statements to show")  # noqa: TRY004 - a text
        return self.catalog.build_ddl(parsed.definition)

    def queue(self, name: str) -> TableQueue:
        """Open a queue. Raises ``NoSuchQueue``."""
        queue = self._open(name)
        self._queues.append(queue)
        return queue

    def _open(self, name: str) -> TableQueue:
        return TableQueue(self.dialect, self.catalog.get_definition(name))

    def connect(self) -> Connection:
        """Return a new connection of the driver; every statement commits, unless you begin."""
        return self.dialect.connect()

    def close(self) -> None:
        """Close all queues that were opened here."""
        for queue in self._queues:
            queue.close()
        self.catalog.close()


def connect(url: str) -> Database:
    """Return the queue tables of the database at ``url``; opens no connection yet.

    See :func:`turnlane.databases.load_dialect` for the forms of urls.
    """
    return Database(load_queue_dialect(url))


def convert_to_nanoseconds(moment: datetime | int) -> int:
    """Return nanoseconds since the epoch; a ``datetime`` must have a time zone."""
    if isinstance(moment, int):
        return moment
    if moment.tzinfo is None:
        raise ValueError("the time has no time zone; use a datetime with tzinfo")
    whole = int(moment.replace(microsecond=0).timestamp())
    return (whole * 1_000_000 + moment.microsecond) * 1_000


def run_schedule_statement(
    statement: ScheduleStatement,
    open_queue: Callable[[str], TableQueue | ShardedQueue],
    list_queues: Callable[[], Iterable[str]],
) -> list[str]:
    """Run a statement; returns the schedule's name, or for SHOW the statements that create all."""
    match statement:
        case CreateSchedule(schedule):
            with open_queue(schedule.queue) as queue:
                queue.schedule(
                    schedule.name, schedule.every, schedule.time_zone, **schedule.columns
                )
            return [schedule.name]
        case DropSchedule(name, queue_name):
            with open_queue(queue_name) as queue:
                if not queue.unschedule(name):
                    raise NoSuchSchedule(f"{queue_name!r} has no schedule {name!r}")
            return [name]
        case _:
            shown: list[str] = []
            for queue_name in list_queues():
                with open_queue(queue_name) as queue:
                    shown += map(str, queue.schedules())
            return shown
