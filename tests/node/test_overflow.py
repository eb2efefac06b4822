"""Tests of dead letters that cannot be written: commits continue, and every loss is counted."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from tests.contract.harness import wait_until
from tests.node.conftest import Serve, ServedNode, values
from turnlane.client.node_client import RemoteNode
from turnlane.errors import QueueFull, StorageFailed
from turnlane.events import block_of
from turnlane.node import staging
from turnlane.node.metrics import NodeCollector
from turnlane.node.node import DRAIN_SECONDS, Housekeeping
from turnlane.node.staging import OverflowBuffer
from turnlane.testing import FaultyDisk, ManualClock

QUEUES: dict[str, dict[str, Any]] = {"alerts": {}, "alerts.dead": {"size": 10}}


@pytest.fixture
def full_node(serve: Serve) -> ServedNode:
    """A node whose dead letter queue is full and whose lane has events to settle."""
    served = serve(QUEUES)
    served.node.queue("alerts").producer(ack="persisted").publish_block(block_of([b"x"] * 100))
    dead = served.node.queue("alerts.dead")
    dead.producer(ack="persisted").publish_block(block_of([b"old %d" % n for n in range(10)]))
    return served


def commit_dead_batch(
    node: RemoteNode, first: int, count: int, spare: int, *, diskless: bool = False
) -> None:
    """Commit a batch of a lane in which all events are dead."""
    with node.stage("alerts.dead", block_of([]).schema, spare, diskless=diskless) as stage:
        for number in range(first, first + count):
            stage.write(block_of([b"new %d" % number]))
        stage_id = stage.finish()
    span = [(first, first + count)]
    node.plan("alerts", "1", "alerts", span)
    node.commit([stage_id], lane="alerts", run="1", dead=span)


def build_letters(first: int, end: int) -> list[bytes]:
    return [b"new %d" % number for number in range(first, end)]


def check_ledger(served: ServedNode) -> bool:
    return all(queue.stats().ledger.adds_up for queue in served.node.queues().values())


def test_commit_without_spare_events_waits_for_room(full_node: ServedNode) -> None:
    with pytest.raises(QueueFull, match="no room for 5 staged events"):
        commit_dead_batch(full_node.client().nodes[0], 0, 5, spare=0)
    assert full_node.node.queue("alerts").low == 0


def test_dead_letters_wait_in_memory_until_there_is_room(full_node: ServedNode) -> None:
    commit_dead_batch(full_node.client().nodes[0], 0, 5, spare=100)
    assert full_node.node.queue("alerts").low == 5, "the lane goes on"
    assert full_node.node.queue("alerts").stats().ledger.dead == 5
    overflow = full_node.node.commits.overflow
    assert overflow.events() == {"alerts.dead": 5}
    assert overflow.drain() == 0
    full_node.node.queue("alerts.dead").settle(0, 3)
    assert overflow.drain() == 3, "as many as there is room for"
    assert overflow.events() == {"alerts.dead": 2}
    full_node.node.queue("alerts.dead").settle(3, 10)
    assert overflow.drain() == 2
    assert values(full_node.node, "alerts.dead") == build_letters(0, 5)
    assert overflow.events() == {}
    assert len(full_node.node.staging) == 0
    assert check_ledger(full_node)


def test_dead_letters_of_a_commit_without_ranges_wait_in_memory(full_node: ServedNode) -> None:
    node = full_node.client().nodes[0]
    with node.stage("alerts.dead", block_of([]).schema, 100) as stage:
        stage.write(block_of([b"new"]))
        stage_id = stage.finish()
    node.commit([stage_id])
    assert full_node.node.commits.overflow.events() == {"alerts.dead": 1}
    assert len(full_node.node.staging) == 0


def test_oldest_dead_letters_beyond_the_limit_are_dropped_and_counted(
    full_node: ServedNode,
) -> None:
    node = full_node.client().nodes[0]
    commit_dead_batch(node, 0, 6, spare=8)
    commit_dead_batch(node, 6, 6, spare=8)
    overflow = full_node.node.commits.overflow
    assert overflow.events() == {"alerts.dead": 8}
    assert overflow.dropped == {"alerts.dead": 4}
    assert full_node.node.queue("alerts.dead").stats().ledger.dropped == {"newest": 4}
    (metric,) = [
        each
        for each in NodeCollector(full_node.node).collect()
        if each.name == "turnlane_dead_letters_dropped"
    ]
    assert [(each.labels, each.value) for each in metric.samples] == [
        ({"queue": "alerts.dead"}, 4.0)
    ]
    full_node.node.queue("alerts.dead").settle(0, 10)
    overflow.drain()
    assert values(full_node.node, "alerts.dead") == build_letters(4, 12)
    assert check_ledger(full_node)


def test_overflow_buffer_drops_the_oldest_beyond_its_memory_limit(full_node: ServedNode) -> None:
    """The limit holds for all queues together, independent of ``spare``."""
    blocks = [block_of([bytes(1000)] * 100) for _ in range(10)]
    room = 5 * blocks[0].nbytes
    overflow = OverflowBuffer(full_node.node.queue, room)
    overflow.add("alerts.dead", blocks, 1 << 61)
    assert overflow.events() == {"alerts.dead": 500}
    overflow.add("alerts", blocks[:2], 1 << 61)
    assert overflow.events() == {"alerts.dead": 300, "alerts": 200}, "who has most gives way"
    assert overflow.dropped == {"alerts.dead": 700}


def test_dead_letters_left_at_close_are_counted_as_dropped(
    full_node: ServedNode, serve: Serve
) -> None:
    commit_dead_batch(full_node.client().nodes[0], 0, 5, spare=100)
    full_node.close()
    again = serve(QUEUES)
    ledger = again.node.queue("alerts.dead").stats().ledger
    assert ledger.dropped == {"newest": 5}
    assert ledger.adds_up
    assert again.node.queue("alerts").low == 5


# ── a disk that is full, or fails ────────────────────────────────────────────────────────────────


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def filling_node(serve: Serve, disk: FaultyDisk) -> ServedNode:
    """A node on that disk, whose lane has events to settle."""
    served = serve({"alerts": {}, "alerts.dead": {}}, disk=disk)
    served.node.queue("alerts").producer(ack="persisted").publish_block(block_of([b"x"] * 100))
    return served


def is_disk_working(served: ServedNode) -> bool:
    return not served.node.queue("alerts.dead").stats().trouble


def check_all_arrive(served: ServedNode, count: int) -> None:
    """Check that all letters are in their queue once after the disk works and the sums match."""
    wait_until(lambda: is_disk_working(served), "the queue to write again")
    served.node.commits.overflow.drain()
    assert values(served.node, "alerts.dead") == build_letters(0, count)
    assert check_ledger(served)


def test_dead_letters_wait_in_memory_until_the_disk_works(
    filling_node: ServedNode, disk: FaultyDisk
) -> None:
    """The oldest beyond the limit are dropped and counted; the queue is tried every 5 s."""
    node, overflow, clock = filling_node.node, filling_node.node.commits.overflow, ManualClock()
    remote = filling_node.client().nodes[0]
    with Housekeeping(node.staging, lambda: (), overflow.drain, clock) as housekeeping:
        disk.fill()
        commit_dead_batch(remote, 0, 6, spare=8, diskless=True)
        commit_dead_batch(remote, 6, 6, spare=8, diskless=True)
        assert node.queue("alerts").low == 12, "the lane goes on"
        assert node.queue("alerts").stats().ledger.dead == 12
        assert overflow.events() == {"alerts.dead": 8}
        assert overflow.dropped == {"alerts.dead": 4}
        assert node.queue("alerts.dead").stats().ledger.dropped == {"newest": 4}

        disk.unfill()
        clock.advance(DRAIN_SECONDS - 0.1)
        housekeeping.tidy()
        assert overflow.events() == {"alerts.dead": 8}, "not yet"
        clock.advance(0.1)
        housekeeping.tidy()
    assert overflow.events() == {}
    assert values(node, "alerts.dead") == build_letters(4, 12)
    assert len(node.staging) == 0
    assert check_ledger(filling_node)


def test_early_drain_attempt_loses_no_dead_letter(
    filling_node: ServedNode, disk: FaultyDisk
) -> None:
    overflow, remote = filling_node.node.commits.overflow, filling_node.client().nodes[0]
    disk.fill()
    for first in range(0, 12, 2):
        commit_dead_batch(remote, first, 2, spare=100, diskless=True)
        overflow.drain()
        wait_until(lambda: not is_disk_working(filling_node), "the queue to find that out")
    assert overflow.events()["alerts.dead"] >= 10, "it takes no more once it knows"
    disk.unfill()
    check_all_arrive(filling_node, 12)


@pytest.mark.parametrize("operation", ["open", "write", "sync"])
def test_stage_continues_in_memory_after_a_disk_error(
    filling_node: ServedNode, disk: FaultyDisk, operation: str
) -> None:
    nth = 4 if operation == "write" else 1
    disk.fail(operation, nth, errno.EIO, None, match=".stage")
    commit_dead_batch(filling_node.client().nodes[0], 0, 10, spare=100, diskless=True)
    assert filling_node.node.commits.overflow.drain() == 10
    assert values(filling_node.node, "alerts.dead") == build_letters(0, 10)
    assert filling_node.node.queue("alerts").low == 10
    assert list(filling_node.node.staging.directory.iterdir()) == []


def test_lane_does_not_wait_for_staged_letters_of_a_failing_queue(
    filling_node: ServedNode, disk: FaultyDisk
) -> None:
    overflow, remote = filling_node.node.commits.overflow, filling_node.client().nodes[0]
    disk.fail("write", error=errno.ENOSPC, times=None, match=".chunk")
    commit_dead_batch(remote, 0, 5, spare=100, diskless=True)
    commit_dead_batch(remote, 5, 5, spare=100, diskless=True)
    assert filling_node.node.queue("alerts").low == 10
    assert overflow.events()["alerts.dead"] >= 5, "the queue takes no more once it knows"
    disk.clear()
    check_all_arrive(filling_node, 10)


def test_diskless_commit_needs_no_record_on_a_full_disk(
    filling_node: ServedNode, disk: FaultyDisk
) -> None:
    disk.fail("write", error=errno.ENOSPC, times=None, match=".commit")
    commit_dead_batch(filling_node.client().nodes[0], 0, 5, spare=100, diskless=True)
    assert filling_node.node.queue("alerts").low == 5
    assert filling_node.node.commits.overflow.drain() == 5
    assert values(filling_node.node, "alerts.dead") == build_letters(0, 5)


@pytest.mark.parametrize("match", [".stage", ".commit"])
def test_commit_without_diskless_stages_is_refused_on_a_full_disk(
    filling_node: ServedNode, disk: FaultyDisk, match: str
) -> None:
    disk.fail("write", error=errno.ENOSPC, times=None, match=match)
    with pytest.raises(StorageFailed, match="No space left"):
        commit_dead_batch(filling_node.client().nodes[0], 0, 5, spare=100)
    assert filling_node.node.queue("alerts").low == 0
    assert filling_node.node.commits.overflow.events() == {}


def test_stage_beyond_the_memory_limit_is_refused(
    filling_node: ServedNode, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "MAX_BYTES", 2 * block_of([b"new 0"]).nbytes)
    disk.fill()
    remote = filling_node.client().nodes[0]
    with pytest.raises(StorageFailed, match="No space left"):
        commit_dead_batch(remote, 0, 3, spare=100, diskless=True)
    assert filling_node.node.queue("alerts").low == 0
    commit_dead_batch(remote, 0, 2, spare=100, diskless=True)
    commit_dead_batch(remote, 2, 2, spare=100, diskless=True)
    assert filling_node.node.commits.overflow.events() == {"alerts.dead": 4}
    disk.unfill()
