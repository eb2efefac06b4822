"""Producers get acks of exactly their own events, in publish order, never early."""

from __future__ import annotations

import logging
import threading
from functools import partial

import pytest

from tests.contract.harness import (
    PATIENCE,
    Acks,
    Harness,
    Task,
    assert_never,
    make_producer_with_acks,
    numbered,
    publish_all,
    values_of,
    wait_until,
)
from turnlane.errors import QueueClosed
from turnlane.events import block_of
from turnlane.queues.api import Ack, AckLevel, Batch, Durability, Queue
from turnlane.queues.settings import ON_DISK, Kind

LEVELS = list(AckLevel)


def take(queue: Queue, batches: int, each: int = 1) -> list[Batch]:
    """Take batches of ``each`` events."""
    return [queue.get(each) for _ in range(batches)]


@pytest.mark.parametrize("level", LEVELS)
def test_every_event_is_acked_once_at_the_level_asked_for(
    any_kind: Harness, level: AckLevel
) -> None:
    """Counts are exact, and every ack has its level and its end."""
    queue = any_kind.open()
    producer, acks = make_producer_with_acks(queue, level)
    publish_all(producer, numbered(0, 5))
    producer.publish_block(block_of(numbered(5, 9)))
    any_kind.receive(queue, 9)
    acks.wait_for(9)
    assert {ack.level for ack in acks.received} == {level}
    assert acks.dropped == 0
    ends = [ack.end for ack in acks.received]
    assert ends == sorted(set(ends))
    assert ends[-1] == 9


def test_accepted_is_acked_without_a_consumer(buffered_kind: Harness) -> None:
    """An event is accepted as soon as it is in the queue."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue, AckLevel.ACCEPTED)
    publish_all(producer, numbered(0, 3))
    acks.wait_for(3)


def test_delivered_is_acked_only_when_done(buffered_kind: Harness) -> None:
    """Publishing and handing out ack nothing; settling does."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue, AckLevel.DELIVERED)
    producer.publish(b"one")
    batch = queue.get()
    assert_never(lambda: bool(acks.received), "an early ack")
    batch.done()
    acks.wait_for(1)


def test_dead_events_are_acked_too(buffered_kind: Harness) -> None:
    """The consumer keeps a dead letter, so its producer gets an ack as well."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue, AckLevel.DELIVERED)
    producer.publish(b"one")
    queue.get().dead()
    acks.wait_for(1)
    assert acks.dropped == 0


def test_a_direct_consumers_dead_letters_are_acked_too(direct: Harness) -> None:
    """A consumer that keeps an event as a dead letter is responsible for it."""
    queue = direct.open(consumer=lambda batch: batch.dead())
    producer, acks = make_producer_with_acks(queue)
    assert producer.publish(b"one")
    acks.wait_for(1)
    assert queue.stats().ledger.dead == 1


def test_batches_done_in_reverse_are_acked_in_publish_order(buffered_kind: Harness) -> None:
    """While the oldest batch is in flight, no ack comes for later ones."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue)
    producer.publish_block(block_of(numbered(0, 20)))
    batches = take(queue, 10, 2)
    for batch in batches[1:]:
        batch.free()
        assert len(batch) == 2
        batch.done()
    assert_never(lambda: bool(acks.received), "an ack out of order")
    batches[0].done()
    acks.wait_for(20)


def test_batches_done_in_any_order_are_acked_up_to_the_first_gap(buffered_kind: Harness) -> None:
    """Acks end where the first unsettled event begins."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue)
    batches = []
    for value in numbered(0, 6):
        producer.publish(value)
        batches.append(queue.get())  # one by one, so that a proxy sends them one by one too
        assert values_of(batches[-1]) == [value]
    for at, expected in ((1, 0), (0, 2), (3, 2), (5, 2), (2, 4), (4, 6)):
        batches[at].done()
        acks.wait_for(expected)


def test_counts_are_exact_for_each_of_several_producers(buffered_kind: Harness) -> None:
    """Producers that publish in turns get acks only for their own events."""
    queue = buffered_kind.open()
    one, acks_of_one = make_producer_with_acks(queue)
    other, acks_of_other = make_producer_with_acks(queue)
    for turn in range(12):
        one.publish(b"one")
        if turn % 3 == 0:
            other.publish_block(block_of([b"other"] * 2))
    buffered_kind.receive(queue, 20)
    acks_of_one.wait_for(12)
    acks_of_other.wait_for(8)
    assert acks_of_one.count + acks_of_other.count == queue.stats().ledger.delivered


def test_a_producer_without_callback_does_not_disturb_one_with_callback(any_kind: Harness) -> None:
    """Events of a producer without callback are in no count."""
    queue = any_kind.open()
    quiet = queue.producer()
    producer, acks = make_producer_with_acks(queue)
    for _ in range(5):
        quiet.publish(b"quiet")
        producer.publish(b"heard")
    quiet.publish(b"quiet")
    any_kind.receive(queue, 11)
    acks.wait_for(5)
    assert acks.received[-1].end <= 11


def test_producers_may_share_a_callback(any_kind: Harness) -> None:
    """Two producers with one callback get two series of acks that add up."""
    queue = any_kind.open()
    acks = Acks()
    one = queue.producer(ack="delivered", on_ack=acks)
    other = queue.producer(ack="delivered", on_ack=acks)
    for _ in range(4):
        one.publish(b"one")
        other.publish(b"other")
    any_kind.receive(queue, 8)
    acks.wait_for(8)


def test_each_producer_has_its_own_level(disk: Harness) -> None:
    """Producers of one queue can use different levels at the same time."""
    queue = disk.open()
    received = {level: make_producer_with_acks(queue, level) for level in LEVELS}
    for producer, _ in received.values():
        producer.publish(b"one")
    received[AckLevel.ACCEPTED][1].wait_for(1)
    received[AckLevel.PERSISTED][1].wait_for(1)
    assert not received[AckLevel.DELIVERED][1].received
    disk.receive(queue, 3)
    received[AckLevel.DELIVERED][1].wait_for(1)


def test_a_persisted_ack_comes_only_once_the_event_is_persisted(any_kind: Harness) -> None:
    """A queue without a disk acks persisted on delivery, and not before."""
    queue = any_kind.open()
    producer, acks = make_producer_with_acks(queue, AckLevel.PERSISTED)
    producer.publish(b"one")
    if not any_kind.persists_by_itself:
        assert_never(lambda: bool(acks.received), "an untrue ack")
        any_kind.receive(queue, 1)
    acks.wait_for(1)


def test_a_spilled_event_is_acked_as_persisted(disk_assisted: Harness) -> None:
    """Events that were spilled to disk are persisted before they are delivered."""
    queue = disk_assisted.open(size=4, high_watermark=3, low_watermark=0)
    producer, acks = make_producer_with_acks(queue, AckLevel.PERSISTED)
    publish_all(producer, numbered(0, 4))
    wait_until(lambda: acks.count >= 3, "acks for what was spilled")
    assert disk_assisted.receive(queue, 4) == numbered(0, 4)
    acks.wait_for(4)


@pytest.mark.parametrize("level", LEVELS)
def test_an_ack_states_its_durability(any_kind: Harness, level: AckLevel) -> None:
    """The durability of an ack holds at that moment: acceptance promises only memory."""
    queue = any_kind.open()
    producer, acks = make_producer_with_acks(queue, level)
    producer.publish(b"one")
    any_kind.receive(queue, 1)
    acks.wait_for(1)
    on_disk = any_kind.kind in ON_DISK and level is not AckLevel.ACCEPTED
    expected = Durability.INTERVAL if on_disk else Durability.MEMORY
    assert acks.received[0].durability is expected


@pytest.mark.parametrize("level", [AckLevel.PERSISTED, AckLevel.DELIVERED])
@pytest.mark.parametrize("in_block", [False, True], ids=["event", "block"])
def test_without_callback_publish_returns_when_the_level_is_reached(
    any_kind: Harness, level: AckLevel, in_block: bool
) -> None:
    """A producer without a callback waits."""
    queue = any_kind.open()
    producer = queue.producer(ack=level)

    def publish() -> bool:
        if in_block:
            return producer.publish_block(block_of([b"one"])).accepted == 1
        return producer.publish(b"one")

    publishing = Task(publish)
    delivering = level is AckLevel.DELIVERED and any_kind.kind is not Kind.DIRECT
    if delivering or not any_kind.persists_by_itself:
        batch = queue.get()
        assert_never(lambda: not publishing.running, "an early return")
        batch.done()
    assert publishing.result()


def test_try_publish_never_waits_for_a_level(any_kind: Harness) -> None:
    """It does not block at any level."""
    queue = any_kind.open()
    producer = queue.producer(ack="delivered")
    assert producer.try_publish(b"one")
    assert producer.try_publish_block(block_of([b"two"])) is not None
    assert any_kind.receive(queue, 2) == [b"one", b"two"]
    assert producer.flush(timeout=10)


def test_a_publish_that_waits_for_its_level_ends_at_close(buffered_kind: Harness) -> None:
    """The publisher gets QueueClosed, because the event is not acked."""
    queue = buffered_kind.open()
    producer = queue.producer(ack="delivered")
    publishing = Task(lambda: producer.publish(b"one"))
    wait_until(lambda: queue.stats().ledger.pending == 1)
    queue.close()
    with pytest.raises(QueueClosed):
        publishing.result()


def test_callbacks_run_on_a_thread_of_their_own(any_kind: Harness) -> None:
    """Callbacks use neither the publisher's nor the consumer's thread."""
    queue = any_kind.open()
    threads: list[threading.Thread] = []
    producer = queue.producer(
        ack="delivered", on_ack=lambda _: threads.append(threading.current_thread())
    )
    producer.publish(b"one")
    any_kind.receive(queue, 1)
    wait_until(lambda: bool(threads))
    assert threads[0] is not threading.current_thread()
    assert threads[0].name.startswith("turnlane-acks")


def test_a_slow_callback_delays_no_publisher(any_kind: Harness) -> None:
    """While a callback blocks, publishing, getting and settling continue."""
    queue = any_kind.open()
    stuck, go_on = threading.Event(), threading.Event()
    acks = Acks()

    def slow(ack: Ack) -> None:
        stuck.set()
        assert go_on.wait(20)
        acks(ack)

    producer = queue.producer(ack="delivered", on_ack=slow)
    producer.publish(b"000")
    any_kind.receive(queue, 1)
    assert stuck.wait(20)
    publish_all(producer, numbered(1, 50))
    assert any_kind.receive(queue, 49) == numbered(1, 50)
    assert not acks.received
    go_on.set()
    acks.wait_for(50)


def test_a_callback_that_raises_costs_no_other_ack(
    any_kind: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is logged with its ack, and the next ack comes."""
    queue = any_kind.open()
    acks = Acks()

    def fail_once(ack: Ack) -> None:
        if not acks.received:
            acks(ack)
            raise ZeroDivisionError
        acks(ack)

    producer = queue.producer(ack="delivered", on_ack=fail_once)
    with caplog.at_level(logging.ERROR):
        producer.publish(b"one")
        any_kind.receive(queue, 1)
        acks.wait_for(1)
        producer.publish(b"two")
        any_kind.receive(queue, 1)
        acks.wait_for(2)
    assert "queue.ack_callback_failed" in caplog.text


def test_a_callback_may_publish(any_kind: Harness) -> None:
    """A callback may publish to the same queue."""
    queue = any_kind.open()
    acks = Acks()

    def answer(ack: Ack) -> None:
        acks(ack)
        if acks.count < 3:
            producer.publish(b"again")

    producer = queue.producer(ack="accepted", on_ack=answer)
    producer.publish(b"first")
    acks.wait_for(3)
    assert any_kind.receive(queue, 3) == [b"first", b"again", b"again"]


def test_a_callback_may_wait_for_room(buffered_kind: Harness) -> None:
    """A callback that waits at a full queue continues when there is room."""
    queue = buffered_kind.open(size=1, stalled=True)
    acks = Acks()
    answered = threading.Event()

    def answer(ack: Ack) -> None:
        acks(ack)
        if not answered.is_set():
            queue.producer().publish(b"answer")
            answered.set()

    queue.producer(ack="accepted", on_ack=answer).publish(b"first")
    wait_until(lambda: queue.stats().blocked_publishers == 1)
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 2) == [b"first", b"answer"]
    assert answered.wait(20)


def test_a_callback_may_close_the_queue(any_kind: Harness) -> None:
    """A close from a callback does not deadlock, and no more acks come."""
    queue = any_kind.open()
    closed = threading.Event()
    acks = Acks()

    def close(ack: Ack) -> None:
        acks(ack)
        queue.close()
        closed.set()

    queue.producer(ack="accepted", on_ack=close).publish(b"one")
    assert closed.wait(20)
    with pytest.raises(QueueClosed):
        queue.producer().publish(b"two")
    assert acks.count == 1


def test_a_callback_may_close_the_queue_and_wait_for_it_to_drain(buffered_kind: Harness) -> None:
    """A draining close from a callback waits for consumers, which continue."""
    queue = buffered_kind.open()
    closed = threading.Event()

    def close(_: Ack) -> None:
        queue.close(drain=True, timeout=20)
        closed.set()

    queue.producer(ack="accepted", on_ack=close).publish(b"one")
    assert buffered_kind.receive(queue, 1) == [b"one"]
    assert closed.wait(20)
    assert queue.stats().ledger.delivered == 1


def test_a_direct_queue_acks_in_publish_order_when_consumers_end_out_of_order(
    direct: Harness,
) -> None:
    """Consumers on several threads end in any order; acks follow the offsets."""
    go_on = {value: threading.Event() for value in numbered(0, 3)}

    def consume(batch: Batch) -> None:
        (value,) = values_of(batch)
        assert go_on[value or b""].wait(PATIENCE)

    queue = direct.open(consumer=consume)
    producer, acks = make_producer_with_acks(queue)
    publishing: list[Task[bool]] = []
    for value in numbered(0, 3):
        publishing.append(Task(partial(producer.publish, value)))
        wait_until(lambda: queue.stats().in_flight == len(publishing), "a consumer at it")
    for at in (2, 1, 0):
        assert acks.received == []
        go_on[b"%03d" % at].set()
        assert publishing[at].result()
    acks.wait_for(3)
    assert [ack.end for ack in acks.received] == [3]
