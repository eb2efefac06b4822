"""Is anything lost when the process is killed, at whatever moment? See ``victim`` and ``oracle``.

The lives of a loop share one directory, so every one begins with what the kill before it has left.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import IN_CI
from tests.recovery.oracle import Oracle
from tests.recovery.victim import (
    Closed,
    Got,
    Identity,
    Opened,
    Orders,
    Plan,
    Report,
    Settled,
    Settling,
    live,
)
from turnlane.errors import QueueClosed
from turnlane.queues import open_queue
from turnlane.queues.disk import DiskQueue
from turnlane.queues.disk_assisted import DiskAssistedQueue

SEED = 20_240_517
PATIENCE = 60.0
"""Seconds after which a life that neither ends nor reports counts as stuck."""


@pytest.fixture(scope="module")
def nursery() -> ForkServerContext:
    """Where victims come from: a server that has turnlane imported and nothing opened."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.recovery.victim"])
    return context


@dataclass
class Loop:
    """Lives in one directory, and the oracle that hears of them."""

    nursery: ForkServerContext
    knobs: dict[str, Any]
    oracle: Oracle
    rng: random.Random = field(default_factory=lambda: random.Random(SEED))
    lives: int = 0
    kills: int = 0

    def live(self, *, kill_after: float | None = None, **orders: Any) -> bool:
        """One life; true if it ended by a kill, the parent's or that of a planned fault."""
        order = Orders(
            life=self.lives,
            seed=SEED,
            knobs=self.knobs,
            resend_from=self.oracle.resend_from,
            **orders,
        )
        self.lives += 1
        ours, theirs = self.nursery.Pipe(duplex=False)
        child = self.nursery.Process(target=live, args=(order, theirs), daemon=True)
        child.start()
        theirs.close()
        reports: list[Report] = []
        deadline = time.monotonic() + (PATIENCE if kill_after is None else kill_after)
        try:
            while (left := deadline - time.monotonic()) > 0:
                if ours.poll(left):
                    reports.append(ours.recv())
            child.kill()
            while True:
                reports.append(ours.recv())
        except EOFError:
            pass
        finally:
            ours.close()
            child.join()
        stuck = kill_after is None and time.monotonic() > deadline
        assert not stuck, f"life {order} is stuck after {reports[-3:]}"
        self.oracle.hear(order, reports)
        killed = child.exitcode == -9
        self.kills += killed
        child.close()
        return killed

    def drain(self) -> None:
        """Take out everything that is left, and see whether that was all there had to be."""
        started = time.perf_counter()
        queue = open_queue(**self.knobs)
        assert isinstance(queue, DiskQueue | DiskAssistedQueue)
        reports: list[Report] = [Opened.by(queue, started)]
        queue.finish()
        reports += taken(queue)
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
        """What happened, for people."""
        times = [seconds * 1000 for seconds in self.oracle.recoveries]
        print(  # noqa: T201 - the point of it
            f"\n{what}: {self.kills} kills in {self.lives} lives, "
            f"{self.oracle.persisted_total} events persisted, {len(self.oracle.gone)} settled; "
            f"opening took {statistics.median(times):.1f} ms (median), {max(times):.1f} ms (most)"
        )


def taken(queue: DiskQueue | DiskAssistedQueue) -> Iterator[Report]:
    """Settle everything in a queue that is finished."""
    while True:
        try:
            batch = queue.get()
        except QueueClosed:
            return
        events = [Identity.of(value) for value in batch.block.column("value").to_pylist()]
        yield Got(batch.place.first, batch.attempt, events)
        yield Settling(batch.place.first, batch.place.end)
        batch.done()
        yield Settled(batch.place.first, batch.place.end)


def disk_knobs(path: Path, durability: str) -> dict[str, Any]:
    """A queue that starts and deletes chunks all the time."""
    interval = {"sync_interval": "20ms"} if durability == "interval" else {}
    return {
        "kind": "disk",
        "path": path,
        "durability": durability,
        "chunk_size": "8Ki",
        "memory_bytes": "32Ki",
        "write_buffer": "4Ki",
        **interval,
    }


@pytest.mark.parametrize("durability", ["always", "interval"])
def test_what_survives_kills_at_random_moments(
    nursery: ForkServerContext, tmp_path: Path, durability: str
) -> None:
    """Whenever the process dies, persisted events stay and settled ones stay away."""
    knobs = disk_knobs(tmp_path / "queue", durability)
    loop = Loop(nursery, knobs, Oracle(keeps_offsets=True))
    wanted = 65 if IN_CI else 12
    while loop.kills < wanted:
        moment = loop.rng.choice([0.03, 0.15, 0.5])
        loop.live(
            kill_after=loop.rng.uniform(0, moment),
            appetite=loop.rng.choice([0.2, 0.8, 1.5, 3.0]),
            close=loop.rng.random() < 0.2,
        )
        if loop.lives % 20 == 0:
            loop.drain()
    loop.drain()
    loop.summary(f"disk, {durability}")
