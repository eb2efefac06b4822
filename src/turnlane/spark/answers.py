"""What transforms, which are functions of the user's own, and SQL make of events."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame

from turnlane.errors import ConfigError
from turnlane.pipeline.settings import EVENTS, ActionSettings
from turnlane.spark.remembering import remembered, spreads
from turnlane.spark.tolerant import tolerant
from turnlane.spark.user_code import module_of


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
