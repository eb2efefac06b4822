"""Spark's own sinks: what a lane must know of them so that they leave nothing out."""

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
from turnlane.spark import transforms
from turnlane.spark.row_codec import filled
from turnlane.spark.transforms import remembered, tolerant

LOG: Final = "_spark_metadata"
"""Where Spark's file sinks note the batches that they have, beside the files."""


class SinkTaken(Never):
    """The files of a sink were written with another checkpoint."""


def check_sink(spark: SparkSession, sink: SparkSinkSettings, checkpoint: Path) -> None:
    """Refuse a new checkpoint for files that there are already. Raises ``SinkTaken``.

    Batches are numbered by the checkpoint, from 0. A sink that has a batch 0 would take the new
    one for a repeat, pass it over, and say that it is written.
    """
    if sink.place is None or _has_begun(checkpoint) or not _has_batches(spark, sink.place):
        return
    raise SinkTaken(
        f"{sink.place} was written with another checkpoint than {checkpoint}, and Spark would pass "
        f"over what comes now: bring the checkpoint back, or give the output another path, or move "
        f"{LOG} out of this one"
    )


def streams_into(spark: SparkSession, name: str) -> bool:
    """Whether Spark writes streams in a format; others, such as JDBC, take only whole tables.

    Raises ``ConfigError`` if Spark does not find the format.
    """
    jvm, found = _java(spark), _looked_up(spark, name)
    takers = (
        jvm.org.apache.spark.sql.sources.StreamSinkProvider,
        jvm.org.apache.spark.sql.execution.datasources.FileFormat,
        jvm.org.apache.spark.sql.connector.catalog.TableProvider,
    )
    return any(_is_a(taker, found) for taker in takers)


def check_files_take(rows: DataFrame, sink: SparkSinkSettings) -> None:
    """Have a format of files look at the columns, as it does before it writes.

    Nothing is written, nor are tasks needed. Other formats are not asked. Raises what Spark raises,
    and ``ConfigError`` if it does not find the format.
    """
    spark = rows.sparkSession
    files = _file_format(spark, sink.format)
    if files is None:
        return
    jvm = _java(spark)
    schema = rows.drop(*sink.partition_by)._jdf.schema()  # noqa: SLF001 - these are folders
    checks = jvm.org.apache.spark.sql.execution.datasources.DataSourceUtils
    checks.verifySchema(files, schema, False)  # noqa: FBT003 - for writing, not only for reading
    # Text has room for one column, which only this tells.
    job = jvm.org.apache.hadoop.mapreduce.Job.getInstance(spark._jsc.hadoopConfiguration())  # noqa: SLF001
    options = jvm.PythonUtils.toScalaMap(sink.options)
    files.prepareWrite(spark._jsparkSession, job, options, schema)  # noqa: SLF001


def _file_format(spark: SparkSession, name: str) -> Any:  # noqa: ANN401 - of Java
    """Spark's way of writing files in a format; ``None`` for what is no format of files."""
    datasources = _java(spark).org.apache.spark.sql.execution.datasources
    found = _looked_up(spark, name)
    if _is_a(datasources.v2.FileDataSourceV2, found):  # streams are written in the older way
        found = found.newInstance().fallbackFileFormat()
    return found.newInstance() if _is_a(datasources.FileFormat, found) else None


def _looked_up(spark: SparkSession, name: str) -> Any:  # noqa: ANN401 - of Java
    """The class of a format. Raises ``ConfigError`` if there is none."""
    conf = spark._jsparkSession.sessionState().conf()  # noqa: SLF001
    formats = _java(spark).org.apache.spark.sql.execution.datasources.DataSource
    try:
        return formats.lookupDataSource(name, conf)
    except PySparkException as error:
        raise ConfigError("format", str(error).partition("\n")[0]) from None
    except Py4JJavaError as error:  # one that pyspark has no name for
        why = str(error.java_exception.getMessage()).partition("\n")[0]
        raise ConfigError("format", why) from None


def _is_a(kind: Any, found: Any) -> bool:  # noqa: ANN401 - of Java
    return bool(kind._java_lang_class.isAssignableFrom(found))  # noqa: SLF001


def _java(spark: SparkSession) -> Any:  # noqa: ANN401 - of Java
    return spark._jvm  # noqa: SLF001 - pyspark does not tell what is asked here


def _has_begun(checkpoint: Path) -> bool:
    offsets = checkpoint / "offsets"
    return offsets.is_dir() and any(offsets.iterdir())


def _has_batches(spark: SparkSession, directory: str) -> bool:
    """Whether the sink's log has an entry: Spark makes an empty one before the first batch.

    Asked of Hadoop, for the files may be anywhere.
    """
    jvm: Any = spark._jvm  # noqa: SLF001 - pyspark has no files of its own
    place = jvm.org.apache.hadoop.fs.Path(directory, LOG)
    files = place.getFileSystem(spark._jsc.hadoopConfiguration())  # noqa: SLF001
    return bool(files.exists(place)) and any(
        not entry.getPath().getName().startswith(".") for entry in files.listStatus(place)
    )


# ── queue_sink ──
# Queues as the sinks of queries that remember things: each batch is written once.
#
# Rows of such queries cannot be told by offsets. A batch has a number, which its checkpoint
# keeps,
# and the node there takes none twice.


def writes_once(action: ActionSettings) -> bool:
    """Whether an action's rows can go into a queue by whole batches.

    Spark's sinks for Python take no updates, and know of no second output.
    """
    return (
        isinstance(action.output, QueueOutputSettings)
        and action.output_mode != "update"
        and action.delivery.failover is None
    )


def to_queue(rows: DataFrame, output: QueueOutputSettings) -> DataStreamWriter:
    """A query into a queue, not started yet."""
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
    return filled(transforms.storable(rows)).writeStream.format("turnlane").options(**options)


# ── sink_files ──
# The files of Spark's own sinks: few and large ones, also where little comes in.

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
