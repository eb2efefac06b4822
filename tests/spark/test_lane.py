"""A lane counts every batch, ends after a batch, and reports why it does not send."""

from __future__ import annotations

import itertools
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
    Collecting,
    Lane,
    LaneLimits,
    LaneState,
    LaneStatus,
    LaneWatch,
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


def make_lane(
    *queries: Any, watch: ProgressHandler | None = None, stall: LaneWatch | None = None
) -> Lane:
    """Create a lane that runs these queries, one after another."""
    left = iter(queries)

    def start(_: str) -> Any:
        query = next(left)
        query.lane = lane
        return query

    lane = Lane("a", start, watch, watch=stall)
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
    """Events wait and no batch ends: either the lane collects events, or it has stalled."""

    def test_stall_is_reported_again_each_time_it_doubles(self) -> None:
        found = StallDetector(LaneLimits(stall_timeout=60.0))
        moments = [0, 59, 60, 61, 119, 120, 239, 240]
        said = [found.check(1, 100.0 + each, is_in_batch=False) for each in moments]
        assert said == [None, None, 60.0, None, None, 120.0, None, 240.0]

    def test_batch_in_progress_gets_more_time(self) -> None:
        found = StallDetector(LaneLimits(stall_timeout=60.0))
        said = [found.check(1, 100.0 + each, is_in_batch=True) for each in (0, 61, 299, 300)]
        assert said == [None, None, None, 300.0]

    def test_lane_that_starts_again_gets_more_time_until_a_batch_ends(self) -> None:
        found = StallDetector(LaneLimits(stall_timeout=60.0))
        moments = []
        for begin in (0.0, 1000.0, 2000.0):
            found.reset()
            waits = range(1000)
            moments.append(
                next(
                    each
                    for each in waits
                    if found.check(1, begin + each, is_in_batch=False) is not None
                )
            )
            if begin == 1000.0:
                found.on_batch()
        assert moments == [60, 120, 60]

    def test_too_few_events_are_collected_until_their_time_is_over(self) -> None:
        found = StallDetector(LaneLimits(min_events=10, max_age=600.0, stall_timeout=60.0))
        assert found.check(3, 100.0, is_in_batch=False) == Collecting(3, 10, 600.0)
        assert found.check(5, 699.0, is_in_batch=False) == Collecting(5, 10, 1.0)
        assert found.check(5, 700.0, is_in_batch=False) is None, "a batch can start"
        assert found.check(5, 759.0, is_in_batch=False) is None
        assert found.check(5, 760.0, is_in_batch=False) == 60.0

    def test_enough_events_are_never_collected(self) -> None:
        found = StallDetector(LaneLimits(min_events=10, max_age=600.0, stall_timeout=60.0))
        assert found.check(10, 100.0, is_in_batch=False) is None
        assert found.check(9, 159.0, is_in_batch=False) is None, "the batch has still to start"
        assert found.check(9, 160.0, is_in_batch=False) == 60.0


class TestStalledLane:
    @pytest.fixture(autouse=True)
    def _soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lanes, "POLL_SECONDS", 0.001)
        monkeypatch.setattr(lanes, "BATCH_PATIENCE", 1)
        monkeypatch.setattr(lanes, "RESTART_BACKOFF", Backoff(0.0, 0.0))

    @pytest.mark.parametrize("spark", ["Waiting for data", PROCESSING])
    def test_query_with_waiting_events_and_no_batch_is_reported_and_started_again(
        self, caplog: pytest.LogCaptureFixture, spark: str
    ) -> None:
        first, second = Query(), Query()
        counted: list[str] = []
        limits = LaneLimits(stall_timeout=0.01)

        def count(_: StreamingQueryProgress | None) -> int:
            return 7 if first.isActive else 0

        lane = make_lane(first, second, stall=LaneWatch(limits, count, lambda: counted.append("a")))
        if spark != PROCESSING:
            first.batch_ended.set()
        first.finish_batch(0, 0)
        lane.start()
        wait_for_query(lane, second)
        assert not first.isActive
        second.finish_batch(0, 7)
        wait_until(lambda: lane.status.batches == 1)
        assert stop_lane(lane, second).restarts == 1
        assert counted == ["a"]
        (stalled, failed) = caplog.messages
        assert stalled.startswith(f'lane.stalled lane=a events=7 seconds=0 spark="{spark}" stack=')
        assert re.match(r'lane\.failed lane=a reason="stalled: 7 events wait, no batch', failed)

    def test_batch_of_a_lane_with_a_checkpoint_is_reported_and_not_interrupted(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        query = Query()
        limits = LaneLimits(stall_timeout=0.01, can_interrupt=False)
        lane = make_lane(query, stall=LaneWatch(limits, lambda _: 7))
        query.finish_batch(0, 1)
        lane.start()
        wait_until(lambda: lane.status.stalled is not None)
        assert re.fullmatch(
            r"lane a: running, stalled: 7 events wait, no batch has ended for \d+ s; "
            "Spark: Processing new data",
            format_lane_status(lane.status),
        )
        wait_until(lambda: len(caplog.messages) > 1)
        assert query.isActive
        assert "its batch is not interrupted" in caplog.text
        stop_lane(lane, query)

    def test_lane_whose_batches_deliver_nothing_is_reported_and_not_started_again(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        query = Query()
        query.batch_ended.set()
        settled = [5]
        limits = LaneLimits(stall_timeout=2.0)
        watch = LaneWatch(limits, lambda _: 7, count_settled=lambda: settled[0])
        lane = make_lane(query, stall=watch)
        lane.start()
        batches = itertools.count()

        def has_stalled() -> bool:
            query.finish_batch(next(batches), 7)
            return lane.status.stalled is not None

        wait_until(has_stalled)
        assert re.fullmatch(
            r"7 events wait, \d+ batches have delivered no event for \d+ s; "
            "Spark: Waiting for data",
            lane.status.stalled or "",
        )
        assert "its batches end" in caplog.text
        settled[0] = 6
        query.finish_batch(next(batches), 7)
        wait_until(lambda: lane.status.stalled is None)
        assert stop_lane(lane, query).restarts == 0

    def test_lane_that_waits_for_a_known_reason_has_not_stalled(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        asked: list[int] = []

        def count(_: StreamingQueryProgress | None) -> int:
            asked.append(1)
            return 0 if len(asked) % 2 else 7

        query = Query()
        query.batch_ended.set()
        lane = Lane(
            "a",
            lambda _: query,  # type: ignore[arg-type, return-value]
            get_suspension=lambda: Suspension(1.0, why="away") if len(asked) % 2 else None,
            watch=LaneWatch(LaneLimits(stall_timeout=0.001), count),
        )
        query.send_event = lane.on_event
        query.finish_batch(0, 0)
        lane.start()
        wait_until(lambda: len(asked) > 10)
        stop_lane(lane, query)
        assert caplog.messages == []

    def test_collected_events_are_in_the_status(self) -> None:
        query = Query()
        query.batch_ended.set()
        limits = LaneLimits(min_events=100_000, max_age=NEVER)
        lane = make_lane(query, stall=LaneWatch(limits, lambda _: 50_000))
        query.finish_batch(0, 0)
        lane.start()
        wait_until(lambda: lane.status.collecting is not None)
        assert re.fullmatch(
            r"lane a: running, collects events: 50,000 of 100,000, at most until "
            r"(\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d",
            format_lane_status(lane.status),
        )
        assert get_lane_fields(lane.status)["collecting"]["wanted"] == 100_000
        stop_lane(lane, query)
        assert lane.status.collecting is None


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
