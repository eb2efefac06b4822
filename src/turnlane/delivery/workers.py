"""Send workers: the threads that prepare batches and send them, for one output.

A run gives a worker one job at a time and finds the result in its mailbox as a message. Workers
decide nothing: they catch every error and put it into the message. The threads are daemons, because
a send that never returns must not keep the process from ending.
"""

from __future__ import annotations

import enum
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from turnlane.clock import Clock
from turnlane.delivery.batching import SendBatch
from turnlane.events import Block
from turnlane.logs import get_logger
from turnlane.runtime import Closeable, start_thread

log = get_logger(__name__)


class DeliveryOutput(Protocol):
    """The part of an output that delivery uses. Several threads call it at a time."""

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """Convert a block to the form that :meth:`send` takes."""

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        """Deliver, or raise."""

    def cancel(self) -> None:
        """Make sends in progress fail, as far as possible."""

    @property
    def rejected(self) -> int:
        """The number of records inside delivered events that were refused for good."""


# ── messages ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False, slots=True)
class SendAttempt:
    """The first ``count`` rows of a batch, while they are sent."""

    batch: SendBatch
    count: int
    probe: str | None
    """The token of the breaker's probe, if this send is the probe."""


@dataclass(frozen=True, slots=True)
class PrepareFinished:
    """The first ``count`` rows of a batch are prepared, or failed to be."""

    batch: SendBatch
    count: int
    payload: Any
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class SendFinished:
    """A send ended. With ``unprepared`` the rows could not be prepared, so nothing was sent."""

    attempt: SendAttempt
    seconds: float
    error: BaseException | None = None
    unprepared: bool = False


class RunSignal(enum.Enum):
    """A message without contents."""

    STOP = enum.auto()
    """The run must end: it starts no more sends."""
    CAPACITY_FREED = enum.auto()
    """A send of another run ended, so this run may be allowed to send."""


Message: TypeAlias = PrepareFinished | SendFinished | RunSignal
Mailbox: TypeAlias = "queue.SimpleQueue[Message]"


# ── counters ─────────────────────────────────────────────────────────────────────────────────────


class SendActivity:
    """How many calls of an output's ``prepare`` and ``send`` are in progress.

    The workers count, and the destination's state reads: a node divides its limit of sends among
    tasks by what they are doing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._preparing = 0
        self._sending = 0

    def get_counts(self) -> tuple[int, int]:
        """Return how many prepares and how many sends are in progress."""
        return self._preparing, self._sending

    def add(self, preparing: int = 0, sending: int = 0) -> None:
        """Change the counts by these numbers."""
        with self._lock:
            self._preparing += preparing
            self._sending += sending


class InFlightCounter:
    """Counts the sends in progress, to limit them. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._waiting: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return self._count

    def take(self, limit: int, on_free: Callable[[], object]) -> bool:
        """Count one more send and return true, or return false if there are ``limit`` already.

        After false, ``on_free`` is called once when a send ends, on the thread of that send. It
        must not block.
        """
        with self._lock:
            if self._count < limit:
                self._count += 1
                return True
            if on_free not in self._waiting:
                self._waiting.append(on_free)
            return False

    def give_back(self) -> None:
        """Count one send less."""
        with self._lock:
            self._count -= 1
            waiting, self._waiting = self._waiting, []
        for on_free in waiting:
            on_free()


IN_FLIGHT = InFlightCounter()
"""The sends of all actions in this process. A node gives each process its share of a limit."""


# ── threads ──────────────────────────────────────────────────────────────────────────────────────


class SendWorkers(Closeable):
    """Prepares and sends on threads of its own. Safe to use from any thread."""

    def __init__(
        self, output: DeliveryOutput, clock: Clock, activity: SendActivity | None = None
    ) -> None:
        self._output = output
        self._clock = clock
        self._activity = activity or SendActivity()
        self._preparers = _DaemonPool("preparer")
        self._senders = _DaemonPool("sender")

    def prepare(self, batch: SendBatch, mailbox: Mailbox) -> None:
        """Start to prepare the rows that a batch tries next; a message tells when it is done."""
        count = batch.search.trial
        rows = batch.block.slice(0, count)

        def job() -> None:
            mailbox.put(PrepareFinished(batch, count, *self._prepare(rows)))

        self._preparers.start(job)

    def send(self, attempt: SendAttempt, mailbox: Mailbox) -> None:
        """Start to send, preparing the rows first if needed; a message tells when it is done.

        The caller has counted the send in ``IN_FLIGHT``; the worker gives that back.
        """
        batch = attempt.batch
        rows = None if batch.prepared else batch.block.slice(0, attempt.count)
        payload = batch.payload

        def job() -> None:
            if rows is None:
                message = self._send(attempt, payload)
            else:
                prepared, error = self._prepare(rows)
                if error is None:
                    message = self._send(attempt, prepared)
                else:
                    message = SendFinished(attempt, 0.0, error, unprepared=True)
            IN_FLIGHT.give_back()
            mailbox.put(message)

        try:
            self._senders.start(job)
        except BaseException:
            IN_FLIGHT.give_back()
            raise

    @property
    def rejected(self) -> int:
        """The number of records inside delivered events that the output says were refused."""
        return self._output.rejected

    def cancel(self) -> None:
        """Make the sends in progress fail, so that their threads end soon."""
        try:
            self._output.cancel()
        except Exception:
            log.exception("delivery.cancel_failed")

    def close(self) -> None:
        """Let the threads end, each after its current job. Does not wait for them."""
        self._preparers.close()
        self._senders.close()

    def _prepare(self, rows: Block) -> tuple[Any, BaseException | None]:
        self._activity.add(preparing=1)
        try:
            return self._output.prepare(rows), None
        except BaseException as error:  # noqa: BLE001 - the run decides what it means
            return None, error
        finally:
            self._activity.add(preparing=-1)

    def _send(self, attempt: SendAttempt, payload: Any) -> SendFinished:  # noqa: ANN401
        started = self._clock.monotonic()
        failure: BaseException | None = None
        self._activity.add(sending=1)
        try:
            self._output.send(payload)
        except BaseException as error:  # noqa: BLE001 - the run decides what it means
            failure = error
        finally:
            self._activity.add(sending=-1)
        return SendFinished(attempt, self._clock.monotonic() - started, failure)


_Job = Callable[[], None]


class _DaemonPool(Closeable):
    """Daemon threads, as many as there were jobs at a time. Safe to use from any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0
        self._closed = False

    def start(self, job: _Job) -> None:
        """Run a job, which must not raise, on an idle thread or a new one."""
        with self._lock:
            assert not self._closed
            if self._idle:
                self._idle -= 1
            else:
                self._threads += 1
                name = f"turnlane-{self._name}-{self._threads}"
                start_thread(name, self._work)
        self._jobs.put(job)

    def close(self) -> None:
        """Let the threads end, each after its current job. Further calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            threads = self._threads
        for _ in range(threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._idle += 1
