"""The window: events that are due, or soon will be, in the manager's memory."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from turnlane.table.definition import Definition, TableOrdering
from turnlane.table.event import TableEvent
from turnlane.table.in_flight import AckBuffer, InFlightEvents
from turnlane.table.ordering import KeyOrder
from turnlane.table.shards import (
    KEYSPACE_SHIFT,
    KEYSPACE_SIZE,
    WHOLE_KEYSPACE,
    KeyRange,
    keyspace_id,
)
from turnlane.table.sql.dialect import Row
from turnlane.table.store import Position


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


# ── backlogs ──
# Backlogs: parts of the key space whose events are left in the table for now.
#
# Events that no receiver can take must not fill the memory, or those of other receivers would
# not be
# read. So they are forgotten, and it is noted from where on they have to be read again. Pure.

MAX_FIRE_TIME: Final = 2**63 - 1
"""The last fire time there is."""


class RangeBacklogs:
    """The key space, cut at the bounds of the receivers' key ranges, and what is left of it."""

    def __init__(self) -> None:
        self._ranges: frozenset[KeyRange] = frozenset({WHOLE_KEYSPACE})
        self.spans: Sequence[KeyRange] = (WHOLE_KEYSPACE,)
        """The parts: whoever takes an event of one may take all of them."""
        self._starts = [-KEYSPACE_SHIFT]
        self._left: dict[KeyRange, Position] = {}
        self._again = MAX_FIRE_TIME

    def cut(self, ranges: Iterable[KeyRange]) -> bool:
        """Take the receivers' key ranges; if they are others than before, nothing is left."""
        wanted = frozenset(ranges)
        if wanted == self._ranges:
            return False
        self._ranges = wanted
        bounds = sorted({0, KEYSPACE_SIZE, *(b for each in wanted for b in (each.start, each.end))})
        self.spans = tuple(KeyRange(start, end) for start, end in pairwise(bounds))
        self._starts = [span.stored[0] for span in self.spans]
        self._again = min([self._again, *(fire_at for fire_at, _ in self._left.values())])
        self._left.clear()
        return True

    def span(self, keyspace_id: int) -> KeyRange:
        """The part in which an id lies."""
        return self.spans[bisect_right(self._starts, keyspace_id) - 1]

    def __contains__(self, span: KeyRange) -> bool:
        return span in self._left

    def __len__(self) -> int:
        return len(self._left)

    def __iter__(self) -> Iterator[KeyRange]:
        return iter(self._left)

    @property
    def others(self) -> Sequence[KeyRange]:
        """The parts of which nothing is left."""
        if not self._left:
            return (WHOLE_KEYSPACE,)
        return [span for span in self.spans if span not in self._left]

    def leave(self, span: KeyRange, fire_at: int, event_id: int) -> None:
        """Leave an event of a part, and all later ones, in the table."""
        position = (fire_at, event_id - 1)
        self._left[span] = min(self._left.get(span, position), position)

    def overlapping(self, where: KeyRange) -> list[KeyRange]:
        """The parts that have something in common with a range."""
        return [span for span in self.spans if span.overlaps(where)]

    def outside(self, where: KeyRange) -> Sequence[KeyRange]:
        """A key's range, or everything, without the parts of which something is left."""
        if where.is_everything:
            return self.others
        return () if self.span(where.stored[0]) in self._left else (where,)

    def lower(self, position: Position) -> None:
        """Leave nothing out that a sweep would find from a position on."""
        for span, left in self._left.items():
            self._left[span] = min(left, position)

    def position(self, span: KeyRange) -> Position:
        """After which events of a part are left."""
        return self._left[span]

    def advance(self, span: KeyRange, position: Position | None) -> None:
        """Events were read up to a position, or all of them."""
        if position is None:
            del self._left[span]
        else:
            self._left[span] = position

    def take_first(self) -> int:
        """From which fire time on to look for what was left before a cut; it is told once."""
        first, self._again = self._again, MAX_FIRE_TIME
        return first


# ── stock ──
# The stock: all events that a manager has in memory, each in one place.

CHECK_AFTER = 1.0
"""Seconds after which the row of a fired event is marked, or looked at again. Most events are
acked before, and cost no mark at all."""


class EventCache:
    """What waits, what is out, what is settled but not stored yet; and what is left for now."""

    def __init__(self, definition: Definition) -> None:
        timeout = definition.settings.ack_timeout
        self.window = Window()
        self.flights = InFlightEvents(timeout, min(CHECK_AFTER, timeout / 3))
        self.settling = AckBuffer()
        self.order = self._order(definition)
        self.reach = MAX_FIRE_TIME
        """The last fire time for which the window has room."""
        self.backlogs = RangeBacklogs()
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

    def _order(self, definition: Definition) -> KeyOrder | None:
        # Half of the window: the other half is for keys that nothing holds up.
        most = definition.settings.window_events // 2
        match definition.settings.ordering:
            case TableOrdering.NONE:
                return None
            case TableOrdering.QUEUE:
                return KeyOrder(lambda _: None, lambda _: WHOLE_KEYSPACE, most)
            case TableOrdering.KEY:
                column = definition.shard_by
                assert column is not None, "the definition has been checked"

                def key(event: TableEvent) -> Hashable:
                    found: Hashable = event[column]
                    return found

                return KeyOrder(key, self._point, most)

    def _point(self, event: TableEvent) -> KeyRange:
        """The part of the key space that is the event's key, and no other that anybody has met."""
        start = self.key(event) + KEYSPACE_SHIFT
        return KeyRange(start, start + 1)
