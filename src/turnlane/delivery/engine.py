"""The delivery engine: delivers blocks to one output, also while its destination fails.

The rows of a task pass five layers until bytes are written:

    LaneTask           spark/lane_task.py  reads rows, stages dead letters, notes deferred offsets
    DeliveryRun        this module         cuts batches, applies the error policy, collects results
    DestinationClient  destination.py      breaker, rate limit and share of sends: what may go now
    SendWorkers        workers.py          threads that prepare batches and send them
    Output             outputs/            makes payloads of rows and writes them

``Engine`` owns the threads of one output and starts one ``DeliveryRun`` at a time.

Results. Every row ends in exactly one state: delivered, dead, or deferred to a later task. A run
never waits long for a destination that is away: it defers what it cannot deliver soon, and ends.

Threads. All state of a run belongs to the thread that iterates over its results. That thread gives
jobs to the workers and waits for messages in the run's mailbox: finished prepares and sends, freed
capacity, a request to stop. The mailbox is the only thing that other threads touch, so a run needs
no lock. Nothing happens between two results while the caller does not ask for the next one, except
that workers finish their jobs.

A batch is in one place at a time: held back in an ordering group, ``_waiting`` to be prepared,
``_preparing``, ``_ready`` to be sent, ``_in_flight``, or ``_delayed`` until it is tried again. It
leaves when all its rows are settled.
"""

from __future__ import annotations

import heapq
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Final

import numpy as np

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.delivery.batching import (
    BatchCutter,
    OrderingGroups,
    SendBatch,
    get_event_ref,
    get_spans_by_source,
)
from turnlane.delivery.destination import DestinationClient, DestinationState, make_backoff
from turnlane.delivery.error_policy import (
    AttemptDecision,
    AttemptSignal,
    decide_after_failed_prepare,
    decide_after_send,
    get_retry_after,
)
from turnlane.delivery.limits import get_burst, make_concurrency_limit
from turnlane.delivery.results import BlockProgress, BlockResult, RowState
from turnlane.delivery.settings import DeliverySettings, Ordering
from turnlane.delivery.workers import (
    IN_FLIGHT,
    DeliveryOutput,
    Mailbox,
    Message,
    PrepareFinished,
    RunSignal,
    SendActivity,
    SendAttempt,
    SendFinished,
    SendWorkers,
)
from turnlane.events import Block
from turnlane.runtime import Closeable, count_cores

MAX_WAIT: Final = 1.5
"""Seconds. A run waits at most this long to retry; for longer waits it defers the events and ends.

It never waits for an open breaker: if some tasks of a Spark batch waited and others did not, those
few would have the destination to themselves afterwards. The planner of tasks also plans the probe.
"""
PREPARED_AHEAD: Final = 2
"""Batches that are prepared in addition to the number that can be sent at a time."""
SHARE_POLL: Final = 0.25
"""Seconds after which a run without a share of the sends looks whether it has one."""
MAX_OPEN_BLOCKS: Final = 64
"""Blocks in progress at a time. A block whose events have to wait does not hold up the others."""
GRACE: Final = 30.0
"""Seconds that sends in progress may take after a run is stopped. An output's timeout is shorter,
or the caller passes a longer grace."""


class Engine(Closeable):
    """Delivers blocks to an output, one run at a time.

    The caller closes the output, after the engine. Sends that take longer than ``grace`` seconds
    after a run was stopped are given up, and their events deferred. ``can_deliver_partly`` says
    that the output may take some events of a send and want others later. ``activity`` counts what
    the threads are doing, for a destination state that wants to know.
    """

    def __init__(
        self,
        output: DeliveryOutput,
        settings: DeliverySettings,
        destination: DestinationState,
        *,
        clock: Clock = SYSTEM_CLOCK,
        chance: Callable[[], float] = random.random,
        grace: float = GRACE,
        can_deliver_partly: bool = False,
        activity: SendActivity | None = None,
    ) -> None:
        self._workers = SendWorkers(output, clock, activity)
        self._make_run = partial(
            DeliveryRun,
            self._workers,
            settings,
            destination,
            clock=clock,
            chance=chance,
            grace=grace,
            can_deliver_partly=can_deliver_partly,
        )
        self._lock = threading.Lock()
        """Guards what follows: any thread may stop or close the engine."""
        self._run: DeliveryRun | None = None
        self._stopped = self._closed = False

    def deliver(self, block: Block) -> BlockResult:
        """Deliver one block. Blocks for ``max_time`` and ``grace`` seconds at most."""
        (result,) = self.run([block])
        return result

    def run(self, blocks: Iterable[Block]) -> Generator[BlockResult]:
        """Deliver blocks for at most ``max_time`` seconds in all; after that defer the rest.

        The time in which the run waits for blocks does not count.
        Yields a result for every block, in order. Blocks are taken from the iterable when there is
        room for them. Close the generator if you do not iterate to its end.
        """
        run = self._make_run()
        with self._lock:
            assert self._run is None, "an engine delivers one run at a time"
            self._run = run
            if self._stopped:
                run.stop()
        try:
            yield from run.deliver(blocks)
        finally:
            with self._lock:
                self._run = None
                closed = self._closed
            if closed:
                self._workers.close()

    def stop(self) -> None:
        """Start no more sends, in this run and in later ones. Any thread may call it."""
        with self._lock:
            self._stopped = True
            if self._run is not None:
                self._run.mailbox.put(RunSignal.STOP)

    def close(self) -> None:
        """Stop, and let the threads end; does not wait for sends in progress.

        A run in progress on another thread ends as after ``stop``, and the threads end with it.
        """
        self.stop()
        with self._lock:
            self._closed = True
            is_running = self._run is not None
        if not is_running:
            self._workers.close()


class DeliveryRun:
    """One run of an engine. Other threads may only use ``mailbox``."""

    def __init__(
        self,
        workers: SendWorkers,
        settings: DeliverySettings,
        destination: DestinationState,
        *,
        clock: Clock,
        chance: Callable[[], float],
        grace: float,
        can_deliver_partly: bool,
    ) -> None:
        self.mailbox: Mailbox = queue.SimpleQueue()
        self._on_capacity_freed = partial(self.mailbox.put, RunSignal.CAPACITY_FREED)
        self._workers = workers
        self._settings = settings
        self._clock = clock
        self._chance = chance
        self._grace = grace
        self._backoff = make_backoff(settings)
        self._deadline = clock.monotonic() + settings.max_time
        """Nothing is sent after this time. The time in which the run waits for blocks is added: on
        a busy machine they may take longer than that, and nothing would ever be sent."""
        self._give_up_at: float | None = None
        """Set when the run is stopping: the time at which it gives up sends in progress."""
        burst, limit = get_burst(settings), settings.batch_events
        self._cutter = BatchCutter(
            settings, min(limit, burst or limit), can_deliver_partly=can_deliver_partly
        )
        self._client = DestinationClient(destination, clock, has_rate_limit=burst is not None)
        self._concurrency = make_concurrency_limit(settings, self._client.permit.concurrency)
        self._ordering_groups = OrderingGroups()
        self._blocks: deque[BlockProgress] = deque()
        self._waiting: list[SendBatch] = []
        self._ready: list[SendBatch] = []
        self._delayed: list[tuple[float, SendBatch]] = []
        """These three are heaps: lower orders, or earlier times, come first."""
        self._preparing: set[SendBatch] = set()
        self._in_flight: set[SendAttempt] = set()
        self._rate_wait = 0.0
        self._preparers = settings.preparers or count_cores()
        self._most: int | None = None
        """More events than this in one send were too large lately."""
        self._exhausted = False
        self._rejected_before = workers.rejected

    def deliver(self, blocks: Iterable[Block]) -> Iterator[BlockResult]:
        """Deliver blocks; yield the result of each, in order."""
        source = iter(blocks)
        try:
            while True:
                self._take_blocks(source)
                self._start_work()
                while self._blocks and not self._blocks[0].open:
                    progress = self._blocks.popleft()
                    result = progress.get_result()
                    self._forget_failed(progress.block, result)
                    dead = sum(len(letter.numbers) for letter in result.dead)
                    self._client.count(
                        delivered=result.delivered, dead=dead, kept=len(result.deferred)
                    )
                    yield result
                if self._blocks:
                    self._process_messages()
                elif self._exhausted:
                    return
        finally:
            self._client.count(rejected=self._workers.rejected - self._rejected_before)
            self._client.finish(self._concurrency.limit)

    def stop(self) -> None:
        """Start nothing more; sends in progress may end. Only on the run's thread or before it."""
        self._give_up_at = self._clock.monotonic() + self._grace

    # ── blocks in ────────────────────────────────────────────────────────────────────────────────

    def _take_blocks(self, source: Iterator[Block]) -> None:
        """Take blocks while there is too little to do. While stopping, defer them one by one."""
        while not self._exhausted and self._needs_blocks():
            asked_at = self._clock.monotonic()
            block = next(source, None)
            self._deadline += self._clock.monotonic() - asked_at
            if block is None:
                self._exhausted = True
                return
            progress = BlockProgress(block)
            self._blocks.append(progress)
            if self._give_up_at is not None:
                progress.settle(range(block.num_rows), RowState.DEFERRED)
                continue
            for batch in self._cutter.cut(progress, self._client.permit.attempts, self._most):
                self._enqueue(self._ordering_groups.enter(batch))

    def _needs_blocks(self) -> bool:
        if self._give_up_at is not None:
            return not self._blocks
        busy = len(self._waiting) + len(self._ready) + len(self._preparing)
        busy += len(self._ordering_groups)
        enough = self._concurrency.limit + max(self._channel_size, self._preparers)
        return busy < enough and len(self._blocks) < MAX_OPEN_BLOCKS

    @property
    def _channel_size(self) -> int:
        """The most batches that are prepared, or are being prepared, and not sent yet."""
        return self._settings.channel_size or self._concurrency.limit + PREPARED_AHEAD

    # ── starting work ────────────────────────────────────────────────────────────────────────────

    def _start_work(self) -> None:
        """Start everything that can start now, or stop the run if nothing can be sent in time."""
        now = self._clock.monotonic()
        if self._give_up_at is None and self._can_send_in_time(now):
            while self._delayed and self._delayed[0][0] <= now:
                self._enqueue(heapq.heappop(self._delayed)[1])
            # Sends first: a batch that is sent makes room for another one to be prepared.
            self._start_sends(self._ready if self._settings.pipelined else self._waiting)
            if self._settings.pipelined:
                room = self._channel_size - len(self._ready)
                while self._waiting and len(self._preparing) < min(self._preparers, room):
                    batch = heapq.heappop(self._waiting)
                    self._preparing.add(batch)
                    self._workers.prepare(batch, self.mailbox)
        # Asking for permits may have changed what can be sent.
        if self._give_up_at is None and not self._can_send_in_time(now):
            self.stop()
        if self._give_up_at is not None:
            self._defer_all(now)

    def _can_send_in_time(self, now: float) -> bool:
        """Whether anything more may be sent in the time that a task has."""
        if now >= self._deadline or self._client.is_breaker_open:
            return False
        return self._client.not_before <= min(self._deadline, now + MAX_WAIT)

    def _start_sends(self, batches: list[SendBatch]) -> None:
        self._rate_wait = 0.0
        while batches:
            count = batches[0].prepared or batches[0].search.trial
            if not self._client.can_send(self._concurrency.limit, len(self._in_flight)):
                return
            self._rate_wait = self._client.get_rate_wait(count, self._deadline)
            if self._rate_wait > 0:
                return
            if not IN_FLIGHT.take(self._settings.max_in_flight, self._on_capacity_freed):
                return
            batch = heapq.heappop(batches)
            attempt = SendAttempt(batch, count, self._client.start_send(count))
            self._in_flight.add(attempt)
            self._concurrency.on_start(len(self._in_flight))
            self._workers.send(attempt, self.mailbox)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────

    def _process_messages(self) -> None:
        """Wait for a message, but not longer than until the next step is due; process them all."""
        try:
            self._process(self.mailbox.get(timeout=self._get_seconds_until_next_step()))
            while True:
                self._process(self.mailbox.get_nowait())
        except queue.Empty:
            pass

    def _get_seconds_until_next_step(self) -> float:
        now = self._clock.monotonic()
        if self._give_up_at is not None:
            return max(0.0, self._give_up_at - now)
        times = [self._deadline]
        if self._client.not_before > now:
            times.append(self._client.not_before)
        if self._delayed:
            times.append(self._delayed[0][0])
        if self._rate_wait:
            times.append(now + self._rate_wait)
        if self._client.share == 0:
            times.append(now + SHARE_POLL)
        return max(0.0, min(times) - now)

    def _process(self, message: Message) -> None:
        match message:
            case PrepareFinished():
                self._on_prepare_finished(message)
            case SendFinished():
                self._on_send_finished(message)
            case RunSignal.STOP if self._give_up_at is None:
                self.stop()

    def _on_prepare_finished(self, message: PrepareFinished) -> None:
        batch = message.batch
        if batch not in self._preparing:
            return  # given up
        self._preparing.remove(batch)
        if message.error is None:
            batch.payload, batch.prepared = message.payload, message.count
            heapq.heappush(self._ready, batch)
            return
        decision = decide_after_failed_prepare(batch, message.count, message.error)
        if decision.signal is AttemptSignal.FAILED:
            probe = self._client.unused_probe
            self._client.on_attempt(decision.signal, probe, 0.0, message.error)
        self._apply(batch, decision)

    def _on_send_finished(self, message: SendFinished) -> None:
        attempt, error = message.attempt, message.error
        if attempt not in self._in_flight:
            return  # given up
        self._in_flight.remove(attempt)
        batch = attempt.batch
        if message.unprepared and error is not None:
            decision = decide_after_failed_prepare(batch, attempt.count, error)
        else:
            self._count_retry(batch, attempt.count, error)
            decision = decide_after_send(batch, attempt.count, error, self._settings.max_attempts)
            if decision.later is not None:
                self._remember_failed(decision.later, attempt.count)
            if error is None:
                self._most = batch.search.most or self._most
            is_answer = decision.signal in (AttemptSignal.ANSWERED, AttemptSignal.PARTIAL)
            self._concurrency.on_finish(
                self._clock.monotonic(),
                message.seconds if is_answer else None,
                is_pushed_back=decision.later is not None,
            )
        self._client.on_attempt(decision.signal, attempt.probe, message.seconds, decision.error)
        self._apply(batch, decision)

    # ── what happens to batches ──────────────────────────────────────────────────────────────────

    def _apply(self, batch: SendBatch, decision: AttemptDecision) -> None:
        if decision.later is None:
            if decision.now is None:
                self._forget_attempts(batch)
                self._enqueue(self._ordering_groups.leave(batch))
            else:
                self._enqueue(decision.now)
            return
        if decision.now is not None:
            self._enqueue(self._ordering_groups.put_back(decision.now))
        self._retry_or_defer(decision.later, decision.error)

    def _enqueue(self, batch: SendBatch | None) -> None:
        if batch is not None:
            heapq.heappush(self._waiting, batch)

    def _retry_or_defer(self, batch: SendBatch, error: BaseException | None) -> None:
        """Retry a batch after a short wait, or defer it if the wait is long."""
        batch.retries += 1
        self._remember_attempts(batch)
        now = self._clock.monotonic()
        due = self._client.not_before
        if due <= now:
            retry_after = None if error is None else get_retry_after(error)
            due = now + self._backoff.get_wait(batch.retries, self._chance(), retry_after)
        if self._give_up_at is not None or due > min(self._deadline, now + MAX_WAIT):
            self._defer(batch)
        else:
            heapq.heappush(self._delayed, (due, batch))

    def _defer(self, batch: SendBatch) -> None:
        """Leave a batch to a later task, and with it all events that must not go before it."""
        self._remember_attempts(batch)
        self._ordering_groups.block_keys(batch)
        batch.defer()
        if self._settings.ordering is Ordering.STRICT and self._give_up_at is None:
            self.stop()
        self._enqueue(self._ordering_groups.leave(batch))

    def _defer_all(self, now: float) -> None:
        """Defer all batches that are not in progress, and at the end of the grace those too."""
        assert self._give_up_at is not None
        delayed = [batch for _, batch in self._delayed]
        deferred = [*self._waiting, *self._ready, *delayed, *self._ordering_groups.remove_all()]
        self._waiting, self._ready, self._delayed = [], [], []
        if now >= self._give_up_at:
            deferred += [*self._preparing, *(attempt.batch for attempt in self._in_flight)]
            for attempt in self._in_flight:
                self._remember_failed(attempt.batch, attempt.count)
            if self._in_flight:
                self._workers.cancel()
            self._preparing, self._in_flight = set(), set()
        for batch in deferred:
            self._remember_attempts(batch)
            batch.defer()

    def _count_retry(self, batch: SendBatch, count: int, error: BaseException | None) -> None:
        """Count a send as a retry if an earlier send of its events failed, in whichever task."""
        if not batch.retries and not self._client.has_any_failed:
            return
        sent = get_spans_by_source(batch.block.slice(0, count))
        if self._client.has_failed(sent) if sent else batch.retries:
            self._client.count_retry(error)

    def _remember_failed(self, batch: SendBatch, count: int) -> None:
        self._client.remember_failed(get_spans_by_source(batch.block.slice(0, count)))

    def _forget_failed(self, block: Block, result: BlockResult) -> None:
        if self._client.has_any_failed:
            is_settled = np.ones(block.num_rows, dtype=np.bool_)
            is_settled[result.deferred] = False
            self._client.forget_settled(get_spans_by_source(block, is_settled))

    def _remember_attempts(self, batch: SendBatch) -> None:
        """Have the destination's state remember how many times a batch failed, by its first event.

        A later task that gets the same events goes on counting.
        """
        self._forget_attempts(batch)
        event_ref = get_event_ref(batch.block) if batch.unknown_errors else None
        if event_ref is not None:
            batch.event_refs = {event_ref}
            self._client.remember_attempts(event_ref, batch.unknown_errors)

    def _forget_attempts(self, batch: SendBatch) -> None:
        for event_ref in batch.event_refs:
            self._client.remember_attempts(event_ref, 0)
        batch.event_refs = set()
