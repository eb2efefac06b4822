"""Every waiting thread is woken, even if others wait for something else."""

from __future__ import annotations

import sys
import threading

import pytest

from tests.contract.harness import PATIENCE, Acks, Harness, Task, wait_until
from tests.queue_internals import state_of
from turnlane.errors import QueueClosed
from turnlane.queues.api import Ack, AckLevel
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.settings import Kind


def _open(harness: Harness, **knobs: object) -> BufferedQueue:
    queue = harness.open(**knobs)  # type: ignore[arg-type]
    assert isinstance(queue, BufferedQueue)
    return queue


def test_a_publisher_behind_one_that_does_not_wait_is_woken(keeping: Harness) -> None:
    """``try_publish`` waits for no ack, and takes no wake-up of another publisher."""
    queue = _open(keeping)
    hasty = queue.producer(ack=AckLevel.DELIVERED)
    assert hasty.try_publish(b"0")
    patient = [Task(lambda: queue.producer(ack=AckLevel.DELIVERED).publish(b"x")) for _ in range(3)]
    wait_until(lambda: queue.stats().ledger.accepted == 4, "the publishers")
    queue.get(4, timeout=PATIENCE).done()
    assert all(task.result() for task in patient)


def test_a_release_wakes_a_consumer_while_readers_wait(keeping: Harness) -> None:
    """Readers by offset wait too, but a released batch is for a consumer."""
    queue = _open(keeping)
    queue.producer().publish(b"x")
    batch = queue.get(timeout=PATIENCE)
    waiting = [Task(lambda: queue.wait_beyond(1, PATIENCE)) for _ in range(3)]
    wait_until(lambda: len(state_of(queue).waiting_readers) == 3, "the readers")
    consumer = Task(lambda: queue.get(timeout=PATIENCE))
    wait_until(lambda: len(state_of(queue).waiting_readers) == 4, "the consumer")
    batch.release()
    again = consumer.result()
    assert again.attempt == 2
    again.done()
    queue.finish()
    assert [task.result() for task in waiting] == [1, 1, 1]


@pytest.mark.parametrize("level", [AckLevel.PERSISTED, AckLevel.DELIVERED])
def test_a_flush_after_a_close_returns_at_once(keeping: Harness, level: AckLevel) -> None:
    """The level can never be reached, so flush() returns false at once."""
    queue = _open(keeping)
    producer = queue.producer(ack=level, on_ack=Acks())
    producer.publish(b"x")
    queue.close()
    flushing = Task(producer.flush)
    saved = keeping.kind is not Kind.MEMORY
    assert flushing.result() is (level is AckLevel.PERSISTED and saved)


def test_acks_go_on_after_a_callback_that_exits(keeping: Harness) -> None:
    """The callback of one producer cannot end the thread that serves all producers."""
    queue = _open(keeping)
    acks = Acks()

    def leaving(ack: Ack) -> None:
        sys.exit(f"after {ack.count}")

    for callback in (leaving, acks):
        queue.producer(ack=AckLevel.DELIVERED, on_ack=callback).publish(b"x")
    for _ in range(2):
        queue.get(1, timeout=PATIENCE).done()
    acks.wait_for(1)


def test_a_closed_queue_starts_no_ack_thread(keeping: Harness) -> None:
    """A producer of a closed queue is refused, and no thread starts for it."""
    queue = _open(keeping, name="late")
    queue.close()
    with pytest.raises(QueueClosed):
        queue.producer(ack=AckLevel.DELIVERED, on_ack=Acks())
    names = [thread.name for thread in threading.enumerate()]
    assert f"turnlane-acks-{queue.name}" not in names
