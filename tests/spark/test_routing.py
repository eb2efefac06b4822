"""Routes: does each event go where filters and discards say, however many there are?"""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from turnlane.delivery.columns import DIRECT
from turnlane.outputs.contract import OutputSettings
from turnlane.outputs.file import FileSettings
from turnlane.pipeline.settings import ActionSettings
from turnlane.spark.routing import routed

DISCARDS = 30


def routes(spark: SparkSession, discards: int) -> DataFrame:
    """Numbers, of which each discard takes one out; what is left is taken."""
    actions = [
        ActionSettings(name=f"d{at}", filter=f"id = {at}", output=OutputSettings(type="discard"))
        for at in range(discards)
    ]
    taken = ActionSettings(name="taken", output=FileSettings(type="file", path=Path("o")))
    return routed(spark.range(discards + 2), [*actions, taken])


def plan_size(rows: DataFrame) -> int:
    return len(str(rows._jdf.queryExecution().analyzed()))


def test_discards_add_to_a_plan_and_do_not_multiply_it(spark: SparkSession) -> None:
    few, more, most = (plan_size(routes(spark, count)) for count in (5, 10, 15))
    assert most - more < 2 * (more - few)


def test_what_many_discards_leave_is_taken(spark: SparkSession) -> None:
    rows = routes(spark, DISCARDS).select("id", DIRECT).collect()
    assert {(row[0], *row[1]) for row in rows} == {(DISCARDS, "taken"), (DISCARDS + 1, "taken")}
