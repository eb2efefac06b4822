"""The blocks of a queue that are in memory and not yet handed out, in offset order."""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from turnlane.errors import BatchFreed
from turnlane.events import BASE_SCHEMA, Block, build_values, conform_block, join_blocks
from turnlane.ledger import Outcome
from turnlane.queues.api import Batch, Place
from turnlane.storage.frames import ProducerSequence

# ── batch ──
# The batch that the holding kinds of queue hand out.


class BatchState(enum.Enum):
    """Where a batch is in its short life."""

    OUT = enum.auto()
    SETTLING = enum.auto()
    SETTLED = enum.auto()
    RELEASED = enum.auto()


class Settler(Protocol):
    """The queue that a batch goes back to."""

    def free_batch(self, batch: HeldBatch) -> None:
        """Give up the contents."""

    def settle_batch(self, batch: HeldBatch, outcome: Outcome) -> None:
        """Settle for good."""

    def release_batch(self, batch: HeldBatch) -> None:
        """Take back."""


class HeldBatch(Batch):
    """A portion in a consumer's hands. Its fields change only under the queue's lock."""

    __slots__ = ("_queue", "charged_bytes", "charged_events", "freed", "place", "portion", "state")

    def __init__(self, queue: Settler, portion: Portion) -> None:
        self._queue = queue
        self.portion = portion
        self.place = Place(portion.first, portion.end, portion.attempt)
        self.state = BatchState.OUT
        self.freed = False
        self.charged_events, self.charged_bytes = portion.charge

    def uncharge(self, events: int, of: int) -> tuple[int, int]:
        """Have so many of its ``of`` unsettled events count no more; returns what they did."""
        size = self.charged_bytes * events // of
        events = min(events, self.charged_events)
        self.charged_events -= events
        self.charged_bytes -= size
        return events, size

    @property
    def block(self) -> Block:
        pieces = self._pieces()
        if len(pieces) > 1:
            self.portion.pieces = pieces = [join_blocks(pieces)]
        return conform_block(pieces[0])

    @property
    def blocks(self) -> Sequence[Block]:
        return [conform_block(piece) for piece in self._pieces()]

    def _pieces(self) -> Sequence[Block]:
        pieces = self.portion.pieces
        if self.freed or pieces is None:
            msg = f"batch {self.place.first} was freed; its contents are gone"
            raise BatchFreed(msg)
        return pieces

    def free(self) -> None:
        self._queue.free_batch(self)

    def done(self) -> None:
        self._queue.settle_batch(self, Outcome.DELIVERED)

    def dead(self) -> None:
        self._queue.settle_batch(self, Outcome.DEAD)

    def release(self) -> None:
        self._queue.release_batch(self)


# ── open_block ──
# The block that single events are gathered in until somebody needs it as Arrow.

_OPTIONAL = ("key", "headers", "severity", "source")


class OpenBlock:
    """Columns as plain lists: appending to them is the cheapest thing Python can do.

    Columns that hardly anybody fills exist only from the first event that fills them on.
    """

    __slots__ = ("_columns", "first", "size", "timestamps", "values")

    def __init__(self, first: int) -> None:
        self.first = first
        self.size = 0
        """Bytes that the events count for."""
        self.values: list[bytes] = []
        self.timestamps: list[int] = []
        """In nanoseconds."""
        self._columns: dict[str, list[object]] = {}

    def annotate(
        self,
        key: str | None,
        headers: Mapping[str, str] | None,
        severity: int | None,
        source: str | None,
    ) -> None:
        """Give the event appended last what is not ``None`` here."""
        for name, given in zip(_OPTIONAL, (key, headers, severity, source), strict=True):
            if given is not None:
                column = self._columns.setdefault(name, [])
                column.extend([None] * (len(self.values) - 1 - len(column)))
                column.append(list(given.items()) if isinstance(given, Mapping) else given)

    def cut(self, count: int) -> None:
        """Keep only the first ``count`` events."""
        del self.values[count:], self.timestamps[count:]
        for column in self._columns.values():
            del column[count:]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def end(self) -> int:
        """The offset after its last event."""
        return self.first + len(self.values)

    def seal(self) -> Block:
        """The events as a block, with the base columns."""
        stamps = np.array(self.timestamps, dtype=np.int64) // 1000
        arrays = {
            "value": build_values(self.values),
            "timestamp": pa.array(stamps).view(BASE_SCHEMA.field("timestamp").type),
        }
        count = len(self.values)
        for name, column in self._columns.items():
            column.extend([None] * (count - len(column)))
            arrays[name] = pa.array(column, BASE_SCHEMA.field(name).type)
        names = [name for name in BASE_SCHEMA.names if name in arrays]
        return pa.RecordBatch.from_arrays([arrays[name] for name in names], names=names)


# ── portion ──
# A run of consecutive events on its way through a queue, with or without its contents.


@dataclass(slots=True)
class Portion:
    """Offsets ``first`` to ``end - 1``; ``pieces`` is ``None`` while the events are elsewhere."""

    first: int
    end: int
    size: int
    """Bytes that it counts for."""
    pieces: Sequence[Block] | None
    attempt: int = 1
    sequences: Sequence[ProducerSequence] = ()
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
            self.sequences,
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
        head.sequences = self._stamps_before(self.end - cut)
        self.first, self.size, self.pieces = cut, self.size - size, rest
        return head

    def _stamps_before(self, events: int) -> list[ProducerSequence]:
        """What is known of its numbers so many events before its end."""
        return [stamp.subtract(events) for stamp in self.sequences] if self.consecutive else []

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
        stamps: list[ProducerSequence] = []
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
            stamps.extend(portion.sequences)
            size += portion.size
            at = portion.end
        return Portion(first, end, size, pieces, sequences=stamps)

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
