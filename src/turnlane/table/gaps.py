"""Gaps: ids that were given out to transactions that have not committed yet, or never will.

The manager reads new rows by ascending ids. Transactions commit in another order than they took
their ids, so an id that is missing may still appear: it is asked for again for a while. What
appears later than that is found by the sweep over fire times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MOST: Final = 1_000
"""Ids to ask for again; when more are missing, the oldest are left to the sweep."""

PATIENCE: Final = 60.0
"""Seconds for which a missing id is asked for."""


class Gaps:
    """The missing ids below the highest one seen. Pure: times are passed in."""

    def __init__(self, highest: int) -> None:
        self.highest = highest
        self._missing: dict[int, float] = {}
        """With the time until which they are asked for, in order of that time."""

    def saw(self, ids: Sequence[int], now: float) -> None:
        """Take note of ids that were read, in ascending order."""
        if ids and not self._missing and ids[-1] - self.highest == len(ids):
            self.highest = ids[-1]  # all of them follow each other: the usual case
            return
        until = now + PATIENCE
        for each in ids:
            if each > self.highest + 1:
                first = max(self.highest + 1, each - MOST)
                self._missing.update(dict.fromkeys(range(first, each), until))
            self._missing.pop(each, None)
            self.highest = max(self.highest, each)
        self._limit()

    def missing(self, now: float) -> list[int]:
        """The ids to ask for again."""
        while self._missing and next(iter(self._missing.values())) <= now:
            del self._missing[next(iter(self._missing))]
        return list(self._missing)

    def youngest(self, now: float) -> float:
        """Seconds since the last id was found missing; infinite if none is."""
        if not self._missing:
            return float("inf")
        return now - (next(reversed(self._missing.values())) - PATIENCE)

    def _limit(self) -> None:
        while len(self._missing) > MOST:
            del self._missing[next(iter(self._missing))]
