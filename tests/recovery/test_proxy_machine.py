"""A proxy queue keeps its promises when its connection, its node or its own process dies.

A Hypothesis state machine compares it with a plain list. The node is a disk queue behind a
transport that can die at any step. To kill the node, the test replaces its directory by a copy
made at any moment. To kill a client, the test disconnects it for good and starts another with the
same producer id.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.conftest import IN_CI
from tests.contract.harness import PATIENCE, Acks, wait_until
from tests.queue_internals import remote_storage_of
from tests.recovery.copyable_disk import CopyableDisk
from tests.recovery.hooked_disk import get_block_values
from tests.recovery.proxy_harness import impatience, open_proxy
from turnlane.events import block_of
from turnlane.queues import open_buffered_queue
from turnlane.queues.api import Batch
from turnlane.queues.settings import QueueSettings
from turnlane.testing import FlakyTransport, LoopbackTransport, Step

NAME = "client"
PERSISTED, DELIVERED = "persisted", "delivered"
MOST = 300
"""The most events that are pending at a time; the node's queue has room for more."""

picks = st.integers(0, 9)
levels = st.sampled_from([PERSISTED, DELIVERED])


@pytest.fixture(autouse=True, scope="module")
def _impatient() -> Iterator[None]:
    with impatience():
        yield


class ProxyMachine(RuleBasedStateMachine):
    """All published events by number, and all numbers that were ever settled."""

    @initialize(interval=st.sampled_from(["1h", "5ms"]))
    def start(self, interval: str) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.disk = CopyableDisk()
        self.interval = interval
        self.node_lives = 0
        self.made = 0
        self.events: list[bytes] = []
        self.settled: set[bytes] = set()
        self.lost: set[bytes] = set()
        """Events that a node had only accepted, and lost after the death of their client."""
        self.open_node(self.folder / "0")
        self.begin()

    def open_node(self, path: Path) -> None:
        knobs = {"sync_interval": self.interval, "stale_flush": "1h", "write_buffer": "4Ki"}
        settings = QueueSettings.of(kind="disk", path=path, chunk_size="4Ki", size=1000, **knobs)
        self.node = open_buffered_queue(settings, disk=self.disk)
        self.path = path
        self.out: list[Batch] = []

    def begin(self) -> None:
        """Start a client, which continues at the number that the node has."""
        self.cut_off = threading.Event()
        self.way = FlakyTransport(LoopbackTransport(self.node), crash=self.cut_off.set)
        self.queue = open_proxy(self.way, producer_id=NAME, batch_size=8, batches=3)
        wait_until(lambda: remote_storage_of(self.queue)._base is not None, "the node's greeting")
        self.base = len(self.events)
        self.acks = {PERSISTED: Acks(), DELIVERED: Acks()}
        self.producers = {
            level: self.queue.producer(ack=level, on_ack=acks) for level, acks in self.acks.items()
        }
        self.published: dict[str, list[int]] = {PERSISTED: [], DELIVERED: []}

    # The model

    def waiting(self) -> list[bytes]:
        """The events that are neither settled nor in flight."""
        held = {value for batch in self.out for value in get_block_values(batch.block)}
        return [value for value in self.events if value not in self.settled | self.lost | held]

    def low(self) -> int:
        """The first number that is neither settled nor lost."""
        gone = self.settled | self.lost
        numbers = (at for at, value in enumerate(self.events) if value not in gone)
        return next(numbers, len(self.events))

    def accept(self, level: str, new: list[bytes]) -> None:
        self.published[level] += range(len(self.events), len(self.events) + len(new))
        self.events += new

    def new_values(self, count: int) -> list[bytes]:
        count = max(0, min(count, MOST - len(self.events) + self.low()))
        self.made += count
        return [b"%05d" % number for number in range(self.made - count, self.made)]

    # Publishing and consuming

    @rule(level=levels, count=st.integers(1, 20))
    def publish(self, level: str, count: int) -> None:
        for value in self.new_values(count):
            assert self.producers[level].publish(value, timeout=PATIENCE)
            self.accept(level, [value])

    @rule(level=levels, count=st.integers(1, 50))
    def publish_block(self, level: str, count: int) -> None:
        new = self.new_values(count)
        if new:
            self.producers[level].publish_block(block_of(new), timeout=PATIENCE)
            self.accept(level, new)

    @rule(limit=st.integers(1, 10))
    def get(self, limit: int) -> None:
        """Batches come in order, without gaps, and without settled events."""
        expected = self.waiting()
        if expected:
            batch = self.queue.get(limit, timeout=PATIENCE)
            found = get_block_values(batch.block)
            assert found == expected[: len(found)]
            self.out.append(batch)

    @rule(which=picks)
    def done(self, which: int) -> None:
        if self.out:
            batch = self.out.pop(which % len(self.out))
            values = get_block_values(batch.block)
            batch.done()
            self.settled.update(values)

    @rule(limit=st.integers(1, 10))
    def overtake(self, limit: int) -> None:
        """Settle the later of two batches first; a kill in this state is rare by chance."""
        self.get(limit)
        self.get(limit)
        self.done(-1)

    @rule(which=picks)
    def release(self, which: int) -> None:
        if self.out:
            self.out.pop(which % len(self.out)).release()

    @rule()
    def flush(self) -> None:
        """Everything is persisted in the end, and soon if a publisher waits for it."""
        assert self.producers[PERSISTED].flush(PATIENCE)
        self.acks[PERSISTED].wait_for(len(self.published[PERSISTED]))

    @rule()
    def drain(self) -> None:
        """After any deaths every event comes once, and then all acks have come."""
        while self.out:
            self.done(0)
        while self.waiting():
            self.get(40)
            self.done(0)
        for level, acks in self.acks.items():
            acks.wait_for(len(self.published[level]))
        wait_until(lambda: not self.queue.stats().ledger.pending, "the last ack of the node")

    # Dying

    @rule(step=st.sampled_from(Step), nth=st.integers(1, 3))
    def disconnect(self, step: Step, nth: int) -> None:
        """The connection dies soon, at some step; the proxy connects again."""
        self.way.die(step, nth)

    def sever(self) -> None:
        """End the connection and refuse new ones."""
        self.way.die(Step.CONNECT, times=None, crash=True)
        self.way.die(Step.IDLE)
        wait_until(self.cut_off.is_set, "the end of the connection")

    def has(self) -> int:
        """How many events the node has, as it reports to clients."""
        return self.node.get_known_sequence(NAME) or 0

    def safe(self) -> int:
        """How many events the node must have: up to the last persisted or settled one."""
        acked = self.published[PERSISTED][: self.acks[PERSISTED].count]
        settled = [at for at, value in enumerate(self.events) if value in self.settled]
        return max(acked + settled, default=-1) + 1

    @rule()
    def kill_node(self) -> None:
        """The events that it had only in memory are lost, and sent again."""
        self.sever()
        self.node_lives += 1
        copy = self.disk.copy(self.path, self.folder / str(self.node_lives))
        self.node.close()
        self.open_node(copy)
        assert self.has() >= self.safe()
        self.lost.update(self.events[self.has() : self.base])
        self.lost -= self.settled
        self.way.transport = LoopbackTransport(self.node)
        self.way.clear()
        self.cut_off.clear()

    @rule()
    def kill_client(self) -> None:
        """The events that the node did not have are lost; none of them was acked."""
        self.sever()
        assert self.has() >= self.safe()
        del self.events[self.has() :]
        dead = self.queue
        self.begin()
        dead.close()
        assert dead.stats().ledger.adds_up

    # Invariants

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "queue"):
            near, far = self.queue.stats().ledger, self.node.stats().ledger
            assert near.adds_up
            assert near.accepted == sum(map(len, self.published.values()))
            assert far.adds_up
            assert far.delivered == len(self.settled)
            assert set(far.dropped) <= {"missing"}

    @invariant()
    def acks_are_never_early(self) -> None:
        if hasattr(self, "queue"):
            low, acks = self.low(), self.acks
            assert acks[DELIVERED].count <= sum(at < low for at in self.published[DELIVERED])
            assert acks[PERSISTED].count <= len(self.published[PERSISTED])
            assert not acks[PERSISTED].dropped + acks[DELIVERED].dropped

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self.queue.close()
            self.node.close()
            shutil.rmtree(self.folder)


TestProxy = ProxyMachine.TestCase
TestProxy.settings = settings(
    max_examples=60 if IN_CI else 10, stateful_step_count=40, deadline=None
)


def test_event_held_and_newer_one_given_back_when_node_dies_come_in_order() -> None:
    machine = ProxyMachine()
    machine.start(interval="1h")
    try:
        machine.publish(level=PERSISTED, count=2)
        machine.get(limit=1)
        machine.get(limit=1)
        machine.release(which=1)
        machine.kill_node()
        machine.drain()
    finally:
        machine.teardown()
