"""Load shedding, sampling and flow control."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from tests.contract.harness import (
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
from turnlane.errors import AckPending, QueueClosed, QueueFull
from turnlane.events import block_of
from turnlane.queues.api import FlowControl
from turnlane.queues.settings import Kind

DELAYING: dict[str, Any] = {
    "size": 10,
    "light_delay_mark": 1,
    "light_delay": "600s",
    "full_delay_mark": 1,
}
"""With this mark, the second event of a producer with full flow control waits."""


def test_above_the_discard_mark_unimportant_events_are_shed(buffered_kind: Harness) -> None:
    """Above the mark, events of this severity and less important ones are dropped."""
    queue = buffered_kind.open(size=10, discard_mark=2, discard_severity=5, stalled=True)
    producer, acks = make_producer_with_acks(queue)
    assert producer.publish(b"000", severity=7)
    assert producer.publish(b"001", severity=5)
    assert not producer.publish(b"shed", severity=5)
    assert not producer.try_publish(b"shed", severity=7)
    assert producer.publish(b"002", severity=4)
    assert producer.publish(b"003")
    assert queue.stats().ledger.dropped == {"severity": 2}
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 4) == numbered(0, 4)
    acks.wait_for(4)
    assert acks.dropped == 0


def test_a_block_is_shed_event_by_event(buffered_kind: Harness) -> None:
    """Above the mark, only the important events of a block are accepted."""
    queue = buffered_kind.open(size=10, discard_mark=1, discard_severity=5, stalled=True)
    producer = queue.producer()
    producer.publish(b"000")
    severities = [7, 1, None, 5, 4]
    values = [b"shed", b"001", b"002", b"shed", b"003"]
    published = producer.publish_block(block_of(values, severities=severities))
    assert (published.accepted, published.dropped) == (3, 2)
    assert producer.publish_block(block_of([b"shed"], severities=[6])).accepted == 0
    assert producer.publish_block(block_of([b"004"]).select(["value"])).accepted == 1
    assert queue.stats().ledger.dropped == {"severity": 3}
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 5) == numbered(0, 5)


def test_shedding_ends_below_the_mark(buffered_kind: Harness) -> None:
    """Below the mark all events are accepted again."""
    queue = buffered_kind.open(size=10, discard_mark=1, discard_severity=0, stalled=True)
    producer = queue.producer()
    producer.publish(b"000", severity=3)
    assert not producer.publish(b"shed", severity=3)
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 1) == [b"000"]
    wait_until(lambda: queue.stats().size == 0)
    assert producer.publish(b"001", severity=3)
    assert buffered_kind.receive(queue, 1) == [b"001"]


def test_sampling_keeps_every_nth_event(any_kind: Harness) -> None:
    """The first of every three is kept; single events and blocks count together."""
    queue = any_kind.open(sampling_interval=3)
    producer, acks = make_producer_with_acks(queue)
    kept = [producer.publish(value) for value in numbered(0, 4)]
    assert kept == [True, False, False, True]
    published = producer.publish_block(block_of(numbered(4, 12)))
    assert (published.accepted, published.dropped) == (2, 6)
    assert producer.try_publish(b"012")
    assert not producer.try_publish(b"013")
    assert any_kind.receive(queue, 5) == [b"000", b"003", b"006", b"009", b"012"]
    acks.wait_for(5)
    assert queue.stats().ledger.dropped == {"sampled": 9}
    assert queue.stats().ledger.accepted == 14


def test_a_block_that_is_dropped_entirely_raises_no_error(any_kind: Harness) -> None:
    """Publishing a block of which sampling keeps nothing succeeds."""
    queue = any_kind.open(sampling_interval=10)
    producer = queue.producer()
    assert producer.publish(b"000")
    for publish_block in (producer.publish_block, producer.try_publish_block):
        published = publish_block(block_of(numbered(1, 5)))
        assert published is not None
        assert (published.accepted, published.dropped) == (0, 4)
    assert any_kind.receive(queue, 1) == [b"000"]


@pytest.mark.parametrize("in_block", [False, True], ids=["event", "block"])
def test_full_flow_control_waits_above_its_mark(buffered_kind: Harness, in_block: bool) -> None:
    """A producer that can wait as long as needed waits until the queue is below the mark."""
    queue = buffered_kind.open(size=10, full_delay_mark=2, stalled=True)
    patient = queue.producer(flow=FlowControl.FULL)
    publish_all(patient, numbered(0, 2))

    def publish() -> bool:
        if in_block:
            return patient.publish_block(block_of([b"003"])).accepted == 1
        return patient.publish(b"003")

    publishing = Task(publish)
    assert_never(lambda: not publishing.running, "an end of patience")
    assert queue.producer().publish(b"002")
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 4) == numbered(0, 4)
    assert publishing.result()


def test_light_flow_control_waits_a_moment(buffered_kind: Harness) -> None:
    """A producer with light flow control waits ``light_delay``, then publishes."""
    queue = buffered_kind.open(size=10, light_delay_mark=2, light_delay="50ms", stalled=True)
    producer = queue.producer(flow=FlowControl.LIGHT)
    publish_all(producer, numbered(0, 2))
    started = time.monotonic()
    assert producer.publish(b"002")
    assert time.monotonic() - started >= 0.05
    started = time.monotonic()
    assert producer.publish_block(block_of([b"003"])).accepted == 1
    assert time.monotonic() - started >= 0.05
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 4) == numbered(0, 4)


def test_light_flow_control_ends_when_there_is_room(buffered_kind: Harness) -> None:
    """A delayed publisher continues when the queue falls below the mark."""
    queue = buffered_kind.open(size=10, light_delay_mark=1, light_delay="600s", stalled=True)
    producer = queue.producer(flow=FlowControl.LIGHT)
    assert producer.publish(b"000")
    publishing = Task(lambda: producer.publish(b"001"))
    assert_never(lambda: not publishing.running)
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 2) == numbered(0, 2)
    assert publishing.result()


@pytest.mark.parametrize("flow", [FlowControl.LIGHT, FlowControl.FULL])
def test_delayed_publishers_are_served_first_come_first_served(
    buffered_kind: Harness, flow: FlowControl
) -> None:
    """They enter in the order in which they came; later publishers do not overtake them."""
    queue = buffered_kind.open(**DELAYING, stalled=True)
    producer = queue.producer(flow=flow)
    assert producer.publish(b"000")
    calls = [partial(producer.publish, value) for value in numbered(1, 9)]
    publishing = line_up(queue, *calls)
    assert queue.stats().blocked_publishers == 8
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 9) == numbered(0, 9)
    assert all(task.result() for task in publishing)
    assert queue.stats().blocked_publishers == 0


@pytest.mark.parametrize("flow", [FlowControl.LIGHT, FlowControl.FULL])
def test_closing_wakes_delayed_publishers(buffered_kind: Harness, flow: FlowControl) -> None:
    """All of them are woken, not only the first."""
    queue = buffered_kind.open(**DELAYING, stalled=True)
    producer = queue.producer(flow=flow)
    assert producer.publish(b"000")
    publishing = line_up(queue, *[partial(producer.publish, b"never")] * 3)
    queue.finish()
    for task in publishing:
        with pytest.raises(QueueClosed):
            task.result()


def test_marks_also_apply_to_the_bound_in_bytes(buffered_kind: Harness) -> None:
    """A few large events fill a queue like many small ones."""
    large = bytes(1000)
    queue = buffered_kind.open(
        size=1000,
        max_bytes=4 * bytes_for(large),
        discard_mark=500,
        discard_severity=5,
        light_delay_mark=500,
        light_delay="600s",
        full_delay_mark=500,
        stalled=True,
    )
    publish_all(queue.producer(), [large, large])
    assert not queue.producer().publish(b"shed", severity=5)
    slow = [queue.producer(flow=flow) for flow in (FlowControl.LIGHT, FlowControl.FULL)]
    publishing = line_up(queue, *[partial(producer.publish, large) for producer in slow])
    assert queue.producer().publish(large)
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 5) == [large] * 5
    assert all(task.result() for task in publishing)


def test_waits_of_one_publish_share_one_timeout(memory: Harness) -> None:
    """The waits for the mark, for room and for the ack together end at the timeout."""
    queue = memory.open(size=2, full_delay_mark=1)
    queue.producer().publish(b"000")
    patient = queue.producer(flow=FlowControl.FULL, ack="delivered")
    started = time.monotonic()
    publishing = Task(lambda: patient.publish(b"001", timeout=1.0))
    wait_for_line(queue, 1)
    wait_until(lambda: time.monotonic() - started > 0.6)
    memory.receive(queue, 1)
    with pytest.raises(AckPending, match="within 1 s"):
        publishing.result()
    assert time.monotonic() - started < 1.5


def test_a_producer_without_flow_control_is_not_delayed(buffered_kind: Harness) -> None:
    """A producer without flow control can fill the queue up to its bound."""
    queue = buffered_kind.open(
        size=4, light_delay_mark=1, light_delay="600s", full_delay_mark=1, stalled=True
    )
    publish_all(queue.producer(flow=FlowControl.NONE), numbered(0, 4))
    assert queue.stats().size == 4


def test_try_publish_is_never_delayed(any_kind: Harness) -> None:
    """It does not block with any flow control."""
    waits = any_kind.kind is not Kind.DIRECT
    marks: dict[str, Any] = {"size": 10, "full_delay_mark": 1} if waits else {}
    queue = any_kind.open(stalled=True, **marks)
    producer = queue.producer(flow=FlowControl.FULL)
    assert producer.try_publish(b"000")
    assert producer.try_publish(b"001")
    assert producer.try_publish_block(block_of([b"002"])) is not None
    any_kind.resume()
    assert any_kind.receive(queue, 3) == numbered(0, 3)


def test_delayed_producers_do_not_block_others(buffered_kind: Harness) -> None:
    """A publisher that waits for a mark is not in the line for room."""
    queue = buffered_kind.open(size=3, full_delay_mark=1, stalled=True)
    queue.producer().publish(b"000")
    patient = Task(lambda: queue.producer(flow="full").publish(b"last"))
    wait_for_line(queue, 1)
    publish_all(queue.producer(), numbered(1, 3))
    blocked = Task(lambda: queue.producer().publish(b"003"))
    wait_for_line(queue, 2)
    buffered_kind.resume()
    assert sorted(value or b"" for value in buffered_kind.receive(queue, 5)) == [
        *numbered(0, 4),
        b"last",
    ]
    assert patient.result()
    assert blocked.result()


def test_a_direct_queue_takes_any_flow_control(direct: Harness) -> None:
    """Nothing waits in the queue, so no flow control slows a producer down."""
    queue = direct.open()
    for flow in FlowControl:
        assert queue.producer(flow=flow).publish(b"one")
    assert direct.receive(queue, 3) == [b"one"] * 3


@pytest.mark.parametrize("flow", FlowControl)
def test_a_refused_event_is_not_counted_as_dropped(
    buffered_kind: Harness, flow: FlowControl
) -> None:
    """A block without room comes again; only accepted or dropped events are counted."""
    queue = buffered_kind.open(
        size=4,
        light_delay_mark=2,
        full_delay_mark=3,
        light_delay=0.01,
        discard_mark=1,
        discard_severity=5,
        stalled=True,
    )
    publish_all(queue.producer(), numbered(0, 4))
    block = block_of([b"shed", b"004"], severities=[7, 1])
    producer = queue.producer(flow=flow)
    for _ in range(2):
        with pytest.raises(QueueFull):
            producer.publish_block(block, timeout=0.05)
        assert producer.try_publish_block(block) is None
    assert queue.stats().ledger.dropped == {}
    assert producer.publish_block(block.slice(0, 1), timeout=0.05).dropped == 1
    assert queue.stats().ledger.dropped == {"severity": 1}
    assert queue.stats().ledger.adds_up


def test_a_refused_block_larger_than_the_queue_continues_where_it_stopped(
    buffered_kind: Harness,
) -> None:
    """Events that policies dropped of its first pieces need not come again."""
    queue = buffered_kind.open(size=4, discard_mark=1, discard_severity=5, stalled=True)
    publish_all(queue.producer(), [b"000"])
    block = block_of(numbered(0, 8), severities=[1, 7, 7, 7, 1, 1, 1, 1])
    with pytest.raises(QueueFull) as refused:
        queue.producer().publish_block(block, timeout=0.05)
    assert refused.value.accepted == 4
