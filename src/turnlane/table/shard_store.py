"""What a database keeps for a queue that has several: maps, plans, and events on their way.

An event is moved to another shard as a letter is. One transaction takes it out of the table and
puts it into the *outbox*, next to the number of its batch; from then on nobody can fire or ack it
here. Another transaction, over there, inserts the whole batch and notes its number; a batch whose
number was noted before is not inserted again. Then the batch is struck off the outbox. So whoever
dies in between, an event is in one place, and whoever comes next goes on.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from typing import Any, Final

from turnlane.errors import LeadLost, NoSuchQueue, ReshardUnderWay
from turnlane.runtime import Closing
from turnlane.table.definition import Definition
from turnlane.table.fenced_writes import EventInserter, find_unreadable_rows
from turnlane.table.row_codec import (
    ONLINE_FILTERS,
    TRANSFERRED_COLUMNS,
    TransferBatch,
    TransferFilter,
    get_transferred_columns,
    prepare_arrivals,
)
from turnlane.table.schedules import ScheduleTable
from turnlane.table.shards import ShardMap
from turnlane.table.sql.dialect import Dialect, Row
from turnlane.table.sql.session import Execute, Session
from turnlane.table.statements import begin_delete

# ── shard_tables ──
# The tables that a database has for a queue with several: made when they are needed.

OUTBOX_PREFIX: Final = "turnlane_move_"
"""Of the outboxes' names."""


def delete_shard_data(dialect: Dialect, queue: str, execute: Execute) -> None:
    """Remove all that is kept of the shards of a queue that is dropped.

    Its maps too: one that is made anew under the same name has nothing to do with them.
    """
    execute(f"DROP TABLE IF EXISTS {dialect.identifier(OUTBOX_PREFIX + queue)}")
    for name, statement in _bookkeeping(dialect).items():
        execute(statement)  # which nobody may have needed so far
        execute(f"DELETE FROM {name} WHERE queue = {dialect.mark}", (queue,))


def _bookkeeping(dialect: Dialect) -> dict[str, str]:
    """Statements that make the tables which all queues share, by their names."""
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


class ShardTables:
    """``turnlane_map``, ``turnlane_shard``, ``turnlane_arrival`` and the outbox of one queue."""

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self.dialect = dialect
        self.definition = definition
        self.session = Session(dialect)
        self._name = definition.name
        self._prepared = False

    def prepare(self) -> None:
        """Make the tables, once; who finds them there needs no right to make any."""
        if self._prepared:
            return
        if not self._are_there():
            for statement in self._tables():
                self.change(statement)
        if not self._is_known():
            try:
                self.change(
                    "INSERT INTO turnlane_shard (queue, shard_id) VALUES (%s, %s)",
                    *(self._name, uuid.uuid4().hex),
                )
            except self.dialect.error:
                if not self._is_known():  # else another was quicker
                    raise
        self._prepared = True

    def _are_there(self) -> bool:
        try:
            for name in (*_bookkeeping(self.dialect), "{outbox}"):
                self.query(f"SELECT 1 FROM {name} WHERE 1 = 0")
        except self.dialect.error:
            return False
        return True

    def _is_known(self) -> bool:
        return bool(self.query("SELECT 1 FROM turnlane_shard WHERE queue = %s", self._name))

    def _tables(self) -> list[str]:
        number = f"CAST(0 AS {'SIGNED' if self.dialect.name == 'mysql' else 'BIGINT'})"
        return [
            *_bookkeeping(self.dialect).values(),
            (
                f"CREATE TABLE IF NOT EXISTS {{outbox}} AS SELECT {number} AS batch, "
                f"{number} AS version, event_id, {{columns}} FROM {{table}} WHERE 1 = 0"
            ),
        ]

    def query(self, template: str, *parameters: object) -> list[Row]:
        """The rows of one statement."""
        return self.session.query(self.sql(template), parameters)

    def change(self, template: str, *parameters: object) -> int:
        """How many rows one statement changed."""
        return self.session.change(self.sql(template), parameters)

    def sql(self, template: str) -> str:
        """A statement with the names of the tables and of the columns that are moved."""
        table, by_id = self.dialect.identifier(self._name), self.dialect.hints(self.definition)[1]
        return self.dialect.sql(
            template,
            table=table,
            by_id=by_id,
            delete=begin_delete(table, by_id),
            outbox=self.dialect.identifier(OUTBOX_PREFIX + self._name),
            columns=", ".join(
                map(self.dialect.identifier, get_transferred_columns(self.definition))
            ),
        )


# ── outbox ──
# The outbox: events on their way to another shard, read past what cannot be read.
#
# A row that the driver cannot give must not stop a reshard. Of such a row each column is read by
# itself, and one that cannot be as the text that the database has for it. It arrives as a dead
# letter, as it would have become where it was.

log = logging.getLogger(__name__)


class Outbox:
    """The outbox of one queue in one database, as far as it is read."""

    def __init__(self, tables: ShardTables) -> None:
        self._tables = tables
        self._names = get_transferred_columns(tables.definition)

    def first_batch(self) -> TransferBatch | None:
        """The oldest batch."""
        found = self._tables.query(
            "SELECT batch, version, event_id FROM {outbox} "
            "WHERE batch = (SELECT MIN(batch) FROM {outbox}) ORDER BY fire_at, event_id"
        )
        if not found:
            return None
        number, version, _ = found[0]
        ids = [row[2] for row in found]
        rows, broken = find_unreadable_rows(self._tables.dialect, self._read, ids)
        rows += [self._dead(*each) for each in broken]
        place = {event_id: at for at, event_id in enumerate(ids)}
        rows.sort(key=lambda row: place[row[0]])
        return TransferBatch(number, version, [row[1:] for row in rows])

    def _read(self, ids: Sequence[int]) -> list[Row]:
        condition, parameters = self._tables.dialect.ids(ids)
        statement = self._tables.sql("SELECT event_id, {columns} FROM {outbox} WHERE event_id ")
        return self._tables.session.query(statement + condition, parameters)

    def _dead(self, event_id: int, error: str) -> Row:
        """A row that cannot be read, as a dead letter; one that was acked stays so."""
        log.error("queue %s: event %d: %s", self._tables.definition.name, event_id, error)
        row = {name: self._value(event_id, name) for name in self._names}
        if row["state"] != "acked":
            row |= {"state": "dead", "last_error": error}
        return (event_id, *row.values())

    def _value(self, event_id: int, name: str) -> Any:  # noqa: ANN401 - whatever a column holds
        dialect = self._tables.dialect
        column = dialect.identifier(name)
        try:
            return self._column(event_id, column)
        except dialect.error as error:
            if not dialect.is_unreadable(error):
                raise
        raw = self._column(event_id, dialect.raw(column))
        return raw.decode(errors="backslashreplace") if isinstance(raw, bytes) else raw

    def _column(self, event_id: int, expression: str) -> Any:  # noqa: ANN401 - likewise
        rest = self._tables.sql("FROM {outbox} WHERE event_id = %s")
        return self._tables.session.query(f"SELECT {expression} {rest}", (event_id,))[0][0]


TRANSFER_BATCH: Final = 1_000
"""Events that are moved at a time."""

CLOSED_OWNER: Final = "(closed)"
"""Holds the lease of a shard that nobody may lead: one that is retired, or not open yet."""

MAX_INT64: Final = 2**63 - 1


class ShardStore(Closing):
    """One database of a sharded queue. Safe to use from any thread; every call blocks on it.

    Every call may raise ``DatabaseDown`` or ``DatabaseReadOnly``, and may be repeated.
    """

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self.dialect = dialect
        self.definition = definition
        self._name = definition.name
        self._tables = ShardTables(dialect, definition)
        self._outbox = Outbox(self._tables)
        self._schedules = ScheduleTable(self._tables.session, EventInserter(dialect, definition))
        self._id: str | None = None

    def close(self) -> None:
        self._tables.session.close()

    @property
    def id(self) -> str:
        """The name of this shard's outbox, for those who take events from it."""
        if self._id is None:
            self._tables.prepare()
            found = self._tables.query(
                "SELECT shard_id FROM turnlane_shard WHERE queue = %s", self._name
            )
            self._id = str(found[0][0])
        return self._id

    # ── maps ─────────────────────────────────────────────────────────────────────────────────────

    def newest_map(self) -> ShardMap | None:
        """The newest map that this database knows."""
        self._tables.prepare()
        return self.kept_map()

    def kept_map(self) -> ShardMap | None:
        """The same, for those who only look: the driver's error if no table was made for maps."""
        found = self._tables.query(
            "SELECT map FROM turnlane_map WHERE queue = %s ORDER BY version DESC LIMIT 1",
            self._name,
        )
        return ShardMap.from_json(found[0][0]) if found else None

    def map_of(self, version: int) -> ShardMap:
        """The map of a version: one that is kept, or the planned one."""
        found = self._tables.query(
            "SELECT map FROM turnlane_map WHERE queue = %s AND version = %s", self._name, version
        )
        if found:
            return ShardMap.from_json(found[0][0])
        plan = self.plan()
        if plan is None or plan.version != version:
            raise NoSuchQueue(f"no map of {self._name!r} has the version {version}")
        return plan

    def keep_map(self, shards: ShardMap) -> None:
        """Keep a map; it is in force from now on, unless there is a newer one."""
        self._tables.prepare()

        def work(execute: Execute) -> None:
            self._lock_shard(execute)
            known = execute(
                self._tables.sql("SELECT 1 FROM turnlane_map WHERE queue = %s AND version = %s"),
                (self._name, shards.version),
            )
            if not known.rows():
                execute(
                    self._tables.sql(
                        "INSERT INTO turnlane_map (queue, version, map) VALUES (%s, %s, %s)"
                    ),
                    (self._name, shards.version, shards.to_json()),
                )

        self._tables.session.transact(work)

    # ── plans ────────────────────────────────────────────────────────────────────────────────────

    def plan(self) -> ShardMap | None:
        """The map that a reshard under way leads to."""
        self._tables.prepare()
        found = self._tables.query("SELECT plan FROM turnlane_shard WHERE queue = %s", self._name)
        return ShardMap.from_json(found[0][0]) if found and found[0][0] else None

    def set_plan(self, plan: ShardMap) -> None:
        """Begin a reshard. Raises ``ReshardUnderWay`` if there is another."""
        self._tables.prepare()
        text = plan.to_json()

        def work(execute: Execute) -> None:
            kept = self._lock_shard(execute)[2]
            newest = execute(
                self._tables.sql(
                    "SELECT COALESCE(MAX(version), -1) FROM turnlane_map WHERE queue = %s"
                ),
                (self._name,),
            ).rows()[0][0]
            if (kept is not None and kept != text) or (kept is None and newest >= plan.version):
                raise ReshardUnderWay(f"{self._name!r} is being resharded otherwise; resume that")
            execute(
                self._tables.sql("UPDATE turnlane_shard SET plan = %s WHERE queue = %s"),
                (text, self._name),
            )

        self._tables.session.transact(work)

    def end_plan(self) -> None:
        """The reshard is over."""
        self._tables.change("UPDATE turnlane_shard SET plan = NULL WHERE queue = %s", self._name)

    # ── the lease ────────────────────────────────────────────────────────────────────────────────

    def is_led(self) -> bool:
        """Whether a manager holds the lease at this moment."""
        owner, _, expires_at, now = self._tables.query(
            "SELECT owner, token, expires_at, {now} FROM turnlane_lease WHERE queue = %s",
            self._name,
        )[0]
        return owner is not None and owner != CLOSED_OWNER and expires_at > now

    def shut(self) -> None:
        """Have nobody lead here: a manager that does can write nothing from now on."""
        self._tables.change(
            "UPDATE turnlane_lease SET owner = %s, token = token + 1, expires_at = %s, "
            "listening = 0 WHERE queue = %s AND (owner IS NULL OR owner <> %s)",
            *(CLOSED_OWNER, MAX_INT64, self._name, CLOSED_OWNER),
        )

    def open(self) -> None:
        """Let managers lead."""
        self._tables.change(
            "UPDATE turnlane_lease SET owner = NULL, expires_at = 0 "
            "WHERE queue = %s AND owner = %s",
            *(self._name, CLOSED_OWNER),
        )

    # ── the way out ──────────────────────────────────────────────────────────────────────────────

    def now(self) -> int:
        """The database's clock."""
        found: int = self._tables.query("SELECT {now}")[0][0]
        return found

    def left(self) -> int:
        """How many events are in the table or the outbox."""
        counted = "SELECT (SELECT COUNT(*) FROM {table}) + (SELECT COUNT(*) FROM {outbox})"
        found: int = self._tables.query(counted)[0][0]
        return found

    def last_id(self) -> int:
        """The highest id in the table."""
        found: int = self._tables.query("SELECT COALESCE(MAX(event_id), 0) FROM {table}")[0][0]
        return found

    def has(self, what: TransferFilter, last_id: int = MAX_INT64) -> bool:
        """Whether there is such an event in the table, with an id up to ``last_id``."""
        chosen = f"SELECT 1 FROM {{table}} WHERE {what.value} AND event_id <= %s LIMIT 1"
        return bool(self._tables.query(chosen, last_id))

    def take(self, what: TransferFilter, version: int, *parameters: int) -> int:
        """Put a batch of events into the outbox; how many. They go where the map says.

        Not those that somebody is about to change: they are taken another time. Raises
        ``LeadLost`` if a manager may have them in memory.
        """
        limit = " LIMIT %s" if what is not TransferFilter.ALL else ""
        chosen = self._tables.sql(
            f"SELECT event_id FROM {{table}} WHERE {what.value} "
            f"ORDER BY fire_at, event_id{limit} {{lock_free}}"
        )
        most = (TRANSFER_BATCH,) if limit else ()

        def work(execute: Execute) -> int:
            # Others who take wait here: numbers are committed in their order.
            _, number, _ = self._lock_shard(execute)
            if what not in ONLINE_FILTERS:
                self._check_shut(execute)
            ids = [row[0] for row in execute(chosen, (*parameters, *most)).rows()]
            if ids:
                self._put_out(execute, ids, number + 1, version)
            return len(ids)

        self._tables.prepare()
        return self._tables.session.transact(work)

    def _put_out(self, execute: Execute, ids: Sequence[int], number: int, version: int) -> None:
        condition, parameters = self.dialect.ids(ids)
        execute(
            self._tables.sql(
                "INSERT INTO {outbox} (batch, version, event_id, {columns}) "
                "SELECT %s, %s, event_id, {columns} FROM {table} {by_id} WHERE event_id "
            )
            + condition,
            (number, version, *parameters),
        )
        execute(self._tables.sql("{delete} WHERE event_id ") + condition, parameters)
        execute(
            self._tables.sql("UPDATE turnlane_shard SET batch = %s WHERE queue = %s"),
            (number, self._name),
        )

    def first_batch(self) -> TransferBatch | None:
        """The oldest batch in the outbox; what cannot be read is a dead letter there."""
        self._tables.prepare()
        return self._outbox.first_batch()

    def strike(self, number: int) -> None:
        """A batch has arrived."""
        self._tables.change("DELETE FROM {outbox} WHERE batch = %s", number)

    # ── the way in ───────────────────────────────────────────────────────────────────────────────

    def arrive(self, source: str, number: int, rows: Sequence[Row]) -> bool:
        """Insert a batch from another shard's outbox; false if it was here before."""
        self._tables.prepare()
        self._expect(source)
        key = (self._name, source)

        def work(execute: Execute) -> bool:
            last = execute(
                self._tables.sql(
                    "SELECT batch FROM turnlane_arrival WHERE queue = %s AND source = %s {lock}"
                ),
                key,
            ).rows()[0][0]
            if last >= number:
                return False
            here = prepare_arrivals(rows, self.definition, self._names_taken(execute, rows))
            self._tables.session.insert_many(
                self._name, get_transferred_columns(self.definition), here
            )
            execute(
                self._tables.sql(
                    "UPDATE turnlane_arrival SET batch = %s WHERE queue = %s AND source = %s"
                ),
                (number, *key),
            )
            return True

        return self._tables.session.transact(work)

    def _names_taken(self, execute: Execute, rows: Sequence[Row]) -> set[str]:
        """Those of the rows' names that are in the table."""
        at = TRANSFERRED_COLUMNS.index("event_name")
        names = [row[at] for row in rows if row[at] is not None]
        if not names:
            return set()
        marks = ", ".join(["%s"] * len(names))
        statement = f"SELECT event_name FROM {{table}} WHERE event_name IN ({marks})"
        return {row[0] for row in execute(self._tables.sql(statement), names).rows()}

    def _expect(self, source: str) -> None:
        known = "SELECT 1 FROM turnlane_arrival WHERE queue = %s AND source = %s"
        if self._tables.query(known, self._name, source):
            return
        try:
            self._tables.change(
                "INSERT INTO turnlane_arrival (queue, source) VALUES (%s, %s)", self._name, source
            )
        except self.dialect.error:
            if not self._tables.query(known, self._name, source):  # else another was quicker
                raise

    # ── schedules ────────────────────────────────────────────────────────────────────────────────

    def schedules(self) -> list[Row]:
        """Those that are here."""
        return self._schedules.rows()

    def keep_schedule(self, row: Row) -> None:
        """Take one over from another shard, unless it is here."""
        self._schedules.arrive(row)

    def drop_schedule(self, name: str) -> None:
        """One is somewhere else."""
        self._schedules.remove(name)

    # ── how ──────────────────────────────────────────────────────────────────────────────────────

    def _lock_shard(self, execute: Execute) -> tuple[str, int, str | None]:
        found = execute(
            self._tables.sql(
                "SELECT shard_id, batch, plan FROM turnlane_shard WHERE queue = %s {lock}"
            ),
            (self._name,),
        ).rows()
        shard_id, batch, plan = found[0]
        return shard_id, batch, plan

    def _check_shut(self, execute: Execute) -> None:
        found = execute(
            self._tables.sql("SELECT owner FROM turnlane_lease WHERE queue = %s {lock}"),
            (self._name,),
        ).rows()
        if not found or found[0][0] != CLOSED_OWNER:
            raise LeadLost(f"{self._name!r} is not shut here: a manager may fire its events")
