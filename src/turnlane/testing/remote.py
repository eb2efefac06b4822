"""Remote ends under the control of a test: nodes and transports for proxy queues, and an output.

``LoopbackTransport`` connects a proxy queue to a queue in the same process. ``ModelNode`` is a
transport to a list of events, which are persisted and delivered on command. ``FlakyTransport``
wraps either of them and fails at a chosen step. ``FaultyOutput`` is a destination.
"""

from __future__ import annotations

import enum
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from turnlane.errors import NotSupported, QueueClosed, QueueFull, TransportDown
from turnlane.events import Block, get_values
from turnlane.outputs.api import Output, OutputSettings
from turnlane.queues.acks import AckWaiter
from turnlane.queues.api import (
    AckLevel,
    Batch,
    Durability,
    NodeConnection,
    NodeProgress,
    Transport,
)
from turnlane.queues.buffered import BufferedQueue
from turnlane.storage.producer_sequences import GapPolicy
from turnlane.testing.machine import CallPlan

PROGRESS_POLL = 0.002
"""Seconds between two looks of a loopback connection at the progress of its queue."""
FULL_POLL = 0.05
"""Seconds that a loopback connection waits at a full queue before it checks if it was closed."""
IDLE_SECONDS = 0.005
"""Seconds of silence after which a flaky connection counts as idle, if it must fail when idle."""

# ── a queue in the same process ──────────────────────────────────────────────────────────────────


class LoopbackTransport:
    """Connects a proxy queue to ``far_queue``, a queue in this process.

    For the proxy queue it looks like a network. While ``far_queue`` is full, sending blocks; when
    it is closed, the node cannot be reached. The test owns ``far_queue``.
    """

    def __init__(self, far_queue: BufferedQueue) -> None:
        self.far_queue = far_queue
        self._lock = threading.Lock()
        self._maps: dict[str, _SequenceOffsets] = {}

    def connect(self, producer_id: str) -> LoopbackConnection:
        with self._lock:
            sequences = self._maps.setdefault(producer_id, _SequenceOffsets(self.far_queue))
        return LoopbackConnection(self.far_queue, producer_id, sequences)

    def get(self, max_events: int | None, timeout: float) -> Batch:
        return self.far_queue.get(max_events, timeout)


class LoopbackConnection:
    """A stream to the far queue. Made by :meth:`LoopbackTransport.connect`."""

    def __init__(
        self, far_queue: BufferedQueue, producer_id: str, sequences: _SequenceOffsets
    ) -> None:
        self._far_queue = far_queue
        self._sequences = sequences
        self._closed = threading.Event()
        self._reported: NodeProgress | None = None
        self._urge: AckWaiter | None = None
        try:
            self._producer = far_queue.producer(producer_id=producer_id, gaps=GapPolicy.FORGET)
        except QueueClosed as error:
            raise TransportDown(f"queue {far_queue.name!r} is closed") from error
        self.resume_at = far_queue.get_known_sequence(producer_id) or 0
        self.durability = far_queue.durability
        sequences.add(self.resume_at)

    def send(self, sequence: int, block: Block) -> None:
        while not self._closed.is_set():
            try:
                self._producer.publish_block(block, sequence=sequence, timeout=FULL_POLL)
            except QueueFull:
                continue  # the accepted part of the block is a repeat the next time
            except QueueClosed as error:
                raise TransportDown(str(error)) from error
            self._sequences.add(sequence + block.num_rows)
            return
        raise TransportDown("the connection was closed")

    def urge(self) -> None:
        self._far_queue.cancel_urge(self._urge)
        self._urge = self._far_queue.urge(AckLevel.PERSISTED, self._far_queue.end)

    def progress(self, timeout: float) -> NodeProgress | None:
        deadline = time.monotonic() + timeout
        while not self._closed.is_set():
            progress = self._sequences.get_progress()
            if progress != self._reported:
                self._reported = progress
                return progress
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._closed.wait(min(left, PROGRESS_POLL))
        raise TransportDown("the connection was closed")

    def close(self) -> None:
        self._closed.set()
        self._far_queue.cancel_urge(self._urge)


class _SequenceOffsets:
    """Which sequence numbers of one producer are below which offsets of the far queue."""

    def __init__(self, far_queue: BufferedQueue) -> None:
        self._far_queue = far_queue
        self._lock = threading.Lock()
        self._sequences = [0]
        self._offsets = [0]

    def add(self, sequence: int) -> None:
        """Record that all events below ``sequence`` are in the far queue, so below its end now."""
        with self._lock:
            if sequence > self._sequences[-1]:
                self._sequences.append(sequence)
                self._offsets.append(self._far_queue.end)

    def get_progress(self) -> NodeProgress:
        """Return the progress of the far queue, never too much: the offsets are upper bounds."""
        positions = self._far_queue.get_ack_positions()
        with self._lock:
            persisted, delivered = (bisect_right(self._offsets, each) - 1 for each in positions)
            sequences = self._sequences
            progress = NodeProgress(sequences[-1], sequences[persisted], sequences[delivered])
            # Below the last delivered position nothing is needed.
            del self._sequences[:delivered], self._offsets[:delivered]
        return progress


# ── a model of a node ────────────────────────────────────────────────────────────────────────────


class ModelNode:
    """A minimal node: a list of events, and how many of them are persisted and delivered.

    It is a transport itself. Events are persisted and delivered only on command, unless it is
    ``eager`` to do it at once; ``crash()`` loses events that were only accepted, and every
    connection. With ``size``, sending blocks while that many events are not delivered. Safe to use
    from several threads: one condition guards it and its connections.
    """

    def __init__(
        self,
        *,
        eager: AckLevel | str = AckLevel.ACCEPTED,
        size: int | None = None,
        durability: Durability = Durability.ALWAYS,
    ) -> None:
        self.durability = durability
        self.repeats = 0
        """Events that arrived again and were dropped."""
        self.connects = 0
        self._eager = AckLevel(eager)
        self._size = size
        self._away = False
        self._changed = threading.Condition()
        self._events: list[tuple[str, int, bytes]] = []
        self._ends = dict.fromkeys(AckLevel, 0)
        self._sequences: dict[AckLevel, dict[str, int]] = {level: {} for level in AckLevel}
        self._connections: dict[str, ModelConnection] = {}

    # ── commands of a test ──────────────────────────────────────────────────────────────────────

    def persist(self, events: int | None = None) -> None:
        """Persist the next ``events`` accepted events, or all."""
        self._advance(AckLevel.PERSISTED, AckLevel.ACCEPTED, events)

    def deliver(self, events: int | None = None) -> None:
        """Deliver the next ``events`` persisted events, or all."""
        self._advance(AckLevel.DELIVERED, AckLevel.PERSISTED, events)

    def become_eager(self, level: AckLevel | str) -> None:
        """Let all current and future events reach ``level`` at once."""
        with self._changed:
            self._eager = AckLevel(level)
            self._advance_eagerly()

    def crash(self, *, away: bool = False) -> None:
        """Lose events that are only accepted, and every connection; with ``away``, stay down."""
        with self._changed:
            self._away = away
            del self._events[self._ends[AckLevel.PERSISTED] :]
            self._ends[AckLevel.ACCEPTED] = len(self._events)
            self._sequences[AckLevel.ACCEPTED] = dict(self._sequences[AckLevel.PERSISTED])
            self._drop_connections(*self._connections)

    def leave(self) -> None:
        """Become unreachable, and lose nothing."""
        with self._changed:
            self._away = True
            self._drop_connections(*self._connections)

    def come_back(self) -> None:
        """Become reachable again."""
        with self._changed:
            self._away = False

    def values(self, level: AckLevel | str = AckLevel.ACCEPTED) -> list[bytes]:
        """Return the events that have reached ``level``, in order."""
        with self._changed:
            return [value for _, _, value in self._events[: self._ends[AckLevel(level)]]]

    def wait_for(self, condition: Callable[[], bool], timeout: float = 10.0) -> bool:
        """Wait until a change makes the condition true; false on timeout."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    # ── calls of a proxy queue ──────────────────────────────────────────────────────────────────

    def connect(self, producer_id: str) -> ModelConnection:
        with self._changed:
            if self._away:
                raise TransportDown("the node is away")
            self.connects += 1
            self._drop_connections(producer_id)
            resume_at = self._sequences[AckLevel.ACCEPTED].get(producer_id, 0)
            connection = ModelConnection(self, producer_id, resume_at)
            self._connections[producer_id] = connection
            return connection

    def get(self, max_events: int | None, timeout: float) -> NoReturn:
        """Raise ``NotSupported``: the received events are in :meth:`values`."""
        del max_events, timeout
        raise NotSupported("a model node has no consumers; look at its values()")

    def accept(self, connection: ModelConnection, sequence: int, block: Block) -> None:
        """Add the events of a block, except repeats. Blocks while the node is full."""
        producer = connection.producer_id
        with self._changed:
            self._changed.wait_for(lambda: connection.closed or self._has_room())
            connection.check()
            known = self._sequences[AckLevel.ACCEPTED].get(producer, 0)
            for at, value in enumerate(get_values([block]), sequence):
                if at >= known:
                    self._events.append((producer, at, value or b""))
                else:
                    self.repeats += 1
            self._ends[AckLevel.ACCEPTED] = len(self._events)
            end = max(known, sequence + block.num_rows)
            self._sequences[AckLevel.ACCEPTED][producer] = end
            self._advance_eagerly()

    def await_progress(
        self, connection: ModelConnection, reported: NodeProgress | None, timeout: float
    ) -> NodeProgress | None:
        """Wait until the progress differs from ``reported``; ``None`` on timeout."""
        producer = connection.producer_id
        with self._changed:
            self._changed.wait_for(
                lambda: connection.closed or self._get_progress(producer) != reported, timeout
            )
            connection.check()
            progress = self._get_progress(producer)
            return None if progress == reported else progress

    def disconnect(self, connection: ModelConnection) -> None:
        """Close a connection for its client."""
        with self._changed:
            connection.closed = True
            self._changed.notify_all()

    # ── under the condition ─────────────────────────────────────────────────────────────────────

    def _has_room(self) -> bool:
        waiting = len(self._events) - self._ends[AckLevel.DELIVERED]
        return self._size is None or waiting < self._size

    def _get_progress(self, producer_id: str) -> NodeProgress:
        return NodeProgress(*(self._sequences[level].get(producer_id, 0) for level in AckLevel))

    def _advance_eagerly(self) -> None:
        if self._eager is not AckLevel.ACCEPTED:
            self.persist()
        if self._eager is AckLevel.DELIVERED:
            self.deliver()
        self._changed.notify_all()

    def _advance(self, level: AckLevel, behind: AckLevel, events: int | None) -> None:
        with self._changed:
            first, most = self._ends[level], self._ends[behind]
            end = most if events is None else min(most, first + events)
            for producer, sequence, _ in self._events[first:end]:
                self._sequences[level][producer] = sequence + 1
            self._ends[level] = end
            self._changed.notify_all()

    def _drop_connections(self, *producer_ids: str) -> None:
        for producer_id in producer_ids:
            connection = self._connections.pop(producer_id, None)
            if connection is not None:
                connection.closed = True
        self._changed.notify_all()


class ModelConnection:
    """A stream to a :class:`ModelNode`, whose condition guards it."""

    def __init__(self, node: ModelNode, producer_id: str, resume_at: int) -> None:
        self.producer_id = producer_id
        self.resume_at = resume_at
        self.durability = node.durability
        self.closed = False
        self._node = node
        self._reported: NodeProgress | None = None

    def send(self, sequence: int, block: Block) -> None:
        self._node.accept(self, sequence, block)

    def urge(self) -> None:
        """Do nothing: a model persists on command."""

    def progress(self, timeout: float) -> NodeProgress | None:
        progress = self._node.await_progress(self, self._reported, timeout)
        self._reported = progress or self._reported
        return progress

    def close(self) -> None:
        self._node.disconnect(self)

    def check(self) -> None:
        """Raise ``TransportDown`` if it is closed."""
        if self.closed:
            raise TransportDown("the connection was closed")


# ── a transport that fails ───────────────────────────────────────────────────────────────────────


class Step(enum.StrEnum):
    """A step at which a :class:`FlakyTransport` can fail."""

    CONNECT = "connect"
    """Before a connection is made."""
    BEFORE_SEND = "before_send"
    """Before a block reaches the node."""
    WITHIN_SEND = "within_send"
    """Half of a block has reached the node, and the client does not know."""
    AFTER_SEND = "after_send"
    """A block has reached the node, and the client does not know."""
    RESEND = "resend"
    """Before a block that was sent before reaches the node."""
    ACCEPTED = "accepted"
    """The client knows of events that are accepted and not persisted."""
    PERSISTED = "persisted"
    """The client knows of events that are persisted and not delivered."""
    IDLE = "idle"
    """Nothing is going on."""
    CLOSE = "close"
    """While the client closes the connection."""


@dataclass(slots=True)
class PlannedFailure:
    """A planned end of a connection."""

    step: Step
    plan: CallPlan
    crash: bool
    error: Exception


class FlakyTransport:
    """A transport whose connections fail at planned steps. Safe to use from several threads.

    It wraps ``transport``, which may be replaced while there is no connection. ``crash`` is called
    by failures that also crash the node.
    """

    def __init__(self, transport: Transport, *, crash: Callable[[], object] | None = None) -> None:
        self.transport = transport
        self._crash = crash
        self._changed = threading.Condition()
        self._plans: list[PlannedFailure] = []
        self._deaths: Counter[Step] = Counter()
        self._sent: dict[str, int] = {}

    def die(
        self,
        step: Step | str,
        nth: int = 1,
        times: int | None = 1,
        *,
        crash: bool = False,
        error: Exception | None = None,
    ) -> None:
        """Fail at the ``nth`` such step from now, ``times`` times (``None``: until cleared).

        The client gets ``error``; by default ``TransportDown``.
        """
        step = Step(step)
        error = error or TransportDown(f"failed at the step {step}, as planned")
        with self._changed:
            self._plans.append(PlannedFailure(step, CallPlan(nth, times), crash, error))

    def clear(self) -> None:
        """Remove all plans."""
        with self._changed:
            self._plans.clear()

    @property
    def deaths(self) -> int:
        """How many times it has failed."""
        with self._changed:
            return self._deaths.total()

    def await_death(self, step: Step | str, times: int = 1, timeout: float = 10.0) -> bool:
        """Wait until it has failed this many times at ``step``; false on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._deaths[Step(step)] >= times, timeout)

    def connect(self, producer_id: str) -> FlakyConnection:
        failure = self.find_failure(Step.CONNECT)
        if failure is not None:
            raise self.carry_out(failure)
        return FlakyConnection(self, producer_id, self.transport.connect(producer_id))

    def get(self, max_events: int | None, timeout: float) -> Batch:
        return self.transport.get(max_events, timeout)

    def has_plan(self, step: Step) -> bool:
        """Whether a failure at this step is planned."""
        with self._changed:
            return any(plan.step is step for plan in self._plans)

    def find_failure(self, step: Step) -> PlannedFailure | None:
        """Count a step; return the failure that is planned for it."""
        with self._changed:
            due = [each for each in self._plans if each.step is step and each.plan.count_call()]
        return due[0] if due else None

    def carry_out(self, failure: PlannedFailure) -> Exception:
        """Crash the node if that is planned; return the error for the client."""
        if failure.crash and self._crash is not None:
            self._crash()
        with self._changed:
            self._deaths[failure.step] += 1
            self._changed.notify_all()
        return failure.error

    def record_send(self, producer_id: str, sequence: int, events: int) -> bool:
        """Record that events are sent; return whether the first of them was sent before."""
        with self._changed:
            known = self._sent.get(producer_id, 0)
            self._sent[producer_id] = max(known, sequence + events)
            return sequence < known


class FlakyConnection:
    """A connection made by :meth:`FlakyTransport.connect`."""

    def __init__(self, flaky: FlakyTransport, producer_id: str, inner: NodeConnection) -> None:
        self.resume_at = inner.resume_at
        self.durability: Durability = inner.durability
        self._flaky = flaky
        self._producer_id = producer_id
        self._inner = inner
        self._error: Exception | None = None
        self._report_lock = threading.Lock()
        """Held while the node gets events that the listening thread must not report."""
        self._first_close = threading.Lock()

    def send(self, sequence: int, block: Block) -> None:
        self._check()
        if self._flaky.record_send(self._producer_id, sequence, block.num_rows):
            self._fail_at(Step.RESEND)
        self._fail_at(Step.BEFORE_SEND)
        for step, events in ((Step.WITHIN_SEND, block.num_rows // 2), (Step.AFTER_SEND, None)):
            failure = self._flaky.find_failure(step)
            if failure is not None:
                with self._report_lock:
                    part = block.slice(0, events)
                    if part.num_rows:
                        self._inner.send(sequence, part)
                    self._error = self._flaky.carry_out(failure)
                raise self._error
        self._inner.send(sequence, block)

    def urge(self) -> None:
        self._check()
        self._inner.urge()

    def progress(self, timeout: float) -> NodeProgress | None:
        self._check()
        is_short = self._flaky.has_plan(Step.IDLE)
        progress = self._inner.progress(min(timeout, IDLE_SECONDS) if is_short else timeout)
        with self._report_lock:
            self._check()
            if progress is None:
                self._fail_at(Step.IDLE)
                return None
            # The client gets this progress; only its next call fails.
            for step, further, nearer in (
                (Step.ACCEPTED, progress.accepted, progress.persisted),
                (Step.PERSISTED, progress.persisted, progress.delivered),
            ):
                failure = self._flaky.find_failure(step) if further > nearer else None
                if failure is not None:
                    self._error = self._flaky.carry_out(failure)
        return progress

    def close(self) -> None:
        self._inner.close()
        if self._first_close.acquire(blocking=False):
            self._fail_at(Step.CLOSE)

    def _fail_at(self, step: Step) -> None:
        failure = self._flaky.find_failure(step)
        if failure is not None:
            self._error = self._flaky.carry_out(failure)
            raise self._error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


# ── a destination ────────────────────────────────────────────────────────────────────────────────

OutputFault = Callable[[Block], BaseException | None]
"""Returns the error for a block, or ``None``."""


class FaultyOutput(Output):
    """Takes blocks, or fails as planned. Safe to use from several threads.

    ``prepare_fault`` and ``fault`` decide about every block, in ``prepare`` and in ``send``; a
    fault may also block for a while, like a slow destination.
    """

    def __init__(
        self, fault: OutputFault | None = None, prepare_fault: OutputFault | None = None
    ) -> None:
        super().__init__(OutputSettings(type="faulty"))
        self.fault = fault
        self.prepare_fault = prepare_fault
        self.taken: list[Block] = []
        """The delivered events, in order of delivery."""
        self.sends = 0
        self.failures = 0
        self.most_in_flight = 0
        self._in_flight = 0
        self._planned: list[BaseException] = []
        self._changed = threading.Condition()

    def fail(self, error: BaseException, times: int = 1) -> None:
        """Fail the next ``times`` sends with this error, before any other fault."""
        with self._changed:
            self._planned += [error] * times

    def await_sends(self, count: int, timeout: float = 20.0) -> bool:
        """Wait until this many sends have begun; false on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self.sends >= count, timeout)

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        error = self.prepare_fault(block) if self.prepare_fault is not None else None
        if error is not None:
            raise error
        return block

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        with self._changed:
            self.sends += 1
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            error = self._planned.pop(0) if self._planned else None
            self._changed.notify_all()
        try:
            if error is None and self.fault is not None:
                error = self.fault(prepared)
            with self._changed:
                self._record(prepared, error)
        finally:
            with self._changed:
                self._in_flight -= 1
        if error is not None:
            raise error

    def _record(self, block: Block, error: BaseException | None) -> None:
        if error is None:
            self.taken.append(block)
            return
        self.failures += 1
        failed = getattr(error, "failures", None)
        if failed is not None:
            self.taken.append(
                block.take([row for row in range(block.num_rows) if row not in failed])
            )
