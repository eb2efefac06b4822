"""Lapsed ids: missing for so long that they are asked for rarely. Pure.

Most never appear, because their transactions were rolled back; but one may belong to a transaction
that stays open for an hour.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

MOST: Final = 2_000
"""Ids to ask for; when there are more, the oldest are left to the full sweep."""

PROBES: Final = 32
"""Ids at either end of a long row of missing ones that are asked for instead of all."""


class Running(NamedTuple):
    """The numbers of a database's transactions at a moment."""

    oldest: int
    """All before it are over."""
    next: int
    """Of the one that begins next."""


class Lapsed:
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
        if len(ids) > 2 * PROBES:
            some = (*ids[:PROBES], *ids[-PROBES:])
            self._probes.update(some)
        self._ids.update(dict.fromkeys(some))
        while len(self._ids) > MOST:
            self._forget(next(iter(self._ids)))

    def began(self, running: Running) -> None:
        """Whoever is under way now may have taken ids that are not missed."""
        self._doubt = running.next if running.oldest < running.next else None

    def saw(self, ids: Iterable[int]) -> bool:
        """Some appeared; whether there may be more that were not asked for."""
        probes = [each for each in ids if self._forget(each)]
        return bool(probes)

    def over(self, running: Running) -> bool:
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
