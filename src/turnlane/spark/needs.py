"""Which columns lanes need. Pure.

The main lane mostly needs all that parsing makes: they are stored in the actions' queues, for
outputs to read. Where outputs take the value only, parsing is for filters alone, and what no filter
names need not even be planned.

Tasks that deliver mostly need few: every column is carried row by row from a task that reads into
Java, and from there into one that sends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from turnlane.delivery.settings import Ordering
from turnlane.events import BASE_SCHEMA
from turnlane.outputs.contract import OutputSettings
from turnlane.pipeline.settings import ActionSettings, PipelineSettings
from turnlane.queues.spans import MOST_COPIES

PLACE: Final = frozenset({"partition", "offset"})


def wanted_by_main(settings: PipelineSettings) -> frozenset[str] | None:
    """The columns that filters name, if nobody else reads any; ``None`` for all.

    There may be words among them that name no column.
    """
    if settings.transform is not None or settings.dead_letters is not None:
        return None
    if not all(_takes_values_only(action) for action in settings.actions):
        return None
    text = " ".join(action.filter or "" for action in settings.actions)
    return None if "*" in text else frozenset(re.findall(r"\w+", text.lower()))


def _takes_values_only(action: ActionSettings) -> bool:
    if action.discards:
        return True
    if action.transform is not None or action.sql is not None:
        return False
    of_every_event = {"timestamp"}
    return payload_form(action) == "raw" and all(
        each.wants is not None and each.wants <= of_every_event for each in _outputs(action)
    )


def goes_by_place(settings: PipelineSettings) -> bool:
    """Whether the main lane is about no more of an event than what its filters read.

    Then only its place goes through Spark, and tasks copy what the queue has into others. Not if
    one of those sheds events by their severity, which parsing may have found in them.
    """
    return (
        wanted_by_main(settings) is not None
        and len(settings.queued) <= MOST_COPIES
        and all(action.queue and action.queue.discard_mark is None for action in settings.queued)
    )


def delivers_by_place(action: ActionSettings) -> bool:
    """Whether a lane has nothing for Spark to do but to hand tasks their share of the queue."""
    wanted = wanted_by_tasks(action)
    return (
        action.transform is None
        and wanted is not None
        and wanted <= PLACE | set(BASE_SCHEMA.names)
        and payload_form(action) == "raw"
    )


def wanted_by_tasks(action: ActionSettings) -> frozenset[str] | None:
    """The columns beside ``payload`` that tasks need to deliver; ``None`` for all.

    Dead letters need none: their events are read from the queue again.
    """
    if action.sql is not None:
        return None  # its rows are of no queue
    outputs = _outputs(action)
    wanted = set(PLACE)
    for each in outputs:
        if each.wants is None:
            return None
        wanted |= each.wants
    if action.delivery.ordering is Ordering.KEY:
        wanted.add("key")
    if payload_form(action) != "raw" and "raw" in map(_form, outputs):
        wanted.add("value")  # the task makes that output's payloads of it
    return frozenset(wanted)


def payload_form(action: ActionSettings) -> str:
    """What payloads are made of: values as they are only if all the action's outputs want them so.

    Tasks can make raw payloads of others, but not the other way round.
    """
    return "raw" if set(map(_form, _outputs(action))) == {"raw"} else "json"


def _form(output: OutputSettings) -> str:
    return str(getattr(output, "format", "json"))


def _outputs(action: ActionSettings) -> Sequence[OutputSettings]:
    failover = action.delivery.failover
    return [action.output] if failover is None else [action.output, failover.output]
