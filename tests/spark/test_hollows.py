"""Do null lists and maps arrive as nulls, although they travel as something else?"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from turnlane.delivery.settings import NULL_BITS
from turnlane.spark.row_codec import decode_nulls, encode_nulls

SCHEMA = "value string, headers map<string,string>, tags array<string>, at int"
ROWS = [
    ("a", {"k": "v"}, ["x", None], 1),
    ("b", None, None, None),
    ("c", {}, [], 3),
    ("d", None, ["y"], 4),
]


def blocks(spark: SparkSession, rows: Sequence[tuple[object, ...]]) -> tuple[pa.Table, pa.Table]:
    frame = spark.createDataFrame(rows, SCHEMA)
    return frame.toArrow(), encode_nulls(frame).toArrow()


def test_nulls_are_encoded_as_empty_values_and_decoded(spark: SparkSession) -> None:
    before, travelling = blocks(spark, ROWS)

    assert travelling.column("headers").null_count == travelling.column("tags").null_count == 0
    (arrived,) = travelling.combine_chunks().to_batches()
    assert decode_nulls(arrived).to_pylist() == before.to_pylist()
    assert decode_nulls(arrived).schema.names == before.schema.names


def test_column_of_nulls_is_decoded(spark: SparkSession) -> None:
    _, travelling = blocks(spark, [(each, None, None, None) for each in "abc"])

    (arrived,) = travelling.combine_chunks().to_batches()
    assert pc.all(decode_nulls(arrived).column("headers").is_null()).as_py()
    assert decode_nulls(arrived).column("headers").type == travelling.schema.field("headers").type


def test_rows_without_lists_and_maps_are_not_changed(spark: SparkSession) -> None:
    frame = spark.createDataFrame([("a",)], "value string")

    assert encode_nulls(frame) is frame
    (rows,) = frame.toArrow().to_batches()
    assert NULL_BITS not in rows.schema.names
    assert decode_nulls(rows) is rows
