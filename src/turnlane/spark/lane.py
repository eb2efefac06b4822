"""A lane: a streaming query that is started again, with patience, whenever it fails."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

FIRST_PAUSE: Final = 1.0
LAST_PAUSE: Final = 60.0
"""Seconds between attempts, doubling from one to the other."""
HEALTHY_AFTER: Final = 120.0
"""A lane that ran so long has recovered: its next pause is a short one again."""
LOOK_SECONDS: Final = 0.2


class LaneState(StrEnum):
    """What a lane is doing."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    """It failed, and will be started again."""
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


Start = Callable[[str], StreamingQuery]
"""Starts the query; the argument tells this run of the lane from all others."""
Watch = Callable[[StreamingQuery], None]
"""Called now and then while the query runs, and once when it has ended."""


class Lane:
    """Runs a query on a thread of its own until it is stopped."""

    def __init__(self, name: str, start: Start, watch: Watch | None = None) -> None:
        self.name = name
        self._start = start
        self._watch = watch or (lambda _: None)
        self._stop = threading.Event()
        self._query: StreamingQuery | None = None
        self._state = LaneState.STARTING
        self._reason: str | None = None
        self._restarts = 0
        self._batches = 0
        self._rows = 0
        self._last_batch: tuple[str, int] | None = None
        self._thread = threading.Thread(target=self._run, name=f"lane-{name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """End the query; what it has not committed stays in its queue."""
        self._stop.set()
        query = self._query
        if query is not None and query.isActive:
            query.stop()
        self._thread.join(timeout)

    @property
    def status(self) -> LaneStatus:
        """How it is."""
        return LaneStatus(
            self.name, self._state, self._restarts, self._reason, self._batches, self._rows
        )

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                self._run_once()
            except Exception as error:  # noqa: BLE001 - whatever it is, other lanes run on
                self._reason = reason_of(error)
                log.warning("lane %s failed: %s", self.name, self._reason)
            if self._stop.is_set():
                break
            if time.monotonic() - started > HEALTHY_AFTER:
                pause = FIRST_PAUSE
            self._state = LaneState.WAITING
            self._stop.wait(pause)
            pause = min(2 * pause, LAST_PAUSE)
            self._restarts += 1
        self._state = LaneState.STOPPED

    def _run_once(self) -> None:
        self._state = LaneState.STARTING
        query = self._query = self._start(uuid.uuid4().hex)
        try:
            while query.isActive and not self._stop.is_set():
                self._stop.wait(LOOK_SECONDS)
                self._look(query)
        finally:
            if query.isActive:
                query.stop()
        error = query.exception()
        if error is not None:
            raise error
        self._look(query)

    def _look(self, query: StreamingQuery) -> None:
        progress = query.lastProgress
        if progress is not None:
            batch = (str(query.runId), progress.batchId)
            if batch != self._last_batch and progress.numInputRows:
                self._last_batch = batch
                self._batches += 1
                self._rows += progress.numInputRows
            self._state = LaneState.RUNNING
            self._reason = None
        self._watch(query)


def reason_of(error: BaseException) -> str:
    """The one line of a Spark error that says what is wrong.

    Of a Python traceback the last, of everything else the first.
    """
    text = str(error)
    lines = [line.strip().removeprefix(": ") for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("An error occurred while calling")]
    named = [line for line in lines if line.startswith("turnlane.errors.")]
    if named:
        return named[-1].removeprefix("turnlane.errors.")
    raised = [line for line in lines if _looks_raised(line)]
    return (raised or lines or [type(error).__name__])[-1 if raised else 0][:500]


def _looks_raised(line: str) -> bool:
    """Whether a line is the end of a Python traceback: ``ValueError: …``."""
    head, colon, _ = line.partition(": ")
    return (
        bool(colon)
        and head.replace(".", "").replace("_", "").isalnum()
        and (head.endswith(("Error", "Exception", "Warning")))
    )
