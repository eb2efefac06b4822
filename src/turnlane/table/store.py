"""The table of one queue in one database: all that is read from it and written to it.

Whatever a manager writes is *fenced*: the transaction first holds the lease row in place and sees
that it still carries the manager's token. A takeover waits for such a transaction, and one that
comes after a takeover fails with ``LeadLost`` and changes nothing. Whatever a manager reads to fire
from is read under the same condition.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from turnlane.closing import Closing
from turnlane.errors import LeadLost, NoSuchQueue
from turnlane.table.definition import ENQUEUED, Definition
from turnlane.table.event import COLUMNS
from turnlane.table.sql.dialect import STATES, Connection, Dialect, Row, Verdict
from turnlane.table.sql.session import Execute, Executed, Session, understood
from turnlane.table.statements import ByIds, Statements

T = TypeVar("T")

BATCH: Final = 1_000
"""Events to a statement. Larger ones hold locks for longer and are no faster."""


PARAMETERS: Final = 30_000
"""To a statement: what every database takes."""


class Grant(NamedTuple):
    """A lease that was given."""

    token: int
    now: int
    """The database's clock when it was given."""
    clean: bool
    """Whether the last holder gave the lease back, rather than die with it."""


class Store(Closing):
    """One queue's table. Safe to use from any thread; every call blocks on the database.

    Every call may raise ``DatabaseDown`` or ``DatabaseReadOnly``; the fenced ones, which take a
    token, also ``LeadLost``. All of them may be repeated.
    """

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self.dialect = dialect
        self.definition = definition
        self.session = Session(dialect)
        self._sql = Statements.of(dialect, definition)
        self._name = definition.name

    def close(self) -> None:
        self.session.close()

    # ── the lease ────────────────────────────────────────────────────────────────────────────────

    def acquire(self, owner: str, seconds: float) -> Grant | None:
        """Take the lease if nobody has it, or its time is over."""

        def work(execute: Execute) -> Grant | None:
            found = execute(self._sql.lease, (self._name,)).rows()
            if not found:
                raise NoSuchQueue(f"there is no queue {self._name!r} in this database")
            holder, token, expires_at, now = found[0]
            if holder is not None and expires_at > now:
                return None
            execute(self._sql.take, (owner, now + round(seconds * 1e9), self._name))
            return Grant(token + 1, now, holder is None)

        return self.session.transact(work)

    def renew(self, token: int, seconds: float) -> int:
        """Keep the lease for longer; returns the database's clock. Raises ``LeadLost``."""
        span = round(seconds * 1e9)
        if not self.session.change(self._sql.renew, (span, self._name, token)):
            raise LeadLost(f"another manager leads {self._name!r}")
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

    def read_new(self, token: int, after: int, limit: int) -> list[Row]:
        """Events to be fired with ids above ``after``, in the order of ids."""
        return self.session.query(self._sql.read_new, (after, self._name, token, limit))

    def read_ids(self, token: int, ids: Sequence[int]) -> list[Row]:
        """Those of the ids that are to be fired."""
        condition, parameters = self.dialect.ids(ids)
        statement = self._sql.read_ids.where(condition)
        return self.session.query(statement, (*parameters, self._name, token))

    def read_due(self, token: int, after: tuple[int, int], until: int, limit: int) -> list[Row]:
        """Events due up to ``until``, in the order of (fire time, id), after a position."""
        parameters = (after[0], *after, until, self._name, token, limit)
        return self.session.query(self._sql.read_due, parameters)

    def read_retried(self, token: int) -> list[Row]:
        """Events that were fired before and are not settled, whenever they are due again."""
        return self.session.query(self._sql.read_retried, (self._name, token))

    def standing(self, ids: Sequence[int]) -> set[int]:
        """Those of the ids that are not settled: nobody acked or deleted their rows."""
        standing: set[int] = set()
        for batch in _batches(ids):
            condition, parameters = self.dialect.ids(batch)
            rows = self.session.query(self._sql.standing.where(condition), parameters)
            standing.update(row[0] for row in rows)
        return standing

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

    def ack(self, token: int, ids: Sequence[int], groups: Iterable[str] = ()) -> None:
        """Settle events, and let go of what waited for the last of their groups."""
        keep = self.definition.settings.retention > 0
        statement = self._sql.ack_keep if keep else self._sql.ack_delete
        groups = tuple(groups)
        if self.dialect.fenced_in_one and not groups:
            self._ack_in_one(token, ids, keep=keep)
            return

        def work(execute: Execute) -> None:
            self._fence(execute, token)
            for batch in _batches(ids):
                self._run(execute, statement, batch)
            for group in groups:
                execute(self._sql.release_group, (group, group))

        self.session.transact(work)

    def late_ack(self, token: int, ids: Sequence[int]) -> list[str]:
        """Settle those of the events that were fired at some time; returns the groups concerned."""

        def work(execute: Execute) -> list[Row]:
            self._fence(execute, token)
            return [
                row
                for batch in _batches(ids)
                for row in self._run(execute, self._sql.fired_before, batch).rows()
            ]

        fired = self.session.transact(work)
        groups = {row[1] for row in fired if row[1] is not None}
        if fired:
            self.ack(token, [row[0] for row in fired], groups)
        return sorted(groups)

    def put_back(self, token: int, verdicts: Sequence[Verdict]) -> set[int]:
        """Apply verdicts; returns the ids of those events that were not settled.

        Not of one that somebody is about to change: nothing was done to it.
        """

        def work(execute: Execute) -> set[int]:
            self._fence(execute, token)
            standing: set[int] = set()
            for batch in _batches(verdicts):
                ids = [verdict.event_id for verdict in batch]
                free = {row[0] for row in self._run(execute, self._sql.lock_standing, ids).rows()}
                if free:
                    applied = [verdict for verdict in batch if verdict.event_id in free]
                    execute(*self.dialect.put_back(self._sql.table, applied))
                standing |= free
            return standing

        return self.session.transact(work)

    def insert_fired(self, token: int, columns: Sequence[str], rows: Sequence[Row]) -> list[int]:
        """Insert events that are fired as they are written; returns their ids, in order."""
        names = [*map(self.dialect.identifier, columns), "state", "attempts"]
        marks = [*[self.dialect.mark] * len(columns), "'fired'", "1"]
        room = max(1, PARAMETERS // max(1, len(columns)))

        def work(execute: Execute) -> list[int]:
            self._fence(execute, token)
            ids: list[int] = []
            for at in range(0, len(rows), room):
                batch = rows[at : at + room]
                statement = self._insert(names, marks, len(batch))
                executed = execute(statement, tuple(itertools.chain.from_iterable(batch)))
                ids += self._new_ids(execute, executed, len(batch))
            return ids

        return self.session.transact(work)

    def release_groups(self, token: int) -> int:
        """Let go of all events whose groups are done; how many."""

        def work(execute: Execute) -> int:
            self._fence(execute, token)
            groups = execute(self._sql.done_groups).rows()
            return sum(
                execute(self._sql.release_group, (group, group)).count for (group,) in groups
            )

        return self.session.transact(work)

    def purge(self, token: int, until: int, limit: int = BATCH) -> int:
        """Delete acked events that were due by ``until``; at most ``limit`` of them."""

        def work(execute: Execute) -> int:
            self._fence(execute, token)
            old = [row[0] for row in execute(self._sql.old_acked, (until, limit)).rows()]
            return self._run(execute, self._sql.delete, old).count if old else 0

        return self.session.transact(work)

    # ── what users do ────────────────────────────────────────────────────────────────────────────

    def enqueue(
        self, connection: Connection, row: Mapping[str, Any], delay: float | None = None
    ) -> int:
        """Insert one event in the transaction that ``connection`` is in; returns its id."""
        columns = tuple(row)
        self._check(columns)
        names = [self.dialect.identifier(name) for name in columns]
        marks = [self.dialect.mark] * len(columns)
        values = list(row.values())
        if delay is not None:
            names.append("fire_at")
            marks.append(f"{self.dialect.now} + {self.dialect.mark}")
            values.append(round(delay * 1e9))
        cursor = connection.cursor()
        cursor.execute(self._insert(names, marks), tuple(values))
        if self.dialect.returning:
            return int(cursor.fetchone()[0])
        return int(cursor.lastrowid)

    def enqueue_many(self, connection: Connection, rows: Iterable[Mapping[str, Any]]) -> int:
        """Insert events in the transaction that ``connection`` is in; returns how many."""
        listed = list(rows)
        shapes: dict[tuple[str, ...], list[Row]] = {}
        for row in listed:
            shapes.setdefault(tuple(row), []).append(tuple(row.values()))
        for columns in shapes:
            self._check(columns)
        for columns, values in shapes.items():
            self.dialect.insert_many(connection, self._name, columns, values)
        return len(listed)

    def insert(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert events in a transaction of the store's own."""
        with (
            understood(self.dialect),
            contextlib.closing(self.dialect.connect()) as connection,
            self.dialect.transaction(connection),
        ):
            self.enqueue_many(connection, rows)

    def check_columns(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Raise ``ValueError`` for a column that an insert cannot set."""
        for columns in {tuple(row) for row in rows}:
            self._check(columns)

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
        """The first events in a state, by fire time: every column of theirs."""
        names = (*COLUMNS, "last_error", *self.definition.names)
        rows = self.session.query(self._sql.peek, (state, limit))
        return [dict(zip(names, row, strict=True)) for row in rows]

    # ── how ──────────────────────────────────────────────────────────────────────────────────────

    def _fence(self, execute: Execute, token: int) -> None:
        if not execute(self._sql.fence, (self._name, token)).rows():
            raise LeadLost(f"another manager leads {self._name!r}")

    def _ack_in_one(self, token: int, ids: Sequence[int], *, keep: bool) -> None:
        """Settle events by statements that are fenced themselves: a round trip to a batch."""
        statement = self._sql.fenced_ack_keep if keep else self._sql.fenced_ack_delete
        for batch in _batches(ids):
            condition, parameters = self.dialect.ids(batch)
            if not self.session.write(statement.where(condition), (self._name, token, *parameters)):
                raise LeadLost(f"another manager leads {self._name!r}")

    def _mark(self, token: int, ids: Sequence[int], lock: ByIds, change: ByIds) -> set[int]:
        def work(execute: Execute) -> set[int]:
            self._fence(execute, token)
            changed: set[int] = set()
            for batch in _batches(ids):
                locked = [row[0] for row in self._run(execute, lock, batch).rows()]
                if locked:
                    self._run(execute, change, locked)
                changed.update(locked)
            return changed

        return self.session.transact(work)

    def _new_ids(self, execute: Execute, executed: Executed, count: int) -> list[int]:
        """The ids of rows just inserted: databases give them out in the order of the rows."""
        if self.dialect.returning:
            return sorted(row[0] for row in executed.rows())
        first, step = execute("SELECT LAST_INSERT_ID(), @@auto_increment_increment").rows()[0]
        return list(range(first, first + count * step, step))

    def _check(self, columns: Iterable[str]) -> None:
        allowed = (*self.definition.names, *ENQUEUED)
        for name in columns:
            if name not in allowed:
                raise ValueError(
                    f"{name!r} is not a column that an insert into {self._name!r} sets"
                )

    def _insert(self, names: Sequence[str], marks: Sequence[str], rows: int = 1) -> str:
        """A statement that inserts rows and returns their ids, where the database does that."""
        if not names:
            names, marks = ["event_group"], ["NULL"]
        returning = " RETURNING event_id" if self.dialect.returning else ""
        values = ", ".join([f"({', '.join(marks)})"] * rows)
        return f"INSERT INTO {self._sql.table} ({', '.join(names)}) VALUES {values}{returning}"

    def _change_ids(self, statement: ByIds, ids: Sequence[int]) -> int:
        def work(execute: Execute) -> int:
            return sum(self._run(execute, statement, batch).count for batch in _batches(ids))

        return self.session.transact(work)

    def _run(self, execute: Execute, statement: ByIds, ids: Sequence[int]) -> Executed:
        condition, parameters = self.dialect.ids(ids)
        return execute(statement.where(condition), parameters)


def _batches(items: Sequence[T]) -> Iterable[Sequence[T]]:
    return (items[at : at + BATCH] for at in range(0, len(items), BATCH))
