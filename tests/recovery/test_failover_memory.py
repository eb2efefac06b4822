"""A disk that fails, and memory that takes its place: ``failover_memory``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contract.harness import Acks, Task, assert_never, wait_until
from tests.queue_internals import state_of
from tests.recovery.hooked_disk import Stored, drain_queue
from tests.recovery.stored import value, values
from turnlane.errors import AckPending, EventsLost, QueueFull
from turnlane.events import BASE_SCHEMA, block_of
from turnlane.node.commit_record import Commit, SettleRange
from turnlane.node.event_refs import read_range
from turnlane.node.node import Node
from turnlane.testing import FaultyDisk

KNOBS: dict[str, Any] = {
    "durability": "interval",
    "sync_interval": "10ms",
    "memory_bytes": "64Mi",
    "chunk_size": "64Mi",
    "write_buffer": "2Mi",
    "failover_memory": "64Ki",
}
ALWAYS: dict[str, Any] = {"durability": "always", "sync_interval": None}


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


def break_disk(
    disk: FaultyDisk, queue: Stored, match: str = "", ops: Sequence[str] = ("write", "sync")
) -> None:
    """Fail these operations of the queue until ``disk.clear()``."""
    for op in ops:
        disk.fail(op, times=None, match=match)
    queue.producer().publish(b"first")
    wait_until(lambda: queue.storage_failure, "the failing disk")


@pytest.mark.parametrize("op", ["write", "sync", "open"])
@pytest.mark.parametrize("durability", ["interval", "always"])
def test_publishers_continue_while_the_disk_fails(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk, op: str, durability: str
) -> None:
    knobs = KNOBS if durability == "interval" else KNOBS | ALWAYS
    queue = queues(path, disk=disk, **knobs)
    break_disk(disk, queue, ops=[op])
    acks = Acks()
    producer = queue.producer(ack="persisted", on_ack=acks)
    for each in values(0, 100):
        producer.publish(each, timeout=5)
    assert queue.stats().blocked_publishers == 0
    assert_never(lambda: acks.count > 0, "an ack for events that no disk has")
    disk.clear()
    acks.wait_for(100)
    queue.close()
    again = queues(path, **knobs)
    assert drain_queue(again) == [b"first", *values(0, 100)]


@pytest.mark.parametrize("is_full", [False, True])
def test_publishers_wait_without_failover_memory_or_while_the_disk_is_full(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk, *, is_full: bool
) -> None:
    queue = queues(path, disk=disk, **KNOBS | ({} if is_full else {"failover_memory": None}))
    if is_full:
        disk.fill()
        queue.producer().publish(b"first")
        wait_until(lambda: queue.storage_failure, "the full disk")
    else:
        break_disk(disk, queue)
    wait_until(lambda: queue.holds_publishers, "publishers to be held")
    with pytest.raises(QueueFull):
        queue.producer().publish(b"second", timeout=0.02)
    disk.clear()
    disk.unfill()
    queue.producer().publish(b"second")
    assert drain_queue(queue) == [b"first", b"second"]


def test_publishers_wait_once_the_failover_memory_is_full(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk
) -> None:
    queue = queues(path, disk=disk, **KNOBS)
    break_disk(disk, queue)
    producer = queue.producer()
    for number in range(8):
        assert producer.try_publish_block(block_of([value(number) + bytes(10_000)])) or number > 5
    with pytest.raises(QueueFull):
        producer.publish(b"x", timeout=0.02)
    accepted = queue.end
    blocked = Task(lambda: producer.publish(b"last"))
    wait_until(lambda: queue.stats().blocked_publishers == 1, "the blocked publisher")
    disk.clear()
    blocked.result()
    assert len(drain_queue(queue)) == accepted + 1
    assert queue.stats().ledger.dropped == {}


def test_oldest_events_leave_a_full_failover_memory_and_are_counted(
    queues: Callable[..., Stored],
    path: Path,
    disk: FaultyDisk,
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = queues(path, disk=disk, full_behavior="drop_oldest", **KNOBS)
    break_disk(disk, queue)
    acks = Acks()
    producer = queue.producer(ack="persisted", on_ack=acks)
    for number in range(50):
        producer.publish_block(block_of([value(number) + bytes(10_000)]))
    ledger = queue.stats().ledger
    lost = ledger.dropped["oldest"]
    assert ledger.adds_up
    assert ledger.pending * 10_000 <= 80_000
    assert [each for each in caplog.messages if "queue.failover_full" in each]
    disk.clear()
    wait_until(lambda: acks.count + acks.dropped == 50, "all acks")
    assert acks.dropped == lost - 1  # and the very first event, of another producer
    assert queue.producer(ack="persisted").publish(b"last")
    queue.close()
    again = queues(path, **KNOBS)
    assert again.stats().ledger.dropped == {"oldest": lost}
    found = drain_queue(again)
    assert found[-1] == b"last"
    assert [each[:6] for each in found[-6:-1]] == [b"%06d" % number for number in range(45, 50)]
    again.close()
    ledger = again.stats().ledger
    assert (ledger.accepted, ledger.delivered) == (52, 52 - lost)


def test_failover_memory_is_bounded_while_an_older_event_is_unread(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk
) -> None:
    queue = queues(path, disk=disk, full_behavior="drop_oldest", **KNOBS)
    assert queue.producer(ack="persisted").publish(b"old")
    break_disk(disk, queue)
    producer = queue.producer()
    for number in range(300):
        producer.publish_block(block_of([value(number) + bytes(100_000)]))
    stats = queue.stats()
    assert stats.ledger.dropped["oldest"] > 290
    sealed = list(state_of(queue).buffer)
    assert sum(block.nbytes for each in sealed for block in each.blocks or ()) < 300_000
    assert stats.memory_blocks < 10, "ranges without contents are joined"
    start, block = next(iter(read_range(queue, 2, queue.end)))
    assert block.column("value")[0].as_py()[:6] == b"%06d" % (start - 2)
    assert start + block.num_rows == queue.end
    disk.clear()
    wait_until(lambda: not queue.storage_failure, "the working disk")
    assert queue.producer(ack="persisted").publish(b"last")
    found = drain_queue(queue)
    assert (found[0], found[-1]) == (b"old", b"last")
    assert found[-2][:6] == b"%06d" % 299
    assert queue.stats().ledger.adds_up


def test_reader_finds_the_right_offsets_around_settled_events(
    queues: Callable[..., Stored], path: Path
) -> None:
    queue = queues(path, **KNOBS)
    producer = queue.producer()
    for number in range(0, 40, 4):
        producer.publish_block(block_of(values(number, number + 4)))
    for first, end in ((10, 13), (6, 9), (30, 40), (9, 10), (22, 23)):
        queue.settle(first, end)
    found: dict[int, Any] = {}
    for start, block in read_range(queue, 0, queue.end):
        found |= dict(enumerate(block.column("value").to_pylist(), start))
    left = [*range(6), *range(13, 22), *range(23, 30)]
    assert {at: each for at, each in found.items() if at in left} == {at: value(at) for at in left}
    assert all(each == value(at) for at, each in found.items())
    assert drain_queue(queue) == [value(at) for at in left]


def test_event_that_a_consumer_holds_is_not_dropped(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk
) -> None:
    queue = queues(path, disk=disk, full_behavior="drop_oldest", **KNOBS)
    break_disk(disk, queue, match="chunk")
    producer = queue.producer()
    producer.publish_block(block_of([b"held" + bytes(60_000)]))
    held = [queue.get(1, timeout=5), queue.get(1, timeout=5)]
    assert held[1].block.column("value")[0].as_py()[:4] == b"held"
    for number in range(20):
        producer.publish_block(block_of([value(number) + bytes(10_000)]))
    for batch in held:
        batch.done()
    ledger = queue.stats().ledger
    assert ledger.delivered == 2
    assert ledger.dropped["oldest"] + ledger.dropped.get("newest", 0) + ledger.pending == 20


def test_dropped_event_of_a_numbered_producer_is_not_taken_twice(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk
) -> None:
    queue = queues(path, disk=disk, full_behavior="drop_oldest", **KNOBS)
    break_disk(disk, queue)
    producer = queue.producer(producer_id="p")
    for number in range(30):
        producer.publish_block(block_of([value(number) + bytes(10_000)]), sequence=number)
    lost = queue.stats().ledger.dropped["oldest"]
    assert lost > 20
    disk.clear()
    assert producer.flush(20)
    wait_until(lambda: not queue.storage_failure, "the repaired disk")
    queue.close()
    again = queues(path, **KNOBS)
    producer = again.producer(producer_id="p")
    for number in range(30):
        assert producer.publish_block(block_of([value(number)]), sequence=number).repeated == 1
    assert again.stats().ledger.dropped == {"oldest": lost}
    producer.publish_block(block_of([b"new"]), sequence=30)
    assert drain_queue(again)[-1] == b"new"


def test_close_with_a_failing_disk_counts_the_events_in_memory(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk
) -> None:
    queue = queues(path, disk=disk, shutdown_timeout="100ms", **KNOBS)
    break_disk(disk, queue)
    for each in values(0, 50):
        queue.producer().publish(each, timeout=5)
    with pytest.raises(EventsLost, match="51 accepted events"):
        queue.close()
    ledger = queue.stats().ledger
    assert ledger.adds_up
    assert ledger.dropped == {"closed": 51}


def test_commit_settles_nothing_before_the_disk_has_its_events(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    """Events of the main queue stay there: memory does not replace the disk for a commit."""
    with Node(tmp_path, {"main": {}, "action": {"failover_memory": "1Mi"}}, disk=disk) as node:
        main, action = node.queue("main"), node.queue("action")
        main.producer(ack="persisted").publish_block(block_of(values(0, 10)))
        with node.stage("action", BASE_SCHEMA) as stage:
            stage.add(block_of(values(0, 10)))
            stages = [stage.finish()]
        disk.fail("write", times=None, match="chunk")
        commit = Task(lambda: node.commits.commit(Commit(stages, [SettleRange("main", 0, 10)])))
        wait_until(lambda: action.storage_failure, "the failing disk")
        wait_until(lambda: action.end == 10, "the events in memory")
        assert_never(lambda: main.low > 0, "the settlement")
        assert commit.running
        disk.clear()
        assert commit.result()
        assert main.low == 10
    with Node(tmp_path, {"main": {}, "action": {}}) as node:
        assert drain_queue(node.queue("action")) == values(0, 10)


def test_waiting_publishers_do_not_shorten_the_pauses_of_a_failing_disk(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk
) -> None:
    queue = queues(path, disk=disk, **KNOBS | {"failover_memory": "64Mi"})
    break_disk(disk, queue)
    before = queue.stats().disk_errors
    wait_until(lambda: queue.stats().disk_errors > before + 3, "a pause of some length")
    before = queue.stats().disk_errors
    producer = queue.producer(ack="persisted")
    for _ in range(200):
        with pytest.raises(AckPending):
            producer.publish(b"x", timeout=0.002)
    assert queue.stats().disk_errors < before + 20
    disk.clear()
    assert producer.publish(b"last")


def test_position_that_is_not_recorded_is_logged_once_in_an_outage(
    queues: Callable[..., Stored], path: Path, disk: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    queue = queues(path, disk=disk, **KNOBS)

    def await_failure_of(event: bytes) -> None:
        before = queue.stats().disk_errors
        queue.producer().publish(event)
        wait_until(lambda: queue.stats().disk_errors > before, "another failure")

    for _ in range(2):
        assert queue.producer(ack="persisted").publish(b"before")
        caplog.clear()
        disk.fail("write", times=None, match="journal")
        for each in values(0, 5):
            await_failure_of(each)
        lines = [each for each in caplog.messages if "journal.position_not_recorded" in each]
        assert len(lines) == 1
        disk.clear()
