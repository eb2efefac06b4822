"""How fast events come and go, and when a queue will be empty: as a metric and as a command."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from turnlane.cli.app import app
from turnlane.events import block_of
from turnlane.node.flight.server import FlightPlane
from turnlane.node.metrics import NodeCollector
from turnlane.node.node import Node
from turnlane.serving.address import LOOPBACK, Address
from turnlane.serving.auth import Authority
from turnlane.testing import ManualClock


class Stage:
    """A node whose clock the test moves."""

    def __init__(self, node: Node, url: str, clock: ManualClock) -> None:
        self.node = node
        self.queue = node.queue("orders")
        self.clock = clock
        self._url = url

    def flow(self, seconds: float, came: int, left: int) -> None:
        """Let events come and go, then let time pass."""
        self.queue.stats()
        self.queue.producer().publish_block(block_of([b"x"] * came))
        self.queue.settle(self.queue.low, self.queue.low + left)
        self.clock.advance(seconds)

    def get_metric(self) -> float | None:
        for metric in NodeCollector(self.node).collect():
            if metric.name == "turnlane_queue_drain_seconds":
                return metric.samples[0].value if metric.samples else None
        raise AssertionError("the metric is missing")

    def run(self, *words: str) -> str:
        result = CliRunner().invoke(app, ["queue", "stats", "--endpoint", self._url, *words])
        assert result.exit_code == 0, result.output
        return result.stdout


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    clock = ManualClock()
    with Node(tmp_path, {"orders": {"kind": "memory", "size": 1000}}, clock=clock) as node:
        plane = FlightPlane(node, Authority(()), Address(LOOPBACK, 0))
        plane.start()
        yield Stage(node, f"turnlane://{plane.address}", clock)
        plane.stop(5.0)


def test_queue_that_shrinks_says_when_it_is_empty(stage: Stage) -> None:
    assert stage.get_metric() is None, "no rates yet"
    assert stage.run().splitlines()[1].split() == ["orders", "0", "0%", "unknown", "0"]
    stage.flow(10.0, came=500, left=0)
    stage.flow(10.0, came=100, left=400)
    assert stage.get_metric() == math.inf, "in this time more came than left"
    assert stage.run().splitlines()[1].split()[3:6] == ["30.0", "20.0", "never"]
    assert json.loads(stage.run("--json"))["drain_seconds"] is None
    stage.clock.advance(70.0)  # what came before this is forgotten
    stage.flow(10.0, came=20, left=100)
    assert stage.get_metric() == pytest.approx(120), "1 event a second less, 120 events"
    stage.queue.settle(0, stage.queue.end)
    assert stage.get_metric() == 0
    assert stage.run().splitlines()[1].split()[5] == "0s"
    found = json.loads(stage.run("--json"))
    assert (found["name"], found["ledger"]["pending"], found["drain_seconds"]) == ("orders", 0, 0)


def test_dropped_events_do_not_count_as_rate_out(tmp_path: Path) -> None:
    clock = ManualClock()
    knobs = {"kind": "memory", "size": 100, "full_behavior": "drop_oldest"}
    with Node(tmp_path, {"orders": knobs}, clock=clock) as node:
        queue = node.queue("orders")
        queue.stats()
        for _ in range(10):
            queue.producer().publish_block(block_of([b"x"] * 50))
        clock.advance(10.0)
        stats = queue.stats()
        assert (stats.rate_in, stats.rate_out, stats.rate_dropped) == (50.0, 0.0, 40.0)
        assert stats.drain_seconds == math.inf
        clock.advance(90.0)
        queue.stats()
        queue.settle(queue.low, queue.low + 30)
        clock.advance(30.0)
        queue.stats()
        clock.advance(30.0)
        stats = queue.stats()
        assert (stats.rate_in, stats.rate_out, stats.rate_dropped) == (0.0, 0.5, 0.0)
        assert stats.drain_seconds == 140.0
