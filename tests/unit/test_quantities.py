"""Quantities are read as people write them, and written so that they can be read back."""

from __future__ import annotations

import re
from datetime import time, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from turnlane.units import (
    MAX_DURATION,
    MAX_SIZE,
    Duration,
    Percentage,
    Size,
    SizeOrShare,
    TimeWindow,
    compute_share,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    parse_size_or_share,
)


class Holder(BaseModel):
    wait: Duration = 1.0
    room: Size = 1
    share: Percentage | None = None
    hours: TimeWindow | None = None


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("30s", 30),
        ("500ms", 0.5),
        ("1.5h", 5400),
        ("250us", 0.00025),
        ("2d", 172_800),
        ("1h30m", 5400),
        ("1m0.5s", 60.5),
        ("1s500ms", 1.5),
        ("1d2h3m4s5ms6us", 93_784.005006),
        (" 30s ", 30),
        ("0s", 0),
        ("0", 0),
        ("45", 45),
        ("0.25", 0.25),
        (45, 45),
        (0.25, 0.25),
        (timedelta(minutes=2), 120),
        ("36500d", MAX_DURATION),
    ],
)
def test_durations_are_parsed(written: object, seconds: float) -> None:
    assert parse_duration(written) == seconds


@pytest.mark.parametrize(
    "written",
    [
        "",
        " ",
        "s",
        "-5s",
        -1,
        "5 parsecs",
        "5S",
        "30m1h",
        "1h1h",
        "1e3s",
        "1.s",
        ".5s",
        "1h 30m",
        "٣s",
        "36501d",
        timedelta(seconds=-1),
        float("nan"),
        float("inf"),
        10**400,
        True,
        None,
        b"30s",
        [30],
    ],
)
def test_invalid_durations_are_refused(written: object) -> None:
    with pytest.raises(ValueError, match=r"is not a duration; .* such as 30s"):
        parse_duration(written)


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0s"),
        (0.0000001, "0.1us"),
        (0.00025, "250us"),
        (0.0015, "1.5ms"),
        (0.5, "500ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (60, "1m"),
        (5400, "1h30m"),
        (86_401, "1d1s"),
        (864_000, "10d"),
    ],
)
def test_durations_are_formatted(seconds: float, written: str) -> None:
    assert format_duration(seconds) == written


@given(st.floats(min_value=0, max_value=MAX_DURATION))
def test_formatted_durations_are_parsed_exactly(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.floats() | st.integers())
def test_only_numbers_within_the_bounds_are_durations(number: float) -> None:
    if 0 <= number <= MAX_DURATION:
        assert parse_duration(number) == number
    else:
        with pytest.raises(ValueError, match="is not a duration"):
            parse_duration(number)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("512Mi", 512 * 2**20),
        ("1Gi", 2**30),
        ("64Ki", 65_536),
        ("2Ti", 2**41),
        ("10M", 10_000_000),
        ("100k", 100_000),
        ("100K", 100_000),
        ("3G", 3 * 10**9),
        ("1T", 10**12),
        ("512MiB", 512 * 2**20),
        ("10MB", 10_000_000),
        ("100kB", 100_000),
        ("100B", 100),
        ("64 KiB", 65_536),
        ("1.5Ki", 1536),
        (" 7 ", 7),
        ("0", 0),
        (4096, 4096),
        (4096.0, 4096),
        (MAX_SIZE, MAX_SIZE),
    ],
)
def test_sizes_are_parsed(written: object, size: int) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize(
    "written",
    ["", "Mi", "-1", -1, "1.5", 1.5, "0.3Ki", "10m", "10mb", "1Zi", "1e6", "lots", "8388608Ti",
     MAX_SIZE + 1, float("inf"), float("nan"), True, None, b"1Gi"],
)  # fmt: skip
def test_invalid_sizes_are_refused(written: object) -> None:
    with pytest.raises(ValueError, match=r"is not a size; .* such as 512Mi"):
        parse_size(written)


@pytest.mark.parametrize(
    ("size", "written"),
    [(0, "0"), (1, "1"), (1000, "1k"), (1024, "1Ki"), (1025, "1025"), (50_000, "50k"),
     (256 * 2**20, "256Mi"), (10 * 2**30, "10Gi"), (10**10, "10G")],
)  # fmt: skip
def test_sizes_are_formatted(size: int, written: str) -> None:
    assert format_size(size) == written


@given(
    st.integers(0, MAX_SIZE)
    | st.builds(lambda n, unit: n * unit, st.integers(0, 4096), st.sampled_from([10**6, 2**30]))
)
def test_formatted_sizes_are_parsed_exactly(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("written", "value"),
    [("80%", 80), ("0.5%", 0.5), ("100%", 100), (" 12.5 % ", 12.5), ("25", 25), (25, 25)],
)
def test_percentages_are_parsed(written: object, value: float) -> None:
    assert Percentage.parse(written) == Percentage(value)


@pytest.mark.parametrize(
    "written",
    ["", "%", "0%", "101%", "-3%", "half", "8 0%", 0, 101, True, None, float("nan"), 0.1, "0.1", 1],
)
def test_invalid_percentages_are_refused(written: object) -> None:
    with pytest.raises(
        ValueError, match=r"is not a percentage; .* such as 80%|a ratio or a percentage: write"
    ):
        Percentage.parse(written)


def test_percentage_out_of_range_cannot_be_created() -> None:
    with pytest.raises(ValueError, match="such as 80%"):
        Percentage(0)


@pytest.mark.parametrize(
    ("percentage", "total", "part"),
    [(70, 50_000, 35_000), (97, 100, 97), (32.3, 1000, 323), (90, 1, 0), (100, 7, 7), (50, 7, 3)],
)
def test_percentage_of_a_total_is_exact_and_rounded_down(
    percentage: float, total: int, part: int
) -> None:
    assert Percentage(percentage).of(total) == part


@pytest.mark.parametrize(
    ("written", "share"), [("80%", 800 * 2**20), ("100Mi", 100 * 2**20), ("2Gi", 1000 * 2**20)]
)
def test_size_or_share_is_at_most_the_total(written: str, share: int) -> None:
    assert compute_share(parse_size_or_share(written), 1000 * 2**20) == share


@pytest.mark.parametrize("written", ["", "101%", 0.8, "0.8", 80, "80", True, None, "-1Gi"])
def test_size_or_share_without_unit_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="such as 80%"):
        parse_size_or_share(written)


@given(st.floats(min_value=0, max_value=100, exclude_min=True))
def test_formatted_percentages_are_parsed_exactly(value: float) -> None:
    assert Percentage.parse(str(Percentage(value))) == Percentage(value)


@pytest.mark.parametrize(
    ("written", "start", "end"),
    [
        ("22:00-06:00", time(22), time(6)),
        ("9:30-17:45", time(9, 30), time(17, 45)),
        ("00:00:30-00:01:00", time(0, 0, 30), time(0, 1)),
        ("18:00-24:00", time(18), time(0)),
        (" 09:00 - 17:00 ", time(9), time(17)),
    ],
)
def test_windows_are_parsed(written: str, start: time, end: time) -> None:
    assert TimeWindow.parse(written) == TimeWindow(start, end)


@pytest.mark.parametrize(
    "written",
    ["", "22:00", "22-06", "25:00-06:00", "22:60-06:00", "24:00-06:00", "08:00-24:01",
     "08:00-08:00", "00:00-24:00", "night", 22, None],
)  # fmt: skip
def test_invalid_windows_are_refused(written: object) -> None:
    with pytest.raises(ValueError, match=r"is not a time window; .* such as 22:00-06:00"):
        TimeWindow.parse(written)


def test_empty_window_cannot_be_created() -> None:
    with pytest.raises(ValueError, match="08:00-08:00 is empty"):
        TimeWindow(time(8), time(8))


@pytest.mark.parametrize(
    ("window", "moment", "inside", "wait"),
    [
        ("09:00-17:00", time(9), True, 0),
        ("09:00-17:00", time(16, 59, 59, 999_999), True, 0),
        ("09:00-17:00", time(17), False, 16 * 3600),
        ("09:00-17:00", time(8, 59, 59, 500_000), False, 0.5),
        ("22:00-06:00", time(22), True, 0),
        ("22:00-06:00", time(0), True, 0),
        ("22:00-06:00", time(5, 59), True, 0),
        ("22:00-06:00", time(6), False, 16 * 3600),
        ("18:00-24:00", time(23, 59), True, 0),
        ("18:00-24:00", time(0), False, 18 * 3600),
    ],
)
def test_window_contains_times_from_start_to_end(
    window: str, moment: time, inside: bool, wait: float
) -> None:
    parsed = TimeWindow.parse(window)
    assert parsed.contains(moment) is inside
    assert parsed.seconds_until_open(moment) == wait


moments = st.times().map(lambda moment: moment.replace(microsecond=0))
windows = (
    st.tuples(moments, moments)
    .filter(lambda pair: pair[0] != pair[1])
    .map(lambda pair: TimeWindow(*pair))
)


@given(windows)
def test_formatted_windows_are_parsed_exactly(window: TimeWindow) -> None:
    assert TimeWindow.parse(str(window)) == window


@given(windows, st.times())
def test_time_is_in_a_window_or_in_the_opposite_one(window: TimeWindow, moment: time) -> None:
    opposite = TimeWindow(window.end, window.start)
    assert window.contains(moment) is not opposite.contains(moment)


@given(windows, moments)
def test_window_opens_after_the_computed_wait(window: TimeWindow, moment: time) -> None:
    wait = window.seconds_until_open(moment)
    since_midnight = timedelta(hours=moment.hour, minutes=moment.minute, seconds=moment.second)
    later = (since_midnight + timedelta(seconds=wait)).total_seconds() % 86_400
    opening = time(int(later // 3600), int(later // 60 % 60), int(later % 60))
    assert window.contains(opening)
    assert wait == 0 or opening == window.start


def test_quantities_in_a_model_are_converted() -> None:
    holder = Holder(wait="30s", room="1Ki", share="5%", hours="22:00-06:00")  # type: ignore[arg-type]
    assert (holder.wait, holder.room) == (30.0, 1024)
    assert holder.model_dump(mode="json") == {
        "wait": 30.0,
        "room": 1024,
        "share": "5%",
        "hours": "22:00-06:00",
    }
    assert Holder.model_validate_json(holder.model_dump_json()) == holder


@pytest.mark.parametrize("knob", ["wait", "room", "share", "hours"])
def test_model_refuses_a_wrong_value_with_an_example(knob: str) -> None:
    with pytest.raises(ValidationError, match="such as"):
        Holder.model_validate({knob: "nonsense"})


@pytest.mark.parametrize(
    ("annotation", "valid", "invalid"),
    [
        (Duration, ["30s", "1h30m", "1.5h", "45"], ["", "5 parsecs", "30m1h"]),
        (Size, ["512Mi", "10MB", "7"], ["", "10m", "lots"]),
        (Percentage, ["80%", "0.5%", "1%", "25", "1.5"], ["", "half", "0.5", "1", "1.0", "01"]),
        (SizeOrShare, ["80%", "0.5%", "2Gi"], ["", "half"]),
        (TimeWindow, ["22:00-06:00"], ["", "22:00"]),
    ],
)
def test_json_schema_accepts_all_written_forms(
    annotation: Any, valid: list[str], invalid: list[str]
) -> None:
    schema = TypeAdapter(annotation).json_schema()
    assert schema["description"]
    assert schema["examples"]
    (text,) = [form for form in schema.get("anyOf", [schema]) if form["type"] == "string"]
    assert all(re.search(text["pattern"], written) for written in [*valid, schema["examples"][0]])
    assert not any(re.search(text["pattern"], written) for written in invalid)
