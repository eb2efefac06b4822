"""Order: events of one key, or of the whole queue, fire one after the other."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Container, Hashable, Iterable

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
        return self._next(key) if self._out.get(key) == event.id else None

    def leave(self, event: TableEvent) -> list[TableEvent]:
        """An event is left in the table; returns those behind it, which are left there too.

        One that was fired before keeps its key busy, wherever it is.
        """
        key = self._key(event)
        if event.attempts or self._out.get(key) != event.id:
            return []
        del self._out[key]
        behind = [each for _, _, each in self._waiting.pop(key, [])]
        self._parked.difference_update(each.id for each in behind)
        return behind

    def retried(self, event: TableEvent) -> None:
        """An event that was fired before and is not settled: its key is busy."""
        self._out.setdefault(self._key(event), event.id)

    @property
    def out(self) -> Collection[int]:
        """The ids of the events that keep a key busy."""
        return self._out.values()

    def gone(self, ids: Container[int]) -> list[TableEvent]:
        """Events that kept keys busy are not there any more; returns those that may fire next."""
        keys = [key for key, event_id in self._out.items() if event_id in ids]
        return [event for event in map(self._next, keys) if event is not None]

    def _next(self, key: Hashable) -> TableEvent | None:
        """Free a key; returns the first that waits for it."""
        del self._out[key]
        line = self._waiting.get(key)
        if not line:
            return None
        following = heapq.heappop(line)[2]
        self._parked.discard(following.id)
        if not line:
            del self._waiting[key]
        return following
