"""Configurations: the answers of ``turnlane validate``, and the list of all settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import trustme
from ruamel.yaml import YAML

import turnlane
from tests.compatibility.comparison import list_names
from tests.compatibility.running import run_turnlane, set_variables
from turnlane.config import json_schema

VARIABLES: Final = {
    "SHOP_TOKEN": "0123456789abcdef-shop",
    "OTHER_TOKEN": "0123456789abcdef-other",
    "HTTP_TOKEN": "0123456789abcdef-http",
    "DB_PASSWORD": "password",
}
KNOBS: Final[Mapping[str, Mapping[str, Any]]] = {
    "proxy": {
        "name": "orders",
        "max_bytes": "512Mi",
        "max_event_bytes": "1Mi",
        "full_behavior": "drop_oldest",
        "minimum_batch_size": 10,
        "shutdown_timeout": "30s",
        "batch_size": 4096,
        "batches": 8,
        "resend_bytes": "128Mi",
    },
    "direct": {"name": "orders", "max_event_bytes": "1Mi", "sampling_interval": 10},
}
_IS_KNOB: Final = re.compile(
    r"\.main\.|\.actions\.queue\.|\.queues\.\*\.(batch_size|batches|resend_bytes)$"
)
_PLACE: Final = re.compile(r"^\S+\.yaml:(\d+:\d+: [\w.\[\]]+):", re.MULTILINE)


def prepare_directory(directory: Path) -> None:
    """Make the files that configurations name: certificates, a token, a module."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(str(directory / "cert.pem"))
    issued.private_key_pem.write_to_path(str(directory / "key.pem"))
    (directory / "token.txt").write_text("0123456789abcdef-file\n")
    (directory / "rules.py").write_text("def tidy(events):\n    return events\n")


def observe_configuration(file: Path, directory: Path) -> dict[str, Any]:
    """Validate a configuration: its settings with all defaults, or the places of its mistakes."""
    (directory / file.name).write_bytes(file.read_bytes())
    with set_variables(**VARIABLES):
        finished = run_turnlane("validate", file.name, "--show", cwd=directory)
    text = finished.out.replace(str(directory.resolve()), "<directory>")
    shown = _mask_memory(json.loads(text)) if text else None
    return {"code": finished.code, "places": _PLACE.findall(finished.err), "shown": shown}


def observe_knobs() -> dict[str, Any]:
    """Return the knobs of the queues that no node has."""
    found = {}
    for kind, knobs in KNOBS.items():
        settings = turnlane.QueueSettings.of(kind=kind, **knobs)
        found[kind] = {name: str(getattr(settings, name)) for name in knobs}
    return found


def _mask_memory(value: Any) -> Any:
    """Mask sizes that depend on the memory of the machine."""
    if isinstance(value, list):
        return [_mask_memory(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {name: _mask_memory(each) for name, each in value.items()}
    return found | ({"max_bytes": "<varies>"} if found.get("memory_percent") else {})


# ── settings ─────────────────────────────────────────────────────────────────────────────────────


def read_settings() -> dict[str, Any]:
    """Return every setting by its path, with its default and the names that it allows."""
    schema = json_schema()
    return {path: _describe(setting, schema) for path, setting in _walk(schema, schema, "")}


def find_unset(files: Iterable[Path]) -> list[str]:
    """Return the settings that no configuration sets."""
    schema = json_schema()
    unset = {path for path, _ in _walk(schema, schema, "")}
    for file in files:
        unset -= set(_walk_values(schema, schema, YAML(typ="safe").load(file), ""))
    # All queues have the same settings. The last three belong to proxy queues, which no node has.
    return sorted(path for path in unset if not _IS_KNOB.match(path))


def _walk(node: Any, root: Any, path: str) -> Iterator[tuple[str, Any]]:
    for branch in _branches(node, root):
        place = _place_of(branch, path)
        for name, setting in branch.get("properties", {}).items():
            yield f"{place}.{name}", setting
            if not (name == "output" and "failover" in place):  # the outputs once more
                yield from _walk(setting, root, f"{place}.{name}")
        if isinstance(branch.get("additionalProperties"), dict):
            yield from _walk(branch["additionalProperties"], root, f"{path}.*")
        if "items" in branch:
            yield from _walk(branch["items"], root, path)


def _walk_values(node: Any, root: Any, value: Any, path: str) -> Iterator[str]:
    for branch in _branches(node, root):
        place = _place_of(branch, path)
        properties = branch.get("properties", {})
        kind = _kind_of(branch)
        if isinstance(value, dict) and (kind is None or value.get("type") == kind):
            for name in value.keys() & properties.keys():
                yield f"{place}.{name}"
                yield from _walk_values(properties[name], root, value[name], f"{place}.{name}")
            if isinstance(branch.get("additionalProperties"), dict):
                for each in value.values():
                    yield from _walk_values(branch["additionalProperties"], root, each, f"{path}.*")
        if isinstance(value, list) and "items" in branch:
            for each in value:
                yield from _walk_values(branch["items"], root, each, path)


def _branches(node: Any, root: Any) -> Iterator[dict[str, Any]]:
    """Return the alternatives of a schema, with references followed."""
    if "$ref" in node:
        node = root["$defs"][node["$ref"].rpartition("/")[2]]
    choices = [*node.get("anyOf", ()), *node.get("oneOf", ())]
    if not choices:
        yield node
    for choice in choices:
        yield from _branches(choice, root)


def _kind_of(branch: dict[str, Any]) -> str | None:
    """Return the type of an input or an output."""
    kind: str | None = branch.get("properties", {}).get("type", {}).get("const")
    return kind


def _place_of(branch: dict[str, Any], path: str) -> str:
    kind = _kind_of(branch)
    return path if kind is None else f"{path}[{kind}]"


def _describe(setting: Any, root: Any) -> dict[str, Any]:
    allowed = [str(name) for branch in _branches(setting, root) for name in branch.get("enum", ())]
    about: dict[str, Any] = {}
    if "default" in setting:
        about["default"] = setting["default"]
    return about | ({"allowed": list_names(allowed)} if allowed else {})
