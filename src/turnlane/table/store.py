"""The table of one queue in one database: everything that is read from it and written to it.

**The fence.** A manager's writes take effect only while its token is the token of the lease row.
The transaction first locks the lease row against changes and compares the token. A takeover waits
for such a transaction; a transaction after a takeover fails with ``LeadLost`` and changes nothing.
Rows that the manager will fire are read under the same condition.

**Locked rows.** A user's transaction may lock a row for minutes, to ack it or for another reason.
The manager never waits for it: it skips the row, reports its id, and the caller tries again later.

**Unreadable rows.** A database can hold values that its driver cannot return: invalid text in
SQLite, a PostgreSQL date after the last year of Python. One such row must not stop a queue: it is
found by halving the page that it is on, and set aside as a dead letter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

from turnlane.databases import (
    Dialect,
    Execute,
    Row,
    RowsLocked,
    Session,
    StatementResult,
)
from turnlane.errors import LeadLost, NoSuchQueue
from turnlane.logs import get_logger
from turnlane.runtime import Closeable
from turnlane.table.definition import Definition
from turnlane.table.queue_sql import (
    FilteredStatement,
    RetryDecision,
    Statements,
    get_queue_sql,
)
from turnlane.table.rows import EventInserter
from turnlane.table.schedules import ScheduleTable
from turnlane.table.shards import WHOLE_KEYSPACE, KeyRange

log = get_logger(__name__)

T = TypeVar("T")

BATCH_SIZE: Final = 1_000
"""Events per statement. Larger statements hold locks longer and are no faster."""

MAX_PARAMETERS: Final = 30_000
"""Parameters per statement that every database accepts."""

Position = tuple[int, int]
"""A position in the order of events: fire time, then id."""


def split_batches(items: Sequence[T]) -> Iterable[Sequence[T]]:
    """Split items into batches of one statement each."""
    return (items[at : at + BATCH_SIZE] for at in range(0, len(items), BATCH_SIZE))


class AckResult(NamedTuple):
    """The result of storing acks."""

    locked: set[int]
    """Events whose rows another transaction has locked: their acks are not stored."""
    released: list[int]
    """Events that waited for a group which is done now."""


class LeaseGrant(NamedTuple):
    """A lease that was granted."""

    token: int
    now: int
    """The database's clock when it was granted."""
    was_released: bool
    """Whether the last holder released the lease; otherwise it died with it."""


class TransactionSnapshot(NamedTuple):
    """The transaction numbers of a database at one moment."""

    oldest: int
    """All transactions with lower numbers are over."""
    next: int
    """The number of the next transaction to begin."""


class TableStore(Closeable):
    """One queue's table. Thread-safe; every call blocks on the database.

    Every call may raise ``DatabaseDown`` or ``DatabaseReadOnly``; a call with a token is fenced
    and may also raise ``LeadLost``. Every call may be repeated.
    """

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self.dialect = dialect
        self.definition = definition
        self.session = Session(dialect)
        self.inserter = EventInserter(dialect, definition)
        self.schedules = ScheduleTable(self.session, self.inserter)
        self.unreadable = 0
        """How many rows were set aside because they could not be read."""
        self.sql = Statements(dialect, definition)
        self._queue_sql = get_queue_sql(dialect)
        self._name = definition.name

    def close(self) -> None:
        self.session.close()

    # ── the fence ────────────────────────────────────────────────────────────────────────────────

    def _transact(self, token: int, work: Callable[[Execute], T]) -> T:
        """Run ``work`` in a transaction while the token is valid. Raises ``LeadLost``."""

        def check_and_work(execute: Execute) -> T:
            if not execute(self.sql.fence, (self._name, token)).rows():
                raise self._make_lost_error()
            return work(execute)

        return self.session.transact(check_and_work)

    def _make_lost_error(self) -> LeadLost:
        return LeadLost(f"another manager leads {self._name!r}")

    # ── the lease ────────────────────────────────────────────────────────────────────────────────

    def acquire_lease(
        self, owner: str, seconds: float, is_believed: Callable[[Row], bool] = lambda _: True
    ) -> LeaseGrant | None:
        """Take the lease if it is free or its time is over. Raises ``NoSuchQueue``.

        ``is_believed`` is asked about the lease of another owner (owner, token, end, database's
        clock) whose time is not over; it may be asked twice.
        """

        def work(execute: Execute) -> LeaseGrant | None:
            found = execute(self.sql.read_lease, (self._name,)).rows()
            if not found:
                raise self.make_missing_error()
            holder, token, expires_at, now = found[0]
            if holder is not None and expires_at > now and is_believed(found[0]):
                return None
            execute(self.sql.take_lease, (owner, now + round(seconds * 1e9), self._name))
            return LeaseGrant(token + 1, now, holder is None)

        return self.session.transact(work)

    def renew_lease(self, token: int, seconds: float) -> int:
        """Extend the lease; returns the database's clock. Raises ``LeadLost``."""
        span = round(seconds * 1e9)
        if not self.session.change(self.sql.renew_lease, (span, self._name, token)):
            raise self._make_lost_error()
        expires_at: int = self.session.query(self.sql.read_expiry, (self._name,))[0][0]
        return expires_at - span

    def release_lease(self, token: int) -> None:
        """Give the lease back, if the token is still valid."""
        self.session.change(self.sql.release_lease, (self._name, token))

    def set_listening(self, token: int, *, on: bool) -> None:
        """Set whether inserts wake the manager."""
        self.session.change(self.sql.set_listening, (int(on), self._name, token))

    # ── reads of the manager ─────────────────────────────────────────────────────────────────────

    def read_last_id(self) -> int:
        """Return the highest visible id."""
        found: int = self.session.query(self.sql.read_last_id)[0][0]
        return found

    def read_definition(self) -> str | None:
        """Return the statement that created the queue; ``None`` if it was dropped."""
        found = self.session.query(self.sql.read_definition, (self._name,))
        return str(found[0][0]) if found else None

    def make_missing_error(self) -> NoSuchQueue:
        """Return the error for a queue that was dropped."""
        return NoSuchQueue(f"there is no queue {self._name!r} in this database")

    def read_transactions(self) -> TransactionSnapshot | None:
        """Return the transaction numbers of the database, if it has them."""
        if self.dialect.snapshot_query is None:
            return None
        return TransactionSnapshot(*self.session.query(self.dialect.snapshot_query)[0])

    def read_new(self, token: int, after: int, limit: int) -> list[Row]:
        """Return events to be fired with ids above ``after``, in the order of their ids."""
        parameters = (after, self._name, token, limit)
        return self._read_page(token, self.sql.read_new, parameters)

    def read_ids(self, token: int, ids: Sequence[int]) -> list[Row]:
        """Return the events to be fired among the ids."""
        condition, parameters = self.dialect.match_ids(ids)
        statement = self.sql.read_ids.where(condition)
        return self._read_page(token, statement, (*parameters, self._name, token))

    def read_due(
        self,
        token: int,
        after: Position,
        until: int,
        limit: int,
        ranges: Sequence[KeyRange] = (WHOLE_KEYSPACE,),
    ) -> list[Row]:
        """Return events due up to ``until``, after a position, in the order of positions.

        Only events whose keys lie in the ranges.
        """
        if WHOLE_KEYSPACE in ranges:
            condition = "1 = 1"
            bounds: tuple[int, ...] = ()
        else:
            keyspace = self._queue_sql.get_keyspace(self.definition)
            mark = self.dialect.placeholder
            in_range = f"{keyspace} BETWEEN {mark} AND {mark}"
            condition = f"({' OR '.join([in_range] * len(ranges))})"
            bounds = tuple(itertools.chain.from_iterable(each.stored_bounds for each in ranges))
        parameters = (after[0], *after, until, *bounds, self._name, token, limit)
        return self._read_page(token, self.sql.read_due.where(condition), parameters)

    def read_retried(self, token: int) -> list[Row]:
        """Return the open events that were fired before, with any fire time."""
        return self._read_page(token, self.sql.read_retried, (self._name, token))

    def find_open(self, ids: Sequence[int]) -> set[int]:
        """Return the ids of open events: their rows are there, neither acked nor dead."""
        return self._find_ids(self.sql.find_open, ids)

    def read_old_fired(self, since: int, until: int, limit: int) -> list[Row]:
        """Return id and attempts of fired events that were due between two times."""
        return self.session.query(self.sql.read_old_fired, (since, until, limit))

    # ── unreadable rows ──────────────────────────────────────────────────────────────────────────

    def _read_page(self, token: int, statement: str, parameters: Row) -> list[Row]:
        """Return the rows of a page; rows that cannot be read are set aside as dead letters."""
        try:
            return self.session.query(statement, parameters)
        except self.dialect.error as error:
            if not self.dialect.is_unreadable(error):
                raise
        # The same page, ids only: an id is always readable.
        id_statement = statement.replace(f"SELECT {self.sql.columns} ", "SELECT event_id ", 1)
        ids = [row[0] for row in self.session.query(id_statement, parameters)]

        def read_open(some: Sequence[int]) -> list[Row]:
            condition, matched = self.dialect.match_ids(some)
            open_rows = self.sql.read_open.where(condition)
            return self.session.query(open_rows, (*matched, self._name, token))

        rows, unreadable = find_unreadable_rows(self.dialect, read_open, ids)
        decisions = [
            RetryDecision(event_id, "dead", 0, 0, reason) for event_id, reason in unreadable
        ]
        set_aside = self.apply_decisions(token, decisions) if decisions else set()
        for event_id, reason in unreadable:
            log.error(
                "table.row_unreadable",
                queue=self._name,
                event_id=event_id,
                error=reason,
                hint="it becomes a dead letter; correct the row, then retry it",
            )
        self.unreadable += len(set_aside)
        if len(set_aside) == len(decisions):  # the page is readable now, with further rows
            return self._read_page(token, statement, parameters)
        positions = {event_id: at for at, event_id in enumerate(ids)}
        return sorted(rows, key=lambda row: positions[row[0]])

    # ── marks, retries and new events ────────────────────────────────────────────────────────────

    def mark_fired(self, token: int, ids: Sequence[int]) -> set[int]:
        """Mark due events as fired; returns the ids that were still to be fired.

        Skips locked rows.
        """
        sql = self.sql
        return self._transact(
            token, lambda execute: self._change_free(execute, ids, sql.lock_due, sql.mark_fired)
        )

    def unmark_fired(self, token: int, ids: Sequence[int]) -> set[int]:
        """Undo the mark of events that no receiver took; returns the changed ids.

        Skips locked rows.
        """
        sql = self.sql
        return self._transact(
            token, lambda execute: self._change_free(execute, ids, sql.lock_fired, sql.unmark_fired)
        )

    def apply_decisions(self, token: int, decisions: Sequence[RetryDecision]) -> set[int]:
        """Put events back to fire again, or as dead letters; returns the ids that were open.

        Skips locked rows.
        """
        by_id = {decision.event_id: decision for decision in decisions}

        def apply(execute: Execute, ids: Sequence[int]) -> None:
            execute(*self._queue_sql.build_retry(self.sql.table, [by_id[each] for each in ids]))

        return self._transact(
            token,
            lambda execute: self._change_free(execute, list(by_id), self.sql.lock_open, apply),
        )

    def insert_fired(self, token: int, columns: Sequence[str], rows: Sequence[Row]) -> list[int]:
        """Insert events that are marked as fired; returns their ids, in order."""
        names = [*map(self.dialect.quote_name, columns), "state", "attempts"]
        marks = [*[self.dialect.placeholder] * len(columns), "'fired'", "1"]
        per_statement = max(1, MAX_PARAMETERS // max(1, len(columns)))

        def work(execute: Execute) -> list[int]:
            ids: list[int] = []
            for at in range(0, len(rows), per_statement):
                batch = rows[at : at + per_statement]
                statement = self.inserter.build_statement(names, marks, len(batch))
                executed = execute(statement, tuple(itertools.chain.from_iterable(batch)))
                # Databases number the rows of a statement in their order.
                if self.dialect.has_returning:
                    ids += sorted(row[0] for row in executed.rows())
                else:
                    read_ids = "SELECT LAST_INSERT_ID(), @@auto_increment_increment"
                    first, step = execute(read_ids).rows()[0]
                    ids += range(first, first + len(batch) * step, step)
            return ids

        return self._transact(token, work)

    def fire_schedule(self, token: int, name: str) -> None:
        """Insert the event of a schedule, if it is due, and set its next time."""
        self._transact(token, lambda execute: self.schedules.fire(execute, name))

    # ── acks ─────────────────────────────────────────────────────────────────────────────────────

    def store_acks(
        self,
        token: int,
        ids: Sequence[int],
        groups: Iterable[str] = (),
        *,
        likely_locked: bool = False,
    ) -> AckResult:
        """Delete the rows of settled events, or mark them as acked if the queue keeps them.

        Releases the events that waited for the last of their groups. Skips locked rows; with
        ``likely_locked``, it expects some and skips them from the start.
        """
        groups = tuple(groups)
        in_one = self._queue_sql.can_fence_in_one and not groups and not likely_locked
        if in_one and self._settle_in_one_statement(token, ids):
            return AckResult(set(), [])
        settle = self.sql.ack_keep if self._keeps_acked else self.sql.ack_delete

        def work(execute: Execute) -> tuple[set[int], list[int]]:
            if self.dialect.lock_free:
                lock = self.sql.lock_unacked
                skipped = set(ids) - self._change_free(execute, ids, lock, settle)
            else:  # SQLite: one writer at a time, no locked rows
                skipped = set()
                self.change(execute, settle, ids)
            return skipped, self._release_groups(execute, groups)

        skipped, released = self._transact(token, work)
        # A skipped row is locked, or it is gone.
        return AckResult(self._find_ids(self.sql.find_unacked, list(skipped)), released)

    def store_late_acks(self, token: int, ids: Sequence[int]) -> AckResult:
        """Settle the events that were fired at some time; ignore the others."""

        def find_fired(execute: Execute) -> list[Row]:
            return [
                row
                for batch in split_batches(ids)
                for row in self._run(execute, self.sql.find_fired_before, batch).rows()
            ]

        fired = self._transact(token, find_fired)
        if not fired:
            return AckResult(set(), [])
        groups = {row[1] for row in fired if row[1] is not None}
        return self.store_acks(token, [row[0] for row in fired], groups)

    def release_groups(self, token: int) -> int:
        """Release all events whose groups are done; returns how many."""

        def work(execute: Execute) -> int:
            groups = [row[0] for row in execute(self.sql.find_done_groups).rows()]
            return len(self._release_groups(execute, groups))

        return self._transact(token, work)

    def delete_old_acked(self, token: int, until: int, limit: int = BATCH_SIZE) -> int:
        """Delete at most ``limit`` acked events that were due by ``until``; returns how many."""

        def work(execute: Execute) -> int:
            old = [row[0] for row in execute(self.sql.read_old_acked, (until, limit)).rows()]
            return self.change(execute, self.sql.delete_acked, old)

        return self._transact(token, work)

    @property
    def _keeps_acked(self) -> bool:
        return self.definition.settings.retention > 0

    def _settle_in_one_statement(self, token: int, ids: Sequence[int]) -> bool:
        """Settle events by statements that contain the fence: one round trip per batch.

        False if a row is locked: then the caller settles the rest in a transaction.
        """
        settle = self.sql.fenced_ack_keep if self._keeps_acked else self.sql.fenced_ack_delete
        for batch in split_batches(ids):
            condition, matched = self.dialect.match_ids(batch)
            parameters = (self._name, token, *matched)
            try:
                rows = self.session.write(settle.where(condition), parameters, retry_locked=False)
            except RowsLocked:
                return False
            if not rows:
                raise self._make_lost_error()
        return True

    def _release_groups(self, execute: Execute, groups: Iterable[str]) -> list[int]:
        """Release the events that wait for groups which are done; returns their ids."""
        released: list[int] = []
        for group in groups:
            if execute(self.sql.find_unacked_member, (group,)).rows():
                continue
            waiting = [row[0] for row in execute(self.sql.lock_waiting, (group,)).rows()]
            if waiting:
                self._run(execute, self.sql.release_waiting, waiting)
            released += waiting
        return released

    # ── statements about ids ─────────────────────────────────────────────────────────────────────

    def _run(
        self, execute: Execute, statement: FilteredStatement, ids: Sequence[int]
    ) -> StatementResult:
        condition, parameters = self.dialect.match_ids(ids)
        return execute(statement.where(condition), parameters)

    def change(self, execute: Execute, statement: FilteredStatement, ids: Sequence[int]) -> int:
        """Change the rows of the ids within a transaction; returns how many."""
        return sum(self._run(execute, statement, batch).count for batch in split_batches(ids))

    def _change_free(
        self,
        execute: Execute,
        ids: Sequence[int],
        lock: FilteredStatement,
        change: FilteredStatement | Callable[[Execute, Sequence[int]], None],
    ) -> set[int]:
        """Lock the rows of the ids that are free, and change them; returns their ids."""
        changed: set[int] = set()
        for batch in split_batches(ids):
            free = [row[0] for row in self._run(execute, lock, batch).rows()]
            changed.update(free)
            if not free:
                continue
            if isinstance(change, FilteredStatement):
                self._run(execute, change, free)
            else:
                change(execute, free)
        return changed

    def _find_ids(self, statement: FilteredStatement, ids: Sequence[int]) -> set[int]:
        """Return the ids that a statement selects, without the fence."""
        found: set[int] = set()
        for batch in split_batches(ids):
            condition, parameters = self.dialect.match_ids(batch)
            found.update(
                row[0] for row in self.session.query(statement.where(condition), parameters)
            )
        return found


def find_unreadable_rows(
    dialect: Dialect, read: Callable[[Sequence[int]], list[Row]], ids: Sequence[int]
) -> tuple[list[Row], list[tuple[int, str]]]:
    """Return the rows of the ids that can be read, and the other ids with their errors."""
    try:
        return read(ids), []
    except dialect.error as error:
        if not dialect.is_unreadable(error):
            raise
        if len(ids) == 1:
            return [], [(ids[0], f"cannot be read: {error}")]
    middle = len(ids) // 2
    halves = [find_unreadable_rows(dialect, read, half) for half in (ids[:middle], ids[middle:])]
    return halves[0][0] + halves[1][0], halves[0][1] + halves[1][1]
