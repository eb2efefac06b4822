"""Disk queues compared with a bare file: the same bytes, the same writes, the same syncs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import turnlane
from benchmarks.effort import Effort
from benchmarks.lines import make_log_lines, split_into_blocks
from benchmarks.measure import SHORT_TURNS, Series, alternate, freeze_gc
from benchmarks.outcome import Cell, Outcome, Table, make_figure
from benchmarks.publish_and_read import BLOCK, SIZES
from turnlane.events import Block
from turnlane.storage.disk_io import Buffers, Disk

SYNC = -1
"""The number of a sync in a trace; other numbers are the bytes of a write."""


class TracingDisk(Disk):
    """A real disk that records the writes and syncs of chunk files; the bare file repeats them."""

    def __init__(self) -> None:
        self.trace: list[int] = []
        self._chunks: set[int] = set()

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> int:
        fd = super().open(path, create=create, write=write)
        if ".chunk" in path.name:
            self._chunks.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self._chunks.discard(fd)
        super().close(fd)

    def write(self, fd: int, buffers: Buffers, at: int) -> None:
        super().write(fd, buffers, at)
        if fd in self._chunks:
            self.trace.append(sum(memoryview(buffer).nbytes for buffer in buffers))

    def sync(self, fd: int) -> None:
        super().sync(fd)
        if fd in self._chunks:
            self.trace.append(SYNC)


@dataclass
class Recording:
    """The bytes and the trace of the last queue; the bare file writes the same."""

    stored: bytes = b""
    trace: list[int] = field(default_factory=list)


class Speed(NamedTuple):
    """Bytes of chunk files per second, and events per second."""

    bytes: float
    events: float


Publish = Callable[[turnlane.Queue, Sequence[Any]], None]


@dataclass(frozen=True)
class Task:
    """The events to write, the function that publishes them, and the queue's settings."""

    work: Sequence[Any]
    publish: Publish
    knobs: dict[str, Any]


def publish_until_persisted(queue: turnlane.Queue, blocks: Sequence[Block]) -> None:
    """Publish blocks, and a last event whose publisher waits for the sync."""
    producer = queue.producer()
    for block in blocks:
        producer.publish_block(block)
    queue.producer(ack="persisted").publish(b"the end")


def publish_until_acked(queue: turnlane.Queue, work: Sequence[Block | bytes]) -> None:
    """Publish blocks or single values, until the callback knows that all are persisted."""
    expected = sum(1 if isinstance(each, bytes) else each.num_rows for each in work)
    heard = 0
    complete = threading.Event()

    def on_ack(ack: turnlane.Ack) -> None:
        nonlocal heard
        heard += ack.count
        if heard == expected:
            complete.set()

    producer = queue.producer(ack="persisted", on_ack=on_ack)
    for each in work:
        if isinstance(each, bytes):
            producer.publish(each)
        else:
            producer.publish_block(each)
    complete.wait()


def write_queue(effort: Effort, task: Task, kept: Recording) -> Speed:
    disk = TracingDisk()
    with effort.place() as directory:
        path = directory / "queue"
        queue = turnlane.open_queue(
            kind="disk", path=path, max_bytes="16Gi", disk=disk, **task.knobs
        )
        with freeze_gc():
            started = time.perf_counter()
            task.publish(queue, task.work)
            seconds = time.perf_counter() - started
        kept.trace = list(disk.trace)
        events = queue.stats().ledger.accepted
        queue.close()
        kept.stored = b"".join(chunk.read_bytes() for chunk in sorted(path.glob("*.chunk")))
    return Speed(len(kept.stored) / seconds, events / seconds)


def write_bare(effort: Effort, kept: Recording) -> Speed:
    stored = memoryview(kept.stored)
    with effort.place() as directory:
        fd = os.open(directory / "bare", os.O_RDWR | os.O_CREAT, 0o644)
        at = 0
        started = time.perf_counter()
        for piece in kept.trace:
            if piece == SYNC:
                os.fdatasync(fd)
            else:
                at += os.pwrite(fd, stored[at : at + piece], at)
        seconds = time.perf_counter() - started
        os.close(fd)
    return Speed(at / seconds, 0.0)


class Comparison(NamedTuple):
    """Bytes/s of the queue and of the bare file, and events/s of the queue."""

    own: Series
    bare: Series
    events: Series

    @property
    def ratio(self) -> Series:
        """The ratio of queue and bare file, round by round."""
        return self.own.over(self.bare)

    @property
    def row(self) -> list[Cell | None]:
        """A row of a table with :data:`COLUMNS`."""
        megabytes = [each.map(lambda speed: speed / 1e6) for each in (self.own, self.bare)]
        return [Cell.of(each) for each in (*megabytes, self.ratio, self.events)]


COLUMNS = ("queue, MB/s", "bare file, MB/s", "ratio", "queue, events/s")


def compare_writing(effort: Effort, task: Task, rounds: int) -> Comparison:
    kept = Recording()
    found = alternate(
        {
            "queue": partial(write_queue, effort, task, kept),
            "bare": partial(write_bare, effort, kept),
        },
        rounds,
    )
    return Comparison(
        Series([speed.bytes for speed in found["queue"]]),
        Series([speed.bytes for speed in found["bare"]]),
        Series([speed.events for speed in found["queue"]]),
    )


def find_worst(comparisons: Sequence[Comparison]) -> Series:
    """Return the lowest of the ratios."""
    return min((each.ratio for each in comparisons), key=lambda ratio: ratio.median)


# ── with the disk synced every second ─────────────────────────────────────────────────────────────

_SAME = "gets the same stored bytes in the same writes, with a sync where the queue synced a chunk"


def measure_writing(effort: Effort) -> Outcome:
    found: dict[str, list[Comparison]] = {"none": [], "auto": []}
    rows = {}
    for compression, comparisons in found.items():
        for name, size in SIZES.items():
            lines = make_log_lines(effort.events(100_000_000 // size, 500_000_000 // size), size)
            work = [turnlane.block_of(values) for values in split_into_blocks(lines, BLOCK)]
            task = Task(work, publish_until_persisted, {"compression": compression})
            comparisons.append(compare_writing(effort, task, effort.rounds + 2))
            rows[f"{name}, compression {compression}"] = comparisons[-1].row
    how = (
        "blocks of 1,000 events, `interval`, {}, until all events are synced / a bare file that "
        + _SAME
        + "; the worse of 100 B and 1 KB"
    )
    note = (
        "Blocks of 1,000 events, `durability: interval`, until all events are persisted. The bare "
        "file " + _SAME + "; it has no journal. With `auto`, the default, the queue compresses "
        "if it expects to be faster. The bare file then gets bytes that are compressed already, so "
        "compare events/s."
    )
    plain, default = how.format("`compression: none`"), how.format("default settings")
    return Outcome(
        [
            make_figure("disk_write_ratio", find_worst(found["none"]), plain, at_least=0.7),
            make_figure("disk_write_auto_ratio", find_worst(found["auto"]), default),
        ],
        [Table("Disk kind: writing", "", COLUMNS, rows, note)],
    )


# ── with every ack synced ─────────────────────────────────────────────────────────────────────────


_FIGURED = "blocks of 1,000"


def measure_synced_writing(effort: Effort) -> Outcome:
    # With fewer events, the time before the first write would dominate: until then the publisher
    # has Python's lock most of the time.
    lines = make_log_lines(effort.events(1_000_000, 2_000_000), 100)
    some = lines[: effort.events(200_000, 1_000_000)]
    works: dict[str, Sequence[Any]] = {
        "single events, one thread": lines[: effort.events(50_000)],
        "blocks of 100": [turnlane.block_of(values) for values in split_into_blocks(some, 100)],
        _FIGURED: [turnlane.block_of(values) for values in split_into_blocks(lines, BLOCK)],
    }
    knobs = {"durability": "always", "compression": "none"}
    rounds = dict.fromkeys(works, effort.few_rounds)
    rounds[_FIGURED] = SHORT_TURNS * effort.rounds
    found = {
        name: compare_writing(effort, Task(work, publish_until_acked, knobs), rounds[name])
        for name, work in works.items()
    }
    how = (
        "`always`, `compression: none`, 100-byte events in blocks of 1,000 from one thread, with "
        "ack callbacks, until all events are acked as `persisted` / a bare file that " + _SAME
    )
    note = (
        "`durability: always`, ack callbacks, 100-byte events, until the last ack. The bare file "
        + _SAME
        + "."
    )
    rows = {name: each.row for name, each in found.items()}
    return Outcome(
        [make_figure("synced_write_ratio", found[_FIGURED].ratio, how, at_least=0.7)],
        [Table("Disk kind: synced writing with ack callbacks", "", COLUMNS, rows, note)],
    )


def run(effort: Effort) -> Outcome:
    """Run both comparisons."""
    outcome = measure_writing(effort)
    outcome.add(measure_synced_writing(effort))
    return outcome
