"""A power cut keeps the promises, also if unsynced writes are lost in part and out of order.

The disk is a model (``turnlane.testing.PowerCutDisk``); ``make test-power`` cuts the power of a
virtual machine. Each life starts with the files that the last cut left.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import IN_CI
from tests.contract.harness import PATIENCE
from tests.recovery.hooked_disk import Opener, get_block_values
from turnlane.errors import QueueEmpty
from turnlane.events import block_of
from turnlane.queues.api import Ack
from turnlane.queues.buffered import BufferedQueue
from turnlane.testing import PowerCutDisk

SMALL = {"chunk_size": "2Ki", "compression": "none"}
KNOBS: dict[str, dict[str, Any]] = {
    "always": {"kind": "disk", "durability": "always", "memory_bytes": "4Ki", **SMALL},
    "interval": {
        "kind": "disk",
        "durability": "interval",
        "sync_interval": "5ms",
        "memory_bytes": "4Ki",
        **SMALL,
    },
    "assisted": {
        "kind": "disk_assisted",
        "durability": "always",
        "size": 100,
        "high_watermark": 30,
        "low_watermark": 10,
        **SMALL,
    },
}
LIVES = 4
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A directory in memory: the model says what is synced, so that real syncs only take time."""


def value(number: int) -> bytes:
    return b"%d:" % number + bytes(number * 37 % 200)


def number(value: bytes) -> int:
    return int(value.split(b":")[0])


@dataclass
class Lives:
    """One queue through its power cuts, and everything that its users were told."""

    name: str
    path: Path
    rng: random.Random
    disk: PowerCutDisk = field(default_factory=PowerCutDisk)
    told: int = 0
    """The first events that are persisted."""
    settling: set[int] = field(default_factory=set)
    settled: set[int] = field(default_factory=set)

    def live(self, life: int) -> None:
        """Open the queue, check it, use it, and cut the power at any operation of the disk."""
        self.disk = PowerCutDisk()
        after = self.path.with_name(f"{self.path.name}-{life}")
        promised: list[tuple[int, set[int]]] = []

        def cut() -> None:
            if promised:
                return
            promised.append((self.told, set(self.settled)))
            self.disk.draw_power_cut(self.path, after, self.rng)
            promised.append((0, set(self.settling)))

        self.disk.call(cut, self.rng.choice([self.rng.randint(1, 40), self.rng.randint(1, 400)]))
        opener = Opener()
        with opener.closing:
            queue = opener(path=self.path, disk=self.disk, **KNOBS[self.name])
            self.check(queue)
            self.use(queue, promised)
            self.disk.call(cut)  # if it has not come yet, it comes while the queue is closed
        cut()
        # After the cut, nothing happened.
        (self.told, self.settled), (_, self.settling) = promised
        self.path = after

    def check(self, queue: BufferedQueue) -> None:
        """Compare the pending events of a queue that was just opened with all that was told."""
        found: list[int] = []
        at = queue.low
        while (read := queue.read(at, 1000)) is not None:
            values = get_block_values(read[1])
            found += map(number, values)
            assert values == [value(number) for number in found[-len(values) :]]
            at = read[0] + len(values)
        assert found == sorted(set(found)), "each once, in order"
        lost = set(range(self.told)) - set(found) - self.settling
        assert not lost, f"persisted, and lost: {lost}"
        ledger = queue.stats().ledger
        assert ledger.adds_up, ledger
        assert ledger.pending == len(found), ledger
        assert set(ledger.dropped) <= {"missing"}, ledger  # events that were never persisted
        if self.name == "always":  # only this one syncs each settlement
            again = self.settled.intersection(found)
            assert not again, f"settled, and came again: {again}"
            assert len(self.settled) <= ledger.delivered <= len(self.settling), ledger

    def use(self, queue: BufferedQueue, promised: list[Any]) -> None:
        """Publish, take and settle events until the cut, or for some time."""
        base = self.told

        def hear(ack: Ack) -> None:
            if not promised:
                self.told += ack.count

        producer = queue.producer(ack="persisted", on_ack=hear, producer_id="p")
        following = base
        for _ in range(self.rng.randint(5, 60)):
            if promised:
                return
            match self.rng.choice(["publish", "publish", "take", "take", "flush"]):
                case "publish":
                    end = following + self.rng.randint(1, 12)
                    block = block_of([value(number) for number in range(following, end)])
                    if producer.try_publish_block(block, sequence=following) is not None:
                        following = end
                case "take":
                    self.take(queue, promised)
                case _ if self.name != "assisted":  # there it waits for a consumer
                    assert producer.flush(PATIENCE)

    def take(self, queue: BufferedQueue, promised: list[Any]) -> None:
        """Take some events, and settle or release them."""
        try:
            batch = queue.get(self.rng.randint(1, 20), timeout=0)
        except QueueEmpty:
            return
        numbers = [number(value) for value in get_block_values(batch.block)]
        if self.rng.random() < 0.2:
            batch.release()
            return
        self.settling.update(numbers)
        batch.done()
        if not promised:
            self.settled.update(numbers)


@pytest.mark.parametrize("name", KNOBS)
@settings(max_examples=30 if IN_CI else 10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_power_cut_with_lost_and_reordered_writes_keeps_promises(name: str, seed: int) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        lives = Lives(name, Path(folder) / "queue", random.Random(seed))
        for life in range(LIVES):
            lives.live(life)
        opener = Opener()
        with opener.closing:
            lives.check(opener(path=lives.path, **KNOBS[name]))
