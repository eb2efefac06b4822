"""The blocks of a queue that are in memory and not yet handed out, in offset order."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator

from turnlane.events import Block
from turnlane.queues.log.position import Stamp
from turnlane.queues.open_block import OpenBlock
from turnlane.queues.portion import Portion

SEAL_BYTES = 256 * 1024
"""An open block is sealed at this size at the latest: a few thousand log lines."""


class Tail:
    """Sealed portions, then the open block that single events are appended to.

    Not thread-safe: its queue's lock guards it. ``on_seal`` hears of every new portion.
    """

    __slots__ = ("_on_seal", "_sealed", "_sealed_singles", "bytes", "open")

    def __init__(self, first: int, on_seal: Callable[[Portion], None]) -> None:
        self.open = OpenBlock(first)
        self.bytes = 0
        """What the sealed portions count for."""
        self._sealed: deque[Portion] = deque()
        self._sealed_singles = 0
        self._on_seal = on_seal

    @property
    def first(self) -> int:
        """The oldest offset in memory; the queue's end if there is none."""
        return self._sealed[0].first if self._sealed else self.open.first

    @property
    def singles(self) -> int:
        """How many events came one by one, ever."""
        return self._sealed_singles + len(self.open)

    @property
    def blocks(self) -> int:
        """How many blocks are held."""
        return len(self._sealed) + bool(self.open.values)

    def append(self, portion: Portion) -> None:
        """Add a block behind everything else."""
        self.seal()
        self.open.first = portion.end
        self._add(portion)

    def seal(self) -> None:
        """Turn the open block, if it has events, into a portion."""
        block = self.open
        if block.values:
            portion = Portion(block.first, block.end, block.size, [block.seal()])
            self.open = OpenBlock(block.end)
            self._sealed_singles += len(portion)
            self._add(portion)

    def _add(self, portion: Portion) -> None:
        self._sealed.append(portion)
        self.bytes += portion.size
        self._on_seal(portion)

    def take(self, first: int, end: int) -> Portion:
        """Cut out ``first`` to ``end - 1``; ``first`` must be in memory."""
        self.forget_below(first)
        pieces: list[Block] = []
        stamps: list[Stamp] = []
        size = 0
        at = first
        while at < end:
            if not self._sealed:
                self.seal()
            portion = self._sealed[0]
            if portion.end > end:
                portion = portion.head(end - portion.first)
                self.bytes -= portion.size
            else:
                self.drop_oldest()
            pieces.extend(portion.pieces or ())
            stamps.extend(portion.stamps)
            size += portion.size
            at = portion.end
        return Portion(first, end, size, pieces, stamps=stamps)

    def look(self, first: int, end: int) -> list[Block]:
        """The blocks of ``first`` to ``end - 1``, left in place."""
        if end > self.open.first:
            self.seal()
        found: list[Block] = []
        for portion in self._sealed:
            start, stop = max(first, portion.first), min(end, portion.end)
            at = portion.first
            for block in portion.pieces or ():
                lower, upper = max(start, at), min(stop, at + block.num_rows)
                if lower < upper:
                    found.append(block.slice(lower - at, upper - lower))
                at += block.num_rows
        return found

    def uncharge(self, first: int, end: int) -> tuple[int, int]:
        """Have ``first`` to ``end - 1``, which are settled, count no more; returns what they did.

        They stay where they are, so that the tail has no gaps.
        """
        if end > self.open.first:
            self.seal()
        sealed = self._sealed
        events = size = 0
        at = bisect_right(sealed, first, key=lambda portion: portion.end)
        while at < len(sealed) and sealed[at].first < end:
            portion = sealed[at]
            if portion.first < first:
                sealed.insert(at, portion.head(first - portion.first))
                at += 1
            if portion.end > end:
                sealed.insert(at, portion.head(end - portion.first))
            part = sealed[at]
            if part.charged:
                part.charged = False
                events, size = events + len(part), size + part.size
            at += 1
        return events, size

    def forget_below(self, offset: int) -> None:
        """Drop what lies below ``offset``."""
        if offset > self.open.first:
            self.seal()
        sealed = self._sealed
        while sealed and sealed[0].end <= offset:
            self.drop_oldest()
        if sealed and sealed[0].first < offset:
            self.bytes -= sealed[0].head(offset - sealed[0].first).size

    def __iter__(self) -> Iterator[Portion]:
        """The sealed portions, oldest first."""
        return iter(self._sealed)

    def oldest(self) -> Portion | None:
        """The oldest sealed portion, left in place."""
        return self._sealed[0] if self._sealed else None

    def drop_oldest(self) -> Portion:
        """Take the oldest sealed portion out."""
        portion = self._sealed.popleft()
        self.bytes -= portion.size
        return portion
