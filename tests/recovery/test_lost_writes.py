"""Written events that a failed sync or a power cut has dropped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.harness import Acks, wait_until
from tests.queue_internals import store_of
from tests.recovery.hooked_disk import Opener, Stored, drain_queue
from turnlane.events import block_of
from turnlane.queues.buffered import BufferedQueue
from turnlane.testing import FaultyDisk

KNOBS: dict[str, dict[str, Any]] = {
    "disk": {"memory_bytes": "8Ki", "write_buffer": 1},
    "disk_assisted": {"size": 100, "high_watermark": 20, "low_watermark": 5},
}
SLOW: dict[str, Any] = {"sync_interval": "1h", "stale_flush": "1h"}
VALUES = [b"%03d" % number for number in range(60)]


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def opener() -> Iterator[Opener]:
    opener = Opener()
    with opener.closing:
        yield opener


def publish(queue: BufferedQueue, end: int = len(VALUES)) -> None:
    """Publish the values up to ``end``; values that were published before are repeats."""
    producer = queue.producer(producer_id="p")
    for at in range(0, end, 10):
        producer.publish_block(block_of(VALUES[at : at + 10]), sequence=at)


@pytest.fixture(params=["disk", "disk_assisted"])
def unsynced(
    request: pytest.FixtureRequest, opener: Opener, disk: FaultyDisk, tmp_path: Path
) -> Stored:
    """Return a queue with events that are written and not synced."""
    path = tmp_path / "queue"
    queue = opener.stored(request.param, path, disk=disk, **KNOBS[request.param], **SLOW)
    log = store_of(queue).log
    queue.producer().publish_block(block_of([b"first"] * 20))
    wait_until(lambda: log.synced_end > 0, "the first events are synced")
    publish(queue)
    wait_until(lambda: log.end > 30, "the others are written")
    assert log.synced_end <= 20
    return queue


@pytest.fixture
def written(unsynced: Stored, disk: FaultyDisk) -> Stored:
    """Return the same queue, on a disk that drops these writes."""
    disk.forget(match=".chunk")
    return unsynced


def test_events_lost_in_a_power_cut_are_accepted_again(
    opener: Opener, disk: FaultyDisk, tmp_path: Path, unsynced: Stored
) -> None:
    """The journal survived, and does not count them as repeats."""
    synced = store_of(unsynced).log.synced_end
    unsynced.sync_acks()
    disk.cut_power(tmp_path / "queue", tmp_path / "copy", match=".chunk")
    again = opener.stored(unsynced.settings.kind, tmp_path / "copy")
    assert again.stats().ledger.accepted == synced
    publish(again)
    assert drain_queue(again) == [b"first"] * synced + VALUES
    assert not again.stats().ledger.dropped


def test_events_left_in_the_page_cache_by_a_kill_are_repeats(
    opener: Opener, tmp_path: Path, unsynced: Stored
) -> None:
    """The frames contain the numbers, although the journal does not have them."""
    written = store_of(unsynced).log.end  # some events may still be in memory
    shutil.copytree(tmp_path / "queue", tmp_path / "copy")
    again = opener.stored(unsynced.settings.kind, tmp_path / "copy")
    assert again.stats().ledger.accepted >= written
    publish(again)
    assert drain_queue(again) == [b"first"] * 20 + VALUES


def test_repeat_is_recognised_from_a_chunk_before_the_last(opener: Opener, tmp_path: Path) -> None:
    """Chunks change before the interval ends, and recovery reads only the last one."""
    knobs: dict[str, Any] = {**KNOBS["disk"], **SLOW, "chunk_size": "1Ki"}
    queue = opener.stored("disk", tmp_path / "queue", **knobs)
    for at in range(0, len(VALUES), 10):
        publish(queue, at + 10)
        wait_until(lambda end=at + 10: store_of(queue).log.end == end, "a frame of its own")  # type: ignore[misc]
    assert store_of(queue).log.rotations > 1
    shutil.copytree(tmp_path / "queue", tmp_path / "copy")
    again = opener.stored("disk", tmp_path / "copy")
    publish(again)
    assert drain_queue(again) == VALUES


def test_lost_writes_are_written_again(opener: Opener, tmp_path: Path, written: Stored) -> None:
    written.close()
    assert written.stats().disk_errors == 1
    assert not written.stats().ledger.dropped
    again = opener.stored(written.settings.kind, tmp_path / "queue")
    publish(again)
    assert drain_queue(again) == [b"first"] * 20 + VALUES
    assert again.stats().quarantined == 0


def test_publishers_of_lost_writes_get_correct_acks(
    opener: Opener, disk: FaultyDisk, tmp_path: Path
) -> None:
    queue = opener("disk", path=tmp_path, disk=disk, **KNOBS["disk"], **SLOW)
    acks = Acks()
    assert queue.producer(ack="persisted").publish(b"first")
    quiet = queue.producer(ack="persisted", on_ack=acks, producer_id="q")
    quiet.publish_block(block_of([b"a", b"b"]), sequence=0)
    wait_until(lambda: queue.stats().flushes == 2)
    disk.forget(match=".chunk")
    assert queue.producer(ack="persisted").publish(b"c")
    acks.wait_for(2)
    assert acks.dropped == 0
    assert drain_queue(queue) == [b"first", b"a", b"b", b"c"]


def test_rewritten_events_keep_columns_and_order(
    opener: Opener, disk: FaultyDisk, tmp_path: Path
) -> None:
    """Even if some are settled before, or the chunk is not the last one."""
    queue = opener.stored("disk", tmp_path, disk=disk, **KNOBS["disk"], **SLOW)
    assert queue.producer(ack="persisted").publish(b"first")
    publish(queue)
    wait_until(lambda: store_of(queue).log.end == 1 + len(VALUES))
    queue.settle(6, 26)
    queue.producer().publish(b"keyed", "key", headers={"a": "b"})
    disk.forget(match=".chunk")
    queue.close()
    again = opener("disk", path=tmp_path)
    assert drain_queue(again) == [b"first", *VALUES[:5], *VALUES[25:], b"keyed"]
    assert not again.stats().ledger.dropped


def test_unsynced_events_in_memory_stay_within_memory_bytes(
    opener: Opener, disk: FaultyDisk, tmp_path: Path
) -> None:
    queue = opener.stored("disk", tmp_path, disk=disk, **KNOBS["disk"], **SLOW)
    for _ in range(20):
        queue.producer().publish_block(block_of([bytes(1024)] * 2))
    wait_until(lambda: store_of(queue).log.end == 40)
    assert queue.stats().syncs >= 4
