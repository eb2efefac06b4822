"""The disk kind against the bare file system: the same bytes, the same pieces, the same syncs."""

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
from benchmarks.lines import in_blocks, log_lines
from benchmarks.measure import Series, alternate
from benchmarks.outcome import Cell, Outcome, Table, figure
from benchmarks.publishing import BLOCK, SIZES
from turnlane.events import Block
from turnlane.queues.log.files import Buffers, Disk

SYNC = -1
"""Stands in a trace for a sync; other numbers are the bytes of a write."""


class TracingDisk(Disk):
    """A real disk that notes the writes and syncs of chunk files, for the bare file to repeat."""

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
    """What the queue wrote last: the bare file writes it after it."""

    stored: bytes = b""
    trace: list[int] = field(default_factory=list)


class Speed(NamedTuple):
    """Bytes of chunk files a second, and events a second."""

    bytes: float
    events: float


Publish = Callable[[turnlane.Queue, Sequence[Any]], None]


def publish_until_persisted(queue: turnlane.Queue, blocks: Sequence[Block]) -> None:
    """Blocks, and one last event whose publisher waits for the sync."""
    producer = queue.producer()
    for block in blocks:
        producer.publish_block(block)
    queue.producer(ack="persisted").publish(b"the end")


def publish_until_acked(queue: turnlane.Queue, work: Sequence[Block | bytes]) -> None:
    """Blocks or single values, until the callback has heard that all are persisted."""
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


def write_queue(
    effort: Effort, work: Sequence[Any], publish: Publish, durability: str, kept: Recording
) -> Speed:
    disk = TracingDisk()
    with effort.place() as directory:
        path = directory / "queue"
        queue = turnlane.open_queue(kind="disk", path=path, durability=durability, disk=disk)
        started = time.perf_counter()
        publish(queue, work)
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


def compare_writing(
    effort: Effort, work: Sequence[Any], publish: Publish, durability: str
) -> tuple[Series, Series, Series]:
    """Bytes/s of the queue and of the bare file, and the queue's events/s."""
    kept = Recording()
    found = alternate(
        {
            "queue": partial(write_queue, effort, work, publish, durability, kept),
            "bare": partial(write_bare, effort, kept),
        },
        effort.rounds,
    )
    return (
        Series([speed.bytes for speed in found["queue"]]),
        Series([speed.bytes for speed in found["bare"]]),
        Series([speed.events for speed in found["queue"]]),
    )


# ── writing ───────────────────────────────────────────────────────────────────────────────────────

MEGABYTE = 1e6


def _row(own: Series, bare: Series, events: Series) -> list[Cell | None]:
    megabytes = [series.map(lambda speed: speed / MEGABYTE) for series in (own, bare)]
    return [Cell.of(each) for each in (*megabytes, own.over(bare), events)]


_COLUMNS = ("queue, MB/s", "bare file, MB/s", "ratio", "queue, events/s")


def writing(effort: Effort) -> Outcome:
    ratios, rows = [], {}
    for name, size in SIZES.items():
        lines = log_lines(effort.events(200_000_000 // size, 500_000_000 // size), size)
        work = [turnlane.block_of(values) for values in in_blocks(lines, BLOCK)]
        own, bare, events = compare_writing(effort, work, publish_until_persisted, "interval")
        ratios.append(own.over(bare))
        rows[f"{name}, blocks of 1,000"] = _row(own, bare, events)
    note = (
        "`durability: interval`, default settings, until everything is persisted. The bare file "
        "gets the bytes of the chunk files in the same pieces, with a sync wherever the queue "
        "synced a chunk; the journal is the queue's own expense."
    )
    how = (
        "blocks of 1,000 events, `interval`, until all is synced / a bare file that gets the same "
        "stored bytes in the same writes and syncs; the worse of 100 B and 1 KB"
    )
    worst = min(ratios, key=lambda series: series.median)
    return Outcome(
        [figure("disk_write_ratio", worst, how, at_least=0.7)],
        [Table("Disk kind: writing", "", _COLUMNS, rows, note)],
    )


def synced_writing(effort: Effort) -> Outcome:
    lines = log_lines(effort.events(300_000, 1_000_000), 100)
    works: dict[str, Sequence[Any]] = {
        "single events, one thread": lines[: effort.events(100_000)],
        "blocks of 100": [turnlane.block_of(values) for values in in_blocks(lines, 100)],
        "blocks of 1,000": [turnlane.block_of(values) for values in in_blocks(lines, BLOCK)],
    }
    rows, ratios = {}, {}
    for name, work in works.items():
        own, bare, events = compare_writing(effort, work, publish_until_acked, "always")
        rows[name] = _row(own, bare, events)
        ratios[name] = own.over(bare)
    how = (
        "`always`, 100-byte events in blocks of 100 from one thread with ack callbacks, until all "
        "are acked `persisted` / a bare file with the same bytes, writes and syncs"
    )
    note = "`durability: always`, ack callbacks, 100-byte events, until the last ack."
    return Outcome(
        [figure("synced_write_ratio", ratios["blocks of 100"], how, at_least=0.7)],
        [Table("Disk kind: synced writing with ack callbacks", "", _COLUMNS, rows, note)],
    )


def run(effort: Effort) -> Outcome:
    """All of it."""
    outcome = writing(effort)
    outcome.add(synced_writing(effort))
    return outcome
