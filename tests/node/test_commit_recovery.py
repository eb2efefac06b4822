"""Tests of the recovery of commits: the node starts, and every commit is applied once."""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.contract.harness import Task, wait_until
from tests.node.lane import open_until_killed, read_contents, stage_block
from tests.node.test_commit_order import (
    KNOBS,
    build_block,
    fill,
    list_record_suffixes,
    values,
    wait_until_blocked,
)
from tests.recovery.hooked_disk import take
from turnlane.errors import ConfigError, NoSuchStage, QueueClosed, RetryLater, StorageFailed
from turnlane.events import block_of
from turnlane.node import commit_record
from turnlane.node.commit_apply import CommitJob
from turnlane.node.commit_record import Commit, SettleRange
from turnlane.node.node import Node
from turnlane.node.staging import StageContents
from turnlane.testing import FaultyDisk

Queues = Mapping[str, Mapping[str, Any]]
QUEUES: Queues = {"main": KNOBS, "a": KNOBS, "b": KNOBS}


def interrupt(data: Path, queues: Queues = QUEUES, *, writer: str | None = "w") -> None:
    """Leave a commit with only its record written: 20 events for ``a``, 20 for ``b``."""
    disk = FaultyDisk()
    with Node(data, queues, disk=disk) as node:
        fill(node, "main", 20)
        stages = [
            stage_block(node, "a", build_block(b"a", 20)),
            stage_block(node, "b", build_block(b"b", 20)),
        ]
        stage_block(node, "a", build_block(b"never committed", 1))
        disk.fail("write", error=errno.ENOSPC, match=".chunk", times=None)
        commit = Commit(stages, [SettleRange("main", 0, 20)], writer, 1)
        task = Task(lambda: node.commits.commit(commit))
        wait_until(lambda: list_record_suffixes(node) == [".commit"], "the step")
        node.close()
        with pytest.raises(QueueClosed):
            task.result()


def wait_until_complete(node: Node) -> None:
    """Wait until a commit is complete: its stages are removed last."""
    wait_until(lambda: not list((node.data / "staging").iterdir()), "the commit")


def check_complete(node: Node) -> None:
    assert read_contents(node.queue("a")) == values(b"a", 20)
    assert read_contents(node.queue("b")) == values(b"b", 20)
    assert node.queue("main").low == 20
    assert node.commits.get_epoch("w") == 1
    assert list_record_suffixes(node) == [".writer"]
    assert not list((node.data / "staging").iterdir())


class TestStart:
    def test_start_on_a_full_disk_recovers_the_commits(self, tmp_path: Path) -> None:
        interrupt(tmp_path)
        disk = FaultyDisk()
        disk.fill()
        with Task(lambda: Node(tmp_path, QUEUES, disk=disk)).result() as node:
            assert ".commit" in list_record_suffixes(node)
            disk.unfill()
            wait_until_complete(node)
            check_complete(node)

    def test_commit_with_a_damaged_epoch_waits_and_is_applied_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        interrupt(tmp_path)
        damaged = tmp_path / "commits" / (hashlib.sha256(b"w").hexdigest()[:32] + ".writer")
        damaged.write_bytes(bytes(40))
        with Node(tmp_path, QUEUES) as node:
            wait_until(lambda: "commit.delayed error" in caplog.text, "the damaged file")
            assert list_record_suffixes(node) == [".commit", ".writer"]
            damaged.unlink()
            wait_until_complete(node)
            again = Commit([stage_block(node, "a", build_block(b"a", 20))], (), "w", 1)
            assert not node.commits.commit(again)
            check_complete(node)

    @pytest.mark.parametrize(("op", "match"), [("sync", ".writer"), ("write", ".writer")])
    def test_start_on_a_failing_disk_recovers_the_commits(
        self, op: str, match: str, tmp_path: Path
    ) -> None:
        interrupt(tmp_path)
        disk = FaultyDisk()
        disk.fail(op, error=errno.ENOSPC, match=match, times=None)
        with Node(tmp_path, QUEUES, disk=disk) as node:
            assert ".commit" in list_record_suffixes(node)
            disk.clear()
            wait_until_complete(node)
            check_complete(node)

    def test_interrupted_start_leaves_the_commits_to_the_next_start(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        interrupt(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(CommitJob, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                Task(lambda: Node(tmp_path, QUEUES)).result()
        with Node(tmp_path, QUEUES) as node:
            check_complete(node)

    def test_start_ignores_a_record_that_was_not_finished(self, tmp_path: Path) -> None:
        with Node(tmp_path, QUEUES) as node:
            assert list_record_suffixes(node) == []
        for name in (f"{7:020}.commit.new", "cafe.writer.new"):
            (tmp_path / "commits" / name).write_bytes(b"half")
        with Node(tmp_path, QUEUES) as node:
            assert list_record_suffixes(node) == []

    def test_unreadable_record_prevents_the_start(self, tmp_path: Path) -> None:
        """Other commits would use its sequence numbers."""
        interrupt(tmp_path)
        (left,) = (tmp_path / "commits").glob("*.commit")
        aside = left.rename(tmp_path / "aside")
        left.mkdir()  # every read of it fails
        with pytest.raises(StorageFailed, match="cannot read"):
            Node(tmp_path, QUEUES)
        left.rmdir()
        aside.rename(left)
        with Node(tmp_path, QUEUES) as node:
            check_complete(node)

    @pytest.mark.parametrize("content", [b"{garbage", b"[" * 100_000], ids=["garbage", "nested"])
    def test_stages_are_kept_if_a_record_is_invalid(self, content: bytes, tmp_path: Path) -> None:
        interrupt(tmp_path)
        (left,) = (tmp_path / "commits").glob("*.commit")
        left.write_bytes(content)
        staging = tmp_path / "staging"
        for _ in range(2):
            with Node(tmp_path, QUEUES) as node:
                assert list_record_suffixes(node) == [".failed"]
                assert [path.suffix for path in staging.iterdir()] == [".kept"] * 3
                stage_block(node, "a", build_block(b"c", 1))
        assert left.with_suffix(".failed").read_bytes() == content


class TestWaitingForRoom:
    """A recovered commit that waits for room while the node runs."""

    QUEUES: ClassVar[Queues] = {
        "main": KNOBS,
        "mem": {"kind": "memory"},
        "small": {**KNOBS, "size": 4},
    }

    def leave_commit(self, data: Path, ranges: list[SettleRange]) -> str:
        with Node(data, self.QUEUES) as node:
            fill(node, "main", 10)
            fill(node, "mem", 10)
            stage = stage_block(node, "small", build_block(b"a", 10))
            task = Task(lambda: node.commits.commit(Commit([stage], ranges)))
            wait_until_blocked(node.queue("small"))
            node.close()
            with pytest.raises(QueueClosed):
                task.result()
        return stage

    def test_stages_of_a_recovering_commit_cannot_be_discarded(self, tmp_path: Path) -> None:
        """A returning client gets an unknown stage and gives up."""
        stage = self.leave_commit(tmp_path, [SettleRange("main", 0, 10)])
        with Node(tmp_path, self.QUEUES) as node:
            with pytest.raises(NoSuchStage):
                node.commits.commit(Commit([stage]))
            node.commits.abort([stage])
            assert take(node.queue("small"), 10) == values(b"a", 10)
            wait_until_complete(node)
            assert list_record_suffixes(node) == []
            assert node.queue("main").low == 10

    def test_recovery_does_not_settle_later_events(self, tmp_path: Path) -> None:
        """A memory queue gives the same offsets to other events after a restart."""
        self.leave_commit(tmp_path, [SettleRange("main", 0, 10), SettleRange("mem", 0, 10)])
        for _ in range(2):
            with Node(tmp_path, self.QUEUES) as node:
                fill(node, "mem", 10)
        with Node(tmp_path, self.QUEUES) as node:
            fill(node, "mem", 10)
            take(node.queue("small"), 10)
            wait_until_complete(node)
            assert list_record_suffixes(node) == []
            assert node.queue("main").low == 10
            assert node.queue("mem").low == 0

    @pytest.mark.parametrize("kind", ["disk", "disk_assisted"])
    def test_recovery_does_not_settle_events_with_reused_offsets(
        self, kind: str, tmp_path: Path
    ) -> None:
        """A power cut loses events that were read before they were synced."""
        self.leave_commit(tmp_path, [SettleRange("main", 0, 10)])
        queues = {**self.QUEUES, "main": {**KNOBS, "kind": kind}}
        # As if the last five events were lost: the plan goes beyond the end of the log.
        (left,) = (tmp_path / "commits").glob("*.commit")
        left.write_bytes(left.read_bytes().replace(b'["main", 0, 10', b'["main", 0, 15'))
        for _ in range(2):
            with Node(tmp_path, queues) as node:
                assert ".commit" in list_record_suffixes(node)
                fill(node, "main", 3)
        with Node(tmp_path, queues) as node:
            take(node.queue("small"), 10)
            wait_until_complete(node)
            assert list_record_suffixes(node) == []
            assert node.queue("main").find_unsettled(100).spans == [(10, 16)]


class TestRepeated:
    """A complete commit whose record could not be removed is applied again."""

    def test_recovery_does_not_decrease_an_epoch(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        disk.fail("unlink", match=".commit")
        with Node(tmp_path, QUEUES, disk=disk) as node:
            for epoch in (5, 6):
                stage = stage_block(node, "a", build_block(b"%d." % epoch, 1))
                assert node.commits.commit(Commit([stage], writer="w", epoch=epoch))
            assert list_record_suffixes(node) == [".commit", ".writer"]
        with Node(tmp_path, QUEUES) as node:
            assert list_record_suffixes(node) == [".writer"]
            assert node.commits.get_epoch("w") == 6
            stage = stage_block(node, "a", build_block(b"6.", 1))
            assert not node.commits.commit(Commit([stage], writer="w", epoch=6))
            assert read_contents(node.queue("a")) == [b"5.0", b"6.0"]

    def test_recreated_queue_does_not_get_the_commit(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        with Node(tmp_path, QUEUES, disk=disk) as node:
            node.create("source", **KNOBS)
            fill(node, "source", 5)
            disk.fail("unlink", match=".commit")
            stage = stage_block(node, "a", build_block(b"a", 5))
            assert node.commits.commit(Commit([stage], [SettleRange("source", 0, 5)]))
            node.drop("source")
            node.create("source", **KNOBS)
            fill(node, "source", 5)
        with Node(tmp_path, QUEUES) as node:
            assert list_record_suffixes(node) == []
            assert node.queue("source").low == 0
            assert read_contents(node.queue("a")) == values(b"a", 5)

    def test_stage_that_cannot_be_removed_is_not_a_failure(self, tmp_path: Path) -> None:
        disk = FaultyDisk()
        disk.fail("unlink", match=".stage")
        with Node(tmp_path, QUEUES, disk=disk) as node:
            assert node.commits.commit(Commit([stage_block(node, "a", build_block(b"a", 5))]))
        with Node(tmp_path, QUEUES) as node:
            assert read_contents(node.queue("a")) == values(b"a", 5)
            assert not list((tmp_path / "staging").iterdir())

    def test_record_that_can_neither_be_synced_nor_removed_is_applied(self, tmp_path: Path) -> None:
        """The next start would find the record, also if its client gave up after an error."""
        disk = FaultyDisk()
        with Node(tmp_path, QUEUES, disk=disk) as node:
            fill(node, "main", 5)
            stage = stage_block(node, "a", build_block(b"a", 5))
            disk.fail("sync_directory", match="commits")
            disk.fail("unlink", match=".commit", times=2)
            assert node.commits.commit(Commit([stage], [SettleRange("main", 0, 5)]))
            assert node.queue("main").low == 5
            assert read_contents(node.queue("a")) == values(b"a", 5)


class TestFailed:
    """A part that a start cannot apply."""

    def test_missing_queue_gets_its_part_when_it_is_configured_again(self, tmp_path: Path) -> None:
        interrupt(tmp_path)
        without = {name: QUEUES[name] for name in ("main", "a")}
        for _ in range(2):
            with Node(tmp_path, without) as node:
                assert read_contents(node.queue("a")) == values(b"a", 20)
                assert node.queue("main").low == 20
                assert node.commits.get_epoch("w") == 1
                assert list_record_suffixes(node) == [".failed", ".writer"]
                assert len(list((tmp_path / "staging").iterdir())) == 1, "stages pile up"
                stage_block(node, "a", build_block(b"never committed", 1))
        with Node(tmp_path, QUEUES) as node:
            check_complete(node)

    def test_commits_are_refused_while_a_failed_part_waits(self, tmp_path: Path) -> None:
        interrupt(tmp_path)
        without = {name: QUEUES[name] for name in ("main", "a")}
        with Node(tmp_path, without) as node:
            node.create("b", **KNOBS)
            with pytest.raises(RetryLater, match="failed"):
                node.commits.commit(Commit([stage_block(node, "b", build_block(b"c", 1))]))
            assert node.commits.commit(Commit([stage_block(node, "a", build_block(b"c", 1))]))
        with Node(tmp_path, without) as node:
            assert read_contents(node.queue("b")) == values(b"b", 20)
            assert node.commits.commit(Commit([stage_block(node, "b", build_block(b"c", 1))]))
            assert read_contents(node.queue("b")) == [*values(b"b", 20), b"c0"]

    def test_range_of_a_missing_queue_is_settled_when_it_is_configured_again(
        self, tmp_path: Path
    ) -> None:
        interrupt(tmp_path)
        with Node(tmp_path, {name: QUEUES[name] for name in ("a", "b")}) as node:
            assert list_record_suffixes(node) == [".failed", ".writer"]
        with Node(tmp_path, QUEUES) as node:
            check_complete(node)

    @pytest.mark.parametrize("fits", [0, 3])
    def test_refused_event_is_published_once_the_queue_accepts_it(
        self, fits: int, tmp_path: Path
    ) -> None:
        """Other commits continue. Events that the queue already has are not published again."""
        leave_too_large(tmp_path, fits)
        for number in range(2):
            with Node(tmp_path, NARROW) as node:
                check_kept(node, number)
        with Node(tmp_path, QUEUES) as node:
            check_all_published(node, fits, 2)

    def test_unsynced_failed_rename_does_not_lose_the_commit(self, tmp_path: Path) -> None:
        """A power cut restores the old name after other commits have used later numbers."""
        leave_too_large(tmp_path, 3)
        disk = FaultyDisk()
        disk.fail("sync_directory", nth=2, match="commits")
        with Node(tmp_path, NARROW, disk=disk) as node:
            check_kept(node, 0)
        (failed,) = (tmp_path / "commits").iterdir()
        failed.rename(failed.with_suffix(".commit"))
        with Node(tmp_path, QUEUES) as node:
            check_all_published(node, 3, 1)

    @pytest.mark.parametrize("op", ["write", "sync", "sync_directory", "rename", "unlink"])
    def test_kill_at_every_operation_of_a_start_loses_nothing(
        self, op: str, tmp_path: Path, process_server: ForkServerContext
    ) -> None:
        """Kills the start that finds the event too large, and the start that accepts it."""
        data, at = tmp_path / "data", tmp_path / "at"
        leave_too_large(data, 3)
        for number, queues in enumerate((NARROW, QUEUES)):
            disk = FaultyDisk()
            shutil.copytree(data, at)
            with Node(at, queues, disk=disk):
                total = disk.operations[op]  # of the start only
            shutil.rmtree(at)
            for nth in range(1, total + 1):
                shutil.copytree(data, at)
                life = process_server.Process(target=open_until_killed, args=(at, queues, op, nth))
                life.start()
                life.join(60.0)
                assert life.exitcode == -9
                with Node(at, queues) as node:
                    if queues is NARROW:
                        check_kept(node, 0)
                with Node(at, QUEUES) as node:
                    check_all_published(node, 3, 1)
                shutil.rmtree(at)
            if not number:
                with Node(data, NARROW) as node:
                    check_kept(node, 0)


NARROW: Queues = {**QUEUES, "b": {**KNOBS, "max_event_bytes": 100}}
LONG = b"x" * 1000


def build_short_events(count: int) -> list[bytes]:
    return [b"s%d" % number for number in range(count)]


def leave_too_large(data: Path, fits: int) -> None:
    """Leave a commit for ``b`` with some short events, one long event and two short ones."""
    disk = FaultyDisk()
    with Node(data, QUEUES, disk=disk) as node:
        fill(node, "main", 20)
        with node.staging.stage(StageContents("b", block_of([]).schema)) as stage:
            for each in (build_short_events(fits), [LONG]):
                stage.add(block_of(each))
            first = stage.finish()
        stages = [
            first,
            stage_block(node, "b", build_block(b"t", 2)),
            stage_block(node, "a", build_block(b"a", 1)),
        ]
        disk.fail("write", error=errno.ENOSPC, match=".chunk", times=None)
        task = Task(lambda: node.commits.commit(Commit(stages, [SettleRange("main", 0, 20)])))
        wait_until(lambda: list_record_suffixes(node) == [".commit"], "the step")
        node.close()
        with pytest.raises(QueueClosed):
            task.result()


def check_kept(node: Node, number: int) -> None:
    """Check that the rest is applied and that other commits continue."""
    assert read_contents(node.queue("a")) == [b"a0"]
    assert node.queue("main").low == 20
    assert list_record_suffixes(node) == [".failed"]
    assert node.commits.commit(Commit([stage_block(node, "b", build_block(b"%d." % number, 5))]))


def check_all_published(node: Node, fits: int, others: int) -> None:
    """Check that the events of other commits come before the event that was too large."""
    between = [value for number in range(others) for value in values(b"%d." % number, 5)]
    assert read_contents(node.queue("b")) == [
        *build_short_events(fits),
        *between,
        LONG,
        *values(b"t", 2),
    ]
    assert read_contents(node.queue("a")) == [b"a0"]
    assert list_record_suffixes(node) == []
    assert not list((node.data / "staging").iterdir())


class TestWriters:
    def test_writer_without_stages_or_ranges_is_refused(self, tmp_path: Path) -> None:
        with Node(tmp_path, QUEUES) as node:
            with pytest.raises(ConfigError, match="writer"):
                node.commits.commit(Commit(writer="w", epoch=1))
            assert list_record_suffixes(node) == []

    def test_longest_inactive_writer_is_forgotten(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(commit_record, "MAX_WRITERS", 3)
        for life in range(2):  # a queue without an earlier count counts its events
            with Node(tmp_path, QUEUES) as node:
                for number in range(life * 3, life * 3 + 3):
                    stage = stage_block(node, "a", build_block(b"a", 1))
                    assert node.commits.commit(Commit([stage], writer=f"w{number}", epoch=number))
        with Node(tmp_path, QUEUES) as node:
            assert [node.commits.get_epoch(f"w{number}") for number in range(6)] == [
                *[None] * 3,
                *(3, 4, 5),
            ]
