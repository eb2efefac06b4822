"""A lane: a streaming query that is started again, with patience, whenever it fails."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]  # has none
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from turnlane.errors import RetryLater
from turnlane.retry import doubled
from turnlane.spark.batch_planning import TAKEN
from turnlane.spark.errors import reason_of
from turnlane.spark.nodes import Gates, Nodes
from turnlane.spark.steps import Breakers, Suspension, Ways, suspension

# ── held_up ──
# What keeps lanes from going on, for people: asked for once in a while, beside the lanes' work.

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
"""How often to ask."""


class GatesSeen:
    """The breakers of all lanes of a pipeline, asked for in one question once in a while.

    Safe from any thread; whoever comes while another one asks gets what was known before.
    """

    def __init__(self, gates: Gates) -> None:
        self._gates = gates
        self._actions: set[str] = set()
        self._asking = threading.Lock()
        self._asked = -LOOK_SECONDS
        self._known: Breakers = {}

    def include(self, actions: Iterable[str]) -> None:
        """Ask for the breakers of these, too."""
        self._actions |= set(actions)

    def status(self) -> Breakers:
        """How the breakers are, or were a moment ago."""
        if self._asking.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._asking.release()
        return self._known

    def _look(self) -> None:
        if time.monotonic() - self._asked < LOOK_SECONDS:
            return
        try:
            self._known = self._gates.status(sorted(self._actions))
        except RetryLater as error:
            log.info("no word of breakers: %s", error)
        self._asked = time.monotonic()


class Rooms:
    """Which of the queues that a lane fills is full, asked for once in a while. For one thread."""

    def __init__(self, nodes: Nodes, queues: Sequence[str]) -> None:
        self._nodes = nodes
        self._queues = queues
        self._asked = -LOOK_SECONDS
        self._full: str | None = None

    def full(self) -> str | None:
        """The first of them, on any node, or what it was a moment ago."""
        if self._queues and time.monotonic() - self._asked >= LOOK_SECONDS:
            try:
                self._full = self._look()
            except RetryLater as error:
                log.info("no word of room in queues: %s", error)
            self._asked = time.monotonic()
        return self._full

    def _look(self) -> str | None:
        nodes = range(self._nodes.count)
        questions = {node: partial(self._nodes[node].full, self._queues) for node in nodes}
        found = self._nodes.answers("room", questions, 0.0)
        return min((queue for full in found.values() for queue in full), default=None)


class HeldUpHeldUp:
    """What keeps a lane from going on, for people."""

    def __init__(self, gates: GatesSeen, lane: Sequence[Ways], rooms: Rooms | None = None) -> None:
        self._gates = gates
        self._lane = lane
        self._rooms = rooms
        gates.include(way.action for ways in lane for way in ways)

    def __call__(self) -> Suspension | None:
        """What is known."""
        if self._lane:
            found = suspension(self._lane, self._gates.status())
            if found.why is not None:
                return found
        full = self._rooms.full() if self._rooms is not None else None
        return None if full is None else Suspension(0.0, why=f"queue {full!r} is full")


# ── news ──
# What Spark tells of streaming queries, handed to the lanes that run them.


OVER: Final = ""
"""What the listener tells itself when it is to end."""


@dataclass(frozen=True, slots=True)
class News:
    """What has happened to one run of a query."""

    run: str
    progress: StreamingQueryProgress | None = None
    """How a batch went; ``None`` if the run has ended."""


Tell = Callable[[News], None]
"""Called on the listener's thread, where all others wait for it."""


class Listener:
    """Hears of all queries of a session, and tells those who run them; ``told`` by query name.

    Of each run it tells of every batch once, in their order, and then of its end. The first news
    may come before the query's ``start()`` has returned. A run is somebody's if it starts while
    this one listens: what comes late of a pipeline before it is nobody's.

    Java keeps what it has to say in a queue, and a thread waits for it here. Were Python called, as
    pyspark's listeners are, each run of a query would leave a thread and a connection behind, and
    each progress would take a hundred calls to be read.
    """

    def __init__(self, spark: SparkSession, told: Mapping[str, Tell]) -> None:
        jvm: Any = spark._jvm  # noqa: SLF001 - pyspark's listeners are called
        self._queries: Any = spark.streams._jsqm  # noqa: SLF001
        self._said: Any = jvm.java.util.concurrent.LinkedBlockingQueue()
        streaming = jvm.org.apache.spark.sql.streaming
        kind = jvm.java.lang.Class.forName(
            "org.apache.spark.sql.streaming.PythonStreamingQueryListener"
        )
        # Whatever it is called with: ``said.add(event.json())``.
        keeping = jvm.java.beans.EventHandler.create(kind, self._said, "add", "json")
        self._keeper: Any = streaming.PythonStreamingQueryListenerWrapper(keeping)
        self._told = told
        self._runs: dict[str, Tell] = {}
        """Those under way. Spark tells of the start of a run before anything else of it."""
        self._thread = threading.Thread(target=self._run, name="lane-news", daemon=True)

    def start(self) -> None:
        """Begin, before the queries do."""
        self._queries.addListener(self._keeper)
        self._thread.start()

    def stop(self) -> None:
        """End; what has been said until now is still told."""
        self._queries.removeListener(self._keeper)
        self._said.add(OVER)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (said := self._said.take()) != OVER:
                self._take(said)
        except (Py4JError, OSError) as error:
            log.warning("Spark tells nothing any more: %s", error)

    def _take(self, said: str) -> None:
        """Hand it on. Whatever is wrong with it, lanes wait for what comes after it."""
        try:
            self._hand_on(json.loads(said))
        except Exception:
            log.exception("news of a query that cannot be handed on: %.300s", said)

    def _hand_on(self, event: Mapping[str, Any]) -> None:
        if "progress" in event:
            self._progress(StreamingQueryProgress.fromJson(event["progress"]))
        elif "name" in event:
            self._started(event["runId"], event["name"])
        elif "timestamp" not in event:  # that would be a query with nothing to do
            self._ended(event["runId"])

    def _started(self, run: str, name: str | None) -> None:
        tell = self._told.get(name or "")
        if tell is not None:
            self._runs[run] = tell

    def _progress(self, progress: StreamingQueryProgress) -> None:
        run = str(progress.runId)
        tell = self._runs.get(run)
        if tell is not None:
            tell(News(run, progress))

    def _ended(self, run: str) -> None:
        tell = self._runs.pop(run, None)
        if tell is not None:
            tell(News(run))


# ── silence ──
# How long a lane has ended no batch, and when to mention it. Pure: it is told the time.

QUIET_SECONDS: Final = 300.0
"""So long a silence is mentioned first, and again each time that it is twice as long."""


class Silence:
    """The time since a query began or was heard of last."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._mention_after = QUIET_SECONDS

    def lasted(self, now: float) -> float | None:
        """Its seconds, if it is time to mention them."""
        seconds = now - self._since
        if seconds < self._mention_after:
            return None
        self._mention_after = 2 * seconds
        return seconds


FIRST_PAUSE: Final = 1.0
LAST_PAUSE: Final = 60.0
"""Seconds between attempts, doubling from one to the other."""
START_SECONDS: Final = 0.2
"""How often to look whether a query runs by now: if it has nothing to do, Spark tells nobody."""
NEWS_SECONDS: Final = 5.0
"""How late the news may be that a query has ended; Spark drops news that it cannot get rid of."""
BATCH_SECONDS: Final = 10.0
"""How long a batch may go on once the lane is to stop: a task stops sending after half of that."""
HURRY_SECONDS: Final = 1.0
"""How long a lane may take to end its query once it is to wait for no batch."""
PROCESSING: Final = "Processing new data"
"""What Spark says of a query that is at a batch."""
TIMED_OUT: Final = "java.util.concurrent.TimeoutException"
"""What Spark raises if a query has not stopped in time."""


class LaneState(StrEnum):
    """What a lane is doing."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    """It failed, and will be started again."""
    STOPPING = "stopping"
    """It is to end, and has not ended yet."""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """A lane at this moment."""

    name: str
    state: LaneState
    restarts: int
    reason: str | None
    """Why it failed last; ``None`` if it has recovered, or never did."""
    batches: int
    rows: int
    suspension: Suspension | None = None
    """What its destination says while it is not to be sent anything; the query itself runs."""

    @property
    def suspended(self) -> str | None:
        """Why nothing is sent; ``None`` if things are."""
        return None if self.suspension is None else self.suspension.why


Start = Callable[[str], StreamingQuery]
"""Starts the query; the argument tells this run of the lane from all others."""
Watch = Callable[[StreamingQueryProgress], None]
"""Called with every progress of the query, and now and then again with the last one."""
HeldUp = Callable[[], Suspension | None]
"""Says what keeps the lane from sending, if anything does."""


class Lane:
    """Runs a query on a thread of its own until it is stopped.

    What happens to the query it learns by :meth:`tell`: each batch is counted, however quick.
    """

    def __init__(
        self,
        name: str,
        start: Start,
        watch: Watch | None = None,
        held_up: HeldUp = lambda: None,
    ) -> None:
        self.name = name
        self._start = start
        self._watch = watch or (lambda _: None)
        self._held_up = held_up
        self._suspension: Suspension | None = None
        self._stop = threading.Event()
        self._hurry = threading.Event()
        """Set when the batch that is under way is to be waited for no longer."""
        self._news: SimpleQueue[News | None] = SimpleQueue()
        """What is not heard yet; ``None`` says that the lane is to stop."""
        self._query: StreamingQuery | None = None
        self._state = LaneState.STARTING
        self._reason: str | None = None
        self._restarts = 0
        self._batches = 0
        self._rows = 0
        self._progress: StreamingQueryProgress | None = None
        """The last one of this run."""
        self._silence = Silence(time.monotonic())
        self._thread = threading.Thread(target=self._run, name=f"lane-{name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def tell(self, news: News) -> None:
        """Say what has happened to a query of its name. Does not wait."""
        self._news.put(news)

    def ask_to_stop(self) -> None:
        """Have the query end after the batch that is under way. Does not wait."""
        self._stop.set()
        self._news.put(None)

    def stop(self, timeout: float = 30.0) -> bool:
        """End the query, and wait so long for it; returns whether the lane has ended.

        After that a batch is no longer waited for. What is not committed stays in its queue. A lane
        that has not ended does so as soon as it can: until then its query has its name and its
        checkpoint, and no other may have them.
        """
        self.ask_to_stop()
        if self._thread.ident is None:  # it was never started
            return True
        self._thread.join(timeout)
        self._hurry.set()
        self._thread.join(HURRY_SECONDS)
        return not self._thread.is_alive()

    @property
    def status(self) -> LaneStatus:
        """How it is."""
        ends = self._stop.is_set() and self._state is not LaneState.STOPPED
        return LaneStatus(
            self.name,
            LaneState.STOPPING if ends else self._state,
            self._restarts,
            self._reason,
            self._batches,
            self._rows,
            self._suspension,
        )

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            batches = self._batches
            try:
                self._run_once()
            except Exception as error:  # noqa: BLE001 - whatever it is, other lanes run on
                self._reason = reason_of(error)
                log.warning("lane %s failed: %s", self.name, self._reason)
            if self._stop.is_set():
                break
            # It had recovered if there was a batch: one that fails for ever is the first.
            failures = 1 if self._batches > batches else failures + 1
            self._state = LaneState.WAITING
            self._stop.wait(doubled(FIRST_PAUSE, LAST_PAUSE, failures))
            self._restarts += 1
        self._state = LaneState.STOPPED

    def _run_once(self) -> None:
        self._state, self._progress = LaneState.STARTING, None
        query = self._query = self._start(uuid.uuid4().hex)
        run = str(query.runId)
        self._silence = Silence(time.monotonic())
        try:
            has_ended = self._follow(query, run)
            self._let_batch_end(query)
        finally:
            self._suspension = None
            if query.isActive:
                self._end(query)
        if not has_ended:
            self._hear_out(run)
        error = query.exception()
        if error is not None:
            raise error

    def _end(self, query: StreamingQuery) -> None:
        """Stop a query, however long that takes: it may be at what nothing interrupts.

        Spark gives up after ``spark.sql.streaming.stopTimeout``, and calls the query inactive as
        soon as it is told to stop, though it runs on.
        """
        while True:
            try:
                return query.stop()
            except Py4JJavaError as error:
                if error.java_exception.getClass().getName() != TIMED_OUT:
                    raise
                log.warning("lane %s: its query is told to stop, and has not ended yet", self.name)

    def _follow(self, query: StreamingQuery, run: str) -> bool:
        """Go on until the query has ended, or is to end; returns whether its end was told."""
        while not self._stop.is_set():
            starts = self._state is LaneState.STARTING
            news = self._next(START_SECONDS if starts else LOOK_SECONDS)
            if news is None:
                if self._stop.is_set() or not query.isActive:
                    break
                self._look(query)
            elif self._is_end(news, run):
                return True
            self._suspension = self._held_up()
        return False

    def _hear_out(self, run: str) -> None:
        """Hear what Spark has still to tell of a run that is over."""
        deadline = time.monotonic() + NEWS_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            news = self._next(left)
            if news is not None and self._is_end(news, run):
                return
        log.warning("lane %s: Spark has not told of all its batches", self.name)

    def _next(self, timeout: float) -> News | None:
        try:
            return self._news.get(timeout=timeout)
        except Empty:
            return None

    def _is_end(self, news: News, run: str) -> bool:
        """Take news in, unless it is of another run; returns whether it was the last."""
        if news.run != run:
            return False
        if news.progress is None:
            return True
        self._silence = Silence(time.monotonic())
        if news.progress.numInputRows:
            self._batches += 1
            self._rows += _events(news.progress)
        self._reached(news.progress)
        return False

    def _let_batch_end(self, query: StreamingQuery) -> None:
        """What is being sent need not be sent again if it may end, and be committed."""
        deadline = time.monotonic() + BATCH_SECONDS
        while query.isActive and query.status["message"] == PROCESSING:
            if time.monotonic() > deadline:
                log.warning("lane %s: a batch takes too long and comes again", self.name)
                return
            if self._hurry.wait(0.01):
                return

    def _look(self, query: StreamingQuery) -> None:
        """What is to be done while there is no news."""
        self._mention_silence(query)
        progress = self._progress or query.lastProgress
        if progress is not None:
            self._reached(progress)

    def _mention_silence(self, query: StreamingQuery) -> None:
        """Say so if a query that has something to do has done nothing for long: it may hang."""
        seconds = self._silence.lasted(time.monotonic())
        if seconds is None:
            return
        doing = query.status["message"]
        if doing == PROCESSING or self._state is LaneState.STARTING:
            text = "lane %s: no batch has ended for %.0f s (Spark: %s)"
            log.warning(text, self.name, seconds, doing)

    def _reached(self, progress: StreamingQueryProgress) -> None:
        """The query has come so far."""
        self._state, self._reason = LaneState.RUNNING, None
        self._progress = progress
        self._watch(progress)


def _events(progress: StreamingQueryProgress) -> int:
    """The events of a batch. Where Spark sees only their places, its rows are not as many."""
    (source, *_) = progress.sources
    start, end = map(_offset, (source.startOffset, source.endOffset))
    return end[TAKEN] - start.get(TAKEN, 0) if TAKEN in end else progress.numInputRows


def _offset(text: str) -> dict[str, int]:
    """An offset as Spark tells of it; there is none before the first batch."""
    return json.loads(text) if text.startswith("{") else {}
