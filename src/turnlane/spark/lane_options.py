"""The options by which a lane's reader and sink are told what the lane is. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import to_jsonable_python

from turnlane.delivery.settings import Ordering
from turnlane.pipeline.settings import MAIN, LaneSettings
from turnlane.problems import Contradiction, Problem
from turnlane.quantities import Duration
from turnlane.spark.options import ReadOptions, WriteOptions
from turnlane.spark.steps import Step, ordering_of, ways_of
from turnlane.spark.suspension import Way


def _json(value: object) -> object:
    return json.loads(value) if isinstance(value, str) else value


class LaneReadOptions(ReadOptions):
    """The options of a lane's reader."""

    lane: str = Field(description="The lane whose cursor the sink moves.")
    run: str = Field(description="Tells this start of a lane from earlier ones.")
    ways: Annotated[tuple[tuple[Way, ...], ...], BeforeValidator(_json)] = Field(
        default=(), description="What must be free for a batch, as JSON; see `suspension.py`."
    )
    ordering: Ordering = Field(default=Ordering.NONE, description="What waits for what.")
    fresh_share: float = Field(
        default=0.0, ge=0, le=1, description="The share of the newest of a backlog."
    )
    probe_events: int = Field(
        default=1000, ge=1, description="The events of a batch that is a probe."
    )
    batch_seconds: Duration = Field(default=5.0, gt=0, description="How long tasks go on sending.")
    by_place: bool = Field(
        default=False, description="Whether rows are shares of the queue, for the sink to read."
    )
    into: Annotated[tuple[str, ...], BeforeValidator(_json)] = Field(
        default=(), description="The queues that need room for a batch, as JSON."
    )
    grouped: bool = Field(
        default=False, description="Whether events that look the same are one row."
    )


class LaneWriteOptions(WriteOptions):
    """The options of a lane's sink, and of one that delivers a batch for a lane."""

    lane: str | None = Field(default=None, description="The lane whose cursor a commit moves.")
    run: str | None = Field(
        default=None, description="Tells this start of a lane from earlier ones."
    )
    steps: Annotated[tuple[Step, ...], BeforeValidator(_json)] = Field(
        default=(), description="What tasks do for each action, as JSON; see `steps.py`."
    )
    routed: bool = Field(
        default=False,
        description="Beside `steps`: whether the column `queue` sends rows on to queues, too.",
    )
    copies: Annotated[tuple[str, ...] | None, BeforeValidator(_json)] = Field(
        default=None,
        description="Rows are places in the lane's queue: copy its events into these queues, as "
        "JSON, by the bits of a row's routes. There may be none, if all events are discarded.",
    )
    reads: Annotated[tuple[str, ...], BeforeValidator(_json)] = Field(
        default=(),
        description="Rows are shares of the lane's queue: read these columns of it, as JSON.",
    )

    @property
    def has_own_rows(self) -> bool:
        """Whether rows are no events to be stored, but what the lane's tasks make something of."""
        return bool(self.steps) or self.copies is not None

    @model_validator(mode="after")
    def _run_given(self) -> Self:
        if (self.lane is None) != (self.run is None):
            raise Contradiction([Problem("run", "goes with lane")])
        return self


def read_options(given: Mapping[str, str]) -> ReadOptions:
    """The options of a lane's reader if they name one, else anyone's. Raises ``ConfigError``."""
    return (LaneReadOptions if _named(given) & {"lane"} else ReadOptions).of(given)


def write_options(given: Mapping[str, str]) -> WriteOptions:
    """The same of sinks."""
    return (LaneWriteOptions if _named(given) & {"lane", "steps"} else WriteOptions).of(given)


def _named(given: Mapping[str, str]) -> set[str]:
    return {name.lower() for name in given}


def reading(
    lane: str, run: str, settings: LaneSettings, steps: Sequence[Step], into: Sequence[str] = ()
) -> dict[str, str]:
    """For the reader of a lane's queue, whose sink settles what it has read and fills ``into``."""
    mine = [step.delivery for step in steps if step.output is not None]
    ordering = ordering_of(steps)
    fresh = min((each.fresh_share for each in mine), default=0.0)
    options = {
        "lane": lane,
        "run": run,
        "ways": in_json(ways_of(steps)),
        "into": in_json(into),
        "ordering": str(ordering),
        "freshShare": str(fresh if ordering is Ordering.NONE else 0.0),
        "probeEvents": str(min((each.batch_events for each in mine), default=1000)),
        "batchSeconds": f"{min((each.max_time for each in mine), default=5.0)}s",
    }
    age = max((each.batch_age for each in mine), default=0.0)
    if age and settings.min_events == 1:
        full = max(each.batch_events for each in mine)
        options |= {"minOffsetsPerTrigger": str(full), "maxTriggerDelay": f"{age}s"}
    return options


def writing(lane: str, run: str, steps: Sequence[Step]) -> dict[str, str]:
    """For a lane's sink."""
    routed = str(lane == MAIN).lower()
    return {"lane": lane, "run": run, "steps": in_json(steps), "routed": routed}


def in_json(parts: Sequence[Any]) -> str:
    """Steps, or ways, as the source's options have them."""
    return json.dumps(to_jsonable_python(parts))
