"""What a lane's tasks do with events, action by action, as it is told to them in JSON. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict

from turnlane.delivery.settings import DeliverySettings, Ordering
from turnlane.events import BASE_SCHEMA
from turnlane.intervals import MOST_COPIES
from turnlane.outputs.api import OutputSettings
from turnlane.pipeline.settings import FAILOVER, MAIN, ActionSettings, PipelineSettings

# ── needs ──
# Which columns lanes need. Pure.
#
# The main lane mostly needs all that parsing makes: they are stored in the actions' queues, for
# outputs to read. Where outputs take the value only, parsing is for filters alone, and what no
# filter
# names need not even be planned.
#
# Tasks that deliver mostly need few: every column is carried row by row from a task that reads
# into
# Java, and from there into one that sends.

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


# ── suspension ──
# Whether a lane may go on, by the breakers of its actions. Pure.
#
# While it may not, its reader plans nothing: no task waits for a destination.

Breakers = Mapping[str, Mapping[str, Any]]
"""What a node says of breakers, by action."""


class Way(BaseModel):
    """One way that events can go."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: str
    after: float = 0.0
    """Taken only once the breaker of the way before has been open for so long."""


Ways = Sequence[Way]
"""Ways to be tried one after another: if one is free, events go."""


class Suspension(NamedTuple):
    """What keeps a lane from going on."""

    wait: float
    """Seconds until it may go on; 0 if it may now."""
    is_probe: bool = False
    """Whether it may go on only to find out how its destination is."""
    why: str | None = None
    """What the destination has said; ``None`` while no breaker is open."""


def suspension(lane: Sequence[Ways], breakers: Breakers) -> Suspension:
    """Whether a lane may go on: each of its actions needs a way that is free."""
    each = [_of_ways(ways, breakers) for ways in lane]
    wait = max((one.wait for one in each), default=0.0)
    reasons = [one.why for one in each if one.why is not None]
    is_probe = any(one.is_probe for one in each)
    return Suspension(wait, is_probe, reasons[0] if reasons else None)


def _of_ways(ways: Ways, breakers: Breakers) -> Suspension:
    own = [breakers.get(way.action, {}) for way in ways]
    waits = [_wait(*each) for each in zip(ways, own, [own[0], *own], strict=False)]
    wait, first = min(waits), own[0]
    free = [breaker for breaker, each in zip(own, waits, strict=True) if each <= 0]
    is_probe = bool(free) and all(map(_is_failing, free))
    if not _is_open(first) or (free and not is_probe):
        return Suspension(wait, is_probe)
    return Suspension(wait, is_probe, f"{ways[0].action}: {first.get('error') or 'unknown'}")


def _wait(way: Way, own: Mapping[str, Any], before: Mapping[str, Any]) -> float:
    wait = float(own.get("wait", 0.0))
    if way.after <= 0:
        return wait
    since = before.get("open_for")
    return max(wait, float("inf") if since is None else way.after - since)


def _is_open(breaker: Mapping[str, Any]) -> bool:
    return bool(breaker.get("state", "closed") != "closed")


def _is_failing(breaker: Mapping[str, Any]) -> bool:
    """Whether it is open, or on its way there: a full batch would be read for nothing."""
    return _is_open(breaker) or breaker.get("failures", 0) > 0


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
