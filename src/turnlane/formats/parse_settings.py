"""The settings of the parse stage. They are here, without Spark, so that every part can check them.

What only Java can judge, a regular expression's finer points, is judged when the stage is built.
"""

from __future__ import annotations

import enum
import re
import zoneinfo
from typing import Any, Final, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnlane.delivery.columns import OURS, PAYLOAD
from turnlane.events import BASE_SCHEMA
from turnlane.formats.java_regex import BadPattern, GroupedPattern
from turnlane.problems import Contradiction, Problem, did_you_mean

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


class Pick(NamedTuple):
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
            raise Contradiction(problems)
        return self

    def _misplaced(self) -> list[Problem]:
        return [
            Problem(knob, f"belongs to the format `{owner}`, not to `{self.format}`")
            for knob, owner in _KNOBS.items()
            if knob in self.model_fields_set and self.format is not owner
        ]

    def _pattern(self) -> list[Problem]:
        if self.format is not Format.REGEX:
            return []
        if self.pattern is None:
            return [Problem("pattern", "is required with the format `regex`")]
        try:
            names = self.grouped().names
        except BadPattern as error:
            return [Problem("pattern", str(error))]
        if not names:
            return [Problem("pattern", "has no named group; write one as (?<name>…)")]
        return [Problem("pattern", f"group {name!r} {why}") for name, why in _unusable(names)]

    def _columns(self) -> list[Problem]:
        problems = [Problem(f"columns.{name}", why) for name, why in _unusable(self.columns)]
        for name, text in self.columns.items():
            why = _why_not_picked(text)
            if why:
                problems.append(Problem(f"columns.{name}", why))
        return problems

    def _zone(self) -> list[Problem]:
        try:
            zoneinfo.ZoneInfo(self.time_zone)
        except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
            near = did_you_mean(self.time_zone, zoneinfo.available_timezones())
            return [Problem("time_zone", f"there is no time zone {self.time_zone!r}{near}")]
        return []

    def grouped(self) -> GroupedPattern:
        """The pattern with its groups counted. Raises ``BadPattern``."""
        return GroupedPattern.of(self.pattern or "")

    def picks(self) -> dict[str, Pick]:
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
        elif name.lower().startswith(OURS):
            found.append((name, f"begins as only our own columns do, with {OURS}"))
    lowered = [name.lower() for name in names]
    found += [
        (name, "is there twice, since Spark does not tell capitals from small letters")
        for at, name in enumerate(names)
        if name.lower() in lowered[:at]
    ]
    return found


def _pick(text: str) -> Pick:
    path, _, kind = text.partition("::")
    path = path.strip()
    return Pick(
        f"${path}" if path.startswith("[") else f"$.{path}", kind.strip().lower() or "string"
    )


def _why_not_picked(text: str) -> str | None:
    path, _, kind = text.partition("::")
    if not _PATH.fullmatch(path.strip()):
        return f"{path!r} is no path; write one as http.status or items[0].name"
    kind = kind.strip().lower() or "string"
    if kind not in _TYPES and not _DECIMAL.fullmatch(kind):
        return f"there is no type {kind!r}{did_you_mean(kind, _TYPES)}; there are: " + ", ".join(
            (*_TYPES, "decimal(p,s)")
        )
    return None
