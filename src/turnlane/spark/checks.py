"""Having Spark look at a pipeline before it runs: every expression, and where rows go."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import partial

from pyspark.sql import DataFrame, SparkSession

from turnlane.delivery.settings import OURS, PAYLOAD
from turnlane.errors import ConfigError, SchemaMismatch
from turnlane.outputs.api import OutputSettings
from turnlane.outputs.queue import QueueOutputSettings
from turnlane.outputs.spark import SparkSinkSettings
from turnlane.outputs.sql import SqlSettings
from turnlane.outputs.sql_rows import has_source
from turnlane.outputs.table import TableOutputSettings
from turnlane.pipeline.settings import ActionSettings, PipelineSettings
from turnlane.spark import transforms
from turnlane.spark.errors import reason_of
from turnlane.spark.parsing import parsed
from turnlane.spark.row_codec import check_writable
from turnlane.spark.sinks import check_files_take, chosen, streams_into
from turnlane.spark.transforms import (
    answer,
    called,
    check_runs,
    check_together,
    remembered,
    stream_of,
    tolerant,
)
from turnlane.validation import Findings, message_of


def check(session: SparkSession, settings: PipelineSettings) -> frozenset[str]:
    """Check it all; returns the actions whose queries have to remember things between batches.

    Raises ``ConfigProblems``, which names actions and settings: all that is wrong, but for what
    only shows once something before it is right.
    """
    findings = Findings()
    remembering: set[str] = set()
    with findings.noted():
        # In a session of its own: views made here are no business of the lanes that run.
        remembering |= _check_all(session.newSession(), settings, findings)
    findings.tell()
    return frozenset(remembering)


def _check_all(
    spark: SparkSession, settings: PipelineSettings, findings: Findings
) -> AbstractSet[str]:
    base = stream_of(spark, transforms.nothing(spark).schema)
    plain = _checked("parse", lambda: parsed(base, settings.parse))
    events = _checked("transform", lambda: transforms.transformed(plain, settings))
    with findings.noted():
        _refuse_ours("transform", events)
        _refuse_memory("transform", events)
    queued = stream_of(spark, transforms.stored_schema(spark, settings))
    queued = transforms.restored(queued, settings)
    own = {action.name for action in settings.queued}
    remembering: set[str] = set()
    for at, action in enumerate(settings.actions):
        where = f"actions[{at}]"
        if action.filter is not None:
            with findings.noted():
                _checked(f"{where}.filter", partial(events.where, tolerant(action.filter)))
        if action.is_direct:
            _check_tables(action, where, events, findings)
            continue
        with findings.noted():
            rows = _made(action, where, queued, lambda name: queued if name in own else base)
            remembering |= {action.name} if remembered(rows) else set()
            _check_output(action, where, rows, findings)
    return remembering


def _made(
    action: ActionSettings, where: str, events: DataFrame, source_of: Callable[[str], DataFrame]
) -> DataFrame:
    """What an action's lane makes of events."""
    rows = events
    if action.transform is not None:
        mode = "append" if action.sql is None else None  # else what SQL makes of it has to run
        rows = _checked(f"{where}.transform", partial(called, action.transform, events), mode)
        check_together(action, rows, where)
    if action.sql is not None:
        make = partial(answer, action, events, source_of)
        rows = _checked(f"{where}.sql", make, action.output_mode)
    return rows


def _check_output(action: ActionSettings, where: str, rows: DataFrame, findings: Findings) -> None:
    """Check that an action's output takes what its lane has made."""
    steps = [name for name in ("sql", "transform") if getattr(action, name) is not None]
    last = ".".join([where, *steps[:1]])
    if isinstance(action.output, SparkSinkSettings):
        _check_sink(action.output, f"{where}.output", rows, findings)
        return
    with findings.noted():
        _refuse_ours(last, rows)
    if isinstance(action.output, QueueOutputSettings):
        with findings.noted():
            _check_events(last, rows)
    _check_tables(action, where, rows, findings)


def _check_tables(action: ActionSettings, where: str, rows: DataFrame, findings: Findings) -> None:
    _check_sources(f"{where}.output", action.output, rows, findings)
    failover = action.delivery.failover
    if failover is not None:
        _check_sources(f"{where}.delivery.failover.output", failover.output, rows, findings)


def _check_events(place: str, rows: DataFrame) -> None:
    """Check that a queue takes the rows."""
    try:
        check_writable(rows.schema, needs_route=False)
    except SchemaMismatch as error:
        raise ConfigError(place, f"a queue does not take this: {error}") from error


def _check_sink(sink: SparkSinkSettings, where: str, rows: DataFrame, findings: Findings) -> None:
    with findings.noted():
        _check_format(f"{where}.format", rows.sparkSession, sink)
    written = _checked(f"{where}.columns", partial(chosen, rows, sink))
    there = {name.lower() for name in written.columns}
    for name in sink.partition_by:
        if name.lower() not in there:
            why = f"there is no column {name!r} among those that are written"
            findings.add(f"{where}.partition_by", why)
    _check_files(f"{where}.{'columns' if sink.columns else 'format'}", written, sink)


def _check_format(place: str, spark: SparkSession, sink: SparkSinkSettings) -> None:
    try:
        streams_into(spark, sink.format)
    except ConfigError as error:
        raise _placed(error, place) from error


def _check_files(place: str, rows: DataFrame, sink: SparkSinkSettings) -> None:
    """Check that files of the format can have these columns, and so many of them."""
    try:
        check_files_take(rows, sink)
    except ConfigError:
        return  # there is no such format, which was found before
    except Exception as error:
        advice = "say in `columns` what is written, as in CAST(value AS string) AS value"
        raise ConfigError(place, f"{reason_of(error)}; {advice}") from error


def _check_sources(place: str, output: OutputSettings, rows: DataFrame, findings: Findings) -> None:
    """Check that an output which fills columns of a table has what to fill them with."""
    if not isinstance(output, SqlSettings | TableOutputSettings):
        return
    there = [*transforms.storable(rows).columns, PAYLOAD]
    for name, source in output.columns.items():
        if not has_source(there, source):
            message = f"the events have no {source!r}; they have {', '.join(there)}"
            findings.add(f"{place}.columns.{name}", message)


def _refuse_ours(place: str, rows: DataFrame) -> None:
    """Columns that would be replaced in silence by those of the same name that lanes add."""
    for name in rows.columns:
        if name.lower() == PAYLOAD or name.lower().startswith(OURS):
            raise ConfigError(place, f"makes a column {name!r}, which lanes use; call it otherwise")


def _refuse_memory(place: str, rows: DataFrame) -> None:
    """The main lane keeps its place in the node, and nothing else from batch to batch."""
    what = remembered(rows)
    if what is not None:
        why = f"{what} has to remember events, which only the lane of an action does"
        raise ConfigError(place, f"{why}: do it in the transform, or sql, of one with a queue")


def _checked(place: str, make: Callable[[], DataFrame], mode: str | None = "append") -> DataFrame:
    """What is made, if Spark could run it in an output mode, or could plan it without one."""
    try:
        made = make()
        made.schema  # noqa: B018 - analyses the plan
        if mode is not None:
            check_runs(made, mode)
    except ConfigError as error:  # it knows what is wrong, not where
        raise _placed(error, place) from error
    except Exception as error:
        raise ConfigError(place, reason_of(error)) from error
    return made


def _placed(error: ConfigError, place: str) -> ConfigError:
    return ConfigError(place, message_of(error))
