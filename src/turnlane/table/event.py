"""An event of a queue table, as a receiver has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from turnlane.table.sql.dialect import Row

EVENT_COLUMNS: Final = (
    "event_id",
    "fire_at",
    "priority",
    "attempts",
    "keyspace_id",
    "event_group",
    "after_group",
)
"""The first columns of every row that the manager reads; the user's follow."""


class AckHandler(Protocol):
    """Where an event came from, and where its ack goes."""

    positions: Mapping[str, int]
    """Of the user's columns in a row."""

    def ack(self, events: list[TableEvent]) -> None:
        """Take acks."""

    def nack(self, events: list[TableEvent], delay: float | None, error: str | None) -> None:
        """Take nacks."""


class TableEvent:
    """One event. ``event["payload"]`` is a column of yours; settle it with ack() or nack()."""

    __slots__ = ("_row", "fire_at", "fired", "home", "id", "lost", "marked", "read_at", "seat")

    def __init__(self, row: Row, home: AckHandler, read_at: float) -> None:
        self._row = row
        self.home = home
        """The manager that fired it."""
        self.id: int = row[0]
        """The ``event_id`` of its row."""
        self.fire_at: int = row[1]
        """When it was due: nanoseconds since the epoch, by the database's clock."""
        self.read_at = read_at
        """When the database was last asked about it, in monotonic seconds; -inf: ask again."""
        self.marked = False
        """Whether its row says ``fired``."""
        self.fired = 0.0
        """When it was last given to a receiver, in monotonic seconds; 0: it was not."""
        self.lost = False
        """Whether its ack was taken and will not be stored: it fires again."""
        self.seat: object = None
        """The receiver that has it."""

    def __getitem__(self, column: str) -> Any:  # noqa: ANN401 - whatever the column holds
        return self._row[self.home.positions[column]]

    @property
    def columns(self) -> dict[str, Any]:
        """All of the user's columns."""
        return {name: self._row[at] for name, at in self.home.positions.items()}

    @property
    def row(self) -> Row:
        """All of it, in the order of :data:`EVENT_COLUMNS` and then of the user's columns."""
        return self._row

    @property
    def priority(self) -> int:
        """Higher goes first."""
        priority: int = self._row[2]
        return priority

    @property
    def attempts(self) -> int:
        """How often it was fired before, as far as its row knows."""
        attempts: int = self._row[3]
        return attempts

    @property
    def keyspace_id(self) -> int | None:
        """Where its key lies; SQLite leaves that to whoever asks."""
        found: int | None = self._row[4]
        return found

    @property
    def group(self) -> str | None:
        """The event group that it is a member of."""
        group: str | None = self._row[5]
        return group

    @property
    def after_group(self) -> str | None:
        """The event group whose end it waits for."""
        group: str | None = self._row[6]
        return group

    def moved(self, fire_at: int, more: int) -> TableEvent:
        """The same event, to be fired again at another time."""
        row = (self.id, fire_at, self._row[2], self.attempts + more, *self._row[4:])
        return TableEvent(row, self.home, float("-inf"))

    def ack(self) -> None:
        """Settle it: it never fires again once that is stored. Does not wait for that."""
        self.home.ack([self])

    def nack(self, delay: float | None = None, error: str | None = None) -> None:
        """Have it fired again: after ``delay`` seconds, or when its backoff is over."""
        self.home.nack([self], delay, error)

    def __repr__(self) -> str:
        return f"TableEvent({self.id}, {self.columns!r})"
