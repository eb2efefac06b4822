"""The time to open a queue, by its size, after kill -9 and after a clean close."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import turnlane
from benchmarks.effort import Effort
from benchmarks.lines import make_log_lines
from benchmarks.measure import Series, alternate
from benchmarks.outcome import Cell, Outcome, Table, make_figure

SIZES = {"10 MB": 10_000_000, "2 GB": 2_000_000_000}
FRESH = 1_000
"""The events of 1 KB that a process publishes before it ends; half of them are synced."""

_CHILDREN = multiprocessing.get_context("forkserver")
_CHILDREN.set_forkserver_preload(["benchmarks.recovery"])


def _open(path: Path) -> turnlane.Queue:
    return turnlane.open_queue(kind="disk", path=path, max_bytes="16Gi", compression="none")


def fill(path: Path, size: int) -> None:
    """Make a queue whose chunk files have ``size`` bytes."""
    block = turnlane.block_of(make_log_lines(1_000, 1_000))
    with _open(path) as queue:
        producer = queue.producer()
        for _ in range(-(-size // block.nbytes)):
            producer.publish_block(block)


def open_and_end(path: Path, results: Connection, *, kill: bool) -> None:
    """Open the queue, send how long it took, publish, and end. Runs in a process of its own."""
    started = time.perf_counter()
    queue = _open(path)
    results.send(time.perf_counter() - started)
    lines = make_log_lines(FRESH, 1_000)
    producer = queue.producer()
    for line in lines[: FRESH // 2]:
        producer.publish(line)
    queue.producer(ack="persisted").publish(b"synced")
    for line in lines[FRESH // 2 :]:
        producer.publish(line)
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    queue.close()


def measure_opening(path: Path, *, kill: bool) -> float:
    """Return the seconds to open the queue in a new process, which ends in the same way."""
    receiving, sending = _CHILDREN.Pipe(duplex=False)
    child = _CHILDREN.Process(target=open_and_end, args=(path, sending), kwargs={"kill": kill})
    child.start()
    sending.close()
    seconds: float = receiving.recv()
    child.join()
    receiving.close()
    return seconds


def run(effort: Effort) -> Outcome:
    """Measure both sizes and both ways to end, in turns."""
    with effort.place() as directory:
        sizes = {name: max(1_000_000, int(size * effort.scale)) for name, size in SIZES.items()}
        for name, size in sizes.items():
            fill(directory / name, size)
        after = {
            "kill -9": _measure_openings(directory, 2 * effort.rounds - 1, kill=True),
            "a clean close": _measure_openings(directory, 2 * effort.few_rounds - 1, kill=False),
        }
    rows = {
        f"after {way}": [Cell.of(series.map(lambda each: each * 1e3)) for series in found.values()]
        for way, found in after.items()
    }
    small, large = after["kill -9"].values()
    how = (
        "`open_queue()` in a new process, 2 GB on disk / 10 MB on disk, after a kill -9 between "
        "two syncs; the median of several kills of each, in turns"
    )
    note = "The process before published 1,000 events of 1 KB, half of them synced, and then ended."
    return Outcome(
        [make_figure("recovery_ratio", large.over(small), how, unit="×", at_most=2)],
        [Table("Opening a queue", "ms", list(SIZES), rows, note)],
        [f"Recovery was measured with {effort.scale:g} times these sizes."]
        if effort.scale != 1
        else [],
    )


def _measure_openings(directory: Path, rounds: int, *, kill: bool) -> dict[str, Series]:
    contestants = {name: partial(measure_opening, directory / name, kill=kill) for name in SIZES}
    for measure in contestants.values():
        measure()  # The first finds a directory that was not left by this kind of end.
    found = alternate(contestants, rounds)
    return {name: Series(times) for name, times in found.items()}
