"""Order: events of one key, or of the whole queue, fire one after the other."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable

from turnlane.table.event import TableEvent


class Order:
    """Who is out, and who waits behind whom. Pure.

    A key is busy from the moment one of its events fires until that event is settled, however often
    it is fired again in between. The others of the key wait by fire time, then by id.
    """

    def __init__(self, key: Callable[[TableEvent], Hashable]) -> None:
        self._key = key
        self._out: dict[Hashable, int] = {}
        self._waiting: dict[Hashable, list[tuple[int, int, TableEvent]]] = {}
        self._parked: set[int] = set()

    def __contains__(self, event_id: int) -> bool:
        """Whether the event waits here behind another."""
        return event_id in self._parked

    def admit(self, events: Iterable[TableEvent]) -> list[TableEvent]:
        """Those of the due events that may fire now; the rest waits here."""
        admitted = []
        for event in events:
            key = self._key(event)
            out = self._out.setdefault(key, event.id)
            if out == event.id:
                admitted.append(event)
            else:
                line = self._waiting.setdefault(key, [])
                heapq.heappush(line, (event.fire_at, event.id, event))
                self._parked.add(event.id)
        return admitted

    def settled(self, event: TableEvent) -> TableEvent | None:
        """An event is over; returns the one that may fire next."""
        key = self._key(event)
        if self._out.get(key) != event.id:
            return None
        del self._out[key]
        line = self._waiting.get(key)
        if not line:
            return None
        following = heapq.heappop(line)[2]
        self._parked.discard(following.id)
        if not line:
            del self._waiting[key]
        return following

    def retried(self, event: TableEvent) -> None:
        """An event that was fired before and is not settled: its key is busy."""
        self._out.setdefault(self._key(event), event.id)
