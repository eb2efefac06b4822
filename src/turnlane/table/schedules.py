"""Schedules: events that recur. Cron expressions, and the table ``turnlane_schedule``.

A schedule is kept in the database that has the key of its event. There the leader inserts the event
and sets the schedule's next time in one transaction, behind its fence. So no occurrence comes
twice, even if a manager dies or notices late that another one leads.
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

from turnlane.databases import Dialect, Execute, Row, Session
from turnlane.errors import SchemaMismatch
from turnlane.table.definition import check_name, quote_identifier
from turnlane.table.queue_sql import get_table_options
from turnlane.table.rows import EventInserter, check_columns, convert_to_portable

# ── cron expressions ─────────────────────────────────────────────────────────────────────────────

NANOSECONDS_PER_SECOND: Final = 1_000_000_000
DAY: Final = timedelta(days=1)
MAX_DAYS: Final = 366 * 41
"""Days within which every expression comes: the 29th of February on a given day of the week."""

_PART: Final = re.compile(r"(?:(\*)|(\w+)(?:-(\w+))?)(?:/(\d{1,4}))?", re.ASCII)


class CronField(NamedTuple):
    """A field of an expression, and the values that it allows."""

    name: str
    first: int
    last: int
    words: Mapping[str, int]

    def parse(self, text: str) -> frozenset[int]:
        """Return the numbers that match. Raises ``ValueError``, which names the field."""
        return frozenset(number for part in text.split(",") for number in self._parse_part(part))

    def _parse_part(self, text: str) -> range:
        match = _PART.fullmatch(text)
        if match is None:
            raise ValueError(f"{self.name}: {text!r} is not *, a number, a range or a step")
        everything, first, last, step = match.groups()
        start = self.first if everything else self._parse_number(first)
        end = self._parse_number(last) if last else self.last if everything or step else start
        if start > end or step in {"0", "00", "000", "0000"}:
            raise ValueError(f"{self.name}: {text!r} matches no value")
        return range(start, end + 1, int(step or 1))

    def _parse_number(self, text: str) -> int:
        number = self.words.get(text.upper(), int(text) if text.isdecimal() else -1)
        if not self.first <= number <= self.last:
            raise ValueError(f"{self.name}: {text!r} is not from {self.first} to {self.last}")
        return number


def _number_words(words: str, first: int) -> Mapping[str, int]:
    return {word: at for at, word in enumerate(words.split(), start=first)}


CRON_FIELDS: Final = (
    CronField("minute", 0, 59, {}),
    CronField("hour", 0, 23, {}),
    CronField("day of the month", 1, 31, {}),
    CronField("month", 1, 12, _number_words("JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC", 1)),
    CronField("day of the week", 0, 7, _number_words("SUN MON TUE WED THU FRI SAT", 0)),
)


@dataclass(frozen=True, slots=True)
class Cron:
    """An expression of five fields: minute, hour, day of the month, month, day of the week. Pure.

    An expression with fixed hours comes once on every matching day, also on days on which clocks
    skip or repeat the hour. An expression for every hour (``*``) follows the elapsed time.
    """

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    has_fixed_hours: bool
    matches_either_day: bool
    """Whether it restricts days of the month and days of the week: then either is enough."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an expression. Raises ``ValueError``, which names the field."""
        parts = text.split()
        if len(parts) != len(CRON_FIELDS):
            names = ", ".join(field.name for field in CRON_FIELDS)
            raise ValueError(f"{text!r} has {len(parts)} fields, not five: {names}")
        minutes, hours, days, months, weekdays = map(CronField.parse, CRON_FIELDS, parts)
        matches_either_day = not parts[2].startswith("*") and not parts[4].startswith("*")
        # 2024 was a leap year.
        has_day = any(_count_days(2024, month) >= min(days) for month in months)
        if not matches_either_day and not has_day:
            raise ValueError(f"day of the month: {parts[2]!r} does not occur in month {parts[3]!r}")
        sunday_is_zero = frozenset(day % 7 for day in weekdays)
        has_fixed_hours = not parts[1].startswith("*")
        return cls(
            minutes, hours, days, months, sunday_is_zero, has_fixed_hours, matches_either_day
        )

    def find_next(self, moment: int, zone: ZoneInfo) -> int:
        """Return the next time after a moment; both in nanoseconds since the epoch."""
        second = moment // NANOSECONDS_PER_SECOND
        day = datetime.fromtimestamp(second, zone).date()
        for _ in range(MAX_DAYS):
            for hour in sorted(self.hours) if self._matches_day(day) else ():
                if max(_find_seconds(day, hour, 59, zone)) <= second:
                    continue  # the whole hour is over: no need to check each minute
                later = [at for at in self._list_times(day, hour, zone) if at > second]
                if later:
                    return min(later) * NANOSECONDS_PER_SECOND
            day += DAY
        raise AssertionError("parse() accepts no expression that never comes")

    def _matches_day(self, day: date) -> bool:
        matches = (day.day in self.days, day.isoweekday() % 7 in self.weekdays)
        return day.month in self.months and (
            any(matches) if self.matches_either_day else all(matches)
        )

    def _list_times(self, day: date, hour: int, zone: ZoneInfo) -> Iterator[int]:
        """Yield its times in an hour of a day, by the clocks of a time zone, in seconds.

        With fixed hours, a time that clocks skip moves by the skipped time, and a time that they
        show twice counts once. For every hour, a skipped time does not count, and a repeated time
        counts twice.
        """
        for minute in self.minutes:
            first, second = _find_seconds(day, hour, minute, zone)
            if self.has_fixed_hours:
                yield first
                continue
            for at in {first, second}:
                shown = datetime.fromtimestamp(at, zone)
                if (shown.hour, shown.minute) == (hour, minute):
                    yield at


def _find_seconds(day: date, hour: int, minute: int, zone: ZoneInfo) -> tuple[int, int]:
    """Return when clocks show a time first and last; for a skipped time, values around the gap."""
    wall = datetime(day.year, day.month, day.day, hour, minute, tzinfo=zone)
    return int(wall.timestamp()), int(wall.replace(fold=1).timestamp())


def _count_days(year: int, month: int) -> int:
    return (date(year + month // 12, month % 12 + 1, 1) - DAY).day


# ── a schedule ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Schedule:
    """An event that recurs; ``str()`` returns the statement that creates it."""

    queue: str
    name: str
    every: str
    """A cron expression."""
    time_zone: str = "UTC"
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The columns of the event."""
    next_at: int = 0
    """When it is due next: nanoseconds since the epoch."""

    def check(self) -> None:
        """Raise ``ValueError`` if its name, its expression or its values are not allowed."""
        check_name(self.name)
        self.find_next(0)
        for name in ("fire_at", "event_name"):
            if name in self.columns:
                raise ValueError(f"a schedule sets {name} by itself")
        self.encode_columns()

    def find_next(self, moment: int) -> int:
        """Return when it is due next after a moment."""
        return Cron.parse(self.every).find_next(moment, get_time_zone(self.time_zone))

    def encode_columns(self) -> str:
        """Return the event's columns as JSON. Raises ``ValueError``."""
        values = {name: convert_to_portable(value) for name, value in self.columns.items()}
        try:
            return json.dumps(values, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"a schedule cannot keep these values: {error}") from None

    def make_event(self) -> dict[str, Any]:
        """Return the event that is due next, with a name that no other occurrence has."""
        due = datetime.fromtimestamp(self.next_at // NANOSECONDS_PER_SECOND, UTC)
        name = f"{self.name}@{due:%Y-%m-%dT%H:%M:%SZ}"
        return {**self.columns, "fire_at": self.next_at, "event_name": name}

    def __str__(self) -> str:
        text = f"CREATE SCHEDULE {quote_identifier(self.name)} ON {quote_identifier(self.queue)} "
        text += f"EVERY {_format_literal(self.every)}"
        if self.time_zone != "UTC":
            text += f" TIME ZONE {_format_literal(self.time_zone)}"
        if self.columns:
            values = (
                f"{quote_identifier(name)} = {_format_literal(value)}"
                for name, value in self.columns.items()
            )
            text += f" VALUES ({', '.join(values)})"
        return text


def get_time_zone(name: str) -> ZoneInfo:
    """Return the time zone of this name. Raises ``ValueError``."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"there is no time zone {name!r}") from None


def _format_literal(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "NULL" if value is None else str(value).upper()
    if isinstance(value, int | float):
        return str(value)
    return quote_identifier(str(value), "'")


# ── the table ────────────────────────────────────────────────────────────────────────────────────

_COLUMNS: Final = "queue, name, cron, time_zone, event, next_at"


class _RollBack(Exception):
    """Rolls a trial back."""


def get_schedule_ddl(dialect: Dialect) -> str:
    """Return the statement that creates the table, unless it exists."""
    text = "LONGTEXT" if dialect.name == "mysql" else "TEXT"
    return (
        "CREATE TABLE IF NOT EXISTS turnlane_schedule (queue VARCHAR(64) NOT NULL, "
        "name VARCHAR(64) NOT NULL, cron TEXT NOT NULL, time_zone VARCHAR(255) NOT NULL, "
        f"event {text} NOT NULL, next_at BIGINT NOT NULL, PRIMARY KEY (queue, name))"
        + get_table_options(dialect)
    )


class ScheduleTable:
    """The schedules of one queue in one database. Thread-safe."""

    def __init__(self, session: Session, inserter: EventInserter) -> None:
        self._session = session
        self._inserter = inserter
        self._queue = inserter.definition.name

    def list_all(self) -> list[Schedule]:
        """Return all schedules, by name."""
        return [_decode_row(row) for row in self.read_rows()]

    def save(self, schedule: Schedule) -> None:
        """Save a schedule in place of another with its name; an equal one is not changed.

        Raises ``SchemaMismatch`` if its event does not fit the queue.
        """
        check_columns(schedule.columns, self._inserter.definition)
        encoded = schedule.encode_columns()
        wanted = (schedule.every, schedule.time_zone, encoded)

        def try_event(execute: Execute) -> None:
            self._insert_event(execute, json.loads(encoded))
            raise _RollBack

        try:
            # Insert the event and roll back: a wrong event fails now, not when it is due.
            with contextlib.suppress(_RollBack):
                self._session.transact(try_event)
        except self._inserter.dialect.error as error:
            raise SchemaMismatch(f"{self._queue!r} rejects the event: {error}") from error

        def replace(execute: Execute) -> None:
            key = (self._queue, schedule.name)
            select = "SELECT cron, time_zone, event FROM turnlane_schedule WHERE {key} {lock}"
            if execute(self._render(select), key).rows() == [wanted]:
                return
            now = execute(self._render("SELECT {now}")).rows()[0][0]
            self._delete(execute, schedule.name)
            self._insert(execute, (*key, *wanted, schedule.find_next(now)))

        self._session.transact(replace)

    def remove(self, name: str) -> bool:
        """Delete a schedule; false if there is none. Events that it inserted stay."""
        return self._session.transact(lambda execute: self._delete(execute, name))

    def list_due_within(self, seconds: float) -> list[tuple[str, int]]:
        """Return names and times of schedules that are due within some seconds, by time."""
        select = self._render(
            "SELECT name, next_at FROM turnlane_schedule "
            "WHERE queue = %s AND next_at <= {now} + %s ORDER BY next_at"
        )
        found = self._session.query(select, (self._queue, round(seconds * 1e9)))
        return [(row[0], row[1]) for row in found]

    def fire(self, execute: Execute, name: str) -> None:
        """Insert the event of a schedule, if it is due, and set its next time after now."""
        key = (self._queue, name)
        select = f"SELECT {_COLUMNS}, {{now}} FROM turnlane_schedule "
        select += "WHERE {key} AND next_at <= {now} {lock}"
        found = execute(self._render(select), key).rows()
        if not found:
            return
        *row, now = found[0]
        schedule = _decode_row(tuple(row))
        event = schedule.make_event()
        same_name = "SELECT 1 FROM {table} WHERE event_name = %s"
        if not execute(self._render(same_name), (event["event_name"],)).rows():
            self._insert_event(execute, event)
        update = "UPDATE turnlane_schedule SET next_at = %s WHERE {key}"
        execute(self._render(update), (schedule.find_next(now), *key))

    # ── for a reshard ────────────────────────────────────────────────────────────────────────────

    def read_rows(self) -> list[Row]:
        """Return the rows of all schedules, by name."""
        select = f"SELECT {_COLUMNS} FROM turnlane_schedule WHERE queue = %s ORDER BY name"
        return self._session.query(self._render(select), (self._queue,))

    def add_row(self, row: Row) -> None:
        """Add the row of a schedule from another shard, unless one of its name is here."""
        self._session.transact(lambda execute: self._insert(execute, row))

    # ── helpers ──────────────────────────────────────────────────────────────────────────────────

    def _insert_event(self, execute: Execute, event: Mapping[str, Any]) -> None:
        dialect = self._inserter.dialect
        names = [dialect.quote_name(name) for name in event]
        statement = self._inserter.build_statement(names, [dialect.placeholder] * len(names))
        execute(statement, tuple(event.values()))

    def _insert(self, execute: Execute, row: Row) -> None:
        begin, end = self._inserter.dialect.insert_or_ignore  # another process may have inserted it
        marks = ", ".join(["%s"] * len(row))
        execute(self._render(f"{begin} turnlane_schedule ({_COLUMNS}) VALUES ({marks}) {end}"), row)

    def _delete(self, execute: Execute, name: str) -> bool:
        delete = "DELETE FROM turnlane_schedule WHERE {key}"
        return execute(self._render(delete), (self._queue, name)).count > 0

    def _render(self, template: str) -> str:
        """Fill in the queue's table, and the condition that selects one schedule."""
        dialect = self._inserter.dialect
        key = f"queue = {dialect.placeholder} AND name = {dialect.placeholder}"
        return dialect.render(template, table=dialect.quote_name(self._queue), key=key)


def _decode_row(row: Row) -> Schedule:
    queue, name, every, time_zone, event, next_at = row
    return Schedule(queue, name, every, time_zone, json.loads(event), next_at)


def get_schedule_key(row: Row, shard_by: str) -> object:
    """Return the key of a schedule's event; ``None`` if a user made the row invalid."""
    try:
        return _decode_row(row).columns.get(shard_by)
    except (ValueError, AttributeError):
        return None
