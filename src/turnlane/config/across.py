"""What is right section by section and wrong together: names, queues, and what needs what.

Looked for in the plain values, so that it is found also if something else is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import chain
from typing import Final

from turnlane.config.delivering import wrong_deliveries
from turnlane.config.document import Path
from turnlane.config.joins import wrong_joins
from turnlane.config.listeners import listeners_twice
from turnlane.config.outputs import wrong_outputs
from turnlane.config.values import Values, mapping, mappings
from turnlane.pipeline.settings import DEAD_LETTERS, DISCARD, MAIN
from turnlane.problems import did_you_mean
from turnlane.queues.kinds import ON_DISK, Kind
from turnlane.serving.rights import Right

KINDS: Final = (Kind.MEMORY, *ON_DISK)
"""The kinds of queue that a node has."""
NOT_FOR_QUEUES: Final = {
    "path": "a node keeps its queues below its data directory; set node.data",
    "name": "the queue's name is the key above; leave this out",
}
_NOT_FOR_ACTIONS: Final = {**NOT_FOR_QUEUES, "name": "the queue is called as its action is"}
_NOT_FOR_MAIN: Final = {**NOT_FOR_QUEUES, "name": f"the main queue is called {MAIN}"}

_NEEDS_ACTIONS: Final = ("parse", "transform", "lane")
_NEEDS_LANE: Final = {
    "sql": "needs a lane of its own: give the action a queue, such as queue: {kind: disk}",
    "transform": "needs a lane of its own: give the action a queue, or use the transform above all "
    "actions",
    "lane": "means nothing without a queue, which gives the action a lane of its own",
}
_NEEDS_SQL: Final = ("watermark", "with_queues", "output_mode")

_NEEDS_NAME: Final = (
    "needs a name: positions are kept by name, and there is another files input without one"
)
"""Numbered by their places, two that change places would read each other's files anew."""

_ONE_STDIN: Final = (
    "another input reads the standard input already, and each would get pieces of lines"
)

Found = tuple[Path, str, bool]
"""Where something is wrong, what, and whether it is the key that is."""


def across_sections(data: Values) -> Iterator[Found]:
    """All that is wrong together."""
    queues = mapping(data.get("queues"))
    for name, knobs in queues.items():
        yield from _queue_of_others(("queues", name), knobs, NOT_FOR_QUEUES)
    yield from _queue_of_others(("main",), data.get("main"), _NOT_FOR_MAIN)
    if MAIN in queues and "main" in data:
        yield ("main",), "stands in queues too; keep one of them", True
    known = [*queues, *_queues_of_pipeline(data)]
    yield from _lost_inputs(data.get("inputs"), known)
    yield from _lost_rights(mapping(data.get("node")).get("tokens"), known)
    actions = mappings(data.get("actions"))
    wrong = (wrong_deliveries(actions, is_direct), wrong_outputs(actions, is_direct))
    for path, message in chain(listeners_twice(data), *wrong, wrong_joins(actions, known)):
        yield path, message, False
    if not data.get("actions"):
        for section in _NEEDS_ACTIONS:
            if data.get(section) is not None:
                yield (section,), "means nothing without actions; add some", True
    yield from _names_twice("actions", "action", actions)
    for at, action in actions:
        yield from _action(("actions", at), action, queues)
    yield from lost_cases(data.get("tests"), {str(each.get("name")): each for _, each in actions})


def is_direct(action: Values) -> bool:
    """Whether the main lane itself calls the output."""
    queue = action.get("queue", Kind.DIRECT)
    return (queue.get("kind") if isinstance(queue, dict) else queue) == Kind.DIRECT


def _queues_of_pipeline(data: Values) -> Iterator[str]:
    if data.get("actions") or "main" in data:
        yield MAIN
    for _, action in mappings(data.get("actions")):
        if isinstance(action.get("name"), str) and not is_direct(action):
            yield action["name"]
        if isinstance(action.get("name"), str):
            yield f"{action['name']}.dead"
    if data.get("actions") and mapping(data.get("parse")).get("on_error") == "dead":
        yield DEAD_LETTERS


def _queue_of_others(path: Path, knobs: object, refused: dict[str, str]) -> Iterator[Found]:
    """What is no queue of a node, or not there."""
    for knob, why in refused.items():
        if isinstance(knobs, dict) and knob in knobs:
            yield (*path, knob), why, True
    kind = knobs.get("kind") if isinstance(knobs, dict) else None
    if kind in (Kind.DIRECT, Kind.PROXY):
        yield (*path, "kind"), f"a node has no {kind} queues, only {', '.join(KINDS)}", False


def _lost_inputs(inputs: object, queues: list[str]) -> Iterator[Found]:
    """Inputs whose queue there is not, or whose name is another one's."""
    for at, each in mappings(inputs):
        yield from _lost(("inputs", at, "queue"), each.get("queue"), queues)
        for pattern, queue in mapping(each.get("routes")).items():
            yield from _lost(("inputs", at, "routes", pattern), queue, queues)
    yield from _names_twice("inputs", "input", mappings(inputs))
    nameless = [at for at, each in mappings(inputs) if _is_nameless(each)]
    for at in nameless[1:]:
        yield ("inputs", at), _NEEDS_NAME, False
    standard = [at for at, each in mappings(inputs) if each.get("type") == "stdin"]
    for at in standard[1:]:
        yield ("inputs", at, "type"), _ONE_STDIN, False


def _is_nameless(given: Values) -> bool:
    return given.get("type") == "files" and given.get("name") is None


def _lost_rights(tokens: object, queues: list[str]) -> Iterator[Found]:
    """Rights on queues that there are not, and that nobody may make while the node runs."""
    rights = [(at, mapping(each.get("rights"))) for at, each in mappings(tokens)]
    made = [name for _, given in rights for name, words in given.items() if _may_make(words)]
    for at, given in rights:
        for name in given:
            is_pattern = not {"*", "?", "["}.isdisjoint(name)
            if not is_pattern and not any(fnmatchcase(name, pattern) for pattern in made):
                yield from _lost(("node", "tokens", at, "rights", name), name, queues, of_key=True)


def _may_make(words: object) -> bool:
    return isinstance(words, list) and Right.ADMIN in words


def _lost(path: Path, name: object, queues: list[str], *, of_key: bool = False) -> Iterator[Found]:
    """The name of a queue that there is not."""
    if isinstance(name, str) and name not in queues:
        hint = did_you_mean(name, queues) or "; add it to queues"
        yield path, f"there is no queue {name!r}{hint}", of_key


def _names_twice(section: str, noun: str, parts: list[tuple[int, Values]]) -> Iterator[Found]:
    names = Counter[str]()
    for at, each in parts:
        name = each.get("name")
        if isinstance(name, str):
            names[name] += 1
            if names[name] > 1:
                yield (section, at, "name"), f"another {noun} is called {name!r} too", False


def _action(path: Path, action: Values, queues: Values) -> Iterator[Found]:
    name = action.get("name")
    if name == MAIN:
        yield (*path, "name"), f"{MAIN} is the main queue and its lane; choose another name", False
    yield from _queue_of_action(path, action.get("queue"))
    if is_direct(action):
        yield from _direct(path, action)
    elif name in queues:
        message = f"queues has a queue {name!r} already, and this action's would be called so too"
        yield (*path, "name"), message, False
    if action.get("sql") is None:
        for knob in _NEEDS_SQL:
            if action.get(knob) is not None:
                yield (*path, knob), "means nothing without sql", True


def _queue_of_action(path: Path, queue: object) -> Iterator[Found]:
    kind = queue.get("kind") if isinstance(queue, dict) else queue
    if isinstance(queue, dict):
        for knob, why in _NOT_FOR_ACTIONS.items():
            if knob in queue:
                yield (*path, "queue", knob), why, True
    if kind == Kind.PROXY:
        where: Path = ("queue", "kind") if isinstance(queue, dict) else ("queue",)
        there = ", ".join((Kind.DIRECT, *KINDS))
        yield (*path, *where), f"an action has no {kind} queue, only {there}", False


def _direct(path: Path, action: Values) -> Iterator[Found]:
    for knob, why in _NEEDS_LANE.items():
        if action.get(knob) is not None:
            yield (*path, knob), why, True
    output = action.get("output")
    if isinstance(output, dict) and output.get("type") == "spark":
        message = "Spark writes this in a lane of its own: give the action a queue"
        yield (*path, "output", "type"), message, False


def lost_cases(tests: object, actions: dict[str, Values]) -> Iterator[Found]:
    """Cases that expect something of actions that there are not, or that give nothing out."""
    for at, case in mappings(tests):
        for name in mapping(case.get("expect")):
            message = _unexpected(name, list(actions), mapping(actions.get(name)).get("output"))
            if message is not None:
                yield ("tests", at, "expect", name), message, True


def _unexpected(name: str, actions: list[str], output: object) -> str | None:
    """Why nothing can be expected of an action; ``None`` if something can."""
    if name not in actions:
        return f"there is no action {name!r}{did_you_mean(name, actions)}"
    kind = output.get("type") if isinstance(output, dict) else getattr(output, "type", None)
    if kind == DISCARD:
        return "what is discarded goes nowhere; say of the actions behind it what they get"
    return None
