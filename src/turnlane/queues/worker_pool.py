"""A pool of workers that calls a passive consumer: the queue as the active part, without Spark.

From no worker at all to ``workers``: one for every ``worker_minimum_events`` waiting, each ending
after ``idle_timeout`` without work. Batches of a consumer that fails come again after a pause; one
that takes longer than ``completion_timeout`` is cancelled and its batch released.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
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
from turnlane.queues.api import Batch, Consumer
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.settings import STORING
from turnlane.retry import doubled, scattered
from turnlane.runtime import Closing

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


def pause_after(failures: int, error: BaseException, jitter: float) -> float:
    """Seconds to wait after so many failures in a row; ``jitter`` is between 0 and 1."""
    if isinstance(error, RetryLater) and error.after is not None:
        return error.after
    return scattered(doubled(FIRST_PAUSE, LAST_PAUSE, failures), jitter)


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
        except Exception:
            log.exception("a worker of queue %s failed", self._pool.queue.name)
        finally:
            if not self.cancelled:  # otherwise the pool has written it off already
                self._pool.left(self)

    def _work(self) -> bool:
        """Handle one batch; false if there was none for so long that this worker may go."""
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
            except StorageFailed as error:
                self._stumbled(error)
        return None

    def _handle(self, batch: Batch) -> None:
        self._begin(batch)
        try:
            settle = self._attempt(batch)
        except Cancelled:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a consumer raises is its failure
            if self._end():
                # Kept for as long as the pause takes: nobody else is to try it meanwhile.
                self._stumbled(error)
                self._pool.give_back(batch)
        else:
            if self._end():
                self._settle(batch, settle)

    def _attempt(self, batch: Batch) -> Callable[[], None]:
        """Call the consumer; returns how the batch is to be settled."""
        try:
            self._pool.consumer(batch)
        except Never as error:
            if self._pool.dead_letters is None:
                raise
            self._pool.dead_letters(batch, error)
            return batch.dead
        return batch.done

    def _settle(self, batch: Batch, settle: Callable[[], None]) -> None:
        """Have it recorded, however often that takes: delivered is delivered."""
        self._failures = 0
        while True:
            try:
                settle()
            except AckNotStored as error:
                if not self._stumbled(error):
                    self._pool.give_back(batch)
                    return
            except QueueClosed as error:
                log.warning("%s", error)
                return
            else:
                self._failures = 0
                return

    def _stumbled(self, error: BaseException) -> bool:
        """Something failed: pause; false if the pool stops."""
        self._failures += 1
        log.warning("queue %s: failure %d: %r", self._pool.queue.name, self._failures, error)
        return self._pool.pause(pause_after(self._failures, error, self._pool.jitter()))

    def _begin(self, batch: Batch) -> None:
        with self._guard:
            self._batch, self._since = batch, time.monotonic()

    def _end(self) -> bool:
        """The consumer is through; false if it was given up meanwhile."""
        with self._guard:
            self._batch = None
            if not self.cancelled:
                return True
        self._absorb()
        return False

    def _absorb(self) -> None:
        """Take the cancellation here if it is still on its way.

        Taking it back would leave Python 3.11 with something pending for good: every thread would
        look for it again and again, and one that is traced or profiled would never go on. Raised
        again, as there is room for one only, it is sure to come.
        """
        with contextlib.suppress(Cancelled):
            self._raise_inside()
            while True:
                time.sleep(0)

    def cancel_if_over(self, limit: float) -> bool:
        """Give the batch back if the consumer has had it for longer than ``limit`` seconds."""
        with self._guard:
            batch = self._batch
            if batch is None or self.cancelled or time.monotonic() - self._since <= limit:
                return False
            self.cancelled = True
            # Under the guard, which the worker has to pass: so it still is this thread, and what
            # is on its way meets it nowhere but in the consumer or in _end().
            self._raise_inside()
        self._pool.give_back(batch)
        return True

    def _raise_inside(self) -> None:
        """Have the cancellation raised in the worker as soon as that runs Python code again."""
        ident = self.thread.ident
        if ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(ident), ctypes.py_object(Cancelled)
            )


class WorkerPool(Closing):
    """Workers for one queue. As a context manager it stops at the end."""

    def __init__(
        self,
        queue: BufferedQueue,
        consumer: Consumer,
        *,
        dead_letters: DeadLetters | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Start at once. ``jitter`` varies the pauses after failures, between 0 and 1.

        ``dead_letters`` takes batches refused with ``Never``; without it they are tried again for
        ever, because nothing else would keep them.
        """
        if queue.settings.kind not in STORING:
            raise NotSupported(
                f"a pool needs a queue that stores events, not a {queue.settings.kind} queue"
            )
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

    def pause(self, seconds: float) -> bool:
        """Sleep, unless the pool stops first; true if it runs on."""
        return not self._stop.wait(seconds)

    def give_back(self, batch: Batch) -> None:
        """Release a batch; while the pool stops, not before there is no worker to take it."""
        with self._changed:
            if not self.running and not self._ended:
                self._left_over.append(batch)
                return
        self._release(batch)

    def _release(self, batch: Batch) -> None:
        try:
            batch.release()
        except BatchFreed as error:
            log.error("queue %s: a consumer failed after free(): %s", self.queue.name, error)  # noqa: TRY400

    def left(self, worker: _Worker) -> None:
        """A worker has ended."""
        with self._changed:
            self._workers.discard(worker)
            self._changed.notify_all()

    def _supervise(self) -> None:
        while self.running and (self.active or not self.queue.closed):
            try:
                self._look_after_workers()
            except Exception:
                log.exception("queue %s: its workers cannot be looked after", self.queue.name)
                self._stop.wait(LOOK_SECONDS)

    def _look_after_workers(self) -> None:
        settings = self.queue.settings
        backlog = self.queue.await_backlog(LOOK_SECONDS if self.active else 1.0)
        if not self.queue.closed:
            minimum = settings.worker_minimum_events or settings.dequeue_batch_size
            self._hire(wanted_workers(backlog, minimum, settings.workers))
        self._cancel_overrunning(settings.completion_timeout)
        if self.active and (backlog or self.queue.closed):
            self._stop.wait(LOOK_SECONDS)

    def _hire(self, wanted: int) -> None:
        with self._changed:
            while len(self._workers) < wanted and self.running:
                self._started += 1
                worker = _Worker(self, self._started)
                worker.thread.start()
                self._workers.add(worker)

    def _cancel_overrunning(self, limit: float) -> None:
        for worker in self._others():
            if worker.cancel_if_over(limit):
                log.warning("queue %s: cancelled a consumer that overran", self.queue.name)
                self._cancelled += 1
                # It may hang in C code for ever: the pool goes on without it.
                self.left(worker)

    def _others(self) -> list[_Worker]:
        """All workers but the caller, should it be one."""
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
            self._supervisor.join(LOOK_SECONDS)
        with self._changed:
            self._changed.wait_for(lambda: not self._others(), settings.completion_timeout)
        self._cancel_overrunning(-1.0)
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
            self._warn_of_rest(timeout)

    def _warn_of_rest(self, timeout: float) -> None:
        pending = self.queue.stats().ledger.pending
        if pending and self.running:
            name = self.queue.name
            log.warning("queue %s: %d events are left after draining %g s", name, pending, timeout)
