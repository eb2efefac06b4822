"""Order: events of one key, or of the whole queue, fire one after the other."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Container, Hashable, Iterable
from itertools import islice
from typing import Final, NamedTuple

from turnlane.table.event import TableEvent
from turnlane.table.shards import KeyRange
from turnlane.table.store import Position

KEYS_PER_STATEMENT: Final = 50
"""Keys to a statement."""


class KeyBacklog(NamedTuple):
    """Events of a key that are left in the table, because too many of them wait here."""

    after: Position
    """They come after this one; nothing that waits here does."""
    where: KeyRange
    """The part of the key space where they are; others may be there too."""

    @property
    def first(self) -> Position:
        """The first of them that there can be."""
        return self.after[0], self.after[1] + 1


class KeyOrder:
    """Who is out, and who waits behind whom. Pure.

    A key is busy from the moment one of its events may fire until that event is settled, however
    often it is fired again in between. The others of the key wait by fire time, then by id: at
    most ``most`` of all keys here, the rest in the table. The longest line gives way.
    """

    def __init__(
        self,
        key: Callable[[TableEvent], Hashable],
        where: Callable[[TableEvent], KeyRange],
        most: int,
    ) -> None:
        self.most = most
        self._key = key
        self._where = where
        self._out: dict[Hashable, int] = {}
        self._waiting: dict[Hashable, list[tuple[int, int, TableEvent]]] = {}
        self._parked: set[int] = set()
        self._left: dict[Hashable, KeyBacklog] = {}

    def __contains__(self, event_id: int) -> bool:
        """Whether the event waits here behind another."""
        return event_id in self._parked

    def __len__(self) -> int:
        """How many events wait here."""
        return len(self._parked)

    def admit(self, events: Iterable[TableEvent]) -> list[TableEvent]:
        """Those of the due events that may fire now; the rest waits, here or in the table."""
        admitted = []
        for event in events:
            key = self._key(event)
            if self.is_left(event):
                continue
            if self._out.setdefault(key, event.id) == event.id:
                admitted.append(event)
            else:
                self._park(key, event)
        self._shorten()
        return admitted

    def settled(self, event: TableEvent) -> TableEvent | None:
        """An event is over; returns the one that may fire next."""
        key = self._key(event)
        return self._next(key) if self._out.get(key) == event.id else None

    def leave(self, event: TableEvent) -> tuple[list[TableEvent], KeyBacklog | None]:
        """An event is left in the table; returns all that is behind it, which is left there too.

        One that was fired before keeps its key busy, wherever it is.
        """
        key = self._key(event)
        if event.attempts or self._out.get(key) != event.id:
            return [], None
        del self._out[key]
        behind = [each for _, _, each in self._waiting.pop(key, [])]
        self._parked.difference_update(each.id for each in behind)
        return behind, self._left.pop(key, None)

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

    # ── what is left in the table ────────────────────────────────────────────────────────────────

    def is_left(self, event: TableEvent) -> bool:
        """Whether a due event belongs to those that are left in the table, to be read later."""
        if not self._left:
            return False
        key = self._key(event)
        left = self._left.get(key)
        if left is None or (event.fire_at, event.id) <= left.after:
            return False
        return self._out.get(key) != event.id  # else it is the one that the others wait for

    def wanted(self) -> dict[Hashable, KeyBacklog]:
        """Keys of which events should be read now, some of them at a time.

        Those that nothing holds up; ahead of time only as long as nobody has to give way for it.
        """
        ahead = len(self._parked) <= self.most // 2
        keys = (
            key
            for key in self._left
            if key not in self._waiting and (ahead or key not in self._out)
        )
        return {key: self._left[key] for key in islice(keys, KEYS_PER_STATEMENT)}

    def passed(self, position: Position, known: Callable[[int], bool]) -> list[KeyRange]:
        """Where whatever is due after a position is left anyway, so that nobody need read it.

        Not where an event is which others wait for, unless it is ``known``.
        """
        ranges = (
            left.where
            for key, left in self._left.items()
            if left.after <= position and (key not in self._out or known(self._out[key]))
        )
        return list(islice(ranges, KEYS_PER_STATEMENT))

    def advance(self, keys: Iterable[Hashable], end: Position | None) -> None:
        """Events of keys were read up to a position, or all that are due."""
        for key in keys:
            if end is None:
                del self._left[key]
            else:
                left = self._left[key]
                self._left[key] = left._replace(after=max(left.after, end))

    def line_up(self, events: Iterable[TableEvent]) -> list[TableEvent]:
        """Take events that were left in the table; returns those that may fire now."""
        ready, keys = [], set()
        for event in events:
            key = self._key(event)
            if self._out.get(key) == event.id:
                ready.append(event)
            elif not self.is_left(event):
                self._park(key, event)
                keys.add(key)
        ready += [self._go_ahead(key) for key in keys - self._out.keys()]
        self._shorten()
        return ready

    # ── how ──────────────────────────────────────────────────────────────────────────────────────

    def _park(self, key: Hashable, event: TableEvent) -> None:
        insort(self._waiting.setdefault(key, []), (event.fire_at, event.id, event))
        self._parked.add(event.id)

    def _shorten(self) -> None:
        """Leave the later half of the longest line in the table, until there is room for all."""
        while len(self._parked) > self.most:
            key = max(self._waiting, key=lambda each: len(self._waiting[each]))
            line = self._waiting[key]
            gone = line[len(line) // 2 :]
            del line[len(line) // 2 :]
            fire_at, event_id, first = gone[0]
            self._left[key] = KeyBacklog((fire_at, event_id - 1), self._where(first))
            self._parked.difference_update(event_id for _, event_id, _ in gone)
            if not line:
                del self._waiting[key]

    def _next(self, key: Hashable) -> TableEvent | None:
        """Free a key, or give it to the first that waits for it, which is returned."""
        del self._out[key]
        return self._go_ahead(key) if key in self._waiting else None

    def _go_ahead(self, key: Hashable) -> TableEvent:
        """Give a key to the first that waits for it: nobody comes between until that fires."""
        line = self._waiting[key]
        _, event_id, following = line.pop(0)
        self._parked.discard(event_id)
        if not line:
            del self._waiting[key]
        self._out[key] = event_id
        return following
