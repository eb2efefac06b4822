"""Places: what a manager has for each of its receivers, and what it is to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from turnlane.table.dispatch import Seat
from turnlane.table.event import Home, TableEvent
from turnlane.table.receiver import Receiver, Source


class Court(Home, Source, Protocol):
    """The manager, as its events and its receivers see it."""


_FIRE_AT = attrgetter("fire_at")


@dataclass(slots=True)
class Lag:
    """How late events were, in all: from when they were due, by the database's clock."""

    events: int = 0
    seconds: float = 0.0

    def add(self, events: Sequence[TableEvent], now: int) -> None:
        """Something happened to events at a time."""
        self.events += len(events)
        self.seconds += (now * len(events) - sum(map(_FIRE_AT, events))) / 1e9


@dataclass(slots=True)
class Counts:
    """What happened since the manager was made."""

    fired: int = 0
    acked: int = 0
    retried: int = 0
    """Events not acked in time, or nacked, that fire again."""
    dead: int = 0
    lost_leads: int = 0
    fire_lag: Lag = field(default_factory=Lag)
    """From due to fired."""
    ack_lag: Lag = field(default_factory=Lag)
    """From due to acked."""


@dataclass(slots=True, eq=False)
class Place(Seat):
    """A receiver's seat."""

    receiver: Receiver | None = None
    stalled_at: int | None = None
    """How often the receiver had asked for events when it did not take what it was offered."""

    @property
    def room(self) -> int:
        """How many more events it takes; none while it does not even ask for those it has."""
        if self.receiver is not None and self.receiver.asked == self.stalled_at:
            return 0
        return max(0, self.capacity - self.load)

    def stall(self) -> None:
        """Events waited for too long: send no more until the receiver asks for some."""
        if self.receiver is not None and not self.receiver.asks:
            self.stalled_at = self.receiver.asked
