"""Checks a pipeline before it runs, and tries its test cases, with Spark but without nodes.

:func:`check_pipeline` has Spark analyse every expression and plan of a configuration. It collects
all errors, each with the place in the configuration. :class:`CaseTrial` runs the plan of the lanes
over the events of one test case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from functools import partial

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from turnlane.delivery.settings import DIRECT, OWN_PREFIX, PAYLOAD
from turnlane.errors import ConfigError, SchemaMismatch
from turnlane.outputs.api import OutputSettings
from turnlane.outputs.queue import QueueOutputSettings
from turnlane.outputs.spark import SparkSinkSettings
from turnlane.outputs.sql import SqlSettings
from turnlane.outputs.sql_rows import has_source
from turnlane.outputs.table import TableOutputSettings
from turnlane.pipeline.cases import Case, CaseEvent, CaseRow
from turnlane.pipeline.settings import MAIN, ActionSettings, PipelineSettings
from turnlane.spark.errors import describe_failure
from turnlane.spark.parsing import parse_events
from turnlane.spark.routing import add_payload, add_routes
from turnlane.spark.row_codec import QUEUE_COLUMN, check_writable, get_read_schema
from turnlane.spark.sinks import can_stream_into, check_file_columns, select_sink_columns
from turnlane.spark.transforms import (
    apply_action,
    apply_transform,
    call_transform,
    check_streaming_plan,
    drop_variants,
    find_stateful_operation,
    get_queue_schema,
    has_repartition,
    make_no_events,
    make_stream,
    parse_and_transform,
    restore_from_queue,
    use_try_casts,
)
from turnlane.validation import IssueCollector, get_message


def check_pipeline(session: SparkSession, settings: PipelineSettings) -> frozenset[str]:
    """Check a pipeline; returns the actions whose queries keep state between batches.

    Raises ``ConfigProblems`` with all errors, except errors that are hidden by others.
    """
    issues = IssueCollector()
    stateful: set[str] = set()
    with issues.collect():
        # In a session of its own: its views must not replace the views of running lanes.
        stateful |= _check_all(session.newSession(), settings, issues)
    issues.raise_issues()
    return frozenset(stateful)


def _check_all(
    spark: SparkSession, settings: PipelineSettings, issues: IssueCollector
) -> AbstractSet[str]:
    base = make_stream(spark, make_no_events(spark).schema)
    parsed = _check_plan("parse", lambda: parse_events(base, settings.parse))
    events = _check_plan("transform", lambda: apply_transform(parsed, settings))
    with issues.collect():
        _refuse_own_columns("transform", events)
        operation = find_stateful_operation(events)
        if operation is not None:  # The main lane has only its cursor in the node.
            why = f"{operation} has to remember events, which only the lane of an action does"
            advice = "do it in the transform, or sql, of an action with a queue"
            raise ConfigError("transform", f"{why}: {advice}")
    queued = make_stream(spark, get_queue_schema(spark, settings))
    queued = restore_from_queue(queued, settings)
    own_queues = {action.name for action in settings.queued_actions}
    stateful: set[str] = set()
    for at, action in enumerate(settings.actions):
        where = f"actions[{at}]"
        if action.filter is not None:
            with issues.collect():
                _check_plan(f"{where}.filter", partial(events.where, use_try_casts(action.filter)))
        if action.is_direct:
            _check_tables(action, where, events, issues)
            continue
        with issues.collect():
            rows = _check_action(
                action, where, queued, lambda name: queued if name in own_queues else base
            )
            stateful |= {action.name} if find_stateful_operation(rows) else set()
            _check_output(action, where, rows, issues)
    return stateful


def _check_action(
    action: ActionSettings, where: str, events: DataFrame, read_queue: Callable[[str], DataFrame]
) -> DataFrame:
    """Check an action's transform and SQL; returns their rows."""
    rows = events
    if action.transform is not None:
        mode = "append" if action.sql is None else None  # With SQL, only its result has to run.
        call = partial(call_transform, action.transform, events)
        rows = _check_plan(f"{where}.transform", call, mode)
        _check_rows_stay_together(action, rows, where)
    if action.sql is not None:
        apply = partial(apply_action, action, events, read_queue)
        rows = _check_plan(f"{where}.sql", apply, action.output_mode)
    return rows


def _check_rows_stay_together(action: ActionSettings, rows: DataFrame, where: str) -> None:
    """Refuse a transform that moves rows if the output knows its rows by their numbers.

    A task numbers the rows of an event. In two tasks, two rows would have the same number, and one
    would be skipped as a repeat.
    """
    output = action.output
    if not (getattr(output, "exactly_once", False) or getattr(output, "producer", None)):
        return
    if has_repartition(rows) or find_stateful_operation(rows):
        why = "moves rows to other tasks, but this output needs all rows of an event in one task"
        raise ConfigError(f"{where}.transform", why)


def _check_output(
    action: ActionSettings, where: str, rows: DataFrame, issues: IssueCollector
) -> None:
    """Check that an action's output takes its rows."""
    if isinstance(action.output, SparkSinkSettings):
        _check_sink(action.output, f"{where}.output", rows, issues)
        return
    last = where
    if action.sql is not None or action.transform is not None:
        last = f"{where}.{'transform' if action.sql is None else 'sql'}"
    with issues.collect():
        _refuse_own_columns(last, rows)
    if isinstance(action.output, QueueOutputSettings):
        with issues.collect():
            try:
                check_writable(rows.schema, needs_route=False)
            except SchemaMismatch as error:
                raise ConfigError(last, f"a queue cannot store these rows: {error}") from error
    _check_tables(action, where, rows, issues)


def _check_sink(
    sink: SparkSinkSettings, where: str, rows: DataFrame, issues: IssueCollector
) -> None:
    with issues.collect():
        try:
            can_stream_into(rows.sparkSession, sink.format)
        except ConfigError as error:
            raise ConfigError(f"{where}.format", get_message(error)) from error
    written = _check_plan(f"{where}.columns", partial(select_sink_columns, rows, sink))
    columns = {name.lower() for name in written.columns}
    for name in sink.partition_by:
        if name.lower() not in columns:
            why = f"there is no column {name!r}; the output has {', '.join(written.columns)}"
            issues.add(f"{where}.partition_by", why)
    try:
        check_file_columns(written, sink)
    except ConfigError:
        return  # There is no such format: `can_stream_into` has reported it.
    except Exception as error:
        place = f"{where}.{'columns' if sink.columns else 'format'}"
        advice = "name the columns to write in `columns`, as in CAST(value AS string) AS value"
        raise ConfigError(place, f"{describe_failure(error)}; {advice}") from error


def _check_tables(
    action: ActionSettings, where: str, rows: DataFrame, issues: IssueCollector
) -> None:
    """Check that outputs which fill columns of a table find them in the rows."""
    outputs: dict[str, OutputSettings] = {f"{where}.output": action.output}
    if action.delivery.failover is not None:
        outputs[f"{where}.delivery.failover.output"] = action.delivery.failover.output
    for place, output in outputs.items():
        if not isinstance(output, SqlSettings | TableOutputSettings):
            continue
        columns = [*drop_variants(rows).columns, PAYLOAD]
        for name, source in output.columns.items():
            if not has_source(columns, source):
                message = f"the events have no {source!r}; they have {', '.join(columns)}"
                issues.add(f"{place}.columns.{name}", message)


def _refuse_own_columns(place: str, rows: DataFrame) -> None:
    """Refuse columns that lanes would replace with their own of the same name."""
    for name in rows.columns:
        if name.lower() == PAYLOAD or name.lower().startswith(OWN_PREFIX):
            raise ConfigError(
                place, f"makes a column {name!r}, which lanes use; give it another name"
            )


def _check_plan(
    place: str, make: Callable[[], DataFrame], mode: str | None = "append"
) -> DataFrame:
    """Return the rows if Spark can run them in an output mode, or can plan them without one."""
    try:
        rows = make()
        rows.schema  # noqa: B018 - analyses the plan
        if mode is not None:
            check_streaming_plan(rows, mode)
    except ConfigError as error:
        raise ConfigError(place, get_message(error)) from error
    except Exception as error:
        raise ConfigError(place, describe_failure(error)) from error
    return rows


# ── test cases ──


class CaseTrial:
    """Runs the plan of a pipeline's lanes over the events of one test case."""

    def __init__(self, spark: SparkSession, settings: PipelineSettings, case: Case) -> None:
        # In a session of its own, for the views of SQL.
        self._spark = spark.newSession()
        self._settings = settings
        self._case = case
        self._source = self._make_table(case.events)
        events = parse_and_transform(self._source, settings)
        routed = add_routes(events, settings.actions, settings.dead_letters, settings.joined_queues)
        self._routed = routed.cache()

    def collect_results(self) -> Iterator[tuple[str, list[CaseRow]]]:
        """Yield the rows of each action that the case expects something of, as outputs get them."""
        try:
            for action in self._settings.actions:
                if action.name in self._case.expect:
                    rows = apply_action(action, self._select_routed(action), self._read_queue)
                    columns = [name for name in rows.columns if name not in (QUEUE_COLUMN, DIRECT)]
                    payloads = add_payload(rows, "json").select(F.col(PAYLOAD).cast("string"))
                    # JSON leaves out columns that are null.
                    nulls = dict.fromkeys(columns)
                    found: list[CaseRow] = [
                        {**nulls, **json.loads(row[0])} for row in payloads.collect()
                    ]
                    yield action.name, found
        finally:
            self._routed.unpersist()

    def _make_table(self, events: Sequence[CaseEvent]) -> DataFrame:
        now = datetime.now(UTC)
        rows = []
        for offset, event in enumerate(events):
            value = None if event.value is None else bytearray(event.value.encode())
            time = event.timestamp or now
            time = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
            given = (event.key, value, time, event.severity, event.source)
            rows.append((*given, MAIN, 0, offset, event.headers))
        return self._spark.createDataFrame(rows, get_read_schema(include_headers=True))

    def _select_routed(self, action: ActionSettings) -> DataFrame:
        """Return the events that are routed to an action, as its lane would read them."""
        column = DIRECT if action.is_called_by_main else QUEUE_COLUMN
        return (
            self._routed.where(F.array_contains(column, action.name))
            .drop(DIRECT)
            .withColumn(QUEUE_COLUMN, F.lit(action.name))
        )

    def _read_queue(self, name: str) -> DataFrame:
        """Return the events of a queue after the case; a queue without an action is empty."""
        for action in self._settings.queued_actions:
            if action.name == name:
                return self._select_routed(action)
        return self._source.limit(0)
