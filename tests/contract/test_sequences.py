"""A queue recognizes events that a numbered producer sends again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.harness import (
    PATIENCE,
    DiskHarness,
    Harness,
    Task,
    line_up,
    make_producer_with_acks,
    numbered,
    values_of,
)
from turnlane.errors import EventsLost
from turnlane.events import block_of
from turnlane.queues import open_queue
from turnlane.queues.api import AckLevel, Batch, Published, Queue
from turnlane.testing import FaultyDisk


def test_a_repeated_block_is_taken_once(buffered_kind: Harness) -> None:
    """The same sequence under the same producer id is a repeat, on any connection."""
    queue = buffered_kind.open()
    first = queue.producer(producer_id="me")
    assert first.publish_block(block_of(numbered(0, 3)), sequence=0).accepted == 3
    again = queue.producer(producer_id="me").publish_block(block_of(numbered(0, 3)), sequence=0)
    assert (again.accepted, again.repeated, again.dropped) == (0, 3, 0)
    first.publish_block(block_of(numbered(3, 5)), sequence=3)
    assert buffered_kind.receive(queue, 5) == numbered(0, 5)
    assert queue.stats().ledger.accepted == 5


def test_only_the_new_part_of_an_overlapping_block_is_taken(buffered_kind: Harness) -> None:
    """Events that the queue has are left out; the others are appended."""
    queue = buffered_kind.open()
    producer = queue.producer(producer_id="me")
    producer.publish_block(block_of(numbered(0, 3)), sequence=0)
    published = producer.publish_block(block_of(numbered(1, 6)), sequence=1)
    assert (published.first, published.accepted, published.repeated) == (3, 3, 2)
    assert buffered_kind.receive(queue, 6) == numbered(0, 6)


def test_a_gap_in_the_sequence_is_accepted(buffered_kind: Harness) -> None:
    """A missing number may come later: a lower number is a repeat only if the queue took it."""
    queue = buffered_kind.open()
    producer = queue.producer(producer_id="me")
    producer.publish_block(block_of(numbered(0, 2)), sequence=0)
    assert producer.publish_block(block_of(numbered(10, 12)), sequence=10).accepted == 2
    late = producer.publish_block(block_of(numbered(2, 10)), sequence=2)
    assert (late.accepted, late.repeated) == (8, 0)
    again = producer.publish_block(block_of(numbered(0, 12)), sequence=0)
    assert (again.accepted, again.repeated) == (0, 12)
    assert buffered_kind.receive(queue, 12) == numbered(0, 2) + numbered(10, 12) + numbered(2, 10)


def test_try_publish_block_recognizes_repeats(buffered_kind: Harness) -> None:
    """A repeat counts as success."""
    queue = buffered_kind.open()
    producer = queue.producer(producer_id="me")
    assert producer.try_publish_block(block_of(numbered(0, 2)), sequence=0) is not None
    again = producer.try_publish_block(block_of(numbered(0, 2)), sequence=0)
    assert again is not None
    assert (again.accepted, again.repeated) == (0, 2)
    assert buffered_kind.receive(queue, 2) == numbered(0, 2)


def test_producers_have_numbers_of_their_own(buffered_kind: Harness) -> None:
    """The same sequence of another producer is not a repeat."""
    queue = buffered_kind.open()
    for name in ("me", "you"):
        producer = queue.producer(producer_id=name)
        assert producer.publish_block(block_of(numbered(0, 2)), sequence=0).accepted == 2
    assert buffered_kind.receive(queue, 4) == numbered(0, 2) * 2


def test_without_sequence_nothing_is_a_repeat(buffered_kind: Harness) -> None:
    """A producer with an id may also publish blocks and events without numbers."""
    queue = buffered_kind.open()
    producer = queue.producer(producer_id="me")
    for _ in range(2):
        assert producer.publish_block(block_of([b"same"])).accepted == 1
        assert producer.publish(b"same")
    assert buffered_kind.receive(queue, 4) == [b"same"] * 4


def test_a_sequence_needs_a_producer_id(any_kind: Harness) -> None:
    """Sequence numbers without a producer id are an error."""
    producer = any_kind.open().producer()
    for publish_block in (producer.publish_block, producer.try_publish_block):
        with pytest.raises(ValueError, match="producer_id"):
            publish_block(block_of([b"one"]), sequence=0)


def test_a_repeat_needs_no_room(buffered_kind: Harness) -> None:
    """A block that is in the queue already is answered at once, even by a full queue."""
    queue = buffered_kind.open(size=2, stalled=True)
    producer = queue.producer(producer_id="me")
    producer.publish_block(block_of(numbered(0, 2)), sequence=0)
    again = producer.publish_block(block_of(numbered(0, 2)), sequence=0, timeout=0)
    assert again.repeated == 2
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 2) == numbered(0, 2)


def test_a_repeat_is_answered_while_others_wait_in_line(buffered_kind: Harness) -> None:
    """The publisher of a repeat does not wait, and delays no other publisher."""
    queue = buffered_kind.open(size=2, stalled=True)
    producer = queue.producer(producer_id="me")
    producer.publish_block(block_of(numbered(0, 2)), sequence=0)
    (blocked,) = line_up(queue, lambda: queue.producer().publish(b"002"))
    again = producer.publish_block(block_of(numbered(0, 2)), sequence=0, timeout=0)
    assert again.repeated == 2
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 3) == numbered(0, 3)
    assert blocked.result()


def test_a_repeat_is_not_counted_as_dropped_by_a_full_queue(buffered_kind: Harness) -> None:
    """A queue that drops when full still recognizes repeats."""
    queue = buffered_kind.open(size=2, full_behavior="drop_newest", stalled=True)
    producer = queue.producer(producer_id="me")
    producer.publish_block(block_of(numbered(0, 2)), sequence=0)
    again = producer.publish_block(block_of(numbered(0, 3)), sequence=0)
    assert (again.accepted, again.repeated, again.dropped) == (0, 2, 1)
    assert queue.stats().ledger.dropped == {"newest": 1}


def test_sampling_does_not_confuse_the_numbers(buffered_kind: Harness) -> None:
    """Events that sampling dropped count as accepted."""
    queue = buffered_kind.open(sampling_interval=2)
    producer = queue.producer(producer_id="me")
    first = producer.publish_block(block_of(numbered(0, 4)), sequence=0)
    assert (first.accepted, first.dropped) == (2, 2)
    again = producer.publish_block(block_of(numbered(2, 6)), sequence=2)
    assert (again.accepted, again.dropped, again.repeated) == (1, 1, 2)
    assert buffered_kind.receive(queue, 3) == [b"000", b"002", b"004"]


def test_a_sampled_block_in_line_leaves_out_numbers_that_came_since(
    buffered_kind: Harness,
) -> None:
    """The numbers do not depend on the position in the sampled block."""
    queue = buffered_kind.open(size=6, sampling_interval=2, stalled=True)
    queue.producer().publish_block(block_of([b"before"] * 12))

    def publish(first: int, end: int) -> Published:
        producer = queue.producer(producer_id="me")
        return producer.publish_block(block_of(numbered(first, end)), sequence=first)

    # Kept are 000, 002 of the first, and 002, 004 of the second.
    one, other = line_up(queue, lambda: publish(0, 4), lambda: publish(2, 6))
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 9) == [b"before"] * 6 + [b"000", b"002", b"004"]
    assert (one.result().accepted, one.result().repeated) == (2, 0)
    assert (other.result().accepted, other.result().repeated) == (1, 1)


def test_block_dropped_for_lack_of_room_does_not_delay_later_blocks(buffered_kind: Harness) -> None:
    """A numbered block that was dropped for lack of room does not delay later ones."""
    queue = buffered_kind.open(size=2, full_behavior="drop_newest", stalled=True)
    producer = queue.producer(producer_id="me")
    producer.publish_block(block_of(numbered(0, 2)), sequence=0)
    assert producer.publish_block(block_of(numbered(2, 4)), sequence=2).dropped == 2
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 2) == numbered(0, 2)


def test_the_same_block_waiting_twice_in_line_enters_once(buffered_kind: Harness) -> None:
    """A client reconnects while its first attempt still waits in line."""
    queue = buffered_kind.open(size=2, stalled=True)
    queue.producer().publish_block(block_of(numbered(0, 2)))

    def publish() -> Published:
        producer = queue.producer(producer_id="me")
        return producer.publish_block(block_of(numbered(2, 4)), sequence=0)

    twice = line_up(queue, publish, publish)
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 4) == numbered(0, 4)
    assert [(one.result().accepted, one.result().repeated) for one in twice] == [(2, 0), (0, 2)]


def test_pieces_of_a_large_numbered_block_have_consecutive_numbers(buffered_kind: Harness) -> None:
    """Each piece has the numbers of its events, so a second publish is a repeat."""
    queue = buffered_kind.open(size=3)
    producer = queue.producer(producer_id="me")
    publishing = Task(lambda: producer.publish_block(block_of(numbered(0, 10)), sequence=0))
    assert buffered_kind.receive(queue, 10) == numbered(0, 10)
    assert publishing.result().accepted == 10
    again = producer.publish_block(block_of(numbered(0, 10)), sequence=0, timeout=0)
    assert (again.accepted, again.repeated) == (0, 10)


def test_repeats_are_acked_once(buffered_kind: Harness) -> None:
    """A callback gets one ack per event, not one per attempt."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue, AckLevel.DELIVERED, producer_id="me")
    producer.publish_block(block_of(numbered(0, 3)), sequence=0)
    producer.publish_block(block_of(numbered(0, 5)), sequence=0)
    producer.publish_block(block_of(numbered(0, 5)), sequence=0)
    buffered_kind.receive(queue, 5)
    acks.wait_for(5)


def test_a_repeat_waits_for_its_level_too(buffered_kind: Harness) -> None:
    """Without a callback, publish waits until the event has reached the level."""
    queue = buffered_kind.open()
    accepted = queue.producer(producer_id="me")
    accepted.publish_block(block_of([b"000"]), sequence=0)
    delivered = queue.producer(producer_id="me", ack="delivered")
    publishing = Task(lambda: delivered.publish_block(block_of([b"000"]), sequence=0))
    assert buffered_kind.receive(queue, 1) == [b"000"]
    assert publishing.result().repeated == 1


def test_numbers_survive_a_restart(disk_kind: DiskHarness) -> None:
    """A queue with a directory recognizes repeats after a restart."""
    queue = disk_kind.open()
    producer = queue.producer(producer_id="me")
    producer.publish_block(block_of(numbered(0, 3)), sequence=0)
    queue.close()
    again = disk_kind.reopen()
    producer, acks = make_producer_with_acks(again, AckLevel.ACCEPTED, producer_id="me")
    published = producer.publish_block(block_of(numbered(0, 5)), sequence=0)
    assert (published.accepted, published.repeated) == (2, 3)
    assert disk_kind.receive(again, 5) == numbered(0, 5)
    acks.wait_for(2)


def open_with_unwritten_blocks(
    path: Path, blocks: int, *, older: int = 0, **knobs: Any
) -> tuple[Queue, list[Batch]]:
    """Open a queue whose writer is idle, with numbered blocks of two events in flight."""
    queue = open_queue(kind="disk", path=path, sync_interval="1h", stale_flush="1h", **knobs)
    queue.producer(ack="persisted").publish(b"written")
    queue.get(1).done()
    for _ in range(older):
        queue.producer(producer_id="you").publish_block(block_of([b"older"]))
    if older:
        queue.get(older)
    producer = queue.producer(producer_id="me")
    for at in range(blocks):
        producer.publish_block(block_of(numbered(2 * at, 2 * at + 2)), sequence=2 * at)
    return queue, [queue.get(2) for _ in range(blocks)]


def count_accepted_again(path: Path, blocks: int) -> list[int]:
    """Return how many events of each block a queue accepts again after a kill."""
    left = shutil.copytree(path, path.with_name("left"))
    with open_queue(kind="disk", path=left) as queue:
        producer = queue.producer(producer_id="me")
        return [
            producer.publish_block(block_of(numbered(2 * at, 2 * at + 2)), sequence=2 * at).accepted
            for at in range(blocks)
        ]


def test_events_settled_before_they_were_written_are_repeats_after_a_kill(tmp_path: Path) -> None:
    """The number is in the journal, although the event was never in the log."""
    queue, batches = open_with_unwritten_blocks(tmp_path / "queue", 2)
    with queue:
        for batch in batches:
            batch.done()
        assert count_accepted_again(tmp_path / "queue", 2) == [0, 0]


def test_settling_out_of_order_writes_older_events_of_the_producer_first(
    tmp_path: Path,
) -> None:
    """Otherwise, after a kill, older events and with them settled ones would come again."""
    queue, batches = open_with_unwritten_blocks(tmp_path / "queue", 3)
    with queue:
        batches[0].done()
        batches[2].done()
        assert count_accepted_again(tmp_path / "queue", 3) == [0, 0, 0]
        with open_queue(kind="disk", path=tmp_path / "left") as left:
            assert values_of(left.get(timeout=PATIENCE)) == numbered(2, 4)
            assert left.stats().ledger.pending == 2


def test_settling_in_order_waits_for_no_write(tmp_path: Path) -> None:
    """The journal has all numbers; events of other producers do not matter."""
    queue, batches = open_with_unwritten_blocks(tmp_path / "queue", 3, older=1)
    with queue:
        writes = queue.stats().flushes
        for batch in batches:
            batch.done()
        assert queue.stats().flushes == writes


@contextmanager
def failing_log_writes(queue: Queue, disk: FaultyDisk) -> Iterator[None]:
    """Let writes to the log fail, and let the queue stay open."""
    disk.fail("write", times=None, match=".chunk")
    with queue:
        yield
        disk.clear()
    assert queue.stats().ledger.adds_up


def test_events_neither_settled_nor_written_are_accepted_again_after_a_kill(tmp_path: Path) -> None:
    """Even if a newer event of the producer was settled: a repeat is better than a loss."""
    disk = FaultyDisk()
    queue, batches = open_with_unwritten_blocks(tmp_path / "queue", 3, disk=disk)
    with failing_log_writes(queue, disk):
        batches[0].done()
        batches[2].done()
        assert count_accepted_again(tmp_path / "queue", 2) == [0, 2]


def test_numbers_are_recorded_once_everything_older_of_the_producer_is_settled(
    tmp_path: Path,
) -> None:
    """The order of settlements does not matter."""
    disk = FaultyDisk()
    queue, batches = open_with_unwritten_blocks(tmp_path / "queue", 3, disk=disk)
    with failing_log_writes(queue, disk):
        for at in (2, 0, 1):
            batches[at].done()
        assert count_accepted_again(tmp_path / "queue", 3) == [0, 0, 0]


def test_numbers_are_recorded_with_the_settlement_in_one_write(tmp_path: Path) -> None:
    """A kill between two writes would leave only one of them."""
    disk = FaultyDisk()
    queue, batches = open_with_unwritten_blocks(tmp_path / "queue", 2, disk=disk)
    with failing_log_writes(queue, disk):
        batches[1].done()
        disk.fail("write", nth=2, times=None, match="journal")
        batches[0].done()
        assert count_accepted_again(tmp_path / "queue", 2) == [0, 0]


def test_numbers_of_a_producer_do_not_wait_for_another_producer(tmp_path: Path) -> None:
    """Older events of another producer do not matter."""
    queue, batches = open_with_unwritten_blocks(tmp_path / "queue", 1, older=3)
    with queue:
        batches[0].done()
        assert count_accepted_again(tmp_path / "queue", 1) == [0]


def test_a_partly_settled_block_is_accepted_in_part_after_a_kill(tmp_path: Path) -> None:
    """A block may be handed out in several batches: settled events do not come back."""
    disk = FaultyDisk()
    queue, _ = open_with_unwritten_blocks(tmp_path / "queue", 0, disk=disk)
    with failing_log_writes(queue, disk):
        producer = queue.producer(producer_id="me")
        producer.publish_block(block_of(numbered(0, 10)), sequence=0)
        batches = [queue.get(2) for _ in range(4)]
        for at in (0, 2, 1):
            batches[at].done()
        assert count_accepted_again(tmp_path / "queue", 5) == [0, 0, 0, 2, 2]


def test_a_partly_settled_sampled_block_is_accepted_whole_after_a_kill(tmp_path: Path) -> None:
    """The number of each single event is unknown: a repeat is better than a loss."""
    disk = FaultyDisk()
    queue, _ = open_with_unwritten_blocks(tmp_path / "queue", 0, disk=disk, sampling_interval=2)
    with failing_log_writes(queue, disk):
        producer = queue.producer(producer_id="me")
        producer.publish_block(block_of(numbered(0, 8)), sequence=0)
        first, second = queue.get(2), queue.get(2)
        first.done()
        assert count_accepted_again(tmp_path / "queue", 4) == [2, 2, 2, 2]
        shutil.rmtree(tmp_path / "left")
        second.done()
        assert count_accepted_again(tmp_path / "queue", 4) == [0, 0, 0, 0]


def test_a_sampled_block_is_written_before_it_is_settled_in_part(tmp_path: Path) -> None:
    """The block is written with its last number, so settled events do not come back."""
    queue, _ = open_with_unwritten_blocks(tmp_path / "queue", 0, sampling_interval=2)
    with queue:
        producer = queue.producer(producer_id="me")
        producer.publish_block(block_of(numbered(0, 8)), sequence=0)
        queue.get(2).done()
        assert count_accepted_again(tmp_path / "queue", 4) == [0, 0, 0, 0]


def test_events_that_a_close_dropped_may_be_sent_again(tmp_path: Path) -> None:
    """A dropped event is not a repeat; an event settled before is."""
    disk = FaultyDisk()
    queue, batches = open_with_unwritten_blocks(
        tmp_path / "queue", 2, disk=disk, shutdown_timeout="50ms"
    )
    batches[0].done()
    disk.fail("write", times=None, match=".chunk")
    with pytest.raises(EventsLost):
        queue.close()
    assert count_accepted_again(tmp_path / "queue", 2) == [0, 2]
