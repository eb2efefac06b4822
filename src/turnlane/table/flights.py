"""Flights: events that were fired and are not settled."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator

from turnlane.table.event import TableEvent


class Flights:
    """Events in the hands of receivers, by id. Pure: times are passed in, monotonic.

    Fired events are remembered batch by batch, in the order of time, so that nobody has to look
    through all of them to find the late ones. Most are settled before the first look: until then
    only their ids are remembered, and they are gone from memory when they are settled.
    """

    def __init__(self, ack_timeout: float, look_after: float) -> None:
        self._timeout = ack_timeout
        self._look_after = look_after
        self._events: dict[int, TableEvent] = {}
        self._new: deque[tuple[float, list[int]]] = deque()
        """With the times at which they were fired."""
        self._late: deque[tuple[float, list[TableEvent]]] = deque()
        self._unseen: deque[tuple[float, list[TableEvent]]] = deque()

    def __len__(self) -> int:
        return len(self._events)

    def __contains__(self, event_id: int) -> bool:
        return event_id in self._events

    @property
    def ids(self) -> Container[int]:
        """Of all events that are out; a view."""
        return self._events.keys()

    def __iter__(self) -> Iterator[TableEvent]:
        return iter(self._events.values())

    def add(self, events: list[TableEvent], now: float) -> None:
        """Events that are given to a receiver now."""
        for event in events:
            event.fired = now
            self._events[event.id] = event
        self._new.append((now, [event.id for event in events]))

    def get(self, event_id: int) -> TableEvent | None:
        """The event of this id, if it is out."""
        return self._events.get(event_id)

    def pop(self, event_id: int) -> TableEvent | None:
        """Take an event out: it is settled, or fired again."""
        return self._events.pop(event_id, None)

    def late(self, now: float) -> list[TableEvent]:
        """Events whose time to be settled is over; again after a while, if they stay.

        Of those that :meth:`unseen` has named before.
        """
        found = self._over(self._late, now)
        if found:
            self._late.append((now + self._look_after, found))
        return found

    def unseen(self, now: float) -> list[TableEvent]:
        """Events whose rows should be looked at: out for a while, or for another while."""
        found = self._over(self._unseen, now)
        while self._new and self._new[0][0] + self._look_after <= now:
            fired, ids = self._new.popleft()
            # One that was fired again has another time.
            known = [event for each in ids if (event := self._events.get(each)) is not None]
            out = [event for event in known if event.fired == fired]
            if out:
                self._late.append((fired + self._timeout, out))
            found += out
        if found:
            self._unseen.append((now + self._look_after, found))
        return found

    def next_time(self) -> float | None:
        """When :meth:`late` or :meth:`unseen` will have something to say."""
        times = [line[0][0] for line in (self._late, self._unseen) if line]
        if self._new:
            times.append(self._new[0][0] + self._look_after)
        return min(times, default=None)

    def _over(self, line: deque[tuple[float, list[TableEvent]]], now: float) -> list[TableEvent]:
        over: list[TableEvent] = []
        while line and line[0][0] <= now:
            over += self._still_out(line.popleft()[1])
        return over

    def _still_out(self, events: Iterable[TableEvent]) -> list[TableEvent]:
        """An event that was fired again is another object."""
        return [event for event in events if self._events.get(event.id) is event]
