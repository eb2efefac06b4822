"""``format("turnlane")`` in a user's job: reads and writes each event once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.contract.harness import wait_until
from tests.spark.nodes import Served, numbers, serving
from tests.spark.streams import both, into, positions, read, stream

PATIENCE = 120.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    queues = {name: {"durability": "always"} for name in ("main", "odd", "all")}
    with serving(tmp_path / "data", queues) as served:
        yield served


def all_rows(frame: DataFrame, checkpoint: Path) -> list[bytes]:
    """Run a stream; returns all events that streams with this checkpoint have read."""
    place = checkpoint.with_suffix(".rows")
    query = (
        frame.writeStream.format("parquet")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start(str(place))
    )
    query.awaitTermination()
    rows = frame.sparkSession.read.schema("value binary").parquet(str(place)).collect()
    return [bytes(row.value) for row in rows]


class TestBatch:
    def test_batch_reads_the_queue_as_it_is(self, spark: SparkSession, node: Served) -> None:
        node.publish(
            "main",
            [b"one", b"two"],
            keys=["k", None],
            headers=[{"a": "b"}, None],
            severities=[3, None],
            sources=["here", None],
            timestamps=[1_700_000_000_000_000, 0],
        )
        one, two = read(spark, node, includeHeaders="true").orderBy("offset").collect()
        assert (bytes(one.value), one.key, one.headers, one.severity) == (
            b"one",
            "k",
            {"a": "b"},
            3,
        )
        assert (one.source, one.queue, one.partition, one.offset) == ("here", "main", 0, 0)
        assert one.timestamp.timestamp() == 1_700_000_000
        assert (bytes(two.value), two.key, two.headers, two.offset) == (b"two", None, None, 1)
        assert "headers" not in read(spark, node).columns

    def test_source_parses_values_if_told_the_format(
        self, spark: SparkSession, node: Served
    ) -> None:
        node.publish("main", [b"<13>1 2026-01-31T12:00:00Z h app - - - hello", b"no syslog"])
        parsed = read(spark, node, parse="syslog").orderBy("offset")
        one, two = parsed.select("severity", "facility", "app_name", "message", "value").collect()
        assert (one.severity, one.facility, one.app_name, one.message) == (5, 1, "app", "hello")
        assert (two.severity, two.app_name, bytes(two.value)) == (None, None, b"no syslog")
        assert parsed.where("parse_error IS NOT NULL").count() == 1
        settings = '{"format": "syslog", "time_zone": "Europe/Berlin"}'
        assert read(spark, node, parse=settings).columns == parsed.columns

    def test_format_that_the_source_cannot_parse_is_refused(
        self, spark: SparkSession, node: Served
    ) -> None:
        with pytest.raises(AnalysisException, match="the source parses otlp and syslog, not json"):
            read(spark, node, parse="json").collect()

    def test_ranges_and_filters_limit_the_rows(self, spark: SparkSession, node: Served) -> None:
        node.publish("main", numbers(0, 100), timestamps=[1_000_000 * n for n in range(100)])
        some = read(spark, node, startingOffsets='{"0": 10}', endingOffsets='{"0": 30}')
        assert some.count() == 20
        assert read(spark, node, startingTimestamp="90000").count() == 10
        assert read(spark, node, minPartitions="4").rdd.getNumPartitions() == 4
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
        try:
            pushed = read(spark, node, pushFilters="true").where("offset >= 95 AND offset < 97")
            assert [row.offset for row in pushed.collect()] == [95, 96]
            two = read(spark, node, pushFilters="true", minPartitions="4").where("offset IN (7, 8)")
            assert two.rdd.getNumPartitions() == 2, "at most one for each event"
            assert [row.offset for row in two.collect()] == [7, 8]
        finally:
            spark.conf.unset("spark.sql.python.filterPushdown.enabled")

    def test_batch_settles_nothing(self, spark: SparkSession, node: Served) -> None:
        node.publish("main", numbers(0, 10))
        assert read(spark, node).count() == read(spark, node).count() == 10
        assert node.queue("main").low == 0

    def test_batch_is_written_completely_or_not_at_all(
        self, spark: SparkSession, node: Served
    ) -> None:
        rows = spark.range(100).selectExpr("cast(id as string) as value", "'k' as key")
        rows.write.format("turnlane").options(endpoint=node.url).mode("append").save("all")
        assert sorted(node.values("all")) == sorted(numbers(0, 100))
        failing = rows.selectExpr("if(value = '99', raise_error('no'), value) as value")
        with pytest.raises(Exception, match="no"):
            failing.write.format("turnlane").options(endpoint=node.url).mode("append").save("odd")
        assert node.values("odd") == []

    def test_column_queue_routes_rows(self, spark: SparkSession, node: Served) -> None:
        rows = spark.range(10).selectExpr(
            "cast(id as string) as value", "if(id % 2 = 1, array('odd', 'all'), array('all')) queue"
        )
        rows.write.format("turnlane").option("endpoint", node.url).mode("append").save()
        assert sorted(node.values("odd")) == [b"1", b"3", b"5", b"7", b"9"]
        assert sorted(node.values("all")) == numbers(0, 10)

    @pytest.mark.parametrize(
        "queue",
        [
            "if(id > 1, null, 'all')",
            "if(id > 1, null, array('odd', 'all'))",
            "if(id > 1, array(), array('all'))",
            "if(id > 1, array(cast(null as string)), array('all', null))",
        ],
    )
    def test_row_without_a_queue_fails_the_batch(
        self, queue: str, spark: SparkSession, node: Served
    ) -> None:
        rows = spark.range(0, 10, 1, 1).selectExpr("cast(id as string) value", f"{queue} queue")
        writer = rows.write.format("turnlane").option("endpoint", node.url).mode("append")
        with pytest.raises(Exception, match=r"8 of 10 rows name no queue .* leave them out"):
            writer.save()
        assert node.values("all") == node.values("odd") == []
        writer.option("steps", "[]").save()  # Lanes drop events without a route.
        assert sorted(node.values("all")) == numbers(0, 2)

    def test_extra_columns_are_kept(self, spark: SparkSession, node: Served) -> None:
        rows = spark.range(3).selectExpr("cast(id as string) as value", "id * 2 as twice")
        rows.write.format("turnlane").option("endpoint", node.url).mode("append").save("all")
        given = spark.read.schema("value binary, twice bigint, missing string").format("turnlane")
        found = given.option("endpoint", node.url).load("all").collect()
        assert sorted((row.twice, row.missing) for row in found) == [
            (0, None),
            (2, None),
            (4, None),
        ]


class TestWrongOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"queue": "main"}, "endpoint: is required"),
            ({"endpoint": "{url}"}, "queue: is required"),
            ({"endpoint": "http://x", "queue": "main"}, "turnlane://host:port"),
            ({"endpoint": "{url}", "queue": "main", "maxOffsets": "1"}, "did you mean"),
            ({"endpoint": "{url}", "queue": "main", "startingOffsets": "now"}, "startingOffsets"),
            ({"endpoint": "{url}", "queue": "nope"}, "there is no queue 'nope'"),
        ],
    )
    def test_invalid_option_fails_with_its_name(
        self, options: dict[str, str], message: str, spark: SparkSession, node: Served
    ) -> None:
        given = {name: value.format(url=node.url) for name, value in options.items()}
        with pytest.raises(Exception, match=message):
            spark.read.format("turnlane").options(**given).load().count()

    def test_invalid_columns_are_refused(self, spark: SparkSession, node: Served) -> None:
        writer = spark.range(1).write.format("turnlane").option("endpoint", node.url)
        with pytest.raises(AnalysisException, match="no column `value`"):
            writer.mode("append").save("all")


class TestStream:
    def test_available_now_reads_existing_events(
        self, spark: SparkSession, node: Served, tmp_path: Path
    ) -> None:
        node.publish("main", numbers(0, 1000))
        frame = stream(spark, node, maxOffsetsPerTrigger="300")
        assert sorted(all_rows(frame, tmp_path / "c")) == sorted(numbers(0, 1000))

    def test_stream_continues_at_its_checkpoint(
        self, spark: SparkSession, node: Served, tmp_path: Path
    ) -> None:
        node.publish("main", numbers(0, 10))
        assert len(all_rows(stream(spark, node), tmp_path / "c")) == 10
        assert node.queue("main").low == 10, "committed events are settled"
        node.publish("main", numbers(10, 15))
        assert sorted(all_rows(stream(spark, node), tmp_path / "c")) == sorted(numbers(0, 15))
        assert node.queue("main").low == 15

    def test_latest_starts_at_the_end(
        self, spark: SparkSession, node: Served, tmp_path: Path
    ) -> None:
        node.publish("main", numbers(0, 10))
        frame = stream(spark, node, startingOffsets="latest")
        assert all_rows(frame, tmp_path / "c") == []

    def test_stream_writes_exactly_once_across_restarts(
        self, spark: SparkSession, node: Served, tmp_path: Path
    ) -> None:
        """Spark loses the commit of the last batch and repeats it; the node does not."""
        node.publish("main", numbers(0, 100))
        for _ in range(2):
            query = into(node, stream(spark, node, consume="false"), tmp_path / "c")
            query.awaitTermination()
            for file in (tmp_path / "c" / "commits").iterdir():
                file.unlink()
        assert sorted(node.values("all")) == sorted(numbers(0, 100))

    def test_progress_has_the_lag(self, spark: SparkSession, node: Served, tmp_path: Path) -> None:
        node.publish("main", numbers(0, 100))
        frame = stream(spark, node, maxOffsetsPerTrigger="40")
        query = into(node, frame, tmp_path / "c")
        query.awaitTermination()
        first = query.recentProgress[0].sources[0]
        assert positions(json.loads(first.endOffset)) == {"0": 40}
        assert json.loads(first.latestOffset) == {"0": 100}

    def test_lost_events_fail_the_query(
        self, spark: SparkSession, node: Served, tmp_path: Path
    ) -> None:
        node.publish("main", numbers(0, 10))
        all_rows(stream(spark, node), tmp_path / "c")
        with serving(tmp_path / "other", {"main": {}}) as other:
            other.publish("main", numbers(0, 3))
            with pytest.raises(StreamingQueryException, match="failOnDataLoss"):
                all_rows(stream(spark, other), tmp_path / "c")


class TestLanes:
    def test_commit_publishes_and_moves_the_cursor(
        self, spark: SparkSession, node: Served, tmp_path: Path
    ) -> None:
        node.publish("main", numbers(0, 1000))
        query = _lane(spark, node, "run-1", tmp_path / "c")
        wait_until(lambda: node.queue("main").low == 1000, "the lane to catch up", PATIENCE)
        query.stop()
        assert sorted(node.values("odd")) == sorted(numbers(0, 1000)[1::2])
        assert sorted(node.values("all")) == sorted(numbers(0, 1000))

    def test_superseded_run_cannot_commit(
        self, spark: SparkSession, node: Served, tmp_path: Path
    ) -> None:
        node.publish("main", numbers(0, 10))
        old = _lane(spark, node, "run-1", tmp_path / "c1")
        wait_until(lambda: node.queue("main").low == 10, "the first run", PATIENCE)
        new = _lane(spark, node, "run-2", tmp_path / "c2")
        end = 10
        while old.isActive and new.isActive:
            assert end < 300, "both continue"
            node.publish("main", numbers(end, end + 10))
            end += 10
            wait_until(lambda e=end: node.queue("main").low == e, "either", PATIENCE)  # type: ignore[misc]
        assert new.isActive, "the later offset stays"
        new.stop()
        assert "was restarted" in str(old.exception())
        assert sorted(node.values("all")) == sorted(numbers(0, end)), "and no event twice"


def _lane(spark: SparkSession, node: Served, run: str, checkpoint: Path) -> StreamingQuery:
    source = stream(spark, node, lane="main", run=run, includeHeaders="true")
    routes = "if(cast(cast(value as string) as int) % 2 = 1, array('odd', 'all'), array('all'))"
    rows = source.selectExpr("* except (queue)", f"{routes} as queue")
    options = {"endpoint": node.url, "lane": "main", "run": run}
    return (
        rows.writeStream.format("turnlane")
        .options(checkpointLocation=str(checkpoint), **options)
        .start()
    )


def test_each_node_is_a_partition(spark: SparkSession, node: Served, tmp_path: Path) -> None:
    with serving(tmp_path / "second", {"main": {}, "all": {}}) as second:
        node.publish("main", numbers(0, 5))
        second.publish("main", numbers(5, 12))
        frame = read(spark, node, endpoint=both(node, second))
        assert sorted((row.partition, bytes(row.value)) for row in frame.collect()) == [
            *((0, value) for value in numbers(0, 5)),
            *sorted((1, value) for value in numbers(5, 12)),
        ]
