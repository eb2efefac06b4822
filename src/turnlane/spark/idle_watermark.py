"""Moves the watermark of an idle lane on by the clock, so that its last windows come out.

Spark moves a watermark only by newer events: on a quiet stream, the last windows of an aggregate
would stay in the state until the next event. So if a lane with state has had no event for
``idle_after``, its watermark moves on as fast as the clock, in steps, until nothing is left in the
state.

It moves on from where the events have left it, and not to the time of the clock. If a stream is
always ten minutes late, so is its watermark, and its events are still not too late after a pause.
The watermark never comes closer to the clock than the delay that the action allows.

A lane is idle (:class:`IdleTimer`) only if no event waits in a queue that its query reads. Events
may also wait in the main queue, because the main lane is slow or suspended. So the watermark moves
only up to the time before which all events of the main queue have reached the queues of actions.

The watermark is Spark's own. Spark decides on the watermark of a batch before it plans the batch,
and must not find another one later. So :class:`IdleWatermark` asks the lane's reader for a batch
without events (``queue_reader``), and sets the watermark while Spark runs that batch. The batch
after it has the new watermark: Spark runs it without events, as it does whenever events have moved
the watermark. So there are no rows that belong to no event, the checkpoint keeps the watermark of
each batch, and a batch that is repeated after a restart has the same result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from py4j.clientserver import ClientServer  # type: ignore[import-untyped]  # has none
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from turnlane.client.node_client import UnsettledSpans
from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.errors import TurnlaneError
from turnlane.logs import get_logger
from turnlane.pipeline.settings import MAIN
from turnlane.spark.errors import describe_failure
from turnlane.spark.nodes import Nodes

log = get_logger(__name__)

STEP_SHARE: Final = 0.1
"""The share of a pause that a step takes at least: each step costs two batches, and a window may be
open for a day."""
BATCH_SECONDS: Final = 5.0
"""How long the batch that was asked for may take to begin: the reader polls for about a second."""
LOOK_SECONDS: Final = 0.02
"""How often to look whether it has begun."""

QueueState = Mapping[int, UnsettledSpans]
"""The state of a queue on every node."""


class IdleTimer:
    """Finds out for how long the query of a lane has had no event. Pure.

    Times are seconds of a monotonic clock, taken before the nodes are asked.
    """

    def __init__(self, now: float) -> None:
        self.idle_since = now
        self.routed_until: float | None = None
        """All events that the main queue had at this time have reached the queues of actions."""
        self._mark: tuple[float, dict[int, int]] | None = None
        """A time, and the end of the main queue on each node at this time."""
        self._ends: list[list[int]] | None = None

    def add_main(self, main: QueueState, now: float) -> None:
        """Note the state of the main queue. The other queues have to be asked after it."""
        for _ in range(2):  # If all before the old mark is routed, all before the new one may be.
            if self._mark is None:
                self._mark = now, {node: each.end for node, each in main.items()}
            at, ends = self._mark
            if not all(node in main and main[node].low >= end for node, end in ends.items()):
                break
            self.routed_until, self._mark = at, None

    def add_queues(self, queues: Sequence[QueueState], now: float) -> bool:
        """Note the states of the queues that the query reads; returns whether events came or wait.

        Then the lane is idle from now on.
        """
        ends = [[each.end for _, each in sorted(queue.items())] for queue in queues]
        has_new = self._ends is not None and ends != self._ends
        self._ends = ends
        waits = any(each.pending for queue in queues for each in queue.values())
        if has_new or waits:
            self.idle_since = now
        return has_new or waits


class WatermarkLine(NamedTuple):
    """A watermark that moves on as fast as the clock, in seconds."""

    watermark: float
    at: float
    """The monotonic time at which events had moved it there."""

    def compute(self, until: float, limit: float) -> float:
        """Return the watermark at a monotonic time, at most ``limit``."""
        return min(self.watermark + max(0.0, until - self.at), limit)


class IdleWatermark:
    """Moves the watermark of one lane. Used by the lane's thread, about once a second.

    ``delay`` is how far the watermark stays behind the clock at least, ``trigger`` the time between
    two batches. The reader looks into the file ``request``.
    """

    def __init__(
        self,
        spark: SparkSession,
        nodes: Nodes,
        queues: Sequence[str],
        request: Path,
        *,
        idle_after: float,
        delay: float,
        trigger: float = 0.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._nodes = nodes
        self._queues = queues
        self._request = request
        self._idle_after = idle_after
        self._delay = delay
        self._trigger = trigger
        self._clock = clock
        self._run: str | None = None
        self._timer = IdleTimer(0.0)
        self._line: WatermarkLine | None = None
        self._moved_at = 0.0
        self._moved_in: int | None = None
        """The last batch before it was moved, until events that are too late are reported."""
        self._seconds: Any = spark._jvm.java.util.concurrent.TimeUnit.SECONDS  # type: ignore[union-attr]  # noqa: SLF001 - pyspark has no other way
        self._not_before = 0.0
        """No attempt before this time: an earlier one has failed."""
        if not isinstance(spark.sparkContext._gateway, ClientServer):  # noqa: SLF001
            # Only a thread of Python with its own thread of Java can own a lock.
            self._not_before = math.inf
            log.warning("lane.watermark_not_moved", error="PYSPARK_PIN_THREAD is not true")

    def on_progress(self, progress: StreamingQueryProgress) -> None:
        """Report events that have come too late after the watermark was moved."""
        late = sum(each.numRowsDroppedByWatermark for each in progress.stateOperators)
        if late and self._moved_in is not None and progress.batchId > self._moved_in:
            self._moved_in = None
            log.warning(
                "lane.events_late",
                lane=progress.name,
                rows=late,
                watermark=progress.eventTime.get("watermark"),
                hint="they are not in its windows; use a longer watermark or idle_after",
            )

    def check(
        self, query: StreamingQuery, progress: StreamingQueryProgress | None, stop: threading.Event
    ) -> None:
        """Move the watermark if it is time; ``progress`` is the last of this run of the query.

        May wait until a batch begins, or until the lane is stopped.
        """
        now = self._clock.monotonic()
        if self._run != str(query.runId):
            self._run, self._timer, self._line = str(query.runId), IdleTimer(now), None
            self._moved_at = 0.0
        if now < self._not_before or not _may_have_open_windows(progress):
            return
        main = self._ask(MAIN)
        queues = [self._ask(queue) for queue in self._queues]
        if main is None or None in queues:
            return
        self._timer.add_main(main, now)
        if self._timer.add_queues([each for each in queues if each is not None], now):
            self._line = None
        try:
            if self._move(query, now, stop):
                self._moved_in = -1 if progress is None else progress.batchId
        except (AttributeError, OSError, Py4JError) as error:
            if query.isActive:  # The lane itself reports why a query has ended.
                self._not_before = now + self._idle_after
                reason = describe_failure(error)
                log.warning("lane.watermark_not_moved", lane=query.name, error=reason)

    def _ask(self, queue: str) -> QueueState | None:
        """Return the state of a queue; ``None`` unless all nodes answer."""
        calls = {n: partial(self._nodes[n].unsettled, queue, 1) for n in range(self._nodes.count)}
        try:
            found = self._nodes.ask_all(f"idle {queue}", calls, 0.0)
        except TurnlaneError:  # The lane itself reports nodes that are away.
            return None
        return found if len(found) == self._nodes.count else None

    def _move(self, query: StreamingQuery, now: float, stop: threading.Event) -> bool:
        """Move the watermark if it is time; returns whether it was moved."""
        execution: Any = query._jsq.streamingQuery()  # noqa: SLF001 - pyspark has no other way
        tracker = execution.watermarkTracker()
        if self._line is None and tracker is not None:
            self._line = self._read_line(execution, tracker.currentWatermark() / 1000)
        timer, line = self._timer, self._line
        if line is None or timer.routed_until is None:
            return False
        step = max(self._idle_after, (now - timer.idle_since) * STEP_SHARE)
        if now - max(timer.idle_since, self._moved_at) < step:
            return False
        clock = self._clock.time_ns() / 1e9 - (self._clock.monotonic() - timer.routed_until)
        wanted = line.compute(timer.routed_until, clock - self._delay)
        milliseconds = int(wanted * 1000)
        if tracker.currentWatermark() >= milliseconds:
            return False
        self._ask_for_batch()
        deadline = self._clock.monotonic() + self._trigger + BATCH_SECONDS
        while not self._set_in_batch(execution, tracker, milliseconds):
            if self._clock.monotonic() > deadline or not query.isActive or stop.wait(LOOK_SECONDS):
                return False
        self._moved_at = now
        to = datetime.fromtimestamp(wanted, UTC).isoformat(timespec="milliseconds")
        log.info("lane.watermark_moved", lane=query.name, to=to)
        return True

    def _ask_for_batch(self) -> None:
        """Have the reader begin a batch, with or without events."""
        draft = self._request.with_name(f".{self._request.name}")
        draft.write_text(str(self._clock.time_ns()))
        draft.replace(self._request)

    def _set_in_batch(self, execution: Any, tracker: Any, milliseconds: int) -> bool:  # noqa: ANN401 - of Java
        """Raise Spark's watermark if a batch is in progress; returns whether one was.

        Under Spark's lock, no batch begins or ends. The lock is fair, so it is free for this thread
        between the beginning of a batch and its end.
        """
        lock = execution.awaitProgressLock()
        if not lock.tryLock(1, self._seconds):
            return False
        try:
            begun, ended = (
                each.getLatestBatchId().getOrElse(None)
                for each in (execution.offsetLog(), execution.commitLog())
            )
            if begun is None or begun == ended:
                return False
            if tracker.currentWatermark() < milliseconds:
                tracker.setWatermark(milliseconds)
        finally:
            lock.unlock()
        return True

    def _read_line(self, execution: Any, watermark: float) -> WatermarkLine | None:  # noqa: ANN401 - of Java
        """Return where events have moved the watermark, and when; ``None`` without a batch.

        The watermark has to be read before the time: if a batch ends in between, the time is too
        late, which is safe.
        """
        latest = execution.offsetLog().getLatest()
        if latest.isEmpty() or watermark <= 0:
            return None
        offsets = latest.get()._2()  # noqa: SLF001 - a pair of Scala
        seconds = offsets.metadataOpt().get().batchTimestampMs() / 1000
        since = max(0.0, self._clock.time_ns() / 1e9 - seconds)
        return WatermarkLine(watermark, max(self._clock.monotonic() - since, self._moved_at))


def _may_have_open_windows(progress: StreamingQueryProgress | None) -> bool:
    """Whether the query may have state that a later watermark removes; unknown before a batch."""
    if progress is None:
        return True
    return "watermark" in progress.eventTime and any(
        each.numRowsTotal for each in progress.stateOperators
    )
