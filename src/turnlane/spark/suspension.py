"""Whether a lane may go on, by the breakers of its actions. Pure.

While it may not, its reader plans nothing: no task waits for a destination.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

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
