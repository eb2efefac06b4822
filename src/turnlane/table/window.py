"""The window: events that are due, or soon will be, in the manager's memory."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Iterable

from turnlane.table.event import TableEvent


class Window:
    """Events that wait to be fired, by id. Pure: the time is passed in, on the database's clock.

    What is due goes out by priority and then in the order in which it came in; what is not waits
    in a heap.
    """

    def __init__(self) -> None:
        self._events: dict[int, TableEvent] = {}
        self._later: list[tuple[int, int]] = []
        self._due: dict[int, deque[int]] = {}

    def __len__(self) -> int:
        return len(self._events)

    def __contains__(self, event_id: int) -> bool:
        return event_id in self._events

    @property
    def ids(self) -> Container[int]:
        """Of all events that wait; a view."""
        return self._events.keys()

    def add(self, events: Iterable[TableEvent], now: int) -> None:
        """Take events in; one whose id is there replaces it."""
        for event in events:
            self._events[event.id] = event
            if event.fire_at <= now:
                self._line(event.priority).append(event.id)
            else:
                heapq.heappush(self._later, (event.fire_at, event.id))

    def take(self, most: int, now: int) -> list[TableEvent]:
        """Take out up to ``most`` events that are due."""
        self._ripen(now)
        taken: list[TableEvent] = []
        for priority in sorted(self._due, reverse=True):
            line = self._due[priority]
            while line and len(taken) < most:
                event = self._events.pop(line.popleft(), None)
                if event is not None and event.fire_at <= now:
                    taken.append(event)
                elif event is not None:  # it was moved since it got into line
                    self._events[event.id] = event
            if not line:
                del self._due[priority]
        return taken

    def put_back(self, events: list[TableEvent]) -> None:
        """Take back what was taken and did not fire; it goes out first again."""
        for event in reversed(events):
            self._events[event.id] = event
            self._line(event.priority).appendleft(event.id)

    def get(self, event_id: int) -> TableEvent | None:
        """The event of this id, if it waits here."""
        return self._events.get(event_id)

    def discard(self, event_id: int) -> None:
        """Forget an event."""
        self._events.pop(event_id, None)

    def forget(self, events: Iterable[TableEvent]) -> None:
        """Forget events that are due, and their places in line."""
        gone = {event.id for event in events}
        for event_id in gone:
            self._events.pop(event_id, None)
        for priority, line in self._due.items():
            self._due[priority] = deque(each for each in line if each not in gone)

    def has_due(self, now: int) -> bool:
        """Whether an event is due."""
        self._ripen(now)
        return any(self._due.values())

    def due(self, now: int) -> list[TableEvent]:
        """All events that are due, in the order in which they would go out."""
        self._ripen(now)
        lines = (self._due[priority] for priority in sorted(self._due, reverse=True))
        found = dict.fromkeys(each for line in lines for each in line)
        events = (self._events.get(each) for each in found)
        return [event for event in events if event is not None and event.fire_at <= now]

    def count_due(self, now: int) -> int:
        """How many events are due; those that were discarded since may be counted in."""
        self._ripen(now)
        return sum(map(len, self._due.values()))

    def trim(self, most: int) -> int | None:
        """Forget the latest of more than so many events that are not due; from which time on."""
        later = sorted({each for each in self._later if self._waits(*each)}, reverse=True)
        gone = later[: max(0, len(self._events) - most)]
        for _, event_id in gone:
            del self._events[event_id]
        self._later = later[len(gone) :][::-1]  # ascending, as a heap may be
        return gone[-1][0] if gone else None

    def next_time(self) -> int | None:
        """When the next event becomes due that is not yet."""
        while self._later:
            fire_at, event_id = self._later[0]
            if self._waits(fire_at, event_id):
                return fire_at
            heapq.heappop(self._later)
        return None

    def _ripen(self, now: int) -> None:
        while self._later and self._later[0][0] <= now:
            fire_at, event_id = heapq.heappop(self._later)
            event = self._events.get(event_id)
            if event is not None and event.fire_at == fire_at:
                self._line(event.priority).append(event_id)

    def _waits(self, fire_at: int, event_id: int) -> bool:
        """Whether the event is there, and was not moved since."""
        event = self._events.get(event_id)
        return event is not None and event.fire_at == fire_at

    def _line(self, priority: int) -> deque[int]:
        return self._due.setdefault(priority, deque())
