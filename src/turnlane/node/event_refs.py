"""Copies of events from one queue of a node to others, by their offsets.

A lane that only routes events does not need the events themselves: it sends offsets and routes, and
the node stages the events. Where it can, the node stages only *references*, which are offsets of
the source queue: to write the events to a stage and read them again would cost more than the rest
of the copy. The commit needs the events when it is applied, also after a crash, so only a queue
that has its events on disk can be referred to. The source keeps the events until the commit, which
copies them first and settles them then. Events that another consumer has settled before, or that a
purge has settled, are not copied.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.errors import RetryLater, SchemaMismatch
from turnlane.events import BASE_SCHEMA, Block, conform_block
from turnlane.intervals import MAX_GAP, RangeSet, Span, convert_to_spans, merge_near_spans
from turnlane.node.staging import EVENT_REF_SCHEMA, Stage, finish_all
from turnlane.queues.api import AckLevel, Durability
from turnlane.queues.buffered import BufferedQueue
from turnlane.runtime import Closeable

READ_EVENTS: Final = 65_536
"""The most events of a block that is read by offset."""


def read_range(queue: BufferedQueue, first: int, end: int) -> Iterator[tuple[int, Block]]:
    """Yield the events of a queue between two offsets: the first offset of a block, the block.

    Some of them may be settled.
    """
    while first < end:
        found = queue.read(first, min(READ_EVENTS, end - first))
        if found is None or found[0] >= end:
            return
        first, block = found
        yield first, conform_block(block.slice(0, end - first))
        first += block.num_rows


def read_unsettled(
    queue: BufferedQueue, first: int, end: int, most: int = READ_EVENTS
) -> Iterator[tuple[int, Block]]:
    """Yield the events between two offsets that are not settled, ``most`` of them at a time."""
    while left := queue.find_unsettled(most, first=first).spans:
        for hull in merge_near_spans(left):
            for start, block in read_range(queue, hull[0], min(hull[1], end)):
                # Once more: they may have been settled since, and those between them are.
                for span in queue.filter_unsettled([(start, start + block.num_rows)]):
                    yield span[0], block.slice(span[0] - start, span[1] - span[0])
        first = left[-1][1]
        if first >= end:
            return


OffsetArray = npt.NDArray[np.int64]
CopiedBlock = tuple[int, int, Block]
"""The number of a list of offsets, the index of the first event in that list, and the events."""

ASSUMED_MAX_EVENT_BYTES: Final = 64 << 20
"""The assumed size of the largest event: a queue can hold larger events than it accepts now."""
MAX_STRETCH_GAP: Final = 512
"""Offsets that are farther apart are in different stretches: the bits between would cost more."""
PERSIST_TIMEOUT: Final = 30.0
"""How long a copy waits until its referenced events are on disk, in seconds."""


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
    for piece in _split_at_gaps(offsets, MAX_STRETCH_GAP):
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


def _split_at_gaps(offsets: OffsetArray, gap: int = MAX_GAP) -> Iterator[slice]:
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
    for first, end in _get_hulls(wanted):
        for start, block in read_range(source, first, end):
            # Of the events above the lowest pending one, others may have settled some.
            unsettled = source.filter_unsettled([(start, start + block.num_rows)])
            for number, offsets in enumerate(wanted):
                low, high = np.searchsorted(offsets, (start, start + block.num_rows)).tolist()
                _check_settled(source, offsets[done[number] : low])
                done[number] = max(done[number], high)
                for span in unsettled:
                    low, high = np.searchsorted(offsets, span).tolist()
                    if low < high:
                        yield number, low, _select_rows(block, offsets[low:high] - start)
    for offsets, at in zip(wanted, done, strict=True):
        _check_settled(source, offsets[at:])


def _check_settled(source: BufferedQueue, offsets: OffsetArray) -> None:
    """Raise ``RetryLater`` if one of these unreadable offsets is not settled."""
    left = source.filter_unsettled(convert_to_spans(offsets)) if len(offsets) else []
    if left:
        raise RetryLater(f"queue {source.name!r} has an event at {left[0][0]} that cannot be read")


def _get_hulls(wanted: Sequence[OffsetArray]) -> Iterable[Span]:
    """Yield the ranges to read: all offsets, and the small gaps between them."""
    hulls = RangeSet()
    for offsets in wanted:
        for piece in _split_at_gaps(offsets):
            hulls.add(int(offsets[piece][0]), int(offsets[piece][-1]) + 1)
    return hulls


def _select_rows(block: Block, rows: OffsetArray) -> Block:
    """Return the given rows of a block."""
    if len(rows) == block.num_rows:
        return block
    used = [i for i, column in enumerate(block.columns) if column.null_count < block.num_rows]
    chosen = dict(zip(used, block.select(used).take(rows).columns, strict=True))
    kinds: list[Any] = block.schema.types
    # New nulls are faster than a selection of nulls. A slice would keep the whole block alive.
    columns = [
        chosen[i] if i in chosen else pa.nulls(len(rows), kind) for i, kind in enumerate(kinds)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=block.schema)


# ── copies ───────────────────────────────────────────────────────────────────────────────────────


class QueueCopy(Closeable):
    """Stages the events of given offsets and routes. Without :meth:`finish` nothing is kept."""

    def __init__(self, source: BufferedQueue, into: Sequence[str]) -> None:
        self._source = source
        self._into = into
        self._opened = ExitStack()
        self.events = 0

    def add(self, rows: Block) -> None:
        """Stage events: ``offset`` ascending, and one bit of ``routes`` for each target queue.

        Raises ``SchemaMismatch``, ``RetryLater``, and the errors of :meth:`Stage.add`.
        """
        offsets, routes = _get_integers(rows, "offset"), _get_integers(rows, "routes")
        if (np.diff(offsets) <= 0).any() or (offsets < 0).any():
            raise SchemaMismatch("`offset`: offsets must be ascending and not negative")
        if len(offsets) and offsets[-1] >= self._source.end:
            raise SchemaMismatch(
                f"`offset`: {offsets[-1]} is beyond the end of the queue, {self._source.end}"
            )
        self._add([offsets[(routes >> n & 1).astype(np.bool_)] for n in range(len(self._into))])

    @abstractmethod
    def _add(self, wanted: Sequence[OffsetArray]) -> None:
        """Stage events, or remember them for :meth:`_get_stages`: offsets for each target."""

    @abstractmethod
    def _get_stages(self) -> Sequence[Stage]:
        """Return all stages, ready to be finished."""

    def finish(self) -> list[str]:
        """Sync all stages, or none; return their ids for the commit."""
        return finish_all(self._get_stages())

    def close(self) -> None:
        """Close all files."""
        self._opened.close()


class CopyByValue(QueueCopy):
    """Stages the events themselves."""

    def __init__(
        self,
        source: BufferedQueue,
        into: Sequence[str],
        open_stage: Callable[[str, pa.Schema], Stage],
    ) -> None:
        super().__init__(source, into)
        self._open_stage = open_stage
        self._stages: dict[tuple[str, pa.Schema], Stage] = {}

    def _add(self, wanted: Sequence[OffsetArray]) -> None:
        for number, _, block in read_referenced_events(self._source, wanted):
            key = self._into[number], block.schema
            if key not in self._stages:
                self._stages[key] = self._opened.enter_context(self._open_stage(*key))
            self._stages[key].add(block)
            self.events += block.num_rows

    def _get_stages(self) -> Sequence[Stage]:
        return list(self._stages.values())


class CopyByReference(QueueCopy):
    """Stages references to the events; the commit copies the events."""

    def __init__(
        self,
        source: BufferedQueue,
        into: Sequence[str],
        open_stage: Callable[[str, BufferedQueue], Stage],
    ) -> None:
        super().__init__(source, into)
        self._open_stage = open_stage
        self._references: dict[str, list[tuple[Block, int]]] = {}
        """References and their number, by queue. They are encoded, because batches are large."""
        self._end = 0

    def _add(self, wanted: Sequence[OffsetArray]) -> None:
        for queue, offsets in zip(self._into, wanted, strict=True):
            if len(offsets):
                encoded = encode_references(offsets), len(offsets)
                self._references.setdefault(queue, []).append(encoded)
                self._end = max(self._end, int(offsets[-1]) + 1)

    def _get_stages(self) -> Sequence[Stage]:
        # After a crash the offsets must still belong to the same events.
        if not self._source.wait_level(AckLevel.PERSISTED, self._end, PERSIST_TIMEOUT):
            raise RetryLater(f"queue {self._source.name!r} has not persisted its events yet")
        stages = []
        for queue, encoded in self._references.items():
            stage = self._opened.enter_context(self._open_stage(queue, self._source))
            for references, events in encoded:
                stage.add_counted(references, events, self._source.estimate_size(events))
            self.events += stage.events
            stages.append(stage)
        return stages


def _get_integers(rows: Block, name: str) -> OffsetArray:
    at = rows.schema.get_field_index(name)
    if at < 0 or rows.schema.field(at).type != pa.int64() or rows.column(at).null_count:
        raise SchemaMismatch(f"`{name}` must be a column of 64-bit integers without nulls")
    return np.asarray(rows.column(at))
