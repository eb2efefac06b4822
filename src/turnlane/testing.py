"""Stand-ins for what tests cannot command: time, disks that fail, a node at the far end.

Shipped, so that you can test your own code against the same troubles as turnlane's::

    disk = FaultyDisk()
    disk.fail("sync", nth=2, error=errno.EIO)       # the second sync fails
    disk.tear(nth=5, keep_bytes=100, kill=True)     # killed in the middle of the fifth write
    disk.fill(after_bytes=1_000_000)                # then full, until something is deleted

    node = MemoryQueue(QueueSettings.of())          # a proxy queue without a network
    proxy = open_queue(kind="proxy", transport=LoopbackTransport(node))

    node = ModelNode()                              # one that persists and delivers when told to
    transport = FlakyTransport(node, crash=node.crash)
    transport.die("after_send", nth=3, crash=True)  # the third block arrives; nobody hears of it
"""

from __future__ import annotations

import enum
import errno
import os
import signal
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pyarrow as pa

from turnlane.clock import Clock
from turnlane.errors import NotSupported, QueueClosed, QueueFull, TransportDown
from turnlane.events import Block, values_of
from turnlane.queues.contract import AckLevel, Batch, Durability
from turnlane.queues.holding import HoldingQueue
from turnlane.queues.log.files import Buffers, Disk
from turnlane.queues.producer import hashed
from turnlane.queues.transport import Connection, Progress, Transport

OPERATIONS = frozenset(
    {
        "open",
        "close",
        "write",
        "read",
        "sync",
        "sync_directory",
        "truncate",
        "allocate",
        "size",
        "rename",
        "unlink",
        "listing",
        "free_bytes",
    }
)
"""What a fault can be planned for. ``write_whole`` is made of these and has no name of its own."""


class ManualClock(Clock):
    """A clock that stands still until a test moves it. Safe to use from several threads."""

    def __init__(self, time_ns: int = 1_700_000_000_000_000_000, monotonic: float = 1000.0) -> None:
        self._lock = threading.Lock()
        self._wall = time_ns
        self._monotonic = round(monotonic * 1e9)

    def time_ns(self) -> int:
        """Nanoseconds since the epoch, as the test has it."""
        return self._wall

    def monotonic(self) -> float:
        """Seconds that only :meth:`advance` adds to."""
        return self._monotonic / 1e9

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        if seconds < 0:
            raise ValueError("time does not go back; jump() moves the wall clock alone")
        step = round(seconds * 1e9)
        with self._lock:
            self._wall += step
            self._monotonic += step

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward, or back, as an operator or NTP would."""
        with self._lock:
            self._wall += round(seconds * 1e9)


@dataclass(slots=True)
class _Fault:
    """One planned trouble: which calls it meets, and what it does to them."""

    op: str
    match: str
    nth: int
    times: int | None
    error: int | None = None
    keep: int | None = None
    kill: bool = False
    seconds: float = 0.0
    seen: int = 0

    def meets(self, op: str, path: Path | None) -> bool:
        """Count a call, and say whether it is one of those to be hit."""
        if op != self.op or self.match not in (path.name if path else ""):
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)


class FaultyDisk(Disk):
    """A real disk with planned troubles. Safe to use from several threads.

    A plan names an operation (one of :data:`OPERATIONS`) and which call of it to hit: ``nth``
    counts from 1 at the moment of planning, ``times`` says how many calls in a row (``None``: until
    :meth:`clear`), ``match`` restricts it to files whose name contains that text. Several plans
    may stand at once. Faults hit before the operation has any effect, except that :meth:`tear` and
    a full disk leave the first part of a write behind.

    A killed process loses nothing that it had written: what a power cut would do to data that was
    never synced is not simulated.
    """

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        """How often each operation was called, failed calls included."""
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._paths: dict[int, Path] = {}
        self._room: int | None = None

    # Planning

    def fail(
        self,
        op: str,
        nth: int = 1,
        error: int = errno.EIO,
        times: int | None = 1,
        *,
        match: str = "",
    ) -> None:
        """Raise ``OSError(error)`` from the ``nth`` call on, ``times`` times."""
        self._plan(_Fault(op, match, nth, times, error=error))

    def tear(
        self, nth: int = 1, keep_bytes: int = 0, *, kill: bool = False, match: str = ""
    ) -> None:
        """Write only the first ``keep_bytes`` of a write, then raise EIO, or kill the process."""
        self._plan(_Fault("write", match, nth, 1, error=errno.EIO, keep=keep_bytes, kill=kill))

    def kill(self, op: str, nth: int = 1, *, match: str = "") -> None:
        """Kill the process with SIGKILL in place of the ``nth`` call."""
        self._plan(_Fault(op, match, nth, 1, kill=True))

    def delay(
        self, op: str, nth: int = 1, seconds: float = 0.1, times: int | None = 1, *, match: str = ""
    ) -> None:
        """Let the call wait before it goes on."""
        self._plan(_Fault(op, match, nth, times, seconds=seconds))

    def clear(self) -> None:
        """Forget all plans, the full disk excepted: :meth:`unfill` ends that."""
        with self._lock:
            self._faults.clear()

    def _plan(self, fault: _Fault) -> None:
        if fault.op not in OPERATIONS:
            raise ValueError(
                f"no operation {fault.op!r}; there are {', '.join(sorted(OPERATIONS))}"
            )
        with self._lock:
            self._faults.append(fault)

    # A full disk

    def fill(self, after_bytes: int = 0) -> None:
        """Let files grow by ``after_bytes`` more in all, then raise ENOSPC.

        A write that does not fit is made as far as it does. Bytes that a file already has, or that
        were allocated, cost nothing; deleting, replacing or cutting files gives their bytes back.
        """
        with self._lock:
            self._room = after_bytes

    def drain(self, size: int) -> None:
        """Make room for ``size`` more bytes on the full disk, as if someone had cleaned up."""
        self._give_back(size)

    def unfill(self) -> None:
        """End the shortage."""
        with self._lock:
            self._room = None

    def _take(self, size: int) -> int:
        """Use up room for ``size`` bytes; returns how many of them fit."""
        with self._lock:
            if self._room is None or size <= 0:
                return size
            fits = min(size, self._room)
            self._room -= fits
            return fits

    def _give_back(self, size: int) -> None:
        with self._lock:
            if self._room is not None and size > 0:
                self._room += size

    # The operations

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> int:
        self._pass("open", path)
        fd = super().open(path, create=create, write=write)
        with self._lock:
            self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        self._pass("close", fd)
        with self._lock:
            self._paths.pop(fd, None)
        super().close(fd)

    def write(self, fd: int, buffers: Buffers, at: int) -> None:
        length = sum(memoryview(buffer).nbytes for buffer in buffers)
        torn = self._pass("write", fd)
        if torn is not None and torn.keep is not None:
            super().write(fd, _cut(buffers, torn.keep), at)
            _strike(torn, self._path(fd))
        grows = max(0, at + length - max(at, super().size(fd)))
        short = grows - self._take(grows)
        super().write(fd, _cut(buffers, length - short) if short else buffers, at)
        if short:
            raise _error(errno.ENOSPC, self._path(fd))

    def read(self, fd: int, length: int, at: int) -> pa.Buffer:
        self._pass("read", fd)
        return super().read(fd, length, at)

    def sync(self, fd: int) -> None:
        self._pass("sync", fd)
        super().sync(fd)

    def sync_directory(self, path: Path) -> None:
        self._pass("sync_directory", path)
        super().sync_directory(path)

    def truncate(self, fd: int, size: int) -> None:
        self._pass("truncate", fd)
        before = super().size(fd)
        super().truncate(fd, size)
        self._give_back(before - size)

    def allocate(self, fd: int, size: int) -> None:
        self._pass("allocate", fd)
        grows = max(0, size - super().size(fd))
        fits = self._take(grows)
        if fits < grows:
            self._give_back(fits)
            raise _error(errno.ENOSPC, self._path(fd))
        super().allocate(fd, size)

    def size(self, fd: int) -> int:
        self._pass("size", fd)
        return super().size(fd)

    def rename(self, old: Path, new: Path) -> None:
        self._pass("rename", new)
        replaced = _length(new)
        super().rename(old, new)
        self._give_back(replaced)

    def unlink(self, path: Path) -> None:
        self._pass("unlink", path)
        freed = _length(path)
        super().unlink(path)
        self._give_back(freed)

    def listing(self, path: Path) -> list[str]:
        self._pass("listing", path)
        return super().listing(path)

    def free_bytes(self, path: Path) -> int:
        self._pass("free_bytes", path)
        free = super().free_bytes(path)
        return free if self._room is None else min(free, self._room)

    # How plans are carried out

    def _pass(self, op: str, file: Path | int) -> _Fault | None:
        """Count the call and let the faults that meet it strike; a tear is left to the caller."""
        path = file if isinstance(file, Path) else self._path(file)
        with self._lock:
            self.operations[op] += 1
            due = [fault for fault in self._faults if fault.meets(op, path)]
        # Outside the lock: a delayed call must not delay the others.
        for fault in due:
            if fault.keep is None:
                _strike(fault, path)
        return next((fault for fault in due if fault.keep is not None), None)

    def _path(self, fd: int) -> Path | None:
        with self._lock:
            return self._paths.get(fd)


def _strike(fault: _Fault, path: Path | None) -> None:
    if fault.seconds:
        time.sleep(fault.seconds)
    if fault.kill:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.error is not None:
        raise _error(fault.error, path)


def _error(number: int, path: Path | None) -> OSError:
    return OSError(number, os.strerror(number), str(path) if path else None)


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _cut(buffers: Buffers, keep: int) -> list[memoryview]:
    """The first ``keep`` bytes of the buffers."""
    kept: list[memoryview] = []
    for buffer in buffers:
        view = memoryview(buffer).cast("B")[:keep]
        kept.append(view)
        keep -= len(view)
    return kept


LOOK_SECONDS = 0.002
"""How often a loopback connection looks for progress: there is nobody to tell it."""
BUSY_SECONDS = 0.05
"""How long it waits at a full queue before looking whether it was closed meanwhile."""


class LoopbackTransport:
    """The way to a node that is not there: the queue at the far end is in this process.

    For a ``ProxyQueue`` it looks like a network. While ``far_queue`` is full, sending blocks; once
    it takes no more events, the node cannot be reached. The far queue remains the test's own, to
    read from, to look into and to close.
    """

    def __init__(self, far_queue: HoldingQueue) -> None:
        self.far_queue = far_queue
        self._lock = threading.Lock()
        self._routes: dict[str, _Route] = {}

    def connect(self, producer_id: str) -> LoopbackConnection:
        """Open a stream. Raises ``TransportDown`` if the far queue is closed."""
        with self._lock:
            route = self._routes.setdefault(producer_id, _Route(self.far_queue))
        return LoopbackConnection(self.far_queue, producer_id, route)

    def get(self, max_events: int | None, timeout: float) -> Batch:
        """Take a batch from the far queue."""
        return self.far_queue.get(max_events, timeout)


class LoopbackConnection:
    """A stream to the far queue. Made by :meth:`LoopbackTransport.connect`."""

    def __init__(self, far_queue: HoldingQueue, producer_id: str, route: _Route) -> None:
        self._far_queue = far_queue
        self._route = route
        self._closed = threading.Event()
        self._told: Progress | None = None
        with far_queue.lock:
            if far_queue.gate.closed:
                raise TransportDown(f"queue {far_queue.name!r} takes no more events")
            self._resume_at = far_queue.sequences.get(hashed(producer_id), 0)
        self._producer = far_queue.producer(producer_id=producer_id)
        route.reached(self._resume_at)

    @property
    def resume_at(self) -> int:
        """What the far queue has of this producer."""
        return self._resume_at

    @property
    def durability(self) -> Durability:
        """The far queue's."""
        return self._far_queue.durability

    def send(self, sequence: int, block: Block) -> None:
        """Publish to the far queue, however long it is full."""
        while not self._closed.is_set():
            try:
                self._producer.publish_block(block, sequence=sequence, timeout=BUSY_SECONDS)
            except QueueFull:
                continue  # whatever part of the block went in is a repeat the next time
            except QueueClosed as error:
                raise TransportDown(str(error)) from error
            self._route.reached(sequence + block.num_rows)
            return
        raise TransportDown("the connection was closed")

    def progress(self, timeout: float) -> Progress | None:
        """Look at the far queue until it has come further than was last told."""
        deadline = time.monotonic() + timeout
        while not self._closed.is_set():
            progress = self._route.progress()
            if progress != self._told:
                self._told = progress
                return progress
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._closed.wait(min(left, LOOK_SECONDS))
        raise TransportDown("the connection was closed")

    def close(self) -> None:
        """Let go."""
        self._closed.set()


class _Route:
    """Which sequence numbers of one producer lie below which offsets of the far queue."""

    def __init__(self, far_queue: HoldingQueue) -> None:
        self._far_queue = far_queue
        self._lock = threading.Lock()
        self._sequences = [0]
        self._offsets = [0]

    def reached(self, sequence: int) -> None:
        """All below ``sequence`` is in the far queue, and so below its end at this moment."""
        with self._lock:
            if sequence > self._sequences[-1]:
                self._sequences.append(sequence)
                self._offsets.append(self._far_queue.end)

    def progress(self) -> Progress:
        """How far the far queue has come. Never too far: offsets are upper bounds."""
        with self._far_queue.lock:
            persisted = self._far_queue.watermarks[AckLevel.PERSISTED].position
            delivered = self._far_queue.watermarks[AckLevel.DELIVERED].position
        with self._lock:
            progress = Progress(self._sequences[-1], self._below(persisted), self._below(delivered))
            self._forget(progress.delivered)
        return progress

    def _below(self, offset: int) -> int:
        return self._sequences[bisect_right(self._offsets, offset) - 1]

    def _forget(self, delivered: int) -> None:
        """Only the last of what is delivered is still needed."""
        passed = self._sequences.index(delivered)
        del self._sequences[:passed], self._offsets[:passed]


IDLE_SECONDS = 0.005
"""How soon a connection that is to die while idle takes silence for idleness."""


class Step(enum.StrEnum):
    """Where a :class:`FlakyTransport` can die."""

    CONNECT = "connect"
    """Before a connection is made."""
    BEFORE_SEND = "before_send"
    """Before a block reaches the node."""
    WITHIN_SEND = "within_send"
    """Half of a block has reached the node, and the client does not know."""
    AFTER_SEND = "after_send"
    """A block has reached the node, and the client does not know."""
    RESEND = "resend"
    """Before a block reaches the node that was sent before."""
    ACCEPTED = "accepted"
    """The client knows of events that are accepted and not persisted."""
    PERSISTED = "persisted"
    """The client knows of events that are persisted and not delivered."""
    IDLE = "idle"
    """Nothing is going on."""
    CLOSE = "close"
    """While the client lets go."""


@dataclass(slots=True)
class _Death:
    """One planned end of a connection."""

    step: Step
    nth: int
    times: int | None
    crash: bool
    error: Exception
    seen: int = 0

    def meets(self, step: Step) -> bool:
        """Count a step, and say whether it is one to die at."""
        if step is not self.step:
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)


class FlakyTransport:
    """A transport whose connections die where you tell them to. Safe to use from several threads.

    It goes round another one, ``transport``, which may be exchanged while no connection stands.
    ``crash`` is called by deaths that are to take the node with them.
    """

    def __init__(self, transport: Transport, *, crash: Callable[[], object] | None = None) -> None:
        self.transport = transport
        self._crash = crash
        self._changed = threading.Condition()
        self._plans: list[_Death] = []
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
        """Die at the ``nth`` such step from now on, ``times`` times (``None``: until cleared).

        ``error`` is what the client gets to see, ``TransportDown`` if it is left out.
        """
        step = Step(step)
        error = error or TransportDown(f"died, as planned: {step}")
        with self._changed:
            self._plans.append(_Death(step, nth, times, crash, error))

    def clear(self) -> None:
        """Forget all plans."""
        with self._changed:
            self._plans.clear()

    @property
    def deaths(self) -> int:
        """How often it died so far."""
        with self._changed:
            return self._deaths.total()

    def await_death(self, step: Step | str, times: int = 1, timeout: float = 10.0) -> bool:
        """Wait until it has died at ``step`` so many times in all; false on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._deaths[Step(step)] >= times, timeout)

    def connect(self, producer_id: str) -> FlakyConnection:
        """Connect by the transport inside."""
        death = self.due(Step.CONNECT)
        if death is not None:
            raise self.carry_out(death)
        return FlakyConnection(self, producer_id, self.transport.connect(producer_id))

    def get(self, max_events: int | None, timeout: float) -> Batch:
        """Take a batch by the transport inside."""
        return self.transport.get(max_events, timeout)

    def expects(self, step: Step) -> bool:
        """Whether a death at this step is planned."""
        with self._changed:
            return any(plan.step is step for plan in self._plans)

    def due(self, step: Step) -> _Death | None:
        """Count a step, and say whether it is one to die at."""
        with self._changed:
            plans = [plan for plan in self._plans if plan.meets(step)]
        return plans[0] if plans else None

    def carry_out(self, death: _Death) -> Exception:
        """Let the node crash if that is planned; returns what the client gets to see."""
        if death.crash and self._crash is not None:
            self._crash()
        with self._changed:
            self._deaths[death.step] += 1
            self._changed.notify_all()
        return death.error

    def sends(self, producer_id: str, sequence: int, events: int) -> bool:
        """Note that events are sent; true if the first of them was sent before."""
        with self._changed:
            known = self._sent.get(producer_id, 0)
            self._sent[producer_id] = max(known, sequence + events)
            return sequence < known


class FlakyConnection:
    """A connection made by :meth:`FlakyTransport.connect`."""

    def __init__(self, flaky: FlakyTransport, producer_id: str, inner: Connection) -> None:
        self._flaky = flaky
        self._producer_id = producer_id
        self._inner = inner
        self._error: Exception | None = None
        self._telling = threading.Lock()
        """Held while something happens that the listener must not tell of."""
        self._closing = threading.Lock()

    @property
    def resume_at(self) -> int:
        """As the transport inside has it."""
        return self._inner.resume_at

    @property
    def durability(self) -> Durability:
        """As the transport inside has it."""
        return self._inner.durability

    def send(self, sequence: int, block: Block) -> None:
        """Send by the connection inside, as far as planned."""
        self._check()
        if self._flaky.sends(self._producer_id, sequence, block.num_rows):
            self._die_if_due(Step.RESEND)
        self._die_if_due(Step.BEFORE_SEND)
        for step, events in ((Step.WITHIN_SEND, block.num_rows // 2), (Step.AFTER_SEND, None)):
            death = self._flaky.due(step)
            if death is not None:
                self._send_and_die(death, sequence, block.slice(0, events))
        self._inner.send(sequence, block)

    def _send_and_die(self, death: _Death, sequence: int, block: Block) -> NoReturn:
        with self._telling:
            if block.num_rows:
                self._inner.send(sequence, block)
            self._error = self._flaky.carry_out(death)
        raise self._error

    def progress(self, timeout: float) -> Progress | None:
        """Hear what the connection inside hears."""
        self._check()
        idle = self._flaky.expects(Step.IDLE)
        progress = self._inner.progress(min(timeout, IDLE_SECONDS) if idle else timeout)
        with self._telling:
            self._check()
            if progress is None:
                self._die_if_due(Step.IDLE)
            else:
                self._die_after(progress)
        return progress

    def _die_after(self, progress: Progress) -> None:
        """Die once the client has been told this."""
        for step, further, nearer in (
            (Step.ACCEPTED, progress.accepted, progress.persisted),
            (Step.PERSISTED, progress.persisted, progress.delivered),
        ):
            death = self._flaky.due(step) if further > nearer else None
            if death is not None:
                self._error = self._flaky.carry_out(death)

    def close(self) -> None:
        """Let go of the connection inside."""
        self._inner.close()
        if self._closing.acquire(blocking=False):
            self._die_if_due(Step.CLOSE)

    def _die_if_due(self, step: Step) -> None:
        death = self._flaky.due(step)
        if death is not None:
            self._error = self._flaky.carry_out(death)
            raise self._error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


class ModelNode:
    """A node as small as can be: a list of events, and how far it is persisted and delivered.

    It is a transport itself. Nothing is persisted or delivered before you say so, unless it is
    ``eager`` to do it at once; ``crash()`` loses what was only accepted, and every connection. With
    ``size``, sending blocks while so many events are not delivered. Safe to use from several
    threads.
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
        """Events that came again and were not taken twice."""
        self.connects = 0
        self._eager = AckLevel(eager)
        self._size = size
        self._away = False
        self._changed = threading.Condition()
        self._events: list[tuple[str, int, bytes]] = []
        self._ends = dict.fromkeys(AckLevel, 0)
        self._sequences: dict[AckLevel, dict[str, int]] = {level: {} for level in AckLevel}
        self._connections: dict[str, ModelConnection] = {}

    # What a test commands

    def persist(self, events: int | None = None) -> None:
        """Persist the next ``events`` accepted ones, or all."""
        self._advance(AckLevel.PERSISTED, AckLevel.ACCEPTED, events)

    def deliver(self, events: int | None = None) -> None:
        """Deliver the next ``events`` persisted ones, or all."""
        self._advance(AckLevel.DELIVERED, AckLevel.PERSISTED, events)

    def become_eager(self, level: AckLevel | str) -> None:
        """Bring all there is, and all to come, to ``level`` at once."""
        with self._changed:
            self._eager = AckLevel(level)
            self._hurry()

    def crash(self, *, away: bool = False) -> None:
        """Lose what was only accepted, and every connection; with ``away``, do not come back."""
        with self._changed:
            self._away = away
            del self._events[self._ends[AckLevel.PERSISTED] :]
            self._ends[AckLevel.ACCEPTED] = len(self._events)
            self._sequences[AckLevel.ACCEPTED] = dict(self._sequences[AckLevel.PERSISTED])
            self._disconnect()

    def leave(self) -> None:
        """Be unreachable, and lose nothing."""
        with self._changed:
            self._away = True
            self._disconnect()

    def come_back(self) -> None:
        """Be reachable again."""
        with self._changed:
            self._away = False

    def values(self, level: AckLevel | str = AckLevel.ACCEPTED) -> list[bytes]:
        """The events that came so far, in order."""
        with self._changed:
            return [value for _, _, value in self._events[: self._ends[AckLevel(level)]]]

    def wait_for(self, condition: Callable[[], bool], timeout: float = 10.0) -> bool:
        """Wait until something changes that makes the condition true; false on timeout."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    # What a proxy queue calls

    def connect(self, producer_id: str) -> ModelConnection:
        """Open a stream; an earlier one of the same producer is at an end."""
        with self._changed:
            if self._away:
                raise TransportDown("the node is away")
            self.connects += 1
            self._drop(producer_id)
            resume_at = self._sequences[AckLevel.ACCEPTED].get(producer_id, 0)
            connection = ModelConnection(self, producer_id, resume_at)
            self._connections[producer_id] = connection
            self._changed.notify_all()
            return connection

    def get(self, max_events: int | None, timeout: float) -> NoReturn:
        """Not of use here: what came is in :meth:`values`."""
        del max_events, timeout
        raise NotSupported("a model node has no consumers; look at its values()")

    def accept(self, connection: ModelConnection, sequence: int, block: Block) -> None:
        """Take a block over a connection, except what came before."""
        producer = connection.producer_id
        with self._changed:
            self._changed.wait_for(lambda: connection.closed or self._has_room())
            connection.check()
            known = self._sequences[AckLevel.ACCEPTED].get(producer, 0)
            for at, value in enumerate(values_of([block]), sequence):
                if at >= known:
                    self._events.append((producer, at, value or b""))
                else:
                    self.repeats += 1
            self._ends[AckLevel.ACCEPTED] = len(self._events)
            end = max(known, sequence + block.num_rows)
            self._sequences[AckLevel.ACCEPTED][producer] = end
            self._hurry()

    def await_progress(
        self, connection: ModelConnection, told: Progress | None, timeout: float
    ) -> Progress | None:
        """Wait for something that was not told yet."""
        with self._changed:
            self._changed.wait_for(
                lambda: connection.closed or self._progress(connection.producer_id) != told, timeout
            )
            connection.check()
            progress = self._progress(connection.producer_id)
            return None if progress == told else progress

    def hang_up(self, connection: ModelConnection) -> None:
        """A client lets go."""
        with self._changed:
            connection.closed = True
            self._changed.notify_all()

    # How it goes on, under the lock

    def _has_room(self) -> bool:
        waiting = len(self._events) - self._ends[AckLevel.DELIVERED]
        return self._size is None or waiting < self._size

    def _progress(self, producer_id: str) -> Progress:
        return Progress(*(self._sequences[level].get(producer_id, 0) for level in AckLevel))

    def _hurry(self) -> None:
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

    def _disconnect(self) -> None:
        for producer_id in list(self._connections):
            self._drop(producer_id)
        self._changed.notify_all()

    def _drop(self, producer_id: str) -> None:
        connection = self._connections.pop(producer_id, None)
        if connection is not None:
            connection.closed = True


class ModelConnection:
    """A stream to a :class:`ModelNode`, whose lock guards it."""

    def __init__(self, node: ModelNode, producer_id: str, resume_at: int) -> None:
        self.producer_id = producer_id
        self.resume_at = resume_at
        self.durability = node.durability
        self.closed = False
        self._node = node
        self._told: Progress | None = None

    def send(self, sequence: int, block: Block) -> None:
        """Hand a block to the node; blocks while that is full."""
        self._node.accept(self, sequence, block)

    def progress(self, timeout: float) -> Progress | None:
        """Wait for the node to come further."""
        progress = self._node.await_progress(self, self._told, timeout)
        self._told = progress or self._told
        return progress

    def close(self) -> None:
        """Let go."""
        self._node.hang_up(self)

    def check(self) -> None:
        """Raise ``TransportDown`` if it is at an end."""
        if self.closed:
            raise TransportDown("the connection is at an end")
