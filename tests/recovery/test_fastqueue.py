"""Are directories that metrics-governor's FastQueue left behind read in full, whatever happened?

The writer below is made from the format's description alone and shares nothing with the reader.
"""

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import cramjam
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turnlane.errors import NotAQueue
from turnlane.events import BASE_SCHEMA
from turnlane.queues.log import fastqueue, fastqueue_chunk
from turnlane.queues.log.fastqueue import FastQueueDirectory, FastQueueMetadata, Fault
from turnlane.queues.log.files import Disk

Block = tuple[int, bytes]


def framed(value: bytes, *, snappy: bool) -> bytes:
    data = bytes(cramjam.snappy.compress_raw(value)) if snappy else value
    return struct.pack("<Q", len(data) | snappy << 63) + data


class Writer:
    """Writes as FastQueue does: chunks named by position, rotation, JSON metadata."""

    def __init__(self, path: Path, *, chunk_size: int = 1 << 20) -> None:
        self.path = path
        self.chunk_size = chunk_size
        self.position = 0
        self.blocks: list[Block] = []
        self._file: Path | None = None

    def chunk(self, position: int) -> Path:
        return self.path / f"{position // self.chunk_size * self.chunk_size:016x}"

    def put(self, value: bytes, *, snappy: bool = True) -> int:
        return self.put_raw(framed(value, snappy=snappy), value)

    def put_raw(self, data: bytes, value: bytes | None = None) -> int:
        """Append bytes; ``value`` is what a reader should make of them, if anything."""
        if self._file and self.position % self.chunk_size + len(data) > self.chunk_size:
            self.position = (self.position // self.chunk_size + 1) * self.chunk_size
            self._file = None
        self._file = self._file or self.chunk(self.position)
        with self._file.open("ab") as file:
            file.write(data)
        position = self.position
        self.position += len(data)
        if value is not None:
            self.blocks.append((position, value))
        return position

    def restart(self, position: int) -> None:
        """Go on as FastQueue does after a crash: where the metadata says, whatever is there."""
        self._file = self.chunk(position)
        with self._file.open("ab") as file:
            file.truncate(position % self.chunk_size)
        self.position = position

    def metadata(
        self, *, reader: int = 0, writer: int | None = None, version: int = 2, **more: int
    ) -> None:
        fields = {
            "name": "fastqueue",
            "reader_offset": reader,
            "writer_offset": self.position if writer is None else writer,
            "version": version,
            **more,
        }
        (self.path / "fastqueue.meta").write_text(json.dumps(fields, indent=2))


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path)


@pytest.fixture
def small_chunks(tmp_path: Path) -> Writer:
    return Writer(tmp_path, chunk_size=1024)


def read(path: Path, start: int | None = None, batch_events: int = 1024) -> list[Block]:
    found = []
    for batch in FastQueueDirectory.open(path).blocks(start=start, batch_events=batch_events):
        assert batch.schema.equals(BASE_SCHEMA)
        assert batch.num_rows <= batch_events
        found += [
            (int(dict(row["headers"])["fastqueue.position"]), row["value"])
            for row in batch.to_pylist()
        ]
    return found


def faults(path: Path) -> list[Fault]:
    return list(FastQueueDirectory.open(path).faults())


def the_fault(path: Path) -> Fault:
    (fault,) = faults(path)
    return fault


# What a sound directory gives.


def test_version_2_is_read(writer: Writer) -> None:
    for number in range(20):
        writer.put(b"block-%d " % number * 50)
    writer.metadata(entry_count=20, total_bytes=9000)
    assert read(writer.path) == writer.blocks
    assert faults(writer.path) == []
    assert FastQueueDirectory.open(writer.path).metadata == FastQueueMetadata(
        version=2,
        reader_offset=0,
        writer_offset=writer.position,
        entry_count=20,
        total_bytes=9000,
        name="fastqueue",
    )


def test_version_1_is_read_and_has_no_counts(writer: Writer) -> None:
    writer.put(b"old", snappy=False)
    writer.metadata(version=1)
    metadata = FastQueueDirectory.open(writer.path).metadata
    assert metadata is not None
    assert (metadata.version, metadata.entry_count, metadata.total_bytes) == (1, None, None)
    assert read(writer.path) == [(0, b"old")]
    assert faults(writer.path) == []


def test_version_2_leaves_counts_of_zero_out(writer: Writer) -> None:
    writer.metadata()
    metadata = FastQueueDirectory.open(writer.path).metadata
    assert metadata is not None
    assert (metadata.entry_count, metadata.total_bytes) == (0, 0)
    assert read(writer.path) == []
    assert faults(writer.path) == []


def test_plain_and_snappy_blocks_may_follow_each_other(writer: Writer) -> None:
    for number in range(40):
        writer.put(bytes([number]) * 300, snappy=number % 3 == 0)
    writer.metadata()
    assert read(writer.path) == writer.blocks
    assert faults(writer.path) == []


def test_snappy_as_go_writes_it(writer: Writer) -> None:
    """Bytes by hand: a literal, then a copy of 11 bytes from 1 back, in the raw format."""
    data = bytes([12, 0 << 2, ord("a"), (11 - 4) << 2 | 1, 1])
    writer.put_raw(struct.pack("<Q", len(data) | 1 << 63) + data, b"a" * 12)
    writer.metadata()
    assert read(writer.path) == [(0, b"a" * 12)]


def test_positions_jump_from_chunk_to_chunk(small_chunks: Writer) -> None:
    writer = small_chunks
    for number in range(30):
        writer.put(b"%03d" % number * 30, snappy=False)
    writer.metadata()
    chunks = sorted(path.name for path in writer.path.glob("0*"))
    assert chunks[:3] == ["0000000000000000", "0000000000000400", "0000000000000800"]
    assert read(writer.path) == writer.blocks
    assert faults(writer.path) == []


def test_source_names_the_chunk(small_chunks: Writer) -> None:
    small_chunks.put(b"a" * 1000, snappy=False)
    small_chunks.put(b"b" * 1000, snappy=False)
    small_chunks.metadata()
    (batch,) = FastQueueDirectory.open(small_chunks.path).blocks()
    assert batch.column("source").to_pylist() == ["0000000000000000", "0000000000000400"]
    assert batch.column("timestamp").null_count == 2


def test_a_block_larger_than_a_chunk_runs_on(small_chunks: Writer) -> None:
    writer = small_chunks
    for size in (1500, 200, 200, 900, 3000, 10):
        writer.put(b"x" * size, snappy=False)
    writer.metadata()
    assert read(writer.path) == writer.blocks
    assert faults(writer.path) == []


def test_a_restart_after_a_large_block_leaves_zeros_that_are_no_blocks(
    small_chunks: Writer,
) -> None:
    writer = small_chunks
    writer.put(b"x" * 1500, snappy=False)
    writer.restart(writer.position)
    writer.put(b"after", snappy=False)
    writer.metadata()
    assert (writer.path / "0000000000000400").read_bytes()[:484] == bytes(484)
    assert read(writer.path) == writer.blocks
    assert faults(writer.path) == []


def test_batches_are_bounded_by_events_and_by_bytes(
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
        assert faults(writer.path) == []


def test_a_start_overrides_the_reader_offset(writer: Writer) -> None:
    for number in range(10):
        writer.put(b"%d" % number)
    writer.metadata(reader=writer.blocks[7][0])
    assert read(writer.path, start=0) == writer.blocks
    assert read(writer.path, start=writer.blocks[3][0]) == writer.blocks[3:]
    assert read(writer.path, start=writer.position) == []


def test_a_start_within_a_block_gives_the_whole_block(writer: Writer) -> None:
    for number in range(10):
        writer.put(b"%d" % number * 20, snappy=False)
    inside = writer.blocks[4][0] + 3
    writer.metadata(reader=inside)
    assert read(writer.path) == writer.blocks[4:]
    assert the_fault(writer.path).what == f"reader_offset {inside} lies within the block at 112"


def test_a_reader_at_the_end_has_nothing_unread(writer: Writer) -> None:
    writer.put(b"done")
    writer.metadata(reader=writer.position)
    assert read(writer.path) == []
    assert faults(writer.path) == []


# Metadata that cannot be relied upon.


def test_without_metadata_everything_is_unread(writer: Writer) -> None:
    writer.put(b"a")
    writer.put(b"b")
    assert FastQueueDirectory.open(writer.path).metadata is None
    assert read(writer.path) == writer.blocks
    fault = the_fault(writer.path)
    assert fault.file == writer.path / "fastqueue.meta"
    assert fault.what == "missing; everything counts as unread"


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
def test_with_unusable_metadata_everything_is_unread(writer: Writer, content: bytes) -> None:
    writer.put(b"a")
    (writer.path / "fastqueue.meta").write_bytes(content)
    assert FastQueueDirectory.open(writer.path).metadata is None
    assert read(writer.path) == [(0, b"a")]
    assert the_fault(writer.path).file == writer.path / "fastqueue.meta"


def test_a_writer_offset_ahead_of_the_data_is_told(writer: Writer) -> None:
    writer.put(b"a" * 100, snappy=False)
    writer.metadata(writer=5000)
    assert read(writer.path) == writer.blocks
    fault = the_fault(writer.path)
    assert fault.what == "writer_offset 5000 is ahead of the data, which ends at 108"


def test_data_beyond_the_writer_offset_is_read_and_told(writer: Writer) -> None:
    writer.put(b"a")
    writer.put(b"b")
    writer.metadata(writer=writer.blocks[1][0])
    assert read(writer.path) == writer.blocks
    assert "behind the data" in the_fault(writer.path).what


def test_a_reader_offset_ahead_of_the_data_gives_nothing_and_is_told(writer: Writer) -> None:
    writer.put(b"a" * 100, snappy=False)
    writer.metadata(reader=4000, writer=4000)
    assert read(writer.path) == []
    assert read(writer.path, start=0) == writer.blocks
    assert [fault.what for fault in faults(writer.path)] == [
        "reader_offset 4000 is ahead of the data, which ends at 108",
        "writer_offset 4000 is ahead of the data, which ends at 108",
    ]


def test_a_reader_offset_whose_chunk_is_gone_is_told(small_chunks: Writer) -> None:
    for _ in range(3):
        small_chunks.put(b"x" * 900, snappy=False)
    small_chunks.metadata(reader=0)
    (small_chunks.path / "0000000000000000").unlink()
    assert read(small_chunks.path) == small_chunks.blocks[1:]
    assert the_fault(small_chunks.path).what == "reader_offset 0 lies in no chunk"


def test_metadata_that_contradicts_itself_or_is_of_the_future_is_told(writer: Writer) -> None:
    writer.put(b"a" * 100, snappy=False)
    writer.metadata(reader=108, writer=0, version=7)
    assert [fault.what for fault in faults(writer.path)] == [
        "version 7 is not known; read as version 2",
        "reader_offset 108 is ahead of writer_offset 0",
        "writer_offset 0 is behind the data, which ends at 108",
    ]


# Damage in the chunks.


def test_a_torn_last_block_is_told_and_the_rest_is_read(writer: Writer) -> None:
    for number in range(5):
        writer.put(b"%d" % number * 50, snappy=False)
    chunk, last = writer.chunk(0), writer.blocks[4][0]
    content = chunk.read_bytes()
    for size in range(last + 1, len(content)):
        chunk.write_bytes(content[:size])
        writer.metadata(writer=size)
        assert read(writer.path) == writer.blocks[:4]
        fault = the_fault(writer.path)
        assert (fault.file, fault.byte) == (chunk, last)
        assert fault.what.startswith("torn")


@pytest.mark.parametrize("word", [1 << 61, (1 << 62) - 1, 1 << 63 | 1 << 61, 1 << 40, 1 << 62])
def test_a_corrupt_length_allocates_nothing_and_costs_only_its_chunk(
    small_chunks: Writer, word: int
) -> None:
    writer = small_chunks
    for number in range(12):
        writer.put(b"%d" % (number % 10) * 200, snappy=False)
    writer.metadata()
    per_chunk = 4
    bad = writer.blocks[per_chunk + 1][0]
    content = bytearray(writer.chunk(bad).read_bytes())
    struct.pack_into("<Q", content, bad % 1024, word)
    writer.chunk(bad).write_bytes(content)
    tracemalloc.start()
    try:
        assert read(writer.path) == writer.blocks[: per_chunk + 1] + writer.blocks[2 * per_chunk :]
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
    fault = the_fault(writer.path)
    assert (fault.file, fault.byte) == (writer.chunk(bad), bad % 1024)
    assert "corrupt length" in fault.what


def test_a_corrupt_length_among_what_was_read_does_not_hide_what_was_not(writer: Writer) -> None:
    for number in range(10):
        writer.put(b"%d" % number * 50, snappy=False)
    content = bytearray(writer.chunk(0).read_bytes())
    struct.pack_into("<Q", content, writer.blocks[2][0], 1 << 61)
    writer.chunk(0).write_bytes(content)
    writer.metadata(reader=writer.blocks[6][0])
    assert read(writer.path) == writer.blocks[6:]
    assert read(writer.path, start=0) == writer.blocks[:2] + writer.blocks[6:]
    assert the_fault(writer.path).byte == writer.blocks[2][0]


def test_a_block_that_does_not_decompress_is_skipped_alone(writer: Writer) -> None:
    writer.put(b"before")
    bad = writer.put_raw(struct.pack("<Q", 4 | 1 << 63) + b"\x20\xff\xff\xff")
    writer.put(b"after")
    writer.metadata()
    assert read(writer.path) == writer.blocks
    fault = the_fault(writer.path)
    assert fault.byte == bad
    assert "cannot be decompressed" in fault.what


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff\x0f\x00", b"\x80\x80\x80\x80\x02\x00", b"\x80\x80\x80\x80\x80\x80", b""],
)
def test_snappy_data_that_claims_too_much_is_not_believed(writer: Writer, data: bytes) -> None:
    writer.put_raw(struct.pack("<Q", len(data) | 1 << 63) + data)
    writer.put(b"after")
    writer.metadata()
    assert read(writer.path) == writer.blocks
    assert "length that cannot be" in the_fault(writer.path).what


def test_the_best_that_snappy_can_do_is_believed(writer: Writer) -> None:
    writer.put(bytes(1 << 22))
    writer.metadata()
    assert read(writer.path) == writer.blocks


def test_a_block_larger_than_an_event_is_told_and_passed_over(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastqueue_chunk, "MAX_BLOCK_BYTES", 1000)
    writer.put_raw(framed(b"x" * 1001, snappy=False))
    writer.put(b"after", snappy=False)
    writer.metadata()
    assert read(writer.path) == writer.blocks
    assert "larger than an event" in the_fault(writer.path).what


# Zeros.


@pytest.mark.parametrize("count", [1, 2, 30])
def test_zero_length_blocks_are_empty_events(writer: Writer, count: int) -> None:
    writer.put(b"before", snappy=False)
    for _ in range(count):
        writer.put(b"", snappy=False)
    writer.put(b"", snappy=True)
    writer.put(b"after", snappy=False)
    writer.put(b"", snappy=False)
    writer.metadata()
    assert read(writer.path) == writer.blocks
    assert faults(writer.path) == []


@pytest.mark.parametrize("snappy", [True, False])
@pytest.mark.parametrize("hole", [4096, 4097, 100_003, 11, 509])
def test_a_hole_is_told_and_what_follows_it_is_found(
    writer: Writer, hole: int, snappy: bool
) -> None:
    """Metadata ahead of the data at a crash: FastQueue goes on after zeros never written."""
    writer.put(b"before", snappy=snappy)
    begin = writer.position
    writer.restart(begin + hole)
    for size in (256, 300, 7):
        writer.put(bytes(range(1, 256)) * size, snappy=snappy)
    writer.metadata()
    assert read(writer.path) == writer.blocks
    assert the_fault(writer.path) == Fault(
        writer.chunk(0), begin, f"{hole} bytes of zeros: never written"
    )


def test_a_tail_of_zeros_is_told(writer: Writer) -> None:
    writer.put(b"before")
    begin = writer.position
    writer.put_raw(bytes(8192))
    writer.metadata()
    assert read(writer.path) == writer.blocks
    assert the_fault(writer.path).byte == begin


def test_blocks_written_over_older_ones_are_read(writer: Writer) -> None:
    """Metadata behind the data at a crash: FastQueue goes on in the middle of what is there."""
    for number in range(6):
        writer.put(b"%d" % number * 50, snappy=False)
    old = writer.chunk(0).read_bytes()
    end = writer.blocks[2][0]
    new = framed(b"new", snappy=True)
    writer.chunk(0).write_bytes(old[:end] + new + old[end + len(new) :])
    writer.metadata(writer=end + len(new))
    assert read(writer.path) == [*writer.blocks[:2], (end, b"new")]
    behind, corrupt = faults(writer.path)
    assert "behind the data" in behind.what
    assert corrupt.byte == end + len(new)


# The directory itself.


class BadSector(Disk):
    def open(self, path: Path, *, create: bool = False, write: bool = True) -> int:
        assert not create
        assert not write
        if path.name == "0000000000000400":
            raise OSError(5, "Input/output error")
        return super().open(path, write=False)


def test_a_chunk_that_cannot_be_opened_is_told_and_the_others_are_read(
    small_chunks: Writer,
) -> None:
    for _ in range(3):
        small_chunks.put(b"x" * 900, snappy=False)
    small_chunks.metadata()
    directory = FastQueueDirectory.open(small_chunks.path, disk=BadSector())
    assert sum(batch.num_rows for batch in directory.blocks()) == 2
    (fault,) = directory.faults()
    assert fault.what == "cannot be read: Input/output error"


def test_nothing_in_the_directory_changes(writer: Writer) -> None:
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
    faults(writer.path)
    assert snapshot() == before


def test_fastqueue_directories_are_recognised(tmp_path: Path) -> None:
    only_metadata, only_chunk = tmp_path / "metadata", tmp_path / "chunk"
    only_metadata.mkdir()
    (only_metadata / "fastqueue.meta").touch()
    only_chunk.mkdir()
    (only_chunk / "0000000000000000").touch()
    assert FastQueueDirectory.recognises(only_metadata)
    assert FastQueueDirectory.recognises(str(only_chunk))
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
    assert not FastQueueDirectory.recognises(path)
    with pytest.raises(NotAQueue, match=why):
        FastQueueDirectory.open(path)


# Anything at all.

anything = st.lists(
    st.tuples(st.binary(max_size=200) | st.binary(max_size=3).map(lambda b: b * 99), st.booleans()),
    max_size=40,
)
on_one_directory = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


@given(
    values=anything,
    chunk_size=st.integers(16, 2000),
    batch_events=st.integers(1, 7),
    data=st.data(),
)
@on_one_directory
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    values: list[tuple[bytes, bool]],
    chunk_size: int,
    batch_events: int,
    data: st.DataObject,
) -> None:
    writer = Writer(tmp_path_factory.mktemp("queue"), chunk_size=chunk_size)
    for value, snappy in values:
        writer.put(value, snappy=snappy)
    unread = data.draw(st.integers(0, len(values)))
    positions = [position for position, _ in writer.blocks] + [writer.position]
    writer.metadata(reader=positions[unread])
    assert read(writer.path, batch_events=batch_events) == writer.blocks[unread:]
    assert read(writer.path, start=0, batch_events=batch_events) == writer.blocks
    if values:
        assert faults(writer.path) == []


@given(values=anything.filter(bool), data=st.data())
@on_one_directory
def test_whatever_is_overwritten_what_lies_before_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    values: list[tuple[bytes, bool]],
    data: st.DataObject,
) -> None:
    writer = Writer(tmp_path_factory.mktemp("queue"))
    for value, snappy in values:
        writer.put(value, snappy=snappy)
    content = bytearray(writer.chunk(0).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=30))
    content[at : at + len(junk)] = junk
    writer.chunk(0).write_bytes(content)
    (writer.path / "fastqueue.meta").write_bytes(data.draw(st.binary(max_size=50)))
    whole = [
        (position, value)
        for (position, value), (end, _) in zip(
            writer.blocks, [*writer.blocks[1:], (writer.position, b"")], strict=True
        )
        if end <= at
    ]
    assert read(writer.path)[: len(whole)] == whole
    list(FastQueueDirectory.open(writer.path).faults())


@given(content=st.binary(max_size=300) | st.lists(st.sampled_from(range(0, 256, 51))).map(bytes))
@on_one_directory
def test_any_bytes_at_all_are_read_to_their_end(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("queue")
    (path / "0000000000000000").write_bytes(content)
    (path / "0000000000001000").write_bytes(framed(b"next", snappy=True))
    assert read(path)[-1] == (4096, b"next")
    list(FastQueueDirectory.open(path).faults())
