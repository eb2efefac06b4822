"""The intake: brings rows of the table into the window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from turnlane.table.backlogs import NEVER
from turnlane.table.event import TableEvent
from turnlane.table.keyspace import KeyRange
from turnlane.table.ordering import Left, Order
from turnlane.table.places import Place
from turnlane.table.reader import PAGE, Reader, Times
from turnlane.table.realm import Realm
from turnlane.table.sql.dialect import Row

SOON = 20_000_000
"""Nanoseconds. An event that is due later than this when it is read waits for its time, and is
asked about again before it fires: somebody may cancel it meanwhile. (The database's clock is known
only so well: what is due now may look as if it were not yet.)"""

SOME = 500
"""Rows that are read for keys which wait for them, even if others have to give way."""


class Intake:
    """Reads as much as the window can take. Called by a reign."""

    def __init__(self, realm: Realm) -> None:
        self._realm = realm
        self._backlogs = realm.stock.backlogs
        dialect = realm.store.dialect
        self.reader = Reader(
            realm.store, realm.settings, dialect.idle_poll, self._backlogs, realm.stock.passed
        )
        self._listening = False
        self._more = False
        """Whether events are left in the table that a receiver would take."""

    def read(self, now: float, places: Sequence[Place]) -> None:
        """Read what is due to be read."""
        realm = self._realm
        if self._backlogs.cut(place.key_range for place in places):
            self.reader.sweep_soon()
        room = self._room() or self._make_room()
        wanted = self._wanted(places) if room else []
        if now >= self.reader.next_time(room):
            rows = self.reader.read(realm.token, room, now, self._times())
            self._take_in(self._others(self._fresh(rows, now)))
        for span in wanted:
            rows = self.reader.read_left(realm.token, span, room, self._times())
            self._take_in(self._fresh(rows, now))
        self._more = any(span in self._backlogs for span in wanted)
        if room and realm.stock.order is not None:
            self._read_lines(realm.stock.order, room, now)
        self._fit()

    def next_time(self) -> float:
        """When to read again; monotonic."""
        room = self._room()
        if self._more or (room and self._lines()):
            return float("-inf")
        return self.reader.next_time(room)

    def listen(self) -> None:
        """Be woken by inserts while it is quiet; under load, looking is cheaper for everybody."""
        store = self._realm.store
        if not store.dialect.notifies:
            return
        wanted = self.reader.idle if not self._listening else self.reader.busy < 4
        if wanted != self._listening:
            store.listen(self._realm.token, on=wanted)
            self._listening = wanted

    def _times(self) -> Times:
        return Times(self._realm.now(), self._realm.horizon())

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────

    def _fresh(self, rows: Sequence[Row], now: float) -> list[TableEvent]:
        """Those of the rows that are not in memory, and not too far off."""
        realm = self._realm
        horizon, soon = realm.horizon(), realm.now() + SOON
        return [
            TableEvent(row, realm.court, now if row[1] <= soon else float("-inf"))
            for row in realm.stock.unknown(rows)
            if row[1] <= horizon
        ]

    def _others(self, events: list[TableEvent]) -> list[TableEvent]:
        """All but those of backlogs, which are read again in their turn."""
        if not self._backlogs:
            return events
        left = {event for event in events if self._realm.stock.span(event) in self._backlogs}
        self._realm.stock.leave(left)
        return [event for event in events if event not in left]

    def _lines(self) -> dict[Hashable, Left]:
        """Keys of which events should be read now."""
        order = self._realm.stock.order
        return {} if order is None else order.wanted()

    def _read_lines(self, order: Order, room: int, now: float) -> None:
        """Read on for keys of which events were left in the table because too many waited."""
        lines = self._lines()
        if not lines:
            return
        realm = self._realm
        for left in lines.values():
            for span in self._backlogs.overlapping(left.where):
                if span in self._backlogs:
                    self._backlogs.leave(span, *left.first)
        limit = min(room, PAGE, max(SOME, order.most - len(order)))
        rows, end = self.reader.read_lines(realm.token, lines.values(), limit, realm.now())
        order.advance(lines, end)
        realm.stock.window.add(order.line_up(self._fresh(rows, now)), realm.now())

    def _take_in(self, events: Sequence[TableEvent]) -> None:
        realm = self._realm
        free = [event for event in events if event.after_group is None]
        realm.stock.window.add(self._wanted_now(free), realm.now())
        waiting = {group for event in events if (group := event.after_group) is not None}
        if waiting:
            # Their groups may be done already.
            self.reader.ask(realm.store.ack(realm.token, (), waiting).released)

    def _wanted_now(self, events: list[TableEvent]) -> list[TableEvent]:
        """All but those whose keys are busy, and have left enough of theirs in the table."""
        order = self._realm.stock.order
        if order is None:
            return events
        now = self._realm.now()
        return [event for event in events if event.fire_at > now or not order.is_left(event)]

    # ── room ─────────────────────────────────────────────────────────────────────────────────────

    def _room(self) -> int:
        """How many events that are due the window takes; none until it is half empty.

        (Pages are large.) Of a backlog only two pages are read ahead: what waits in memory gets
        stale.
        """
        realm = self._realm
        limit = self._most_due
        waiting = realm.stock.window.count_due(realm.now())
        return limit - waiting if waiting <= limit // 2 else 0

    @property
    def _most_due(self) -> int:
        return min(self._limit, 2 * PAGE)

    @property
    def _limit(self) -> int:
        """How many events may wait in the window: those behind others of their keys count too."""
        return self._realm.settings.window_events - self._realm.stock.parked

    def _make_room(self) -> int:
        """Leave events of crowded parts of the key space in the table; how much room that makes.

        If all parts are alike, nobody waits for room but those who are crowded.
        """
        stock = self._realm.stock
        if len(self._backlogs.spans) == 1:
            return 0
        share = max(1, self._most_due // (4 * len(self._backlogs.spans)))
        kept: Counter[KeyRange] = Counter()
        gone = []
        for event in stock.window.due(self._realm.now()):
            span = stock.span(event)
            kept[span] += 1
            if kept[span] > share:
                gone.append(event)
        stock.window.forget(gone)
        stock.leave(gone)
        return self._room()

    def _wanted(self, places: Sequence[Place]) -> list[KeyRange]:
        """Backlogs of which a receiver could take events, and none wait in memory."""
        if not self._backlogs:
            return []
        stock = self._realm.stock
        there = {stock.span(event) for event in stock.window.due(self._realm.now())}
        free = [place.key_range for place in places if place.room]
        return [
            span
            for span in self._backlogs
            if span not in there and any(each.overlaps(span) for each in free)
        ]

    def _fit(self) -> None:
        """Have the window reach no further than it has room, and again further when it has."""
        stock, limit = self._realm.stock, self._limit
        if len(stock.window) > limit:
            first = stock.window.trim(limit * 3 // 4)
            if first is not None:
                stock.reach = first - 1
        elif stock.reach < NEVER and len(stock.window) <= limit // 2:
            stock.reach = NEVER
            self.reader.sweep_soon()
