"""Acks, as they are stored: the rows of settled events are deleted, or kept as acked.

A user's transaction may hold a row for minutes, to ack it or for whatever reason. Nobody waits for
that: such a row is *held*, and its ack has to be stored later.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from turnlane.errors import LeadLost
from turnlane.table.definition import INSERT_COLUMNS, Definition
from turnlane.table.sql.dialect import Connection, Dialect, Row, Verdict
from turnlane.table.sql.session import Execute, Executed, RowsLocked, Session, understood
from turnlane.table.statements import FilteredStatement, Statements

# ── fence ──
# The fence: what a manager writes is written only while its token is the one of the lease row.
#
# The transaction first holds the lease row in place and sees that it still carries the token. A
# takeover waits for such a transaction, and one that comes after a takeover fails with
# ``LeadLost``
# and changes nothing.

T = TypeVar("T")

BATCH_SIZE: Final = 1_000
"""Events to a statement. Larger ones hold locks for longer and are no faster."""


class LeaseFence:
    """One queue's fence, and the session behind it."""

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self.dialect = dialect
        self.session = Session(dialect)
        self.sql = Statements.of(dialect, definition)
        self.name = definition.name

    def transact(self, token: int, work: Callable[[Execute], T]) -> T:
        """Run ``work`` as one transaction, behind the fence."""

        def fenced(execute: Execute) -> T:
            if not execute(self.sql.fence, (self.name, token)).rows():
                raise self.lost()
            return work(execute)

        return self.session.transact(fenced)

    def run(self, execute: Execute, statement: FilteredStatement, ids: Sequence[int]) -> Executed:
        """Run a statement about events by their ids, within a transaction."""
        condition, parameters = self.dialect.ids(ids)
        return execute(statement.where(condition), parameters)

    def query(self, statement: FilteredStatement, ids: Sequence[int]) -> list[Row]:
        """The rows of a statement about events by their ids, as they are; there is no fence."""
        found: list[Row] = []
        for batch in split_batches(ids):
            condition, parameters = self.dialect.ids(batch)
            found += self.session.query(statement.where(condition), parameters)
        return found

    def lost(self) -> LeadLost:
        """What there is to say to who stands before the fence."""
        return LeadLost(f"another manager leads {self.name!r}")


def split_batches(items: Sequence[T]) -> Iterable[Sequence[T]]:
    """The items, so many at a time as a statement takes."""
    return (items[at : at + BATCH_SIZE] for at in range(0, len(items), BATCH_SIZE))


class AckResult(NamedTuple):
    """What became of acks."""

    held: set[int]
    """Events that somebody else is about to change: their acks are not stored."""
    released: list[int]
    """Events that waited for a group which is done now."""


class AckWriter:
    """One queue's acks. Every call is fenced."""

    def __init__(self, fence: LeaseFence, *, keep: bool) -> None:
        self._fence = fence
        self._settle = fence.sql.ack_keep if keep else fence.sql.ack_delete
        self._settle_in_one = fence.sql.fenced_ack_keep if keep else fence.sql.fenced_ack_delete

    def store(
        self, token: int, ids: Sequence[int], groups: Iterable[str] = (), *, wary: bool = False
    ) -> AckResult:
        """Settle events, and let go of what waited for the last of their groups.

        ``wary``: their rows are probably held.
        """
        groups = tuple(groups)
        in_one = self._fence.dialect.fenced_in_one and not groups and not wary
        if in_one and self._in_one(token, ids):
            return AckResult(set(), [])

        def work(execute: Execute) -> tuple[set[int], list[int]]:
            left = {each for batch in split_batches(ids) for each in self._free(execute, batch)}
            return left, self.release(execute, groups)

        left, released = self._fence.transact(token, work)
        there = self._fence.query(self._fence.sql.unsettled, list(left)) if left else []
        return AckResult({row[0] for row in there}, released)

    def fired(self, token: int, ids: Sequence[int]) -> list[Row]:
        """Those of the events that were fired before and are not settled, with their groups."""
        sql = self._fence.sql

        def work(execute: Execute) -> list[Row]:
            return [
                row
                for batch in split_batches(ids)
                for row in self._fence.run(execute, sql.fired_before, batch).rows()
            ]

        return self._fence.transact(token, work)

    def release(self, execute: Execute, groups: Iterable[str]) -> list[int]:
        """Let go of the events that waited for groups, as far as those are done; their ids."""
        sql = self._fence.sql
        released: list[int] = []
        for group in groups:
            if execute(sql.unsettled_member, (group,)).rows():
                continue
            waiting = [row[0] for row in execute(sql.lock_waiting, (group,)).rows()]
            if waiting:
                self._fence.run(execute, sql.let_go, waiting)
            released += waiting
        return released

    def _free(self, execute: Execute, ids: Sequence[int]) -> set[int]:
        """Settle what nobody holds; returns the others, which may also be gone."""
        if not self._fence.dialect.lock_free:  # one writer at a time: nobody holds anything
            self._fence.run(execute, self._settle, ids)
            return set()
        locked = self._fence.run(execute, self._fence.sql.lock_unsettled, ids).rows()
        free = [row[0] for row in locked]
        if free:
            self._fence.run(execute, self._settle, free)
        return set(ids).difference(free)

    def _in_one(self, token: int, ids: Sequence[int]) -> bool:
        """Settle events by statements that are fenced themselves: a round trip to a batch.

        False if one met a row that is held: then whatever is left is done otherwise.
        """
        for batch in split_batches(ids):
            condition, parameters = self._fence.dialect.ids(batch)
            statement = self._settle_in_one.where(condition)
            try:
                rows = self._fence.session.write(
                    statement, (self._fence.name, token, *parameters), patient=False
                )
            except RowsLocked:
                return False
            if not rows:
                raise self._fence.lost()
        return True


# ── inserts ──
# Inserts: how events get into a queue table.


class EventInserter:
    """Inserts into one queue. Holds no connection; safe to use from any thread."""

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self.dialect = dialect
        self.definition = definition
        self._name = definition.name

    def enqueue(
        self, connection: Connection, row: Mapping[str, Any], delay: float | None = None
    ) -> int:
        """Insert one event in the transaction that ``connection`` is in; returns its id."""
        columns = tuple(row)
        self._check_columns(columns)
        names = [self.dialect.identifier(name) for name in columns]
        marks = [self.dialect.mark] * len(columns)
        values = list(row.values())
        if delay is not None:
            names.append("fire_at")
            marks.append(f"{self.dialect.now} + {self.dialect.mark}")
            values.append(round(delay * 1e9))
        cursor = connection.cursor()
        cursor.execute(self.statement(names, marks), tuple(values))
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
            self._check_columns(columns)
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

    def check(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Raise ``ValueError`` for a column that an insert cannot set."""
        for columns in {tuple(row) for row in rows}:
            self._check_columns(columns)

    def statement(self, names: Sequence[str], marks: Sequence[str], rows: int = 1) -> str:
        """One that inserts rows and returns their ids, where the database does that."""
        if not names:
            names, marks = ["event_group"], ["NULL"]
        returning = " RETURNING event_id" if self.dialect.returning else ""
        values = ", ".join([f"({', '.join(marks)})"] * rows)
        table = self.dialect.identifier(self._name)
        return f"INSERT INTO {table} ({', '.join(names)}) VALUES {values}{returning}"

    def _check_columns(self, columns: Iterable[str]) -> None:
        allowed = (*self.definition.names, *INSERT_COLUMNS)
        for name in columns:
            if name not in allowed:
                raise ValueError(
                    f"{name!r} is not a column that an insert into {self._name!r} sets"
                )


# ── salvage ──
# Salvage: reading on past rows that cannot be read.
#
# A database may hold what its driver cannot give: a text in SQLite that is none, a date in
# PostgreSQL
# after the last year that Python knows. One such row must not stop a queue: it is found by
# halving
# the page that it is on, and set aside as a dead letter.

log = logging.getLogger(__name__)


class SkippingReader:
    """One queue's reader of pages on which a row may be unreadable. Every read is fenced."""

    def __init__(
        self, fence: LeaseFence, set_aside: Callable[[int, Sequence[Verdict]], set[int]]
    ) -> None:
        self._fence = fence
        self._set_aside = set_aside
        """Applies verdicts; returns the ids of those that it could apply."""
        self.unreadable = 0
        """Rows that were set aside so far."""

    def read(self, token: int, statement: str, parameters: Row) -> list[Row]:
        """The rows of a page, without those that cannot be read."""
        try:
            return self._fence.session.query(statement, parameters)
        except self._fence.dialect.error as error:
            if not self._fence.dialect.is_unreadable(error):
                raise
        ids = [row[0] for row in self._fence.session.query(self._only_ids(statement), parameters)]
        rows, found = find_unreadable_rows(
            self._fence.dialect, lambda some: self._read(token, some), ids
        )
        broken = [Verdict(event_id, "dead", 0, 0, wrong) for event_id, wrong in found]
        aside = self._set_aside(token, broken) if broken else set()
        for event_id, wrong in found:
            log.error("queue %s: event %d: %s", self._fence.name, event_id, wrong)
        self.unreadable += len(aside)
        if len(aside) == len(broken):  # the page is whole again, with others in their places
            return self.read(token, statement, parameters)
        place = {event_id: at for at, event_id in enumerate(ids)}
        return sorted(rows, key=lambda row: place[row[0]])

    def _read(self, token: int, ids: Sequence[int]) -> list[Row]:
        condition, parameters = self._fence.dialect.ids(ids)
        statement = self._fence.sql.read_standing.where(condition)
        return self._fence.session.query(statement, (*parameters, self._fence.name, token))

    def _only_ids(self, statement: str) -> str:
        """The same page, of which nothing is read that could not be."""
        return statement.replace(f"SELECT {self._fence.sql.columns} ", "SELECT event_id ", 1)


def find_unreadable_rows(
    dialect: Dialect, read: Callable[[Sequence[int]], list[Row]], ids: Sequence[int]
) -> tuple[list[Row], list[tuple[int, str]]]:
    """The rows of these ids that can be read; the other ids, each with what is wrong."""
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
