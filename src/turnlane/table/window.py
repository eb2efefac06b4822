"""The window: events in the manager's memory that are due or soon will be. Pure.

Two structures. The :class:`Window` holds the events that wait to be fired. :class:`RangeBacklogs`
remembers which parts of the key space have events that were *left in the table*: events that no
receiver can take must not fill the memory, because then the events of other receivers could not be
read. They are removed from the window, and read again from the recorded position later.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from turnlane.table.receiver import TableEvent
from turnlane.table.shards import KEYSPACE_SHIFT, KEYSPACE_SIZE, WHOLE_KEYSPACE, KeyRange
from turnlane.table.store import Position

MAX_FIRE_TIME: Final = 2**63 - 1


class Window:
    """Events that wait to be fired, by id. The time is passed in, by the database's clock.

    Due events are taken by priority, then in the order in which they came in. Events that are not
    due wait in a heap.
    """

    def __init__(self) -> None:
        self._events: dict[int, TableEvent] = {}
        self._later: list[tuple[int, int]] = []
        """A heap of (fire time, id). Entries of removed or rescheduled events stay until popped."""
        self._due: dict[int, deque[int]] = {}
        """Ids by priority; may also contain ids of removed events."""

    def __len__(self) -> int:
        return len(self._events)

    def __contains__(self, event_id: int) -> bool:
        return event_id in self._events

    @property
    def ids(self) -> Container[int]:
        """The ids of all events that wait; a view."""
        return self._events.keys()

    def add(self, events: Iterable[TableEvent], now: int) -> None:
        """Add events; an event replaces another one with its id."""
        for event in events:
            self._events[event.id] = event
            if event.fire_at <= now:
                self._get_line(event.priority).append(event.id)
            else:
                heapq.heappush(self._later, (event.fire_at, event.id))

    def take(self, most: int, now: int) -> list[TableEvent]:
        """Remove and return up to ``most`` due events."""
        self._move_due(now)
        taken: list[TableEvent] = []
        for priority in sorted(self._due, reverse=True):
            line = self._due[priority]
            while line and len(taken) < most:
                event = self._events.pop(line.popleft(), None)
                if event is not None and event.fire_at <= now:
                    taken.append(event)
                elif event is not None:  # it was rescheduled after it became due
                    self._events[event.id] = event
            if not line:
                del self._due[priority]
        return taken

    def put_back(self, events: list[TableEvent]) -> None:
        """Add events that were taken and not sent; they are the first to be taken again."""
        for event in reversed(events):
            self._events[event.id] = event
            self._get_line(event.priority).appendleft(event.id)

    def get(self, event_id: int) -> TableEvent | None:
        """Return the event of this id, if it waits here."""
        return self._events.get(event_id)

    def discard(self, event_id: int) -> None:
        """Remove an event."""
        self._events.pop(event_id, None)

    def discard_due(self, events: Iterable[TableEvent]) -> None:
        """Remove due events, also from the lines of their priorities."""
        ids = {event.id for event in events}
        for event_id in ids:
            self._events.pop(event_id, None)
        for priority, line in self._due.items():
            self._due[priority] = deque(each for each in line if each not in ids)

    def has_due(self, now: int) -> bool:
        """Whether an event is due."""
        self._move_due(now)
        return any(self._due.values())

    def list_due(self, now: int) -> list[TableEvent]:
        """Return all due events, in the order in which they would be taken."""
        self._move_due(now)
        lines = (self._due[priority] for priority in sorted(self._due, reverse=True))
        ids = dict.fromkeys(each for line in lines for each in line)
        events = (self._events.get(each) for each in ids)
        return [event for event in events if event is not None and event.fire_at <= now]

    def count_due(self, now: int) -> int:
        """Return how many events are due; may include some that were removed."""
        self._move_due(now)
        return sum(map(len, self._due.values()))

    def trim(self, most: int) -> int | None:
        """Remove the latest events until ``most`` are left; returns the first removed fire time.

        Removes no due event.
        """
        later = sorted({each for each in self._later if self._is_current(*each)}, reverse=True)
        removed = later[: max(0, len(self._events) - most)]
        for _, event_id in removed:
            del self._events[event_id]
        self._later = later[len(removed) :][::-1]  # an ascending list is a heap
        return removed[-1][0] if removed else None

    def get_next_time(self) -> int | None:
        """Return when the next event becomes due."""
        while self._later:
            fire_at, event_id = self._later[0]
            if self._is_current(fire_at, event_id):
                return fire_at
            heapq.heappop(self._later)
        return None

    def _move_due(self, now: int) -> None:
        """Move events that became due from the heap to the line of their priority."""
        while self._later and self._later[0][0] <= now:
            fire_at, event_id = heapq.heappop(self._later)
            event = self._events.get(event_id)
            if event is not None and event.fire_at == fire_at:
                self._get_line(event.priority).append(event_id)

    def _is_current(self, fire_at: int, event_id: int) -> bool:
        """Whether the event is here, and was not rescheduled."""
        event = self._events.get(event_id)
        return event is not None and event.fire_at == fire_at

    def _get_line(self, priority: int) -> deque[int]:
        return self._due.setdefault(priority, deque())


class RangeBacklogs:
    """The key space, cut at the bounds of the receivers' key ranges; each part may have a backlog.

    The backlog of a part is a position: all events of the part after it were left in the table.
    """

    def __init__(self) -> None:
        self._receiver_ranges: frozenset[KeyRange] = frozenset({WHOLE_KEYSPACE})
        self.ranges: Sequence[KeyRange] = (WHOLE_KEYSPACE,)
        """The parts: a receiver takes all keys of a part, or none."""
        self._starts = [-KEYSPACE_SHIFT]
        self._positions: dict[KeyRange, Position] = {}
        self._resume_time = MAX_FIRE_TIME

    def set_receiver_ranges(self, ranges: Iterable[KeyRange]) -> bool:
        """Cut the key space again if the receivers' ranges changed; whether they did.

        A change removes all backlogs: the next sweep starts at the earliest of them.
        """
        wanted = frozenset(ranges)
        if wanted == self._receiver_ranges:
            return False
        self._receiver_ranges = wanted
        bounds = {0, KEYSPACE_SIZE, *(b for each in wanted for b in (each.start, each.end))}
        self.ranges = tuple(KeyRange(start, end) for start, end in pairwise(sorted(bounds)))
        self._starts = [part.stored_bounds[0] for part in self.ranges]
        fire_times = (fire_at for fire_at, _ in self._positions.values())
        self._resume_time = min([self._resume_time, *fire_times])
        self._positions.clear()
        return True

    def take_resume_time(self) -> int:
        """Return the fire time from which to sweep after a change of ranges, and forget it."""
        time, self._resume_time = self._resume_time, MAX_FIRE_TIME
        return time

    def __contains__(self, key_range: KeyRange) -> bool:
        return key_range in self._positions

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[KeyRange]:
        return iter(self._positions)

    @property
    def ranges_without_backlog(self) -> Sequence[KeyRange]:
        """The parts of which no event was left in the table."""
        if not self._positions:
            return (WHOLE_KEYSPACE,)
        return [part for part in self.ranges if part not in self._positions]

    def find_range(self, keyspace_id: int) -> KeyRange:
        """Return the part in which an id lies."""
        return self.ranges[bisect_right(self._starts, keyspace_id) - 1]

    def find_overlapping(self, key_range: KeyRange) -> list[KeyRange]:
        """Return the parts that overlap a range."""
        return [part for part in self.ranges if part.overlaps(key_range)]

    def exclude_from(self, key_range: KeyRange) -> Sequence[KeyRange]:
        """Return the range of a key, or the whole key space, without the parts with a backlog."""
        if key_range.is_whole:
            return self.ranges_without_backlog
        part = self.find_range(key_range.stored_bounds[0])
        return () if part in self._positions else (key_range,)

    def leave(self, key_range: KeyRange, fire_at: int, event_id: int) -> None:
        """Leave an event of a part, and all later ones, in the table."""
        position = (fire_at, event_id - 1)
        self._positions[key_range] = min(self._positions.get(key_range, position), position)

    def get_position(self, key_range: KeyRange) -> Position:
        """Return the position after which events of a part were left in the table."""
        return self._positions[key_range]

    def advance(self, key_range: KeyRange, position: Position | None) -> None:
        """Record that events were read up to a position; ``None``: all of them."""
        if position is None:
            del self._positions[key_range]
        else:
            self._positions[key_range] = position

    def move_back_to(self, position: Position) -> None:
        """Move every backlog back to the position of a sweep, which may find earlier events."""
        for key_range, current in self._positions.items():
            self._positions[key_range] = min(current, position)
