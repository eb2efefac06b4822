"""Queues that must not hang, spin, or grow without bound."""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.contract.harness import (
    NOTICEABLE,
    PATIENCE,
    Acks,
    Task,
    numbered,
    wait_for_line,
    wait_until,
)
from tests.queue_internals import state_of, store_of
from tests.recovery.hooked_disk import HookedDisk, Once, Opener, drain_queue, get_block_values, take
from turnlane.errors import EventsLost, QueueClosed, QueueFull, StorageFailed
from turnlane.events import block_of
from turnlane.ledger import Outcome
from turnlane.queues import disk as disk_queues
from turnlane.queues.api import Ack
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.disk import DiskStorage, WriteJob
from turnlane.queues.disk_assisted import SpillStorage
from turnlane.queues.producer import BufferedProducer

SMALL: dict[str, Any] = {
    "durability": "always",
    "chunk_size": "4Ki",
    "write_buffer": "1Ki",
    "compression": "none",
    "dequeue_batch_size": 5,
}


def long_values(first: int, end: int) -> list[bytes]:
    """Return values of half a kilobyte."""
    return [value + bytes(500) for value in numbered(first, end)]


def publish(queue: BufferedQueue, values: list[bytes]) -> None:
    """Publish values one by one; each is persisted before the next."""
    producer = queue.producer(ack="persisted")
    for value in values:
        assert producer.publish(value)


def store_blocks(opener: Opener, path: Path, count: int, **knobs: Any) -> list[bytes]:
    """Leave blocks of ten events in a directory, each a frame of its own; returns the values."""
    queue = opener.stored("disk", path, compression="none", **knobs)
    values: list[bytes] = []
    for number in range(count):
        block = long_values(number * 10, number * 10 + 10)
        queue.producer(ack="persisted").publish_block(block_of(block))
        values += block
    queue.close()
    return values


# Chunks that cannot be deleted


def lose_first_chunk(path: Path, disk: HookedDisk) -> None:
    min(path.glob("*.chunk")).unlink()


def forbid_deleting(path: Path, disk: HookedDisk) -> None:
    disk.fail("unlink", error=errno.EACCES, times=None, match=".chunk")


@pytest.mark.parametrize("trouble", [lose_first_chunk, forbid_deleting])
def test_queue_continues_when_a_settled_chunk_cannot_be_deleted(
    opener: Opener, tmp_path: Path, disk: HookedDisk, trouble: Callable[[Path, HookedDisk], None]
) -> None:
    """A chunk that is gone, or cannot be deleted, delays no publish and no close."""
    queue = opener.stored("disk", tmp_path, disk=disk, full_timeout="5s", **SMALL)
    publish(queue, long_values(0, 40))
    trouble(tmp_path, disk)
    assert take(queue, 40) == long_values(0, 40)
    Task(lambda: publish(queue, long_values(40, 60))).result()
    assert take(queue, 20) == long_values(40, 60)
    if trouble is lose_first_chunk:
        wait_until(lambda: len(list(tmp_path.glob("*.chunk"))) <= 1, "the chunks' end")
    Task(queue.close).result()
    ledger = opener.stored("disk", tmp_path).stats().ledger
    assert (ledger.delivered, ledger.pending) == (60, 0)


# Publishers that wait


def delay_producer(opener: Opener, flow: str) -> BufferedProducer:
    """Return a producer that flow control delays for longer than any test runs."""
    mark = {"light_delay": PATIENCE * 2, "light_delay_mark": "97%"}
    queue = opener("memory", size=100, **mark)
    producer = queue.producer(flow=flow)
    for value in numbered(0, 97):
        producer.publish(value)
    return producer


def test_flow_control_respects_the_timeout(opener: Opener) -> None:
    """A producer with full flow control waits no longer than its timeout."""
    producer = delay_producer(opener, "full")
    with pytest.raises(QueueFull):
        Task(lambda: producer.publish(b"late", timeout=0.01)).result()
    with pytest.raises(QueueFull):
        Task(lambda: producer.publish_block(block_of([b"late"]), timeout=0.01)).result()
    assert producer.state.describe().ledger.accepted == 97


def test_light_delay_ends_at_the_timeout(opener: Opener) -> None:
    """A producer with light flow control publishes or raises at its timeout."""
    producer = delay_producer(opener, "light")
    entered = 0
    with contextlib.suppress(QueueFull):
        entered += Task(lambda: producer.publish(b"late", timeout=0.01)).result()
    assert producer.state.describe().ledger.accepted == 97 + entered


# Reading


def test_events_come_again_after_a_memory_error(
    opener: Opener, tmp_path: Path, disk: HookedDisk
) -> None:
    """An error while reading loses no event and no count."""
    values = store_blocks(opener, tmp_path, 3)
    queue = opener.stored("disk", tmp_path, disk=disk, dequeue_batch_size=10)
    disk.on("read", Once(MemoryError("no memory")), match=".chunk")
    with pytest.raises((MemoryError, StorageFailed)):
        queue.get(timeout=PATIENCE)
    assert queue.stats().ledger.pending == 30
    assert take(queue, 30) == values
    stats = queue.stats()
    assert (stats.in_flight, stats.size, stats.ledger.delivered) == (0, 0, 30)
    Task(lambda: queue.close(drain=True, timeout=PATIENCE * 2)).result()


@pytest.mark.parametrize("late", [False, True])
def test_waiting_reader_gets_queue_closed(
    opener: Opener, tmp_path: Path, disk: HookedDisk, late: bool
) -> None:
    """A consumer that reads the disk during a close gets QueueClosed, at any moment."""
    values = store_blocks(opener, tmp_path, 3)
    queue = opener.stored("disk", tmp_path, disk=disk)
    pause = disk.pause("read", match=".chunk")
    getting = Task(queue.get)
    pause.await_reached()
    closing = Task(queue.close)
    wait_until(lambda: queue.closed, "the closing")
    if late:
        closing.thread.join(NOTICEABLE * 4)  # the whole close, unless it waits for the reader
    pause.end()
    with pytest.raises(QueueClosed):
        getting.result()
    closing.result()
    assert disk.open_files == set()
    assert drain_queue(opener.stored("disk", tmp_path)) == values


def test_events_in_memory_are_delivered_without_their_chunk(opener: Opener, tmp_path: Path) -> None:
    """A deleted file costs only the events that were nowhere else."""
    knobs = {**SMALL, "chunk_size": "1Mi", "memory_bytes": "8Ki"}
    queue = opener.stored("disk", tmp_path, **knobs)
    publish(queue, long_values(0, 40))
    in_memory = state_of(queue).buffer.first
    assert 0 < in_memory < 35
    [chunk] = tmp_path.glob("*.chunk")
    chunk.unlink()
    assert drain_queue(queue) == long_values(in_memory, 40)
    stats = queue.stats()
    assert stats.ledger.dropped == {"missing": in_memory}
    assert (stats.size, stats.bytes) == (0, 0)


class BadSector(HookedDisk):
    """A disk that cannot read the first chunk after a certain byte."""

    def __init__(self, first_byte: int, times: float = float("inf")) -> None:
        super().__init__()
        self._first_byte = first_byte
        self._times = times
        self.bad = False
        self.failed = 0

    def read(self, fd: int, length: int, at: int) -> pa.Buffer:
        path = self._get_path(fd)
        first = path is not None and path.name == f"{0:016}.chunk"
        if self.bad and first and at + length > self._first_byte and self.failed < self._times:
            self.failed += 1
            raise OSError(errno.EIO, "bad sector")
        return super().read(fd, length, at)


def drain_despite_errors(queue: BufferedQueue) -> list[bytes]:
    """Settle and return all remaining events, despite read errors."""
    found: list[bytes] = []

    def take_all() -> None:
        with contextlib.suppress(QueueClosed):
            while True:
                with contextlib.suppress(StorageFailed), queue.get(timeout=PATIENCE) as batch:
                    found.extend(get_block_values(batch.block))

    queue.finish()
    Task(take_all).result()
    return found


@pytest.mark.parametrize("first_byte", [0, 1000])
def test_unreadable_events_are_given_up_after_some_attempts(
    opener: Opener, tmp_path: Path, first_byte: int
) -> None:
    """After a few attempts the frame counts as corrupt, and the other events come."""
    values = store_blocks(opener, tmp_path, 4, chunk_size="8Ki", write_buffer="4Ki")
    disk = BadSector(first_byte)
    queue = opener.stored("disk", tmp_path, disk=disk, dequeue_batch_size=5)
    disk.bad = True
    assert drain_despite_errors(queue) == values[10:]
    assert disk.failed > 1
    ledger = queue.stats().ledger
    assert ledger.dropped == {"corrupt": 10}
    assert ledger.adds_up
    queue.close()
    again = opener.stored("disk", tmp_path)
    assert (again.stats().ledger.delivered, again.stats().ledger.pending) == (30, 0)


def test_temporary_read_error_loses_nothing(opener: Opener, tmp_path: Path) -> None:
    """A read that fails once raises, and costs no event."""
    values = store_blocks(opener, tmp_path, 4, chunk_size="8Ki", write_buffer="4Ki")
    disk = BadSector(0, times=1)
    queue = opener.stored("disk", tmp_path, disk=disk, dequeue_batch_size=5)
    disk.bad = True
    assert drain_despite_errors(queue) == values
    assert disk.failed == 1
    assert queue.stats().ledger.dropped == {}


def read_by_offset(queue: BufferedQueue) -> list[bytes]:
    """Return all events that a reader by offset finds, despite read errors."""
    found: list[bytes] = []
    at = 0
    while at < queue.end:
        with contextlib.suppress(OSError):
            read = queue.read(at, 5)
            if read is None:
                break
            found += get_block_values(read[1])
            at = read[0] + read[1].num_rows
    return found


def test_readers_by_offset_skip_a_bad_sector(opener: Opener, tmp_path: Path) -> None:
    """Otherwise a lane would wait for these events without end."""
    values = store_blocks(opener, tmp_path, 4, chunk_size="8Ki", write_buffer="4Ki")
    disk = BadSector(1000)
    queue = opener.stored("disk", tmp_path, disk=disk)
    disk.bad = True
    assert read_by_offset(queue) == values[10:]
    assert queue.stats().ledger.dropped == {"corrupt": 10}
    assert queue.find_unsettled(100).spans == [(10, 40)]


# A writer with nothing to do


def count_rounds(monkeypatch: pytest.MonkeyPatch, kind: str) -> list[WriteJob]:
    """Count the rounds of the writer."""
    rounds: list[WriteJob] = []
    storage = DiskStorage if kind == "disk" else SpillStorage
    next_job = storage._next_job

    def counted(storage: Any) -> WriteJob:
        rounds.append(next_job(storage))
        return rounds[-1]

    monkeypatch.setattr(storage, "_next_job", counted)
    return rounds


def watch_idling(rounds: list[WriteJob]) -> None:
    """Check that the writer makes almost no rounds."""
    before = len(rounds)
    threading.Event().wait(NOTICEABLE * 4)
    assert len(rounds) - before <= 5


@pytest.mark.parametrize("kind", ["disk", "disk_assisted"])
def test_chunk_without_events_does_not_keep_the_writer_busy(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A process was killed after it created a chunk and before it wrote an event."""
    disk = HookedDisk()
    dying = opener.stored(kind, tmp_path / "dying", disk=disk, size=100)
    writes: list[Path | int] = []

    def die(file: Path | int) -> None:
        writes.append(file)
        if len(writes) == 2:  # the first write is the schema
            shutil.copytree(tmp_path / "dying", tmp_path / "left")

    disk.on("write", die, match=".chunk")
    dying.producer().publish_block(block_of(numbered(0, 95)))
    wait_until(lambda: store_of(dying).log.end > 0, "the writer")
    dying.close()
    left = tmp_path / "left"
    assert list(left.glob("*.chunk"))
    rounds = count_rounds(monkeypatch, kind)
    queue = opener.stored(kind, left, size=100)
    assert queue.stats().ledger.pending == 0
    watch_idling(rounds)
    queue.producer().publish_block(block_of(numbered(0, 95)))
    assert take(queue, 95) == numbered(0, 95)


@pytest.mark.parametrize("kind", ["disk", "disk_assisted"])
def test_drained_queue_becomes_idle(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """If everything on disk is settled, there is nothing to write or delete."""
    rounds = count_rounds(monkeypatch, kind)
    queue = opener.stored(kind, tmp_path, size=100, durability="always")
    queue.producer().publish_block(block_of(numbered(0, 95)))
    wait_until(lambda: store_of(queue).log.end > 0, "the writer")
    assert take(queue, 95) == numbered(0, 95)
    watch_idling(rounds)


# Acks whose callback hangs


class Slow(Acks):
    """An ack callback that hangs until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.go = threading.Event()

    def __call__(self, ack: Ack) -> None:
        self.reached.set()
        assert self.go.wait(PATIENCE)
        super().__call__(ack)


@pytest.mark.parametrize("level", ["accepted", "persisted", "delivered"])
def test_hanging_callback_keeps_a_bounded_number_of_acks(opener: Opener, level: str) -> None:
    """Acks that wait for the same listener are added up: it gets few acks for all events."""
    queue = opener("memory", size=1000)
    slow, others = Slow(), [Acks(), Acks()]
    producers = [queue.producer(ack=level, on_ack=acks) for acks in (slow, *others)]
    producers[0].publish(b"first")
    take(queue, 1)
    assert slow.reached.wait(PATIENCE)
    for _ in range(500):
        for producer in producers:
            producer.publish(b"later")
        take(queue, 3)
    assert [acks.received for acks in others] == [[], []]
    slow.go.set()
    slow.wait_for(501)
    for acks in others:
        acks.wait_for(500)
    for acks in (slow, *others):
        assert len(acks.received) <= 3
        ends = [ack.end for ack in acks.received]
        assert ends == sorted(ends)
    assert slow.received[-1].end == 1 + 3 * 499 + 1


# Publishers in line while the queue closes


def test_waiting_publishers_fail_when_the_disk_never_recovers(
    opener: Opener, tmp_path: Path, disk: HookedDisk
) -> None:
    """The close of a queue with a full disk wakes its publishers, and returns."""
    queue = opener.stored("disk", tmp_path, disk=disk, shutdown_timeout="50ms", **SMALL)
    disk.fail("write", error=errno.ENOSPC, times=None, match=".chunk")
    assert queue.producer().publish(b"unwritten")
    wait_until(lambda: bool(queue.storage_failure), "the trouble")
    waiting = Task(lambda: queue.producer().publish(b"waiting"))
    wait_for_line(queue, 1)
    with pytest.raises(EventsLost):
        Task(queue.close).result()
    with pytest.raises(QueueClosed):
        waiting.result()
    assert queue.stats().ledger.dropped == {"closed": 1}


# Synced acks


def test_concurrent_acks_share_a_sync(opener: Opener, tmp_path: Path, disk: HookedDisk) -> None:
    """While one sync runs the other acks gather, and one more sync covers all of them."""
    queue = opener.stored("disk", tmp_path / "queue", disk=disk, durability="always")
    publish(queue, numbered(0, 8))
    batches = [queue.get(1) for _ in range(8)]
    pause = disk.pause("sync", match="journal")
    before = queue.stats().meta_syncs
    first = Task(batches[0].done)
    pause.await_reached()
    others = [Task(batch.done) for batch in batches[1:]]
    wait_until(lambda: store_of(queue).journal.state().low == 8, "everybody's record")
    pause.end()
    for task in (first, *others):
        task.result()
    assert queue.stats().meta_syncs - before == 2
    assert queue.stats().ledger.delivered == 8


def test_syncing_drops_blocks_no_caller(opener: Opener, tmp_path: Path, disk: HookedDisk) -> None:
    """Only the publisher that drops the oldest events waits for the sync."""
    knobs = {"size": 4, "full_behavior": "drop_oldest", "durability": "always"}
    queue = opener.stored("disk", tmp_path / "queue", disk=disk, **knobs)
    publish(queue, numbered(0, 4))
    pause = disk.pause("sync", match="journal")
    dropping = Task(lambda: queue.producer().publish(b"004"))
    pause.await_reached()
    assert Task(queue.stats).result().ledger.dropped == {"oldest": 1}
    assert get_block_values(Task(queue.get).result().block) == [*numbered(1, 4), b"004"]
    assert dropping.running
    pause.end()
    assert dropping.result()


def test_failed_sync_of_drops_is_repeated(opener: Opener, tmp_path: Path, disk: HookedDisk) -> None:
    """The new event is in the queue even if the sync fails."""
    knobs = {"size": 4, "full_behavior": "drop_oldest", "durability": "always"}
    queue = opener.stored("disk", tmp_path / "queue", disk=disk, **knobs)
    publish(queue, numbered(0, 4))
    before = queue.stats().meta_syncs
    disk.fail("sync", match="journal")
    assert queue.producer().publish(b"004")
    wait_until(lambda: queue.stats().meta_syncs > before, "the next attempt")


def test_writer_is_idle_until_the_next_housekeeping(
    opener: Opener, tmp_path: Path, disk: HookedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer records dropped events once a second and does not poll."""
    rounds = count_rounds(monkeypatch, "disk")
    knobs = {"size": 1, "full_behavior": "drop_newest"}
    queue = opener.stored("disk", tmp_path / "queue", disk=disk, **knobs)
    publish(queue, [b"000"])
    before = len(rounds)
    for _ in range(2):
        assert not queue.producer().publish(b"dropped")
    journal = store_of(queue).journal
    wait_until(lambda: journal.state().totals.get(Outcome.NEWEST) == 2, "noted drops")
    assert len(rounds) - before < 10


# A writer that dies or hangs


@pytest.mark.parametrize("timeout", [None, PATIENCE])
def test_dead_writer_raises_its_error_in_all_callers(
    opener: Opener, tmp_path: Path, disk: HookedDisk, timeout: float | None
) -> None:
    """Publishers get an error with the cause, and the stats show it."""
    queue = opener.stored("disk", tmp_path / "queue", disk=disk, durability="always")
    waiting = queue.producer(ack="persisted")
    disk.on("write", Once(ZeroDivisionError("of all things")), match=".chunk")
    with pytest.raises(StorageFailed, match="of all things") as failed:
        waiting.publish(b"000", timeout=timeout)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    with pytest.raises(StorageFailed, match="of all things"):
        queue.producer()
    with pytest.raises(StorageFailed, match="of all things"):
        waiting.flush()
    assert queue.stats().trouble == "of all things"
    assert take(queue, 1) == [b"000"]


def test_memory_error_is_survived_like_a_full_disk(
    opener: Opener, tmp_path: Path, disk: HookedDisk
) -> None:
    """The writer tries again."""
    queue = opener.stored("disk", tmp_path / "queue", disk=disk, durability="always")
    lack = Once(MemoryError())
    disk.on("write", lack, match=".chunk")
    publish(queue, numbered(0, 3))
    assert lack.raised
    assert queue.stats().trouble == ""
    assert take(queue, 3) == numbered(0, 3)


def test_close_gives_up_a_hanging_disk(
    opener: Opener, tmp_path: Path, disk: HookedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close raises with the number of unwritten events."""
    monkeypatch.setattr(disk_queues, "HANG_SECONDS", NOTICEABLE)
    queue = opener.stored("disk", tmp_path / "queue", disk=disk, shutdown_timeout=NOTICEABLE)
    pause = disk.pause("write", match=".chunk")
    for value in numbered(0, 3):
        queue.producer().publish(value)
    with pytest.raises(EventsLost, match="with 3 accepted events unwritten"):
        Task(queue.close).result()
    assert queue.closed
    pause.end()


def test_close_waits_for_a_slow_disk(
    opener: Opener, tmp_path: Path, disk: HookedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close waits as long as the writer makes progress."""
    monkeypatch.setattr(disk_queues, "HANG_SECONDS", 4 * NOTICEABLE)
    knobs = SMALL | {"durability": "interval", "sync_interval": "1h"}
    queue = opener.stored("disk", tmp_path / "queue", disk=disk, shutdown_timeout=0.0, **knobs)
    disk.delay("write", seconds=NOTICEABLE, times=None, match=".chunk")
    values = long_values(0, 60)
    for value in values:
        queue.producer().publish(value)
    queue.close()
    disk.clear()
    assert drain_queue(opener.stored("disk", tmp_path / "queue")) == values
