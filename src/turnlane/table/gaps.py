"""Gaps: ids that were given out to transactions that have not committed yet, or never will.

The manager reads new rows by ascending ids. Transactions commit in another order than they took
their ids, so an id that is missing may still appear: it is asked for again, and less often when
it has lapsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from turnlane.table.lapsed import Lapsed

MOST: Final = 1_000
"""Ids to ask for often; when more are missing, the oldest lapse."""

PATIENCE: Final = 60.0
"""Seconds for which a missing id is asked for often."""


class Gaps:
    """The missing ids below the highest one seen. Pure: times are passed in."""

    def __init__(self, highest: int) -> None:
        self.highest = highest
        self._missing: dict[int, float] = {}
        """With the time until which they are asked for, in order of that time."""
        self.lapsed = Lapsed()

    def saw(self, ids: Sequence[int], now: float) -> None:
        """Take note of ids that were read, in ascending order."""
        if ids and not self._missing and ids[-1] - self.highest == len(ids):
            self.highest = ids[-1]  # all of them follow each other: the usual case
            return
        until = now + PATIENCE
        for each in ids:
            if each > self.highest + 1:
                first = max(self.highest + 1, each - MOST)
                self.lapsed.add(range(self.highest + 1, first))
                self._missing.update(dict.fromkeys(range(first, each), until))
            self._missing.pop(each, None)
            self.highest = max(self.highest, each)
        self._limit()

    def missing(self, now: float) -> list[int]:
        """The ids to ask for again."""
        while self._missing and next(iter(self._missing.values())) <= now:
            self._lapse()
        return list(self._missing)

    def youngest(self, now: float) -> float:
        """Seconds since the last id was found missing; infinite if none is."""
        if not self._missing:
            return float("inf")
        return now - (next(reversed(self._missing.values())) - PATIENCE)

    def _limit(self) -> None:
        while len(self._missing) > MOST:
            self._lapse()

    def _lapse(self) -> None:
        oldest = next(iter(self._missing))
        del self._missing[oldest]
        self.lapsed.add(range(oldest, oldest + 1))
