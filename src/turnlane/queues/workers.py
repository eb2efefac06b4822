"""A pool of workers that calls a passive consumer: the queue as the active part, without Spark.

From no worker at all to ``workers``: one for every ``worker_minimum_events`` waiting, each ending
after ``idle_timeout`` without work. Batches of a consumer that fails come again after a pause; one
that takes longer than ``completion_timeout`` is cancelled and its batch released.
"""

from __future__ import annotations

import ctypes
import logging
import random
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from turnlane.errors import Never, QueueClosed, QueueEmpty, RetryLater
from turnlane.queues.contract import Batch, Consumer
from turnlane.queues.holding import HoldingQueue

log = logging.getLogger(__name__)

DeadLetters = Callable[[Batch, Exception], None]
"""Keeps a batch that can never be delivered; once it returns, the batch is settled as dead."""

FIRST_PAUSE = 0.1
LAST_PAUSE = 30.0
"""Seconds between attempts of a consumer that fails, doubling with jitter."""
LOOK_SECONDS = 0.1
"""How often the supervisor looks for workers that overrun while any of them is busy."""


class Cancelled(BaseException):
    """Raised inside a consumer that overran, so that it ends. Not to be caught."""


def wanted_workers(backlog: int, minimum: int, most: int) -> int:
    """One worker for every ``minimum`` events begun, none for none, ``most`` at most."""
    return min(most, -(-backlog // minimum))


def pause_after(failures: int, error: Exception, jitter: float) -> float:
    """Seconds to wait after so many failures in a row; ``jitter`` is between 0 and 1."""
    if isinstance(error, RetryLater) and error.after is not None:
        return error.after
    pause: float = min(LAST_PAUSE, FIRST_PAUSE * 2 ** min(failures - 1, 30))
    return pause * (0.5 + jitter / 2)


class _Worker:
    """A thread, the batch it is at, and since when."""

    def __init__(self, pool: WorkerPool, number: int) -> None:
        self._pool = pool
        self._failures = 0
        self._guard = threading.Lock()
        self._batch: Batch | None = None
        self._since = 0.0
        self.cancelled = False
        self.thread = threading.Thread(
            target=self._run, name=f"turnlane-worker-{pool.queue.name}-{number}", daemon=True
        )

    def _run(self) -> None:
        try:
            while self._pool.running and not self.cancelled and self._work():
                pass
        except Cancelled:
            log.debug("a worker of queue %s ended by cancellation", self._pool.queue.name)
        finally:
            self._pool.left(self)

    def _work(self) -> bool:
        """Handle one batch; false if there was none for so long that this worker may go."""
        batch = self._next_batch()
        if batch is None:
            return False
        self._begin(batch)
        try:
            self._pool.consumer(batch)
        except Exception as error:  # noqa: BLE001 - whatever a consumer raises is its failure
            self._end()
            self._failed(batch, error)
        else:
            if self._end():
                self._failures = 0
                batch.done()
        return True

    def _next_batch(self) -> Batch | None:
        """Wait for work in short spells, so that the pool can stop."""
        until = time.monotonic() + self._pool.queue.settings.idle_timeout
        while self._pool.running:
            left = until - time.monotonic()
            try:
                return self._pool.queue.get(timeout=max(0.0, min(LOOK_SECONDS, left)))
            except QueueEmpty:
                if left <= 0:
                    return None
            except QueueClosed:
                return None
        return None

    def _begin(self, batch: Batch) -> None:
        with self._guard:
            self._batch, self._since = batch, time.monotonic()

    def _end(self) -> bool:
        """The consumer is through; false if it was given up meanwhile."""
        with self._guard:
            self._batch = None
            return not self.cancelled

    def _failed(self, batch: Batch, error: Exception) -> None:
        if self.cancelled:
            return
        keep = self._pool.dead_letters
        if isinstance(error, Never) and keep is not None:
            keep(batch, error)
            batch.dead()
            return
        self._failures += 1
        log.warning("queue %s: attempt %d failed: %r", self._pool.queue.name, batch.attempt, error)
        batch.release()
        self._pool.pause(pause_after(self._failures, error, random.random()))  # noqa: S311

    def cancel_if_over(self, limit: float) -> bool:
        """Give the batch back if the consumer has had it for longer than ``limit`` seconds."""
        with self._guard:
            batch = self._batch
            if batch is None or self.cancelled or time.monotonic() - self._since <= limit:
                return False
            self.cancelled = True
        batch.release()
        self._raise_inside()
        return True

    def _raise_inside(self) -> None:
        """Have ``Cancelled`` raised in the consumer as soon as it runs Python code again."""
        ident = self.thread.ident
        if ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(ident), ctypes.py_object(Cancelled)
            )


class WorkerPool:
    """Workers for one queue. As a context manager it stops at the end."""

    def __init__(
        self,
        queue: HoldingQueue,
        consumer: Consumer,
        *,
        dead_letters: DeadLetters | None = None,
    ) -> None:
        """Start at once.

        ``dead_letters`` takes batches refused with ``Never``; without it they are tried again for
        ever, because nothing else would keep them.
        """
        self.queue = queue
        self.consumer = consumer
        self.dead_letters = dead_letters
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._workers: set[_Worker] = set()
        self._started = 0
        self._cancelled = 0
        self._supervisor = threading.Thread(
            target=self._supervise, name=f"turnlane-supervisor-{queue.name}", daemon=True
        )
        self._supervisor.start()

    @property
    def running(self) -> bool:
        """Whether workers go on taking batches."""
        return not self._stop.is_set()

    @property
    def active(self) -> int:
        """How many workers there are."""
        with self._changed:
            return len(self._workers)

    @property
    def cancelled(self) -> int:
        """How many consumers overran and were cancelled."""
        return self._cancelled

    def pause(self, seconds: float) -> None:
        """Sleep, unless the pool stops first."""
        self._stop.wait(seconds)

    def left(self, worker: _Worker) -> None:
        """A worker has ended."""
        with self._changed:
            self._workers.discard(worker)
            self._changed.notify_all()

    def _supervise(self) -> None:
        while self.running:
            backlog = self.queue.await_backlog(LOOK_SECONDS if self.active else 1.0)
            settings = self.queue.settings
            minimum = settings.worker_minimum_events or settings.dequeue_batch_size
            self._hire(wanted_workers(backlog, minimum, settings.workers))
            self._cancel_overrunning(settings.completion_timeout)
            if backlog and self.active:
                self._stop.wait(LOOK_SECONDS)

    def _hire(self, wanted: int) -> None:
        with self._changed:
            while len(self._workers) < wanted and self.running:
                self._started += 1
                worker = _Worker(self, self._started)
                self._workers.add(worker)
                worker.thread.start()

    def _cancel_overrunning(self, limit: float) -> None:
        with self._changed:
            workers = list(self._workers)
        for worker in workers:
            if worker.cancel_if_over(limit):
                log.warning("queue %s: a consumer took over %g s", self.queue.name, limit)
                self._cancelled += 1
                # It may hang in C code for ever: the pool goes on without it.
                self.left(worker)

    def close(self, *, drain: bool = True) -> None:
        """Stop. With ``drain``, first let workers empty the queue for ``shutdown_timeout``.

        Consumers that are at a batch then have ``completion_timeout`` to finish it; after that they
        are cancelled and their batches released.
        """
        settings = self.queue.settings
        if drain and self.running:
            self._await_empty(settings.shutdown_timeout)
        self._stop.set()
        self._supervisor.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._workers, settings.completion_timeout)
        self._cancel_overrunning(-1.0)

    def _await_empty(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.queue.stats().ledger.pending:
            self._stop.wait(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
