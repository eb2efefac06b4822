"""A producer that is closed with ``cancel`` takes its unread events back out of memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.harness import (
    PATIENCE,
    DiskAssistedHarness,
    DiskHarness,
    Harness,
    MemoryHarness,
    Task,
    line_up,
    make_producer_with_acks,
    numbered,
    publish_all,
    wait_until,
)
from turnlane.errors import QueueClosed
from turnlane.events import block_of
from turnlane.queues import open_queue
from turnlane.queues.api import AckLevel, Producer, Queue
from turnlane.queues.settings import Kind
from turnlane.testing import ModelNode

IN_MEMORY = (MemoryHarness, DiskAssistedHarness)


@pytest.fixture(params=IN_MEMORY, ids=lambda made: made.kind.value)
def in_memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """A harness for each kind whose events wait in the memory of this process."""
    made: Harness = request.param(tmp_path)
    yield made
    made.close()


def count_cancelled(queue: Queue) -> int:
    ledger = queue.stats().ledger
    assert ledger.adds_up
    return ledger.dropped.get("cancelled", 0)


def test_cancelled_producer_publishes_no_more(any_kind: Harness) -> None:
    queue = any_kind.open()
    producer = queue.producer()
    for _ in range(2):  # the second call does nothing
        producer.close(cancel=True)
    for publish in (producer.publish, producer.try_publish):
        with pytest.raises(QueueClosed):
            publish(b"late")
    for publish_block in (producer.publish_block, producer.try_publish_block):
        with pytest.raises(QueueClosed):
            publish_block(block_of([b"late"]))
    assert queue.stats().ledger.accepted == 0


def test_cancel_removes_only_unread_events_of_this_producer(any_kind: Harness) -> None:
    """Every kind keeps the events of others, in order, and counts every event once."""
    queue = any_kind.open(stalled=True)
    mine, other = queue.producer(), queue.producer()
    values = numbered(0, 40)
    for value in values[:20]:
        (mine if int(value) % 3 else other).publish(value)
    mine.publish_block(block_of(values[20:25]))
    other.publish_block(block_of(values[25:35]))
    publish_all(mine, values[35:])
    mine.close(cancel=True)
    cancelled = count_cancelled(queue)
    expected = {Kind.DIRECT: {0}, Kind.DISK: {0}, Kind.PROXY: set(range(24))}
    assert cancelled in expected.get(any_kind.kind, {23})
    any_kind.resume()
    received = any_kind.receive(queue, 40 - cancelled)
    kept = [value for value in values if int(value) % 3 == 0 and int(value) < 20] + values[25:35]
    assert [value for value in received if value in kept] == kept
    assert received == sorted(received)  # type: ignore[type-var]
    wait_until(lambda: queue.stats().ledger.pending == 0)
    assert queue.stats().ledger.accepted == 40
    assert count_cancelled(queue) == cancelled


def test_cancel_gives_room_to_blocked_publishers_of_others(memory: Harness) -> None:
    queue = memory.open(size=4, stalled=True)
    mine, other = queue.producer(), queue.producer()
    other.publish(b"000")
    publish_all(mine, numbered(1, 4))
    blocked = line_up(
        queue,
        lambda: mine.publish(b"004"),
        lambda: other.publish(b"005"),
        lambda: mine.publish_block(block_of([b"006"])).accepted > 0,
    )
    mine.close(cancel=True)
    for own in (blocked[0], blocked[2]):
        with pytest.raises(QueueClosed, match="cancelled"):
            own.result()
    assert blocked[1].result()
    assert count_cancelled(queue) == 3
    assert queue.stats().ledger.accepted == 5
    assert memory.receive(queue, 2) == [b"000", b"005"]


def test_cancel_wakes_blocked_publishers_of_every_kind(buffered_kind: Harness) -> None:
    queue = buffered_kind.open(size=1, stalled=True)
    producer = queue.producer()
    queue.producer().publish(b"000")
    blocked = line_up(
        queue, lambda: producer.publish(b"001"), lambda: producer.publish(b"002", timeout=600)
    )
    producer.close(cancel=True)
    for publisher in blocked:
        with pytest.raises(QueueClosed, match="cancelled"):
            publisher.result()
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 1) == [b"000"]
    assert queue.stats().ledger.accepted == 1


def test_cancel_wakes_a_publisher_that_flow_control_slows_down(buffered_kind: Harness) -> None:
    queue = buffered_kind.open(size=4, full_delay_mark=1, stalled=True)
    queue.producer().publish(b"000")
    patient = queue.producer(flow="full")
    [publisher] = line_up(queue, lambda: patient.publish(b"001"))
    patient.close(cancel=True)
    with pytest.raises(QueueClosed, match="cancelled"):
        publisher.result()
    assert queue.stats().ledger.accepted == 1
    assert queue.stats().blocked_publishers == 0


@pytest.mark.parametrize("level", [AckLevel.PERSISTED, AckLevel.DELIVERED])
@pytest.mark.parametrize("pieces", [1, 3])
def test_cancel_wakes_publishers_that_wait_for_the_ack(
    in_memory: Harness, level: AckLevel, pieces: int
) -> None:
    queue = in_memory.open(size=9, stalled=True)
    queue.producer().publish(b"000")
    waiting = queue.producer(ack=level)
    single = Task(lambda: waiting.publish(b"001"))
    wait_until(lambda: queue.stats().ledger.accepted == 2)
    block = block_of(numbered(2, 4 + pieces))
    whole = Task(lambda: waiting.publish_block(block))
    wait_until(lambda: queue.stats().ledger.accepted == 4 + pieces)
    waiting.close(cancel=True)
    for task in (single, whole):
        with pytest.raises(QueueClosed, match="cancelled"):
            task.result()
    assert count_cancelled(queue) == 3 + pieces


def test_cancelled_oldest_event_is_not_reported_as_lost_by_the_disk(in_memory: Harness) -> None:
    queue = in_memory.open(stalled=True)
    waiting = queue.producer(ack=AckLevel.DELIVERED)
    publisher = Task(lambda: waiting.publish(b"000"))
    wait_until(lambda: queue.stats().ledger.accepted == 1)
    waiting.close(cancel=True)
    with pytest.raises(QueueClosed, match="cancelled"):
        publisher.result()


def test_cancelled_events_are_never_acked(in_memory: Harness) -> None:
    queue = in_memory.open(stalled=True)
    mine, my_acks = make_producer_with_acks(queue)
    other, other_acks = make_producer_with_acks(queue)
    for number, value in enumerate(numbered(0, 10)):
        (mine if number % 2 else other).publish(value)
    mine.close(cancel=True)
    in_memory.receive(queue, 5)
    other_acks.wait_for(5)
    wait_until(lambda: my_acks.dropped == 5)
    assert my_acks.count == 0
    assert other_acks.dropped == 0


def test_events_in_flight_and_given_back_are_not_cancelled(in_memory: Harness) -> None:
    queue = in_memory.open(stalled=True)
    producer, acks = make_producer_with_acks(queue)
    publish_all(producer, numbered(0, 6))
    held, returned = queue.get(2, timeout=PATIENCE), queue.get(2, timeout=PATIENCE)
    returned.release()
    producer.close(cancel=True)
    assert count_cancelled(queue) == 2
    held.done()
    assert in_memory.receive(queue, 2) == numbered(2, 4)
    acks.wait_for(4)
    wait_until(lambda: acks.dropped == 2)
    assert queue.stats().ledger.pending == 0


def test_events_settled_by_offset_are_not_cancelled(memory: Harness) -> None:
    queue = memory.open()
    producer = queue.producer()
    publish_all(producer, numbered(0, 6))
    queue.settle(2, 4)  # type: ignore[attr-defined]
    producer.close(cancel=True)
    ledger = queue.stats().ledger
    assert (ledger.delivered, ledger.dropped, ledger.pending) == (2, {"cancelled": 4}, 0)


def test_repeated_block_of_a_numbered_producer_claims_no_events_of_others(memory: Harness) -> None:
    queue = memory.open()
    mine = queue.producer(producer_id="mine")
    mine.publish_block(block_of(numbered(0, 2)), sequence=0)
    publish_all(queue.producer(), numbered(2, 4))
    assert mine.publish_block(block_of(numbered(0, 2)), sequence=0).repeated == 2
    publish_all(queue.producer(), numbered(4, 6))
    mine.close(cancel=True)
    assert count_cancelled(queue) == 2
    assert memory.receive(queue, 4) == numbered(2, 6)


def test_many_interleaved_events_are_told_apart(memory: Harness) -> None:
    """The producers remember thousands of runs; runs of events that were read are forgotten."""
    queue = memory.open(size=20_000)
    mine, other = queue.producer(), queue.producer()
    for number in range(6_000):
        (mine if number % 2 else other).publish(b"%d" % number)
        if number % 8 == 7:
            memory.receive(queue, 4)
    left = 3_000
    mine.close(cancel=True)
    cancelled = count_cancelled(queue)
    assert cancelled == left // 2
    received = memory.receive(queue, left - cancelled)
    assert received == [b"%d" % number for number in range(3_000, 6_000, 2)]
    assert len(mine._runs) < 6_000  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["disk", "disk_assisted"])
def test_runs_of_events_on_disk_are_not_remembered(tmp_path: Path, kind: str) -> None:
    """A disk holds far more events than memory has room for what producers remember of them."""
    knobs: dict[str, Any] = {"size": 1_000, "high_watermark": 500, "low_watermark": 100}
    with open_queue(kind=kind, path=tmp_path, **knobs if kind == "disk_assisted" else {}) as queue:
        mine, other = queue.producer(), queue.producer()
        for number in range(20_000):
            (mine if number % 2 else other).publish(b"%d" % number)
        assert len(mine._runs) < 5_000  # type: ignore[attr-defined]
        assert queue.stats().ledger.pending == 20_000


def test_cancel_during_publishing_leaves_no_event_behind(in_memory: Harness) -> None:
    """Each event that a cancelled producer published was read, or is counted as cancelled."""
    queue = in_memory.open(size=1_000_000)
    numbers = itertools.count()
    started = threading.Barrier(5)

    def publish(producer: Producer) -> int:
        started.wait(PATIENCE)
        for accepted in itertools.count():
            try:
                producer.publish(b"%d" % next(numbers))
            except QueueClosed:
                return accepted
        raise AssertionError

    producers = [queue.producer() for _ in range(4)]
    tasks = [Task(lambda own=each: publish(own)) for each in producers]  # type: ignore[misc]
    started.wait(PATIENCE)
    wait_until(lambda: queue.stats().ledger.accepted > 2_000)
    received = len(in_memory.receive(queue, 500))
    for producer in producers:
        producer.close(cancel=True)
    accepted = sum(task.result() for task in tasks)
    ledger = queue.stats().ledger
    assert ledger.accepted == accepted
    assert ledger.pending == 0
    assert (ledger.delivered, count_cancelled(queue)) == (received, accepted - received)


def test_proxy_cancels_events_that_were_not_sent() -> None:
    node = ModelNode()
    node.leave()
    with open_queue(kind="proxy", transport=node) as queue:
        mine, other = queue.producer(), queue.producer()
        for number, value in enumerate(numbered(0, 10)):
            (mine if number % 2 else other).publish(value)
        mine.close(cancel=True)
        assert count_cancelled(queue) == 5
        node.come_back()
        assert node.wait_for(lambda: len(node.values()) == 5)
        assert node.values() == numbered(0, 10)[::2]
        node.become_eager("delivered")
        wait_until(lambda: queue.stats().ledger.delivered == 5)
        assert queue.stats().ledger.pending == 0


def test_disk_queue_keeps_the_events_of_a_cancelled_producer(disk: DiskHarness) -> None:
    queue = disk.open()
    producer = queue.producer(ack="persisted")
    publish_all(producer, numbered(0, 3))
    producer.close(cancel=True)
    assert count_cancelled(queue) == 0
    queue.close()
    assert disk.receive(disk.reopen(), 3) == numbered(0, 3)


def test_spilled_events_are_not_cancelled_and_the_ledger_survives(
    disk_assisted: DiskAssistedHarness,
) -> None:
    queue = disk_assisted.open(size=100, high_watermark=20, low_watermark=10)
    producer = queue.producer()
    publish_all(producer, numbered(0, 21))
    wait_until(lambda: queue.stats().size <= 10)
    in_memory = queue.stats().size
    other = queue.producer()
    publish_all(other, numbered(21, 25))
    producer.close(cancel=True)
    assert count_cancelled(queue) == in_memory
    queue.close()
    again = disk_assisted.reopen()
    assert count_cancelled(again) == in_memory
    assert again.stats().ledger.accepted == 25
    kept = numbered(0, 21 - in_memory) + numbered(21, 25)
    assert disk_assisted.receive(again, len(kept)) == kept
