"""The log returns appended events, while it is written and after it is reopened."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from tests.log_harness import append_events, build_values, open_log, read_all, start_segment
from turnlane.errors import Bug, SchemaMismatch
from turnlane.events import BASE_SCHEMA, block_of, get_values
from turnlane.ledger import Outcome
from turnlane.storage.encoder import CompressionMode
from turnlane.storage.frames import LogPosition, ProducerSequence
from turnlane.storage.log import Log
from turnlane.storage.producer_sequences import AcceptedSequences
from turnlane.storage.reader import StoredEvents, UnreadableRange

Opener = Callable[..., Log]


@pytest.fixture
def opened(tmp_path: Path) -> Opener:
    return partial(open_log, tmp_path)


def test_an_empty_log_has_nothing_to_read(opened: Opener) -> None:
    log = opened()
    assert (log.start, log.end, log.bytes, log.list_segments()) == (0, 0, 0, [])
    assert log.create_reader().read(0, 10) is None


@pytest.mark.parametrize("max_events", [1, 7, 100, 1000])
@pytest.mark.parametrize("mode", ["none", "snappy", "auto"])
def test_appended_events_are_read(opened: Opener, mode: CompressionMode, max_events: int) -> None:
    log = opened(mode=mode, segment_size=4096)
    append_events(log, 50, blocks=10)
    assert read_all(log, max_events=max_events) == build_values(0, 500)
    assert read_all(log, 123, max_events) == build_values(123, 377)


def test_reading_restores_the_base_columns(opened: Opener) -> None:
    log = opened()
    block = block_of([b"a", b"b"], timestamps=5)
    log.append(0, block)
    found = log.create_reader().read(0, 10)
    assert isinstance(found, StoredEvents)
    assert found.block.schema.equals(BASE_SCHEMA)
    assert found.block.equals(block)


def test_all_column_types_survive(opened: Opener) -> None:
    log = opened()
    block = block_of(
        [b"a", b"b"],
        keys=["k", None],
        headers=[{"x": "1"}, None],
        severities=[None, 3],
        sources=["s", "t"],
        timestamps=5,
    ).append_column("extra", pa.array([1.5, None]))
    log.append(0, block)
    found = log.create_reader().read(0, 10)
    assert isinstance(found, StoredEvents)
    assert found.block.equals(block)


def test_reader_at_the_end_sees_later_events(opened: Opener) -> None:
    log = opened()
    reader = log.create_reader()
    assert reader.read(0, 10) is None
    append_events(log, 3)
    assert isinstance(reader.read(0, 10), StoredEvents)
    assert reader.read(3, 10) is None
    append_events(log, 3)
    found = reader.read(3, 10)
    assert isinstance(found, StoredEvents)
    assert get_values([found.block]) == build_values(3, 3)


def test_segments_stay_within_their_size_and_are_named_by_first_offset(
    opened: Opener, tmp_path: Path
) -> None:
    log = opened(segment_size=8192)
    append_events(log, 40, blocks=20)
    spans = log.list_segments()
    assert len(spans) > 2
    assert [span.end for span in spans] == [*[span.first for span in spans[1:]], 800]
    for span in spans:
        path = tmp_path / f"{span.first:016x}.chunk"
        assert path.stat().st_size == span.bytes <= 8192
    assert log.bytes == sum(span.bytes for span in spans)
    assert log.rotations == len(spans)


def test_block_larger_than_a_segment_gets_its_own_segment(opened: Opener) -> None:
    log = opened(segment_size=1000)
    append_events(log, 1)
    append_events(log, 500)
    append_events(log, 1)
    assert [span.first for span in log.list_segments()] == [0, 1, 501]
    assert read_all(log) == build_values(0, 502)


def test_only_a_new_column_starts_a_segment(opened: Opener) -> None:
    log = opened()
    append_events(log, 2)
    log.append(2, block_of([b"event 2"], keys=["k"], timestamps=1))
    append_events(log, 2)
    log.append(5, block_of([b"event 5"], keys=["k"], timestamps=1))
    assert [span.first for span in log.list_segments()] == [0, 2]
    assert read_all(log) == build_values(0, 6)


def test_columns_without_values_are_not_stored(opened: Opener) -> None:
    log = opened()
    log.append(0, block_of([b"a"] * 1000, timestamps=1))
    bare = log.bytes
    assert bare < 1000 * (8 + 4 + 1) + 1000


def test_different_type_of_a_column_is_refused_before_any_write(
    opened: Opener,
) -> None:
    log = opened()
    append_events(log, 2)
    before = log.position
    good = block_of([b"x"])
    for bad in (
        pa.record_batch({"value": pa.array(["text"])}),
        pa.record_batch({"severity": pa.array([1], pa.int64())}),
    ):
        with pytest.raises(SchemaMismatch):
            log.append_frames(2, [[good], [bad]])
        assert log.position == before


def test_two_columns_with_one_name_are_refused(opened: Opener) -> None:
    twice = pa.RecordBatch.from_arrays([pa.array([b"x"]), pa.array([b"y"])], ["value", "value"])
    with pytest.raises(SchemaMismatch):
        opened().append(0, twice)


def test_dictionaries_are_stored_as_plain_values(opened: Opener) -> None:
    log = opened()
    keys = pa.array(["a", "b", "a"]).dictionary_encode()
    for _ in range(2):
        log.append(log.end, pa.record_batch({"key": keys, "value": pa.array([b"1", b"2", b"3"])}))
    found = log.create_reader().read(3, 10)
    assert isinstance(found, StoredEvents)
    assert found.block.column("key").to_pylist() == ["a", "b", "a"]
    assert found.block.schema.field("key").type == pa.string()


def test_slice_of_a_larger_block_is_stored_alone(opened: Opener) -> None:
    log = opened()
    whole = block_of(build_values(0, 1000), keys=[None if i % 3 else "k" for i in range(1000)])
    log.append(0, whole.slice(0, 7))
    log.append(7, whole.slice(7, 3))
    assert read_all(log) == build_values(0, 10)
    assert log.bytes < 4000


def test_gap_is_reported_as_missing(opened: Opener) -> None:
    log = opened()
    append_events(log, 5)
    log.append(20, block_of(build_values(20, 5)))
    expected = [*build_values(0, 5), UnreadableRange(5, 20, Outcome.MISSING), *build_values(20, 5)]
    assert read_all(log) == expected
    assert read_all(log, 10)[0] == UnreadableRange(10, 20, Outcome.MISSING)


def test_offsets_never_go_back(opened: Opener) -> None:
    log = opened()
    append_events(log, 5)
    with pytest.raises(Bug):
        log.append(4, block_of([b"x"]))


def test_empty_block_writes_nothing(opened: Opener) -> None:
    log = opened()
    log.append(0, block_of([]))
    assert log.position == LogPosition(0, 0, 0)


def test_several_blocks_are_one_write(opened: Opener) -> None:
    from turnlane.testing import FaultyDisk

    disk = FaultyDisk()
    log = opened(disk=disk)
    append_events(log, 1)
    writes = disk.operations["write"]
    log.append_frames(1, [[block_of(build_values(1 + 3 * n, 3), timestamps=1)] for n in range(20)])
    assert disk.operations["write"] == writes + 1
    assert read_all(log) == build_values(0, 61)


def test_reopened_log_continues_at_its_end(opened: Opener) -> None:
    log = opened(segment_size=4096)
    append_events(log, 50, blocks=5)
    hint = log.position
    append_events(log, 50, blocks=2)
    log.close()
    for given in (None, hint):
        log = opened(segment_size=4096, hint=given)
        assert log.end == 350
        assert log.torn_bytes == 0
        assert read_all(log) == build_values(0, 350)
        log.close()
    log = opened(segment_size=4096)
    append_events(log, 50)
    assert read_all(log) == build_values(0, 400)


def test_reopened_log_keeps_its_columns_and_its_segment(opened: Opener) -> None:
    log = opened()
    log.append(0, block_of([b"event 0"], keys=["k"], sources=["s"], timestamps=1))
    log.close()
    log = opened()
    append_events(log, 2)
    assert len(log.list_segments()) == 1
    assert read_all(log) == build_values(0, 3)


def test_sequences_after_the_hint_are_recovered(opened: Opener) -> None:
    log = opened(segment_size=2000)
    first, second = b"p" * 16, b"q" * 16
    log.append(0, block_of(build_values(0, 40)), [ProducerSequence(first, 40)])
    hint = log.position
    log.append(40, block_of(build_values(40, 40)), [ProducerSequence(second, 7)])
    log.append(
        80,
        block_of(build_values(80, 40)),
        [ProducerSequence(first, 120), ProducerSequence(second, 8)],
    )
    assert len(log.list_segments()) > 1
    log.close()
    log = opened(hint=hint)
    assert log.recovered_sequences == {first: AcceptedSequences(120), second: AcceptedSequences(8)}
    assert log.recovered_events_bytes > 0
    log.close()
    log = opened(hint=log.position)
    log.close()


@pytest.mark.parametrize("mode", ["none", "snappy"])
def test_sequences_do_not_change_the_events(opened: Opener, mode: CompressionMode) -> None:
    log = opened(mode=mode)
    log.append(0, block_of(build_values(0, 500)), [ProducerSequence(b"p" * 16, 3)])
    assert read_all(log) == build_values(0, 500)


def test_sync_covers_everything_appended(opened: Opener) -> None:
    log = opened()
    append_events(log, 5)
    assert log.synced_end == 0
    log.sync()
    assert log.synced_end == 5


def test_rotation_syncs_the_former_segment(opened: Opener) -> None:
    log = opened()
    append_events(log, 5)
    start_segment(log)
    assert log.synced_end == 5


def test_later_sync_covers_all_segments_without_durability(opened: Opener) -> None:
    from turnlane.testing import FaultyDisk

    disk = FaultyDisk()
    log = opened(disk=disk, durable=False, segment_size=500)
    append_events(log, 5, blocks=4)
    assert disk.operations["sync"] == 0
    log.sync()
    assert disk.operations["sync"] == len(log.list_segments()) > 1
    assert log.synced_end == 20


def test_segment_can_be_removed_once_it_is_not_active(opened: Opener, tmp_path: Path) -> None:
    log = opened()
    append_events(log, 5)
    with pytest.raises(Bug):
        log.remove_segment(0)
    start_segment(log)
    start_segment(log)
    log.remove_segment(0)
    assert [span.first for span in log.list_segments()] == [5]
    assert log.start == log.end == 5
    append_events(log, 5)
    assert read_all(log, 5) == build_values(5, 5)
    assert [path.name for path in tmp_path.glob("*.chunk")] == ["0000000000000005.chunk"]


def test_reader_survives_the_removal_of_its_segment(opened: Opener) -> None:
    log = opened()
    append_events(log, 5, blocks=2)
    reader = log.create_reader()
    assert isinstance(reader.read(0, 5), StoredEvents)
    start_segment(log)
    append_events(log, 5)
    log.remove_segment(0)
    assert reader.read(5, 5) == UnreadableRange(5, 10, Outcome.MISSING)
    found = reader.read(10, 5)
    assert isinstance(found, StoredEvents)
    assert get_values([found.block]) == build_values(10, 5)


def test_empty_segment_can_get_new_columns(opened: Opener) -> None:
    log = opened()
    append_events(log, 5)
    start_segment(log)
    reader = log.create_reader()
    assert isinstance(reader.read(0, 5), StoredEvents)
    assert reader.read(5, 5) is None
    log.append(5, block_of([b"event 5"], keys=["k"], timestamps=1))
    found = reader.read(5, 5)
    assert isinstance(found, StoredEvents)
    assert get_values([found.block]) == build_values(5, 1)


def test_floor_above_the_end_starts_a_new_segment(opened: Opener) -> None:
    log = opened()
    append_events(log, 5)
    log.close()
    log = opened(floor=9)
    assert log.end == 9
    assert read_all(log) == [*build_values(0, 5), UnreadableRange(5, 9, Outcome.MISSING)]
    append_events(log, 2)
    assert [span.first for span in log.list_segments()] == [0, 9]
    assert read_all(log, 9) == build_values(9, 2)


def test_seek_in_a_large_segment_starts_near_the_offset(opened: Opener) -> None:
    from turnlane.testing import FaultyDisk

    disk = FaultyDisk()
    log = opened(segment_size=64 << 20, disk=disk)
    for _ in range(200):
        log.append(log.end, block_of([b"x" * 1000] * 20))
    reader = log.create_reader()
    before = disk.operations["read"]
    assert isinstance(reader.read(3990, 1), StoredEvents)
    assert disk.operations["read"] - before < 10


def test_readers_and_the_writer_do_not_disturb_each_other(opened: Opener) -> None:
    log = opened(segment_size=20_000, mode="snappy")
    total, problems = 20_000, []

    def read() -> None:
        reader, offset = log.create_reader(), 0
        while offset < total:
            result = reader.read(offset, 64)
            if isinstance(result, StoredEvents):
                if get_values([result.block]) != build_values(offset, result.block.num_rows):
                    problems.append(offset)
                offset += result.block.num_rows
            elif result is not None:
                problems.append(result.first)
                offset = result.end

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    append_events(log, 100, blocks=total // 100)
    for thread in threads:
        thread.join()
    assert problems == []
