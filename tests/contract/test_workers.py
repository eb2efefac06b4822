"""The worker pool: workers start and end with the backlog; each batch is settled once."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.contract.harness import (
    PATIENCE,
    Acks,
    DiskHarness,
    Harness,
    Task,
    assert_never,
    make_producer_with_acks,
    numbered,
    publish_all,
    values_of,
    wait_until,
)
from turnlane.errors import Never, RetryLater
from turnlane.events import block_of
from turnlane.queues import worker_pool
from turnlane.queues.api import Batch, Consumer
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.worker_pool import FIRST_PAUSE, Cancelled, DeadLetters, WorkerPool


@pytest.fixture(autouse=True, scope="module")
def _attentive() -> Iterator[None]:
    """Let supervisors check often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_pool, "POLL_SECONDS", 0.005)
        yield


class Pool(WorkerPool):
    """Records the pauses of workers, and limits them to ``longest``."""

    def __init__(
        self,
        queue: BufferedQueue,
        consumer: Consumer,
        *,
        dead_letters: DeadLetters | None = None,
        longest: float = 0.001,
    ) -> None:
        self.pauses: list[float] = []
        self._longest = longest
        super().__init__(queue, consumer, dead_letters=dead_letters, jitter=lambda: 1.0)

    def pause(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        return super().pause(min(seconds, self._longest))


def _open(harness: Harness, **knobs: Any) -> BufferedQueue:
    knobs.setdefault("dequeue_batch_size", 5)
    knobs.setdefault("completion_timeout", "20s")
    queue = harness.open(**knobs)
    assert isinstance(queue, BufferedQueue)
    return queue


def _publish(queue: BufferedQueue, first: int, end: int) -> None:
    """Publish one block, so that only the batch size decides about batches."""
    queue.producer().publish_block(block_of(numbered(first, end)))


def _await_delivered(queue: BufferedQueue, count: int) -> None:
    wait_until(lambda: queue.stats().ledger.delivered >= count, f"{count} delivered")
    assert queue.stats().ledger.delivered == count


def _threads(queue: BufferedQueue) -> list[threading.Thread]:
    prefixes = (f"turnlane-worker-{queue.name}-", f"turnlane-supervisor-{queue.name}")
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefixes)]


class Recorder:
    """A consumer that calls a function with each batch, then keeps its values."""

    def __init__(self, act: Callable[[Batch], object] = lambda batch: None) -> None:
        self.act = act
        self.attempts: list[tuple[int, int]] = []
        self.values: list[bytes | None] = []
        self._lock = threading.Lock()

    def __call__(self, batch: Batch) -> None:
        with self._lock:
            self.attempts.append((batch.place.first, batch.attempt))
        self.act(batch)
        with self._lock:
            self.values += values_of(batch)


def _failing(times: int, error: BaseException) -> Callable[[Batch], None]:
    """Raise ``error`` at the first attempts of each batch."""

    def act(batch: Batch) -> None:
        if batch.attempt <= times:
            raise error

    return act


# The number of workers


def test_a_pool_without_work_has_no_workers(keeping: Harness) -> None:
    """The pool of an empty queue has only a supervisor."""
    queue = _open(keeping)
    with Pool(queue, Recorder()) as pool:
        assert_never(lambda: pool.active > 0, "a worker")


def test_a_pool_with_zero_workers_has_two_for_each_core(keeping: Harness) -> None:
    most = 2 * len(os.sched_getaffinity(0))
    queue = _open(keeping, workers=0, worker_minimum_events=1, dequeue_batch_size=1)
    together = threading.Barrier(most, timeout=PATIENCE)
    with Pool(queue, Recorder(lambda batch: together.wait())) as pool:
        _publish(queue, 0, 3 * most)
        _await_delivered(queue, 3 * most)
        assert pool.active <= most


def test_a_longer_backlog_starts_more_workers(keeping: Harness) -> None:
    """The backlog decides, up to ``workers``."""
    queue = _open(keeping, workers=3, worker_minimum_events=10)
    goes_on = threading.Event()
    recorder = Recorder(lambda batch: goes_on.wait(PATIENCE))
    with Pool(queue, recorder) as pool:
        _publish(queue, 0, 5)  # the first worker takes these
        wait_until(lambda: pool.active == 1 and len(recorder.attempts) == 1, "a worker")
        _publish(queue, 5, 15)
        assert_never(lambda: pool.active > 1, "a second worker")
        _publish(queue, 15, 16)  # the second takes five, six are left
        wait_until(lambda: pool.active == 2 and len(recorder.attempts) == 2, "a second worker")
        assert_never(lambda: pool.active > 2, "a third worker")
        _publish(queue, 16, 100)
        wait_until(lambda: pool.active == 3, "a third worker")
        assert_never(lambda: pool.active > 3, "a fourth worker")
        goes_on.set()
        _await_delivered(queue, 100)
    assert sorted(recorder.values, key=bytes) == numbered(0, 100)  # type: ignore[arg-type]


def test_idle_workers_end_and_start_again(keeping: Harness) -> None:
    """After ``idle_timeout`` no worker is left; the next event starts one."""
    queue = _open(keeping, idle_timeout="10ms")
    recorder = Recorder()
    with Pool(queue, recorder) as pool:
        for number in range(3):
            _publish(queue, number, number + 1)
            _await_delivered(queue, number + 1)
            wait_until(lambda: pool.active == 0, "the worker's end")
            wait_until(lambda: len(_threads(queue)) == 1, "the thread's end")
    assert recorder.values == numbered(0, 3)


# Failures


def test_a_failed_batch_is_tried_again_after_a_growing_pause(keeping: Harness) -> None:
    """It is released with its attempt counted; a success resets the pause."""
    queue = _open(keeping)
    recorder = Recorder(_failing(3, ValueError("not now")))
    with Pool(queue, recorder) as pool:
        _publish(queue, 0, 1)
        _await_delivered(queue, 1)
        assert recorder.attempts == [(0, 1), (0, 2), (0, 3), (0, 4)]
        assert pool.pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
        _publish(queue, 1, 2)
        _await_delivered(queue, 2)
        assert pool.pauses[3:] == pool.pauses[:3]
    assert queue.stats().releases == 6


def test_no_other_worker_tries_a_batch_during_its_pause(keeping: Harness) -> None:
    """``after`` holds for all workers; other batches are handled during that time."""
    queue = _open(keeping, workers=4, worker_minimum_events=1)
    recorder = Recorder(_failing(1, RetryLater("busy", after=3600.0)))
    with Pool(queue, recorder, longest=3600.0) as pool:
        _publish(queue, 0, 5)
        wait_until(lambda: pool.pauses == [3600.0], "the pause")
        recorder.act = lambda batch: None
        _publish(queue, 5, 10)
        _await_delivered(queue, 5)
        assert_never(lambda: len(recorder.attempts) > 2, "another attempt")
        pool.close(drain=False)  # ends the pause and gives the batch back
    assert queue.get(timeout=PATIENCE).place.attempt == 2


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_a_consumer_that_raises_system_exit_has_failed(
    keeping: Harness, error: BaseException
) -> None:
    """The batch is given back although SystemExit would end a thread silently."""
    queue = _open(keeping)
    recorder = Recorder(_failing(1, error))
    with Pool(queue, recorder):
        _publish(queue, 0, 3)
        _await_delivered(queue, 3)
    assert recorder.values == numbered(0, 3)


def test_a_refused_batch_is_kept_as_dead_letters(keeping: Harness) -> None:
    """``Never`` settles a batch as dead after its dead letters are stored."""
    queue = _open(keeping, dequeue_batch_size=2)
    kept: list[tuple[list[bytes | None], str]] = []

    def refuse(batch: Batch) -> None:
        if values_of(batch) == numbered(2, 4):
            raise Never("poison")

    def keep(batch: Batch, error: Exception) -> None:
        kept.append((values_of(batch), str(error)))

    producer, acks = make_producer_with_acks(queue)
    with Pool(queue, Recorder(refuse), dead_letters=keep) as pool:
        publish_all(producer, numbered(0, 6))
        acks.wait_for(6)
        assert pool.pauses == []
    assert kept == [(numbered(2, 4), "poison")]
    ledger = queue.stats().ledger
    assert (ledger.delivered, ledger.dead, ledger.pending) == (4, 2, 0)


def test_a_refused_batch_without_dead_letters_is_tried_again(keeping: Harness) -> None:
    """Without dead letters nothing else would keep the events."""
    queue = _open(keeping)
    recorder = Recorder(_failing(2, Never("poison")))
    with Pool(queue, recorder):
        _publish(queue, 0, 1)
        _await_delivered(queue, 1)
    assert recorder.attempts == [(0, 1), (0, 2), (0, 3)]
    assert queue.stats().ledger.dead == 0


def test_a_batch_whose_dead_letters_fail_is_tried_again(keeping: Harness) -> None:
    """Events that could not be stored are not dead: they come again after a pause."""
    queue = _open(keeping)
    calls: list[int] = []

    def keep(batch: Batch, error: Exception) -> None:
        calls.append(batch.attempt)
        if batch.attempt < 3:
            raise OSError("no space for dead letters")

    with Pool(queue, Recorder(_failing(9, Never("poison"))), dead_letters=keep) as pool:
        _publish(queue, 0, 4)
        wait_until(lambda: queue.stats().ledger.dead == 4, "the dead letters")
        assert pool.pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE]
    assert calls == [1, 2, 3]


def test_a_delivered_batch_whose_ack_fails_is_not_delivered_again(disk: DiskHarness) -> None:
    """The worker repeats ``done()``, not the delivery, until the disk has recorded it."""
    queue = _open(disk)
    recorder = Recorder()
    with Pool(queue, recorder) as pool:
        disk.disk.fail("write", times=3, match="journal")
        _publish(queue, 0, 1)
        _await_delivered(queue, 1)
        assert len(pool.pauses) <= 3
    assert recorder.attempts == [(0, 1)]


def test_a_worker_survives_a_disk_that_cannot_read(disk: DiskHarness) -> None:
    """It pauses and reads again; nothing is skipped."""
    queue = _open(disk, memory_bytes=1, durability="always")
    assert queue.producer(ack="persisted").publish(b"000")
    wait_until(lambda: queue.stats().memory_blocks == 0, "an empty memory")
    disk.disk.fail("read", times=2)
    recorder = Recorder()
    with Pool(queue, recorder) as pool:
        _await_delivered(queue, 1)
        assert pool.pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE]
    assert recorder.values == [b"000"]


# Consumers that take too long


def _overrun(pool: WorkerPool) -> None:
    """Treat the consumer that has a batch as overdue, without waiting."""
    pool._cancel_overdue(-1.0)
    assert pool.cancelled == 1


def test_a_consumer_that_takes_too_long_is_cancelled(keeping: Harness) -> None:
    """After ``completion_timeout`` the batch goes to another worker."""
    queue = _open(keeping, completion_timeout="50ms")
    goes_on = threading.Event()
    recorder = Recorder(lambda batch: batch.attempt > 1 or goes_on.wait(PATIENCE))
    with Pool(queue, recorder) as pool:
        _publish(queue, 0, 5)
        _await_delivered(queue, 5)
        assert pool.cancelled >= 1
        assert queue.stats().releases == pool.cancelled
        goes_on.set()
    assert recorder.values[:5] == numbered(0, 5)


def test_a_consumer_that_loops_is_cancelled(keeping: Harness) -> None:
    """It is interrupted in its code; another worker gets the batch."""
    queue = _open(keeping)
    begun = threading.Event()
    ended: list[type[BaseException]] = []

    def act(batch: Batch) -> None:
        begun.set()
        try:
            while batch.attempt == 1:
                pass
        except BaseException as error:
            ended.append(type(error))
            raise

    recorder = Recorder(act)
    with Pool(queue, recorder) as pool:
        _publish(queue, 0, 5)
        assert begun.wait(PATIENCE)
        _overrun(pool)
        _await_delivered(queue, 5)
        assert (pool.cancelled, pool.pauses) == (1, [])
    assert recorder.attempts == [(0, 1), (0, 2)]
    assert recorder.values == numbered(0, 5)
    wait_until(lambda: ended == [Cancelled], "the end of the first")
    wait_until(lambda: not _threads(queue), "the threads' end")


@pytest.mark.parametrize("call", ["Event.wait", "time.sleep"])
def test_a_consumer_that_hangs_in_c_code_is_given_up(keeping: Harness, call: str) -> None:
    """Its batch goes to another worker at once; the stuck one ends when it can."""
    queue = _open(keeping)
    begun, goes_on = threading.Event(), threading.Event()

    def act(batch: Batch) -> None:
        begun.set()
        if batch.attempt > 1:
            return
        if call == "Event.wait":
            goes_on.wait(PATIENCE)
        else:
            time.sleep(0.1)

    recorder = Recorder(act)
    with Pool(queue, recorder) as pool:
        _publish(queue, 0, 5)
        assert begun.wait(PATIENCE)
        _overrun(pool)
        _await_delivered(queue, 5)
        goes_on.set()
        wait_until(lambda: len(_threads(queue)) == 2, "the end of the stuck worker")
    assert recorder.attempts == [(0, 1), (0, 2)]
    assert recorder.values == numbered(0, 5)
    assert queue.stats().ledger.delivered == 5


def test_a_done_after_the_cancellation_is_ignored(keeping: Harness) -> None:
    """A consumer that catches the cancellation cannot settle its batch."""
    queue = _open(keeping)
    begun, goes_on, late = threading.Event(), threading.Event(), threading.Event()
    seen: list[list[bytes | None]] = []

    def act(batch: Batch) -> None:
        if batch.attempt > 1:
            raise RetryLater("not yet", after=3600.0)
        begun.set()
        with contextlib.suppress(Cancelled):  # consumers should not catch it, but some do
            goes_on.wait(PATIENCE)
        batch.done()
        batch.release()
        batch.dead()
        seen.append(values_of(batch))
        late.set()

    recorder = Recorder(act)
    with Pool(queue, recorder, longest=3600.0) as pool:
        _publish(queue, 0, 2)
        assert begun.wait(PATIENCE)
        _overrun(pool)
        wait_until(lambda: pool.pauses == [3600.0], "the second worker")
        goes_on.set()
        assert late.wait(PATIENCE)
        ledger = queue.stats().ledger
        assert (ledger.delivered, ledger.dead, ledger.pending) == (0, 0, 2)
        pool.close(drain=False)
    assert seen == [numbered(0, 2)]
    assert queue.get(timeout=PATIENCE).attempt == 3


def test_workers_survive_consumers_that_end_at_the_time_limit(keeping: Harness) -> None:
    """A consumer that ends at the moment of its cancellation harms neither worker nor pool."""
    queue = _open(keeping, completion_timeout="10ms", workers=4, worker_minimum_events=1)
    chance = random.Random(7)

    def act(batch: Batch) -> None:
        until = time.monotonic() + chance.uniform(0.005, 0.02) / batch.attempt
        while time.monotonic() < until:
            pass

    recorder = Recorder(act)
    with Pool(queue, recorder) as pool:
        _publish(queue, 0, 200)
        _await_delivered(queue, 200)
    assert pool.cancelled == queue.stats().releases > 0
    assert set(recorder.values) == set(numbered(0, 200))


def test_a_pool_goes_on_when_a_consumer_fails_after_free(keeping: Harness) -> None:
    """The contents are gone; the batch stays unsettled, and others are handled."""
    queue = _open(keeping, dequeue_batch_size=1)
    begun, goes_on = threading.Event(), threading.Event()

    def act(batch: Batch) -> None:
        if batch.place.first < 2:
            batch.free()
        if batch.place.first == 0:
            raise ValueError("failed after free")
        if batch.place.first == 1:
            begun.set()
            goes_on.wait(PATIENCE)

    recorder = Recorder(act)
    with Pool(queue, recorder) as pool:
        _publish(queue, 0, 4)
        assert begun.wait(PATIENCE)
        _overrun(pool)
        _await_delivered(queue, 2)
        goes_on.set()
        pool.close(drain=False)
    assert recorder.values == numbered(2, 4)
    assert queue.stats().ledger.pending == 2


# Closing


def test_a_draining_close_lets_workers_finish(keeping: Harness) -> None:
    """Everything published before is delivered, and no thread is left."""
    queue = _open(keeping, workers=2, worker_minimum_events=1)
    recorder = Recorder()
    pool = Pool(queue, recorder)
    _publish(queue, 0, 500)
    pool.close(drain=True)
    pool.close(drain=True)
    assert len(recorder.values) == 500
    assert queue.stats().ledger.delivered == 500
    assert (pool.active, _threads(queue)) == (0, [])


def test_a_draining_close_ends_in_time(keeping: Harness) -> None:
    """A close waits at most ``shutdown_timeout`` for a consumer that always fails."""
    queue = _open(keeping, shutdown_timeout="30ms")
    failing = _failing(10**9, RetryLater("never", after=3600.0))  # one attempt, then a long pause
    pool = Pool(queue, Recorder(failing), longest=3600.0)
    _publish(queue, 0, 5)
    wait_until(lambda: bool(pool.pauses), "a failure")
    pool.close(drain=True)
    assert pool.active == 0
    stats = queue.stats()
    assert (stats.ledger.pending, stats.in_flight, stats.releases) == (5, 0, 1)


def test_a_close_without_drain_finishes_batches_in_work(keeping: Harness) -> None:
    """The current batch is delivered; the others stay in the queue."""
    queue = _open(keeping)
    goes_on = threading.Event()
    recorder = Recorder(lambda batch: goes_on.wait(PATIENCE))
    pool = Pool(queue, recorder)
    _publish(queue, 0, 5)
    wait_until(lambda: len(recorder.attempts) == 1, "the consumer")
    _publish(queue, 5, 20)
    closing = Task(lambda: pool.close(drain=False))
    wait_until(lambda: not pool.running, "the close")
    goes_on.set()
    closing.result()
    assert recorder.values == numbered(0, 5)
    assert queue.stats().ledger.pending == 15


def test_a_close_cancels_a_consumer_that_does_not_finish(keeping: Harness) -> None:
    """After ``completion_timeout`` its batch is released, even if it hangs in C code."""
    queue = _open(keeping, completion_timeout="50ms")
    goes_on = threading.Event()
    recorder = Recorder(lambda batch: goes_on.wait(PATIENCE))
    pool = Pool(queue, recorder)
    _publish(queue, 0, 5)
    wait_until(lambda: len(recorder.attempts) == 1, "the consumer")
    pool.close(drain=False)
    assert pool.cancelled >= 1
    assert pool.active == 0
    assert queue.get(timeout=PATIENCE).attempt == 1 + pool.cancelled
    goes_on.set()
    wait_until(lambda: not _threads(queue), "the end of the stuck worker")


def test_a_consumer_may_close_its_pool(keeping: Harness) -> None:
    """It does not wait for itself."""
    queue = _open(keeping)
    recorder = Recorder(lambda batch: pool.close(drain=False))
    pool = Pool(queue, recorder)
    _publish(queue, 0, 5)
    _await_delivered(queue, 5)
    wait_until(lambda: not _threads(queue), "the threads' end")


def test_a_pool_ends_when_its_queue_is_closed(keeping: Harness) -> None:
    """No thread spins or waits at a closed queue, even if events are left in it."""
    queue = _open(keeping, workers=2, worker_minimum_events=1)
    goes_on = threading.Event()
    recorder = Recorder(lambda batch: goes_on.wait(PATIENCE))
    pool = Pool(queue, recorder)
    _publish(queue, 0, 30)
    wait_until(lambda: len(recorder.attempts) == 2, "two consumers")
    queue.close()
    goes_on.set()
    wait_until(lambda: not _threads(queue), "the threads' end")
    assert len(recorder.attempts) == 2
    pool.close(drain=True)


# Everything together


def test_one_worker_keeps_the_order(keeping: Harness) -> None:
    """Failures delay later events, and no event overtakes another."""
    queue = _open(keeping, dequeue_batch_size=3)
    chance = random.Random(3)

    def act(batch: Batch) -> None:
        if chance.random() < 0.3:
            raise ValueError("by chance")

    recorder = Recorder(act)
    with Pool(queue, recorder):
        _publish(queue, 0, 300)
        _await_delivered(queue, 300)
    assert recorder.values == numbered(0, 300)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_many_workers_lose_nothing_and_settle_nothing_twice(keeping: Harness, seed: int) -> None:
    """After failures, refusals and timeouts every event is delivered or dead, and acked once."""
    queue = _open(keeping, workers=8, worker_minimum_events=1, dequeue_batch_size=7)
    chance = random.Random(seed)
    dead: list[bytes | None] = []

    def act(batch: Batch) -> None:
        match chance.randrange(6):
            case 0:
                raise ValueError("by chance")
            case 1:
                raise RetryLater("busy", after=0.0)
            case 2 if batch.attempt > 2:
                raise Never("poison")
            case 3:
                sys.exit(1)
            case _:
                pass

    recorder = Recorder(act)
    acks = Acks()
    producer = queue.producer(ack="delivered", on_ack=acks)
    with Pool(queue, recorder, dead_letters=lambda batch, _: dead.extend(values_of(batch))):
        publish_all(producer, numbered(0, 900))
        acks.wait_for(900)
    assert sorted(map(bytes, [*recorder.values, *dead])) == numbered(0, 900)  # type: ignore[arg-type]
    ledger = queue.stats().ledger
    assert (ledger.delivered, ledger.dead) == (len(recorder.values), len(dead))
    assert acks.dropped == 0


def test_a_pool_that_cannot_drain_in_time_logs_the_remaining_events(
    memory: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """The close continues; remaining events stay in the queue."""
    queue = memory.open(shutdown_timeout="50ms")
    assert isinstance(queue, BufferedQueue)
    publish_all(queue.producer(), numbered(0, 3))

    def refuse(_: Batch) -> None:
        raise RetryLater("not now")

    with caplog.at_level(logging.WARNING):
        Pool(queue, refuse).close()
    assert "seconds=0.05 events=3" in caplog.text
