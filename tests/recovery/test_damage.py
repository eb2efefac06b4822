"""A queue with damaged metadata or chunks opens and returns every readable event."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import pyarrow as pa
import pytest

from tests.conftest import IN_CI
from tests.recovery.hooked_disk import Stored, drain_queue, take
from tests.recovery.stored import KNOBS, close, publish, value, values
from turnlane.events import block_of
from turnlane.queues import open_queue
from turnlane.queues.buffered import BufferedQueue

# Metadata in every state


def make_damaged_queue(path: Path) -> None:
    """Return a closed queue of 400 events; the first 100 and some later ones are settled."""
    queue = open_queue(path=path, **KNOBS["disk"])
    assert isinstance(queue, BufferedQueue)
    producer = queue.producer()
    publish(producer, 0, 199)
    publish(queue.producer(ack="persisted"), 199, 200)
    assert take(queue, 50) == values(0, 50)
    stale = path.with_name("stale")
    shutil.copytree(path, stale)
    publish(producer, 200, 400)
    assert take(queue, 50) == values(50, 100)
    held = queue.get(20)
    queue.get(30).done()
    held.release()
    queue.close()


SETTLED = {*range(100), *range(120, 150)}


@pytest.fixture
def made(path: Path) -> Path:
    make_damaged_queue(path)
    return path


def list_journals(path: Path) -> list[Path]:
    return [path / "journal.a", path / "journal.b"]


def remove_journals(path: Path) -> None:
    for journal in list_journals(path):
        journal.unlink()


def empty_journals(path: Path) -> None:
    for journal in list_journals(path):
        journal.write_bytes(b"")


def garble_journals(path: Path) -> None:
    for journal in list_journals(path):
        journal.write_bytes(b"\xa5" * 5000)


def age_journals(path: Path) -> None:
    for journal in list_journals(path):
        shutil.copy(path.with_name("stale") / journal.name, journal)


def remove_identity(path: Path) -> None:
    (path / "queue.json").unlink()


def empty_identity(path: Path) -> None:
    (path / "queue.json").write_bytes(b"")


def garble_identity(path: Path) -> None:
    (path / "queue.json").write_bytes(b"\xa5{")


def garble_lock(path: Path) -> None:
    (path / "lock").write_bytes(b"\xa5" * 100)


@pytest.mark.parametrize("damage", [remove_journals, empty_journals, garble_journals, age_journals])
def test_queue_opens_without_a_valid_journal(
    queues: Callable[..., Stored], made: Path, damage: Callable[[Path], None]
) -> None:
    """Settled events may come again; every unsettled event comes, in order."""
    damage(made)
    queue = queues(made)
    found = [int(each[:6]) for each in drain_queue(queue)]
    assert found == sorted(set(found))
    assert set(found) >= set(range(400)) - SETTLED
    ledger = queue.stats().ledger
    assert ledger.adds_up
    assert ledger.accepted == 400
    # A segment whose events are all settled is removed, wherever the writer began a new one. Only
    # the journal knows that its events were settled and are not missing.
    assert set(ledger.dropped) <= {"missing"}
    assert sum(ledger.dropped.values()) <= len(SETTLED - set(found))


@pytest.mark.parametrize("damage", [remove_identity, empty_identity, garble_identity, garble_lock])
def test_queue_opens_without_a_valid_identity(
    queues: Callable[..., Stored], made: Path, damage: Callable[[Path], None]
) -> None:
    """The chunks contain the queue's id: no event is lost or repeated."""
    damage(made)
    queue = queues(made)
    assert {int(each[:6]) for each in drain_queue(queue)} == set(range(400)) - SETTLED
    assert queue.stats().ledger.delivered == 400


def test_queue_opens_with_a_journal_ahead_of_the_log(
    queues: Callable[..., Stored], made: Path
) -> None:
    """Events that are in the journal and not in the log count as missing."""
    stale = made.with_name("stale")
    for journal in list_journals(made):
        shutil.copy(journal, stale / journal.name)
    queue = queues(stale)
    found = [int(each[:6]) for each in drain_queue(queue)]
    assert found == [number for number in range(200) if number not in SETTLED]
    ledger = queue.stats().ledger
    assert ledger.adds_up
    assert ledger.accepted == 400
    assert ledger.dropped == {"missing": 200}
    queue.close()
    again = queues(stale)
    again.producer(ack="persisted").publish(value(400))
    assert drain_queue(again) == [value(400)]
    assert again.low == 401


# Damaged chunks


def list_chunks(path: Path) -> list[Path]:
    return sorted(path.glob("*.chunk"))


@pytest.fixture
def full(path: Path) -> Path:
    """A closed queue of 300 events in a dozen chunks, none settled."""
    queue = open_queue(path=path, **KNOBS["disk"])
    publish_blocks(queue, 0, 300)
    queue.close()
    assert len(list_chunks(path)) >= 8
    return path


def publish_blocks(queue: Any, first: int, end: int) -> None:
    producer = queue.producer(ack="persisted")
    for at in range(first, end, 10):
        producer.publish_block(block_of(values(at, at + 10), timestamps=1))


def check_rest(queue: Stored, accepted: int = 300) -> dict[str, int]:
    """Check that all events come in order except lost ones; return the losses by reason."""
    found = [int(each[:6]) for each in drain_queue(queue)]
    assert found == sorted(set(found))
    ledger = queue.stats().ledger
    assert ledger.adds_up
    assert ledger.accepted == accepted
    assert set(ledger.dropped) <= {"corrupt", "missing"}
    assert len(found) + sum(ledger.dropped.values()) == accepted
    return dict(ledger.dropped)


@pytest.mark.parametrize("which", [0, 3, -1])
def test_queue_opens_with_a_missing_chunk(
    queues: Callable[..., Stored], full: Path, which: int
) -> None:
    """Its events count as missing; all others are delivered."""
    gone = list_chunks(full)[which]
    ends = [*(int(each.stem, 16) for each in list_chunks(full)), 300]
    first = int(gone.stem, 16)
    lost = next(end for end in ends if end > first) - first
    gone.unlink()
    assert check_rest(queues(full)) == {"missing": lost}


def flip_bit(path: Path, byte: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("which", [0, 4, -1])
def test_flipped_bit_anywhere_costs_at_most_one_frame(
    queues: Callable[..., Stored], full: Path, tmp_path: Path, which: int
) -> None:
    """It costs one frame, at worst the chunk; the loss is counted and the bytes are kept."""
    target = list_chunks(full)[which]
    size = target.stat().st_size
    for number, byte in enumerate(range(0, size, size // (60 if IN_CI else 12))):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(full, copy)
        flip_bit(copy / target.name, byte, number % 8)
        queue = queues(copy)
        lost = check_rest(queue)
        assert sum(lost.values()) <= 40
        if lost:
            kept = [each for each in (copy / "quarantine").rglob("*") if each.is_file()]
            assert sum(each.stat().st_size for each in kept) > 0
        close(queue)
        shutil.rmtree(copy)


@pytest.mark.parametrize("which", [0, 3, -1])
def test_chunk_of_another_queue_is_set_aside_unchanged(
    queues: Callable[..., Stored], full: Path, tmp_path: Path, which: int
) -> None:
    """The foreign chunk is never delivered; the chunk that it replaced counts as missing."""
    other = queues(tmp_path / "other")
    publish_blocks(other, 1000, 1010)
    other.close()
    foreign = list_chunks(tmp_path / "other")[0]
    target = list_chunks(full)[which]
    shutil.copy(foreign, target)
    queue = queues(full)
    lost = check_rest(queue)
    assert set(lost) == {"missing"}
    assert (full / f"{target.name}.foreign").read_bytes() == foreign.read_bytes()


@pytest.mark.parametrize("which", [0, 3, -1])
@pytest.mark.parametrize("signed", [False, True])
def test_length_of_two_exabytes_allocates_nothing(
    queues: Callable[..., Stored], full: Path, which: int, signed: bool
) -> None:
    """Even with a valid checksum it costs no memory, and at most its chunk."""
    target = list_chunks(full)[which]
    data = bytearray(target.read_bytes())
    schema = struct.unpack_from("<Q", data)[0] & (1 << 62) - 1
    at = 32 + schema + -schema % 8
    data[at : at + 8] = struct.pack("<Q", 1 << 61 | 1 << 62)
    if signed:
        data[at + 24 : at + 28] = struct.pack("<I", google_crc32c.value(bytes(data[at : at + 24])))
    target.write_bytes(data)
    before = pa.total_allocated_bytes()
    queue = queues(full)
    lost = check_rest(queue)
    assert 0 < sum(lost.values()) <= 40
    assert pa.total_allocated_bytes() - before < 64 << 20
