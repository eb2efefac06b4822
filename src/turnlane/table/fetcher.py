"""The reader: finds the rows that belong into the window.

Three ways, because none is enough. *New rows* are read by ascending id: a short range at the end of
an index, whatever the table holds. *Gaps* in the ids are asked for again, often at first and then
every few seconds, as long as their transactions may be open. The *sweep* goes through
fire times up to the window's end: it finds what comes into the window, what was committed late,
what somebody edited by hand, and after a downtime everything, page by page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Final, NamedTuple

from turnlane.table.definition import TableSettings
from turnlane.table.event import TableEvent
from turnlane.table.id_gaps import IdGaps
from turnlane.table.leader_state import LeaderState, ReceiverSlot2
from turnlane.table.ordering import KeyBacklog, KeyOrder
from turnlane.table.shards import KeyRange, subtract_ranges
from turnlane.table.sql.dialect import Row
from turnlane.table.store import Position, TableStore
from turnlane.table.window import MAX_FIRE_TIME, RangeBacklogs

SWEEP_SECONDS: Final = 5.0
FULL_SWEEP_SECONDS: Final = 60.0
FULL_SWEEP_WITH_RETENTION: Final = 3600.0
SWEEP_LOOKBACK: Final = 600 * 1_000_000_000
"""A sweep starts ten minutes back: it need not pass over all the acked rows of the past. Older
ones are found by their ids, and by a full sweep: at the start, and every minute, or every hour if
acked rows are kept."""

PAGE_ROWS: Final = 2_000
"""Rows to a page of a backlog, and to a look at new rows."""

FIRST_POSITION: Final = (-(2**63), -1)
"""The position before all rows."""

MAX_EVENT_ID: Final = 2**63 - 1

FAST_POLL: Final = 0.005
"""Seconds between looks while events arrive."""

BATCHING_POLL: Final = 0.01
BATCHING_ROWS: Final = 5
"""While a look finds so many, they are gathered for longer: half the statements, and most of the
time from due to received is the same."""

GAP_POLLS: Final = (0.02, 1.0)
"""The shortest and the longest time between looks for ids that are missing."""

STALE_POLL: Final = 3.0
"""Seconds between looks for those that are missing for long."""


class ClockTimes(NamedTuple):
    """On the database's clock."""

    now: int
    horizon: int
    """The end of the window."""


class RowFinder:
    """Where the manager is in the table. Times are passed in: monotonic, and the database's."""

    def __init__(
        self,
        store: TableStore,
        settings: TableSettings,
        slow_poll: float,
        backlogs: RangeBacklogs,
        passed: Callable[[Position], Sequence[KeyRange]] = lambda _: (),
    ) -> None:
        self._store = store
        self._passed = passed
        """Where nothing has to be read that is due after a position."""
        self._backlogs = backlogs
        self._every = min(SWEEP_SECONDS, settings.window / 3)
        self._every_full = FULL_SWEEP_WITH_RETENTION if settings.retention else FULL_SWEEP_SECONDS
        self._slow_poll = slow_poll
        self._gaps = IdGaps(0)
        self._position: Position | None = None
        """Of a sweep that is under way."""
        self._asked: set[int] = set()
        self._next_sweep = self._next_full = float("-inf")
        self._next_poll = float("-inf")
        self._next_gaps = self._next_lapsed = float("inf")
        self._pause = FAST_POLL
        self.busy = 0
        """Looks in a row that found new rows."""

    def start(self) -> int:
        """Begin anew, from what the table holds now; returns the highest id in it."""
        # Before the sweep: what is inserted from here on is read by its id.
        last_id = self._store.last_id()
        self._gaps = IdGaps(last_id)
        running = self._store.running()
        if running is not None:
            self._gaps.lapsed.began(running)
        self._next_full = self._next_sweep = float("-inf")
        self.poke()
        return last_id

    def poke(self) -> None:
        """There may be new rows."""
        self._next_poll = float("-inf")

    def sweep_soon(self) -> None:
        """Rows that were passed over may be wanted now."""
        self._next_sweep = float("-inf")

    def ask(self, ids: Iterable[int]) -> None:
        """Events of these ids are to be fired now."""
        self._asked.update(ids)

    def read(self, token: int, room: int, now: float, times: ClockTimes) -> list[Row]:
        """Rows to be fired; some of them may be known. ``room`` is what the window can take."""
        if self._asked and room > 0:
            rows = self._store.read_ids(token, list(self._asked))
            self._asked.clear()
            return rows
        if now >= self._next_sweep and self._position is None:
            self._start_sweep(now, times.now)
        if self._position is not None:
            return self._page(token, times, min(room, PAGE_ROWS)) if room > 0 else []
        if room <= 0:
            # New rows are not read: the sweep will come to them.
            self._position = (times.now - SWEEP_LOOKBACK, -1)
            return []
        rows = self._new_rows(token, now) + self._gap_rows(token, now)
        return rows + self._lapsed_rows(token, now)

    def read_left(self, token: int, span: KeyRange, room: int, times: ClockTimes) -> list[Row]:
        """Rows of a part of the key space that were left in the table."""
        limit = min(room, PAGE_ROWS)
        after = self._backlogs.position(span)
        rows = self._store.read_due(token, after, times.horizon, limit, (span,))
        self._backlogs.advance(span, _end(rows, limit))
        return rows

    def read_lines(
        self, token: int, lines: Collection[KeyBacklog], limit: int, until: int
    ) -> tuple[list[Row], Position | None]:
        """Rows of keys that were left in the table; up to which position, if there may be more."""
        ranges = [part for left in lines for part in self._backlogs.outside(left.where)]
        after = min(left.after for left in lines)
        rows = self._read_due(token, after, until, limit, ranges)
        return rows, _end(rows, limit)

    def next_time(self, room: int) -> float:
        """When to read again; monotonic."""
        if self._position is not None or self._asked:
            return float("-inf") if room > 0 else float("inf")
        return min(self._next_poll, self._next_sweep, self._next_gaps, self._next_lapsed)

    def _start_sweep(self, now: float, database_now: int) -> None:
        self._position = (min(database_now - SWEEP_LOOKBACK, self._backlogs.take_first()), -1)
        if now >= self._next_full:
            self._position = FIRST_POSITION
            self._next_full = now + self._every_full
        self._next_sweep = now + self._every

    def _page(self, token: int, times: ClockTimes, limit: int) -> list[Row]:
        assert self._position is not None
        self._backlogs.lower(self._position)
        ranges, after, rows = self._backlogs.others, self._position, list[Row]()
        passed = self._passed(after) if after[0] < times.now else ()
        if passed:
            rows = self._read_due(token, after, times.now, limit, subtract_ranges(ranges, passed))
            # What is not due yet is there for all keys.
            after = _end(rows, limit) or (times.now, MAX_EVENT_ID)
        if len(rows) < limit:
            rows += self._read_due(token, after, times.horizon, limit - len(rows), ranges)
        # Only now: if one of the two fails, both are read again.
        self._position = _end(rows, limit)
        return rows

    def _read_due(
        self, token: int, after: Position, until: int, limit: int, ranges: Sequence[KeyRange]
    ) -> list[Row]:
        return self._store.read_due(token, after, until, limit, ranges) if ranges else []

    def _new_rows(self, token: int, now: float) -> list[Row]:
        if now < self._next_poll:
            return []
        rows = self._store.read_new(token, self._gaps.highest, PAGE_ROWS)
        self._gaps.saw([row[0] for row in rows], now)
        if self._next_gaps == float("inf"):
            self._plan_gaps(now)
        self.busy = self.busy + 1 if rows else 0
        # Quickly while something comes, then more and more slowly.
        self._pause = self._next_pause(len(rows))
        self._next_poll = now if len(rows) == PAGE_ROWS else now + self._pause
        return rows

    def _next_pause(self, found: int) -> float:
        if found:
            return BATCHING_POLL if found >= BATCHING_ROWS else FAST_POLL
        return min(self._slow_poll, self._pause * 1.5)

    def _gap_rows(self, token: int, now: float) -> list[Row]:
        missing = self._gaps.missing(now) if now >= self._next_gaps else []
        rows = self._store.read_ids(token, missing) if missing else []
        self._gaps.saw(sorted(row[0] for row in rows), now)
        self._plan_gaps(now)
        return rows

    def _lapsed_rows(self, token: int, now: float) -> list[Row]:
        lapsed = self._gaps.lapsed
        if now < self._next_lapsed:
            if lapsed and self._next_lapsed == float("inf"):
                self._next_lapsed = now + STALE_POLL
            return []
        running = self._store.running()
        rows = self._store.read_ids(token, lapsed.ids) if lapsed.ids else []
        more = lapsed.saw(row[0] for row in rows)
        if more or (running is not None and lapsed.over(running)):
            self._next_full = self._next_sweep = float("-inf")
        self._next_lapsed = now + STALE_POLL if lapsed else float("inf")
        return rows

    def _plan_gaps(self, now: float) -> None:
        """The longer an id is missing, the less likely it is to come soon."""
        shortest, longest = GAP_POLLS
        youngest = self._gaps.youngest(now)
        pause = min(longest, max(shortest, youngest / 4))
        self._next_gaps = float("inf") if youngest == float("inf") else now + pause

    @property
    def idle(self) -> bool:
        """Whether nothing has come for a while."""
        return self._pause >= 20 * FAST_POLL


def _end(rows: list[Row], limit: int) -> Position | None:
    """The position of the last row of a page, if there may be more."""
    return (rows[-1][1], rows[-1][0]) if len(rows) == limit else None


# ── intake ──
# The intake: brings rows of the table into the window.

FRESH_NANOSECONDS = 20_000_000
"""Nanoseconds. An event that is due later than this when it is read waits for its time, and is
asked about again before it fires: somebody may cancel it meanwhile. (The database's clock is known
only so well: what is due now may look as if it were not yet.)"""

MIN_BACKLOG_ROWS = 500
"""Rows that are read for keys which wait for them, even if others have to give way."""


class Fetcher:
    """Reads as much as the window can take. Called by a reign."""

    def __init__(self, realm: LeaderState) -> None:
        self._realm = realm
        self._backlogs = realm.stock.backlogs
        dialect = realm.store.dialect
        self.reader = RowFinder(
            realm.store, realm.settings, dialect.idle_poll, self._backlogs, realm.stock.passed
        )
        self._listening = False
        self._more = False
        """Whether events are left in the table that a receiver would take."""

    def read(self, now: float, places: Sequence[ReceiverSlot2]) -> None:
        """Read what is due to be read."""
        realm = self._realm
        if self._backlogs.cut(place.key_range for place in places):
            self.reader.sweep_soon()
        room = self._room() or self._make_room()
        wanted = self._wanted(places) if room else []
        if now >= self.reader.next_time(room):
            rows = self.reader.read(realm.token, room, now, self._times())
            self._take_in(self._others(self._fresh(rows, now)))
        for span in wanted:
            rows = self.reader.read_left(realm.token, span, room, self._times())
            self._take_in(self._fresh(rows, now))
        self._more = any(span in self._backlogs for span in wanted)
        if room and realm.stock.order is not None:
            self._read_lines(realm.stock.order, room, now)
        self._fit()

    def next_time(self) -> float:
        """When to read again; monotonic."""
        room = self._room()
        if self._more or (room and self._lines()):
            return float("-inf")
        return self.reader.next_time(room)

    def listen(self) -> None:
        """Be woken by inserts while it is quiet; under load, looking is cheaper for everybody."""
        store = self._realm.store
        if not store.dialect.notifies:
            return
        wanted = self.reader.idle if not self._listening else self.reader.busy < 4
        if wanted != self._listening:
            store.listen(self._realm.token, on=wanted)
            self._listening = wanted

    def _times(self) -> ClockTimes:
        return ClockTimes(self._realm.now(), self._realm.horizon())

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────

    def _fresh(self, rows: Sequence[Row], now: float) -> list[TableEvent]:
        """Those of the rows that are not in memory, and not too far off."""
        realm = self._realm
        horizon, soon = realm.horizon(), realm.now() + FRESH_NANOSECONDS
        return [
            TableEvent(row, realm.court, now if row[1] <= soon else float("-inf"))
            for row in realm.stock.unknown(rows)
            if row[1] <= horizon
        ]

    def _others(self, events: list[TableEvent]) -> list[TableEvent]:
        """All but those of backlogs, which are read again in their turn."""
        if not self._backlogs:
            return events
        left = {event for event in events if self._realm.stock.span(event) in self._backlogs}
        self._realm.stock.leave(left)
        return [event for event in events if event not in left]

    def _lines(self) -> dict[Hashable, KeyBacklog]:
        """Keys of which events should be read now."""
        order = self._realm.stock.order
        return {} if order is None else order.wanted()

    def _read_lines(self, order: KeyOrder, room: int, now: float) -> None:
        """Read on for keys of which events were left in the table because too many waited."""
        lines = self._lines()
        if not lines:
            return
        realm = self._realm
        for left in lines.values():
            for span in self._backlogs.overlapping(left.where):
                if span in self._backlogs:
                    self._backlogs.leave(span, *left.first)
        limit = min(room, PAGE_ROWS, max(MIN_BACKLOG_ROWS, order.most - len(order)))
        rows, end = self.reader.read_lines(realm.token, lines.values(), limit, realm.now())
        order.advance(lines, end)
        realm.stock.window.add(order.line_up(self._fresh(rows, now)), realm.now())

    def _take_in(self, events: Sequence[TableEvent]) -> None:
        realm = self._realm
        free = [event for event in events if event.after_group is None]
        realm.stock.window.add(self._wanted_now(free), realm.now())
        waiting = {group for event in events if (group := event.after_group) is not None}
        if waiting:
            # Their groups may be done already.
            self.reader.ask(realm.store.ack(realm.token, (), waiting).released)

    def _wanted_now(self, events: list[TableEvent]) -> list[TableEvent]:
        """All but those whose keys are busy, and have left enough of theirs in the table."""
        order = self._realm.stock.order
        if order is None:
            return events
        now = self._realm.now()
        return [event for event in events if event.fire_at > now or not order.is_left(event)]

    # ── room ─────────────────────────────────────────────────────────────────────────────────────

    def _room(self) -> int:
        """How many events that are due the window takes; none until it is half empty.

        (Pages are large.) Of a backlog only two pages are read ahead: what waits in memory gets
        stale.
        """
        realm = self._realm
        limit = self._most_due
        waiting = realm.stock.window.count_due(realm.now())
        return limit - waiting if waiting <= limit // 2 else 0

    @property
    def _most_due(self) -> int:
        return min(self._limit, 2 * PAGE_ROWS)

    @property
    def _limit(self) -> int:
        """How many events may wait in the window: those behind others of their keys count too."""
        return self._realm.settings.window_events - self._realm.stock.parked

    def _make_room(self) -> int:
        """Leave events of crowded parts of the key space in the table; how much room that makes.

        If all parts are alike, nobody waits for room but those who are crowded.
        """
        stock = self._realm.stock
        if len(self._backlogs.spans) == 1:
            return 0
        share = max(1, self._most_due // (4 * len(self._backlogs.spans)))
        kept: Counter[KeyRange] = Counter()
        gone = []
        for event in stock.window.due(self._realm.now()):
            span = stock.span(event)
            kept[span] += 1
            if kept[span] > share:
                gone.append(event)
        stock.window.forget(gone)
        stock.leave(gone)
        return self._room()

    def _wanted(self, places: Sequence[ReceiverSlot2]) -> list[KeyRange]:
        """Backlogs of which a receiver could take events, and none wait in memory."""
        if not self._backlogs:
            return []
        stock = self._realm.stock
        there = {stock.span(event) for event in stock.window.due(self._realm.now())}
        free = [place.key_range for place in places if place.room]
        return [
            span
            for span in self._backlogs
            if span not in there and any(each.overlaps(span) for each in free)
        ]

    def _fit(self) -> None:
        """Have the window reach no further than it has room, and again further when it has."""
        stock, limit = self._realm.stock, self._limit
        if len(stock.window) > limit:
            first = stock.window.trim(limit * 3 // 4)
            if first is not None:
                stock.reach = first - 1
        elif stock.reach < MAX_FIRE_TIME and len(stock.window) <= limit // 2:
            stock.reach = MAX_FIRE_TIME
            self.reader.sweep_soon()
