"""What is wrong with outputs, seen beside the rest of their actions, and beside each other."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from turnlane.config.document import Path
from turnlane.config.values import Values, Wrong, mapping
from turnlane.delivery.settings import Ordering
from turnlane.pipeline.settings import SPARK

_OWN_QUEUE: Final = (
    "notes which offsets were delivered, of which the main queue has many that go elsewhere: give "
    "the action a queue"
)
_TWO_IDS: Final = (
    "knows events by their place, and with delivery.mode try_direct one may come from two: from "
    "the main queue, and then from the action's own; leave out one of the two"
)
_NO_EVENTS: Final = "is for events; what sql makes of them has no offset: leave it out"
_IN_ORDER: Final = (
    "has the node there drop what comes out of order: set delivery.ordering to strict, or leave "
    "it out"
)


_WITH_LOG: Final = ("avro", "csv", "json", "orc", "parquet", "text")
"""Formats of files whose batches Spark notes beside them, by the numbers of one lane."""
_SAME_FILES: Final = (
    "writes there too, and Spark would take the batches of one for those of the other and leave "
    "them out: choose another path"
)
_SAME_PRODUCER: Final = (
    "sends to that queue under this name too, and the node there would take the events of one for "
    "those of the other and drop them: choose another name"
)


def wrong_outputs(
    actions: Sequence[tuple[int, Values]], is_direct: Callable[[Values], bool]
) -> Iterator[Wrong]:
    """All that is wrong, with its place."""
    yield from _mistaken(actions)
    for at, action in actions:
        for path, output in _outputs(("actions", at), action):
            if output.get("type") in ("sql", "table") and output.get("exactly_once") is True:
                yield from _once((*path, "exactly_once"), action, direct=is_direct(action))
            if output.get("type") == "queue" and output.get("producer") is not None:
                yield from _numbered((*path, "producer"), action)


def _outputs(path: Path, action: Values) -> Iterator[tuple[Path, Values]]:
    """An action's output, and the one that may stand in for it, with their places."""
    failover = mapping(_delivery(action).get("failover"))
    yield (*path, "output"), mapping(action.get("output"))
    yield (*path, "delivery", "failover", "output"), mapping(failover.get("output"))


def _mistaken(actions: Sequence[tuple[int, Values]]) -> Iterator[Wrong]:
    """Outputs of different actions whose events would be taken for each other's."""
    owners: dict[object, tuple[int, object]] = {}
    for at, action in actions:
        for path, output in _outputs(("actions", at), action):
            place, knob, why = _place_of(output)
            owner, name = owners.setdefault(place, (at, action.get("name")))
            if place is not None and owner != at:
                yield (*path, knob), f"action {name!r} {why}"


def _place_of(output: Values) -> tuple[object, str, str]:
    """What only one action may have, the knob that says it, and why; ``None`` if there is none."""
    if output.get("type") == SPARK and output.get("format") in _WITH_LOG:
        path = output.get("path") or mapping(output.get("options")).get("path")
        return path and posixpath.normpath(str(path)), "path", _SAME_FILES
    if output.get("type") == "queue" and output.get("producer") is not None:
        place = tuple(str(output.get(knob)) for knob in ("endpoint", "queue", "producer"))
        return place, "producer", _SAME_PRODUCER
    return None, "", ""


def _once(path: Path, action: Values, *, direct: bool) -> Iterator[Wrong]:
    if direct:
        yield path, _OWN_QUEUE
    elif _delivery(action).get("mode") == "try_direct":
        yield path, _TWO_IDS
    elif action.get("sql") is not None:
        yield path, _NO_EVENTS


def _numbered(path: Path, action: Values) -> Iterator[Wrong]:
    if _delivery(action).get("ordering") != Ordering.STRICT:
        yield path, _IN_ORDER
    elif action.get("sql") is not None:
        yield path, _NO_EVENTS


def _delivery(action: Values) -> Values:
    return mapping(action.get("delivery"))
