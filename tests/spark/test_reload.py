"""A pipeline is replaced while events arrive: each event arrives where it belongs, once."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from dataclasses import replace
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


def list_runs(runner: PipelineRunner) -> dict[str, str]:
    """Return the ids of the runs of all lanes' queries, by lane."""
    return {str(query.name): str(query.runId) for query in runner._spark.streams.active}


def change(before: PipelinePlan, **changes: dict[str, Any]) -> PipelinePlan:
    """Return a plan with changed settings of some actions."""
    actions = [
        action.model_copy(update=changes.get(action.name, {})) for action in before.settings.actions
    ]
    settings = before.settings.model_copy(update={"actions": tuple(actions)})
    return replace(before, settings=settings)


def test_reload_restarts_only_the_lanes_that_have_changed(
    node: Served, publisher: Publisher, runner: PipelineRunner, tmp_path: Path
) -> None:
    first = plan(node, tmp_path, "held", "more")

    def start(wanted: PipelinePlan) -> dict[str, str]:
        """Start a plan; return the runs of its lanes."""
        names = {"main", *(action.name for action in wanted.settings.actions)}
        runner.start(wanted)
        wait_until(lambda: set(list_runs(runner)) == names, "the lanes", PATIENCE)
        return list_runs(runner)

    runs = start(first)
    wait_until(lambda: node.queue("more").end > 0, "the first lanes", PATIENCE)

    # Filters are evaluated by the main lane.
    filtered = change(first, more={"filter": "CAST(CAST(value AS string) AS int) % 2 = 0"})
    assert find_changed(runs, runs := start(filtered)) == {"main"}
    # An output, or the size of batches, belongs to the lane of its action.
    output = FileOutputSettings(type="file", path=tmp_path / "elsewhere")
    moved = change(filtered, held={"output": output})
    assert find_changed(runs, runs := start(moved)) == {"held"}
    lane = LaneSettings(min_events=10**8, max_age=86_400)
    resized = change(moved, more={"lane": lane})
    assert find_changed(runs, runs := start(resized)) == {"more"}
    # The main lane routes to all actions, so it starts again if an action goes.
    fewer = replace(
        resized,
        settings=resized.settings.model_copy(update={"actions": resized.settings.actions[:1]}),
    )
    assert find_changed(runs, runs := start(fewer)) == {"main", "more"}
    assert find_changed(runs, start(fewer)) == set()

    publisher.stop()
    wait_until(lambda: node.queue("main").low == publisher.count, "all of them", PATIENCE)
    runner.stop()
    assert node.values("held") == numbers(0, publisher.count)
    assert len(set(node.values("more"))) == len(node.values("more"))


def find_changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before | after if before.get(name) != after.get(name)}


def test_lanes_run_on_while_a_reload_waits_for_another_lane(
    node: Served,
    runner: PipelineRunner,
    disk: FaultyDisk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The main lane commits into a queue whose disk is full, and cannot be interrupted."""
    monkeypatch.setattr(pipelines, "STOP_SECONDS", 5.0)
    first = plan(node, tmp_path, "held", "more")
    runner.start(first)
    wait_until(lambda: _all_run(runner), "the first lanes", PATIENCE)
    before = list_runs(runner)
    node.publish("main", numbers(0, 100))
    disk.fail("write", error=errno.ENOSPC, times=None, match=".chunk")
    wait_until(lambda: node.queue("held").storage_failure, "the full disk", PATIENCE)
    lane = LaneSettings(min_events=10**8, max_age=86_400)
    changed = change(first, held={"filter": "true"}, more={"lane": lane})
    with pytest.raises(LanesStillRunning, match="lane main of the earlier configuration"):
        runner.start(changed)
    assert runner.plan is None
    wait_until(
        lambda: list_runs(runner).get("more") not in (None, before["more"]), "more", PATIENCE
    )
    new = list_runs(runner)["more"]
    assert list_runs(runner)["held"] == before["held"]

    disk.clear()
    wait_until(lambda: runner.status()[0].state is LaneState.STOPPED, "the main lane", PATIENCE)
    assert runner.start(changed) == ["main"]
    assert runner.plan == changed
    wait_until(lambda: node.queue("main").low == 100, "all of them", PATIENCE)
    after = list_runs(runner)
    assert (after["held"], after["more"]) == (before["held"], new)
    assert not runner.stop()
    assert node.values("held") == node.values("more") == numbers(0, 100)


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


def test_queue_that_cannot_be_opened_stops_only_the_lanes_that_need_it(
    runner: PipelineRunner, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    with serving(data, {"main": {}}) as node:
        node.node.create_for_action("held")
        node.node.create_for_action("more")
    queue = data / "queues" / "held"
    queue.rename(tmp_path / "away")
    queue.write_bytes(b"no directory")
    with serving(data, {"main": {}}) as node:
        node.publish("main", numbers(0, 10))
        runner.start(plan(node, tmp_path, "held", "more"))

        def get_states() -> dict[str, str]:
            return {each.name: str(each.state) for each in runner.status()}

        expected = {"main": "waiting", "held": "waiting", "more": "running"}
        wait_until(lambda: get_states() == expected, "the lane of the other queue", PATIENCE)
        reasons = {each.name: each.reason or "" for each in runner.status()}
        assert "queue 'held' could not be opened" in reasons["main"]
        assert reasons["main"] == reasons["held"]
        for query in runner._spark.streams.active:
            query.stop()
        wait_until(lambda: runner.status()[2].restarts == 1, "the restart of a lane", PATIENCE)
        wait_until(lambda: get_states()["more"] == "running", "the lane again", PATIENCE)

        node.node.drop("held")
        wait_until(lambda: node.queue("main").low == 10, "all lanes", PATIENCE)
        assert node.values("held") == node.values("more") == numbers(0, 10)
        runner.stop()
    assert (data / "quarantine" / "held").read_bytes() == b"no directory"


def _all_run(runner: PipelineRunner) -> bool:
    return all(status.state is LaneState.RUNNING for status in runner.status())
