"""Routing: which actions an event goes to, decided for all of them in one pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from turnlane.delivery.columns import DIRECT
from turnlane.formats.parse_settings import PARSE_ERROR
from turnlane.pipeline.settings import ActionSettings
from turnlane.spark.tolerant import tolerant

QUEUE = "queue"
"""The column that says into which queues a row goes; ``DIRECT`` has the outputs that are called."""


def routed(
    events: DataFrame,
    actions: Sequence[ActionSettings],
    dead_letters: str | None = None,
    joined: Collection[str] = (),
) -> DataFrame:
    """Events with their routes, those that go nowhere left out.

    As in rsyslog, a direct ``discard`` ends the event's way: later actions do not see it. Behind a
    queue it takes nothing, unless the queue is ``joined``. What could not be parsed goes to
    ``dead_letters``, if there is such a queue, and nowhere else.
    """
    queued: list[Column] = []
    direct: list[Column] = []
    going: Column | None = None
    if dead_letters is not None:
        queued.append(F.when(F.col(PARSE_ERROR).isNotNull(), F.lit(dead_letters)))
        going = F.col(PARSE_ERROR).isNull()
    for action in actions:
        matches = _all_of(going, _condition(action))
        if action.discards and action.name not in joined:
            if action.is_direct:
                going = F.expr("false") if matches is None else _all_of(going, ~matches)
            continue
        name = F.lit(action.name)
        (direct if action.is_called_by_main else queued).append(
            name if matches is None else F.when(matches, name)
        )
    routes = {QUEUE: _present(queued), DIRECT: _present(direct)}
    return events.withColumns(routes).where((F.size(QUEUE) > 0) | (F.size(DIRECT) > 0))


def _condition(action: ActionSettings) -> Column | None:
    """The filter; what is neither true nor false does not pass."""
    if action.filter is None:
        return None
    return F.coalesce(F.expr(tolerant(action.filter)), F.expr("false"))


def _all_of(one: Column | None, other: Column | None) -> Column | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _present(names: list[Column]) -> Column:
    if not names:
        return F.array().cast("array<string>")
    return F.array_compact(F.array(*names))
