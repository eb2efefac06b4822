"""The sinks of lanes with a checkpoint: Spark's own formats, and queues.

Spark's file sinks know their batches by the numbers of the checkpoint, which makes them exactly
once. With another checkpoint, numbers start at 0 again, and a sink would skip batches as repeats:
:func:`check_sink` refuses that. Every batch makes a file, so lanes that write files wait for enough
events (:func:`with_file_batching`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from turnlane.errors import ConfigError, Never
from turnlane.outputs.queue import QueueOutputSettings
from turnlane.outputs.spark import SparkSinkSettings
from turnlane.pipeline.settings import ActionSettings
from turnlane.spark.row_codec import encode_nulls
from turnlane.spark.transforms import drop_variants, find_stateful_operation, use_try_casts

SINK_LOG: Final = "_spark_metadata"
"""The directory in which Spark's file sinks note their batches, beside the files."""


class SinkTaken(Never):
    """The files of a sink were written with another checkpoint."""


def check_sink(spark: SparkSession, sink: SparkSinkSettings, checkpoint: Path) -> None:
    """Refuse a new checkpoint for files that exist already. Raises ``SinkTaken``.

    The checkpoint numbers batches from 0. A sink that has a batch 0 would skip the new one as a
    repeat, and report that it is written.
    """
    offsets = checkpoint / "offsets"
    has_begun = offsets.is_dir() and any(offsets.iterdir())
    if sink.place is None or has_begun or not _has_batches(spark, sink.place):
        return
    raise SinkTaken(
        f"{sink.place} was written with another checkpoint than {checkpoint}, and Spark would skip "
        f"new events: restore the checkpoint, or give the output another path, or move "
        f"{SINK_LOG} out of this one"
    )


def can_stream_into(spark: SparkSession, name: str) -> bool:
    """Whether Spark can write streams in a format; others, such as JDBC, take only tables.

    Raises ``ConfigError`` if Spark does not find the format.
    """
    jvm, found = _get_jvm(spark), _find_format(spark, name)
    interfaces = (
        jvm.org.apache.spark.sql.sources.StreamSinkProvider,
        jvm.org.apache.spark.sql.execution.datasources.FileFormat,
        jvm.org.apache.spark.sql.connector.catalog.TableProvider,
    )
    return any(_is_subclass(found, each) for each in interfaces)


def check_file_columns(rows: DataFrame, sink: SparkSinkSettings) -> None:
    """Have a file format check the columns, as it does before it writes. Writes nothing.

    Other formats are not checked. Raises Spark's errors, and ``ConfigError`` if Spark does not find
    the format.
    """
    spark = rows.sparkSession
    jvm, found = _get_jvm(spark), _find_format(spark, sink.format)
    datasources = jvm.org.apache.spark.sql.execution.datasources
    if _is_subclass(found, datasources.v2.FileDataSourceV2):  # Streams use the older interface.
        found = found.newInstance().fallbackFileFormat()
    if not _is_subclass(found, datasources.FileFormat):
        return
    files = found.newInstance()
    schema = rows.drop(*sink.partition_by)._jdf.schema()  # noqa: SLF001 - partition columns become directories
    datasources.DataSourceUtils.verifySchema(files, schema, False)  # noqa: FBT003 - not only for reading
    # The text format takes one column, which only this call checks.
    job = jvm.org.apache.hadoop.mapreduce.Job.getInstance(spark._jsc.hadoopConfiguration())  # noqa: SLF001
    options = jvm.PythonUtils.toScalaMap(sink.options)
    files.prepareWrite(spark._jsparkSession, job, options, schema)  # noqa: SLF001


def _find_format(spark: SparkSession, name: str) -> Any:  # noqa: ANN401 - of Java
    """Return the Java class of a format. Raises ``ConfigError`` if there is none."""
    conf = spark._jsparkSession.sessionState().conf()  # noqa: SLF001
    formats = _get_jvm(spark).org.apache.spark.sql.execution.datasources.DataSource
    try:
        return formats.lookupDataSource(name, conf)
    except PySparkException as error:
        raise ConfigError("format", str(error).partition("\n")[0]) from None
    except Py4JJavaError as error:  # An exception without a class in pyspark.
        why = str(error.java_exception.getMessage()).partition("\n")[0]
        raise ConfigError("format", why) from None


def _is_subclass(found: Any, kind: Any) -> bool:  # noqa: ANN401 - of Java
    return bool(kind._java_lang_class.isAssignableFrom(found))  # noqa: SLF001


def _get_jvm(spark: SparkSession) -> Any:  # noqa: ANN401 - of Java
    return spark._jvm  # noqa: SLF001 - pyspark has no other way


def _has_batches(spark: SparkSession, directory: str) -> bool:
    """Whether the sink's log has an entry: Spark creates an empty log before the first batch.

    Hadoop lists the files, which may be on any file system.
    """
    jvm = _get_jvm(spark)
    place = jvm.org.apache.hadoop.fs.Path(directory, SINK_LOG)
    files = place.getFileSystem(spark._jsc.hadoopConfiguration())  # noqa: SLF001
    return bool(files.exists(place)) and any(
        not entry.getPath().getName().startswith(".") for entry in files.listStatus(place)
    )


def write_to_queue(rows: DataFrame, output: QueueOutputSettings) -> DataStreamWriter:
    """Return the writer of a query into a queue, not started.

    The checkpoint numbers the batches, and the queue's node takes no batch twice.
    """
    access = {
        "endpoint": output.endpoint,
        "queue": output.queue,
        "tokenEnv": output.token_env,
        "tokenFile": output.token_file,
        "tlsCa": output.tls.ca,
        "tlsCert": output.tls.cert,
        "tlsKey": output.tls.key,
    }
    options = {name: str(value) for name, value in access.items() if value is not None}
    return encode_nulls(drop_variants(rows)).writeStream.format("turnlane").options(**options)


# ── files ──

MIN_EVENTS_PER_FILE: Final = 100_000
"""The events for which a lane waits before it writes files, for `max_age` at most. Every batch
makes a file, and files are not merged later."""


def with_file_batching(action: ActionSettings) -> ActionSettings:
    """Return the action; if it writes files, with waiting for enough events, unless it is set."""
    sink = action.output
    writes_files = isinstance(sink, SparkSinkSettings) and sink.place is not None
    lane = action.lane
    if not writes_files or "min_events" in lane.model_fields_set:
        return action
    waiting = lane.model_copy(update={"min_events": min(MIN_EVENTS_PER_FILE, lane.max_events)})
    return action.model_copy(update={"lane": waiting})


def write_to_sink(rows: DataFrame, action: ActionSettings) -> DataStreamWriter:
    """Return the writer of a query into an action's sink, not started."""
    settings = action.output
    rows = _limit_files(select_sink_columns(rows, settings), action)
    if not can_stream_into(rows.sparkSession, settings.format):
        return rows.writeStream.foreachBatch(partial(_append_batch, settings))
    writer = rows.writeStream.format(settings.format).options(**settings.options)
    if settings.path is not None:
        writer = writer.option("path", settings.path)
    return writer.partitionBy(*settings.partition_by) if settings.partition_by else writer


def select_sink_columns(rows: DataFrame, sink: SparkSinkSettings) -> DataFrame:
    """Return rows with the columns that the sink writes."""
    return rows.selectExpr(*map(use_try_casts, sink.columns)) if sink.columns else rows


def _append_batch(sink: SparkSinkSettings, rows: DataFrame, batch: int) -> None:
    """Write a batch into a sink without streams; a repeated batch is written twice."""
    del batch
    writer = rows.write.format(sink.format).options(**sink.options).mode("append")
    if sink.partition_by:
        writer = writer.partitionBy(*sink.partition_by)
    writer.save(sink.path)


def _limit_files(rows: DataFrame, action: ActionSettings) -> DataFrame:
    """Return rows, partitioned so that a batch makes as many files as the sink asks for.

    Rows that come directly from a queue are in few partitions. An aggregation has as many as
    Spark's shuffle, some of them nearly empty.
    """
    sink = action.output
    assert isinstance(sink, SparkSinkSettings)
    files = sink.files if sink.files is not None or find_stateful_operation(rows) is None else 1
    if files is None or sink.place is None:
        return rows
    return rows.repartition(files, *sink.partition_by)
