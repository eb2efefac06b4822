"""The queues of the contract suite: a small harness for each kind.

A harness opens queues of its kind with the knobs that a test asks for, takes events out of them,
and closes them after the test. Then every ledger must add up.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from tests.queue_internals import state_of
from turnlane.client import connect
from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.events import EVENT_OVERHEAD
from turnlane.node.flight.server import FlightPlane
from turnlane.node.node import Node
from turnlane.queues import open_buffered_queue, open_queue
from turnlane.queues.api import Ack, AckLevel, Batch, Consumer, Producer, Queue, Stats
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.settings import Kind, QueueSettings
from turnlane.serving.address import LOOPBACK, Address
from turnlane.serving.auth import Authority
from turnlane.testing import FaultyDisk, LoopbackTransport

PATIENCE = 20.0
"""Seconds after which a test gives up waiting. Generous: machines may be busy."""
NOTICEABLE = 0.05
"""Seconds to wait in order to show that nothing happens."""

T = TypeVar("T")


def wait_until(
    condition: Callable[[], object], what: str = "the condition", patience: float = PATIENCE
) -> None:
    """Wait until the condition holds; fail if it never does."""
    start = time.monotonic()
    while not condition():
        waited = time.monotonic() - start
        assert waited < patience, f"{what} did not come about in {patience:g} s"
        # Each check may delay the threads that the test waits for: check less often over time.
        time.sleep(min(max(0.001, waited / 20), 0.05))


def assert_never(condition: Callable[[], bool], what: str = "the condition") -> None:
    """Check for a moment that the condition stays false."""
    deadline = time.monotonic() + NOTICEABLE
    while time.monotonic() < deadline:
        assert not condition(), f"{what} came about"
        time.sleep(0.001)


class Task(Generic[T]):
    """A call on its own thread, with its result or its error."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._result: T | None = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            self._error = error

    @property
    def running(self) -> bool:
        """Whether the call has not returned yet."""
        return self.thread.is_alive()

    def result(self) -> T:
        """Wait for the call; return its result or raise its error."""
        self.thread.join(PATIENCE)
        assert not self.running, "the call hangs"
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class Acks:
    """An ack callback that keeps all acks."""

    def __init__(self) -> None:
        self.received: list[Ack] = []

    def __call__(self, ack: Ack) -> None:
        self.received.append(ack)

    @property
    def count(self) -> int:
        """How many events reached the level."""
        return sum(ack.count for ack in list(self.received))

    @property
    def dropped(self) -> int:
        """How many events were dropped."""
        return sum(ack.dropped for ack in list(self.received))

    def wait_for(self, count: int) -> None:
        """Wait until ``count`` events are acked, and check that there are no more."""
        wait_until(lambda: self.count >= count, f"{count} acks")
        assert self.count == count


class Harness(abc.ABC):
    """Makes queues of one kind."""

    kind: ClassVar[Kind]
    label: ClassVar[str] = ""
    """Its name in test ids, if it differs from the kind."""
    persists_by_itself: ClassVar[bool] = False
    """Whether ``persisted`` comes before delivery, without a consumer."""

    delivers_in_background: ClassVar[bool] = False
    """Whether events leave the queue without a ``get()``, to be consumed elsewhere."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.queues: list[Queue] = []

    def open(self, *, stalled: bool = False, clock: Clock = SYSTEM_CLOCK, **knobs: Any) -> Queue:
        """Open a queue; if ``stalled``, it is stalled until :meth:`resume`."""
        queue = self.make(clock, **knobs)
        self.queues.append(queue)
        if stalled:
            self.stall()
        return queue

    @abc.abstractmethod
    def make(self, clock: Clock, **knobs: Any) -> Queue:
        """Make a queue with these knobs."""

    def stall(self) -> None:  # noqa: B027 - most kinds have nothing to do here
        """Let events leave a queue only by its consumer, so that it can become full."""

    def resume(self) -> None:  # noqa: B027 - most kinds have nothing to do here
        """End the stall."""

    def settle_in(self, queue: Queue) -> None:  # noqa: B027 - likewise
        """Wait until published events have reached their place during a stall."""

    def receive(self, queue: Queue, count: int) -> list[bytes | None]:
        """Take the next ``count`` events, settle them, and return their values."""
        values: list[bytes | None] = []
        while len(values) < count:
            with queue.get(count - len(values), timeout=PATIENCE) as batch:
                values += values_of(batch)
        return values

    def close(self) -> None:
        """Close all queues; every ledger must add up before and after."""
        self.resume()
        for queue in self.queues:
            check(queue.stats())
            queue.close(timeout=PATIENCE)
            assert queue.stats().ledger.adds_up, queue.stats().ledger


def check(stats: Stats) -> None:
    """Check that the ledger adds up and that an empty open queue takes no room."""
    assert stats.ledger.adds_up, stats.ledger
    assert stats.size >= 0
    assert stats.bytes >= 0
    assert 0 <= stats.utilization <= 1
    if not stats.ledger.pending and "closed" not in stats.ledger.dropped:
        assert (stats.size, stats.bytes, stats.in_flight) == (0, 0, 0), stats


def values_of(batch: Batch) -> list[bytes | None]:
    """Return the values of a batch."""
    return [event.value for event in batch]


class DirectHarness(Harness):
    """A direct queue calls a consumer, which collects its batches here."""

    kind = Kind.DIRECT
    persists_by_itself = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.collected: list[bytes | None] = []

    def make(self, clock: Clock, consumer: Consumer | None = None, **knobs: Any) -> Queue:
        return open_queue(consumer=consumer or self._collect, clock=clock, kind=self.kind, **knobs)

    def _collect(self, batch: Batch) -> None:
        self.collected += values_of(batch)

    def receive(self, queue: Queue, count: int) -> list[bytes | None]:
        assert len(self.collected) >= count, "a direct queue delivers before publish returns"
        values, self.collected = self.collected[:count], self.collected[count:]
        return values


class MemoryHarness(Harness):
    """Events leave a memory queue only by its consumer."""

    kind = Kind.MEMORY

    def make(self, clock: Clock, **knobs: Any) -> Queue:
        return open_queue(clock=clock, kind=self.kind, **knobs)


class DiskHarness(Harness):
    """A disk queue counts events on disk against its bounds: writing makes no room."""

    kind = Kind.DISK
    persists_by_itself = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.disk = FaultyDisk()

    def make(self, clock: Clock, **knobs: Any) -> Queue:
        if "durability" not in knobs:
            knobs = {"sync_interval": "20ms", **knobs}
        knobs = {"path": self.path / f"queue-{len(self.queues)}", **knobs}
        return open_queue(clock=clock, disk=self.disk, kind=self.kind, **knobs)

    def reopen(self) -> Queue:
        """Open the last queue again."""
        return self.open(path=self.path / f"queue-{len(self.queues) - 1}")


class DiskAssistedHarness(DiskHarness):
    """Memory becomes full only if the disk is full, so a stall is a full disk."""

    kind = Kind.DISK_ASSISTED
    persists_by_itself = False

    def stall(self) -> None:
        self.disk.fail("write", error=errno.ENOSPC, times=None, match=".chunk")

    def resume(self) -> None:
        self.disk.clear()


class ProxyHarness(Harness):
    """A proxy in front of a memory queue; a stall is a node that keeps publishers out.

    The knobs of consumers, which a proxy queue does not have, go to the queue of the node.
    """

    kind = Kind.PROXY
    delivers_in_background = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.nodes: list[BufferedQueue] = []

    def make(self, clock: Clock, **knobs: Any) -> Queue:
        if "size" in knobs:
            knobs |= {"batches": 1, "batch_size": knobs.pop("size")}
        own = {knob for knob in knobs if self.kind in QueueSettings.kinds_of(knob)}
        far = {knob: value for knob, value in knobs.items() if knob not in own}
        node = open_buffered_queue(QueueSettings.of(name="node", **far), clock=clock)
        self.nodes.append(node)
        near = QueueSettings.of(kind=self.kind, **{knob: knobs[knob] for knob in own})
        return open_queue(near, transport=LoopbackTransport(node), clock=clock)

    def stall(self) -> None:
        self._hold(held=True)

    def resume(self) -> None:
        self._hold(held=False)

    def settle_in(self, queue: Queue) -> None:
        wait_until(lambda: queue.stats().in_flight > 0, "the sender's first batch")

    def _hold(self, *, held: bool) -> None:
        for node in self.nodes:
            with state_of(node).lock:
                state_of(node).admission.hold(hold=held)

    def close(self) -> None:
        super().close()
        for node in self.nodes:
            check(node.stats())
            node.close()
            assert node.stats().ledger.adds_up, node.stats().ledger


class ClientHarness(ProxyHarness):
    """A client of a real node, over the network; the node's queue is a memory queue."""

    label = "client"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._opened = contextlib.ExitStack()

    def make(self, clock: Clock, **knobs: Any) -> Queue:
        if "size" in knobs:
            knobs |= {"batches": 1, "batch_size": knobs.pop("size")}
        own = {knob for knob in knobs if self.kind in QueueSettings.kinds_of(knob)}
        far = {knob: value for knob, value in knobs.items() if knob not in own}
        near = {knob: knobs[knob] for knob in own}
        name = near.pop("name", "queue")
        data = self.path / f"node-{len(self.nodes)}"
        node = self._opened.enter_context(
            Node(data, {name: {"kind": "memory", **far}}, clock=clock)
        )
        plane = FlightPlane(node, Authority(), Address(LOOPBACK, 0))
        plane.start()
        self._opened.callback(plane.stop)
        client = self._opened.enter_context(connect(f"turnlane://{plane.address}"))
        self.nodes.append(node.queue(name))
        return client.queue(name, clock=clock, **near)

    def close(self) -> None:
        super().close()
        self._opened.close()


KEEPING: Sequence[type[Harness]] = (MemoryHarness, DiskHarness, DiskAssistedHarness)
"""The kinds whose events wait in the queue itself until they are settled."""
BUFFERING: Sequence[type[Harness]] = (*KEEPING, ProxyHarness, ClientHarness)
"""The kinds in which events wait, for a consumer or for a node."""
STORING: Sequence[type[Harness]] = (DiskHarness, DiskAssistedHarness)
"""The kinds that keep a directory."""
EVERY: Sequence[type[Harness]] = (DirectHarness, *BUFFERING)


def numbered(first: int, end: int) -> list[bytes]:
    """Return the distinct values ``first`` to ``end - 1``."""
    return [b"%03d" % number for number in range(first, end)]


def publish_all(producer: Producer, values: Sequence[bytes]) -> None:
    """Publish values one by one."""
    for value in values:
        assert producer.publish(value)


def bytes_for(*values: bytes) -> int:
    """Return the bytes that these values count for if they are published one by one."""
    return sum(len(value) + EVENT_OVERHEAD for value in values)


def wait_for_line(queue: Queue, length: int) -> None:
    """Wait until ``length`` publishers wait in line."""
    wait_until(lambda: queue.stats().blocked_publishers == length, f"a line of {length}")


def line_up(queue: Queue, *calls: Callable[[], T]) -> list[Task[T]]:
    """Start calls that block, each after the earlier one is in line."""
    tasks: list[Task[T]] = []
    already = queue.stats().blocked_publishers
    for call in calls:
        tasks.append(Task(call))
        wait_for_line(queue, already + len(tasks))
    return tasks


def make_producer_with_acks(
    queue: Queue, level: AckLevel = AckLevel.DELIVERED, **options: Any
) -> tuple[Producer, Acks]:
    """Return a producer and its acks."""
    acks = Acks()
    return queue.producer(ack=level, on_ack=acks, **options), acks
