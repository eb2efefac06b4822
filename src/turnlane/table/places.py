"""Places: what a manager has for each of its receivers, and what it is to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from turnlane.table.dispatch import Seat
from turnlane.table.event import Home
from turnlane.table.receiver import Receiver, Source


class Court(Home, Source, Protocol):
    """The manager, as its events and its receivers see it."""


@dataclass(slots=True)
class Counts:
    """What happened since the manager was made."""

    fired: int = 0
    acked: int = 0
    retried: int = 0
    """Events not acked in time, or nacked, that fire again."""
    dead: int = 0
    lost_leads: int = 0


@dataclass(slots=True, eq=False)
class Place(Seat):
    """A receiver's seat."""

    receiver: Receiver | None = None
