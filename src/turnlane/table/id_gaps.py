"""Lapsed ids: missing for so long that they are asked for rarely. Pure.

Most never appear, because their transactions were rolled back; but one may belong to a transaction
that stays open for an hour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

MAX_STALE_IDS: Final = 2_000
"""Ids to ask for; when there are more, the oldest are left to the full sweep."""

PROBES_PER_END: Final = 32
"""Ids at either end of a long row of missing ones that are asked for instead of all."""


class TransactionSnapshot(NamedTuple):
    """The numbers of a database's transactions at a moment."""

    oldest: int
    """All before it are over."""
    next: int
    """Of the one that begins next."""


class StaleIdGaps:
    """Ids that may still appear, and what is known of their transactions."""

    def __init__(self) -> None:
        self._ids: dict[int, int | None] = {}
        """Each with the transaction before which its own began, once that is known."""
        self._probes: set[int] = set()
        """Those that stand for others."""
        self._doubt: int | None = None
        """Transactions before this one may have rows that nobody misses."""

    def __bool__(self) -> bool:
        return bool(self._ids) or self._doubt is not None

    @property
    def ids(self) -> list[int]:
        """The ids to ask for."""
        return list(self._ids)

    def add(self, ids: range) -> None:
        """Ids lapsed that follow each other."""
        some: Iterable[int] = ids
        if len(ids) > 2 * PROBES_PER_END:
            some = (*ids[:PROBES_PER_END], *ids[-PROBES_PER_END:])
            self._probes.update(some)
        self._ids.update(dict.fromkeys(some))
        while len(self._ids) > MAX_STALE_IDS:
            self._forget(next(iter(self._ids)))

    def began(self, running: TransactionSnapshot) -> None:
        """Whoever is under way now may have taken ids that are not missed."""
        self._doubt = running.next if running.oldest < running.next else None

    def saw(self, ids: Iterable[int]) -> bool:
        """Some appeared; whether there may be more that were not asked for."""
        probes = [each for each in ids if self._forget(each)]
        return bool(probes)

    def over(self, running: TransactionSnapshot) -> bool:
        """Forget ids that are missing though their transactions are over.

        To be called with what was true *before* the ids were asked for. Returns whether there may
        be rows that were not asked for.
        """
        for each, before in list(self._ids.items()):
            if before is None:
                self._ids[each] = running.next
            elif before <= running.oldest:
                self._forget(each)
        if self._doubt is None or self._doubt > running.oldest:
            return False
        self._doubt = None
        return True

    def _forget(self, event_id: int) -> bool:
        """Whether the id stood for others."""
        self._ids.pop(event_id, None)
        probe = event_id in self._probes
        self._probes.discard(event_id)
        return probe


# ── gaps ──
# Gaps: ids that were given out to transactions that have not committed yet, or never will.
#
# The manager reads new rows by ascending ids. Transactions commit in another order than they
# took
# their ids, so an id that is missing may still appear: it is asked for again, and less often
# when
# it has lapsed.

MAX_GAPS: Final = 1_000
"""Ids to ask for often; when more are missing, the oldest lapse."""

STALE_AFTER: Final = 60.0
"""Seconds for which a missing id is asked for often."""


class IdGaps:
    """The missing ids below the highest one seen. Pure: times are passed in."""

    def __init__(self, highest: int) -> None:
        self.highest = highest
        self._missing: dict[int, float] = {}
        """With the time until which they are asked for, in order of that time."""
        self.lapsed = StaleIdGaps()

    def saw(self, ids: Sequence[int], now: float) -> None:
        """Take note of ids that were read, in ascending order."""
        if ids and not self._missing and ids[-1] - self.highest == len(ids):
            self.highest = ids[-1]  # all of them follow each other: the usual case
            return
        until = now + STALE_AFTER
        for each in ids:
            if each > self.highest + 1:
                first = max(self.highest + 1, each - MAX_GAPS)
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
        return now - (next(reversed(self._missing.values())) - STALE_AFTER)

    def _limit(self) -> None:
        while len(self._missing) > MAX_GAPS:
            self._lapse()

    def _lapse(self) -> None:
        oldest = next(iter(self._missing))
        del self._missing[oldest]
        self.lapsed.add(range(oldest, oldest + 1))
