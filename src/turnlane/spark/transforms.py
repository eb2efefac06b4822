"""What Spark says of a streaming plan: whether it can run, remembers things, or spreads rows.

Asked of Java, by the plan and not by the words of a query: a transform may remember things as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import StructType

from turnlane.delivery.settings import DIRECT, PAYLOAD
from turnlane.errors import ConfigError
from turnlane.formats.parse_settings import Format
from turnlane.pipeline.settings import EVENTS, ActionSettings, PipelineSettings
from turnlane.spark.errors import module_of
from turnlane.spark.parsing import parsed
from turnlane.spark.parsing.formats import with_data
from turnlane.spark.row_codec import names_read, read_schema
from turnlane.spark.steps import wanted_by_main

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


# ── tolerant ──
# SQL in which the short way into JSON, ``data:http.status::int``, is null where it does not fit.
#
# Spark's own cast of such a value fails instead, whatever its settings: one event in which the
# status
# is no number would stop the lane, and stop it again whenever it is tried again. Pure.

_WORD: Final = r"(?:[A-Za-z_]\w*|`[^`]+`)"
_STEP: Final = rf"(?:\.\s*{_WORD}|\[\s*(?:\d+|'[^'\\]*'|\"[^\"\\]*\")\s*\])"
_WAY: Final = rf"{_WORD}(?:\s*\.\s*{_WORD})*\s*:\s*(?:{_WORD}|\[[^\]]*\]){_STEP}*"
_TYPE: Final = (
    r"(?:(?:array|map|struct)\s*<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>"
    r"|\w+(?:\s*\(\s*\d+\s*(?:,\s*\d+\s*)?\))?)"
)
_TOKEN: Final = re.compile(
    rf"""
      (?P<literal>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|--[^\n]*|/\*.*?\*/)
    | \bcast\s*\(\s*(?P<inner>{_WAY})\s+as\b
    | (?P<way>(?<![\w`.:]){_WAY})\s*::\s*(?P<type>{_TYPE})
    | `[^`]*`
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


def tolerant(sql: str) -> str:
    """The same query or condition, with casts of values in JSON that give null if they fail."""
    return _TOKEN.sub(_rewritten, sql)


def _rewritten(found: re.Match[str]) -> str:
    if found["inner"] is not None:
        return f"try_cast({found['inner']} AS"
    if found["way"] is not None:
        return f"try_cast({found['way']} AS {found['type']})"
    return found[0]


# ── answers ──
# What transforms, which are functions of the user's own, and SQL make of events.


def answer(
    action: ActionSettings, events: DataFrame, source_of: Callable[[str], DataFrame]
) -> DataFrame:
    """What an action's transform and SQL make of events; ``source_of`` has the queues it joins.

    The views that this takes stay in the session of the events.
    """
    if action.transform is not None:
        events = called(action.transform, events)
    if action.sql is None:
        return events
    _late(action, events).createOrReplaceTempView(EVENTS)
    for name in action.with_queues:
        _late(action, source_of(name)).createOrReplaceTempView(f"`{name}`")
    return events.sparkSession.sql(tolerant(action.sql))


def _late(action: ActionSettings, events: DataFrame) -> DataFrame:
    """Events of which Spark knows how late they may be, so that it can forget some."""
    if action.watermark is None:
        return events
    return events.withWatermark("timestamp", f"{action.watermark} seconds")


def called(name: str, events: DataFrame) -> DataFrame:
    """What the function ``module:function`` makes of events. Raises ``ConfigError``."""
    module, _, function = name.partition(":")
    try:
        found = getattr(module_of(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError("transform", f"{name}: {error}") from error
    made = found(events)
    if not isinstance(made, DataFrame):
        raise ConfigError("transform", f"{name} returned {type(made).__name__}, not a DataFrame")
    return made


def check_together(action: ActionSettings, rows: DataFrame, where: str) -> None:
    """Check that an event's rows stay together, if what was delivered is known by their numbers.

    They are numbered in the task that has them: in two tasks, two would have the same, and one
    would be taken for a repeat. Raises ``ConfigError``.
    """
    output = action.output
    if not (getattr(output, "exactly_once", False) or getattr(output, "producer", None)):
        return
    if spreads(rows) or remembered(rows):
        why = "spreads rows over tasks, so that several of one event could not be told apart"
        raise ConfigError(f"{where}.transform", why)


# ── shape ──
# What events look like: to actions, in their queues, and when lanes read them again.


def seen(
    source: DataFrame, settings: PipelineSettings, wanted: Collection[str] | None = None
) -> DataFrame:
    """Events as actions see them: parsed, as far as that is ``wanted``, and transformed."""
    return transformed(parsed(source, settings.parse, wanted), settings)


def transformed(events: DataFrame, settings: PipelineSettings) -> DataFrame:
    """Events after the transform that is above all actions."""
    return events if settings.transform is None else called(settings.transform, events)


def stored(events: DataFrame, settings: PipelineSettings) -> DataFrame:
    """Events without columns that no queue keeps: what only filters have read is left out."""
    if wanted_by_main(settings) is None:
        return storable(events)
    kept = {*names_read(), DIRECT, PAYLOAD}
    return events.select(*(name for name in events.columns if name in kept))


def storable(events: DataFrame) -> DataFrame:
    """Events without columns that a queue has no type for; what they were made of is kept."""
    variants = [
        field.name for field in events.schema.fields if field.dataType.typeName() == "variant"
    ]
    return events.drop(*variants)


def stored_schema(spark: SparkSession, settings: PipelineSettings) -> StructType:
    """The columns of action queues: those of events once they are parsed and transformed."""
    return stored(seen(nothing(spark), settings), settings).schema


def restored(events: DataFrame, settings: PipelineSettings) -> DataFrame:
    """Events of an action's queue, with the columns that no queue stores made again."""
    is_json = settings.parse is not None and settings.parse.format == Format.JSON
    return with_data(events) if is_json else events


def nothing(spark: SparkSession) -> DataFrame:
    """No events, with the columns that all have."""
    return spark.createDataFrame([], read_schema(include_headers=True))
