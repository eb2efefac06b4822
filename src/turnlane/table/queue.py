"""Queue tables as their users have them: a database, and the queues in it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from turnlane.errors import NoSuchQueue
from turnlane.runtime import Closing
from turnlane.table.catalog import QueueCatalog
from turnlane.table.definition import SYSTEM_COLUMNS, Definition
from turnlane.table.grammar import CreateQueue, DropQueue, ShowQueues, parse, run_schedule_statement
from turnlane.table.manager import Manager
from turnlane.table.receiver import DEFAULT_PREFETCH, Receiver
from turnlane.table.schedules import Schedule
from turnlane.table.shards import WHOLE_KEYSPACE, KeyRange
from turnlane.table.sql.dialect import Connection, Dialect, Row
from turnlane.table.sql.session import understood
from turnlane.table.store import TableStore
from turnlane.table.url import dialect_of

# ── selection ──
# Selections: which events of a queue table somebody wants to see. Pure.


@dataclass(frozen=True, slots=True)
class EventSelection:
    """Events for which all of it is so; ``None`` asks for nothing."""

    states: tuple[str, ...] | None = None
    fire_from: int | None = None
    """Due then or later: nanoseconds since the epoch."""
    fire_until: int | None = None
    """Due before."""
    keys: tuple[object, ...] | None = None
    """Values of the queue's ``SHARD BY`` column."""
    names: tuple[str, ...] | None = None
    ids: tuple[int, ...] | None = None
    key_range: KeyRange = WHOLE_KEYSPACE

    def where(self, dialect: Dialect, definition: Definition) -> tuple[str, tuple[Any, ...]]:
        """A condition in SQL, and its parameters."""
        mark = dialect.mark
        parts: list[str] = []
        parameters: list[Any] = []
        lists: list[tuple[str, tuple[object, ...] | None]] = [
            ("state", self.states),
            ("event_name", self.names),
            ("event_id", self.ids),
        ]
        if definition.shard_by is not None:
            lists.append((dialect.identifier(definition.shard_by), self.keys))
        for column, values in lists:
            if values is not None:
                marks = ", ".join([mark] * len(values)) or "NULL"
                parts.append(f"{column} IN ({marks})")
                parameters += values
        for bound, condition in ((self.fire_from, "fire_at >="), (self.fire_until, "fire_at <")):
            if bound is not None:
                parts.append(f"{condition} {mark}")
                parameters.append(bound)
        if not self.key_range.is_everything:
            parts.append(f"{dialect.keyspace(definition)} BETWEEN {mark} AND {mark}")
            parameters += self.key_range.stored
        return " AND ".join(parts) or "1 = 1", tuple(parameters)


# ── scan ──
# Scans: reading a queue table as it is, beside its manager, in one statement.
#
# A scan takes no lock and no part in firing: whoever manages the table does not notice.

SCAN_PAGE_ROWS: Final = 10_000
"""Rows that are in memory at a time."""


class TableScan:
    """Reads the events of one queue in one database, every column of theirs."""

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self._dialect = dialect
        self._definition = definition
        self.columns: tuple[str, ...] = (*SYSTEM_COLUMNS, *definition.names)
        """All there are, turnlane's own first."""

    def pages(
        self,
        selection: EventSelection,
        columns: Sequence[str] | None = None,
        *,
        first: int | None = None,
        size: int = SCAN_PAGE_ROWS,
    ) -> Generator[list[Row], None, None]:
        """The rows, as they are at one moment, some at a time.

        Only the ``first`` so many by fire time, if that is given; otherwise all, in any order.
        Raises ``DatabaseDown``.
        """
        statement, parameters = self._statement(selection, columns or self.columns, first)
        with (
            understood(self._dialect),
            contextlib.closing(self._dialect.connect()) as connection,
        ):
            yield from self._dialect.stream(connection, statement, parameters, size)

    def events(
        self, selection: EventSelection, first: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """The rows, as columns by their names."""
        for page in self.pages(selection, first=first):
            yield from (dict(zip(self.columns, row, strict=True)) for row in page)

    def ids(self, selection: EventSelection, first: int | None = None) -> list[int]:
        """Their ids."""
        pages = self.pages(selection, ("event_id",), first=first)
        return [row[0] for page in pages for row in page]

    def _statement(
        self, selection: EventSelection, columns: Sequence[str], first: int | None
    ) -> tuple[str, Row]:
        dialect = self._dialect
        own = [self._expression(name) for name in columns]
        condition, parameters = selection.where(dialect, self._definition)
        table = dialect.identifier(self._definition.name)
        statement = f"SELECT {', '.join(own)} FROM {table} WHERE {condition}"
        if first is not None:
            statement += f" ORDER BY fire_at, event_id LIMIT {int(first)}"
        return statement, parameters

    def _expression(self, name: str) -> str:
        if name == "keyspace_id":
            return self._dialect.keyspace(self._definition)
        return self._dialect.identifier(name)


# ── status ──
# How a queue is in one database: what waits, how late it is, and who leads.

_WAITING = (
    "SELECT COUNT(*), COUNT(CASE WHEN fire_at <= {now} THEN 1 END), MIN(fire_at), {now} "
    "FROM {table} WHERE fire_at <= {now} + %s AND state = 'to_be_fired' AND after_group IS NULL"
)
_LEASE = "SELECT owner, token, expires_at, {now} FROM turnlane_lease WHERE queue = %s"


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """A queue at one moment, by the database's clock."""

    counts: dict[str, int]
    """How many events are in each state."""
    due: int
    """Events that are due and not fired, as far as the table knows."""
    lag: float
    """Seconds that the first of them is late."""
    window: int
    """Events due within the manager's window, those included."""
    leader: str | None
    """Who holds the lease; ``None`` if its time is over."""
    term: int
    """The lease's token: it grows whenever the lead is taken."""
    lease: float
    """Seconds until it ends unless it is renewed."""


def read_status(store: TableStore) -> QueueStatus:
    """Ask the database. Raises ``NoSuchQueue`` and ``DatabaseDown``."""
    dialect, definition = store.dialect, store.definition
    table = dialect.identifier(definition.name)
    span = round(definition.settings.window * 1e9)
    window, due, first, now = store.session.query(dialect.sql(_WAITING, table=table), (span,))[0]
    leases = store.session.query(dialect.sql(_LEASE), (definition.name,))
    if not leases:
        raise NoSuchQueue(f"there is no queue {definition.name!r} in this database")
    owner, term, expires_at, at = leases[0]
    leads = owner is not None and expires_at > at
    return QueueStatus(
        counts=store.counts(),
        due=due,
        lag=max(0.0, (now - first) / 1e9) if due else 0.0,
        window=window,
        leader=owner if leads else None,
        term=term,
        lease=round((expires_at - at) / 1e9, 3) if leads else 0.0,
    )


class TableQueue(Closing):
    """A queue table in one database. Safe to use from any thread."""

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self.definition = definition
        self._dialect = dialect
        self._store = TableStore(dialect, definition)
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
        """Insert an event in the transaction that ``connection`` is in; returns its ``event_id``.

        It fires once that transaction has committed: at once, ``at`` a time (with a time zone, or
        in nanoseconds since the epoch), or ``delay`` seconds from now. ``name`` is unique in the
        table. An event of a ``group`` counts towards its end; one ``after_group`` fires when every
        member of that group is acked. Nothing is committed here.
        """
        values = dict(row)
        given = {
            "fire_at": None if at is None else convert_to_nanoseconds(at),
            "event_name": name,
            "priority": priority or None,
            "event_group": group,
            "after_group": after_group,
        }
        values.update({key: value for key, value in given.items() if value is not None})
        if delay is not None and "fire_at" in values:
            raise ValueError("give a time or a delay, not both")
        return self._store.inserts.enqueue(connection, values, delay)

    def enqueue_many(self, connection: Connection, rows: Iterable[Mapping[str, Any]]) -> int:
        """Insert many events at once, in the transaction of ``connection``; returns how many.

        A row may also set ``fire_at`` (nanoseconds), ``event_name``, ``priority``,
        ``event_group`` and ``after_group``.
        """
        return self._store.inserts.enqueue_many(connection, rows)

    def put(self, rows: Sequence[Mapping[str, Any]], timeout: float | None = None) -> bool:
        """Store events in a transaction of the manager's own; false if the time is over.

        The quickest way to a receiver in this process: what is due at once is written as fired.
        """
        return self.manager().enqueue(rows, timeout)

    def insert(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert events in one transaction of their own; as :meth:`enqueue_many` has them."""
        self._store.inserts.insert(rows)

    def receive(self, key_range: str = "-", prefetch: int = DEFAULT_PREFETCH) -> Receiver:
        """A receiver of the events in a key range; starts a manager in this process.

        Events come while that manager leads: one of all processes that serve the table does.
        """
        receiver = Receiver(KeyRange.parse(key_range), prefetch)
        self.manager().attach(receiver)
        return receiver

    def ack(self, connection: Connection, ids: Sequence[int]) -> int:
        """Ack events in the transaction that ``connection`` is in; returns how many it settles."""
        return self._store.ack_in(connection, ids)

    def schedule(self, name: str, every: str, time_zone: str = "UTC", /, **columns: object) -> None:
        """Have an event recur: ``every`` is a cron expression, by the clocks of ``time_zone``.

        In place of another schedule of this name; an equal one stays as it is, so that every
        process may call this when it starts. Raises ``ValueError`` for what is no schedule, and
        ``SchemaMismatch`` if the queue does not take the event.
        """
        schedule = Schedule(self.name, name, every, time_zone, columns)
        schedule.check()
        self._store.schedules.put(schedule)

    def unschedule(self, name: str) -> bool:
        """Have it recur no more; false if there is no such schedule. What was enqueued stays."""
        return self._store.schedules.remove(name)

    def schedules(self) -> list[Schedule]:
        """What recurs, by name."""
        return self._store.schedules.all()

    def manager(self) -> Manager:
        """This process's manager of the table, started if it is not."""
        with self._lock:
            if self._manager is None:
                self._manager = Manager(TableStore(self._dialect, self.definition))
                self._manager.start()
            return self._manager

    def counts(self) -> dict[str, int]:
        """How many events are in each state."""
        return self._store.counts()

    def status(self) -> QueueStatus:
        """What waits, how late it is, and who leads."""
        return read_status(self._store)

    @property
    def scan(self) -> TableScan:
        """Reads the table as it is, beside its manager."""
        return TableScan(self._dialect, self.definition)

    def peek(self, state: str = "to_be_fired", limit: int = 10) -> list[dict[str, Any]]:
        """The first events in a state, by fire time."""
        return self._store.peek(state, limit)

    def retry(self, ids: Sequence[int] | None = None) -> int:
        """Have all dead letters fired again, or some events, dead or fired; returns how many."""
        return self._changed(self._store.retry_dead(ids))

    def cancel(self, ids: Sequence[int]) -> int:
        """Delete events that were not fired; returns how many."""
        return self._store.cancel(ids)

    def close(self) -> None:
        """Stop the manager, if one runs here. The table stays."""
        with self._lock:
            manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()
        self._store.close()

    def _changed(self, count: int) -> int:
        if count and self._manager is not None:
            self._manager.sweep()
        return count


class Database(Closing):
    """A database with queue tables. Safe to use from any thread."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.catalog = QueueCatalog(dialect)
        self._queues: list[TableQueue] = []

    def sql(self, statement: str, first_id: int = 1) -> list[str]:
        """Run a statement about queues or schedules; returns the names concerned.

        ``SHOW SCHEDULES`` returns statements that make them. The ids of a queue that is made begin
        at ``first_id``.
        """
        match parse(statement):
            case CreateQueue(definition, if_not_exists):
                self.catalog.create(definition, if_not_exists=if_not_exists, first_id=first_id)
                return [definition.name]
            case DropQueue(name, if_exists):
                self.catalog.drop(name, if_exists=if_exists)
                return [name]
            case ShowQueues():
                return self.catalog.names()
            case other:
                return run_schedule_statement(other, self._opened, self.catalog.names)

    def ddl(self, statement: str) -> list[str]:
        """What a ``CREATE QUEUE`` would run, for a migration tool."""
        parsed = parse(statement)
        if not isinstance(parsed, CreateQueue):
            raise ValueError("only CREATE QUEUE has statements to show")  # noqa: TRY004 - a text
        return self.catalog.ddl(parsed.definition)

    def queue(self, name: str) -> TableQueue:
        """The queue of this name. Raises ``NoSuchQueue``."""
        queue = self._opened(name)
        self._queues.append(queue)
        return queue

    def _opened(self, name: str) -> TableQueue:
        return TableQueue(self.dialect, self.catalog.definition(name))

    def connect(self) -> Connection:
        """A new connection of the driver's; every statement commits, unless you begin first."""
        return self.dialect.connect()

    def close(self) -> None:
        """Close all queues that were opened here."""
        for queue in self._queues:
            queue.close()
        self.catalog.close()


def connect(url: str) -> Database:
    """The queue tables of the database at ``url``; see :func:`turnlane.table.url.dialect_of`."""
    return Database(dialect_of(url))


def convert_to_nanoseconds(moment: datetime | int) -> int:
    """Nanoseconds since the epoch; a ``datetime`` must say its time zone."""
    if isinstance(moment, int):
        return moment
    if moment.tzinfo is None:
        raise ValueError("a time without a time zone means another moment elsewhere")
    whole = int(moment.replace(microsecond=0).timestamp())
    return (whole * 1_000_000 + moment.microsecond) * 1_000
