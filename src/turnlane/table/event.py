"""An event of a queue table, as a receiver gets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from turnlane.databases import Row

EVENT_COLUMNS: Final = (
    "event_id",
    "fire_at",
    "priority",
    "attempts",
    "keyspace_id",
    "event_group",
    "after_group",
)
"""The first columns of every row that the manager reads; the user's columns follow."""


class AckHandler(Protocol):
    """The source of an event, which takes its ack or nack: a manager, or a stream from a node."""

    positions: Mapping[str, int]
    """The positions of the user's columns in a row, by name."""

    def ack(self, events: list[TableEvent]) -> None:
        """Take acks. Does not wait until they are stored."""

    def nack(self, events: list[TableEvent], delay: float | None, error: str | None) -> None:
        """Take nacks. Does not wait."""


class TableEvent:
    """One event. ``event["payload"]`` is a user's column; settle it with ack() or nack().

    The manager's thread owns the attributes below ``fire_at``; receivers only read the row.
    """

    __slots__ = (
        "_row",
        "ack_handler",
        "ack_lost",
        "fire_at",
        "id",
        "is_marked",
        "read_at",
        "sent_at",
        "slot",
    )

    def __init__(self, row: Row, ack_handler: AckHandler, read_at: float) -> None:
        self._row = row
        self.ack_handler = ack_handler
        """The manager that fired it, or the stream that it came on."""
        self.id: int = row[0]
        """The ``event_id`` of its row."""
        self.fire_at: int = row[1]
        """When it was due: nanoseconds since the epoch, by the database's clock."""
        self.read_at = read_at
        """When its row was last read, in monotonic seconds; -inf: read it again before sending."""
        self.is_marked = False
        """Whether its row has the state ``fired``."""
        self.sent_at = 0.0
        """When it was last sent to a receiver, in monotonic seconds; 0: never."""
        self.ack_lost = False
        """Whether the manager took its ack and cannot store it: the event fires again."""
        self.slot: object = None
        """The slot of the receiver that has it."""

    def __getitem__(self, column: str) -> Any:  # noqa: ANN401 - a user's column of any type
        return self._row[self.ack_handler.positions[column]]

    @property
    def columns(self) -> dict[str, Any]:
        """The user's columns, by name."""
        return {name: self._row[at] for name, at in self.ack_handler.positions.items()}

    @property
    def row(self) -> Row:
        """All values, in the order of :data:`EVENT_COLUMNS` and then of the user's columns."""
        return self._row

    @property
    def priority(self) -> int:
        """Events with a higher priority fire first."""
        priority: int = self._row[2]
        return priority

    @property
    def attempts(self) -> int:
        """How often it was fired before, according to its row."""
        attempts: int = self._row[3]
        return attempts

    @property
    def keyspace_id(self) -> int | None:
        """The position of its key in the key space; SQLite does not compute it."""
        found: int | None = self._row[4]
        return found

    @property
    def group(self) -> str | None:
        """The event group that it is a member of."""
        group: str | None = self._row[5]
        return group

    @property
    def after_group(self) -> str | None:
        """The event group that has to be done before it fires."""
        group: str | None = self._row[6]
        return group

    def copy_for_retry(self, fire_at: int, more_attempts: int) -> TableEvent:
        """Return a copy with another fire time; its row is read again before it is sent."""
        row = (self.id, fire_at, self._row[2], self.attempts + more_attempts, *self._row[4:])
        return TableEvent(row, self.ack_handler, float("-inf"))

    def ack(self) -> None:
        """Settle the event: once the ack is stored, it never fires again. Does not wait."""
        self.ack_handler.ack([self])

    def nack(self, delay: float | None = None, error: str | None = None) -> None:
        """Fire the event again, after ``delay`` seconds or after its backoff. Does not wait."""
        self.ack_handler.nack([self], delay, error)

    def __repr__(self) -> str:
        return f"TableEvent({self.id}, {self.columns!r})"
