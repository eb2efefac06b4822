"""The table of one queue in one database: all that is read from it and written to it.

A manager's writes are *fenced* (see :mod:`turnlane.table.fenced_writes`). What it reads to fire
from is read under the same condition.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from turnlane.errors import NoSuchQueue
from turnlane.runtime import Closing
from turnlane.table.definition import Definition
from turnlane.table.event import EVENT_COLUMNS
from turnlane.table.fenced_writes import (
    BATCH_SIZE,
    AckResult,
    AckWriter,
    EventInserter,
    LeaseFence,
    SkippingReader,
    split_batches,
)
from turnlane.table.id_gaps import TransactionSnapshot
from turnlane.table.schedules import ScheduleTable
from turnlane.table.shards import WHOLE_KEYSPACE, KeyRange
from turnlane.table.sql.dialect import STATES, Connection, Dialect, Row, Verdict
from turnlane.table.sql.session import Execute, Executed
from turnlane.table.statements import FilteredStatement

MAX_PARAMETERS: Final = 30_000
"""To a statement: what every database takes."""

Position = tuple[int, int]
"""A place in the order of events: fire time, then id."""


class LeaseGrant(NamedTuple):
    """A lease that was given."""

    token: int
    now: int
    """The database's clock when it was given."""
    clean: bool
    """Whether the last holder gave the lease back, rather than die with it."""


class TableStore(Closing):
    """One queue's table. Safe to use from any thread; every call blocks on the database.

    Every call may raise ``DatabaseDown`` or ``DatabaseReadOnly``; the fenced ones, which take a
    token, also ``LeadLost``. All of them may be repeated.
    """

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self.dialect = dialect
        self.definition = definition
        self.inserts = EventInserter(dialect, definition)
        self._fence = LeaseFence(dialect, definition)
        self._acks = AckWriter(self._fence, keep=definition.settings.retention > 0)
        self._salvage = SkippingReader(self._fence, self.put_back)
        self.session = self._fence.session
        self.schedules = ScheduleTable(self.session, self.inserts)
        self._sql = self._fence.sql
        self._name = definition.name

    def close(self) -> None:
        self.session.close()

    @property
    def unreadable(self) -> int:
        """How many rows were set aside because they could not be read."""
        return self._salvage.unreadable

    # ── the lease ────────────────────────────────────────────────────────────────────────────────

    def acquire(self, owner: str, seconds: float) -> LeaseGrant | None:
        """Take the lease if nobody has it, or its time is over."""

        def work(execute: Execute) -> LeaseGrant | None:
            found = execute(self._sql.lease, (self._name,)).rows()
            if not found:
                raise self.missing()
            holder, token, expires_at, now = found[0]
            if holder is not None and expires_at > now:
                return None
            execute(self._sql.take, (owner, now + round(seconds * 1e9), self._name))
            return LeaseGrant(token + 1, now, holder is None)

        return self.session.transact(work)

    def renew(self, token: int, seconds: float) -> int:
        """Keep the lease for longer; returns the database's clock. Raises ``LeadLost``."""
        span = round(seconds * 1e9)
        if not self.session.change(self._sql.renew, (span, self._name, token)):
            raise self._fence.lost()
        expires_at: int = self.session.query(self._sql.expiry, (self._name,))[0][0]
        return expires_at - span

    def release(self, token: int) -> None:
        """Give the lease back, if it is still ours."""
        self.session.change(self._sql.release, (self._name, token))

    def listen(self, token: int, *, on: bool) -> None:
        """Say whether inserts should wake the manager."""
        self.session.change(self._sql.listen, (int(on), self._name, token))

    # ── what the manager reads ───────────────────────────────────────────────────────────────────

    def last_id(self) -> int:
        """The highest id that anybody can see."""
        found: int = self.session.query(self._sql.last_id)[0][0]
        return found

    def defined(self) -> str | None:
        """The statement that made the queue; none if it was dropped."""
        found = self.session.query(self._sql.definition, (self._name,))
        return str(found[0][0]) if found else None

    def missing(self) -> NoSuchQueue:
        """What there is to say when it was dropped."""
        return NoSuchQueue(f"there is no queue {self._name!r} in this database")

    def running(self) -> TransactionSnapshot | None:
        """Which transactions are under way in the database, if it says so."""
        if self.dialect.running is None:
            return None
        return TransactionSnapshot(*self.session.query(self.dialect.running)[0])

    def read_new(self, token: int, after: int, limit: int) -> list[Row]:
        """Events to be fired with ids above ``after``, in the order of ids."""
        parameters = (after, self._name, token, limit)
        return self._salvage.read(token, self._sql.read_new, parameters)

    def read_ids(self, token: int, ids: Sequence[int]) -> list[Row]:
        """Those of the ids that are to be fired."""
        condition, parameters = self.dialect.ids(ids)
        statement = self._sql.read_ids.where(condition)
        return self._salvage.read(token, statement, (*parameters, self._name, token))

    def read_due(
        self,
        token: int,
        after: Position,
        until: int,
        limit: int,
        ranges: Sequence[KeyRange] = (WHOLE_KEYSPACE,),
    ) -> list[Row]:
        """Events due up to ``until``, in the order of (fire time, id), after a position.

        Only those whose keys lie in the ranges.
        """
        condition, within = self._within(ranges)
        parameters = (after[0], *after, until, *within, self._name, token, limit)
        return self._salvage.read(token, self._sql.read_due.where(condition), parameters)

    def read_retried(self, token: int) -> list[Row]:
        """Events that were fired before and are not settled, whenever they are due again."""
        return self._salvage.read(token, self._sql.read_retried, (self._name, token))

    def standing(self, ids: Sequence[int]) -> set[int]:
        """Those of the ids that are not settled: nobody acked or deleted their rows."""
        return {row[0] for row in self._fence.query(self._sql.standing, ids)}

    def old_fired(self, since: int, until: int, limit: int) -> list[Row]:
        """Id and attempts of fired events that were due between two times."""
        return self.session.query(self._sql.old_fired, (since, until, limit))

    # ── what the manager writes ──────────────────────────────────────────────────────────────────

    def mark(self, token: int, ids: Sequence[int]) -> set[int]:
        """Mark due events as fired; returns those that were still to be fired.

        Not one that somebody is about to change: it can be marked later, if it is still there.
        """
        return self._mark(token, ids, self._sql.lock_due, self._sql.mark)

    def unmark(self, token: int, ids: Sequence[int]) -> set[int]:
        """Marked events were not received: they are to be fired as before. Returns which."""
        return self._mark(token, ids, self._sql.lock_fired, self._sql.unmark)

    def ack(
        self, token: int, ids: Sequence[int], groups: Iterable[str] = (), *, wary: bool = False
    ) -> AckResult:
        """Settle events, and let go of what waited for the last of their groups.

        Not those that somebody is about to change; ``wary`` says that it is likely.
        """
        return self._acks.store(token, ids, groups, wary=wary)

    def late_ack(self, token: int, ids: Sequence[int]) -> AckResult:
        """Settle those of the events that were fired at some time."""
        fired = self._acks.fired(token, ids)
        if not fired:
            return AckResult(set(), [])
        groups = {row[1] for row in fired if row[1] is not None}
        return self._acks.store(token, [row[0] for row in fired], groups)

    def put_back(self, token: int, verdicts: Sequence[Verdict]) -> set[int]:
        """Apply verdicts; returns the ids of those events that were not settled.

        Not of one that somebody is about to change: nothing was done to it.
        """

        def work(execute: Execute) -> set[int]:
            standing: set[int] = set()
            for batch in split_batches(verdicts):
                ids = [verdict.event_id for verdict in batch]
                locked = self._fence.run(execute, self._sql.lock_standing, ids)
                free = {row[0] for row in locked.rows()}
                if free:
                    applied = [verdict for verdict in batch if verdict.event_id in free]
                    execute(*self.dialect.put_back(self._sql.table, applied))
                standing |= free
            return standing

        return self._fence.transact(token, work)

    def insert_fired(self, token: int, columns: Sequence[str], rows: Sequence[Row]) -> list[int]:
        """Insert events that are fired as they are written; returns their ids, in order."""
        names = [*map(self.dialect.identifier, columns), "state", "attempts"]
        marks = [*[self.dialect.mark] * len(columns), "'fired'", "1"]
        room = max(1, MAX_PARAMETERS // max(1, len(columns)))

        def work(execute: Execute) -> list[int]:
            ids: list[int] = []
            for at in range(0, len(rows), room):
                batch = rows[at : at + room]
                statement = self.inserts.statement(names, marks, len(batch))
                executed = execute(statement, tuple(itertools.chain.from_iterable(batch)))
                ids += self._new_ids(execute, executed, len(batch))
            return ids

        return self._fence.transact(token, work)

    def release_groups(self, token: int) -> int:
        """Let go of all events whose groups are done; how many."""

        def work(execute: Execute) -> int:
            groups = [row[0] for row in execute(self._sql.done_groups).rows()]
            return len(self._acks.release(execute, groups))

        return self._fence.transact(token, work)

    def fire_schedule(self, token: int, name: str) -> None:
        """Insert the event of a schedule, if it is due, and move that on."""
        self._fence.transact(token, lambda execute: self.schedules.fire(execute, name))

    def purge(self, token: int, until: int, limit: int = BATCH_SIZE) -> int:
        """Delete acked events that were due by ``until``; at most ``limit`` of them."""

        def work(execute: Execute) -> int:
            old = [row[0] for row in execute(self._sql.old_acked, (until, limit)).rows()]
            return self._fence.run(execute, self._sql.delete, old).count if old else 0

        return self._fence.transact(token, work)

    # ── what users do ────────────────────────────────────────────────────────────────────────────

    def ack_in(self, connection: Connection, ids: Sequence[int]) -> int:
        """Settle events in the transaction that ``connection`` is in; returns how many."""
        condition, parameters = self.dialect.ids(ids)
        cursor = connection.cursor()
        cursor.execute(self._sql.ack_keep.where(condition), parameters)
        return int(cursor.rowcount)

    def counts(self) -> dict[str, int]:
        """How many events are in each state."""
        found: dict[str, int] = dict(self.session.query(self._sql.counts))
        return {state: int(found.get(state, 0)) for state in STATES}

    def retry_dead(self, ids: Sequence[int] | None = None) -> int:
        """Have dead letters fired again, or what is named and was fired; returns how many."""
        if ids is None:
            return self.session.change(self._sql.retry_all)
        return self._change_ids(self._sql.retry, ids)

    def cancel(self, ids: Sequence[int]) -> int:
        """Delete events that were not fired yet; returns how many."""
        return self._change_ids(self._sql.cancel, ids)

    def peek(self, state: str, limit: int) -> list[dict[str, Any]]:
        """The first events in a state, by fire time: every column of theirs.

        If one cannot be read, all of them without the columns that hold texts or are the user's.
        """
        names = (*EVENT_COLUMNS, "last_error", *self.definition.names)
        try:
            rows = self.session.query(self._sql.peek, (state, limit))
        except self.dialect.error as error:
            if not self.dialect.is_unreadable(error):
                raise
            nothing = (None,) * len(self.definition.names)
            known = self.session.query(self._sql.peek_known, (state, limit))
            rows = [(*row, *nothing) for row in known]
        return [dict(zip(names, row, strict=True)) for row in rows]

    # ── how ──────────────────────────────────────────────────────────────────────────────────────

    def _within(self, ranges: Sequence[KeyRange]) -> tuple[str, tuple[int, ...]]:
        """The condition that an event's key lies in one of the ranges, and its parameters."""
        if WHOLE_KEYSPACE in ranges:
            return "1 = 1", ()
        keyspace, mark = self.dialect.keyspace(self.definition), self.dialect.mark
        each = f"{keyspace} BETWEEN {mark} AND {mark}"
        bounds = itertools.chain.from_iterable(span.stored for span in ranges)
        return f"({' OR '.join([each] * len(ranges))})", tuple(bounds)

    def _mark(
        self, token: int, ids: Sequence[int], lock: FilteredStatement, change: FilteredStatement
    ) -> set[int]:
        def work(execute: Execute) -> set[int]:
            changed: set[int] = set()
            for batch in split_batches(ids):
                locked = [row[0] for row in self._fence.run(execute, lock, batch).rows()]
                if locked:
                    self._fence.run(execute, change, locked)
                changed.update(locked)
            return changed

        return self._fence.transact(token, work)

    def _new_ids(self, execute: Execute, executed: Executed, count: int) -> list[int]:
        """The ids of rows just inserted: databases give them out in the order of the rows."""
        if self.dialect.returning:
            return sorted(row[0] for row in executed.rows())
        first, step = execute("SELECT LAST_INSERT_ID(), @@auto_increment_increment").rows()[0]
        return list(range(first, first + count * step, step))

    def _change_ids(self, statement: FilteredStatement, ids: Sequence[int]) -> int:
        def work(execute: Execute) -> int:
            return sum(
                self._fence.run(execute, statement, batch).count for batch in split_batches(ids)
            )

        return self.session.transact(work)
