"""Each event is settled once, by its batch, by its offset, or by both."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tests.contract.harness import (
    PATIENCE,
    Harness,
    Task,
    make_producer_with_acks,
    numbered,
    values_of,
)
from tests.queue_internals import state_of
from turnlane.errors import QueueEmpty
from turnlane.events import block_of
from turnlane.ledger import Outcome
from turnlane.queues.buffered import BufferedQueue

if TYPE_CHECKING:
    import pytest

    from turnlane.events import Block
from turnlane.queues.buffer import BlockRange
from turnlane.storage.reader import UnreadableRange


def opened(harness: Harness, count: int, **knobs: Any) -> BufferedQueue:
    """Open a queue with ``count`` events."""
    queue = harness.open(**knobs)
    assert isinstance(queue, BufferedQueue)
    queue.producer().publish_block(block_of(numbered(0, count)))
    return queue


def left(queue: BufferedQueue) -> list[bytes | None]:
    """Take and settle all remaining events; return their values."""
    values: list[bytes | None] = []
    try:
        while True:
            with queue.get(timeout=0) as batch:
                values += values_of(batch)
    except QueueEmpty:
        return values


def test_a_batch_settled_by_offset_frees_its_room_once(keeping: Harness) -> None:
    """A later done() is harmless; other events count as before."""
    queue = opened(keeping, 10)
    batch = queue.get(6)
    queue.settle(0, 6)
    assert (queue.stats().size, queue.stats().in_flight) == (4, 0)
    batch.done()
    assert queue.stats().size == 4
    assert queue.stats().ledger.delivered == 6
    assert left(queue) == numbered(6, 10)


def test_a_release_does_not_bring_back_events_settled_by_offset(keeping: Harness) -> None:
    """Only the unsettled events come again, in two pieces here, with the attempt counted."""
    queue = opened(keeping, 10)
    batch = queue.get(10)
    queue.settle(3, 6)
    assert (queue.stats().size, queue.stats().in_flight) == (7, 7)
    batch.release()
    again = [queue.get(10), queue.get(10)]
    assert [values_of(each) for each in again] == [numbered(0, 3), numbered(6, 10)]
    assert [each.attempt for each in again] == [2, 2]
    for each in again:
        each.done()
    assert left(queue) == []
    assert queue.stats().ledger.delivered == 10


def test_returned_events_can_be_settled_by_offset(keeping: Harness) -> None:
    """They are not handed out again, and their room is free."""
    queue = opened(keeping, 10)
    queue.get(4).release()
    queue.settle(1, 7)
    assert queue.stats().size == 4
    assert left(queue) == [*numbered(0, 1), *numbered(7, 10)]


def test_a_batch_of_which_part_was_settled_by_offset_settles_the_rest(keeping: Harness) -> None:
    """The first settlement of each event counts."""
    queue = opened(keeping, 10)
    batch = queue.get(10)
    queue.settle(0, 4)
    batch.dead()
    ledger = queue.stats().ledger
    assert (ledger.delivered, ledger.dead, ledger.pending) == (4, 6, 0)
    assert (queue.stats().size, queue.stats().bytes) == (0, 0)


def test_a_freed_batch_settled_by_offset_gives_back_the_rest_of_its_room(
    keeping: Harness,
) -> None:
    """free() has given back the bytes: they do not count twice."""
    queue = opened(keeping, 10)
    batch = queue.get(5)
    before = queue.stats().bytes
    batch.free()
    freed = queue.stats().bytes
    assert freed < before
    queue.settle(0, 5)
    assert queue.stats().bytes == freed
    assert queue.stats().size == 5


def test_publishers_get_no_more_room_than_there_is(keeping: Harness) -> None:
    """The bound holds although events are settled in both ways repeatedly."""
    queue = opened(keeping, 8, size=8, full_behavior="drop_newest")
    for _ in range(5):
        first = queue.low
        batch = queue.get(4)
        queue.settle(first, first + 4)
        batch.done()
        assert queue.producer().publish_block(block_of(numbered(0, 4))).dropped == 0
        pending = queue.stats().ledger.pending
        assert pending == 8
    assert queue.stats().ledger.adds_up


def test_acks_come_once_for_events_settled_twice(keeping: Harness) -> None:
    """There are exactly as many acks as events."""
    queue = keeping.open()
    assert isinstance(queue, BufferedQueue)
    producer, acks = make_producer_with_acks(queue)
    producer.publish_block(block_of(numbered(0, 6)))
    batch = queue.get(6)
    queue.settle(0, 3)
    batch.done()
    queue.settle(0, 6)
    acks.wait_for(6)


class SlowRecord:
    """Replaces ``settle`` of the storage: the first call waits for the test after its work."""

    def __init__(self, queue: BufferedQueue, monkeypatch: pytest.MonkeyPatch) -> None:
        storage = state_of(queue).storage
        self._record = storage.settle
        self.reached, self.go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(storage, "settle", self)

    def __call__(self, settled: BlockRange, outcome: Outcome) -> None:
        self._record(settled, outcome)
        if not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(PATIENCE)


def test_the_first_of_two_concurrent_settlements_decides_the_outcome(
    keeping: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it, by batch and by offset, and nothing is counted twice."""
    queue = opened(keeping, 10)
    batch = queue.get(8)
    slow = SlowRecord(queue, monkeypatch)
    first = Task(lambda: queue.settle(0, 5, Outcome.DEAD))
    assert slow.reached.wait(PATIENCE)
    others = [Task(lambda: queue.settle(3, 6)), Task(batch.done)]
    slow.go_on.set()
    for each in (first, *others):
        each.result()
    ledger = queue.stats().ledger
    assert (ledger.dead, ledger.delivered, ledger.pending) == (5, 3, 2)
    assert queue.stats().size == 2
    monkeypatch.undo()


def test_settling_by_offset_waits_for_a_batch_that_is_being_settled(
    disk_kind: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger and the journal agree: a restart changes nothing."""
    queue = opened(disk_kind, 10)
    batch = queue.get(5)
    slow = SlowRecord(queue, monkeypatch)
    dying = Task(batch.dead)
    assert slow.reached.wait(PATIENCE)
    settling = Task(lambda: queue.settle(0, 10))
    slow.go_on.set()
    dying.result()
    settling.result()
    before = queue.stats().ledger
    assert (before.dead, before.delivered) == (5, 5)
    monkeypatch.undo()
    queue.close()
    assert disk_kind.reopen().stats().ledger == before  # type: ignore[attr-defined]


def test_events_settled_during_a_disk_read_are_not_handed_out(
    disk: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer gets the unsettled events, and the room is freed once."""
    queue = opened(disk, 0)
    queue.producer(ack="persisted").publish_block(block_of(numbered(0, 10)))
    state_of(queue).buffer.drop_below(10)  # as after a restart: all events are only on disk
    storage = state_of(queue).storage
    fetch = storage.fetch

    def fetch_slowly(wanted: BlockRange) -> list[Block] | UnreadableRange:
        found = fetch(wanted)
        monkeypatch.undo()
        queue.settle(2, 5)
        return found

    monkeypatch.setattr(storage, "fetch", fetch_slowly)
    assert values_of(queue.get(10)) == numbered(0, 2)
    assert queue.stats().size == 7
    assert values_of(queue.get(10)) == numbered(5, 10)


def test_events_settled_by_offset_stay_settled_after_a_restart(disk_kind: Harness) -> None:
    """Batches that are done or released later do not change this."""
    queue = opened(disk_kind, 10)
    first, second = queue.get(5), queue.get(5)
    queue.settle(3, 8)
    first.done()
    second.release()
    queue.close()
    again = disk_kind.reopen()  # type: ignore[attr-defined]
    assert left(again) == numbered(8, 10)
    assert again.stats().ledger.delivered == 10


def test_events_returned_before_a_restart_and_settled_by_offset_delay_nothing(
    disk_kind: Harness,
) -> None:
    """The few other events are handed out."""
    queue = opened(disk_kind, 6)
    oldest, middle = queue.get(1), queue.get(3)
    middle.release()
    del oldest
    queue.close()
    again = disk_kind.reopen()  # type: ignore[attr-defined]
    again.settle(1, 4)
    assert left(again) == [*numbered(0, 1), *numbered(4, 6)]
