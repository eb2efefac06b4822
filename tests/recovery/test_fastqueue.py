"""Directories of metrics-governor's FastQueue are read completely."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recovery.fastqueue_writer import Writer, get_only_fault, list_faults, read
from turnlane.errors import NotAQueue
from turnlane.storage import fastqueue
from turnlane.storage.disk_io import Disk
from turnlane.storage.fastqueue import FastQueueDirectory, FastQueueMetadata

# An undamaged directory.


def test_version_2_is_read(writer: Writer) -> None:
    for number in range(20):
        writer.put(b"block-%d " % number * 50)
    writer.metadata(entry_count=20, total_bytes=9000)
    assert read(writer.path) == writer.blocks
    assert list_faults(writer.path) == []
    assert FastQueueDirectory.open(writer.path).metadata == FastQueueMetadata(
        version=2,
        reader_offset=0,
        writer_offset=writer.position,
        name="fastqueue",
    )


def test_version_1_is_read(writer: Writer) -> None:
    writer.put(b"old", snappy=False)
    writer.metadata(version=1)
    metadata = FastQueueDirectory.open(writer.path).metadata
    assert metadata is not None
    assert metadata.version == 1
    assert read(writer.path) == [(0, b"old")]
    assert list_faults(writer.path) == []


def test_version_2_without_counts_is_read(writer: Writer) -> None:
    writer.metadata()
    assert read(writer.path) == []
    assert list_faults(writer.path) == []


def test_plain_and_snappy_blocks_can_be_mixed(writer: Writer) -> None:
    for number in range(40):
        writer.put(bytes([number]) * 300, snappy=number % 3 == 0)
    writer.metadata()
    assert read(writer.path) == writer.blocks
    assert list_faults(writer.path) == []


def test_snappy_data_written_by_go_is_read(writer: Writer) -> None:
    """Hand-written bytes: a literal, then a copy of 11 bytes at distance 1."""
    data = bytes([12, 0 << 2, ord("a"), (11 - 4) << 2 | 1, 1])
    writer.put_raw(struct.pack("<Q", len(data) | 1 << 63) + data, b"a" * 12)
    writer.metadata()
    assert read(writer.path) == [(0, b"a" * 12)]


def test_positions_continue_at_the_start_of_the_next_chunk(small_chunks: Writer) -> None:
    writer = small_chunks
    for number in range(30):
        writer.put(b"%03d" % number * 30, snappy=False)
    writer.metadata()
    chunks = sorted(path.name for path in writer.path.glob("0*"))
    assert chunks[:3] == ["0000000000000000", "0000000000000400", "0000000000000800"]
    assert read(writer.path) == writer.blocks
    assert list_faults(writer.path) == []


def test_source_is_the_name_of_the_chunk(small_chunks: Writer) -> None:
    small_chunks.put(b"a" * 1000, snappy=False)
    small_chunks.put(b"b" * 1000, snappy=False)
    small_chunks.metadata()
    (batch,) = FastQueueDirectory.open(small_chunks.path).blocks()
    assert batch.column("source").to_pylist() == ["0000000000000000", "0000000000000400"]
    assert batch.column("timestamp").null_count == 2


def test_block_larger_than_a_chunk_is_read(small_chunks: Writer) -> None:
    writer = small_chunks
    for size in (1500, 200, 200, 900, 3000, 10):
        writer.put(b"x" * size, snappy=False)
    writer.metadata()
    assert read(writer.path) == writer.blocks
    assert list_faults(writer.path) == []


def test_zeros_left_by_a_restart_after_a_large_block_are_skipped(
    small_chunks: Writer,
) -> None:
    writer = small_chunks
    writer.put(b"x" * 1500, snappy=False)
    writer.restart(writer.position)
    writer.put(b"after", snappy=False)
    writer.metadata()
    assert (writer.path / "0000000000000400").read_bytes()[:484] == bytes(484)
    assert read(writer.path) == writer.blocks
    assert list_faults(writer.path) == []


def test_batches_are_limited_by_events_and_bytes(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(10):
        writer.put(b"x" * 100)
    batches = FastQueueDirectory.open(writer.path).blocks(batch_events=4)
    assert [batch.num_rows for batch in batches] == [4, 4, 2]
    monkeypatch.setattr(fastqueue, "BATCH_BYTES", 250)
    batches = FastQueueDirectory.open(writer.path).blocks()
    assert [batch.num_rows for batch in batches] == [2, 2, 2, 2, 2]


# Where reading starts.


def test_reading_starts_at_the_reader_offset(small_chunks: Writer) -> None:
    writer = small_chunks
    for number in range(30):
        writer.put(b"%03d" % number * 30, snappy=False)
    for index in (1, 9, 10, 17, 29):
        writer.metadata(reader=writer.blocks[index][0])
        assert read(writer.path) == writer.blocks[index:]
        assert list_faults(writer.path) == []


def test_start_overrides_the_reader_offset(writer: Writer) -> None:
    for number in range(10):
        writer.put(b"%d" % number)
    writer.metadata(reader=writer.blocks[7][0])
    assert read(writer.path, start=0) == writer.blocks
    assert read(writer.path, start=writer.blocks[3][0]) == writer.blocks[3:]
    assert read(writer.path, start=writer.position) == []


def test_start_within_a_block_returns_the_whole_block(writer: Writer) -> None:
    for number in range(10):
        writer.put(b"%d" % number * 20, snappy=False)
    inside = writer.blocks[4][0] + 3
    writer.metadata(reader=inside)
    assert read(writer.path) == writer.blocks[4:]
    assert (
        get_only_fault(writer.path).message == f"reader_offset {inside} is within the block at 112"
    )


def test_reader_offset_at_the_end_leaves_nothing_unread(writer: Writer) -> None:
    writer.put(b"done")
    writer.metadata(reader=writer.position)
    assert read(writer.path) == []
    assert list_faults(writer.path) == []


# Metadata that is wrong.


def test_missing_metadata_makes_everything_unread(writer: Writer) -> None:
    writer.put(b"a")
    writer.put(b"b")
    assert FastQueueDirectory.open(writer.path).metadata is None
    assert read(writer.path) == writer.blocks
    fault = get_only_fault(writer.path)
    assert fault.file == writer.path / "fastqueue.meta"
    assert fault.message == "is missing; everything counts as unread"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"null",
        b"[1, 2]",
        b'{"name": "fastq',
        b"\x00\xff\xfe garbage",
        b"[" * 60_000,
        b'{"reader_offset": -5, "writer_offset": 10}',
        b'{"reader_offset": true, "writer_offset": 10}',
        b'{"reader_offset": 1e300, "writer_offset": 10}',
        b'{"reader_offset": "0", "writer_offset": 10}',
        b'{"reader_offset": 9223372036854775808, "writer_offset": 9223372036854775808}',
        b'{"reader_offset": ' + b"9" * 5000 + b', "writer_offset": 1}',
    ],
    ids=lambda content: repr(content[:24]),
)
def test_invalid_metadata_makes_everything_unread(writer: Writer, content: bytes) -> None:
    writer.put(b"a")
    (writer.path / "fastqueue.meta").write_bytes(content)
    assert FastQueueDirectory.open(writer.path).metadata is None
    assert read(writer.path) == [(0, b"a")]
    assert get_only_fault(writer.path).file == writer.path / "fastqueue.meta"


def test_writer_offset_ahead_of_the_data_is_a_fault(writer: Writer) -> None:
    writer.put(b"a" * 100, snappy=False)
    writer.metadata(writer=5000)
    assert read(writer.path) == writer.blocks
    fault = get_only_fault(writer.path)
    assert fault.message == "writer_offset 5000 is ahead of the data, which ends at 108"


def test_data_after_the_writer_offset_is_read_and_is_a_fault(writer: Writer) -> None:
    writer.put(b"a")
    writer.put(b"b")
    writer.metadata(writer=writer.blocks[1][0])
    assert read(writer.path) == writer.blocks
    assert "behind the data" in get_only_fault(writer.path).message


def test_reader_offset_ahead_of_the_data_returns_nothing_and_is_a_fault(writer: Writer) -> None:
    writer.put(b"a" * 100, snappy=False)
    writer.metadata(reader=4000, writer=4000)
    assert read(writer.path) == []
    assert read(writer.path, start=0) == writer.blocks
    assert [fault.message for fault in list_faults(writer.path)] == [
        "reader_offset 4000 is ahead of the data, which ends at 108",
        "writer_offset 4000 is ahead of the data, which ends at 108",
    ]


def test_reader_offset_without_its_chunk_is_a_fault(small_chunks: Writer) -> None:
    for _ in range(3):
        small_chunks.put(b"x" * 900, snappy=False)
    small_chunks.metadata(reader=0)
    (small_chunks.path / "0000000000000000").unlink()
    assert read(small_chunks.path) == small_chunks.blocks[1:]
    assert get_only_fault(small_chunks.path).message == "reader_offset 0 is in no chunk"


def test_contradictory_or_newer_metadata_is_a_fault(writer: Writer) -> None:
    writer.put(b"a" * 100, snappy=False)
    writer.metadata(reader=108, writer=0, version=7)
    assert [fault.message for fault in list_faults(writer.path)] == [
        "version 7 is not known; read as version 2",
        "reader_offset 108 is ahead of writer_offset 0",
        "writer_offset 0 is behind the data, which ends at 108",
    ]


# The directory itself.


class BadSector(Disk):
    def open(self, path: Path, *, create: bool = False, write: bool = True) -> int:
        assert not create
        assert not write
        if path.name == "0000000000000400":
            raise OSError(5, "Input/output error")
        return super().open(path, write=False)


def test_unreadable_chunk_is_a_fault_and_others_are_read(
    small_chunks: Writer,
) -> None:
    for _ in range(3):
        small_chunks.put(b"x" * 900, snappy=False)
    small_chunks.metadata()
    directory = FastQueueDirectory.open(small_chunks.path, disk=BadSector())
    assert sum(batch.num_rows for batch in directory.blocks()) == 2
    (fault,) = directory.faults()
    assert fault.message == "cannot be read: Input/output error"


def test_reading_changes_nothing_in_the_directory(writer: Writer) -> None:
    writer.put(b"a")
    writer.put_raw(b"torn")
    writer.metadata()

    def snapshot() -> dict[str, tuple[bytes, int]]:
        return {
            path.name: (path.read_bytes(), path.stat().st_mtime_ns)
            for path in writer.path.iterdir()
        }

    before = snapshot()
    read(writer.path)
    list_faults(writer.path)
    assert snapshot() == before


def test_fastqueue_directory_is_recognised_by_its_file_names(tmp_path: Path) -> None:
    only_metadata, only_chunk = tmp_path / "metadata", tmp_path / "chunk"
    only_metadata.mkdir()
    (only_metadata / "fastqueue.meta").touch()
    only_chunk.mkdir()
    (only_chunk / "0000000000000000").touch()
    assert FastQueueDirectory.is_fastqueue(only_metadata)
    assert FastQueueDirectory.is_fastqueue(str(only_chunk))
    assert read(only_metadata) == read(only_chunk) == []


def _empty(path: Path) -> None:
    path.mkdir()


def _a_file(path: Path) -> None:
    path.touch()


def _turnlane(path: Path) -> None:
    path.mkdir()
    (path / "0000000000000000.chunk").touch()
    (path / "queue.json").touch()


def _parent(path: Path) -> None:
    (path / "queue").mkdir(parents=True)
    (path / "queue" / "fastqueue.meta").touch()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "No such file or directory"),
        (_a_file, "Not a directory"),
        (_empty, "neither fastqueue.meta nor a chunk"),
        (_turnlane, "is a turnlane queue"),
        (_parent, "did you mean .*/queue"),
    ],
)
def test_other_directories_are_refused_with_a_reason(
    tmp_path: Path, make: Callable[[Path], None], why: str
) -> None:
    path = tmp_path / "other"
    make(path)
    assert not FastQueueDirectory.is_fastqueue(path)
    with pytest.raises(NotAQueue, match=why):
        FastQueueDirectory.open(path)
