"""The log on a disk that fails: is everything that it has taken still there afterwards?"""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.log_harness import (
    CHUNK_0,
    QUEUE_ID,
    drained,
    fill,
    flip,
    kept,
    open_log,
    three_frames,
    values,
)
from turnlane.events import block_of, get_values
from turnlane.ledger import Outcome
from turnlane.storage.log import Log, SyncFailed
from turnlane.storage.reader import StoredEvents, UnreadableRange
from turnlane.storage.segments import encode_schema_frame
from turnlane.testing import FaultyDisk

# Writes that fail


@pytest.mark.parametrize("room", [0, 1, 31, 200, 600])
def test_a_disk_that_fills_up_mid_append_leaves_the_log_as_it_was(
    tmp_path: Path, room: int
) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk)
    fill(log, 10)
    before = log.position
    disk.fill(after_bytes=room)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            fill(log, 100)
        assert log.position == before
        assert (tmp_path / CHUNK_0).stat().st_size == before.byte
    assert drained(log) == values(0, 10)
    disk.unfill()
    fill(log, 100)
    assert drained(log) == values(0, 110)


def test_a_disk_that_fills_up_at_a_rotation_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk, segment_size=1000)
    fill(log, 10)
    for room in (0, 100, 400):
        disk.fill(after_bytes=room)
        with pytest.raises(OSError, match="No space"):
            fill(log, 100)
        disk.unfill()
    fill(log, 100)
    log.close()
    log = open_log(tmp_path, disk)
    assert drained(log) == values(0, 110)


def test_a_write_that_can_not_be_cut_back_is_cut_before_the_next(tmp_path: Path) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk)
    fill(log, 10)
    disk.tear(keep_bytes=1500)
    disk.fail("truncate", times=2)
    blocks = [block_of(values(10 + 20 * n, 20), timestamps=1) for n in range(5)]
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            log.append_frames(10, [[block] for block in blocks])
    log.append(10, block_of(values(10, 1), timestamps=1))
    log.close()
    log = open_log(tmp_path)
    assert log.torn_bytes == 0
    assert drained(log) == values(0, 11)


def test_appending_many_goes_on_where_a_full_disk_stopped_it(tmp_path: Path) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk, segment_size=3000)
    blocks = [block_of(values(20 * n, 20), timestamps=1) for n in range(20)]
    disk.fill(after_bytes=8000)
    with pytest.raises(OSError, match="No space"):
        log.append_frames(0, [[block] for block in blocks])
    assert 0 < log.end < 400
    disk.unfill()
    log.append_frames(0, [[block] for block in blocks])
    assert drained(log) == values(0, 400)


@pytest.mark.parametrize("keep", [0, 10, 40, 300])
def test_a_process_killed_in_the_middle_of_a_write_loses_nothing_before_it(
    tmp_path: Path, keep: int
) -> None:
    child = os.fork()
    if not child:
        disk = FaultyDisk()
        log = open_log(tmp_path, disk)
        fill(log, 10, blocks=2)
        disk.tear(keep_bytes=keep, kill=True)
        fill(log, 10)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    log = open_log(tmp_path)
    assert (log.end, log.torn_bytes) == (20, keep)
    fill(log, 10)
    assert drained(log) == values(0, 30)


# Syncs that fail


def failed_sync(directory: Path, disk: FaultyDisk, synced: int) -> Log:
    log = open_log(directory, disk)
    if synced:
        fill(log, 10, blocks=synced)
        log.sync()
    fill(log, 10, blocks=3)
    disk.fail("sync")
    with pytest.raises(SyncFailed) as caught:
        log.sync()
    assert caught.value.errno == errno.EIO
    return log


@pytest.mark.parametrize("synced", [0, 1, 3])
def test_after_a_failed_sync_everything_is_written_again(tmp_path: Path, synced: int) -> None:
    disk = FaultyDisk()
    log = failed_sync(tmp_path, disk, synced)
    total = 10 * (synced + 3)
    reader = log.create_reader()
    assert isinstance(reader.read(total - 5, 2), StoredEvents)
    for refused in (log.sync, lambda: fill(log, 1), log.rotate):
        with pytest.raises(SyncFailed):
            refused()
    assert log.rewrite_after_failed_sync() == []
    assert log.synced_end == log.end == total
    fill(log, 10)
    log.sync()
    assert drained(log) == values(0, total + 10)
    found = reader.read(total - 1, 5)
    assert isinstance(found, StoredEvents)
    log.close()
    log = open_log(tmp_path)
    assert drained(log) == values(0, total + 10)
    assert [span.first for span in log.list_segments()] == sorted({0, 10 * synced})


def test_a_sync_that_fails_at_a_rotation_is_rescued_and_the_append_goes_on(
    tmp_path: Path,
) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk, segment_size=1500)
    fill(log, 50)
    disk.fail("sync")
    with pytest.raises(SyncFailed):
        fill(log, 50)
    assert log.rewrite_after_failed_sync() == []
    fill(log, 50)
    log.sync()
    assert drained(log) == values(0, 100)


def test_several_unsynced_chunks_are_all_rescued(tmp_path: Path) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk, segment_size=1500, durable=False)
    fill(log, 10, blocks=12)
    assert len(log.list_segments()) > 2
    disk.fail("sync", nth=2)
    with pytest.raises(SyncFailed):
        log.sync()
    assert log.rewrite_after_failed_sync() == []
    fill(log, 10)
    assert drained(log) == values(0, 130)


@pytest.mark.parametrize("byte", [5, 60])
@pytest.mark.parametrize("synced", [0, 2])
def test_what_can_not_be_read_back_is_reported_and_kept(
    tmp_path: Path, synced: int, byte: int
) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk)
    if synced:
        fill(log, 10, blocks=synced)
        log.sync()
    fill(log, 10)
    start = log.position.byte
    fill(log, 10)
    stop = log.position.byte
    fill(log, 10)
    disk.fail("sync")
    with pytest.raises(SyncFailed):
        log.sync()
    with (tmp_path / CHUNK_0).open("r+b") as file:
        file.seek(start + byte)
        file.write(b"?")
    damaged = (tmp_path / CHUNK_0).read_bytes()[start:stop]
    lost = 10 * synced + 10
    assert log.rewrite_after_failed_sync() == [(lost, lost + 10)]
    assert kept(tmp_path) == damaged
    total = 10 * synced + 30
    expected = [
        *values(0, lost),
        UnreadableRange(lost, lost + 10, Outcome.MISSING),
        *values(lost + 10, total - lost - 10),
    ]
    assert drained(log) == expected


@pytest.mark.parametrize("operation", ["open", "write", "sync", "rename", "sync_directory"])
def test_a_rescue_that_fails_can_be_tried_again(tmp_path: Path, operation: str) -> None:
    disk = FaultyDisk()
    log = failed_sync(tmp_path, disk, 1)
    disk.fail(operation)
    with pytest.raises(OSError, match="Input/output"):
        log.rewrite_after_failed_sync()
    assert drained(log) == values(0, 40)
    with pytest.raises(SyncFailed):
        log.sync()
    assert log.rewrite_after_failed_sync() == []
    fill(log, 10)
    assert drained(log) == values(0, 50)


@pytest.mark.parametrize("synced", [0, 1])
@pytest.mark.parametrize(
    ("operation", "nth"),
    [
        ("write", 1),
        ("write", 3),
        ("sync", 1),
        ("rename", 1),
        ("sync_directory", 1),
        ("truncate", 1),
        ("truncate", 2),
    ],
)
def test_a_crash_anywhere_in_a_rescue_loses_and_repeats_nothing(
    tmp_path: Path, operation: str, nth: int, synced: int
) -> None:
    child = os.fork()
    if not child:
        disk = FaultyDisk()
        log = failed_sync(tmp_path, disk, synced)
        disk.kill(operation, nth)
        log.rewrite_after_failed_sync()
        os._exit(0)  # not every rescue has a second truncate
    os.waitpid(child, 0)
    total = 10 * synced + 30
    log = open_log(tmp_path)
    assert log.end == total
    assert drained(log) == values(0, total)
    fill(log, 10)
    assert drained(log) == values(0, total + 10)
    assert not list(tmp_path.glob("*.new"))


def test_offsets_in_two_chunks_are_read_once_and_from_the_later(tmp_path: Path) -> None:
    path, (first, second, _) = three_frames(tmp_path)
    frames = path.read_bytes()[first:]
    flip(path, second + 50)
    schema = block_of([b""], timestamps=1).select(["value", "timestamp"]).schema
    head = b"".join(bytes(memoryview(piece)) for piece in encode_schema_frame(schema, 10, QUEUE_ID))
    (tmp_path / f"{10:016x}.chunk").write_bytes(head + frames)
    log = open_log(tmp_path)
    assert drained(log) == values(0, 30)


def follow(log: Log, total: int, problems: list[object]) -> None:
    """Read along with the writer, and note whatever is not as it was written."""
    reader, offset = log.create_reader(), 0
    while offset < total:
        result = reader.read(offset, 7)
        if isinstance(result, StoredEvents):
            if get_values([result.block]) != values(offset, result.block.num_rows):
                problems.append(offset)
            offset += result.block.num_rows
        elif result is not None:
            problems.append(result)
            offset = result.end


def test_readers_are_not_disturbed_by_a_rescue(tmp_path: Path) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk)
    total = 6000
    problems: list[object] = []

    threads = [threading.Thread(target=follow, args=(log, total, problems)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(total // 20):
        fill(log, 20)
        if number % 10 == 5:
            disk.fail("sync")
            with pytest.raises(SyncFailed):
                log.sync()
            log.rewrite_after_failed_sync()
        elif number % 10 == 0:
            log.sync()
    for thread in threads:
        thread.join()
    assert problems == []
    assert kept(tmp_path) == b""
