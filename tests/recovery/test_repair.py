"""Any damage to the files is found, and a repair keeps every readable event."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import turnlane
from tests.acceptance.queue_commands import drained
from turnlane.events import block_of, get_values
from turnlane.storage.inspection import QueueInspection, QueueRepair
from turnlane.storage.walk import FindingKind, Selection

Harm = Callable[[bytearray, random.Random], bytearray | None]

JOURNAL_BYTES = 2000
"""The part of a journal file that is used in these queues."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a queue of 300 events in eight chunks; 0-24 and 65-94 are settled."""
    path = tmp_path_factory.mktemp("sound") / "queue"
    noise = random.Random(1)
    with turnlane.open_queue(
        kind="disk", path=path, durability="always", chunk_size="4Ki"
    ) as queue:
        producer = queue.producer(ack="persisted")
        for _ in range(30):
            producer.publish_block(block_of([noise.randbytes(60) for _ in range(10)]))
        first, second, third = queue.get(25), queue.get(40), queue.get(30)
        first.done()
        third.done()
        second.release()
    return path


def flip_bit(data: bytearray, rng: random.Random) -> bytearray:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def overwrite(data: bytearray, rng: random.Random) -> bytearray:
    at = rng.randrange(len(data))
    data[at : at + 50] = rng.randbytes(50)
    return data


def cut_file(data: bytearray, rng: random.Random) -> bytearray:
    return data[: rng.randrange(len(data))]


def extend(data: bytearray, rng: random.Random) -> bytearray:
    return data + rng.randbytes(rng.randrange(1, 200))


def delete(data: bytearray, rng: random.Random) -> None:
    """Delete the file."""


HARMS: list[Harm] = [flip_bit, overwrite, cut_file, extend, delete]


def harm_file(path: Path, harm: Harm, rng: random.Random) -> None:
    data = path.read_bytes()
    used = len(data) if path.suffix == ".chunk" else min(len(data), JOURNAL_BYTES)
    if not used:
        return
    harmed = harm(bytearray(data[:used]), rng)
    if harmed is None:
        path.unlink()
    else:
        path.write_bytes(harmed + data[used:])


def list_pending(path: Path) -> dict[int, bytes | None]:
    """Return all unsettled events that can be read, by offset."""
    found: dict[int, bytes | None] = {}
    for piece in QueueInspection(path).slices(Selection()):
        found |= zip(piece.offsets.tolist(), get_values([piece.block]), strict=True)
    return found


@given(
    harms=st.lists(st.tuples(st.sampled_from(HARMS), st.integers(0, 9)), min_size=1, max_size=3),
    seed=st.integers(0, 1 << 32),
)
def test_any_damage_is_found_and_repaired(
    sound: Path,
    tmp_path_factory: pytest.TempPathFactory,
    harms: list[tuple[Harm, int]],
    seed: int,
) -> None:
    path = tmp_path_factory.mktemp("harmed") / "queue"
    shutil.copytree(sound, path)
    files = sorted(file for file in path.iterdir() if file.suffix in {".chunk", ".a", ".b"})
    rng = random.Random(seed)
    for harm, which in harms:
        if (file := files[which % len(files)]).exists():
            harm_file(file, harm, rng)
    report, readable = QueueInspection(path).verify(), list_pending(path)
    if report.clean:
        assert readable == list_pending(sound)
    repaired = QueueRepair(path).run()
    after = list_pending(path)
    assert after.items() <= readable.items()
    assert repaired.saved == len(after)
    if not any(finding.kind is FindingKind.JOURNAL for finding in report.faults):
        assert after == readable
        assert sum(repaired.lost.values()) == report.lost
    assert QueueInspection(path).verify().clean
    assert QueueInspection(path).account().ledger.adds_up
    assert drained(path) == list(after.values())
    shutil.rmtree(path.parent)
