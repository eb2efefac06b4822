"""The stock: all events that a manager has in memory, each in one place."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Final

from turnlane.table.definition import Definition
from turnlane.table.event import TableEvent
from turnlane.table.flights import Flights
from turnlane.table.ordering import Order
from turnlane.table.settings import Ordering
from turnlane.table.settling import Settling
from turnlane.table.sql.dialect import Row
from turnlane.table.window import Window

LOOK_AFTER = 1.0
"""Seconds after which the row of a fired event is marked, or looked at again. Most events are
acked before, and cost no mark at all."""

NEVER: Final = 2**63 - 1
"""The last fire time there is."""


class Stock:
    """What waits, what is out, and what is settled but not stored yet."""

    def __init__(self, definition: Definition) -> None:
        timeout = definition.settings.ack_timeout
        self.window = Window()
        self.flights = Flights(timeout, min(LOOK_AFTER, timeout / 3))
        self.settling = Settling()
        self.order = _order(definition)
        self._passed_over = NEVER

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

    def pass_over(self, events: Iterable[TableEvent], now: int) -> None:
        """Forget events for which there is no receiver; they are found again when one comes."""
        dropped = list(events)
        self._passed_over = min([event.fire_at for event in dropped] + [self._passed_over])
        self.over(dropped, now)

    def take_passed_over(self) -> int:
        """The first fire time of such events, for who looks for them again from there on."""
        first, self._passed_over = self._passed_over, NEVER
        return first


def _order(definition: Definition) -> Order | None:
    match definition.settings.ordering:
        case Ordering.NONE:
            return None
        case Ordering.QUEUE:
            return Order(lambda _: None)
        case Ordering.KEY:
            column = definition.shard_by
            assert column is not None, "the definition has been checked"

            def key(event: TableEvent) -> Hashable:
                found: Hashable = event[column]
                return found

            return Order(key)
