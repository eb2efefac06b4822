"""Does a lane end after its batch, not in it, and is what holds it up told in a line?"""

from __future__ import annotations

import threading
from typing import Any

from tests.contract.harness import wait_until
from turnlane.cli.operation import _about, _said
from turnlane.spark.lane import PROCESSING, Lane, LaneState, LaneStatus
from turnlane.spark.suspension import Suspension


class Query:
    """A query at a batch that ends when the test says so."""

    runId = "1"  # noqa: N815 - as Spark has it

    def __init__(self) -> None:
        self.isActive = True  # as Spark has it
        self.batch_ended = threading.Event()
        self.was_at_a_batch = False
        self.asked = threading.Event()
        self.lastProgress = None

    @property
    def status(self) -> dict[str, Any]:
        self.asked.set()
        return {"message": "Waiting for data" if self.batch_ended.is_set() else PROCESSING}

    def stop(self) -> None:
        self.was_at_a_batch = not self.batch_ended.is_set()
        self.isActive = False

    def exception(self) -> None:
        return None


def started(query: Any) -> Lane:
    lane = Lane("a", lambda _: query)
    lane.start()
    wait_until(lambda: lane._query is query)
    return lane


def test_a_batch_that_is_under_way_may_end_first() -> None:
    query = Query()
    lane = started(query)
    lane.ask_to_stop()
    assert query.asked.wait(20)
    assert query.isActive
    query.batch_ended.set()
    lane.stop()
    assert not query.was_at_a_batch
    assert lane.status.state is LaneState.STOPPED


def test_one_that_does_not_end_in_time_is_ended() -> None:
    query = Query()
    lane = started(query)
    lane.stop(timeout=0.0)
    assert not query.isActive
    assert query.was_at_a_batch


def test_what_holds_a_lane_up_is_told_with_the_time_of_the_next_try() -> None:
    suspension = Suspension(12.3, why="a: RetryLater: HTTP 503")
    status = LaneStatus("a", LaneState.RUNNING, 0, None, 1, 10, suspension)
    assert _said(status) == "lane a: suspended: RetryLater: HTTP 503, next try in 12s"
    assert _about(status)["suspended"] == "a: RetryLater: HTTP 503"
    assert _about(status)["next_try"] == 12.3
    well = LaneStatus("a", LaneState.RUNNING, 0, None, 1, 10)
    assert _said(well) == "lane a: running"
    assert _about(well)["suspended"] is None
