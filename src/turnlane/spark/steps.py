"""What a lane's tasks do with events, action by action, as it is told to them in JSON. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from turnlane.delivery.settings import DeliverySettings, Ordering
from turnlane.pipeline.settings import FAILOVER, MAIN, ActionSettings, PipelineSettings
from turnlane.spark.needs import wanted_by_tasks
from turnlane.spark.suspension import Way


class Step(BaseModel):
    """What is done for one action."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: str
    reads: str
    """The queue that the lane reads."""
    output: dict[str, Any] | None = None
    """Whom to deliver to; without, rows only go into the action's queue."""
    delivery: DeliverySettings = DeliverySettings()
    queue: str | None = None
    """Where rows go that are not delivered now; without, their events come again."""
    only_when_suspended: bool = False
    """Whether it takes only rows that the step before could not deliver now."""
    dead_letters: str | None = None
    """Where rows go that can never be delivered."""
    rereads: bool = False
    """Whether dead letters are read from the lane's queue again: rows are no longer the same."""
    version: str = ""
    """Of the configuration, for people."""
    workers: int = 0
    """How many tasks the lane may have at a time."""


def steps_of_main(settings: PipelineSettings) -> list[Step]:
    """The steps of the main lane: for actions without a queue, and those that try without it."""
    return [_main_step(action) for action in settings.actions if _is_step(action)]


def _is_step(action: ActionSettings) -> bool:
    if action.discards:
        return False
    return action.is_called_by_main or action.delivery.only_when_suspended


def _main_step(action: ActionSettings) -> Step:
    only_queue = not action.is_called_by_main
    return Step(
        action=action.name,
        reads=MAIN,
        output=None if only_queue else action.output.model_dump(mode="json"),
        delivery=_delivery(action),
        queue=None if action.is_direct else action.name,
        only_when_suspended=action.delivery.only_when_suspended,
        dead_letters=action.dead_letters,
        rereads=action.is_direct,
        version=_version(action),
    )


def _delivery(action: ActionSettings) -> DeliverySettings:
    """How an action delivers; what it does not say is as is usual for its output."""
    said = action.delivery
    if said.failover is not None:
        return said  # it holds for both outputs, and the second one may be of another kind
    usual = action.output.usual.items()
    return said.model_copy(update={k: v for k, v in usual if k not in said.model_fields_set})


def step_of_lane(action: ActionSettings) -> Step:
    """What the lane of an action does."""
    return Step(
        action=action.name,
        reads=action.name,
        output=action.output.model_dump(mode="json"),
        delivery=_delivery(action),
        dead_letters=action.dead_letters,
        rereads=action.transform is not None or wanted_by_tasks(action) is not None,
        version=_version(action),
    )


def _version(action: ActionSettings) -> str:
    return hashlib.sha256(action.model_dump_json().encode()).hexdigest()[:12]


def ways_of(steps: Sequence[Step]) -> list[list[Way]]:
    """The ways that a lane needs free to go on: of each step, and those that stand in for it.

    One whose rows can go into a queue instead never holds the lane up.
    """
    groups: list[list[Step]] = []
    for step in steps:
        if step.only_when_suspended and groups:
            groups[-1].append(step)
        else:
            groups.append([step])
    return [
        [way for step in group for way in _ways(step)]
        for group in groups
        if all(step.queue is None for step in group)
    ]


def _ways(step: Step) -> list[Way]:
    ways = [Way(action=step.action)]
    if step.delivery.failover is not None:
        ways.append(Way(action=f"{step.action}.{FAILOVER}", after=step.delivery.failover.after))
    return ways


def ordering_of(steps: Sequence[Step]) -> Ordering:
    """The strictest order that any of them wants."""
    wanted = {step.delivery.ordering for step in steps}
    for ordering in (Ordering.STRICT, Ordering.KEY):
        if ordering in wanted:
            return ordering
    return Ordering.NONE
