"""The collector: looks after old events, apart from the window and on a slower schedule.

Fired events that no manager remembers (the one that fired them is gone) are given their retry;
acked ones are deleted when their retention is over, a few at a time; events that wait for a group
whose last member was acked by plain SQL are let go; so are those that wait in order behind one that
somebody settled in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from turnlane.table.fence import BATCH
from turnlane.table.reader import FIRST
from turnlane.table.settings import TableSettings
from turnlane.table.sql.dialect import Row
from turnlane.table.stock import Stock
from turnlane.table.store import Store

SECONDS: Final = 10.0
"""Between two rounds; at most, for queues with short timeouts."""

BEHIND: Final = 0.1
"""Seconds between rounds while there is more to do than a round does."""

FULL_SECONDS: Final = 3600.0
RECENT: Final = 86_400 * 1_000_000_000
"""Fired events are looked for a day back, and now and then without a limit."""


class Collector:
    """One shard's collector, called by the manager. Times are passed in, monotonic."""

    def __init__(
        self,
        store: Store,
        settings: TableSettings,
        stock: Stock,
        retry: Callable[[list[Row]], None],
    ) -> None:
        self._store = store
        self._timeout = settings.ack_timeout
        self._retention = round(settings.retention * 1e9)
        self._every = min(SECONDS, settings.ack_timeout / 2)
        self._stock = stock
        self._retry = retry
        self._next = float("-inf")
        self._patient_until = float("-inf")
        self._next_full = float("-inf")
        self.collected = 0
        self.purged = 0

    def start(self, now: float, *, cautious: bool) -> None:
        """The lead was taken: what the last leader fired may still be acked in time."""
        self._patient_until = now + self._timeout if cautious else now
        self._next = now + self._every
        self._next_full = float("-inf")

    def next_time(self) -> float:
        """When the next round is due."""
        return self._next

    def run_once(self, token: int, now: float, database_now: int) -> bool:
        """One round, if it is due; whether events were let go that the window lacks."""
        if now < self._next:
            return False
        more = self._collect(now, database_now)
        purged = self._store.purge(token, database_now - self._retention)
        self.purged += purged
        released = self._store.release_groups(token)
        self._free_keys(database_now)
        more = more or purged == BATCH
        self._next = now + (BEHIND if more else self._every)
        return released > 0

    def _free_keys(self, database_now: int) -> None:
        """Let no key wait for a retry that somebody acked or cancelled in the table."""
        away = self._stock.away()
        if away:
            self._stock.gone(set(away) - self._store.standing(away), database_now)

    def _collect(self, now: float, database_now: int) -> bool:
        if now < self._patient_until:
            return False
        since = database_now - RECENT
        if now >= self._next_full:
            since = FIRST[0]
            self._next_full = now + FULL_SECONDS
        until = database_now - round(self._timeout * 1e9)
        rows = self._store.old_fired(since, until, BATCH + len(self._stock.flights))
        forgotten = [row for row in rows if not self._stock.knows(row[0])]
        if forgotten:
            self._retry(forgotten)
            self.collected += len(forgotten)
        return len(forgotten) >= BATCH
