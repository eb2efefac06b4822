"""The events of a queue that are in memory and not handed out, in offset order.

A :class:`BlockRange` is a range of offsets, usually with its blocks; every part of a queue passes
events on in this form. Single events gather in an :class:`OpenBlock` of plain lists. Sealing turns
it into an Arrow block, which joins the sealed ranges of the :class:`Buffer`; a published block
joins them directly.

Nothing here is thread-safe: the lock of the queue guards it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from turnlane.events import BASE_SCHEMA, Block, build_values
from turnlane.storage.frames import ProducerSequence

SEAL_BYTES = 256 * 1024
"""An open block is sealed at this size at the latest: a few thousand log lines."""

_OPTIONAL = ("key", "headers", "severity", "source")


@dataclass(slots=True)
class BlockRange:
    """Events ``first`` to ``end - 1`` of a queue; ``blocks`` is ``None`` if they are elsewhere."""

    first: int
    end: int
    size: int
    """The bytes that the events count for."""
    blocks: Sequence[Block] | None
    attempt: int = 1
    """How often the events were handed out, this time included."""
    sequences: Sequence[ProducerSequence] = ()
    """For each numbered producer, the numbers that are complete with this range."""
    is_charged: bool = True
    """Whether the events count against the bounds of the queue."""
    is_recorded: bool = False
    """Whether the journal knows that the events are settled."""
    is_consecutive: bool = False
    """Whether one producer published all the events, with consecutive sequence numbers."""

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def charge(self) -> tuple[int, int]:
        """The events and bytes that the range takes of the bounds."""
        return (len(self), self.size) if self.is_charged else (0, 0)

    def copy(self) -> BlockRange:
        """Return a second range of the same events, which can be cut independently."""
        return BlockRange(  # by hand: dataclasses.replace() takes four times as long
            self.first,
            self.end,
            self.size,
            self.blocks,
            self.attempt,
            self.sequences,
            self.is_charged,
            self.is_recorded,
            self.is_consecutive,
        )

    def slice(self, first: int, end: int) -> BlockRange:
        """Return a range of the events ``first`` to ``end - 1``, which can be cut independently."""
        part = self.copy()
        if end < self.end:
            part = part.cut_head(end - self.first)
        if first > self.first:
            part.cut_head(first - self.first)
        return part

    def cut_head(self, events: int) -> BlockRange:
        """Cut off the first ``events`` events and return them; this range keeps the rest."""
        cut = self.first + events
        size = self.size * events // len(self)
        blocks, rest = (None, None) if self.blocks is None else _cut_blocks(self.blocks, events)
        head = self.copy()
        head.end, head.size, head.blocks = cut, size, blocks
        # Which number an event in the middle has is known only if the numbers are consecutive.
        rest_events = self.end - cut
        head.sequences = (
            [each.subtract(rest_events) for each in self.sequences] if self.is_consecutive else ()
        )
        self.first, self.size, self.blocks = cut, self.size - size, rest
        return head

    def split(self, size: int) -> list[BlockRange]:
        """Return the events in ranges of about ``size`` bytes."""
        count = min(len(self), round(self.size / size))
        if count <= 1:
            return [self]
        rest, step = self.copy(), -(-len(self) // count)
        return [rest.cut_head(min(step, len(rest))) for _ in range(0, len(self), step)]


def _cut_blocks(blocks: Sequence[Block], events: int) -> tuple[list[Block], list[Block]]:
    head: list[Block] = []
    rest = list(blocks)
    while events:
        block = rest.pop(0)
        if block.num_rows > events:
            rest.insert(0, block.slice(events))
            block = block.slice(0, events)
        head.append(block)
        events -= block.num_rows
    return head, rest


class OpenBlock:
    """Columns as plain lists: no other way to gather events costs Python as little.

    An optional column exists from the first event on that has a value for it.
    """

    __slots__ = ("_columns", "first", "size", "timestamps", "values")

    def __init__(self, first: int) -> None:
        self.first = first
        self.size = 0
        """The bytes that the events count for."""
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
        """Set the optional columns of the event that was appended last."""
        for name, given in zip(_OPTIONAL, (key, headers, severity, source), strict=True):
            if given is not None:
                column = self._columns.setdefault(name, [])
                column.extend([None] * (len(self.values) - 1 - len(column)))
                column.append(list(given.items()) if isinstance(given, Mapping) else given)

    def truncate(self, count: int) -> None:
        """Keep only the first ``count`` events."""
        del self.values[count:], self.timestamps[count:]
        for column in self._columns.values():
            del column[count:]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def end(self) -> int:
        """The offset after the last event."""
        return self.first + len(self.values)

    def to_block(self) -> Block:
        """Return the events as an Arrow block."""
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


class Buffer:
    """Sealed ranges, then the open block. ``on_sealed`` is called for every new sealed range."""

    __slots__ = ("_on_sealed", "_sealed", "_sealed_singles", "bytes", "open")

    def __init__(self, first: int, on_sealed: Callable[[BlockRange], None]) -> None:
        self.open = OpenBlock(first)
        self.bytes = 0
        """The bytes that the sealed ranges count for."""
        self._sealed: deque[BlockRange] = deque()
        self._sealed_singles = 0
        self._on_sealed = on_sealed

    @property
    def first(self) -> int:
        """The oldest offset in memory; the end of the queue if there is none."""
        return self._sealed[0].first if self._sealed else self.open.first

    @property
    def singles(self) -> int:
        """How many events were published one by one since the queue was opened."""
        return self._sealed_singles + len(self.open)

    @property
    def block_count(self) -> int:
        """How many blocks are in memory."""
        return len(self._sealed) + bool(self.open.values)

    @property
    def oldest(self) -> BlockRange | None:
        """The oldest sealed range."""
        return self._sealed[0] if self._sealed else None

    def __iter__(self) -> Iterator[BlockRange]:
        """Iterate over the sealed ranges, oldest first."""
        return iter(self._sealed)

    def append(self, added: BlockRange) -> None:
        """Add a published block behind everything else."""
        self.seal()
        self.open.first = added.end
        self._add(added)

    def seal(self) -> None:
        """Turn the open block into a sealed range, if it has events."""
        block = self.open
        if block.values:
            sealed = BlockRange(block.first, block.end, block.size, [block.to_block()])
            self.open = OpenBlock(block.end)
            self._sealed_singles += len(sealed)
            self._add(sealed)

    def _add(self, added: BlockRange) -> None:
        self._sealed.append(added)
        self.bytes += added.size
        self._on_sealed(added)

    def take(self, first: int, end: int) -> BlockRange:
        """Take out the events ``first`` to ``end - 1``; ``first`` must be in memory."""
        self.drop_below(first)
        blocks: list[Block] = []
        sequences: list[ProducerSequence] = []
        size = 0
        at = first
        while at < end:
            if not self._sealed:
                self.seal()
            part = self._sealed[0]
            if part.end > end:
                part = part.cut_head(end - part.first)
                self.bytes -= part.size
            else:
                self.drop_oldest()
            blocks.extend(part.blocks or ())
            sequences.extend(part.sequences)
            size += part.size
            at = part.end
        return BlockRange(first, end, size, blocks, sequences=sequences)

    def peek(self, first: int, end: int) -> tuple[int, list[Block]]:
        """Return the first run of events from ``first`` to ``end - 1`` that have contents.

        The events stay in place. Returns the offset of the run and its blocks; none, and the end,
        if all the events were released.
        """
        if end > self.open.first:
            self.seal()
        found: list[Block] = []
        for sealed in self._sealed:
            start, stop = max(first, sealed.first), min(end, sealed.end)
            if start < stop and sealed.blocks is None:
                if found:
                    break
                first = stop
            at = sealed.first
            for block in sealed.blocks or ():
                lower, upper = max(start, at), min(stop, at + block.num_rows)
                if lower < upper:
                    found.append(block.slice(lower - at, upper - lower))
                at += block.num_rows
        return first, found

    def cut_at(self, offset: int) -> None:
        """Cut the sealed range that has ``offset`` in its middle."""
        at = bisect_right(self._sealed, offset, key=lambda each: each.end)
        found = self._sealed[at]
        self._sealed.insert(at, found.cut_head(offset - found.first))

    def uncharge(self, first: int, end: int, *, release: bool) -> tuple[int, int]:
        """Stop charging the events ``first`` to ``end - 1``, and release the contents on request.

        Returns the events and bytes that they took of the bounds. A range without contents stays
        in place of them, so that the buffer has no gaps.
        """
        if end > self.open.first:
            self.seal()
        sealed = self._sealed
        events = size = 0
        at = bisect_right(sealed, first, key=lambda each: each.end)
        while at < len(sealed) and sealed[at].first < end:
            found = sealed[at]
            if found.first < first:
                sealed.insert(at, found.cut_head(first - found.first))
                at += 1
            if found.end > end:
                sealed.insert(at, found.cut_head(end - found.first))
            part = sealed[at]
            charge = part.charge
            events, size = events + charge[0], size + charge[1]
            part.is_charged = False
            if not release:
                at += 1
                continue
            self.bytes -= part.size
            sealed[at] = BlockRange(part.first, part.end, 0, None, is_charged=False)
            at += not self._join_released(at)
        self._join_released(at)
        return events, size

    def _join_released(self, at: int) -> bool:
        """Join a released range with a released range before it: there may be millions."""
        sealed = self._sealed
        if not 0 < at < len(sealed):
            return False
        if sealed[at - 1].blocks is not None or sealed[at].blocks is not None:
            return False
        sealed[at - 1].end = sealed[at].end
        del sealed[at]
        return True

    def drop_below(self, offset: int) -> None:
        """Drop the events below ``offset``."""
        if offset > self.open.first:
            self.seal()
        sealed = self._sealed
        while sealed and sealed[0].end <= offset:
            self.drop_oldest()
        if sealed and sealed[0].first < offset:
            self.bytes -= sealed[0].cut_head(offset - sealed[0].first).size

    def trim(self, stored_end: int, max_bytes: int) -> None:
        """Drop the oldest ranges below ``stored_end`` until ``max_bytes`` are left."""
        while self.bytes > max_bytes and self._sealed and self._sealed[0].end <= stored_end:
            self.drop_oldest()

    def drop_oldest(self) -> BlockRange:
        """Take out the oldest sealed range."""
        dropped = self._sealed.popleft()
        self.bytes -= dropped.size
        return dropped
