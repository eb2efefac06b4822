"""Reading a backlog from the disk, compared with bare reads of the same files."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import turnlane
from benchmarks.effort import Effort
from benchmarks.lines import make_log_lines, split_into_blocks
from benchmarks.measure import SHORT_TURNS, Series, alternate, freeze_gc
from benchmarks.outcome import Cell, Figure, Outcome, Table, make_figure
from benchmarks.own_contestants import READ_BATCH
from benchmarks.publish_and_read import BLOCK, SIZES

PIECE = 1 << 20


def fill(path: Path, events: int, size: int, compression: str) -> None:
    """Make a queue with a backlog, closed and synced."""
    with turnlane.open_queue(
        kind="disk", path=path, max_bytes="16Gi", compression=compression
    ) as queue:
        producer = queue.producer()
        for values in split_into_blocks(make_log_lines(events, size), BLOCK):
            producer.publish_block(turnlane.block_of(values))


def link_copy(path: Path, copy: Path) -> None:
    """Make a copy that shares the chunks and their page cache; reading a queue removes chunks."""
    copy.mkdir()
    for file in path.iterdir():
        if file.suffix == ".chunk":
            os.link(file, copy / file.name)
        else:
            shutil.copy(file, copy)


def read_queue(effort: Effort, path: Path, events: int, before: Callable[[], None]) -> float:
    """Return bytes per second of get and done, for a queue with no events in memory."""
    with effort.place() as directory:
        link_copy(path, directory / "queue")
        queue = turnlane.open_queue(
            kind="disk",
            path=directory / "queue",
            max_bytes="16Gi",
            dequeue_batch_size=READ_BATCH,
        )
        before()
        taken = 0
        with freeze_gc():
            started = time.perf_counter()
            while taken < events:
                batch = queue.get(timeout=30)
                taken += batch.block.num_rows
                batch.done()
            seconds = time.perf_counter() - started
        queue.close()
    return count_stored_bytes(path) / seconds


def read_bare(path: Path, before: Callable[[], None]) -> float:
    """Return bytes per second of ``preadv`` in pieces of 1 MiB, always into the same memory."""
    piece = bytearray(PIECE)
    before()
    total = 0
    with freeze_gc():
        started = time.perf_counter()
        for chunk in list_chunks(path):
            fd = os.open(chunk, os.O_RDONLY)
            at = 0
            while got := os.preadv(fd, [piece], at):
                at += got
            os.close(fd)
            total += at
        return total / (time.perf_counter() - started)


def list_chunks(path: Path) -> list[Path]:
    """Return the chunk files, oldest first."""
    return sorted(path.glob("*.chunk"))


def count_stored_bytes(path: Path) -> int:
    """Return the size of all chunk files."""
    return sum(chunk.stat().st_size for chunk in list_chunks(path))


def load_into_page_cache(path: Path) -> None:
    """Read the chunks into the page cache."""
    for chunk in list_chunks(path):
        chunk.read_bytes()


def drop_from_page_cache(path: Path) -> None:
    """Drop the chunks from the page cache."""
    for chunk in list_chunks(path):
        fd = os.open(chunk, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def compare_reading(
    effort: Effort, path: Path, events: int, prepare: Callable[[Path], None], rounds: int
) -> tuple[Series, Series]:
    """Return bytes/s of the queue and of bare reads."""
    before = partial(prepare, path)
    found = alternate(
        {
            "queue": partial(read_queue, effort, path, events, before),
            "bare": partial(read_bare, path, before),
        },
        rounds,
    )
    return Series(found["queue"]), Series(found["bare"])


def _make_row(own: Series, bare: Series, per_event: float) -> list[Cell | None]:
    columns = (
        own.map(lambda speed: speed / 1e6),
        bare.map(lambda speed: speed / 1e6),
        own.over(bare),
        own.map(lambda speed: speed / per_event),
    )
    return [Cell.of(each) for each in columns]


def run(effort: Effort) -> Outcome:
    """Measure both sizes with a warm and a cold page cache; compressed only with a warm one."""
    rows: dict[str, Sequence[Cell | None]] = {}
    ratios: dict[str, list[Series]] = {}
    rounds = {COLD: SHORT_TURNS * effort.rounds, WARM: effort.rounds}
    for name, size in SIZES.items():
        events = effort.events(60_000_000 // size, 500_000_000 // size)
        for compression, cases in _CASES.items():
            with effort.place() as directory:
                path = directory / "full"
                fill(path, events, size, compression)
                for case, prepare in cases.items():
                    turns = rounds.get(case, effort.few_rounds)
                    own, bare = compare_reading(effort, path, events, prepare, turns)
                    rows[f"{name}, {case}"] = _make_row(
                        own, bare, count_stored_bytes(path) / events
                    )
                    ratios.setdefault(case, []).append(own.over(bare))
    return Outcome(_make_figures(ratios), [Table(_TITLE, "", _COLUMNS, rows, _NOTE)])


_TITLE = "Disk kind: reading a backlog"
_COLUMNS = ("queue, MB/s", "bare reads, MB/s", "ratio", "queue, events/s")
WARM, COLD = "page cache warm", "page cache cold"
_CASES = {
    "none": {WARM: load_into_page_cache, COLD: drop_from_page_cache},
    "snappy": {f"{WARM}, all compressed": load_into_page_cache},
}
_NOTE = (
    "Bytes are the bytes of the chunk files, with `compression: none` unless the row says "
    "otherwise. The queue checks the checksum of every frame, makes Arrow blocks, records every "
    "ack in its journal and deletes the chunks; compressed frames become more bytes than it "
    "reads. The queue reads its files only if events are not in memory: for a backlog larger than "
    "its memory, and after a restart. Then the disk has to be read, so `disk_read_ratio` is "
    "measured after the files were dropped from the page cache (`POSIX_FADV_DONTNEED`) before "
    "each turn of the queue and of the bare reader. With a warm page cache, the bare reader only "
    "copies memory to the same 1 MiB and never uses the bytes. A queue that copies as fast and "
    "only checks the checksum as well, which takes 50 to 200 µs/MB here, would reach between a "
    "half and four fifths of that. Reading the page cache in place (`mmap`) would save the copy, "
    "but then a bad sector or a truncated file ends the process instead of raising an error. The "
    "ratio with a warm page cache is `disk_read_warm_ratio`, without a target."
)


def _make_figures(ratios: dict[str, list[Series]]) -> list[Figure]:
    how = (
        f"`get()` and `done()` of a backlog on disk after opening the queue, at most "
        f"{READ_BATCH:,} events in a batch / `preadv` of the same files in pieces of 1 MiB into "
        "one buffer; {}; the worse of 100 B and 1 KB"
    )
    worst = {case: min(each, key=lambda one: one.median) for case, each in ratios.items()}
    return [
        make_figure("disk_read_ratio", worst[COLD], how.format(COLD), at_least=0.7),
        make_figure("disk_read_warm_ratio", worst[WARM], how.format(WARM)),
    ]
