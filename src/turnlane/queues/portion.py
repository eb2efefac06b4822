"""A run of consecutive events on its way through a queue, with or without its contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnlane.events import Block
from turnlane.queues.log.position import Stamp


@dataclass(slots=True)
class Portion:
    """Offsets ``first`` to ``end - 1``; ``pieces`` is ``None`` while the events are elsewhere."""

    first: int
    end: int
    size: int
    """Bytes that it counts for."""
    pieces: Sequence[Block] | None
    attempt: int = 1
    stamps: Sequence[Stamp] = ()
    """The numbered producers whose events it completes."""
    charged: bool = True
    """Whether it counts against the queue's bounds."""
    recorded: bool = False
    """Whether the journal knows that it is settled."""
    consecutive: bool = False
    """Whether all its events are of one producer, and their numbers follow on each other."""

    def __len__(self) -> int:
        return self.end - self.first

    def copy(self) -> Portion:
        """Another portion of the same events, to be cut independently."""
        return Portion(
            self.first,
            self.end,
            self.size,
            self.pieces,
            self.attempt,
            self.stamps,
            self.charged,
            self.recorded,
            self.consecutive,
        )

    @property
    def charge(self) -> tuple[int, int]:
        """What it takes of the bounds, in events and bytes."""
        return (len(self), self.size) if self.charged else (0, 0)

    def part(self, first: int, end: int) -> Portion:
        """Another portion of the events ``first`` to ``end - 1``, to be cut independently."""
        part = self.copy()
        if end < self.end:
            part = part.head(end - self.first)
        if first > self.first:
            part.head(first - self.first)
        return part

    def head(self, events: int) -> Portion:
        """Cut off and return the first ``events``; what stays is the rest."""
        cut = self.first + events
        size = self.size * events // len(self)
        pieces, rest = (None, None) if self.pieces is None else _cut(self.pieces, events)
        head = self.copy()
        head.end, head.size, head.pieces = cut, size, pieces
        head.stamps = self._stamps_before(self.end - cut)
        self.first, self.size, self.pieces = cut, self.size - size, rest
        return head

    def _stamps_before(self, events: int) -> list[Stamp]:
        """What is known of its numbers so many events before its end."""
        return [stamp.before(events) for stamp in self.stamps] if self.consecutive else []

    def parts(self, size: int) -> list[Portion]:
        """The same events in portions of about this size; their numbers go along if they can."""
        count = min(len(self), round(self.size / size))
        if count <= 1:
            return [self]
        rest, step = self.copy(), -(-len(self) // count)
        return [rest.head(min(step, len(rest))) for _ in range(0, len(self), step)]


def _cut(pieces: Sequence[Block], events: int) -> tuple[list[Block], list[Block]]:
    head: list[Block] = []
    rest = list(pieces)
    while events:
        block = rest.pop(0)
        if block.num_rows > events:
            rest.insert(0, block.slice(events))
            block = block.slice(0, events)
        head.append(block)
        events -= block.num_rows
    return head, rest
