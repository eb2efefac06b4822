"""The files of Spark's own sinks: few and large ones, also where little comes in."""

from __future__ import annotations

from functools import partial
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql.streaming.readwriter import DataStreamWriter

from turnlane.outputs.spark import SparkSinkSettings
from turnlane.pipeline.settings import ActionSettings
from turnlane.spark.remembering import remembered
from turnlane.spark.sinks import streams_into
from turnlane.spark.tolerant import tolerant

WORTH_A_FILE: Final = 100_000
"""Events that a lane waits for before it writes files, for `max_age` at most. Every batch makes a
file, and nothing else joins them later."""
AGE_OF_A_FILE: Final = 600.0
"""That `max_age`, where nothing is said: so a quiet stream makes 144 files a day in a folder."""


def patient(action: ActionSettings) -> ActionSettings:
    """The action; one that writes files waits for a file's worth, unless it says for how much."""
    sink = action.output
    writes_files = isinstance(sink, SparkSinkSettings) and sink.place is not None
    given = action.lane.model_fields_set
    if not writes_files or "min_events" in given:
        return action
    knobs: dict[str, float] = {"min_events": min(WORTH_A_FILE, action.lane.max_events)}
    if "max_age" not in given:
        knobs["max_age"] = AGE_OF_A_FILE
    return action.model_copy(update={"lane": action.lane.model_copy(update=knobs)})


def to_sink(rows: DataFrame, action: ActionSettings) -> DataStreamWriter:
    """A query into an action's sink, not started yet."""
    settings = action.output
    rows = _in_few_files(chosen(rows, settings), action)
    if not streams_into(rows.sparkSession, settings.format):
        return rows.writeStream.foreachBatch(partial(_append, settings))
    writer = rows.writeStream.format(settings.format).options(**settings.options)
    if settings.path is not None:
        writer = writer.option("path", settings.path)
    return writer.partitionBy(*settings.partition_by) if settings.partition_by else writer


def chosen(rows: DataFrame, sink: SparkSinkSettings) -> DataFrame:
    """Rows with the columns that are to be written."""
    return rows.selectExpr(*map(tolerant, sink.columns)) if sink.columns else rows


def _append(sink: SparkSinkSettings, rows: DataFrame, batch: int) -> None:
    """Write one batch into a sink that knows nothing of streams; a repeat comes in twice."""
    del batch
    writer = rows.write.format(sink.format).options(**sink.options).mode("append")
    if sink.partition_by:
        writer = writer.partitionBy(*sink.partition_by)
    writer.save(sink.path)


def _in_few_files(rows: DataFrame, action: ActionSettings) -> DataFrame:
    """Rows, so partitioned that a batch makes as many files as the sink says.

    What is read straight from a queue comes in few partitions by itself. After an aggregation
    there are as many as Spark shuffles into, nearly empty ones among them.
    """
    sink = action.output
    assert isinstance(sink, SparkSinkSettings)
    files = sink.files if sink.files is not None or remembered(rows) is None else 1
    if files is None or sink.place is None:
        return rows
    return rows.repartition(files, *sink.partition_by)
