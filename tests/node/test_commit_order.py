"""Tests of commits that share queues: each is applied once, in spite of waits and stops."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract.harness import PATIENCE, Task, wait_until
from tests.node.lane import read_contents, stage_block
from tests.recovery.hooked_disk import HookedDisk, take
from turnlane.errors import NoSuchStage, QueueClosed, RetryLater
from turnlane.events import Block, block_of, get_values
from turnlane.node.commit_record import Commit, SettleRange
from turnlane.node.node import Node
from turnlane.node.staging import StageContents
from turnlane.queues.buffered import BufferedQueue

KNOBS: dict[str, Any] = {"durability": "always", "shutdown_timeout": "1s"}


def fill(node: Node, name: str, count: int) -> None:
    queue = node.queue(name)
    queue.producer(ack=queue.usual_level).publish_block(block_of([b"x"] * count))


def build_block(text: bytes, count: int) -> Block:
    return block_of([b"%s%d" % (text, number) for number in range(count)])


def values(text: bytes, count: int) -> list[bytes]:
    return get_values([build_block(text, count)])


def list_record_suffixes(node: Node) -> list[str]:
    """Return the suffixes of the commit records."""
    return sorted(path.suffix for path in (node.data / "commits").iterdir())


def call_after_record(disk: HookedDisk, act: Callable[[], object]) -> None:
    """Call a function right after the record of the next commit is written."""
    done = threading.Event()

    def rewrite_once(_: object) -> None:
        if not done.is_set():
            done.set()
            act()

    disk.on("sync_directory", rewrite_once, match="commits")


def wait_until_blocked(queue: BufferedQueue) -> None:
    wait_until(lambda: queue.stats().blocked_publishers > 0, "a commit that waits for room")


def start_waiting_commit(node: Node, commit: Commit, monkeypatch: pytest.MonkeyPatch) -> Task[bool]:
    """Start a commit that has to wait for its locks; return when it is about to wait."""
    asked = threading.Event()
    look_up = node.staging.find_contents

    def find_contents(stage: str) -> StageContents | None:
        if stage in commit.stages:
            asked.set()
        return look_up(stage)

    monkeypatch.setattr(node.staging, "find_contents", find_contents)
    task = Task(lambda: node.commits.commit(commit))
    assert asked.wait(PATIENCE)
    return task


class TestStopped:
    """The node closes while one commit is partly applied and another waits for it."""

    @pytest.mark.parametrize("published", [0, 5], ids=["nothing in", "some in"])
    def test_concurrent_commits_lose_no_event(
        self, published: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = HookedDisk()
        queues = {"main": KNOBS, "other": KNOBS, "q": {**KNOBS, "size": 10}}
        with Node(tmp_path, queues, disk=disk) as node:
            fill(node, "main", 20)
            fill(node, "other", 20)
            # Two blocks: with room for five events the first is in when the node stops.
            with node.staging.stage(StageContents("q", build_block(b"a", 5).schema)) as stage:
                stage.add(build_block(b"a", 5))
                stage.add(build_block(b"b", 5))
                first = Commit([stage.finish()], [SettleRange("main", 0, 20)])
            second = Commit(
                [stage_block(node, "q", build_block(b"c", 2))], [SettleRange("other", 0, 20)]
            )
            call_after_record(disk, lambda: fill(node, "q", 10 - published))
            tasks = [Task(lambda: node.commits.commit(first))]
            wait_until_blocked(node.queue("q"))
            tasks.append(start_waiting_commit(node, second, monkeypatch))
            node.close()
            for task in tasks:
                with pytest.raises(QueueClosed):
                    task.result()
            assert list_record_suffixes(node) == [".commit"]
        with Node(tmp_path, {**queues, "q": KNOBS}) as node:
            mine = read_contents(node.queue("q"))[10 - published :]
            assert mine == values(b"a", 5) + values(b"b", 5)
            assert node.queue("main").low == 20
            assert node.queue("other").low == 0, "settled, and its events are nowhere"
            again = Commit(
                [stage_block(node, "q", build_block(b"c", 2))], [SettleRange("other", 0, 20)]
            )
            assert node.commits.commit(again)
            assert read_contents(node.queue("q"))[20 - published :] == values(b"c", 2)

    def test_concurrent_commits_on_a_failing_disk_lose_no_event(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = HookedDisk()
        queues = {"main": KNOBS, "other": KNOBS, "q": KNOBS}
        with Node(tmp_path, queues, disk=disk) as node:
            fill(node, "main", 20)
            fill(node, "other", 20)
            first = Commit(
                [stage_block(node, "q", build_block(b"a", 8))], [SettleRange("main", 0, 20)]
            )
            second = Commit(
                [stage_block(node, "q", build_block(b"b", 2))], [SettleRange("other", 0, 20)]
            )
            disk.fail("write", error=errno.ENOSPC, match=".chunk", times=None)
            tasks = [Task(lambda: node.commits.commit(first))]
            wait_until(lambda: ".commit" in list_record_suffixes(node), "the step")
            tasks.append(start_waiting_commit(node, second, monkeypatch))
            node.close()
            for task in tasks:
                with pytest.raises(QueueClosed):
                    task.result()
        with Node(tmp_path, queues) as node:
            assert read_contents(node.queue("q")) == values(b"a", 8)
            assert node.queue("main").low == 20
            assert node.queue("other").low == 0

    def test_commit_that_waits_for_the_disk_ends_when_the_node_closes(self, tmp_path: Path) -> None:
        """Its thread must not continue in a directory that another process may own by then."""
        disk = HookedDisk()
        with Node(tmp_path, {"q": KNOBS}, disk=disk) as node:
            disk.fail("write", error=errno.ENOSPC, match=".writer", times=None)
            commit = Commit([stage_block(node, "q", build_block(b"a", 2))], writer="w", epoch=1)
            task = Task(lambda: node.commits.commit(commit))
            wait_until(lambda: node.queue("q").end == 2, "the events")
            node.close()
            assert not node.commits._locks.is_busy
            with pytest.raises(QueueClosed):
                task.result()
        with Node(tmp_path, {"q": KNOBS}) as node:
            assert node.commits.get_epoch("w") == 1
            assert read_contents(node.queue("q")) == values(b"a", 2)


class TestBlockedCommits:
    def test_commit_that_waits_for_one_queue_does_not_lock_another(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The lane that empties the full queue writes to the same dead letter queue."""
        disk = HookedDisk()
        queues = {"main": KNOBS, "other": KNOBS, "dead": KNOBS, "full": {**KNOBS, "size": 10}}
        with Node(tmp_path, queues, disk=disk) as node:
            fill(node, "main", 10)
            fill(node, "other", 10)
            first = Commit(
                [stage_block(node, "full", build_block(b"a", 8))], [SettleRange("main", 0, 10)]
            )
            both = [
                stage_block(node, "dead", build_block(b"b", 1)),
                stage_block(node, "full", build_block(b"b", 1)),
            ]
            second = Commit(both, [SettleRange("other", 0, 10)])
            call_after_record(disk, lambda: fill(node, "full", 10))
            tasks = [Task(lambda: node.commits.commit(first))]
            wait_until_blocked(node.queue("full"))
            tasks.append(start_waiting_commit(node, second, monkeypatch))
            emptied = Commit(
                [stage_block(node, "dead", build_block(b"d", 1))], [SettleRange("full", 0, 10)]
            )
            assert Task(lambda: node.commits.commit(emptied)).result()
            assert [task.result() for task in tasks] == [True, True]
            assert read_contents(node.queue("dead")) == [b"d0", b"b0"]
            assert list_record_suffixes(node) == []

    def test_broken_queue_refuses_the_commit_before_the_record(self, tmp_path: Path) -> None:
        with Node(tmp_path, {"main": KNOBS, "q": KNOBS}) as node:
            fill(node, "main", 5)
            commit = Commit(
                [stage_block(node, "q", build_block(b"a", 5))], [SettleRange("main", 0, 5)]
            )
            node.queue("q").finish()
            with pytest.raises(QueueClosed):
                node.commits.commit(commit)
            assert list_record_suffixes(node) == []
            assert node.queue("main").low == 0

    def test_queue_that_breaks_after_the_record_blocks_later_commits(self, tmp_path: Path) -> None:
        disk = HookedDisk()
        queues = {"main": KNOBS, "other": KNOBS, "q": KNOBS}
        with Node(tmp_path, queues, disk=disk) as node:
            fill(node, "main", 5)
            commit = Commit(
                [stage_block(node, "q", build_block(b"a", 5))], [SettleRange("main", 0, 5)]
            )
            call_after_record(disk, node.queue("q").finish)
            with pytest.raises(QueueClosed):
                node.commits.commit(commit)
            for each in (commit, Commit([stage_block(node, "q", build_block(b"b", 5))])):
                with pytest.raises(RetryLater, match="next start"):
                    node.commits.commit(each)
            assert list_record_suffixes(node) == [".commit"]
            assert node.commits.commit(Commit([stage_block(node, "other", build_block(b"c", 1))]))
        with Node(tmp_path, queues) as node:
            assert read_contents(node.queue("q")) == values(b"a", 5)
            assert node.queue("main").low == 5

    def test_complete_commits_leave_no_locks(self, tmp_path: Path) -> None:
        with Node(tmp_path, {"q": KNOBS}) as node:
            for number in range(5):
                stage = stage_block(node, "q", build_block(b"a", 1))
                assert node.commits.commit(Commit([stage], writer=f"w{number}", epoch=1))
            with pytest.raises(NoSuchStage):
                node.commits.commit(Commit(["nope"], writer="w", epoch=1))
            assert not node.commits._locks.is_busy


class TestDropped:
    """A queue is dropped during a commit that publishes to it."""

    def test_dropped_target_queue_does_not_stop_the_rest_of_the_commit(
        self, tmp_path: Path
    ) -> None:
        disk = HookedDisk()
        with Node(tmp_path, {"main": KNOBS, "a": KNOBS}, disk=disk) as node:
            node.create("b", size=10, **KNOBS)
            fill(node, "main", 20)
            stages = [
                stage_block(node, "a", build_block(b"a", 2)),
                stage_block(node, "b", build_block(b"b", 10)),
            ]
            commit = Commit(stages, [SettleRange("main", 0, 20)])
            call_after_record(disk, lambda: fill(node, "b", 5))
            task = Task(lambda: node.commits.commit(commit))
            wait_until_blocked(node.queue("b"))
            node.drop("b")
            assert task.result()
            assert node.queue("main").low == 20
            node.create("b", size=10, **KNOBS)
            assert not node.commits.commit(commit)
            assert read_contents(node.queue("a")) == values(b"a", 2)
            assert list_record_suffixes(node) == []
            assert not list((tmp_path / "staging").iterdir())

    def test_dropped_source_queue_does_not_stop_the_rest_of_the_commit(
        self, tmp_path: Path
    ) -> None:
        disk = HookedDisk()
        with Node(tmp_path, {"q": {**KNOBS, "size": 10}}, disk=disk) as node:
            node.create("source", **KNOBS)
            fill(node, "source", 5)
            call_after_record(disk, lambda: fill(node, "q", 10))
            commit = Commit(
                [stage_block(node, "q", build_block(b"a", 5))], [SettleRange("source", 0, 5)]
            )
            task = Task(lambda: node.commits.commit(commit))
            wait_until_blocked(node.queue("q"))
            node.drop("source")
            node.create("source", **KNOBS)
            fill(node, "source", 5)
            take(node.queue("q"), 10)
            assert task.result()
            assert node.queue("source").low == 0, "events of the new queue were settled"
            assert list_record_suffixes(node) == []
