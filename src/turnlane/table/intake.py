"""The intake: brings rows of the table into the window."""

from __future__ import annotations

from turnlane.table.event import TableEvent
from turnlane.table.reader import PAGE, Reader
from turnlane.table.realm import Realm


class Intake:
    """Reads as much as the window can take. Called by a reign."""

    def __init__(self, realm: Realm) -> None:
        self._realm = realm
        self.reader = Reader(
            realm.store,
            realm.settings,
            realm.store.dialect.idle_poll,
            realm.stock.take_passed_over,
        )
        self._listening = False

    def read(self, now: float) -> None:
        """Read what is due to be read."""
        realm = self._realm
        room = self._room()
        if now < self.reader.next_time(room):
            return
        rows = self.reader.read(realm.token, room, now, realm.now())
        horizon = realm.horizon()
        fresh = [
            TableEvent(row, realm.court, now)
            for row in realm.stock.unknown(rows)
            if row[1] <= horizon
        ]
        free = [event for event in fresh if event.after_group is None]
        realm.stock.window.add(free, realm.now())
        waiting = {group for event in fresh if (group := event.after_group) is not None}
        if waiting:
            # Their groups may be done already; then the sweep finds them.
            realm.store.ack(realm.token, (), waiting)
            self.reader.sweep_soon()

    def next_time(self) -> float:
        """When to read again; monotonic."""
        return self.reader.next_time(self._room())

    def listen(self) -> None:
        """Be woken by inserts while it is quiet; under load, looking is cheaper for everybody."""
        store = self._realm.store
        if not store.dialect.notifies:
            return
        wanted = self.reader.idle if not self._listening else self.reader.busy < 4
        if wanted != self._listening:
            store.listen(self._realm.token, on=wanted)
            self._listening = wanted

    def _room(self) -> int:
        """How many events the window takes; none until it is half empty: pages are large.

        Of a backlog only two pages are read ahead: what waits in memory gets stale.
        """
        window = self._realm.stock.window
        limit = self._realm.settings.window_events
        if window.has_due(self._realm.now()):
            limit = min(limit, 2 * PAGE)
        waiting = len(window)
        return limit - waiting if waiting <= limit // 2 else 0
