"""Firing: gives the events that are due to receivers, as far as the queue's limits allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnlane.errors import DatabaseDown, DatabaseReadOnly
from turnlane.rate import TokenBucket
from turnlane.table.assignment import Assignment, assign_events
from turnlane.table.event import EVENT_COLUMNS, TableEvent
from turnlane.table.leader_state import LeaderState, ReceiverSlot2
from turnlane.table.sql.dialect import Row

MAX_UNMARKED_AGE = 1.0
"""Seconds. An event that was due when its row was read, so recently and under the lease, fires on
the strength of that; an older one is marked in the table first, which notices what others did to
its row. So is one that was fired before: who got it then may ack it at any moment."""

BURSTS_PER_SECOND = 10
"""With ``max_qps``, at most this fraction of the events of a second fire at once."""

FULL_RECEIVER_PAUSE = 0.02
"""Seconds until another try when all receivers that are wanted are full and others are not."""

MARK_RETRY = 50_000_000
"""Nanoseconds until another try with an event that could not be marked now."""


class EventDispatcher:
    """Fires from the window. Called by a reign."""

    def __init__(self, realm: LeaderState) -> None:
        self._realm = realm
        rate = realm.settings.max_qps
        burst = max(1.0, (rate or 0) / BURSTS_PER_SECOND)
        now = realm.clock.monotonic()
        self._rate = None if rate is None else TokenBucket(rate, burst, now, tokens=burst)
        self._doubtful = 0
        """Events up to this id are marked before they fire: the last leader may have died of one,
        and an attempt that is not written down does not count."""
        self._not_before = float("-inf")

    def doubt(self, last_id: int) -> None:
        """The last leader died, perhaps of an event up to this id."""
        self._doubtful = last_id

    def next_time(self, places: Sequence[ReceiverSlot2], now: float) -> float:
        """When to fire again; monotonic."""
        realm = self._realm
        if not realm.lead.fires:
            return float("inf")
        database_now = realm.now()
        if realm.stock.window.has_due(database_now) and self._allowed(places) > 0:
            wait = 0.0 if self._rate is None else self._rate.seconds_until(1, now)
            return max(self._not_before, now + wait)
        due = realm.stock.window.next_time()
        return float("inf") if due is None else now + max(0, due - database_now) / 1e9

    def fire(self, places: Sequence[ReceiverSlot2]) -> None:
        """Fire what is due and allowed."""
        realm = self._realm
        window = realm.stock.window
        now = realm.clock.monotonic()
        if now < self._not_before or not window.has_due(realm.now()) or not self._still_fires():
            return
        fired_before = realm.counts.fired
        left: list[TableEvent] = []
        try:
            while self._fire_some(places, now, left):
                pass  # a receiver that is full holds up nobody whose events come after its own
        finally:
            window.put_back(left)
        if left and realm.counts.fired == fired_before:
            self._not_before = now + FULL_RECEIVER_PAUSE

    def _fire_some(
        self, places: Sequence[ReceiverSlot2], now: float, left: list[TableEvent]
    ) -> bool:
        """Fire the next that are due, put those without room into ``left``; whether to go on."""
        realm = self._realm
        allowed = max(0, self._allowed(places))
        if self._rate is not None:
            allowed = self._rate.take_available(allowed, now)
        due = realm.stock.window.take(allowed, realm.now())
        if realm.stock.order is not None:
            due = realm.stock.order.admit(due)
        decided = assign_events(due, places, realm.stock.key)
        left += decided.left
        realm.stock.leave(decided.homeless)
        fired = self._hand_out(decided, now)
        if self._rate is not None:
            self._rate.give_back(allowed - fired)
        return bool(decided.left) and realm.lead.fires

    def fire_new(self, rows: Sequence[Mapping[str, Any]], places: Sequence[ReceiverSlot2]) -> bool:
        """Write events that are due at once as fired and send them off; false if that cannot be.

        It cannot while others wait before them, or a receiver would have to be chosen by key.
        """
        columns = tuple(rows[0]) if rows else ()
        at_once = all(
            tuple(row) == columns and "fire_at" not in row and "after_group" not in row
            for row in rows
        )
        values = [tuple(row.values()) for row in rows]
        return at_once and self._write_new(columns, values, places)

    def _write_new(
        self, columns: Sequence[str], rows: Sequence[Row], places: Sequence[ReceiverSlot2]
    ) -> bool:
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
        if self._rate is not None and self._rate.seconds_until(len(rows), now) > 0:
            return False
        ids = realm.store.insert_fired(realm.token, columns, rows)
        # They are stored, whatever happens now; fire() sends them off in this step.
        realm.stock.window.add(self._written(columns, ids, rows, now), realm.now())
        return True

    def _allowed(self, places: Sequence[ReceiverSlot2]) -> int:
        """How many events may be out in addition, apart from the rate limit."""
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
            assert isinstance(seat, ReceiverSlot2)
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

    def _take_off(self, place: ReceiverSlot2, events: list[TableEvent], now: float) -> None:
        """Give events to a receiver."""
        assert place.receiver is not None
        for event in events:
            event.seat = place
        self._realm.stock.flights.add(events, now)
        place.load += len(events)
        self._realm.counts.fired += len(events)
        self._realm.counts.fire_lag.add(events, self._realm.now())
        place.receiver.offer(self._realm.court, events)

    def _written(
        self, columns: Sequence[str], ids: Sequence[int], rows: Sequence[Row], now: float
    ) -> list[TableEvent]:
        """Events as if they had been read."""
        names = (*EVENT_COLUMNS, *self._realm.store.definition.names)
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
        stale = [
            event
            for event in events
            if event.read_at < now - MAX_UNMARKED_AGE
            or ((event.id <= self._doubtful or event.attempts) and not event.marked)
        ]
        if not stale:
            return set()
        try:
            standing = self._mark(stale)
            unmarked = {event for event in stale if event.id not in standing}
            if unmarked:
                self._look_again(unmarked)
        except BaseException:
            self._realm.stock.window.put_back(events)
            raise
        return unmarked

    def _look_again(self, events: set[TableEvent]) -> None:
        """Find out why events could not be marked: they are gone, moved, not quite due, or locked.

        By its own clock the database may be a moment behind what is thought here.
        """
        realm = self._realm
        rows = realm.store.read_ids(realm.token, [event.id for event in events])
        there = {row[0] for row in rows}
        now, horizon = realm.now(), realm.horizon()
        realm.stock.over([event for event in events if event.id not in there], now)
        again = [TableEvent(row, realm.court, 0.0) for row in rows if row[1] <= horizon]
        realm.stock.window.add(
            [event.moved(max(event.fire_at, now + MARK_RETRY), 0) for event in again], now
        )

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
