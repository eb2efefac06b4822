"""The result of a migration: a configuration with the origin of each value, and findings.

A converter sets values and adds findings. :meth:`Draft.render` returns YAML that turnlane accepts:
it validates the configuration, removes values that turnlane refuses, and adds a finding for each of
them. So every setting of the other program is in the YAML, or in the findings, or in both.
"""

from __future__ import annotations

import enum
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from turnlane.config import ConfigFileError, loads
from turnlane.config.document import Path, parse_path
from turnlane.delivery.settings import DeliverySettings
from turnlane.errors import Bug
from turnlane.units import parse_duration

SECTIONS: Final = ("node", "inputs", "queues", "main", "parse", "lane", "actions")
"""The sections of the YAML, in the order in which they are written."""

_MAX_TEXT: Final = 120
"""The most characters of a value in a comment or a finding."""


class Origin(NamedTuple):
    """Where a setting of the other program stands."""

    line: int | None
    """Its line in the file; none for an option of the command line."""
    setting: str
    value: object

    def __str__(self) -> str:
        return f"{shorten(self.setting)} = {shorten(self.value)}"

    def describe(self) -> str:
        """Return the setting with its line."""
        return str(self) if self.line is None else f"line {self.line}: {self}"


class Verdict(enum.StrEnum):
    """What became of a setting."""

    MISSING = "no counterpart"
    DIFFERENT = "differs"
    UNUSED = "has no effect"


class MigrationFinding(NamedTuple):
    """A setting that was not converted, or that means something else now."""

    origin: Origin
    verdict: Verdict
    advice: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.verdict}; {self.advice}"


@dataclass
class Leaf:
    """A value of the YAML with the text of its comment."""

    value: object
    origin: Origin | None = None
    comment: str = ""


@dataclass
class Draft:
    """A configuration in the making: nested mappings and lists whose ends are leaves."""

    title: str
    settings: dict[str, Any] = field(default_factory=lambda: {name: {} for name in SECTIONS})
    findings: list[MigrationFinding] = field(default_factory=list)

    def set(self, place: dict[str, Any], path: str, value: object, origin: Origin) -> None:
        """Set a value in a mapping of the draft, by its dotted path; a later value wins."""
        *sections, name = path.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        before = place.get(name)
        if isinstance(before, Leaf) and before.origin is not None and before.origin != origin:
            self.add_unused(before.origin, f"{origin} decides {path}")
        place[name] = Leaf(value, origin)

    def add_missing(self, origin: Origin, advice: str) -> None:
        """Add a setting that turnlane does not have."""
        self.findings.append(MigrationFinding(origin, Verdict.MISSING, advice))

    def add_different(self, origin: Origin, advice: str) -> None:
        """Add a setting that was converted and means something else now."""
        self.findings.append(MigrationFinding(origin, Verdict.DIFFERENT, advice))

    def add_unused(self, origin: Origin, why: str) -> None:
        """Add a setting that has no effect in the other program either."""
        self.findings.append(MigrationFinding(origin, Verdict.UNUSED, why))

    def render(self) -> str:
        """Return YAML that ``turnlane validate`` accepts."""
        while True:
            text = self._write()
            try:
                loads(text, environment={})
            except ConfigFileError as error:
                # One at a time: a removed value may be the cause of the next issue.
                issue = error.issues[0]
                self._remove(parse_path(issue.path), issue.message)
            else:
                return text

    def _write(self) -> str:
        yaml = YAML()
        yaml.width = 4096
        yaml.indent(mapping=2, sequence=4, offset=2)
        stream = io.StringIO()
        comments: list[str] = []
        yaml.dump(_build_node(self.settings, comments), stream)
        # ruamel puts one or two spaces before a comment, so it writes only the comment's number.
        text = re.sub(
            r" +#(\d+)$",
            lambda found: f"  # {comments[int(found[1])]}",
            stream.getvalue(),
            flags=re.MULTILINE,
        )
        lines = [self.title, "Check the settings, then: turnlane validate FILE"]
        sections = re.sub(r"^(?=\w)", "\n", text, flags=re.MULTILINE)
        return "".join(f"# {shorten(line)}\n" for line in lines) + sections

    def _remove(self, path: Path, message: str) -> None:
        """Remove a value that turnlane refuses, or the nearest part that has an origin."""
        parents: list[Any] = [self.settings]
        for part in path:
            place = parents[-1]
            is_known = part in place if isinstance(place, dict) else isinstance(place, list)
            if not is_known or isinstance(place[part], Leaf):
                break
            parents.append(place[part])
        depth = len(parents) - 1
        last: Any = parents[-1]
        if depth < len(path) and isinstance(last, dict) and path[depth] in last:
            removed = last.pop(path[depth])
        elif depth:
            removed = parents[-2].pop(path[depth - 1])
        else:
            raise Bug(f"the draft has no setting {path}: {message}")
        for origin in dict.fromkeys(_find_origins(removed)):
            self.add_missing(origin, f"turnlane refuses it: {message}")


def complete_backoff(delivery: dict[str, Any]) -> None:
    """Raise the longest wait of a delivery to its first wait, if it is below that."""
    first, longest = delivery.get("backoff"), delivery.get("max_backoff")
    most = DeliverySettings().max_backoff if longest is None else parse_duration(longest.value)
    if first is not None and parse_duration(first.value) > most:
        delivery["max_backoff"] = Leaf(first.value, first.origin, "at least backoff")


def shorten(value: object) -> str:
    """Return a value as printable text on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    signs = (sign if sign.isprintable() else repr(sign)[1:-1] for sign in str(value))
    text = "".join(signs)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _find_origins(part: object) -> Iterator[Origin]:
    if isinstance(part, Leaf):
        if part.origin is not None:
            yield part.origin
    elif isinstance(part, dict | list):
        for each in part.values() if isinstance(part, dict) else part:
            yield from _find_origins(each)


def _build_node(part: object, comments: list[str]) -> object:
    """Return a part of the draft as an object that ruamel writes; add its comments to the list."""
    if isinstance(part, list):
        return CommentedSeq([_build_node(each, comments) for each in part])
    if not isinstance(part, dict):
        return part
    made = CommentedMap()
    for key, each in part.items():
        if isinstance(each, Leaf):
            made[key] = _escape_variables(each.value)
            comment = each.comment or (each.origin.describe() if each.origin else "")
            if comment:
                made.yaml_add_eol_comment(f"#{len(comments)}", key)
                comments.append(comment)
        elif each:
            made[key] = _build_node(each, comments)
    return made


def _escape_variables(value: object) -> object:
    """Return a value in which turnlane replaces no variables."""
    if isinstance(value, list):
        made = CommentedSeq([_escape_variables(each) for each in value])
        made.fa.set_flow_style()
        return made
    return value.replace("$", "$$") if isinstance(value, str) else value
