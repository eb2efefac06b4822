"""How long a queue takes to open, by what is in it, after kill -9 and after a clean close."""

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
from benchmarks.lines import log_lines
from benchmarks.measure import Series, alternate
from benchmarks.outcome import Cell, Outcome, Table, figure

SIZES = {"10 MB": 10_000_000, "2 GB": 2_000_000_000}
FRESH = 1_000
"""Events of 1 KB that a process publishes before its end: half of them synced, half not."""

_CHILDREN = multiprocessing.get_context("forkserver")
_CHILDREN.set_forkserver_preload(["benchmarks.recovery"])


def _open(path: Path) -> turnlane.Queue:
    return turnlane.open_queue(kind="disk", path=path, max_bytes="16Gi", compression="none")


def fill(path: Path, size: int) -> None:
    """Make a queue whose chunk files have ``size`` bytes."""
    block = turnlane.block_of(log_lines(1_000, 1_000))
    with _open(path) as queue:
        producer = queue.producer()
        for _ in range(-(-size // block.nbytes)):
            producer.publish_block(block)


def open_and_end(path: Path, results: Connection, *, kill: bool) -> None:
    """In a process of its own: open, say how long it took, publish, and end as told."""
    started = time.perf_counter()
    queue = _open(path)
    results.send(time.perf_counter() - started)
    lines = log_lines(FRESH, 1_000)
    producer = queue.producer()
    for line in lines[: FRESH // 2]:
        producer.publish(line)
    queue.producer(ack="persisted").publish(b"synced")
    for line in lines[FRESH // 2 :]:
        producer.publish(line)
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    queue.close()


def opening(path: Path, *, kill: bool) -> float:
    """Seconds to open what the process before has left; then leave it likewise for the next."""
    receiving, sending = _CHILDREN.Pipe(duplex=False)
    child = _CHILDREN.Process(target=open_and_end, args=(path, sending), kwargs={"kill": kill})
    child.start()
    sending.close()
    seconds: float = receiving.recv()
    child.join()
    receiving.close()
    return seconds


def run(effort: Effort) -> Outcome:
    """Both sizes, both ways to end, alternating."""
    with effort.place() as directory:
        sizes = {name: max(1_000_000, int(size * effort.scale)) for name, size in SIZES.items()}
        for name, size in sizes.items():
            fill(directory / name, size)
        after = {
            "kill -9": _openings(directory, 2 * effort.rounds - 1, kill=True),
            "a clean close": _openings(directory, 2 * effort.few_rounds - 1, kill=False),
        }
    rows = {
        f"after {way}": [Cell.of(series.map(lambda each: each * 1e3)) for series in found.values()]
        for way, found in after.items()
    }
    small, large = after["kill -9"].values()
    how = (
        "`open_queue()` in a new process, 2 GB on disk / 10 MB on disk, after a kill -9 that came "
        "between syncs; median of several kills each, alternating"
    )
    note = "The process before published 1,000 events of 1 KB, half of them synced, and ended so."
    return Outcome(
        [figure("recovery_ratio", large.over(small), how, unit="×", at_most=2)],
        [Table("Opening a queue", "ms", list(SIZES), rows, note)],
        [f"Recovery was measured at {effort.scale:g} of the sizes named."]
        if effort.scale != 1
        else [],
    )


def _openings(directory: Path, rounds: int, *, kill: bool) -> dict[str, Series]:
    contestants = {name: partial(opening, directory / name, kill=kill) for name in SIZES}
    for measure in contestants.values():
        measure()  # the first finds a directory that was left in another way
    found = alternate(contestants, rounds)
    return {name: Series(times) for name, times in found.items()}
