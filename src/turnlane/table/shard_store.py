"""One database of a sharded queue: its maps, its plan, its lease, and its side of transfers.

A *map* is in force once the database has saved it, unless it has a newer one. A *plan* is the map
that an unfinished reshard leads to; a database has at most one. A shard whose lease belongs to
``(closed)`` has no leader: it is retired, or not open yet. How events move is described in
:mod:`turnlane.table.row_transfer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from turnlane.databases import Dialect, Execute, Row
from turnlane.errors import LeadLost, NoSuchQueue, ReshardUnderWay
from turnlane.runtime import Closeable
from turnlane.table.definition import Definition
from turnlane.table.row_transfer import (
    ONLINE_FILTERS,
    TRANSFERRED_COLUMNS,
    Outbox,
    ShardTables,
    TransferBatch,
    TransferFilter,
    get_transferred_columns,
    prepare_arrivals,
)
from turnlane.table.rows import EventInserter
from turnlane.table.schedules import ScheduleTable
from turnlane.table.shards import ShardMap

TRANSFER_BATCH: Final = 1_000
"""Events in one batch."""

CLOSED_OWNER: Final = "(closed)"
"""The owner of the lease of a shard that must have no leader."""

MAX_INT64: Final = 2**63 - 1


class ShardStore(Closeable):
    """One database of a sharded queue. Thread-safe; every call blocks on the database.

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
        """The unique id of this shard's outbox, which the receiving shards record."""
        if self._id is None:
            self._tables.prepare()
            found = self._tables.query(
                "SELECT shard_id FROM turnlane_shard WHERE queue = %s", self._name
            )
            self._id = str(found[0][0])
        return self._id

    # ── maps ─────────────────────────────────────────────────────────────────────────────────────

    def read_newest_map(self) -> ShardMap | None:
        """Return the newest map of this database."""
        self._tables.prepare()
        return self.read_saved_map()

    def read_saved_map(self) -> ShardMap | None:
        """Return the newest map, without creating tables: the driver's error if none exists."""
        found = self._tables.query(
            "SELECT map FROM turnlane_map WHERE queue = %s ORDER BY version DESC LIMIT 1",
            self._name,
        )
        return ShardMap.from_json(found[0][0]) if found else None

    def read_map(self, version: int) -> ShardMap:
        """Return the map of a version: a saved one, or the planned one."""
        found = self._tables.query(
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

    def read_plan(self) -> ShardMap | None:
        """Return the map that an unfinished reshard leads to."""
        self._tables.prepare()
        found = self._tables.query("SELECT plan FROM turnlane_shard WHERE queue = %s", self._name)
        return ShardMap.from_json(found[0][0]) if found and found[0][0] else None

    def save_plan(self, plan: ShardMap) -> None:
        """Begin a reshard. Raises ``ReshardUnderWay`` if there is another plan or a newer map."""
        self._tables.prepare()
        text = plan.to_json()

        def work(execute: Execute) -> None:
            saved = self._lock_shard(execute)[1]
            newest = execute(
                self._tables.sql(
                    "SELECT COALESCE(MAX(version), -1) FROM turnlane_map WHERE queue = %s"
                ),
                (self._name,),
            ).rows()[0][0]
            if (saved is not None and saved != text) or (saved is None and newest >= plan.version):
                raise ReshardUnderWay(
                    f"another reshard of {self._name!r} is not finished; resume it first"
                )
            execute(
                self._tables.sql("UPDATE turnlane_shard SET plan = %s WHERE queue = %s"),
                (text, self._name),
            )

        self._tables.session.transact(work)

    def delete_plan(self) -> None:
        """End the reshard."""
        self._tables.change("UPDATE turnlane_shard SET plan = NULL WHERE queue = %s", self._name)

    # ── the lease ────────────────────────────────────────────────────────────────────────────────

    def has_leader(self) -> bool:
        """Whether a manager holds the lease now."""
        owner, expires_at, now = self._tables.query(
            "SELECT owner, expires_at, {now} FROM turnlane_lease WHERE queue = %s", self._name
        )[0]
        return owner is not None and owner != CLOSED_OWNER and expires_at > now

    def close_lease(self) -> None:
        """Take the lease away from all managers: a leader can write nothing after this."""
        self._tables.change(
            "UPDATE turnlane_lease SET owner = %s, token = token + 1, expires_at = %s, "
            "listening = 0 WHERE queue = %s AND (owner IS NULL OR owner <> %s)",
            *(CLOSED_OWNER, MAX_INT64, self._name, CLOSED_OWNER),
        )

    def open_lease(self) -> None:
        """Let managers lead."""
        self._tables.change(
            "UPDATE turnlane_lease SET owner = NULL, expires_at = 0 "
            "WHERE queue = %s AND owner = %s",
            *(self._name, CLOSED_OWNER),
        )

    # ── sending events ───────────────────────────────────────────────────────────────────────────

    def read_now(self) -> int:
        """Return the database's clock."""
        found: int = self._tables.query("SELECT {now}")[0][0]
        return found

    def read_last_id(self) -> int:
        """Return the highest id in the table."""
        found: int = self._tables.query("SELECT COALESCE(MAX(event_id), 0) FROM {table}")[0][0]
        return found

    def count_rows(self) -> int:
        """Return how many events are in the table and the outbox."""
        count = "SELECT (SELECT COUNT(*) FROM {table}) + (SELECT COUNT(*) FROM {outbox})"
        found: int = self._tables.query(count)[0][0]
        return found

    def has_rows(self, wanted: TransferFilter, last_id: int = MAX_INT64) -> bool:
        """Whether the table has such an event, with an id up to ``last_id``."""
        select = f"SELECT 1 FROM {{table}} WHERE {wanted.value} AND event_id <= %s LIMIT 1"
        return bool(self._tables.query(select, last_id))

    def move_to_outbox(self, wanted: TransferFilter, version: int, *parameters: int) -> int:
        """Move a batch of events to the outbox; returns how many. A map says where they belong.

        Skips locked rows. Raises ``LeadLost`` if a manager may have the events in memory.
        """
        limit = " LIMIT %s" if wanted is not TransferFilter.ALL else ""
        select = self._tables.sql(
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

        self._tables.prepare()
        return self._tables.session.transact(work)

    def _fill_outbox(self, execute: Execute, ids: Sequence[int], number: int, version: int) -> None:
        condition, parameters = self.dialect.match_ids(ids)
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

    def read_first_batch(self) -> TransferBatch | None:
        """Return the oldest batch in the outbox; unreadable rows are dead letters in it."""
        self._tables.prepare()
        return self._outbox.read_first_batch()

    def delete_batch(self, number: int) -> None:
        """Delete a batch that has arrived from the outbox."""
        self._tables.change("DELETE FROM {outbox} WHERE batch = %s", number)

    # ── receiving events ─────────────────────────────────────────────────────────────────────────

    def insert_batch(self, source: str, number: int, rows: Sequence[Row]) -> bool:
        """Insert a batch from another shard's outbox; false if it was inserted before."""
        self._tables.prepare()
        self._add_source(source)
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
            used_names = self._find_used_names(execute, rows)
            arrivals = prepare_arrivals(rows, self.definition, used_names)
            columns = get_transferred_columns(self.definition)
            self._tables.session.insert_many(self._name, columns, arrivals)
            execute(
                self._tables.sql(
                    "UPDATE turnlane_arrival SET batch = %s WHERE queue = %s AND source = %s"
                ),
                (number, *key),
            )
            return True

        return self._tables.session.transact(work)

    def _find_used_names(self, execute: Execute, rows: Sequence[Row]) -> set[str]:
        """Return the event names of the rows that are in the table."""
        at = TRANSFERRED_COLUMNS.index("event_name")
        names = [row[at] for row in rows if row[at] is not None]
        if not names:
            return set()
        marks = ", ".join(["%s"] * len(names))
        statement = f"SELECT event_name FROM {{table}} WHERE event_name IN ({marks})"
        return {row[0] for row in execute(self._tables.sql(statement), names).rows()}

    def _add_source(self, source: str) -> None:
        """Add the row that records the batches of a source."""
        select = "SELECT 1 FROM turnlane_arrival WHERE queue = %s AND source = %s"
        if self._tables.query(select, self._name, source):
            return
        try:
            self._tables.change(
                "INSERT INTO turnlane_arrival (queue, source) VALUES (%s, %s)", self._name, source
            )
        except self.dialect.error:
            if not self._tables.query(select, self._name, source):  # otherwise another process did
                raise

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

    def _lock_shard(self, execute: Execute) -> tuple[int, str | None]:
        """Lock the shard's row; returns the number of its last batch, and its plan."""
        found = execute(
            self._tables.sql("SELECT batch, plan FROM turnlane_shard WHERE queue = %s {lock}"),
            (self._name,),
        ).rows()
        batch, plan = found[0]
        return batch, plan

    def _check_lease_closed(self, execute: Execute) -> None:
        found = execute(
            self._tables.sql("SELECT owner FROM turnlane_lease WHERE queue = %s {lock}"),
            (self._name,),
        ).rows()
        if not found or found[0][0] != CLOSED_OWNER:
            raise LeadLost(f"{self._name!r} is not closed here: a manager may fire its events")
