"""Reading a queue with Spark, in a batch or as a stream. Blocks stay Arrow all the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from turnlane.errors import Never, TransportDown
from turnlane.events import Block, join
from turnlane.spark.columns import RowMaker
from turnlane.spark.nodes import Extent, Nodes
from turnlane.spark.options import EARLIEST, LATEST, Offsets, ReadOptions
from turnlane.spark.pruning import Bounds, bounds_of
from turnlane.spark.ranges import Positions, Slice, admitted, sliced

log = logging.getLogger(__name__)

UNHEARD: Final = -1
"""The position on a node that has been away since the query was made."""


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
        blocks = self._nodes().read(piece.node, self._options.queue, piece.first, piece.end)
        for first, block in gathered(blocks, self._options.rows_per_batch):
            yield maker.rows(block, first)

    def _arrow_schema(self) -> pa.Schema:
        return to_arrow_schema(self._schema, timezone="UTC")

    def _resolved(self, wanted: Offsets, knob: str, extents: dict[int, Extent]) -> dict[int, int]:
        """Offsets as asked for, within what there is."""
        if wanted == EARLIEST:
            return {node: extent.low for node, extent in extents.items()}
        if wanted == LATEST:
            return {node: extent.end for node, extent in extents.items()}
        assert isinstance(wanted, dict)
        self._check_named(wanted, knob, extents)
        return {node: min(max(wanted[node], 0), extents[node].end) for node in extents}

    def _check_named(self, wanted: dict[int, int], knob: str, nodes: Collection[int]) -> None:
        if wanted.keys() != set(nodes):
            raise Never(f"{knob}: names nodes {sorted(wanted)}, but there are {sorted(nodes)}")


def gathered(blocks: Iterator[tuple[int, Block]], rows: int) -> Iterator[tuple[int, Block]]:
    """Consecutive blocks joined up to ``rows``: Spark pays for every batch it is given."""
    held: list[Block] = []
    first = end = 0
    for at, block in blocks:
        if held and (at != end or end - first + block.num_rows > rows):
            yield first, join(held)
            held = []
        if not held:
            first = at
        held.append(block)
        end = at + block.num_rows
    if held:
        yield first, join(held)


class BatchReader(QueueReading, DataSourceReader):
    """A queue as it is now."""

    _bounds = Bounds()

    def partitions(self) -> Sequence[InputPartition]:
        extents = self._nodes().extents(self._options.queue)
        start = self._resolved(self._options.starting_offsets, "startingOffsets", extents)
        end = self._resolved(self._options.ending_offsets, "endingOffsets", extents)
        if self._options.starting_timestamp is not None:
            start = self._nodes().offsets_at(self._options.queue, self._options.starting_timestamp)
        return self._partitions(*self._bounds.applied(start, end))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, SlicePartition)
        return self._rows(partition.piece)


class PruningReader(BatchReader):
    """The same, reading no more than filters ask for. Spark refuses it unless told to push them."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802
        """Filters on ``offset`` and ``partition`` decide what is read; Spark applies the rest."""
        self._bounds, rest = bounds_of(filters)
        yield from rest


class StreamReader(QueueReading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A queue as it grows. Offsets are those of the queue, by node."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._target: dict[int, int] | None = None
        """Where to stop, for ``Trigger.AvailableNow``."""
        self._waiting_since: float | None = None
        self._seen: dict[int, int] = {}

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        nodes, options = self._nodes(), self._options
        if options.starting_timestamp is not None:
            return _written(nodes.offsets_at(options.queue, options.starting_timestamp))
        unheard = dict.fromkeys(range(nodes.count), UNHEARD)
        return _written(unheard | self._begun(nodes.wait(options.queue, unheard, 0.0)))

    def _begun(self, extents: dict[int, Extent]) -> dict[int, int]:
        """Where reading begins on these nodes."""
        wanted = self._options.starting_offsets
        if isinstance(wanted, dict):
            self._check_named(wanted, "startingOffsets", range(self._nodes().count))
            wanted = {node: wanted[node] for node in extents}
        return self._resolved(wanted, "startingOffsets", extents)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.max_offsets_per_trigger is not None:
            return ReadMaxRows(self._options.max_offsets_per_trigger)
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        extents = self._nodes().extents(self._options.queue)
        self._target = {node: extent.end for node, extent in extents.items()}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        at = _read(start)
        extents = self._available(at)
        heard = {node: each for node, each in extents.items() if at[node] == UNHEARD != each.end}
        if heard:
            # A step without events, by which Spark learns where they begin.
            return _written(at | self._begun(heard))
        self._check_loss(at, extents)
        end = {node: max(at[node], extents[node].end) for node in at}
        self._seen = dict(end)
        if self._target is not None:
            end = {node: min(end[node], max(at[node], self._target.get(node, 0))) for node in end}
        elif not self._enough(at, end):
            return start
        return _written(admitted(at, end, self._limit(limit)))

    def _available(self, at: dict[int, int]) -> dict[int, Extent]:
        """How far the nodes have come; waits a while. One that is away stays where it is."""
        nodes, queue = self._nodes(), self._options.queue
        timeout = 0.0 if self._target is not None else self._options.poll_timeout
        known = nodes.wait(queue, at, timeout)
        return {node: known.get(node, Extent(at[node], at[node])) for node in at}

    def _check_loss(self, at: dict[int, int], extents: dict[int, Extent]) -> None:
        for node, extent in extents.items():
            if extent.end < at[node]:
                self._lost(f"node {node} ends at offset {extent.end}, before {at[node]}")

    def _lost(self, what: str) -> None:
        text = f"queue {self._options.queue!r}: {what}"
        if self._options.fail_on_data_loss:
            raise DataLost(f"{text}; set failOnDataLoss to false to go on without")
        log.warning("%s; going on without", text)

    def _enough(self, at: dict[int, int], end: dict[int, int]) -> bool:
        """Whether there is enough for a batch, or it has been waited for long enough."""
        events = sum(end.values()) - sum(at.values())
        if not events or events >= self._options.min_offsets_per_trigger:
            self._waiting_since = None
            return True
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < self._options.max_trigger_delay:
            # Spark asks again at once: not to burn a core while there is too little.
            time.sleep(min(self._options.poll_timeout, self._options.max_trigger_delay))
            return False
        self._waiting_since = None
        return True

    def _limit(self, limit: ReadLimit) -> int | None:
        if isinstance(limit, ReadMaxRows):
            return limit.max_rows
        if isinstance(limit, ReadMaxBytes):
            each = self._nodes().bytes_per_event(self._options.queue)
            return max(1, int(limit.max_bytes / each))
        return None

    def reportLatestOffset(self) -> dict[str, int] | None:  # noqa: N802
        """How far the queue goes: Spark shows the lag."""
        return _written(self._seen) if self._seen else None

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        last = _read(end)
        first = {node: last[node] if at == UNHEARD else at for node, at in _read(start).items()}
        return self._partitions(first, last)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, SlicePartition)
        return self._rows(partition.piece)

    def commit(self, end: dict[str, int]) -> None:
        """Spark is through with everything before ``end``."""
        if not self._options.consume:
            return
        for node, offset in _read(end).items():
            try:
                self._nodes().settle(node, self._options.queue, offset)
            except TransportDown as error:  # the next commit settles it, too
                log.warning("node %d did not hear that %d is done: %s", node, offset, error)


def _written(positions: Positions) -> dict[str, int]:
    return {str(node): offset for node, offset in positions.items()}


def _read(offsets: dict[str, int]) -> dict[int, int]:
    return {int(node): offset for node, offset in offsets.items()}
