"""The log on a failing disk: every appended event is still there afterwards."""

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
    append_events,
    build_values,
    flip_bit,
    open_log,
    read_all,
    read_quarantine,
    start_segment,
    write_three_frames,
)
from turnlane.events import block_of, get_values
from turnlane.ledger import Outcome
from turnlane.storage.log import Log, SyncFailed
from turnlane.storage.reader import StoredEvents, UnreadableRange
from turnlane.storage.segments import encode_schema_frame
from turnlane.testing import FaultyDisk

# Writes that fail


@pytest.mark.parametrize("room", [0, 1, 31, 200, 600])
def test_disk_full_during_an_append_leaves_the_log_unchanged(tmp_path: Path, room: int) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk)
    append_events(log, 10)
    before = log.position
    disk.fill(after_bytes=room)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            append_events(log, 100)
        assert log.position == before
        assert (tmp_path / CHUNK_0).stat().st_size == before.byte
    assert read_all(log) == build_values(0, 10)
    disk.unfill()
    append_events(log, 100)
    assert read_all(log) == build_values(0, 110)


def test_disk_full_at_a_rotation_leaves_the_log_unchanged(tmp_path: Path) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk, segment_size=1000)
    append_events(log, 10)
    for room in (0, 100, 400):
        disk.fill(after_bytes=room)
        with pytest.raises(OSError, match="No space"):
            append_events(log, 100)
        disk.unfill()
    append_events(log, 100)
    log.close()
    log = open_log(tmp_path, disk)
    assert read_all(log) == build_values(0, 110)


def test_failed_write_is_cut_off_before_the_next_one(tmp_path: Path) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk)
    append_events(log, 10)
    disk.tear(keep_bytes=1500)
    disk.fail("truncate", times=2)
    blocks = [block_of(build_values(10 + 20 * n, 20), timestamps=1) for n in range(5)]
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            log.append_frames(10, [[block] for block in blocks])
    log.append(10, block_of(build_values(10, 1), timestamps=1))
    log.close()
    log = open_log(tmp_path)
    assert log.torn_bytes == 0
    assert read_all(log) == build_values(0, 11)


def test_repeated_append_continues_after_a_full_disk(tmp_path: Path) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk, segment_size=3000)
    blocks = [block_of(build_values(20 * n, 20), timestamps=1) for n in range(20)]
    disk.fill(after_bytes=8000)
    with pytest.raises(OSError, match="No space"):
        log.append_frames(0, [[block] for block in blocks])
    assert 0 < log.end < 400
    disk.unfill()
    log.append_frames(0, [[block] for block in blocks])
    assert read_all(log) == build_values(0, 400)


@pytest.mark.parametrize("keep", [0, 10, 40, 300])
def test_kill_during_a_write_loses_nothing_before_it(tmp_path: Path, keep: int) -> None:
    child = os.fork()
    if not child:
        disk = FaultyDisk()
        log = open_log(tmp_path, disk)
        append_events(log, 10, blocks=2)
        disk.tear(keep_bytes=keep, kill=True)
        append_events(log, 10)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    log = open_log(tmp_path)
    assert (log.end, log.torn_bytes) == (20, keep)
    append_events(log, 10)
    assert read_all(log) == build_values(0, 30)


# Syncs that fail


def fail_sync(directory: Path, disk: FaultyDisk, synced: int) -> Log:
    log = open_log(directory, disk)
    if synced:
        append_events(log, 10, blocks=synced)
        log.sync()
    append_events(log, 10, blocks=3)
    disk.fail("sync")
    with pytest.raises(SyncFailed) as caught:
        log.sync()
    assert caught.value.errno == errno.EIO
    return log


@pytest.mark.parametrize("synced", [0, 1, 3])
def test_failed_sync_rewrites_all_unsynced_events(tmp_path: Path, synced: int) -> None:
    disk = FaultyDisk()
    log = fail_sync(tmp_path, disk, synced)
    total = 10 * (synced + 3)
    reader = log.create_reader()
    assert isinstance(reader.read(total - 5, 2), StoredEvents)
    for refused in (log.sync, lambda: append_events(log, 1), lambda: start_segment(log)):
        with pytest.raises(SyncFailed):
            refused()
    assert log.rewrite_after_failed_sync() == []
    assert log.synced_end == log.end == total
    append_events(log, 10)
    log.sync()
    assert read_all(log) == build_values(0, total + 10)
    found = reader.read(total - 1, 5)
    assert isinstance(found, StoredEvents)
    log.close()
    log = open_log(tmp_path)
    assert read_all(log) == build_values(0, total + 10)
    assert [span.first for span in log.list_segments()] == sorted({0, 10 * synced})


def test_append_continues_after_a_failed_sync_at_a_rotation(
    tmp_path: Path,
) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk, segment_size=1500)
    append_events(log, 50)
    disk.fail("sync")
    with pytest.raises(SyncFailed):
        append_events(log, 50)
    assert log.rewrite_after_failed_sync() == []
    append_events(log, 50)
    log.sync()
    assert read_all(log) == build_values(0, 100)


def test_several_unsynced_segments_are_all_rewritten(tmp_path: Path) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk, segment_size=1500, durable=False)
    append_events(log, 10, blocks=12)
    assert len(log.list_segments()) > 2
    disk.fail("sync", nth=2)
    with pytest.raises(SyncFailed):
        log.sync()
    assert log.rewrite_after_failed_sync() == []
    append_events(log, 10)
    assert read_all(log) == build_values(0, 130)


@pytest.mark.parametrize("byte", [5, 60])
@pytest.mark.parametrize("synced", [0, 2])
def test_events_that_cannot_be_read_back_are_reported_and_quarantined(
    tmp_path: Path, synced: int, byte: int
) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk)
    if synced:
        append_events(log, 10, blocks=synced)
        log.sync()
    append_events(log, 10)
    start = log.position.byte
    append_events(log, 10)
    stop = log.position.byte
    append_events(log, 10)
    disk.fail("sync")
    with pytest.raises(SyncFailed):
        log.sync()
    with (tmp_path / CHUNK_0).open("r+b") as file:
        file.seek(start + byte)
        file.write(b"?")
    damaged = (tmp_path / CHUNK_0).read_bytes()[start:stop]
    lost = 10 * synced + 10
    assert log.rewrite_after_failed_sync() == [(lost, lost + 10)]
    assert read_quarantine(tmp_path) == damaged
    total = 10 * synced + 30
    expected = [
        *build_values(0, lost),
        UnreadableRange(lost, lost + 10, Outcome.MISSING),
        *build_values(lost + 10, total - lost - 10),
    ]
    assert read_all(log) == expected


@pytest.mark.parametrize("operation", ["open", "write", "sync", "rename", "sync_directory"])
def test_failed_rewrite_can_be_repeated(tmp_path: Path, operation: str) -> None:
    disk = FaultyDisk()
    log = fail_sync(tmp_path, disk, 1)
    disk.fail(operation)
    with pytest.raises(OSError, match="Input/output"):
        log.rewrite_after_failed_sync()
    assert read_all(log) == build_values(0, 40)
    with pytest.raises(SyncFailed):
        log.sync()
    assert log.rewrite_after_failed_sync() == []
    append_events(log, 10)
    assert read_all(log) == build_values(0, 50)


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
def test_kill_during_a_rewrite_loses_and_repeats_nothing(
    tmp_path: Path, operation: str, nth: int, synced: int
) -> None:
    child = os.fork()
    if not child:
        disk = FaultyDisk()
        log = fail_sync(tmp_path, disk, synced)
        disk.kill(operation, nth)
        log.rewrite_after_failed_sync()
        os._exit(0)  # not every rewrite has a second truncate
    os.waitpid(child, 0)
    total = 10 * synced + 30
    log = open_log(tmp_path)
    assert log.end == total
    assert read_all(log) == build_values(0, total)
    append_events(log, 10)
    assert read_all(log) == build_values(0, total + 10)
    assert not list(tmp_path.glob("*.new"))


def test_offsets_in_two_segments_are_read_once_from_the_later(tmp_path: Path) -> None:
    path, (first, second, _) = write_three_frames(tmp_path)
    frames = path.read_bytes()[first:]
    flip_bit(path, second + 50)
    schema = block_of([b""], timestamps=1).select(["value", "timestamp"]).schema
    head = b"".join(bytes(memoryview(piece)) for piece in encode_schema_frame(schema, 10, QUEUE_ID))
    (tmp_path / f"{10:016x}.chunk").write_bytes(head + frames)
    log = open_log(tmp_path)
    assert read_all(log) == build_values(0, 30)


def follow_writer(log: Log, total: int, problems: list[object]) -> None:
    """Read while the writer writes, and note every difference from the written events."""
    reader, offset = log.create_reader(), 0
    while offset < total:
        result = reader.read(offset, 7)
        if isinstance(result, StoredEvents):
            if get_values([result.block]) != build_values(offset, result.block.num_rows):
                problems.append(offset)
            offset += result.block.num_rows
        elif result is not None:
            problems.append(result)
            offset = result.end


def test_rewrite_does_not_disturb_readers(tmp_path: Path) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk)
    total = 6000
    problems: list[object] = []

    threads = [
        threading.Thread(target=follow_writer, args=(log, total, problems)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for number in range(total // 20):
        append_events(log, 20)
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
    assert read_quarantine(tmp_path) == b""
