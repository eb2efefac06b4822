"""A lane: a streaming query on a thread of its own, started again whenever it fails.

Threads: each :class:`Lane` has a thread, which starts the query, waits for events of it, and starts
it again after a failure, with a pause that doubles. :class:`QueryEventListener` has one thread for
all lanes of a pipeline, which receives Spark's events and puts them into the queues of the lanes.
``status`` and ``stop`` may be called from any thread.

:class:`RunningLanes` replaces lanes one by one, and leaves those with the same settings alone.

A lane's status also says what keeps the lane from sending, although its query runs: an open breaker
or a full queue (:class:`BlockedReason`), or that it collects events for a batch. If events wait
(:class:`WaitingEvents`), no batch ends and nothing of this is the reason, the lane is stalled: it
reports that with what Spark is doing, and starts its query again if that is safe. A lane whose
batches end and settle no event is stalled, too.

If the query fails because of its events, the lane isolates them (``isolation``) before it starts
the query again.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, NamedTuple, TypeVar

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]  # has none
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from turnlane.client.node_client import UnsettledSpans
from turnlane.errors import RetryLater, TurnlaneError
from turnlane.logs import get_logger
from turnlane.pacing import Backoff
from turnlane.runtime import create_thread
from turnlane.spark.batch_planning import TAKEN_EVENTS, UNKNOWN_POSITION, QueryPosition
from turnlane.spark.errors import describe_failure, has_own_error
from turnlane.spark.isolation import EventIsolation
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
ENDING_SECONDS: Final = 0.05
"""How often to check whether lanes have ended."""
HURRY_SECONDS: Final = 1.0
"""How long a lane may take to end its query if it must not wait for a batch."""
BATCH_PATIENCE: Final = 5
"""How many times longer than without a batch a lane may take to end one before it is stalled."""
STACK_LINES: Final = 10
"""How many calls of a stalled query's thread are logged, without those of Java itself."""
PROCESSING: Final = "Processing new data"
"""Spark's status message of a query that processes a batch."""
JAVA_OBJECT: Final = re.compile(r"(?:\w+\.)+(\w+)@[0-9a-f]+")
"""A Java object in a message of Spark: its class is enough."""
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


class Collecting(NamedTuple):
    """A lane waits for more events before it starts a batch."""

    events: int
    wanted: int
    wait: float
    """Seconds until it starts a batch with fewer events."""

    def __str__(self) -> str:
        until = time.localtime(time.time() + self.wait)
        day = "" if until[:3] == time.localtime()[:3] else "%Y-%m-%d "
        return (
            f"collects events: {self.events:,} of {self.wanted:,}, "
            f"at most until {time.strftime(f'{day}%H:%M:%S', until)}"
        )


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
    collecting: Collecting | None = None
    """The events that it waits for before the next batch."""
    stalled: str | None = None
    """For how long no batch has ended, or none has delivered, and what Spark is doing, if there is
    no reason for it."""

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
PollHandler = Callable[[StreamingQuery, StreamingQueryProgress | None, threading.Event], None]
"""Called about once a second while no batch ends, with the query, its last progress, and an event
that is set when the lane is stopped."""
CountWaiting = Callable[[StreamingQueryProgress | None], int]
"""Returns how many events wait for the lane; the argument is the last progress of this run."""


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """How long a lane may take before its next batch."""

    min_events: int = 1
    max_age: float = 0.0
    """It may wait so long for ``min_events``."""
    stall_timeout: float = 60.0
    can_interrupt: bool = True
    """Whether a batch in progress may be stopped because it takes too long: not if its checkpoint
    is the truth, because then a batch may take any time, and the same batch comes again."""


class StallDetector:
    """Finds out whether a lane with waiting events collects more, or does nothing. Pure.

    Each time it reports a stall, it doubles the time until the next, until a batch ends: so a lane
    that is only slow gets more time after each restart.
    """

    def __init__(self, limits: LaneLimits) -> None:
        self._limits = limits
        self._patience = limits.stall_timeout
        self._first_seen: float | None = None
        self._could_start: float | None = None

    def on_batch(self) -> None:
        """Note that a batch has ended."""
        self._patience = self._limits.stall_timeout
        self.reset()

    def reset(self) -> None:
        """Note that no events wait, that there is a reason to wait, or that the query is new."""
        self._first_seen = self._could_start = None

    def check(self, events: int, now: float, *, is_in_batch: bool) -> Collecting | float | None:
        """Return what it collects, or for how many seconds it has stalled if that is to report."""
        limits = self._limits
        if self._first_seen is None:
            self._first_seen = now
        wait = self._first_seen + limits.max_age - now
        if (
            self._could_start is None
            and not is_in_batch
            and events < limits.min_events
            and wait > 0
        ):
            return Collecting(events, limits.min_events, wait)
        if self._could_start is None:
            self._could_start = now
        seconds = now - self._could_start
        if seconds < self._patience * (BATCH_PATIENCE if is_in_batch else 1):
            return None
        self._patience *= 2
        return seconds


@dataclass(frozen=True, slots=True)
class LaneWatch:
    """How a lane notices that it has stalled. By default no events wait, so it never has."""

    limits: LaneLimits = field(default_factory=LaneLimits)
    count_waiting: CountWaiting = lambda _: 0
    report_stall: Callable[[], None] = lambda: None
    count_settled: Callable[[], int | None] = lambda: None
    """Returns how many events are settled; ``None`` if that is unknown, or each batch settles."""


class LaneStalled(RetryLater):
    """A lane has done nothing for too long, and starts again."""


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
        watch: LaneWatch | None = None,
        *,
        isolation: EventIsolation | None = None,
        on_poll: PollHandler | None = None,
        settings: object = None,
        queues: Collection[str] | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        """Everything that the lane depends on: a lane with equal settings would do the same."""
        self.queues = frozenset([name] if queues is None else queues)
        """The queues that it reads. No other lane may read them at the same time."""
        self._start_query = start_query
        self._on_progress = on_progress or (lambda _: None)
        self._get_suspension = get_suspension
        self._suspension: Suspension | None = None
        self._isolation = isolation
        self._on_poll = on_poll or (lambda *_: None)
        self._code_error: str | None = None
        """Why no event passes the lane's code, until a batch does."""
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
        self._watch = watch or LaneWatch()
        self._detector = StallDetector(self._watch.limits)
        self._settled: int | None = None
        self._futile_batches = 0
        """How many batches with events have ended since the last that has settled any."""
        self._batch_ended_at = 0.0
        self._collecting: Collecting | None = None
        self._stalled: str | None = None
        self._thread = create_thread(f"lane-{name}", self._run)

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

    @property
    def is_stopping(self) -> bool:
        """Whether the lane was asked to stop; it may have ended."""
        return self._stop.is_set()

    def has_ended(self, timeout: float = 0.0) -> bool:
        """Wait at most ``timeout`` seconds; return whether the lane has ended, or never started."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self, timeout: float = 30.0) -> bool:
        """End the query, waiting at most ``timeout`` seconds; returns whether the lane has ended.

        After the timeout it no longer waits for the batch in progress. Uncommitted events stay in
        the queue. A lane that has not ended does so as soon as it can: until then no other query
        may have its name and its checkpoint.
        """
        self.ask_to_stop()
        if self.has_ended(timeout):
            return True
        self._hurry.set()
        return self.has_ended(HURRY_SECONDS)

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
            self._collecting,
            self._stalled,
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
                if self._isolate(error):
                    failures = 0
                    continue
            if self._stop.is_set():
                break
            # After a batch the lane had recovered, so this is the first failure of a new series.
            failures = 1 if self._batches > batches else failures + 1
            wait = RESTART_BACKOFF.get_wait(failures)
            if self._code_error is not None:
                self._suspension = Suspension(wait, why=self._code_error)
            self._state = LaneState.WAITING
            self._stop.wait(wait)
            self._restarts += 1
        self._state = LaneState.STOPPED

    def _isolate(self, error: Exception) -> bool:
        """Give up the events at which the query has failed; returns whether there were any."""
        is_query = isinstance(error, StreamingQueryException) and not has_own_error(error)
        self._code_error = None
        if self._isolation is None or not is_query or self._stop.is_set():
            return False
        try:
            found = self._isolation.isolate(self._stop.is_set)
        except Exception as failure:  # noqa: BLE001 - the lane starts again in any case
            log.warning("lane.isolation_failed", lane=self.name, error=describe_failure(failure))
            return False
        self._code_error = found.code_error
        return found.dead > 0

    def _run_once(self) -> None:
        self._state, self._last_progress = LaneState.STARTING, None
        query = self._start_query(uuid.uuid4().hex)
        run = str(query.runId)
        self._detector.reset()
        try:
            has_ended = self._follow(query, run)
            self._wait_for_batch(query)
        finally:
            self._suspension = self._collecting = None
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
                progress = self._last_progress or query.lastProgress
                if progress is not None:
                    self._set_progress(progress)
            elif self._process_event(event, run):
                return True
            self._suspension = self._get_suspension()
            if self._suspension is None and self._code_error is not None:
                self._suspension = Suspension(0.0, why=self._code_error)
            if event is None:
                self._check_stall(query)
                self._on_poll(query, self._last_progress, self._stop)
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
        before, self._settled = self._settled, self._watch.count_settled()
        has_settled = self._settled is None or self._settled != before
        if has_settled or not event.progress.numInputRows:
            self._detector.on_batch()
            self._stalled, self._futile_batches = None, 0
        else:
            self._futile_batches += 1
        self._batch_ended_at = time.monotonic()
        self._collecting = None
        if event.progress.numInputRows:
            self._batches += 1
            self._rows += _count_events(event.progress)
        self._set_progress(event.progress)
        return False

    def _set_progress(self, progress: StreamingQueryProgress) -> None:
        self._state, self._reason, self._code_error = LaneState.RUNNING, None, None
        self._last_progress = progress
        self._on_progress(progress)

    def _check_stall(self, query: StreamingQuery) -> None:
        """Note whether the query collects events or does nothing although events wait.

        Raises ``LaneStalled`` if the query is to be started again.
        """
        events = self._watch.count_waiting(self._last_progress)
        self._collecting = None
        if not events or self._suspension is not None:
            self._detector.reset()
            self._stalled = None
            return
        message = JAVA_OBJECT.sub(r"\1", query.status["message"])
        is_in_batch = message == PROCESSING
        found = self._detector.check(events, time.monotonic(), is_in_batch=is_in_batch)
        if isinstance(found, Collecting):
            self._collecting = found
        elif found is not None:
            what = "no batch has ended"
            can_restart = self._watch.limits.can_interrupt or not is_in_batch
            hint = "it starts again" if can_restart else "its batch is not interrupted"
            silence = time.monotonic() - self._batch_ended_at
            if self._futile_batches and silence < self._watch.limits.stall_timeout:
                # The next run would do the same.
                what = f"{self._futile_batches} batches have delivered no event"
                can_restart, hint = False, "its batches end"
            about = f"{events:,} events wait, {what} for {round(found)} s"
            self._stalled = f"{about}; Spark: {message}"
            log.warning(
                "lane.stalled",
                lane=self.name,
                events=events,
                seconds=round(found),
                spark=message,
                stack=_get_stack(query),
                hint=hint,
            )
            self._watch.report_stall()
            if can_restart:
                self._state, self._reason = LaneState.WAITING, f"stalled: {self._stalled}"
                raise LaneStalled(self._reason)

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


def _get_stack(query: StreamingQuery) -> str:
    """Return the calls of Spark that the query's thread is in, the innermost first."""
    try:
        thread = query._jsq.streamingQuery().queryExecutionThread()  # noqa: SLF001
        calls = (str(each).rpartition("/")[2] for each in thread.getStackTrace())
        found = [each for each in calls if not each.startswith(("java", "jdk.", "sun.", "scala."))]
        return " < ".join(found[:STACK_LINES])
    except (AttributeError, Py4JError) as error:
        return f"unknown: {describe_failure(error)}"


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
        self._thread = create_thread("lane-events", self._run)

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


# ── all lanes ──


class RunningLanes:
    """The lanes that run in a session, and the listener of their queries.

    The owner sees to it that one thread at a time calls :meth:`replace`; :meth:`status` may be
    called from any thread.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._lanes: dict[str, Lane] = {}
        self._handlers: dict[str, EventHandler] = {}
        self._listener: QueryEventListener | None = None
        self.start_lock = threading.Lock()
        """Held while a lane starts its query."""

    def find_unchanged(self, wanted: Iterable[Lane]) -> set[str]:
        """Return the names of the lanes that run already, with the same settings."""
        known = ((lane, self._lanes.get(lane.name)) for lane in wanted)
        return {
            lane.name
            for lane, running in known
            if running is not None and not running.is_stopping
            if lane.settings is not None and lane.settings == running.settings
        }

    def replace(self, wanted: Sequence[Lane], timeout: float) -> list[str]:
        """Run exactly these lanes; returns the earlier lanes that have not ended in time.

        A lane that runs already with the same settings continues. Every other earlier lane is
        stopped, and a new lane starts as soon as no earlier lane reads its queues. The new lanes
        that have not started for this reason are left out: call it again, with new lanes.
        """
        unchanged = self.find_unchanged(wanted)
        waiting = [lane for lane in wanted if lane.name not in unchanged]
        ending = [lane for name, lane in self._lanes.items() if name not in unchanged]
        for lane in ending:
            lane.ask_to_stop()
        if waiting and self._listener is None:
            self._listener = QueryEventListener(self._spark, self._handlers)
            self._listener.start()
        deadline = time.monotonic() + timeout
        while True:
            ending = [lane for lane in ending if not lane.has_ended()]
            waiting = self._start_free(waiting, ending)
            if not ending or time.monotonic() > deadline:
                break
            ending[0].has_ended(ENDING_SECONDS)
        left = [lane for lane in ending if not lane.stop(0.0)]
        self._start_free(waiting, left)
        if not left:
            names = {lane.name for lane in wanted}
            self._lanes = {name: lane for name, lane in self._lanes.items() if name in names}
            if not self._lanes and self._listener is not None:
                self._listener.stop()
                self._listener = None
        return [lane.name for lane in left]

    def _start_free(self, waiting: list[Lane], ending: Sequence[Lane]) -> list[Lane]:
        """Start the lanes whose queues no earlier lane reads; return the others."""
        busy = {queue for lane in ending for queue in lane.queues}
        for lane in waiting:
            if not lane.queues & busy:
                self._lanes[lane.name] = lane
                self._handlers[lane.name] = lane.on_event
                lane.start()
        return [lane for lane in waiting if lane.queues & busy]

    def status(self) -> list[LaneStatus]:
        """Return the states of the lanes."""
        return [lane.status for lane in list(self._lanes.values())]


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


class WaitingEvents(Poller[Mapping[int, UnsettledSpans]]):
    """Counts the events of a lane's queue that wait for it, on all nodes that answer.

    With a checkpoint, these are the events after the query's position: events before it are settled
    a moment later.
    """

    def __init__(self, nodes: Nodes, queue: str, *, has_checkpoint: bool) -> None:
        self._has_checkpoint = has_checkpoint

        def ask() -> Mapping[int, UnsettledSpans]:
            calls = {n: partial(nodes[n].unsettled, queue, 1) for n in range(nodes.count)}
            try:
                return nodes.ask_all(f"waiting {queue}", calls, 0.0)
            except TurnlaneError:  # The lane itself reports nodes that are away.
                return {}

        super().__init__("waiting events", ask, {})

    def count_settled(self) -> int | None:
        """Return how many events are settled now; ``None`` if no node answers."""
        self._asked_at = -POLL_SECONDS  # A batch has ended, so the last answer is too old.
        found = self.get()
        return sum(each.end - each.pending for each in found.values()) if found else None

    def count(self, progress: StreamingQueryProgress | None) -> int:
        """Return the number of events that wait."""
        ends = {}
        if self._has_checkpoint and progress is not None and progress.sources[0].endOffset:
            ends = QueryPosition.from_offset(json.loads(progress.sources[0].endOffset)).offsets
        return sum(
            min(each.pending, max(0, each.end - max(0, ends.get(node, UNKNOWN_POSITION))))
            for node, each in self.get().items()
        )


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
