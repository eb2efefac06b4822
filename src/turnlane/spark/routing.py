"""Routing: which actions an event goes to, decided for all of them in one pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import NamedTuple, Self

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from turnlane.delivery.settings import DIRECT, DISCARDED, PAYLOAD, ROUTES
from turnlane.formats.parse_settings import PARSE_ERROR
from turnlane.pipeline.settings import ActionSettings
from turnlane.spark.transforms import tolerant

QUEUE = "queue"
"""The column that says into which queues a row goes; ``DIRECT`` has the outputs that are called."""


class Routes(NamedTuple):
    """Which actions an event goes to: the condition of each, ``None`` if it gets all."""

    queued: dict[str, Column | None]
    direct: dict[str, Column | None]

    @classmethod
    def of(
        cls,
        actions: Sequence[ActionSettings],
        dead_letters: str | None = None,
        joined: Collection[str] = (),
    ) -> Self:
        """The routes of some actions.

        As in rsyslog, a direct ``discard`` ends the event's way: later actions do not see it.
        Behind a queue it takes nothing, unless the queue is ``joined``. What could not be parsed
        goes to ``dead_letters``, if there is such a queue, and nowhere else.
        """
        queued: dict[str, Column | None] = {}
        direct: dict[str, Column | None] = {}
        going: Column | None = None
        if dead_letters is not None:
            queued[dead_letters] = F.col(PARSE_ERROR).isNotNull()
            going = F.col(PARSE_ERROR).isNull()
        for action in actions:
            condition = _condition(action)
            if action.discards and action.name not in joined:
                if action.is_direct:
                    going = F.expr("false") if condition is None else _all_of(going, ~condition)
                continue
            (direct if action.is_called_by_main else queued)[action.name] = _all_of(
                going, condition
            )
        return cls(queued, direct)


class Drawn(NamedTuple):
    """Events of which chance has decided what discards take: once, for all actions after them.

    The condition of a discard is a part of each of theirs. One that is left to chance would be
    tossed for anew in each: it is in a column of its own instead, which is all that they read.
    """

    events: DataFrame
    actions: Sequence[ActionSettings]
    columns: Sequence[str] = ()

    @classmethod
    def of(cls, events: DataFrame, actions: Sequence[ActionSettings]) -> Self:
        """The same events and actions if nothing is left to chance."""
        names = {f"{DISCARDED}{at}": action for at, action in enumerate(actions)}
        discards = {
            name: condition
            for name, action in names.items()
            if action.discards and action.is_direct
            if (condition := _condition(action)) is not None
        }
        columns = _by_chance(events, discards)
        reading = [
            action.model_copy(update={"filter": name}) if name in columns else action
            for name, action in names.items()
        ]
        return cls(events.withColumns(columns) if columns else events, reading, list(columns))

    def without(self, routed: DataFrame) -> DataFrame:
        """The events with their routes: how those came about is of no more use."""
        return routed.drop(*self.columns) if self.columns else routed


def routed(
    events: DataFrame,
    actions: Sequence[ActionSettings],
    dead_letters: str | None = None,
    joined: Collection[str] = (),
) -> DataFrame:
    """Events with the names of their routes, those that go nowhere left out."""
    drawn = Drawn.of(events, actions)
    routes = Routes.of(drawn.actions, dead_letters, joined)
    columns = {QUEUE: _present(routes.queued), DIRECT: _present(routes.direct)}
    going = drawn.without(drawn.events.withColumns(columns))
    return going.where((F.size(QUEUE) > 0) | (F.size(DIRECT) > 0))


def numbered(
    events: DataFrame, actions: Sequence[ActionSettings], joined: Collection[str] = ()
) -> DataFrame:
    """Events with their routes as a number in which each queue has a bit, in the order of actions.

    Of actions that all have a queue, but for those that discard.
    """
    drawn = Drawn.of(events, actions)
    routes = Routes.of(drawn.actions, joined=joined).queued
    bits = [
        F.lit(1 << at) if matches is None else F.when(matches, F.lit(1 << at)).otherwise(F.lit(0))
        for at, matches in enumerate(routes.values())
    ]
    none = F.lit(0).cast("bigint")
    number = reduce(Column.bitwiseOR, bits, none)
    going = drawn.without(drawn.events.withColumn(ROUTES, number))
    return going.where(F.col(ROUTES) != 0)


def is_deterministic(rows: DataFrame) -> bool:
    """Whether all that is made of equal rows is equal. ``rand() < 0.1`` is not."""
    plan = rows._jdf.queryExecution().analyzed()  # noqa: SLF001 - nothing else tells
    return bool(plan.deterministic())


def _by_chance(events: DataFrame, conditions: Mapping[str, Column]) -> dict[str, Column]:
    """Those that may come out differently for equal events, however the events were made."""
    if not conditions:
        return {}
    plan = events.select(*conditions.values())._jdf.queryExecution().analyzed()  # noqa: SLF001
    made = plan.expressions()
    return {
        name: condition
        for at, (name, condition) in enumerate(conditions.items())
        if not made.apply(at).deterministic()
    }


def _condition(action: ActionSettings) -> Column | None:
    """The filter; what is neither true nor false does not pass."""
    if action.filter is None:
        return None
    return F.coalesce(F.expr(tolerant(action.filter)), F.expr("false"))


def _all_of(one: Column | None, other: Column | None) -> Column | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _present(routes: Mapping[str, Column | None]) -> Column:
    if not routes:
        return F.array().cast("array<string>")
    names = [
        F.lit(name) if matches is None else F.when(matches, F.lit(name))
        for name, matches in routes.items()
    ]
    return F.array_compact(F.array(*names))


# ── payloads ──
# What an output is handed: each event as one piece of text or bytes, made by Spark itself.

_PLACE = ("partition", "offset")


def with_payload(events: DataFrame, form: str) -> DataFrame:
    """Events with a column ``payload``: ``json`` of all that is known, or ``raw``, the value."""
    return events.withColumn(PAYLOAD, _raw(events) if form == "raw" else _json(events))


def _raw(events: DataFrame) -> Column:
    return F.col("value") if "value" in events.columns else _json(events)


def _json(events: DataFrame) -> Column:
    """A JSON object with every column."""
    columns: list[Column] = []
    for field in events.schema.fields:
        if field.name in (PAYLOAD, QUEUE, DIRECT, *_PLACE):
            continue
        if field.dataType.typeName() == "binary":
            columns += _bytes(field.name, events.columns)
        else:
            columns.append(F.col(f"`{field.name}`"))
    return F.to_json(F.struct(*columns)).cast("binary")


def _bytes(name: str, taken: Sequence[str]) -> tuple[Column, Column]:
    """Bytes as the text that they nearly always are; under another name where they are none.

    One of the two is null, and left out. Bytes within others, and these, are base64 in JSON.
    """
    column = F.col(f"`{name}`")
    text = column.cast("string")
    is_text = F.is_valid_utf8(text)
    other = f"{name}_base64"
    while other in taken:
        other += "_"
    return F.when(is_text, text).alias(name), F.when(~is_text, column).alias(other)
