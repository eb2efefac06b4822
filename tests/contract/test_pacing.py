"""The minimum batch, the dequeue rate and the dequeue window."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from typing import Any

import pytest

from tests.contract.harness import (
    PATIENCE,
    Harness,
    Task,
    assert_never,
    line_up,
    numbered,
    publish_all,
    values_of,
)
from turnlane.errors import ConfigError, QueueClosed, QueueEmpty
from turnlane.events import block_of
from turnlane.testing import ManualClock


def at(hour: int, minute: int = 0) -> ManualClock:
    """Return a clock that stands at this local time of day."""
    moment = dt.datetime(2026, 3, 4, hour, minute).astimezone()
    return ManualClock(time_ns=int(moment.timestamp()) * 10**9)


def test_a_minimum_batch_is_waited_for(buffered_kind: Harness) -> None:
    """Fewer events than the minimum are not handed out; the next event completes the batch."""
    queue = buffered_kind.open(size=100, minimum_batch_size=3, minimum_batch_timeout="600s")
    producer = queue.producer()
    publish_all(producer, numbered(0, 2))
    getting = Task(queue.get)
    assert_never(lambda: not getting.running, "a batch too small")
    producer.publish(b"002")
    with getting.result() as batch:
        assert values_of(batch) == numbered(0, 3)


def test_a_full_batch_is_handed_out_at_once(buffered_kind: Harness) -> None:
    """The consumer does not wait if the minimum is reached."""
    queue = buffered_kind.open(size=100, minimum_batch_size=3, minimum_batch_timeout="600s")
    queue.producer().publish_block(block_of(numbered(0, 5)))
    with queue.get(timeout=PATIENCE) as batch:
        assert values_of(batch) == numbered(0, 5)


def test_a_minimum_batch_is_not_waited_for_longer_than_its_timeout(buffered_kind: Harness) -> None:
    """After the timeout consumers get the events that are there."""
    queue = buffered_kind.open(size=100, minimum_batch_size=10, minimum_batch_timeout="50ms")
    started = time.monotonic()
    queue.producer().publish(b"000")
    with queue.get(timeout=PATIENCE) as batch:
        assert values_of(batch) == [b"000"]
    assert time.monotonic() - started >= 0.045


def test_a_timeout_ends_the_wait_for_a_minimum_batch(keeping: Harness) -> None:
    """The timeout of the consumer counts; the events stay for the next one."""
    queue = keeping.open(minimum_batch_size=10, minimum_batch_timeout="600s")
    queue.producer().publish(b"000")
    with pytest.raises(QueueEmpty):
        queue.get(timeout=0.02)
    queue.finish()
    assert keeping.receive(queue, 1) == [b"000"]


def test_a_minimum_batch_times_out_for_a_consumer_that_polls(keeping: Harness) -> None:
    """The time since the first event counts, not the time since the last get()."""
    queue = keeping.open(minimum_batch_size=10, minimum_batch_timeout="100ms")
    queue.producer().publish(b"000")
    deadline = time.monotonic() + PATIENCE
    found: list[bytes | None] = []
    while not found and time.monotonic() < deadline:
        with contextlib.suppress(QueueEmpty), queue.get(timeout=0.02) as batch:
            found = values_of(batch)
    assert found == [b"000"]


def test_a_smaller_batch_asked_for_lowers_the_minimum(keeping: Harness) -> None:
    """A consumer that asks for one event does not wait for ten."""
    queue = keeping.open(minimum_batch_size=10, minimum_batch_timeout="600s")
    queue.producer().publish(b"000")
    assert keeping.receive(queue, 1) == [b"000"]


def test_a_queue_that_is_full_hands_out_less_than_the_minimum(buffered_kind: Harness) -> None:
    """If no publisher can enter, no more events would come."""
    queue = buffered_kind.open(
        size=4, minimum_batch_size=4, minimum_batch_timeout="600s", stalled=True
    )
    producer = queue.producer()
    publish_all(producer, numbered(0, 3))
    getting = Task(queue.get)
    (blocked,) = line_up(queue, lambda: producer.publish_block(block_of(numbered(3, 5))))
    buffered_kind.resume()
    with getting.result() as batch:
        assert values_of(batch)[0] == b"000"
        held = len(batch)
    assert blocked.result().accepted == 2
    queue.finish()
    assert buffered_kind.receive(queue, 5 - held) == numbered(held, 5)


def test_finishing_ends_the_wait_for_a_minimum_batch(buffered_kind: Harness) -> None:
    """No more events can come, so consumers get the rest at once."""
    queue = buffered_kind.open(size=100, minimum_batch_size=10, minimum_batch_timeout="600s")
    publish_all(queue.producer(), numbered(0, 2))
    getting = Task(queue.get)
    assert_never(lambda: not getting.running)
    queue.finish()
    with getting.result() as batch:
        assert values_of(batch) == numbered(0, 2)


def test_the_dequeue_rate_spaces_batches(buffered_kind: Harness) -> None:
    """After the events of one second the next ones wait until the second is over."""
    clock = ManualClock()
    queue = buffered_kind.open(dequeue_rate=2, clock=clock)
    queue.producer().publish_block(block_of(numbered(0, 5)))
    with queue.get(timeout=PATIENCE) as batch:
        assert values_of(batch) == numbered(0, 2)
    with pytest.raises(QueueEmpty):
        queue.get(timeout=0.01)
    clock.advance(0.9)
    with pytest.raises(QueueEmpty):
        queue.get(timeout=0.01)
    clock.advance(0.1)
    assert buffered_kind.receive(queue, 2) == numbered(2, 4)


def test_a_rate_below_one_a_second_hands_out_single_events(buffered_kind: Harness) -> None:
    """There is a long pause after each event."""
    clock = ManualClock()
    queue = buffered_kind.open(dequeue_rate=0.5, clock=clock)
    queue.producer().publish_block(block_of(numbered(0, 2)))
    assert buffered_kind.receive(queue, 1) == [b"000"]
    clock.advance(1.9)
    with pytest.raises(QueueEmpty):
        queue.get(timeout=0.01)
    clock.advance(0.1)
    assert buffered_kind.receive(queue, 1) == [b"001"]


def test_idle_time_does_not_raise_the_dequeue_rate_later(buffered_kind: Harness) -> None:
    """An idle hour does not allow an hour's worth of events at once."""
    clock = ManualClock()
    queue = buffered_kind.open(dequeue_rate=2, clock=clock)
    clock.advance(3600)
    queue.producer().publish_block(block_of(numbered(0, 5)))
    assert buffered_kind.receive(queue, 2) == numbered(0, 2)
    with pytest.raises(QueueEmpty):
        queue.get(timeout=0.01)


def test_outside_the_dequeue_window_nothing_is_handed_out(buffered_kind: Harness) -> None:
    """Events wait for the window to open, and come at once when it does."""
    clock = at(21, 59)
    queue = buffered_kind.open(dequeue_window="22:00-06:00", clock=clock)
    publish_all(queue.producer(), numbered(0, 2))
    with pytest.raises(QueueEmpty):
        queue.get(timeout=0.02)
    clock.advance(60)
    assert buffered_kind.receive(queue, 1) == [b"000"]
    clock.advance(8 * 3600)
    with pytest.raises(QueueEmpty):
        queue.get(timeout=0.02)
    clock.jump(-3600)
    assert buffered_kind.receive(queue, 1) == [b"001"]


def test_a_consumer_outside_the_window_is_woken_by_close(buffered_kind: Harness) -> None:
    """A close ends the wait for the window."""
    queue = buffered_kind.open(dequeue_window="22:00-06:00", clock=at(12))
    queue.producer().publish(b"000")
    getting = Task(queue.get)
    assert_never(lambda: not getting.running)
    queue.close()
    with pytest.raises(QueueClosed):
        getting.result()


def test_publishing_works_outside_the_dequeue_window(buffered_kind: Harness) -> None:
    """The window restricts consumers, not publishers."""
    queue = buffered_kind.open(dequeue_window="22:00-06:00", clock=at(12))
    publish_all(queue.producer(), numbered(0, 100))
    assert queue.stats().ledger.pending == 100


@pytest.mark.parametrize(
    "knobs",
    [
        {"minimum_batch_size": 10},
        {"dequeue_rate": 2},
        {"dequeue_window": "22:00-06:00"},
    ],
    ids=lambda knobs: next(iter(knobs)),
)
def test_a_direct_queue_cannot_be_paced(direct: Harness, knobs: dict[str, Any]) -> None:
    """The publishers set the pace of a direct queue, so these knobs are refused."""
    with pytest.raises(ConfigError) as error:
        direct.open(**knobs)
    assert error.value.knob in knobs
