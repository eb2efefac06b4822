"""Spark's own sinks: what a lane must know of them so that they leave nothing out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

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
    jvm: Any = spark._jvm  # noqa: SLF001 - pyspark does not tell
    conf = spark._jsparkSession.sessionState().conf()  # noqa: SLF001
    formats = jvm.org.apache.spark.sql.execution.datasources.DataSource
    try:
        found = formats.lookupDataSource(name, conf)
    except PySparkException as error:
        raise ConfigError("format", str(error).partition("\n")[0]) from None
    except Py4JJavaError as error:  # one that pyspark has no name for
        why = str(error.java_exception.getMessage()).partition("\n")[0]
        raise ConfigError("format", why) from None
    takers = (
        jvm.org.apache.spark.sql.sources.StreamSinkProvider,
        jvm.org.apache.spark.sql.execution.datasources.FileFormat,
        jvm.org.apache.spark.sql.connector.catalog.TableProvider,
    )
    return any(taker._java_lang_class.isAssignableFrom(found) for taker in takers)  # noqa: SLF001


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
