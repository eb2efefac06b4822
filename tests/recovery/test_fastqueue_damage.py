"""A damaged FastQueue directory returns every readable block, and no invented one."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.recovery.fastqueue_writer import Writer, encode_block, get_only_fault, list_faults, read
from turnlane.storage import fastqueue
from turnlane.storage.fastqueue import FastQueueDirectory, FastQueueFault

# Damage in the chunks.


def test_torn_last_block_is_a_fault_and_the_rest_is_read(writer: Writer) -> None:
    for number in range(5):
        writer.put(b"%d" % number * 50, snappy=False)
    chunk, last = writer.chunk(0), writer.blocks[4][0]
    content = chunk.read_bytes()
    for size in range(last + 1, len(content)):
        chunk.write_bytes(content[:size])
        writer.metadata(writer=size)
        assert read(writer.path) == writer.blocks[:4]
        fault = get_only_fault(writer.path)
        assert (fault.file, fault.byte) == (chunk, last)
        assert fault.message.startswith("torn")


@pytest.mark.parametrize("word", [1 << 61, (1 << 62) - 1, 1 << 63 | 1 << 61, 1 << 40, 1 << 62])
def test_corrupt_length_allocates_nothing_and_costs_only_its_chunk(
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
    fault = get_only_fault(writer.path)
    assert (fault.file, fault.byte) == (writer.chunk(bad), bad % 1024)
    assert "corrupt length" in fault.message


def test_corrupt_length_before_the_reader_offset_hides_no_unread_block(writer: Writer) -> None:
    for number in range(10):
        writer.put(b"%d" % number * 50, snappy=False)
    content = bytearray(writer.chunk(0).read_bytes())
    struct.pack_into("<Q", content, writer.blocks[2][0], 1 << 61)
    writer.chunk(0).write_bytes(content)
    writer.metadata(reader=writer.blocks[6][0])
    assert read(writer.path) == writer.blocks[6:]
    assert read(writer.path, start=0) == writer.blocks[:2] + writer.blocks[6:]
    assert get_only_fault(writer.path).byte == writer.blocks[2][0]


def test_block_that_cannot_be_decompressed_is_skipped_alone(writer: Writer) -> None:
    writer.put(b"before")
    bad = writer.put_raw(struct.pack("<Q", 4 | 1 << 63) + b"\x20\xff\xff\xff")
    writer.put(b"after")
    writer.metadata()
    assert read(writer.path) == writer.blocks
    fault = get_only_fault(writer.path)
    assert fault.byte == bad
    assert "cannot be decompressed" in fault.message


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff\x0f\x00", b"\x80\x80\x80\x80\x02\x00", b"\x80\x80\x80\x80\x80\x80", b""],
)
def test_snappy_data_with_a_false_length_is_a_fault(writer: Writer, data: bytes) -> None:
    writer.put_raw(struct.pack("<Q", len(data) | 1 << 63) + data)
    writer.put(b"after")
    writer.metadata()
    assert read(writer.path) == writer.blocks
    assert "begins with a wrong length" in get_only_fault(writer.path).message


def test_highest_snappy_ratio_is_accepted(writer: Writer) -> None:
    writer.put(bytes(1 << 22))
    writer.metadata()
    assert read(writer.path) == writer.blocks


def test_block_larger_than_an_event_is_a_fault_and_skipped(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastqueue, "MAX_BLOCK_BYTES", 1000)
    writer.put_raw(encode_block(b"x" * 1001, snappy=False))
    writer.put(b"after", snappy=False)
    writer.metadata()
    assert read(writer.path) == writer.blocks
    assert "larger than an event" in get_only_fault(writer.path).message


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
    assert list_faults(writer.path) == []


@pytest.mark.parametrize("snappy", [True, False])
@pytest.mark.parametrize("hole", [4096, 4097, 100_003, 11, 509])
def test_hole_of_zeros_is_a_fault_and_the_next_block_is_found(
    writer: Writer, hole: int, snappy: bool
) -> None:
    """The metadata is ahead of the data at a crash: FastQueue continues after zeros."""
    writer.put(b"before", snappy=snappy)
    begin = writer.position
    writer.restart(begin + hole)
    for size in (256, 300, 7):
        writer.put(bytes(range(1, 256)) * size, snappy=snappy)
    writer.metadata()
    assert read(writer.path) == writer.blocks
    assert get_only_fault(writer.path) == FastQueueFault(
        writer.chunk(0), begin, f"{hole} bytes of zeros: never written"
    )


def test_tail_of_zeros_is_a_fault(writer: Writer) -> None:
    writer.put(b"before")
    begin = writer.position
    writer.put_raw(bytes(8192))
    writer.metadata()
    assert read(writer.path) == writer.blocks
    assert get_only_fault(writer.path).byte == begin


def test_blocks_that_overwrote_older_ones_are_read(writer: Writer) -> None:
    """The metadata is behind the data at a crash: FastQueue overwrites existing data."""
    for number in range(6):
        writer.put(b"%d" % number * 50, snappy=False)
    old = writer.chunk(0).read_bytes()
    end = writer.blocks[2][0]
    new = encode_block(b"new", snappy=True)
    writer.chunk(0).write_bytes(old[:end] + new + old[end + len(new) :])
    writer.metadata(writer=end + len(new))
    assert read(writer.path) == [*writer.blocks[:2], (end, b"new")]
    behind, corrupt = list_faults(writer.path)
    assert "behind the data" in behind.message
    assert corrupt.byte == end + len(new)


# Random bytes.

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
def test_written_blocks_are_read(
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
        assert list_faults(writer.path) == []


@given(values=anything.filter(bool), data=st.data())
@on_one_directory
def test_overwritten_bytes_leave_earlier_blocks_readable(
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
def test_random_bytes_are_read_to_the_end(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("queue")
    (path / "0000000000000000").write_bytes(content)
    (path / "0000000000001000").write_bytes(encode_block(b"next", snappy=True))
    assert read(path)[-1] == (4096, b"next")
    list(FastQueueDirectory.open(path).faults())
