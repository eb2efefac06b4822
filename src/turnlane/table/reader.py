"""The reader: finds the rows that belong into the window.

Three ways, because none is enough. *New rows* are read by ascending id: a short range at the end of
an index, whatever the table holds. *Gaps* in the ids are asked for again. The *sweep* goes through
fire times up to the window's end: it finds what comes into the window, what was committed late,
what somebody edited by hand, and after a downtime everything, page by page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from turnlane.table.gaps import Gaps
from turnlane.table.settings import TableSettings
from turnlane.table.sql.dialect import Row
from turnlane.table.store import Store

SWEEP_SECONDS: Final = 5.0
FULL_SWEEP_SECONDS: Final = 3600.0
RECENT: Final = 600 * 1_000_000_000
"""A sweep starts ten minutes back: it need not pass over all the acked rows of the past. Older
ones can be found by their ids, and by a full sweep at the start and every hour."""

PAGE: Final = 2_000
"""Rows to a page of a backlog, and to a look at new rows."""

FIRST: Final = (-(2**63), -1)
"""The position before all rows."""

FAST_POLL: Final = 0.005
"""Seconds between looks while events arrive."""

GATHERING_POLL: Final = 0.01
GATHERED: Final = 5
"""While a look finds so many, they are gathered for longer: half the statements, and most of the
time from due to received is the same."""

GAP_POLLS: Final = (0.02, 1.0)
"""The shortest and the longest time between looks for ids that are missing."""


class Reader:
    """Where the manager is in the table. Times are passed in: monotonic, and the database's."""

    def __init__(
        self,
        store: Store,
        settings: TableSettings,
        slow_poll: float,
        passed_over: Callable[[], int],
    ) -> None:
        self._store = store
        self._passed_over = passed_over
        """Says from which fire time on events were read and left there."""
        self._ahead = round(settings.window * 1e9)
        self._every = min(SWEEP_SECONDS, settings.window / 3)
        self._slow_poll = slow_poll
        self._gaps = Gaps(0)
        self._position: tuple[int, int] | None = None
        """Of a sweep that is under way."""
        self._next_sweep = self._next_full = float("-inf")
        self._next_poll = float("-inf")
        self._next_gaps = float("inf")
        self._pause = FAST_POLL
        self.busy = 0
        """Looks in a row that found new rows."""

    def start(self) -> None:
        """Begin anew, from what the table holds now."""
        # Before the sweep: what is inserted from here on is read by its id.
        self._gaps = Gaps(self._store.last_id())
        self._next_full = self._next_sweep = float("-inf")
        self.poke()

    def poke(self) -> None:
        """There may be new rows."""
        self._next_poll = float("-inf")

    def sweep_soon(self) -> None:
        """Rows that were passed over may be wanted now."""
        self._next_sweep = float("-inf")

    def read(self, token: int, room: int, now: float, database_now: int) -> list[Row]:
        """Rows to be fired; some of them may be known. ``room`` is what the window can take."""
        if now >= self._next_sweep and self._position is None:
            self._start_sweep(now, database_now)
        if self._position is not None:
            return self._page(token, database_now, min(room, PAGE)) if room > 0 else []
        if room <= 0:
            # New rows are not read: the sweep will come to them.
            self._position = (database_now - RECENT, -1)
            return []
        return self._new_rows(token, now) + self._gap_rows(token, now)

    def next_time(self, room: int) -> float:
        """When to read again; monotonic."""
        if self._position is not None:
            return float("-inf") if room > 0 else float("inf")
        return min(self._next_poll, self._next_sweep, self._next_gaps)

    def _start_sweep(self, now: float, database_now: int) -> None:
        self._position = (min(database_now - RECENT, self._passed_over()), -1)
        if now >= self._next_full:
            self._position = FIRST
            self._next_full = now + FULL_SWEEP_SECONDS
        self._next_sweep = now + self._every

    def _page(self, token: int, database_now: int, limit: int) -> list[Row]:
        assert self._position is not None
        until = database_now + self._ahead
        rows = self._store.read_due(token, self._position, until, limit)
        self._position = (rows[-1][1], rows[-1][0]) if len(rows) == limit else None
        return rows

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
