"""The settings of the parse stage. This module does not need Spark, so every part can check them.

Java's regular expressions are checked without Java: groups, names and brackets. Java itself checks
the rest when the stage is built. Named groups become numbered groups: so a name may be any column
name (Java refuses ``_``), and one pass extracts all groups.
"""

from __future__ import annotations

import enum
import re
import zoneinfo
from collections.abc import Iterable
from typing import Final, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnlane.delivery.settings import OWN_PREFIX, PAYLOAD
from turnlane.events import BASE_SCHEMA
from turnlane.validation import ConfigIssue, ContradictorySettings, suggest

_TOKEN: Final = re.compile(
    r"""
      (?P<quoted>\\Q.*?(?:\\E|\Z))
    | (?P<back>\\k<(?P<backname>[^>]*)>)
    | (?P<escape>\\.)
    | (?P<stray>\\\Z)
    | (?P<named>\(\?P?<(?![=!])(?P<name>[^>]*)>?)
    | (?P<special>\(\?)
    | (?P<group>\()
    | (?P<close>\))
    | (?P<class>\[)
    | (?P<other>[^\\()\[]+)
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_CLASS: Final = re.compile(r"\\Q.*?(?:\\E|\Z)|\\.|\[\^?\]?|\]|[^\\\[\]]+|\\\Z", re.DOTALL)


class BadPattern(ValueError):
    """The pattern cannot be a regular expression; the message has the place."""


class GroupedPattern(NamedTuple):
    """A pattern without names, and the numbers of its named groups, in order."""

    pattern: str
    numbers: dict[str, int]

    @property
    def names(self) -> tuple[str, ...]:
        """The named groups, in order."""
        return tuple(self.numbers)

    @classmethod
    def of(cls, pattern: str) -> GroupedPattern:  # noqa: C901 - one case for each token
        """Parse a pattern. Raises ``BadPattern``."""
        parts: list[str] = []
        opened: list[int] = []
        numbers: dict[str, int] = {}
        count = at = 0
        while at < len(pattern):
            token = _TOKEN.match(pattern, at)
            assert token is not None, "some alternative matches any character"
            end, text, place = token.end(), token[0], f"character {at + 1}"
            match token.lastgroup:
                case "named":
                    name = _check_group_name(token, place, numbers)
                    opened.append(at)
                    count += 1
                    numbers[name] = count
                    text = "("
                case "group" | "special":
                    opened.append(at)
                    count += token.lastgroup == "group"
                case "close":
                    if not opened:
                        raise BadPattern(f"`)` at {place} closes nothing")
                    opened.pop()
                case "class":
                    end = _find_class_end(pattern, at)
                    text = pattern[at:end]
                case "stray":
                    raise BadPattern("it ends with a lone backslash")
                case "other" if text[0] in "*+?" and (not parts or parts[-1] == "("):
                    raise BadPattern(f"`{text[0]}` at {place} repeats nothing")
                case "back":
                    name = token["backname"]
                    if name not in numbers:
                        raise BadPattern(f"there is no group {name!r} before {place}")
                    text = rf"(?:\{numbers[name]})"
            parts.append(text)
            at = end
        if opened:
            raise BadPattern(f"the group opened at character {opened[-1] + 1} is never closed")
        return cls("".join(parts), numbers)


def _check_group_name(token: re.Match[str], place: str, numbers: dict[str, int]) -> str:
    name = token["name"]
    if not token[0].endswith(">"):
        raise BadPattern(f"the group's name at {place} is not closed with >")
    if token[0].startswith("(?P"):
        raise BadPattern(f"{token[0]} at {place} is Python; Java writes (?<{name}>…)")
    if name in numbers:
        raise BadPattern(f"there are two groups {name!r}")
    return name


def _find_class_end(pattern: str, start: int) -> int:
    """Return where the character class that opens at ``start`` ends; classes nest in Java."""
    depth, at = 0, start
    while at < len(pattern):
        token = _IN_CLASS.match(pattern, at)
        assert token is not None, "some alternative matches any character"
        depth += token[0].startswith("[")
        depth -= token[0] == "]"
        at = token.end()
        if depth == 0:
            return at
    raise BadPattern(f"the character class opened at character {start + 1} is never closed")


PARSE_ERROR: Final = "parse_error"
"""The column with the reason why an event could not be parsed; null if it was parsed."""

TAKEN: Final = frozenset(
    {*BASE_SCHEMA.names, "queue", "partition", "offset", "data", PAYLOAD, PARSE_ERROR}
)
"""Columns that every event has; no parsed column may replace them."""

_COLUMN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_STEP: Final = r"(?:[A-Za-z_][\w-]*|\[(?:\d+|'[^'\\]+'|\"[^\"\\]+\")\])"
_PATH: Final = re.compile(rf"{_STEP}(?:\.?{_STEP})*")
_TYPES: Final = (
    "string", "boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "binary",
    "date", "timestamp", "variant",
)  # fmt: skip
_DECIMAL: Final = re.compile(r"decimal\(\d{1,2}, ?\d{1,2}\)")


class Format(enum.StrEnum):
    """The format of the values of a queue's events."""

    NONE = "none"
    SYSLOG = "syslog"
    JSON = "json"
    OTLP = "otlp"
    REGEX = "regex"


class OnError(enum.StrEnum):
    """What happens to an event that cannot be parsed."""

    KEEP = "keep"
    """It is kept as it is, with the reason in the column ``parse_error``."""
    DEAD = "dead"
    """It goes to the dead letters, with the reason."""


class JsonColumn(NamedTuple):
    """A column extracted from JSON: its path in Spark's notation, and its type."""

    path: str
    kind: str


_KNOBS: Final = {"pattern": Format.REGEX, "columns": Format.JSON, "time_zone": Format.SYSLOG}
"""The format that a setting belongs to."""


class ParseSettings(BaseModel):
    """How values become columns. A bare word stands for its format: ``parse: syslog``."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    format: Format = Field(default=Format.NONE, description="The format of the values.")
    on_error: OnError = Field(
        default=OnError.KEEP,
        description="Events that cannot be parsed are kept raw (`keep`) or dead letters (`dead`).",
    )
    pattern: str | None = Field(
        default=None,
        description="With `regex`: a Java regular expression; each named group is a column.",
        examples=[r"(?<ip>\S+) (?<rest>.*)"],
    )
    columns: dict[str, str] = Field(
        default={},
        description="With `json`: further columns, each a path and a type.",
        examples=[{"status": "http.status::int"}],
    )
    time_zone: str = Field(
        default="UTC",
        description="With `syslog`: the time zone of times without one.",
        examples=["Europe/Berlin"],
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_format(cls, given: object) -> object:
        if isinstance(given, str):
            return {"format": given}
        return {} if given is None else given

    @model_validator(mode="after")
    def _check(self) -> Self:
        issues = [
            ConfigIssue(knob, f"belongs to the format `{owner}`, not to `{self.format}`")
            for knob, owner in _KNOBS.items()
            if knob in self.model_fields_set and self.format is not owner
        ]
        if self.format is Format.REGEX:
            issues += [ConfigIssue("pattern", why) for why in self._check_pattern()]
        for name, why in _find_unusable_names(self.columns):
            issues.append(ConfigIssue(f"columns.{name}", why))
        for name, text in self.columns.items():
            reason = _check_json_column(text)
            if reason:
                issues.append(ConfigIssue(f"columns.{name}", reason))
        try:
            zoneinfo.ZoneInfo(self.time_zone)
        except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
            near = suggest(self.time_zone, zoneinfo.available_timezones())
            why = f"there is no time zone {self.time_zone!r}{near}"
            issues.append(ConfigIssue("time_zone", why))
        if issues:
            raise ContradictorySettings(issues)
        return self

    def _check_pattern(self) -> list[str]:
        if self.pattern is None:
            return ["is required with the format `regex`"]
        try:
            names = self.build_grouped_pattern().names
        except BadPattern as error:
            return [str(error)]
        if not names:
            return ["has no named group; write one as (?<name>…)"]
        return [f"group {name!r} {why}" for name, why in _find_unusable_names(names)]

    def build_grouped_pattern(self) -> GroupedPattern:
        """Return the pattern with numbered groups. Raises ``BadPattern``."""
        return GroupedPattern.of(self.pattern or "")

    def build_json_columns(self) -> dict[str, JsonColumn]:
        """Return the columns to extract from JSON, by name."""
        found = {}
        for name, text in self.columns.items():
            path, kind = _split_json_column(text)
            found[name] = JsonColumn(f"${path}" if path.startswith("[") else f"$.{path}", kind)
        return found


def _find_unusable_names(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the names that cannot be columns, each with the reason."""
    issues = []
    for name in names:
        if not _COLUMN.fullmatch(name):
            why = "is not a column name: a letter, then letters, digits and _"
        elif name.lower() in TAKEN:
            why = "is a column that every event has; choose another name"
        elif name.lower().startswith(OWN_PREFIX):
            why = f"begins with {OWN_PREFIX}, which is reserved for turnlane's own columns"
        else:
            continue
        issues.append((name, why))
    known: set[str] = set()
    for name in names:
        if name.lower() in known:
            issues.append((name, "is listed twice: Spark ignores the case of column names"))
        known.add(name.lower())
    return issues


def _split_json_column(text: str) -> tuple[str, str]:
    path, _, kind = text.partition("::")
    return path.strip(), kind.strip().lower() or "string"


def _check_json_column(text: str) -> str | None:
    """Return the problem of a path and type, if there is one."""
    path, kind = _split_json_column(text)
    if not _PATH.fullmatch(path):
        return f"{path!r} is not a path; write one as http.status or items[0].name"
    if kind not in _TYPES and not _DECIMAL.fullmatch(kind):
        types = ", ".join((*_TYPES, "decimal(p,s)"))
        return f"there is no type {kind!r}{suggest(kind, _TYPES)}; there are: {types}"
    return None
