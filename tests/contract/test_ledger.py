"""accepted = delivered + dead + dropped + pending holds at every moment and on every path.

The harness checks this at the end of every other test as well.
"""

from __future__ import annotations

import pytest

from tests.contract.harness import (
    DiskHarness,
    Harness,
    Task,
    check,
    line_up,
    make_producer_with_acks,
    numbered,
    publish_all,
    wait_until,
)
from turnlane.errors import RetryLater
from turnlane.events import block_of
from turnlane.queues.api import Batch
from turnlane.queues.settings import Kind


def test_an_unused_queue_has_an_empty_ledger(any_kind: Harness) -> None:
    """All counts are 0, and they add up."""
    stats = any_kind.open(name="idle").stats()
    assert str(stats.ledger) == "0 accepted = 0 delivered + 0 dead + 0 pending"
    assert (stats.name, stats.kind) == ("idle", any_kind.kind.value)
    assert stats.utilization == 0


def test_the_ledger_follows_an_event_through_the_queue(keeping: Harness) -> None:
    """It is pending while it waits and while it is in flight, then delivered or dead."""
    queue = keeping.open()
    publish_all(queue.producer(), numbered(0, 3))
    assert queue.stats().ledger.pending == 3
    first, second = queue.get(1), queue.get(1)
    assert queue.stats().in_flight == 2
    assert queue.stats().ledger.pending == 3
    first.done()
    second.dead()
    ledger = queue.stats().ledger
    assert (ledger.delivered, ledger.dead, ledger.pending, ledger.accepted) == (1, 1, 1, 3)
    assert ledger.settled == 2


def test_a_proxys_ledger_follows_its_node(proxy: Harness) -> None:
    """Events are pending until the node reports them as delivered."""
    queue = proxy.open()
    publish_all(queue.producer(), numbered(0, 3))
    assert queue.stats().ledger.pending == 3
    proxy.receive(queue, 3)
    wait_until(lambda: queue.stats().ledger.delivered == 3)
    assert queue.stats().ledger.pending == 0


def test_a_direct_ledger_follows_the_consumer(direct: Harness) -> None:
    """An event is pending during the consumer's call, and accepted only if it succeeds."""
    pending: list[int] = []

    def consume(batch: Batch) -> None:
        pending.append(queue.stats().ledger.pending)
        if len(pending) == 2:
            raise ZeroDivisionError
        if len(pending) == 3:
            batch.dead()

    queue = direct.open(consumer=consume)
    producer = queue.producer()
    producer.publish(b"delivered")
    with pytest.raises(ZeroDivisionError):
        producer.publish(b"failed")
    producer.publish_block(block_of([b"dead", b"dead"]))
    assert pending == [1, 1, 2]
    ledger = queue.stats().ledger
    assert (ledger.accepted, ledger.delivered, ledger.dead, ledger.pending) == (3, 1, 2, 0)


def test_a_direct_batch_cannot_be_settled_after_its_failure(direct: Harness) -> None:
    """The publisher got the error; a consumer that keeps the batch cannot change that."""
    kept: list[Batch] = []

    def consume(batch: Batch) -> None:
        kept.append(batch)
        raise ZeroDivisionError

    queue = direct.open(consumer=consume)
    with pytest.raises(ZeroDivisionError):
        queue.producer().publish(b"one")
    kept[0].done()
    assert queue.stats().ledger.accepted == queue.stats().ledger.delivered == 0


def test_a_direct_ledger_adds_up_within_the_consumer(direct: Harness) -> None:
    """This holds between the consumer's done and the end of its call."""

    def consume(batch: Batch) -> None:
        batch.done()
        check(queue.stats())
        assert queue.stats().ledger.delivered == 1

    queue = direct.open(consumer=consume)
    assert queue.producer().publish(b"one")


def test_a_release_changes_no_count(keeping: Harness) -> None:
    """An event that is handed out again counts once."""
    queue = keeping.open()
    queue.producer().publish(b"one")
    before = queue.stats()
    queue.get().release()
    after = queue.stats()
    assert after.ledger == before.ledger
    assert (after.size, after.bytes, after.in_flight) == (before.size, before.bytes, 0)
    assert after.releases == 1


def test_every_drop_is_counted_by_its_reason(buffered_kind: Harness) -> None:
    """Sampled, shed and refused events have separate counts; all count as accepted."""
    queue = buffered_kind.open(
        size=4,
        full_behavior="drop_newest",
        discard_mark=3,
        discard_severity=6,
        sampling_interval=2,
        stalled=True,
    )
    producer = queue.producer()
    for _ in range(6):  # every other one is kept
        producer.publish(b"kept", severity=3)
    for _ in range(2):
        producer.publish(b"shed", severity=7)
    for _ in range(4):
        producer.publish(b"newest", severity=3)
    ledger = queue.stats().ledger
    assert ledger.dropped == {"newest": 1, "severity": 1, "sampled": 6}
    assert (ledger.accepted, ledger.pending) == (12, 4)


def test_blocked_publishers_are_in_the_stats_and_not_in_the_ledger(buffered_kind: Harness) -> None:
    """A publisher in line has not published yet."""
    queue = buffered_kind.open(size=1, stalled=True)
    producer = queue.producer()
    producer.publish(b"000")
    blocked = line_up(queue, lambda: producer.publish(b"001"), lambda: producer.publish(b"002"))
    stats = queue.stats()
    assert (stats.blocked_publishers, stats.ledger.accepted, stats.full_waits) == (2, 1, 2)
    buffered_kind.resume()
    assert buffered_kind.receive(queue, 3) == numbered(0, 3)
    assert all(publisher.result() for publisher in blocked)
    assert queue.stats().blocked_publishers == 0
    assert queue.stats().ledger.accepted == 3


def test_the_ledger_adds_up_at_every_moment(any_kind: Harness) -> None:
    """The stats are consistent while other threads publish and consume."""
    queue = any_kind.open()
    producer, acks = make_producer_with_acks(queue)
    publishing = Task(lambda: publish_all(producer, numbered(0, 500)))
    receiving = None
    if any_kind.kind is not Kind.DIRECT:
        receiving = Task(lambda: any_kind.receive(queue, 500))
    while publishing.running or (receiving is not None and receiving.running):
        check(queue.stats())
    publishing.result()
    if receiving is not None:
        assert receiving.result() == numbered(0, 500)
    acks.wait_for(500)
    wait_until(lambda: queue.stats().ledger.delivered == 500)


def test_room_comes_back_to_the_last_byte(buffered_kind: Harness) -> None:
    """After any cuts, frees, releases and settlements, an empty queue takes no room."""
    queue = buffered_kind.open()
    producer, acks = make_producer_with_acks(queue)
    producer.publish_block(block_of([b"x" * size for size in range(1, 30)]))
    publish_all(producer, [b"y" * size for size in range(1, 30)])
    queue.get(7).release()
    left = 58
    for take in (1, 2, 3, 5, 8, 13, 50, 50):
        if not left:
            break
        batch = queue.get(min(take, left))
        left -= len(batch)
        if take % 2:
            batch.free()
        batch.done()
    while left:
        with queue.get() as batch:
            left -= len(batch)
    acks.wait_for(58)
    wait_until(lambda: queue.stats().ledger.pending == 0)
    stats = queue.stats()
    assert (stats.size, stats.bytes, stats.in_flight) == (0, 0, 0)


def test_stats_are_ready_for_json(any_kind: Harness) -> None:
    """Every figure has a name, and the ledger says whether it adds up."""
    queue = any_kind.open()
    queue.producer().publish(b"one")
    described = queue.stats().as_dict()
    assert isinstance(described["ledger"], dict)
    assert described["ledger"]["adds_up"] is True
    assert described["ledger"]["accepted"] == 1
    assert isinstance(described["utilization"], float)


def test_the_ledger_survives_a_restart(disk_kind: DiskHarness) -> None:
    """A queue with a directory continues to count after a restart."""
    queue = disk_kind.open(sampling_interval=2)
    producer = queue.producer()
    for value in numbered(0, 10):
        producer.publish(value)
    queue.get(2).done()
    queue.get(1).dead()
    queue.close()
    before = queue.stats().ledger
    assert (before.delivered, before.dead, before.pending) == (2, 1, 2)
    again = disk_kind.reopen()
    assert again.stats().ledger == before
    assert disk_kind.receive(again, 2) == [b"006", b"008"]


def test_pushes_count_calls_in_every_kind(any_kind: Harness) -> None:
    """A block is one push, with any number of events."""
    queue = any_kind.open()
    producer = queue.producer()
    producer.publish(b"000")
    producer.publish_block(block_of(numbered(1, 6)))
    assert queue.stats().pushes == 2
    assert any_kind.receive(queue, 6) == numbered(0, 6)


def test_a_direct_queue_counts_batches_given_back(direct: Harness) -> None:
    """Each batch of any size counts once; a refused block is no push."""

    def refuse(_: Batch) -> None:
        raise RetryLater("not now")

    queue = direct.open(consumer=refuse)
    with pytest.raises(RetryLater):
        queue.producer().publish_block(block_of(numbered(0, 5)))
    stats = queue.stats()
    assert (stats.pushes, stats.releases, stats.ledger.accepted) == (0, 1, 0)
