"""Queries with ``format("turnlane")``, as anyone's own job has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.spark.loop import SCHEMA
from tests.spark.nodes import Served
from turnlane.spark.options import ReadOptions
from turnlane.spark.stream_reader import QueueStreamReader


def both(*nodes: Served) -> str:
    """An endpoint of several nodes."""
    return "turnlane://" + ",".join(str(node.plane.address) for node in nodes)


def read(spark: SparkSession, node: Served, queue: str = "main", **options: str) -> DataFrame:
    given = {"endpoint": node.url, **options}
    return spark.read.format("turnlane").options(**given).load(queue)


def stream(spark: SparkSession, node: Served, queue: str = "main", **options: str) -> DataFrame:
    given = {"endpoint": node.url, **options}
    return spark.readStream.format("turnlane").options(**given).load(queue)


def run(frame: DataFrame, checkpoint: Path) -> StreamingQuery:
    """A query that has read what there is, for nothing."""
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def rows_of(query: StreamingQuery) -> int:
    """How many rows a query has read."""
    return sum(progress.numInputRows for progress in query.recentProgress)


def into(node: Served, frame: DataFrame, checkpoint: Path, **options: str) -> StreamingQuery:
    """A query that writes values into the queue ``all``."""
    given = {"endpoint": node.url, "queue": "all", "checkpointLocation": str(checkpoint)}
    writer = frame.select("value").writeStream.format("turnlane").options(**given, **options)
    return writer.trigger(availableNow=True).start()


def positions(offset: dict[str, Any]) -> dict[str, int]:
    """What an offset of Spark's says of nodes, without which queues it is of."""
    return {node: at for node, at in offset.items() if node.isdecimal()}


def reader(url: str, queue: str = "main", **options: str) -> QueueStreamReader:
    """The reader of a streaming query, to be asked as Spark asks it."""
    given: dict[str, Any] = {"endpoint": url, "queue": queue, "pollTimeout": "10ms", **options}
    return QueueStreamReader(ReadOptions.from_spark(given), SCHEMA)
