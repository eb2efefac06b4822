"""Routes: does each event go where filters and discards say, however many there are?"""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from turnlane.delivery.settings import DIRECT, ROUTES
from turnlane.intervals import MAX_COPY_TARGETS
from turnlane.outputs.api import OutputSettings
from turnlane.outputs.file import FileOutputSettings
from turnlane.pipeline.settings import ActionSettings
from turnlane.queues.settings import QueueSettings
from turnlane.spark.routing import add_route_bits, add_routes
from turnlane.spark.row_codec import QUEUE_COLUMN, encode_nulls

DISCARDS = 30
EVENTS = 1000
HALF = "rand() < 0.5"


def taking(name: str, condition: str | None = None, *, queued: bool = False) -> ActionSettings:
    queue = QueueSettings.of(kind="disk", name=name, path=Path(name)) if queued else None
    output = FileOutputSettings(type="file", path=Path("o"))
    return ActionSettings(name=name, filter=condition, queue=queue, output=output)


def discard(name: str, condition: str) -> ActionSettings:
    return ActionSettings(name=name, filter=condition, output=OutputSettings(type="discard"))


def routes(spark: SparkSession, discards: int) -> DataFrame:
    """Numbers, of which each discard takes one out; what is left is taken."""
    actions = [discard(f"d{at}", f"id = {at}") for at in range(discards)]
    return add_routes(spark.range(discards + 2), [*actions, taking("taken")])


def plan_size(rows: DataFrame) -> int:
    return len(str(rows._jdf.queryExecution().analyzed()))


def test_plan_grows_linearly_with_discards(spark: SparkSession) -> None:
    few, more, most = (plan_size(routes(spark, count)) for count in (5, 10, 15))
    assert most - more < 2 * (more - few)


def test_events_left_by_many_discards_are_routed(spark: SparkSession) -> None:
    rows = routes(spark, DISCARDS).select("id", DIRECT).collect()
    assert {(row[0], *row[1]) for row in rows} == {(DISCARDS, "taken"), (DISCARDS + 1, "taken")}


def test_each_queue_has_a_bit(spark: SparkSession) -> None:
    actions = [taking(f"a{at}", f"id >= {at}", queued=True) for at in range(MAX_COPY_TARGETS)]
    rows = add_route_bits(spark.range(-1, MAX_COPY_TARGETS), actions).select("id", ROUTES).collect()
    assert {row[0]: row[1] for row in rows} == {
        at: (1 << (at + 1)) - 1 for at in range(MAX_COPY_TARGETS)
    }


def test_event_of_a_random_discard_is_not_routed(spark: SparkSession) -> None:
    """And no action before it misses: these are not asked."""
    before, after = taking("first", queued=True), [taking("a"), taking("b", queued=True)]
    rows = add_routes(spark.range(EVENTS), [before, discard("d", HALF), *after, taking("c")])
    assert rows.columns == ["id", QUEUE_COLUMN, DIRECT]
    found = [(*row[QUEUE_COLUMN], *row[DIRECT]) for row in rows.collect()]
    assert set(found) == {("first",), ("first", "b", "a", "c")}
    assert len(found) == EVENTS


def test_event_of_a_random_discard_has_no_bit(spark: SparkSession) -> None:
    after = [taking(name, queued=True) for name in "abc"]
    rows = add_route_bits(spark.range(EVENTS), [discard("d", HALF), *after])
    assert rows.columns == ["id", ROUTES]
    numbers = [row[ROUTES] for row in rows.collect()]
    assert set(numbers) == {0b111}
    assert 0 < len(numbers) < EVENTS


def test_random_discards_are_independent(spark: SparkSession) -> None:
    """A half of a half is left, and nothing that a discard takes for sure."""
    sure = discard("sure", "id % 2 = 0")
    actions = [discard("one", HALF), sure, discard("two", HALF), taking("a"), taking("b")]
    rows = add_routes(spark.range(EVENTS), actions).collect()
    assert {tuple(row[DIRECT]) for row in rows} == {("a", "b")}
    assert all(row.id % 2 for row in rows)
    assert EVENTS / 16 < len(rows) < EVENTS / 4


def test_random_discard_is_decided_once_per_event(spark: SparkSession) -> None:
    """However often its route is looked at afterwards."""
    actions = [taking("a", HALF), taking("b", HALF, queued=True)]
    rows = encode_nulls(add_routes(spark.range(EVENTS), actions))
    looked = rows.select(
        QUEUE_COLUMN, DIRECT, (F.size(QUEUE_COLUMN) + F.size(DIRECT)).alias("count")
    ).collect()
    assert all(row["count"] == len(row[QUEUE_COLUMN]) + len(row[DIRECT]) > 0 for row in looked)
    assert 0 < len(looked) < EVENTS


def test_deterministic_discard_adds_no_column(spark: SparkSession) -> None:
    """Even if chance has made the events: the plan is that of the conditions alone."""
    events = spark.range(EVENTS).withColumn("drawn", F.rand())
    rows = add_routes(events, [discard("d", "drawn < 0.5"), taking("a"), taking("b")])
    assert "discarded" not in str(rows._jdf.queryExecution().analyzed())
    assert {tuple(row[DIRECT]) for row in rows.collect()} == {("a", "b")}
