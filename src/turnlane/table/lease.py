"""The lease of a table: which manager leads, until when, and the database's clock.

The lease row in the database has an owner, an expiry time by the database's clock, and a token.
The token grows with every takeover, and every write of the leader carries it (the fence, see
:mod:`turnlane.table.store`). So two managers may believe for a moment that they lead, but only one
of them can write.

Between two calls of the database, the holder uses its own monotonic clock. It counts the lease from
the moment *before* it sent the request, so it stops firing before the lease ends. The clock has to
run on while the machine sleeps (:class:`turnlane.clock.BootClock`).

The database's clock may be set back, and then a lease ends later than any holder asked for. Such a
lease is doubted: a holder that lives renews it, and the lease ends as usual again. If the row stays
as it is for as long as its holder may fire, the holder is gone, and the lease is taken over.

A database can become read-only while reads succeed. While events are in flight or about to fire,
the holder therefore asks for a recent successful write, and renews the lease if there is none.
"""

from __future__ import annotations

import os
import socket
import uuid

from turnlane.clock import Clock
from turnlane.databases import Row
from turnlane.logs import get_logger
from turnlane.table.shard_store import CLOSED_OWNER
from turnlane.table.store import TableStore

log = get_logger(__name__)

RENEWALS_PER_LEASE = 3

RETRY_SECONDS = 0.25
"""Seconds between two renewals after the database failed."""

WRITE_PROOF_SECONDS = 1.0
"""A successful write proves for this long that the database takes writes."""


class LeaderLease:
    """One manager's claim to lead. Owned by the manager's thread; any may read :attr:`can_fire`."""

    def __init__(self, store: TableStore, seconds: float, clock: Clock) -> None:
        self._store = store
        self._seconds = seconds
        self._clock = clock
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._until = float("-inf")
        self._asked_at = float("-inf")
        self._database_time = 0
        """The database's clock at ``_database_time_at``."""
        self._database_time_at = 0.0
        self._is_suspended = False
        self._doubted: Row = ()
        """Another holder's lease (owner, token, end) that ends too late to be believed."""
        self._doubted_since = 0.0
        self._writes = 0
        self._written_at = float("-inf")
        """When the database is known to have taken a write."""
        self.token: int | None = None
        self.was_released = True
        """Whether the last leader released the lease; otherwise an event may have killed it."""

    @property
    def can_fire(self) -> bool:
        """Whether events may fire: the lease is ours, and the database takes writes."""
        return (
            self.token is not None
            and not self._is_suspended
            and self._clock.monotonic() < self._until
        )

    def acquire(self) -> bool:
        """Try to acquire the lease; whether that succeeded."""
        asked_at = self._asked_at = self._clock.monotonic()
        grant = self._store.acquire_lease(self._owner, self._seconds, self._is_believed)
        if grant is None:
            return False
        self.token, self.was_released = grant.token, grant.was_released
        self._extend(asked_at, grant.now)
        return True

    def renew_if_due(self, *, needs_write_proof: bool = False) -> None:
        """Renew the lease if it is time, or if the database failed. Raises ``LeadLost``.

        With ``needs_write_proof``, also if the last successful write is too long ago.
        """
        now = self._clock.monotonic()
        if self.token is None:
            return
        if now >= self.get_next_time() or (needs_write_proof and not self._has_write_proof(now)):
            self._asked_at = now
            self._extend(now, self._store.renew_lease(self.token, self._seconds))

    def suspend(self) -> None:
        """Fire nothing until the lease was renewed: the database failed."""
        self._is_suspended = True

    def forget(self) -> None:
        """Give up the lease without writing to the database: another manager has it."""
        self.token = None

    def release(self) -> None:
        """Give the lease back, so that another manager need not wait for its end."""
        token, self.token = self.token, None
        if token is not None:
            self._store.release_lease(token)

    def get_next_time(self) -> float:
        """Return when to renew the lease, or to try to acquire it, in monotonic seconds."""
        pause = self._seconds / RENEWALS_PER_LEASE
        return self._asked_at + (min(pause, RETRY_SECONDS) if self._is_suspended else pause)

    def now(self) -> int:
        """Return the database's clock; never ahead of it, so that no event fires early."""
        elapsed = self._clock.monotonic() - self._database_time_at
        return self._database_time + round(elapsed * 1e9)

    def _is_believed(self, lease: Row) -> bool:
        """Whether to wait for the end of another holder's lease, or of a proof that it is gone."""
        owner, _, expires_at, database_now = lease
        left = (expires_at - database_now) / 1e9
        if left <= self._seconds or owner == CLOSED_OWNER:
            return True
        now = self._clock.monotonic()
        if lease[:3] != self._doubted:
            self._doubted, self._doubted_since = lease[:3], now
        if now - self._doubted_since < self._seconds:
            return True
        log.warning(
            "table.lease_not_believed",
            queue=self._store.definition.name,
            owner=owner,
            ends_in=round(left, 3),
            lease=self._seconds,
            hint="the database's clock was set back, and the owner renews nothing: taking over",
        )
        return False

    def _has_write_proof(self, now: float) -> bool:
        writes = self._store.session.writes
        if writes != self._writes:
            self._writes, self._written_at = writes, now
        return now - self._written_at < WRITE_PROOF_SECONDS

    def _extend(self, asked_at: float, database_now: int) -> None:
        self._writes, self._written_at = self._store.session.writes, asked_at
        self._until = asked_at + self._seconds
        self._database_time, self._database_time_at = database_now, self._clock.monotonic()
        self._is_suspended = False
