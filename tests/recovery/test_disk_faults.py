"""Queues on a full, failing, slow, damaged, read-only or locked disk."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.conftest import skip_or_fail
from tests.contract.harness import PATIENCE, Acks, Task, assert_never, wait_until
from tests.queue_internals import store_of
from tests.recovery.hooked_disk import Stored, drain_queue, get_block_values, take
from tests.recovery.stored import KNOBS, publish, value, values
from turnlane.errors import (
    AckNotStored,
    DirectoryLocked,
    DirectoryUnusable,
    EventsLost,
    QueueFull,
)
from turnlane.events import block_of
from turnlane.queues import open_queue
from turnlane.storage.disk_io import Disk
from turnlane.testing import FaultyDisk, ManualClock


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


both_kinds = pytest.mark.parametrize("kind", ["disk", "disk_assisted"])


# A full disk


def test_full_disk_makes_the_queue_full(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk
) -> None:
    """Publishers are refused or wait, and are admitted when there is space again."""
    queue = queues(path, disk=disk)
    producer = queue.producer()
    disk.fill()
    producer.publish(value(0))
    wait_until(lambda: queue.stats().disk_full > 0, "the full disk")
    wait_until(lambda: not producer.try_publish(value(999)), "the full queue")
    accepted = queue.end
    with pytest.raises(QueueFull):
        producer.publish(value(999), timeout=0.02)
    blocked = Task(lambda: producer.publish(value(777)))
    wait_until(lambda: queue.stats().blocked_publishers == 1, "the blocked publisher")
    disk.unfill()
    assert blocked.result()
    found = drain_queue(queue)
    assert found == [value(0), *[value(999)] * (accepted - 1), value(777)]


LARGE: dict[str, Any] = {"chunk_size": "64Mi", "memory_bytes": "64Mi", "write_buffer": "1Mi"}
"""Knobs of a queue for large blocks."""


def large_block(events: int) -> pa.RecordBatch:
    """Return a block of events of 64 KiB."""
    return block_of([b"%06d" % number + bytes(65_530) for number in range(events)])


@both_kinds
def test_block_larger_than_the_free_space_is_written_in_parts(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk, kind: str
) -> None:
    """The part that fits is on disk; the rest follows when there is space again."""
    # Spilling ends at the low watermark, so a low watermark of 0 sends all of the block to disk.
    knobs = LARGE if kind == "disk" else {"chunk_size": "64Mi", "low_watermark": 0}
    queue = queues(path, kind, disk=disk, **knobs)
    disk.fill(after_bytes=5 << 20)
    queue.producer().publish_block(large_block(100))
    wait_until(lambda: queue.stats().disk_full > 0, "the full disk")
    written = store_of(queue).log.end
    assert 32 <= written < 80
    disk.unfill()
    wait_until(lambda: store_of(queue).log.end == 100, "the rest")
    assert len(drain_queue(queue)) == 100


def test_kill_between_parts_of_a_numbered_block_accepts_only_the_rest_again(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk
) -> None:
    """Each part is stored with its own number."""
    queue = queues(path, disk=disk, **LARGE)
    producer = queue.producer(producer_id="me")
    disk.fill(after_bytes=5 << 20)
    producer.publish_block(large_block(100), sequence=7)
    wait_until(lambda: queue.stats().disk_full > 0, "the full disk")
    left = shutil.copytree(path, path.with_name("left"))
    disk.unfill()
    again = queues(left, **LARGE)
    written = again.end
    assert written >= 32
    sent = again.producer(producer_id="me").publish_block(large_block(100), sequence=7)
    assert (sent.repeated, sent.accepted) == (written, 100 - written)
    assert get_block_values(large_block(100)) == drain_queue(again)


def test_acks_free_space_on_a_full_disk(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk
) -> None:
    """Acks alone free the space: settled chunks are deleted, even the active one."""
    queue = queues(path, disk=disk)
    producer = queue.producer()
    disk.fill(after_bytes=20_000)
    publishing = Task(lambda: publish(producer, 0, 1000))
    for first in range(0, 1000, 50):
        assert take(queue, 50) == values(first, first + 50)
    publishing.result()
    assert queue.stats().disk_full > 0
    assert queue.stats().ledger.delivered == 1000


def test_full_disk_releases_the_chunk_being_written_once_settled(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk
) -> None:
    """If all its events are settled, the only chunk is deleted to make room."""
    queue = queues(path, disk=disk, chunk_size="1Mi")
    producer = queue.producer(ack="persisted")
    publish(producer, 0, 50)
    disk.fill()
    waiting = Task(lambda: producer.publish(value(50)))
    wait_until(lambda: queue.stats().disk_full > 0, "the full disk")
    assert take(queue, 50) == values(0, 50)
    assert waiting.result()
    assert take(queue, 1) == [value(50)]


def test_disk_assisted_queue_on_a_full_disk_works_in_memory(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk
) -> None:
    """It accepts events until its memory is full; consumers make room again."""
    queue = queues(path, "disk_assisted", disk=disk)
    producer = queue.producer()
    disk.fill()
    publish(producer, 0, 100)
    wait_until(lambda: queue.stats().disk_full > 0, "the full disk")
    assert not producer.try_publish(value(999))
    with pytest.raises(QueueFull):
        producer.publish(value(999), timeout=0.02)
    blocked = Task(lambda: publish(producer, 100, 150))
    assert take(queue, 50) == values(0, 50)
    blocked.result()
    assert not producer.try_publish(value(999))
    disk.unfill()
    publish(producer, 150, 400)
    assert drain_queue(queue) == values(50, 400)


@contextlib.contextmanager
def mount_small_file_system(path: Path, size: str) -> Iterator[Path]:
    """Mount a small file system; skip the test where that is not allowed."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "turnlane-test", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        skip_or_fail("there is no mount command")
    if done.returncode:
        skip_or_fail(f"may not mount a file system: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@both_kinds
def test_queue_survives_a_real_full_file_system(
    queues: Callable[..., Stored], tmp_path: Path, kind: str
) -> None:
    """12 MB pass in order through a disk of 4 MB, which is full again and again."""
    with mount_small_file_system(tmp_path / "small", "4m") as small:
        queue = queues(small / "queue", kind, chunk_size="256Ki")
        producer = queue.producer()
        block = [b"%06d" % number + bytes(1000) for number in range(200)]

        def publish_all() -> None:
            for first in range(0, 12_000, 200):
                numbered = [b"%06d" % (first + at) + each[6:] for at, each in enumerate(block)]
                producer.publish_block(block_of(numbered, timestamps=1))

        publishing = Task(publish_all)
        wait_until(lambda: queue.stats().disk_full > 0 or not publishing.running, "the full disk")
        assert queue.stats().disk_full > 0
        assert publishing.running
        found = take(queue, 12_000)
        publishing.result()
        assert [int(each[:6]) for each in found] == list(range(12_000))
        assert queue.stats().ledger.delivered == 12_000
        queue.close()


# A disk that fails


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("op", ["sync", "write"])
def test_queue_recovers_from_a_failing_disk(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk, op: str, times: int
) -> None:
    """The writer retries until everything is written; then each ack comes once."""
    queue = queues(path, disk=disk)
    acks = Acks()
    producer = queue.producer(ack="persisted", on_ack=acks)
    publish(producer, 0, 20)
    acks.wait_for(20)
    disk.fail(op, times=times, match=".chunk")
    publish(producer, 20, 60)
    acks.wait_for(60)
    assert queue.stats().disk_errors >= times
    queue.close()
    assert drain_queue(queues(path)) == values(0, 60)


@pytest.mark.parametrize("op", ["sync", "write"])
def test_failing_disk_acks_nothing(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk, op: str
) -> None:
    """Acks come only after the disk has stored the events, without another call."""
    queue = queues(path, disk=disk)
    acks = Acks()
    producer = queue.producer(ack="persisted", on_ack=acks)
    disk.fail(op, times=None, match=".chunk")
    producer.publish(value(0))
    wait_until(lambda: queue.stats().disk_errors >= 3, "three errors")
    assert_never(lambda: acks.count > 0, "an ack")
    disk.clear()
    acks.wait_for(queue.end)


@pytest.mark.parametrize("durability", ["always", "interval"])
@pytest.mark.parametrize("op", ["sync", "write"])
def test_close_reports_events_that_were_never_written(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk, op: str, durability: str
) -> None:
    """The close raises; no lost event was acked, and the ledger counts the losses."""
    queue = queues(path, disk=disk, durability=durability, shutdown_timeout="100ms")
    acks = Acks()
    producer = queue.producer(ack="persisted", on_ack=acks)
    disk.fail(op, times=None, match=".chunk")
    publish(producer, 0, 3)
    with pytest.raises(EventsLost, match="accepted events"):
        queue.close()
    assert acks.count == 0
    lost = queue.stats().ledger.dropped.get("closed", 0)
    assert queue.stats().ledger.adds_up
    again = queues(path)
    assert again.stats().ledger.accepted == queue.stats().ledger.accepted
    assert drain_queue(again) == values(lost, 3), (
        "what was written, though not synced, is still there"
    )


def test_close_reports_a_failed_sync(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk
) -> None:
    """Written events are not safe before they are synced, even old ones."""
    rarely = {"durability": "interval", "sync_interval": "1h", "stale_flush": "1h"}
    large = {"chunk_size": "1Mi", "memory_bytes": "1Mi"}
    queue = queues(path, disk=disk, shutdown_timeout="100ms", **large, **rarely)
    publish(queue.producer(ack="persisted"), 0, 1)
    disk.fail("sync", times=None, match=".chunk")
    queue.producer().publish_block(block_of(values(1, 100), timestamps=1))
    wait_until(lambda: queue.stats().flushes > 1, "the second write")
    with pytest.raises(EventsLost, match="accepted events"):
        queue.close()


def test_torn_write_is_repeated(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk
) -> None:
    """The torn frame is cut off before it is written again."""
    queue = queues(path, disk=disk)
    producer = queue.producer(ack="persisted")
    publish(producer, 0, 5)
    for keep in (0, 1, 31, 32, 33, 100, 150):
        disk.tear(keep_bytes=keep, match=".chunk")
        producer.publish(value(5 + keep))
    queue.close()
    again = queues(path)
    expected = [value(5 + keep) for keep in (0, 1, 31, 32, 33, 100, 150)]
    assert drain_queue(again) == values(0, 5) + expected
    assert again.stats().quarantined == 0


@both_kinds
@pytest.mark.parametrize("op", ["write", "sync"])
def test_busy_queue_survives_scattered_disk_errors(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk, kind: str, op: str
) -> None:
    """Many failures under load, on any file, lose, double or reorder no event."""
    queue = queues(path, kind, disk=disk)
    for nth in range(2, 60, 3):
        disk.fail(op, nth)
    producer = queue.producer()
    publishing = Task(lambda: publish(producer, 0, 2000))
    found: list[bytes] = []
    while len(found) < 1000:
        batch = queue.get(20, timeout=PATIENCE)
        found += get_block_values(batch.block)
        settle_batch(batch.done)
    publishing.result()
    queue.close()
    assert found + drain_queue(queues(path, kind)) == values(0, 2000)


def settle_batch(settle: Callable[[], None]) -> None:
    """Call ``done()`` until it succeeds."""
    for _ in range(100):
        try:
            settle()
        except AckNotStored:
            continue
        return
    raise AssertionError("the ack is never stored")


def test_waiting_publishers_share_one_slow_sync(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk
) -> None:
    """Twenty waiting publishers need only a few more syncs than one."""
    queue = queues(path, disk=disk, chunk_size="1Mi")
    disk.delay("sync", seconds=0.02, times=None, match=".chunk")

    def publish_ten(first: int) -> Task[None]:
        producer = queue.producer(ack="persisted")
        return Task(lambda: publish(producer, first, first + 10))

    tasks = [publish_ten(first) for first in range(0, 200, 10)]
    for task in tasks:
        task.result()
    assert queue.stats().syncs <= 200 / 5
    assert sorted(drain_queue(queue)) == values(0, 200)


def test_failed_done_leaves_the_batch_with_the_consumer(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk
) -> None:
    """The failed done() raises, changes nothing, and can be called again."""
    queue = queues(path, disk=disk)
    acks = Acks()
    producer = queue.producer(ack="delivered", on_ack=acks)
    publish(producer, 0, 10)
    persisted = queue.producer(ack="persisted")
    publish(persisted, 10, 11)
    batch = queue.get(10)
    disk.fail("write", times=2, match="journal")
    for _ in range(2):
        with pytest.raises(AckNotStored):
            batch.done()
        assert queue.stats().in_flight == 10
        assert acks.count == 0
    batch.done()
    acks.wait_for(10)
    queue.close()
    assert drain_queue(queues(path)) == [value(10)]


def test_batch_can_be_released_after_done_failed(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk
) -> None:
    """After a failed done() the other methods work too."""
    queue = queues(path, disk=disk)
    publish(queue.producer(ack="persisted"), 0, 10)
    batch = queue.get(10)
    disk.fail("write", match="journal")
    with pytest.raises(AckNotStored):
        batch.done()
    batch.release()
    again = queue.get(10)
    assert again.attempt == 2
    assert get_block_values(again.block) == values(0, 10)


# A directory that cannot be opened


@both_kinds
@pytest.mark.parametrize("op", ["open", "write", "rename", "allocate"])
def test_unwritable_directory_is_named_in_the_error(
    path: Path, disk: FaultyDisk, kind: str, op: str
) -> None:
    """The error names the directory, at every step of the opening that can fail."""
    disk.fail(op, error=errno.EROFS, times=None)
    with pytest.raises(DirectoryUnusable, match=str(path)):
        open_queue(path=path, disk=disk, **KNOBS[kind])


@both_kinds
def test_read_only_file_system_is_named_in_the_error(
    queues: Callable[..., Stored], tmp_path: Path, kind: str
) -> None:
    """The same for a new queue and for an existing one."""
    with mount_small_file_system(tmp_path / "small", "4m") as small:
        queue = queues(small / "old", kind)
        publish(queue.producer(), 0, 10)
        queue.close()
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        for name in ("old", "new"):
            with pytest.raises(DirectoryUnusable, match=str(small / name)):
                queues(small / name, kind)
        subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
        again = queues(small / "old", kind)
        assert drain_queue(again) == values(0, 10)
        again.close()


@both_kinds
def test_second_process_cannot_open_the_queue(
    queues: Callable[..., Stored], path: Path, kind: str
) -> None:
    """The error names the process that has the queue. After its close the queue opens."""
    knobs = json.dumps({**KNOBS[kind], "path": str(path)})
    program = f"""
import json, sys
from turnlane.queues import open_queue
with open_queue(**json.loads({knobs!r})):
    print("open", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(DirectoryLocked, match=rf"{path}.*\b{other.pid}\b"):
            queues(path, kind)
        other.communicate()
    queues(path, kind)


# A clock that jumps


@both_kinds
def test_jumping_clock_changes_only_timestamps(
    queues: Callable[..., Stored], path: Path, kind: str
) -> None:
    """After a jump by years, events have the time of the clock; order and ledger are right."""
    clock = ManualClock()
    queue = queues(path, kind, clock=clock)
    producer = queue.producer()
    said: list[int] = []
    for number, jump in enumerate([0, 3e8, -6e8, 1, -1, 3e8] * 10):
        clock.jump(jump)
        said.append(clock.time_ns() // 1000)
        producer.publish(value(number))
    queue.close()
    again = queues(path, kind, clock=ManualClock(time_ns=0))
    found: list[int] = []
    seen: list[bytes] = []
    while len(seen) < 60:
        with again.get(7, timeout=PATIENCE) as batch:
            seen += get_block_values(batch.block)
            stamps = batch.block.column("timestamp").cast(pa.int64()).to_pylist()
            found += [stamp for stamp in stamps if stamp is not None]
    assert seen == values(0, 60)
    assert found == said
    assert again.stats().ledger.delivered == 60


# The cost of opening


class CountingDisk(Disk):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        self.bytes_read = 0

    def read(self, fd: int, length: int, at: int) -> pa.Buffer:
        found = super().read(fd, length, at)
        self.bytes_read += len(found)
        return found


def test_opening_costs_the_same_for_any_amount_of_data(
    queues: Callable[..., Stored], tmp_path: Path
) -> None:
    """With twenty times the data, opening reads as many bytes."""
    read = {}
    for events in (1000, 20_000):
        path = tmp_path / str(events)
        queue = queues(path, chunk_size="64Ki", durability="interval")
        publish(queue.producer(), 0, events)
        queue.close()
        disk = CountingDisk()
        queues(path, disk=disk, chunk_size="64Ki").close()
        read[events] = disk.bytes_read
    assert read[20_000] <= read[1000] * 1.1 + 4096
