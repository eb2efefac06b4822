"""Segments: a scan finds every frame and every fault."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from turnlane.errors import NotAQueue
from turnlane.events import block_of
from turnlane.storage import segments
from turnlane.storage.disk_io import Disk
from turnlane.storage.frames import BufferLike, FrameKind, compute_checksum, encode_frame
from turnlane.storage.segments import (
    InvalidRegion,
    InvalidRegionKind,
    ValidFrame,
    encode_schema_frame,
    format_segment_name,
    list_segments,
    parse_segment_name,
    read_segment_schema,
    scan_segment,
)

QUEUE_ID = "ab" * 16
SCHEMA = pa.schema([pa.field("value", pa.binary())])
DISK = Disk()


def frame(first: int, count: int, size: int = 10) -> bytes:
    block = block_of([b"x" * size] * count).select(["value"])
    return joined(encode_frame(FrameKind.EVENTS, first, count, [block.serialize()]))


def joined(pieces: list[BufferLike]) -> bytes:
    return b"".join(bytes(memoryview(piece)) for piece in pieces)


SCHEMA_FRAME = joined(encode_schema_frame(SCHEMA, 0, QUEUE_ID))
A, B, C = frame(0, 10), frame(10, 10), frame(20, 10)
AT_A = len(SCHEMA_FRAME)
AT_B = AT_A + len(A)
AT_C = AT_B + len(B)


class WatchedDisk(Disk):
    """Remembers the largest read."""

    def __init__(self) -> None:
        self.most = 0

    def read(self, fd: int, length: int, at: int) -> pa.Buffer:
        self.most = max(self.most, length)
        return super().read(fd, length, at)


class Opened:
    """Opens files with given contents, and closes them at the end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.fds: list[int] = []

    def __call__(self, data: bytes) -> int:
        path = self._directory / f"{len(self.fds)}"
        path.write_bytes(data)
        self.fds.append(os.open(path, os.O_RDONLY))
        return self.fds[-1]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    files = Opened(tmp_path)
    yield files
    for fd in files.fds:
        os.close(fd)


def regions(
    fd: int, *, check_payload: bool = True, disk: Disk = DISK
) -> list[ValidFrame | InvalidRegion]:
    return list(scan_segment(disk, fd, AT_A, 0, check_payload=check_payload))


def flaws(fd: int, *, check_payload: bool = True, disk: Disk = DISK) -> list[InvalidRegion]:
    found = regions(fd, check_payload=check_payload, disk=disk)
    return [region for region in found if isinstance(region, InvalidRegion)]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]


@pytest.mark.parametrize("first", [0, 1_000_000, 2**64 - 1])
def test_segment_name_is_the_first_offset(first: int) -> None:
    assert parse_segment_name(format_segment_name(first)) == first


@pytest.mark.parametrize("name", ["journal.a", "0.chunk", "00000000000F4240.chunk", "x.chunk.new"])
def test_other_names_are_not_segments(name: str) -> None:
    assert parse_segment_name(name) is None


def test_segments_are_listed_in_order(tmp_path: Path) -> None:
    for name in (
        format_segment_name(300),
        format_segment_name(2),
        "lock",
        format_segment_name(9) + ".foreign",
    ):
        (tmp_path / name).touch()
    assert list_segments(tmp_path, DISK) == [2, 300]


def test_schema_is_read_without_the_metadata_of_the_log(opened: Opened) -> None:
    found = read_segment_schema(DISK, opened(SCHEMA_FRAME))
    assert found is not None
    assert found.schema.equals(SCHEMA, check_metadata=True)
    assert (found.queue_id, found.stored_size) == (QUEUE_ID, len(SCHEMA_FRAME))


def test_schema_of_many_columns_is_read_completely(opened: Opened) -> None:
    wide = pa.schema([pa.field(f"column_{number}", pa.string()) for number in range(500)])
    found = read_segment_schema(DISK, opened(joined(encode_schema_frame(wide, 0, QUEUE_ID))))
    assert found is not None
    assert found.schema.equals(wide)


@pytest.mark.parametrize("data", [b"", b"junk" * 100, A, SCHEMA_FRAME[:-8]])
def test_segment_without_schema_frame_returns_none(opened: Opened, data: bytes) -> None:
    assert read_segment_schema(DISK, opened(data)) is None


def test_unknown_format_is_refused_and_named(opened: Opened) -> None:
    future = SCHEMA.with_metadata({"turnlane.format": "2"})
    data = joined(encode_frame(FrameKind.SCHEMA, 0, 0, [future.serialize()]))
    with pytest.raises(NotAQueue, match="format 2"):
        read_segment_schema(DISK, opened(data))


def test_intact_segment_has_only_valid_frames(opened: Opened) -> None:
    found = regions(opened(SCHEMA_FRAME + A + B + C))
    assert [region.byte for region in found] == [AT_A, AT_B, AT_C]
    assert all(isinstance(region, ValidFrame) for region in found)


def test_corrupt_payload_costs_one_frame(opened: Opened) -> None:
    fd = opened(flipped(SCHEMA_FRAME + A + B + C, AT_B + 60))
    assert flaws(fd) == [InvalidRegion(InvalidRegionKind.CORRUPT_PAYLOAD, AT_B, len(B), 10, 20)]
    assert flaws(fd, check_payload=False) == []


@pytest.mark.parametrize("byte", range(28))
def test_corrupt_header_costs_one_frame(opened: Opened, byte: int) -> None:
    fd = opened(flipped(SCHEMA_FRAME + A + B + C, AT_B + byte))
    assert flaws(fd) == [InvalidRegion(InvalidRegionKind.CORRUPT_HEADER, AT_B, len(B), 10, 20)]


@pytest.mark.parametrize("keep", [1, 31, 32, 40, len(C) - 1])
def test_truncated_frame_is_torn(opened: Opened, keep: int) -> None:
    found = flaws(opened(SCHEMA_FRAME + A + B + C[:keep]))
    assert [(flaw.kind, flaw.byte, flaw.length, flaw.first) for flaw in found] == [
        (InvalidRegionKind.TORN, AT_C, keep, 20)
    ]


def test_zeros_at_the_end_are_torn(opened: Opened) -> None:
    found = flaws(opened(SCHEMA_FRAME + A + bytes(5000)))
    assert found == [InvalidRegion(InvalidRegionKind.TORN, AT_B, 5000, 10, None)]


def test_gap_and_repeat_are_reported(opened: Opened) -> None:
    fd = opened(SCHEMA_FRAME + A + C + A)
    assert flaws(fd) == [
        InvalidRegion(InvalidRegionKind.GAP, AT_B, 0, 10, 20),
        InvalidRegion(InvalidRegionKind.REPEAT, AT_B + len(C), len(A), 0, 10),
    ]


def test_false_length_allocates_nothing(opened: Opened) -> None:
    claim = encode_frame(FrameKind.EVENTS, 10, 10, [b""])[0]
    header = bytearray(memoryview(claim))
    header[:8] = (1 << 62 | 1 << 61).to_bytes(8, "little")
    header[24:28] = compute_checksum([bytes(header[:24])]).to_bytes(4, "little")
    disk = WatchedDisk()
    found = flaws(opened(SCHEMA_FRAME + A + bytes(header) + C), disk=disk)
    assert [flaw.kind for flaw in found] == [InvalidRegionKind.TORN]
    assert disk.most < 10_000


def test_search_finds_a_header_across_two_windows(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "WINDOW_BYTES", 64)
    for junk in range(8, 160, 8):
        fd = opened(SCHEMA_FRAME + A + bytes(junk) + B)
        assert flaws(fd) == [InvalidRegion(InvalidRegionKind.CORRUPT_HEADER, AT_B, junk, 10, 10)]
