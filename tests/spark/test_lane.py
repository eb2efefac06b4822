"""A lane counts every batch, ends after a batch, and reports why it does not send."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # has none
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.listener import StreamingQueryProgress

from tests.contract.harness import wait_until
from turnlane.cli.supervise import format_lane_status, get_lane_fields
from turnlane.pacing import Backoff
from turnlane.spark import lane as lanes
from turnlane.spark.batch_planning import TAKEN_EVENTS
from turnlane.spark.lane import (
    PROCESSING,
    TIMED_OUT,
    Lane,
    LaneState,
    LaneStatus,
    ProgressHandler,
    QueryEvent,
    StallDetector,
)
from turnlane.spark.steps import Suspension

NEVER = 3600.0


def progress(run: str, batch: int, events: int) -> StreamingQueryProgress:
    """Return Spark's progress after a batch that starts at 0."""
    source = {
        "description": "",
        "startOffset": {TAKEN_EVENTS: 0},
        "endOffset": {TAKEN_EVENTS: events},
        "latestOffset": {TAKEN_EVENTS: events},
        "numInputRows": events,
        "inputRowsPerSecond": 1.0,
        "processedRowsPerSecond": 1.0,
    }
    return StreamingQueryProgress.fromJson(
        {
            "id": run,
            "runId": run,
            "name": "a",
            "timestamp": "2026-11-16T05:00:00.000Z",
            "batchId": batch,
            "batchDuration": 1,
            "numInputRows": events,
            "stateOperators": [],
            "sources": [source],
            "sink": {"description": "", "numOutputRows": events},
        }
    )


class Query:
    """A query in a batch, which ends when the test sets ``batch_ended``."""

    def __init__(self) -> None:
        self.runId = str(uuid.uuid4())  # Spark's name.
        self.isActive = True
        self.batch_ended = threading.Event()
        self.was_in_a_batch = False
        self.asked = threading.Event()
        self.lastProgress: StreamingQueryProgress | None = None
        self.error: Exception | None = None
        self.send_event: Callable[[QueryEvent], None] = lambda _: None
        self.late: list[QueryEvent] = []
        """Events that are sent only after the end."""

    @property
    def status(self) -> dict[str, Any]:
        self.asked.set()
        return {"message": "Waiting for data" if self.batch_ended.is_set() else PROCESSING}

    def make_event(self, batch: int, events: int) -> QueryEvent:
        return QueryEvent(self.runId, progress(self.runId, batch, events))

    def finish_batch(self, batch: int, events: int) -> None:
        """Send the event of a finished batch."""
        self.send_event(self.make_event(batch, events))

    def stop(self) -> None:
        self.was_in_a_batch = not self.batch_ended.is_set()
        self.end()

    def end(self, *, sends_event: bool = True) -> None:
        self.isActive = False
        for each in self.late:
            self.send_event(each)
        if sends_event:
            self.send_event(QueryEvent(self.runId))

    def exception(self) -> Exception | None:
        return self.error


def make_lane(*queries: Any, watch: ProgressHandler | None = None) -> Lane:
    """Create a lane that runs these queries, one after another."""
    left = iter(queries)

    def start(_: str) -> Any:
        query = next(left)
        query.lane = lane
        return query

    lane = Lane("a", start, watch)
    for query in queries:
        query.send_event = lane.on_event
    return lane


def wait_for_query(lane: Lane, query: Any) -> None:
    wait_until(lambda: getattr(query, "lane", None) is lane)


def start_lane(query: Query, watch: ProgressHandler | None = None) -> Lane:
    lane = make_lane(query, watch=watch)
    lane.start()
    wait_for_query(lane, query)
    return lane


def stop_lane(lane: Lane, query: Query) -> LaneStatus:
    """Stop the lane between two batches; returns its status."""
    query.batch_ended.set()
    lane.stop()
    assert lane.status.state is LaneState.STOPPED
    return lane.status


@pytest.fixture
def without_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes that do not poll."""
    monkeypatch.setattr(lanes, "START_SECONDS", NEVER)
    monkeypatch.setattr(lanes, "POLL_SECONDS", NEVER)


@pytest.mark.usefixtures("without_polling")
class TestQueryEvents:
    def test_every_batch_is_counted(self) -> None:
        query = Query()
        lane = start_lane(query)
        for batch in range(20):
            query.finish_batch(batch, 3)
        query.finish_batch(20, 0)
        wait_until(lambda: lane.status.state is LaneState.RUNNING)
        status = stop_lane(lane, query)
        assert (status.batches, status.rows) == (20, 60)

    def test_events_before_the_start_and_after_the_end_are_counted(self) -> None:
        query = Query()
        query.late = [query.make_event(1, 5)]
        lane = make_lane(query)
        query.finish_batch(0, 2)
        lane.start()
        wait_until(lambda: lane.status.batches == 1)
        status = stop_lane(lane, query)
        assert (status.batches, status.rows) == (2, 7)

    def test_events_of_another_run_are_ignored(self) -> None:
        query, other = Query(), Query()
        lane = start_lane(query)
        lane.on_event(other.make_event(0, 100))
        lane.on_event(QueryEvent(other.runId))
        query.finish_batch(0, 1)
        wait_until(lambda: lane.status.batches == 1)
        assert query.isActive
        assert stop_lane(lane, query).rows == 1

    def test_failed_query_is_started_again_and_the_reason_shown(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lanes, "RESTART_BACKOFF", Backoff(0.0, 0.0))
        first, second = Query(), Query()
        first.error = StreamingQueryException(message="of the query")
        first.late = [first.make_event(0, 4)]
        lane = make_lane(first, second)
        lane.start()
        first.end()
        wait_for_query(lane, second)
        assert lane.status.reason == "of the query"
        lane.on_event(first.make_event(1, 1000))
        second.finish_batch(0, 4)
        wait_until(lambda: lane.status.batches == 2)
        assert lane.status.reason is None
        status = stop_lane(lane, second)
        assert (status.restarts, status.rows) == (1, 8)

    def test_progress_handler_is_called_on_the_lanes_thread(self) -> None:
        batches: list[tuple[str, int]] = []
        query = Query()

        def watch(found: StreamingQueryProgress) -> None:
            batches.append((threading.current_thread().name, found.batchId))

        lane = start_lane(query, watch)
        query.finish_batch(0, 1)
        query.late = [query.make_event(1, 1)]
        wait_until(lambda: lane.status.batches == 1)
        stop_lane(lane, query)
        assert batches == [("lane-a", 0), ("lane-a", 1)]


class TestWithoutEvents:
    def test_idle_query_is_reported_as_running(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lanes, "POLL_SECONDS", NEVER)
        batches: list[int] = []
        query = Query()
        query.lastProgress = progress(query.runId, 7, 0)
        lane = start_lane(query, lambda found: batches.append(found.batchId))
        wait_until(lambda: lane.status.state is LaneState.RUNNING)
        assert stop_lane(lane, query).batches == 0
        assert batches == [7]

    def test_progress_handler_is_called_again_with_the_last_progress(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lanes, "POLL_SECONDS", 0.001)
        batches: list[int] = []
        query = Query()
        lane = start_lane(query, lambda found: batches.append(found.batchId))
        query.finish_batch(3, 1)
        wait_until(lambda: len(batches) > 2)
        assert stop_lane(lane, query).batches == 1
        assert set(batches) == {3}

    def test_end_without_an_event_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lanes, "POLL_SECONDS", 0.001)
        monkeypatch.setattr(lanes, "EVENT_SECONDS", 0.0)
        query = Query()
        query.error = StreamingQueryException(message="unheard of")
        lane = start_lane(query)
        query.finish_batch(0, 1)
        wait_until(lambda: lane.status.state is LaneState.RUNNING)
        query.end(sends_event=False)
        wait_until(lambda: lane.status.state is LaneState.WAITING)
        assert lane.status.reason == "unheard of"
        lane.stop()


class TestStallDetector:
    """A batch that takes very long may hang: it is logged."""

    @pytest.fixture(autouse=True)
    def _soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lanes, "POLL_SECONDS", 0.001)
        monkeypatch.setattr(lanes, "STALL_SECONDS", 0.01)

    def test_stall_is_reported_again_each_time_it_doubles(self) -> None:
        quiet = lanes.STALL_SECONDS
        found = StallDetector(100.0)
        moments = [0.5, 1.5, 1.6, 2.9, 3.1, 6.1, 6.3]
        said = [found.check(100.0 + each * quiet) is not None for each in moments]
        assert said == [False, True, False, False, True, False, True]

    def test_stall_during_a_batch_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        query = Query()
        lane = make_lane(query)
        query.finish_batch(0, 1)
        lane.start()
        wait_until(lambda: len(caplog.messages) > 1)
        stop_lane(lane, query)
        for each in caplog.messages:
            assert re.fullmatch(
                r'lane\.stalled lane=a seconds=\d+ spark="Processing new data"', each
            )

    def test_idle_query_is_no_stall(self, caplog: pytest.LogCaptureFixture) -> None:
        query = Query()
        query.batch_ended.set()
        lane = make_lane(query)
        query.finish_batch(0, 0)
        lane.start()
        wait_until(query.asked.is_set)
        stop_lane(lane, query)
        assert caplog.messages == []


def test_stop_waits_for_the_batch_in_progress() -> None:
    query = Query()
    lane = start_lane(query)
    lane.ask_to_stop()
    assert query.asked.wait(20)
    assert query.isActive
    query.batch_ended.set()
    lane.stop()
    assert not query.was_in_a_batch
    assert lane.status.state is LaneState.STOPPED


def test_batch_that_takes_too_long_is_interrupted() -> None:
    query = Query()
    lane = start_lane(query)
    assert lane.stop(timeout=0.0)
    assert not query.isActive
    assert query.was_in_a_batch


class Stuck(Query):
    """A query that cannot be interrupted: it is inactive, but has not ended."""

    def __init__(self, patience: float) -> None:
        super().__init__()
        self.batch_ended.set()
        self.may_end = threading.Event()
        self.asked_to_stop = 0
        self._patience = patience

    def stop(self) -> None:
        self.isActive = False
        self.asked_to_stop += 1
        if not self.may_end.wait(self._patience):
            raise Py4JJavaError("stop: ", Late())
        self.end()


class Late:
    """Spark's error if a query does not stop in time, as py4j raises it."""

    _target_id = "o1"

    def getClass(self) -> Late:  # noqa: N802 - as Java has it
        return self

    def getName(self) -> str:  # noqa: N802
        return TIMED_OUT


@pytest.mark.parametrize("patience", [NEVER, 0.01], ids=["Spark waits", "Spark gives up"])
def test_stop_returns_false_while_the_query_runs(
    patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "HURRY_SECONDS", 0.1)
    query = Stuck(patience)
    lane = start_lane(query)
    assert not lane.stop(timeout=0.1)
    assert (lane.status.state, query.isActive) == (LaneState.STOPPING, False)
    assert query.asked_to_stop > 1 or patience == NEVER, "it is interrupted again"
    query.may_end.set()
    assert lane.stop(timeout=20.0)
    assert lane.status.state is LaneState.STOPPED


def test_open_breaker_is_reported_with_the_time_of_the_next_try() -> None:
    suspension = Suspension(12.3, why="a: RetryLater: HTTP 503")
    status = LaneStatus("a", LaneState.RUNNING, 0, None, 1, 10, suspension)
    assert format_lane_status(status) == "lane a: suspended: RetryLater: HTTP 503, next try in 12s"
    assert get_lane_fields(status)["suspended"] == "a: RetryLater: HTTP 503"
    assert get_lane_fields(status)["next_try"] == 12.3
    well = LaneStatus("a", LaneState.RUNNING, 0, None, 1, 10)
    assert format_lane_status(well) == "lane a: running"
    assert get_lane_fields(well)["suspended"] is None
