"""Shared by the tests of the proxy queue: publishers that record, and the checks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.contract.harness import PATIENCE
from turnlane.queues import proxy
from turnlane.queues.api import Ack, AckLevel, Queue, Transport
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.proxy import RemoteStorage
from turnlane.queues.settings import QueueSettings
from turnlane.testing import ModelNode

Values = Callable[[AckLevel], Sequence[bytes]]


@contextmanager
def impatience() -> Iterator[None]:
    """Let proxies look often and reconnect soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proxy, "FIRST_RETRY", 0.001)
        patch.setattr(proxy, "LAST_RETRY", 0.01)
        patch.setattr(proxy, "POLL_SECONDS", 0.02)
        yield


def open_proxy(
    transport: Transport, *, producer_id: str | None = None, **knobs: Any
) -> BufferedQueue:
    settings = QueueSettings.of(kind="proxy", **{"batch_size": 4, "batches": 4} | knobs)
    return BufferedQueue(settings, RemoteStorage(settings, transport, producer_id=producer_id))


class Publisher:
    """A producer with its published events and acks; each ack is checked against the node."""

    def __init__(self, queue: Queue, far: Values, name: str, level: AckLevel) -> None:
        self.name = name
        self.level = level
        self.published: list[bytes] = []
        self.acks: list[Ack] = []
        self.early: list[Ack] = []
        self._far = far
        self._changed = threading.Condition()
        self.producer = queue.producer(ack=level, on_ack=self._heard)

    def _heard(self, ack: Ack) -> None:
        there = len(self.mine(self._far(self.level)))
        with self._changed:
            self.acks.append(ack)
            if there < self.acked or ack.level is not self.level:
                self.early.append(ack)
            self._changed.notify_all()

    @property
    def acked(self) -> int:
        with self._changed:
            return sum(ack.count for ack in self.acks)

    def mine(self, values: Sequence[bytes]) -> list[bytes]:
        return [value for value in values if value.startswith(self.name.encode() + b":")]

    def publish(self, count: int, timeout: float | None = PATIENCE) -> None:
        for _ in range(count):
            value = self._next()
            assert self.producer.publish(value, timeout=timeout)
            self.published.append(value)

    def try_publish(self, count: int) -> int:
        taken = 0
        while taken < count and self.producer.try_publish(self._next()):
            self.published.append(self._next())
            taken += 1
        return taken

    def _next(self) -> bytes:
        return b"%s:%d" % (self.name.encode(), len(self.published))

    def await_acks(self, count: int | None = None) -> None:
        wanted = len(self.published) if count is None else count
        with self._changed:
            arrived = self._changed.wait_for(lambda: self.acked >= wanted, PATIENCE)
        assert arrived, f"{self.name} heard of {self.acked} events, not {wanted}"

    def check(self, values: Sequence[bytes]) -> None:
        """No event is lost, doubled or out of order; acks are exact and never early."""
        assert self.mine(values) == self.published
        assert self.early == []
        assert self.acked == len(self.published)
        ends = [ack.end for ack in self.acks]
        assert ends == sorted(set(ends))


def await_values(node: ModelNode, count: int, level: AckLevel = AckLevel.ACCEPTED) -> None:
    arrived = node.wait_for(lambda: len(node.values(level)) >= count, PATIENCE)
    assert arrived, f"{len(node.values(level))} events are {level}, not {count}"
