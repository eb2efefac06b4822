"""The proxy queue: contents, acks, close, and a node that is away."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.harness import PATIENCE, Task, wait_until
from tests.queue_internals import remote_storage_of, state_of
from tests.recovery.proxy_harness import Publisher, await_values, impatience, open_proxy
from turnlane.errors import QueueClosed, QueueEmpty, QueueFull, TransportDown
from turnlane.events import Block, block_of
from turnlane.queues import open_buffered_queue, proxy
from turnlane.queues.api import Ack, AckLevel, Durability, NodeConnection, Transport
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.proxy import RemoteStorage, retry_delay
from turnlane.queues.settings import QueueSettings
from turnlane.testing import FlakyTransport, LoopbackTransport, ModelConnection, ModelNode, Step

MOMENT = 0.05
"""Seconds to wait in order to show that nothing happens."""


@pytest.fixture(autouse=True, scope="module")
def _impatient() -> Iterator[None]:
    with impatience():
        yield


@pytest.fixture
def opened() -> Iterator[Callable[..., BufferedQueue]]:
    """Open proxies that are closed after the test."""
    queues: list[BufferedQueue] = []

    def opening(transport: Transport, **knobs: object) -> BufferedQueue:
        queues.append(open_proxy(transport, **knobs))  # type: ignore[arg-type]
        return queues[-1]

    yield opening
    for queue in queues:
        queue.close()
        assert queue.stats().ledger.adds_up


Opening = Callable[..., BufferedQueue]


def _publisher(queue: BufferedQueue, node: ModelNode, level: str = "persisted") -> Publisher:
    return Publisher(queue, node.values, "p", AckLevel(level))


# Contents


def test_room_is_free_once_the_node_has_accepted(opened: Opening) -> None:
    """Many times the queue's size fits through, although nothing is persisted or delivered."""
    node = ModelNode()
    queue = opened(node, batch_size=4, batches=1)
    publisher = _publisher(queue, node)
    publisher.publish(100)
    await_values(node, 100)
    wait_until(lambda: queue.stats().size == 0, "room")
    assert queue.stats().bytes == 0
    assert queue.stats().ledger.pending == 100
    assert publisher.acks == []


def test_a_proxy_holds_several_batches(opened: Opening) -> None:
    """While the node is away, ``batches`` × ``batch_size`` events fit, and no more."""
    node = ModelNode()
    node.leave()
    queue = opened(node, batch_size=4, batches=3)
    publisher = _publisher(queue, node)
    assert publisher.try_publish(100) == 12
    node.come_back()
    await_values(node, 12)
    publisher.publish(12)
    await_values(node, 24)


def test_a_batch_has_up_to_batch_size_events(opened: Opening) -> None:
    """The default of ``dequeue_batch_size`` does not limit a batch for the node."""
    sizes: list[int] = []

    class Measuring(ModelNode):
        def accept(self, connection: ModelConnection, sequence: int, block: Block) -> None:
            sizes.append(block.num_rows)
            super().accept(connection, sequence, block)

    node = Measuring()
    node.leave()
    queue = opened(node, batch_size=3000, batches=1)
    assert queue.producer().publish_block(block_of([b"x"] * 3000)).accepted == 3000
    node.come_back()
    await_values(node, 3000)
    assert sizes == [3000]


def test_contents_kept_for_resending_stay_within_resend_bytes(opened: Opening) -> None:
    """Beyond it publishers wait, until the node has persisted something."""
    node = ModelNode()
    queue = opened(node, batch_size=4, batches=1, resend_bytes=1000, max_event_bytes=100)
    producer = queue.producer(ack="persisted", on_ack=lambda _: None)
    value = b"x" * 84  # 100 bytes with the overhead of an event

    def is_stuck() -> bool:
        producer.try_publish(value)
        full = queue.stats().size == 4
        return (
            full
            and remote_storage_of(queue)._awaited_bytes > 1000
            and len(remote_storage_of(queue)._unaccepted) == 1
        )

    wait_until(is_stuck, "a batch that has to wait")
    with pytest.raises(QueueFull):
        producer.publish(value, timeout=MOMENT)
    kept = len(node.values())
    assert 6 < kept <= 10
    assert not producer.try_publish(value)
    node.persist(4)
    assert producer.publish(value, timeout=PATIENCE)
    node.become_eager("persisted")
    for _ in range(100):
        assert producer.publish(value, timeout=PATIENCE)


def test_a_batch_larger_than_resend_bytes_is_sent_alone(opened: Opening) -> None:
    """Otherwise the queue would stop."""
    node = ModelNode(eager="persisted")
    queue = opened(node, batch_size=50, batches=1, resend_bytes=200, max_event_bytes=100)
    producer = queue.producer()
    for _ in range(20):
        producer.publish_block(block_of([b"x" * 80] * 10), timeout=PATIENCE)
    await_values(node, 200)


def test_contents_are_given_up_once_persisted(opened: Opening) -> None:
    """The contents are freed when the node has persisted them, before the delivery."""
    node = ModelNode()
    queue = opened(node)
    publisher = _publisher(queue, node)
    publisher.publish(40)
    await_values(node, 40)
    assert all(sent.block is not None for sent in list(remote_storage_of(queue)._undelivered))
    node.persist()
    publisher.await_acks()
    assert remote_storage_of(queue)._undelivered
    assert not remote_storage_of(queue)._unpersisted
    assert all(sent.block is None for sent in list(remote_storage_of(queue)._undelivered))
    assert all(sent.batch.is_freed for sent in list(remote_storage_of(queue)._undelivered))


@pytest.mark.parametrize("kind", ["memory", "disk_assisted"])
def test_publisher_at_accepted_is_not_held_up_by_events_not_delivered(
    opened: Opening, kind: str, tmp_path: Path
) -> None:
    """Forty times ``resend_bytes`` wait in the node's memory, and the proxy keeps nothing."""
    path = {"path": tmp_path / "far"} if kind == "disk_assisted" else {}
    with open_buffered_queue(QueueSettings.of(kind=kind, size=1000, **path)) as far:
        queue = opened(LoopbackTransport(far), resend_bytes=1000, max_event_bytes=100)
        producer = queue.producer()
        for _ in range(400):
            assert producer.publish(b"x" * 84, timeout=PATIENCE)
        wait_until(lambda: far.stats().size == 400, "all events in the node")
        wait_until(lambda: _count_kept(remote_storage_of(queue)) == 0, "no contents kept")
        assert queue.stats().ledger.pending == 400
        queue.close(drain=True, timeout=PATIENCE)
        assert queue.stats().ledger.delivered == 400


def test_producers_of_different_levels_share_a_proxy(opened: Opening) -> None:
    """Only the events that are promised more than acceptance are kept and sent again."""
    node = ModelNode()
    queue = opened(node, batch_size=8, batches=2)
    kept = {
        level: Publisher(queue, node.values, level[0], AckLevel(level))
        for level in ("persisted", "delivered")
    }
    silent = queue.producer()
    for number in range(30):
        silent.publish(b"a:%d" % number, timeout=PATIENCE)
        kept["persisted" if number % 2 else "delivered"].publish(1)
    await_values(node, 60)
    storage = remote_storage_of(queue)
    wait_until(lambda: not storage._unaccepted, "acceptance")
    wait_until(lambda: _count_kept(storage) == 30, "the copies of two producers")
    node.crash()
    await_values(node, 30)
    assert not [value for value in node.values() if value.startswith(b"a:")]
    silent.publish(b"a:30")
    await_values(node, 31)
    node.become_eager("delivered")
    for publisher in kept.values():
        publisher.await_acks()
        publisher.check(node.values())
    wait_until(lambda: queue.stats().ledger.pending == 0, "the delivery of all")
    assert _count_kept(storage) == 0
    assert queue.stats().ledger.dropped == {"missing": 30}


def _count_kept(storage: RemoteStorage) -> int:
    with storage._lock:
        return sum(sent.block.num_rows for sent in storage._unpersisted if sent.block is not None)


def test_events_that_the_node_has_not_accepted_are_sent_again_at_every_level(
    opened: Opening,
) -> None:
    """The first promise to every producer is that the node gets its events."""
    node = ModelNode()
    transport = FlakyTransport(node, crash=node.crash)
    transport.die(Step.AFTER_SEND, crash=True)
    queue = opened(transport, batch_size=8)
    queue.producer().publish_block(block_of([b"%d" % number for number in range(8)]))
    assert transport.await_death(Step.AFTER_SEND)
    await_values(node, 8)
    assert queue.stats().ledger.dropped == {}


def test_block_that_reaches_beyond_its_batch_is_kept_while_a_flush_waits(opened: Opening) -> None:
    """A flush waits for a position and has no events: it must hide no publisher behind it."""
    node = ModelNode()
    queue = opened(node, batch_size=4, batches=4)
    first = queue.producer(ack="persisted", on_ack=lambda _: None)
    first.publish_block(block_of([b"0", b"1"]))
    flushing = Task(lambda: queue.wait_level(AckLevel.PERSISTED, 4, PATIENCE))
    waiting = Task(lambda: queue.producer(ack="persisted").publish_block(block_of([b"x"] * 6)))
    await_values(node, 8)
    storage = remote_storage_of(queue)
    wait_until(lambda: not storage._unaccepted, "acceptance")
    node.crash()
    await_values(node, 8)
    node.persist()
    assert flushing.result()
    assert waiting.result().accepted == 6


# Acks


def test_acks_wait_for_the_level_of_the_producer(opened: Opening) -> None:
    """Each producer gets exact counts of its own events, at its own level."""
    node = ModelNode()
    queue = opened(node)
    persisted = Publisher(queue, node.values, "p", AckLevel.PERSISTED)
    delivered = Publisher(queue, node.values, "d", AckLevel.DELIVERED)
    silent = queue.producer()
    for _ in range(5):
        persisted.publish(2)
        silent.publish(b"silent")
        delivered.publish(1)
    await_values(node, 20)
    assert (persisted.acked, delivered.acked) == (0, 0)
    node.persist()
    persisted.await_acks()
    assert delivered.acked == 0
    node.deliver()
    delivered.await_acks()
    persisted.check(node.values())
    delivered.check(node.values())


def test_a_partly_delivered_batch_is_acked_in_part(opened: Opening) -> None:
    """An ack does not wait for the end of a batch."""
    node = ModelNode()
    node.leave()
    queue = opened(node, batch_size=8)
    publisher = _publisher(queue, node, "delivered")
    publisher.publish(8)
    node.come_back()
    await_values(node, 8)
    node.persist(6)
    node.deliver(3)
    publisher.await_acks(3)
    assert queue.stats().ledger.delivered == 3
    node.persist()
    node.deliver()
    publisher.await_acks()
    publisher.check(node.values())


def test_acks_have_the_durability_of_the_node(opened: Opening) -> None:
    """The durability in an ack is the node's, not the proxy's own."""
    node = ModelNode(eager="persisted", durability=Durability.INTERVAL)
    queue = opened(node)
    publisher = _publisher(queue, node)
    publisher.publish(1)
    publisher.await_acks()
    assert publisher.acks[-1].durability is Durability.INTERVAL


def test_a_blocking_callback_stalls_nothing(opened: Opening) -> None:
    """Sending, listening and publishing continue while a callback blocks."""
    node = ModelNode(eager="persisted")
    queue = opened(node, batch_size=4, batches=1, resend_bytes=1000, max_event_bytes=100)
    inside, goes_on = threading.Event(), threading.Event()
    counts: list[int] = []

    def slow(ack: Ack) -> None:
        inside.set()
        assert goes_on.wait(PATIENCE)
        counts.append(ack.count)

    producer = queue.producer(ack="persisted", on_ack=slow)
    producer.publish(b"first")
    assert inside.wait(PATIENCE)
    for _ in range(100):
        producer.publish(b"x" * 80, timeout=PATIENCE)
    wait_until(lambda: queue.stats().size == 0, "room")
    assert producer.try_publish(b"last")
    await_values(node, 102)
    assert counts == []
    goes_on.set()
    assert producer.flush(PATIENCE)
    queue.close()
    assert sum(counts) == 102


def test_a_callback_may_close_the_proxy(opened: Opening) -> None:
    """The close waits for all threads except the callback's own."""
    node = ModelNode(eager="persisted")
    queue = opened(node)
    closed = threading.Event()

    def closing(ack: Ack) -> None:
        queue.close()
        closed.set()

    queue.producer(ack="persisted", on_ack=closing).publish(b"x")
    assert closed.wait(PATIENCE)
    with pytest.raises(QueueClosed):
        queue.producer().publish(b"y")


# Closing


def _closing(queue: BufferedQueue, timeout: float = PATIENCE) -> threading.Thread:
    thread = threading.Thread(target=lambda: queue.close(drain=True, timeout=timeout))
    thread.start()
    return thread


def test_a_draining_close_waits_for_persisted(opened: Opening) -> None:
    """Accepted is not enough, and delivered is not needed."""
    node = ModelNode()
    queue = opened(node)
    publisher = _publisher(queue, node)
    publisher.publish(10)
    closing = _closing(queue)
    await_values(node, 10)
    closing.join(MOMENT)
    assert closing.is_alive()
    node.persist()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    publisher.check(node.values())
    ledger = queue.stats().ledger
    assert (ledger.delivered, ledger.dropped) == (10, {})


def test_a_draining_close_gives_up_in_time(opened: Opening) -> None:
    """Events that the node has not persisted by then count as lost and are not acked."""
    node = ModelNode()
    queue = opened(node)
    publisher = _publisher(queue, node)
    publisher.publish(10)
    await_values(node, 10)
    node.persist(4)
    publisher.await_acks(4)
    queue.close(drain=True, timeout=MOMENT)
    assert publisher.acked == 4
    ledger = queue.stats().ledger
    assert (ledger.delivered, dict(ledger.dropped)) == (4, {"closed": 6})


def test_a_forced_close_counts_lost_events(opened: Opening) -> None:
    """All events that the node did not report as persisted count as dropped: closed."""
    node = ModelNode()
    node.leave()
    queue = opened(node)
    publisher = _publisher(queue, node)
    publisher.publish(7)
    queue.close()
    ledger = queue.stats().ledger
    assert (ledger.accepted, dict(ledger.dropped), ledger.pending) == (7, {"closed": 7}, 0)
    assert publisher.acks == []


def test_a_draining_close_sends_events_again_that_a_crash_lost(opened: Opening) -> None:
    """The drain waits for a node that died, and sends everything again."""
    node = ModelNode()
    queue = opened(node)
    publisher = _publisher(queue, node)
    publisher.publish(10)
    await_values(node, 10)
    closing = _closing(queue)
    wait_until(lambda: state_of(queue).admission.is_closed, "the close")
    node.crash(away=True)
    assert node.values() == []
    node.come_back()
    await_values(node, 10)
    node.persist()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    publisher.check(node.values())


def test_a_close_frees_a_sender_that_is_blocked_at_a_busy_node(opened: Opening) -> None:
    """A node that accepts nothing, or reports nothing, does not delay a close."""
    node = ModelNode(size=1)
    queue = opened(node)
    publisher = _publisher(queue, node)
    publisher.publish(16)
    await_values(node, 1)
    closing = threading.Thread(target=queue.close)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert queue.stats().ledger.dropped == {"closed": 16}


def test_a_node_that_dies_during_the_close_does_no_harm(opened: Opening) -> None:
    """A transport that raises from ``close`` changes nothing."""
    node = ModelNode(eager="persisted")
    transport = FlakyTransport(node, crash=node.crash)
    transport.die(Step.CLOSE, crash=True, error=OSError("reset by peer"))
    queue = opened(transport)
    publisher = _publisher(queue, node)
    publisher.publish(3)
    publisher.await_acks()
    queue.close()
    assert transport.deaths == 1
    publisher.check(node.values())


def test_a_drain_ends_when_the_last_events_were_dropped(opened: Opening) -> None:
    """The node never gets events that were dropped after the last sent one."""
    node = ModelNode(size=1)
    queue = opened(node, full_behavior="drop_oldest", max_bytes=300, batch_size=8, batches=2)
    acks: list[Ack] = []
    producer = queue.producer(ack="persisted", on_ack=acks.append)
    producer.publish(b"x" * 84)
    await_values(node, 1)
    wait_until(lambda: queue.stats().size == 0, "room")
    producer.publish(b"y" * 184)  # being sent to a full node
    wait_until(lambda: queue.stats().in_flight == 2, "the second batch")
    assert producer.publish(b"z" * 64)
    assert not producer.publish(b"w" * 134)  # z is dropped, and there is still no room
    node.become_eager("delivered")
    queue.close(drain=True, timeout=PATIENCE)
    assert len(node.values()) == 2
    assert dict(queue.stats().ledger.dropped) == {"newest": 1, "oldest": 1}
    assert (sum(ack.count for ack in acks), sum(ack.dropped for ack in acks)) == (2, 1)


def test_a_close_wakes_a_publisher_that_waits_for_an_ack(opened: Opening) -> None:
    """Without a callback ``publish`` waits for its level; a close ends the wait."""
    node = ModelNode()
    queue = opened(node)
    raised: list[type[Exception]] = []

    def publish() -> None:
        try:
            queue.producer(ack="persisted").publish(b"x")
        except QueueClosed as error:
            raised.append(type(error))

    thread = threading.Thread(target=publish)
    thread.start()
    await_values(node, 1)
    queue.close()
    thread.join(PATIENCE)
    assert raised == [QueueClosed]


# A node that is away


def test_publishing_blocks_while_the_node_is_away(opened: Opening) -> None:
    """Publishers wait, or get ``QueueFull``; they continue when the node is back."""
    node = ModelNode(eager="delivered")
    node.leave()
    queue = opened(node, batch_size=2, batches=2)
    publisher = _publisher(queue, node, "delivered")
    publisher.publish(4)
    with pytest.raises(QueueFull):
        publisher.publish(1, timeout=MOMENT)
    blocked = threading.Thread(target=lambda: publisher.publish(8))
    blocked.start()
    wait_until(lambda: queue.stats().blocked_publishers == 1, "a publisher in line")
    node.come_back()
    blocked.join(PATIENCE)
    publisher.await_acks()
    publisher.check(node.values())


@pytest.mark.parametrize("behavior", ["drop_newest", "drop_oldest"])
def test_events_are_dropped_as_configured_while_the_node_is_away(
    opened: Opening, behavior: str
) -> None:
    """Drops are counted and acked as dropped; the other events arrive in order."""
    node = ModelNode(eager="delivered")
    node.leave()
    queue = opened(node, batch_size=2, batches=2, full_behavior=behavior)
    acks: list[Ack] = []
    producer = queue.producer(ack="delivered", on_ack=acks.append)
    taken = [producer.publish(b"%d" % number) for number in range(10)]
    node.come_back()
    producer.publish(b"last", timeout=PATIENCE)
    queue.close(drain=True, timeout=PATIENCE)
    kept = [b"0", b"1", b"2", b"3"] if behavior == "drop_newest" else [b"6", b"7", b"8", b"9"]
    # The queue may have been full when the last event was published.
    assert [value for value in node.values() if value != b"last"][-3:] == kept[-3:]
    ledger = queue.stats().ledger
    assert ledger.accepted == 11
    assert ledger.delivered == len(node.values())
    assert taken.count(False) == (6 if behavior == "drop_newest" else 0)
    assert sum(ack.count for ack in acks) == len(node.values())


def test_a_client_with_a_fixed_id_continues_after_a_restart(opened: Opening) -> None:
    """The numbers continue at the node's, so no new event counts as a repeat."""
    node = ModelNode(eager="persisted")
    first = opened(node, producer_id="client-1")
    one = Publisher(first, node.values, "one", AckLevel.PERSISTED)
    one.publish(10)
    first.close(drain=True, timeout=PATIENCE)
    second = opened(node, producer_id="client-1")
    two = Publisher(second, node.values, "two", AckLevel.PERSISTED)
    two.publish(10)
    two.await_acks()
    node.crash()
    two.publish(3)
    second.close(drain=True, timeout=PATIENCE)
    one.check(node.values())
    two.check(node.values())
    assert len(node.values()) == 23
    assert second.stats().ledger.delivered == 13


def test_events_of_an_old_client_are_refused_after_a_new_one_came() -> None:
    """A block of the old client must not use numbers of the new one."""
    node = ModelNode()
    old = node.connect("client-1")
    new = node.connect("client-1")
    with pytest.raises(TransportDown):
        old.send(0, block_of([b"late"]))
    new.send(new.resume_at, block_of([b"fresh"]))
    assert node.values() == [b"fresh"]


def test_a_node_that_lost_persisted_events_is_logged(
    opened: Opening, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss is logged, and later events arrive."""
    node, empty = ModelNode(eager="persisted"), ModelNode(eager="persisted")
    transport = FlakyTransport(node)
    queue = opened(transport)
    publisher = _publisher(queue, node)
    publisher.publish(5)
    publisher.await_acks()
    transport.transport = empty
    transport.die(Step.IDLE)
    assert transport.await_death(Step.IDLE)
    with caplog.at_level(logging.ERROR):
        queue.producer().publish(b"next")
        await_values(empty, 1)
    assert "queue.node_lost_events" in caplog.text
    assert "events=5" in caplog.text


# A transport that misbehaves


@pytest.mark.parametrize(
    "step",
    [Step.CONNECT, Step.BEFORE_SEND, Step.AFTER_SEND, Step.ACCEPTED, Step.IDLE, Step.CLOSE],
)
def test_an_unexpected_error_of_the_transport_ends_nothing(opened: Opening, step: Step) -> None:
    """After any exception the queue connects again and loses nothing."""
    node = ModelNode()
    transport = FlakyTransport(node, crash=node.crash)
    transport.die(step, crash=True, error=ValueError("a bug in the transport"))
    if step is Step.CLOSE:
        transport.die(Step.IDLE)
    queue = opened(transport)
    publisher = _publisher(queue, node)
    publisher.publish(6)
    assert transport.await_death(step, timeout=PATIENCE)
    await_values(node, 6)
    node.persist()
    publisher.await_acks()
    publisher.check(node.values())


def test_a_sender_is_freed_when_the_listener_loses_the_node(opened: Opening) -> None:
    """A blocked send ends when the listener finds that the node is gone."""
    node = ModelNode(size=1)
    transport = FlakyTransport(node)
    queue = opened(transport)
    publisher = _publisher(queue, node)
    publisher.publish(8)
    await_values(node, 1)
    connects = node.connects
    transport.die(Step.IDLE)
    assert node.wait_for(lambda: node.connects > connects, PATIENCE)
    node.become_eager("delivered")
    publisher.await_acks()
    publisher.check(node.values())


# Reconnecting


def test_the_backoff_grows_to_its_cap() -> None:
    """The delay doubles each time; jitter reduces it to between half and all of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proxy, "FIRST_RETRY", 0.05)
        patch.setattr(proxy, "LAST_RETRY", 5.0)
        assert [retry_delay(n, 1.0) for n in (1, 2, 3)] == [0.05, 0.1, 0.2]
        assert [retry_delay(n, 0.0) for n in (1, 2, 3)] == [0.025, 0.05, 0.1]
        assert retry_delay(8, 1.0) == retry_delay(10_000, 1.0) == 5.0


class _Patient(RemoteStorage):
    """Records its pauses and does not sleep."""

    pauses: list[float]

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


def test_a_proxy_backs_off_until_the_node_makes_progress() -> None:
    """A connection without progress counts as a failure; progress resets the backoff."""
    node = ModelNode(eager="persisted")
    transport = FlakyTransport(node)
    transport.die(Step.CONNECT, times=3)
    transport.die(Step.BEFORE_SEND, times=2)
    pauses: list[float] = []
    _Patient.pauses = pauses
    settings = QueueSettings.of(kind="proxy")
    with BufferedQueue(settings, _Patient(settings, transport, jitter=lambda: 1.0)) as queue:
        queue.producer(ack="persisted").publish(b"x")
        assert pauses == [retry_delay(failures, 1.0) for failures in (1, 2, 3, 4, 5)]
        transport.die(Step.AFTER_SEND)
        queue.producer(ack="persisted").publish(b"y")
        assert pauses[5:] in ([], [retry_delay(1, 1.0)])
    assert node.values() == [b"x", b"y"]


def test_a_proxy_reconnects_at_once_after_progress(opened: Opening) -> None:
    """A node that crashes sometimes but makes progress causes no pause."""
    node = ModelNode(eager="persisted")
    transport = FlakyTransport(node)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proxy, "FIRST_RETRY", 2 * PATIENCE)
        patch.setattr(proxy, "LAST_RETRY", 2 * PATIENCE)
        queue = opened(transport)
        publisher = _publisher(queue, node)
        for times in range(1, 11):
            publisher.publish(1)
            publisher.await_acks()
            transport.die(Step.IDLE)
            assert transport.await_death(Step.IDLE, times)
            transport.clear()
    publisher.check(node.values())


# Reading


def test_the_queue_of_the_node_can_be_read_through_the_proxy(opened: Opening) -> None:
    """``get`` reads from the queue of the node, until this queue is closed."""
    with open_buffered_queue(QueueSettings.of()) as far:
        queue = opened(LoopbackTransport(far))
        with pytest.raises(QueueEmpty):
            queue.get(timeout=0)
        queue.producer().publish(b"there and back")
        with queue.get(timeout=PATIENCE) as batch:
            assert [event.value for event in batch] == [b"there and back"]
        queue.close(drain=True)
        with pytest.raises(QueueClosed):
            queue.get()


def test_the_test_transports_match_the_protocol() -> None:
    """They can be used as a transport."""
    transports: list[Transport] = [ModelNode(), FlakyTransport(ModelNode())]
    connections: list[NodeConnection] = [transport.connect("client") for transport in transports]
    assert [connection.resume_at for connection in connections] == [0, 0]


def test_a_closed_queue_of_the_node_is_logged_once(
    opened: Opening, caplog: pytest.LogCaptureFixture
) -> None:
    """The proxy tries again without end, so the log has to say why."""
    attempts: list[str] = []

    class Closed(ModelNode):
        def connect(self, producer_id: str) -> ModelConnection:
            attempts.append(producer_id)
            raise QueueClosed("the far queue is closed")

    with caplog.at_level(logging.WARNING):
        opened(Closed())
        wait_until(lambda: len(attempts) > 3, "attempts")
    assert caplog.text.count("the far queue is closed") == 1
