"""The files of Spark's own sinks: few and large ones, also where little comes in."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame

from turnlane.outputs.spark import SparkSinkSettings
from turnlane.pipeline.settings import ActionSettings

WORTH_A_FILE: Final = 100_000
"""Events that a lane waits for before it writes files, for `max_age` at most. Every batch makes a
file, and nothing else joins them later."""


def patient(action: ActionSettings) -> ActionSettings:
    """The action; one that writes files waits for a file's worth, unless it says for how much."""
    sink = action.output
    writes_files = isinstance(sink, SparkSinkSettings) and sink.place is not None
    if not writes_files or "min_events" in action.lane.model_fields_set:
        return action
    events = min(WORTH_A_FILE, action.lane.max_events)
    lane = action.lane.model_copy(update={"min_events": events})
    return action.model_copy(update={"lane": lane})


def in_few_files(rows: DataFrame, action: ActionSettings) -> DataFrame:
    """Rows, so partitioned that a batch makes as many files as the sink says.

    What is read straight from a queue comes in few partitions by itself. After an aggregation
    there are as many as Spark shuffles into, nearly empty ones among them.
    """
    sink = action.output
    assert isinstance(sink, SparkSinkSettings)
    files = sink.files if sink.files is not None or not action.is_stateful else 1
    if files is None or sink.place is None:
        return rows
    return rows.repartition(files, *sink.partition_by)
