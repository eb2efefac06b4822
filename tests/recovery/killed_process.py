"""The process that the kill loop kills: it uses a queue and reports acks and results over a pipe.

It is forked from a server that has imported everything, so a life takes only some milliseconds. An
ack is reported after it comes, a ``done()`` before and after the call. So a reader of the whole
pipe knows everything that this process knew when it died.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

from tests.queue_internals import store_of
from turnlane.errors import AckNotStored, QueueClosed, QueueEmpty, RetryLater
from turnlane.events import Block, block_of
from turnlane.queues import open_queue
from turnlane.queues.api import Ack, AckLevel, Batch
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.producer import BufferedProducer
from turnlane.queues.settings import Kind
from turnlane.testing import FaultyDisk

SINGLES, BLOCKS, NUMBERED, WAITING = range(4)
"""The producers, named by the way in which they publish."""

EVERY_LIFE = -1
"""Used instead of a life: the numbered producer repeats events until it gets an ack."""

Plan = Sequence[tuple[str, dict[str, Any]]]
"""Faults to plan: a method of ``FaultyDisk`` and its arguments."""


class Identity(NamedTuple):
    """The identity of an event, independent of its offset."""

    life: int
    producer: int
    number: int

    def value(self) -> bytes:
        """The event's value: its identity, and some bytes to fill chunks."""
        text = f"{self.life}:{self.producer}:{self.number}:"
        return text.encode() + bytes(random.Random(text).randbytes(self.number * 37 % 150))

    @classmethod
    def of(cls, value: bytes) -> Identity:
        """Return the identity in a value, and check that the value is complete."""
        life, producer, number, _ = value.split(b":", 3)
        found = cls(int(life), int(producer), int(number))
        assert value == found.value(), f"{found} came back with other bytes"
        return found


@dataclass(frozen=True)
class Opened:
    """The queue was opened."""

    seconds: float
    low: int
    end: int
    written: int
    """The end of the log after recovery, which may be before the end of the queue."""
    ledger: dict[str, Any]

    @classmethod
    def by(cls, queue: BufferedQueue, started: float) -> Self:
        """Return the report on an opening that began at ``started``."""
        seconds = time.perf_counter() - started
        chunks = store_of(queue).log._catalog.segments
        written = chunks[-1].end if chunks else 0
        return cls(seconds, queue.low, queue.end, written, queue.stats().ledger.as_dict())


@dataclass(frozen=True)
class Persisted:
    """The producer got acks: the first ``total`` events that it published are persisted."""

    producer: int
    total: int


@dataclass(frozen=True)
class Got:
    """A batch was handed out."""

    first: int
    attempt: int
    events: list[Identity]

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Return the report on a batch, and check that its events are complete."""
        values = batch.block.column("value").to_pylist()
        return cls(
            batch.place.first, batch.attempt, [Identity.of(value or b"") for value in values]
        )


@dataclass(frozen=True)
class Settling:
    """``done()`` or ``dead()`` is about to be called."""

    first: int
    end: int


@dataclass(frozen=True)
class Settled:
    """It has returned."""

    first: int
    end: int


@dataclass(frozen=True)
class Releasing:
    """``release()`` is about to be called."""

    first: int
    end: int


@dataclass(frozen=True)
class Closed:
    """The queue was closed without an error."""

    ledger: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """An error that must not happen."""

    trace: str


Report = Opened | Persisted | Got | Settling | Settled | Releasing | Closed | Failed


@dataclass(frozen=True)
class Orders:
    """The work of one life."""

    life: int
    seed: int
    knobs: dict[str, Any]
    resend_from: int
    """The first number for which the numbered producer has no ack."""
    appetite: float
    """How many events the consumer takes for every event published."""
    events: int = 1000
    plan: Plan = ()
    close: bool = False
    """Whether to close the queue at the end, instead of a kill."""


def live(orders: Orders, pipe: Connection) -> None:
    """Do the ordered work until killed; report errors too."""
    reporter = Reporter(pipe)
    try:
        Life(orders, reporter).run()
    except BaseException:  # noqa: BLE001 - the parent decides what it means
        reporter.tell(Failed(traceback.format_exc()))
    if not orders.close:
        os.kill(os.getpid(), signal.SIGKILL)


class Reporter:
    """One end of the pipe, for several threads."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def tell(self, report: Report) -> None:
        """Send a report; it survives this process when this returns."""
        with self._lock:
            self._pipe.send(report)


@dataclass
class Life:
    """One opening of the queue, until the process is killed or the queue is closed."""

    orders: Orders
    reporter: Reporter
    published: int = 0
    consumed: int = 0
    held: list[Batch] = field(default_factory=list)
    acked: Counter[int] = field(default_factory=Counter)
    repeated: int = 0

    def run(self) -> None:
        """Publish and consume at the same time."""
        started = time.perf_counter()
        self.queue = open_with_faults(self.orders)
        self.reporter.tell(Opened.by(self.queue, started))
        work = [self.singles, self.blocks, self.numbered]
        if self.queue.settings.kind is Kind.DISK:
            # In other kinds it would wait until a consumer takes its event.
            work.append(self.waiting)
        threads = [self.thread(task) for task in work]
        consumer = self.thread(self.consume)
        for thread in threads:
            thread.join()
        if self.orders.close:
            self.queue.finish()
        consumer.join()
        if self.orders.close:
            self.queue.close()
            self.reporter.tell(Closed(self.queue.stats().ledger.as_dict()))

    def thread(self, task: Callable[[random.Random], None]) -> threading.Thread:
        """Run a task on a thread, with its own random numbers."""
        rng = random.Random(f"{self.orders.seed} {self.orders.life} {task.__name__}")

        def guarded() -> None:
            try:
                task(rng)
            except BaseException:  # noqa: BLE001 - see above
                self.reporter.tell(Failed(traceback.format_exc()))

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    # Publishing

    def producer(self, number: int, **options: Any) -> BufferedProducer:
        """Return a producer whose persisted acks are reported."""

        def heard(ack: Ack) -> None:
            self.acked[number] += ack.count
            repeated = self.repeated if number == NUMBERED else 0
            self.reporter.tell(Persisted(number, repeated + self.acked[number]))

        return self.queue.producer(ack=AckLevel.PERSISTED, on_ack=heard, **options)

    def block(self, life: int, producer: int, first: int, count: int) -> Block:
        """Return consecutive events of a producer."""
        events = [Identity(life, producer, number) for number in range(first, first + count)]
        self.published += count
        return block_of([event.value() for event in events], timestamps=1)

    def singles(self, rng: random.Random) -> None:
        """Publish one event after the other, without waiting."""
        producer = self.producer(SINGLES)
        for number in range(self.orders.events // 4):
            key = "key" if rng.random() < 0.1 else None
            producer.publish(Identity(self.orders.life, SINGLES, number).value(), key)
            self.published += 1

    def blocks(self, rng: random.Random) -> None:
        """Publish blocks of various sizes."""
        producer = self.producer(BLOCKS)
        number = 0
        while number < self.orders.events // 2:
            count = rng.randint(1, 60)
            producer.publish_block(self.block(self.orders.life, BLOCKS, number, count))
            number += count

    def numbered(self, rng: random.Random) -> None:
        """Publish blocks with sequence numbers, first those which may be repeats."""
        producer = self.producer(NUMBERED, producer_id="numbered")
        number = self.orders.resend_from
        for _ in range(self.orders.events // 80):
            count = rng.randint(1, 40)
            block = self.block(EVERY_LIFE, NUMBERED, number, count)
            result = producer.publish_block(block, sequence=number)
            # Repeats are not acked again, and come before all events that will be acked.
            self.repeated += result.repeated
            number += count

    def waiting(self, rng: random.Random) -> None:
        """Publish events; wait until each one is persisted."""
        producer = self.queue.producer(ack=AckLevel.PERSISTED)
        for number in range(10):
            producer.publish(Identity(self.orders.life, WAITING, number).value())
            self.reporter.tell(Persisted(WAITING, number + 1))

    # Consuming

    def consume(self, rng: random.Random) -> None:
        """Take batches and settle them in any order, up to the ordered number of events."""
        limit = self.orders.appetite * self.orders.events
        while self.consumed < limit:
            try:
                batch = self.queue.get(rng.randint(1, 50), timeout=0.2)
            except (QueueClosed, QueueEmpty):
                break
            except RetryLater:
                continue
            self.take(batch)
            while len(self.held) > rng.randint(0, 3):
                self.settle(self.held.pop(rng.randrange(len(self.held))), rng.random())
        while self.held:
            self.settle(self.held.pop(), rng.random())

    def take(self, batch: Batch) -> None:
        """Report a batch and keep it."""
        self.reporter.tell(Got.of(batch))
        self.held.append(batch)

    def settle(self, batch: Batch, chance: float) -> None:
        """Release the batch, or settle it as dead or done."""
        first, end = batch.place.first, batch.place.end
        if chance < 0.15:
            self.reporter.tell(Releasing(first, end))
            batch.release()
            return
        self.reporter.tell(Settling(first, end))
        try:
            if chance < 0.25:
                batch.dead()
            else:
                batch.done()
        except AckNotStored:
            self.held.append(batch)
        else:
            self.consumed += len(batch)
            self.reporter.tell(Settled(first, end))


class FailingThenKillingDisk(FaultyDisk):
    """A disk that can also kill the process during the rewrite after a failed sync."""

    def __init__(self) -> None:
        super().__init__()
        self._planned: dict[str, Any] | None = None

    def kill_after_failure(self, **plan: Any) -> None:
        """Like :meth:`kill`, but calls count from the first failed sync."""
        self._planned = plan

    def sync(self, fd: int) -> None:
        try:
            super().sync(fd)
        except OSError:
            plan, self._planned = self._planned, None
            if plan is not None:
                self.kill(**plan)
            raise


def open_with_faults(orders: Orders) -> BufferedQueue:
    """Open the queue on a disk with the planned faults."""
    disk = FailingThenKillingDisk()
    for method, arguments in orders.plan:
        getattr(disk, method)(**arguments)
    queue = open_queue(**orders.knobs, disk=disk)
    assert isinstance(queue, BufferedQueue)
    return queue
