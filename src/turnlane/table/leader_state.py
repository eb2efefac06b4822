"""Places: what a manager has for each of its receivers, and what it is to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from turnlane.clock import Clock
from turnlane.table.assignment import ReceiverSlot
from turnlane.table.definition import TableSettings
from turnlane.table.event import AckHandler, TableEvent
from turnlane.table.lease import LeaderLease
from turnlane.table.receiver import ManagerHandle, Receiver
from turnlane.table.store import TableStore
from turnlane.table.window import EventCache


class ManagerHandle2(AckHandler, ManagerHandle, Protocol):
    """The manager, as its events and its receivers see it."""


_FIRE_AT = attrgetter("fire_at")


@dataclass(slots=True)
class LagTotal:
    """How late events were, in all: from when they were due, by the database's clock."""

    events: int = 0
    seconds: float = 0.0

    def add(self, events: Sequence[TableEvent], now: int) -> None:
        """Something happened to events at a time."""
        self.events += len(events)
        self.seconds += (now * len(events) - sum(map(_FIRE_AT, events))) / 1e9


@dataclass(slots=True)
class ManagerCounts:
    """What happened since the manager was made."""

    fired: int = 0
    acked: int = 0
    retried: int = 0
    """Events not acked in time, or nacked, that fire again."""
    dead: int = 0
    lost_leads: int = 0
    fire_lag: LagTotal = field(default_factory=LagTotal)
    """From due to fired."""
    ack_lag: LagTotal = field(default_factory=LagTotal)
    """From due to acked."""


@dataclass(slots=True, eq=False)
class ReceiverSlot2(ReceiverSlot):
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


# ── realm ──
# The realm: what the parts of a reign have in common.


@dataclass(frozen=True, slots=True)
class LeaderState:
    """One shard's table while one manager leads it. Used by the manager's thread only."""

    store: TableStore
    lead: LeaderLease
    token: int
    court: ManagerHandle2
    """The manager, to which its events belong."""
    counts: ManagerCounts
    clock: Clock
    stock: EventCache

    @property
    def settings(self) -> TableSettings:
        """The queue's options."""
        return self.store.definition.settings

    def now(self) -> int:
        """The database's clock."""
        return self.lead.now()

    def horizon(self) -> int:
        """The end of the window, on the database's clock: nearer while it is full."""
        now = self.now()
        return max(now, min(now + round(self.settings.window * 1e9), self.stock.reach))
