"""Checks across sections: settings that are valid alone and wrong together.

The checks read the plain values of the file, so they run also if other settings are invalid. They
skip values of a wrong type: pydantic reports those.
"""

from __future__ import annotations

import os
import posixpath
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from pydantic import SecretStr

from turnlane.config.document import Path, SettingIssue, format_path
from turnlane.config.settings import FLIGHT, HTTP, Config
from turnlane.databases import get_dialect_name, load_dialect
from turnlane.databases.sqlite import get_database_path, list_files_of
from turnlane.delivery.settings import Ordering
from turnlane.errors import ConfigError, NotSupported
from turnlane.pipeline.settings import DEAD_LETTERS, DISCARD, EVENTS_VIEW, FAILOVER, MAIN, SPARK
from turnlane.queues.settings import ON_DISK, Kind
from turnlane.serving.address import LOOPBACK, Address
from turnlane.serving.auth import Right
from turnlane.units import Percentage
from turnlane.validation import ConfigIssue, suggest

Values = dict[str, Any]
"""The plain values of a mapping, valid or not."""
Actions = Sequence[tuple[int, Values]]
"""The actions that are mappings, with their indexes."""

KINDS: Final = (Kind.MEMORY, *ON_DISK)
"""The kinds of queue that a node has."""
_QUEUE_FILES: Final = ("queue.json", "journal.a", f"{0:016}.chunk")
"""The kinds of files in the directory of a queue."""
FORBIDDEN_IN_QUEUES: Final = {
    "path": "a node keeps its queues below its data directory; set node.data",
    "name": "the queue's name is the key above; leave this out",
}


def find_warnings(config: Config) -> Iterator[ConfigError]:
    """Return valid settings that their author may not have meant, with their positions."""
    in_memory = {
        Kind.MEMORY: "are kept in memory",
        Kind.DISK_ASSISTED: "are kept in memory until they spill",
    }
    for at, action in enumerate(config.actions):
        where = None if action.queue is None else in_memory.get(action.queue.kind)
        if where is not None:
            message = (
                f"events that the main lane commits here {where}: if the node is killed they are "
                "lost, though they are settled in the main queue; use disk to keep them"
            )
            yield config.locate(ConfigError(f"actions[{at}].queue", message))
    yield from map(config.locate, _find_memory_warnings(config))


def _find_memory_warnings(config: Config) -> Iterator[ConfigError]:
    """Return shares of memory that are too much together."""
    queues = {f"queues.{name}": queue for name, queue in config.queues.items()}
    queues |= {} if config.main is None else {"main": config.main}
    for at, action in enumerate(config.actions):
        queues |= {} if action.queue is None else {f"actions[{at}].queue": action.queue}
    shares = {
        path: queue.target_utilization.value
        for path, queue in queues.items()
        if queue.target_utilization is not None and queue.kind is not Kind.DISK
    }
    if sum(shares.values()) > 100:
        message = (
            f"the queues in memory with size: auto may use {sum(shares.values()):g}% of the "
            "available memory together; lower their target_utilization"
        )
        yield ConfigError(f"{list(shares)[-1]}.size", message)
    node, driver = config.node.memory_limit, config.spark.driver_memory
    if isinstance(node, Percentage) and isinstance(driver, Percentage):
        both = node.value + driver.value
        if both > 100:
            message = (
                f"this and node.memory_limit are {both:g}% of the memory together, and Spark's "
                "Python processes need some, too; lower one of them"
            )
            yield ConfigError("spark.driver_memory", message)


def find_missing_drivers(config: Config) -> Iterator[ConfigIssue]:
    """Return the URLs of databases whose drivers are not installed here."""

    def check(path: Path, data: object) -> Iterator[ConfigIssue]:
        if isinstance(data, SecretStr):
            data = data.get_secret_value()
        if isinstance(data, str) and path[-1] == "url" and get_dialect_name(data) is not None:
            try:
                load_dialect(data)
            except NotSupported as error:
                yield ConfigIssue(format_path(path), str(error))
        elif isinstance(data, dict | list | tuple):
            for part, value in data.items() if isinstance(data, dict) else enumerate(data):
                yield from check((*path, part), value)

    yield from check((), config.model_dump())


def check_sections(data: Values) -> Iterator[SettingIssue]:
    """Return all issues of settings that contradict each other."""
    queues = _get_mapping(data.get("queues"))
    actions = _get_mappings(data.get("actions"))
    for name, knobs in queues.items():
        yield from _check_queue(("queues", name), knobs, FORBIDDEN_IN_QUEUES["name"])
    yield from _check_queue(("main",), data.get("main"), f"the main queue is called {MAIN}")
    if MAIN in queues and "main" in data:
        yield SettingIssue(("main",), "is also defined in `queues`; keep one of them", of_key=True)
    known = [*queues, *_list_pipeline_queues(data)]
    yield from _check_inputs(data.get("inputs"), known)
    yield from _check_own_files(data, known)
    yield from _check_rights(_get_mapping(data.get("node")).get("tokens"), known)
    yield from _check_listeners(data)
    yield from _check_deliveries(actions)
    yield from _check_outputs(actions)
    yield from _check_joins(actions, known)
    if not data.get("actions"):
        for section in ("parse", "transform", "lane"):
            if data.get(section) is not None:
                message = "has no effect without actions; add some"
                yield SettingIssue((section,), message, of_key=True)
    yield from _check_unique_names("actions", "action", actions)
    for at, action in actions:
        yield from _check_action(("actions", at), action, queues)
    yield from check_cases(data.get("tests"), {str(each.get("name")): each for _, each in actions})


def check_cases(tests: object, actions: dict[str, Values]) -> Iterator[SettingIssue]:
    """Return the cases that expect rows of actions that do not exist, or that discard events."""
    for at, case in _get_mappings(tests):
        for name in _get_mapping(case.get("expect")):
            output = _get_mapping(actions.get(name)).get("output")
            kind = output.get("type") if isinstance(output, dict) else getattr(output, "type", None)
            path: Path = ("tests", at, "expect", name)
            if name not in actions:
                message = f"there is no action {name!r}{suggest(name, actions)}"
                yield SettingIssue(path, message, of_key=True)
            elif kind == DISCARD:
                message = "this action discards its events; expect rows of the actions after it"
                yield SettingIssue(path, message, of_key=True)


# ── values ───────────────────────────────────────────────────────────────────────────────────────


def _get_mapping(value: object) -> Values:
    """Return the value if it is a mapping, else an empty mapping."""
    return value if isinstance(value, dict) else {}


def _get_mappings(values: object) -> list[tuple[int, Values]]:
    """Return the mappings in a list, with their indexes."""
    parts = enumerate(values) if isinstance(values, list) else ()
    return [(at, each) for at, each in parts if isinstance(each, dict)]


def _get_delivery(action: Values) -> Values:
    return _get_mapping(action.get("delivery"))


def _get_type(output: object) -> object:
    return _get_mapping(output).get("type")


def _get_kind(queue: object) -> object:
    return queue.get("kind") if isinstance(queue, dict) else queue


def _is_direct(action: Values) -> bool:
    """Whether the main lane itself calls the output."""
    return _get_kind(action.get("queue", Kind.DIRECT)) == Kind.DIRECT


def _list_dead_letter_queues(actions: Actions) -> set[str]:
    return {DEAD_LETTERS, *(f"{action.get('name')}.dead" for _, action in actions)}


def _list_pipeline_queues(data: Values) -> Iterator[str]:
    if data.get("actions") or "main" in data:
        yield MAIN
    for _, action in _get_mappings(data.get("actions")):
        if isinstance(action.get("name"), str):
            if not _is_direct(action):
                yield action["name"]
            yield f"{action['name']}.dead"
    if data.get("actions"):
        yield DEAD_LETTERS


# ── queues, inputs and rights ────────────────────────────────────────────────────────────────────


def _check_queue(path: Path, knobs: object, name_message: str) -> Iterator[SettingIssue]:
    yield from _check_forbidden_knobs(path, knobs, name_message)
    kind = _get_mapping(knobs).get("kind")
    if kind in (Kind.DIRECT, Kind.PROXY):
        message = f"a node has no {kind} queues, only {', '.join(KINDS)}"
        yield SettingIssue((*path, "kind"), message)


def _check_forbidden_knobs(path: Path, knobs: object, name_message: str) -> Iterator[SettingIssue]:
    for knob, message in {**FORBIDDEN_IN_QUEUES, "name": name_message}.items():
        if knob in _get_mapping(knobs):
            yield SettingIssue((*path, knob), message, of_key=True)


def _check_inputs(inputs: object, queues: list[str]) -> Iterator[SettingIssue]:
    given = _get_mappings(inputs)
    for at, each in given:
        yield from _check_queue_name(("inputs", at, "queue"), each.get("queue"), queues)
        for pattern, queue in _get_mapping(each.get("routes")).items():
            yield from _check_queue_name(("inputs", at, "routes", pattern), queue, queues)
    yield from _check_unique_names("inputs", "input", given)
    # If their index numbered them, two inputs that swap places would read each other's files again.
    unnamed = [at for at, each in given if each.get("type") == "files" and each.get("name") is None]
    for at in unnamed[1:]:
        message = (
            "needs a name: positions are kept by name, and there is another files input without one"
        )
        yield SettingIssue(("inputs", at), message)
    for at in [at for at, each in given if each.get("type") == "stdin"][1:]:
        message = (
            "another input reads the standard input already, and each would get pieces of lines"
        )
        yield SettingIssue(("inputs", at, "type"), message)


def _check_own_files(data: Values, queues: list[str]) -> Iterator[SettingIssue]:
    """Return globs of files inputs that match files of the node itself.

    A file of the data directory would be read into the queue that it belongs to. Of a SQLite
    database, the locks would be lost, and committed events with them.
    """
    directory = _get_mapping(data.get("node")).get("data")
    own: dict[str, str] = {}
    if isinstance(directory, str):
        files = [f"queues/{queue}/{file}" for queue in queues for file in _QUEUE_FILES]
        for file in ("lock", "inputs/files.json", *files):
            own[os.path.abspath(f"{directory}/{file}")] = "the data directory"  # noqa: PTH100 - text
    for url in _list_urls([data.get("tables"), data.get("inputs")]):
        for path in list_files_of(get_database_path(url)):
            own[path] = "a SQLite database that the node uses"
    for at, each in _get_mappings(data.get("inputs")):
        if each.get("type") != "files":
            continue
        given, excluded = (
            [globs] if isinstance(globs, str) else globs if isinstance(globs, list) else []
            for globs in (each.get("paths"), each.get("exclude"))
        )
        for pattern in (glob for glob in given if isinstance(glob, str)):
            found = next((own[path] for path in own if _is_read(path, pattern, excluded)), None)
            if found is not None:
                message = (
                    f"{pattern!r} matches files of {found}; choose other globs, or add `exclude`"
                )
                yield SettingIssue(("inputs", at, "paths"), message)


def _list_urls(values: object) -> Iterator[str]:
    """Return the URLs of SQLite databases among some values."""
    if isinstance(values, SecretStr):
        values = values.get_secret_value()
    if isinstance(values, str) and get_dialect_name(values) == "sqlite":
        yield values
    elif isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _list_urls(value)


def _is_read(path: str, pattern: str, excluded: Sequence[object]) -> bool:
    """Whether a files input reads a path."""
    name = posixpath.basename(path)
    for each in excluded:
        if isinstance(each, str) and fnmatchcase(path if "/" in each else name, each):
            return False
    return _matches_glob(path.split("/"), os.path.abspath(pattern).split("/"))  # noqa: PTH100 - a glob


def _matches_glob(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a glob matches a path; both are given by their parts."""
    if not pattern or not path:
        return not path and all(part == "**" for part in pattern)
    part, rest = pattern[0], pattern[1:]
    is_hidden = path[0].startswith(".") and not part.startswith(".")
    if part == "**":
        return _matches_glob(path, rest) or (not is_hidden and _matches_glob(path[1:], pattern))
    is_same = path[0] == part or (not is_hidden and fnmatchcase(path[0], part))
    return is_same and _matches_glob(path[1:], rest)


def _check_rights(tokens: object, queues: list[str]) -> Iterator[SettingIssue]:
    """Return rights on queues that do not exist and cannot be created while the node runs."""
    rights = [(at, _get_mapping(each.get("rights"))) for at, each in _get_mappings(tokens)]
    creatable = [
        name
        for _, given in rights
        for name, words in given.items()
        if isinstance(words, list) and Right.ADMIN in words
    ]
    for at, given in rights:
        for name in given:
            is_pattern = not {"*", "?", "["}.isdisjoint(name)
            if not is_pattern and not any(fnmatchcase(name, pattern) for pattern in creatable):
                path: Path = ("node", "tokens", at, "rights", name)
                yield from _check_queue_name(path, name, queues, of_key=True)


def _check_queue_name(
    path: Path, name: object, queues: list[str], *, of_key: bool = False
) -> Iterator[SettingIssue]:
    if isinstance(name, str) and name not in queues:
        hint = suggest(name, queues) or "; add it to queues"
        yield SettingIssue(path, f"there is no queue {name!r}{hint}", of_key)


def _check_unique_names(section: str, noun: str, parts: Actions) -> Iterator[SettingIssue]:
    names = Counter[str]()
    for at, each in parts:
        name = each.get("name")
        if isinstance(name, str):
            names[name] += 1
            if names[name] > 1:
                message = f"the name {name!r} is already used by another {noun}"
                yield SettingIssue((section, at, "name"), message)


# ── addresses ────────────────────────────────────────────────────────────────────────────────────

TCP: Final = "tcp"
UDP: Final = "udp"

_PLANES: Final = {"flight": FLIGHT, "http": HTTP}
_INPUT_ADDRESSES: Final = {("listen",): TCP, ("tcp",): TCP, ("udp",): UDP, ("tls", "listen"): TCP}
"""The settings of inputs that are addresses, and their protocol."""
_ALL_INTERFACES: Final = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to


class ListenAddress(NamedTuple):
    """An address on which a plane or an input will listen, and the setting that has it."""

    path: Path
    protocol: str
    address: Address

    def collides_with(self, other: ListenAddress) -> bool:
        """Whether only one of both can be bound. Port 0 is a free port every time."""
        here, there = self.address, other.address
        if self.protocol != other.protocol or here.port != there.port or not here.port:
            return False
        hosts = {each.host.lower().replace("localhost", LOOPBACK) for each in (here, there)}
        return len(hosts) == 1 or not hosts.isdisjoint(_ALL_INTERFACES)


def _check_listeners(data: Values) -> Iterator[SettingIssue]:
    taken: list[ListenAddress] = []
    # Defaults first: an issue can only point at a setting that stands in the file.
    for each in sorted(
        _list_addresses(data), key=lambda listener: _get_value(listener.path, data) is not None
    ):
        other = next(filter(each.collides_with, taken), None)
        if other is not None:
            where = f"{format_path(other.path)} listens on {other.address}"
            yield SettingIssue(each.path, f"{where} already; choose another port")
        taken.append(each)


def _list_addresses(data: Values) -> Iterator[ListenAddress]:
    given: list[tuple[Path, str, object]] = []
    for plane, default in _PLANES.items():
        path: Path = ("node", plane, "listen")
        if _get_value(("node", plane, "enabled"), data) is not False:
            given.append((path, TCP, _get_value(path, data) or default))
    for at, each in _get_mappings(data.get("inputs")):
        given += [
            (("inputs", at, *setting), protocol, _get_value(setting, each))
            for setting, protocol in _INPUT_ADDRESSES.items()
        ]
    for path, protocol, value in given:
        try:
            yield ListenAddress(path, protocol, Address.parse(value))
        except ValueError:
            continue  # there is none, or pydantic reports its issue


def _get_value(path: Path, data: Any) -> Any:  # noqa: ANN401 - any value of YAML
    for part in path:
        if isinstance(data, list) and isinstance(part, int):
            data = data[part]
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return data


# ── actions ──────────────────────────────────────────────────────────────────────────────────────


def _check_action(path: Path, action: Values, queues: Values) -> Iterator[SettingIssue]:
    name, queue = action.get("name"), action.get("queue")
    if name == MAIN:
        message = f"{MAIN} is the main queue and its lane; choose another name"
        yield SettingIssue((*path, "name"), message)
    yield from _check_forbidden_knobs(
        (*path, "queue"), queue, "the queue has the name of its action"
    )
    if _get_kind(queue) == Kind.PROXY:
        where: Path = ("queue", "kind") if isinstance(queue, dict) else ("queue",)
        kinds = ", ".join((Kind.DIRECT, *KINDS))
        message = f"an action has no {Kind.PROXY} queue, only {kinds}"
        yield SettingIssue((*path, *where), message)
    if _is_direct(action):
        yield from _check_direct_action(path, action)
    elif name in queues:
        message = f"queues has a queue {name!r} already; the queue of this action has this name too"
        yield SettingIssue((*path, "name"), message)
    yield from _check_query_settings(path, action)


def _check_query_settings(path: Path, action: Values) -> Iterator[SettingIssue]:
    has_sql, mode = action.get("sql") is not None, action.get("output_mode")
    needs_sql = ["watermark", "with_queues", "output_mode"]
    if action.get("transform") is None:  # It may set a watermark.
        needs_sql.append("idle_after")
    for setting in needs_sql:
        if not has_sql and action.get(setting) is not None:
            yield SettingIssue((*path, setting), "has no effect without sql", of_key=True)
    if has_sql and mode in ("update", "complete") and action.get("idle_after") is not None:
        message = f"has no effect with output_mode: {mode}, which does not wait for the watermark"
        yield SettingIssue((*path, "idle_after"), message, of_key=True)


def _check_direct_action(path: Path, action: Values) -> Iterator[SettingIssue]:
    needs_lane = {
        "sql": "needs a lane of its own: give the action a queue, such as queue: {kind: disk}",
        "transform": "needs a lane of its own: give the action a queue, or use the transform "
        "above all actions",
        "lane": "has no effect without a queue, which gives the action a lane of its own",
    }
    for setting, why in needs_lane.items():
        if action.get(setting) is not None:
            yield SettingIssue((*path, setting), why, of_key=True)
    if _get_type(action.get("output")) == SPARK:
        message = "Spark writes this in a lane of its own: give the action a queue"
        yield SettingIssue((*path, "output", "type"), message)


def _check_deliveries(actions: Actions) -> Iterator[SettingIssue]:
    """Return issues of deliveries with the rest of the action and with the action before it."""
    previous: Values | None = None
    dead_letters = _list_dead_letter_queues(actions)
    failovers = {f"{action.get('name')}.{FAILOVER}" for _, action in actions}
    for at, action in actions:
        name = action.get("name")
        if isinstance(name, str) and name in dead_letters:
            message = "a queue of dead letters has this name; choose another one"
            yield SettingIssue(("actions", at, "name"), message)
        if isinstance(name, str) and name in failovers:
            message = "the second output of another action has this name; choose another one"
            yield SettingIssue(("actions", at, "name"), message)
        delivery = action.get("delivery")
        if isinstance(delivery, dict):
            yield from _check_delivery(("actions", at, "delivery"), action, delivery, previous)
        previous = action


def _check_delivery(
    path: Path, action: Values, delivery: Values, previous: Values | None
) -> Iterator[SettingIssue]:
    if _get_type(action.get("output")) == SPARK:
        yield SettingIssue(path, "has no effect here: Spark itself writes this output")
    if _get_type(_get_mapping(delivery.get("failover")).get("output")) == SPARK:
        message = "Spark writes this only in a lane of its own: choose another output"
        yield SettingIssue((*path, "failover", "output", "type"), message)
    if delivery.get("mode") == "try_direct":
        yield from _check_try_direct(path, action, delivery)
    if delivery.get("only_when_suspended") is True:
        where: Path = (*path, "only_when_suspended")
        if previous is None or _get_type(previous.get("output")) == DISCARD:
            yield SettingIssue(where, "there is no action before this one that it could replace")
        elif not _is_direct(previous) and _get_delivery(previous).get("mode") != "try_direct":
            message = (
                "the action before has a queue, which takes all its events; "
                "leave out that queue, or set its delivery.mode to try_direct"
            )
            yield SettingIssue(where, message)


def _check_try_direct(path: Path, action: Values, delivery: Values) -> Iterator[SettingIssue]:
    if _is_direct(action):
        message = (
            "needs a queue for events that cannot be delivered at once: give the action one, "
            "or leave this out"
        )
        yield SettingIssue((*path, "mode"), message)
    for setting in ("sql", "transform"):
        if action.get(setting) is not None:
            message = "runs in the action's lane, not in the main lane: leave out try_direct"
            yield SettingIssue((*path[:-1], setting), message)
    if delivery.get("ordering") in (Ordering.KEY, Ordering.STRICT):
        message = "lets events overtake events in the queue: leave out mode or ordering"
        yield SettingIssue((*path, "mode"), message)


# ── joins ──
# SQL that joins with a queue removes the joined events from it.

_USE_ANOTHER_QUEUE: Final = (
    "and a join would take its events away; join with a queue that nothing else reads: a queue "
    "from the section `queues`, or the queue of an action with `output: {type: discard}`"
)


def _check_joins(actions: Actions, known: Sequence[str]) -> Iterator[SettingIssue]:
    """Return issues of joined queues. ``known`` are the names of all queues."""
    readers = {
        str(action.get("name"))
        for _, action in actions
        if _get_type(action.get("output")) != DISCARD
        or action.get("sql") is not None
        or action.get("transform") is not None
    }
    dead_letters = _list_dead_letter_queues(actions)
    taken: dict[str, object] = {}
    for at, action in actions:
        names = action.get("with_queues")
        seen: set[str] = set()
        for index, name in enumerate(names if isinstance(names, list) else ()):
            if not isinstance(name, str):
                continue
            message = _find_join_issue(name, known, readers, dead_letters)
            if message is None and name.lower() in seen:
                message = "is listed twice: Spark does not distinguish upper and lower case"
            elif message is None and name in taken:
                message = f"action {taken[name]!r} joins with it already, {_USE_ANOTHER_QUEUE}"
            if message is not None:
                yield SettingIssue(("actions", at, "with_queues", index), message)
            seen.add(name.lower())
            taken.setdefault(name, action.get("name"))


def _find_join_issue(
    name: str, known: Sequence[str], readers: set[str], dead_letters: set[str]
) -> str | None:
    if name.lower() == EVENTS_VIEW:
        return "SQL has the action's own events under this name; rename the queue"
    if name not in known:
        return f"there is no queue {name!r}{suggest(name, known) or '; add it to queues'}"
    if name == MAIN:
        return f"the main lane reads this queue, {_USE_ANOTHER_QUEUE}"
    if name in dead_letters:
        return "dead letters wait here until a person handles them, and a join would take them away"
    if name in readers:
        return f"the lane of action {name!r} reads this queue, {_USE_ANOTHER_QUEUE}"
    return None


# ── outputs ──────────────────────────────────────────────────────────────────────────────────────

_FORMATS_WITH_LOG: Final = ("avro", "csv", "json", "orc", "parquet", "text")
"""Formats for which Spark records finished batches beside the files, by the lane's numbers."""
_NO_OFFSETS: Final = "needs events with offsets, and the rows of sql have none: leave it out"


def _check_outputs(actions: Actions) -> Iterator[SettingIssue]:
    """Return issues of outputs with the rest of the action and with other outputs."""
    owners: dict[object, tuple[int, object]] = {}
    for at, action in actions:
        failover = _get_mapping(_get_delivery(action).get("failover"))
        for path, output in (
            (("actions", at, "output"), _get_mapping(action.get("output"))),
            (
                ("actions", at, "delivery", "failover", "output"),
                _get_mapping(failover.get("output")),
            ),
        ):
            target, setting, why = _find_exclusive_target(output)
            owner, name = owners.setdefault(target, (at, action.get("name")))
            if target is not None and owner != at:
                yield SettingIssue((*path, setting), f"action {name!r} {why}")
            message = _find_output_issue(action, output)
            if message is not None:
                setting = "producer" if output.get("type") == "queue" else "exactly_once"
                yield SettingIssue((*path, setting), message)


def _find_output_issue(action: Values, output: Values) -> str | None:
    delivery, has_sql = _get_delivery(action), action.get("sql") is not None
    if output.get("type") in ("sql", "table") and output.get("exactly_once") is True:
        if _is_direct(action):
            return (
                "records which offsets were delivered, and the main queue has many events that go "
                "elsewhere: give the action a queue"
            )
        if delivery.get("mode") == "try_direct":
            return (
                "identifies events by their queue and offset, and with delivery.mode try_direct an "
                "event may come from the main queue or from the action's own: leave out one of both"
            )
        return _NO_OFFSETS if has_sql else None
    if output.get("type") == "queue" and output.get("producer") is not None:
        if delivery.get("ordering") != Ordering.STRICT:
            return (
                "lets the other node drop events that come out of order: set delivery.ordering to "
                "strict, or leave it out"
            )
        return _NO_OFFSETS if has_sql else None
    return None


def _find_exclusive_target(output: Values) -> tuple[object, str, str]:
    """Return a target that only one action may have, its setting, and why; or ``None``."""
    if output.get("type") == SPARK and output.get("format") in _FORMATS_WITH_LOG:
        path = output.get("path") or _get_mapping(output.get("options")).get("path")
        why = (
            "writes there too, and Spark would mistake the batches of one for batches of the other "
            "and skip them: choose another path"
        )
        return path and posixpath.normpath(str(path)), "path", why
    if output.get("type") == "queue" and output.get("producer") is not None:
        target = tuple(str(output.get(setting)) for setting in ("endpoint", "queue", "producer"))
        why = (
            "sends to that queue under this name too, and the other node would mistake the events "
            "of one for events of the other and drop them: choose another name"
        )
        return target, "producer", why
    return None, "", ""
