"""Reads a queue with Spark: as it is now, or as it grows. Blocks stay Arrow all the way.

:class:`QueueScan` is the part that all readers of a queue share: it turns options into offsets,
divides offsets among tasks and reads a task's offsets. :class:`QueueBatchReader` reads for a batch
query, :class:`QueueStreamReader` for a streaming query; lanes have ``lane_reader``.

Losing events is an error unless ``failOnDataLoss`` is false: a query that has to read an offset
either gets its event or fails.

Spark's checkpoint says how far a streaming query has come: an offset for each node
(``batch_planning.QueryPosition``). A query with ``consume`` settles events after Spark has
committed their batch: before that, Spark may ask for them again. The lane of an action with a
checkpoint reads in the same way, and settles by the progress that Spark reports
(:class:`QuerySettler`).

A queue that was dropped and created again has other events at the same offsets. So the position
also has the id of the queue on each node. If the id changes, the query reports a loss, starts at
the first event of the new queue, and never settles the new queue by old offsets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    In,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.types import StructType

from turnlane.client.node_client import QueueEnds
from turnlane.delivery.settings import Ordering
from turnlane.errors import Never, RetryLater
from turnlane.events import Block, join_consecutive
from turnlane.intervals import RangeSet, Span, find_inside, merge_near_spans
from turnlane.key_hash import find_nodes
from turnlane.logs import get_logger
from turnlane.spark.batch_planning import (
    UNKNOWN_POSITION,
    BatchWait,
    NodeRange,
    Offset,
    PendingSpans,
    Positions,
    QueryPosition,
    TaskSpans,
    cut_into_ranges,
    limit_ends,
    split_into_tasks,
)
from turnlane.spark.nodes import Nodes
from turnlane.spark.options import (
    EARLIEST,
    FROM_EARLIEST,
    FROM_LATEST,
    ROWS_PER_BATCH,
    Offsets,
    ReadOptions,
    SpanReadOptions,
    StateReadOptions,
    get_range,
)
from turnlane.spark.row_codec import Mask, RowBuilder
from turnlane.spark.session import freeze_gc_after

log = get_logger(__name__)

MAX_SPANS_SHOWN: Final = 5
"""The most spans of lost offsets that a message names."""


class DataLost(Never):
    """Events that a query had still to read are gone."""


class QueueScan:
    """Reads the queue of some options with the columns of a schema; used by every reader.

    Spark pickles readers into its tasks, and their scan with them: it has no connections of its
    own.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._wait = BatchWait(options.min_offsets_per_trigger, options.max_trigger_delay)
        self._reported_losses: set[str] = set()

    @property
    def nodes(self) -> Nodes:
        """The nodes of the endpoint, shared by all readers of this process."""
        return Nodes.from_options(self._options)

    @property
    def arrow_schema(self) -> pa.Schema:
        """The columns that Spark expects."""
        return to_arrow_schema(self._schema, timezone="UTC")

    def cut_into_partitions(self, start: Positions, end: Positions) -> list[InputPartition]:
        """Divide a range among tasks; each partition has a :class:`NodeRange`."""
        options = self._options
        pieces = cut_into_ranges(
            start,
            end,
            at_least=options.min_partitions,
            at_most=options.workers or max(2, options.min_partitions),
            events_per_task=options.worker_minimum_events,
        )
        return [InputPartition(piece) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the events of a task."""
        piece = partition.value
        if not isinstance(piece, NodeRange | TaskSpans):
            return  # Spark passes an empty partition if a query has none.
        options = self._options
        builder = RowBuilder(self.arrow_schema, options.queue, piece.node, options.parse)
        with freeze_gc_after("read"):
            if isinstance(piece, TaskSpans):
                rows = options.rows_per_batch
                yield from read_task_spans(self.nodes, options.queue, piece, builder, rows)
            else:
                read = self._read_unsettled if options.skip_settled else self._read_all
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
            lost = [f"{first} to {end - 1}" for first, end in missing]
            offsets = ", ".join(lost[:MAX_SPANS_SHOWN])
            if len(lost) > MAX_SPANS_SHOWN:
                offsets += f" and {len(lost) - MAX_SPANS_SHOWN} more spans"
            self.report_loss(f"on node {piece.node} the offsets {offsets} are gone: {why}")

    def _read_unsettled(self, piece: NodeRange, builder: RowBuilder) -> Iterator[pa.RecordBatch]:
        """Read the events of a range that are not settled, of which none may be missing.

        A query settles a batch only when it will never ask for it again. So a batch that is
        repeated has the same rows, without events that another client has settled in between.
        """
        queue, rows_per_batch = self._options.queue, self._options.rows_per_batch
        spans = self.nodes.find_unsettled(piece.node, queue, piece.first, piece.end)
        if spans:
            task = TaskSpans(piece.node, tuple(spans))
            yield from read_task_spans(self.nodes, queue, task, builder, rows_per_batch)

    def has_enough(self, events: int) -> bool:
        """Whether a batch of a stream can start with this many events; else sleeps for a while.

        Spark asks again at once: without a sleep it would keep a core busy.
        """
        wait = self._wait.compute_wait(events, time.monotonic())
        if wait:
            time.sleep(min(self._options.poll_timeout, wait))
        return not wait

    def find_starts(self, extents: Mapping[int, QueueEnds]) -> dict[int, int]:
        """Return the offsets at which a new query starts on these nodes."""
        options, nodes = self._options, self.nodes
        if options.starting_timestamp is not None:
            stamp = options.starting_timestamp
            return {node: nodes.find_offset_at(node, options.queue, stamp) for node in extents}
        return self.resolve_offsets(options.starting_offsets, "startingOffsets", extents)

    def resolve_offsets(
        self, wanted: Offsets, option: str, extents: Mapping[int, QueueEnds]
    ) -> dict[int, int]:
        """Return offsets that an option asks for. Raises ``Never`` if the queue is shorter."""
        nodes = range(self.nodes.count)
        if not isinstance(wanted, dict):
            wanted = dict.fromkeys(nodes, FROM_EARLIEST if wanted == EARLIEST else FROM_LATEST)
        if wanted.keys() != set(nodes):
            raise Never(
                f"{option}: names nodes {sorted(wanted)}, but the nodes are {sorted(nodes)}"
            )
        found = {}
        for node, extent in extents.items():
            special = {FROM_EARLIEST: extent.low, FROM_LATEST: extent.end}
            at = found[node] = special.get(wanted[node], wanted[node])
            if at > extent.end:
                ends = f"on node {node} the queue ends at offset {extent.end}, not {at}"
                raise Never(f"{option}: {ends}")
        return found

    def check_gone(self, offsets: Positions, extents: Mapping[int, QueueEnds]) -> None:
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
            raise DataLost(f"{text}; set failOnDataLoss to false to continue without them")
        if text not in self._reported_losses:
            log.warning("query.events_lost", queue=self._options.queue, loss=what)
        self._reported_losses.add(text)


def split_into_partitions(
    spans: PendingSpans, ordering: Ordering, options: ReadOptions
) -> list[InputPartition]:
    """Divide scattered events among tasks; each partition has :class:`TaskSpans`."""
    tasks = split_into_tasks(
        spans,
        ordering,
        at_most=options.workers or max(2, options.min_partitions),
        events_per_task=options.worker_minimum_events,
    )
    return [InputPartition(task) for task in tasks]


def read_task_spans(
    nodes: Nodes,
    queue: str,
    task: TaskSpans,
    builder: RowBuilder,
    rows_per_batch: int = ROWS_PER_BATCH,
) -> Iterator[Block]:
    """Read the events of a lane's task.

    The commit of the batch settles all of them, so every event must arrive, unless
    another client has settled it in between. Raises ``RetryLater``.
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
            raise RetryLater(
                f"queue {queue!r}: the event at offset {left[0][0]} cannot be read now"
            )


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


def extract_bounds(filters: Iterable[Filter]) -> tuple[OffsetBounds, list[Filter]]:
    """Return the bounds that filters set, and the filters that Spark has still to apply."""
    rest: list[Filter] = []
    firsts, ends, nodes = [0], [], None
    for each in filters:
        match each:
            case EqualTo(("partition",), int(value)):
                nodes = {value} if nodes is None else nodes & {value}
            case In(("partition",), tuple(values)):
                nodes = set(values) if nodes is None else nodes & set(values)
            case In(("offset",), (int(), *_) as values):
                offsets = [value for value in values if value is not None]
                firsts.append(min(offsets))
                ends.append(max(offsets) + 1)
                rest.append(each)  # The bounds include offsets between these.
            case _ if (found := get_range(each, "offset", int)) is not None:
                first, end = found
                firsts += [] if first is None else [first]
                ends += [] if end is None else [end]
            case _:
                rest.append(each)
    found_nodes = None if nodes is None else frozenset(nodes)
    return OffsetBounds(max(firsts), min(ends, default=None), found_nodes), rest


class QueueBatchReader(DataSourceReader):
    """Reads a queue as it is now."""

    _bounds = OffsetBounds()

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._scan = QueueScan(options, schema)

    def partitions(self) -> Sequence[InputPartition]:
        scan = self._scan
        if isinstance(self._options, SpanReadOptions):
            spans: dict[int, list[Span]] = {}
            for node, first, until in self._options.spans:
                spans.setdefault(node, []).append((first, until))
            return split_into_partitions(spans, Ordering.NONE, self._options)
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


# ── streaming queries ──


SettledEnd = tuple[int, str | None]
"""How far a queue is settled, and its id, if that is known."""


class QuerySettler:
    """Settles the events that a query has committed to its checkpoint.

    It always settles from where the query began: so it also settles what an earlier run could not,
    and leaves the events that the query has passed over to others.
    """

    def __init__(self, nodes: Nodes, queue: str) -> None:
        self._nodes = nodes
        self._queue = queue
        self._settled: dict[int, SettledEnd] = {}
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
            if (wanted := (end, position.queue_ids.get(node))) != self._settled.get(node)
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

    def _settle(self, node: int, first: int, wanted: SettledEnd) -> SettledEnd:
        self._nodes.settle(node, self._queue, first, *wanted)
        return wanted


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a queue as it grows, for a query with a checkpoint."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._scan = QueueScan(options, schema)
        self._target: dict[int, int] | None = None
        """Where to stop, for ``Trigger.AvailableNow``."""
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
        # A node that does not answer is left out.
        nodes = self._scan.nodes
        timeout = 0.0 if self._target is not None else self._options.poll_timeout
        known = dict.fromkeys(range(nodes.count), UNKNOWN_POSITION) | position.offsets
        extents = nodes.wait_for_events(self._options.queue, known, timeout)
        first = self._find_new_starts(position, extents)
        if first:
            # A batch without events, by which Spark stores where they begin.
            return position.start_at(first, extents).to_offset()
        self._scan.check_gone(position.offsets, extents)
        # An old checkpoint has no queue ids: adding them is a batch, too, so that Spark stores it.
        position = position.add_queue_ids(extents)
        end = self._find_ends(position.offsets, extents)
        events = sum(end.values()) - sum(position.offsets.values())
        if self._target is None and not self._scan.has_enough(events):
            return position.to_offset()
        # Another number makes a batch, also without events.
        position = replace(position, request=max(position.request, self._read_request()))
        limited = limit_ends(position.offsets, end, self._get_event_limit(limit))
        return position.advance_to(limited).to_offset()

    def _read_request(self) -> int:
        """Return the number of the last batch for which the lane has asked (``idle_watermark``)."""
        if not isinstance(self._options, StateReadOptions):
            return 0
        try:
            return int(self._options.request.read_text())
        except (OSError, ValueError):  # There is none yet, or a power loss has left it empty.
            return 0

    def _find_new_starts(
        self, position: QueryPosition, extents: dict[int, QueueEnds]
    ) -> dict[int, int]:
        """Return where reading starts on nodes for which the checkpoint has no valid position.

        On a node that was added, and in a queue that was created again, it starts at the earliest
        event, also if the query began at another offset.
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

    def _report_replaced_queue(self, node: int, position: QueryPosition, extent: QueueEnds) -> None:
        at = position.offsets[node]
        if position.is_other_queue(node, extent.queue_id):
            what = f"node {node} has created it again since it was read up to offset {at}"
        else:
            what = f"node {node} ends at offset {extent.end}, before {at}"
        self._scan.report_loss(what)
        self._gone[node] = at, position.queue_ids.get(node)

    def _find_ends(self, start: Positions, extents: dict[int, QueueEnds]) -> dict[int, int]:
        """Return how far the query could read. A node that does not answer stays where it is."""
        ends = {node: extents[node].end if node in extents else at for node, at in start.items()}
        self._latest_ends = dict(ends)
        if self._target is None:
            return ends
        target = self._target
        return {node: min(end, max(start[node], target.get(node, 0))) for node, end in ends.items()}

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
