"""Reading a backlog back from the disk, against bare reads of the same files."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import turnlane
from benchmarks.effort import Effort
from benchmarks.lines import in_blocks, log_lines
from benchmarks.measure import SHORT_TURNS, Series, alternate, undisturbed
from benchmarks.ours import READ_BATCH
from benchmarks.outcome import Cell, Figure, Outcome, Table, figure
from benchmarks.publishing import BLOCK, SIZES

PIECE = 1 << 20


def fill(path: Path, events: int, size: int, compression: str) -> None:
    """A queue with a backlog, closed and synced."""
    with turnlane.open_queue(
        kind="disk", path=path, max_bytes="16Gi", compression=compression
    ) as queue:
        producer = queue.producer()
        for values in in_blocks(log_lines(events, size), BLOCK):
            producer.publish_block(turnlane.block_of(values))


def linked(path: Path, copy: Path) -> None:
    """A copy that shares the chunks, and so their page cache: reading a queue empties it."""
    copy.mkdir()
    for file in path.iterdir():
        if file.suffix == ".chunk":
            os.link(file, copy / file.name)
        else:
            shutil.copy(file, copy)


def read_queue(effort: Effort, path: Path, events: int, before: Callable[[], None]) -> float:
    """Bytes a second of get and done, nothing being in memory."""
    with effort.place() as directory:
        linked(path, directory / "queue")
        queue = turnlane.open_queue(
            kind="disk",
            path=directory / "queue",
            max_bytes="16Gi",
            dequeue_batch_size=READ_BATCH,
        )
        before()
        taken = 0
        with undisturbed():
            started = time.perf_counter()
            while taken < events:
                batch = queue.get(timeout=30)
                taken += batch.block.num_rows
                batch.done()
            seconds = time.perf_counter() - started
        queue.close()
    return stored_bytes(path) / seconds


def read_bare(path: Path, before: Callable[[], None]) -> float:
    """Bytes a second of ``preadv`` in pieces of 1 MiB, into the same memory each time."""
    piece = bytearray(PIECE)
    before()
    total = 0
    with undisturbed():
        started = time.perf_counter()
        for chunk in chunks(path):
            fd = os.open(chunk, os.O_RDONLY)
            at = 0
            while got := os.preadv(fd, [piece], at):
                at += got
            os.close(fd)
            total += at
        return total / (time.perf_counter() - started)


def chunks(path: Path) -> list[Path]:
    """The chunk files, oldest first."""
    return sorted(path.glob("*.chunk"))


def stored_bytes(path: Path) -> int:
    """The size of all chunk files."""
    return sum(chunk.stat().st_size for chunk in chunks(path))


def warm(path: Path) -> None:
    """Bring the chunks into the page cache."""
    for chunk in chunks(path):
        chunk.read_bytes()


def cool(path: Path) -> None:
    """Drop the chunks from the page cache."""
    for chunk in chunks(path):
        fd = os.open(chunk, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def compare_reading(
    effort: Effort, path: Path, events: int, prepare: Callable[[Path], None], rounds: int
) -> tuple[Series, Series]:
    """Bytes/s of the queue and of bare reads."""
    before = partial(prepare, path)
    found = alternate(
        {
            "queue": partial(read_queue, effort, path, events, before),
            "bare": partial(read_bare, path, before),
        },
        rounds,
    )
    return Series(found["queue"]), Series(found["bare"])


def _row(own: Series, bare: Series, per_event: float) -> list[Cell | None]:
    columns = (
        own.map(lambda speed: speed / 1e6),
        bare.map(lambda speed: speed / 1e6),
        own.over(bare),
        own.map(lambda speed: speed / per_event),
    )
    return [Cell.of(each) for each in columns]


def run(effort: Effort) -> Outcome:
    """Warm and cold, both sizes; compressed, warm."""
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
                    rows[f"{name}, {case}"] = _row(own, bare, stored_bytes(path) / events)
                    ratios.setdefault(case, []).append(own.over(bare))
    return Outcome(_figures(ratios), [Table(_TITLE, "", _COLUMNS, rows, _NOTE)])


_TITLE = "Disk kind: reading a backlog"
_COLUMNS = ("queue, MB/s", "bare reads, MB/s", "ratio", "queue, events/s")
WARM, COLD = "page cache warm", "page cache cold"
_CASES = {
    "none": {WARM: warm, COLD: cool},
    "snappy": {f"{WARM}, all compressed": warm},
}
_NOTE = (
    "Bytes are those of the chunk files, `compression: none` unless it says otherwise. The queue "
    "checks every frame's checksum, makes Arrow blocks of it, records every ack in its journal and "
    "deletes the chunks; compressed, it unpacks more bytes than it reads. What the queue has in "
    "memory it never reads from its files: it does so for a backlog larger than that, or after a "
    "restart, and then the disk has to be read. So `disk_read_ratio` is measured with the page "
    "cache emptied of the files (`POSIX_FADV_DONTNEED`) before each turn, the queue's and the bare "
    "reader's. With all of it in the page cache, the bare reader merely copies memory to memory, "
    "again and again to the same 1 MiB, and never looks at what it copied. A queue that copies as "
    "fast and only checks the checksum as well, which takes 50 to 200 µs/MB here, would come to "
    "between a half and four fifths of that; reading the page cache in place (`mmap`) would save "
    "the copy, but then a bad sector or a truncated file ends the process instead of raising an "
    "error. That ratio is given as `disk_read_warm_ratio`, without a target."
)


def _figures(ratios: dict[str, list[Series]]) -> list[Figure]:
    how = (
        f"`get()` and `done()` of a backlog on disk, the queue just opened, {READ_BATCH:,} events "
        "a batch at most / `preadv` of the same files in pieces of 1 MiB into one buffer; {}; the "
        "worse of 100 B and 1 KB"
    )
    worst = {case: min(each, key=lambda one: one.median) for case, each in ratios.items()}
    return [
        figure("disk_read_ratio", worst[COLD], how.format(COLD), at_least=0.7),
        figure("disk_read_warm_ratio", worst[WARM], how.format(WARM)),
    ]
