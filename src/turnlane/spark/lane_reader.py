"""Reading for a lane: what the node says is not settled, batch by batch.

Spark's own offsets are a clock for it, no more: they change when there is something to do. What a
batch has is agreed with the nodes, and events of which a task could make nothing come again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit
from pyspark.sql.types import StructType

from turnlane.client.node_client import Unsettled
from turnlane.delivery.settings import PLACES
from turnlane.intervals import Span, count_of
from turnlane.spark.batch_planning import TAKEN, BatchSize, BatchWait, Share, batch_of, shared
from turnlane.spark.nodes import Gates, LaneNodes
from turnlane.spark.options import LaneReadOptions
from turnlane.spark.reader import QueueReading, share_events, share_rows
from turnlane.spark.row_codec import RowMaker, grouped
from turnlane.spark.session import lasting
from turnlane.spark.steps import Suspension, suspension

LARGEST: Final = 10_000_000
"""The most events of a batch where nobody says how many."""

Offset = dict[str, int]


class SharePartition(InputPartition):
    """A share, as Spark carries it to a task."""

    def __init__(self, share: Share) -> None:
        super().__init__(tuple(share))
        self.share = share


class LaneReader(QueueReading, DataSourceStreamReader):
    """A queue as a lane reads it. The driver has one, and each task one for its share."""

    _options: LaneReadOptions

    def __init__(self, options: LaneReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._size = BatchSize.at_first(
            options.probe_events, options.max_offsets_per_trigger or LARGEST, options.batch_seconds
        )
        self._batch: dict[int, list[Span]] = {}
        self._count = 0
        self._begun: float | None = None
        """When the last batch was planned, until it is known how it went."""
        self._wait = BatchWait(options.min_offsets_per_trigger, options.max_trigger_delay)
        self._seen: Offset = {}
        self._held_up = Suspension(0.0)
        """As it was when something waited last."""

    def _lane(self) -> LaneNodes:
        options = self._options
        return LaneNodes(self._nodes(), options.lane, options.run, options.queue, options.into)

    # ── in the driver ────────────────────────────────────────────────────────────────────────────

    def initialOffset(self) -> Offset:  # noqa: N802
        return {TAKEN: 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadAllAvailable()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Another one than ``start`` if there is a batch to be had; waits a while for one."""
        del limit  # it is the size of the batch, which is found out
        options = self._options
        events, fresh = self._wanted()
        found = self._lane().waiting(events, int(events * fresh), options.poll_timeout)
        pending = sum(each.pending for each in found.values())
        if pending:  # without, there is nothing to hold up: a lane that is idle asks but one thing
            self._held_up = self._suspension()
            if self._held_up.wait > 0:
                time.sleep(min(self._held_up.wait, options.poll_timeout))
                return start
        self._learn(found)
        if not self._enough(pending):
            return start
        waiting = {node: each.spans for node, each in found.items()}
        self._batch = batch_of(waiting, *self._wanted())
        self._seen = {str(node): each.end for node, each in found.items()}
        return self._next(start, found)

    def _suspension(self) -> Suspension:
        """What holds the lane up."""
        ways = self._options.ways
        actions = [way.action for each in ways for way in each]
        found = suspension(ways, Gates(self._nodes()).status(actions))
        if found.wait > 0 or found.is_probe:
            self._begun = None  # of a batch that failed there is nothing to learn about the rate
        return found

    def _wanted(self) -> tuple[int, float]:
        """The most events of a batch, and the share of the newest of them."""
        if self._held_up.wait > 0 or self._held_up.is_probe:
            return self._options.probe_events, 0.0
        return self._size.events, self._options.fresh_share

    def _learn(self, found: dict[int, Unsettled]) -> None:
        """How the last batch went, now that it is through."""
        if self._begun is None:
            return
        took = time.monotonic() - self._begun
        planned = sum(map(count_of, self._batch.values()))
        kept = sum(each.kept for each in found.values())
        self._size = self._size.after(planned, min(kept, planned), took)
        self._begun = None

    def _enough(self, pending: int) -> bool:
        left = self._wait.left(pending, time.monotonic())
        if left:
            # Spark asks again at once: not to burn a core while there is too little.
            time.sleep(min(self._options.poll_timeout, left))
        return bool(pending) and not left

    def _next(self, start: Offset, found: dict[int, Unsettled]) -> Offset:
        """The offset of the batch: how far it goes, and how much it has."""
        ends = {
            str(node): max(start.get(str(node), 0), self._batch[node][-1][1])
            for node in found
            if self._batch[node]
        }
        count = sum(map(count_of, self._batch.values()))
        return start | ends | {TAKEN: start[TAKEN] + count}

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """How far the queue goes: Spark shows the lag."""
        return self._seen or None

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        del start, end  # what they stand for was agreed on when the offset was made
        options = self._options
        self._count += 1
        self._begun = time.monotonic()
        self._batch = self._lane().plan(self._batch, self._count)
        shares = shared(
            self._batch,
            options.ordering,
            at_most=options.workers or max(2, options.min_partitions),
            per=options.worker_minimum_events,
        )
        return [SharePartition(share) for share in shares]

    def commit(self, end: Offset) -> None:
        """Nothing: the sink has settled it."""

    # ── in tasks ─────────────────────────────────────────────────────────────────────────────────

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, SharePartition)
        with lasting("read"):
            yield from self._rows_of(partition.share)

    def _rows_of(self, share: Share) -> Iterator[pa.RecordBatch]:
        options, schema = self._options, self._arrow_schema()
        if options.by_place:
            return iter([share_rows(share, schema)])
        seen = schema.remove(schema.get_field_index(PLACES)) if options.grouped else schema
        maker = RowMaker(seen, options.queue, share.node)
        rows = share_events(self._nodes(), options.queue, share, maker, options.rows_per_batch)
        if not options.grouped:
            return rows
        return (grouped(each, schema) for each in rows if each.num_rows)
