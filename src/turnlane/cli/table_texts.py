"""What ``turnlane table`` says: columns of its tables, and their cells."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from turnlane.cli.output import Column
from turnlane.cli.tables import Place
from turnlane.quantities import format_duration

if TYPE_CHECKING:
    from turnlane.table.status import Status

STATES: Final = ("to_be_fired", "fired", "acked", "dead")
STATUS_COLUMNS: Final[list[Column]] = [
    ("queue", "left"),
    ("shard", "left"),
    *((state, "right") for state in STATES),
    ("due", "right"),
    ("lag", "right"),
    ("window", "right"),
    ("leader", "left"),
]
PEEK_COLUMNS: Final[list[Column]] = [
    ("event_id", "right"),
    ("fires", "left"),
    ("state", "left"),
    ("attempts", "right"),
    ("name", "left"),
    ("row", "left"),
]
_APART: Final = {
    "fire_at",
    "event_id",
    "state",
    "attempts",
    "event_name",
    "keyspace_id",
    "priority",
}
"""Columns that have a cell of their own, or say little."""


def status_cells(place: Place, status: Status) -> list[str]:
    """A queue in one database."""
    counts = [str(status.counts[state]) for state in STATES]
    lag = format_duration(round(status.lag, 1)) if status.due else ""
    numbers = [str(status.due), lag, str(status.window)]
    return [place.queue.name, place.shard, *counts, *numbers, status.leader or "nobody"]


def peek_cells(row: dict[str, Any]) -> list[str]:
    """An event."""
    fires = datetime.fromtimestamp(row["fire_at"] / 1e9, UTC).isoformat(" ", "milliseconds")
    rest = [
        f"{name}={value}"
        for name, value in shown(row).items()
        if name not in _APART and value is not None
    ]
    place = [str(row["event_id"]), fires.removesuffix("+00:00"), row["state"]]
    return [*place, str(row["attempts"]), row["event_name"] or "", " ".join(rest)]


def shown(row: dict[str, Any]) -> dict[str, object]:
    """A row as JSON has it."""
    from turnlane.queues.inspection.rows import plain

    return {name: plain(value) for name, value in row.items()}
