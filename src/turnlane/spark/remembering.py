"""What Spark says of a streaming plan: whether it can run, remembers things, or spreads rows.

Asked of Java, by the plan and not by the words of a query: a transform may remember things as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import StructType

_REMEMBER: Final = {
    "Aggregate": "an aggregation",
    "Deduplicate": "removing duplicates",
    "DeduplicateWithinWatermark": "removing duplicates",
    "Distinct": "removing duplicates",
    "FlatMapGroupsInPandasWithState": "a function with state",
    "FlatMapGroupsWithState": "a function with state",
    "GlobalLimit": "a limit",
    "TransformWithState": "a function with state",
    "TransformWithStateInPandas": "a function with state",
    "TransformWithStateInPySpark": "a function with state",
}
"""The parts of a plan that keep state from batch to batch, for people; joins of streams do, too."""

_SPREAD: Final = frozenset({"RebalancePartitions", "Repartition", "RepartitionByExpression"})
"""The parts that have rows go from one task to another."""


def stream_of(spark: SparkSession, schema: StructType) -> DataFrame:
    """A stream with these columns that nobody will start, for Spark to plan with."""
    columns = [F.lit(None).cast(field.dataType).alias(field.name) for field in schema.fields]
    return spark.readStream.format("rate").load().select(*columns)


def remembered(rows: DataFrame) -> str | None:
    """What of a streaming plan makes Spark keep state, in words; ``None`` if nothing does."""
    for node in _nodes(_analyzed(rows)):
        if not node.isStreaming():
            continue
        name = node.nodeName()
        if name in _REMEMBER:
            return _REMEMBER[name]
        if name == "Join" and all(side.isStreaming() for side in _children(node)):
            return "a join of streams"
    return None


def spreads(rows: DataFrame) -> bool:
    """Whether rows go from one task to another."""
    return any(node.nodeName() in _SPREAD for node in _nodes(_analyzed(rows)))


def check_runs(rows: DataFrame, mode: str) -> None:
    """Check that Spark can run a plan as a stream, in an output mode. Raises what Spark raises."""
    jvm: Any = rows.sparkSession._jvm  # noqa: SLF001 - pyspark only checks what it starts
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    checker.checkForStreaming(_analyzed(rows), getattr(modes, mode.capitalize())())


def _analyzed(rows: DataFrame) -> Any:  # noqa: ANN401 - of Java
    return rows._jdf.queryExecution().analyzed()  # noqa: SLF001 - pyspark only prints it


def _nodes(plan: Any) -> Iterator[Any]:  # noqa: ANN401 - of Java
    yield plan
    for child in _children(plan):
        yield from _nodes(child)


def _children(plan: Any) -> list[Any]:  # noqa: ANN401 - of Java
    children = plan.children()
    return [children.apply(at) for at in range(children.size())]
