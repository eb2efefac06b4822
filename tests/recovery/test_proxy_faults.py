"""A proxy queue keeps its promises at every step at which its connection can break."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.harness import PATIENCE, Task, wait_until
from tests.queue_internals import state_of
from tests.recovery.hooked_disk import HookedDisk
from tests.recovery.proxy_harness import Publisher, await_values, impatience, open_proxy
from turnlane.events import get_values
from turnlane.queues import open_buffered_queue
from turnlane.queues.api import AckLevel
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.settings import QueueSettings
from turnlane.storage.disk_io import Disk
from turnlane.testing import FlakyTransport, LoopbackTransport, ModelNode, Step

STAGES = {Step.PERSISTED: AckLevel.PERSISTED}
"""The level that the node reaches before the death; without an entry it only accepts."""
BEFORE = {Step.CONNECT: Step.IDLE, Step.RESEND: Step.AFTER_SEND, Step.CLOSE: Step.IDLE}
"""Steps that can happen twice only after an earlier death, and that death."""


@pytest.fixture(autouse=True, scope="module")
def _impatient() -> Iterator[None]:
    with impatience():
        yield


def _publishers(queue: BufferedQueue, node: ModelNode) -> list[Publisher]:
    return [
        Publisher(queue, node.values, "p", AckLevel.PERSISTED),
        Publisher(queue, node.values, "d", AckLevel.DELIVERED),
    ]


def _settle_and_check(queue: BufferedQueue, node: ModelNode, publishers: list[Publisher]) -> None:
    node.come_back()
    node.become_eager(AckLevel.DELIVERED)
    for publisher in publishers:
        publisher.await_acks()
    queue.close(drain=True, timeout=PATIENCE)
    values = node.values(AckLevel.DELIVERED)
    for publisher in publishers:
        publisher.check(values)
    published = sum(len(publisher.published) for publisher in publishers)
    assert len(values) == published
    ledger = queue.stats().ledger
    assert (ledger.accepted, ledger.delivered, ledger.pending) == (published, published, 0)
    assert ledger.adds_up


@pytest.mark.parametrize("crash", [False, True], ids=["connection", "node"])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("step", list(Step))
def test_death_at_any_step_neither_loses_nor_doubles_nor_acks_early(
    step: Step, nth: int, crash: bool
) -> None:
    """All events arrive once and in order, if the connection dies alone or with its node."""
    node = ModelNode(eager=STAGES.get(step, AckLevel.ACCEPTED))
    transport = FlakyTransport(node, crash=node.crash)
    if step in BEFORE:
        transport.die(BEFORE[step], crash=True, times=nth)
    transport.die(step, nth=nth, crash=crash)
    queue = open_proxy(transport)
    publishers = _publishers(queue, node)
    while not transport.await_death(step, timeout=0):
        for publisher in publishers:
            publisher.publish(1)
        wait_until(lambda: queue.stats().size == 0, "acceptance")
        if step in (Step.IDLE, *BEFORE):
            transport.await_death(step, timeout=0.02)
    transport.clear()
    for publisher in publishers:
        publisher.publish(10)
    _settle_and_check(queue, node, publishers)


def test_events_only_accepted_by_a_crashed_node_are_sent_again() -> None:
    """The queue freed their room, but it still has the contents."""
    node = ModelNode()
    queue = open_proxy(node, batches=1)
    publishers = _publishers(queue, node)
    publishers[0].publish(40)
    await_values(node, 40)
    node.persist(10)
    publishers[0].await_acks(10)
    node.crash()
    await_values(node, 40)
    assert publishers[0].acked == 10
    _settle_and_check(queue, node, publishers)


def test_overlapping_batches_drop_repeats() -> None:
    """A node that has half of a block takes only the other half the next time."""
    node = ModelNode()
    transport = FlakyTransport(node)
    transport.die(Step.WITHIN_SEND, times=3)
    queue = open_proxy(transport)
    publisher = Publisher(queue, node.values, "p", AckLevel.PERSISTED)
    node.leave()
    publisher.publish(16)
    node.come_back()
    await_values(node, 16)
    assert node.repeats > 0
    _settle_and_check(queue, node, [publisher])


def test_persisted_events_are_not_sent_again() -> None:
    """A connection that breaks after everything is persisted causes no repeats."""
    node = ModelNode(eager=AckLevel.PERSISTED)
    transport = FlakyTransport(node)
    queue = open_proxy(transport)
    publisher = Publisher(queue, node.values, "p", AckLevel.PERSISTED)
    publisher.publish(20)
    publisher.await_acks()
    transport.die(Step.IDLE)
    assert transport.await_death(Step.IDLE)
    publisher.publish(4)
    publisher.await_acks()
    assert node.repeats == 0
    _settle_and_check(queue, node, [publisher])


ACTIONS = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, 1), st.integers(1, 9)),
    st.tuples(st.just("persist"), st.integers(1, 9), st.none()),
    st.tuples(st.just("deliver"), st.integers(1, 9), st.none()),
    st.tuples(st.just("die"), st.sampled_from(Step), st.booleans()),
    st.tuples(st.sampled_from(["crash", "leave", "come_back"]), st.none(), st.none()),
    st.tuples(st.just("let_go_on"), st.integers(1, 5), st.none()),
)


@settings(max_examples=4 * settings().max_examples)
@given(actions=st.lists(ACTIONS, max_size=30))
def test_any_sequence_of_deaths_neither_loses_nor_doubles_nor_acks_early(
    actions: list[tuple[str, object, object]],
) -> None:
    """Publish, persist, deliver and die in any order: every event arrives once."""
    node = ModelNode()
    transport = FlakyTransport(node, crash=node.crash)
    queue = open_proxy(transport, resend_bytes=600, max_event_bytes=100)
    publishers = _publishers(queue, node)
    for verb, one, other in actions:
        match verb, one, other:
            case "publish", int(index), int(count):
                publishers[index].try_publish(count)
            case "persist", int(count), _:
                node.persist(count)
            case "deliver", int(count), _:
                node.deliver(count)
            case "let_go_on", int(milliseconds), _:
                node.wait_for(lambda: False, milliseconds / 1000)
            case "die", Step() as step, bool(crash):
                transport.die(step, crash=crash)
            case _:
                getattr(node, verb)()
    transport.clear()
    _settle_and_check(queue, node, publishers)


def _far_queue(path: Path, disk: Disk | None = None, **knobs: object) -> BufferedQueue:
    return open_buffered_queue(
        QueueSettings.of(kind="disk", path=path, name="far", **knobs), disk=disk
    )


def test_killed_real_node_gets_everything_again(tmp_path: Path) -> None:
    """A killed disk queue loses its write buffer; the proxy sends the events again."""
    far = [_far_queue(tmp_path / "0", sync_interval="1000h", stale_flush="1000h")]
    far[0].producer(ack="persisted").publish(b"before")
    transport = FlakyTransport(LoopbackTransport(far[0]))
    queue = open_proxy(transport, batch_size=16)
    acked: list[int] = []
    producer = queue.producer(ack="persisted", on_ack=lambda ack: acked.append(ack.count))
    values = [b"%d" % number for number in range(60)]
    for value in values[:40]:
        producer.publish(value, timeout=PATIENCE)
    wait_until(lambda: far[0].end == 41 and queue.stats().size == 0, "acceptance")
    assert acked == []

    transport.die(Step.CONNECT, times=None)
    transport.die(Step.IDLE)
    assert transport.await_death(Step.IDLE)
    shutil.copytree(tmp_path / "0", tmp_path / "1")  # the files as a killed process leaves them
    far.append(_far_queue(tmp_path / "1", sync_interval="10ms"))
    assert far[1].end == 1
    transport.transport = LoopbackTransport(far[1])
    transport.clear()
    for value in values[40:]:
        producer.publish(value, timeout=PATIENCE)
    queue.close(drain=True, timeout=PATIENCE)

    assert sum(acked) == 60
    arrived: list[bytes | None] = []
    while len(arrived) < 61:
        with far[1].get(timeout=PATIENCE) as batch:
            arrived += get_values([batch.block])
    assert arrived == [b"before", *values]
    assert far[1].stats().ledger.accepted == 61
    for each in far:
        each.close()


LAZY: dict[str, Any] = {"sync_interval": "1000h", "stale_flush": "1000h"}


def test_node_is_urged_once_it_has_all_awaited_events(tmp_path: Path) -> None:
    """The node has persisted only the first of several batches when the last one arrives."""
    disk = HookedDisk()
    far = _far_queue(tmp_path, disk, **LAZY)
    transport = FlakyTransport(LoopbackTransport(far))
    transport.die(Step.CONNECT, times=None)
    with far, open_proxy(transport) as queue:
        flushing = _flushing(queue, 12)
        writing = disk.pause("write", match=".chunk")
        transport.clear()
        writing.await_reached()
        wait_until(lambda: far.end == 12, "all batches")
        writing.end()
        assert flushing.result()


def test_returning_node_is_urged_again(tmp_path: Path) -> None:
    """The earlier node was urged, but it died."""
    disk = HookedDisk()
    dead = _far_queue(tmp_path / "0", disk, **LAZY)
    transport = FlakyTransport(LoopbackTransport(dead))
    writing = disk.pause("write", match=".chunk")
    with dead, open_proxy(transport) as queue:
        flushing = _flushing(queue, 4)
        writing.await_reached()
        transport.die(Step.CONNECT, times=None)
        transport.die(Step.IDLE)
        assert transport.await_death(Step.CONNECT, timeout=PATIENCE)
        shutil.copytree(tmp_path / "0", tmp_path / "1")
        writing.end()
        with _far_queue(tmp_path / "1", **LAZY) as far:
            far.producer(ack="persisted").publish(b"first")  # every queue syncs this at once
            transport.transport = LoopbackTransport(far)
            transport.clear()
            assert flushing.result()
            assert far.end == 5


def _flushing(queue: BufferedQueue, count: int) -> Task[bool]:
    """Publish events on a thread that waits until the node has persisted all of them."""
    publisher = Publisher(queue, lambda _: (), "p", AckLevel.PERSISTED)
    publisher.publish(count)
    flushing = Task(lambda: publisher.producer.flush(PATIENCE))
    wait_until(lambda: state_of(queue).acks.persisted.waiters > 0, "the publisher")
    return flushing
