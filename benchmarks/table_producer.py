"""A process that enqueues events while this process receives them."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import NamedTuple

from benchmarks.table_contestant import BATCH, TableContestant
from turnlane.runtime import Closeable

AHEAD = 20_000
"""The most events that wait: a queue in use is short."""


class Job(NamedTuple):
    """The events to enqueue, and where."""

    contestant: Callable[[str], TableContestant]
    url: str
    events: int
    """The number of events, in batches; with a rate, one by one."""
    per_second: float | None = None


class Producer(Closeable):
    """The process, which runs one job after another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._measure_receiving = context.Value("q", 0)
        self._stopped = context.Event()
        self._process = context.Process(
            target=_serve,
            args=(theirs, self._measure_receiving, self._stopped),
            name="bench-producer",
            daemon=True,
        )
        self._process.start()

    def start(self, job: Job) -> None:
        """Start a job; returns when its connection is open."""
        self._measure_receiving.value = 0
        self._stopped.clear()
        self._ours.send(job)
        assert self._ours.recv() == "ready"
        self._ours.send("go")

    def received(self, count: int) -> None:
        """Tell the process how many events are received."""
        assert self._process.is_alive(), "the producer process has ended"
        self._measure_receiving.value = count

    def stop(self) -> None:
        """End the job early."""
        self._stopped.set()

    def finish(self) -> float:
        """Wait for the end of the job; returns its seconds."""
        took: float = self._ours.recv()
        return took

    def close(self) -> None:
        """End the process."""
        self._ours.send(None)
        self._process.join(30)


def _serve(connection: Connection, received: Synchronized[int], stopped: Event) -> None:
    while (job := connection.recv()) is not None:
        with job.contestant(job.url) as contestant:
            connection.send("ready")
            connection.recv()
            started = time.perf_counter()
            if job.per_second is None:
                _in_batches(contestant, job.events, received, stopped)
            else:
                _one_by_one(contestant, job.events, job.per_second)
            connection.send(time.perf_counter() - started)


def _in_batches(
    contestant: TableContestant, count: int, received: Synchronized[int], stopped: Event
) -> None:
    for first in range(0, count, BATCH):
        while first - received.value > AHEAD and not stopped.is_set():
            time.sleep(0.001)
        if stopped.is_set():
            return
        contestant.batch(first, min(BATCH, count - first))


def _one_by_one(contestant: TableContestant, count: int, per_second: float) -> None:
    started = time.perf_counter()
    for number in range(count):
        left = started + number / per_second - time.perf_counter()
        if left > 0:
            time.sleep(left)
        contestant.one(1)
