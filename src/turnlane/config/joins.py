"""What is wrong with the queues that SQL joins with. A join takes events out of them for good."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from turnlane.config.values import Values, Wrong, mapping
from turnlane.pipeline.settings import DEAD_LETTERS, DISCARD, EVENTS, MAIN
from turnlane.problems import did_you_mean

_INSTEAD: Final = (
    "and a join would take its events away; join with one that nobody else reads: a queue of "
    "queues, or an action's with `output: {type: discard}`"
)
_OWN_VIEW: Final = "SQL knows the action's own events by this name; call the queue another name"
_LETTERS: Final = "dead letters wait here until somebody looks at them, and a join would take them"
_TWICE: Final = "is there twice, since Spark does not tell capitals from small letters"


def wrong_joins(actions: Sequence[tuple[int, Values]], known: Sequence[str]) -> Iterator[Wrong]:
    """All that is wrong, with its place. ``known`` are the names of all queues."""
    readers = {str(action.get("name")): action for _, action in actions if not _only_keeps(action)}
    letters = {DEAD_LETTERS, *(f"{action.get('name')}.dead" for _, action in actions)}
    taken: dict[str, object] = {}
    for at, action in actions:
        names = action.get("with_queues")
        seen: set[str] = set()
        for place, name in enumerate(names if isinstance(names, list) else ()):
            if not isinstance(name, str):
                continue
            why = _why_not(name, known, readers, letters)
            if why is None and name.lower() in seen:
                why = _TWICE
            elif why is None and name in taken:
                why = f"action {taken[name]!r} joins with this queue already, {_INSTEAD}"
            if why is not None:
                yield ("actions", at, "with_queues", place), why
            seen.add(name.lower())
            taken.setdefault(name, action.get("name"))


def _why_not(
    name: str, known: Sequence[str], readers: dict[str, Values], letters: set[str]
) -> str | None:
    if name.lower() == EVENTS:
        return _OWN_VIEW
    if name not in known:
        return f"there is no queue {name!r}{did_you_mean(name, known) or '; add it to queues'}"
    if name == MAIN:
        return f"the main lane reads this queue, {_INSTEAD}"
    if name in letters:
        return _LETTERS
    if name in readers:
        return f"the lane of action {name!r} reads this queue, {_INSTEAD}"
    return None


def _only_keeps(action: Values) -> bool:
    """Whether nothing is done with what is in the action's queue."""
    discards = mapping(action.get("output")).get("type") == DISCARD
    return discards and action.get("sql") is None and action.get("transform") is None
