"""A process that is killed at any moment loses no event. See ``killed_process`` and ``oracle``.

The lives of a loop share one directory: each one starts with the files that the last kill left.
Every run is different; ``TURNLANE_SEED=…``, which a failure prints, repeats its choices.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import IN_CI
from tests.recovery.killed_process import (
    Closed,
    Got,
    Opened,
    Orders,
    Plan,
    Report,
    Settled,
    Settling,
    live,
)
from tests.recovery.oracle import Oracle
from turnlane.errors import QueueClosed
from turnlane.queues import open_queue
from turnlane.queues.buffered import BufferedQueue

SEED = int(os.environ.get("TURNLANE_SEED") or time.time())
PATIENCE = 60.0
"""Seconds after which a life that neither ends nor reports counts as stuck."""


@dataclass
class Loop:
    """Runs lives in one directory, and passes their reports to the oracle."""

    process_server: ForkServerContext
    knobs: dict[str, Any]
    oracle: Oracle
    rng: random.Random = field(default_factory=lambda: random.Random(SEED))
    lives: int = 0
    kills: int = 0

    def __post_init__(self) -> None:
        print(f"TURNLANE_SEED={SEED}")  # noqa: T201 - pytest shows it with a failure

    def live(self, *, kill_at: int | None = None, **orders: Any) -> bool:
        """Run one life; true if it was killed, by a planned fault or at report ``kill_at``.

        Counted in reports and not in time: a busy machine then tests as much.
        """
        order = Orders(
            life=self.lives,
            seed=SEED,
            knobs=self.knobs,
            resend_from=self.oracle.resend_from,
            **orders,
        )
        self.lives += 1
        ours, theirs = self.process_server.Pipe(duplex=False)
        child = self.process_server.Process(target=live, args=(order, theirs), daemon=True)
        child.start()
        theirs.close()
        reports = self.listen(child, ours, kill_at)
        child.join()
        self.oracle.hear(order, reports)
        killed = child.exitcode == -signal.SIGKILL
        self.kills += killed
        child.close()
        return killed

    def listen(self, child: BaseProcess, pipe: Connection, kill_at: int | None) -> list[Report]:
        """Read the pipe to its end, and kill the child at its report ``kill_at``."""
        reports: list[Report] = []
        with pipe, contextlib.suppress(EOFError):
            while kill_at is None or len(reports) < kill_at:
                assert pipe.poll(PATIENCE), f"stuck after {reports[-3:]}"
                reports.append(pipe.recv())
            # Some milliseconds later, because no report is sent during a write.
            wait([child.sentinel], self.rng.expovariate(1000))
            child.kill()
            while True:
                reports.append(pipe.recv())
        return reports

    def drain(self) -> None:
        """Take out all remaining events, and check that none is missing."""
        started = time.perf_counter()
        queue = open_queue(**self.knobs)
        assert isinstance(queue, BufferedQueue)
        reports: list[Report] = [Opened.by(queue, started)]
        queue.finish()
        reports += drain_queue(queue)
        ledger = queue.stats().ledger.as_dict()
        queue.close()
        orders = Orders(self.lives, SEED, self.knobs, self.oracle.resend_from, 0)
        self.oracle.hear(orders, [*reports, Closed(ledger)])
        self.oracle.check_all_there()
        self.oracle.check_order()
        with open_queue(**self.knobs) as again:
            assert again.stats().ledger.as_dict() == ledger
            assert ledger["pending"] == 0

    def summary(self, what: str) -> None:
        """Describe the lives for people."""
        times = [seconds * 1000 for seconds in self.oracle.recoveries]
        print(  # noqa: T201 - the point of it
            f"\n{what}: {self.kills} kills in {self.lives} lives, "
            f"{self.oracle.persisted_total} events persisted, {len(self.oracle.gone)} settled; "
            f"opening took {statistics.median(times):.1f} ms (median), {max(times):.1f} ms (most)"
        )


def drain_queue(queue: BufferedQueue) -> Iterator[Report]:
    """Settle everything in a queue that is finished."""
    while True:
        try:
            batch = queue.get()
        except QueueClosed:
            return
        yield Got.of(batch)
        yield Settling(batch.place.first, batch.place.end)
        batch.done()
        yield Settled(batch.place.first, batch.place.end)


def disk_knobs(path: Path, durability: str) -> dict[str, Any]:
    """Knobs of a queue that starts and deletes chunks all the time."""
    pace = {"interval": "sync_interval", "never": "stale_flush"}.get(durability)
    return {
        "kind": "disk",
        "path": path,
        "durability": durability,
        "chunk_size": "8Ki",
        "memory_bytes": "32Ki",
        "write_buffer": "4Ki",
        **({} if pace is None else {pace: "20ms"}),
    }


@pytest.mark.parametrize("durability", ["always", "interval", "never"])
def test_kill_at_a_random_moment_loses_no_persisted_event(
    process_server: ForkServerContext, tmp_path: Path, durability: str
) -> None:
    """Persisted events survive, and settled events do not come back.

    This holds without syncs too: the operating system keeps written data.
    """
    knobs = disk_knobs(tmp_path / "queue", durability)
    loop = Loop(process_server, knobs, Oracle(keeps_offsets=True))
    wanted = 45 if IN_CI else 8
    while loop.kills < wanted:
        loop.live(
            kill_at=loop.rng.choice([0, loop.rng.randint(1, 20), loop.rng.randint(20, 200)]),
            appetite=loop.rng.choice([0.2, 0.8, 1.5, 3.0]),
            close=loop.rng.random() < 0.2,
        )
        if loop.lives % 20 == 0:
            loop.drain()
    loop.drain()
    loop.summary(f"disk, {durability}")


def kill(op: str, nth: int, match: str = "") -> Plan:
    """Plan a kill instead of the nth such call."""
    return [("kill", {"op": op, "nth": nth, "match": match})]


def tear(nth: int, keep: int, match: str) -> Plan:
    """Plan a kill during the nth write."""
    return [("tear", {"nth": nth, "keep_bytes": keep, "match": match, "kill": True})]


def kill_during_rewrite(op: str, nth: int) -> Plan:
    """Plan a failed sync, and a kill while the unsynced events are rewritten."""
    return [
        ("fail", {"op": "sync", "nth": 3, "match": ".chunk"}),
        ("kill_after_failure", {"op": op, "nth": nth}),
    ]


def fault_points() -> list[Plan]:
    """Return a fault at every disk operation; torn files first, for the next life."""
    plans: list[Plan] = []
    for nth in range(1, 13):
        keep = (0, 1, 7, 31, 32, 33, 100, 500, 1000, 3000, 5000, 8000)[nth - 1]
        plans += [tear(nth, keep, ".chunk"), kill("truncate", 1), tear(nth, keep % 48, "journal")]
        plans += [kill("write", nth, ".chunk"), kill("sync", nth, ".chunk")]
    for nth in range(1, 7):
        plans += [kill("write", nth, "journal"), kill("sync", nth, "journal")]
        plans += [kill("rename", nth), kill("unlink", nth), kill("sync_directory", nth)]
        plans += [kill("open", 3 * nth), kill("close", 2 * nth), kill("read", 3 * nth)]
        plans += [kill("size", 2 * nth), kill("write", 7 * nth), kill("sync", 5 * nth)]
    for nth in (1, 2):
        plans += [kill("listing", nth)]
        plans += [kill_during_rewrite(op, nth) for op in ("open", "write", "sync")]
    return plans + [kill_during_rewrite(op, 1) for op in ("rename", "truncate", "sync_directory")]


def get_fault_kind(plan: Plan) -> str:
    """Return the kind of operation at which the process is killed."""
    method, arguments = plan[-1]
    words = (method, arguments.get("op", ""), arguments.get("match", ""))
    return " ".join(word for word in words if word)


def few_fault_points() -> list[Plan]:
    """Return one fault of every kind, the second: the first leaves no torn tail."""
    kinds: dict[str, list[Plan]] = defaultdict(list)
    for plan in fault_points():
        kinds[get_fault_kind(plan)].append(plan)
    return [plans[:2][-1] for plans in kinds.values()]


@pytest.mark.parametrize("durability", ["always", "interval"])
def test_kill_at_any_disk_operation_loses_no_persisted_event(
    process_server: ForkServerContext, tmp_path: Path, durability: str
) -> None:
    """A kill instead of any disk operation, or during it, breaks no promise."""
    knobs = disk_knobs(tmp_path / "queue", durability)
    loop = Loop(process_server, knobs, Oracle(keeps_offsets=True))
    fired: Counter[str] = Counter()
    for plan in fault_points() if IN_CI else few_fault_points():
        appetite = loop.rng.choice([0.5, 1.0, 2.0])
        killed = loop.live(plan=plan, appetite=appetite, events=400, close=True)
        fired[get_fault_kind(plan)] += killed
        if loop.lives % 20 == 0:
            loop.drain()
    loop.drain()
    loop.summary(f"disk, {durability}, at fault points")
    assert all(fired.values()), f"never reached: {[kind for kind in fired if not fired[kind]]}"


def test_kill_while_the_queue_is_created_leaves_it_openable(
    process_server: ForkServerContext, tmp_path: Path
) -> None:
    """After a kill at any step of the first opening, the queue opens and works."""
    for op in ("open", "write", "sync", "rename", "sync_directory", "allocate", "truncate"):
        kills = 0
        for nth in range(1, 9 if IN_CI else 3):
            knobs = disk_knobs(tmp_path / f"{op}-{nth}", "always")
            loop = Loop(process_server, knobs, Oracle(keeps_offsets=True))
            loop.live(plan=kill(op, nth), appetite=0.5, events=80, close=True)
            loop.live(appetite=0.5, events=80, close=True)
            loop.drain()
            kills += loop.kills
        assert kills, f"never reached: {op}"


def assisted_knobs(path: Path) -> dict[str, Any]:
    """Knobs of a queue that starts and ends disk assistance all the time."""
    return {
        "kind": "disk_assisted",
        "path": path,
        "durability": "interval",
        "sync_interval": "20ms",
        "chunk_size": "8Ki",
        "size": 200,
    }


def test_killed_disk_assisted_queue_keeps_written_events(
    process_server: ForkServerContext, tmp_path: Path
) -> None:
    """Spilled and synced events survive in order, and no settled event comes back."""
    loop = Loop(process_server, assisted_knobs(tmp_path / "queue"), Oracle(keeps_offsets=False))
    wanted = 40 if IN_CI else 8
    plans: list[Plan] = [(), kill("write", 5), kill("sync", 3), kill("unlink", 2), tear(6, 40, "")]
    while loop.kills < wanted:
        loop.live(
            plan=loop.rng.choice(plans),
            kill_at=loop.rng.randint(1, 150),
            appetite=loop.rng.choice([0.8, 1.5, 3.0]),
            close=True,
        )
    loop.drain()
    loop.summary("disk_assisted")


def test_closed_disk_assisted_queue_keeps_everything(
    process_server: ForkServerContext, tmp_path: Path
) -> None:
    """Many closes and opens lose no event, persisted or not."""
    loop = Loop(process_server, assisted_knobs(tmp_path / "queue"), Oracle(keeps_offsets=True))
    for _ in range(20 if IN_CI else 5):
        killed = loop.live(appetite=loop.rng.choice([0.5, 1.0, 1.5]), events=600, close=True)
        assert not killed
    loop.drain()
    assert len(loop.oracle.gone) == max(loop.oracle.at) + 1
