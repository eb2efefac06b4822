"""Tests of events that are staged by reference: each is copied exactly once."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.harness import Task, wait_until
from tests.node.lane import (
    EVENTS,
    QUEUES,
    open_node,
    open_until_killed,
    read_contents,
    stage_block,
    stage_copies,
)
from tests.node.test_commit_order import (
    KNOBS,
    build_block,
    list_record_suffixes,
    wait_until_blocked,
)
from turnlane.errors import NoSuchStage, QueueClosed
from turnlane.events import Block, block_of, get_values
from turnlane.intervals import COPY_SCHEMA
from turnlane.node import event_refs
from turnlane.node.commit_apply import (
    MAX_GROUP_PARTS,
    READ_RETRY_SECONDS,
    group_parts,
    read_parts,
    restage_events,
)
from turnlane.node.commit_record import Commit, CommitPart, SettleRange
from turnlane.node.event_refs import (
    CopyByReference,
    CopyByValue,
    decode_references,
    encode_references,
    read_range,
)
from turnlane.node.node import Node
from turnlane.queues.buffered import BufferedQueue
from turnlane.testing import FaultyDisk

Queues = Mapping[str, Mapping[str, Any]]
ALL = [b"%d" % number for number in range(EVENTS)]
ODD = ALL[1::2]
WHOLE = [SettleRange("main", 0, EVENTS)]


def interrupt(data: Path, more: Sequence[bytes] = ()) -> None:
    """Leave a commit with only its record written; ``more`` is staged for ``all``."""
    disk = FaultyDisk()
    with open_node(data, disk) as node:
        stages = stage_copies(node, 0, EVENTS)
        if more:
            stages.append(stage_block(node, "all", block_of(more)))
        disk.fail("write", error=errno.ENOSPC, match=".chunk", times=None)
        task = Task(lambda: node.commits.commit(Commit(stages, WHOLE)))
        wait_until(lambda: list_record_suffixes(node) == [".commit"], "the step")
        node.close()
        with pytest.raises(QueueClosed):
            task.result()


def check_all(node: Node) -> None:
    assert read_contents(node.queue("all")) == ALL
    assert read_contents(node.queue("odd")) == ODD
    assert node.queue("main").low == EVENTS
    assert list_record_suffixes(node) == []
    assert not list(node.staging.directory.iterdir())


def test_copy_of_few_events_releases_the_source_block() -> None:
    """This includes columns that have only nulls."""
    before = pa.total_allocated_bytes()
    block = _build_received_block(1000)
    chosen = event_refs._select_rows(block.slice(100, 800), np.array([7, 9]))
    assert chosen.schema == block.schema
    del block
    assert pa.total_allocated_bytes() - before < 10_000
    assert chosen.column("number").to_pylist() == [107, 109]
    assert chosen.column("key").to_pylist() == [None, None]


def _build_received_block(rows: int) -> Block:
    """Return a block in one piece of memory, as in a frame."""
    columns: list[Any] = [
        pa.array([bytes(1000)] * rows),
        pa.nulls(rows, pa.string()),
        pa.array(range(rows), pa.int64()),
    ]
    sent = pa.RecordBatch.from_arrays(columns, names=["value", "key", "number"])
    return pa.ipc.read_record_batch(sent.serialize(), sent.schema)


def test_reference_stage_holds_no_events_before_the_commit(tmp_path: Path) -> None:
    with open_node(tmp_path) as node:
        main = node.queue("main")
        main.producer(ack="persisted").publish_block(block_of([b"x" * 100_000]))
        stage_copies(node, 0, EVENTS + 1)
        files = list(node.staging.directory.iterdir())
        assert len(files) == 2
        assert sum(path.stat().st_size for path in files) < 10_000


def test_start_copies_committed_references(tmp_path: Path) -> None:
    interrupt(tmp_path)
    with open_node(tmp_path) as node:
        check_all(node)


class TestNotOpen:
    """A queue of the commit is not open when the commit is applied."""

    def test_referenced_events_are_restaged_before_they_are_settled(self, tmp_path: Path) -> None:
        interrupt(tmp_path)
        for _ in range(2):
            with Node(tmp_path, {name: QUEUES[name] for name in ("main", "all")}) as node:
                assert read_contents(node.queue("all")) == ALL
                assert node.queue("main").low == EVENTS
                assert list_record_suffixes(node) == [".failed"]
        with open_node(tmp_path) as node:
            check_all(node)

    def test_part_without_its_source_queue_waits(self, tmp_path: Path) -> None:
        interrupt(tmp_path)
        with Node(tmp_path, {name: QUEUES[name] for name in ("odd", "all")}) as node:
            assert read_contents(node.queue("all")) == []
            assert list_record_suffixes(node) == [".failed"]
        with open_node(tmp_path) as node:
            check_all(node)


def test_refused_part_is_kept_and_the_rest_is_published(tmp_path: Path) -> None:
    interrupt(tmp_path)
    with Node(tmp_path, NARROW) as node:
        assert read_contents(node.queue("all")) == ALL
        assert node.queue("main").low == EVENTS
        assert list_record_suffixes(node) == [".failed"]
    with open_node(tmp_path) as node:
        check_all(node)


def test_recreated_source_queue_is_refused(tmp_path: Path) -> None:
    """The references belong to the dropped queue."""
    queues: Queues = {name: QUEUES[name] for name in ("odd", "all")}
    with Node(tmp_path, queues) as node:
        node.create("main", **QUEUES["main"])
        node.queue("main").producer(ack="persisted").publish_block(block_of(ALL))
        stages = stage_copies(node, 0, EVENTS)
        node.drop("main")
        node.create("main", **QUEUES["main"])
        node.queue("main").producer(ack="persisted").publish_block(build_block(b"new", EVENTS))
        with pytest.raises(NoSuchStage, match="which was dropped"):
            node.commits.commit(Commit(stages, WHOLE))
        assert read_contents(node.queue("all")) == []
        assert node.queue("main").low == 0


def test_start_does_not_copy_from_a_recreated_source_queue(tmp_path: Path) -> None:
    interrupt(tmp_path)
    shutil.rmtree(tmp_path / "queues" / "main")
    with open_node(tmp_path) as node:  # fills a new frame
        assert read_contents(node.queue("all")) == []
        assert read_contents(node.queue("main")) == ALL
        assert list_record_suffixes(node) == []


def test_settled_events_are_skipped_and_numbers_continue(tmp_path: Path) -> None:
    with open_node(tmp_path) as node:
        stages = stage_copies(node, 0, 20)
        node.queue("main").settle(0, 6)
        node.queue("main").settle(9, 12)  # above the lowest pending event
        node.commits.commit(Commit(stages, [SettleRange("main", 0, 20)]))
        node.commits.commit(Commit(stage_copies(node, 20, 10), [SettleRange("main", 20, 30)]))
        node.commits.commit(Commit([stage_block(node, "all", block_of([b"more"]))]))
        assert read_contents(node.queue("all")) == [*ALL[6:9], *ALL[12:], b"more"]
        assert read_contents(node.queue("odd")) == [ALL[7], *ALL[13::2]]


def test_restaged_events_after_a_gap_keep_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise events that are not in the queue yet would look like repeats."""

    def publish_with_gap(queue: BufferedQueue, first: int, end: int) -> Iterator[tuple[int, Block]]:
        yield from read_range(queue, first, 10)
        yield from read_range(queue, 20, end)

    with open_node(tmp_path) as node:
        part = CommitPart(stage_copies(node, 0, EVENTS)[0], "all", 7, None, "main", EVENTS)
        node.queue("main").settle(10, 20)
        monkeypatch.setattr(event_refs, "read_range", publish_with_gap)
        found = restage_events(part, node.staging, {"main": node.queue("main")})
        assert [each[1:] for each in found] == [(0, 10), (20, 10)]
        second = CommitPart(found[1].stage, "all", 27)
        assert get_values(block for *_, block in read_parts([second], node.staging, {})) == ALL[20:]


def test_unreadable_reference_stage_settles_nothing(tmp_path: Path) -> None:
    interrupt(tmp_path)
    saved = {path: path.read_bytes() for path in (tmp_path / "staging").iterdir()}
    for path in saved:
        path.write_bytes(b"garbage")
    with open_node(tmp_path) as node:
        assert node.queue("main").low == 0
        assert list_record_suffixes(node) == [".commit"]
    for path, content in saved.items():
        path.write_bytes(content)
    with open_node(tmp_path) as node:
        check_all(node)


@pytest.mark.parametrize("gap", [(0, 3), (10, 20), (29, 30)], ids=["first", "middle", "last"])
def test_unreadable_event_delays_the_commit(
    gap: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit would settle the event, and the events after it have higher numbers."""
    tries: list[int] = []

    def later(queue: BufferedQueue, first: int, end: int) -> Iterator[tuple[int, Block]]:
        tries.append(queue.low)
        if len(tries) > 2:
            yield from read_range(queue, first, end)
            return
        yield from read_range(queue, first, gap[0])
        yield from read_range(queue, gap[1], end)

    with open_node(tmp_path) as node:
        stages = stage_copies(node, 0, EVENTS)
        monkeypatch.setattr(event_refs, "read_range", later)
        node.commits.commit(Commit(stages, WHOLE))
        assert tries == [0, 0, 0]
        check_all(node)


def test_temporary_read_errors_lose_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue gives up an event after a few failed reads, so the commit waits between attempts."""
    pauses: list[float | None] = []

    class Closing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return self.is_set()

    with open_node(tmp_path):
        pass  # the events are then only on disk
    disk = FaultyDisk()
    with open_node(tmp_path, disk) as node:
        stages = stage_copies(node, 0, EVENTS)
        disk.fail("read", match=".chunk", times=2)
        monkeypatch.setattr(node.commits, "_closing", Closing())
        node.commits.commit(Commit(stages, WHOLE))
        assert pauses == [READ_RETRY_SECONDS] * 2
        check_all(node)


WITHOUT_ODD: Queues = {name: QUEUES[name] for name in ("main", "all")}
NARROW: Queues = {**QUEUES, "odd": {**QUEUES["odd"], "max_event_bytes": 1}}


@pytest.mark.parametrize("queues", [WITHOUT_ODD, NARROW], ids=["not open", "refusing"])
class TestRefusedParts:
    """One queue refuses its events; the others accept theirs."""

    @pytest.mark.parametrize("op", ["open", "write", "sync", "sync_directory", "rename", "unlink"])
    def test_kill_during_a_copy_loses_no_event(
        self, queues: Queues, op: str, tmp_path: Path, process_server: ForkServerContext
    ) -> None:
        data, at = tmp_path / "data", tmp_path / "at"
        interrupt(data)
        shutil.copytree(data, at)
        disk = FaultyDisk()
        with Node(at, queues, disk=disk):
            total = disk.operations[op]  # of the start only
        for nth in range(1, total + 1):
            shutil.rmtree(at)
            shutil.copytree(data, at)
            life = process_server.Process(target=open_until_killed, args=(at, queues, op, nth))
            life.start()
            life.join(60.0)
            assert life.exitcode == -9
            with open_node(at) as node:
                check_all(node)

    @pytest.mark.parametrize("match", [".commit", ".journal"])
    def test_temporary_disk_failure_loses_no_event_and_leaves_no_file(
        self, queues: Queues, match: str, tmp_path: Path
    ) -> None:
        interrupt(tmp_path)
        disk = FaultyDisk()
        disk.fail("write", error=errno.ENOSPC, match=match, times=3)
        with Node(tmp_path, queues, disk=disk) as node:
            wait_until(lambda: list_record_suffixes(node) == [".failed"], "what is left")
            assert read_contents(node.queue("all")) == ALL
            left = node.staging.directory
            wait_until(lambda: len(list(left.iterdir())) == 1, "the other stages to be gone")
        with open_node(tmp_path) as node:
            check_all(node)


def test_part_that_waits_for_its_source_keeps_its_order(tmp_path: Path) -> None:
    """The waiting part has the lower numbers."""
    more = [b"more %d" % number for number in range(50)]
    interrupt(tmp_path, more)
    for _ in range(2):
        with Node(tmp_path, {name: QUEUES[name] for name in ("odd", "all")}) as node:
            assert read_contents(node.queue("all")) == []
    with open_node(tmp_path) as node:
        assert read_contents(node.queue("all")) == [*ALL, *more]
        assert read_contents(node.queue("odd")) == ODD


def test_source_dropped_during_the_commit_drops_its_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = {**QUEUES["all"], "size": 10}
    queues: Queues = {"all": small, "odd": QUEUES["odd"]}
    with Node(tmp_path, queues) as node:
        producer = node.create("main", **QUEUES["main"]).producer(ack="persisted")
        for at in range(0, EVENTS, 10):  # each in its own frame
            producer.publish_block(block_of(ALL[at : at + 10]))
    with Node(tmp_path, queues) as node:
        stages = stage_copies(node, 0, EVENTS)
        task = Task(lambda: node.commits.commit(Commit(stages)))
        wait_until_blocked(node.queue("all"))
        node.drop("main")
        everything = node.queue("all")

        def is_complete() -> bool:
            everything.settle(0, everything.end)
            return not task.running

        wait_until(is_complete, "the commit, for which room is made")
        task.result()
        assert "commit.source_dropped queue=" in caplog.text
        assert node.commits.commit(Commit([stage_block(node, "all", block_of([b"more"]))]))


def test_unreadable_reference_stage_does_not_prevent_the_start(tmp_path: Path) -> None:
    interrupt(tmp_path)
    with Node(tmp_path, {name: QUEUES[name] for name in ("odd", "all")}) as node:
        assert list_record_suffixes(node) == [".failed"]
    for path in (tmp_path / "staging").iterdir():
        path.write_bytes(b"garbage")
    with open_node(tmp_path) as node:
        assert list_record_suffixes(node) == [".failed"]
        assert read_contents(node.queue("main")) == ALL


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        ({}, {}, CopyByReference),
        ({"durability": "always"}, {"kind": "memory"}, CopyByReference),
        ({"durability": "never"}, {}, CopyByValue),
        ({"kind": "memory"}, {}, CopyByValue),
        ({"kind": "disk_assisted"}, {}, CopyByValue),
        ({}, {"max_event_bytes": "1Mi"}, CopyByValue),
        ({"max_event_bytes": "1Mi"}, {"max_event_bytes": "1Mi"}, CopyByValue),
        ({"max_event_bytes": "1Mi"}, {}, CopyByReference),
    ],
    ids=["disk", "into memory", "unsynced", "memory", "assisted", "narrower", "narrow", "wider"],
)
def test_only_durable_fitting_events_are_copied_by_reference(
    source: dict[str, Any], target: dict[str, Any], kind: type, tmp_path: Path
) -> None:
    with (
        Node(tmp_path, {"main": source, "other": target}) as node,
        node.copy(node.queue("main"), ["other"]) as copying,
    ):
        assert type(copying) is kind


def test_events_with_extra_columns_are_copied_by_value(tmp_path: Path) -> None:
    with Node(tmp_path, {"main": KNOBS, "other": KNOBS}) as node:
        block = block_of([b"a"])
        extra = block.append_column("shop", block.column("source").fill_null("here"))
        node.queue("main").producer(ack="persisted").publish_block(extra)
        with node.copy(node.queue("main"), ["other"]) as copying:
            assert type(copying) is CopyByValue


@given(st.sets(st.integers(0, 3000) | st.integers(10**9, 10**9 + 600) | st.integers(0, 1 << 60)))
def test_encoded_references_decode_to_the_same_offsets(offsets: set[int]) -> None:
    numbers = np.array(sorted(offsets), dtype=np.int64)
    assert decode_references([encode_references(numbers)]).tolist() == sorted(offsets)


def test_unordered_references_are_sorted(tmp_path: Path) -> None:
    with open_node(tmp_path) as node:
        with node.copy(node.queue("main"), ["all"]) as copying:
            for first in (20, 0, 10, 15):
                copying.add(build_offsets(first, 10))
            stages = copying.finish()
        node.commits.commit(Commit(stages, WHOLE))
        node.commits.commit(Commit([stage_block(node, "all", block_of([b"more"]))]))
        assert read_contents(node.queue("all")) == [*ALL, b"more"]


def build_offsets(first: int, count: int) -> Block:
    offsets = np.arange(first, first + count)
    return pa.record_batch(
        [pa.array(offsets), pa.array(np.ones(count, np.int64))], schema=COPY_SCHEMA
    )


def test_group_has_at_most_max_group_parts() -> None:
    copies = [
        CommitPart("s", str(number), 0, None, "main", 9) for number in range(MAX_GROUP_PARTS + 1)
    ]
    assert group_parts(copies) == [copies[:-1], copies[-1:]]


def test_group_has_each_target_queue_once() -> None:
    """Otherwise higher numbers would be published first, and lower ones look like repeats."""
    copies = [CommitPart(stage, queue, 0, None, "main", 9) for stage in "st" for queue in "ab"]
    plain = CommitPart("u", "a", 0)
    assert group_parts([*copies, plain, plain]) == [copies[:2], copies[2:], [plain], [plain]]
