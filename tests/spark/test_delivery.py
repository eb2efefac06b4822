"""Lanes on real Spark deliver in spite of bad destinations.

test_lane_loop.py tests all cases without Spark; here everything works together.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.contract.harness import wait_until
from tests.outputs.web_servers import Reply, run_server
from tests.spark.destinations import Destination, find_pid
from tests.spark.nodes import Served, serving
from turnlane.delivery.settings import DeliverySettings
from turnlane.formats.parse_settings import ParseSettings
from turnlane.outputs.file import FileOutputSettings
from turnlane.outputs.http import HttpOutputSettings
from turnlane.pipeline.settings import ActionSettings, PipelineSettings
from turnlane.queues.settings import QueueSettings
from turnlane.spark.lane import LaneState, LaneStatus
from turnlane.spark.pipeline import Pipeline

PATIENCE = 240.0
pytestmark = pytest.mark.timeout(900)

SOON = DeliverySettings(backoff=0.05, max_backoff=0.2, breaker_failures=3, breaker_reset=0.3)


class World:
    """The node, the pipeline and its destinations."""

    def __init__(self, node: Served, pipeline: Pipeline, file: Path, **at: Destination) -> None:
        self.node = node
        self.pipeline = pipeline
        self.at = at
        self._file = file

    def send(self, action: str, count: int, *, start: int = 0) -> list[bytes]:
        """Publish events for an action."""
        numbers = range(start, start + count)
        values = [b"%s %d" % (action.encode(), number) for number in numbers]
        self.node.publish("main", values, keys=[action] * count)
        return values

    def get_lane(self, name: str) -> LaneStatus:
        return next(each for each in self.pipeline.status() if each.name == name)

    def suspended(self, name: str) -> str:
        """Wait until a lane is suspended; returns the reason."""
        wait_until(lambda: self.get_lane(name).suspended is not None, f"{name} suspended", PATIENCE)
        return str(self.get_lane(name).suspended)

    def wait_until_empty(self, *queues: str) -> None:
        """Wait until nothing is pending in the main queue and these."""
        for name in ("main", *queues):
            queue = self.node.queue(name)
            wait_until(lambda queue=queue: queue.low == queue.end, f"{name} to drain", PATIENCE)  # type: ignore[misc]
        for each in self.node.node.queues().values():
            assert each.stats().ledger.adds_up, each.stats().ledger

    def is_steady(self) -> list[bytes]:
        return self._file.read_bytes().splitlines() if self._file.exists() else []


def queue(name: str) -> QueueSettings:
    return QueueSettings.of(kind="disk", name=name, path=Path(name))


def action(name: str, output: Any, **more: Any) -> ActionSettings:
    return ActionSettings(name=name, filter=f"key = '{name}'", delivery=SOON, output=output, **more)


@pytest.fixture(scope="module")
def world(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    place = tmp_path_factory.mktemp("delivery")
    names = ["main", "steady", "plain", "steady.dead", "plain.dead", "direct.dead"]
    with ExitStack() as opened:
        node = opened.enter_context(serving(place / "data", {name: {} for name in names}))
        at = {name: Destination(opened.enter_context(run_server())) for name in ("plain", "direct")}
        to = {name: HttpOutputSettings(url=each.url, format="raw") for name, each in at.items()}
        file = FileOutputSettings(type="file", path=place / "steady", format="raw")
        settings = PipelineSettings(
            parse=ParseSettings.model_validate("none"),
            actions=(
                action("steady", file, queue=queue("steady")),
                action("plain", to["plain"], queue=queue("plain")),
                action("direct", to["direct"]),
            ),
        )
        pipeline = Pipeline(settings, {"endpoint": node.url}, spark, place / "checkpoints")
        pipeline.start()
        opened.callback(pipeline.stop)
        yield World(node, pipeline, place / "steady", **at)


def test_destination_gets_all_events_after_an_outage(world: World) -> None:
    """Its query and the other lanes continue to run."""
    plain = world.at["plain"]
    world.wait_until_empty("plain", "steady")
    delivered, taken = world.node.queue("plain").stats().ledger.delivered, len(plain.taken)
    plain.away()
    values = world.send("plain", 3000)
    assert "503" in world.suspended("plain")
    others = world.send("steady", 100)
    wait_until(lambda: set(others) <= set(world.is_steady()), "another lane", PATIENCE)
    wait_until(lambda: world.get_lane("plain").state is LaneState.RUNNING, "its batch", PATIENCE)
    assert world.node.queue("plain").stats().ledger.delivered == delivered
    plain.back()
    world.wait_until_empty("plain")
    assert sorted(set(plain.taken[taken:])) == sorted(values)
    wait_until(lambda: world.get_lane("plain").suspended is None, "the end of it", PATIENCE)


def test_one_bad_event_in_a_thousand_becomes_a_dead_letter(world: World) -> None:
    plain = world.at["plain"]
    world.wait_until_empty("plain")
    before, refused = Counter(plain.taken), plain.refused
    plain.refuse = lambda values: Reply(400, b"no") if b"plain 90617" in values else None
    values = world.send("plain", 1000, start=90_000)
    world.wait_until_empty("plain")
    plain.back()
    assert set(Counter(plain.taken) - before) == set(values) - {b"plain 90617"}
    assert plain.refused - refused <= 2 * math.log2(1000)
    assert world.node.values("plain.dead") == [b"plain 90617"]
    assert world.node.queue("plain").stats().ledger.dead == 1


def test_events_in_flight_at_a_kill_are_sent_again(world: World) -> None:
    """The Python process of a task is killed while the server has an unanswered request."""
    plain = world.at["plain"]
    world.wait_until_empty("plain")
    before, ledger = Counter(plain.taken), world.node.queue("plain").stats().ledger
    sending, release = threading.Event(), threading.Event()

    def hold(_: list[bytes]) -> Reply:
        sending.set()
        release.wait(PATIENCE)
        return Reply(503)

    plain.refuse = hold
    values = world.send("plain", 50, start=95_000)
    assert sending.wait(PATIENCE)
    os.kill(find_pid(plain.url, plain.peer), signal.SIGKILL)
    plain.back()
    release.set()
    world.wait_until_empty("plain")
    assert set(Counter(plain.taken) - before) == set(values), "each at least once"
    after = world.node.queue("plain").stats().ledger
    assert (after.delivered, after.dead) == (ledger.delivered + 50, ledger.dead)
    assert world.node.node.breakers.of("plain").workers == 2, "one for each core of Spark"
    assert after.adds_up


def test_direct_action_that_is_away_suspends_the_main_lane_visibly(
    world: World,
) -> None:
    direct = world.at["direct"]
    direct.away()
    values = world.send("direct", 10)
    assert "direct" in world.suspended("main")
    others = world.send("steady", 5, start=70_000)
    assert world.node.queue("main").low < world.node.queue("main").end
    direct.back()
    world.wait_until_empty("steady")
    assert sorted(set(direct.taken)) == sorted(values)
    assert set(others) <= set(world.is_steady())
