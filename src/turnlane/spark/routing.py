"""Routing: which actions get an event, decided for all actions in one pass; and their payloads.

A row gets its routes as two lists of names (:func:`add_routes`), the queues that it goes into and
the outputs that the main lane calls, or as a number with a bit for each queue
(:func:`add_route_bits`, for the by-reference path).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import NamedTuple, Self

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from turnlane.delivery.settings import DIRECT, DISCARDED, PAYLOAD, ROUTES
from turnlane.formats.parse_settings import PARSE_ERROR
from turnlane.pipeline.settings import ActionSettings
from turnlane.spark.row_codec import QUEUE_COLUMN
from turnlane.spark.transforms import use_try_casts


class RouteConditions(NamedTuple):
    """The condition by which each action gets an event; ``None`` if it gets all events."""

    queued: dict[str, Column | None]
    direct: dict[str, Column | None]

    @classmethod
    def from_actions(
        cls,
        actions: Sequence[ActionSettings],
        dead_letters: str | None = None,
        joined: Collection[str] = (),
    ) -> Self:
        """Return the conditions of some actions.

        As in rsyslog, a direct ``discard`` takes an event from all later actions. A ``discard``
        with a queue takes nothing, unless its queue is ``joined``. Events that cannot be parsed go
        only to ``dead_letters``, if there is such a queue.
        """
        queued: dict[str, Column | None] = {}
        direct: dict[str, Column | None] = {}
        remaining: Column | None = None
        if dead_letters is not None:
            queued[dead_letters] = F.col(PARSE_ERROR).isNotNull()
            remaining = F.col(PARSE_ERROR).isNull()
        for action in actions:
            condition = _build_condition(action)
            if action.is_discard and action.name not in joined:
                if action.is_direct:
                    remaining = (
                        F.expr("false") if condition is None else _and(remaining, ~condition)
                    )
                continue
            routes = direct if action.is_called_by_main else queued
            routes[action.name] = _and(remaining, condition)
        return cls(queued, direct)


def add_routes(
    events: DataFrame,
    actions: Sequence[ActionSettings],
    dead_letters: str | None = None,
    joined: Collection[str] = (),
) -> DataFrame:
    """Return events with the names of their routes; leaves out events without a route."""
    decided, actions, decisions = _decide_random_discards(events, actions)
    routes = RouteConditions.from_actions(actions, dead_letters, joined)
    columns = {QUEUE_COLUMN: _list_names(routes.queued), DIRECT: _list_names(routes.direct)}
    routed = decided.withColumns(columns).drop(*decisions)
    return routed.where((F.size(QUEUE_COLUMN) > 0) | (F.size(DIRECT) > 0))


def add_route_bits(
    events: DataFrame, actions: Sequence[ActionSettings], joined: Collection[str] = ()
) -> DataFrame:
    """Return events with their routes as a number: a bit for each queue, in the order of actions.

    All actions have a queue, except discards. Leaves out events without a route.
    """
    decided, actions, decisions = _decide_random_discards(events, actions)
    routes = RouteConditions.from_actions(actions, joined=joined).queued
    bits = [
        F.lit(1 << at) if matches is None else F.when(matches, F.lit(1 << at)).otherwise(F.lit(0))
        for at, matches in enumerate(routes.values())
    ]
    number = reduce(Column.bitwiseOR, bits, F.lit(0).cast("bigint"))
    return decided.withColumn(ROUTES, number).drop(*decisions).where(F.col(ROUTES) != 0)


def _decide_random_discards(
    events: DataFrame, actions: Sequence[ActionSettings]
) -> tuple[DataFrame, Sequence[ActionSettings], list[str]]:
    """Evaluate random discards into columns; returns events, changed actions, and the columns.

    The condition of a discard is a part of the conditions of all actions after it. A random
    condition would be evaluated again for each of them, with different results. So it is evaluated
    once, into a column that the others read.
    """
    conditions = {
        f"{DISCARDED}{at}": condition
        for at, action in enumerate(actions)
        if action.is_discard and action.is_direct
        if (condition := _build_condition(action)) is not None
    }
    if not conditions:
        return events, actions, []
    plan = events.select(*conditions.values())._jdf.queryExecution().analyzed()  # noqa: SLF001
    expressions = plan.expressions()
    random = {
        name: condition
        for at, (name, condition) in enumerate(conditions.items())
        if not expressions.apply(at).deterministic()
    }
    changed = [
        action.model_copy(update={"filter": name})
        if (name := f"{DISCARDED}{at}") in random
        else action
        for at, action in enumerate(actions)
    ]
    return events.withColumns(random) if random else events, changed, list(random)


def _build_condition(action: ActionSettings) -> Column | None:
    """Return the filter as a condition in which null is false."""
    if action.filter is None:
        return None
    return F.coalesce(F.expr(use_try_casts(action.filter)), F.expr("false"))


def _and(one: Column | None, other: Column | None) -> Column | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _list_names(routes: Mapping[str, Column | None]) -> Column:
    """Return a list of the names whose conditions are true."""
    if not routes:
        return F.array().cast("array<string>")
    names = [
        F.lit(name) if matches is None else F.when(matches, F.lit(name))
        for name, matches in routes.items()
    ]
    return F.array_compact(F.array(*names))


# ── payloads ──


def add_payload(events: DataFrame, payload_format: str) -> DataFrame:
    """Return events with a column ``payload``: ``json`` of all columns, or ``raw``, the value."""
    is_raw = payload_format == "raw" and "value" in events.columns
    return events.withColumn(PAYLOAD, F.col("value") if is_raw else _build_json(events))


def _build_json(events: DataFrame) -> Column:
    """Return a JSON object of all columns except routes and offsets.

    Bytes are a text, or ``<name>_base64`` if they are no UTF-8. Bytes within other types are always
    base64.
    """
    columns: list[Column] = []
    for field in events.schema.fields:
        if field.name in (PAYLOAD, QUEUE_COLUMN, DIRECT, "partition", "offset"):
            continue
        column = F.col(f"`{field.name}`")
        if field.dataType.typeName() != "binary":
            columns.append(column)
            continue
        text = column.cast("string")
        is_text = F.is_valid_utf8(text)
        other = f"{field.name}_base64"
        while other in events.columns:
            other += "_"
        # One of the two is null, and JSON leaves it out.
        columns += [F.when(is_text, text).alias(field.name), F.when(~is_text, column).alias(other)]
    return F.to_json(F.struct(*columns)).cast("binary")
