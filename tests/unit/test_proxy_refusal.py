"""A proxy queue whose node refuses its events for good."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.harness import Acks, Task, wait_until
from tests.recovery.proxy_harness import impatience, open_proxy
from turnlane.errors import NotAllowed, QueueClosed, SchemaMismatch
from turnlane.events import Block
from turnlane.queues.api import NodeConnection, NodeProgress
from turnlane.testing import ModelConnection, ModelNode


@pytest.fixture(autouse=True, scope="module")
def _impatient() -> Iterator[None]:
    with impatience():
        yield


class _Refusing:
    """A node that refuses at a given step."""

    def __init__(self, step: str) -> None:
        self.node = ModelNode()
        self.step = step
        self.connects = 0

    def connect(self, producer_id: str) -> NodeConnection:
        self.connects += 1
        self.check("connect")
        return _RefusingConnection(self, self.node.connect(producer_id))

    def get(self, max_events: int | None, timeout: float) -> object:
        return self.node.get(max_events, timeout)

    def check(self, step: str) -> None:
        if step == self.step:
            raise SchemaMismatch("column 'user' is text")


class _RefusingConnection:
    def __init__(self, owner: _Refusing, inner: ModelConnection) -> None:
        self._owner = owner
        self._inner = inner
        self.resume_at = inner.resume_at
        self.durability = inner.durability

    def send(self, sequence: int, block: Block) -> None:
        self._owner.check("send")
        self._inner.send(sequence, block)

    def urge(self) -> None:
        self._inner.urge()

    def progress(self, timeout: float) -> NodeProgress | None:
        self._owner.check("progress")
        return self._inner.progress(timeout)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("step", ["connect", "send", "progress"])
def test_publishers_get_the_refusal_and_nothing_is_acked(step: str) -> None:
    transport = _Refusing(step)
    queue = open_proxy(transport)  # type: ignore[arg-type]
    acks = Acks()
    with pytest.raises(SchemaMismatch, match="user"):
        queue.producer(ack="persisted").publish(b"x")
    for _ in range(2):
        with pytest.raises(SchemaMismatch, match="user"):
            queue.producer(ack="persisted", on_ack=acks).publish(b"y")
    attempts = transport.connects
    queue.close(drain=True, timeout=60)
    assert (transport.connects, acks.received) == (attempts, [])
    assert queue.stats().ledger.adds_up
    assert queue.stats().ledger.delivered == 0
    with pytest.raises((QueueClosed, SchemaMismatch)):
        queue.producer().publish(b"z")


def test_publishers_that_wait_for_room_get_the_refusal() -> None:
    transport = _Refusing("")
    transport.node.leave()
    queue = open_proxy(transport, batch_size=1, batches=1)  # type: ignore[arg-type]
    producer = queue.producer()
    producer.publish(b"x")
    blocked = Task(lambda: producer.publish(b"y"))
    wait_until(lambda: queue.stats().blocked_publishers == 1)
    transport.step = "connect"
    with pytest.raises(SchemaMismatch):
        blocked.result()
    queue.close()


def test_an_error_of_get_is_raised_in_the_caller() -> None:
    class _Forbidding(_Refusing):
        def get(self, max_events: int | None, timeout: float) -> object:
            raise NotAllowed("the token does not give the right to read")

    queue = open_proxy(_Forbidding(""))  # type: ignore[arg-type]
    with pytest.raises(NotAllowed):
        queue.get(timeout=5)
    queue.close()
