"""The order of events: events of one key, or of the whole queue, fire one after the other. Pure.

A key is *busy* from the moment one of its events may fire until that event is settled, no matter
how often it is fired again in between. The other events of the key wait by fire time, then by id:
at most ``max_waiting`` of all keys in memory, the rest in the table. When there are too many, the
key with the most waiting events leaves the later half of them in the table; its
:class:`KeyBacklog` says from which position they have to be read again.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Container, Hashable, Iterable
from itertools import islice
from typing import Final, NamedTuple

from turnlane.table.receiver import TableEvent
from turnlane.table.shards import KeyRange
from turnlane.table.store import Position

KEYS_PER_STATEMENT: Final = 50


class KeyBacklog(NamedTuple):
    """Events of a key that were left in the table, because too many waited in memory."""

    after: Position
    """All of them come after this position; no event of the key that waits in memory does."""
    key_range: KeyRange
    """The part of the key space that contains the key; other keys may lie there too."""

    @property
    def first_position(self) -> Position:
        """The first position that one of them can have."""
        return self.after[0], self.after[1] + 1


class KeyOrder:
    """Which events may fire, and which wait behind another of their key."""

    def __init__(
        self,
        get_key: Callable[[TableEvent], Hashable],
        get_key_range: Callable[[TableEvent], KeyRange],
        max_waiting: int,
    ) -> None:
        self.max_waiting = max_waiting
        self._get_key = get_key
        self._get_key_range = get_key_range
        self._busy: dict[Hashable, int] = {}
        """The event that makes the key busy, by key."""
        self._waiting: dict[Hashable, list[tuple[int, int, TableEvent]]] = {}
        """Sorted by fire time and id, by key."""
        self._waiting_ids: set[int] = set()
        self._backlogs: dict[Hashable, KeyBacklog] = {}

    def __contains__(self, event_id: int) -> bool:
        """Whether the event waits here behind another."""
        return event_id in self._waiting_ids

    def __len__(self) -> int:
        """How many events wait here."""
        return len(self._waiting_ids)

    @property
    def busy_ids(self) -> Collection[int]:
        """The ids of the events that make a key busy."""
        return self._busy.values()

    def admit(self, events: Iterable[TableEvent]) -> list[TableEvent]:
        """Return the due events that may fire now; the others wait, here or in the table."""
        admitted = []
        for event in events:
            key = self._get_key(event)
            if self.is_in_backlog(event):
                continue
            if self._busy.setdefault(key, event.id) == event.id:
                admitted.append(event)
            else:
                self._add_waiting(key, event)
        self._shorten()
        return admitted

    def mark_busy(self, event: TableEvent) -> None:
        """Make the key of an event busy that was fired before and is not settled."""
        self._busy.setdefault(self._get_key(event), event.id)

    def release(self, event: TableEvent) -> TableEvent | None:
        """Release the key of a settled event; returns the event that may fire next."""
        key = self._get_key(event)
        return self._release_key(key) if self._busy.get(key) == event.id else None

    def release_ids(self, ids: Container[int]) -> list[TableEvent]:
        """Release the keys of settled events; returns the events that may fire next."""
        keys = [key for key, event_id in self._busy.items() if event_id in ids]
        return [event for event in map(self._release_key, keys) if event is not None]

    def remove(self, event: TableEvent) -> tuple[list[TableEvent], KeyBacklog | None]:
        """Remove an event that is left in the table, and all events that wait behind it.

        Returns these events and the backlog of the key. An event that was fired before keeps its
        key busy even in the table.
        """
        key = self._get_key(event)
        if event.attempts or self._busy.get(key) != event.id:
            return [], None
        del self._busy[key]
        behind = [each for _, _, each in self._waiting.pop(key, [])]
        self._waiting_ids.difference_update(each.id for each in behind)
        return behind, self._backlogs.pop(key, None)

    # ── events left in the table ─────────────────────────────────────────────────────────────────

    def is_in_backlog(self, event: TableEvent) -> bool:
        """Whether a due event belongs to the backlog of its key, which is read later."""
        if not self._backlogs:
            return False
        key = self._get_key(event)
        backlog = self._backlogs.get(key)
        if backlog is None or (event.fire_at, event.id) <= backlog.after:
            return False
        return self._busy.get(key) != event.id  # the event that makes its key busy never waits

    def find_readable_backlogs(self) -> dict[Hashable, KeyBacklog]:
        """Return some backlogs from which events should be read now, by key.

        These are keys that are not busy; while at most half of the room is used, also busy keys of
        which no event waits.
        """
        reads_ahead = len(self._waiting_ids) <= self.max_waiting // 2
        keys = (
            key
            for key in self._backlogs
            if key not in self._waiting and (reads_ahead or key not in self._busy)
        )
        return {key: self._backlogs[key] for key in islice(keys, KEYS_PER_STATEMENT)}

    def find_skippable_ranges(
        self, position: Position, is_cached: Callable[[int], bool]
    ) -> list[KeyRange]:
        """Return ranges in which every due event after a position belongs to a backlog.

        A range is not skippable if the event that makes its key busy is not in memory: that event
        has to be found.
        """
        ranges = (
            backlog.key_range
            for key, backlog in self._backlogs.items()
            if backlog.after <= position and (key not in self._busy or is_cached(self._busy[key]))
        )
        return list(islice(ranges, KEYS_PER_STATEMENT))

    def advance(self, keys: Iterable[Hashable], end: Position | None) -> None:
        """Record that backlogs were read up to a position; ``None``: all of their due events."""
        for key in keys:
            if end is None:
                del self._backlogs[key]
            else:
                backlog = self._backlogs[key]
                self._backlogs[key] = backlog._replace(after=max(backlog.after, end))

    def add_from_backlog(self, events: Iterable[TableEvent]) -> list[TableEvent]:
        """Add events that were read from backlogs; returns the events that may fire now."""
        ready, keys = [], set()
        for event in events:
            key = self._get_key(event)
            if self._busy.get(key) == event.id:
                ready.append(event)
            elif not self.is_in_backlog(event):
                self._add_waiting(key, event)
                keys.add(key)
        ready += [self._start_next(key) for key in keys - self._busy.keys()]
        self._shorten()
        return ready

    # ── helpers ──────────────────────────────────────────────────────────────────────────────────

    def _add_waiting(self, key: Hashable, event: TableEvent) -> None:
        insort(self._waiting.setdefault(key, []), (event.fire_at, event.id, event))
        self._waiting_ids.add(event.id)

    def _shorten(self) -> None:
        """Leave the later half of the longest line in the table, until all fit."""
        while len(self._waiting_ids) > self.max_waiting:
            key = max(self._waiting, key=lambda each: len(self._waiting[each]))
            line = self._waiting[key]
            removed = line[len(line) // 2 :]
            del line[len(line) // 2 :]
            fire_at, event_id, first = removed[0]
            self._backlogs[key] = KeyBacklog((fire_at, event_id - 1), self._get_key_range(first))
            self._waiting_ids.difference_update(event_id for _, event_id, _ in removed)
            if not line:
                del self._waiting[key]

    def _release_key(self, key: Hashable) -> TableEvent | None:
        """Make a key free, or give it to the next event, which is returned."""
        del self._busy[key]
        return self._start_next(key) if key in self._waiting else None

    def _start_next(self, key: Hashable) -> TableEvent:
        """Give a key to the first event that waits for it: no other event can come between."""
        line = self._waiting[key]
        _, event_id, following = line.pop(0)
        self._waiting_ids.discard(event_id)
        if not line:
            del self._waiting[key]
        self._busy[key] = event_id
        return following
