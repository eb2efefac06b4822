"""The steps of a lane: what its tasks do for each action, and when the lane has to wait. Pure.

The driver sends the steps to the tasks as JSON, in an option of the sink. From the same steps the
lane's reader learns which breakers it has to watch: while a breaker is open, the reader plans no
batch, so no task waits for a destination that does not answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from turnlane.delivery.settings import DeliverySettings, Ordering
from turnlane.pipeline.settings import FAILOVER

BreakerStates = Mapping[str, Mapping[str, Any]]
"""By action, the state of its breaker as a node reports it."""


class LaneStep(BaseModel):
    """What tasks do for one action."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: str
    source_queue: str
    """The queue that the lane reads."""
    output: dict[str, Any] | None = None
    """The settings of the output; without one, rows only go into the action's queue."""
    delivery: DeliverySettings = DeliverySettings()
    queue: str | None = None
    """Where rows go that cannot be delivered now; without one, their events come again."""
    only_when_suspended: bool = False
    """Whether it takes only rows that the step before it could not deliver now."""
    dead_letters: str | None = None
    """The queue of rows that can never be delivered."""
    rereads: bool = False
    """Whether dead letters are read from the source queue again, because the rows have changed or
    lack columns."""
    version: str = ""
    """A hash of the action's settings; dead letters carry it for people."""
    workers: int = 0
    """How many tasks the lane may have at a time."""


class DeliveryPath(BaseModel):
    """A way to deliver an action's events: its output, or its second output."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: str
    after: float = 0.0
    """The path is used only after the breaker of the path before it was open for this long."""


DeliveryPaths = Sequence[DeliveryPath]
"""Alternatives, tried in this order: one open path is enough."""


def list_required_paths(steps: Sequence[LaneStep]) -> list[list[DeliveryPath]]:
    """Return the paths that a lane needs: of each list, one path must be open.

    Steps with ``only_when_suspended`` add their paths to the step before them. A step whose rows
    can go into a queue instead never stops the lane.
    """
    groups: list[list[LaneStep]] = []
    for step in steps:
        if step.only_when_suspended and groups:
            groups[-1].append(step)
        else:
            groups.append([step])
    required: list[list[DeliveryPath]] = []
    for group in groups:
        if any(step.queue is not None for step in group):
            continue
        required.append([])
        for step in group:
            required[-1].append(DeliveryPath(action=step.action))
            if (second := step.delivery.failover) is not None:
                name = f"{step.action}.{FAILOVER}"
                required[-1].append(DeliveryPath(action=name, after=second.after))
    return required


def find_strictest_ordering(steps: Sequence[LaneStep]) -> Ordering:
    """Return the strictest ordering that any of the steps needs."""
    strictness = (Ordering.NONE, Ordering.KEY, Ordering.STRICT)
    return max(
        (step.delivery.ordering for step in steps), key=strictness.index, default=Ordering.NONE
    )


class Suspension(NamedTuple):
    """Whether a lane has to wait for its destinations."""

    wait: float
    """Seconds until it may continue; 0 if it may continue now."""
    is_probe: bool = False
    """Whether it may send only a few events, to find out whether the destination works again."""
    why: str | None = None
    """The error of the destination; ``None`` while no breaker is open."""


def find_suspension(lane: Sequence[DeliveryPaths], breakers: BreakerStates) -> Suspension:
    """Return whether a lane has to wait: each of its actions needs an open path."""
    each = [_find_suspension(paths, breakers) for paths in lane]
    return Suspension(
        max((one.wait for one in each), default=0.0),
        any(one.is_probe for one in each),
        next((one.why for one in each if one.why is not None), None),
    )


def _find_suspension(paths: DeliveryPaths, breakers: BreakerStates) -> Suspension:
    """Return whether one action has to wait, by all of its paths."""
    own = [breakers.get(path.action, {}) for path in paths]
    waits = []
    for path, breaker, before in zip(paths, own, [own[0], *own], strict=False):
        waits.append(float(breaker.get("wait", 0.0)))
        if path.after > 0:
            since = before.get("open_for")
            waits[-1] = max(waits[-1], float("inf") if since is None else path.after - since)
    wait, first = min(waits), own[0]
    open_paths = [breaker for breaker, each in zip(own, waits, strict=True) if each <= 0]
    is_probe = bool(open_paths) and all(map(_is_failing, open_paths))
    if not _is_open(first) or (open_paths and not is_probe):
        return Suspension(wait, is_probe)
    return Suspension(wait, is_probe, f"{paths[0].action}: {first.get('error') or 'unknown'}")


def _is_open(breaker: Mapping[str, Any]) -> bool:
    return bool(breaker.get("state", "closed") != "closed")


def _is_failing(breaker: Mapping[str, Any]) -> bool:
    """Whether the breaker is open or counts failures: a full batch would probably be wasted."""
    return _is_open(breaker) or breaker.get("failures", 0) > 0
