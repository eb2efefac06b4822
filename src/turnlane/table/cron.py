"""Cron expressions: when something that recurs is due. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Final, NamedTuple, Self
from zoneinfo import ZoneInfo

SECOND: Final = 1_000_000_000
DAY: Final = timedelta(days=1)
LONGEST: Final = 366 * 41
"""Days within which every expression comes: the 29th of February on a certain day of the week."""

_PART: Final = re.compile(r"(?:(\*)|(\w+)(?:-(\w+))?)(?:/(\d{1,4}))?", re.ASCII)


def _numbered(words: str, first: int) -> Mapping[str, int]:
    return {word: at for at, word in enumerate(words.split(), start=first)}


class Field(NamedTuple):
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


FIELDS: Final = (
    Field("minute", 0, 59, {}),
    Field("hour", 0, 23, {}),
    Field("day of the month", 1, 31, {}),
    Field("month", 1, 12, _numbered("JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC", 1)),
    Field("day of the week", 0, 7, _numbered("SUN MON TUE WED THU FRI SAT", 0)),
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
        if len(parts) != len(FIELDS):
            names = ", ".join(field.name for field in FIELDS)
            raise ValueError(f"{text!r} has {len(parts)} fields, not five: {names}")
        minutes, hours, days, months, weekdays = map(Field.parse, FIELDS, parts)
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
        second = moment // SECOND
        day = datetime.fromtimestamp(second, zone).date()
        for _ in range(LONGEST):
            for hour in sorted(self.hours) if self._falls_on(day) else ():
                if max(_seconds(day, hour, 59, zone)) <= second:
                    continue  # which saves the look at each of its minutes
                later = [at for at in self._within(day, hour, zone) if at > second]
                if later:
                    return min(later) * SECOND
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
