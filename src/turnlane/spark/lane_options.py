"""The options by which a lane's reader and sink are told what the lane is. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from turnlane.delivery.settings import Ordering
from turnlane.pipeline.settings import MAIN, LaneSettings
from turnlane.spark.steps import Step, ordering_of, ways_of


def reading(lane: str, run: str, settings: LaneSettings, steps: Sequence[Step]) -> dict[str, str]:
    """For the reader of a lane's queue, whose sink settles what it has read."""
    mine = [step.delivery for step in steps if step.output is not None]
    ordering = ordering_of(steps)
    fresh = min((each.fresh_share for each in mine), default=0.0)
    options = {
        "lane": lane,
        "run": run,
        "ways": in_json(ways_of(steps)),
        "ordering": str(ordering),
        "freshShare": str(fresh if ordering is Ordering.NONE else 0.0),
        "probeEvents": str(min((each.batch_events for each in mine), default=1000)),
        "batchSeconds": f"{min((each.max_time for each in mine), default=5.0)}s",
    }
    age = max((each.batch_age for each in mine), default=0.0)
    if age and settings.min_events == 1:
        full = max(each.batch_events for each in mine)
        options |= {"minOffsetsPerTrigger": str(full), "maxTriggerDelay": f"{age}s"}
    if any(each.rate_limit for each in mine):
        options["workers"] = "1"  # a rate is for all tasks together: one of them keeps to it
    return options


def writing(lane: str, run: str, steps: Sequence[Step]) -> dict[str, str]:
    """For a lane's sink."""
    routed = str(lane == MAIN).lower()
    return {"lane": lane, "run": run, "steps": in_json(steps), "routed": routed}


def in_json(parts: Sequence[Any]) -> str:
    """Steps, or ways, as the source's options have them."""
    return json.dumps(to_jsonable_python(parts))
