"""Reading a queue with Spark, as it is now. Blocks stay Arrow all the way."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from turnlane.errors import Never
from turnlane.events import gathered
from turnlane.queues.ranges import Ranges
from turnlane.spark.columns import RowMaker
from turnlane.spark.lasting import lasting
from turnlane.spark.nodes import Nodes
from turnlane.spark.offsets import UNHEARD
from turnlane.spark.options import EARLIEST, FROM_EARLIEST, FROM_LATEST, Offsets, ReadOptions
from turnlane.spark.pruning import Bounds, bounds_of
from turnlane.spark.ranges import Extent, Positions, Slice, sliced
from turnlane.spark.share_reading import share_events
from turnlane.spark.shares import Share

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
