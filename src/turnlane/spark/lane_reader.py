"""Reads a queue for a lane: the events that are not settled, batch by batch.

The truth about a lane's progress is in the nodes: each event is settled or not. Spark's offsets
only tell Spark that there is something to do; they change with every batch. When Spark asks for
the latest offset, the reader selects the events of a batch, and when Spark asks for partitions, it
agrees on them with the nodes (``nodes.LaneNodes.plan_batch``). Events that a task could not deliver
are not settled and come again in a later batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit
from pyspark.sql.types import StructType

from turnlane.client.node_client import UnsettledSpans
from turnlane.delivery.settings import GROUP_OFFSETS
from turnlane.intervals import Span, count_offsets
from turnlane.spark.batch_planning import (
    TAKEN_EVENTS,
    BatchSize,
    TaskSpans,
    select_batch,
)
from turnlane.spark.by_reference import encode_task_spans, group_rows
from turnlane.spark.nodes import BreakerClient, LaneNodes
from turnlane.spark.options import LaneReadOptions
from turnlane.spark.queue_reader import QueueScan, read_task_spans, split_into_partitions
from turnlane.spark.row_codec import RowBuilder
from turnlane.spark.session import freeze_gc_after
from turnlane.spark.steps import Suspension, find_suspension

MAX_BATCH_EVENTS: Final = 10_000_000
"""The most events of a batch if no option says how many."""

LaneOffset = dict[str, int]


class LaneReader(DataSourceStreamReader):
    """Reads a queue for a lane. The driver has one reader, and each task a copy of it."""

    def __init__(self, options: LaneReadOptions, schema: StructType) -> None:
        self._options = options
        self._scan = QueueScan(options, schema)
        most = options.max_offsets_per_trigger or MAX_BATCH_EVENTS
        self._size = BatchSize.from_limits(options.probe_events, most, options.batch_seconds)
        self._batch: dict[int, list[Span]] = {}
        self._batch_number = 0
        self._batch_started: float | None = None
        """When the last batch was planned; ``None`` after its result was used."""
        self._latest_ends: LaneOffset = {}
        self._suspension = Suspension(0.0)
        """As it was when events were waiting last."""

    @property
    def _lane(self) -> LaneNodes:
        options = self._options
        return LaneNodes(self._scan.nodes, options.lane, options.run)

    # ── in the driver ──

    def initialOffset(self) -> LaneOffset:  # noqa: N802
        return {TAKEN_EVENTS: 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadAllAvailable()

    def latestOffset(self, start: LaneOffset, limit: ReadLimit) -> LaneOffset:  # noqa: N802
        """Return an offset after ``start`` if a batch can start; waits a while for events."""
        del limit  # The reader computes the size of the batch itself.
        options = self._options
        events, newest = self._get_batch_limits()
        found = self._lane.find_pending(
            options.queue, events, int(events * newest), options.poll_timeout, options.into
        )
        pending = sum(each.pending for each in found.values())
        if pending:  # A lane without events does not ask for breakers.
            self._suspension = self._find_suspension()
            if self._suspension.wait > 0:
                time.sleep(min(self._suspension.wait, options.poll_timeout))
                return start
        self._adjust_size(found)
        if not self._scan.has_enough(pending) or not pending:
            return start
        spans = {node: each.spans for node, each in found.items()}
        self._batch = select_batch(spans, *self._get_batch_limits())
        self._latest_ends = {str(node): each.end for node, each in found.items()}
        ends = {
            str(node): max(start.get(str(node), 0), self._batch[node][-1][1])
            for node in found
            if self._batch[node]
        }
        return start | ends | {TAKEN_EVENTS: start[TAKEN_EVENTS] + self._count_batch()}

    def _get_batch_limits(self) -> tuple[int, float]:
        """Return the most events of a batch, and the share of the newest events in it."""
        if self._suspension.wait > 0 or self._suspension.is_probe:
            return self._options.probe_events, 0.0
        return self._size.events, self._options.fresh_share

    def _find_suspension(self) -> Suspension:
        paths = self._options.ways
        actions = [path.action for each in paths for path in each]
        found = find_suspension(paths, BreakerClient(self._scan.nodes).get_states(actions))
        if found.wait > 0 or found.is_probe:
            self._batch_started = None  # A batch that failed says nothing about the rate.
        return found

    def _adjust_size(self, found: dict[int, UnsettledSpans]) -> None:
        """Use the result of the last batch for the size of the next."""
        if self._batch_started is None:
            return
        took = time.monotonic() - self._batch_started
        planned = self._count_batch()
        kept = sum(each.kept for each in found.values())
        self._size = self._size.adjust(planned, min(kept, planned), took)
        self._batch_started = None

    def _count_batch(self) -> int:
        return sum(map(count_offsets, self._batch.values()))

    def reportLatestOffset(self) -> LaneOffset | None:  # noqa: N802
        """Return how far the queue goes: Spark shows the lag."""
        return self._latest_ends or None

    def partitions(self, start: LaneOffset, end: LaneOffset) -> Sequence[InputPartition]:
        del start, end  # `latestOffset` has selected the events.
        options = self._options
        self._batch_number += 1
        self._batch_started = time.monotonic()
        self._batch = self._lane.plan_batch(options.queue, self._batch, self._batch_number)
        return split_into_partitions(self._batch, options.ordering, options)

    def commit(self, end: LaneOffset) -> None:
        """Do nothing: the sink has settled the batch."""

    # ── in tasks ──

    def read(self, partition: InputPartition) -> Iterator[Any]:
        with freeze_gc_after("read"):
            yield from self._read(partition.value)

    def _read(self, task: TaskSpans) -> Iterator[pa.RecordBatch]:
        options, schema = self._options, self._scan.arrow_schema
        if options.by_place:
            return iter([encode_task_spans(task, schema)])
        read = schema
        if options.grouped:
            read = schema.remove(schema.get_field_index(GROUP_OFFSETS))
        builder = RowBuilder(read, options.queue, task.node, options.parse)
        nodes, queue = self._scan.nodes, options.queue
        rows = read_task_spans(nodes, queue, task, builder, options.rows_per_batch)
        if not options.grouped:
            return rows
        return (group_rows(each, schema) for each in rows if each.num_rows)
