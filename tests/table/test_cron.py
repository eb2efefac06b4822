"""Cron expressions: their times in a time zone, and errors."""

from __future__ import annotations

import re
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlane.table.schedules import Cron

BERLIN = ZoneInfo("Europe/Berlin")


def list_next_times(text: str, start: str, count: int, zone: ZoneInfo | None = None) -> list[str]:
    """Return the next times after ``start`` in ISO 8601, in the time zone."""
    cron, zone = Cron.parse(text), zone or ZoneInfo("UTC")
    moment = round(datetime.fromisoformat(start).timestamp()) * 10**9
    found = []
    for _ in range(count):
        moment = cron.find_next(moment, zone)
        shown = datetime.fromtimestamp(moment // 10**9, zone)
        found.append(shown.isoformat(timespec="minutes"))
    return found


@pytest.mark.parametrize(
    ("text", "start", "expected"),
    [
        ("*/20 * * * *", "2026-11-17T23:30Z", ["2026-11-17T23:40", "2026-11-18T00:00"]),
        ("5 3 * * *", "2026-11-17T03:05Z", ["2026-11-18T03:05", "2026-11-19T03:05"]),
        ("0 9-17/8 * * mon,FRI", "2026-11-17T00:00Z", ["2026-11-20T09:00", "2026-11-20T17:00"]),
        ("0 0 1 * *", "2026-12-31T23:59Z", ["2027-01-01T00:00", "2027-02-01T00:00"]),
        ("0 0 31 * *", "2026-01-31T00:00Z", ["2026-03-31T00:00", "2026-05-31T00:00"]),
        ("0 0 29 feb *", "2097-01-01T00:00Z", ["2104-02-29T00:00", "2108-02-29T00:00"]),
        # With days of the month and days of the week, either is enough.
        ("0 0 1 * 7", "2026-03-31T00:00Z", ["2026-04-01T00:00", "2026-04-05T00:00"]),
        ("30/15 8 * * *", "2026-01-01T00:00Z", ["2026-01-01T08:30", "2026-01-01T08:45"]),
    ],
)
def test_expression_matches_its_fields(text: str, start: str, expected: list[str]) -> None:
    assert list_next_times(text, start, 2) == [f"{each}+00:00" for each in expected]


def test_fixed_hour_comes_once_on_days_when_clocks_change() -> None:
    spring = list_next_times("30 2 * * *", "2026-03-28T12:00Z", 2, BERLIN)
    assert spring == ["2026-03-29T03:30+02:00", "2026-03-30T02:30+02:00"]
    autumn = list_next_times("30 2 * * *", "2026-10-24T12:00Z", 2, BERLIN)
    assert autumn == ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]


def test_every_hour_follows_elapsed_time_when_clocks_change() -> None:
    spring = list_next_times("*/30 * * * *", "2026-03-29T00:29Z", 3, BERLIN)
    assert spring == ["2026-03-29T01:30+01:00", "2026-03-29T03:00+02:00", "2026-03-29T03:30+02:00"]
    autumn = list_next_times("30 * * * *", "2026-10-25T00:00Z", 3, BERLIN)
    assert autumn == ["2026-10-25T02:30+02:00", "2026-10-25T02:30+01:00", "2026-10-25T03:30+01:00"]


moments = st.integers(1_577_836_800 * 10**9, 2_051_222_400 * 10**9)  # from 2020 to 2035


@given(
    moments,
    st.integers(0, 59),
    st.integers(0, 23),
    st.sampled_from(["Europe/Berlin", "Asia/Kolkata"]),
)
def test_daily_expression_comes_after_the_moment_and_within_a_day(
    moment: int, minute: int, hour: int, zone: str
) -> None:
    came = Cron.parse(f"{minute} {hour} * * *").find_next(moment, ZoneInfo(zone))
    assert 0 < came - moment <= 25 * 3_600 * 10**9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 fields, not five"),
        ("* * * *", "4 fields, not five: minute, hour, day of the month, month, day of the week"),
        ("60 * * * *", "minute: '60' is not from 0 to 59"),
        ("* 24 * * *", "hour: '24' is not from 0 to 23"),
        ("* * 0 * *", "day of the month: '0' is not from 1 to 31"),
        ("* * * Juin *", "month: 'Juin' is not from 1 to 12"),
        ("* * * * 8", "day of the week: '8' is not from 0 to 7"),
        ("*/0 * * * *", "minute: '*/0' matches no value"),
        ("* 5-1 * * *", "hour: '5-1' matches no value"),
        ("1,,2 * * * *", "minute: '' is not"),
        ("\u0663 * * * *", "minute: '\u0663' is not"),
        ("0 0 30 2 *", "day of the month: '30' does not occur in month '2'"),
    ],
)
def test_invalid_expression_error_names_the_field(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Cron.parse(text)
