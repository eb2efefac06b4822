"""What is wrong with how actions deliver, seen beside the rest of the action and the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from turnlane.config.document import Path
from turnlane.config.values import Values, Wrong, mapping
from turnlane.delivery.settings import Ordering
from turnlane.pipeline.settings import DEAD_LETTERS, DISCARD, FAILOVER, SPARK

_BY_SPARK: Final = "means nothing here: Spark itself writes this output"
_NO_QUEUE: Final = (
    "needs a queue for what cannot be delivered at once: give the action one, or leave this out"
)
_LATER: Final = "is done in the action's lane, which the main lane cannot do: leave out try_direct"
_OVERTAKES: Final = "lets events overtake those that wait in the queue: leave out one of the two"
_FIRST: Final = "there is no action before this one whose place it could take"
_ALWAYS_QUEUED: Final = (
    "the action before has a queue, which takes all its events; "
    "leave out that queue, or set its delivery.mode to try_direct"
)


def wrong_deliveries(
    actions: Sequence[tuple[int, Values]], is_direct: Callable[[Values], bool]
) -> Iterator[Wrong]:
    """All that is wrong, with its place."""
    before: Values | None = None
    letters = {DEAD_LETTERS, *(f"{action.get('name')}.dead" for _, action in actions)}
    seconds = {f"{action.get('name')}.{FAILOVER}" for _, action in actions}
    for at, action in actions:
        name = action.get("name")
        if isinstance(name, str) and name in letters:
            yield ("actions", at, "name"), "dead letters of others are called so"
        if isinstance(name, str) and name in seconds:
            yield ("actions", at, "name"), "the second output of another action is called so"
        delivery = action.get("delivery")
        path: Path = ("actions", at, "delivery")
        if isinstance(delivery, dict):
            yield from _of_output(path, action, delivery)
            yield from _of_mode(path, action, delivery, direct=is_direct(action))
            if delivery.get("only_when_suspended") is True:
                yield from _stands_in(path, before, is_direct)
        before = action


def _of_output(path: Path, action: Values, delivery: Values) -> Iterator[Wrong]:
    if _type(action.get("output")) == SPARK:
        yield path, _BY_SPARK
    if _type(mapping(delivery.get("failover")).get("output")) == SPARK:
        message = "Spark writes this only in a lane of its own: name another output"
        yield (*path, "failover", "output", "type"), message


def _of_mode(path: Path, action: Values, delivery: Values, *, direct: bool) -> Iterator[Wrong]:
    if delivery.get("mode") != "try_direct":
        return
    if direct:
        yield (*path, "mode"), _NO_QUEUE
    for knob in ("sql", "transform"):
        if action.get(knob) is not None:
            yield (*path[:-1], knob), _LATER
    if delivery.get("ordering") in (Ordering.KEY, Ordering.STRICT):
        yield (*path, "mode"), _OVERTAKES


def _stands_in(
    path: Path, before: Values | None, is_direct: Callable[[Values], bool]
) -> Iterator[Wrong]:
    where: Path = (*path, "only_when_suspended")
    if before is None or _type(before.get("output")) == DISCARD:
        yield where, _FIRST
        return
    mode = mapping(before.get("delivery")).get("mode")
    if not is_direct(before) and mode != "try_direct":
        yield where, _ALWAYS_QUEUED


def _type(output: object) -> object:
    return mapping(output).get("type")
