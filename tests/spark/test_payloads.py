"""Is everything of an event in its payload, also bytes that are no text?"""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from turnlane.spark.routing import add_payload

NO_TEXT = [b"\xff\xfe\x00abc", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf", b"\xff" * 100]


def events(spark: SparkSession, *values: bytes | None) -> DataFrame:
    rows = [(None if value is None else bytearray(value), "k") for value in values]
    return spark.createDataFrame(rows, "value binary, key string")


def payloads(rows: DataFrame) -> list[dict[str, Any]]:
    return [json.loads(row.payload) for row in add_payload(rows, "json").collect()]


@pytest.mark.parametrize("value", [b"", b"plain", "Zoë €\x00🙂".encode(), b'{"a": "\\"\n"}'])
def test_utf8_bytes_are_text_in_json(spark: SparkSession, value: bytes) -> None:
    assert payloads(events(spark, value)) == [{"value": value.decode(), "key": "k"}]


@pytest.mark.parametrize("value", NO_TEXT, ids=lambda value: value[:6].hex())
def test_other_bytes_are_base64_under_another_name(spark: SparkSession, value: bytes) -> None:
    encoded = base64.b64encode(value).decode()
    assert payloads(events(spark, value)) == [{"value_base64": encoded, "key": "k"}]


def test_null_value_is_left_out(spark: SparkSession) -> None:
    assert payloads(events(spark, None)) == [{"key": "k"}]


def test_binary_column_of_a_transform_is_text_or_base64(
    spark: SparkSession,
) -> None:
    rows = events(spark, b"text").withColumn("a.b", F.unhex(F.lit("fffe")))
    rows = rows.withColumn("within", F.array("`a.b`", "value"))
    found = {"value": "text", "key": "k", "a.b_base64": "//4=", "within": ["//4=", "dGV4dA=="]}
    assert payloads(rows) == [found]


def test_existing_base64_column_keeps_its_name(spark: SparkSession) -> None:
    rows = events(spark, b"\xff", b"text").withColumn("value_base64", F.lit("mine"))
    assert payloads(rows) == [
        {"value_base64_": "/w==", "key": "k", "value_base64": "mine"},
        {"value": "text", "key": "k", "value_base64": "mine"},
    ]


def test_raw_payload_is_the_value(spark: SparkSession) -> None:
    rows = add_payload(events(spark, *NO_TEXT), "raw").collect()
    assert [bytes(row.payload) for row in rows] == NO_TEXT


def test_payloads_need_no_python(spark: SparkSession) -> None:
    made = add_payload(spark.range(1).selectExpr("CAST(id AS string)::binary AS value"), "json")
    plan = made._jdf.queryExecution().executedPlan().toString()
    assert "Python" not in plan
    assert "*(1) Project" in plan
