"""Is a streaming write exactly once for its checkpoint, and new for another?"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from tests.spark.nodes import Served, numbers, serving
from tests.spark.streams import into, stream
from turnlane.spark.options import find_writer_id


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with serving(
        tmp_path / "data", {name: {"durability": "always"} for name in ("main", "all")}
    ) as served:
        yield served


def test_new_checkpoint_at_the_same_path_writes_again(
    spark: SparkSession, node: Served, tmp_path: Path
) -> None:
    node.publish("main", numbers(0, 10))
    into(node, stream(spark, node, consume="false"), tmp_path / "c").awaitTermination()
    shutil.rmtree(tmp_path / "c")
    node.publish("main", numbers(10, 20))
    rest = stream(spark, node, consume="false", startingOffsets='{"0": 10}')
    into(node, rest, tmp_path / "c").awaitTermination()
    assert sorted(node.values("all")) == sorted(numbers(0, 20))


def test_writer_that_is_ahead_fails(spark: SparkSession, node: Served, tmp_path: Path) -> None:
    node.publish("main", numbers(0, 10))
    frame = stream(spark, node, consume="false", maxOffsetsPerTrigger="5")
    into(node, frame, tmp_path / "c", writerId="w").awaitTermination()
    with pytest.raises(Exception, match=r"'w' has written batch 1 .*batch 0"):
        into(node, frame, tmp_path / "other", writerId="w").awaitTermination()
    assert sorted(node.values("all")) == sorted(numbers(0, 10))


def test_overwrite_is_refused(spark: SparkSession, node: Served) -> None:
    rows = spark.range(3).selectExpr("cast(id as string) as value")
    with pytest.raises(AnalysisException, match='only "append" is supported'):
        rows.write.format("turnlane").option("endpoint", node.url).mode("overwrite").save("all")
    assert node.values("all") == []


def test_writer_id_is_the_query_of_the_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / "a b"
    assert find_writer_id("w", str(place)) == "w"
    assert find_writer_id(None, None) is None
    assert find_writer_id(None, "hdfs://there/c") == "hdfs://there/c"
    assert find_writer_id(None, str(place)) == str(place), "Spark may keep it elsewhere"
    place.mkdir()
    (place / "metadata").write_text('{"id": "q1"}')
    assert find_writer_id(None, str(place)) == f"{place}#q1"
    assert find_writer_id(None, f"file://{place}") == f"{place}#q1", "which is the same place"
