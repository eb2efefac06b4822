"""The lead: the lease of a shard's table, in the hands of one manager, and the database's clock.

The lease row says who leads and until when, on the database's clock. Its token grows with every
takeover, and every write carries it (see :mod:`turnlane.table.store`). In between, the holder goes
by its own monotonic clock, counted from *before* it asked: it stops before the lease is over. That
clock has to go on while the machine sleeps (:class:`turnlane.clock.BootClock`).
"""

from __future__ import annotations

import os
import socket
import uuid

from turnlane.clock import Clock
from turnlane.table.store import TableStore

RENEWALS_PER_LEASE = 3
"""In the time of a lease."""


RETRY_SECONDS = 0.25
"""Seconds between two looks at a database that failed."""

WRITE_PROOF_SECONDS = 1.0
"""Seconds. While events are out or about to fire, the database has taken a write so recently: one
that became read-only is noticed without waiting for an ack."""


class LeaderLease:
    """One manager's claim to lead. Used by the manager's thread; :attr:`fires` from any."""

    def __init__(self, store: TableStore, seconds: float, clock: Clock) -> None:
        self._store = store
        self._seconds = seconds
        self._clock = clock
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._until = float("-inf")
        self._asked = float("-inf")
        self._now = 0
        self._now_at = 0.0
        self._held_up = False
        self._writes = 0
        self._written_at = float("-inf")
        """When the database was last seen to have taken a write."""
        self.token: int | None = None
        self.since = 0
        """The database's clock when the lead was taken."""
        self.clean = True
        """Whether the last leader left in order; else it may have died of an event."""

    @property
    def fires(self) -> bool:
        """Whether events may fire: the lease is ours for sure, and the database takes writes."""
        return (
            self.token is not None and not self._held_up and self._clock.monotonic() < self._until
        )

    def take(self) -> bool:
        """Try to take the lead; true if that succeeded."""
        asked = self._asked = self._clock.monotonic()
        grant = self._store.acquire(self._owner, self._seconds)
        if grant is None:
            return False
        self.token, self.since, self.clean = grant.token, grant.now, grant.clean
        self._extend(asked, grant.now)
        return True

    def keep(self, *, proven: bool = False) -> None:
        """Renew the lease, if it is time to, or if writes failed before. Raises ``LeadLost``.

        ``proven``: also if there is no recent proof that the database takes writes.
        """
        asked = self._clock.monotonic()
        if self.token is None or not (asked >= self.next_time() or (proven and self._doubt(asked))):
            return
        self._asked = asked
        self._extend(asked, self._store.renew(self.token, self._seconds))

    def hold_up(self) -> None:
        """The database failed: nothing fires until the lease could be renewed."""
        self._held_up = True

    def lose(self) -> None:
        """Another manager leads."""
        self.token = None

    def give_up(self) -> None:
        """Give the lease back, so that another need not wait for its end."""
        token, self.token = self.token, None
        if token is not None:
            self._store.release(token)

    def next_time(self) -> float:
        """When to renew the lease, or to try again to take it; monotonic."""
        pause = self._seconds / RENEWALS_PER_LEASE
        return self._asked + (min(pause, RETRY_SECONDS) if self._held_up else pause)

    def now(self) -> int:
        """The database's clock; never ahead of it, so that nothing fires early."""
        return self._now + round((self._clock.monotonic() - self._now_at) * 1e9)

    def _doubt(self, now: float) -> bool:
        """Whether the last write is too long ago to tell that the next one would succeed."""
        writes = self._store.session.writes
        if writes != self._writes:
            self._writes, self._written_at = writes, now
        return now - self._written_at >= WRITE_PROOF_SECONDS

    def _extend(self, asked: float, database_now: int) -> None:
        self._writes, self._written_at = self._store.session.writes, asked
        self._until = asked + self._seconds
        self._now, self._now_at = database_now, self._clock.monotonic()
        self._held_up = False
