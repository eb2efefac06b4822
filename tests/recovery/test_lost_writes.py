"""What becomes of events that a failed sync has dropped, though they were written?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.harness import Acks, wait_until
from tests.recovery.hooked_disk import Opener, Stored, drained
from turnlane.events import block_of
from turnlane.queues.holding import HoldingQueue
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


def publish(queue: HoldingQueue) -> None:
    producer = queue.producer(producer_id="p")
    for at in range(0, len(VALUES), 10):
        producer.publish_block(block_of(VALUES[at : at + 10]), sequence=at)


@pytest.fixture(params=["disk", "disk_assisted"])
def written(
    request: pytest.FixtureRequest, opener: Opener, disk: FaultyDisk, tmp_path: Path
) -> Stored:
    """A queue with events that are on disk, not synced, and about to be dropped."""
    queue = opener.stored(request.param, tmp_path, disk=disk, **KNOBS[request.param], **SLOW)
    log = queue.store.log
    queue.producer().publish_block(block_of([b"first"] * 20))
    wait_until(lambda: log.synced_end > 0, "the first events are synced")
    publish(queue)
    wait_until(lambda: log.end > 30, "the others are written")
    assert log.synced_end <= 20
    disk.forget(match=".chunk")
    return queue


def test_they_are_written_again(opener: Opener, tmp_path: Path, written: Stored) -> None:
    written.close()
    assert written.stats().disk_errors == 1
    assert not written.stats().ledger.dropped
    again = opener.stored(written.settings.kind, tmp_path)
    publish(again)
    assert drained(again) == [b"first"] * 20 + VALUES
    assert again.stats().quarantined == 0


def test_their_publishers_are_told_the_truth(
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
    assert drained(queue) == [b"first", b"a", b"b", b"c"]


def test_they_keep_their_columns_and_their_order(
    opener: Opener, disk: FaultyDisk, tmp_path: Path
) -> None:
    """Also when some were settled meanwhile, and when the chunk is not the last."""
    queue = opener.stored("disk", tmp_path, disk=disk, **KNOBS["disk"], **SLOW)
    assert queue.producer(ack="persisted").publish(b"first")
    publish(queue)
    wait_until(lambda: queue.store.log.end == 1 + len(VALUES))
    queue.settle(6, 26)
    queue.producer().publish(b"keyed", "key", headers={"a": "b"})
    disk.forget(match=".chunk")
    queue.close()
    again = opener("disk", path=tmp_path)
    assert drained(again) == [b"first", *VALUES[:5], *VALUES[25:], b"keyed"]
    assert not again.stats().ledger.dropped


def test_no_more_is_kept_for_it_than_the_queue_may_keep_in_memory(
    opener: Opener, disk: FaultyDisk, tmp_path: Path
) -> None:
    queue = opener.stored("disk", tmp_path, disk=disk, **KNOBS["disk"], **SLOW)
    for _ in range(20):
        queue.producer().publish_block(block_of([bytes(1024)] * 2))
    wait_until(lambda: queue.store.log.end == 40)
    assert queue.stats().syncs >= 4
