"""The settings of the parse stage. They are here, without Spark, so that every part can check them.

What only Java can judge, a regular expression's finer points, is judged when the stage is built.
"""

from __future__ import annotations

import enum
import re
import zoneinfo
from typing import Any, Final, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnlane.delivery.settings import OWN_PREFIX, PAYLOAD
from turnlane.events import BASE_SCHEMA
from turnlane.validation import ConfigIssue, ContradictorySettings, suggest

# ── java_regex ──
# Java's regular expressions, as far as one can judge them without Java: groups, names, brackets.
#
# Named groups become numbered ones. So a name may be any column name (Java itself refuses
# ``_``),
# and one pass can take out all groups.

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
    """The pattern cannot be a regular expression; says where."""


class GroupedPattern(NamedTuple):
    """A pattern with no names in it, and the numbers of the groups that had one."""

    pattern: str
    numbers: dict[str, int]

    @property
    def names(self) -> tuple[str, ...]:
        """The named groups, in order."""
        return tuple(self.numbers)

    @classmethod
    def of(cls, pattern: str) -> GroupedPattern:
        """Read a pattern. Raises ``BadPattern``."""
        return _PatternScanner(pattern).done()


class _PatternScanner:
    """One way through a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._written: list[str] = []
        self._opened: list[int] = []
        self._numbers: dict[str, int] = {}
        self._count = 0

    def done(self) -> GroupedPattern:
        at = 0
        while at < len(self._pattern):
            found = _TOKEN.match(self._pattern, at)
            assert found is not None, "some alternative takes any character"
            at = self._take(found)
        if self._opened:
            raise BadPattern(f"the group opened at {_place(self._opened[-1])} is never closed")
        return GroupedPattern("".join(self._written), self._numbers)

    def _take(self, token: re.Match[str]) -> int:
        at, end, text = token.start(), token.end(), token[0]
        match token.lastgroup:
            case "named":
                self._named(at, token)
                text = "("
            case "group":
                self._open(at, counts=True)
            case "special":
                self._open(at, counts=False)
            case "close":
                if not self._opened:
                    raise BadPattern(f"`)` at {_place(at)} closes nothing")
                self._opened.pop()
            case "class":
                end = self._class_end(at)
                text = self._pattern[at:end]
            case "stray":
                raise BadPattern("it ends with a lone backslash")
            case "other":
                self._check_start(at, text)
            case "back":
                text = self._reference(at, token)
        self._written.append(text)
        return end

    def _open(self, at: int, *, counts: bool) -> None:
        self._opened.append(at)
        self._count += counts

    def _named(self, at: int, token: re.Match[str]) -> None:
        name = token["name"]
        if not token[0].endswith(">"):
            raise BadPattern(f"the group's name at {_place(at)} is not closed with >")
        if token[0].startswith("(?P"):
            raise BadPattern(f"{token[0]} at {_place(at)} is Python; Java writes (?<{name}>…)")
        if name in self._numbers:
            raise BadPattern(f"there are two groups {name!r}")
        self._open(at, counts=True)
        self._numbers[name] = self._count

    def _reference(self, at: int, token: re.Match[str]) -> str:
        name = token["backname"]
        if name not in self._numbers:
            raise BadPattern(f"there is no group {name!r} before {_place(at)}")
        return rf"(?:\{self._numbers[name]})"

    def _check_start(self, at: int, text: str) -> None:
        opened = not self._written or self._written[-1] == "("
        if opened and text[0] in "*+?":
            raise BadPattern(f"`{text[0]}` at {_place(at)} repeats nothing")

    def _class_end(self, at: int) -> int:
        """Where the character class that opens here ends; classes nest in Java."""
        depth, place = 0, at
        while place < len(self._pattern):
            found = _IN_CLASS.match(self._pattern, place)
            assert found is not None, "some alternative takes any character"
            depth += found[0].startswith("[")
            depth -= found[0] == "]"
            place = found.end()
            if depth == 0:
                return place
        raise BadPattern(f"the character class opened at {_place(at)} is never closed")


def _place(at: int) -> str:
    return f"character {at + 1}"


PARSE_ERROR: Final = "parse_error"
"""The column that says why an event could not be parsed; null if it could."""

TAKEN: Final = frozenset(
    {*BASE_SCHEMA.names, "queue", "partition", "offset", "data", PAYLOAD, PARSE_ERROR}
)
"""Columns that events have anyway, which no parsed column may replace."""

_COLUMN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_STEP: Final = r"(?:[A-Za-z_][\w-]*|\[(?:\d+|'[^'\\]+'|\"[^\"\\]+\")\])"
_PATH: Final = re.compile(rf"{_STEP}(?:\.?{_STEP})*")
_TYPES: Final = (
    "string", "boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "binary",
    "date", "timestamp", "variant",
)  # fmt: skip
_DECIMAL: Final = re.compile(r"decimal\(\d{1,2}, ?\d{1,2}\)")


class Format(enum.StrEnum):
    """What the values of a queue's events are."""

    NONE = "none"
    SYSLOG = "syslog"
    JSON = "json"
    OTLP = "otlp"
    REGEX = "regex"


class OnError(enum.StrEnum):
    """What becomes of an event that does not parse."""

    KEEP = "keep"
    """It goes on as it came, with the reason in the column ``parse_error``."""
    DEAD = "dead"
    """It goes to the dead letters, with the reason."""


class JsonColumn(NamedTuple):
    """A column taken out of JSON: where it is, as Spark writes paths, and its type."""

    path: str
    kind: str


_KNOBS: Final = {"pattern": Format.REGEX, "columns": Format.JSON, "time_zone": Format.SYSLOG}
"""Which format a knob belongs to."""


class ParseSettings(BaseModel):
    """How values become columns. A bare word stands for its format: ``parse: syslog``."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    format: Format = Field(default=Format.NONE, description="What the values are.")
    on_error: OnError = Field(
        default=OnError.KEEP,
        description="An event that does not parse goes on raw (`keep`) or dies (`dead`).",
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
        description="With `syslog`: the zone of times that come without one.",
        examples=["Europe/Berlin"],
    )

    @model_validator(mode="before")
    @classmethod
    def _worded(cls, given: object) -> object:
        if isinstance(given, str):
            return {"format": given}
        return {} if given is None else given

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        problems = [*self._misplaced(), *self._pattern(), *self._columns(), *self._zone()]
        if problems:
            raise ContradictorySettings(problems)
        return self

    def _misplaced(self) -> list[ConfigIssue]:
        return [
            ConfigIssue(knob, f"belongs to the format `{owner}`, not to `{self.format}`")
            for knob, owner in _KNOBS.items()
            if knob in self.model_fields_set and self.format is not owner
        ]

    def _pattern(self) -> list[ConfigIssue]:
        if self.format is not Format.REGEX:
            return []
        if self.pattern is None:
            return [ConfigIssue("pattern", "is required with the format `regex`")]
        try:
            names = self.grouped().names
        except BadPattern as error:
            return [ConfigIssue("pattern", str(error))]
        if not names:
            return [ConfigIssue("pattern", "has no named group; write one as (?<name>…)")]
        return [ConfigIssue("pattern", f"group {name!r} {why}") for name, why in _unusable(names)]

    def _columns(self) -> list[ConfigIssue]:
        problems = [ConfigIssue(f"columns.{name}", why) for name, why in _unusable(self.columns)]
        for name, text in self.columns.items():
            why = _why_not_picked(text)
            if why:
                problems.append(ConfigIssue(f"columns.{name}", why))
        return problems

    def _zone(self) -> list[ConfigIssue]:
        try:
            zoneinfo.ZoneInfo(self.time_zone)
        except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
            near = suggest(self.time_zone, zoneinfo.available_timezones())
            return [ConfigIssue("time_zone", f"there is no time zone {self.time_zone!r}{near}")]
        return []

    def grouped(self) -> GroupedPattern:
        """The pattern with its groups counted. Raises ``BadPattern``."""
        return GroupedPattern.of(self.pattern or "")

    def picks(self) -> dict[str, JsonColumn]:
        """The columns to be taken out of JSON, by name."""
        return {name: _pick(text) for name, text in self.columns.items()}


def _unusable(names: Any) -> list[tuple[str, str]]:  # noqa: ANN401
    """The names that cannot be columns, and why."""
    found = []
    for name in names:
        if not _COLUMN.fullmatch(name):
            found.append((name, "is no column name: a letter, then letters, digits and _"))
        elif name.lower() in TAKEN:
            found.append((name, "is a column that every event has; choose another name"))
        elif name.lower().startswith(OWN_PREFIX):
            found.append((name, f"begins as only our own columns do, with {OWN_PREFIX}"))
    lowered = [name.lower() for name in names]
    found += [
        (name, "is there twice, since Spark does not tell capitals from small letters")
        for at, name in enumerate(names)
        if name.lower() in lowered[:at]
    ]
    return found


def _pick(text: str) -> JsonColumn:
    path, _, kind = text.partition("::")
    path = path.strip()
    return JsonColumn(
        f"${path}" if path.startswith("[") else f"$.{path}", kind.strip().lower() or "string"
    )


def _why_not_picked(text: str) -> str | None:
    path, _, kind = text.partition("::")
    if not _PATH.fullmatch(path.strip()):
        return f"{path!r} is no path; write one as http.status or items[0].name"
    kind = kind.strip().lower() or "string"
    if kind not in _TYPES and not _DECIMAL.fullmatch(kind):
        return f"there is no type {kind!r}{suggest(kind, _TYPES)}; there are: " + ", ".join(
            (*_TYPES, "decimal(p,s)")
        )
    return None
