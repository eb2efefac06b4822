"""Close and finish: publishers, consumers and remaining events."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

from tests.contract.harness import (
    NOTICEABLE,
    PATIENCE,
    Acks,
    Harness,
    ProxyHarness,
    Task,
    assert_never,
    line_up,
    make_producer_with_acks,
    numbered,
    publish_all,
    wait_until,
)
from tests.queue_internals import state_of
from turnlane.errors import QueueClosed, QueueEmpty
from turnlane.events import block_of
from turnlane.ledger import Outcome
from turnlane.queues.api import Ack, AckLevel, Batch, Queue
from turnlane.queues.buffer import BlockRange
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.settings import ON_DISK, Kind

PUBLISHERS = 50


@pytest.mark.parametrize("end", ["close", "finish"])
def test_publishing_after_the_end_raises(any_kind: Harness, end: str) -> None:
    """All four publish methods raise QueueClosed, and none of them blocks."""
    queue = any_kind.open()
    producer = queue.producer()
    getattr(queue, end)()
    with pytest.raises(QueueClosed):
        queue.producer()
    for publish in (producer.publish, producer.try_publish):
        with pytest.raises(QueueClosed):
            publish(b"late")
    for publish_block in (producer.publish_block, producer.try_publish_block):
        with pytest.raises(QueueClosed):
            publish_block(block_of([b"late"]))
    assert queue.stats().ledger.accepted == 0


@pytest.mark.parametrize("end", ["close", "finish"])
def test_blocked_publishers_are_woken_by_the_end(buffered_kind: Harness, end: str) -> None:
    """Publishers in line get QueueClosed, and none of their events is in the queue."""
    queue = buffered_kind.open(size=1, stalled=True)
    producer = queue.producer()
    producer.publish(b"000")
    blocked = line_up(
        queue,
        lambda: producer.publish(b"001"),
        lambda: producer.publish(b"002", timeout=600),
        lambda: producer.publish_block(block_of(numbered(3, 5))).accepted > 0,
    )
    ending = Task(getattr(queue, end))
    for publisher in blocked:
        with pytest.raises(QueueClosed):
            publisher.result()
    buffered_kind.resume()
    ending.result()
    assert queue.stats().ledger.accepted == 1


def test_a_publisher_slowed_down_is_woken_by_close(buffered_kind: Harness) -> None:
    """A close ends the wait of flow control."""
    queue = buffered_kind.open(size=4, full_delay_mark=1, stalled=True)
    queue.producer().publish(b"000")
    patient = queue.producer(flow="full")
    publishing = Task(lambda: patient.publish(b"001"))
    assert_never(lambda: not publishing.running)
    closing = Task(queue.close)
    with pytest.raises(QueueClosed):
        publishing.result()
    buffered_kind.resume()
    closing.result()


def test_a_second_close_waits_for_the_first(
    keeping: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any close returns, the directory can be opened again."""
    queue = keeping.open()
    assert isinstance(queue, BufferedQueue)
    entered, go_on = threading.Event(), threading.Event()
    storage = state_of(queue).storage
    close_storage = storage.close

    def close_slowly() -> None:
        entered.set()
        assert go_on.wait(PATIENCE)
        close_storage()

    monkeypatch.setattr(storage, "close", close_slowly)
    first = Task(queue.close)
    assert entered.wait(PATIENCE)
    second = Task(queue.close)
    assert_never(lambda: not second.running, "the second close's return")
    go_on.set()
    first.result()
    second.result()


def test_a_callback_may_close_a_queue_that_is_being_closed(keeping: Harness) -> None:
    """The first close waits for the callback, so the callback's close must not wait."""
    queue = keeping.open()
    assert isinstance(queue, BufferedQueue)
    called, go_on = threading.Event(), threading.Event()

    def close_again(_: Ack) -> None:
        called.set()
        assert go_on.wait(PATIENCE)
        queue.close()

    queue.producer(ack="accepted", on_ack=close_again).publish(b"one")
    assert called.wait(PATIENCE)
    closing = Task(queue.close)
    wait_until(lambda: queue.closed)
    go_on.set()
    closing.result()


def test_a_second_close_does_nothing(any_kind: Harness) -> None:
    """Neither a second close nor a finish after it does anything."""
    queue = any_kind.open()
    queue.producer().publish(b"one")
    queue.close()
    ledger = queue.stats().ledger
    queue.close()
    queue.close(drain=True)
    queue.finish()
    assert queue.stats().ledger == ledger


def test_a_queue_as_context_is_closed_at_the_end(any_kind: Harness) -> None:
    """Leaving the with-block closes the queue."""
    with any_kind.open(shutdown_timeout="50ms") as queue:
        queue.producer().publish(b"one")
    with pytest.raises(QueueClosed):
        queue.producer().publish(b"two")


def test_nothing_is_acked_by_a_close(buffered_kind: Harness) -> None:
    """Events neither delivered nor saved are not reported as if they were."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue, AckLevel.DELIVERED)
    publish_all(producer, numbered(0, 3))
    queue.get(1)
    queue.close()
    assert not acks.received


def test_a_close_counts_the_remaining_events(buffered_kind: Harness) -> None:
    """The close counts events in memory as dropped; events on disk are still pending."""
    queue = buffered_kind.open()
    publish_all(make_producer_with_acks(queue)[0], numbered(0, 3))
    batch = queue.get(1)
    queue.close()
    ledger = queue.stats().ledger
    assert ledger.delivered == 0
    if buffered_kind.kind in ON_DISK:
        assert (ledger.pending, ledger.dropped) == (3, {})
    else:
        assert (ledger.pending, ledger.dropped) == (0, {"closed": 3})
    batch.release()


def test_a_disk_assisted_queue_that_does_not_save_drops_events_in_memory(
    disk_assisted: Harness,
) -> None:
    """With ``save_on_shutdown`` off, a close counts the dropped events."""
    queue = disk_assisted.open(save_on_shutdown=False)
    publish_all(queue.producer(), numbered(0, 3))
    queue.close()
    assert queue.stats().ledger.dropped == {"closed": 3}


def test_done_after_close_is_refused(keeping: Harness) -> None:
    """The consumer of a batch gets QueueClosed if its queue is closed."""
    queue = keeping.open()
    producer, acks = make_producer_with_acks(queue)
    producer.publish(b"one")
    batch = queue.get()
    queue.close()
    for settle in (batch.done, batch.dead):
        with pytest.raises(QueueClosed):
            settle()
    batch.release()
    batch.free()
    assert not acks.received


def test_done_after_close_of_a_proxy_reaches_the_node(proxy: Harness) -> None:
    """A proxy's batches belong to its node, which is still open."""
    queue = proxy.open()
    queue.producer().publish(b"one")
    batch = queue.get()
    queue.close()
    batch.done()
    assert isinstance(proxy, ProxyHarness)
    assert proxy.nodes[0].stats().ledger.delivered == 1


def test_a_draining_close_waits_for_consumers(buffered_kind: Harness) -> None:
    """Publishing ends at once; consuming continues until everything is settled."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue)
    publish_all(producer, numbered(0, 5))
    closing = Task(lambda: queue.close(drain=True, timeout=PATIENCE))
    values = buffered_kind.receive(queue, 2)
    assert_never(lambda: not closing.running, "an early end")
    with pytest.raises(QueueClosed):
        producer.publish(b"late")
    values += buffered_kind.receive(queue, 3)
    closing.result()
    assert values == numbered(0, 5)
    assert acks.count == 5
    assert queue.stats().ledger.delivered == 5


def test_a_draining_close_gives_up_after_its_timeout(buffered_kind: Harness) -> None:
    """A consumer that never finishes delays a close only by the timeout."""
    queue = buffered_kind.open(shutdown_timeout="600s")
    publish_all(make_producer_with_acks(queue)[0], numbered(0, 2))
    started = time.monotonic()
    queue.close(drain=True, timeout=0.1)
    assert 0.1 <= time.monotonic() - started < PATIENCE
    ledger = queue.stats().ledger
    assert ledger.pending + sum(ledger.dropped.values()) == 2


def test_a_draining_close_gives_up_after_shutdown_timeout(buffered_kind: Harness) -> None:
    """The default timeout of a draining close is the queue's ``shutdown_timeout``."""
    queue = buffered_kind.open(shutdown_timeout="50ms")
    make_producer_with_acks(queue)[0].publish(b"one")
    started = time.monotonic()
    queue.close(drain=True)
    assert 0.05 <= time.monotonic() - started < PATIENCE
    assert queue.stats().ledger.delivered == 0


def test_a_draining_close_of_an_empty_queue_returns_at_once(any_kind: Harness) -> None:
    """There is nothing to wait for."""
    queue = any_kind.open(shutdown_timeout="600s")
    queue.producer().publish(b"one")
    any_kind.receive(queue, 1)
    Task(lambda: queue.close(drain=True)).result()
    assert queue.stats().ledger.delivered == 1


def test_a_forced_close_ends_a_draining_one(buffered_kind: Harness) -> None:
    """A second close without drain ends the first one."""
    queue = buffered_kind.open()
    make_producer_with_acks(queue)[0].publish(b"one")
    draining = Task(lambda: queue.close(drain=True, timeout=600))
    assert_never(lambda: not draining.running)
    queue.close()
    draining.result()
    with pytest.raises(QueueClosed):
        queue.get()


def test_a_direct_close_waits_for_a_running_consumer_only_if_asked_to(direct: Harness) -> None:
    """A draining close waits for the consumer's call; a forced close does not."""
    entered, go_on = threading.Event(), threading.Event()

    def consume(batch: Batch) -> None:
        entered.set()
        assert go_on.wait(PATIENCE)

    queue = direct.open(consumer=consume)
    producer, acks = make_producer_with_acks(queue)
    publishing = Task(lambda: producer.publish(b"one"))
    assert entered.wait(PATIENCE)
    queue.close()
    draining = Task(lambda: queue.close(drain=True, timeout=PATIENCE))
    assert_never(lambda: not draining.running)
    assert queue.stats().ledger.pending == 1
    go_on.set()
    assert publishing.result()
    draining.result()
    acks.wait_for(1)


def slow_direct(direct: Harness) -> tuple[Queue, threading.Event, Task[bool]]:
    """Return a direct queue whose consumer runs until the test releases it."""
    begun, go_on = threading.Event(), threading.Event()

    def consume(_: Batch) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)

    queue = direct.open(consumer=consume)
    publishing = Task(lambda: queue.producer().publish(b"000"))
    assert begun.wait(PATIENCE)
    return queue, go_on, publishing


def test_a_second_direct_close_waits_for_a_draining_one(direct: Harness) -> None:
    """When any close returns, the queue is closed."""
    queue, go_on, publishing = slow_direct(direct)
    closing = [Task(lambda: queue.close(drain=True, timeout=PATIENCE)) for _ in range(2)]
    assert_never(lambda: not all(task.running for task in closing), "an early return")
    go_on.set()
    for task in closing:
        task.result()
    assert publishing.result()


def test_a_forced_direct_close_ends_a_draining_one(direct: Harness) -> None:
    """As in other kinds; the running consumer is not interrupted."""
    queue, go_on, publishing = slow_direct(direct)
    draining = Task(lambda: queue.close(drain=True, timeout=PATIENCE))
    assert_never(lambda: not draining.running, "an early return")
    queue.close()
    draining.result()
    assert publishing.running
    go_on.set()
    assert publishing.result()


def test_a_draining_direct_close_that_times_out_logs_it(
    direct: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the number of events that consumers still have."""
    queue, go_on, publishing = slow_direct(direct)
    with caplog.at_level(logging.WARNING):
        queue.close(drain=True, timeout=0.05)
    assert "seconds=0.05 events=1" in caplog.text
    go_on.set()
    assert publishing.result()


def test_a_direct_consumer_may_close_its_queue(direct: Harness) -> None:
    """A close from the consumer does not deadlock, and the event is delivered."""

    def close(batch: Batch) -> None:
        queue.close()

    queue = direct.open(consumer=close)
    producer, acks = make_producer_with_acks(queue)
    assert producer.publish(b"last")
    acks.wait_for(1)


def consume_until_closed(queue: Queue) -> None:
    """Settle all batches until the queue is closed."""
    while True:
        try:
            queue.get(7).done()
        except QueueClosed:
            return


def publish_until_closed(queue: Queue, acks: Acks) -> int:
    """Publish until refused; returns how many events were taken."""
    producer = queue.producer(ack="delivered", on_ack=acks)
    published = 0
    try:
        while True:
            published += producer.publish(b"one")
            published += producer.publish_block(block_of([b"two", b"three"])).accepted
    except QueueClosed:
        return published


@pytest.mark.parametrize("drain", [False, True], ids=["forced", "draining"])
def test_publishers_that_race_a_close_learn_whether_their_events_are_in(
    any_kind: Harness, drain: bool
) -> None:
    """With fifty publishers, published = acked + dropped + pending in the ledger."""
    waits = any_kind.kind is not Kind.DIRECT
    bounds: dict[str, Any] = {"size": 100} if waits else {}
    queue = any_kind.open(**bounds)
    heard = [Acks() for _ in range(PUBLISHERS)]
    publishers = [Task(lambda acks=acks: publish_until_closed(queue, acks)) for acks in heard]  # type: ignore[misc]
    consumer = Task(lambda: consume_until_closed(queue)) if waits else None
    wait_until(lambda: queue.stats().ledger.delivered > 300, "some traffic")
    queue.close(drain=drain, timeout=PATIENCE)
    published = sum(publisher.result() for publisher in publishers)
    if consumer is not None:
        consumer.result()
    ledger = queue.stats().ledger
    known_lost = sum(ledger.dropped.values()) + ledger.pending
    wait_until(lambda: sum(acks.count for acks in heard) + known_lost >= published, "all acks")
    assert sum(acks.count for acks in heard) + known_lost == published == ledger.accepted
    if drain:
        assert known_lost == 0
    assert sum(acks.dropped for acks in heard) == 0


def test_a_done_that_runs_during_close_counts(
    keeping: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close waits until the done is recorded: otherwise it would be acked and lost."""
    queue = keeping.open()
    assert isinstance(queue, BufferedQueue)
    storage, recording, go_on = state_of(queue).storage, threading.Event(), threading.Event()
    record = storage.settle

    def record_slowly(settled: BlockRange, outcome: Outcome) -> None:
        recording.set()
        assert go_on.wait(PATIENCE)
        record(settled, outcome)

    monkeypatch.setattr(storage, "settle", record_slowly)
    producer, acks = make_producer_with_acks(queue)
    producer.publish(b"one")
    settling = Task(queue.get().done)
    assert recording.wait(PATIENCE)
    closing = Task(queue.close)
    assert_never(lambda: not closing.running, "an end before done was recorded")
    go_on.set()
    settling.result()
    closing.result()
    assert queue.stats().ledger.delivered == acks.count == 1


@pytest.mark.parametrize("consumers", [1, 4])
def test_a_done_that_races_close_counts_if_it_returns(keeping: Harness, consumers: int) -> None:
    """A ``done()`` that returned counts as delivered; a ``done()`` that raised does not."""
    for _ in range(5):
        queue = keeping.open()
        producer, acks = make_producer_with_acks(queue)
        publish_all(producer, numbered(0, 200))
        settling = [Task(lambda queue=queue: settle_one_by_one(queue)) for _ in range(consumers)]  # type: ignore[misc]
        wait_until(lambda queue=queue: queue.stats().ledger.delivered > 0)  # type: ignore[misc]
        queue.close()
        done = sum(task.result() for task in settling)
        assert queue.stats().ledger.delivered == done
        assert acks.count <= done
        if consumers == 1:  # in order: no ack waits for an older event
            assert acks.count == done


def settle_one_by_one(queue: Queue) -> int:
    """Settle single events until the queue is closed or empty; returns how many it did."""
    done = 0
    while True:
        try:
            queue.get(1, timeout=NOTICEABLE).done()
            done += 1
        except (QueueClosed, QueueEmpty):
            return done


def test_a_draining_close_that_times_out_logs_the_remaining_events(
    buffered_kind: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the number of events and the seconds."""
    queue = buffered_kind.open(stalled=buffered_kind.delivers_in_background)
    publish_all(queue.producer(), numbered(0, 3))
    with caplog.at_level(logging.WARNING):
        queue.close(drain=True, timeout=0.05)
    assert "seconds=0.05 events=3" in caplog.text
