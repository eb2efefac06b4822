"""A queue keeps its identity, and with it all its events, whatever happens to ``queue.json``."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.recovery.hooked_disk import HookedDisk, Opener, Stored, drain_queue
from tests.recovery.stored import KNOBS, publish, values
from turnlane.errors import NotAQueue
from turnlane.queues import open_queue
from turnlane.queues.buffered import BufferedQueue
from turnlane.storage.directory import (
    IDENTITY_COPY,
    IDENTITY_FILE,
    QueueDirectory,
    read_identity_files,
)
from turnlane.storage.disk_io import Disk
from turnlane.storage.inspection import QueueInspection, QueueRepair
from turnlane.storage.segments import format_segment_name

DISK = Disk()
FILES = [IDENTITY_FILE, IDENTITY_COPY]


def fill(path: Path, count: int = 60) -> str:
    """Make a queue in several chunks, of which 10 events are settled; return its id."""
    queue = open_queue(path=path, **KNOBS["disk"])
    assert isinstance(queue, BufferedQueue)
    publish(queue.producer(ack="persisted"), 0, count)
    queue.get(10).done()
    queue.close()
    return queue.stored_id


@pytest.fixture
def made(path: Path) -> str:
    return fill(path)


def make_old(path: Path) -> None:
    """Make the directory one that was written before the checksum was added."""
    data = json.loads((path / IDENTITY_FILE).read_bytes())
    del data["crc"]
    (path / IDENTITY_FILE).write_text(json.dumps(data) + "\n")
    (path / IDENTITY_COPY).unlink()


def flip_each_bit(file: Path) -> Iterator[int]:
    """Flip one bit after another; the file is as it was between two flips."""
    data = file.read_bytes()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        yield bit
        file.write_bytes(data)


def list_chunks(path: Path) -> list[Path]:
    return sorted(path.glob("*.chunk"))


def check_whole(queue: Stored) -> None:
    ledger = queue.stats().ledger
    assert (ledger.accepted, ledger.delivered, ledger.pending) == (60, 10, 50)
    assert not ledger.dropped


@pytest.mark.parametrize("file", FILES)
def test_any_flipped_bit_is_recognised_and_loses_nothing(path: Path, made: str, file: str) -> None:
    for _ in flip_each_bit(path / file):
        found = read_identity_files(path, DISK)
        assert found[file].identity is None or not found[file].has_checksum
        directory = QueueDirectory.read_only(path, DISK)
        assert (directory.queue_id, directory.name) == (made, "queue")


@pytest.mark.parametrize("file", FILES)
def test_flipped_bit_is_reported_and_repaired_with_all_events(
    queues: Callable[..., Stored], path: Path, made: str, file: str
) -> None:
    intact = (path / file).read_bytes()
    for bit in itertools.islice(flip_each_bit(path / file), 0, None, len(intact)):
        report = QueueInspection(path).verify()
        assert [(fault.kind, fault.file) for fault in report.faults] == [("identity", file)]
        assert (report.queue_id, report.pending, report.lost) == (made, 50, 0)
        if bit % 2:
            assert QueueRepair(path).run().saved == 50
        else:
            queue = queues(path)
            check_whole(queue)
            queue.close()
        assert (path / file).read_bytes() == intact
    assert QueueInspection(path).verify().clean


def test_any_flipped_bit_of_a_file_without_checksum_loses_nothing(path: Path, made: str) -> None:
    """The chunks and the journal tell the id. A flip in the format is refused by name."""
    make_old(path)
    refusals = []
    for _ in flip_each_bit(path / IDENTITY_FILE):
        try:
            assert QueueDirectory.read_only(path, DISK).queue_id == made
        except NotAQueue as error:
            refusals.append(str(error))
    assert all(f"{path}/queue.json: has format" in refusal for refusal in refusals)
    assert len(refusals) < 8


def test_directory_without_checksum_is_clean_and_gets_one(
    queues: Callable[..., Stored], path: Path, made: str
) -> None:
    make_old(path)
    assert not QueueInspection(path).verify().findings
    queue = queues(path)
    assert queue.stored_id == made
    check_whole(queue)
    assert "crc" in json.loads((path / IDENTITY_FILE).read_bytes())
    assert (path / IDENTITY_COPY).read_bytes() == (path / IDENTITY_FILE).read_bytes()
    assert not (path / "quarantine").exists()


@pytest.mark.parametrize("file", FILES)
def test_lost_file_is_written_again(
    queues: Callable[..., Stored], path: Path, made: str, file: str
) -> None:
    intact = (path / file).read_bytes()
    (path / file).unlink()
    queue = queues(path)
    assert queue.stored_id == made
    check_whole(queue)
    assert (path / file).read_bytes() == intact


def test_lost_files_of_an_empty_queue_are_derived_from_its_journal(
    queues: Callable[..., Stored], path: Path, made: str
) -> None:
    """The ledger survives, though no chunk is left."""
    for file in [*FILES, *(chunk.name for chunk in list_chunks(path))]:
        (path / file).unlink()
    queue = queues(path)
    assert queue.stored_id == made
    assert queue.stats().ledger.delivered == 10


def test_lost_files_beside_a_foreign_chunk_are_derived_from_journal_and_chunks(
    queues: Callable[..., Stored], path: Path, made: str, tmp_path: Path
) -> None:
    fill(tmp_path / "other")
    shutil.copy(list_chunks(tmp_path / "other")[0], path / format_segment_name(1 << 20))
    for file in FILES:
        (path / file).unlink()
    queue = queues(path)
    assert queue.stored_id == made
    check_whole(queue)


def test_damaged_file_on_a_full_disk_does_not_keep_the_queue_from_opening(
    opener: Opener, disk: HookedDisk, path: Path, made: str
) -> None:
    (path / IDENTITY_FILE).write_bytes(b"")
    disk.fill()
    with QueueDirectory.open(path, disk) as directory:
        assert directory.queue_id == made


def list_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_identity_of_another_queue_is_refused_by_name_without_a_change(
    path: Path, made: str, tmp_path: Path
) -> None:
    fill(tmp_path / "other")
    for file in FILES:
        shutil.copy(tmp_path / "other" / file, path / file)
    before = list_files(path)
    for opening in (QueueDirectory.open, QueueDirectory.read_only):
        with pytest.raises(NotAQueue, match=rf"{path}/queue\.json: is of another queue.*{made}"):
            opening(path, DISK)
    assert list_files(path) == before


def test_chunks_whose_queue_nothing_tells_are_never_a_new_queue(path: Path, made: str) -> None:
    for file in path.iterdir():
        file.write_bytes(b"\xa5" * 100)
    (path / "lock").unlink()
    before = list_files(path)
    with pytest.raises(NotAQueue, match=rf"{path}/queue\.json: is missing or damaged.*restore"):
        QueueDirectory.open(path, DISK)
    assert list_files(path) == before
    assert "restore it" in QueueInspection(path).verify().faults[0].todo


@pytest.mark.parametrize("place", [5, 45, 59, 100_000])
def test_copied_chunk_under_a_wrong_name_is_set_aside(
    queues: Callable[..., Stored], path: Path, made: str, place: int
) -> None:
    """Neither before, between nor behind the others does it cost an event, or an offset."""
    original = list_chunks(path)[0]
    copy = path / format_segment_name(place)
    assert not copy.exists()
    shutil.copy(original, copy)
    report = QueueInspection(path).verify()
    assert [(fault.kind, fault.file) for fault in report.faults] == [("foreign", copy.name)]
    assert (report.pending, report.lost) == (50, 0)
    assert QueueInspection(path).account().ledger.pending == 50
    queue = queues(path)
    check_whole(queue)
    assert queue.end == 60
    assert (path / f"{copy.name}.foreign").read_bytes() == original.read_bytes()
    assert drain_queue(queue) == values(10, 60)
    assert not queue.stats().ledger.dropped
