"""A pipeline is replaced while events arrive: each event arrives where it belongs, once."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.contract.harness import wait_until
from tests.spark.nodes import Served, numbers, serving
from turnlane.events import block_of
from turnlane.formats.parse_settings import ParseSettings
from turnlane.outputs.file import FileOutputSettings
from turnlane.pipeline.settings import ActionSettings, LaneSettings, PipelineSettings
from turnlane.queues.settings import QueueSettings
from turnlane.spark import pipeline as pipelines
from turnlane.spark.checks import check_pipeline
from turnlane.spark.lane import LaneState
from turnlane.spark.pipeline import LanesStillRunning, PipelinePlan, PipelineRunner
from turnlane.testing import FaultyDisk

PATIENCE = 180.0
PIECE = 10
PAUSE = 0.02
QUEUES = ("main", "held", "more")
Caplog = pytest.LogCaptureFixture
pytestmark = pytest.mark.timeout(600)


class Publisher:
    """Publishes numbers until it is stopped."""

    def __init__(self, node: Served) -> None:
        self.count = 0
        self._node = node
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(PAUSE):
            self._node.publish("main", numbers(self.count, self.count + PIECE))
            self.count += PIECE

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def node(tmp_path: Path, disk: FaultyDisk) -> Iterator[Served]:
    queues = {name: {"durability": "always"} for name in QUEUES}
    with serving(tmp_path / "data", queues, disk=disk) as served:
        yield served
        disk.clear()


@pytest.fixture
def publisher(node: Served) -> Iterator[Publisher]:
    running = Publisher(node)
    yield running
    running.stop()


@pytest.fixture
def runner(spark: SparkSession) -> Iterator[PipelineRunner]:
    made = PipelineRunner(spark)
    yield made
    made.stop()


def plan(node: Served, place: Path, *names: str) -> PipelinePlan:
    """Actions whose lanes wait for more events than there are: their queues keep all."""
    actions = [
        ActionSettings(
            name=name,
            queue=QueueSettings.of(kind="disk", name=name, path=Path(name)),
            lane=LaneSettings(min_events=10**9, max_age=86_400),
            output=FileOutputSettings(type="file", path=place / name),
        )
        for name in names
    ]
    settings = PipelineSettings(parse=ParseSettings(), actions=tuple(actions))
    queues: dict[str, dict[str, str]] = {name: {} for name in QUEUES}
    return PipelinePlan(settings, queues, {"endpoint": node.url}, place / "checkpoints")


def test_events_published_during_a_reload_are_in_each_queue_once(
    node: Served, publisher: Publisher, runner: PipelineRunner, tmp_path: Path
) -> None:
    runner.start(plan(node, tmp_path, "held"))
    wait_until(lambda: node.queue("held").end > 0, "the first lanes", PATIENCE)
    before = publisher.count
    runner.start(plan(node, tmp_path, "held", "more"))
    wait_until(lambda: node.queue("more").end > 0, "the lanes after them", PATIENCE)
    assert publisher.count > before, "events arrived during the reload"
    publisher.stop()
    wait_until(lambda: node.queue("main").low == publisher.count, "all of them", PATIENCE)
    runner.stop()
    assert node.values("held") == numbers(0, publisher.count)
    more = node.values("more")
    assert 0 < len(more) < publisher.count
    assert more == numbers(publisher.count - len(more), publisher.count)


def test_reload_waits_for_blocked_lanes_and_names_the_reason(
    node: Served, runner: PipelineRunner, disk: FaultyDisk, tmp_path: Path, caplog: Caplog
) -> None:
    """The main lane commits into a queue whose disk is full, and cannot be interrupted."""
    runner.start(plan(node, tmp_path, "held"))
    wait_until(lambda: _all_run(runner), "the first lanes", PATIENCE)
    node.publish("main", numbers(0, 100))
    disk.fail("write", error=errno.ENOSPC, times=None, match=".chunk")
    wait_until(lambda: "queue.write_failed queue=held" in caplog.text, "the full disk", PATIENCE)
    assert runner.stop(timeout=5.0) == ["main"]
    states = {each.name: each.state for each in runner.status()}
    assert states == {"main": LaneState.STOPPING, "held": LaneState.STOPPED}
    again = plan(node, tmp_path, "held", "more")
    reason = "lane main of the earlier configuration has not ended yet; queue held cannot write"
    with pytest.raises(LanesStillRunning, match=reason):
        runner.start(again)
    assert runner.plan is None
    assert "lane.stop_delayed lane=main" in caplog.text

    node.queue("main").producer(ack="accepted").publish_block(block_of(numbers(100, 120)))
    disk.clear()
    runner.start(again)
    wait_until(lambda: node.queue("main").low == 120, "all of them", PATIENCE)
    assert not runner.stop()
    assert node.values("held") == numbers(0, 120)
    assert set(node.values("more")) <= {*numbers(0, 120)}
    assert "already active" not in caplog.text


def test_plan_is_checked_once_while_the_earlier_plan_runs(
    node: Served, runner: PipelineRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second check would find nothing new, and its failure would leave nothing running."""
    running: list[list[LaneState]] = []

    def noted(*given: Any) -> frozenset[str]:
        running.append([status.state for status in runner.status()])
        return check_pipeline(*given)

    monkeypatch.setattr(pipelines, "check_pipeline", noted)
    runner.start(plan(node, tmp_path, "held"))
    wait_until(lambda: _all_run(runner), "the first lanes", PATIENCE)
    runner.start(plan(node, tmp_path, "more"))
    assert running == [[], [LaneState.RUNNING] * 2]


def _all_run(runner: PipelineRunner) -> bool:
    return all(status.state is LaneState.RUNNING for status in runner.status())
