"""Firing: gives the events that are due to receivers, as far as the queue's limits allow."""

from __future__ import annotations

from collections.abc import Sequence

from turnlane.errors import DatabaseDown, DatabaseReadOnly
from turnlane.table.dispatch import Assignment, assign
from turnlane.table.event import COLUMNS, TableEvent
from turnlane.table.keyspace import keyspace_id
from turnlane.table.pace import Pace
from turnlane.table.places import Place
from turnlane.table.realm import Realm
from turnlane.table.sql.dialect import Row

FRESH = 1.0
"""Seconds. An event whose row was read so recently, under the lease, fires on the strength of that;
an older one is marked in the table first, which notices what others did to its row."""


class Firing:
    """Fires from the window. Called by a reign."""

    def __init__(self, realm: Realm) -> None:
        self._realm = realm
        self._pace = Pace(realm.settings.max_qps, realm.clock.monotonic())
        self._cautious = 0 if realm.lead.clean else realm.settings.window_events
        """So many events more are marked before they fire: the last leader may have died of one,
        and an attempt that is not written down does not count."""

    def next_time(self, places: Sequence[Place], now: float) -> float:
        """When to fire again; monotonic."""
        realm = self._realm
        if not realm.lead.fires:
            return float("inf")
        database_now = realm.now()
        if realm.stock.window.has_due(database_now) and self._allowed(places) > 0:
            return now + self._pace.wait(now)
        due = realm.stock.window.next_time()
        return float("inf") if due is None else now + max(0, due - database_now) / 1e9

    def fire(self, places: Sequence[Place]) -> None:
        """Fire what is due and allowed."""
        realm = self._realm
        window = realm.stock.window
        now = realm.clock.monotonic()
        if not window.has_due(realm.now()) or not self._still_fires():
            return
        allowed = self._pace.allowed(max(0, self._allowed(places)), now)
        due = window.take(allowed, realm.now())
        if realm.stock.order is not None:
            due = realm.stock.order.admit(due)
        decided = assign(due, places, self._key)
        window.put_back(decided.left)
        # Found again when a receiver comes for them.
        realm.stock.over(decided.homeless, realm.now())
        fired = self._hand_out(decided, now)
        self._pace.give_back(allowed - fired)

    def fire_new(
        self, columns: Sequence[str], rows: Sequence[Row], places: Sequence[Place]
    ) -> bool:
        """Write events that are due at once as fired and send them off; false if that cannot be.

        It cannot while others wait before them, or a receiver would have to be chosen by key.
        """
        realm = self._realm
        now = realm.clock.monotonic()
        if (
            not realm.lead.fires
            or realm.stock.order is not None
            or self._allowed(places) < len(rows)
            or realm.stock.window.has_due(realm.now())
            or not all(place.key_range.is_everything for place in places)
        ):
            return False
        granted = self._pace.allowed(len(rows), now)
        if granted < len(rows):
            self._pace.give_back(granted)
            return False
        ids = realm.store.insert_fired(realm.token, columns, rows)
        events = self._written(columns, ids, rows, now)
        self._hand_out(assign(events, places, self._key), now)
        return True

    def _allowed(self, places: Sequence[Place]) -> int:
        """How many events may be out in addition, the pace apart."""
        room = sum(place.room for place in places)
        limit = self._realm.settings.max_concurrency
        return room if limit is None else min(room, limit - len(self._realm.stock.flights))

    def _hand_out(self, decided: Assignment, now: float) -> int:
        """Fire what was decided, what is not fresh only once its row says so."""
        realm = self._realm
        chosen = [event for _, events in decided.given for event in events]
        gone = self._mark_stale(chosen, now)
        if not self._still_fires():
            realm.stock.window.put_back([event for event in chosen if event not in gone])
            return 0
        fired = 0
        for seat, mine in decided.given:
            assert isinstance(seat, Place)
            events = [event for event in mine if event not in gone] if gone else mine
            self._take_off(seat, events, realm.clock.monotonic())
            fired += len(events)
        return fired

    def _still_fires(self) -> bool:
        """Whether the lease is ours, which a slow database may have used up; asks for more."""
        lead = self._realm.lead
        try:
            lead.keep(proven=True)
        except (DatabaseDown, DatabaseReadOnly):
            lead.hold_up()
        return lead.fires

    def _take_off(self, place: Place, events: list[TableEvent], now: float) -> None:
        """Give events to a receiver."""
        assert place.receiver is not None
        for event in events:
            event.seat = place
        self._realm.stock.flights.add(events, now)
        place.load += len(events)
        self._realm.counts.fired += len(events)
        place.receiver.offer(self._realm.court, events)

    def _written(
        self, columns: Sequence[str], ids: Sequence[int], rows: Sequence[Row], now: float
    ) -> list[TableEvent]:
        """Events as if they had been read."""
        names = (*COLUMNS, *self._realm.store.definition.names)
        known = {"fire_at": self._realm.now(), "priority": 0, "attempts": 0}
        events = []
        for event_id, row in zip(ids, rows, strict=True):
            values = {**known, **dict(zip(columns, row, strict=True)), "event_id": event_id}
            event = TableEvent(tuple(map(values.get, names)), self._realm.court, now)
            event.marked = True
            events.append(event)
        return events

    def _mark_stale(self, events: list[TableEvent], now: float) -> set[TableEvent]:
        """Mark what may not fire unmarked; returns what is not to be fired after all."""
        cautious = self._cautious > 0
        self._cautious -= len(events)
        stale = [
            event
            for event in events
            if event.read_at < now - FRESH or (cautious and not event.marked)
        ]
        if not stale:
            return set()
        try:
            standing = self._mark(stale)
        except BaseException:
            self._realm.stock.window.put_back(events)
            raise
        gone = {event for event in stale if event.id not in standing}
        self._realm.stock.over(gone, self._realm.now())
        return gone

    def _mark(self, events: list[TableEvent]) -> set[int]:
        """Mark rows as fired; returns the ids of those that are not settled."""
        store = self._realm.store
        unmarked = [event.id for event in events if not event.marked]
        standing = store.mark(self._realm.token, unmarked) if unmarked else set()
        marked = [event.id for event in events if event.marked]
        if marked:
            standing |= store.standing(marked)
        now = self._realm.clock.monotonic()
        for event in events:
            if event.id in standing:
                event.marked, event.read_at = True, now
        return standing

    def _key(self, event: TableEvent) -> int:
        found = event.keyspace_id
        if found is not None:
            return found
        column = self._realm.store.definition.shard_by
        return keyspace_id(event.fire_at if column is None else event[column])
