"""One database of a sharded queue: its maps, its plan, its lease, and its side of transfers.

**Maps and plans.** A *map* is in force once the database has saved it, unless it has a newer one. A
*plan* is the map that an unfinished reshard leads to; a database has at most one. A shard whose
lease belongs to ``(closed)`` has no leader: it is retired, or not open yet.

**Transfers.** Events go from one shard to another in three transactions. The first takes a batch of
events out of the table and puts them into the *outbox*, next to the number of the batch; after it,
no manager can fire or ack them here. The second, in the other database, inserts the whole batch and
records its number; a batch whose number is recorded is not inserted again. The third deletes the
batch from the outbox. So an event is in one place no matter where a process dies, and the next
process goes on.

**Unreadable rows.** A row that the driver cannot read must not stop a reshard. Each column of such
a row is read by itself, and an unreadable column as the text that the database has for it. The row
arrives as a dead letter, which it would also have become in its old table.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Container, Sequence
from typing import Any, Final, NamedTuple

from turnlane.databases import Dialect, Execute, Row, Session
from turnlane.errors import LeadLost, NoSuchQueue, ReshardUnderWay
from turnlane.logs import get_logger
from turnlane.runtime import Closeable
from turnlane.table.definition import Definition
from turnlane.table.queue_sql import begin_delete, get_queue_sql
from turnlane.table.rows import EventInserter, convert_to_portable
from turnlane.table.schedules import ScheduleTable
from turnlane.table.shards import ShardMap
from turnlane.table.store import find_unreadable_rows

log = get_logger(__name__)

TRANSFER_BATCH: Final = 1_000
"""Events in one batch."""

CLOSED_OWNER: Final = "(closed)"
"""The owner of the lease of a shard that must have no leader."""

MAX_INT64: Final = 2**63 - 1

OUTBOX_PREFIX: Final = "turnlane_move_"

TRANSFERRED_COLUMNS: Final = (
    "fire_at",
    "state",
    "attempts",
    "priority",
    "event_name",
    "event_group",
    "after_group",
    "last_error",
)
"""The system columns of an event that move with it. It gets another id."""


class TransferFilter(enum.Enum):
    """Which events are taken out of a table, as a condition in SQL."""

    FAR = (
        "fire_at > %s AND state = 'to_be_fired' AND attempts = 0 "
        "AND event_group IS NULL AND after_group IS NULL"
    )
    """Events that no manager has in memory: they are due after the end of its window."""
    HISTORY = "state = 'acked'"
    PLAIN = "after_group IS NULL"
    ALL = "1 = 1"
    """Also events that wait for a group, whose members have to arrive before them."""


ONLINE_FILTERS: Final = (TransferFilter.FAR, TransferFilter.HISTORY)
"""Events that can be moved while a manager fires from the same table."""


class TransferBatch(NamedTuple):
    """A batch of events in an outbox."""

    number: int
    version: int
    """The version of the map that says where they belong."""
    rows: list[Row]


def prepare_arrivals(
    rows: Sequence[Row], definition: Definition, used_names: Container[str]
) -> list[Row]:
    """Return rows for the database that they arrive in, without event names that are used there.

    A fired event has to fire again: no ack can reach the manager that fired it.
    """
    columns = (*TRANSFERRED_COLUMNS, *definition.column_names)
    at_state, at_name = columns.index("state"), columns.index("event_name")
    booleans = {column.name for column in definition.columns if column.type == "BOOLEAN"}
    at_booleans = [at for at, name in enumerate(columns) if name in booleans]
    prepared = []
    for row in rows:
        values = list(map(convert_to_portable, row))
        if values[at_state] == "fired":
            values[at_state] = "to_be_fired"
        if values[at_name] in used_names:
            values[at_name] = None
        for at in at_booleans:  # MySQL and SQLite return numbers
            values[at] = None if values[at] is None else bool(values[at])
        prepared.append(tuple(values))
    return prepared


def _get_shared_ddl(dialect: Dialect) -> dict[str, str]:
    """Return the statements that create the tables which all queues share, by table."""
    mysql = dialect.name == "mysql"
    text = "VARCHAR(64)" + (" CHARACTER SET utf8mb4 COLLATE utf8mb4_bin" if mysql else "")
    columns = {
        "turnlane_map": (
            f"queue {text} NOT NULL, version BIGINT NOT NULL, map TEXT NOT NULL, "
            "PRIMARY KEY (queue, version)"
        ),
        "turnlane_shard": (
            f"queue {text} PRIMARY KEY, shard_id {text} NOT NULL, "
            "batch BIGINT NOT NULL DEFAULT 0, plan TEXT"
        ),
        "turnlane_arrival": (
            f"queue {text} NOT NULL, source {text} NOT NULL, batch BIGINT NOT NULL DEFAULT 0, "
            "PRIMARY KEY (queue, source)"
        ),
    }
    return {
        name: f"CREATE TABLE IF NOT EXISTS {name} ({listed})" for name, listed in columns.items()
    }


def delete_shard_data(dialect: Dialect, queue: str, execute: Execute) -> None:
    """Delete the outbox, maps and plans of a dropped queue.

    A queue that is created again under the same name must not follow the old maps.
    """
    execute(f"DROP TABLE IF EXISTS {dialect.quote_name(OUTBOX_PREFIX + queue)}")
    for name, create in _get_shared_ddl(dialect).items():
        execute(create)  # it may not exist yet
        execute(f"DELETE FROM {name} WHERE queue = {dialect.placeholder}", (queue,))


class ShardStore(Closeable):
    """One database of a sharded queue. Thread-safe; every call blocks on the database.

    Every call may raise ``DatabaseDown`` or ``DatabaseReadOnly``, and may be repeated.
    """

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self.dialect = dialect
        self.definition = definition
        self._name = definition.name
        self._columns = (*TRANSFERRED_COLUMNS, *definition.column_names)
        """The columns of an event that move with it."""
        self._session = Session(dialect)
        self._schedules = ScheduleTable(self._session, EventInserter(dialect, definition))
        self._is_prepared = False
        self._id: str | None = None

    def close(self) -> None:
        self._session.close()

    @property
    def id(self) -> str:
        """The unique id of this shard's outbox, which the receiving shards record."""
        if self._id is None:
            self._prepare()
            found = self._query("SELECT shard_id FROM turnlane_shard WHERE queue = %s", self._name)
            self._id = str(found[0][0])
        return self._id

    # ── maps ─────────────────────────────────────────────────────────────────────────────────────

    def read_newest_map(self) -> ShardMap | None:
        """Return the newest map of this database."""
        self._prepare()
        return self.read_saved_map()

    def read_saved_map(self) -> ShardMap | None:
        """Return the newest map, without creating tables: the driver's error if none exists."""
        found = self._query(
            "SELECT map FROM turnlane_map WHERE queue = %s ORDER BY version DESC LIMIT 1",
            self._name,
        )
        return ShardMap.from_json(found[0][0]) if found else None

    def read_map(self, version: int) -> ShardMap:
        """Return the map of a version: a saved one, or the planned one."""
        found = self._query(
            "SELECT map FROM turnlane_map WHERE queue = %s AND version = %s", self._name, version
        )
        if found:
            return ShardMap.from_json(found[0][0])
        plan = self.read_plan()
        if plan is None or plan.version != version:
            raise NoSuchQueue(f"no map of {self._name!r} has the version {version}")
        return plan

    def save_map(self, shards: ShardMap) -> None:
        """Save a map; it is in force at once, unless there is a newer one."""
        self._prepare()

        def work(execute: Execute) -> None:
            self._lock_shard(execute)
            key = (self._name, shards.version)
            known = self._render("SELECT 1 FROM turnlane_map WHERE queue = %s AND version = %s")
            if not execute(known, key).rows():
                insert = "INSERT INTO turnlane_map (queue, version, map) VALUES (%s, %s, %s)"
                execute(self._render(insert), (*key, shards.to_json()))

        self._session.transact(work)

    # ── plans ────────────────────────────────────────────────────────────────────────────────────

    def read_plan(self) -> ShardMap | None:
        """Return the map that an unfinished reshard leads to."""
        self._prepare()
        found = self._query("SELECT plan FROM turnlane_shard WHERE queue = %s", self._name)
        return ShardMap.from_json(found[0][0]) if found and found[0][0] else None

    def save_plan(self, plan: ShardMap) -> None:
        """Begin a reshard. Raises ``ReshardUnderWay`` if there is another plan or a newer map."""
        self._prepare()
        text = plan.to_json()

        def work(execute: Execute) -> None:
            saved = self._lock_shard(execute)[1]
            select = "SELECT COALESCE(MAX(version), -1) FROM turnlane_map WHERE queue = %s"
            newest = execute(self._render(select), (self._name,)).rows()[0][0]
            if (saved is not None and saved != text) or (saved is None and newest >= plan.version):
                raise ReshardUnderWay(
                    f"another reshard of {self._name!r} is not finished; resume it first"
                )
            update = self._render("UPDATE turnlane_shard SET plan = %s WHERE queue = %s")
            execute(update, (text, self._name))

        self._session.transact(work)

    def delete_plan(self) -> None:
        """End the reshard."""
        self._change("UPDATE turnlane_shard SET plan = NULL WHERE queue = %s", self._name)

    # ── the lease ────────────────────────────────────────────────────────────────────────────────

    def has_leader(self) -> bool:
        """Whether a manager holds the lease now."""
        owner, expires_at, now = self._query(
            "SELECT owner, expires_at, {now} FROM turnlane_lease WHERE queue = %s", self._name
        )[0]
        return owner is not None and owner != CLOSED_OWNER and expires_at > now

    def close_lease(self) -> None:
        """Take the lease away from all managers: a leader can write nothing after this."""
        self._change(
            "UPDATE turnlane_lease SET owner = %s, token = token + 1, expires_at = %s, "
            "listening = 0 WHERE queue = %s AND (owner IS NULL OR owner <> %s)",
            *(CLOSED_OWNER, MAX_INT64, self._name, CLOSED_OWNER),
        )

    def open_lease(self) -> None:
        """Let managers lead."""
        self._change(
            "UPDATE turnlane_lease SET owner = NULL, expires_at = 0 "
            "WHERE queue = %s AND owner = %s",
            *(self._name, CLOSED_OWNER),
        )

    # ── sending events ───────────────────────────────────────────────────────────────────────────

    def read_now(self) -> int:
        """Return the database's clock."""
        found: int = self._query("SELECT {now}")[0][0]
        return found

    def read_last_id(self) -> int:
        """Return the highest id in the table."""
        found: int = self._query("SELECT COALESCE(MAX(event_id), 0) FROM {table}")[0][0]
        return found

    def count_rows(self) -> int:
        """Return how many events are in the table and the outbox."""
        count = "SELECT (SELECT COUNT(*) FROM {table}) + (SELECT COUNT(*) FROM {outbox})"
        found: int = self._query(count)[0][0]
        return found

    def has_rows(self, wanted: TransferFilter, last_id: int = MAX_INT64) -> bool:
        """Whether the table has such an event, with an id up to ``last_id``."""
        select = f"SELECT 1 FROM {{table}} WHERE {wanted.value} AND event_id <= %s LIMIT 1"
        return bool(self._query(select, last_id))

    def move_to_outbox(self, wanted: TransferFilter, version: int, *parameters: int) -> int:
        """Move a batch of events to the outbox; returns how many. A map says where they belong.

        Skips locked rows. Raises ``LeadLost`` if a manager may have the events in memory.
        """
        limit = " LIMIT %s" if wanted is not TransferFilter.ALL else ""
        select = self._render(
            f"SELECT event_id FROM {{table}} WHERE {wanted.value} "
            f"ORDER BY fire_at, event_id{limit} {{lock_free}}"
        )
        most = (TRANSFER_BATCH,) if limit else ()

        def work(execute: Execute) -> int:
            # Only one transfer at a time gets past this lock: numbers are committed in order.
            number, _ = self._lock_shard(execute)
            if wanted not in ONLINE_FILTERS:
                self._check_lease_closed(execute)
            ids = [row[0] for row in execute(select, (*parameters, *most)).rows()]
            if ids:
                self._fill_outbox(execute, ids, number + 1, version)
            return len(ids)

        self._prepare()
        return self._session.transact(work)

    def _fill_outbox(self, execute: Execute, ids: Sequence[int], number: int, version: int) -> None:
        condition, parameters = self.dialect.match_ids(ids)
        copy = self._render(
            "INSERT INTO {outbox} (batch, version, event_id, {columns}) "
            "SELECT %s, %s, event_id, {columns} FROM {table} {by_id} WHERE event_id "
        )
        execute(copy + condition, (number, version, *parameters))
        execute(self._render("{delete} WHERE event_id ") + condition, parameters)
        update = self._render("UPDATE turnlane_shard SET batch = %s WHERE queue = %s")
        execute(update, (number, self._name))

    def read_first_batch(self) -> TransferBatch | None:
        """Return the oldest batch in the outbox; unreadable rows are dead letters in it."""
        self._prepare()
        found = self._query(
            "SELECT batch, version, event_id FROM {outbox} "
            "WHERE batch = (SELECT MIN(batch) FROM {outbox}) ORDER BY fire_at, event_id"
        )
        if not found:
            return None
        number, version, _ = found[0]
        ids = [row[2] for row in found]
        rows, unreadable = find_unreadable_rows(self.dialect, self._read_outbox, ids)
        rows += [self._read_as_dead_letter(*each) for each in unreadable]
        positions = {event_id: at for at, event_id in enumerate(ids)}
        rows.sort(key=lambda row: positions[row[0]])
        return TransferBatch(number, version, [row[1:] for row in rows])

    def _read_outbox(self, ids: Sequence[int]) -> list[Row]:
        condition, parameters = self.dialect.match_ids(ids)
        statement = self._render("SELECT event_id, {columns} FROM {outbox} WHERE event_id ")
        return self._session.query(statement + condition, parameters)

    def _read_as_dead_letter(self, event_id: int, error: str) -> Row:
        """Read an unreadable row column by column; an acked event stays acked."""
        log.error("table.row_unreadable", queue=self._name, event_id=event_id, error=error)
        row = {name: self._read_value(event_id, name) for name in self._columns}
        if row["state"] != "acked":
            row |= {"state": "dead", "last_error": error}
        return (event_id, *row.values())

    def _read_value(self, event_id: int, name: str) -> Any:  # noqa: ANN401 - a column of any type
        rest = self._render("FROM {outbox} WHERE event_id = %s")

        def read(expression: str) -> Any:  # noqa: ANN401
            return self._session.query(f"SELECT {expression} {rest}", (event_id,))[0][0]

        column = self.dialect.quote_name(name)
        try:
            return read(column)
        except self.dialect.error as error:
            if not self.dialect.is_unreadable(error):
                raise
        raw = read(self.dialect.cast_to_raw(column))
        return raw.decode(errors="backslashreplace") if isinstance(raw, bytes) else raw

    def delete_batch(self, number: int) -> None:
        """Delete a batch that has arrived from the outbox."""
        self._change("DELETE FROM {outbox} WHERE batch = %s", number)

    # ── receiving events ─────────────────────────────────────────────────────────────────────────

    def insert_batch(self, source: str, number: int, rows: Sequence[Row]) -> bool:
        """Insert a batch from another shard's outbox; false if it was inserted before."""
        self._prepare()
        key = (self._name, source)
        select = "SELECT batch FROM turnlane_arrival WHERE queue = %s AND source = %s"
        if not self._query(select, *key):
            self._insert_if_missing("turnlane_arrival (queue, source)", *key)

        def work(execute: Execute) -> bool:
            last = execute(self._render(f"{select} {{lock}}"), key).rows()[0][0]
            if last >= number:
                return False
            used_names = self._find_used_names(execute, rows)
            arrivals = prepare_arrivals(rows, self.definition, used_names)
            self._session.insert_many(self._name, self._columns, arrivals)
            update = "UPDATE turnlane_arrival SET batch = %s WHERE queue = %s AND source = %s"
            execute(self._render(update), (number, *key))
            return True

        return self._session.transact(work)

    def _find_used_names(self, execute: Execute, rows: Sequence[Row]) -> set[str]:
        """Return the event names of the rows that are in the table."""
        at = TRANSFERRED_COLUMNS.index("event_name")
        names = [row[at] for row in rows if row[at] is not None]
        if not names:
            return set()
        marks = ", ".join(["%s"] * len(names))
        statement = f"SELECT event_name FROM {{table}} WHERE event_name IN ({marks})"
        return {row[0] for row in execute(self._render(statement), names).rows()}

    # ── schedules ────────────────────────────────────────────────────────────────────────────────

    def read_schedules(self) -> list[Row]:
        """Return the rows of the schedules that are here."""
        return self._schedules.read_rows()

    def add_schedule(self, row: Row) -> None:
        """Add a schedule from another shard, unless it is here."""
        self._schedules.add_row(row)

    def remove_schedule(self, name: str) -> None:
        """Delete a schedule that another shard has."""
        self._schedules.remove(name)

    # ── helpers ──────────────────────────────────────────────────────────────────────────────────

    def _prepare(self) -> None:
        """Create the tables, once; if they exist, no right to create tables is needed."""
        if self._is_prepared:
            return
        shared = _get_shared_ddl(self.dialect)
        try:
            for name in (*shared, "{outbox}"):
                self._query(f"SELECT 1 FROM {name} WHERE 1 = 0")
        except self.dialect.error:
            number = f"CAST(0 AS {'SIGNED' if self.dialect.name == 'mysql' else 'BIGINT'})"
            create_outbox = (
                f"CREATE TABLE IF NOT EXISTS {{outbox}} AS SELECT {number} AS batch, "
                f"{number} AS version, event_id, {{columns}} FROM {{table}} WHERE 1 = 0"
            )
            for statement in (*shared.values(), create_outbox):
                self._change(statement)
        if not self._query("SELECT 1 FROM turnlane_shard WHERE queue = %s", self._name):
            shard_id = uuid.uuid4().hex
            self._insert_if_missing("turnlane_shard (queue, shard_id)", self._name, shard_id)
        self._is_prepared = True

    def _insert_if_missing(self, table_and_columns: str, *values: str) -> None:
        """Insert a row of two texts, unless another process inserts one with its key just now."""
        begin, end = self.dialect.insert_or_ignore
        self._change(f"{begin} {table_and_columns} VALUES (%s, %s) {end}", *values)

    def _lock_shard(self, execute: Execute) -> tuple[int, str | None]:
        """Lock the shard's row; returns the number of its last batch, and its plan."""
        select = self._render("SELECT batch, plan FROM turnlane_shard WHERE queue = %s {lock}")
        batch, plan = execute(select, (self._name,)).rows()[0]
        return batch, plan

    def _check_lease_closed(self, execute: Execute) -> None:
        select = self._render("SELECT owner FROM turnlane_lease WHERE queue = %s {lock}")
        if execute(select, (self._name,)).rows() != [(CLOSED_OWNER,)]:
            raise LeadLost(f"{self._name!r} is not closed here: a manager may fire its events")

    def _query(self, template: str, *parameters: object) -> list[Row]:
        return self._session.query(self._render(template), parameters)

    def _change(self, template: str, *parameters: object) -> int:
        return self._session.change(self._render(template), parameters)

    def _render(self, template: str) -> str:
        """Fill in the names of the tables and of the columns that move."""
        table = self.dialect.quote_name(self._name)
        by_id = get_queue_sql(self.dialect).get_index_hints(self.definition)[1]
        return self.dialect.render(
            template,
            table=table,
            by_id=by_id,
            delete=begin_delete(table, by_id),
            outbox=self.dialect.quote_name(OUTBOX_PREFIX + self._name),
            columns=", ".join(map(self.dialect.quote_name, self._columns)),
        )
