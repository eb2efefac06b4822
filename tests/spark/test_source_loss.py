"""A streaming query reads and settles all of its events and no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable

from tests.spark.loop import SCHEMA
from tests.spark.nodes import Served, damage, numbers, serving
from tests.spark.streams import both, positions, reader, rows_of, run, stream
from turnlane.client.node_client import QueueEnds, RemoteNode, UnsettledSpans
from turnlane.errors import RetryLater
from turnlane.events import block_of
from turnlane.queues.buffered import MAX_SPANS
from turnlane.spark.batch_planning import QueryPosition
from turnlane.spark.nodes import Nodes
from turnlane.spark.options import ReadOptions
from turnlane.spark.queue_reader import DataLost, QuerySettler, QueueBatchReader, QueueStreamReader

QUEUES = {"main": {"durability": "always"}}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "data", QUEUES) as served:
        yield served


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "second", QUEUES) as served:
        yield served


Offset = dict[str, Any]


def batch(query: QueueStreamReader, start: Offset) -> tuple[Offset, int]:
    """Run the next batch; returns where it ends and how many rows it has."""
    end = query.latestOffset(start, ReadAllAvailable())
    parts = query.partitions(start, end)
    return end, sum(rows.num_rows for part in parts for rows in query.read(part))


def read_all(query: QueueStreamReader, start: Offset) -> tuple[Offset, int]:
    """Run batches until there are no more; returns the last end and the number of rows."""
    total = 0
    while (found := batch(query, start))[0] != start:
        start, rows = found
        total += rows
    return start, total


def read_values(query: QueueStreamReader, parts: Sequence[InputPartition]) -> list[bytes]:
    """Return the values that tasks read."""
    rows = [each for part in parts for each in query.read(part)]
    return [value for each in rows for value in each.column("value").to_pylist()]


class TestSettling:
    def test_unread_backlog_is_not_settled(
        self, spark: SparkSession, node: Served, tmp_path: Path
    ) -> None:
        node.publish("main", numbers(0, 100))
        frame = stream(spark, node, startingOffsets="latest")
        for end in (
            100,
            103,
            106,
        ):  # Each run settles the events that the one before has committed.
            run(frame, tmp_path / "c")
            node.publish("main", numbers(end, end + 3))
        run(frame, tmp_path / "c")
        assert node.values("main")[:100] == numbers(0, 100)
        assert node.queue("main").is_settled(100, 103)

    @pytest.mark.parametrize(
        "start",
        [
            {"startingOffsets": "latest"},
            {"startingOffsets": '{"0": 10}'},
            {"startingTimestamp": "10000"},
        ],
    )
    def test_settling_starts_where_the_query_began(
        self, node: Served, start: dict[str, str]
    ) -> None:
        node.publish("main", numbers(0, 10), timestamps=[1_000_000 * n for n in range(10)])
        query = reader(node.url, **start)
        offset = query.initialOffset()
        node.publish("main", numbers(10, 15), timestamps=[1_000_000 * n for n in range(10, 15)])
        offset, _ = read_all(query, offset)
        # As after a restart: another process, which knows only the checkpoint.
        reader(node.url, **start).commit(offset)
        assert node.queue("main").low == 0
        assert node.queue("main").find_unsettled(100).spans == [(0, 10)]

    def test_query_from_the_earliest_event_settles_all(self, node: Served) -> None:
        node.publish("main", numbers(0, 10))
        query = reader(node.url)
        offset, rows = read_all(query, query.initialOffset())
        query.commit(offset)
        assert (rows, node.queue("main").low) == (10, 10)

    def test_batch_is_settled_when_the_next_is_requested(self, node: Served) -> None:
        node.publish("main", numbers(0, 10))
        query = reader(node.url)
        offset, rows = batch(query, query.initialOffset())
        assert (rows, node.queue("main").low) == (10, 0)
        assert batch(query, offset) == (offset, 0)
        assert node.queue("main").low == 10

    def test_removed_node_is_not_settled(self, node: Served, second: Served) -> None:
        node.publish("main", numbers(0, 3))
        query = reader(both(node, second))
        offset, _ = read_all(query, query.initialOffset())
        reader(node.url).commit(offset)
        assert node.queue("main").low == 3


class TestAddedNodes:
    def test_added_node_is_read_from_its_first_event(
        self, spark: SparkSession, node: Served, second: Served, tmp_path: Path
    ) -> None:
        node.publish("main", numbers(0, 10))
        second.publish("main", numbers(0, 10))
        assert rows_of(run(stream(spark, node), tmp_path / "c")) == 10
        node.publish("main", numbers(10, 15))
        frame = stream(spark, node, endpoint=both(node, second))
        assert rows_of(run(frame, tmp_path / "c")) == 15

    @pytest.mark.parametrize("start", ["latest", '{"0": 0}'])
    def test_added_node_is_read_from_its_first_event_for_any_start(
        self, node: Served, second: Served, start: str
    ) -> None:
        query = reader(node.url, startingOffsets=start)
        offset = query.initialOffset()
        node.publish("main", numbers(0, 5))
        second.publish("main", numbers(0, 10))
        offset, rows = read_all(reader(both(node, second), startingOffsets=start), offset)
        assert (positions(offset), rows) == ({"0": 5, "1": 10}, 15)


class TestLoss:
    def test_events_settled_by_another_client_are_lost(
        self, spark: SparkSession, node: Served, tmp_path: Path
    ) -> None:
        node.publish("main", numbers(0, 10))
        run(stream(spark, node), tmp_path / "c")
        node.publish("main", numbers(10, 30))
        node.queue("main").settle(0, 20)
        with pytest.raises(Exception, match=r"10 to 19 .*failOnDataLoss"):
            run(stream(spark, node), tmp_path / "c")
        assert rows_of(run(stream(spark, node, failOnDataLoss="false"), tmp_path / "c")) == 10

    def test_loss_is_logged_once(self, node: Served, caplog: pytest.LogCaptureFixture) -> None:
        node.publish("main", numbers(0, 10))
        node.queue("main").settle(0, 5)
        knobs = {"minOffsetsPerTrigger": "100", "failOnDataLoss": "false"}
        query = reader(node.url, **knobs)
        for _ in range(3):
            query.latestOffset({"0": 2}, ReadAllAvailable())
        assert sum("2 to 4" in record.getMessage() for record in caplog.records) == 1

    def test_events_settled_between_plan_and_read_are_lost(self, node: Served) -> None:
        node.publish("main", numbers(0, 10))
        query = reader(node.url)
        start = query.initialOffset()
        (part,) = query.partitions(start, query.latestOffset(start, ReadAllAvailable()))
        node.queue("main").settle(0, 5)
        rows = query.read(part)
        assert next(rows).column("value").to_pylist() == numbers(5, 10)
        with pytest.raises(DataLost, match=r"queue 'main': on node 0 .* 0 to 4 .*failOnDataLoss"):
            next(rows)

    def test_loss_is_logged_and_other_events_are_read(
        self, node: Served, caplog: pytest.LogCaptureFixture
    ) -> None:
        node.publish("main", numbers(0, 10))
        query = reader(node.url, failOnDataLoss="false")
        start = query.initialOffset()
        parts = query.partitions(start, query.latestOffset(start, ReadAllAvailable()))
        node.queue("main").settle(0, 5)
        assert read_values(query, parts) == numbers(5, 10)
        assert sum("0 to 4 are gone" in record.getMessage() for record in caplog.records) == 1

    def test_damaged_events_are_lost(self, tmp_path: Path) -> None:
        with serving(tmp_path / "damaged", QUEUES) as node:
            for first in (0, 10, 20):
                node.publish("main", numbers(first, first + 10))
        damage(tmp_path / "damaged", b"".join(numbers(10, 20)))
        with serving(tmp_path / "damaged", QUEUES) as node:
            query = reader(node.url)
            with pytest.raises(DataLost, match="10 to 19 are gone"):
                read_all(query, query.initialOffset())
            query = reader(node.url, failOnDataLoss="false")
            assert read_all(query, query.initialOffset())[1] == 20

    def test_batch_query_fails_on_loss(self, node: Served) -> None:
        node.publish("main", numbers(0, 10))
        query = QueueBatchReader(
            ReadOptions.from_spark({"endpoint": node.url, "queue": "main"}), SCHEMA
        )
        (part,) = query.partitions()
        node.queue("main").settle(0, 5)
        with pytest.raises(DataLost, match="0 to 4 are gone"):
            list(query.read(part))

    def test_message_names_the_first_lost_spans(self, tmp_path: Path) -> None:
        values = [b"value %d." % number for number in range(16)]
        with serving(tmp_path / "damaged", QUEUES) as node:
            for value in values:
                node.publish("main", [value])
        for value in values[1::2]:
            damage(tmp_path / "damaged", value)
        with serving(tmp_path / "damaged", QUEUES) as node:
            query = reader(node.url)
            with pytest.raises(DataLost, match=r"offsets 1 to 1, .*, 9 to 9 and 3 more spans"):
                read_all(query, query.initialOffset())

    def test_repeated_plan_is_checked_for_loss(self, node: Served) -> None:
        node.publish("main", numbers(0, 10))
        node.queue("main").settle(0, 5)
        with pytest.raises(DataLost, match="2 to 4"):
            reader(node.url).partitions({"0": 2}, {"0": 10})

    def test_events_settled_by_the_query_itself_are_no_loss(self, node: Served) -> None:
        node.publish("main", numbers(0, 10))
        query = reader(node.url)
        offset, _ = read_all(query, query.initialOffset())
        query.commit(offset)
        node.publish("main", numbers(10, 12))
        offset, rows = read_all(reader(node.url), offset)
        assert (positions(offset), rows) == ({"0": 12}, 2)

    def test_recreated_queue_is_read_from_its_first_event(
        self, spark: SparkSession, node: Served, second: Served, tmp_path: Path
    ) -> None:
        node.publish("main", numbers(0, 100))
        run(stream(spark, node), tmp_path / "c")
        second.publish("main", numbers(0, 50))
        anew = stream(spark, second, failOnDataLoss="false")
        assert rows_of(run(anew, tmp_path / "c")) == 50
        second.publish("main", numbers(50, 120))
        assert rows_of(run(anew, tmp_path / "c")) == 70

    def test_recreated_queue_is_settled(self, node: Served, second: Served) -> None:
        node.publish("main", numbers(0, 100))
        query = reader(node.url, startingOffsets="latest")
        start = query.initialOffset()
        second.publish("main", numbers(0, 50))
        anew = reader(second.url, startingOffsets="latest", failOnDataLoss="false")
        offset, rows = read_all(anew, start)
        anew.commit(offset)
        assert (positions(offset), rows, second.queue("main").low) == ({"0": 50}, 50, 50)


class TestSkipSettled:
    def test_only_unsettled_events_are_read(self, node: Served) -> None:
        node.publish("main", numbers(0, 30))
        for span in ((0, 3), (5, 8), (12, 18), (29, 30)):
            node.queue("main").settle(*span)
        assert find_pending(node) == [*numbers(3, 5), *numbers(8, 12), *numbers(18, 29)]

    def test_scattered_unsettled_events_are_read(self, node: Served) -> None:
        count = 2 * MAX_SPANS + 100
        node.node.create("late", kind="memory")
        node.queue("late").producer().publish_block(block_of(numbers(0, count)))
        for offset in range(1, count, 2):
            node.queue("late").settle(offset, offset + 1)
        assert find_pending(node, "late") == numbers(0, count)[::2]

    def test_task_asks_once_for_unsettled_events(
        self, node: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node.publish("main", numbers(0, 30))
        node.queue("main").settle(5, 8)
        asked = []
        ask = RemoteNode.unsettled

        def counted(*args: Any, **more: Any) -> UnsettledSpans:
            asked.append(args)
            return ask(*args, **more)

        monkeypatch.setattr(RemoteNode, "unsettled", counted)
        assert len(find_pending(node, minPartitions="3")) == 27
        assert len(asked) == 3

    def test_repeated_batch_has_the_same_rows(self, node: Served) -> None:
        node.publish("main", numbers(0, 10))
        node.queue("main").settle(2, 4)
        query = reader(node.url, skipSettled="true")
        start = query.initialOffset()
        end = query.latestOffset(start, ReadAllAvailable())
        expected = read_values(query, query.partitions(start, end))
        again = reader(node.url, skipSettled="true")
        assert read_values(again, again.partitions(start, end)) == expected

    def test_events_settled_by_another_client_are_no_loss(
        self, node: Served, caplog: pytest.LogCaptureFixture
    ) -> None:
        node.publish("main", numbers(0, 10))
        query = reader(node.url, skipSettled="true")
        start = query.initialOffset()
        node.queue("main").settle(0, 2)
        parts = query.partitions(start, query.latestOffset(start, ReadAllAvailable()))
        node.queue("main").settle(0, 5)
        assert read_values(query, parts) == numbers(5, 10)
        node.queue("main").settle(0, 10)
        assert read_values(query, parts) == []
        assert "gone" not in caplog.text

    def test_unreadable_events_are_retried(self, node: Served) -> None:
        """Otherwise the event would be settled unread."""
        node.node.create("late", kind="memory")
        node.queue("late").producer().publish_block(block_of(numbers(0, 10)))
        node.queue("late").get(max_events=5)
        with pytest.raises(RetryLater, match="event at offset 0 cannot be read"):
            find_pending(node, "late")


def find_pending(node: Served, queue: str = "main", **options: str) -> list[bytes]:
    """Return the values that a new query reads with ``skipSettled``."""
    query = reader(node.url, queue, skipSettled="true", **options)
    start = query.initialOffset()
    end = query.latestOffset(start, ReadAllAvailable())
    return read_values(query, query.partitions(start, end))


def recreate_queue(node: Served, first: int, end: int, **knobs: str) -> None:
    """Create the queue ``late`` again, with these events."""
    if "late" in node.node.queues():
        node.node.drop("late")
    node.node.create("late", **knobs)
    node.queue("late").producer().publish_block(block_of(numbers(first, end)))


def read_to_end(node: Served, **options: str) -> Offset:
    """Return the position of a query that has read the queue ``late`` to its end."""
    query = reader(node.url, "late", **options)
    offset, _ = read_all(query, query.initialOffset())
    return offset


@pytest.fixture(params=["disk", "memory", "disk_assisted"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestRecreatedQueueWithMoreEvents:
    """A queue that was created again and is longer than the query had read."""

    def test_query_fails_in_spark(self, spark: SparkSession, node: Served, tmp_path: Path) -> None:
        recreate_queue(node, 0, 100)
        assert rows_of(run(stream(spark, node, "late"), tmp_path / "c")) == 100
        recreate_queue(node, 1000, 1150)
        with pytest.raises(Exception, match=r"created it again .*offset 100; .*failOnDataLoss"):
            run(stream(spark, node, "late"), tmp_path / "c")
        assert node.values("late") == numbers(1000, 1150), "nothing is settled"
        anew = stream(spark, node, "late", failOnDataLoss="false")
        assert rows_of(run(anew, tmp_path / "c")) == 150
        assert node.queue("late").low == 150
        recreate_queue(node, 2000, 2150)
        assert rows_of(run(anew, tmp_path / "c")) == 150, "it distinguishes the queues"

    def test_query_fails_and_settles_nothing(self, node: Served, kind: str) -> None:
        recreate_queue(node, 0, 100, kind=kind)
        offset = read_to_end(node)
        recreate_queue(node, 1000, 1150, kind=kind)
        query = reader(node.url, "late")
        with pytest.raises(DataLost, match="created it again since it was read up to offset 100"):
            query.latestOffset(offset, ReadAllAvailable())
        query.commit(offset)
        assert node.queue("late").low == 0

    @pytest.mark.parametrize("events", [50, 100, 150])
    def test_query_without_fail_on_data_loss_reads_all_events(
        self, node: Served, kind: str, events: int
    ) -> None:
        recreate_queue(node, 0, 100, kind=kind)
        offset = read_to_end(node, startingOffsets="latest")
        recreate_queue(node, 1000, 1000 + events, kind=kind)
        query = reader(node.url, "late", startingOffsets="latest", failOnDataLoss="false")
        offset, rows = read_all(query, offset)
        assert (rows, node.queue("late").low) == (events, events)

    def test_recreation_is_noticed_while_the_query_runs(self, node: Served) -> None:
        recreate_queue(node, 0, 100)
        query = reader(node.url, "late", failOnDataLoss="false")
        offset, _ = read_all(query, query.initialOffset())
        recreate_queue(node, 1000, 1100)
        offset, rows = read_all(query, offset)
        assert (positions(offset), rows, node.queue("late").low) == ({"0": 100}, 100, 100)

    def test_settled_events_of_the_new_queue_do_not_count(self, node: Served) -> None:
        recreate_queue(node, 0, 100)
        offset = read_to_end(node)
        recreate_queue(node, 1000, 1150)
        node.queue("late").settle(0, 120)
        query = reader(node.url, "late", failOnDataLoss="false")
        end, rows = batch(query, offset)
        assert (positions(end), rows) == ({"0": 120}, 0)
        assert read_all(query, end)[1] == 30

    def test_repeated_plan_has_no_events_of_the_new_queue(self, node: Served) -> None:
        recreate_queue(node, 0, 100)
        query = reader(node.url, "late", maxOffsetsPerTrigger="50")
        begun = query.initialOffset()
        start = query.latestOffset(begun, query.getDefaultReadLimit())
        end = query.latestOffset(start, query.getDefaultReadLimit())
        assert [positions(each)["0"] for each in (start, end)] == [50, 100]
        recreate_queue(node, 1000, 1150)
        with pytest.raises(DataLost, match="created it again"):
            reader(node.url, "late").partitions(start, end)
        query = reader(node.url, "late", failOnDataLoss="false")
        assert query.partitions(start, end) == []
        query.commit(end)
        assert node.queue("late").low == 0
        assert read_all(query, end)[1] == 150

    def test_other_nodes_are_read_on(self, node: Served, second: Served) -> None:
        for each in (node, second):
            recreate_queue(each, 0, 100)
        options = {"failOnDataLoss": "false"}
        query = reader(both(node, second), "late", **options)
        offset, _ = read_all(query, query.initialOffset())
        recreate_queue(node, 1000, 1150)
        second.publish("late", numbers(100, 110))
        offset, rows = read_all(reader(both(node, second), "late", **options), offset)
        assert (positions(offset), rows) == ({"0": 150, "1": 110}, 160)


class TestOldCheckpoints:
    """Checkpoints of older versions have no queue ids."""

    def test_old_checkpoint_continues_and_gets_the_queue_id(self, node: Served) -> None:
        recreate_queue(node, 0, 100)
        of_old = {"0": 40, "from": {"0": 10}}
        query = reader(node.url, "late", consume="false", startingOffsets="latest")
        offset, rows = read_all(query, of_old)
        expected = {"0": 100, "from": {"0": 10}, "queues": {"0": node.queue("late").queue_id}}
        assert (offset, rows) == (expected, 60)

    @pytest.mark.parametrize("least", ["1", "100"])
    def test_old_checkpoint_gets_the_queue_id_at_once(self, node: Served, least: str) -> None:
        recreate_queue(node, 0, 100)
        query = reader(node.url, "late", minOffsetsPerTrigger=least)
        offset, rows = read_all(query, {"0": 100})
        assert (offset["queues"], rows) == ({"0": node.queue("late").queue_id}, 0)
        recreate_queue(node, 1000, 1150)
        with pytest.raises(DataLost, match="created it again"):
            query.latestOffset(offset, ReadAllAvailable())

    def test_queue_that_ends_before_an_old_checkpoint_is_another(self, node: Served) -> None:
        recreate_queue(node, 0, 50)
        with pytest.raises(DataLost, match="ends at offset 50, before 100"):
            reader(node.url, "late").latestOffset({"0": 100}, ReadAllAvailable())


def test_lane_does_not_settle_events_of_another_queue(node: Served) -> None:
    """Lanes with a checkpoint settle by the progress that Spark reports."""
    recreate_queue(node, 0, 100)
    settling = QuerySettler(
        Nodes.from_options(ReadOptions.from_spark({"endpoint": node.url, "queue": "late"})), "late"
    )
    before = QueryPosition.from_offset(read_to_end(node, consume="false"))
    settling.settle(before)
    assert node.queue("late").low == 100
    recreate_queue(node, 1000, 1150)
    settling.settle(before.advance_to({0: 120}))
    assert node.queue("late").low == 0
    settling.settle(before.start_at({0: 0}, {0: QueueEnds(150, 0, node.queue("late").queue_id)}))
    settling.settle(QueryPosition({0: 100}, {}, {0: node.queue("late").queue_id}))
    assert node.queue("late").low == 100
