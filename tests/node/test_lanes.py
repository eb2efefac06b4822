"""Tests of lanes: a commit settles the planned events except the kept ones, for its run only."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from tests.contract.harness import PATIENCE, Task, wait_until
from tests.node.conftest import Serve, ServedNode, values
from turnlane.client.node_client import RemoteNode
from turnlane.errors import ConfigError, LaneTaken, RetryLater
from turnlane.events import block_of
from turnlane.ledger import Outcome
from turnlane.node import commits
from turnlane.node import lanes as lane_module
from turnlane.node.commit_record import CommitPlan, SettleRange
from turnlane.node.commits import CommitLocks, Commits, LockSet
from turnlane.node.flight import actions, read
from turnlane.node.lanes import MAX_RETIRED_RUNS, LanePlan, Lanes
from turnlane.queues.api import Stats
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.producer import BufferedProducer
from turnlane.testing import FaultyDisk


def build_numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


@pytest.fixture
def node(served: ServedNode) -> RemoteNode:
    served.node.queue("disk").producer(ack="persisted").publish_block(block_of(build_numbers(10)))
    return served.client().nodes[0]


def staged(node: RemoteNode, *stage_values: bytes) -> str:
    return stage_for(node, list(stage_values), "slow")


def read_ledger(served: ServedNode) -> Any:
    return served.node.queue("disk").stats().ledger


def test_lane_that_reads_during_a_commit_gets_all_its_events(
    served: ServedNode, node: RemoteNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "FILL_SECONDS", PATIENCE)
    filling = threading.Event()
    real = BufferedProducer.flush

    def publish_slowly(producer: BufferedProducer, timeout: float | None = None) -> bool:
        """Publish slowly: the first events of a commit can be read before the last."""
        filling.set()
        looked.wait(PATIENCE)
        served.node.queue("disk").producer().publish(b"the rest")
        return real(producer, timeout)

    looked = threading.Event()
    monkeypatch.setattr(
        Commits,
        "wait_for_publishing_commits",
        wait_and_record(looked, Commits.wait_for_publishing_commits),
    )
    with node.stage("disk", block_of([]).schema) as stage:
        stage.write(block_of([b"staged"]))
        stages = [stage.finish()]
    monkeypatch.setattr(BufferedProducer, "flush", publish_slowly)
    commit = Task(lambda: node.commit(stages))
    assert filling.wait(PATIENCE)
    assert served.client().nodes[0].unsettled("disk", 100, lane="a").pending == 12
    assert commit.result()


def wait_and_record(looked: threading.Event, call: Callable[..., None]) -> Callable[..., None]:
    def call_and_return(*arguments: object) -> None:
        looked.set()
        call(*arguments)

    return call_and_return


def test_kept_events_stay_and_dead_events_are_counted_as_dead(
    served: ServedNode, node: RemoteNode
) -> None:
    node.plan("a", "1", "disk", [(0, 10)])
    assert node.commit(
        [staged(node, b"x")], lane="a", run="1", kept=[(2, 4), (9, 10)], dead=[(5, 6)]
    )
    assert node.unsettled("disk", 100, lane="a") == ([(2, 4), (9, 10)], 3, 10, 2, 3)
    assert (
        read_ledger(served).delivered,
        read_ledger(served).dead,
        read_ledger(served).pending,
    ) == (6, 1, 3)
    assert read_ledger(served).adds_up
    assert values(served.node, "slow") == [b"x"]


def test_kept_events_are_planned_again_until_none_are_left(
    served: ServedNode, node: RemoteNode
) -> None:
    node.plan("a", "1", "disk", [(0, 10)])
    node.commit(lane="a", run="1", kept=[(0, 10)])
    assert node.unsettled("disk", 4, lane="a").spans == [(0, 4)]
    assert node.plan("a", "1", "disk", [(0, 4), (8, 10), (20, 30)]) == [(0, 4), (8, 10)]
    node.commit(lane="a", run="1", kept=[(1, 2)])
    assert node.unsettled("disk", 100).spans == [(1, 2), (4, 8)]
    assert node.plan("a", "1", "disk", [(0, 10)]) == [(1, 2), (4, 8)], "the rest is settled"
    node.commit(lane="a", run="1")
    assert node.unsettled("disk", 100).pending == 0


def test_repeated_commit_changes_nothing(served: ServedNode, node: RemoteNode) -> None:
    node.plan("a", "1", "disk", [(0, 10)])
    stage = staged(node, b"x")
    assert node.commit([stage], lane="a", run="1", kept=[(0, 3)])
    assert not node.commit([stage], lane="a", run="1", kept=[(0, 3)])
    assert values(served.node, "slow") == [b"x"]
    assert node.unsettled("disk", 100).spans == [(0, 3)]


def test_recreated_queue_is_not_settled(served: ServedNode, node: RemoteNode) -> None:
    """The stages made from the events of the old queue are still committed."""
    served.node.create("late")
    served.node.queue("late").producer(ack="persisted").publish_block(block_of(build_numbers(10)))
    node.plan("lane", "r", "late", [(0, 10)])
    stage = staged(node, b"made of them")
    served.node.drop("late")
    served.node.create("late")
    served.node.queue("late").producer(ack="persisted").publish_block(block_of(build_numbers(20)))
    assert node.commit([stage], lane="lane", run="r")
    assert node.unsettled("late", 100).spans == [(0, 20)]
    assert values(served.node, "slow") == [b"made of them"]
    node.plan("lane", "r", "late", [(0, 20)])
    assert node.commit(lane="lane", run="r")
    assert node.unsettled("late", 100).spans == []


def test_replaced_run_cannot_commit(node: RemoteNode) -> None:
    node.plan("a", "1", "disk", [(0, 10)])
    node.plan("a", "2", "disk", [(0, 10)])
    with pytest.raises(LaneTaken):
        node.commit(lane="a", run="1")
    with pytest.raises(LaneTaken):
        node.plan("a", "1", "disk", [(0, 10)])
    assert node.commit(lane="a", run="2")


def test_lane_gets_at_most_as_many_events_as_its_targets_have_room_for(
    serve: Serve,
) -> None:
    queues = {
        "disk": {},
        "few": {"kind": "memory", "size": 5},
        "small": {"kind": "memory", "max_bytes": 11_000},
        "drops": {"kind": "memory", "size": 1, "full_behavior": "drop_newest"},
    }
    served = serve(queues)
    fill(served, build_numbers(10))
    node = served.client().nodes[0]

    def wait_and_record(*into: str) -> int:
        spans = node.unsettled("disk", 10, newest=10, lane="l", into=into).spans
        return sum(end - first for first, end in spans)

    assert wait_and_record(*queues) == 5, "what is empty takes as much as it holds"
    assert wait_and_record("small", "drops") == 10
    for name, event, room in (("few", b"x", 4), ("small", b"x" * 2_000, 4), ("drops", b"x", 10)):
        served.node.queue(name).producer().publish(event)
        assert wait_and_record(name) == room, name
    assert wait_and_record(*queues) == 4
    assert node.full([*queues]) == []
    for _ in range(4):
        served.node.queue("few").producer().publish(b"x")
    assert wait_and_record("few") == 0
    assert node.full([*queues, "never made"]) == ["few"]
    assert node.unsettled("disk", 10).pending == 10, "others are"


SYNCED = {"durability": "always", "shutdown_timeout": "1s"}
TWO_QUEUES = {"disk": SYNCED, "a": SYNCED}


class TestRunningCommit:
    """A recorded commit waits for the disk; its driver is killed, and the lane restarts.

    The events that it read are not settled yet, but will be.
    """

    def begin_commit(self, served: ServedNode, disk: FaultyDisk) -> Task[bool]:
        """Start a commit of ten of twelve events to ``a``, which cannot be written."""
        fill(served, build_numbers(12))
        node = served.client().nodes[0]
        stage = stage_for(node, build_numbers(10))
        node.plan("l", "1", "disk", [(0, 10)])
        disk.fail("write", error=errno.ENOSPC, match=".chunk", times=None)
        task = Task(lambda: node.commit([stage], lane="l", run="1"))
        wait_until(lambda: list((served.node.data / "commits").glob("*.commit")), "the step")
        return task

    def finish_lane(self, served: ServedNode) -> None:
        """Run the lane to its end and check that each event is in ``a`` once."""
        node = served.client().nodes[0]
        wait_until(lambda: node.unsettled("disk", 100, lane="l").pending, "what is left")
        assert node.unsettled("disk", 100, lane="l").spans == [(10, 12)]
        assert node.plan("l", "2", "disk", [(0, 12)]) == [(10, 12)]
        assert node.commit([stage_for(node, [b"10", b"11"])], lane="l", run="2")
        assert values(served.node, "a") == build_numbers(12)
        assert read_ledger(served).delivered == 12

    def check_new_run_waits(self, node: RemoteNode, monkeypatch: pytest.MonkeyPatch) -> None:
        """Check that a new run gets no events and cannot plan the events of the running commit."""
        monkeypatch.setattr(actions, "PLAN_SECONDS", 0.01)
        assert node.unsettled("disk", 100, lane="l")[:2] == ([], 0)
        with pytest.raises(RetryLater, match="'disk' is still running"):
            node.plan("l", "2", "disk", [(0, 12)])

    def test_new_run_waits_for_the_commit_of_the_old_run(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = FaultyDisk()
        served = serve(TWO_QUEUES, disk=disk)
        task = self.begin_commit(served, disk)
        self.check_new_run_waits(served.client().nodes[0], monkeypatch)
        disk.clear()
        assert task.result()
        self.finish_lane(served)

    def test_new_run_waits_for_a_recovering_commit_after_a_restart(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = FaultyDisk()
        first = serve(TWO_QUEUES, disk=disk)
        task = self.begin_commit(first, disk)
        first.close()
        with pytest.raises(RetryLater):
            task.result()
        monkeypatch.setattr(commits, "START_SECONDS", 0.01)
        served = serve(TWO_QUEUES, disk=disk)
        self.check_new_run_waits(served.client().nodes[0], monkeypatch)
        disk.clear()
        self.finish_lane(served)

    def test_commit_of_a_replaced_run_that_waits_for_locks_is_refused(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served = serve(TWO_QUEUES)
        fill(served, build_numbers(10))
        node = served.client().nodes[0]
        node.plan("l", "1", "disk", [(0, 10)])
        stage = stage_for(node, build_numbers(10))
        asked, planned = threading.Event(), threading.Event()
        real = CommitLocks.acquire

        def late(keys: CommitLocks, wanted: set[str]) -> LockSet:
            asked.set()
            assert planned.wait(PATIENCE)
            return real(keys, wanted)

        monkeypatch.setattr(CommitLocks, "acquire", late)
        task = Task(lambda: node.commit([stage], lane="l", run="1"))
        assert asked.wait(PATIENCE)
        assert served.client().nodes[0].plan("l", "2", "disk", [(0, 10)]) == [(0, 10)]
        planned.set()
        with pytest.raises(LaneTaken):
            task.result()
        assert values(served.node, "a") == []


def fill(served: ServedNode, stage_values: list[bytes]) -> None:
    served.node.queue("disk").producer(ack="persisted").publish_block(block_of(stage_values))


def stage_for(node: RemoteNode, stage_values: list[bytes], queue: str = "a") -> str:
    with node.stage(queue, block_of([]).schema) as stage:
        stage.write(block_of(stage_values))
        return stage.finish()


def test_old_replaced_runs_are_forgotten() -> None:
    """A lane that restarts with every reload must not fill the memory of the node."""
    lanes = Lanes()
    for run in range(3 * MAX_RETIRED_RUNS):
        lanes.plan("a", str(run), LanePlan("disk", []))
    for run in (3 * MAX_RETIRED_RUNS - 2, 2 * MAX_RETIRED_RUNS):
        with pytest.raises(LaneTaken, match="was restarted"):
            lanes.get_plan("a", str(run))
    with pytest.raises(LaneTaken, match="unknown here"):
        lanes.get_plan("a", "0")


def test_interrupted_commit_keeps_the_same_events(serve: Serve) -> None:
    """The record has the ranges and their outcomes, and the next start applies them."""
    first = serve()
    first.node.queue("disk").producer(ack="persisted").publish_block(block_of(build_numbers(10)))
    left = first.node.data / "commits" / f"{1:020}.commit"
    ranges = LanePlan("disk", [(0, 10)]).get_settle_ranges([(2, 4)], [(0, 1)])
    plan = CommitPlan([], ranges, ids={"disk": first.node.queue("disk").stored_id})
    first.close()
    left.write_bytes(plan.to_json())
    again = serve()
    assert again.node.queue("disk").find_unsettled(100).spans == [(2, 4)]
    assert (read_ledger(again).delivered, read_ledger(again).dead) == (7, 1)
    assert not left.exists()


def test_commit_may_keep_every_other_event_of_a_large_batch(
    served: ServedNode, node: RemoteNode
) -> None:
    """The command is larger than other commands may be."""
    node.plan("a", "1", "disk", [(0, 10)])
    kept = [(offset, offset + 1) for offset in range(0, 200_000, 2)]
    assert node.commit(lane="a", run="1", kept=kept)
    assert node.unsettled("disk", 100).pending == 5
    with pytest.raises(ConfigError, match="bytes long"):
        node.plan("a", "1", "disk", kept)


def test_wait_for_events_ends_when_some_arrive(served: ServedNode) -> None:
    node = served.client().nodes[0]
    assert node.unsettled("disk", 10, timeout=0.0).spans == []
    served.node.queue("disk").producer().publish_block(block_of([b"a"]))
    assert node.unsettled("disk", 10, timeout=300.0).spans == [(0, 1)]


def test_event_that_arrives_during_the_check_ends_the_wait(
    served: ServedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = served.node.queue("disk")
    looks = count()
    real = type(queue).stats

    def stats(asked: BufferedQueue) -> Stats:
        """Report an empty queue, then publish an event."""
        found = real(asked)
        if asked is queue and next(looks) == 0:
            queue.producer(ack="persisted").publish_block(block_of([b"a"]))
        return found

    monkeypatch.setattr(type(queue), "stats", stats)
    monkeypatch.setattr(read, "POLL_SECONDS", PATIENCE)
    began = time.monotonic()
    found = served.client().nodes[0].unsettled("disk", 10, timeout=PATIENCE)
    assert found.spans == [(0, 1)]
    assert time.monotonic() - began < PATIENCE / 2
    assert next(looks) >= 1, "it was looked at by this way"


def test_only_planned_offsets_that_are_not_kept_become_dead() -> None:
    planned = LanePlan("q", [(0, 4), (6, 10)])
    assert planned.get_settle_ranges([(1, 2)], [(1, 3), (8, 20)]) == [
        SettleRange("q", 0, 1),
        SettleRange("q", 3, 4),
        SettleRange("q", 6, 8),
        SettleRange("q", 2, 3, Outcome.DEAD),
        SettleRange("q", 8, 10, Outcome.DEAD),
    ]


def test_longest_inactive_lanes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forgotten lane has to restart; its events stay unsettled."""
    monkeypatch.setattr(lane_module, "MAX_LANES", 3)
    lanes = Lanes()
    planned = LanePlan("disk", [(0, 1)])
    for name in ("a", "b", "c", "a", "d"):
        lanes.plan(name, "1", planned)
    with pytest.raises(LaneTaken, match="restart the lane"):
        lanes.get_plan("b", "1")
    assert [lanes.get_plan(name, "1") for name in ("a", "c", "d")] == [planned] * 3
