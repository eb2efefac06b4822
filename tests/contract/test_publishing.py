"""Published events arrive, or publishing raises."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.contract.harness import (
    Acks,
    Harness,
    Task,
    make_producer_with_acks,
    numbered,
    publish_all,
)
from turnlane.errors import ConfigError, EventTooLarge, NotSupported, QueueClosed, RetryLater
from turnlane.events import EVENT_OVERHEAD, Event, block_of
from turnlane.queues.api import AckLevel, Batch
from turnlane.testing import ManualClock


def test_events_arrive_in_publish_order(any_kind: Harness) -> None:
    """Single events and blocks come out in the order in which they went in."""
    queue = any_kind.open()
    producer = queue.producer()
    publish_all(producer, numbered(0, 3))
    producer.publish_block(block_of(numbered(3, 6)))
    assert producer.try_publish(b"006")
    assert any_kind.receive(queue, 7) == numbered(0, 7)


def test_an_event_keeps_everything_it_was_published_with(buffered_kind: Harness) -> None:
    """All base columns are unchanged, and the offset comes from the queue."""
    queue = buffered_kind.open()
    queue.producer().publish(
        b"value", "key", headers={"a": "1"}, timestamp=1_234_567, severity=3, source="here"
    )
    with queue.get() as batch:
        (event,) = batch
    assert event == Event(b"value", "key", {"a": "1"}, 1_234_567, 3, "here", 0)


def test_a_direct_consumer_gets_everything_an_event_was_published_with(direct: Harness) -> None:
    """All base columns reach the consumer unchanged."""
    events: list[Event] = []
    queue = direct.open(consumer=events.extend)
    queue.producer().publish(
        b"value", "key", headers={"a": "1"}, timestamp=1_234_567, severity=3, source="here"
    )
    assert events == [Event(b"value", "key", {"a": "1"}, 1_234_567, 3, "here", 0)]


def test_an_event_without_a_timestamp_gets_the_time_of_the_clock(buffered_kind: Harness) -> None:
    """The default timestamp is the time of publishing."""
    clock = ManualClock(time_ns=1_700_000_000_000_001_999)
    queue = buffered_kind.open(clock=clock)
    producer = queue.producer()
    producer.publish(b"one")
    producer.publish_block(block_of([b"two"]).drop_columns(["timestamp"]))
    stamps: list[int | None] = []
    while len(stamps) < 2:
        with queue.get() as batch:
            stamps += [event.timestamp for event in batch]
    assert stamps == [1_700_000_000_000_001] * 2


def test_bytes_like_values_are_taken_as_bytes(any_kind: Harness) -> None:
    """A bytearray or memoryview is copied, so its owner can reuse it."""
    queue = any_kind.open()
    producer = queue.producer()
    buffer = bytearray(b"one")
    producer.publish(buffer)  # type: ignore[arg-type]
    producer.try_publish(memoryview(buffer))  # type: ignore[arg-type]
    buffer[:] = b"two"
    assert any_kind.receive(queue, 2) == [b"one", b"one"]


@pytest.mark.parametrize(
    ("value", "options", "error"),
    [
        ("text", {}, TypeError),
        (None, {}, TypeError),
        (b"", {"key": 7}, TypeError),
        (b"", {"severity": 8}, ValueError),
        (b"", {"severity": -1}, ValueError),
        (b"", {"timestamp": 1 << 70}, (ValueError, OverflowError)),
        (b"", {"source": "\ud800"}, ValueError),
        (b"", {"headers": {"name": 7}}, TypeError),
        (b"", {"headers": {7: "name"}}, TypeError),
    ],
)
def test_a_value_of_a_wrong_type_raises_in_publish(
    any_kind: Harness, value: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    """The publish call raises, and the queue is unchanged."""
    queue = any_kind.open()
    producer = queue.producer()
    with pytest.raises(error):
        producer.publish(value, **options)
    with pytest.raises(error):
        producer.try_publish(value, **options)
    producer.publish(b"right")
    assert any_kind.receive(queue, 1) == [b"right"]
    assert queue.stats().ledger.accepted == 1


def test_a_producer_may_be_shared_by_threads(any_kind: Harness) -> None:
    """All events arrive, and the events of each thread stay in order."""
    queue = any_kind.open()
    producer, acks = make_producer_with_acks(queue)
    threads = [
        Task(lambda name=name: publish_all(producer, [b"%c%d" % (name, n) for n in range(50)]))  # type: ignore[misc]
        for name in b"abcd"
    ]
    for thread in threads:
        thread.result()
    values = [value or b"" for value in any_kind.receive(queue, 200)]
    for name in b"abcd":
        assert [value for value in values if value[0] == name] == [
            b"%c%d" % (name, n) for n in range(50)
        ]
    acks.wait_for(200)


def test_a_closed_producer_publishes_no_more(any_kind: Harness) -> None:
    """Closing a producer does not affect other producers."""
    queue = any_kind.open()
    with queue.producer() as producer:
        producer.publish(b"one")
    for publish in (producer.publish, producer.try_publish):
        with pytest.raises(QueueClosed, match="producer"):
            publish(b"two")
    for publish_block in (producer.publish_block, producer.try_publish_block):
        with pytest.raises(QueueClosed, match="producer"):
            publish_block(block_of([b"two"]))
    queue.producer().publish(b"three")
    assert any_kind.receive(queue, 2) == [b"one", b"three"]


def test_acks_still_come_to_a_closed_producer(any_kind: Harness) -> None:
    """Events published before the producer was closed are acked as usual."""
    queue = any_kind.open()
    producer, acks = make_producer_with_acks(queue)
    publish_all(producer, numbered(0, 2))
    producer.close()
    any_kind.receive(queue, 2)
    acks.wait_for(2)


@pytest.mark.parametrize("word", ["ack", "flow"])
def test_a_producer_with_an_unknown_level_or_flow_is_refused(any_kind: Harness, word: str) -> None:
    """A wrong ack level or flow control is an error."""
    queue = any_kind.open()
    with pytest.raises(ConfigError, match="sometime"):
        queue.producer(**{word: "sometime"})  # type: ignore[arg-type]


def test_flush_waits_for_the_producers_level(buffered_kind: Harness) -> None:
    """flush() returns false while events are undelivered, and true afterwards."""
    queue = buffered_kind.open()
    producer, _ = make_producer_with_acks(queue, AckLevel.DELIVERED)
    assert producer.flush(timeout=0)
    producer.publish(b"one")
    assert not producer.flush(timeout=0.01)
    flushing = Task(producer.flush)
    buffered_kind.receive(queue, 1)
    assert flushing.result()


def test_flush_of_a_direct_producer_has_nothing_to_wait_for(direct: Harness) -> None:
    """When publish has returned, every level is reached."""
    queue = direct.open()
    producer, _ = make_producer_with_acks(queue)
    producer.publish(b"one")
    assert producer.flush(timeout=0)


def test_flush_ends_when_the_queue_is_closed(buffered_kind: Harness) -> None:
    """A close wakes a waiting flush, which returns false."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue, AckLevel.DELIVERED)
    producer.publish(b"one")
    flushing = Task(producer.flush)
    queue.close()
    assert not flushing.result()
    assert not acks.received


def test_an_event_too_large_is_refused_at_once(any_kind: Harness) -> None:
    """An event beyond ``max_event_bytes`` can never enter, so its publisher does not wait."""
    queue = any_kind.open(max_event_bytes=EVENT_OVERHEAD + 10)
    producer = queue.producer()
    for publish in (producer.publish, producer.try_publish):
        with pytest.raises(EventTooLarge):
            publish(b"x" * 11)
        assert publish(b"x" * 10)
    assert len(any_kind.receive(queue, 2)) == 2


def test_an_event_larger_than_the_queue_is_refused_at_once(buffered_kind: Harness) -> None:
    """An event beyond ``max_bytes`` is refused even by a publish that may block."""
    queue = buffered_kind.open(max_bytes=EVENT_OVERHEAD + 10)
    producer = queue.producer()
    with pytest.raises(EventTooLarge):
        producer.publish(b"x" * 11)
    with pytest.raises(EventTooLarge):
        producer.publish_block(block_of([b"x" * 1000]))
    assert producer.publish(b"x" * 10)


def test_an_event_too_large_is_refused_at_a_full_queue_too(buffered_kind: Harness) -> None:
    """A full queue does not make the publisher of such an event wait."""
    queue = buffered_kind.open(size=1, max_event_bytes=100, stalled=True)
    producer = queue.producer()
    producer.publish(b"one")
    with pytest.raises(EventTooLarge):
        producer.publish(b"x" * 100)


def test_direct_publishing_calls_the_consumer_on_the_publishers_thread(direct: Harness) -> None:
    """The consumer has run on this thread when publish returns."""
    threads: list[threading.Thread] = []
    queue = direct.open(consumer=lambda batch: threads.append(threading.current_thread()))
    assert queue.producer().publish(b"one")
    assert threads == [threading.current_thread()]


def test_an_error_of_a_direct_consumer_is_raised_in_publish(direct: Harness) -> None:
    """publish() raises the consumer's error, and the event was never accepted."""

    def fail(batch: Batch) -> None:
        raise ZeroDivisionError

    queue = direct.open(consumer=fail)
    producer, acks = make_producer_with_acks(queue)
    for publish in (producer.publish, producer.try_publish):
        with pytest.raises(ZeroDivisionError):
            publish(b"one")
    with pytest.raises(ZeroDivisionError):
        producer.publish_block(block_of(numbered(0, 3)))
    assert queue.stats().ledger.accepted == 0
    queue.close()
    assert not acks.received


def test_a_direct_consumer_that_releases_asks_for_another_try(direct: Harness) -> None:
    """The publisher has to publish a batch again that was given back."""
    queue = direct.open(consumer=lambda batch: batch.release())
    with pytest.raises(RetryLater):
        queue.producer().publish(b"one")
    assert queue.stats().ledger.accepted == 0
    assert queue.stats().releases == 1


def test_a_direct_queue_refuses_a_producer_id(direct: Harness) -> None:
    """A queue that stores nothing cannot recognize repeats, so it refuses the id."""
    queue = direct.open()
    with pytest.raises(NotSupported):
        queue.producer(producer_id="me")
    with pytest.raises(ValueError, match="producer_id"):
        queue.producer().publish_block(block_of([b"one"]), sequence=0)


def test_a_direct_consumer_may_publish_to_its_own_queue(direct: Harness) -> None:
    """Publishing from the consumer is a plain nested call."""
    seen: list[bytes | None] = []

    def consume(batch: Batch) -> None:
        seen.extend(event.value for event in batch)
        if len(seen) < 3:
            queue.producer().publish(b"again")

    queue = direct.open(consumer=consume)
    acks = Acks()
    queue.producer(ack="delivered", on_ack=acks).publish(b"first")
    assert seen == [b"first", b"again", b"again"]
    acks.wait_for(1)
