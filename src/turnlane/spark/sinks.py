"""Spark's own sinks: what a lane must know of them so that they leave nothing out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from turnlane.errors import ConfigError, Never
from turnlane.outputs.spark import SparkSinkSettings

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
