"""Checks across sections: settings that are right alone and wrong together.

Looked for in the plain values, so that it is found also if something else is wrong.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Final, NamedTuple

from turnlane.config.document import Path, dotted
from turnlane.config.settings import FLIGHT, HTTP, Config
from turnlane.delivery.settings import Ordering
from turnlane.errors import ConfigError
from turnlane.pipeline.settings import DEAD_LETTERS, DISCARD, EVENTS_VIEW, FAILOVER, MAIN, SPARK
from turnlane.queues.settings import ON_DISK, Kind
from turnlane.serving.address import LOOPBACK, Address
from turnlane.serving.auth import Right
from turnlane.validation import suggest

# ── cautions ──
# Warnings: valid settings that their author may not have meant.

_IN_MEMORY: Final = {
    Kind.MEMORY: "is kept in memory",
    Kind.DISK_ASSISTED: "is kept in memory until it spills",
}


def cautions(config: Config) -> Iterator[ConfigError]:
    """Each with its place, as errors have one; none of them is raised."""
    for at, action in enumerate(config.actions):
        where = None if action.queue is None else _IN_MEMORY.get(action.queue.kind)
        if where is not None:
            message = (
                f"what the main lane commits here {where}: if the node is killed it is lost, "
                "though it is settled in the main queue; use disk to keep it"
            )
            yield config.placed(ConfigError(f"actions[{at}].queue", message))


# ── values ──
# The plain values of a configuration, for checks across sections.

Values = dict[str, Any]
"""What stands in a mapping, whether it is right or not."""
Wrong = tuple[Path, str]
"""Where something is wrong, and what."""


def mapping(value: object) -> Values:
    """The value if it is a mapping, else an empty mapping."""
    return value if isinstance(value, dict) else {}


def mappings(values: object) -> list[tuple[int, Values]]:
    """The mappings in a list, each with its place; other checks report other values."""
    parts = enumerate(values) if isinstance(values, list) else ()
    return [(at, each) for at, each in parts if isinstance(each, dict)]


# ── delivering ──
# Find mistakes in the delivery of actions, given the rest of the action and the previous action.

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


# ── joins ──
# Find mistakes in the queues that SQL joins with. A join removes events from them.

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
    if name.lower() == EVENTS_VIEW:
        return _OWN_VIEW
    if name not in known:
        return f"there is no queue {name!r}{suggest(name, known) or '; add it to queues'}"
    if name == MAIN:
        return f"the main lane reads this queue, {_INSTEAD}"
    if name in letters:
        return _LETTERS
    if name in readers:
        return f"the lane of action {name!r} reads this queue, {_INSTEAD}"
    return None


def _only_keeps(action: Values) -> bool:
    """Whether no lane reads the action's queue."""
    discards = mapping(action.get("output")).get("type") == DISCARD
    return discards and action.get("sql") is None and action.get("transform") is None


# ── listeners ──
# What listens where, and whether two things would listen in the same place.
#
# Looked for in the plain values, as everything that is wrong only together.

TCP: Final = "tcp"
UDP: Final = "udp"

_PLANES: Final = {"flight": FLIGHT, "http": HTTP}
_OF_INPUTS: Final = {("listen",): TCP, ("tcp",): TCP, ("udp",): UDP, ("tls", "listen"): TCP}
"""The settings of inputs that are addresses, and their protocol."""
_EVERYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to


class Listener(NamedTuple):
    """One address that something will listen on."""

    path: Path
    protocol: str
    address: Address

    def meets(self, other: Listener) -> bool:
        """Whether only one of both can have its address. Port 0 is a free one every time."""
        here, there = self.address, other.address
        if self.protocol != other.protocol or here.port != there.port or not here.port:
            return False
        hosts = {_host(here), _host(there)}
        return len(hosts) == 1 or not hosts.isdisjoint(_EVERYWHERE)


def listeners_twice(data: Values) -> Iterator[Wrong]:
    """The listeners whose place another one has, and which."""
    taken: list[Listener] = []
    # Defaults first: what can be pointed at is what stands in the file.
    for each in sorted(_listeners(data), key=lambda listener: _is_written(listener.path, data)):
        other = next(filter(each.meets, taken), None)
        if other is not None:
            place = f"{dotted(other.path)} listens on {other.address}"
            yield each.path, f"{place} already; choose another port"
        taken.append(each)


def _listeners(data: Values) -> Iterator[Listener]:
    for plane, default in _PLANES.items():
        path: Path = ("node", plane, "listen")
        if _at(("node", plane, "enabled"), data) is not False:
            yield from _listener(path, TCP, _at(path, data) or default)
    inputs = data.get("inputs")
    for at, each in enumerate(inputs if isinstance(inputs, list) else ()):
        for setting, protocol in _OF_INPUTS.items():
            yield from _listener(("inputs", at, *setting), protocol, _at(setting, each))


def _listener(path: Path, protocol: str, value: object) -> Iterator[Listener]:
    try:
        yield Listener(path, protocol, Address.parse(value))
    except ValueError:
        return  # none, or another check reports its mistake


def _is_written(path: Path, data: object) -> bool:
    return _at(path, data) is not None


def _at(path: Path, data: Any) -> Any:  # noqa: ANN401 - whatever YAML has
    for part in path:
        if isinstance(data, list) and isinstance(part, int):
            data = data[part]
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return data


def _host(address: Address) -> str:
    host = address.host.lower()
    return LOOPBACK if host == "localhost" else host


# ── outputs ──
# Find mistakes in outputs, given the rest of their actions and the other outputs.

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
    """An action's output and its failover output, with their places."""
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
"""If position numbered them, two that swap positions would read each other's files again."""

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
    """Names that are not queues of the node."""
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
    """Rights on queues that do not exist and cannot be created while the node runs."""
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
        hint = suggest(name, queues) or "; add it to queues"
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
        return f"there is no action {name!r}{suggest(name, actions)}"
    kind = output.get("type") if isinstance(output, dict) else getattr(output, "type", None)
    if kind == DISCARD:
        return "what is discarded goes nowhere; say of the actions behind it what they get"
    return None
