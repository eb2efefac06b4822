"""A block that goes into a queue piece by piece: how much of it is inside, and how far that is."""

from __future__ import annotations

from turnlane.queues.acks import Ticket
from turnlane.queues.contract import Published
from turnlane.queues.entries import BlockEntry


class Pieces:
    """The pieces of a block that are inside, in order."""

    def __init__(self) -> None:
        self.published = Published(-1, 0, 0, 0)
        self._tickets: list[Ticket] = []

    def add(self, entry: BlockEntry) -> None:
        """The next piece is inside, or was dropped by the queue's policy."""
        one, other = self.published, entry.published
        self.published = Published(
            one.first if one.first >= 0 else other.first,
            one.accepted + other.accepted,
            one.dropped + other.dropped,
            one.repeated + other.repeated,
        )
        if entry.ticket is not None:
            entry.ticket.leave()  # whoever is woken after it must not wait for the other pieces
            self._tickets.append(entry.ticket)

    @property
    def events(self) -> int:
        """How many events need not come again."""
        return self.published.accepted + self.published.dropped + self.published.repeated

    @property
    def last(self) -> Ticket | None:
        """The ticket that is reached after all others; nobody waits on it."""
        return self._tickets[-1] if self._tickets else None

    @property
    def reached(self) -> bool:
        """Whether all have come as far as their producer wants."""
        return all(ticket.reached for ticket in self._tickets)

    @property
    def lost(self) -> bool:
        """Whether any was dropped instead, of those that were reached."""
        return any(ticket.lost for ticket in self._tickets)
