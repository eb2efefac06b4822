"""How a queue is in one database: what waits, how late it is, and who leads."""

from __future__ import annotations

from dataclasses import dataclass

from turnlane.errors import NoSuchQueue
from turnlane.table.store import Store

_WAITING = (
    "SELECT COUNT(*), COUNT(CASE WHEN fire_at <= {now} THEN 1 END), MIN(fire_at), {now} "
    "FROM {table} WHERE fire_at <= {now} + %s AND state = 'to_be_fired' AND after_group IS NULL"
)
_LEASE = "SELECT owner, token, expires_at, {now} FROM turnlane_lease WHERE queue = %s"


@dataclass(frozen=True, slots=True)
class Status:
    """A queue at one moment, by the database's clock."""

    counts: dict[str, int]
    """How many events are in each state."""
    due: int
    """Events that are due and not fired, as far as the table knows."""
    lag: float
    """Seconds that the first of them is late."""
    window: int
    """Events due within the manager's window, those included."""
    leader: str | None
    """Who holds the lease; ``None`` if its time is over."""
    term: int
    """The lease's token: it grows whenever the lead is taken."""
    lease: float
    """Seconds until it ends unless it is renewed."""


def status_of(store: Store) -> Status:
    """Ask the database. Raises ``NoSuchQueue`` and ``DatabaseDown``."""
    dialect, definition = store.dialect, store.definition
    table = dialect.identifier(definition.name)
    span = round(definition.settings.window * 1e9)
    window, due, first, now = store.session.query(dialect.sql(_WAITING, table=table), (span,))[0]
    leases = store.session.query(dialect.sql(_LEASE), (definition.name,))
    if not leases:
        raise NoSuchQueue(f"there is no queue {definition.name!r} in this database")
    owner, term, expires_at, at = leases[0]
    leads = owner is not None and expires_at > at
    return Status(
        counts=store.counts(),
        due=due,
        lag=max(0.0, (now - first) / 1e9) if due else 0.0,
        window=window,
        leader=owner if leads else None,
        term=term,
        lease=round((expires_at - at) / 1e9, 3) if leads else 0.0,
    )
