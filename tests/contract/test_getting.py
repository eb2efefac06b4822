"""Consumers: batches, and all that they can do with them."""

from __future__ import annotations

import time

import pytest

from tests.contract.harness import (
    PATIENCE,
    Harness,
    Task,
    assert_never,
    bytes_for,
    make_producer_with_acks,
    numbered,
    publish_all,
    values_of,
    wait_until,
)
from turnlane.errors import BatchFreed, NotSupported, QueueClosed, QueueEmpty
from turnlane.events import BASE_SCHEMA, block_of
from turnlane.queues.api import Batch


def test_get_on_an_empty_queue_times_out(buffered_kind: Harness) -> None:
    """QueueEmpty comes after the timeout, not before."""
    queue = buffered_kind.open()
    started = time.monotonic()
    with pytest.raises(QueueEmpty):
        queue.get(timeout=0.05)
    assert time.monotonic() - started >= 0.05
    with pytest.raises(QueueEmpty):
        queue.get(timeout=0)


def test_get_on_an_empty_queue_blocks_until_an_event_comes(buffered_kind: Harness) -> None:
    """A consumer that waits is woken by the next event, single or in a block."""
    queue = buffered_kind.open()
    producer = queue.producer()
    for publish in (
        lambda: producer.publish(b"one"),
        lambda: producer.publish_block(block_of([b"one"])),
    ):
        getting = Task(queue.get)
        assert_never(lambda getting=getting: not getting.running, "get() returned without an event")  # type: ignore[misc]
        publish()
        with getting.result() as batch:
            assert values_of(batch) == [b"one"]


def test_a_waiting_consumer_gets_a_released_batch(buffered_kind: Harness) -> None:
    """A batch that is given back wakes a consumer like a new event."""
    queue = buffered_kind.open()
    queue.producer().publish(b"one")
    batch = queue.get()
    getting = Task(queue.get)
    assert_never(lambda: not getting.running)
    batch.release()
    with getting.result() as again:
        assert values_of(again) == [b"one"]


def test_several_consumers_share_the_events(buffered_kind: Harness) -> None:
    """Each event goes to one consumer, even if all of them wait."""
    queue = buffered_kind.open()
    consumers = [Task(lambda: buffered_kind.receive(queue, 5)) for _ in range(4)]
    producer, acks = make_producer_with_acks(queue)
    publish_all(producer, numbered(0, 20))
    values = [value or b"" for consumer in consumers for value in consumer.result()]
    assert sorted(values) == numbered(0, 20)
    acks.wait_for(20)


def test_a_timeout_counts_while_another_consumer_waits(buffered_kind: Harness) -> None:
    """A consumer without a timeout does not make another wait longer than its timeout."""
    queue = buffered_kind.open()
    patient = Task(queue.get)
    with pytest.raises(QueueEmpty):
        queue.get(timeout=0.05)
    queue.producer().publish(b"one")
    patient.result().done()


def test_get_takes_no_more_than_asked_for(buffered_kind: Harness) -> None:
    """``max_events`` bounds a batch; the next batch has the rest."""
    queue = buffered_kind.open()
    queue.producer().publish_block(block_of(numbered(0, 5)))
    batches = [queue.get(2), queue.get(2), queue.get(2)]
    assert [values_of(batch) for batch in batches] == [
        numbered(0, 2),
        numbered(2, 4),
        numbered(4, 5),
    ]
    assert [(batch.place.first, batch.place.end) for batch in batches] == [(0, 2), (2, 4), (4, 5)]


def test_dequeue_batch_size_bounds_every_batch(buffered_kind: Harness) -> None:
    """Asking for more than ``dequeue_batch_size`` gets no more than that."""
    queue = buffered_kind.open(dequeue_batch_size=3)
    queue.producer().publish_block(block_of(numbered(0, 5)))
    wait_until(lambda: queue.stats().ledger.pending == 5)
    with queue.get(100) as batch:
        assert values_of(batch) == numbered(0, 3)


def test_a_batch_is_a_block_with_the_base_columns_first(buffered_kind: Harness) -> None:
    """Consumers always find the base columns by name and type."""
    queue = buffered_kind.open()
    queue.producer().publish(b"one", severity=1)
    with queue.get() as batch:
        assert batch.block.schema.names == BASE_SCHEMA.names
        assert batch.block.schema.types == BASE_SCHEMA.types
        assert len(batch) == batch.block.num_rows == 1


def test_a_second_done_does_nothing(buffered_kind: Harness) -> None:
    """A second done, or a dead or release after it, changes nothing."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue)
    producer.publish(b"000")
    batch = queue.get()
    batch.done()
    batch.done()
    batch.dead()
    batch.release()
    acks.wait_for(1)
    producer.publish(b"001")
    assert buffered_kind.receive(queue, 1) == [b"001"]
    acks.wait_for(2)
    wait_until(lambda: queue.stats().ledger.delivered == 2)
    assert queue.stats().ledger.dead == 0


def test_a_direct_consumer_may_settle_its_batch_itself(direct: Harness) -> None:
    """Done once or twice by the consumer, an event is delivered once."""

    def consume(batch: Batch) -> None:
        batch.done()
        batch.done()
        batch.dead()

    queue = direct.open(consumer=consume)
    producer, acks = make_producer_with_acks(queue)
    producer.publish(b"one")
    acks.wait_for(1)
    assert queue.stats().ledger.delivered == 1
    assert queue.stats().ledger.dead == 0


def test_a_batch_as_context_is_done_when_the_block_ends(buffered_kind: Harness) -> None:
    """Leaving the with-block settles the batch."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue)
    producer.publish(b"one")
    with queue.get() as batch:
        assert len(batch) == 1
    acks.wait_for(1)


def test_batch_is_released_if_the_with_block_raises(buffered_kind: Harness) -> None:
    """An error in the with-block gives the batch back, and propagates."""
    queue = buffered_kind.open()
    queue.producer().publish(b"one")
    with pytest.raises(ZeroDivisionError), queue.get():
        raise ZeroDivisionError
    with queue.get() as batch:
        assert batch.attempt == 2


def test_free_gives_up_the_contents_and_keeps_the_rest(buffered_kind: Harness) -> None:
    """After free there is no block, but the count, the place and the acks are as before."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue)
    producer.publish_block(block_of(numbered(0, 2)))
    batch = queue.get()
    producer.publish(b"002")
    batch.free()
    batch.free()
    assert (len(batch), batch.place.first, batch.place.end, batch.attempt) == (2, 0, 2, 1)
    with pytest.raises(BatchFreed):
        _ = batch.block
    with pytest.raises(BatchFreed):
        list(batch)
    assert_never(lambda: bool(acks.received), "free() caused an ack")
    batch.done()
    acks.wait_for(2)
    assert buffered_kind.receive(queue, 1) == [b"002"]


def test_free_frees_only_its_own_batch(buffered_kind: Harness) -> None:
    """Batches cut from one block are freed one by one."""
    queue = buffered_kind.open()
    queue.producer().publish_block(block_of(numbered(0, 4)))
    one, other = queue.get(2), queue.get(2)
    one.free()
    assert values_of(other) == numbered(2, 4)
    one.done()
    other.done()


def test_a_direct_consumer_may_free_its_batch(direct: Harness) -> None:
    """The contents are gone for the consumer; the event counts as delivered."""
    errors: list[BatchFreed] = []

    def consume(batch: Batch) -> None:
        batch.free()
        for use in (lambda: batch.block, batch.release):
            try:
                use()
            except BatchFreed as error:
                errors.append(error)

    queue = direct.open(consumer=consume)
    producer, acks = make_producer_with_acks(queue)
    assert producer.publish(b"one")
    acks.wait_for(1)
    assert len(errors) == 2


def test_free_makes_room_in_bytes(buffered_kind: Harness) -> None:
    """Freed contents take no room, even before their batch is done."""
    queue = buffered_kind.open(max_bytes=bytes_for(*numbered(0, 2)))
    producer = queue.producer()
    publish_all(producer, numbered(0, 2))
    batch = queue.get(2)
    batch.free()
    assert producer.publish(b"002", timeout=PATIENCE)
    batch.done()
    while values_of(batch := queue.get()) != [b"002"]:
        batch.done()
    batch.done()


def test_get_on_a_closed_queue_raises(any_kind: Harness) -> None:
    """A closed queue hands out nothing, even if it has events."""
    queue = any_kind.open()
    queue.producer().publish(b"one")
    queue.close()
    with pytest.raises(QueueClosed):
        queue.get()
    with pytest.raises(QueueClosed):
        queue.get(timeout=0)


def test_a_direct_queue_has_nothing_to_get(direct: Harness) -> None:
    """A direct queue calls its consumer; get() raises NotSupported."""
    queue = direct.open()
    with pytest.raises(NotSupported):
        queue.get(timeout=0)


def test_a_blocked_get_is_woken_by_close(buffered_kind: Harness) -> None:
    """A consumer does not wait for a closed queue."""
    queue = buffered_kind.open()
    consumers = [Task(queue.get) for _ in range(3)]
    assert_never(lambda: not all(consumer.running for consumer in consumers))
    queue.close()
    for consumer in consumers:
        with pytest.raises(QueueClosed):
            consumer.result()


def test_a_finished_queue_serves_the_rest(buffered_kind: Harness) -> None:
    """After finish, consumers get the remaining events, and only then QueueClosed."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue)
    publish_all(producer, numbered(0, 3))
    queue.finish()
    assert buffered_kind.receive(queue, 3) == numbered(0, 3)
    acks.wait_for(3)
    with pytest.raises(QueueClosed):
        queue.get(timeout=PATIENCE)


def test_get_on_a_finished_queue_waits_for_batches_that_may_be_released(
    buffered_kind: Harness,
) -> None:
    """While a batch is in flight, a finished queue is not drained: it may come back."""
    queue = buffered_kind.open()
    queue.producer().publish(b"one")
    batch = queue.get()
    queue.finish()
    getting = Task(queue.get)
    assert_never(lambda: not getting.running, "an early end")
    batch.release()
    again = getting.result()
    assert (values_of(again), again.attempt) == ([b"one"], 2)
    last = Task(queue.get)
    again.done()
    with pytest.raises(QueueClosed):
        last.result()


def test_a_get_blocked_on_an_empty_queue_is_woken_by_finish(buffered_kind: Harness) -> None:
    """No event can come any more, so no consumer waits."""
    queue = buffered_kind.open()
    getting = Task(queue.get)
    assert_never(lambda: not getting.running)
    queue.finish()
    with pytest.raises(QueueClosed):
        getting.result()
