"""A lane: a streaming query on a thread of its own, started again whenever it fails.

Threads: each :class:`Lane` has a thread, which starts the query, waits for events of it, and starts
it again after a failure, with a pause that doubles. :class:`QueryEventListener` has one thread for
all lanes of a pipeline, which receives Spark's events and puts them into the queues of the lanes.
``status`` and ``stop`` may be called from any thread.

A lane's status also says what keeps the lane from sending, although its query runs: an open breaker
or a full queue (:class:`BlockedReason`).
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]  # has none
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from turnlane.errors import RetryLater
from turnlane.logs import get_logger
from turnlane.pacing import Backoff
from turnlane.spark.batch_planning import TAKEN_EVENTS
from turnlane.spark.errors import describe_failure
from turnlane.spark.nodes import BreakerClient, Nodes
from turnlane.spark.steps import BreakerStates, DeliveryPaths, Suspension, find_suspension

log = get_logger(__name__)

Answer = TypeVar("Answer")

RESTART_BACKOFF: Final = Backoff(1.0, 60.0)
"""Seconds between attempts to run a lane's query."""
START_SECONDS: Final = 0.2
"""How often to check whether a query runs: Spark sends no event if the query has nothing to do."""
POLL_SECONDS: Final = 1.0
"""How often to ask for breakers and full queues, and to check a query without events."""
EVENT_SECONDS: Final = 5.0
"""How late the event of a query's end may be; Spark drops events if its event queue is full."""
BATCH_SECONDS: Final = 10.0
"""How long a batch may continue after the lane was stopped: a task stops sending after half."""
HURRY_SECONDS: Final = 1.0
"""How long a lane may take to end its query if it must not wait for a batch."""
STALL_SECONDS: Final = 300.0
"""After this time without a batch a warning is logged, and again each time that it has doubled."""
PROCESSING: Final = "Processing new data"
"""Spark's status message of a query that processes a batch."""
TIMED_OUT: Final = "java.util.concurrent.TimeoutException"
"""The exception of Spark if a query has not stopped in time."""
END_OF_EVENTS: Final = ""
"""The text by which the listener ends its own thread."""


class LaneState(StrEnum):
    """What a lane is doing."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    """It failed, and will be started again."""
    STOPPING = "stopping"
    """It was stopped, and has not ended yet."""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """The state of a lane at one moment."""

    name: str
    state: LaneState
    restarts: int
    reason: str | None
    """Why it failed last; ``None`` if it has recovered, or never failed."""
    batches: int
    rows: int
    suspension: Suspension | None = None
    """Why nothing is sent, although the query runs."""

    @property
    def suspended(self) -> str | None:
        """Why nothing is sent; ``None`` if events are sent."""
        return None if self.suspension is None else self.suspension.why


@dataclass(frozen=True, slots=True)
class QueryEvent:
    """An event of one run of a query."""

    run: str
    progress: StreamingQueryProgress | None = None
    """The progress after a batch; ``None`` if the run has ended."""


EventHandler = Callable[[QueryEvent], None]
"""Called on the listener's thread; all other events wait for it."""
StartQuery = Callable[[str], StreamingQuery]
"""Starts the query; the argument is the id of this run of the lane."""
ProgressHandler = Callable[[StreamingQueryProgress], None]
"""Called with every progress of the query, and now and then again with the last one."""
GetSuspension = Callable[[], Suspension | None]
"""Returns what keeps the lane from sending, if anything does."""


class StallDetector:
    """Measures the time since a query started or sent its last event. Pure."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._report_after = STALL_SECONDS

    def check(self, now: float) -> float | None:
        """Return the seconds without an event, if it is time to report them."""
        seconds = now - self._since
        if seconds < self._report_after:
            return None
        self._report_after = 2 * seconds
        return seconds


class Lane:
    """Runs a query on a thread of its own until it is stopped.

    It learns what happens to the query by :meth:`on_event`, so every batch is counted.
    """

    def __init__(
        self,
        name: str,
        start_query: StartQuery,
        on_progress: ProgressHandler | None = None,
        get_suspension: GetSuspension = lambda: None,
    ) -> None:
        self.name = name
        self._start_query = start_query
        self._on_progress = on_progress or (lambda _: None)
        self._get_suspension = get_suspension
        self._suspension: Suspension | None = None
        self._stop = threading.Event()
        self._hurry = threading.Event()
        """Set when the lane must no longer wait for the batch in progress."""
        self._events: SimpleQueue[QueryEvent | None] = SimpleQueue()
        """Events to process; ``None`` wakes the thread up because the lane was stopped."""
        self._state = LaneState.STARTING
        self._reason: str | None = None
        self._restarts = 0
        self._batches = 0
        self._rows = 0
        self._last_progress: StreamingQueryProgress | None = None
        """The last progress of this run."""
        self._stall = StallDetector(time.monotonic())
        self._thread = threading.Thread(target=self._run, name=f"lane-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def on_event(self, event: QueryEvent) -> None:
        """Receive an event of a query with the lane's name. Does not wait."""
        self._events.put(event)

    def ask_to_stop(self) -> None:
        """Have the query end after the batch in progress. Does not wait."""
        self._stop.set()
        self._events.put(None)

    def stop(self, timeout: float = 30.0) -> bool:
        """End the query, waiting at most ``timeout`` seconds; returns whether the lane has ended.

        After the timeout it no longer waits for the batch in progress. Uncommitted events stay in
        the queue. A lane that has not ended does so as soon as it can: until then no other query
        may have its name and its checkpoint.
        """
        self.ask_to_stop()
        if self._thread.ident is None:  # It was never started.
            return True
        self._thread.join(timeout)
        self._hurry.set()
        self._thread.join(HURRY_SECONDS)
        return not self._thread.is_alive()

    @property
    def status(self) -> LaneStatus:
        """The state of the lane now."""
        is_stopping = self._stop.is_set() and self._state is not LaneState.STOPPED
        return LaneStatus(
            self.name,
            LaneState.STOPPING if is_stopping else self._state,
            self._restarts,
            self._reason,
            self._batches,
            self._rows,
            self._suspension,
        )

    # ── on the lane's thread ──

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            batches = self._batches
            try:
                self._run_once()
            except Exception as error:  # noqa: BLE001 - other lanes continue in any case
                self._reason = describe_failure(error)
                log.warning("lane.failed", lane=self.name, reason=self._reason)
            if self._stop.is_set():
                break
            # After a batch the lane had recovered, so this is the first failure of a new series.
            failures = 1 if self._batches > batches else failures + 1
            self._state = LaneState.WAITING
            self._stop.wait(RESTART_BACKOFF.get_wait(failures))
            self._restarts += 1
        self._state = LaneState.STOPPED

    def _run_once(self) -> None:
        self._state, self._last_progress = LaneState.STARTING, None
        query = self._start_query(uuid.uuid4().hex)
        run = str(query.runId)
        self._stall = StallDetector(time.monotonic())
        try:
            has_ended = self._follow(query, run)
            self._wait_for_batch(query)
        finally:
            self._suspension = None
            if query.isActive:
                self._stop_query(query)
        if not has_ended:
            self._process_last_events(run)
        error = query.exception()
        if error is not None:
            raise error

    def _follow(self, query: StreamingQuery, run: str) -> bool:
        """Process events until the query ends or must end; returns whether its end was an event."""
        while not self._stop.is_set():
            is_starting = self._state is LaneState.STARTING
            event = self._get_event(START_SECONDS if is_starting else POLL_SECONDS)
            if event is None:
                if self._stop.is_set() or not query.isActive:
                    break
                self._report_stall(query)
                progress = self._last_progress or query.lastProgress
                if progress is not None:
                    self._set_progress(progress)
            elif self._process_event(event, run):
                return True
            self._suspension = self._get_suspension()
        return False

    def _get_event(self, timeout: float) -> QueryEvent | None:
        try:
            return self._events.get(timeout=timeout)
        except Empty:
            return None

    def _process_event(self, event: QueryEvent, run: str) -> bool:
        """Process an event, unless it is of another run; returns whether it was the last."""
        if event.run != run:
            return False
        if event.progress is None:
            return True
        self._stall = StallDetector(time.monotonic())
        if event.progress.numInputRows:
            self._batches += 1
            self._rows += _count_events(event.progress)
        self._set_progress(event.progress)
        return False

    def _set_progress(self, progress: StreamingQueryProgress) -> None:
        self._state, self._reason = LaneState.RUNNING, None
        self._last_progress = progress
        self._on_progress(progress)

    def _report_stall(self, query: StreamingQuery) -> None:
        """Log a warning if a query that has something to do has finished no batch for long."""
        seconds = self._stall.check(time.monotonic())
        if seconds is None:
            return
        message = query.status["message"]
        if message == PROCESSING or self._state is LaneState.STARTING:
            log.warning("lane.stalled", lane=self.name, seconds=round(seconds), spark=message)

    def _wait_for_batch(self, query: StreamingQuery) -> None:
        """Wait for the batch in progress: if it is committed, it is not sent again."""
        deadline = time.monotonic() + BATCH_SECONDS
        while query.isActive and query.status["message"] == PROCESSING:
            if time.monotonic() > deadline:
                log.warning(
                    "lane.batch_interrupted", lane=self.name, hint="the batch will be repeated"
                )
                return
            if self._hurry.wait(0.01):
                return

    def _stop_query(self, query: StreamingQuery) -> None:
        """Stop a query, however long that takes: some calls in it cannot be interrupted.

        Spark gives up after ``spark.sql.streaming.stopTimeout``, and calls the query inactive as
        soon as it was told to stop, although it still runs.
        """
        while True:
            try:
                return query.stop()
            except Py4JJavaError as error:
                if error.java_exception.getClass().getName() != TIMED_OUT:
                    raise
                log.warning("lane.stop_delayed", lane=self.name)

    def _process_last_events(self, run: str) -> None:
        """Process the events that Spark has still to send of a run that has ended."""
        deadline = time.monotonic() + EVENT_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            event = self._get_event(left)
            if event is not None and self._process_event(event, run):
                return
        log.warning("lane.events_missing", lane=self.name, hint="some batches may not be counted")


def _count_events(progress: StreamingQueryProgress) -> int:
    """Return the events of a batch: more than its rows if a row stands for several events."""
    (source, *_) = progress.sources
    # Before the first batch there is no offset.
    offsets = (source.startOffset, source.endOffset)
    start, end = (json.loads(text) if text.startswith("{") else {} for text in offsets)
    if TAKEN_EVENTS not in end:
        return progress.numInputRows
    return int(end[TAKEN_EVENTS] - start.get(TAKEN_EVENTS, 0))


# ── events of Spark ──


class QueryEventListener:
    """Receives the events of all queries of a session and passes them to handlers by query name.

    For each run, the handler gets one event for each batch, in order, and then one for the end. The
    first event may arrive before the query's ``start()`` has returned. A run belongs to a handler
    only if it starts while this object listens: late events of an earlier pipeline are dropped.

    Java puts its events into a Java queue, and a thread here takes them out. With pyspark's own
    listeners, Java would call Python: each run of a query would leave a thread and a connection
    behind, and reading a progress would take a hundred calls.
    """

    def __init__(self, spark: SparkSession, handlers: Mapping[str, EventHandler]) -> None:
        jvm: Any = spark._jvm  # noqa: SLF001 - pyspark has no other way
        self._queries: Any = spark.streams._jsqm  # noqa: SLF001
        self._java_events: Any = jvm.java.util.concurrent.LinkedBlockingQueue()
        streaming = jvm.org.apache.spark.sql.streaming
        interface = jvm.java.lang.Class.forName(
            "org.apache.spark.sql.streaming.PythonStreamingQueryListener"
        )
        # Each method of the interface calls `java_events.add(event.json())`.
        adder = jvm.java.beans.EventHandler.create(interface, self._java_events, "add", "json")
        self._java_listener: Any = streaming.PythonStreamingQueryListenerWrapper(adder)
        self._handlers = handlers
        self._runs: dict[str, EventHandler] = {}
        """The runs in progress. Spark sends the start of a run before its other events."""
        self._thread = threading.Thread(target=self._run, name="lane-events", daemon=True)

    def start(self) -> None:
        """Start to listen; call it before the queries start."""
        self._queries.addListener(self._java_listener)
        self._thread.start()

    def stop(self) -> None:
        """Stop to listen, after the events that Spark has sent until now are passed on."""
        self._queries.removeListener(self._java_listener)
        self._java_events.add(END_OF_EVENTS)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (text := self._java_events.take()) != END_OF_EVENTS:
                try:
                    self._dispatch(json.loads(text))
                except Exception:  # A bad event must not stop the events after it.
                    log.exception("query_events.dispatch_failed", event_text=text[:300])
        except (Py4JError, OSError) as error:
            log.warning("query_events.ended", error=error)

    def _dispatch(self, event: Mapping[str, Any]) -> None:
        if "progress" in event:
            progress = StreamingQueryProgress.fromJson(event["progress"])
            run = str(progress.runId)
            if run in self._runs:
                self._runs[run](QueryEvent(run, progress))
        elif "name" in event:  # The run has started.
            handler = self._handlers.get(event["name"] or "")
            if handler is not None:
                self._runs[event["runId"]] = handler
        elif "timestamp" not in event:  # The run has ended; with a timestamp it is only idle.
            handler = self._runs.pop(event["runId"], None)
            if handler is not None:
                handler(QueryEvent(event["runId"]))


# ── reasons why a lane does not send ──


class Poller(Generic[Answer]):
    """Asks a question at most once a second, and returns the last answer in between.

    Safe to use from any thread. While one thread asks, the others get the last answer.
    """

    def __init__(self, question: str, ask: Callable[[], Answer], first_answer: Answer) -> None:
        self._question = question
        self._ask = ask
        self._answer = first_answer
        self._asked_at = -POLL_SECONDS
        self._lock = threading.Lock()
        """Held by the thread that asks."""

    def get(self) -> Answer:
        """Return an answer that is at most about a second old."""
        if self._lock.acquire(blocking=False):
            try:
                if time.monotonic() - self._asked_at >= POLL_SECONDS:
                    self._answer = self._ask()
                    self._asked_at = time.monotonic()
            except RetryLater as error:
                log.info("lane.poll_failed", question=self._question, error=error)
                self._asked_at = time.monotonic()
            finally:
                self._lock.release()
        return self._answer


class BreakerPoller(Poller[BreakerStates]):
    """Asks for the breakers of all lanes of a pipeline in one call."""

    def __init__(self, breakers: BreakerClient) -> None:
        self.actions: set[str] = set()
        ask = lambda: breakers.get_states(sorted(self.actions))  # noqa: E731 - of one line
        super().__init__("breakers", ask, {})


class FullQueuePoller(Poller[str | None]):
    """Asks for the first full queue, on any node, of the queues that a lane writes to."""

    def __init__(self, nodes: Nodes, queues: Sequence[str]) -> None:
        def ask() -> str | None:
            calls = {node: partial(nodes[node].full, queues) for node in range(nodes.count)}
            found = nodes.ask_all("room", calls, 0.0) if queues else {}
            return min((queue for full in found.values() for queue in full), default=None)

        super().__init__("full queues", ask, None)


class BlockedReason:
    """Finds out what keeps a lane from sending, for people."""

    def __init__(
        self,
        breakers: BreakerPoller,
        paths: Sequence[DeliveryPaths],
        full_queues: FullQueuePoller | None = None,
    ) -> None:
        self._breakers = breakers
        self._paths = paths
        self._full_queues = full_queues
        breakers.actions |= {path.action for each in paths for path in each}

    def __call__(self) -> Suspension | None:
        """Return an open breaker or a full queue, if there is one."""
        if self._paths:
            found = find_suspension(self._paths, self._breakers.get())
            if found.why is not None:
                return found
        full = None if self._full_queues is None else self._full_queues.get()
        return None if full is None else Suspension(0.0, why=f"queue {full!r} is full")
