"""Backlogs: parts of the key space whose events are left in the table for now.

Events that no receiver can take must not fill the memory, or those of other receivers would not be
read. So they are forgotten, and it is noted from where on they have to be read again. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from turnlane.table.keyspace import EVERYTHING, SHIFT, SPACE, KeyRange
from turnlane.table.store import Position

NEVER: Final = 2**63 - 1
"""The last fire time there is."""


class Backlogs:
    """The key space, cut at the bounds of the receivers' key ranges, and what is left of it."""

    def __init__(self) -> None:
        self._ranges: frozenset[KeyRange] = frozenset({EVERYTHING})
        self.spans: Sequence[KeyRange] = (EVERYTHING,)
        """The parts: whoever takes an event of one may take all of them."""
        self._starts = [-SHIFT]
        self._left: dict[KeyRange, Position] = {}
        self._again = NEVER

    def cut(self, ranges: Iterable[KeyRange]) -> bool:
        """Take the receivers' key ranges; if they are others than before, nothing is left."""
        wanted = frozenset(ranges)
        if wanted == self._ranges:
            return False
        self._ranges = wanted
        bounds = sorted({0, SPACE, *(b for each in wanted for b in (each.start, each.end))})
        self.spans = tuple(KeyRange(start, end) for start, end in pairwise(bounds))
        self._starts = [span.stored[0] for span in self.spans]
        self._again = min([self._again, *(fire_at for fire_at, _ in self._left.values())])
        self._left.clear()
        return True

    def span(self, keyspace_id: int) -> KeyRange:
        """The part in which an id lies."""
        return self.spans[bisect_right(self._starts, keyspace_id) - 1]

    def __contains__(self, span: KeyRange) -> bool:
        return span in self._left

    def __len__(self) -> int:
        return len(self._left)

    def __iter__(self) -> Iterator[KeyRange]:
        return iter(self._left)

    @property
    def others(self) -> Sequence[KeyRange]:
        """The parts of which nothing is left."""
        if not self._left:
            return (EVERYTHING,)
        return [span for span in self.spans if span not in self._left]

    def leave(self, span: KeyRange, fire_at: int, event_id: int) -> None:
        """Leave an event of a part, and all later ones, in the table."""
        position = (fire_at, event_id - 1)
        self._left[span] = min(self._left.get(span, position), position)

    def overlapping(self, where: KeyRange) -> list[KeyRange]:
        """The parts that have something in common with a range."""
        return [span for span in self.spans if span.overlaps(where)]

    def outside(self, where: KeyRange) -> Sequence[KeyRange]:
        """A key's range, or everything, without the parts of which something is left."""
        if where.is_everything:
            return self.others
        return () if self.span(where.stored[0]) in self._left else (where,)

    def lower(self, position: Position) -> None:
        """Leave nothing out that a sweep would find from a position on."""
        for span, left in self._left.items():
            self._left[span] = min(left, position)

    def position(self, span: KeyRange) -> Position:
        """After which events of a part are left."""
        return self._left[span]

    def advance(self, span: KeyRange, position: Position | None) -> None:
        """Events were read up to a position, or all of them."""
        if position is None:
            del self._left[span]
        else:
            self._left[span] = position

    def take_first(self) -> int:
        """From which fire time on to look for what was left before a cut; it is told once."""
        first, self._again = self._again, NEVER
        return first
