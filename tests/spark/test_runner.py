"""The runner: changes of lanes that it reports, and queues that it creates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.spark.nodes import serving
from turnlane.errors import TransportDown
from turnlane.pipeline.settings import PipelineSettings
from turnlane.spark.lane import Collecting, LaneState, LaneStatus
from turnlane.spark.pipeline import PipelinePlan, PipelineRunner, create_missing_queues


class FakePipeline:
    """A pipeline whose lanes have the states that the test sets."""

    def __init__(self) -> None:
        self.now: list[LaneStatus] = []

    def status(self) -> list[LaneStatus]:
        return self.now

    def stop(self, timeout: float) -> list[str]:
        self.now = []
        return []


def lane(state: LaneState, reason: str | None = None, restarts: int = 0) -> LaneStatus:
    return LaneStatus("a", state, restarts, reason, 0, 0)


def list_changes_of(states: list[LaneStatus]) -> list[tuple[str, str | None]]:
    """Return the changes that a runner reports of a lane with these states."""
    lanes: Any = FakePipeline()
    nothing: Any = None
    runner = PipelineRunner(nothing)
    runner._lanes = lanes
    said = []
    for state in states:
        lanes.now = [state]
        said += [(str(each.state), each.reason) for each in runner.list_changes()]
    return said


def test_only_changed_lanes_are_listed() -> None:
    starting, running = lane(LaneState.STARTING), lane(LaneState.RUNNING)
    assert list_changes_of([starting, starting, running, running]) == [
        ("starting", None),
        ("running", None),
    ]


def test_failing_lane_is_listed_once_per_reason() -> None:
    away = [lane(LaneState.WAITING, "away", 1), lane(LaneState.STARTING, "away", 1)]
    assert list_changes_of([*away, *away, *away]) == [("waiting", "away")]
    other = lane(LaneState.WAITING, "full", 2)
    assert list_changes_of([*away, other, lane(LaneState.RUNNING)]) == [
        ("waiting", "away"),
        ("waiting", "full"),
        ("running", None),
    ]


def test_lane_that_collects_before_each_batch_is_listed_once() -> None:
    running = lane(LaneState.RUNNING)
    collecting = [replace(running, collecting=Collecting(each, 9, 60.0)) for each in (1, 2)]
    assert len(list_changes_of([running, *collecting, running, *collecting, running])) == 2


def test_stalled_lane_is_listed() -> None:
    running = lane(LaneState.RUNNING)
    assert len(list_changes_of([running, replace(running, stalled="9 events wait"), running])) == 3


def plan(endpoint: str, **queues: dict[str, Any]) -> PipelinePlan:
    return PipelinePlan(PipelineSettings(), queues, {"endpoint": endpoint}, Path())


def test_missing_queues_are_created_and_others_not_changed(tmp_path: Path) -> None:
    with serving(tmp_path, {"main": {"size": 7}}) as served:
        served.publish("main", [b"kept"])
        create_missing_queues(
            plan(served.url, main={}, small={"kind": "memory", "max_bytes": 2**20})
        )
        assert served.queue("small").settings.max_bytes == 2**20
        assert served.queue("main").settings.size == 7
        assert served.values("main") == [b"kept"]


def test_unreachable_node_raises_an_error(tmp_path: Path) -> None:
    with serving(tmp_path, {}) as served:
        url = served.url
    with pytest.raises(TransportDown):
        create_missing_queues(plan(url, main={}))
