"""A reign: what a manager does and knows while it leads. Ends with the lead, and is forgotten.

All of it runs on the manager's thread, a short step at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from turnlane.clock import Clock
from turnlane.table.collector import Collector
from turnlane.table.event import TableEvent
from turnlane.table.firing import Firing
from turnlane.table.intake import Intake
from turnlane.table.landing import Landing
from turnlane.table.lead import Lead
from turnlane.table.places import Counts, Court, Place
from turnlane.table.reader import Reader
from turnlane.table.realm import Realm
from turnlane.table.stock import Stock
from turnlane.table.store import Store
from turnlane.table.timetable import Timetable


class Reign:
    """One period of leading a shard's table."""

    def __init__(
        self,
        store: Store,
        lead: Lead,
        court: Court,
        counts: Counts,
        *,
        clock: Clock,
        chance: Callable[[], float],
    ) -> None:
        assert lead.token is not None
        self.stock = Stock(store.definition)
        self._realm = Realm(store, lead, lead.token, court, counts, clock, self.stock)
        self._intake = Intake(self._realm)
        self.firing = Firing(self._realm)
        self.landing = Landing(self._realm, chance, self.reader)
        self.collector = Collector(
            store, store.definition.settings, self.stock, self.landing.collected
        )
        self.timetable = Timetable(store)

    @property
    def reader(self) -> Reader:
        """Where it is in the table."""
        return self._intake.reader

    def begin(self) -> None:
        """Read what there is to know."""
        realm = self._realm
        now = realm.clock.monotonic()
        last_id = self.reader.start()
        if not realm.lead.clean:
            self.firing.doubt(last_id)
        self.collector.start(now, cautious=not realm.lead.clean)
        if self.stock.order is not None:
            for row in realm.store.read_retried(realm.token):
                self.stock.order.retried(TableEvent(row, realm.court, now))

    def step(self, places: Sequence[Place]) -> None:
        """Do what is due now. Raises as the store does; then it may be called again."""
        realm = self._realm
        now = realm.clock.monotonic()
        self.landing.store_acks(now)
        self.landing.look_after(now)
        if self.stock.flights:
            realm.lead.keep(proven=True)
        if self.timetable.run_once(realm.token, now, realm.now()):
            self.reader.poke()
        if places:
            self._intake.read(now, places)
            self.firing.fire(places)
        if self.collector.run_once(realm.token, now, realm.now()):
            self.reader.sweep_soon()
        self._intake.listen()

    def next_time(self, places: Sequence[Place]) -> float:
        """When the next step is due; monotonic."""
        times = [
            self.collector.next_time(),
            self.timetable.next_time(),
            self._realm.lead.next_time(),
            self.landing.next_time(),
        ]
        if places:
            now = self._realm.clock.monotonic()
            times += [self._intake.next_time(), self.firing.next_time(places, now)]
        return min(times)
