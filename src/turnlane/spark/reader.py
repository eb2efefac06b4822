"""Reading a queue with Spark, as it is now. Blocks stay Arrow all the way."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from turnlane.errors import Never, RetryLater
from turnlane.events import Block, gathered
from turnlane.intervals import Ranges, hulls, inside
from turnlane.key_hash import nodes_of
from turnlane.spark.batch_planning import UNHEARD, Extent, Positions, Share, Slice, sliced
from turnlane.spark.nodes import Nodes
from turnlane.spark.options import (
    EARLIEST,
    FROM_EARLIEST,
    FROM_LATEST,
    ROWS_PER_BATCH,
    Offsets,
    ReadOptions,
)
from turnlane.spark.row_codec import RowMaker
from turnlane.spark.session import lasting

# ── pruning ──
# Filters that save reading: those on ``offset`` and ``partition``. Pure.


@dataclass(frozen=True)
class Bounds:
    """What filters leave of a queue."""

    first: int = 0
    end: int | None = None
    nodes: frozenset[int] | None = None

    def applied(self, start: Positions, end: Positions) -> tuple[dict[int, int], dict[int, int]]:
        """A range cut down to them."""
        nodes = [node for node in start if self.nodes is None or node in self.nodes]
        firsts = {node: max(start[node], self.first) for node in nodes}
        ends = {node: end[node] if self.end is None else min(end[node], self.end) for node in nodes}
        return firsts, {node: max(ends[node], firsts[node]) for node in nodes}

    def from_offset(self, first: int) -> Bounds:
        """Only what is at ``first`` or beyond."""
        return replace(self, first=max(self.first, first))

    def up_to(self, end: int) -> Bounds:
        """Only what is before ``end``."""
        return replace(self, end=end if self.end is None else min(self.end, end))

    def on_nodes(self, nodes: Iterable[int]) -> Bounds:
        """Only what is on these nodes."""
        wanted = frozenset(nodes)
        return replace(self, nodes=wanted if self.nodes is None else self.nodes & wanted)


def bounds_of(filters: Iterable[Filter]) -> tuple[Bounds, list[Filter]]:
    """The bounds that filters set, and the filters that say more than that."""
    bounds = Bounds()
    rest = []
    for each in filters:
        narrowed = _narrowed(bounds, each)
        if narrowed is None:
            bounds = _hull(bounds, each)
            rest.append(each)
        else:
            bounds = narrowed
    return bounds, rest


def _narrowed(bounds: Bounds, each: Filter) -> Bounds | None:
    narrowed = None
    match each:
        case EqualTo(("offset",), int(value)):
            narrowed = bounds.from_offset(value).up_to(value + 1)
        case GreaterThan(("offset",), int(value)):
            narrowed = bounds.from_offset(value + 1)
        case GreaterThanOrEqual(("offset",), int(value)):
            narrowed = bounds.from_offset(value)
        case LessThan(("offset",), int(value)):
            narrowed = bounds.up_to(value)
        case LessThanOrEqual(("offset",), int(value)):
            narrowed = bounds.up_to(value + 1)
        case EqualTo(("partition",), int(value)):
            narrowed = bounds.on_nodes([value])
        case In(("partition",), tuple(values)):
            narrowed = bounds.on_nodes(values)
    return narrowed


def _hull(bounds: Bounds, each: Filter) -> Bounds:
    """The bounds that a filter sets beside what Spark has still to look at."""
    match each:
        case In(("offset",), (int(), *_) as values):
            there = [value for value in values if value is not None]
            return bounds.from_offset(min(there)).up_to(max(there) + 1)
    return bounds


# ── share_reading ──
# Reading a share of a lane's queue: by the task that hands it to Spark, or by the one that
# sends.
#
# Where Spark has nothing to do with the events themselves, their way through Java and back would
# cost
# more than all the rest. Then what goes through it is the share, and the sending task reads it.

SHARES: Final = StructType(
    [
        StructField("partition", IntegerType()),
        StructField("part", IntegerType()),
        StructField("parts", IntegerType()),
        StructField("first", LongType()),
        StructField("end", LongType()),
    ]
)
"""Shares as rows: one for each span."""


def share_events(
    nodes: Nodes, queue: str, share: Share, maker: RowMaker, rows_per_batch: int = ROWS_PER_BATCH
) -> Iterator[Block]:
    """The events of a share, as ``maker`` makes rows of them.

    The commit that follows settles all of them, so that all have to be there, but for those that
    were settled meanwhile. Raises ``RetryLater``.
    """
    columns = maker.stored | {"key"} if share.parts > 1 else maker.stored
    missing = Ranges(share.spans)
    for hull in hulls(share.spans):
        blocks = nodes.read(share.node, queue, *hull, columns)
        for first, block in gathered(blocks, rows_per_batch):
            missing.remove(first, first + block.num_rows)
            chosen = inside(share.spans, first, block.num_rows)
            if share.parts > 1:
                chosen &= _of_part(block, first, share)
            rows = maker.rows(block, first)
            yield rows if chosen.all() else rows.filter(pa.array(chosen))
    _check_settled(nodes, share.node, queue, missing)


def _check_settled(nodes: Nodes, node: int, queue: str, missing: Ranges) -> None:
    spans = list(missing)
    if not spans:
        return
    unsettled = Ranges(nodes.unsettled(node, queue, spans[0][0], spans[-1][1]))
    left = [part for span in spans for part in unsettled.within(*span)]
    if left:
        raise RetryLater(f"queue {queue!r} has an event at {left[0][0]} that cannot be read")


def _of_part(block: Block, first: int, share: Share) -> Any:  # noqa: ANN401 - a mask
    """Which rows have a key of this part; those without any are shared by their offsets."""
    places = np.arange(first, first + block.num_rows) % share.parts
    if "key" not in block.schema.names:
        return places == share.part
    parts = nodes_of(block.column("key"), share.parts)
    return np.where(parts < 0, places, parts) == share.part


def share_rows(share: Share, schema: pa.Schema) -> pa.RecordBatch:
    """A share as rows of :data:`SHARES`."""
    rows = [(share.node, share.part, share.parts, *span) for span in share.spans]
    columns = [
        pa.array(column, field.type)
        for field, column in zip(schema, zip(*rows, strict=True), strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def shares_in(rows: pa.RecordBatch) -> Iterator[Share]:
    """The shares that rows of :data:`SHARES` are."""
    values = zip(*(rows.column(name).to_pylist() for name in SHARES.names), strict=True)
    for (node, part, parts), spans in groupby(values, key=lambda row: row[:3]):
        yield Share(node, tuple(span[3:] for span in spans), part, parts)


log = logging.getLogger(__name__)

MOST_TOLD: Final = 5
"""So many spans of offsets that are gone are named in a message."""


class DataLost(Never):
    """Events that a query was still to read are gone."""


class SlicePartition(InputPartition):
    """A slice, as Spark carries it to a task."""

    def __init__(self, piece: Slice) -> None:
        super().__init__(tuple(piece))
        self.piece = piece


class QueueReading:
    """What batch and stream have in common: cutting a range into tasks, and doing one."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._told: set[str] = set()
        """What was said to be lost: once is enough."""

    def _nodes(self) -> Nodes:
        return Nodes.of(self._options)

    def _partitions(self, start: Positions, end: Positions) -> list[SlicePartition]:
        options = self._options
        pieces = sliced(
            start,
            end,
            at_least=options.min_partitions,
            at_most=options.workers or max(2, options.min_partitions),
            per=options.worker_minimum_events,
        )
        return [SlicePartition(piece) for piece in pieces]

    def _rows(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        maker = RowMaker(self._arrow_schema(), self._options.queue, piece.node)
        rows = self._unsettled if self._options.skip_settled else self._all
        with lasting("read"):
            yield from rows(piece, maker)

    def _all(self, piece: Slice, maker: RowMaker) -> Iterator[pa.RecordBatch]:
        """Every event of a slice: one that does not come is lost."""
        span = piece.first, piece.end
        missing = Ranges([span])
        blocks = self._nodes().read(piece.node, self._options.queue, *span, maker.stored)
        for first, block in gathered(blocks, self._options.rows_per_batch):
            missing.remove(first, first + block.num_rows)
            yield maker.rows(block, first)
        if missing:
            # Only now: whoever goes on without them has all the others.
            why = "settled by somebody else, in a consumer's hands, or damaged"
            self._lost(f"on node {piece.node} the offsets {_told(missing)} are gone: {why}")

    def _unsettled(self, piece: Slice, maker: RowMaker) -> Iterator[pa.RecordBatch]:
        """The events of a slice that are not settled, of which none may be missing.

        A query settles a batch once it will never ask for it again, so that one that is done again
        has the same rows as before, but for those that somebody else has settled meanwhile.
        """
        nodes, queue = self._nodes(), self._options.queue
        spans = nodes.unsettled(piece.node, queue, piece.first, piece.end)
        if spans:
            share = Share(piece.node, tuple(spans))
            yield from share_events(nodes, queue, share, maker, self._options.rows_per_batch)

    def _arrow_schema(self) -> pa.Schema:
        return to_arrow_schema(self._schema, timezone="UTC")

    def _starts(self, extents: Mapping[int, Extent]) -> dict[int, int]:
        """Where a new query begins on these nodes."""
        options, nodes = self._options, self._nodes()
        if options.starting_timestamp is not None:
            stamp = options.starting_timestamp
            return {node: nodes.offset_at(node, options.queue, stamp) for node in extents}
        return self._resolved(options.starting_offsets, "startingOffsets", extents)

    def _resolved(
        self, wanted: Offsets, knob: str, extents: Mapping[int, Extent]
    ) -> dict[int, int]:
        """Offsets as asked for. Raises ``Never`` if the queue does not go as far."""
        if not isinstance(wanted, dict):
            everywhere = FROM_EARLIEST if wanted == EARLIEST else FROM_LATEST
            wanted = dict.fromkeys(range(self._nodes().count), everywhere)
        self._check_named(wanted, knob, range(self._nodes().count))
        return {node: _within(knob, node, wanted[node], each) for node, each in extents.items()}

    def _check_named(self, wanted: dict[int, int], knob: str, nodes: Collection[int]) -> None:
        if wanted.keys() != set(nodes):
            raise Never(f"{knob}: names nodes {sorted(wanted)}, but there are {sorted(nodes)}")

    def _check_gone(self, at: Positions, extents: Mapping[int, Extent]) -> None:
        """Complain of events that were to be read, and that somebody else has settled."""
        if self._options.skip_settled:
            return
        for node, extent in extents.items():
            if 0 <= at.get(node, UNHEARD) < extent.low:
                self._lost(f"on node {node} the offsets {at[node]} to {extent.low - 1} are gone")

    def _lost(self, what: str) -> None:
        text = f"queue {self._options.queue!r}: {what}"
        if self._options.fail_on_data_loss:
            raise DataLost(f"{text}; set failOnDataLoss to false to go on without")
        if text not in self._told:
            log.warning("%s; going on without", text)
        self._told.add(text)


def _told(missing: Ranges) -> str:
    """Offsets as a message names them: some of them, if they lie scattered."""
    spans = [f"{first} to {end - 1}" for first, end in missing]
    more = len(spans) - MOST_TOLD
    return ", ".join(spans[:MOST_TOLD]) + (f" and {more} more spans" if more > 0 else "")


def _within(knob: str, node: int, offset: int, extent: Extent) -> int:
    if offset == FROM_EARLIEST:
        return extent.low
    if offset == FROM_LATEST:
        return extent.end
    if offset > extent.end:
        raise Never(f"{knob}: on node {node} the queue ends at offset {extent.end}, not {offset}")
    return offset


class BatchReader(QueueReading, DataSourceReader):
    """A queue as it is now."""

    _bounds = Bounds()

    def partitions(self) -> Sequence[InputPartition]:
        extents = self._nodes().extents(self._options.queue)
        start = self._starts(extents)
        self._check_gone(start, extents)
        end = self._resolved(self._options.ending_offsets, "endingOffsets", extents)
        return self._partitions(*self._bounds.applied(start, end))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, SlicePartition):
            return iter(())  # where there are none, Spark makes up one that is empty
        return self._rows(partition.piece)


class PruningReader(BatchReader):
    """The same, reading no more than filters ask for. Spark refuses it unless told to push them."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802
        """Filters on ``offset`` and ``partition`` decide what is read; Spark applies the rest."""
        self._bounds, rest = bounds_of(filters)
        yield from rest
