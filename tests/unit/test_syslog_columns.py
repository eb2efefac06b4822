"""Syslog as columns: the parser of blocks agrees with a plain parser, message by message."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest

from tests.unit import syslog_reference as reference
from tests.unit.syslog_samples import NO_UTF_8, SAMPLES
from turnlane.delivery.settings import PRIORITY
from turnlane.formats.block_parsing import BlockParser
from turnlane.formats.parse_settings import Format, ParseSettings
from turnlane.formats.syslog import parse_priorities
from turnlane.formats.syslog_columns import COLUMNS, parse_syslog

ARRIVAL = datetime(2026, 1, 5, 12, 0, tzinfo=UTC)
LETTERS = ' <>[]:="\\-\x1f0123456789abcZT\n%.ü'
PICKED: list[bytes | None] = [None, *(text.encode() for text in SAMPLES), *NO_UTF_8]


def parse(
    values: Sequence[bytes | None],
    severity: int | None = None,
    zone: str = "UTC",
    wanted: Sequence[str] = tuple(COLUMNS),
) -> list[dict[str, Any]]:
    count = len(values)
    columns = parse_syslog(
        pa.array(values, pa.binary()),
        pa.array([severity] * count, pa.int8()),
        pa.array([ARRIVAL] * count, pa.timestamp("us", tz="UTC")),
        zone,
        wanted,
    )
    for name, column in columns.items():
        assert column.type == COLUMNS[name]
    rows: list[dict[str, Any]] = pa.table(columns).to_pylist(maps_as_pydicts="strict")
    return rows


def check(values: Sequence[bytes | None], zone: str = "UTC") -> None:
    for value, row in zip(values, parse(values, zone=zone), strict=True):
        wanted = reference.parse(value, ARRIVAL, ZoneInfo(zone))
        why, error = wanted.pop("parse_error"), row.pop("parse_error")
        assert row == wanted, value
        assert (why is None) == (error is None), (value, error)
        assert why is None or str(why) in error, value


def damage_message(choice: random.Random) -> bytes:
    text = choice.choice(SAMPLES)
    if choice.random() < 0.2:
        other = choice.choice(SAMPLES)
        text = text[: choice.randrange(len(text) + 1)] + other[choice.randrange(len(other) + 1) :]
    for _ in range(choice.randrange(1, 4)):
        at = choice.randrange(len(text) + 1)
        # Mostly near the start, where the header is.
        at = at if choice.random() < 0.4 else min(at, choice.randrange(40))
        letter = choice.choice(["", choice.choice(LETTERS)])
        text = text[:at] + letter + text[at + choice.randrange(2) :]
    return text.encode()


def test_picked_messages_agree_with_a_plain_parser() -> None:
    check(PICKED)
    check([])


@pytest.mark.parametrize("seed", range(8))
def test_damaged_messages_agree_with_a_plain_parser(seed: int) -> None:
    choice = random.Random(seed)
    check([damage_message(choice) for _ in range(1500)])


@pytest.mark.parametrize("value", PICKED)
def test_message_alone_in_its_block_gives_the_same_result(value: bytes | None) -> None:
    check([value])


def test_slice_of_a_block_gives_the_same_result() -> None:
    whole: Any = pa.array(PICKED, pa.binary())
    count = len(whole)
    severities = pa.nulls(count, pa.int8())
    arrivals = pa.array([ARRIVAL] * count, pa.timestamp("us", tz="UTC"))
    expected = pa.table(parse_syslog(whole, severities, arrivals)).slice(7, 40)
    parts: list[Any] = [each.slice(7, 40) for each in (whole, severities, arrivals)]
    assert pa.table(parse_syslog(*parts)).equals(expected)


def test_message_that_is_no_utf_8_changes_none_of_the_others() -> None:
    values = [None, b"<13>a: \xe9", "<13>a: é".encode(), b"<13>a: plain", b"\xff", b""]
    for seed in range(5):
        random.Random(seed).shuffle(values)
        check(values)


def test_line_may_end_after_nil_structured_data() -> None:
    check([b"<13>1 - h a p m -\n", b"<13>1 - h a p m -\nx", b"<13>1 - h a p m -x"])
    (row,) = parse([b"<13>1 - h a p m -\n"])
    assert (row["structured_data"], row["message"], row["parse_error"]) == (None, "", None)


def test_unusual_structured_data_stands_beside_plain_data() -> None:
    data = [
        '[a b="c"]', '[a b="c" d="e"][f g="h"]', "[a]", '[a b="1" b="2"]', '[a b="\\"x\\]"]',
        '[[a b="c"]', '[a b="] "] x', '[a b="[c]" d=" "]', '[a b=""]', '[a  b="c" ]', '[a b="c"]x',
        '[a b="c"][]', '[a b="ü"]', '[a b="c"] "quotes" [and] brackets', "-",
    ]  # fmt: skip
    values = [f"<13>1 - h a p m {each} text".encode() for each in data]
    for seed in range(5):
        random.Random(seed).shuffle(values)
        check(values)
    rows = parse([b'<13>1 - h a p m [x@1 k="v" l="w"][y m="n"] text'])
    assert rows[0]["structured_data"] == {"x@1.k": "v", "x@1.l": "w", "y.m": "n"}


def test_severity_comes_from_the_message_or_else_from_the_event() -> None:
    values = [b"<0>a: b", b"Oct 11 22:14:15 h a: b", b"nothing", b"<999>x"]
    assert [row["severity"] for row in parse(values, severity=5)] == [0, 5, 5, 5]


def test_time_without_a_zone_uses_the_configured_zone() -> None:
    values = [
        b"<1>Jan  1 00:30:00 h a: b", b"<1>2025-07-01T12:00:00 h a: b",
        b"<1>1 2025-07-01T12:00:00 h a - - -",
        b"<1>2025-07-01T12:00:00Z h a: b", b"<1>2025-07-01T12:00:00+0200 h a: b",
        b"<1>7: Jan  1 00:30:00 UTC: %A-1-B: c",
    ]  # fmt: skip
    check(values, zone="Europe/Berlin")


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ("2025-03-30T02:30:00", "2025-03-30T01:30:00"),  # does not exist: an hour later
        ("2025-10-26T02:30:00", "2025-10-26T00:30:00"),  # exists twice: the first one
        ("2025-10-26T03:30:00", "2025-10-26T02:30:00"),
    ],
)
def test_time_at_a_change_of_clocks_is_the_one_that_java_chooses(local: str, expected: str) -> None:
    (row,) = parse([f"<1>1 {local} h a - - -".encode()], zone="Europe/Berlin")
    assert row["time"] == datetime.fromisoformat(expected).replace(tzinfo=UTC)
    assert row["parse_error"] is None


def test_long_messages_are_parsed() -> None:
    many = " ".join(f'p{at}="\\"\\""' for at in range(2000))
    check(
        [
            f"<1>1 - h a p m [x {many}] m".encode(),
            ('<1>1 - h a p m [x a="' + "\\]" * 200_000 + '"] m').encode(),
            ('<1>1 - h a p m [x a="' + "\\]" * 200_000).encode(),
            ("<1>1 - h a p m " + "[x]" * 3000 + " m").encode(),
            b"<1>" + b"9" * 1_000_000,
            b"<1>Oct 11 22:14:15 " + b"x" * 1_000_000,
            b"<1>Oct 11 22:14:15 h " + b"x: " * 300_000,
        ]
    )


@pytest.mark.parametrize("name", COLUMNS)
def test_column_alone_is_the_same_as_with_the_others(name: str) -> None:
    odd = [b"<1\xff>", b"<1\xc3>x", b"<13\xc3\xa9>", b"<", b"<>", b"", b"<1 >", b"<+1>", b"<0001>"]
    values = [*odd, *PICKED]
    alone, whole = parse(values, 5, wanted=[name]), parse(values, 5)
    assert alone == [{name: row[name]} for row in whole]


def test_priority_of_the_node_gives_the_same_result_as_the_message() -> None:
    """The column replaces the message: a lane that filters by severity reads nothing else."""
    odd = [b"<1\xff>", b"<13\xc3\xa9>", b"<", b"<>", b"", b"<1 >", b"<+1>", b"<0001>", b"<7"]
    values: Any = pa.array([*odd, *PICKED], pa.binary())
    severities = pa.array([5] * len(values), pa.int8())
    parser = BlockParser(ParseSettings(format=Format.SYSLOG), {"severity", "facility", "value"})
    assert parser.source_columns == {"severity", PRIORITY}
    by_priority = parser.parse(
        pa.record_batch([parse_priorities(values), severities], names=[PRIORITY, "severity"])
    )
    whole = parse([*odd, *PICKED], 5)
    for name in ("severity", "facility"):
        assert by_priority[name].to_pylist() == [row[name] for row in whole]
