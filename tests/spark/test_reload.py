"""A pipeline that is exchanged while events come in: does each get where it belongs, once?"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.contract.harness import wait_until
from tests.spark.nodes import Served, numbers, serving
from turnlane.formats.parse_settings import ParseSettings
from turnlane.outputs.file import FileSettings
from turnlane.pipeline.settings import ActionSettings, LaneSettings, PipelineSettings
from turnlane.queues.settings import QueueSettings
from turnlane.spark import pipeline as pipelines
from turnlane.spark.checking import check
from turnlane.spark.lane import LaneState
from turnlane.spark.runner import Plan, Runner

PATIENCE = 180.0
PIECE = 10
PAUSE = 0.02
QUEUES = ("main", "held", "more")
pytestmark = pytest.mark.timeout(600)


class Publisher:
    """Publishes numbers until it is told to stop."""

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
def node(tmp_path: Path) -> Iterator[Served]:
    queues = {name: {"durability": "always"} for name in QUEUES}
    with serving(tmp_path / "data", queues) as served:
        yield served


@pytest.fixture
def publisher(node: Served) -> Iterator[Publisher]:
    running = Publisher(node)
    yield running
    running.stop()


@pytest.fixture
def runner(spark: SparkSession) -> Iterator[Runner]:
    made = Runner(spark)
    yield made
    made.stop()


def plan(node: Served, place: Path, *names: str) -> Plan:
    """Actions whose lanes wait for more than ever comes: their queues keep everything."""
    actions = [
        ActionSettings(
            name=name,
            queue=QueueSettings.of(kind="disk", name=name, path=Path(name)),
            lane=LaneSettings(min_events=10**9, max_age=86_400),
            output=FileSettings(type="file", path=place / name),
        )
        for name in names
    ]
    settings = PipelineSettings(parse=ParseSettings(), actions=tuple(actions))
    queues: dict[str, dict[str, str]] = {name: {} for name in QUEUES}
    return Plan(settings, queues, {"endpoint": node.url}, place / "checkpoints")


def test_events_that_come_throughout_a_reload_are_in_each_queue_once(
    node: Served, publisher: Publisher, runner: Runner, tmp_path: Path
) -> None:
    runner.start(plan(node, tmp_path, "held"))
    wait_until(lambda: node.queue("held").end > 0, "the first lanes", PATIENCE)
    before = publisher.count
    runner.start(plan(node, tmp_path, "held", "more"))
    wait_until(lambda: node.queue("more").end > 0, "the lanes after them", PATIENCE)
    assert publisher.count > before, "events came meanwhile"
    publisher.stop()
    wait_until(lambda: node.queue("main").low == publisher.count, "all of them", PATIENCE)
    runner.stop()
    assert node.values("held") == numbers(0, publisher.count)
    more = node.values("more")
    assert 0 < len(more) < publisher.count
    assert more == numbers(publisher.count - len(more), publisher.count)


def test_a_plan_is_checked_once_and_while_the_one_before_it_runs(
    node: Served, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To check it again would find nothing else, and what fails then leaves nothing running."""
    running = []

    def noted(*given: Any) -> frozenset[str]:
        running.append([status.state for status in runner.status()])
        return check(*given)

    monkeypatch.setattr(pipelines, "check", noted)
    runner.start(plan(node, tmp_path, "held"))
    wait_until(lambda: _all_run(runner), "the first lanes", PATIENCE)
    runner.start(plan(node, tmp_path, "more"))
    assert running == [[], [LaneState.RUNNING] * 2]


def _all_run(runner: Runner) -> bool:
    return all(status.state is LaneState.RUNNING for status in runner.status())
