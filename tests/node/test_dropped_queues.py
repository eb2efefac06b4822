"""Tests of dropped queues: their events never come back."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.contract.harness import PATIENCE
from turnlane.errors import DirectoryLocked, NoSuchQueue, StorageFailed
from turnlane.node.node import Node
from turnlane.storage.directory import lock_directory
from turnlane.storage.disk_io import Disk
from turnlane.testing import FaultyDisk


def fill(node: Node, *, kind: str = "disk") -> None:
    node.create("orders", kind=kind).producer().publish(b"old")


def list_directories(data: Path) -> list[str]:
    return sorted(path.name for path in (data / "queues").iterdir())


def test_dropped_queue_whose_directory_cannot_be_deleted_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse_rename(_: Path) -> None:
        raise OSError(16, "busy")

    with Node(tmp_path) as node:
        fill(node)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", refuse_rename)
            node.drop("orders")
        assert len(list_directories(tmp_path)) == 1
        assert node.create("orders").end == 0
    caplog.clear()
    with Node(tmp_path) as node:
        assert list_directories(tmp_path) == ["orders"]
        assert node.queue("orders").end == 0
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("queues", [{}, {"orders": {}}], ids=["made anew", "configured"])
def test_dropped_queue_that_was_not_renamed_does_not_come_back(
    queues: dict[str, dict[str, object]], tmp_path: Path
) -> None:
    """The node ended, or its disk failed, between the two steps of the drop."""
    disk = FaultyDisk()
    with Node(tmp_path, disk=disk) as node:
        fill(node)
        disk.fail("rename", match=".dropped", times=2)
        with pytest.raises(StorageFailed, match="put"):
            node.drop("orders")
        with pytest.raises(NoSuchQueue):
            node.queue("orders")
        with pytest.raises(StorageFailed, match="put"):
            node.create("orders")
        assert list_directories(tmp_path) == ["orders"]
    with Node(tmp_path, queues) as node:
        assert node.create("orders").end == 0
        fill(node)
    with Node(tmp_path, queues) as node:
        assert node.create("orders").end == 1, "the new queue went, too"


def test_drop_can_be_repeated_once_the_disk_works(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with Node(tmp_path, disk=disk) as node:
        fill(node)
        disk.fail("rename", match=".dropped")
        with pytest.raises(StorageFailed):
            node.drop("orders")
        assert node.create("orders").end == 0
        assert list_directories(tmp_path) == ["orders"]
    with Node(tmp_path) as node:
        assert node.queue("orders").end == 0


def test_slow_deletion_does_not_block_other_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleting, over = threading.Event(), threading.Event()
    delete = shutil.rmtree

    def delete_slowly(path: Path) -> None:
        deleting.set()
        assert over.wait(PATIENCE)
        delete(path)

    monkeypatch.setattr(shutil, "rmtree", delete_slowly)
    with Node(tmp_path) as node, ThreadPoolExecutor(2) as threads:
        fill(node)
        dropping = threads.submit(node.drop, "orders")
        assert deleting.wait(PATIENCE)
        try:
            assert threads.submit(node.queues).result(PATIENCE) == {}
            assert threads.submit(node.create, "orders").result(PATIENCE).end == 0
        finally:
            over.set()
        dropping.result(PATIENCE)
        assert list_directories(tmp_path) == ["orders"]


def test_drop_of_a_memory_queue_keeps_a_directory_of_its_name(tmp_path: Path) -> None:
    with Node(tmp_path, {"orders": {}}) as node:
        node.queue("orders").producer(ack="persisted").publish(b"still wanted")
    with Node(tmp_path) as node:
        fill(node, kind="memory")
        node.drop("orders")
    with Node(tmp_path, {"orders": {}}) as node:
        assert node.queue("orders").end == 1


def make_unreadable_queue(data: Path) -> dict[str, bytes]:
    """Make a node with a queue that it cannot open; return the files of the queue."""
    with Node(data) as node:
        fill(node)
    path = data / "queues" / "orders"
    (path / "queue.json").write_text('{"format": 99}')
    return read_files(path)


def read_files(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir() if each.is_file()}


def test_dropped_queue_that_cannot_be_opened_is_kept_in_quarantine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = make_unreadable_queue(tmp_path)
    with Node(tmp_path) as node:
        with pytest.raises(StorageFailed, match="or drop the queue"):
            node.create("orders")
        node.drop("orders")
        with pytest.raises(NoSuchQueue):
            node.drop("orders")
        assert node.create("orders").end == 0
    assert read_files(tmp_path / "quarantine" / "orders") == files
    caplog.clear()
    with Node(tmp_path) as node:
        assert set(node.queues()) == {"orders"}
    assert "ERROR" not in {each.levelname for each in caplog.records}


def test_dropped_queue_that_is_a_file_is_kept_in_quarantine(tmp_path: Path) -> None:
    make_unreadable_queue(tmp_path)
    path = tmp_path / "queues" / "orders"
    path.rename(tmp_path / "away")
    path.write_bytes(b"no directory")
    with Node(tmp_path) as node:
        node.drop("orders")
    assert (tmp_path / "quarantine" / "orders").read_bytes() == b"no directory"
    with Node(tmp_path) as node:
        assert not node.queues()


@pytest.mark.parametrize(
    ("op", "match"), [("rename", "orders"), ("write", "queues.json")], ids=["move", "registry"]
)
def test_drop_of_a_queue_that_cannot_be_opened_can_be_repeated(
    op: str, match: str, tmp_path: Path
) -> None:
    files = make_unreadable_queue(tmp_path)
    disk = FaultyDisk()
    with Node(tmp_path, disk=disk) as node:
        disk.fail(op, match=match)
        with pytest.raises(StorageFailed):
            node.drop("orders")
        with pytest.raises(StorageFailed, match="could not be opened"):
            node.queue("orders")
        node.drop("orders")
    assert read_files(tmp_path / "quarantine" / "orders") == files
    with Node(tmp_path) as node:
        assert not node.queues()


def test_queue_that_a_tool_has_locked_is_not_moved(tmp_path: Path) -> None:
    make_unreadable_queue(tmp_path)
    path, disk = tmp_path / "queues" / "orders", Disk()
    with Node(tmp_path) as node:
        lock = lock_directory(path, disk)
        with pytest.raises(DirectoryLocked):
            node.drop("orders")
        assert path.exists()
        disk.close(lock)
        node.drop("orders")
    assert not path.exists()
