"""Tests of commits: all or nothing, also if the process, the disk or the answer fails."""

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
from tests.node.lane import (
    EVENTS,
    commit_next_range,
    count_operations,
    open_node,
    read_contents,
    run_lane,
    stage_block,
)
from tests.recovery.hooked_disk import take
from turnlane.errors import (
    NoSuchQueue,
    NoSuchStage,
    QueueClosed,
    QueueFull,
    SchemaMismatch,
    StorageFailed,
)
from turnlane.events import Block, block_of, get_values
from turnlane.node.commit_record import Commit, SettleRange
from turnlane.node.node import Node
from turnlane.testing import FaultyDisk

PATIENCE = 60.0
NUMBERS = [b"%d" % number for number in range(EVENTS)]


def check_outcome(node: Node) -> None:
    assert read_contents(node.queue("all")) == NUMBERS
    assert read_contents(node.queue("odd")) == NUMBERS[1::2]
    assert node.queue("main").low == EVENTS
    assert all(queue.stats().ledger.adds_up for queue in node.queues().values())
    assert not list((node.data / "commits").glob("*.commit"))
    assert not list((node.data / "staging").iterdir())


def build_block(count: int) -> Block:
    return block_of([b"%d" % number for number in range(count)])


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return open_node(tmp_path)


class TestKilled:
    """A process is killed at every disk operation of a commit."""

    @pytest.mark.parametrize("by_place", [False, True], ids=["events", "places"])
    @pytest.mark.parametrize("op", ["open", "write", "sync", "sync_directory", "rename", "unlink"])
    def test_power_cut_at_every_operation_loses_or_applies_the_whole_commit(
        self, op: str, by_place: bool, tmp_path: Path, process_server: ForkServerContext
    ) -> None:
        total = count_operations(tmp_path / "undisturbed", by_place=by_place)[op]
        assert total, f"committing uses no {op}: this test tests nothing"
        for nth in range(1, total + 1):
            data = tmp_path / str(nth)
            life = process_server.Process(target=run_lane, args=(data, op, nth, by_place))
            life.start()
            life.join(PATIENCE)
            assert life.exitcode == -9
            with open_node(data) as node:
                while commit_next_range(node, by_place=by_place):
                    pass
                check_outcome(node)

    def test_crash_after_the_record_is_recovered_by_the_start(self, tmp_path: Path) -> None:
        """Only the record is written: the next start applies the commit."""
        disk = FaultyDisk()
        with open_node(tmp_path, disk) as node:
            disk.fail("write", error=errno.ENOSPC, match=".chunk", times=None)
            thread = threading.Thread(target=_ignore_error, args=(node,))
            thread.start()
            wait_until(
                lambda: bool(list((tmp_path / "commits").glob("*.commit"))), "the commit file"
            )
            node.close()
            thread.join(PATIENCE)
        with open_node(tmp_path) as node:
            assert node.queue("main").low, "the commit was not carried out by the start"
            while commit_next_range(node):
                pass
            check_outcome(node)

    def test_record_that_cannot_be_removed_is_applied_again(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        with open_node(tmp_path, disk) as node:
            disk.fail("unlink", match=".commit")
            commit_next_range(node)
            assert list((tmp_path / "commits").glob("*.commit"))
        with open_node(tmp_path) as node:
            while commit_next_range(node):
                pass
            check_outcome(node)


def _ignore_error(node: Node) -> None:
    with contextlib.suppress(QueueClosed):
        commit_next_range(node)


class TestRepeats:
    def test_repeated_range_changes_nothing(self, node: Node) -> None:
        with node:
            first = Commit([stage_block(node, "all", build_block(5))], [SettleRange("main", 0, 5)])
            again = Commit([stage_block(node, "all", build_block(5))], [SettleRange("main", 0, 5)])
            assert node.commits.commit(first)
            assert not node.commits.commit(again)
            assert not node.commits.commit(first), "its stages are gone, and that is fine"
            assert node.queue("all").end == 5
            assert len(node.staging) == 0

    def test_empty_range_is_not_a_repeat(self, node: Node) -> None:
        with node:
            stage = stage_block(node, "all", build_block(5))
            assert node.commits.commit(Commit([stage], [SettleRange("main", 3, 3)]))
            assert node.queue("all").end == 5

    @pytest.mark.parametrize(
        "damage",
        [b"", b"{", b"[]", b"7", b"\xa5" * 40, b'{"writer": "query", "epoch": "7"}', b"[" * 10**5,
         b'{"writer": "query"}', b'{"writer": "other", "epoch": 7}'],
    )  # fmt: skip
    def test_damaged_epoch_refuses_the_writer_until_the_file_is_restored(
        self, node: Node, damage: bytes
    ) -> None:
        with node:
            assert node.commits.commit(
                Commit([stage_block(node, "all", build_block(5))], writer="query", epoch=7)
            )
            (path,) = (node.data / "commits").glob("*.writer")
            intact = path.read_bytes()
            path.write_bytes(damage)
            commit = Commit([stage_block(node, "all", build_block(5))], writer="query", epoch=7)
            with pytest.raises(StorageFailed, match=f"{path.name}: .* restore the file"):
                node.commits.commit(commit)
            other = Commit([stage_block(node, "all", build_block(1))], writer="other", epoch=1)
            assert node.commits.commit(other)
            path.write_bytes(intact)
            assert not node.commits.commit(commit)
            assert node.queue("all").end == 6

    def test_no_flipped_bit_changes_an_epoch(self, node: Node) -> None:
        with node:
            node.commits.commit(
                Commit([stage_block(node, "all", build_block(5))], writer="query", epoch=17)
            )
            (path,) = (node.data / "commits").glob("*.writer")
            intact = path.read_bytes()
            for bit in range(len(intact) * 8):
                flipped = bytearray(intact)
                flipped[bit // 8] ^= 1 << bit % 8
                path.write_bytes(flipped)
                with contextlib.suppress(StorageFailed):
                    assert node.commits.get_epoch("query") == 17
            path.write_bytes(b'{"writer": "query", "epoch": 17}')  # of an older version
            assert node.commits.get_epoch("query") == 17

    def test_repeated_epoch_changes_nothing_even_after_a_restart(self, tmp_path: Path) -> None:
        with open_node(tmp_path) as node:
            assert node.commits.get_epoch("query") is None
            stage = stage_block(node, "all", build_block(5))
            assert node.commits.commit(Commit([stage], writer="query", epoch=7))
        with open_node(tmp_path) as node:
            assert node.commits.get_epoch("query") == 7
            stage = stage_block(node, "all", build_block(5))
            assert not node.commits.commit(Commit([stage], writer="query", epoch=7))
            stage = stage_block(node, "all", build_block(5))
            assert not node.commits.commit(Commit([stage], writer="query", epoch=6))
            stage = stage_block(node, "all", build_block(5))
            assert node.commits.commit(Commit([stage], writer="query", epoch=8))
            assert node.queue("all").end == 10

    def test_concurrent_repeats_are_applied_once(self, node: Node) -> None:
        with node:
            commits = [
                Commit([stage_block(node, "all", build_block(5))], [SettleRange("main", 0, 5)])
                for _ in range(8)
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

    def test_repeat_does_not_affect_other_stages(self, node: Node) -> None:
        """Two stages for one queue in one commit, then another commit: no number is used twice."""
        with node:
            stages = [
                stage_block(node, "all", build_block(5)),
                stage_block(node, "all", build_block(3)),
            ]
            node.commits.commit(Commit(stages, [SettleRange("main", 0, 5)]))
            node.commits.commit(
                Commit([stage_block(node, "all", build_block(4))], [SettleRange("main", 5, 9)])
            )
            assert node.queue("all").end == 12


class TestRefused:
    """A refused commit changes nothing."""

    def check_unchanged(self, node: Node) -> None:
        assert node.queue("main").low == 0
        assert node.queue("all").end == 0
        assert not list((node.data / "commits").iterdir())

    def test_unknown_stage_is_refused(self, node: Node) -> None:
        with node:
            stage = stage_block(node, "all", build_block(5))
            with pytest.raises(NoSuchStage, match="'nope'"):
                node.commits.commit(Commit([stage, "nope"], [SettleRange("main", 0, 5)]))
            self.check_unchanged(node)

    def test_aborted_stage_is_refused(self, node: Node) -> None:
        with node:
            stage = stage_block(node, "all", build_block(5))
            node.commits.abort([stage, "never-was", "../../etc"])
            with pytest.raises(NoSuchStage):
                node.commits.commit(Commit([stage], [SettleRange("main", 0, 5)]))
            self.check_unchanged(node)

    def test_unknown_queue_is_refused(self, node: Node) -> None:
        with node:
            stage = stage_block(node, "nowhere", build_block(5))
            with pytest.raises(NoSuchQueue, match="'nowhere'"):
                node.commits.commit(Commit([stage], [SettleRange("main", 0, 5)]))
            stage = stage_block(node, "all", build_block(5))
            with pytest.raises(NoSuchQueue, match="'nobody'"):
                node.commits.commit(Commit([stage], [SettleRange("nobody", 0, 5)]))
            self.check_unchanged(node)

    def test_column_of_another_type_is_refused(self, node: Node) -> None:
        with node:
            node.queue("odd").check_columns(pa.schema([("extra", pa.int64())]))
            wrong = build_block(2).append_column("extra", pa.array(["a", "b"]))
            stages = [stage_block(node, "all", build_block(2)), stage_block(node, "odd", wrong)]
            with pytest.raises(SchemaMismatch, match="extra"):
                node.commits.commit(Commit(stages, [SettleRange("main", 0, 2)]))
            self.check_unchanged(node)

    def test_full_queue_refuses_the_commit(self, tmp_path: Path) -> None:
        queues = {"main": {}, "all": {"kind": "memory", "size": 10}}
        with Node(tmp_path, queues) as node:
            node.queue("main").producer().publish_block(build_block(20))
            node.commits.commit(
                Commit([stage_block(node, "all", build_block(8))], [SettleRange("main", 0, 8)])
            )
            stage = stage_block(node, "all", build_block(5))
            with pytest.raises(QueueFull, match="'all' has no room for 5"):
                node.commits.commit(Commit([stage], [SettleRange("main", 8, 13)]))
            assert node.queue("main").low == 8
            node.queue("all").get(8, timeout=PATIENCE).done()
            assert node.commits.commit(Commit([stage], [SettleRange("main", 8, 13)]))

    @pytest.mark.parametrize("behavior", ["drop_newest", "drop_oldest"])
    def test_queue_that_drops_when_full_accepts_the_commit(
        self, tmp_path: Path, behavior: str
    ) -> None:
        queues = {"main": {}, "all": {"kind": "memory", "size": 4, "full_behavior": behavior}}
        with Node(tmp_path, queues) as node:
            node.queue("main").producer().publish_block(build_block(8))
            for first in (0, 4):
                stage = stage_block(node, "all", build_block(4))
                assert node.commits.commit(Commit([stage], [SettleRange("main", first, first + 4)]))
            ledger = node.queue("all").stats().ledger
            assert ledger.pending == 4
            assert sum(ledger.dropped.values()) == 4

    def test_unwritable_record_refuses_the_commit(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        with open_node(tmp_path, disk) as node:
            stage = stage_block(node, "all", build_block(5))
            commit = Commit([stage], [SettleRange("main", 0, 5)])
            disk.fail("write", error=errno.ENOSPC, match=".commit")
            with pytest.raises(StorageFailed):
                node.commits.commit(commit)
            assert node.queue("main").low == 0
            assert node.queue("all").end == 0
            assert node.commits.commit(commit)

    def test_record_written_with_an_error_does_not_survive(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        with open_node(tmp_path, disk) as node:
            disk.fail("sync_directory", match="commits")
            with pytest.raises(StorageFailed):
                node.commits.commit(
                    Commit([stage_block(node, "all", build_block(5))], [SettleRange("main", 0, 5)])
                )
            self.check_unchanged(node)
        with open_node(tmp_path) as node:
            self.check_unchanged(node)

    def test_unwritable_stage_is_refused(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        with open_node(tmp_path, disk) as node:
            disk.fail("sync", error=errno.ENOSPC, match=".stage")
            with pytest.raises(OSError, match="space"):
                stage_block(node, "all", build_block(5))
            assert not list((tmp_path / "staging").iterdir())


class TestAfterTheRecord:
    """A commit whose record is written is applied, even if the disk fails."""

    def test_full_disk_delays_the_commit(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        with open_node(tmp_path, disk) as node:
            stage = stage_block(node, "all", build_block(5))
            # Segments and journals, but not the record.
            disk.fail("write", error=errno.ENOSPC, match=".chunk", times=3)
            disk.fail("sync", error=errno.EIO, match="journal", times=2)
            assert node.commits.commit(Commit([stage], [SettleRange("main", 0, 5)]))
            assert read_contents(node.queue("all")) == NUMBERS[:5]
            assert node.queue("main").low == 5

    def test_events_of_a_failed_sync_are_written_again(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        with open_node(tmp_path, disk) as node:
            disk.forget(match=".chunk")
            assert node.commits.commit(
                Commit([stage_block(node, "all", build_block(5))], [SettleRange("main", 0, 5)])
            )
        with open_node(tmp_path) as node:
            assert read_contents(node.queue("all")) == NUMBERS[:5]

    def test_stages_of_a_running_commit_cannot_be_aborted_or_expire(self, tmp_path: Path) -> None:
        """A client gives up after a timeout while the node completes its commit."""
        disk = FaultyDisk()
        with open_node(tmp_path, disk) as node:
            stages = [
                stage_block(node, "all", build_block(5)),
                stage_block(node, "odd", build_block(3)),
            ]
            disk.fail("write", error=errno.ENOSPC, match=".chunk", times=None)
            task = Task(lambda: node.commits.commit(Commit(stages, [SettleRange("main", 0, 5)])))
            commits = tmp_path / "commits"
            wait_until(lambda: bool(list(commits.glob("*.commit"))), "the commit file")
            node.commits.abort(stages)
            node.staging.discard_older(-1.0)
            disk.clear()
            assert task.result()
            assert read_contents(node.queue("all")) == NUMBERS[:5]
            assert read_contents(node.queue("odd")) == NUMBERS[:3]
            assert not list((tmp_path / "staging").iterdir())

    def test_full_queue_does_not_prevent_the_start(self, tmp_path: Path) -> None:
        """Consumers can make room only after the start; until then later commits wait."""
        queues = {"main": {}, "small": {"size": 4, "durability": "always"}}
        with Node(tmp_path, queues) as node:
            node.queue("main").producer().publish_block(build_block(10))
            commit = Commit(
                [stage_block(node, "small", build_block(10))], [SettleRange("main", 0, 10)]
            )
            task = Task(lambda: node.commits.commit(commit))
            node.queue("small").wait_beyond(1, PATIENCE)
            node.close()
            with pytest.raises(QueueClosed):
                task.result()
        with Task(lambda: Node(tmp_path, queues)).result() as node:
            later = Commit(
                [stage_block(node, "small", build_block(2))], [SettleRange("main", 0, 10)]
            )
            again = Task(lambda: node.commits.commit(later))
            small = node.queue("small")
            found: list[bytes] = []
            while len(found) < 10:
                with small.get(timeout=PATIENCE) as batch:
                    found += get_values([batch.block])
            assert found == NUMBERS[:10]
            assert not again.result(), "the range is settled"
            assert node.queue("main").low == 10
            assert not list((tmp_path / "commits").iterdir())

    def test_commits_of_different_full_queues_recover_independently(self, tmp_path: Path) -> None:
        """One commit may make the room that the other needs."""
        knobs = {"size": 4, "durability": "always"}
        queues = {"main": {}, "first": knobs, "second": knobs}
        with Node(tmp_path, queues) as node:
            node.queue("main").producer().publish_block(build_block(10))
            plans = [
                Commit([stage_block(node, "first", build_block(10))], [SettleRange("main", 0, 10)]),
                Commit([stage_block(node, "second", build_block(8))], [SettleRange("first", 0, 2)]),
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

    def test_invalid_record_is_kept(self, tmp_path: Path) -> None:
        with open_node(tmp_path) as node:
            commits = node.data / "commits"
        (commits / "0.commit").write_bytes(b"{garbage")
        with open_node(tmp_path):
            assert (commits / "0.failed").read_bytes() == b"{garbage"


def test_lanes_of_different_queues_commit_in_parallel(tmp_path: Path) -> None:
    """A commit that waits for room in a queue must not block the lane that empties the queue."""
    queues = {"main": {}, "b": {"kind": "memory", "size": 4}, "dead": {}}
    with Node(tmp_path, queues) as node:
        node.queue("main").producer().publish_block(build_block(10))
        # An empty queue takes any commit: ten events enter room for four in steps.
        commit = Commit([stage_block(node, "b", build_block(10))], [SettleRange("main", 0, 10)])
        thread = threading.Thread(target=node.commits.commit, args=(commit,))
        thread.start()
        done = 0
        while done < 10:
            found = node.queue("b").read(done, 100)
            if found is None:
                node.queue("b").wait_beyond(done, PATIENCE)
                continue
            end = found[0] + found[1].num_rows
            stage = stage_block(node, "dead", found[1])
            assert node.commits.commit(Commit([stage], [SettleRange("b", found[0], end)]))
            done = end
        thread.join(PATIENCE)
        assert node.queue("dead").end == 10
        assert node.queue("main").low == 10


def test_expired_stages_are_discarded(node: Node) -> None:
    with node:
        stage = stage_block(node, "all", build_block(5))
        assert node.staging.discard_older(3600.0) == 0
        assert node.staging.discard_older(-1.0) == 1
        with pytest.raises(NoSuchStage):
            node.staging.get_contents(stage)
        assert not list((node.data / "staging").iterdir())


def test_unfinished_stage_is_discarded_at_the_start(node: Node) -> None:
    with node:
        with node.stage("all", build_block(1).schema) as stage:
            stage.add(build_block(1))
        assert not list((node.data / "staging").iterdir())
