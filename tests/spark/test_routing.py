"""Routing: each event goes where filters and discards say, also with many of them."""

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


def make_action(name: str, condition: str | None = None, *, queued: bool = False) -> ActionSettings:
    queue = QueueSettings.of(kind="disk", name=name, path=Path(name)) if queued else None
    output = FileOutputSettings(type="file", path=Path("o"))
    return ActionSettings(name=name, filter=condition, queue=queue, output=output)


def make_discard(name: str, condition: str) -> ActionSettings:
    return ActionSettings(name=name, filter=condition, output=OutputSettings(type="discard"))


def routes(spark: SparkSession, discards: int) -> DataFrame:
    """Route numbers: each discard removes one, the last action takes the rest."""
    actions = [make_discard(f"d{at}", f"id = {at}") for at in range(discards)]
    return add_routes(spark.range(discards + 2), [*actions, make_action("taken")])


def count_plan_nodes(rows: DataFrame) -> int:
    return len(str(rows._jdf.queryExecution().analyzed()))


def test_plan_grows_linearly_with_discards(spark: SparkSession) -> None:
    few, more, most = (count_plan_nodes(routes(spark, count)) for count in (5, 10, 15))
    assert most - more < 2 * (more - few)


def test_events_left_by_many_discards_are_routed(spark: SparkSession) -> None:
    rows = routes(spark, DISCARDS).select("id", DIRECT).collect()
    assert {(row[0], *row[1]) for row in rows} == {(DISCARDS, "taken"), (DISCARDS + 1, "taken")}


def test_each_queue_has_a_bit(spark: SparkSession) -> None:
    actions = [make_action(f"a{at}", f"id >= {at}", queued=True) for at in range(MAX_COPY_TARGETS)]
    rows = add_route_bits(spark.range(-1, MAX_COPY_TARGETS), actions).select("id", ROUTES).collect()
    assert {row[0]: row[1] for row in rows} == {
        at: (1 << (at + 1)) - 1 for at in range(MAX_COPY_TARGETS)
    }


def test_event_of_a_random_discard_is_not_routed(spark: SparkSession) -> None:
    """Actions before the discard get all events."""
    before, after = (
        make_action("first", queued=True),
        [make_action("a"), make_action("b", queued=True)],
    )
    rows = add_routes(
        spark.range(EVENTS), [before, make_discard("d", HALF), *after, make_action("c")]
    )
    assert rows.columns == ["id", QUEUE_COLUMN, DIRECT]
    found = [(*row[QUEUE_COLUMN], *row[DIRECT]) for row in rows.collect()]
    assert set(found) == {("first",), ("first", "b", "a", "c")}
    assert len(found) == EVENTS


def test_event_of_a_random_discard_has_no_bit(spark: SparkSession) -> None:
    after = [make_action(name, queued=True) for name in "abc"]
    rows = add_route_bits(spark.range(EVENTS), [make_discard("d", HALF), *after])
    assert rows.columns == ["id", ROUTES]
    numbers = [row[ROUTES] for row in rows.collect()]
    assert set(numbers) == {0b111}
    assert 0 < len(numbers) < EVENTS


def test_random_discards_are_independent(spark: SparkSession) -> None:
    """Two random discards leave a quarter, and none of the events of a certain discard."""
    sure = make_discard("sure", "id % 2 = 0")
    actions = [
        make_discard("one", HALF),
        sure,
        make_discard("two", HALF),
        make_action("a"),
        make_action("b"),
    ]
    rows = add_routes(spark.range(EVENTS), actions).collect()
    assert {tuple(row[DIRECT]) for row in rows} == {("a", "b")}
    assert all(row.id % 2 for row in rows)
    assert EVENTS / 16 < len(rows) < EVENTS / 4


def test_random_discard_is_decided_once_per_event(spark: SparkSession) -> None:
    """Also if its routes are read several times."""
    actions = [make_action("a", HALF), make_action("b", HALF, queued=True)]
    rows = encode_nulls(add_routes(spark.range(EVENTS), actions))
    looked = rows.select(
        QUEUE_COLUMN, DIRECT, (F.size(QUEUE_COLUMN) + F.size(DIRECT)).alias("count")
    ).collect()
    assert all(row["count"] == len(row[QUEUE_COLUMN]) + len(row[DIRECT]) > 0 for row in looked)
    assert 0 < len(looked) < EVENTS


def test_deterministic_discard_adds_no_column(spark: SparkSession) -> None:
    """Also if the events are random: only the conditions count."""
    events = spark.range(EVENTS).withColumn("drawn", F.rand())
    rows = add_routes(
        events, [make_discard("d", "drawn < 0.5"), make_action("a"), make_action("b")]
    )
    assert "discarded" not in str(rows._jdf.queryExecution().analyzed())
    assert {tuple(row[DIRECT]) for row in rows.collect()} == {("a", "b")}
