"""Reads a queue with Spark as it grows: Spark's checkpoint says how far a query has come.

The position of a query is an offset for each node (``batch_planning.QueryPosition``). A query with
``consume`` settles events after Spark has committed their batch: before that, Spark may ask for
them again. The lane of an action with a checkpoint reads with this reader, too, and settles by the
progress that Spark reports (:class:`QuerySettler`).

A queue that was dropped and created again has other events at the same offsets. So the position
also has the id of the queue on each node. If the id changes, the query reports a loss, starts at
the first event of the new queue, and never settles the new queue by old offsets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.types import StructType

from turnlane.errors import RetryLater
from turnlane.logs import get_logger
from turnlane.spark.batch_planning import (
    UNKNOWN_POSITION,
    BatchWait,
    Offset,
    Positions,
    QueryPosition,
    QueueExtent,
    limit_ends,
)
from turnlane.spark.batch_reader import QueueScan
from turnlane.spark.nodes import Nodes
from turnlane.spark.options import ReadOptions

log = get_logger(__name__)


class _SettledEnd(NamedTuple):
    """How far a queue is settled, and its id, if that is known."""

    end: int
    queue_id: str | None


class QuerySettler:
    """Settles the events that a query has committed to its checkpoint.

    It always settles from where the query began: so it also settles what an earlier run could not,
    and leaves the events that the query has passed over to others.
    """

    def __init__(self, nodes: Nodes, queue: str) -> None:
        self._nodes = nodes
        self._queue = queue
        self._settled: dict[int, _SettledEnd] = {}
        self._has_warned = False
        """Whether the last attempt failed and was logged; further failures are not logged."""

    def on_progress(self, progress: StreamingQueryProgress) -> None:
        """Settle up to the end of a batch that Spark reports."""
        for source in progress.sources:
            offset = json.loads(source.endOffset) if source.endOffset else {}
            self.settle(QueryPosition.from_offset(offset))

    def settle(self, position: QueryPosition) -> None:
        """Settle up to a position, on nodes that are still part of the endpoint."""
        calls = {
            node: partial(self._settle, node, position.starts.get(node, 0), wanted)
            for node, end in position.offsets.items()
            if (wanted := _SettledEnd(end, position.queue_ids.get(node))) != self._settled.get(node)
            and node < self._nodes.count
            and position.starts.get(node, 0) < end
        }
        try:
            self._settled |= self._nodes.ask_all(f"settle {self._queue}", calls, 0.0)
        except RetryLater as error:  # The next call tries again.
            if not self._has_warned:
                log.warning("query.settle_failed", queue=self._queue, error=error)
            self._has_warned = True
        else:
            self._has_warned = False

    def _settle(self, node: int, first: int, wanted: _SettledEnd) -> _SettledEnd:
        self._nodes.settle(node, self._queue, first, *wanted)
        return wanted


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a queue as it grows, for a query with a checkpoint."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._scan = QueueScan(options, schema)
        self._target: dict[int, int] | None = None
        """Where to stop, for ``Trigger.AvailableNow``."""
        self._wait = BatchWait(options.min_offsets_per_trigger, options.max_trigger_delay)
        self._latest_ends: dict[int, int] = {}
        self._settler: QuerySettler | None = None
        self._gone: dict[int, tuple[int, str | None]] = {}
        """By node, how far a queue was read that no longer exists, and its id if that is known: the
        queue that replaced it must not be settled up to there."""

    # ── in the driver ──

    def initialOffset(self) -> Offset:  # noqa: N802
        nodes = self._scan.nodes
        unknown = dict.fromkeys(range(nodes.count), UNKNOWN_POSITION)
        extents = nodes.wait_for_events(self._options.queue, unknown, 0.0)
        starts = self._scan.find_starts(extents)
        return QueryPosition(unknown).start_at(starts, extents).to_offset()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        options = self._options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        extents = self._scan.nodes.get_extents(self._options.queue)
        self._target = {node: extent.end for node, extent in extents.items()}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        # Spark has noted that the batch up to here is done and will never ask for it again. Spark
        # calls `commit` with the next batch, so after the last batch it does not call it.
        self.commit(start)
        position = QueryPosition.from_offset(start)
        extents = self._wait_for_events(position)
        first = self._find_new_starts(position, extents)
        if first:
            # A batch without events, by which Spark stores where they begin.
            return position.start_at(first, extents).to_offset()
        self._scan.check_gone(position.offsets, extents)
        # An old checkpoint has no queue ids: adding them is a batch, too, so that Spark stores it.
        position = position.add_queue_ids(extents)
        end = self._find_ends(position.offsets, extents)
        if self._target is None and not self._has_enough(position.offsets, end):
            return position.to_offset()
        limited = limit_ends(position.offsets, end, self._get_event_limit(limit))
        return position.advance_to(limited).to_offset()

    def _wait_for_events(self, position: QueryPosition) -> dict[int, QueueExtent]:
        """Return how far the queue goes on nodes that answer; waits a while for new events."""
        nodes = self._scan.nodes
        timeout = 0.0 if self._target is not None else self._options.poll_timeout
        known = dict.fromkeys(range(nodes.count), UNKNOWN_POSITION) | position.offsets
        return nodes.wait_for_events(self._options.queue, known, timeout)

    def _find_new_starts(
        self, position: QueryPosition, extents: dict[int, QueueExtent]
    ) -> dict[int, int]:
        """Return where reading starts on nodes for which the checkpoint has no valid position.

        On a node that was added, and in a queue that was created again, it starts at the earliest
        event, wherever the query began.
        """
        offsets = position.offsets
        answered = {n: each for n, each in extents.items() if offsets.get(n) == UNKNOWN_POSITION}
        first = self._scan.find_starts(answered) if answered else {}
        for node, extent in extents.items():
            at = offsets.get(node)
            if at is None:
                first[node] = extent.low
            elif position.is_other_queue(node, extent.queue_id) or extent.end < at:
                self._report_replaced_queue(node, position, extent)
                first[node] = extent.low
        return first

    def _report_replaced_queue(
        self, node: int, position: QueryPosition, extent: QueueExtent
    ) -> None:
        at = position.offsets[node]
        if position.is_other_queue(node, extent.queue_id):
            what = f"node {node} has created it again since it was read up to offset {at}"
        else:
            what = f"node {node} ends at offset {extent.end}, before {at}"
        self._scan.report_loss(what)
        self._gone[node] = at, position.queue_ids.get(node)

    def _find_ends(self, start: Positions, extents: dict[int, QueueExtent]) -> dict[int, int]:
        """Return how far the query could read. A node that does not answer stays where it is."""
        ends = {node: extents[node].end if node in extents else at for node, at in start.items()}
        self._latest_ends = dict(ends)
        if self._target is None:
            return ends
        target = self._target
        return {node: min(end, max(start[node], target.get(node, 0))) for node, end in ends.items()}

    def _has_enough(self, start: Positions, end: Positions) -> bool:
        events = sum(end.values()) - sum(start.values())
        wait = self._wait.compute_wait(events, time.monotonic())
        if wait:
            # Spark asks again at once: without a sleep it would keep a core busy.
            time.sleep(min(self._options.poll_timeout, wait))
        return not wait

    def _get_event_limit(self, limit: ReadLimit) -> int | None:
        """Return the most events of a batch: as in the options, unless Spark wants everything."""
        if isinstance(limit, ReadAllAvailable):
            return None
        limits = []
        options = self._options
        if options.max_offsets_per_trigger is not None:
            limits.append(options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            event_bytes = self._scan.nodes.estimate_event_bytes(options.queue)
            limits.append(max(1, int(options.max_bytes_per_trigger / event_bytes)))
        return min(limits, default=None)

    def reportLatestOffset(self) -> dict[str, int] | None:  # noqa: N802
        """Return how far the queue goes: Spark shows the lag."""
        return {str(node): end for node, end in self._latest_ends.items()} or None

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        position, last = QueryPosition.from_offset(start), QueryPosition.from_offset(end)
        # On nodes where reading starts, or starts again, the batch has no events.
        without_events = {
            node
            for node, at in last.offsets.items()
            if not 0 <= position.offsets.get(node, UNKNOWN_POSITION) <= at
            or position.is_other_queue(node, last.queue_ids.get(node, ""))
        }
        if not self._latest_ends:
            # A batch of the run before: the queue may have changed since.
            without_events |= self._find_replaced_queues(position, last, without_events)
        first = {
            node: at if node in without_events else position.offsets[node]
            for node, at in last.offsets.items()
        }
        return self._scan.cut_into_partitions(first, last.offsets)

    def _find_replaced_queues(
        self, position: QueryPosition, last: QueryPosition, without_events: set[int]
    ) -> set[int]:
        """Return nodes where the queue of a batch no longer exists; the next batch reads the new.

        Also reports events of the batch that are gone.
        """
        nodes, queue = self._scan.nodes, self._options.queue
        extents = nodes.wait_for_events(queue, position.offsets, 0.0)
        others = {n for n, each in extents.items() if last.is_other_queue(n, each.queue_id)}
        for node in others:
            self._report_replaced_queue(node, last, extents[node])
        checked = extents.keys() - others - without_events
        self._scan.check_gone(position.offsets, {n: extents[n] for n in checked})
        return others

    def commit(self, end: Offset) -> None:
        """Settle everything before ``end``: Spark will not ask for it again."""
        if not self._options.consume:
            return
        if self._settler is None:
            self._settler = QuerySettler(self._scan.nodes, self._options.queue)
        # The last batch of a queue is committed after the query has noticed that it was replaced.
        position = QueryPosition.from_offset(end)
        left = {
            node: at
            for node, at in position.offsets.items()
            if self._gone.get(node) != (at, position.queue_ids.get(node))
        }
        self._settler.settle(replace(position, offsets=left))

    # ── in tasks ──

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self._scan.read(partition)
