"""A schedule: an event that recurs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from turnlane.table.cron import SECOND, Cron
from turnlane.table.letters import portable
from turnlane.table.names import checked_name, quoted


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is put into a queue, and when; as text, the statement that makes it."""

    queue: str
    name: str
    every: str
    """A cron expression."""
    time_zone: str = "UTC"
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Of the event."""
    next_at: int = 0
    """When it is due next: nanoseconds since the epoch."""

    def check(self) -> None:
        """Raise ``ValueError`` for what no schedule can be."""
        checked_name(self.name)
        self.after(0)
        for name in ("fire_at", "event_name"):
            if name in self.columns:
                raise ValueError(f"a schedule sets {name} by itself")
        _ = self.stored

    def after(self, moment: int) -> int:
        """When it is due next after a moment."""
        return Cron.parse(self.every).after(moment, zone_of(self.time_zone))

    @property
    def stored(self) -> str:
        """The event's columns as the database keeps them."""
        values = {name: portable(value) for name, value in self.columns.items()}
        try:
            return json.dumps(values, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"a schedule cannot keep these values: {error}") from None

    @property
    def event(self) -> dict[str, Any]:
        """The event that is due next, under a name that no other occurrence has."""
        due = datetime.fromtimestamp(self.next_at // SECOND, UTC)
        name = f"{self.name}@{due:%Y-%m-%dT%H:%M:%SZ}"
        return {**self.columns, "fire_at": self.next_at, "event_name": name}

    def __str__(self) -> str:
        text = f"CREATE SCHEDULE {quoted(self.name)} ON {quoted(self.queue)} "
        text += f"EVERY {_literal(self.every)}"
        if self.time_zone != "UTC":
            text += f" TIME ZONE {_literal(self.time_zone)}"
        if self.columns:
            values = (f"{quoted(name)} = {_literal(of)}" for name, of in self.columns.items())
            text += f" VALUES ({', '.join(values)})"
        return text


def zone_of(name: str) -> ZoneInfo:
    """The time zone of this name. Raises ``ValueError``."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"there is no time zone {name!r}") from None


def _literal(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "NULL" if value is None else str(value).upper()
    if isinstance(value, int | float):
        return str(value)
    return quoted(str(value), "'")
