"""Reading a queue with Spark as it grows: Spark's checkpoint says how far a query has come."""

from __future__ import annotations

import json
import logging
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
from turnlane.spark.batch_planning import (
    UNHEARD,
    BatchWait,
    Extent,
    Offset,
    Place,
    Positions,
    admitted,
)
from turnlane.spark.nodes import Nodes
from turnlane.spark.options import ReadOptions
from turnlane.spark.reader import QueueReading, SlicePartition

# ── settling ──
# Queries that keep their place in a checkpoint: what they have committed is settled after it.

log = logging.getLogger(__name__)


class _Settled(NamedTuple):
    """How far a queue is settled, and which one, if that is known."""

    end: int
    queue_id: str | None


class Settling:
    """Settles what a query has committed to its checkpoint: it will never ask for it again.

    Always from where the query began: what an earlier run could not settle is settled by this one,
    and what the query has passed over is somebody else's.
    """

    def __init__(self, nodes: Nodes, queue: str) -> None:
        self._nodes = nodes
        self._queue = queue
        self._settled: dict[int, _Settled] = {}
        self._is_late = False
        """Whether it was told of that something could not be settled: once is enough."""

    def __call__(self, progress: StreamingQueryProgress) -> None:
        """The query has come so far."""
        for source in progress.sources:
            self.settle(Place.of(json.loads(source.endOffset) if source.endOffset else {}))

    def settle(self, place: Place) -> None:
        """Settle what the query has read on its way, on nodes that are still there."""
        questions = {
            node: partial(self._settle, node, place.begun.get(node, 0), wanted)
            for node, end in place.at.items()
            if (wanted := _Settled(end, place.queues.get(node))) != self._settled.get(node)
            and node < self._nodes.count
            and place.begun.get(node, 0) < end
        }
        try:
            self._settled |= self._nodes.answers(f"settle {self._queue}", questions, 0.0)
        except RetryLater as error:  # tried again with the next look
            if not self._is_late:
                log.warning("%s is not settled yet: %s", self._queue, error)
            self._is_late = True
        else:
            self._is_late = False

    def _settle(self, node: int, first: int, wanted: _Settled) -> _Settled:
        self._nodes.settle(node, self._queue, first, *wanted)
        return wanted


class StreamReader(QueueReading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A queue as it grows. Offsets are those of the queue, by node."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._target: dict[int, int] | None = None
        """Where to stop, for ``Trigger.AvailableNow``."""
        self._wait = BatchWait(options.min_offsets_per_trigger, options.max_trigger_delay)
        self._seen: dict[int, int] = {}
        self._settling: Settling | None = None
        self._gone: dict[int, tuple[int, str | None]] = {}
        """How far queues were read that are no more, and which they were, if that is known: their
        successors are not to be settled."""

    def initialOffset(self) -> Offset:  # noqa: N802
        nodes, queue = self._nodes(), self._options.queue
        unheard = dict.fromkeys(range(nodes.count), UNHEARD)
        extents = nodes.wait(queue, unheard, 0.0)
        return Place(unheard).begin(self._starts(extents), extents).offset()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        options = self._options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        extents = self._nodes().extents(self._options.queue)
        self._target = {node: extent.end for node, extent in extents.items()}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        # Spark has noted that the batch up to here is done, and will never ask for it again. Its
        # own `commit` comes with the next batch, so after the last one it does not come.
        self.commit(start)
        place = Place.of(start)
        extents = self._available(place)
        first = self._beginnings(place, extents)
        if first:
            # A step without events, by which Spark learns where they begin.
            return place.begin(first, extents).offset()
        self._check_gone(place.at, extents)
        # Of a checkpoint of old: to know the queue is a step too, so that it is not forgotten.
        place = place.knowing(extents)
        end = self._ends(place.at, extents)
        if self._target is None and not self._enough(place.at, end):
            return place.offset()
        return place.moved(admitted(place.at, end, self._limit(limit))).offset()

    def _available(self, place: Place) -> dict[int, Extent]:
        """How far the nodes have come; waits a while. One that is away is left out."""
        nodes, queue = self._nodes(), self._options.queue
        timeout = 0.0 if self._target is not None else self._options.poll_timeout
        known = dict.fromkeys(range(nodes.count), UNHEARD) | place.at
        return nodes.wait(queue, known, timeout)

    def _beginnings(self, place: Place, extents: dict[int, Extent]) -> dict[int, int]:
        """Where reading begins on nodes of which the checkpoint does not say so.

        A node that was added is read from its earliest event, wherever the query began. So is a
        queue that was made anew.
        """
        heard = {node: each for node, each in extents.items() if place.at.get(node) == UNHEARD}
        first = self._starts(heard) if heard else {}
        for node, extent in extents.items():
            at = place.at.get(node)
            if at is None:
                first[node] = extent.low
            elif place.is_other(node, extent.queue_id) or extent.end < at:
                self._made_anew(node, place, extent)
                first[node] = extent.low
        return first

    def _made_anew(self, node: int, place: Place, extent: Extent) -> None:
        """Complain of a queue in whose place there is another, whose offsets mean other events."""
        at = place.at[node]
        if place.is_other(node, extent.queue_id):
            self._lost(f"node {node} has made it anew since it was read up to offset {at}")
        else:
            self._lost(f"node {node} ends at offset {extent.end}, before {at}")
        self._gone[node] = at, place.queues.get(node)

    def _ends(self, at: Positions, extents: dict[int, Extent]) -> dict[int, int]:
        """How far one could read. A node that is away stays where it is."""
        end = {node: extents[node].end if node in extents else each for node, each in at.items()}
        self._seen = dict(end)
        if self._target is None:
            return end
        return {
            node: min(each, max(at[node], self._target.get(node, 0))) for node, each in end.items()
        }

    def _enough(self, at: Positions, end: Positions) -> bool:
        left = self._wait.left(sum(end.values()) - sum(at.values()), time.monotonic())
        if left:
            # Spark asks again at once: not to burn a core while there is too little.
            time.sleep(min(self._options.poll_timeout, left))
        return not left

    def _limit(self, limit: ReadLimit) -> int | None:
        """The most events of a batch: what the options say, unless Spark wants everything."""
        if isinstance(limit, ReadAllAvailable):
            return None
        limits = []
        options = self._options
        if options.max_offsets_per_trigger is not None:
            limits.append(options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            each = self._nodes().bytes_per_event(options.queue)
            limits.append(max(1, int(options.max_bytes_per_trigger / each)))
        return min(limits, default=None)

    def reportLatestOffset(self) -> dict[str, int] | None:  # noqa: N802
        """How far the queue goes: Spark shows the lag."""
        return {str(node): end for node, end in self._seen.items()} or None

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        place, last = Place.of(start), Place.of(end)
        steps = _beginning(place, last)
        if not self._seen:
            # A batch of the run before, which nobody has looked at since.
            steps |= self._replaced(place, last, steps)
        first = {n: at if n in steps else place.at[n] for n, at in last.at.items()}
        return self._partitions(first, last.at)

    def _replaced(self, place: Place, last: Place, steps: set[int]) -> set[int]:
        """Nodes where the queue of a batch is no more: the one that is there is read after it."""
        extents = self._nodes().wait(self._options.queue, place.at, 0.0)
        others = {n for n, each in extents.items() if last.is_other(n, each.queue_id)}
        for node in others:
            self._made_anew(node, last, extents[node])
        self._check_gone(place.at, {n: extents[n] for n in extents.keys() - others - steps})
        return others

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, SlicePartition)
        return self._rows(partition.piece)

    def commit(self, end: Offset) -> None:
        """Spark is through with everything before ``end``."""
        if not self._options.consume:
            return
        if self._settling is None:
            self._settling = Settling(self._nodes(), self._options.queue)
        # The last batch before a queue was made anew is committed after that was noticed.
        place = Place.of(end)
        left = {
            node: at
            for node, at in place.at.items()
            if self._gone.get(node) != (at, place.queues.get(node))
        }
        self._settling.settle(replace(place, at=left))


def _beginning(place: Place, last: Place) -> set[int]:
    """Nodes where reading begins, or begins anew: a step without events, for none are before."""
    return {
        node
        for node, end in last.at.items()
        if not 0 <= place.at.get(node, UNHEARD) <= end
        or place.is_other(node, last.queues.get(node, ""))
    }
