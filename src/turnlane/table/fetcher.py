"""The fetcher: moves rows from the table into the window, as many as the memory has room for.

:mod:`turnlane.table.row_finder` knows where the rows are; the fetcher decides how many are read and
which events stay in memory. Two limits hold: at most ``window_events`` events wait in memory, and
events of one key range or one key must not take the room of the others. When the window is too
full, its end moves nearer, or events of a crowded key range go back to the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from turnlane.databases import Row
from turnlane.table.event import TableEvent
from turnlane.table.leader_state import LeaderState, ReceiverSlot
from turnlane.table.ordering import KeyBacklog, KeyOrder
from turnlane.table.queue_sql import get_queue_sql
from turnlane.table.row_finder import PAGE_ROWS, ClockTimes, RowFinder
from turnlane.table.shards import KeyRange
from turnlane.table.window import MAX_FIRE_TIME

FRESH_NANOSECONDS = 20_000_000
"""An event that is due later than this when it is read has to wait, and its row is checked again
before it is sent: a user may cancel it. (The estimate of the database's clock is a little behind,
so an event that is due now may look as if it were not yet.)"""

MIN_BACKLOG_ROWS = 500
"""Rows that are read for keys with a backlog, even if other keys lose room in memory."""


class Fetcher:
    """Reads as many rows as the window can take. Owned by a leader's term."""

    def __init__(self, state: LeaderState) -> None:
        self._state = state
        self._cache = state.cache
        self._backlogs = state.cache.backlogs
        self.finder = RowFinder(
            state.store,
            state.settings,
            get_queue_sql(state.store.dialect).idle_poll,
            self._backlogs,
            state.cache.find_skippable_ranges,
        )
        self._is_listening = False
        self._has_wanted_backlog = False
        """Whether events are left in the table that a receiver would take."""

    def read(self, now: float, slots: Sequence[ReceiverSlot]) -> None:
        """Read the rows that are wanted now."""
        state = self._state
        if self._backlogs.set_receiver_ranges(slot.key_range for slot in slots):
            self.finder.sweep_soon()
        room = self._get_room() or self._make_room()
        wanted = self._find_wanted_backlogs(slots) if room else []
        if now >= self.finder.get_next_time(room):
            rows = self.finder.read(state.token, room, now, self._get_times())
            self._add_to_window(self._leave_backlogged(self._make_events(rows, now)))
        for key_range in wanted:
            rows = self.finder.read_backlog(state.token, key_range, room, self._get_times())
            self._add_to_window(self._make_events(rows, now))
        self._has_wanted_backlog = any(key_range in self._backlogs for key_range in wanted)
        if room and self._cache.key_order is not None:
            self._read_key_backlogs(self._cache.key_order, room, now)
        self._fit_window()

    def get_next_time(self) -> float:
        """Return when to read again, in monotonic seconds."""
        room = self._get_room()
        if self._has_wanted_backlog or (room and self._find_key_backlogs()):
            return float("-inf")
        return self.finder.get_next_time(room)

    def update_listening(self) -> None:
        """Let inserts wake the manager while the table is quiet; under load, polling is cheaper."""
        store = self._state.store
        if not get_queue_sql(store.dialect).has_wake_trigger:
            return
        finder = self.finder
        wanted = finder.busy_reads < 4 if self._is_listening else finder.is_idle
        if wanted != self._is_listening:
            store.set_listening(self._state.token, on=wanted)
            self._is_listening = wanted

    def _get_times(self) -> ClockTimes:
        return ClockTimes(self._state.now(), self._state.get_window_end())

    # ── from rows to events ──────────────────────────────────────────────────────────────────────

    def _make_events(self, rows: Sequence[Row], now: float) -> list[TableEvent]:
        """Make events of the rows that are not in memory and lie within the window."""
        state = self._state
        window_end, fresh_until = state.get_window_end(), state.now() + FRESH_NANOSECONDS
        return [
            TableEvent(row, state.manager, now if row[1] <= fresh_until else float("-inf"))
            for row in self._cache.filter_not_cached(rows)
            if row[1] <= window_end
        ]

    def _leave_backlogged(self, events: list[TableEvent]) -> list[TableEvent]:
        """Remove events of key ranges with a backlog: they are read later."""
        if not self._backlogs:
            return events
        left = {event for event in events if self._cache.find_range(event) in self._backlogs}
        self._cache.leave_in_table(left)
        return [event for event in events if event not in left]

    def _add_to_window(self, events: Sequence[TableEvent]) -> None:
        state, order = self._state, self._cache.key_order
        free = [event for event in events if event.after_group is None]
        if order is not None:
            now = state.now()
            free = [
                event for event in free if event.fire_at > now or not order.is_in_backlog(event)
            ]
        self._cache.window.add(free, state.now())
        groups = {group for event in events if (group := event.after_group) is not None}
        if groups:
            # The groups that events wait for may be done already.
            self.finder.request(state.store.store_acks(state.token, (), groups).released)

    # ── keys with a backlog ──────────────────────────────────────────────────────────────────────

    def _find_key_backlogs(self) -> dict[Hashable, KeyBacklog]:
        order = self._cache.key_order
        return {} if order is None else order.find_readable_backlogs()

    def _read_key_backlogs(self, order: KeyOrder, room: int, now: float) -> None:
        """Read events of keys that left some in the table because too many waited."""
        key_backlogs = self._find_key_backlogs()
        if not key_backlogs:
            return
        state = self._state
        for key_backlog in key_backlogs.values():
            for key_range in self._backlogs.find_overlapping(key_backlog.key_range):
                if key_range in self._backlogs:
                    self._backlogs.leave(key_range, *key_backlog.first_position)
        limit = min(room, PAGE_ROWS, max(MIN_BACKLOG_ROWS, order.max_waiting - len(order)))
        rows, end = self.finder.read_key_backlogs(
            state.token, key_backlogs.values(), limit, state.now()
        )
        order.advance(key_backlogs, end)
        ready = order.add_from_backlog(self._make_events(rows, now))
        self._cache.window.add(ready, state.now())

    # ── room in memory ───────────────────────────────────────────────────────────────────────────

    def _get_room(self) -> int:
        """Return how many due events the window takes; 0 until it is half empty.

        Pages are large, so it is worth waiting for room. Only two pages of due events are read
        ahead: the rows of events that wait long in memory have to be checked again.
        """
        limit = self._max_due
        waiting = self._cache.window.count_due(self._state.now())
        return limit - waiting if waiting <= limit // 2 else 0

    @property
    def _max_due(self) -> int:
        return min(self._max_waiting, 2 * PAGE_ROWS)

    @property
    def _max_waiting(self) -> int:
        """The most events in the window; events that wait behind a key take room too."""
        return self._state.settings.window_events - self._cache.waiting_behind_key

    def _make_room(self) -> int:
        """Leave events of crowded key ranges in the table; returns the room after that."""
        ranges = self._backlogs.ranges
        if len(ranges) == 1:
            return 0
        share = max(1, self._max_due // (4 * len(ranges)))
        kept: Counter[KeyRange] = Counter()
        removed = []
        for event in self._cache.window.list_due(self._state.now()):
            key_range = self._cache.find_range(event)
            kept[key_range] += 1
            if kept[key_range] > share:
                removed.append(event)
        self._cache.window.discard_due(removed)
        self._cache.leave_in_table(removed)
        return self._get_room()

    def _find_wanted_backlogs(self, slots: Sequence[ReceiverSlot]) -> list[KeyRange]:
        """Return key ranges with a backlog, no event in memory, and a receiver with room."""
        if not self._backlogs:
            return []
        due = self._cache.window.list_due(self._state.now())
        in_memory = {self._cache.find_range(event) for event in due}
        free = [slot.key_range for slot in slots if slot.room]
        return [
            key_range
            for key_range in self._backlogs
            if key_range not in in_memory and any(each.overlaps(key_range) for each in free)
        ]

    def _fit_window(self) -> None:
        """Move the window's end nearer while the window is too full, and back when it is not."""
        cache, limit = self._cache, self._max_waiting
        if len(cache.window) > limit:
            first_removed = cache.window.trim(limit * 3 // 4)
            if first_removed is not None:
                cache.window_end_limit = first_removed - 1
        elif cache.window_end_limit < MAX_FIRE_TIME and len(cache.window) <= limit // 2:
            cache.window_end_limit = MAX_FIRE_TIME
            self.finder.sweep_soon()
