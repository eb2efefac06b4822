"""Are the offsets, limits and partitions that options ask for those that are read?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from tests.spark.nodes import Served, damage, numbers, serving
from tests.spark.streams import both, positions, read, reader
from turnlane.spark.nodes import Nodes
from turnlane.spark.options import ReadOptions

QUEUES = {"main": {"durability": "always"}}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "data", QUEUES) as served:
        yield served


def limited(url: str, **options: str) -> int:
    """How many events the first batch of a query has."""
    query = reader(url, **options)
    start = query.initialOffset()
    end = query.latestOffset(start, query.getDefaultReadLimit())
    return sum(positions(end).values()) - sum(positions(start).values())


@pytest.mark.parametrize("options", [{}, {"pushFilters": "true"}])
def test_batch_without_events_has_no_rows(
    spark: SparkSession, node: Served, options: dict[str, str]
) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        assert read(spark, node, **options).where("offset >= 5").count() == 0
        node.publish("main", numbers(0, 10))
        assert read(spark, node, **options, startingOffsets="latest").collect() == []
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_offsets_by_node_may_be_earliest_and_latest(spark: SparkSession, node: Served) -> None:
    node.publish("main", numbers(0, 10))
    node.queue("main").settle(0, 2)
    assert read(spark, node, startingOffsets='{"0": -2}').count() == 8
    assert read(spark, node, startingOffsets='{"0": -1}').count() == 0
    ends = {"startingOffsets": '{"0": 4}', "endingOffsets": '{"0": -1}'}
    assert read(spark, node, **ends).count() == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffsets": '{"0": 11}'}, "startingOffsets: on node 0 the queue ends at .* 10"),
        ({"endingOffsets": '{"0": 42}'}, "endingOffsets: on node 0 the queue ends at offset 10"),
        ({"startingOffsets": '{"0": 1}'}, "offsets 1 to 1 are gone.*failOnDataLoss"),
        ({"startingOffsets": '{"1": 3}'}, r"startingOffsets: names nodes \[1\]"),
    ],
)
def test_missing_offsets_are_named_in_the_error(
    spark: SparkSession, node: Served, options: dict[str, str], message: str
) -> None:
    node.publish("main", numbers(0, 10))
    node.queue("main").settle(0, 2)
    with pytest.raises(Exception, match=message):
        read(spark, node, **options).count()


def test_time_is_found_around_unreadable_events(tmp_path: Path) -> None:
    place = tmp_path / "damaged"
    with serving(place, QUEUES) as node:
        for span in ((0, 40), (40, 60), (60, 100)):
            stamps = [1_000_000 * number for number in range(*span)]
            node.publish("main", numbers(*span), timestamps=stamps)
    damage(place, b"".join(numbers(40, 60)))
    with serving(place, QUEUES) as node:
        nodes = Nodes.from_options(ReadOptions.from_spark({"endpoint": node.url, "queue": "main"}))
        found = [
            nodes.find_offset_at(0, "main", 1000 * second) for second in (0, 10, 39, 61, 99, 100)
        ]
        assert found == [0, 10, 39, 61, 99, 100]
        # What is not there may have been of that time: it is for the reader to say that it is lost.
        assert [nodes.find_offset_at(0, "main", 1000 * second) for second in (40, 50, 60)] == [
            40
        ] * 3


def test_smaller_of_both_limits_applies(node: Served) -> None:
    node.publish("main", [b"x" * 1000] * 100)
    events = limited(node.url, maxBytesPerTrigger="10k")
    assert 1 <= events <= 10
    assert limited(node.url, maxBytesPerTrigger="10k", maxOffsetsPerTrigger="50") == events
    assert limited(node.url, maxBytesPerTrigger="10k", maxOffsetsPerTrigger="2") == 2
    everything = reader(node.url, maxBytesPerTrigger="10k").latestOffset(
        {"0": 0}, ReadAllAvailable()
    )
    assert positions(everything) == {"0": 100}


def test_node_that_is_away_does_not_affect_the_limit(node: Served, tmp_path: Path) -> None:
    with serving(tmp_path / "second", QUEUES) as second:
        url = both(node, second)
    node.publish("main", [b"x" * 1000] * 100)
    query = reader(url, maxBytesPerTrigger="10k")
    end = query.latestOffset({"0": 0, "1": 0}, query.getDefaultReadLimit())
    assert 1 <= end["0"] <= 10


def test_requested_number_of_partitions_is_reached(node: Served, tmp_path: Path) -> None:
    with serving(tmp_path / "second", QUEUES) as second:
        node.publish("main", numbers(0, 100))
        second.publish("main", numbers(0, 100))
        query = reader(both(node, second), minPartitions="5")
        assert len(query.partitions({"0": 0, "1": 0}, {"0": 100, "1": 100})) == 5
