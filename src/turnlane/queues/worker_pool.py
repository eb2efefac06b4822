"""A pool of workers that takes batches out of a queue and calls a consumer with them.

The pool has between no worker and ``workers`` of them: one for every ``worker_minimum_events`` that
wait. A worker ends after ``idle_timeout`` without work. If a consumer fails, its batch comes again
after a pause; if it takes longer than ``completion_timeout``, it is cancelled and its batch is
released.

Threads: one per worker, and a supervisor that starts workers and cancels consumers. A worker has a
lock of its own, ``_guard``, which decides whether a batch ends by itself or is cancelled. The pool
has the condition ``_changed``. No thread holds both, nor one of them while it calls the queue.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
from collections.abc import Callable

from turnlane.errors import (
    AckNotStored,
    BatchFreed,
    Never,
    NotSupported,
    QueueClosed,
    QueueEmpty,
    RetryLater,
    StorageFailed,
)
from turnlane.logs import get_logger
from turnlane.pacing import double_wait, scatter_wait
from turnlane.queues.api import Batch, Consumer, Queue
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.settings import STORING
from turnlane.runtime import Closeable, create_thread, start_thread

log = get_logger(__name__)

DeadLetters = Callable[[Batch, Exception], None]
"""Stores a batch that can never be delivered; then the batch is settled as dead."""

FIRST_PAUSE = 0.1
LAST_PAUSE = 30.0
"""Seconds between attempts of a consumer that fails, doubling with jitter from one to the other."""
POLL_SECONDS = 0.1
"""How often the supervisor looks for consumers that take too long, while one is busy."""


class Cancelled(BaseException):
    """Raised inside a consumer that takes too long, so that it ends. Do not catch it."""


def count_wanted_workers(backlog: int, minimum: int, most: int) -> int:
    """Return one worker per ``minimum`` events, rounded up, at most ``most``."""
    return min(most, -(-backlog // minimum))


def retry_pause(failures: int, error: BaseException, jitter: float) -> float:
    """Return the seconds to wait after this many failures in a row; ``jitter`` is 0 to 1."""
    if isinstance(error, RetryLater) and error.after is not None:
        return error.after
    return scatter_wait(double_wait(FIRST_PAUSE, LAST_PAUSE, failures), jitter)


class _Worker:
    """A thread, the batch that its consumer has, and since when."""

    def __init__(self, pool: WorkerPool, number: int) -> None:
        self._pool = pool
        self._failures = 0
        self._guard = threading.Lock()
        self._batch: Batch | None = None
        self._since = 0.0
        self.cancelled = False
        self.thread = create_thread(f"turnlane-worker-{pool.queue.name}-{number}", self._run)

    def _run(self) -> None:
        try:
            while self._pool.running and not self.cancelled and self._work():
                pass
        except Exception:
            log.exception("queue.worker_failed", queue=self._pool.queue.name)
        finally:
            if not self.cancelled:  # otherwise the pool has removed it already
                self._pool.remove(self)

    def _work(self) -> bool:
        """Handle one batch; false if there was none for ``idle_timeout``."""
        batch = self._next_batch()
        if batch is None:
            return False
        try:
            self._handle(batch)
        except Cancelled:
            self._end()
            self._pool.give_back(batch)
        return True

    def _next_batch(self) -> Batch | None:
        """Wait for a batch, a short time at once, so that the pool can stop."""
        until = time.monotonic() + self._pool.queue.settings.idle_timeout
        while self._pool.running:
            left = until - time.monotonic()
            try:
                return self._pool.queue.get(timeout=max(0.0, min(POLL_SECONDS, left)))
            except QueueEmpty:
                if left <= 0:
                    return None
            except QueueClosed:
                return None
            except StorageFailed as error:
                self._pause_after(error)
        return None

    def _handle(self, batch: Batch) -> None:
        """Call the consumer, then settle the batch or give it back."""
        with self._guard:
            self._batch, self._since = batch, time.monotonic()
        settle = batch.done
        try:
            try:
                self._pool.consumer(batch)
            except Never as error:
                if self._pool.dead_letters is None:
                    raise
                self._pool.dead_letters(batch, error)
                settle = batch.dead
        except Cancelled:
            raise
        except BaseException as error:  # noqa: BLE001 - a consumer may raise anything
            if self._end():
                # Released after the pause: no other worker may try it before.
                self._pause_after(error)
                self._pool.give_back(batch)
        else:
            if self._end():
                self._settle(batch, settle)

    def _settle(self, batch: Batch, settle: Callable[[], None]) -> None:
        """Record the outcome, and try again until that succeeds: the batch is delivered."""
        self._failures = 0
        while True:
            try:
                settle()
            except AckNotStored as error:
                if not self._pause_after(error):
                    self._pool.give_back(batch)
                    return
            except QueueClosed as error:
                log.warning("queue.batch_not_settled", queue=self._pool.queue.name, error=error)
                return
            else:
                self._failures = 0
                return

    def _pause_after(self, error: BaseException) -> bool:
        """Log a failure and pause; false if the pool stops."""
        self._failures += 1
        name = self._pool.queue.name
        log.warning("queue.consumer_failed", queue=name, failures=self._failures, error=error)
        return self._pool.pause(retry_pause(self._failures, error, self._pool.jitter()))

    def _end(self) -> bool:
        """The consumer has ended; false if it was cancelled before."""
        with self._guard:
            self._batch = None
            if not self.cancelled:
                return True
        self._absorb()
        return False

    def _absorb(self) -> None:
        """Catch the cancellation here if it has not been raised yet.

        To withdraw it would leave Python 3.11 with a pending exception without end: every thread
        would look for it again and again, and a traced or profiled thread would never go on. There
        is room for only one pending exception, so raising it once more makes sure that it comes.
        """
        with contextlib.suppress(Cancelled):
            self._raise_inside()
            while True:
                time.sleep(0)

    def cancel_if_over(self, limit: float) -> bool:
        """Cancel the consumer if it has had its batch for longer than ``limit`` seconds."""
        with self._guard:
            batch = self._batch
            if batch is None or self.cancelled or time.monotonic() - self._since <= limit:
                return False
            self.cancelled = True
            # Under the guard, which the worker has to take: so the thread still has this batch,
            # and the exception reaches it only in the consumer or in _end().
            self._raise_inside()
        self._pool.give_back(batch)
        return True

    def _raise_inside(self) -> None:
        """Raise the cancellation in the worker as soon as its thread runs Python code again."""
        ident = self.thread.ident
        if ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(ident), ctypes.py_object(Cancelled)
            )


class WorkerPool(Closeable):
    """Workers for one queue. As a context manager it stops at the end."""

    def __init__(
        self,
        queue: Queue,
        consumer: Consumer,
        *,
        dead_letters: DeadLetters | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Start at once. ``jitter`` varies the pauses after failures, between 0 and 1.

        ``dead_letters`` takes batches that the consumer refuses with ``Never``. Without it they are
        tried again without end, because nothing else would keep them.
        """
        if not isinstance(queue, BufferedQueue) or queue.settings.kind not in STORING:
            raise NotSupported("a pool needs a memory, disk or disk_assisted queue")
        self.queue = queue
        self.consumer = consumer
        self.dead_letters = dead_letters
        self.jitter = jitter
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._workers: set[_Worker] = set()
        self._left_over: list[Batch] = []
        self._ended = False
        self._started = 0
        self._cancelled = 0
        self._supervisor = start_thread(f"turnlane-supervisor-{queue.name}", self._supervise)

    @property
    def running(self) -> bool:
        """Whether workers take batches."""
        return not self._stop.is_set()

    @property
    def active(self) -> int:
        """How many workers there are."""
        with self._changed:
            return len(self._workers)

    @property
    def cancelled(self) -> int:
        """How many consumers took too long and were cancelled."""
        return self._cancelled

    def pause(self, seconds: float) -> bool:
        """Sleep, unless the pool stops first; true if it still runs."""
        return not self._stop.wait(seconds)

    def give_back(self, batch: Batch) -> None:
        """Release a batch; while the pool stops, only once there is no worker to take it."""
        with self._changed:
            if not self.running and not self._ended:
                self._left_over.append(batch)
                return
        self._release(batch)

    def _release(self, batch: Batch) -> None:
        try:
            batch.release()
        except BatchFreed as error:
            # The contents are gone: the batch stays in flight until the queue is closed.
            log.error(  # noqa: TRY400 - the traceback of the consumer was logged before
                "queue.consumer_failed_after_free", queue=self.queue.name, error=error
            )

    def remove(self, worker: _Worker) -> None:
        """Forget a worker that has ended."""
        with self._changed:
            self._workers.discard(worker)
            self._changed.notify_all()

    def _supervise(self) -> None:
        while self.running and (self.active or not self.queue.closed):
            try:
                self._supervise_once()
            except Exception:
                log.exception("queue.supervisor_failed", queue=self.queue.name)
                self._stop.wait(POLL_SECONDS)

    def _supervise_once(self) -> None:
        settings = self.queue.settings
        backlog = self.queue.await_backlog(POLL_SECONDS if self.active else 1.0)
        if not self.queue.closed:
            minimum = settings.worker_minimum_events or settings.dequeue_batch_size
            wanted = count_wanted_workers(backlog, minimum, settings.most_workers)
            with self._changed:
                while len(self._workers) < wanted and self.running:
                    self._started += 1
                    worker = _Worker(self, self._started)
                    worker.thread.start()
                    self._workers.add(worker)
        self._cancel_overdue(settings.completion_timeout)
        if self.active and (backlog or self.queue.closed):
            self._stop.wait(POLL_SECONDS)

    def _cancel_overdue(self, limit: float) -> None:
        for worker in self._others():
            if worker.cancel_if_over(limit):
                log.warning("queue.consumer_cancelled", queue=self.queue.name, seconds=limit)
                self._cancelled += 1
                # It may hang in C code without end: the pool goes on without it.
                self.remove(worker)

    def _others(self) -> list[_Worker]:
        """Return all workers but the caller, if it is one."""
        with self._changed:
            current = threading.current_thread()
            return [worker for worker in self._workers if worker.thread is not current]

    def close(self, *, drain: bool = True) -> None:
        """Stop. With ``drain``, first let workers empty the queue for ``shutdown_timeout``.

        Consumers that are at a batch then have ``completion_timeout`` to finish it; after that they
        are cancelled and their batches released.
        """
        settings = self.queue.settings
        if drain and self.running:
            self._await_empty(settings.shutdown_timeout)
        self._stop.set()
        while self._supervisor.is_alive():
            self.queue.wake_readers()
            self._supervisor.join(POLL_SECONDS)
        with self._changed:
            self._changed.wait_for(lambda: not self._others(), settings.completion_timeout)
        self._cancel_overdue(-1.0)
        with self._changed:
            self._ended = True
            left_over, self._left_over = self._left_over, []
        for batch in left_over:
            self._release(batch)

    def _await_empty(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.running and time.monotonic() < deadline and not self.queue.closed:
            if not self.queue.stats().ledger.pending:
                break
            self._stop.wait(0.01)
        else:
            pending = self.queue.stats().ledger.pending
            if pending and self.running:
                name = self.queue.name
                log.warning("queue.drain_timed_out", queue=name, seconds=timeout, events=pending)
