"""Which columns the main lane needs of those that parsing makes. Pure.

Mostly all of them: they are stored in the actions' queues, for outputs to read. Where outputs take
the value only, parsing is for filters alone, and what no filter names need not even be planned.
"""

from __future__ import annotations

import re

from turnlane.pipeline.settings import ActionSettings, PipelineSettings


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
    failover = action.delivery.failover
    outputs = [action.output] if failover is None else [action.output, failover.output]
    return all(each.type == "file" and each.format == "raw" for each in outputs)
