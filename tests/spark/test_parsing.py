"""The parse stage on real Spark: columns are correct, and no event is lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.unit.syslog_samples import NO_UTF_8, SAMPLES
from tests.unit.test_otlp_columns import check as check_telemetry
from tests.unit.test_otlp_columns import events as telemetry
from tests.unit.test_syslog_columns import parse as parse_block
from turnlane.errors import ConfigError
from turnlane.formats.otlp import Signal
from turnlane.formats.parse_settings import Format, ParseSettings
from turnlane.spark.parsing import parse_events

SCHEMA = (
    "key string, value binary, headers map<string,string>, timestamp timestamp, "
    "severity tinyint, source string"
)
ARRIVAL = datetime(2026, 1, 5, 12, 0, tzinfo=UTC)
SYSLOG = ParseSettings(format=Format.SYSLOG)


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


def test_syslog_in_a_table_gets_the_columns_of_blocks(spark: SparkSession) -> None:
    values = [None, *(text.encode() for text in SAMPLES), *NO_UTF_8]
    found = parse_events(events(spark, values, severity=5), SYSLOG)
    assert dict(found.dtypes)["severity"] == "tinyint"
    rows = collect_rows(found)
    assert [row["value"] for row in rows] == values
    for row, expected in zip(rows, parse_block(values, severity=5), strict=True):
        if row["time"] is not None:
            row["time"] = row["time"].astimezone(UTC)
        assert {name: row[name] for name in expected} == expected


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
