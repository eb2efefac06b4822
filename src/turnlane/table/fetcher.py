"""The fetcher: moves rows from the table into the window, as many as the memory has room for.

**Where the rows are.** The :class:`RowFinder` reads in three ways, because none is enough. *New
rows* are read by ascending id: a short range at the end of an index, no matter how much the table
holds. *Gaps* in the ids are read again, often at first and then every few seconds, while their
transactions may be open: transactions commit in another order than they took their ids, so a
missing id may still appear. The *sweep* reads by fire time up to the end of the window: it finds
rows that come into the window, rows that were committed late or edited by hand, and after a
downtime all rows, page by page.

**How many stay in memory.** The :class:`Fetcher` decides that. Two limits hold: at most
``window_events`` events wait in memory, and events of one key range or one key must not take the
room of the others. When the window is too full, its end moves nearer, or events of a crowded key
range go back to the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Final

from turnlane.databases import Row
from turnlane.table.leader_state import LeaderState, ReceiverSlot
from turnlane.table.ordering import KeyBacklog, KeyOrder
from turnlane.table.queue_sql import get_queue_sql
from turnlane.table.receiver import TableEvent
from turnlane.table.shards import KeyRange, subtract_ranges
from turnlane.table.store import Position, TransactionSnapshot
from turnlane.table.window import MAX_FIRE_TIME

SWEEP_SECONDS: Final = 5.0
FULL_SWEEP_SECONDS: Final = 60.0
FULL_SWEEP_WITH_RETENTION: Final = 3600.0
SWEEP_LOOKBACK: Final = 600 * 1_000_000_000
"""A sweep starts ten minutes back, so that it does not pass over all acked rows of the past. Older
rows are found by their ids, and by a full sweep: at the start, and then every minute, or every hour
if the table keeps acked rows."""

PAGE_ROWS: Final = 2_000
"""Rows per page of a sweep, and per read of new rows."""

FIRST_POSITION: Final = (-(2**63), -1)
"""The position before all rows."""

MAX_EVENT_ID: Final = 2**63 - 1

FAST_POLL: Final = 0.005
"""Seconds between reads of new rows while events arrive."""

BATCHING_POLL: Final = 0.01
BATCHING_ROWS: Final = 5
"""After a read that found at least this many rows, the next one waits longer: half the statements,
and the time from due to received hardly changes."""

GAP_POLLS: Final = (0.02, 1.0)
"""The shortest and the longest time between reads of missing ids."""

STALE_POLL: Final = 3.0
"""Seconds between reads of ids that have been missing for long."""

MAX_GAPS: Final = 1_000
"""Missing ids to read often; beyond that, the oldest become stale."""

STALE_AFTER: Final = 60.0
"""Seconds for which a missing id is read often."""

MAX_STALE_IDS: Final = 2_000
"""Stale ids to read; beyond that, the oldest are left to the full sweep."""

PROBES_PER_END: Final = 32
"""Ids that are read at either end of a long run of missing ids, instead of all of them."""

FRESH_NANOSECONDS = 20_000_000
"""An event that is due later than this when it is read has to wait, and its row is checked again
before it is sent: a user may cancel it. (The estimate of the database's clock is a little behind,
so an event that is due now may look as if it were not yet.)"""

MIN_BACKLOG_ROWS = 500
"""Rows that are read for keys with a backlog, even if other keys lose room in memory."""


# ── missing ids ──────────────────────────────────────────────────────────────────────────────────


class StaleIdGaps:
    """Ids that have been missing for long and are read rarely. Pure.

    Most never appear, because their transactions were rolled back; but one may belong to a
    transaction that stays open for an hour.
    """

    def __init__(self) -> None:
        self._ids: dict[int, int | None] = {}
        """Each with an upper bound of its transaction's number, once that is known."""
        self._probes: set[int] = set()
        """Ids that stand for a longer run of missing ids."""
        self._unknown_before: int | None = None
        """Transactions before this number may insert rows whose ids are not known to be missing."""

    def __bool__(self) -> bool:
        return bool(self._ids) or self._unknown_before is not None

    @property
    def ids(self) -> list[int]:
        """The ids to read."""
        return list(self._ids)

    def add(self, run: range) -> None:
        """Add a run of consecutive missing ids."""
        added: Iterable[int] = run
        if len(run) > 2 * PROBES_PER_END:
            added = (*run[:PROBES_PER_END], *run[-PROBES_PER_END:])
            self._probes.update(added)
        self._ids.update(dict.fromkeys(added))
        while len(self._ids) > MAX_STALE_IDS:
            self._remove(next(iter(self._ids)))

    def expect_open_transactions(self, transactions: TransactionSnapshot) -> None:
        """Remember the open transactions: they may have taken ids that are not known as missing."""
        has_open = transactions.oldest < transactions.next
        self._unknown_before = transactions.next if has_open else None

    def remove_found(self, ids: Iterable[int]) -> bool:
        """Remove ids that appeared; whether rows that were not read may have appeared too."""
        was_probe = [self._remove(each) for each in ids]
        return any(was_probe)

    def expire(self, transactions: TransactionSnapshot) -> bool:
        """Remove ids whose transactions are over: they will not appear.

        ``transactions`` has to be from *before* the ids were read. Returns whether there may be
        rows that were not read.
        """
        for each, before in list(self._ids.items()):
            if before is None:
                self._ids[each] = transactions.next
            elif before <= transactions.oldest:
                self._remove(each)
        if self._unknown_before is None or self._unknown_before > transactions.oldest:
            return False
        self._unknown_before = None
        return True

    def _remove(self, event_id: int) -> bool:
        """Remove an id; whether it stood for others."""
        self._ids.pop(event_id, None)
        was_probe = event_id in self._probes
        self._probes.discard(event_id)
        return was_probe


class IdGaps:
    """The missing ids below the highest id that was read. Pure: times are passed in."""

    def __init__(self, highest: int) -> None:
        self.highest = highest
        self._missing: dict[int, float] = {}
        """Each with the time when it becomes stale, in the order of that time."""
        self.stale = StaleIdGaps()

    def record_read(self, ids: Sequence[int], now: float) -> None:
        """Record ids that were read, in ascending order."""
        if ids and not self._missing and ids[-1] - self.highest == len(ids):
            self.highest = ids[-1]  # no gap: the usual case
            return
        until = now + STALE_AFTER
        for each in ids:
            if each > self.highest + 1:
                first = max(self.highest + 1, each - MAX_GAPS)
                self.stale.add(range(self.highest + 1, first))
                self._missing.update(dict.fromkeys(range(first, each), until))
            self._missing.pop(each, None)
            self.highest = max(self.highest, each)
        while len(self._missing) > MAX_GAPS:
            self._make_oldest_stale()

    def get_missing(self, now: float) -> list[int]:
        """Return the ids to read again."""
        while self._missing and next(iter(self._missing.values())) <= now:
            self._make_oldest_stale()
        return list(self._missing)

    def get_youngest_age(self, now: float) -> float:
        """Return the seconds since the last id was found missing; infinity if none is."""
        if not self._missing:
            return float("inf")
        return now - (next(reversed(self._missing.values())) - STALE_AFTER)

    def _make_oldest_stale(self) -> None:
        oldest = next(iter(self._missing))
        del self._missing[oldest]
        self.stale.add(range(oldest, oldest + 1))


# ── the finder ───────────────────────────────────────────────────────────────────────────────────


class RowFinder:
    """The manager's read positions in the table. Owned by the manager's thread.

    Times that are passed in are monotonic seconds.
    """

    def __init__(self, state: LeaderState) -> None:
        self._state = state
        self._store = state.store
        self._backlogs = state.backlogs
        settings = state.settings
        self._sweep_interval = min(SWEEP_SECONDS, settings.window / 3)
        self._full_sweep_interval = (
            FULL_SWEEP_WITH_RETENTION if settings.retention else FULL_SWEEP_SECONDS
        )
        self._slow_poll = get_queue_sql(state.store.dialect).idle_poll
        self._gaps = IdGaps(0)
        self._sweep_position: Position | None = None
        """How far the current sweep has come; ``None`` between sweeps."""
        self._requested: set[int] = set()
        self._next_sweep = self._next_full_sweep = float("-inf")
        self._next_poll = float("-inf")
        self._next_gaps = self._next_stale = float("inf")
        self._poll_pause = FAST_POLL
        self.busy_reads = 0
        """Reads of new rows in a row that found some."""

    @property
    def is_idle(self) -> bool:
        """Whether no new row has come for a while."""
        return self._poll_pause >= 20 * FAST_POLL

    def start(self) -> int:
        """Forget all positions and begin with the table as it is; returns its highest id."""
        # Before the sweep: rows inserted after this moment are read by their ids.
        last_id = self._store.read_last_id()
        self._gaps = IdGaps(last_id)
        transactions = self._store.read_transactions()
        if transactions is not None:
            self._gaps.stale.expect_open_transactions(transactions)
        self._next_full_sweep = self._next_sweep = float("-inf")
        self.poll_soon()
        return last_id

    def poll_soon(self) -> None:
        """Read new rows at the next step."""
        self._next_poll = float("-inf")

    def sweep_soon(self) -> None:
        """Sweep at the next step: rows that were passed over may be wanted now."""
        self._next_sweep = float("-inf")

    def request(self, ids: Iterable[int]) -> None:
        """Read these ids at the next step."""
        self._requested.update(ids)

    def get_next_time(self, room: int) -> float:
        """Return when to read again, in monotonic seconds."""
        if self._sweep_position is not None or self._requested:
            return float("-inf") if room > 0 else float("inf")
        return min(self._next_poll, self._next_sweep, self._next_gaps, self._next_stale)

    def read(self, room: int, now: float) -> list[Row]:
        """Return rows to be fired, of which some may be cached; at most about ``room``."""
        if self._requested and room > 0:
            rows = self._store.read_ids(self._state.token, list(self._requested))
            self._requested.clear()
            return rows
        if now >= self._next_sweep and self._sweep_position is None:
            self._start_sweep(now)
        if self._sweep_position is not None:
            return self._read_sweep_page(self._sweep_position, room) if room > 0 else []
        if room <= 0:
            # New rows are not read now: the sweep will reach them.
            self._sweep_position = (self._state.now() - SWEEP_LOOKBACK, -1)
            return []
        return self._read_new_rows(now) + self._read_gaps(now) + self._read_stale_gaps(now)

    def read_backlog(self, key_range: KeyRange, room: int) -> list[Row]:
        """Return rows of a key range that were left in the table."""
        limit = min(room, PAGE_ROWS)
        after = self._backlogs.get_position(key_range)
        rows = self._read_due(after, self._state.get_window_end(), limit, (key_range,))
        self._backlogs.advance(key_range, _get_page_end(rows, limit))
        return rows

    def read_key_backlogs(
        self, backlogs: Collection[KeyBacklog], limit: int
    ) -> tuple[list[Row], Position | None]:
        """Return due rows of keys that were left in the table, and the position of the last one.

        The position is ``None`` if all their due rows were read.
        """
        ranges = [
            part for backlog in backlogs for part in self._backlogs.exclude_from(backlog.key_range)
        ]
        after = min(backlog.after for backlog in backlogs)
        rows = self._read_due(after, self._state.now(), limit, ranges)
        return rows, _get_page_end(rows, limit)

    # ── the sweep ────────────────────────────────────────────────────────────────────────────────

    def _start_sweep(self, now: float) -> None:
        first = min(self._state.now() - SWEEP_LOOKBACK, self._backlogs.take_resume_time())
        self._sweep_position = (first, -1)
        if now >= self._next_full_sweep:
            self._sweep_position = FIRST_POSITION
            self._next_full_sweep = now + self._full_sweep_interval
        self._next_sweep = now + self._sweep_interval

    def _read_sweep_page(self, after: Position, room: int) -> list[Row]:
        limit = min(room, PAGE_ROWS)
        now, window_end = self._state.now(), self._state.get_window_end()
        self._backlogs.move_back_to(after)
        ranges = self._backlogs.ranges_without_backlog
        rows: list[Row] = []
        skippable: Sequence[KeyRange] = ()
        order = self._state.key_order
        if order is not None and after[0] < now:
            skippable = order.find_skippable_ranges(after, self._state.is_cached)
        if skippable:
            rows = self._read_due(after, now, limit, subtract_ranges(ranges, skippable))
            # Rows that are not due yet are read for all keys.
            after = _get_page_end(rows, limit) or (now, MAX_EVENT_ID)
        if len(rows) < limit:
            rows += self._read_due(after, window_end, limit - len(rows), ranges)
        # Only now: if one of the two reads fails, both are repeated.
        self._sweep_position = _get_page_end(rows, limit)
        return rows

    def _read_due(
        self, after: Position, until: int, limit: int, ranges: Sequence[KeyRange]
    ) -> list[Row]:
        if not ranges:
            return []
        return self._store.read_due(self._state.token, after, until, limit, ranges)

    # ── new rows and gaps ────────────────────────────────────────────────────────────────────────

    def _read_new_rows(self, now: float) -> list[Row]:
        if now < self._next_poll:
            return []
        rows = self._store.read_new(self._state.token, self._gaps.highest, PAGE_ROWS)
        self._gaps.record_read([row[0] for row in rows], now)
        if self._next_gaps == float("inf"):
            self._plan_gaps(now)
        # Fast while rows come, then slower and slower.
        if rows:
            self.busy_reads += 1
            self._poll_pause = BATCHING_POLL if len(rows) >= BATCHING_ROWS else FAST_POLL
        else:
            self.busy_reads = 0
            self._poll_pause = min(self._slow_poll, self._poll_pause * 1.5)
        self._next_poll = now if len(rows) == PAGE_ROWS else now + self._poll_pause
        return rows

    def _read_gaps(self, now: float) -> list[Row]:
        missing = self._gaps.get_missing(now) if now >= self._next_gaps else []
        rows = self._store.read_ids(self._state.token, missing) if missing else []
        self._gaps.record_read(sorted(row[0] for row in rows), now)
        self._plan_gaps(now)
        return rows

    def _plan_gaps(self, now: float) -> None:
        """Set when to read missing ids: the longer an id is missing, the later it may come."""
        shortest, longest = GAP_POLLS
        age = self._gaps.get_youngest_age(now)
        pause = min(longest, max(shortest, age / 4))
        self._next_gaps = float("inf") if age == float("inf") else now + pause

    def _read_stale_gaps(self, now: float) -> list[Row]:
        stale = self._gaps.stale
        if now < self._next_stale:
            if stale and self._next_stale == float("inf"):
                self._next_stale = now + STALE_POLL
            return []
        transactions = self._store.read_transactions()
        rows = self._store.read_ids(self._state.token, stale.ids) if stale.ids else []
        has_more = stale.remove_found(row[0] for row in rows)
        if has_more or (transactions is not None and stale.expire(transactions)):
            self._next_full_sweep = self._next_sweep = float("-inf")
        self._next_stale = now + STALE_POLL if stale else float("inf")
        return rows


def _get_page_end(rows: list[Row], limit: int) -> Position | None:
    """Return the position of the last row of a full page; ``None`` if there are no more rows."""
    return (rows[-1][1], rows[-1][0]) if len(rows) == limit else None


# ── the fetcher ──────────────────────────────────────────────────────────────────────────────────


class Fetcher:
    """Reads as many rows as the window can take. Owned by a leader's term."""

    def __init__(self, state: LeaderState) -> None:
        self._state = state
        self._backlogs = state.backlogs
        self._can_listen = get_queue_sql(state.store.dialect).has_wake_trigger
        self.finder = RowFinder(state)
        self._is_listening = False
        self._has_wanted_backlog = False
        """Whether events are left in the table that a receiver would take."""

    def read(self, now: float, slots: Sequence[ReceiverSlot]) -> None:
        """Read the rows that are wanted now."""
        if self._backlogs.set_receiver_ranges(slot.key_range for slot in slots):
            self.finder.sweep_soon()
        room = self._get_room() or self._make_room()
        wanted = self._find_wanted_backlogs(slots) if room else []
        if now >= self.finder.get_next_time(room):
            rows = self.finder.read(room, now)
            self._add_to_window(self._leave_backlogged(self._make_events(rows, now)))
        for key_range in wanted:
            rows = self.finder.read_backlog(key_range, room)
            self._add_to_window(self._make_events(rows, now))
        self._has_wanted_backlog = any(key_range in self._backlogs for key_range in wanted)
        if room and self._state.key_order is not None:
            self._read_key_backlogs(self._state.key_order, room, now)
        self._fit_window()

    def get_next_time(self) -> float:
        """Return when to read again, in monotonic seconds."""
        room = self._get_room()
        if self._has_wanted_backlog or (room and self._find_key_backlogs()):
            return float("-inf")
        return self.finder.get_next_time(room)

    def update_listening(self) -> None:
        """Let inserts wake the manager while the table is quiet; under load, polling is cheaper."""
        if not self._can_listen:
            return
        finder = self.finder
        wanted = finder.busy_reads < 4 if self._is_listening else finder.is_idle
        if wanted != self._is_listening:
            self._state.store.set_listening(self._state.token, on=wanted)
            self._is_listening = wanted

    # ── from rows to events ──────────────────────────────────────────────────────────────────────

    def _make_events(self, rows: Sequence[Row], now: float) -> list[TableEvent]:
        """Make events of the rows that are not in memory and lie within the window."""
        state = self._state
        if state.key_order is not None:
            rows = [row for row in rows if not state.is_cached(row[0])]
        else:
            in_flight, window, acks = state.in_flight.ids, state.window.ids, state.ack_buffer.ids
            rows = [
                row
                for row in rows
                if not (row[0] in in_flight or row[0] in window or row[0] in acks)
            ]
        window_end, fresh_until = state.get_window_end(), state.now() + FRESH_NANOSECONDS
        return [
            TableEvent(row, state.manager, now if row[1] <= fresh_until else float("-inf"))
            for row in rows
            if row[1] <= window_end
        ]

    def _leave_backlogged(self, events: list[TableEvent]) -> list[TableEvent]:
        """Remove events of key ranges with a backlog: they are read later."""
        if not self._backlogs:
            return events
        left = {event for event in events if self._state.find_range(event) in self._backlogs}
        self._state.leave_in_table(left)
        return [event for event in events if event not in left]

    def _add_to_window(self, events: Sequence[TableEvent]) -> None:
        state, order = self._state, self._state.key_order
        free = [event for event in events if event.after_group is None]
        if order is not None:
            now = state.now()
            free = [
                event for event in free if event.fire_at > now or not order.is_in_backlog(event)
            ]
        state.window.add(free, state.now())
        groups = {group for event in events if (group := event.after_group) is not None}
        if groups:
            # The groups that events wait for may be done already.
            self.finder.request(state.store.store_acks(state.token, (), groups).released)

    # ── keys with a backlog ──────────────────────────────────────────────────────────────────────

    def _find_key_backlogs(self) -> dict[Hashable, KeyBacklog]:
        order = self._state.key_order
        return {} if order is None else order.find_readable_backlogs()

    def _read_key_backlogs(self, order: KeyOrder, room: int, now: float) -> None:
        """Read events of keys that left some in the table because too many waited."""
        key_backlogs = self._find_key_backlogs()
        if not key_backlogs:
            return
        for key_backlog in key_backlogs.values():
            for key_range in self._backlogs.find_overlapping(key_backlog.key_range):
                if key_range in self._backlogs:
                    self._backlogs.leave(key_range, *key_backlog.first_position)
        limit = min(room, PAGE_ROWS, max(MIN_BACKLOG_ROWS, order.max_waiting - len(order)))
        rows, end = self.finder.read_key_backlogs(key_backlogs.values(), limit)
        order.advance(key_backlogs, end)
        ready = order.add_from_backlog(self._make_events(rows, now))
        self._state.window.add(ready, self._state.now())

    # ── room in memory ───────────────────────────────────────────────────────────────────────────

    def _get_room(self) -> int:
        """Return how many due events the window takes; 0 until it is half empty.

        Pages are large, so it is worth waiting for room. Only two pages of due events are read
        ahead: the rows of events that wait long in memory have to be checked again.
        """
        limit = self._max_due
        waiting = self._state.window.count_due(self._state.now())
        return limit - waiting if waiting <= limit // 2 else 0

    @property
    def _max_due(self) -> int:
        return min(self._max_waiting, 2 * PAGE_ROWS)

    @property
    def _max_waiting(self) -> int:
        """The most events in the window; events that wait behind a key take room too."""
        return self._state.settings.window_events - self._state.waiting_behind_key

    def _make_room(self) -> int:
        """Leave events of crowded key ranges in the table; returns the room after that."""
        ranges = self._backlogs.ranges
        if len(ranges) == 1:
            return 0
        share = max(1, self._max_due // (4 * len(ranges)))
        kept: Counter[KeyRange] = Counter()
        removed = []
        for event in self._state.window.list_due(self._state.now()):
            key_range = self._state.find_range(event)
            kept[key_range] += 1
            if kept[key_range] > share:
                removed.append(event)
        self._state.window.discard_due(removed)
        self._state.leave_in_table(removed)
        return self._get_room()

    def _find_wanted_backlogs(self, slots: Sequence[ReceiverSlot]) -> list[KeyRange]:
        """Return key ranges with a backlog, no event in memory, and a receiver with room."""
        if not self._backlogs:
            return []
        due = self._state.window.list_due(self._state.now())
        in_memory = {self._state.find_range(event) for event in due}
        free = [slot.key_range for slot in slots if slot.room]
        return [
            key_range
            for key_range in self._backlogs
            if key_range not in in_memory and any(each.overlaps(key_range) for each in free)
        ]

    def _fit_window(self) -> None:
        """Move the window's end nearer while the window is too full, and back when it is not."""
        state, limit = self._state, self._max_waiting
        if len(state.window) > limit:
            first_removed = state.window.trim(limit * 3 // 4)
            if first_removed is not None:
                state.window_end_limit = first_removed - 1
        elif state.window_end_limit < MAX_FIRE_TIME and len(state.window) <= limit // 2:
            state.window_end_limit = MAX_FIRE_TIME
            self.finder.sweep_soon()
