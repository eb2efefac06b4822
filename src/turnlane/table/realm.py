"""The realm: what the parts of a reign have in common."""

from __future__ import annotations

from dataclasses import dataclass

from turnlane.clock import Clock
from turnlane.table.lead import Lead
from turnlane.table.places import Counts, Court
from turnlane.table.settings import TableSettings
from turnlane.table.stock import Stock
from turnlane.table.store import Store


@dataclass(frozen=True, slots=True)
class Realm:
    """One shard's table while one manager leads it. Used by the manager's thread only."""

    store: Store
    lead: Lead
    token: int
    court: Court
    """The manager, to which its events belong."""
    counts: Counts
    clock: Clock
    stock: Stock

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
