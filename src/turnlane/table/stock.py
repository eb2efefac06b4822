"""The stock: all events that a manager has in memory, each in one place."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence

from turnlane.table.backlogs import NEVER, Backlogs
from turnlane.table.definition import Definition
from turnlane.table.event import TableEvent
from turnlane.table.flights import Flights
from turnlane.table.keyspace import EVERYTHING, SHIFT, KeyRange, keyspace_id
from turnlane.table.ordering import Order
from turnlane.table.settings import Ordering
from turnlane.table.settling import Settling
from turnlane.table.sql.dialect import Row
from turnlane.table.store import Position
from turnlane.table.window import Window

LOOK_AFTER = 1.0
"""Seconds after which the row of a fired event is marked, or looked at again. Most events are
acked before, and cost no mark at all."""


class Stock:
    """What waits, what is out, what is settled but not stored yet; and what is left for now."""

    def __init__(self, definition: Definition) -> None:
        timeout = definition.settings.ack_timeout
        self.window = Window()
        self.flights = Flights(timeout, min(LOOK_AFTER, timeout / 3))
        self.settling = Settling()
        self.order = self._order(definition)
        self.reach = NEVER
        """The last fire time for which the window has room."""
        self.backlogs = Backlogs()
        self._shard_by = definition.shard_by

    @property
    def parked(self) -> int:
        """How many events wait behind others of their keys."""
        return 0 if self.order is None else len(self.order)

    @property
    def waiting(self) -> int:
        """How many events wait in memory."""
        return len(self.window) + self.parked

    def knows(self, event_id: int) -> bool:
        """Whether a row that was read is in memory already."""
        return (
            event_id in self.flights
            or event_id in self.window
            or event_id in self.settling
            or (self.order is not None and event_id in self.order)
        )

    def unknown(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Those of the rows that were read which are not in memory."""
        if self.order is not None:
            return [row for row in rows if not self.knows(row[0])]
        flights, window, settling = self.flights.ids, self.window.ids, self.settling.ids
        return [
            row for row in rows if not (row[0] in flights or row[0] in window or row[0] in settling)
        ]

    def over(self, events: Iterable[TableEvent], now: int) -> None:
        """Events are done with: what waited behind them may go."""
        if self.order is None:
            return
        following = map(self.order.settled, events)
        self.window.add([event for event in following if event is not None], now)

    def away(self) -> list[int]:
        """Events that keep others waiting and are not in memory: their retries are far off."""
        out = () if self.order is None else self.order.out
        return [event_id for event_id in out if not self.knows(event_id)]

    def gone(self, ids: Container[int], now: int) -> None:
        """Events that were away are settled: what waited behind them may go."""
        if self.order is not None:
            self.window.add(self.order.gone(ids), now)

    def passed(self, position: Position) -> Sequence[KeyRange]:
        """Where nothing has to be read that is due after a position: it would not be kept."""
        return () if self.order is None else self.order.passed(position, self.knows)

    def leave(self, events: Iterable[TableEvent]) -> None:
        """Forget events that no receiver can take; they are read again when one can."""
        for event in events:
            following, left = ([], None) if self.order is None else self.order.leave(event)
            for each in (event, *following):
                self.backlogs.leave(self.span(each), each.fire_at, each.id)
            if left is not None:
                for span in self.backlogs.overlapping(left.where):
                    self.backlogs.leave(span, *left.first)

    def span(self, event: TableEvent) -> KeyRange:
        """The part of the key space in which an event's key lies."""
        return self.backlogs.span(self.key(event))

    def key(self, event: TableEvent) -> int:
        """Where an event's key lies; SQLite leaves that to whoever asks."""
        found = event.keyspace_id
        if found is not None:
            return found
        return keyspace_id(event.fire_at if self._shard_by is None else event[self._shard_by])

    def _order(self, definition: Definition) -> Order | None:
        # Half of the window: the other half is for keys that nothing holds up.
        most = definition.settings.window_events // 2
        match definition.settings.ordering:
            case Ordering.NONE:
                return None
            case Ordering.QUEUE:
                return Order(lambda _: None, lambda _: EVERYTHING, most)
            case Ordering.KEY:
                column = definition.shard_by
                assert column is not None, "the definition has been checked"

                def key(event: TableEvent) -> Hashable:
                    found: Hashable = event[column]
                    return found

                return Order(key, self._point, most)

    def _point(self, event: TableEvent) -> KeyRange:
        """The part of the key space that is the event's key, and no other that anybody has met."""
        start = self.key(event) + SHIFT
        return KeyRange(start, start + 1)
