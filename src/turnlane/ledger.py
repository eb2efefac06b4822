"""The ledger: every event a queue accepted is delivered, dead, dropped for a reason, or pending."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Outcome(enum.StrEnum):
    """How an event left the queue. All but the first two are drops, counted by reason."""

    DELIVERED = "delivered"
    DEAD = "dead"
    NEWEST = "newest"
    OLDEST = "oldest"
    SEVERITY = "severity"
    SAMPLED = "sampled"
    CLOSED = "closed"
    CORRUPT = "corrupt"
    MISSING = "missing"
    CANCELLED = "cancelled"

    @property
    def is_drop(self) -> bool:
        """Whether the event is gone for good."""
        return self not in (Outcome.DELIVERED, Outcome.DEAD)

    @property
    def is_loss(self) -> bool:
        """Whether the event is gone although no setting chose it: no room, no disk, no process."""
        return self in _LOSSES


_LOSSES = frozenset(
    [Outcome.NEWEST, Outcome.OLDEST, Outcome.CLOSED, Outcome.CORRUPT, Outcome.MISSING]
)

DROPS_WITHOUT_OFFSET = (Outcome.NEWEST, Outcome.SEVERITY, Outcome.SAMPLED)
"""Drops by admission: these events never got an offset."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The outcome of every event since the queue was created."""

    accepted: int
    """Accepted from publishers, including events that a policy then dropped."""
    delivered: int
    dead: int
    dropped: Mapping[str, int]
    """By reason: newest, oldest, severity, sampled, closed, corrupt, missing, cancelled."""
    pending: int
    """Waiting, or in flight and not yet settled."""

    @property
    def settled(self) -> int:
        """Events that have left the queue."""
        return self.delivered + self.dead + sum(self.dropped.values())

    @property
    def adds_up(self) -> bool:
        """Whether accepted = delivered + dead + dropped + pending."""
        return self.accepted == self.settled + self.pending

    def as_dict(self) -> dict[str, object]:
        """Return the ledger for JSON."""
        return {
            "accepted": self.accepted,
            "delivered": self.delivered,
            "dead": self.dead,
            "dropped": dict(self.dropped),
            "pending": self.pending,
            "adds_up": self.adds_up,
        }

    def __str__(self) -> str:
        drops = "".join(f" + {count} dropped ({why})" for why, count in self.dropped.items())
        sign = "=" if self.adds_up else "≠"
        return (
            f"{self.accepted} accepted {sign} {self.delivered} delivered + {self.dead} dead"
            f"{drops} + {self.pending} pending"
        )


class OutcomeTotals:
    """Running counts by outcome. Drops by admission are not among the offsets up to ``end``."""

    __slots__ = ("_counts",)

    def __init__(self, counts: Mapping[Outcome, int] | None = None) -> None:
        self._counts = dict.fromkeys(Outcome, 0) | dict(counts or {})

    def add(self, outcome: Outcome, events: int) -> None:
        """Count events that left the queue this way."""
        self._counts[outcome] += events

    def __getitem__(self, outcome: Outcome) -> int:
        return self._counts[outcome]

    @property
    def numbered(self) -> int:
        """The number of settled events that had an offset."""
        return sum(n for outcome, n in self._counts.items() if outcome not in DROPS_WITHOUT_OFFSET)

    def ledger(self, end: int, pending: int) -> Ledger:
        """Return the ledger of a queue whose offsets end before ``end``."""
        counts = self._counts
        return Ledger(
            accepted=end + sum(counts[outcome] for outcome in DROPS_WITHOUT_OFFSET),
            delivered=counts[Outcome.DELIVERED],
            dead=counts[Outcome.DEAD],
            dropped={o.value: counts[o] for o in Outcome if o.is_drop and counts[o]},
            pending=pending,
        )
