"""Do many frames with many writes keep the order, and leave the log whole when one fails?"""

from __future__ import annotations

from pathlib import Path

import pytest

from turnlane.events import Block, block_of, get_values
from turnlane.storage import log as log_module
from turnlane.storage.disk_io import Buffers, Disk
from turnlane.storage.encoder import CompressionPolicy
from turnlane.storage.log import Log
from turnlane.storage.reader import StoredEvents
from turnlane.testing import FaultyDisk

ID = "0" * 32


def opened(path: Path, disk: Disk, segment_size: int = 1 << 30) -> Log:
    return Log.open(
        path, disk, queue_id=ID, segment_size=segment_size, compression=CompressionPolicy("none")
    )


def numbered(first: int, end: int) -> list[bytes]:
    return [b"%06d" % number * 20 for number in range(first, end)]


def frames(count: int, each: int = 10) -> list[list[Block]]:
    """Frames of two blocks each."""
    half = each // 2
    return [
        [
            block_of(numbered(at, at + half), timestamps=1),
            block_of(numbered(at + half, at + each), timestamps=1),
        ]
        for at in range(0, count * each, each)
    ]


def stored(log: Log) -> list[bytes]:
    reader = log.create_reader()
    values: list[bytes] = []
    while isinstance(found := reader.read(len(values), 1000), StoredEvents):
        values += get_values([found.block])
    reader.close()
    return values


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every frame is written for itself."""
    monkeypatch.setattr(log_module, "WRITE_BYTES", 1)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("segment_size", [1 << 30, 5_000])
def test_frames_written_one_by_one_are_all_there_in_order(
    tmp_path: Path, segment_size: int
) -> None:
    """Also across chunks, and after opening the log again."""
    log = opened(tmp_path, Disk(), segment_size)
    log.append_frames(0, frames(20))
    assert log.end == 200
    assert stored(log) == numbered(0, 200)
    assert (len(log.list_segments()) > 1) is (segment_size < 1 << 30)
    log.close()
    log = opened(tmp_path, Disk(), segment_size)
    assert stored(log) == numbered(0, 200)
    log.close()


@pytest.mark.usefixtures("hasty")
def test_a_chunk_is_full_when_what_is_being_written_fills_it(tmp_path: Path) -> None:
    """Frames that the disk has not got yet count too: no chunk is larger than it may be."""
    log = opened(tmp_path, Disk(), segment_size=5_000)
    log.append_frames(0, frames(20))
    assert max(chunk.bytes for chunk in log.list_segments()) <= 5_000
    log.close()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("nth", [2, 3, 7, 11])
def test_a_write_that_fails_half_way_leaves_whole_frames_and_can_be_repeated(
    tmp_path: Path, nth: int
) -> None:
    """The error comes out of the same call; the frames before it are in, none after it."""
    disk = FaultyDisk()
    log = opened(tmp_path, disk)
    disk.fail("write", nth=nth)
    with pytest.raises(OSError, match="Input/output error"):
        log.append_frames(0, frames(10))
    assert log.end == 10 * (nth - 2)  # the first write is the chunk's schema
    assert stored(log) == numbered(0, log.end)
    disk.clear()
    log.append_frames(0, frames(10))
    assert stored(log) == numbered(0, 100)
    log.close()


class Counting(FaultyDisk):
    """Knows how far a chunk was ever written."""

    furthest = 0

    def write(self, fd: int, buffers: Buffers, at: int) -> None:
        super().write(fd, buffers, at)
        self.furthest = max(self.furthest, at + sum(memoryview(each).nbytes for each in buffers))


@pytest.mark.usefixtures("hasty")
def test_nothing_is_written_behind_a_write_that_failed(tmp_path: Path) -> None:
    """Though it was begun: were the process killed then, whole frames would follow on a gap."""
    disk = Counting()
    log = opened(tmp_path, disk)
    disk.delay("write", nth=4, seconds=0.05)
    disk.fail("write", nth=4)
    with pytest.raises(OSError, match="Input/output error"):
        log.append_frames(0, frames(10))
    assert log.end == 20
    assert disk.furthest == log.bytes
    log.close()
