"""References to events: a stage can hold offsets of a source queue instead of the events.

To write the events to a stage and read them again would cost more than the rest of the copy. The
commit needs the events when it is applied, also after a crash, so only a queue that has its events
on disk can be a source. The source keeps the events until the commit, which copies them first and
settles them then. Events that another consumer has settled before are not copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.errors import RetryLater
from turnlane.events import BASE_SCHEMA, Block, conform_block
from turnlane.intervals import MAX_GAP, RangeSet, Span, convert_to_spans
from turnlane.queues.api import AckLevel, Durability
from turnlane.queues.buffered import BufferedQueue

READ_EVENTS: Final = 65_536
"""The most events of a block that is read by offset."""


def read_range(queue: BufferedQueue, first: int, end: int) -> Iterator[tuple[int, Block]]:
    """Yield the events of a queue between two offsets: the first offset of a block, the block."""
    while first < end:
        found = queue.read(first, min(READ_EVENTS, end - first))
        if found is None or found[0] >= end:
            return
        first, block = found
        yield first, conform_block(block.slice(0, end - first))
        first += block.num_rows


OffsetArray = npt.NDArray[np.int64]
CopiedBlock = tuple[int, int, Block]
"""The number of a list of offsets, the index of the first event in that list, and the events."""

_FIELDS: list[tuple[str, pa.DataType]] = [("first", pa.int64()), ("bits", pa.binary())]
EVENT_REF_SCHEMA: Final = pa.schema(_FIELDS)
"""Each row is a stretch of offsets: one bit for each offset from ``first`` on."""
ASSUMED_MAX_EVENT_BYTES: Final = 64 << 20
"""The assumed size of the largest event: a queue can hold larger events than it accepts now."""
MAX_STRETCH_GAP: Final = 512
"""Offsets that are farther apart are in different stretches: the bits between would cost more."""


def can_stage_references(source: BufferedQueue, target: BufferedQueue) -> bool:
    """Whether the source keeps its events safely, and the target accepts all of them."""
    return (
        source.usual_level is AckLevel.PERSISTED
        and source.durability is not Durability.NEVER
        and not source.columns().keys() - set(BASE_SCHEMA.names)
        and max(source.settings.max_event_bytes, ASSUMED_MAX_EVENT_BYTES) <= target.max_event_bytes
    )


def encode_references(offsets: OffsetArray) -> Block:
    """Encode ascending offsets as a block of a stage."""
    firsts: list[int] = []
    bits: list[bytes] = []
    for piece in _close_together(offsets, MAX_STRETCH_GAP):
        mine = offsets[piece]
        set_bits = np.zeros(int(mine[-1] - mine[0]) + 1, dtype=np.bool_)
        set_bits[mine - mine[0]] = True
        firsts.append(int(mine[0]))
        bits.append(np.packbits(set_bits).tobytes())
    columns: list[pa.Array[Any]] = [pa.array(firsts, pa.int64()), pa.array(bits, pa.binary())]
    return pa.RecordBatch.from_arrays(columns, schema=EVENT_REF_SCHEMA)


def decode_references(blocks: Iterable[Block]) -> OffsetArray:
    """Return the offsets of a stage in ascending order, without duplicates."""
    pieces: list[OffsetArray] = [np.empty(0, dtype=np.int64)]
    for block in blocks:
        for first, bits in zip(*(column.to_pylist() for column in block.columns), strict=True):
            pieces.append(first + np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8))))
    offsets = np.concatenate(pieces)
    return offsets if (np.diff(offsets) > 0).all() else np.unique(offsets)


def _close_together(offsets: OffsetArray, gap: int = MAX_GAP) -> Iterator[slice]:
    """Yield the slices of ``offsets`` that have no gap larger than ``gap``."""
    cuts = (np.flatnonzero(np.diff(offsets) > gap) + 1).tolist()
    ends = [*cuts, len(offsets)] if len(offsets) else []
    for first, end in zip([0, *cuts], ends, strict=False):
        yield slice(first, end)


def read_referenced_events(
    source: BufferedQueue, wanted: Sequence[OffsetArray]
) -> Iterator[CopiedBlock]:
    """Yield the events of several lists of offsets in one pass over the queue.

    Settled events are left out. Raises ``RetryLater`` at an unsettled event that cannot be read:
    later events have higher sequence numbers, so they must not be published before it.
    """
    done = [0] * len(wanted)
    for first, end in _hulls(wanted):
        for start, block in read_range(source, first, end):
            for number, offsets in enumerate(wanted):
                low, high = np.searchsorted(offsets, (start, start + block.num_rows)).tolist()
                if low < high:
                    _check_settled(source, offsets[done[number] : low])
                    done[number] = high
                    yield number, low, _only(block, offsets[low:high] - start)
    for offsets, at in zip(wanted, done, strict=True):
        _check_settled(source, offsets[at:])


def _check_settled(source: BufferedQueue, offsets: OffsetArray) -> None:
    """Raise ``RetryLater`` if one of these unreadable offsets is not settled."""
    left = source.filter_unsettled(convert_to_spans(offsets)) if len(offsets) else []
    if left:
        raise RetryLater(f"queue {source.name!r} has an event at {left[0][0]} that cannot be read")


def _hulls(wanted: Sequence[OffsetArray]) -> Iterable[Span]:
    """Yield the ranges to read: all offsets, and the small gaps between them."""
    hulls = RangeSet()
    for offsets in wanted:
        for piece in _close_together(offsets):
            hulls.add(int(offsets[piece][0]), int(offsets[piece][-1]) + 1)
    return hulls


def _only(block: Block, rows: OffsetArray) -> Block:
    """Return the given rows of a block."""
    if len(rows) == block.num_rows:
        return block
    filled = [i for i, column in enumerate(block.columns) if column.null_count < block.num_rows]
    chosen = dict(zip(filled, block.select(filled).take(rows).columns, strict=True))
    kinds: list[Any] = block.schema.types
    # New nulls are faster than a selection of nulls. A slice would keep the whole block alive.
    columns = [
        chosen[i] if i in chosen else pa.nulls(len(rows), kind) for i, kind in enumerate(kinds)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=block.schema)
