"""Schedules as a database keeps them: rows of ``turnlane_schedule``.

A schedule is in the database that has the key of its event. There its manager inserts the event and
moves the schedule on in one transaction, behind its fence: whoever dies, or is late to notice that
another leads, no occurrence comes twice.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, NamedTuple, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from turnlane.errors import SchemaMismatch
from turnlane.table.definition import check_name, quote_identifier
from turnlane.table.fenced_writes import EventInserter
from turnlane.table.row_codec import check_columns, convert_to_portable
from turnlane.table.sql.dialect import Dialect, Row
from turnlane.table.sql.session import Execute, Session

# ── cron ──
# Cron expressions: when something that recurs is due. Pure.

NANOSECONDS_PER_SECOND: Final = 1_000_000_000
DAY: Final = timedelta(days=1)
MAX_DAYS: Final = 366 * 41
"""Days within which every expression comes: the 29th of February on a certain day of the week."""

_PART: Final = re.compile(r"(?:(\*)|(\w+)(?:-(\w+))?)(?:/(\d{1,4}))?", re.ASCII)


def _numbered(words: str, first: int) -> Mapping[str, int]:
    return {word: at for at, word in enumerate(words.split(), start=first)}


class CronField(NamedTuple):
    """A field of an expression, and what may stand there."""

    name: str
    first: int
    last: int
    words: Mapping[str, int]

    def parse(self, text: str) -> frozenset[int]:
        """The numbers that it means. Raises ``ValueError``, which names the field."""
        return frozenset(number for part in text.split(",") for number in self._part(part))

    def _part(self, text: str) -> range:
        match = _PART.fullmatch(text)
        if match is None:
            raise ValueError(f"{self.name}: {text!r} is not *, a number, a range or a step")
        everything, first, last, step = match.groups()
        start = self.first if everything else self._number(first)
        end = self._number(last) if last else self.last if everything or step else start
        if start > end or step in {"0", "00", "000", "0000"}:
            raise ValueError(f"{self.name}: {text!r} holds nothing")
        return range(start, end + 1, int(step or 1))

    def _number(self, text: str) -> int:
        number = self.words.get(text.upper(), int(text) if text.isdecimal() else -1)
        if not self.first <= number <= self.last:
            raise ValueError(f"{self.name}: {text!r} is not from {self.first} to {self.last}")
        return number


CRON_FIELDS: Final = (
    CronField("minute", 0, 59, {}),
    CronField("hour", 0, 23, {}),
    CronField("day of the month", 1, 31, {}),
    CronField("month", 1, 12, _numbered("JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC", 1)),
    CronField("day of the week", 0, 7, _numbered("SUN MON TUE WED THU FRI SAT", 0)),
)


@dataclass(frozen=True, slots=True)
class Cron:
    """An expression of five fields: minute, hour, day of the month, month, day of the week."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    by_clock: bool
    """Whether it names hours: then it comes once for each, also on days that lack or repeat it."""
    either_day: bool
    """Whether it names days of the month and of the week: then it comes on both."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The expression that ``text`` is. Raises ``ValueError``, which names the field."""
        parts = text.split()
        if len(parts) != len(CRON_FIELDS):
            names = ", ".join(field.name for field in CRON_FIELDS)
            raise ValueError(f"{text!r} has {len(parts)} fields, not five: {names}")
        minutes, hours, days, months, weekdays = map(CronField.parse, CRON_FIELDS, parts)
        either_day = not parts[2].startswith("*") and not parts[4].startswith("*")
        # 2024 was a leap year.
        there = (_days_of(2024, month) >= min(days) for month in months)
        if not either_day and not any(there):
            raise ValueError(f"day of the month: {parts[2]!r} does not come in month {parts[3]!r}")
        seven = frozenset(day % 7 for day in weekdays)
        by_clock = not parts[1].startswith("*")
        return cls(minutes, hours, days, months, seven, by_clock, either_day)

    def after(self, moment: int, zone: ZoneInfo) -> int:
        """When it comes next; both in nanoseconds since the epoch."""
        second = moment // NANOSECONDS_PER_SECOND
        day = datetime.fromtimestamp(second, zone).date()
        for _ in range(MAX_DAYS):
            for hour in sorted(self.hours) if self._falls_on(day) else ():
                if max(_seconds(day, hour, 59, zone)) <= second:
                    continue  # which saves the look at each of its minutes
                later = [at for at in self._within(day, hour, zone) if at > second]
                if later:
                    return min(later) * NANOSECONDS_PER_SECOND
            day += DAY
        raise AssertionError("parse() takes none that never comes")

    def _falls_on(self, day: date) -> bool:
        fits = (day.day in self.days, day.isoweekday() % 7 in self.weekdays)
        return day.month in self.months and (any(fits) if self.either_day else all(fits))

    def _within(self, day: date, hour: int, zone: ZoneInfo) -> Iterator[int]:
        """Its moments in an hour of a day, by the clocks of a time zone; seconds.

        One that clocks pass over counts as so much later, unless it comes every hour anyway. One
        that they show twice counts once, or twice if it comes every hour.
        """
        for minute in self.minutes:
            first, second = _seconds(day, hour, minute, zone)
            if self.by_clock:
                yield first
                continue
            for at in {first, second}:
                shown = datetime.fromtimestamp(at, zone)
                if (shown.hour, shown.minute) == (hour, minute):
                    yield at


def _seconds(day: date, hour: int, minute: int, zone: ZoneInfo) -> tuple[int, int]:
    """When clocks show a time first, and last. If they pass over it, each a while beside it."""
    wall = datetime(day.year, day.month, day.day, hour, minute, tzinfo=zone)
    return int(wall.timestamp()), int(wall.replace(fold=1).timestamp())


def _days_of(year: int, month: int) -> int:
    return (date(year + month // 12, month % 12 + 1, 1) - DAY).day


# ── schedule ──
# A schedule: an event that recurs.


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is put into a queue, and when; as text, the statement that makes it."""

    queue: str
    name: str
    every: str
    """A cron expression."""
    time_zone: str = "UTC"
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Of the event."""
    next_at: int = 0
    """When it is due next: nanoseconds since the epoch."""

    def check(self) -> None:
        """Raise ``ValueError`` for what no schedule can be."""
        check_name(self.name)
        self.after(0)
        for name in ("fire_at", "event_name"):
            if name in self.columns:
                raise ValueError(f"a schedule sets {name} by itself")
        _ = self.stored

    def after(self, moment: int) -> int:
        """When it is due next after a moment."""
        return Cron.parse(self.every).after(moment, get_time_zone(self.time_zone))

    @property
    def stored(self) -> str:
        """The event's columns as the database keeps them."""
        values = {name: convert_to_portable(value) for name, value in self.columns.items()}
        try:
            return json.dumps(values, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"a schedule cannot keep these values: {error}") from None

    @property
    def event(self) -> dict[str, Any]:
        """The event that is due next, under a name that no other occurrence has."""
        due = datetime.fromtimestamp(self.next_at // NANOSECONDS_PER_SECOND, UTC)
        name = f"{self.name}@{due:%Y-%m-%dT%H:%M:%SZ}"
        return {**self.columns, "fire_at": self.next_at, "event_name": name}

    def __str__(self) -> str:
        text = f"CREATE SCHEDULE {quote_identifier(self.name)} ON {quote_identifier(self.queue)} "
        text += f"EVERY {_literal(self.every)}"
        if self.time_zone != "UTC":
            text += f" TIME ZONE {_literal(self.time_zone)}"
        if self.columns:
            values = (
                f"{quote_identifier(name)} = {_literal(of)}" for name, of in self.columns.items()
            )
            text += f" VALUES ({', '.join(values)})"
        return text


def get_time_zone(name: str) -> ZoneInfo:
    """The time zone of this name. Raises ``ValueError``."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"there is no time zone {name!r}") from None


def _literal(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "NULL" if value is None else str(value).upper()
    if isinstance(value, int | float):
        return str(value)
    return quote_identifier(str(value), "'")


_COLUMNS: Final = "queue, name, cron, time_zone, event, next_at"


class _Undone(Exception):
    """Rolls back what was only tried."""


def get_schedule_ddl(dialect: Dialect) -> str:
    """The statement that makes the table, unless it is there."""
    mysql = dialect.name == "mysql"
    return (
        "CREATE TABLE IF NOT EXISTS turnlane_schedule (queue VARCHAR(64) NOT NULL, "
        "name VARCHAR(64) NOT NULL, cron TEXT NOT NULL, time_zone VARCHAR(255) NOT NULL, "
        f"event {'LONGTEXT' if mysql else 'TEXT'} NOT NULL, next_at BIGINT NOT NULL, "
        "PRIMARY KEY (queue, name))"
        + (" ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin" if mysql else "")
    )


class ScheduleTable:
    """The schedules of one queue in one database. Safe to use from any thread."""

    def __init__(self, session: Session, inserts: EventInserter) -> None:
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


def get_schedule_key(row: Row, shard_by: str) -> object:
    """The key of a schedule's event; none if somebody has spoilt it."""
    try:
        return _schedule(row).columns.get(shard_by)
    except (ValueError, AttributeError):
        return None
