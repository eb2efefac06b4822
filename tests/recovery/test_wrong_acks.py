"""Acks, return values, repeats and drops are right when a disk is slow or fails."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.contract.harness import PATIENCE, Acks, Task, numbered, wait_for_line, wait_until
from tests.queue_internals import log_storage_of, state_of, store_of
from tests.recovery.hooked_disk import (
    HookedDisk,
    Once,
    Opener,
    Stored,
    drain_queue,
    get_block_values,
    take,
)
from turnlane.errors import AckNotStored, StorageFailed
from turnlane.events import block_of
from turnlane.ledger import Outcome
from turnlane.queues import admission
from turnlane.queues.buffered import BufferedQueue

both_kinds = pytest.mark.parametrize("kind", ["disk", "disk_assisted"])

ASSISTED: dict[str, Any] = {"kind": "disk_assisted", "size": 100, "dequeue_batch_size": 10}


def get_persisted_offset(queue: BufferedQueue) -> int:
    """Return the offset below which events were acked as persisted."""
    with state_of(queue).lock:
        return state_of(queue).acks.persisted.position


def crash(queue: Stored, copy: Path) -> Path:
    """Copy the directory as a kill at this moment would leave it."""
    source = queue.settings.path
    assert source is not None
    shutil.copytree(source, copy)
    return copy


# Dropping the oldest is for a full queue, not for a slow or failing disk


@pytest.mark.parametrize("full", [False, True])
def test_failing_disk_does_not_drop_the_oldest_events(
    opener: Opener, tmp_path: Path, disk: HookedDisk, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """While no write succeeds, only the event that has no room is dropped."""
    monkeypatch.setattr(admission, "SPILL_SECONDS", 0.01)
    queue = opener.stored(
        "disk",
        tmp_path,
        disk=disk,
        durability="always",
        full_behavior="drop_oldest",
        size=101 if full else None,
    )
    queue.producer(ack="persisted").publish_block(block_of(numbered(0, 100)))
    disk.fail("write", error=errno.ENOSPC, times=None, match=".chunk")
    producer = queue.producer()
    assert producer.publish(b"100")
    wait_until(lambda: bool(queue.storage_failure), "the trouble")
    assert not producer.publish(b"dropped")
    assert not producer.try_publish(b"dropped too")
    published = producer.publish_block(block_of([b"and", b"these"]))
    assert (published.accepted, published.dropped) == (0, 2)
    disk.clear()
    assert drain_queue(queue) == numbered(0, 101)
    assert queue.stats().ledger.dropped == {"newest": 4}


def test_slow_disk_does_not_drop_the_oldest_events(
    opener: Opener, tmp_path: Path, disk: HookedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the writer is only behind, publishers wait for it and no event is dropped."""
    monkeypatch.setattr(admission, "SPILL_SECONDS", PATIENCE)
    queue = opener.stored(
        "disk",
        tmp_path,
        disk=disk,
        durability="always",
        full_behavior="drop_oldest",
        memory_bytes="64Ki",
        write_buffer="1Ki",
    )
    queue.producer(ack="persisted").publish_block(block_of(numbered(0, 100)))
    pause = disk.pause("sync", match=".chunk")
    producer = queue.producer()
    values = [value + bytes(10_000) for value in numbered(0, 100)]
    task = Task(lambda: [producer.publish(value) for value in values])
    pause.await_reached()
    wait_for_line(queue, 1)
    assert queue.stats().ledger.dropped == {}
    pause.end()
    assert all(task.result())
    assert drain_queue(queue) == [*numbered(0, 100), *values]
    assert queue.stats().ledger.dropped == {}


# Acks of waiting publishers


def test_waiting_publisher_learns_that_its_event_was_dropped(
    opener: Opener, tmp_path: Path, disk: HookedDisk
) -> None:
    """An event that is dropped for another one before its sync is not persisted."""
    queue = opener.stored(
        "disk", tmp_path, disk=disk, size=1, full_behavior="drop_oldest", durability="always"
    )
    pause = disk.pause("sync", match=".chunk")
    waiting = Task(lambda: queue.producer(ack="persisted").publish(b"evicted"))
    pause.await_reached()
    assert queue.producer().publish(b"newer")
    pause.end()
    assert waiting.result() is False
    assert drain_queue(queue) == [b"newer"]
    assert queue.stats().ledger.dropped == {"oldest": 1}


def test_publisher_learns_that_its_event_was_destroyed(
    opener: Opener, tmp_path: Path, disk: HookedDisk
) -> None:
    """If a failed sync destroys the event's bytes, it is written again or publish raises."""
    queue = opener.stored("disk", tmp_path, disk=disk, durability="always")
    producer = queue.producer(ack="persisted")
    assert producer.publish(b"first")
    rot = Once(OSError(errno.EIO, "the kernel dropped the page"))

    def destroy(fd: Path | int) -> None:
        if not rot.raised:
            assert isinstance(fd, int)
            os.pwrite(fd, b"\xff" * 16, os.fstat(fd).st_size - 24)
        rot()

    disk.on("sync", destroy, match=".chunk")
    try:
        told = producer.publish(b"lost" * 50)
    except StorageFailed:
        told = False
    assert rot.raised
    queue.close()
    again = opener.stored("disk", tmp_path)
    assert drain_queue(again) == [b"first", b"lost" * 50][: 1 + told]
    assert again.stats().ledger.adds_up


# Acks of disk-assisted queues


def test_freed_events_are_persisted_when_the_log_reaches_them(
    opener: Opener, tmp_path: Path
) -> None:
    """Only the consumer has a freed batch: no later event is acked before it."""
    queue = opener.stored(path=tmp_path / "queue", durability="always", **ASSISTED)
    acks = Acks()
    producer = queue.producer(ack="persisted", on_ack=acks)
    for value in numbered(0, 10):
        producer.publish(value)
    batch = queue.get()
    batch.free()
    for value in numbered(10, 95):
        producer.publish(value)
    wait_until(lambda: queue.stats().size < 90, "the spill")
    assert get_persisted_offset(queue) == 0
    survivors = drain_queue(opener.stored("disk_assisted", crash(queue, tmp_path / "copy")))
    assert survivors
    assert survivors == numbered(10, 10 + len(survivors))
    assert acks.count == 0
    batch.done()
    wait_until(lambda: acks.count >= 10 + len(survivors), "the acks")
    assert drain_queue(queue) == numbered(10, 95)


def test_events_being_settled_are_persisted_when_the_log_reaches_them(
    opener: Opener, tmp_path: Path, disk: HookedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If ``done()`` fails, the batch is pending again: an acked event must be on disk."""
    queue = opener.stored(path=tmp_path / "queue", disk=disk, durability="always", **ASSISTED)
    producer = queue.producer(ack="persisted", on_ack=Acks())
    for value in numbered(0, 10):
        producer.publish(value)
    batch = queue.get()
    disk.fail("write", error=errno.ENOSPC, times=None, match=".chunk")
    for value in numbered(10, 95):
        producer.publish(value)
    wait_until(lambda: bool(queue.storage_failure), "the spill that fails")
    record = store_of(queue).journal.record_settled
    reached, go = threading.Event(), threading.Event()

    def fail_late(first: int, end: int, size: int, outcome: Outcome) -> None:
        if first == 0:
            reached.set()
            assert go.wait(PATIENCE)
            raise OSError(errno.EIO, "no acks now")
        record(first, end, size, outcome)

    monkeypatch.setattr(store_of(queue).journal, "record_settled", fail_late)
    done = Task(batch.done)
    assert reached.wait(PATIENCE)
    disk.clear()

    def recovered() -> bool:
        with state_of(queue).lock:
            return not bool(queue.storage_failure)

    wait_until(recovered, "the spill")
    go.set()
    with pytest.raises(AckNotStored):
        done.result()
    monkeypatch.undo()
    promised = get_persisted_offset(queue)
    copy = opener.stored("disk_assisted", crash(queue, tmp_path / "copy"))
    assert set(numbered(0, promised)) <= set(drain_queue(copy))
    batch.release()
    assert drain_queue(queue) == numbered(0, 95)


# Repeats


@both_kinds
@pytest.mark.parametrize("settled", [True, False])
def test_repeat_is_recognised_after_a_clean_restart(
    opener: Opener, tmp_path: Path, kind: str, settled: bool
) -> None:
    """All numbers of a producer count, even of events that were never on disk."""
    queue = opener.stored(kind, tmp_path)
    block = block_of(numbered(0, 2))
    assert queue.producer(producer_id="A").publish_block(block, sequence=0).accepted == 2
    if settled:
        take(queue, 2)
    queue.close()
    again = opener.stored(kind, tmp_path)
    published = again.producer(producer_id="A").publish_block(block, sequence=0)
    assert (published.accepted, published.repeated) == (0, 2)
    longer = block_of(numbered(0, 3))
    published = again.producer(producer_id="A").publish_block(longer, sequence=0)
    assert (published.accepted, published.repeated) == (1, 2)
    assert drain_queue(again) == numbered(2 if settled else 0, 3)


# Records that the journal missed


def test_failed_sync_of_the_journal_is_repeated(
    opener: Opener, tmp_path: Path, disk: HookedDisk
) -> None:
    """An ack that waits for a sync still waits when the sync fails."""
    queue = opener.stored("disk", tmp_path, disk=disk, sync_interval="20ms")
    queue.producer(ack="persisted").publish_block(block_of(numbered(0, 2)))
    wait_until(lambda: not log_storage_of(queue)._is_untidy(), "tidiness")
    trouble = Once(OSError(errno.EIO, "no sync now"))
    disk.on("sync", trouble, match="journal")
    before = store_of(queue).journal.syncs
    queue.get(1).done()
    wait_until(lambda: trouble.raised, "the failing sync")
    wait_until(lambda: store_of(queue).journal.syncs > before, "another sync")


@pytest.mark.parametrize("nth", [1, 2])
def test_failed_record_is_repeated(
    opener: Opener, tmp_path: Path, disk: HookedDisk, nth: int
) -> None:
    """Acks of events in memory are not lost when the first spill cannot record them."""
    queue = opener.stored(path=tmp_path, disk=disk, **ASSISTED)
    producer = queue.producer()
    for value in numbered(0, 20):
        producer.publish(value)
    queue.get(10).done()
    queue.get(10).dead()
    calls: list[Path | int] = []

    def fail_once(file: Path | int) -> None:
        calls.append(file)
        if len(calls) == nth:
            raise OSError(errno.EIO, "no record now")

    disk.on("write", fail_once, match="journal")
    for value in numbered(20, 115):
        producer.publish(value)
    wait_until(lambda: store_of(queue).log.end > 20, "the spill")
    wait_until(lambda: queue.stats().size < 90, "the room that it makes")
    assert len(calls) > nth
    queue.close()
    again = opener.stored("disk_assisted", tmp_path)
    ledger = again.stats().ledger
    assert (ledger.delivered, ledger.dead, ledger.pending) == (10, 10, 95)
    assert drain_queue(again) == numbered(20, 115)
    assert again.stats().ledger.dropped == {}


def test_batch_stays_whole_when_its_ack_is_not_stored(
    opener: Opener, tmp_path: Path, disk: HookedDisk
) -> None:
    """A ``done()`` that could not be recorded settles nothing, and can be repeated."""
    queue = opener.stored("disk", tmp_path, disk=disk, durability="always")
    queue.producer(ack="persisted").publish_block(block_of(numbered(0, 3)))
    batch = queue.get()
    disk.fail("write", match="journal")
    with pytest.raises(AckNotStored):
        batch.done()
    assert queue.stats().ledger.pending == 3
    assert get_block_values(batch.block) == numbered(0, 3)
    batch.done()
    queue.close()
    assert opener.stored("disk", tmp_path).stats().ledger.delivered == 3


def test_settlement_in_memory_is_recorded_before_later_events_spill(
    opener: Opener, tmp_path: Path, disk: HookedDisk
) -> None:
    """Half of a batch is on disk; events settled in the other half keep their outcome."""
    knobs = {"size": 100, "high_watermark": 10, "low_watermark": 5}
    queue = opener.stored("disk_assisted", tmp_path, disk=disk, **knobs)
    spilling = disk.pause("write", match=".chunk")
    for first in (0, 5):
        queue.producer().publish_block(block_of(numbered(first, first + 5)))
    spilling.await_reached()
    batch = queue.get(10)
    # Events in flight make no room, so the newer half spills too. The older half comes after the
    # chunk's header, which the writer is writing now.
    younger = disk.pause("write", match=".chunk", skip=1)
    spilling.end()
    younger.await_reached()
    assert store_of(queue).log.end == 5, "the older half is on disk"
    queue.settle(6, 8)
    dying = Task(batch.dead)
    younger.end()
    dying.result()
    queue.close()
    ledger = opener.stored("disk_assisted", tmp_path).stats().ledger
    assert (ledger.delivered, ledger.dead, ledger.pending) == (2, 8, 0)


def test_returned_then_settled_events_are_not_missing_after_a_kill(
    opener: Opener, tmp_path: Path
) -> None:
    """Events that were never on disk leave no record there: they would count as lost."""
    queue = opener.stored("disk_assisted", tmp_path / "queue", size=100)
    queue.producer().publish_block(block_of(numbered(0, 6)))
    queue.get(3).done()
    queue.get(3).release()
    take(queue, 3)
    ledger = opener.stored("disk_assisted", crash(queue, tmp_path / "left")).stats().ledger
    assert (ledger.accepted, ledger.dropped, ledger.pending) == (0, {}, 0)


def test_returned_events_keep_their_attempt_when_they_spill(opener: Opener, tmp_path: Path) -> None:
    """Events settled before them are counted as settled."""
    knobs = {"size": 100, "high_watermark": 10, "low_watermark": 1}
    queue = opener.stored("disk_assisted", tmp_path / "queue", sync_interval="5ms", **knobs)
    queue.producer().publish_block(block_of(numbered(0, 6)))
    queue.get(3).done()
    queue.get(3).release()
    queue.producer().publish_block(block_of(numbered(6, 16)))
    wait_until(lambda: get_persisted_offset(queue) >= 6, "the spill")
    again = opener.stored("disk_assisted", crash(queue, tmp_path / "left"))
    assert again.stats().ledger.delivered == 3
    batch = again.get(3)
    assert (get_block_values(batch.block), batch.attempt) == (numbered(3, 6), 2)
