"""Limits that follow from the memory and the disk space there are: auto sizes, the memory limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.contract.harness import Task, wait_until
from turnlane import memory
from turnlane.cli.app import app
from turnlane.config import loads
from turnlane.errors import ConfigError
from turnlane.events import block_of
from turnlane.memory import find_system_limit, measure_process_memory, memory_limit
from turnlane.node.metrics import NodeCollector
from turnlane.node.node import DRAIN_SECONDS, Housekeeping, Node
from turnlane.pipeline.settings import SparkSettings
from turnlane.queues import open_buffered_queue
from turnlane.service import Service
from turnlane.testing import FaultyDisk, ManualClock
from turnlane.units import Percentage

MEBI = 2**20


@pytest.fixture(autouse=True)
def process_limit() -> Iterator[None]:
    yield
    memory.set_process_limit(None)


def test_auto_size_of_a_memory_queue_is_a_share_of_the_memory_that_is_left() -> None:
    before = memory_limit() - measure_process_memory()
    with open_buffered_queue(size="auto", target_utilization="50%") as queue:
        assert queue.max_bytes == pytest.approx(before / 2, rel=0.05)
        stats = queue.stats()
        assert (stats.max_size, stats.max_bytes) == (queue.max_bytes // 64, queue.max_bytes)


def test_auto_size_of_a_disk_queue_counts_its_own_files_as_available(tmp_path: Path) -> None:
    disk = FaultyDisk()
    disk.fill(200 * MEBI)
    knobs: dict[str, Any] = {"kind": "disk", "path": tmp_path / "q", "size": "auto"}
    knobs |= {"target_utilization": "50%", "compression": "none"}
    with open_buffered_queue(disk=disk, **knobs) as queue:
        assert queue.max_bytes == 100 * MEBI
        queue.producer(ack="persisted").publish_block(block_of([bytes(MEBI)] * 40))
        queue.update_bounds()
        assert queue.max_bytes == pytest.approx(100 * MEBI, rel=0.05)
    with open_buffered_queue(disk=disk, **knobs) as queue:
        assert queue.max_bytes == pytest.approx(100 * MEBI, rel=0.05)


def test_publisher_enters_when_the_disk_gets_space_and_the_limit_grows(tmp_path: Path) -> None:
    disk, clock = FaultyDisk(), ManualClock()
    disk.fill(8 * MEBI)
    knobs = {"size": "auto", "target_utilization": "25%", "compression": "none"}
    with Node(tmp_path, {"orders": knobs}, clock=clock, disk=disk) as node:
        queue = node.queue("orders")
        assert queue.max_bytes == pytest.approx(2 * MEBI, rel=0.01)
        producer = queue.producer()
        producer.publish_block(block_of([bytes(MEBI)]))
        blocked = Task(lambda: producer.publish_block(block_of([bytes(MEBI)])))
        wait_until(lambda: queue.stats().blocked_publishers == 1, "the blocked publisher")
        disk.fill(80 * MEBI)
        clock.advance(DRAIN_SECONDS)
        assert blocked.result().accepted == 1
        assert queue.max_bytes > 10 * MEBI


def test_large_event_waits_for_a_disk_that_is_short_of_space(tmp_path: Path) -> None:
    disk = FaultyDisk()
    disk.fill(200 * MEBI)
    knobs: dict[str, Any] = {"kind": "disk", "path": tmp_path / "q", "size": "auto"}
    with open_buffered_queue(disk=disk, **knobs) as queue:
        producer = queue.producer()
        largest = queue.max_event_bytes
        producer.publish(bytes(3 * MEBI))
        disk.fill(0)
        queue.update_bounds()
        assert queue.max_event_bytes == largest <= queue.max_bytes
        producer.check_publishable(block_of([bytes(3 * MEBI)]))
        disk.fill(200 * MEBI)
        producer.publish(bytes(3 * MEBI), timeout=5)
        assert queue.stats().ledger.pending == 2


def test_disk_that_cannot_be_measured_is_logged_once_and_stops_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk, clock = FaultyDisk(), ManualClock()
    disk.fill(200 * MEBI)
    queues = {name: {"size": "auto"} for name in ("first", "second")}
    with Node(tmp_path, queues, disk=disk) as node:
        drained: list[float] = []
        housekeeping = Housekeeping(
            node.staging,
            lambda: node.queues().values(),
            lambda: drained.append(clock.monotonic()),
            clock,
        )
        housekeeping.close()  # the test tidies
        for _ in range(2):
            disk.fail("free_bytes", times=None, match="first")
            disk.fill(100 * MEBI)
            caplog.clear()
            for _ in range(2):
                clock.advance(DRAIN_SECONDS)
                housekeeping.tidy()
            lines = [each for each in caplog.messages if "queue.bounds_not_updated" in each]
            assert ["queue=first" in each for each in lines] == [True]
            assert node.queue("second").max_bytes < 100 * MEBI < node.queue("first").max_bytes
            disk.clear()
            disk.fill(200 * MEBI)
            clock.advance(DRAIN_SECONDS)
            housekeeping.tidy()
        assert len(drained) == 6


def test_queue_with_auto_size_created_again_is_the_same_queue(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        made = node.create("fast", kind="memory", size="auto")
        ballast = bytes(8 * MEBI)
        assert node.create("fast", kind="memory", size="auto") is made
        assert len(ballast) == 8 * MEBI
    with Node(tmp_path) as node:  # from its registry
        assert node.queue("fast").settings.target_utilization == Percentage(85)


def test_full_disk_does_not_keep_a_queue_with_auto_size_from_opening(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with open_buffered_queue(kind="disk", path=tmp_path / "q", disk=disk) as queue:
        queue.producer(ack="persisted").publish(b"x")
    disk.fill(0)
    with open_buffered_queue(kind="disk", path=tmp_path / "q", size="auto", disk=disk) as queue:
        assert MEBI <= queue.max_bytes < 4 * MEBI  # its own files count as available
        with queue.get(timeout=5) as batch:
            assert [event.value for event in batch] == [b"x"]


# ── the limit of the process ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("written", ["50%", "256Mi"])
def test_shares_of_memory_are_shares_of_the_limit_of_the_node(tmp_path: Path, written: str) -> None:
    limit = find_system_limit() // 2 if written == "50%" else 256 * MEBI
    text = f"""
        node:
          data: {tmp_path}/data
          memory_limit: {written}
          http: {{listen: "127.0.0.1:0"}}
          flight: {{listen: "127.0.0.1:0"}}
        queues:
          fast: {{kind: memory, memory_percent: 10%}}
          slow: {{memory_percent: 10%}}
        """
    config = loads(text)
    assert config.queues["fast"].max_bytes == limit // 10  # as `validate --show` prints it
    with Service(config).start() as service:
        assert memory_limit() == limit
        assert service.node.queue("fast").max_bytes == limit // 10
        assert service.node.queue("slow").settings.memory_bytes == limit // 10
        assert service.node.body_budget.limit == limit // 4
        assert service.config.node.flight.get_max_memory() == int(limit * 0.75)
        metrics = {each.name: each for each in NodeCollector(service.node).collect()}
        assert metrics["turnlane_memory_limit_bytes"].samples[0].value == limit
    assert memory_limit() == limit


def test_configuration_alone_does_not_change_the_limit_of_its_reader(tmp_path: Path) -> None:
    loads(f"node: {{data: {tmp_path}, memory_limit: 1Mi}}")
    assert memory_limit() == find_system_limit()


def test_node_above_its_memory_limit_logs_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory.set_process_limit(MEBI)
    with (
        Node(tmp_path, {"fast": {"kind": "memory"}}) as node,
        Housekeeping(node.staging, lambda: node.queues().values(), lambda: None) as housekeeping,
    ):
        caplog.clear()
        for _ in range(3):
            node.queue("fast").producer().publish(b"x")
            housekeeping.tidy()
    lines = [each for each in caplog.records if "node.memory_above_limit" in each.getMessage()]
    mine = [each for each in lines if each.threadName == "MainThread"]
    assert len(mine) == 1


def test_validate_warns_of_shares_that_are_too_much_together(tmp_path: Path) -> None:
    file = tmp_path / "shares.yaml"
    file.write_text(
        f"node: {{data: {tmp_path}/data, memory_limit: 80%}}\n"
        "spark: {driver_memory: 30%}\n"
        "queues:\n  a: {kind: memory, size: auto}\n  b: {kind: memory, size: auto}\n"
        "  c: {size: auto}\n"
    )
    result = CliRunner().invoke(app, ["validate", str(file)])
    assert result.exit_code == 0
    assert "shares.yaml:5:27: queues.b.size: the queues in memory with size: auto" in result.output
    assert "170%" in result.output
    assert "spark.driver_memory: this and node.memory_limit are 110%" in result.output


def test_heap_of_the_driver_is_set_once(tmp_path: Path) -> None:
    assert SparkSettings(driver_memory="25%").driver_memory == Percentage(25)  # type: ignore[arg-type]
    text = (
        f"node: {{data: {tmp_path}}}\n"
        "spark: {driver_memory: 1Gi, conf: {spark.driver.memory: 2g}}\n"
    )
    with pytest.raises(ConfigError, match=r"contradicts spark\.driver\.memory in conf"):
        loads(text)
