"""Queries with ``format("turnlane")``, as in a user's job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.spark.loop import SCHEMA
from tests.spark.nodes import Served
from turnlane.spark.options import ReadOptions
from turnlane.spark.queue_reader import QueueStreamReader


def both(*nodes: Served) -> str:
    """Return the endpoint of several nodes."""
    return "turnlane://" + ",".join(str(node.plane.address) for node in nodes)


def read(spark: SparkSession, node: Served, queue: str = "main", **options: str) -> DataFrame:
    given = {"endpoint": node.url, **options}
    return spark.read.format("turnlane").options(**given).load(queue)


def stream(spark: SparkSession, node: Served, queue: str = "main", **options: str) -> DataFrame:
    given = {"endpoint": node.url, **options}
    return spark.readStream.format("turnlane").options(**given).load(queue)


def run(frame: DataFrame, checkpoint: Path) -> StreamingQuery:
    """Run a query over all events, with a sink that drops them."""
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def rows_of(query: StreamingQuery) -> int:
    """Return how many rows a query has read."""
    return sum(progress.numInputRows for progress in query.recentProgress)


def into(node: Served, frame: DataFrame, checkpoint: Path, **options: str) -> StreamingQuery:
    """Start a query that writes values into the queue ``all``."""
    given = {"endpoint": node.url, "queue": "all", "checkpointLocation": str(checkpoint)}
    writer = frame.select("value").writeStream.format("turnlane").options(**given, **options)
    return writer.trigger(availableNow=True).start()


def positions(offset: dict[str, Any]) -> dict[str, int]:
    """Return the positions in an offset, without queue ids."""
    return {node: at for node, at in offset.items() if node.isdecimal()}


def reader(url: str, queue: str = "main", **options: str) -> QueueStreamReader:
    """Create the reader of a streaming query, to be called as Spark calls it."""
    given: dict[str, Any] = {"endpoint": url, "queue": queue, "pollTimeout": "10ms", **options}
    return QueueStreamReader(ReadOptions.from_spark(given), SCHEMA)
