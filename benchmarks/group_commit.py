"""Publishers that wait for the disk: the gain if they share a sync."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

from benchmarks.contestant import Contestant
from benchmarks.effort import Effort
from benchmarks.lines import make_log_lines
from benchmarks.measure import SHORT_TURNS, Series, alternate
from benchmarks.outcome import Cell, Outcome, Table, make_figure
from benchmarks.own_contestants import AlwaysDisk
from benchmarks.peer_contestants import PersistFileAutosave, PersistSqlite, SyncedFile

Entrant = tuple[type[Contestant], int]
"""A contestant, and the number of threads that put events in."""

PRODUCERS = (1, 8, 64)
FIGURED = 100
"""The size of the events for the figures."""


def measure_synced_puts(
    effort: Effort, kind: type[Contestant], producers: int, seconds: float, size: int
) -> float:
    """Return events per second of threads that wait until each event is on the disk."""
    lines = make_log_lines(64, size)
    with effort.place() as directory:
        contestant = kind(directory, 1_000_000)
        counts: list[int] = []
        start = threading.Barrier(producers + 1)
        over = threading.Event()

        def put_until_over(line: bytes) -> None:
            put, count = contestant.put, 0
            start.wait()
            while not over.is_set():
                put(line)
                count += 1
            counts.append(count)

        threads = [
            threading.Thread(target=put_until_over, args=(line,)) for line in lines[:producers]
        ]
        for thread in threads:
            thread.start()
        start.wait()
        started = time.perf_counter()
        time.sleep(seconds)
        over.set()
        for thread in threads:
            thread.join()
        elapsed = time.perf_counter() - started
        contestant.close()
    return sum(counts) / elapsed


def _make_name(kind: type[Contestant], producers: int) -> str:
    return f"{kind.label}, {producers} producer{'s' if producers > 1 else ''}"


def run(effort: Effort) -> Outcome:
    """Measure 1, 8 and 64 publishers, and other queues with 1 and 8."""
    seconds = effort.seconds(0.2, 1)
    entrants: list[Entrant] = [
        *((AlwaysDisk, producers) for producers in PRODUCERS),
        (SyncedFile, 1),
        (PersistFileAutosave, 1),
        (PersistSqlite, 1),
        (PersistSqlite, 8),
    ]
    figured: list[Entrant] = [(AlwaysDisk, 1), (AlwaysDisk, 64), (PersistFileAutosave, 1)]

    def compare(some: Sequence[Entrant], size: int, rounds: int) -> dict[str, list[float]]:
        return alternate(
            {
                _make_name(kind, producers): partial(
                    measure_synced_puts, effort, kind, producers, seconds, size
                )
                for kind, producers in some
            },
            rounds,
        )

    found = {size: compare(entrants, size, effort.few_rounds) for size in (FIGURED, 1_000)}
    found[FIGURED] |= compare(figured, FIGURED, SHORT_TURNS * effort.rounds)
    rows = {
        name: [Cell.of(Series(found[size][name])) for size in (FIGURED, 1_000)]
        for name in found[FIGURED]
    }
    own = {count: Series(found[FIGURED][_make_name(AlwaysDisk, count)]) for count in PRODUCERS}
    peer = Series(found[FIGURED][_make_name(PersistFileAutosave, 1)])
    how = "100-byte events one by one, `always`: 64 blocking producers / 1 blocking producer"
    synced = (
        "100-byte events one by one: `always`, 1 blocking producer / persist-queue's file queue "
        "with `autosave`, which syncs only every hundredth event"
    )
    return Outcome(
        [
            make_figure("group_commit_ratio", own[64].over(own[1]), how, unit="×", at_least=10),
            make_figure("vs_persist_queue_synced", own[1].over(peer), synced, unit="×"),
        ],
        [
            Table(
                "Durability always: publishers that wait for the disk",
                "events/s",
                ("100 B", "1 KB"),
                rows,
                "Each publisher puts one event, waits until it is on the disk, and puts the next. "
                "persist-queue's SQLite queue commits each event; each commit syncs its WAL "
                "(`synchronous=FULL` is SQLite's default).",
            )
        ],
    )
