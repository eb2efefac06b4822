"""Events that are staged by their places in another queue: the queue keeps them until the commit.

Writing them to a stage, and reading them from it, would cost more than all the rest of copying.
What a commit needs is that the events are still there when it is carried out, after a kill, too. So
only a queue that has them on disk can be referred to. The commit of a lane settles them, after it
has copied them; what somebody else has settled before is not copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.errors import RetryLater
from turnlane.events import BASE_SCHEMA, Block, conform
from turnlane.intervals import GAP, Ranges, Span, spans_of
from turnlane.queues.api import AckLevel, Durability
from turnlane.queues.buffered import BufferedQueue

# ── by_offset ──
# Reading a queue by offset, in the node that has it.

READ_EVENTS: Final = 65_536
"""The most events of a block."""


def read(queue: BufferedQueue, first: int, end: int) -> Iterator[tuple[int, Block]]:
    """What a queue has of some offsets, block by block, with their first offsets."""
    while first < end:
        found = queue.read(first, min(READ_EVENTS, end - first))
        if found is None or found[0] >= end:
            return
        first, block = found
        yield first, conform(block.slice(0, end - first))
        first += block.num_rows


Numbers = npt.NDArray[np.int64]
Piece = tuple[int, int, Block]
"""Of which of several lists of places, from which of its places on, and the events there."""

_FIELDS: list[tuple[str, pa.DataType]] = [("first", pa.int64()), ("bits", pa.binary())]
PLACES: Final = pa.schema(_FIELDS)
"""Stretches of offsets: a bit for each from ``first`` on, set if the event is meant."""
USUALLY_LARGEST: Final = 64 << 20
"""Of an event. A queue may have held larger ones than it takes now."""
STRETCH_GAP: Final = 512
"""Offsets farther apart are in stretches of their own: bits in between would take more room."""


def can_refer(source: BufferedQueue, target: BufferedQueue) -> bool:
    """Whether what one queue has is as good as staged, and the other one sure to take it."""
    return (
        source.usual_level is AckLevel.PERSISTED
        and source.durability is not Durability.NEVER
        and not _extra_columns(source)
        and max(source.settings.max_event_bytes, USUALLY_LARGEST) <= target.max_event_bytes
    )


def _extra_columns(queue: BufferedQueue) -> set[str]:
    return queue.columns().keys() - set(BASE_SCHEMA.names)


def packed(offsets: Numbers) -> Block:
    """Offsets, in order, as a stage has them."""
    firsts: list[int] = []
    bits: list[bytes] = []
    for piece in _close_together(offsets, STRETCH_GAP):
        mine = offsets[piece]
        set_bits = np.zeros(int(mine[-1] - mine[0]) + 1, dtype=np.bool_)
        set_bits[mine - mine[0]] = True
        firsts.append(int(mine[0]))
        bits.append(np.packbits(set_bits).tobytes())
    columns: list[pa.Array[Any]] = [pa.array(firsts, pa.int64()), pa.array(bits, pa.binary())]
    return pa.RecordBatch.from_arrays(columns, schema=PLACES)


def unpacked(blocks: Iterable[Block]) -> Numbers:
    """The offsets that a stage has, in order, each once."""
    pieces: list[Numbers] = [np.empty(0, dtype=np.int64)]
    for block in blocks:
        for first, bits in zip(*(column.to_pylist() for column in block.columns), strict=True):
            pieces.append(first + np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8))))
    offsets = np.concatenate(pieces)
    return offsets if (np.diff(offsets) > 0).all() else np.unique(offsets)


def _close_together(offsets: Numbers, gap: int = GAP) -> Iterator[slice]:
    """Stretches of offsets without gaps larger than that."""
    cuts = (np.flatnonzero(np.diff(offsets) > gap) + 1).tolist()
    ends = [*cuts, len(offsets)] if len(offsets) else []
    for first, end in zip([0, *cuts], ends, strict=False):
        yield slice(first, end)


def copied(source: BufferedQueue, wanted: Sequence[Numbers]) -> Iterator[Piece]:
    """The events at several lists of places, in the order of the queue, which is read once.

    An event that is settled is left out. Raises ``RetryLater`` instead of going on behind one that
    is not and cannot be read: what comes later has higher numbers, so it could not follow.
    """
    done = [0] * len(wanted)
    for first, end in _hulls(wanted):
        for start, block in read(source, first, end):
            for number, offsets in enumerate(wanted):
                low, high = np.searchsorted(offsets, (start, start + block.num_rows)).tolist()
                if low < high:
                    _check_settled(source, offsets[done[number] : low])
                    done[number] = high
                    yield number, low, _only(block, offsets[low:high] - start)
    for offsets, at in zip(wanted, done, strict=True):
        _check_settled(source, offsets[at:])


def _check_settled(source: BufferedQueue, offsets: Numbers) -> None:
    """Raise ``RetryLater`` if any of these, which could not be read, is not settled."""
    left = source.filter_unsettled(spans_of(offsets)) if len(offsets) else []
    if left:  # whoever commits this settles them
        raise RetryLater(f"queue {source.name!r} has an event at {left[0][0]} that cannot be read")


def _hulls(wanted: Sequence[Numbers]) -> Iterable[Span]:
    """What to read: all places, and what lies close between them."""
    hulls = Ranges()
    for offsets in wanted:
        for piece in _close_together(offsets):
            hulls.add(int(offsets[piece][0]), int(offsets[piece][-1]) + 1)
    return hulls


def _only(block: Block, rows: Numbers) -> Block:
    """Some rows of a block, in order."""
    if len(rows) == block.num_rows:
        return block
    filled = [i for i, column in enumerate(block.columns) if column.null_count < block.num_rows]
    chosen = dict(zip(filled, block.select(filled).take(rows).columns, strict=True))
    kinds: list[Any] = block.schema.types
    # To choose among nulls takes longer than to make them. A slice would keep all of the block.
    columns = [
        chosen[i] if i in chosen else pa.nulls(len(rows), kind) for i, kind in enumerate(kinds)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=block.schema)
