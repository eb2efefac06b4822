"""The reader: finds the rows that belong into the window.

Three ways, because none is enough. *New rows* are read by ascending id: a short range at the end of
an index, whatever the table holds. *Gaps* in the ids are asked for again, often at first and then
every few seconds, as long as their transactions may be open. The *sweep* goes through
fire times up to the window's end: it finds what comes into the window, what was committed late,
what somebody edited by hand, and after a downtime everything, page by page.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple

from turnlane.table.backlogs import Backlogs
from turnlane.table.gaps import Gaps
from turnlane.table.keyspace import KeyRange, without
from turnlane.table.ordering import Left
from turnlane.table.settings import TableSettings
from turnlane.table.sql.dialect import Row
from turnlane.table.store import Position, Store

SWEEP_SECONDS: Final = 5.0
FULL_SWEEP_SECONDS: Final = 60.0
KEPT_SWEEP_SECONDS: Final = 3600.0
RECENT: Final = 600 * 1_000_000_000
"""A sweep starts ten minutes back: it need not pass over all the acked rows of the past. Older
ones are found by their ids, and by a full sweep: at the start, and every minute, or every hour if
acked rows are kept."""

PAGE: Final = 2_000
"""Rows to a page of a backlog, and to a look at new rows."""

FIRST: Final = (-(2**63), -1)
"""The position before all rows."""

LAST_ID: Final = 2**63 - 1

FAST_POLL: Final = 0.005
"""Seconds between looks while events arrive."""

GATHERING_POLL: Final = 0.01
GATHERED: Final = 5
"""While a look finds so many, they are gathered for longer: half the statements, and most of the
time from due to received is the same."""

GAP_POLLS: Final = (0.02, 1.0)
"""The shortest and the longest time between looks for ids that are missing."""

LAPSED_POLL: Final = 3.0
"""Seconds between looks for those that are missing for long."""


class Times(NamedTuple):
    """On the database's clock."""

    now: int
    horizon: int
    """The end of the window."""


class Reader:
    """Where the manager is in the table. Times are passed in: monotonic, and the database's."""

    def __init__(
        self,
        store: Store,
        settings: TableSettings,
        slow_poll: float,
        backlogs: Backlogs,
        passed: Callable[[Position], Sequence[KeyRange]] = lambda _: (),
    ) -> None:
        self._store = store
        self._passed = passed
        """Where nothing has to be read that is due after a position."""
        self._backlogs = backlogs
        self._every = min(SWEEP_SECONDS, settings.window / 3)
        self._every_full = KEPT_SWEEP_SECONDS if settings.retention else FULL_SWEEP_SECONDS
        self._slow_poll = slow_poll
        self._gaps = Gaps(0)
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
        self._gaps = Gaps(last_id)
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

    def read(self, token: int, room: int, now: float, times: Times) -> list[Row]:
        """Rows to be fired; some of them may be known. ``room`` is what the window can take."""
        if self._asked and room > 0:
            rows = self._store.read_ids(token, list(self._asked))
            self._asked.clear()
            return rows
        if now >= self._next_sweep and self._position is None:
            self._start_sweep(now, times.now)
        if self._position is not None:
            return self._page(token, times, min(room, PAGE)) if room > 0 else []
        if room <= 0:
            # New rows are not read: the sweep will come to them.
            self._position = (times.now - RECENT, -1)
            return []
        rows = self._new_rows(token, now) + self._gap_rows(token, now)
        return rows + self._lapsed_rows(token, now)

    def read_left(self, token: int, span: KeyRange, room: int, times: Times) -> list[Row]:
        """Rows of a part of the key space that were left in the table."""
        limit = min(room, PAGE)
        after = self._backlogs.position(span)
        rows = self._store.read_due(token, after, times.horizon, limit, (span,))
        self._backlogs.advance(span, _end(rows, limit))
        return rows

    def read_lines(
        self, token: int, lines: Collection[Left], limit: int, until: int
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
        self._position = (min(database_now - RECENT, self._backlogs.take_first()), -1)
        if now >= self._next_full:
            self._position = FIRST
            self._next_full = now + self._every_full
        self._next_sweep = now + self._every

    def _page(self, token: int, times: Times, limit: int) -> list[Row]:
        assert self._position is not None
        self._backlogs.lower(self._position)
        ranges, after, rows = self._backlogs.others, self._position, list[Row]()
        passed = self._passed(after) if after[0] < times.now else ()
        if passed:
            rows = self._read_due(token, after, times.now, limit, without(ranges, passed))
            # What is not due yet is there for all keys.
            after = _end(rows, limit) or (times.now, LAST_ID)
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
        rows = self._store.read_new(token, self._gaps.highest, PAGE)
        self._gaps.saw([row[0] for row in rows], now)
        if self._next_gaps == float("inf"):
            self._plan_gaps(now)
        self.busy = self.busy + 1 if rows else 0
        # Quickly while something comes, then more and more slowly.
        self._pause = self._next_pause(len(rows))
        self._next_poll = now if len(rows) == PAGE else now + self._pause
        return rows

    def _next_pause(self, found: int) -> float:
        if found:
            return GATHERING_POLL if found >= GATHERED else FAST_POLL
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
                self._next_lapsed = now + LAPSED_POLL
            return []
        running = self._store.running()
        rows = self._store.read_ids(token, lapsed.ids) if lapsed.ids else []
        more = lapsed.saw(row[0] for row in rows)
        if more or (running is not None and lapsed.over(running)):
            self._next_full = self._next_sweep = float("-inf")
        self._next_lapsed = now + LAPSED_POLL if lapsed else float("inf")
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
