"""Having Spark look at a pipeline before it runs: every expression, and where rows go."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pyspark.sql import DataFrame, SparkSession

from turnlane.delivery.columns import OURS, PAYLOAD
from turnlane.errors import ConfigError
from turnlane.outputs.spark import SparkSinkSettings
from turnlane.pipeline.settings import ActionSettings, PipelineSettings
from turnlane.spark import shape
from turnlane.spark.answers import answer, called, check_together
from turnlane.spark.parsing import parsed
from turnlane.spark.sink_files import chosen
from turnlane.spark.sinks import streams_into
from turnlane.spark.tolerant import tolerant


def check(session: SparkSession, settings: PipelineSettings) -> None:
    """Check it all. Raises ``ConfigError``, which names the action and the setting."""
    # In a session of its own: views made here are no business of the lanes that run.
    spark = session.newSession()
    base = shape.nothing(spark)
    plain = _checked("parse", lambda: parsed(base, settings.parse))
    events = _checked("transform", lambda: shape.transformed(plain, settings))
    _refuse_ours("transform", events)
    queued = spark.createDataFrame([], shape.stored_schema(spark, settings))
    queued = shape.restored(queued, settings)
    own = {action.name for action in settings.queued}
    for at, action in enumerate(settings.actions):
        where = f"actions[{at}]"
        if action.filter is not None:
            _checked(f"{where}.filter", partial(events.where, tolerant(action.filter)))
        if not action.is_direct:
            _check_lane(action, where, queued, lambda name: queued if name in own else base)


def _check_lane(
    action: ActionSettings, where: str, events: DataFrame, source_of: Callable[[str], DataFrame]
) -> None:
    rows, last = events, where
    if action.transform is not None:
        last = f"{where}.transform"
        rows = _checked(last, partial(called, action.transform, events))
        check_together(action, rows, where)
    if action.sql is not None:
        last = f"{where}.sql"
        rows = _checked(last, partial(answer, action, events, source_of))
    if isinstance(action.output, SparkSinkSettings):
        _check_sink(action.output, f"{where}.output", rows)
    else:
        _refuse_ours(last, rows)


def _check_sink(sink: SparkSinkSettings, where: str, rows: DataFrame) -> None:
    written = _checked(f"{where}.columns", partial(chosen, rows, sink))
    _check_folders(f"{where}.partition_by", written, sink)
    _check_format(f"{where}.format", rows.sparkSession, sink)


def _check_folders(place: str, rows: DataFrame, sink: SparkSinkSettings) -> None:
    there = {name.lower() for name in rows.columns}
    for name in sink.partition_by:
        if name.lower() not in there:
            raise ConfigError(place, f"there is no column {name!r} among those that are written")


def _check_format(place: str, spark: SparkSession, sink: SparkSinkSettings) -> None:
    try:
        streams_into(spark, sink.format)
    except ConfigError as error:
        raise _placed(error, place) from error


def _refuse_ours(place: str, rows: DataFrame) -> None:
    """Columns that would be replaced in silence by those of the same name that lanes add."""
    for name in rows.columns:
        if name.lower() == PAYLOAD or name.lower().startswith(OURS):
            raise ConfigError(place, f"makes a column {name!r}, which lanes use; call it otherwise")


def _checked(place: str, make: Callable[[], DataFrame]) -> DataFrame:
    try:
        made = make()
        made.schema  # noqa: B018 - analyses the plan
    except ConfigError as error:  # it knows what is wrong, not where
        raise _placed(error, place) from error
    except Exception as error:
        raise ConfigError(place, _first_words(error)) from error
    return made


def _placed(error: ConfigError, place: str) -> ConfigError:
    return ConfigError(place, str(error).removeprefix(f"{error.knob}: "))


def _first_words(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
