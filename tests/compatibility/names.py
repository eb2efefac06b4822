"""The names that users write: metrics, commands and options, plug-ins, names of Python."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from tests.compatibility.comparison import list_names
from tests.compatibility.running import run_turnlane

_SECTION: Final = re.compile(r"^(\w+):\n((?:  .*\n|\n)+)", re.MULTILINE)
_LISTED: Final = re.compile(r"^  \[?(\w[\w-]*)", re.MULTILINE)
_OPTION: Final = re.compile(r"^  (-.*?)(?:  .*)?$", re.MULTILINE)
_NAME: Final = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")

LISTED_LABELS: Final = {"reason", "state"}
"""Labels whose values are names, too."""

MEMBERS: Final[Mapping[str, str]] = {
    "Ack": "count dropped end level durability",
    "AckLevel": "ACCEPTED PERSISTED DELIVERED",
    "Batch": "block blocks attempt place done dead release free",
    "Client": ("queue create drop queues stats read wait settle stage commit abort table close"),
    "Durability": "ALWAYS INTERVAL NEVER MEMORY",
    "Event": "value key headers timestamp severity source offset",
    "FlowControl": "NONE LIGHT FULL",
    "FullBehavior": "BLOCK DROP_NEWEST DROP_OLDEST",
    "Ledger": "accepted delivered dead dropped pending settled adds_up as_dict",
    "Producer": "publish try_publish publish_block try_publish_block flush close",
    "Published": "first accepted dropped repeated",
    "Queue": "producer get finish close stats name",
    "QueueSettings": "of replace",
    "Stats": (
        "name kind ledger size bytes max_size max_bytes utilization in_flight blocked_publishers "
        "memory_blocks pushes full_waits releases disk_bytes disk_available_bytes disk_full "
        "disk_errors syncs meta_syncs rotations flushes quarantined trouble as_dict"
    ),
    "WorkerPool": "active cancelled close",
}
"""The documented members of public classes."""
FUNCTIONS: Final = ("open_queue", "connect", "block_of", "WorkerPool", "TurnlaneHandler")
MODULES: Final = ("turnlane", "turnlane.errors", "turnlane.table", "turnlane.testing")


def read_metrics(address: str) -> dict[str, Any]:
    """Return the metrics of a node by name: type, labels, and the values of some labels."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        labels: dict[str, set[str]] = {}
        for sample in family.samples:
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
        found[family.name] = {
            "type": family.type,
            "samples": {sample.name: {} for sample in family.samples},
            "labels": {
                name: list_names(values if name in LISTED_LABELS else ())
                for name, values in labels.items()
            },
        }
    return found


def read_commands(*command: str) -> dict[str, Any]:
    """Return the options and arguments of a command and of those below it, from their help."""
    finished = run_turnlane(*command, "--help")
    assert finished.code == 0, finished.err
    sections = {"Arguments": "", "Options": "", "Commands": ""}
    sections |= dict(_SECTION.findall(finished.out))
    listed = _LISTED.findall(sections["Commands"])
    return {
        "arguments": len(_LISTED.findall(sections["Arguments"])),
        "options": _read_options(sections["Options"]),
        "commands": {name: read_commands(*command, name) for name in listed},
    }


def _read_options(section: str) -> dict[str, Any]:
    found = {}
    for line in _OPTION.findall(section):
        names = _NAME.findall(line)
        value = _NAME.sub("", line).strip(" ,/")
        if "--help" in names:
            continue
        about = {"takes_value": bool(value), "choices": value.strip("<>") if "|" in value else ""}
        found.update(dict.fromkeys(names, about))
    return found


def read_entry_points(root: Path) -> dict[str, Any]:
    """Return the names that the project installs, each by its group; all of them can be loaded."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    for names in groups.values():
        for target in names.values():
            module, _, attribute = target.partition(":")
            assert hasattr(importlib.import_module(module), attribute), target
    extras = project["optional-dependencies"]
    return {
        **{group: list_names(names) for group, names in groups.items()},
        "extras": list_names(extras),
        "modules": {"pyspark_turnlane": {}, "pyspark_turnlane_table": {}},
    }


def read_python_names() -> dict[str, Any]:
    """Return the public names of the documented modules, with parameters."""
    modules = {name: importlib.import_module(name) for name in MODULES}
    turnlane: Any = modules["turnlane"]
    found: dict[str, Any] = {
        name: list_names(_public_names(module)) for name, module in modules.items()
    }
    found["errors"] = {
        name: list_names(each.__name__ for each in error.__mro__ if _is_ours(each))
        for name in _public_names(modules["turnlane.errors"])
        if isinstance(error := getattr(modules["turnlane.errors"], name), type)
    }
    found["members"] = {
        f"{owner}.{name}": _describe_member(getattr(turnlane, owner), name)
        for owner, names in MEMBERS.items()
        for name in names.split()
    }
    found["functions"] = {name: _parameters(getattr(turnlane, name)) for name in FUNCTIONS}
    return found


def _public_names(module: Any) -> list[str]:
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, each in vars(module).items()
        if getattr(each, "__module__", "") == module.__name__
    )


def _is_ours(error: type) -> bool:
    return error.__module__.startswith("turnlane")


def _describe_member(owner: type, name: str) -> dict[str, Any]:
    """Describe a method by its parameters, and a member of an enumeration by its value."""
    found = inspect.getattr_static(owner, name, None)
    if found is None:
        known = {*getattr(owner, "__annotations__", ()), *getattr(owner, "__slots__", ())}
        fields = {*getattr(owner, "__dataclass_fields__", ()), *getattr(owner, "_fields", ())}
        assert name in known | fields, f"{owner.__name__} has no {name}"
        return {}
    if isinstance(found, owner):
        return {"value": str(found)}
    member = getattr(owner, name)
    is_method = callable(member) and not isinstance(found, property)
    return _parameters(member) if is_method else {}


def _parameters(function: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, each in inspect.signature(function).parameters.items():
        if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
            found[each.kind.name] = {}  # users never write its name
        elif name not in ("self", "cls"):
            is_required = each.default is inspect.Parameter.empty
            found[name] = {"kind": each.kind.name, "is_required": is_required}
    return found
