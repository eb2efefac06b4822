"""Schedules as a database keeps them: rows of ``turnlane_schedule``.

A schedule is in the database that has the key of its event. There its manager inserts the event and
moves the schedule on in one transaction, behind its fence: whoever dies, or is late to notice that
another leads, no occurrence comes twice.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any, Final

from turnlane.errors import SchemaMismatch
from turnlane.table.columns import check_columns
from turnlane.table.inserts import Inserts
from turnlane.table.schedule import Schedule
from turnlane.table.sql.dialect import Dialect, Row
from turnlane.table.sql.session import Execute, Session

_COLUMNS: Final = "queue, name, cron, time_zone, event, next_at"


class _Undone(Exception):
    """Rolls back what was only tried."""


def table_of_schedules(dialect: Dialect) -> str:
    """The statement that makes the table, unless it is there."""
    mysql = dialect.name == "mysql"
    return (
        "CREATE TABLE IF NOT EXISTS turnlane_schedule (queue VARCHAR(64) NOT NULL, "
        "name VARCHAR(64) NOT NULL, cron TEXT NOT NULL, time_zone VARCHAR(255) NOT NULL, "
        f"event {'LONGTEXT' if mysql else 'TEXT'} NOT NULL, next_at BIGINT NOT NULL, "
        "PRIMARY KEY (queue, name))"
        + (" ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin" if mysql else "")
    )


class Schedules:
    """The schedules of one queue in one database. Safe to use from any thread."""

    def __init__(self, session: Session, inserts: Inserts) -> None:
        self._session = session
        self._inserts = inserts
        self._queue = inserts.definition.name

    def all(self) -> list[Schedule]:
        """All there are, by name."""
        return [_schedule(row) for row in self.rows()]

    def put(self, schedule: Schedule) -> None:
        """Keep a schedule, in place of another of its name; an equal one stays as it is.

        Raises ``SchemaMismatch`` if its event does not fit the queue.
        """
        check_columns(schedule.columns, self._inserts.definition)
        wanted = (schedule.every, schedule.time_zone, schedule.stored)
        self._try_out(json.loads(schedule.stored))

        def work(execute: Execute) -> None:
            key = (self._queue, schedule.name)
            kept = (
                "SELECT cron, time_zone, event FROM turnlane_schedule "
                "WHERE queue = %s AND name = %s {lock}"
            )
            found = execute(self._sql(kept), key).rows()
            if found == [wanted]:
                return
            now = execute(self._sql("SELECT {now}")).rows()[0][0]
            self._remove(execute, schedule.name)
            self._insert(execute, (*key, *wanted, schedule.after(now)))

        self._session.transact(work)

    def remove(self, name: str) -> bool:
        """Forget a schedule; false if there is none. Events that it put into the queue stay."""
        return self._session.transact(lambda execute: self._remove(execute, name))

    # ── for the manager ──────────────────────────────────────────────────────────────────────────

    def soon(self, span: float) -> list[tuple[str, int]]:
        """Names and times of those that are due within so many seconds, the first one first."""
        found = self._session.query(
            self._sql(
                "SELECT name, next_at FROM turnlane_schedule "
                "WHERE queue = %s AND next_at <= {now} + %s ORDER BY next_at"
            ),
            (self._queue, round(span * 1e9)),
        )
        return [(row[0], row[1]) for row in found]

    def fire(self, execute: Execute, name: str) -> None:
        """Put the event of a schedule into the queue, if it is due, and move it on beyond now."""
        due = "WHERE queue = %s AND name = %s AND next_at <= {now} {lock}"
        found = execute(
            self._sql(f"SELECT {_COLUMNS}, {{now}} FROM turnlane_schedule {due}"),
            (self._queue, name),
        ).rows()
        if not found:
            return
        *row, now = found[0]
        schedule = _schedule(tuple(row))
        event = schedule.event
        taken = "SELECT 1 FROM {table} WHERE event_name = %s"
        if not execute(self._sql(taken), (event["event_name"],)).rows():
            self._enqueue(execute, event)
        execute(
            self._sql("UPDATE turnlane_schedule SET next_at = %s WHERE queue = %s AND name = %s"),
            (schedule.after(now), self._queue, name),
        )

    # ── for a reshard ────────────────────────────────────────────────────────────────────────────

    def rows(self) -> list[Row]:
        """All there are, as they are kept."""
        listed = f"SELECT {_COLUMNS} FROM turnlane_schedule WHERE queue = %s ORDER BY name"
        return self._session.query(self._sql(listed), (self._queue,))

    def arrive(self, row: Row) -> None:
        """Keep one that comes from another shard, unless it is here."""
        self._session.transact(lambda execute: self._insert(execute, row))

    # ── how ──────────────────────────────────────────────────────────────────────────────────────

    def _try_out(self, event: Mapping[str, Any]) -> None:
        """See at once, and not at night, whether the database takes such an event."""

        def work(execute: Execute) -> None:
            self._enqueue(execute, event)
            raise _Undone

        try:
            with contextlib.suppress(_Undone):
                self._session.transact(work)
        except self._inserts.dialect.error as error:
            raise SchemaMismatch(f"{self._queue!r} takes no such event: {error}") from error

    def _enqueue(self, execute: Execute, event: Mapping[str, Any]) -> None:
        dialect = self._inserts.dialect
        names = [dialect.identifier(name) for name in event]
        execute(self._inserts.statement(names, [dialect.mark] * len(names)), tuple(event.values()))

    def _insert(self, execute: Execute, row: Row) -> None:
        begin, end = self._inserts.dialect.skipping  # if another process was quicker
        marks = ", ".join(["%s"] * len(row))
        execute(self._sql(f"{begin} turnlane_schedule ({_COLUMNS}) VALUES ({marks}) {end}"), row)

    def _remove(self, execute: Execute, name: str) -> bool:
        gone = "DELETE FROM turnlane_schedule WHERE queue = %s AND name = %s"
        return execute(self._sql(gone), (self._queue, name)).count > 0

    def _sql(self, template: str) -> str:
        dialect = self._inserts.dialect
        return dialect.sql(template, table=dialect.identifier(self._queue))


def _schedule(row: Row) -> Schedule:
    queue, name, every, time_zone, event, next_at = row
    return Schedule(queue, name, every, time_zone, json.loads(event), next_at)


def key_in(row: Row, shard_by: str) -> object:
    """The key of a schedule's event; none if somebody has spoilt it."""
    try:
        return _schedule(row).columns.get(shard_by)
    except (ValueError, AttributeError):
        return None
