"""Reads a queue with Spark as it is now. Blocks stay Arrow all the way.

:class:`QueueScan` is the part that all readers of a queue share: it turns options into offsets,
divides offsets among tasks and reads a task's offsets. The batch readers are here, the streaming
reader is in ``stream_reader``, the reader of lanes in ``lane_reader``.

Losing events is an error unless ``failOnDataLoss`` is false: a query that was to read an offset
either gets its event or fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from pyspark.sql.types import StructType

from turnlane.errors import Never, RetryLater
from turnlane.events import Block, join_consecutive
from turnlane.intervals import RangeSet, find_inside, merge_near_spans
from turnlane.key_hash import find_nodes
from turnlane.logs import get_logger
from turnlane.spark.batch_planning import (
    UNKNOWN_POSITION,
    NodeRange,
    Positions,
    QueueExtent,
    TaskSpans,
    cut_into_ranges,
)
from turnlane.spark.nodes import Nodes
from turnlane.spark.options import (
    EARLIEST,
    FROM_EARLIEST,
    FROM_LATEST,
    ROWS_PER_BATCH,
    Offsets,
    ReadOptions,
)
from turnlane.spark.row_codec import Mask, RowBuilder
from turnlane.spark.session import freeze_gc_after

log = get_logger(__name__)

MAX_SPANS_SHOWN: Final = 5
"""The most spans of lost offsets that a message names."""


class DataLost(Never):
    """Events that a query had still to read are gone."""


class RangePartition(InputPartition):
    """A range of offsets, in the form in which Spark sends it to a task."""

    def __init__(self, piece: NodeRange) -> None:
        super().__init__(tuple(piece))
        self.piece = piece


class QueueScan:
    """Reads the queue of some options with the columns of a schema; used by every reader.

    Spark pickles readers into its tasks, and their scan with them: it has no connections of its
    own.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._reported_losses: set[str] = set()

    @property
    def nodes(self) -> Nodes:
        """The nodes of the endpoint, shared by all readers of this process."""
        return Nodes.from_options(self._options)

    @property
    def arrow_schema(self) -> pa.Schema:
        """The columns that Spark expects."""
        return to_arrow_schema(self._schema, timezone="UTC")

    def cut_into_partitions(self, start: Positions, end: Positions) -> list[RangePartition]:
        """Divide a range among tasks."""
        options = self._options
        pieces = cut_into_ranges(
            start,
            end,
            at_least=options.min_partitions,
            at_most=options.workers or max(2, options.min_partitions),
            per=options.worker_minimum_events,
        )
        return [RangePartition(piece) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the events of a task."""
        if not isinstance(partition, RangePartition):
            return  # Spark passes an empty partition if a query has none.
        piece = partition.piece
        builder = RowBuilder(self.arrow_schema, self._options.queue, piece.node)
        read = self._read_unsettled if self._options.skip_settled else self._read_all
        with freeze_gc_after("read"):
            yield from read(piece, builder)

    def _read_all(self, piece: NodeRange, builder: RowBuilder) -> Iterator[pa.RecordBatch]:
        """Read every event of a range; an event that does not arrive is lost."""
        span = piece.first, piece.end
        missing = RangeSet([span])
        blocks = self.nodes.read(piece.node, self._options.queue, *span, builder.queue_columns)
        for first, block in join_consecutive(blocks, self._options.rows_per_batch):
            missing.remove(first, first + block.num_rows)
            yield builder.build(block, first)
        if missing:
            # Reported last: a query that continues without them has all other events.
            why = "settled by another client, in flight to a consumer, or damaged"
            offsets = _format_spans(missing)
            self.report_loss(f"on node {piece.node} the offsets {offsets} are gone: {why}")

    def _read_unsettled(self, piece: NodeRange, builder: RowBuilder) -> Iterator[pa.RecordBatch]:
        """Read the events of a range that are not settled, of which none may be missing.

        A query settles a batch only when it will never ask for it again. So a batch that is
        repeated has the same rows, except those that another client has settled in between.
        """
        queue, rows_per_batch = self._options.queue, self._options.rows_per_batch
        spans = self.nodes.find_unsettled(piece.node, queue, piece.first, piece.end)
        if spans:
            task = TaskSpans(piece.node, tuple(spans))
            yield from read_task_spans(self.nodes, queue, task, builder, rows_per_batch)

    def find_starts(self, extents: Mapping[int, QueueExtent]) -> dict[int, int]:
        """Return the offsets at which a new query starts on these nodes."""
        options, nodes = self._options, self.nodes
        if options.starting_timestamp is not None:
            stamp = options.starting_timestamp
            return {node: nodes.find_offset_at(node, options.queue, stamp) for node in extents}
        return self.resolve_offsets(options.starting_offsets, "startingOffsets", extents)

    def resolve_offsets(
        self, wanted: Offsets, option: str, extents: Mapping[int, QueueExtent]
    ) -> dict[int, int]:
        """Return offsets that an option asks for. Raises ``Never`` if the queue is shorter."""
        nodes = range(self.nodes.count)
        if not isinstance(wanted, dict):
            wanted = dict.fromkeys(nodes, FROM_EARLIEST if wanted == EARLIEST else FROM_LATEST)
        if wanted.keys() != set(nodes):
            raise Never(f"{option}: names nodes {sorted(wanted)}, but there are {sorted(nodes)}")
        return {
            node: _resolve_offset(option, node, wanted[node], extent)
            for node, extent in extents.items()
        }

    def check_gone(self, offsets: Positions, extents: Mapping[int, QueueExtent]) -> None:
        """Report events that were still to be read and that another client has settled."""
        if self._options.skip_settled:
            return
        for node, extent in extents.items():
            at = offsets.get(node, UNKNOWN_POSITION)
            if 0 <= at < extent.low:
                self.report_loss(f"on node {node} the offsets {at} to {extent.low - 1} are gone")

    def report_loss(self, what: str) -> None:
        """Raise ``DataLost``, or log the loss once if the query may continue without."""
        text = f"queue {self._options.queue!r}: {what}"
        if self._options.fail_on_data_loss:
            raise DataLost(f"{text}; set failOnDataLoss to false to go on without")
        if text not in self._reported_losses:
            log.warning("query.events_lost", queue=self._options.queue, loss=what)
        self._reported_losses.add(text)


def _format_spans(missing: RangeSet) -> str:
    """Return offsets as a message names them: the first few spans."""
    spans = [f"{first} to {end - 1}" for first, end in missing]
    more = len(spans) - MAX_SPANS_SHOWN
    return ", ".join(spans[:MAX_SPANS_SHOWN]) + (f" and {more} more spans" if more > 0 else "")


def _resolve_offset(option: str, node: int, offset: int, extent: QueueExtent) -> int:
    if offset == FROM_EARLIEST:
        return extent.low
    if offset == FROM_LATEST:
        return extent.end
    if offset > extent.end:
        raise Never(f"{option}: on node {node} the queue ends at offset {extent.end}, not {offset}")
    return offset


def read_task_spans(
    nodes: Nodes,
    queue: str,
    task: TaskSpans,
    builder: RowBuilder,
    rows_per_batch: int = ROWS_PER_BATCH,
) -> Iterator[Block]:
    """Read the events of a lane's task.

    The commit of the batch settles all of them, so every event must arrive, except those that
    another client has settled in between. Raises ``RetryLater``.
    """
    columns = builder.queue_columns | {"key"} if task.parts > 1 else builder.queue_columns
    missing = RangeSet(task.spans)
    for hull in merge_near_spans(task.spans):
        blocks = nodes.read(task.node, queue, *hull, columns)
        for first, block in join_consecutive(blocks, rows_per_batch):
            missing.remove(first, first + block.num_rows)
            mask = find_inside(task.spans, first, block.num_rows)
            if task.parts > 1:
                mask &= _find_part(block, first, task)
            rows = builder.build(block, first)
            yield rows if mask.all() else rows.filter(pa.array(mask))
    spans = list(missing)
    if spans:
        unsettled = RangeSet(nodes.find_unsettled(task.node, queue, spans[0][0], spans[-1][1]))
        left = [part for span in spans for part in unsettled.within(*span)]
        if left:
            raise RetryLater(f"queue {queue!r} has an event at {left[0][0]} that cannot be read")


def _find_part(block: Block, first: int, task: TaskSpans) -> Mask:
    """Return which rows have a key of the task's part; rows without a key go by their offset."""
    by_offset = np.arange(first, first + block.num_rows) % task.parts
    parts = by_offset
    if "key" in block.schema.names:
        by_key = find_nodes(block.column("key"), task.parts)
        parts = np.where(by_key < 0, by_offset, by_key)
    mask: Mask = parts == task.part
    return mask


# ── batch queries ──


@dataclass(frozen=True)
class OffsetBounds:
    """The part of a queue that filters on ``offset`` and ``partition`` leave."""

    first: int = 0
    end: int | None = None
    nodes: frozenset[int] | None = None

    def apply(self, start: Positions, end: Positions) -> tuple[dict[int, int], dict[int, int]]:
        """Return a range reduced to the bounds."""
        nodes = [node for node in start if self.nodes is None or node in self.nodes]
        firsts = {node: max(start[node], self.first) for node in nodes}
        ends = {node: end[node] if self.end is None else min(end[node], self.end) for node in nodes}
        return firsts, {node: max(ends[node], firsts[node]) for node in nodes}

    def limit_first(self, first: int) -> OffsetBounds:
        """Return the bounds with only offsets from ``first`` on."""
        return replace(self, first=max(self.first, first))

    def limit_end(self, end: int) -> OffsetBounds:
        """Return the bounds with only offsets before ``end``."""
        return replace(self, end=end if self.end is None else min(self.end, end))

    def limit_nodes(self, nodes: Iterable[int]) -> OffsetBounds:
        """Return the bounds with only these nodes."""
        wanted = frozenset(nodes)
        return replace(self, nodes=wanted if self.nodes is None else self.nodes & wanted)


def extract_bounds(filters: Iterable[Filter]) -> tuple[OffsetBounds, list[Filter]]:
    """Return the bounds that filters set, and the filters that Spark has still to apply."""
    bounds = OffsetBounds()
    rest = []
    for each in filters:
        exact = _apply_filter(bounds, each)
        if exact is None:
            bounds = _apply_hull(bounds, each)
            rest.append(each)
        else:
            bounds = exact
    return bounds, rest


def _apply_filter(bounds: OffsetBounds, each: Filter) -> OffsetBounds | None:
    """Return the bounds with a filter; ``None`` if bounds cannot express it."""
    result = None
    match each:
        case EqualTo(("offset",), int(value)):
            result = bounds.limit_first(value).limit_end(value + 1)
        case GreaterThan(("offset",), int(value)):
            result = bounds.limit_first(value + 1)
        case GreaterThanOrEqual(("offset",), int(value)):
            result = bounds.limit_first(value)
        case LessThan(("offset",), int(value)):
            result = bounds.limit_end(value)
        case LessThanOrEqual(("offset",), int(value)):
            result = bounds.limit_end(value + 1)
        case EqualTo(("partition",), int(value)):
            result = bounds.limit_nodes([value])
        case In(("partition",), tuple(values)):
            result = bounds.limit_nodes(values)
    return result


def _apply_hull(bounds: OffsetBounds, each: Filter) -> OffsetBounds:
    """Return the bounds around the values of a filter that Spark has still to apply."""
    match each:
        case In(("offset",), (int(), *_) as values):
            offsets = [value for value in values if value is not None]
            return bounds.limit_first(min(offsets)).limit_end(max(offsets) + 1)
    return bounds


class QueueBatchReader(DataSourceReader):
    """Reads a queue as it is now."""

    _bounds = OffsetBounds()

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._scan = QueueScan(options, schema)

    def partitions(self) -> Sequence[InputPartition]:
        scan = self._scan
        extents = scan.nodes.get_extents(self._options.queue)
        start = scan.find_starts(extents)
        scan.check_gone(start, extents)
        end = scan.resolve_offsets(self._options.ending_offsets, "endingOffsets", extents)
        return scan.cut_into_partitions(*self._bounds.apply(start, end))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self._scan.read(partition)


class FilteringBatchReader(QueueBatchReader):
    """Reads only what filters on ``offset`` and ``partition`` ask for.

    A class of its own: Spark refuses a reader with ``pushFilters`` unless its setting
    ``spark.sql.python.filterPushdown.enabled`` is on.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802
        """Take filters on ``offset`` and ``partition``, and leave the others to Spark."""
        self._bounds, rest = extract_bounds(filters)
        yield from rest
