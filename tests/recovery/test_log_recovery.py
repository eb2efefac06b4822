"""The log after damage: does it open, keep every sound event, and lose no unreadable byte?"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from turnlane.errors import NotAQueue
from turnlane.events import block_of, values_of
from turnlane.queues.contract import Outcome
from turnlane.queues.log.chunks import schema_frame
from turnlane.queues.log.compression import Compression, Mode
from turnlane.queues.log.files import Disk
from turnlane.queues.log.frames import FrameKind, checksum, encode
from turnlane.queues.log.log import Fault, Found, Log, SyncFailed
from turnlane.queues.log.position import Position
from turnlane.testing import FaultyDisk

QUEUE_ID = "ab" * 16
CHUNK_0 = "0000000000000000.chunk"


class WatchedDisk(Disk):
    """Remembers the most that was ever asked for at once."""

    def __init__(self) -> None:
        self.most = 0

    def read(self, fd: int, length: int, at: int) -> pa.Buffer:
        self.most = max(self.most, length)
        return super().read(fd, length, at)


def open_log(
    directory: Path,
    disk: Disk | None = None,
    *,
    hint: Position | None = None,
    floor: int = 0,
    chunk_size: int = 1 << 20,
    mode: Mode = "none",
    queue_id: str = QUEUE_ID,
    durable: bool = True,
) -> Log:
    return Log.open(
        directory,
        disk or Disk(),
        queue_id=queue_id,
        chunk_size=chunk_size,
        compression=Compression(mode),
        hint=hint,
        floor=floor,
        durable=durable,
    )


def values(first: int, count: int) -> list[bytes]:
    return [b"event %d" % offset for offset in range(first, first + count)]


def fill(log: Log, count: int, blocks: int = 1) -> None:
    for _ in range(blocks):
        log.append(log.end, block_of(values(log.end, count), timestamps=1))


def drained(log: Log, offset: int = 0) -> list[bytes | Fault | None]:
    reader = log.reader()
    found: list[bytes | Fault | None] = []
    while (result := reader.read(offset, 1000)) is not None:
        if isinstance(result, Found):
            found += values_of([result.block])
            offset += result.block.num_rows
        else:
            found.append(result)
            offset = result.end
    reader.close()
    return found


def three_frames(directory: Path) -> tuple[Path, list[int]]:
    """A chunk with three frames of ten events, and the bytes at which they begin and end."""
    log = open_log(directory)
    places = []
    for _ in range(3):
        fill(log, 10)
        places.append(log.position.byte)
    log.close()
    return directory / CHUNK_0, places


def kept(directory: Path) -> bytes:
    """All bytes in quarantine."""
    folder = directory / "quarantine"
    files = sorted(folder.iterdir()) if folder.exists() else []
    return b"".join(path.read_bytes() for path in files)


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 0x40
    path.write_bytes(bytes(data))


# Torn tails


def test_a_tail_torn_at_any_byte_is_kept_and_cut(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    path, (_, second, third) = three_frames(source)
    data = path.read_bytes()
    for size in range(second + 1, third):
        directory = tmp_path / str(size)
        shutil.copytree(source, directory)
        (directory / CHUNK_0).write_bytes(data[:size])
        log = open_log(directory, hint=Position(0, second, 20))
        assert (log.end, log.torn_bytes) == (20, size - second)
        assert kept(directory) == data[second:size]
        fill(log, 10)
        assert drained(log) == values(0, 30)
        log.close()
        assert (directory / CHUNK_0).read_bytes() == data
        shutil.rmtree(directory)


def test_a_tail_of_zeros_is_torn(tmp_path: Path) -> None:
    path, (*_, third) = three_frames(tmp_path)
    with path.open("ab") as file:
        file.write(bytes(10_000))
    log = open_log(tmp_path)
    assert (log.end, log.torn_bytes) == (30, 10_000)
    assert path.stat().st_size == third


def test_the_same_tail_torn_twice_is_kept_twice(tmp_path: Path) -> None:
    path, (_, second, third) = three_frames(tmp_path)
    torn = []
    for filler in (b"A", b"B"):
        with path.open("r+b") as file:
            file.truncate(second)
            file.seek(second)
            file.write(filler * 50)
        torn.append(filler * 50)
        open_log(tmp_path).close()
    assert kept(tmp_path) in (torn[0] + torn[1], torn[1] + torn[0])
    assert third > second


@pytest.mark.parametrize("size", [0, 1, 31, 40, 100])
def test_a_chunk_torn_at_its_birth_does_not_stop_the_log(tmp_path: Path, size: int) -> None:
    path, _ = three_frames(tmp_path)
    newborn = tmp_path / f"{30:016x}.chunk"
    newborn.write_bytes(path.read_bytes()[:size])
    log = open_log(tmp_path)
    assert log.end == 30
    assert kept(tmp_path) == path.read_bytes()[:size]
    fill(log, 10)
    assert drained(log) == values(0, 40)


def test_a_full_disk_does_not_keep_a_log_with_a_torn_tail_shut(tmp_path: Path) -> None:
    path, (*_, third) = three_frames(tmp_path)
    with path.open("ab") as file:
        file.write(b"torn" * 25)
    disk = FaultyDisk()
    disk.fill()
    log = open_log(tmp_path, disk)
    assert drained(log) == values(0, 30)
    with pytest.raises(OSError, match="No space"):
        fill(log, 10)
    assert path.stat().st_size == third + 100
    disk.unfill()
    fill(log, 10)
    assert drained(log) == values(0, 40)
    log.remove(0)
    assert b"torn" * 25 in kept(tmp_path)


# Corruption


@pytest.mark.parametrize("mode", ["none", "snappy"])
def test_a_flipped_bit_in_any_header_byte_costs_one_frame(tmp_path: Path, mode: Mode) -> None:
    log = open_log(tmp_path, mode=mode)
    fill(log, 10)
    start = log.position.byte
    fill(log, 10)
    stop = log.position.byte
    fill(log, 10)
    log.close()
    path = tmp_path / CHUNK_0
    sound = path.read_bytes()
    for byte in [*range(32), *range(32, stop - start - 8, 41)]:
        flip(path, start + byte)
        damaged = path.read_bytes()[start:stop]
        log = open_log(tmp_path)
        expected = [*values(0, 10), Fault(10, 20, Outcome.CORRUPT), *values(20, 10)]
        assert drained(log) == expected
        assert drained(log) == expected  # not copied a second time
        assert kept(tmp_path) == damaged
        log.close()
        path.write_bytes(sound)
        shutil.rmtree(tmp_path / "quarantine")


def test_a_corrupt_last_frame_is_a_torn_tail_and_its_offsets_are_missing(tmp_path: Path) -> None:
    path, (_, second, third) = three_frames(tmp_path)
    flip(path, third - 20)
    log = open_log(tmp_path, hint=Position(0, second, 20), floor=30)
    assert log.torn_bytes == third - second
    assert drained(log) == [*values(0, 20), Fault(20, 30, Outcome.MISSING)]


def test_a_header_that_claims_two_exabytes_allocates_nothing(tmp_path: Path) -> None:
    path, (first, *_) = three_frames(tmp_path)
    data = bytearray(path.read_bytes())
    data[first : first + 8] = (1 << 62 | 1 << 61).to_bytes(8, "little")
    data[first + 24 : first + 28] = checksum([bytes(data[first : first + 24])]).to_bytes(
        4, "little"
    )
    path.write_bytes(bytes(data))
    disk = WatchedDisk()
    log = open_log(tmp_path, disk, floor=30)
    assert drained(log) == [*values(0, 10), Fault(10, 30, Outcome.MISSING)]
    assert disk.most <= len(data)
    assert kept(tmp_path) == bytes(data[first:])


def test_a_torn_chunk_before_the_last_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 10, blocks=2)
    log.rotate()
    fill(log, 10)
    log.close()
    path = tmp_path / CHUNK_0
    data = path.read_bytes()
    path.write_bytes(data[:-50])
    log = open_log(tmp_path)
    assert drained(log) == [*values(0, 10), Fault(10, 20, Outcome.CORRUPT), *values(20, 10)]
    assert data.endswith(kept(tmp_path) + data[-50:])


def test_a_chunk_cut_by_somebody_else_while_it_is_open_is_read_as_far_as_it_goes(
    tmp_path: Path,
) -> None:
    path, (_, second, third) = three_frames(tmp_path)
    log = open_log(tmp_path)
    for size in (third - 8, second + 40, second + 8):
        os.truncate(path, size)
        assert drained(log) == [*values(0, 20), Fault(20, 30, Outcome.CORRUPT)]


def test_a_chunk_without_its_schema_is_moved_aside_whole(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 10)
    log.rotate()
    fill(log, 10)
    log.close()
    flip(tmp_path / CHUNK_0, 3)
    data = (tmp_path / CHUNK_0).read_bytes()
    log = open_log(tmp_path)
    assert drained(log) == [Fault(0, 10, Outcome.CORRUPT), *values(10, 10)]
    assert kept(tmp_path) == data


def test_a_last_chunk_without_its_schema_still_says_where_the_log_ends(tmp_path: Path) -> None:
    path, _ = three_frames(tmp_path)
    flip(path, 3)
    data = path.read_bytes()
    log = open_log(tmp_path)
    assert log.end == 30
    assert kept(tmp_path) == data
    fill(log, 10)
    assert drained(log) == [Fault(0, 30, Outcome.MISSING), *values(30, 10)]


def test_a_corrupt_frame_on_a_full_disk_is_kept_with_its_chunk(tmp_path: Path) -> None:
    path, (first, *_) = three_frames(tmp_path)
    flip(path, first + 40)
    data = path.read_bytes()
    disk = FaultyDisk()
    log = open_log(tmp_path, disk)
    log.rotate()
    disk.fill()
    assert drained(log) == [*values(0, 10), Fault(10, 20, Outcome.CORRUPT), *values(20, 10)]
    log.remove(0)
    assert kept(tmp_path) == data


# Hints, missing and foreign chunks, formats


@pytest.mark.parametrize(
    "hint",
    [
        None,
        Position(0, 0, 0),
        Position(0, 8, 5),
        Position(0, 1 << 40, 10_000),
        Position(0, 12, 10),
        Position(99, 0, 99),
        Position(1 << 63, 1 << 62, 1 << 61),
    ],
)
def test_a_hint_that_cannot_be_true_is_not_believed(tmp_path: Path, hint: Position | None) -> None:
    three_frames(tmp_path)
    log = open_log(tmp_path, hint=hint)
    assert (log.end, log.torn_bytes) == (30, 0)
    assert drained(log) == values(0, 30)


def test_data_behind_the_journal_is_missing_not_reused(tmp_path: Path) -> None:
    path, (_, second, third) = three_frames(tmp_path)
    os.truncate(path, second)
    log = open_log(tmp_path, hint=Position(0, third, 30), floor=30)
    assert log.end == 30
    fill(log, 5)
    assert drained(log) == [*values(0, 20), Fault(20, 30, Outcome.MISSING), *values(30, 5)]


def test_a_true_hint_spares_reading_what_lies_before_it(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 1000, blocks=50)
    hint = log.position
    log.close()
    disk = FaultyDisk()
    open_log(tmp_path, disk, hint=hint).close()
    assert disk.operations["read"] < 10


def test_a_missing_chunk_is_reported(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for _ in range(3):
        fill(log, 10)
        log.rotate()
    fill(log, 10)
    log.close()
    (tmp_path / f"{10:016x}.chunk").unlink()
    log = open_log(tmp_path)
    assert drained(log) == [*values(0, 10), Fault(10, 20, Outcome.MISSING), *values(20, 20)]
    (tmp_path / f"{20:016x}.chunk").unlink()
    assert drained(log, 20) == [Fault(20, 30, Outcome.MISSING), *values(30, 10)]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_foreign_chunk_is_put_aside(tmp_path: Path, which: int) -> None:
    log = open_log(tmp_path)
    for _ in range(2):
        fill(log, 10)
        log.rotate()
    fill(log, 10)
    log.close()
    name = f"{which * 10:016x}.chunk"
    other = tmp_path / "other"
    other.mkdir()
    log = open_log(other, queue_id="cd" * 16)
    log.append(which * 10, block_of([b"not ours"] * 10, timestamps=1))
    log.close()
    foreign = (other / f"{which * 10:016x}.chunk").read_bytes()
    (tmp_path / name).write_bytes(foreign)
    log = open_log(tmp_path, floor=30)
    found = drained(log)
    expected: list[bytes | Fault | None] = list(values(0, 30))
    expected[which * 10 : which * 10 + 10] = [Fault(which * 10, which * 10 + 10, Outcome.MISSING)]
    assert found == expected
    assert (tmp_path / (name + ".foreign")).read_bytes() == foreign
    assert not (tmp_path / name).exists()


def test_an_unknown_format_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    path, _ = three_frames(tmp_path)
    future = pa.schema([]).with_metadata({"turnlane.format": "9"})
    with (tmp_path / f"{30:016x}.chunk").open("wb") as file:
        for piece in encode(FrameKind.SCHEMA, 30, 0, [future.serialize()]):
            file.write(memoryview(piece))
    with path.open("ab") as file:
        file.write(b"torn")
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}
    with pytest.raises(NotAQueue, match="format 9"):
        open_log(tmp_path)
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == before


def test_columns_that_came_later_are_null_before(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 10)
    extra = block_of([b"x"]).append_column("level", pa.array([7]))
    log.append(10, extra)
    log.close()
    log = open_log(tmp_path)
    log.append(11, block_of([b"y"]))
    reader = log.reader()
    for offset, expected in ((0, None), (10, [7]), (11, [None])):
        found = reader.read(offset, 10)
        assert isinstance(found, Found)
        if expected is None:
            assert "level" not in found.block.schema.names
        else:
            assert found.block.column("level").to_pylist() == expected


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
    log = open_log(tmp_path, disk, chunk_size=1000)
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
            log.append_many(10, [[block] for block in blocks])
    log.append(10, block_of(values(10, 1), timestamps=1))
    log.close()
    log = open_log(tmp_path)
    assert log.torn_bytes == 0
    assert drained(log) == values(0, 11)


def test_appending_many_goes_on_where_a_full_disk_stopped_it(tmp_path: Path) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk, chunk_size=3000)
    blocks = [block_of(values(20 * n, 20), timestamps=1) for n in range(20)]
    disk.fill(after_bytes=8000)
    with pytest.raises(OSError, match="No space"):
        log.append_many(0, [[block] for block in blocks])
    assert 0 < log.end < 400
    disk.unfill()
    log.append_many(0, [[block] for block in blocks])
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
    reader = log.reader()
    assert isinstance(reader.read(total - 5, 2), Found)
    for refused in (log.sync, lambda: fill(log, 1), log.rotate):
        with pytest.raises(SyncFailed):
            refused()
    assert log.rescue() == []
    assert log.synced_end == log.end == total
    fill(log, 10)
    log.sync()
    assert drained(log) == values(0, total + 10)
    found = reader.read(total - 1, 5)
    assert isinstance(found, Found)
    log.close()
    log = open_log(tmp_path)
    assert drained(log) == values(0, total + 10)
    assert [span.first for span in log.chunks()] == sorted({0, 10 * synced})


def test_a_sync_that_fails_at_a_rotation_is_rescued_and_the_append_goes_on(
    tmp_path: Path,
) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk, chunk_size=1500)
    fill(log, 50)
    disk.fail("sync")
    with pytest.raises(SyncFailed):
        fill(log, 50)
    assert log.rescue() == []
    fill(log, 50)
    log.sync()
    assert drained(log) == values(0, 100)


def test_several_unsynced_chunks_are_all_rescued(tmp_path: Path) -> None:
    disk = FaultyDisk()
    log = open_log(tmp_path, disk, chunk_size=1500, durable=False)
    fill(log, 10, blocks=12)
    assert len(log.chunks()) > 2
    disk.fail("sync", nth=2)
    with pytest.raises(SyncFailed):
        log.sync()
    assert log.rescue() == []
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
    assert log.rescue() == [(lost, lost + 10)]
    assert kept(tmp_path) == damaged
    total = 10 * synced + 30
    expected = [
        *values(0, lost),
        Fault(lost, lost + 10, Outcome.MISSING),
        *values(lost + 10, total - lost - 10),
    ]
    assert drained(log) == expected


@pytest.mark.parametrize("operation", ["open", "write", "sync", "rename", "sync_directory"])
def test_a_rescue_that_fails_can_be_tried_again(tmp_path: Path, operation: str) -> None:
    disk = FaultyDisk()
    log = failed_sync(tmp_path, disk, 1)
    disk.fail(operation)
    with pytest.raises(OSError, match="Input/output"):
        log.rescue()
    assert drained(log) == values(0, 40)
    with pytest.raises(SyncFailed):
        log.sync()
    assert log.rescue() == []
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
        log.rescue()
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
    head = b"".join(bytes(memoryview(piece)) for piece in schema_frame(schema, 10, QUEUE_ID))
    (tmp_path / f"{10:016x}.chunk").write_bytes(head + frames)
    log = open_log(tmp_path)
    assert drained(log) == values(0, 30)


def follow(log: Log, total: int, problems: list[object]) -> None:
    """Read along with the writer, and note whatever is not as it was written."""
    reader, offset = log.reader(), 0
    while offset < total:
        result = reader.read(offset, 7)
        if isinstance(result, Found):
            if values_of([result.block]) != values(offset, result.block.num_rows):
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
            log.rescue()
        elif number % 10 == 0:
            log.sync()
    for thread in threads:
        thread.join()
    assert problems == []
    assert kept(tmp_path) == b""


# All of it, in any order


class LogMachine(RuleBasedStateMachine):
    """The log against a list, over appends, failures, crashes and removals."""

    @initialize(chunk_size=st.sampled_from([500, 2000, 1 << 20]))
    def start(self, chunk_size: int) -> None:
        import tempfile

        self.directory = Path(tempfile.mkdtemp())
        self.disk = FaultyDisk()
        self.chunk_size = chunk_size
        self.model: list[bytes] = []
        self.gone = 0
        self.hint: Position | None = None
        self.log = self.reopened()

    def reopened(self) -> Log:
        return open_log(
            self.directory, self.disk, chunk_size=self.chunk_size, hint=self.hint, mode="snappy"
        )

    @rule(count=st.integers(0, 60), keyed=st.booleans())
    def append(self, count: int, keyed: bool) -> None:
        new = values(len(self.model), count)
        self.log.append(len(self.model), block_of(new, keys=["k"] * count if keyed else None))
        self.model += new

    @rule(count=st.integers(1, 60), keep=st.integers(0, 2000))
    def append_fails(self, count: int, keep: int) -> None:
        self.disk.tear(keep_bytes=keep)
        end = self.log.end
        with pytest.raises(OSError, match="Input/output"):
            self.log.append(end, block_of(values(end, count), timestamps=1))
        self.disk.clear()
        assert self.log.end == end

    @rule()
    def sync(self) -> None:
        self.log.sync()
        self.hint = self.log.position

    @rule()
    def sync_fails(self) -> None:
        self.disk.fail("sync")
        try:
            self.log.sync()
        except SyncFailed:
            assert self.log.rescue() == []
        self.disk.clear()

    @rule(torn=st.binary(max_size=100))
    def crash(self, torn: bytes) -> None:
        self.log.close()
        chunks = sorted(self.directory.glob("*.chunk"))
        if chunks:
            with chunks[-1].open("ab") as file:
                file.write(torn)
        self.log = self.reopened()

    @rule()
    def remove_oldest(self) -> None:
        self.log.rotate()
        if len(self.log.chunks()) > 1:
            span = self.log.chunks()[0]
            self.log.remove(span.first)
            self.gone = span.end

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "log"):
            assert self.log.end == len(self.model)
            assert drained(self.log, self.gone) == self.model[self.gone :]

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.log.close()
            shutil.rmtree(self.directory)


TestLogMachine = LogMachine.TestCase
