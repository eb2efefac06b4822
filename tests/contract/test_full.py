"""The bounds of a queue, and the order of publishers in line."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.contract.harness import (
    PATIENCE,
    Harness,
    Task,
    assert_never,
    bytes_for,
    line_up,
    make_producer_with_acks,
    numbered,
    publish_all,
    wait_for_line,
    wait_until,
)
from tests.queue_internals import state_of
from turnlane.errors import QueueFull
from turnlane.events import block_of
from turnlane.queues.api import Queue
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.disk_assisted import SpillStorage


def test_the_bound_in_events_is_exact(buffered_kind: Harness) -> None:
    """A queue of four accepts four events and refuses the fifth."""
    queue = buffered_kind.open(size=4, stalled=True)
    producer = queue.producer()
    publish_all(producer, numbered(0, 3))
    assert producer.try_publish(b"003")
    assert not producer.try_publish(b"004")
    assert queue.stats().utilization == 1
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 4) == numbered(0, 4)


def test_the_bound_in_bytes_is_exact(buffered_kind: Harness) -> None:
    """Events fit to the last byte, and one byte more does not."""
    values = [b"x" * 10, b"y" * 20, b"z" * 30]
    queue = buffered_kind.open(max_bytes=bytes_for(*values), stalled=True)
    producer = queue.producer()
    publish_all(producer, values[:2])
    assert not producer.try_publish(b"z" * 31)
    assert producer.try_publish(b"z" * 30)
    assert queue.stats().bytes == bytes_for(*values)
    assert not producer.try_publish(b"")
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 3) == values


def test_all_columns_of_an_event_count_in_bytes(buffered_kind: Harness) -> None:
    """Key, source and headers take room like the value."""
    queue = buffered_kind.open(max_bytes=1000, stalled=True)
    producer = queue.producer()
    producer.publish(b"value")
    plain = queue.stats().bytes
    producer.publish(b"value", "k" * 100, source="s" * 100, headers={"h" * 100: "v" * 100})
    assert queue.stats().bytes - plain >= plain + 400


def test_publish_blocks_at_the_bound_until_there_is_room(buffered_kind: Harness) -> None:
    """The publisher waits, and its event enters when another leaves."""
    queue = buffered_kind.open(size=2, stalled=True)
    producer = queue.producer()
    publish_all(producer, numbered(0, 2))
    (blocked,) = line_up(queue, lambda: producer.publish(b"002"))
    assert_never(lambda: not blocked.running, "the end of blocking")
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 3) == numbered(0, 3)
    assert blocked.result()
    assert queue.stats().full_waits == 1


def test_publish_blocks_at_the_bound_in_bytes(buffered_kind: Harness) -> None:
    """The bound in bytes makes publishers wait like the bound in events."""
    queue = buffered_kind.open(max_bytes=bytes_for(b"000", b"001"), stalled=True)
    producer = queue.producer()
    publish_all(producer, numbered(0, 2))
    (blocked,) = line_up(queue, lambda: producer.publish(b"002"))
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 3) == numbered(0, 3)
    assert blocked.result()


def test_a_timed_publish_gives_up(buffered_kind: Harness) -> None:
    """After its timeout a blocked publish raises QueueFull and changes nothing."""
    queue = buffered_kind.open(size=1, stalled=True)
    producer = queue.producer()
    producer.publish(b"000")
    started = time.monotonic()
    with pytest.raises(QueueFull):
        producer.publish(b"never", timeout=0.05)
    assert time.monotonic() - started >= 0.05
    with pytest.raises(QueueFull):
        producer.publish(b"never", timeout=0)
    with pytest.raises(QueueFull):
        producer.publish_block(block_of([b"never"]), timeout=0.01)
    assert queue.stats().blocked_publishers == 0
    waiting = Task(lambda: producer.publish(b"001", timeout=60))
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 2) == numbered(0, 2)
    assert waiting.result()


def test_full_timeout_is_the_default_of_every_publish(buffered_kind: Harness) -> None:
    """``full_timeout`` of the queue ends a publish without a timeout."""
    queue = buffered_kind.open(size=1, full_timeout="20ms", stalled=True)
    producer = queue.producer()
    producer.publish(b"000")
    with pytest.raises(QueueFull, match=r"0\.02"):
        producer.publish(b"never")
    with pytest.raises(QueueFull):
        producer.publish_block(block_of([b"never"]))
    waiting = Task(lambda: producer.publish(b"001", timeout=60))
    wait_for_line(queue, 1)
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 2) == numbered(0, 2)
    assert waiting.result()


def test_blocked_publishers_are_served_first_come_first_served(buffered_kind: Harness) -> None:
    """Publishers enter in the order in which they joined the line."""
    queue = buffered_kind.open(size=2, stalled=True)
    producers = [queue.producer() for _ in range(8)]
    publish_all(producers[0], numbered(0, 2))
    blocked = line_up(
        queue,
        *(
            lambda producer=producer, value=value: producer.publish(value)
            for producer, value in zip(producers, numbered(2, 10), strict=True)
        ),
    )
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 10) == numbered(0, 10)
    assert all(publisher.result() for publisher in blocked)


def test_a_small_event_does_not_overtake_a_waiting_block(buffered_kind: Harness) -> None:
    """A small event that would fit waits behind a block that does not."""
    queue = buffered_kind.open(size=4, stalled=True)
    producer = queue.producer()
    publish_all(producer, numbered(0, 3))
    (large,) = line_up(queue, lambda: producer.publish_block(block_of(numbered(3, 6))))
    (small,) = line_up(queue, lambda: producer.publish(b"006"))
    assert not queue.producer().try_publish(b"never")
    assert queue.producer().try_publish_block(block_of([b"never"])) is None
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 7) == numbered(0, 7)
    assert large.result().accepted == 3
    assert small.result()


def test_a_publisher_that_times_out_lets_the_next_one_in(buffered_kind: Harness) -> None:
    """If a large block times out, a small event behind it enters at once."""
    queue = buffered_kind.open(size=4, stalled=True)
    producer = queue.producer()
    publish_all(producer, numbered(0, 3))
    (large,) = line_up(
        queue, lambda: producer.publish_block(block_of(numbered(50, 53)), timeout=0.3)
    )
    (small,) = line_up(queue, lambda: producer.publish(b"003"))
    assert small.running
    with pytest.raises(QueueFull):
        large.result()
    assert small.result()
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 4) == numbered(0, 4)


def test_many_publishers_push_through_a_small_queue(buffered_kind: Harness) -> None:
    """Ten times as many events as fit all arrive, each once."""
    queue = buffered_kind.open(size=2)
    producer, acks = make_producer_with_acks(queue)
    publishers = [Task(lambda value=value: producer.publish(value)) for value in numbered(0, 20)]  # type: ignore[misc]
    assert sorted(value or b"" for value in buffered_kind.receive(queue, 20)) == numbered(0, 20)
    assert all(publisher.result() for publisher in publishers)
    acks.wait_for(20)


def test_drop_newest_drops_the_new_event(buffered_kind: Harness) -> None:
    """The new event is dropped and counted, and publish returns false."""
    queue = buffered_kind.open(size=2, full_behavior="drop_newest", stalled=True)
    producer, acks = make_producer_with_acks(queue)
    publish_all(producer, numbered(0, 2))
    assert not producer.publish(b"new")
    assert not producer.try_publish(b"new")
    assert queue.stats().ledger.dropped == {"newest": 2}
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 2) == numbered(0, 2)
    acks.wait_for(2)
    assert acks.dropped == 0


def test_drop_newest_takes_the_events_of_a_block_that_fit(buffered_kind: Harness) -> None:
    """The first events of a block fill the queue, and the rest is dropped."""
    queue = buffered_kind.open(size=4, full_behavior="drop_newest", stalled=True)
    producer = queue.producer()
    producer.publish(b"000")
    published = producer.publish_block(block_of(numbered(1, 5)))
    assert (published.accepted, published.dropped) == (3, 1)
    assert producer.publish_block(block_of(numbered(5, 7))).accepted == 0
    assert queue.stats().ledger.dropped == {"newest": 3}
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 4) == numbered(0, 4)


def test_drop_oldest_makes_room_for_a_new_event(buffered_kind: Harness) -> None:
    """The oldest unread event is dropped; its producer gets an ack in publish order."""
    queue = buffered_kind.open(size=4, full_behavior="drop_oldest", stalled=True)
    producer, acks = make_producer_with_acks(queue)
    producer.publish(b"000")
    buffered_kind.settle_in(queue)  # a proxy is sending this one: it stays
    publish_all(producer, numbered(1, 6))
    assert queue.stats().ledger.dropped == {"oldest": 2}
    buffered_kind.resume()
    values = buffered_kind.receive(queue, 4)
    assert values[-3:] == numbered(3, 6)
    acks.wait_for(4)
    assert acks.dropped == 2


def test_drop_oldest_makes_room_for_a_block(buffered_kind: Harness) -> None:
    """As many of the oldest events are dropped as the block needs room."""
    queue = buffered_kind.open(size=4, full_behavior="drop_oldest", stalled=True)
    producer, acks = make_producer_with_acks(queue)
    producer.publish(b"000")
    buffered_kind.settle_in(queue)
    publish_all(producer, numbered(1, 4))
    published = producer.publish_block(block_of(numbered(4, 7)))
    assert (published.accepted, published.dropped) == (3, 0)
    assert queue.stats().ledger.dropped == {"oldest": 3}
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 4)[-3:] == numbered(4, 7)
    acks.wait_for(4)
    assert acks.dropped == 3


def test_drop_oldest_makes_room_in_bytes(buffered_kind: Harness) -> None:
    """As many small events are dropped as the large event needs room."""
    size = bytes_for(*numbered(0, 6))
    queue = buffered_kind.open(max_bytes=size, full_behavior="drop_oldest", stalled=True)
    producer, acks = make_producer_with_acks(queue)
    producer.publish(b"000")
    buffered_kind.settle_in(queue)
    publish_all(producer, numbered(1, 6))
    large = b"x" * (bytes_for(*numbered(0, 3)) - bytes_for(b""))
    assert producer.publish(large)
    assert queue.stats().ledger.dropped == {"oldest": 3}
    assert queue.stats().bytes <= size
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 4)[-3:] == [*numbered(4, 6), large]
    acks.wait_for(4)
    assert acks.dropped == 3


def test_drop_oldest_does_not_drop_events_in_flight(buffered_kind: Harness) -> None:
    """When all events are in flight, the newest one is dropped."""
    queue = buffered_kind.open(size=2, full_behavior="drop_oldest", stalled=True)
    producer, acks = make_producer_with_acks(queue)
    producer.publish_block(block_of(numbered(0, 2)))
    buffered_kind.settle_in(queue)
    batch = None if buffered_kind.delivers_in_background else queue.get()
    assert not producer.publish(b"new")
    assert queue.stats().ledger.dropped == {"newest": 1}
    buffered_kind.resume()
    (batch or queue.get()).done()
    acks.wait_for(2)
    assert acks.dropped == 0


@pytest.mark.parametrize("knob", ["events", "bytes"])
def test_the_disk_helps_before_publishers_have_to_wait_long(
    disk_assisted: Harness, knob: str
) -> None:
    """With a disk that works, a disk-assisted queue takes more than its memory holds."""
    bounds: dict[str, dict[str, Any]] = {"events": {"size": 4}, "bytes": {"max_bytes": 10_000}}
    queue = disk_assisted.open(**bounds[knob])
    producer = queue.producer()
    values = [value * 500 for value in numbered(0, 40)]
    publish_all(producer, values[:20])
    for start in range(20, 40, 4):
        assert producer.publish_block(block_of(values[start : start + 4])).accepted == 4
    assert queue.stats().ledger.pending == 40
    assert disk_assisted.receive(queue, 40) == values


def test_a_direct_queue_is_never_full(direct: Harness) -> None:
    """Nothing waits in a direct queue, so any number of events passes it."""
    queue = direct.open()
    producer = queue.producer()
    publish_all(producer, numbered(0, 1000))
    assert direct.receive(queue, 1000) == numbered(0, 1000)
    assert queue.stats().size == 0
    assert queue.stats().full_waits == 0


@pytest.mark.parametrize(("size", "high", "low"), [(50_000, 45_000, 31_500), (1000, 900, 630)])
def test_spill_of_single_events_ends_at_the_low_watermark(
    disk_assisted: Harness, size: int, high: int, low: int
) -> None:
    """Single events gather in large blocks, which are cut for this."""
    queue = disk_assisted.open(size=size)
    producer = queue.producer()
    for number in range(high + 1):
        producer.publish(b"%03d" % number)
    wait_until(lambda: queue.stats().size <= high, "the spill")
    wait_until(lambda: not has_more_to_spill(queue), "its end")
    assert queue.stats().size == low
    assert disk_assisted.receive(queue, high + 1) == numbered(0, high + 1)


def has_more_to_spill(queue: Queue) -> bool:
    assert isinstance(queue, BufferedQueue)
    storage = state_of(queue).storage
    assert isinstance(storage, SpillStorage)
    return storage._is_spilling


def test_spill_for_publishers_in_line_leaves_the_low_watermark(disk_assisted: Harness) -> None:
    """A publisher that is faster than the disk does not empty the memory."""
    queue = disk_assisted.open(size=1000)
    producer = queue.producer()
    for number in range(10_000):
        producer.publish(b"%03d" % number, timeout=PATIENCE)
        assert number < 1000 or queue.stats().size >= 630
    assert disk_assisted.receive(queue, 10_000) == numbered(0, 10_000)


def test_spill_makes_room_for_a_block_larger_than_the_low_watermark_leaves(
    disk_assisted: Harness,
) -> None:
    """A low watermark close to the size must not keep a large block out."""
    queue = disk_assisted.open(size=100, high_watermark=95, low_watermark=90)
    producer = queue.producer()
    producer.publish_block(block_of(numbered(0, 90)))
    producer.publish_block(block_of(numbered(90, 140)), timeout=PATIENCE)
    assert disk_assisted.receive(queue, 140) == numbered(0, 140)
