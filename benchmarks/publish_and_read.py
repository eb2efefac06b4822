"""Publishing and reading, compared with other queues for Python."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import turnlane
from benchmarks.contestant import Contestant
from benchmarks.effort import Effort
from benchmarks.lines import make_log_lines, split_into_blocks
from benchmarks.measure import Series, alternate, freeze_gc
from benchmarks.outcome import Cell, Figure, Outcome, Table, make_figure
from benchmarks.own_contestants import Disk, DiskValues, Memory, Turnlane
from benchmarks.peer_contestants import BareFile, PersistFile, PersistSqlite, Sqlite, StandardQueue

SIZES = {"100 B": 100, "1 KB": 1_000}
BLOCK = 1_000
THREADS = 8

Kind = type[Contestant]


class Timing(NamedTuple):
    """Seconds per event: until the last call returned, and until all events were on the disk."""

    called: float
    safe: float


Measurement = Callable[[Effort, Kind, int], Timing]
Timings = Mapping[str, Sequence[Timing]]


def publish_one_by_one(effort: Effort, kind: Kind, size: int) -> Timing:
    lines = make_log_lines(_count_events(effort, kind, size), size)
    with effort.place() as directory:
        contestant = kind(directory, len(lines))
        put = contestant.put
        with freeze_gc():
            started = time.perf_counter()
            for line in lines:
                put(line)
            return _finish(contestant, started, len(lines))


def blocks(effort: Effort, kind: Kind, size: int) -> Timing:
    lines = make_log_lines(_count_block_events(effort, kind, size), size)
    with effort.place() as directory:
        contestant = kind(directory, len(lines))
        assert isinstance(contestant, Turnlane)
        publish = contestant.producer.publish_block
        ready = [turnlane.block_of(values) for values in split_into_blocks(lines, BLOCK)]
        with freeze_gc():
            started = time.perf_counter()
            for block in ready:
                publish(block)
            return _finish(contestant, started, len(lines))


def publish_blocks_from_bytes(effort: Effort, kind: Kind, size: int) -> Timing:
    lines = make_log_lines(_count_block_events(effort, kind, size), size)
    with effort.place() as directory:
        contestant = kind(directory, len(lines))
        grouped = split_into_blocks(lines, BLOCK)
        with freeze_gc():
            started = time.perf_counter()
            for values in grouped:
                contestant.put_block(values)
            return _finish(contestant, started, len(lines))


def _count_events(effort: Effort, kind: Kind, size: int) -> int:
    return effort.events(kind.events if size <= 100 else kind.events // 2)


def _count_block_events(effort: Effort, kind: Kind, size: int) -> int:
    """Return how many events to publish in blocks: more than one by one, because it is fast."""
    return effort.events(5 * kind.events * 100 // size)


def publish_from_threads(effort: Effort, kind: Kind, size: int) -> Timing:
    lines = make_log_lines(_count_events(effort, kind, size), size)
    shares = [lines[number::THREADS] for number in range(THREADS)]
    with effort.place() as directory:
        contestant = kind(directory, len(lines))
        start = threading.Barrier(THREADS + 1)
        threads = [
            threading.Thread(target=_put_all, args=(contestant.put, share, start))
            for share in shares
        ]
        for thread in threads:
            thread.start()
        with freeze_gc():
            start.wait()
            started = time.perf_counter()
            for thread in threads:
                thread.join()
            return _finish(contestant, started, len(lines))


def _put_all(
    put: Callable[[bytes], object], lines: Sequence[bytes], start: threading.Barrier
) -> None:
    start.wait()
    for line in lines:
        put(line)


def read_published(effort: Effort, kind: Kind, size: int) -> Timing:
    """Take and settle events that were just published; a disk queue has them in memory."""
    lines = make_log_lines(_count_events(effort, kind, size), size)
    with effort.place() as directory:
        contestant = kind(directory, len(lines))
        for values in split_into_blocks(lines, BLOCK):
            contestant.put_block(values)
        with freeze_gc():
            started = time.perf_counter()
            contestant.drain(len(lines))
            elapsed = (time.perf_counter() - started) / len(lines)
        contestant.close()
    return Timing(elapsed, elapsed)


def _finish(contestant: Contestant, started: float, events: int) -> Timing:
    called = time.perf_counter() - started
    contestant.secure()
    safe = time.perf_counter() - started
    contestant.close()
    return Timing(called / events, safe / events)


# ── comparisons ────────────────────────────────────────────────────────────────────


def run(effort: Effort) -> Outcome:
    """Run all comparisons."""
    outcome = Outcome()
    singles = _compare(
        effort,
        publish_one_by_one,
        (Memory, Disk, BareFile, StandardQueue, PersistFile, PersistSqlite, Sqlite),
    )
    ready = _compare(effort, blocks, (Memory, Disk))
    given = _compare(effort, publish_blocks_from_bytes, (Memory, Disk, BareFile, Sqlite))
    threads = _compare(
        effort,
        publish_from_threads,
        (Memory, Disk, StandardQueue, PersistFile, PersistSqlite, Sqlite),
        figured=(),
    )
    read = _compare(
        effort,
        read_published,
        (Memory, Disk, DiskValues, StandardQueue, PersistFile, PersistSqlite, Sqlite),
        figured=(),
    )
    outcome.tables += [
        _make_table("Publish one by one, one thread", singles, _SAFE),
        _make_table("Publish ready-made blocks of 1,000", ready, _AS_ABOVE),
        _make_table("Publish blocks of 1,000, made of Python bytes", given, _AS_ABOVE),
        _make_table("Publish one by one from 8 threads", threads, _AS_ABOVE),
        _make_table("Get and done", read, _READ, safe=False),
    ]
    outcome.figures += [
        _make_publish_one(singles["100 B"]),
        _make_publish_block(ready["100 B"]),
        _compare_with_persist_queue(singles["100 B"]),
        _compare_with_sqlite(given["100 B"]),
    ]
    return outcome


_SAFE = (
    "Until the last call returned. `safe`: until all events were on the disk, with a last sync for "
    "the bare file, persist-queue and SQLite, as for turnlane. SQLite commits 1,000 events at a "
    "time with `synchronous=NORMAL`. persist-queue decides itself when it syncs."
)
_AS_ABOVE = "`safe` as above."
_READ = (
    "The events were published just before. turnlane reads batches of 10,000 events, SQLite 1,000 "
    "in a transaction, the others one by one. turnlane returns Arrow blocks; in the row `values as "
    "bytes` every value becomes a Python object."
)


def _compare(
    effort: Effort,
    measurement: Measurement,
    kinds: Sequence[Kind],
    *,
    figured: Sequence[str] = ("100 B",),
) -> dict[str, Timings]:
    return {
        name: alternate(
            {kind.label: partial(measurement, effort, kind, size) for kind in kinds},
            effort.rounds if name in figured else effort.few_rounds,
        )
        for name, size in SIZES.items()
    }


def _make_table(title: str, found: Mapping[str, Timings], note: str, *, safe: bool = True) -> Table:
    labels = next(iter(found.values()))
    rows = {
        label: [
            cell for timings in found.values() for cell in _make_cells(timings[label])[: 1 + safe]
        ]
        for label in labels
    }
    columns = [text for size in found for text in (size, f"{size}, safe")[: 1 + safe]]
    return Table(title, "events/s", columns, rows, note)


def _make_cells(timings: Sequence[Timing]) -> list[Cell]:
    called = Cell.of(_get_called(timings).map(lambda seconds: 1 / seconds))
    safe = Cell.of(_get_safe(timings).map(lambda seconds: 1 / seconds))
    return [called, safe]


def _get_called(timings: Sequence[Timing]) -> Series:
    return Series([timing.called for timing in timings])


def _get_safe(timings: Sequence[Timing]) -> Series:
    return Series([timing.safe for timing in timings])


def _find_worse(timings: Timings, part: Callable[[Sequence[Timing]], Series]) -> Series:
    both = [part(timings[kind.label]).map(lambda seconds: seconds * 1e6) for kind in (Memory, Disk)]
    return max(both, key=lambda series: series.median)


def _make_publish_one(timings: Timings) -> Figure:
    how = (
        "`publish()` of 100-byte events from one thread; the worse of a memory queue and a disk "
        "queue with `interval`, which writes at the same time"
    )
    return make_figure(
        "publish_one_us", _find_worse(timings, _get_called), how, unit="µs/event", at_most=2
    )


def _make_publish_block(timings: Timings) -> Figure:
    how = (
        "`publish_block()` of ready-made blocks of 1,000 events, 100-byte events, one thread; the "
        "worse of a memory queue and a disk queue with `interval`; for the disk queue until the "
        "last event is synced, because its buffer would hide the time for writing"
    )
    return make_figure(
        "publish_block_us", _find_worse(timings, _get_safe), how, unit="µs/event", at_most=0.3
    )


def _compare_with_persist_queue(timings: Timings) -> Figure:
    ratio = _get_safe(timings[PersistFile.label]).over(_get_safe(timings[Disk.label]))
    how = (
        "100-byte events one by one until all are on the disk: a disk queue with `interval` / "
        "persist-queue's file queue without `autosave`"
    )
    return make_figure("vs_persist_queue", ratio, how, unit="×", at_least=1)


def _compare_with_sqlite(timings: Timings) -> Figure:
    ratio = _get_safe(timings[Sqlite.label]).over(_get_safe(timings[Disk.label]))
    how = (
        "100-byte events from Python bytes in blocks of 1,000 until all are on the disk: a disk "
        "queue with `interval` / SQLite in WAL mode, `executemany` of 1,000 events in a "
        "transaction, `synchronous=NORMAL`. After a power cut, both lack at most the last moments; "
        "both are synced at the end"
    )
    return make_figure("vs_sqlite", ratio, how, unit="×", at_least=1)
