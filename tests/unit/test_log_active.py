"""Frames that are written in many groups: their order, and failures."""

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


def open_log(path: Path, disk: Disk, segment_size: int = 1 << 30) -> Log:
    return Log(
        path, disk, queue_id=ID, segment_size=segment_size, compression=CompressionPolicy("none")
    )


def build_values(first: int, end: int) -> list[bytes]:
    return [b"%06d" % number * 20 for number in range(first, end)]


def build_frames(count: int, each: int = 10) -> list[list[Block]]:
    """Return frames of two blocks each."""
    half = each // 2
    return [
        [
            block_of(build_values(at, at + half), timestamps=1),
            block_of(build_values(at + half, at + each), timestamps=1),
        ]
        for at in range(0, count * each, each)
    ]


def read_values(log: Log) -> list[bytes]:
    reader = log.create_reader()
    values: list[bytes] = []
    while isinstance(found := reader.read(len(values), 1000), StoredEvents):
        values += get_values([found.block])
    reader.close()
    return values


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write every frame on its own."""
    monkeypatch.setattr(log_module, "WRITE_BYTES", 1)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("segment_size", [1 << 30, 5_000])
def test_frames_written_one_by_one_are_all_there_in_order(
    tmp_path: Path, segment_size: int
) -> None:
    """This holds across segments, and after the log is opened again."""
    log = open_log(tmp_path, Disk(), segment_size)
    log.append_frames(0, build_frames(20))
    assert log.end == 200
    assert read_values(log) == build_values(0, 200)
    assert (len(log.list_segments()) > 1) is (segment_size < 1 << 30)
    log.close()
    log = open_log(tmp_path, Disk(), segment_size)
    assert read_values(log) == build_values(0, 200)
    log.close()


@pytest.mark.usefixtures("hasty")
def test_bytes_in_progress_count_towards_a_full_segment(tmp_path: Path) -> None:
    """Frames that are not written yet count too, so no segment exceeds its size."""
    log = open_log(tmp_path, Disk(), segment_size=5_000)
    log.append_frames(0, build_frames(20))
    assert max(chunk.bytes for chunk in log.list_segments()) <= 5_000
    log.close()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("nth", [2, 3, 7, 11])
def test_write_that_fails_half_way_leaves_whole_frames_and_can_be_repeated(
    tmp_path: Path, nth: int
) -> None:
    """The same call raises the error; only the frames before the failure are in the log."""
    disk = FaultyDisk()
    log = open_log(tmp_path, disk)
    disk.fail("write", nth=nth)
    with pytest.raises(OSError, match="Input/output error"):
        log.append_frames(0, build_frames(10))
    assert log.end == 10 * (nth - 2)  # the first write is the segment's schema
    assert read_values(log) == build_values(0, log.end)
    disk.clear()
    log.append_frames(0, build_frames(10))
    assert read_values(log) == build_values(0, 100)
    log.close()


class Counting(FaultyDisk):
    """Knows the highest byte that was written to a segment."""

    furthest = 0

    def write(self, fd: int, buffers: Buffers, at: int) -> None:
        super().write(fd, buffers, at)
        self.furthest = max(self.furthest, at + sum(memoryview(each).nbytes for each in buffers))


@pytest.mark.usefixtures("hasty")
def test_nothing_is_written_after_a_failed_write(tmp_path: Path) -> None:
    """Otherwise, after a kill at this moment, valid frames would follow a gap."""
    disk = Counting()
    log = open_log(tmp_path, disk)
    disk.delay("write", nth=4, seconds=0.05)
    disk.fail("write", nth=4)
    with pytest.raises(OSError, match="Input/output error"):
        log.append_frames(0, build_frames(10))
    assert log.end == 20
    assert disk.furthest == log.bytes
    log.close()
