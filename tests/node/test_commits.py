"""Is a commit all or nothing, whatever happens to the process, the disk or the answer?"""

from __future__ import annotations

import contextlib
import errno
import threading
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pyarrow as pa
import pytest

from tests.contract.harness import Task, wait_until
from tests.node.lane import EVENTS, contents, live, opened, operations, staged, step
from tests.recovery.hooked_disk import take
from turnlane.errors import (
    NoSuchQueue,
    NoSuchStage,
    QueueClosed,
    QueueFull,
    SchemaMismatch,
    StorageFailed,
)
from turnlane.events import Block, block_of, values_of
from turnlane.node.commit_record import Commit, Range
from turnlane.node.node import Node
from turnlane.testing import FaultyDisk

PATIENCE = 60.0
NUMBERS = [b"%d" % number for number in range(EVENTS)]


def check_outcome(node: Node) -> None:
    assert contents(node.queue("all")) == NUMBERS
    assert contents(node.queue("odd")) == NUMBERS[1::2]
    assert node.queue("main").low == EVENTS
    assert all(queue.stats().ledger.adds_up for queue in node.queues().values())
    assert not list((node.data / "commits").glob("*.commit"))
    assert not list((node.data / "staging").iterdir())


def some(count: int) -> Block:
    return block_of([b"%d" % number for number in range(count)])


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return opened(tmp_path)


class TestKilled:
    """kill -9 at every disk operation that committing uses, one life each."""

    @pytest.mark.parametrize("by_place", [False, True], ids=["events", "places"])
    @pytest.mark.parametrize("op", ["open", "write", "sync", "sync_directory", "rename", "unlink"])
    def test_at_every(
        self, op: str, by_place: bool, tmp_path: Path, nursery: ForkServerContext
    ) -> None:
        total = operations(tmp_path / "undisturbed", by_place=by_place)[op]
        assert total, f"committing uses no {op}: this test tests nothing"
        for nth in range(1, total + 1):
            data = tmp_path / str(nth)
            life = nursery.Process(target=live, args=(data, op, nth, by_place))
            life.start()
            life.join(PATIENCE)
            assert life.exitcode == -9
            with opened(data) as node:
                while step(node, by_place=by_place):
                    pass
                check_outcome(node)

    def test_between_the_step_and_its_effects(self, tmp_path: Path) -> None:
        """The commit file is there and nothing else: the next start does the rest."""
        disk = FaultyDisk()
        with opened(tmp_path, disk) as node:
            disk.fail("write", error=errno.ENOSPC, match=".chunk", times=None)
            thread = threading.Thread(target=_swallow, args=(node,))
            thread.start()
            wait_until(
                lambda: bool(list((tmp_path / "commits").glob("*.commit"))), "the commit file"
            )
            node.close()
            thread.join(PATIENCE)
        with opened(tmp_path) as node:
            assert node.queue("main").low, "the commit was not carried out by the start"
            while step(node):
                pass
            check_outcome(node)

    def test_a_file_that_cannot_be_removed_is_carried_out_again(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        with opened(tmp_path, disk) as node:
            disk.fail("unlink", match=".commit")
            step(node)
            assert list((tmp_path / "commits").glob("*.commit"))
        with opened(tmp_path) as node:
            while step(node):
                pass
            check_outcome(node)


def _swallow(node: Node) -> None:
    with contextlib.suppress(QueueClosed):
        step(node)


class TestRepeats:
    def test_of_a_range_do_nothing(self, node: Node) -> None:
        with node:
            first = Commit([staged(node, "all", some(5))], [Range("main", 0, 5)])
            again = Commit([staged(node, "all", some(5))], [Range("main", 0, 5)])
            assert node.commits.commit(first)
            assert not node.commits.commit(again)
            assert not node.commits.commit(first), "its stages are gone, and that is fine"
            assert node.queue("all").end == 5
            assert len(node.staging) == 0

    def test_a_range_of_nothing_tells_nothing(self, node: Node) -> None:
        with node:
            stage = staged(node, "all", some(5))
            assert node.commits.commit(Commit([stage], [Range("main", 3, 3)]))
            assert node.queue("all").end == 5

    def test_of_an_epoch_do_nothing_even_after_a_restart(self, tmp_path: Path) -> None:
        with opened(tmp_path) as node:
            assert node.commits.epoch_of("query") is None
            stage = staged(node, "all", some(5))
            assert node.commits.commit(Commit([stage], writer="query", epoch=7))
        with opened(tmp_path) as node:
            assert node.commits.epoch_of("query") == 7
            stage = staged(node, "all", some(5))
            assert not node.commits.commit(Commit([stage], writer="query", epoch=7))
            stage = staged(node, "all", some(5))
            assert not node.commits.commit(Commit([stage], writer="query", epoch=6))
            stage = staged(node, "all", some(5))
            assert node.commits.commit(Commit([stage], writer="query", epoch=8))
            assert node.queue("all").end == 10

    def test_at_the_same_time_are_carried_out_once(self, node: Node) -> None:
        with node:
            commits = [
                Commit([staged(node, "all", some(5))], [Range("main", 0, 5)]) for _ in range(8)
            ]
            results: list[bool] = []
            threads = [
                threading.Thread(target=lambda c=c: results.append(node.commits.commit(c)))
                for c in commits
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE)
            assert sorted(results) == [False] * 7 + [True]
            assert node.queue("all").end == 5

    def test_do_not_reach_beyond_one_stage(self, node: Node) -> None:
        """Two stages for one queue in one commit, then another commit: numbers never overlap."""
        with node:
            stages = [staged(node, "all", some(5)), staged(node, "all", some(3))]
            node.commits.commit(Commit(stages, [Range("main", 0, 5)]))
            node.commits.commit(Commit([staged(node, "all", some(4))], [Range("main", 5, 9)]))
            assert node.queue("all").end == 12


class TestRefused:
    """Refused means that nothing happened."""

    def check_untouched(self, node: Node) -> None:
        assert node.queue("main").low == 0
        assert node.queue("all").end == 0
        assert not list((node.data / "commits").iterdir())

    def test_a_stage_that_does_not_exist(self, node: Node) -> None:
        with node:
            stage = staged(node, "all", some(5))
            with pytest.raises(NoSuchStage, match="'nope'"):
                node.commits.commit(Commit([stage, "nope"], [Range("main", 0, 5)]))
            self.check_untouched(node)

    def test_a_stage_that_was_aborted(self, node: Node) -> None:
        with node:
            stage = staged(node, "all", some(5))
            node.commits.abort([stage, "never-was", "../../etc"])
            with pytest.raises(NoSuchStage):
                node.commits.commit(Commit([stage], [Range("main", 0, 5)]))
            self.check_untouched(node)

    def test_a_queue_that_does_not_exist(self, node: Node) -> None:
        with node:
            stage = staged(node, "nowhere", some(5))
            with pytest.raises(NoSuchQueue, match="'nowhere'"):
                node.commits.commit(Commit([stage], [Range("main", 0, 5)]))
            stage = staged(node, "all", some(5))
            with pytest.raises(NoSuchQueue, match="'nobody'"):
                node.commits.commit(Commit([stage], [Range("nobody", 0, 5)]))
            self.check_untouched(node)

    def test_a_column_of_another_type(self, node: Node) -> None:
        with node:
            node.queue("odd").check_columns(pa.schema([("extra", pa.int64())]))
            wrong = some(2).append_column("extra", pa.array(["a", "b"]))
            stages = [staged(node, "all", some(2)), staged(node, "odd", wrong)]
            with pytest.raises(SchemaMismatch, match="extra"):
                node.commits.commit(Commit(stages, [Range("main", 0, 2)]))
            self.check_untouched(node)

    def test_no_room(self, tmp_path: Path) -> None:
        queues = {"main": {}, "all": {"kind": "memory", "size": 10}}
        with Node(tmp_path, queues) as node:
            node.queue("main").producer().publish_block(some(20))
            node.commits.commit(Commit([staged(node, "all", some(8))], [Range("main", 0, 8)]))
            stage = staged(node, "all", some(5))
            with pytest.raises(QueueFull, match="'all' has no room for 5"):
                node.commits.commit(Commit([stage], [Range("main", 8, 13)]))
            assert node.queue("main").low == 8
            node.queue("all").get(8, timeout=PATIENCE).done()
            assert node.commits.commit(Commit([stage], [Range("main", 8, 13)]))

    @pytest.mark.parametrize("behavior", ["drop_newest", "drop_oldest"])
    def test_not_by_a_queue_that_drops_when_full(self, tmp_path: Path, behavior: str) -> None:
        queues = {"main": {}, "all": {"kind": "memory", "size": 4, "full_behavior": behavior}}
        with Node(tmp_path, queues) as node:
            node.queue("main").producer().publish_block(some(8))
            for first in (0, 4):
                stage = staged(node, "all", some(4))
                assert node.commits.commit(Commit([stage], [Range("main", first, first + 4)]))
            ledger = node.queue("all").stats().ledger
            assert ledger.pending == 4
            assert sum(ledger.dropped.values()) == 4

    def test_a_disk_that_takes_no_commit(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        with opened(tmp_path, disk) as node:
            stage = staged(node, "all", some(5))
            commit = Commit([stage], [Range("main", 0, 5)])
            disk.fail("write", error=errno.ENOSPC, match=".commit")
            with pytest.raises(StorageFailed):
                node.commits.commit(commit)
            assert node.queue("main").low == 0
            assert node.queue("all").end == 0
            assert node.commits.commit(commit)

    def test_a_disk_that_takes_a_commit_and_does_not_say_so(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        with opened(tmp_path, disk) as node:
            disk.fail("sync_directory", match="commits")
            with pytest.raises(StorageFailed):
                node.commits.commit(Commit([staged(node, "all", some(5))], [Range("main", 0, 5)]))
            self.check_untouched(node)
        with opened(tmp_path) as node:
            self.check_untouched(node)

    def test_a_disk_that_takes_no_stage(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        with opened(tmp_path, disk) as node:
            disk.fail("sync", error=errno.ENOSPC, match=".stage")
            with pytest.raises(OSError, match="space"):
                staged(node, "all", some(5))
            assert not list((tmp_path / "staging").iterdir())


class TestAfterTheStep:
    """Once the step is taken there is no way back, whatever the disk does."""

    def test_a_full_disk_only_delays_it(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        with opened(tmp_path, disk) as node:
            stage = staged(node, "all", some(5))
            # Chunks and journals, not the commit itself.
            disk.fail("write", error=errno.ENOSPC, match=".chunk", times=3)
            disk.fail("sync", error=errno.EIO, match="journal", times=2)
            assert node.commits.commit(Commit([stage], [Range("main", 0, 5)]))
            assert contents(node.queue("all")) == NUMBERS[:5]
            assert node.queue("main").low == 5

    def test_what_a_failed_sync_has_dropped_is_written_again(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        with opened(tmp_path, disk) as node:
            disk.forget(match=".chunk")
            assert node.commits.commit(
                Commit([staged(node, "all", some(5))], [Range("main", 0, 5)])
            )
        with opened(tmp_path) as node:
            assert contents(node.queue("all")) == NUMBERS[:5]

    def test_its_stages_can_be_neither_aborted_nor_forgotten(self, tmp_path: Path) -> None:
        """A client whose call took too long gives up, while the node sees it through."""
        disk = FaultyDisk()
        with opened(tmp_path, disk) as node:
            stages = [staged(node, "all", some(5)), staged(node, "odd", some(3))]
            disk.fail("write", error=errno.ENOSPC, match=".chunk", times=None)
            task = Task(lambda: node.commits.commit(Commit(stages, [Range("main", 0, 5)])))
            commits = tmp_path / "commits"
            wait_until(lambda: bool(list(commits.glob("*.commit"))), "the commit file")
            node.commits.abort(stages)
            node.staging.discard_older(-1.0)
            disk.clear()
            assert task.result()
            assert contents(node.queue("all")) == NUMBERS[:5]
            assert contents(node.queue("odd")) == NUMBERS[:3]
            assert not list((tmp_path / "staging").iterdir())

    def test_a_full_queue_does_not_keep_the_node_from_starting(self, tmp_path: Path) -> None:
        """Who makes room can only come once it has; until then later commits wait."""
        queues = {"main": {}, "small": {"size": 4, "durability": "always"}}
        with Node(tmp_path, queues) as node:
            node.queue("main").producer().publish_block(some(10))
            commit = Commit([staged(node, "small", some(10))], [Range("main", 0, 10)])
            task = Task(lambda: node.commits.commit(commit))
            node.queue("small").wait_beyond(1, PATIENCE)
            node.close()
            with pytest.raises(QueueClosed):
                task.result()
        with Task(lambda: Node(tmp_path, queues)).result() as node:
            later = Commit([staged(node, "small", some(2))], [Range("main", 0, 10)])
            again = Task(lambda: node.commits.commit(later))
            small = node.queue("small")
            found: list[bytes] = []
            while len(found) < 10:
                with small.get(timeout=PATIENCE) as batch:
                    found += values_of([batch.block])
            assert found == NUMBERS[:10]
            assert not again.result(), "the range is settled"
            assert node.queue("main").low == 10
            assert not list((tmp_path / "commits").iterdir())

    def test_commits_left_by_a_full_queue_do_not_wait_for_each_other(self, tmp_path: Path) -> None:
        """One may be about to make the room that the other needs."""
        knobs = {"size": 4, "durability": "always"}
        queues = {"main": {}, "first": knobs, "second": knobs}
        with Node(tmp_path, queues) as node:
            node.queue("main").producer().publish_block(some(10))
            plans = [
                Commit([staged(node, "first", some(10))], [Range("main", 0, 10)]),
                Commit([staged(node, "second", some(8))], [Range("first", 0, 2)]),
            ]
            tasks = [Task(partial(node.commits.commit, plan)) for plan in plans]
            for name in ("first", "second"):
                node.queue(name).wait_beyond(1, PATIENCE)
            node.close()
            for task in tasks:
                with pytest.raises(QueueClosed):
                    task.result()
        with Node(tmp_path, queues) as node:
            take(node.queue("second"), 8)
            wait_until(lambda: node.queue("first").low >= 2, "the second commit")
            take(node.queue("first"), 8)
            wait_until(lambda: not list((tmp_path / "commits").iterdir()), "both commits")
            assert node.queue("main").low == 10

    def test_a_plan_that_cannot_be_read_is_kept(self, tmp_path: Path) -> None:
        with opened(tmp_path) as node:
            commits = node.data / "commits"
        (commits / "0.commit").write_bytes(b"{garbage")
        with opened(tmp_path):
            assert (commits / "0.failed").read_bytes() == b"{garbage"


def test_lanes_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """A commit that waits for room in a queue must not keep that queue's lane from making it."""
    queues = {"main": {}, "b": {"kind": "memory", "size": 4}, "dead": {}}
    with Node(tmp_path, queues) as node:
        node.queue("main").producer().publish_block(some(10))
        # Into an empty queue anything goes: ten events into room for four, bit by bit.
        commit = Commit([staged(node, "b", some(10))], [Range("main", 0, 10)])
        thread = threading.Thread(target=node.commits.commit, args=(commit,))
        thread.start()
        done = 0
        while done < 10:
            found = node.queue("b").read(done, 100)
            if found is None:
                node.queue("b").wait_beyond(done, PATIENCE)
                continue
            end = found[0] + found[1].num_rows
            stage = staged(node, "dead", found[1])
            assert node.commits.commit(Commit([stage], [Range("b", found[0], end)]))
            done = end
        thread.join(PATIENCE)
        assert node.queue("dead").end == 10
        assert node.queue("main").low == 10


def test_stages_nobody_came_for_go(node: Node) -> None:
    with node:
        stage = staged(node, "all", some(5))
        assert node.staging.discard_older(3600.0) == 0
        assert node.staging.discard_older(-1.0) == 1
        with pytest.raises(NoSuchStage):
            node.staging.contents(stage)
        assert not list((node.data / "staging").iterdir())


def test_a_stage_left_unfinished_is_gone(node: Node) -> None:
    with node:
        with node.stage("all", some(1).schema) as stage:
            stage.add(some(1))
        assert not list((node.data / "staging").iterdir())
