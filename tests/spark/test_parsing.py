"""The parse stage on real Spark: columns are correct, and no event is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ShortType, StructField, StructType

from tests.spark import syslog_reference as reference
from tests.spark.syslog_samples import NO_UTF_8, SAMPLES
from tests.unit.test_otlp_columns import check as check_telemetry
from tests.unit.test_otlp_columns import events as telemetry
from turnlane.delivery.settings import PRIORITY
from turnlane.errors import ConfigError
from turnlane.formats.otlp import Signal
from turnlane.formats.parse_settings import Format, ParseSettings
from turnlane.formats.syslog import parse_priorities
from turnlane.spark.parsing import parse_events

SCHEMA = (
    "key string, value binary, headers map<string,string>, timestamp timestamp, "
    "severity tinyint, source string"
)
ARRIVAL = datetime(2026, 1, 5, 12, 0, tzinfo=UTC)
SYSLOG = ParseSettings(format=Format.SYSLOG)
LETTERS = ' <>[]:="\\-\x1f0123456789abcZT\n%.ü'


def events(
    spark: SparkSession,
    values: Sequence[bytes | None],
    headers: Sequence[dict[str, str] | None] | None = None,
    severity: int | None = None,
) -> DataFrame:
    rows = [
        (None, value, headers[at] if headers else None, ARRIVAL, severity, "here")
        for at, value in enumerate(values)
    ]
    return spark.createDataFrame(rows, SCHEMA)


def collect_rows(df: DataFrame) -> list[dict[str, Any]]:
    return [row.asDict() for row in df.collect()]


def make_settings(**knobs: Any) -> ParseSettings:
    return ParseSettings.model_validate(knobs)


# ── syslog ──


def check_syslog(
    spark: SparkSession, values: Sequence[bytes | None], *, lenient: bool = False
) -> None:
    found = collect_rows(parse_events(events(spark, values), SYSLOG))
    assert len(found) == len(values)
    for value, row in zip(values, found, strict=True):
        assert row["value"] == value
        wanted = reference.parse(value, ARRIVAL)
        got = {name: row[name] for name in wanted}
        if got["time"] is not None:
            got["time"] = got["time"].astimezone(UTC)
        if lenient and wanted["parse_error"] == "time":
            # Spark accepts a few more forms of a time than RFC 5424.
            got["time"] = wanted["time"]
            got["parse_error"] = "time"
        why, error = wanted.pop("parse_error"), got.pop("parse_error")
        assert got == wanted, value
        assert (why is None) == (error is None), (value, error)
        assert why is None or str(why) in error, value


def test_syslog_agrees_with_a_plain_parser_on_picked_messages(spark: SparkSession) -> None:
    check_syslog(spark, [None, *(text.encode() for text in SAMPLES), *NO_UTF_8])


@pytest.mark.parametrize("seed", [1, 2])
def test_syslog_agrees_with_a_plain_parser_on_damaged_messages(
    spark: SparkSession, seed: int
) -> None:
    choice = random.Random(seed)
    texts = [damage_message(choice) for _ in range(1500)]
    check_syslog(spark, [text.encode() for text in texts if "0000" not in text], lenient=True)


def damage_message(choice: random.Random) -> str:
    text = choice.choice(SAMPLES)
    if choice.random() < 0.2:
        other = choice.choice(SAMPLES)
        text = text[: choice.randrange(len(text) + 1)] + other[choice.randrange(len(other) + 1) :]
    for _ in range(choice.randrange(1, 4)):
        at = choice.randrange(len(text) + 1)
        # Mostly near the start, where the header is.
        at = at if choice.random() < 0.4 else min(at, choice.randrange(40))
        text = (
            text[:at]
            + choice.choice(["", choice.choice(LETTERS)])
            + text[at + choice.randrange(2) :]
        )
    return text


def test_line_may_end_after_nil_structured_data(spark: SparkSession) -> None:
    check_syslog(spark, [b"<13>1 - h a p m -\n", b"<13>1 - h a p m -\nx", b"<13>1 - h a p m -x"])
    (row,) = collect_rows(parse_events(events(spark, [b"<13>1 - h a p m -\n"]), SYSLOG))
    assert (row["structured_data"], row["message"], row["parse_error"]) == (None, "", None)


def test_syslog_severity_comes_from_the_message(spark: SparkSession) -> None:
    values = [b"<0>a: b", b"Oct 11 22:14:15 h a: b", b"nothing", b"<999>x"]
    found = parse_events(events(spark, values, severity=5), SYSLOG)
    assert [row["severity"] for row in collect_rows(found)] == [0, 5, 5, 5]
    assert dict(found.dtypes)["severity"] == "tinyint"


def test_syslog_time_without_a_zone_uses_the_configured_zone(spark: SparkSession) -> None:
    values = [
        b"<1>Jan  1 00:30:00 h a: b", b"<1>2025-07-01T12:00:00 h a: b",
        b"<1>1 2025-07-01T12:00:00 h a - - -",
        b"<1>2025-07-01T12:00:00Z h a: b", b"<1>2025-07-01T12:00:00+0200 h a: b",
        b"<1>7: Jan  1 00:30:00 UTC: %A-1-B: c",
    ]  # fmt: skip
    berlin = make_settings(format="syslog", time_zone="Europe/Berlin")
    zone = ZoneInfo("Europe/Berlin")
    for value, row in zip(
        values, collect_rows(parse_events(events(spark, values), berlin)), strict=True
    ):
        assert row["time"].astimezone(UTC) == reference.parse(value, ARRIVAL, zone)["time"], value


def test_long_messages_do_not_exhaust_the_stack(spark: SparkSession) -> None:
    many = " ".join(f'p{at}="\\"\\""' for at in range(2000))
    values = [
        f"<1>1 - h a p m [x {many}] m".encode(),
        ('<1>1 - h a p m [x a="' + "\\]" * 200_000 + '"] m').encode(),
        ('<1>1 - h a p m [x a="' + "\\]" * 200_000).encode(),
        ("<1>1 - h a p m " + "[x]" * 3000 + " m").encode(),
        b"<1>" + b"9" * 1_000_000,
        b"<1>Oct 11 22:14:15 " + b"x" * 1_000_000,
        b"<1>Oct 11 22:14:15 h " + b"x: " * 300_000,
    ]
    check_syslog(spark, values)


def test_filter_on_severity_does_not_split_messages(spark: SparkSession) -> None:
    found = (
        parse_events(events(spark, [b"<1>a: b"]), SYSLOG).filter("severity <= 3").select("value")
    )
    plan = found._jdf.queryExecution().optimizedPlan().toString()
    assert "regexp" not in plan
    assert "split" not in plan
    assert found.count() == 1


def test_priority_columns_are_the_same_with_and_without_the_others(spark: SparkSession) -> None:
    odd = [b"<1\xff>", b"<1\xc3>x", b"<13\xc3\xa9>", b"<", b"<>", b"", b"<1 >", b"<+1>", b"<0001>"]
    values = [None, *odd, *(text.encode() for text in SAMPLES), *NO_UTF_8]
    source = events(spark, values, severity=5)
    alone = parse_events(source, SYSLOG, {"severity", "facility", "value"})
    assert set(alone.columns) == {*source.columns, "facility"}
    whole = parse_events(source, SYSLOG).select(alone.columns)
    assert collect_rows(alone) == collect_rows(whole)
    for value, row in zip(values, collect_rows(alone), strict=True):
        assert row["facility"] == reference.parse(value, ARRIVAL)["facility"], value


def test_priority_column_gives_the_same_result_as_the_message(spark: SparkSession) -> None:
    """The column replaces the message: a lane that filters by severity reads nothing else."""
    odd = [b"<1\xff>", b"<13\xc3\xa9>", b"<", b"<>", b"", b"<1 >", b"<+1>", b"<0001>", b"<7"]
    values: Any = [None, *odd, *(text.encode() for text in SAMPLES), *NO_UTF_8]
    source = events(spark, values, severity=5)
    numbers = parse_priorities(pa.array(values, pa.binary())).to_pylist()
    rows = [(*row, number) for row, number in zip(source.collect(), numbers, strict=True)]
    schema = StructType([*source.schema.fields, StructField(PRIORITY, ShortType())])
    known = spark.createDataFrame(rows, schema)
    by_column = parse_events(known, SYSLOG, {"severity", "facility"})
    by_spark = parse_events(source, SYSLOG, {"severity", "facility"})
    assert collect_rows(by_column) == collect_rows(by_spark.select(by_column.columns))


# ── regex ──


def test_regex_groups_become_columns(spark: SparkSession) -> None:
    pattern = r"^(?<ip>\S+) (?:-|(?<user_name>\w+)) \[(?<day>[^\]]+)\](?<rest>.*)"
    values = [
        b"10.0.0.1 ann [today] GET /", b"10.0.0.1 - [today]", b"no match", None, b"",
        b"10.0.0.1 ann [to\x1fday] GET\x1f/", b"\x1f\x1f\x1f\x1f\x1f", b"1 - [\xff]",
    ]  # fmt: skip
    df = parse_events(events(spark, values), make_settings(format="regex", pattern=pattern))
    names = ("ip", "user_name", "day", "rest", "parse_error")
    assert [tuple(row[name] for name in names) for row in collect_rows(df)] == [
        ("10.0.0.1", "ann", "today", " GET /", None),
        ("10.0.0.1", None, "today", None, None),
        (None, None, None, None, "the pattern does not match"),
        (None, None, None, None, "there is no value"),
        (None, None, None, None, "the pattern does not match"),
        ("10.0.0.1", "ann", "to\x1fday", " GET\x1f/", None),
        (None, None, None, None, "the pattern does not match"),
        ("1", None, "\ufffd", None, None),
    ]


def test_regex_uses_the_first_match_anywhere(spark: SparkSession) -> None:
    pattern = r"(?<number>\d+)(?<unit>ms|s)\b|(?<word>never)"
    df = parse_events(
        events(spark, [b"took 12ms not 3s\n", b"a\nnever 5"]),
        make_settings(format="regex", pattern=pattern),
    )
    found = [(row["number"], row["unit"], row["word"]) for row in collect_rows(df)]
    assert found == [("12", "ms", None), (None, None, "never")]


def test_regex_may_have_comments(spark: SparkSession) -> None:
    pattern = r"(?x) (?<number> \d+ ) # a number"
    df = parse_events(
        events(spark, [b"a 12 b", b"a"]), make_settings(format="regex", pattern=pattern)
    )
    assert [row["number"] for row in collect_rows(df)] == ["12", None]


def test_pattern_that_java_refuses_is_a_configuration_error(spark: SparkSession) -> None:
    settings = make_settings(format="regex", pattern=r"(?<a>x{2,1})")
    with pytest.raises(ConfigError, match=r"parse\.pattern: Java cannot compile"):
        parse_events(events(spark, [b"x"]), settings)


# ── json, otlp, none ──


def test_json_becomes_a_variant_with_picked_columns(spark: SparkSession) -> None:
    values = [
        b'{"http": {"status": 503}, "tags": ["a", "b"], "odd key": 1}',
        b'{"http": {"status": "x"}}', b"[1]", b"null", b"", b"{", None, b'{"a": "\xff"}',
    ]  # fmt: skip
    picked = {"status": "http.status::int", "tag": "tags[1]", "odd": "['odd key']::bigint"}
    df = parse_events(events(spark, values), make_settings(format="json", columns=picked))
    assert dict(df.dtypes)["data"] == "variant"
    rows = collect_rows(
        df.selectExpr("status", "tag", "odd", "parse_error", "to_json(data) AS data")
    )
    assert [(row["status"], row["tag"], row["odd"]) for row in rows[:3]] == [
        (503, "b", 1), (None, None, None), (None, None, None),
    ]  # fmt: skip
    bad = "this is not one JSON text, or has a key twice in one object"
    assert [row["parse_error"] for row in rows] == [
        None, None, None, None, bad, bad, "there is no value", None,
    ]  # fmt: skip
    assert json.loads(rows[7]["data"]) == {"a": "\ufffd"}
    assert df.filter("status >= 500").count() == 1


def test_text_after_the_json_is_a_parse_error(spark: SparkSession) -> None:
    good = [b'{"a":1}', b' {"a":1}\n', b'\xef\xbb\xbf{"a":1}', b"null", b"[1,2]", b'"x"', b"1"]
    bad = [b'{"a":1} trailing', b'{"a":1}\n{"a":2}', b'{"a":1},{"a":2}', b'{"a":1}}', b'{"a":1}]']
    bad += [b"1 2", b"[1],[2]", b"", b" ", b'{"a":1,"a":2}']
    df = parse_events(events(spark, [*good, *bad]), make_settings(format="json"))
    rows = collect_rows(
        df.selectExpr("to_json(data) AS data", "data IS NULL AS gone", "parse_error")
    )
    whole = ['{"a":1}'] * 3 + ["null", "[1,2]", '"x"', "1"]
    assert [row["data"] for row in rows[: len(good)]] == whole
    assert not any(row["gone"] or row["parse_error"] for row in rows[: len(good)])
    why = "this is not one JSON text, or has a key twice in one object"
    assert [(row["gone"], row["parse_error"]) for row in rows[len(good) :]] == [(True, why)] * 10


def test_otlp_record_becomes_columns(spark: SparkSession) -> None:
    values, signals = telemetry(9)
    headers: list[dict[str, str] | None] = [{"signal": signal} for signal in signals]
    df = parse_events(
        events(spark, [*values, b"\xff"], [*headers, None]), make_settings(format="otlp")
    )
    rows = collect_rows(df)
    for value, signal, row in zip(values, signals, rows[:-1], strict=True):
        row["attributes"] = list(row["attributes"].items())
        row["resource"] = list(row["resource"].items())
        row["time"] = row["time"] and row["time"].astimezone(UTC)
        row["end_time"] = row["end_time"] and row["end_time"].astimezone(UTC)
        check_telemetry(Signal(signal), value, row)
    assert "signal" in rows[-1]["parse_error"]
    assert rows[-1]["value"] == b"\xff"


def test_otlp_without_headers_names_the_missing_option(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="includeHeaders"):
        parse_events(events(spark, [b""]).drop("headers"), make_settings(format="otlp"))


def test_format_none_does_not_change_events(spark: SparkSession) -> None:
    df = events(spark, [b"x"])
    assert parse_events(df, ParseSettings()).columns == df.columns


@pytest.mark.parametrize(
    "knobs",
    [
        {"format": "syslog"},
        {"format": "json", "columns": {"a": "a"}},
        {"format": "regex", "pattern": "(?<a>.)"},
        {"format": "otlp"},
    ],
    ids=lambda knobs: knobs["format"],
)
def test_parsed_streams_keep_the_columns_of_events(
    spark: SparkSession, tmp_path: Path, knobs: dict[str, Any]
) -> None:
    events(spark, [b"<1>a: b", None, b"{}"]).write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(SCHEMA).parquet(str(tmp_path / "in"))
    df = parse_events(stream, make_settings(**knobs))
    types = dict(df.dtypes)
    assert {name: types[name] for name in stream.columns} == dict(stream.dtypes)
    assert types["parse_error"] == "string"
    assert not [name for name in df.columns if name.startswith("_")]
    name = f"parsed_{knobs['format']}"
    query = (
        df.writeStream.format("memory")
        .queryName(name)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(120)
    assert spark.table(name).count() == 3
