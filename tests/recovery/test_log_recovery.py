"""The log after damage: it opens, keeps every intact event, and loses no unreadable byte."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.log_harness import (
    CHUNK_0,
    append_events,
    build_values,
    flip_bit,
    open_log,
    read_all,
    read_quarantine,
    start_segment,
    write_three_frames,
)
from turnlane.errors import NotAQueue
from turnlane.events import block_of
from turnlane.ledger import Outcome
from turnlane.storage.disk_io import Disk
from turnlane.storage.encoder import CompressionMode
from turnlane.storage.frames import FrameKind, LogPosition, compute_checksum, encode_frame
from turnlane.storage.log import Log, SyncFailed
from turnlane.storage.reader import StoredEvents, UnreadableRange
from turnlane.testing import FaultyDisk


class WatchedDisk(Disk):
    """Remembers the largest read."""

    def __init__(self) -> None:
        self.most = 0

    def read(self, fd: int, length: int, at: int) -> pa.Buffer:
        self.most = max(self.most, length)
        return super().read(fd, length, at)


# Torn tails


def test_torn_tail_is_copied_to_quarantine_and_cut(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    path, (_, second, third) = write_three_frames(source)
    data = path.read_bytes()
    for size in range(second + 1, third):
        directory = tmp_path / str(size)
        shutil.copytree(source, directory)
        (directory / CHUNK_0).write_bytes(data[:size])
        log = open_log(directory, hint=LogPosition(0, second, 20))
        assert (log.end, log.torn_bytes) == (20, size - second)
        assert read_quarantine(directory) == data[second:size]
        append_events(log, 10)
        assert read_all(log) == build_values(0, 30)
        log.close()
        assert (directory / CHUNK_0).read_bytes() == data
        shutil.rmtree(directory)


def test_tail_of_zeros_is_cut_as_torn(tmp_path: Path) -> None:
    path, (*_, third) = write_three_frames(tmp_path)
    with path.open("ab") as file:
        file.write(bytes(10_000))
    log = open_log(tmp_path)
    assert (log.end, log.torn_bytes) == (30, 10_000)
    assert path.stat().st_size == third


def test_tail_torn_twice_is_copied_twice(tmp_path: Path) -> None:
    path, (_, second, third) = write_three_frames(tmp_path)
    torn = []
    for filler in (b"A", b"B"):
        with path.open("r+b") as file:
            file.truncate(second)
            file.seek(second)
            file.write(filler * 50)
        torn.append(filler * 50)
        open_log(tmp_path).close()
    assert read_quarantine(tmp_path) in (torn[0] + torn[1], torn[1] + torn[0])
    assert third > second


@pytest.mark.parametrize("size", [0, 1, 31, 40, 100])
def test_segment_torn_at_its_creation_does_not_stop_the_log(tmp_path: Path, size: int) -> None:
    path, _ = write_three_frames(tmp_path)
    newborn = tmp_path / f"{30:016x}.chunk"
    newborn.write_bytes(path.read_bytes()[:size])
    log = open_log(tmp_path)
    assert log.end == 30
    assert read_quarantine(tmp_path) == path.read_bytes()[:size]
    append_events(log, 10)
    assert read_all(log) == build_values(0, 40)


def test_log_with_a_torn_tail_opens_on_a_full_disk(tmp_path: Path) -> None:
    path, (*_, third) = write_three_frames(tmp_path)
    with path.open("ab") as file:
        file.write(b"torn" * 25)
    disk = FaultyDisk()
    disk.fill()
    log = open_log(tmp_path, disk)
    assert read_all(log) == build_values(0, 30)
    with pytest.raises(OSError, match="No space"):
        append_events(log, 10)
    assert path.stat().st_size == third + 100
    disk.unfill()
    append_events(log, 10)
    assert read_all(log) == build_values(0, 40)
    log.remove_segment(0)
    assert b"torn" * 25 in read_quarantine(tmp_path)


# Corruption


@pytest.mark.parametrize("mode", ["none", "snappy"])
def test_flipped_bit_in_a_header_costs_one_frame(tmp_path: Path, mode: CompressionMode) -> None:
    log = open_log(tmp_path, mode=mode)
    append_events(log, 10)
    start = log.position.byte
    append_events(log, 10)
    stop = log.position.byte
    append_events(log, 10)
    log.close()
    path = tmp_path / CHUNK_0
    sound = path.read_bytes()
    for byte in [*range(32), *range(32, stop - start - 8, 41)]:
        flip_bit(path, start + byte)
        damaged = path.read_bytes()[start:stop]
        log = open_log(tmp_path)
        expected = [
            *build_values(0, 10),
            UnreadableRange(10, 20, Outcome.CORRUPT),
            *build_values(20, 10),
        ]
        assert read_all(log) == expected
        assert read_all(log) == expected  # it is not copied again
        assert read_quarantine(tmp_path) == damaged
        log.close()
        path.write_bytes(sound)
        shutil.rmtree(tmp_path / "quarantine")


def test_corrupt_last_frame_is_cut_and_its_offsets_are_missing(tmp_path: Path) -> None:
    path, (_, second, third) = write_three_frames(tmp_path)
    flip_bit(path, third - 20)
    log = open_log(tmp_path, hint=LogPosition(0, second, 20), floor=30)
    assert log.torn_bytes == third - second
    assert read_all(log) == [*build_values(0, 20), UnreadableRange(20, 30, Outcome.MISSING)]


def test_header_with_a_length_of_two_exabytes_allocates_nothing(tmp_path: Path) -> None:
    path, (first, *_) = write_three_frames(tmp_path)
    data = bytearray(path.read_bytes())
    data[first : first + 8] = (1 << 62 | 1 << 61).to_bytes(8, "little")
    data[first + 24 : first + 28] = compute_checksum([bytes(data[first : first + 24])]).to_bytes(
        4, "little"
    )
    path.write_bytes(bytes(data))
    disk = WatchedDisk()
    log = open_log(tmp_path, disk, floor=30)
    assert read_all(log) == [*build_values(0, 10), UnreadableRange(10, 30, Outcome.MISSING)]
    assert disk.most <= len(data)
    assert read_quarantine(tmp_path) == bytes(data[first:])


def test_torn_segment_before_the_last_is_read_up_to_the_tear(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_events(log, 10, blocks=2)
    start_segment(log)
    append_events(log, 10)
    log.close()
    path = tmp_path / CHUNK_0
    data = path.read_bytes()
    path.write_bytes(data[:-50])
    log = open_log(tmp_path)
    assert read_all(log) == [
        *build_values(0, 10),
        UnreadableRange(10, 20, Outcome.CORRUPT),
        *build_values(20, 10),
    ]
    assert data.endswith(read_quarantine(tmp_path) + data[-50:])


def test_segment_truncated_while_open_is_read_up_to_the_cut(
    tmp_path: Path,
) -> None:
    path, (_, second, third) = write_three_frames(tmp_path)
    log = open_log(tmp_path)
    for size in (third - 8, second + 40, second + 8):
        os.truncate(path, size)
        assert read_all(log) == [*build_values(0, 20), UnreadableRange(20, 30, Outcome.CORRUPT)]


def test_segment_without_schema_goes_to_quarantine(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_events(log, 10)
    start_segment(log)
    append_events(log, 10)
    log.close()
    flip_bit(tmp_path / CHUNK_0, 3)
    data = (tmp_path / CHUNK_0).read_bytes()
    log = open_log(tmp_path)
    assert read_all(log) == [UnreadableRange(0, 10, Outcome.CORRUPT), *build_values(10, 10)]
    assert read_quarantine(tmp_path) == data


def test_last_segment_without_schema_still_determines_the_end(tmp_path: Path) -> None:
    path, _ = write_three_frames(tmp_path)
    flip_bit(path, 3)
    data = path.read_bytes()
    log = open_log(tmp_path)
    assert log.end == 30
    assert read_quarantine(tmp_path) == data
    append_events(log, 10)
    assert read_all(log) == [UnreadableRange(0, 30, Outcome.MISSING), *build_values(30, 10)]


def test_corrupt_frame_on_a_full_disk_keeps_its_segment(tmp_path: Path) -> None:
    path, (first, *_) = write_three_frames(tmp_path)
    flip_bit(path, first + 40)
    data = path.read_bytes()
    disk = FaultyDisk()
    log = open_log(tmp_path, disk)
    start_segment(log)
    disk.fill()
    assert read_all(log) == [
        *build_values(0, 10),
        UnreadableRange(10, 20, Outcome.CORRUPT),
        *build_values(20, 10),
    ]
    log.remove_segment(0)
    assert read_quarantine(tmp_path) == data


# Hints, missing and foreign chunks, formats


@pytest.mark.parametrize(
    "hint",
    [
        None,
        LogPosition(0, 0, 0),
        LogPosition(0, 8, 5),
        LogPosition(0, 1 << 40, 10_000),
        LogPosition(0, 12, 10),
        LogPosition(99, 0, 99),
        LogPosition(1 << 63, 1 << 62, 1 << 61),
    ],
)
def test_impossible_hint_is_ignored(tmp_path: Path, hint: LogPosition | None) -> None:
    write_three_frames(tmp_path)
    log = open_log(tmp_path, hint=hint)
    assert (log.end, log.torn_bytes) == (30, 0)
    assert read_all(log) == build_values(0, 30)


def test_offsets_lost_behind_the_journal_are_missing_and_not_reused(tmp_path: Path) -> None:
    path, (_, second, third) = write_three_frames(tmp_path)
    os.truncate(path, second)
    log = open_log(tmp_path, hint=LogPosition(0, third, 30), floor=30)
    assert log.end == 30
    append_events(log, 5)
    assert read_all(log) == [
        *build_values(0, 20),
        UnreadableRange(20, 30, Outcome.MISSING),
        *build_values(30, 5),
    ]


def test_valid_hint_skips_the_frames_before_it(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_events(log, 1000, blocks=50)
    hint = log.position
    log.close()
    disk = FaultyDisk()
    open_log(tmp_path, disk, hint=hint).close()
    assert disk.operations["read"] < 10


def test_missing_segment_is_reported(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for _ in range(3):
        append_events(log, 10)
        start_segment(log)
    append_events(log, 10)
    log.close()
    (tmp_path / f"{10:016x}.chunk").unlink()
    log = open_log(tmp_path)
    assert read_all(log) == [
        *build_values(0, 10),
        UnreadableRange(10, 20, Outcome.MISSING),
        *build_values(20, 20),
    ]
    (tmp_path / f"{20:016x}.chunk").unlink()
    assert read_all(log, 20) == [UnreadableRange(20, 30, Outcome.MISSING), *build_values(30, 10)]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_foreign_segment_is_set_aside(tmp_path: Path, which: int) -> None:
    log = open_log(tmp_path)
    for _ in range(2):
        append_events(log, 10)
        start_segment(log)
    append_events(log, 10)
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
    found = read_all(log)
    expected: list[bytes | UnreadableRange | None] = list(build_values(0, 30))
    expected[which * 10 : which * 10 + 10] = [
        UnreadableRange(which * 10, which * 10 + 10, Outcome.MISSING)
    ]
    assert found == expected
    assert (tmp_path / (name + ".foreign")).read_bytes() == foreign
    assert not (tmp_path / name).exists()


def test_unknown_format_is_refused_before_any_change(tmp_path: Path) -> None:
    path, _ = write_three_frames(tmp_path)
    future = pa.schema([]).with_metadata({"turnlane.format": "9"})
    with (tmp_path / f"{30:016x}.chunk").open("wb") as file:
        for piece in encode_frame(FrameKind.SCHEMA, 30, 0, [future.serialize()]):
            file.write(memoryview(piece))
    with path.open("ab") as file:
        file.write(b"torn")
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}
    with pytest.raises(NotAQueue, match="format 9"):
        open_log(tmp_path)
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == before


def test_column_added_later_is_null_in_earlier_events(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_events(log, 10)
    extra = block_of([b"x"]).append_column("level", pa.array([7]))
    log.append(10, extra)
    log.close()
    log = open_log(tmp_path)
    log.append(11, block_of([b"y"]))
    reader = log.create_reader()
    for offset, expected in ((0, None), (10, [7]), (11, [None])):
        found = reader.read(offset, 10)
        assert isinstance(found, StoredEvents)
        if expected is None:
            assert "level" not in found.block.schema.names
        else:
            assert found.block.column("level").to_pylist() == expected


# Everything, in any order


class LogMachine(RuleBasedStateMachine):
    """Compares the log with a list, over appends, failures, crashes and removals."""

    @initialize(segment_size=st.sampled_from([500, 2000, 1 << 20]))
    def start(self, segment_size: int) -> None:
        import tempfile

        self.directory = Path(tempfile.mkdtemp())
        self.disk = FaultyDisk()
        self.segment_size = segment_size
        self.model: list[bytes] = []
        self.gone = 0
        self.hint: LogPosition | None = None
        self.log = self.reopened()

    def reopened(self) -> Log:
        return open_log(
            self.directory, self.disk, segment_size=self.segment_size, hint=self.hint, mode="snappy"
        )

    @rule(count=st.integers(0, 60), keyed=st.booleans())
    def append(self, count: int, keyed: bool) -> None:
        new = build_values(len(self.model), count)
        self.log.append(len(self.model), block_of(new, keys=["k"] * count if keyed else None))
        self.model += new

    @rule(count=st.integers(1, 60), keep=st.integers(0, 2000))
    def append_fails(self, count: int, keep: int) -> None:
        self.disk.tear(keep_bytes=keep)
        end = self.log.end
        with pytest.raises(OSError, match="Input/output"):
            self.log.append(end, block_of(build_values(end, count), timestamps=1))
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
            assert self.log.rewrite_after_failed_sync() == []
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
        start_segment(self.log)
        if len(self.log.list_segments()) > 1:
            span = self.log.list_segments()[0]
            self.log.remove_segment(span.first)
            self.gone = span.end

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "log"):
            assert self.log.end == len(self.model)
            assert read_all(self.log, self.gone) == self.model[self.gone :]

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.log.close()
            shutil.rmtree(self.directory)


TestLogMachine = LogMachine.TestCase
