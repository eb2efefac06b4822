"""Released batches come again, before newer events, with their attempt counted."""

from __future__ import annotations

import pytest

from tests.contract.harness import (
    Harness,
    assert_never,
    make_producer_with_acks,
    numbered,
    publish_all,
    values_of,
    wait_until,
)
from turnlane.errors import BatchFreed
from turnlane.events import block_of
from turnlane.queues.api import Batch


def test_a_released_batch_comes_again_with_its_attempt_counted(buffered_kind: Harness) -> None:
    """Each release counts one attempt and acks nothing."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue)
    publish_all(producer, numbered(0, 2))
    wait_until(lambda: queue.stats().ledger.pending == 2)
    for attempt in (1, 2, 3):
        batch = queue.get(1)
        assert (values_of(batch), batch.attempt) == ([b"000"], attempt)
        batch.release()
    assert_never(lambda: bool(acks.received), "release() caused an ack")
    assert buffered_kind.receive(queue, 2) == numbered(0, 2)
    acks.wait_for(2)


def test_released_batches_come_before_newer_events(buffered_kind: Harness) -> None:
    """Batches released in any order come in offset order, before fresh events."""
    queue = buffered_kind.open()
    queue.producer().publish_block(block_of(numbered(0, 8)))
    batches = [queue.get(2) for _ in range(3)]
    for batch in (batches[2], batches[0], batches[1]):
        batch.release()
    queue.producer().publish(b"008")
    again = [queue.get(2) for _ in range(4)]
    assert [values_of(batch) for batch in again] == [numbered(at, at + 2) for at in (0, 2, 4, 6)]
    assert [batch.attempt for batch in again] == [2, 2, 2, 1]
    for batch in again:
        batch.done()
    assert buffered_kind.receive(queue, 1) == [b"008"]


def test_a_released_batch_may_be_taken_in_smaller_ones(buffered_kind: Harness) -> None:
    """A large batch can be retried in smaller ones, each with its attempt."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue)
    producer.publish_block(block_of(numbered(0, 5)))
    queue.get(5).release()
    pieces = [queue.get(2) for _ in range(3)]
    assert [values_of(piece) for piece in pieces] == [
        numbered(0, 2),
        numbered(2, 4),
        numbered(4, 5),
    ]
    assert {piece.attempt for piece in pieces} == {2}
    for piece in reversed(pieces):
        piece.done()
    acks.wait_for(5)


def test_a_second_release_does_nothing(buffered_kind: Harness) -> None:
    """A second release, or a done after it, does not affect another consumer's batch."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue)
    producer.publish(b"one")
    batch = queue.get()
    batch.release()
    batch.release()
    batch.done()
    again = queue.get()
    batch.done()
    batch.dead()
    batch.release()
    assert again.attempt == 2
    assert_never(lambda: bool(acks.received), "a released batch caused an ack")
    again.done()
    acks.wait_for(1)


def test_release_after_free_is_refused(buffered_kind: Harness) -> None:
    """The contents are gone; the batch can still be done."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue)
    producer.publish(b"one")
    batch = queue.get()
    batch.free()
    with pytest.raises(BatchFreed):
        batch.release()
    batch.done()
    acks.wait_for(1)


def test_free_after_release_does_nothing(buffered_kind: Harness) -> None:
    """After a release the consumer has no contents to free."""
    queue = buffered_kind.open()
    queue.producer().publish(b"one")
    batch = queue.get()
    batch.release()
    batch.free()
    assert buffered_kind.receive(queue, 1) == [b"one"]


def test_acks_wait_for_a_released_batch(buffered_kind: Harness) -> None:
    """Later batches that are done are not acked before the released batch."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue)
    publish_all(producer, numbered(0, 3))
    wait_until(lambda: queue.stats().ledger.pending == 3)
    first = queue.get(1)
    buffered_kind.receive(queue, 2)
    first.release()
    assert_never(lambda: bool(acks.received), "an ack out of order")
    assert buffered_kind.receive(queue, 1) == [b"000"]
    acks.wait_for(3)


def test_a_released_batch_keeps_its_room(buffered_kind: Harness) -> None:
    """A release makes no room: the events are still in the queue."""
    queue = buffered_kind.open(size=2, stalled=True)
    if buffered_kind.delivers_in_background:
        buffered_kind.resume()  # events that a proxy has sent take no room in the proxy
    producer = queue.producer()
    publish_all(producer, numbered(0, 2))
    batch = queue.get()
    if buffered_kind.delivers_in_background:
        wait_until(lambda: queue.stats().size == 0, "word that the node has them")
    before = queue.stats().size
    batch.release()
    assert queue.stats().size == before
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 2) == numbered(0, 2)


def test_a_direct_batch_comes_again_only_if_published_again(direct: Harness) -> None:
    """Only the publisher has events that a direct consumer gave back or failed on."""
    attempts: list[int] = []

    def consume(batch: Batch) -> None:
        attempts.append(batch.attempt)
        if len(attempts) == 1:
            raise ZeroDivisionError

    queue = direct.open(consumer=consume)
    producer, acks = make_producer_with_acks(queue)
    with pytest.raises(ZeroDivisionError):
        producer.publish(b"one")
    assert producer.publish(b"one")
    assert attempts == [1, 1]
    acks.wait_for(1)
