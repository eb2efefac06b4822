"""The journal after damage, the death of its process, and failures of its disk.

It always has a state of the past: all records before some moment, and none after it. If only the
process died, this moment is the last call that returned, or the call that was running.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import google_crc32c
import pyarrow as pa
import pytest

from turnlane.ledger import Outcome
from turnlane.storage.disk_io import Buffers, Disk
from turnlane.storage.frames import LogPosition, ProducerSequence
from turnlane.storage.journal import Journal
from turnlane.storage.journal_records import JOURNAL_FILES, JournalState
from turnlane.storage.producer_sequences import AcceptedSequences
from turnlane.testing import FaultyDisk

ID = "0123456789abcdef" * 2
SIZE = 16384
"""Small files: they change after about 270 records."""
DELIVERED = Outcome.DELIVERED
P1, P2 = b"1" * 16, b"2" * 16
RECORD = 48


def settle(journal: Journal, numbers: range) -> None:
    for number in numbers:
        journal.record_settled(number, number + 1, 1, DELIVERED)


def reopen(path: Path, disk: Disk | None = None) -> tuple[Journal, JournalState]:
    return Journal.open(path, disk or Disk(), ID, file_size=SIZE)


def get_low(path: Path) -> int:
    """Open the journal and return its low mark; it must also accept and keep new records."""
    journal, state = reopen(path)
    assert state.totals.get(DELIVERED, 0) == state.low
    assert not state.settled
    settle(journal, range(state.low, state.low + 3))
    journal.close()
    assert Journal.read(path, Disk(), ID).low == state.low + 3
    return state.low


def find_start_of_records(data: bytes | bytearray) -> int:
    length: int = struct.unpack_from("<Q", data, 16)[0]
    return 32 + length + -length % 8


def flip_bit(path: Path, byte: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A directory whose journal.a holds 5 records in generation 2, journal.b 3 in generation 1."""
    path = tmp_path / "kept"
    path.mkdir()
    journal, _ = reopen(path)
    settle(journal, range(3))
    journal.snapshot()
    settle(journal, range(3, 8))
    journal.close()
    return path


@pytest.fixture
def copies(kept: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a function that copies this directory."""
    return fresh_copies(kept, tmp_path / "copies")


def fresh_copies(kept: Path, target: Path) -> Iterator[Path]:
    while True:
        shutil.rmtree(target, ignore_errors=True)
        yield Path(shutil.copytree(kept, target))


# Damage


def test_undamaged_journal_returns_all_records(kept: Path) -> None:
    assert get_low(kept) == 8


def test_flipped_bit_in_a_record_ends_the_replay(kept: Path, copies: Iterator[Path]) -> None:
    start = find_start_of_records((kept / "journal.a").read_bytes())
    for byte in range(RECORD):
        for bit, path in zip(range(8), copies, strict=False):
            flip_bit(path / "journal.a", start + 2 * RECORD + byte, bit)
            assert get_low(path) == 5, (byte, bit)


def test_flipped_bit_in_the_snapshot_falls_back_to_the_older_file(
    kept: Path, copies: Iterator[Path]
) -> None:
    end = find_start_of_records((kept / "journal.a").read_bytes())
    length = struct.unpack_from("<Q", (kept / "journal.a").read_bytes(), 16)[0]
    for byte, path in zip(range(end), copies, strict=False):
        damaged = path / "journal.a"
        flip_bit(damaged, byte, byte % 8)
        before = damaged.read_bytes()
        if byte >= 32 + length:  # padding, which is never read
            assert get_low(path) == 8, byte
        else:
            assert get_low(path) == 3, byte
            assert (path / "quarantine" / "journal.a").read_bytes() == before


def test_flipped_bit_in_the_older_file_is_harmless(kept: Path, copies: Iterator[Path]) -> None:
    end = find_start_of_records((kept / "journal.b").read_bytes()) + 3 * RECORD
    for byte, path in zip(range(0, end, 5), copies, strict=False):
        flip_bit(path / "journal.b", byte, byte % 8)
        assert get_low(path) == 8, byte


def test_truncated_file_keeps_the_records_before_the_cut(
    kept: Path, copies: Iterator[Path]
) -> None:
    start = find_start_of_records((kept / "journal.a").read_bytes())
    payload_end = 32 + struct.unpack_from("<Q", (kept / "journal.a").read_bytes(), 16)[0]
    lengths = [*range(start + 6 * RECORD), *range(start + 6 * RECORD, SIZE, 997)]
    for length, path in zip(lengths, copies, strict=False):
        os.truncate(path / "journal.a", length)
        whole = min(5, max(0, length - start) // RECORD)
        assert get_low(path) == (3 + whole if length >= payload_end else 3), length
        assert all((path / name).stat().st_size == SIZE for name in JOURNAL_FILES)


def test_records_after_a_damaged_one_stay_ignored(kept: Path) -> None:
    """A new record in place of the damaged one would make the old records valid again."""
    start = find_start_of_records((kept / "journal.a").read_bytes())
    flip_bit(kept / "journal.a", start, 0)
    for _ in range(3):
        journal, state = reopen(kept)
        assert (state.low, state.settled) == (3, [])
        journal.close()


GARBAGE: dict[str, bytes] = {
    "noise": random.Random(1).randbytes(SIZE),
    "ones": b"\xff" * SIZE,
    "text": b"hello\n",
    "one byte": b"x",
    "magic": b"TLJOURN1",
}


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("names", [("journal.a",), ("journal.b",), JOURNAL_FILES], ids="+".join)
def test_garbage_goes_to_quarantine_and_the_journal_opens(
    kept: Path, names: tuple[str, ...], garbage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in names:
        (kept / name).write_bytes(GARBAGE[garbage])
    assert get_low(kept) == {"journal.a": 3, "journal.b": 8}[names[0]] * (len(names) == 1)
    for name in names:
        assert (kept / "quarantine" / name).read_bytes() == GARBAGE[garbage]
        assert f"quarantine.file_moved file={kept / name} " in caplog.text


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 0)])
@pytest.mark.parametrize(
    ("names", "left"), [(("journal.a",), 3), (("journal.b",), 8), (JOURNAL_FILES, 0)]
)
def test_missing_or_empty_file_is_created_again(
    kept: Path, damage: Callable[[Path], None], names: tuple[str, ...], left: int
) -> None:
    for name in names:
        damage(kept / name)
    assert get_low(kept) == left
    assert not (kept / "quarantine").exists()


def test_file_of_zeros_counts_as_empty(kept: Path) -> None:
    for name in JOURNAL_FILES:
        (kept / name).write_bytes(bytes(SIZE))
    journal, state = reopen(kept)
    journal.close()
    assert not state.found


def test_blank_header_does_not_revive_old_records(kept: Path) -> None:
    """The same file gets the same generation again, over records that would be valid in it."""
    data = bytearray((kept / "journal.a").read_bytes())
    data[:32] = bytes(32)
    (kept / "journal.a").write_bytes(data)
    journal, state = reopen(kept)
    journal.close()
    assert state.low == 3
    assert Journal.read(kept, Disk(), ID).low == 3


def test_journal_of_another_queue_goes_to_quarantine(kept: Path) -> None:
    journal, state = Journal.open(kept, Disk(), "f" * 32, file_size=SIZE)
    journal.close()
    assert state == JournalState()
    assert sorted(path.name for path in (kept / "quarantine").iterdir()) == list(JOURNAL_FILES)


def test_length_beyond_the_file_is_rejected(kept: Path) -> None:
    start = struct.pack("<8sQQI", b"TLJOURN1", 9, 1 << 60, 0)
    data = start + struct.pack("<I", google_crc32c.value(start))
    (kept / "journal.a").write_bytes(data.ljust(SIZE, b"\0"))
    before = pa.total_allocated_bytes()
    assert get_low(kept) == 3
    assert pa.total_allocated_bytes() == before


def test_invalid_snapshot_goes_to_quarantine(kept: Path) -> None:
    payload = b'{"queue_id": "%s", "low": "many"}' % ID.encode()
    start = struct.pack("<8sQQI", b"TLJOURN1", 9, len(payload), google_crc32c.value(payload))
    data = start + struct.pack("<I", google_crc32c.value(start)) + payload
    (kept / "journal.b").write_bytes(data.ljust(SIZE, b"\0"))
    assert get_low(kept) == 8


def test_record_of_a_later_version_ends_the_replay(kept: Path) -> None:
    data = bytearray((kept / "journal.a").read_bytes())
    at = find_start_of_records(data) + RECORD
    for kind, outcome in ((6, 0), (1, 10), (0, 0)):
        body = struct.pack("<BBHQQQQQ", kind, outcome, 0, 0, 4, 5, 1, 0)
        checksum = google_crc32c.extend(google_crc32c.value(struct.pack("<Q", 2)), body)
        data[at : at + RECORD] = struct.pack("<I", checksum) + body
        (kept / "journal.a").write_bytes(data)
        assert Journal.read(kept, Disk(), ID).low == 4


# Old copies


def test_higher_generation_wins_under_either_file_name(kept: Path) -> None:
    (kept / "journal.a").rename(kept / "journal.c")
    (kept / "journal.b").rename(kept / "journal.a")
    (kept / "journal.c").rename(kept / "journal.b")
    assert get_low(kept) == 8


def test_old_copy_of_one_file_loses_to_the_other(kept: Path, tmp_path: Path) -> None:
    shutil.copy(kept / "journal.b", tmp_path / "old")
    journal, _ = reopen(kept)
    journal.snapshot()
    settle(journal, range(8, 12))
    journal.close()
    shutil.copy(tmp_path / "old", kept / "journal.b")
    assert get_low(kept) == 12


def test_old_copies_of_both_files_restore_the_old_state(kept: Path, copies: Iterator[Path]) -> None:
    old = next(copies)
    journal, _ = reopen(kept)
    settle(journal, range(8, 600))
    journal.close()
    for name in JOURNAL_FILES:
        shutil.copy(old / name, kept / name)
    assert get_low(kept) == 8


# A disk that fails


class Recorder(Disk):
    """Records the order of operations and the part of the file that each touched."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def write(self, fd: int, buffers: Buffers, at: int) -> None:
        length = sum(len(memoryview(buffer)) for buffer in buffers)
        kind = "header" if length == 32 else "record" if length == RECORD else "snapshot"
        self.calls.append(kind if any(memoryview(buffers[0])) else f"blank {kind}")
        super().write(fd, buffers, at)

    def sync(self, fd: int) -> None:
        self.calls.append("sync")
        super().sync(fd)


def test_header_is_written_only_after_the_payload_is_synced(tmp_path: Path) -> None:
    disk = Recorder()
    journal, _ = reopen(tmp_path, disk)
    journal.close()
    assert disk.calls == ["blank snapshot", "sync", "header", "sync"]


@pytest.mark.parametrize(
    ("op", "nth"),
    [("open", nth) for nth in (1, 2, 3, 4)]
    + [("write", nth) for nth in (1, 2)]
    + [("sync", nth) for nth in (1, 2)]
    + [("read", 1), ("size", 1), ("allocate", 1), ("sync_directory", 1)],
)
def test_failed_open_leaves_no_file_open_and_can_be_repeated(kept: Path, op: str, nth: int) -> None:
    (kept / "journal.b").unlink()
    disk = FaultyDisk()
    disk.fail(op, nth, times=None)
    descriptors = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Input/output"):
        reopen(kept, disk)
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert get_low(kept) == 8


# A new journal starts with file b, so every operation on a is part of the first change of files:
# a snapshot under a blank header, a sync, the header, a sync.
STEPS = [("size", 1), ("write", 1), ("sync", 1), ("write", 2), ("sync", 2)]


@pytest.mark.parametrize(("op", "nth"), STEPS)
def test_failed_change_of_files_is_retried(tmp_path: Path, op: str, nth: int) -> None:
    disk = FaultyDisk()
    journal, _ = reopen(tmp_path, disk)
    disk.fail(op, nth, match="journal.a")
    settle(journal, range(1000))
    journal.close()
    assert get_low(tmp_path) == 1000


@pytest.mark.parametrize(("op", "nth"), STEPS)
def test_records_after_a_failed_change_survive_a_kill(tmp_path: Path, op: str, nth: int) -> None:
    disk = FaultyDisk()
    journal, _ = reopen(tmp_path, disk)
    disk.fail(op, nth, match="journal.a")
    for number in range(400):
        settle(journal, range(number, number + 1))
        if number > 250:  # soon after this the change is tried, and fails
            assert Journal.read(tmp_path, Disk(), ID).low == number + 1
    journal.close()


@pytest.mark.parametrize(("op", "nth"), STEPS[:3])
def test_active_file_grows_while_files_cannot_change(tmp_path: Path, op: str, nth: int) -> None:
    disk = FaultyDisk()
    journal, _ = reopen(tmp_path, disk)
    disk.fail(op, nth, times=None, match="journal.a")
    settle(journal, range(2000))
    assert (tmp_path / "journal.b").stat().st_size > SIZE
    assert Journal.read(tmp_path, Disk(), ID).low == 2000
    disk.clear()
    settle(journal, range(2000, 3000))
    journal.close()
    assert get_low(tmp_path) == 3000
    assert all((tmp_path / name).stat().st_size == SIZE for name in JOURNAL_FILES)


@pytest.mark.parametrize(
    "faults",
    [
        [("write", 2)],  # neither the header nor the blank header was written
        [("sync", 2)],  # it was written and blanked again; either may be on the device
        [("sync", 2), ("write", 3)],  # it was written and stays
    ],
)
def test_half_changed_files_that_cannot_be_undone_refuse_records(
    tmp_path: Path, faults: list[tuple[str, int]]
) -> None:
    """The next opening may take either file, so no record may go to only one of them."""
    disk = FaultyDisk()
    journal, _ = reopen(tmp_path, disk)
    for op, nth in faults:
        disk.fail(op, nth, times=None, match="journal.a")
    told = settle_until_refused(journal)
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output"):
            settle(journal, range(told, told + 1))
        assert Journal.read(tmp_path, Disk(), ID).low == told
    disk.clear()
    settle(journal, range(told, told + 100))
    journal.close()
    assert get_low(tmp_path) == told + 100


def test_undone_half_change_accepts_records_again(tmp_path: Path) -> None:
    disk = FaultyDisk()
    journal, _ = reopen(tmp_path, disk)
    disk.fail("sync", nth=2, times=2, match="journal.a")
    told = settle_until_refused(journal)
    disk.fail("size", times=None, match="journal.a")  # it can be blanked, but still not used
    settle(journal, range(told, told + 500))
    journal.close()
    assert get_low(tmp_path) == told + 500


def settle_until_refused(journal: Journal) -> int:
    for number in range(10_000):
        try:
            settle(journal, range(number, number + 1))
        except OSError:
            return number
    raise AssertionError("was never refused")


def test_forced_snapshot_that_fails_half_way_refuses_records(tmp_path: Path) -> None:
    disk = FaultyDisk()
    journal, _ = reopen(tmp_path, disk)
    settle(journal, range(10))
    disk.fail("sync", nth=2, times=3, match="journal.a")
    with pytest.raises(OSError, match="Input/output"):
        journal.snapshot()
    with pytest.raises(OSError, match="Input/output"):
        settle(journal, range(10, 11))
    settle(journal, range(10, 20))
    journal.close()
    assert get_low(tmp_path) == 20


def test_failed_sync_writes_the_state_to_the_other_file(tmp_path: Path) -> None:
    disk = FaultyDisk()
    journal, _ = reopen(tmp_path, disk)
    settle(journal, range(10))
    disk.fail("sync", match="journal.b")
    with pytest.raises(OSError, match="Input/output"):
        journal.sync()
    disk.fail("sync", match="journal.b", times=None)  # another sync of it fails
    journal.sync()
    journal.sync()
    os.truncate(tmp_path / "journal.b", 0)  # the kernel may have dropped these pages
    journal.close()
    assert get_low(tmp_path) == 10


def test_failed_record_is_written_when_repeated(tmp_path: Path) -> None:
    """The record ends with zeros, like the file; before the repeat a kill may lose it."""
    disk = FaultyDisk()
    journal, _ = reopen(tmp_path, disk)
    for keep in range(RECORD):
        before = journal.state()
        disk.tear(keep_bytes=keep)
        with pytest.raises(OSError, match="Input/output"):
            journal.record_settled(keep, keep + 1, 1, DELIVERED)
        assert journal.state() == before
        assert Journal.read(tmp_path, Disk(), ID).low in {keep, keep + 1}
        journal.record_settled(keep, keep + 1, 1, DELIVERED)
    journal.close()
    assert get_low(tmp_path) == RECORD


def test_torn_write_never_moves_a_producer_back(tmp_path: Path) -> None:
    disk = FaultyDisk()
    journal, _ = reopen(tmp_path, disk)
    disk.tear(keep_bytes=3 * RECORD)
    old = [ProducerSequence(bytes([number]) * 16, 100) for number in range(3)]
    with pytest.raises(OSError, match="Input/output"):
        journal.record_position(LogPosition(0, 8, 100), 1, old)
    journal.record_position(LogPosition(0, 16, 200), 2, [ProducerSequence(bytes([2]) * 16, 200)])
    journal.close()
    state = Journal.read(tmp_path, Disk(), ID)
    assert state.position == LogPosition(0, 16, 200)
    assert state.producers[bytes([2]) * 16] == AcceptedSequences(200)


def test_sequences_may_survive_without_their_position_but_not_the_reverse(tmp_path: Path) -> None:
    disk = FaultyDisk()
    journal, _ = reopen(tmp_path, disk)
    for keep in range(3 * RECORD):
        disk.tear(keep_bytes=keep)
        with pytest.raises(OSError, match="Input/output"):
            journal.record_position(
                LogPosition(0, 8, 100), 1 << 63, [ProducerSequence(P1, 5), ProducerSequence(P2, 6)]
            )
        assert Journal.read(tmp_path, Disk(), ID).position is None
    journal.close()


def test_full_disk_accepts_records_and_changes_of_files(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path, Disk(), ID)
    journal.close()
    disk = FaultyDisk()
    disk.fill()
    journal, _ = Journal.open(tmp_path, disk, ID)
    settle(journal, range(50_000))
    journal.close()
    journal, state = Journal.open(tmp_path, disk, ID)
    journal.close()
    assert state.low == 50_000


def test_disk_too_full_for_a_new_journal_raises(tmp_path: Path) -> None:
    disk = FaultyDisk()
    disk.fill()
    with pytest.raises(OSError, match="No space") as caught:
        reopen(tmp_path, disk)
    assert caught.value.errno == errno.ENOSPC
    disk.unfill()
    journal, _ = reopen(tmp_path, disk)
    journal.close()


# Death

PROGRAM = """
import os, sys
from pathlib import Path
from turnlane.ledger import Outcome
from turnlane.storage.journal import Journal
from turnlane.testing import FaultyDisk

disk = FaultyDisk()
{plan}
journal, state = Journal.open(Path(sys.argv[1]), disk, sys.argv[2], file_size=int(sys.argv[3]))
for number in range(state.low, state.low + 1000):
    journal.record_settled(number, number + 1, 1, Outcome.DELIVERED)
    os.write(1, b".")
"""


def count_records_before_death(path: Path, plan: str) -> int:
    """Return how many calls returned in a process that dies as planned."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(plan=plan), str(path), ID, str(SIZE)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    return len(ended.stdout)


DEATHS = {
    # The first opening, and the first change of files ("a" is its target)
    **{
        f"{op} {nth} of {name}": f"disk.kill({op!r}, {nth}, match={name!r})"
        for name in JOURNAL_FILES
        for op in ("write", "sync")
        for nth in (1, 2)
    },
    **{
        f"{op} {nth}": f"disk.kill({op!r}, {nth})"
        for op, nth in (("allocate", 1), ("allocate", 2), ("sync_directory", 1))
    },
    # During the snapshot, the header, and a record
    **{
        f"snapshot at {keep}": f"disk.tear(1, {keep}, kill=True, match='journal.a')"
        for keep in (1, 16, 31, 32, 33, 100, 200, 5000)
    },
    **{
        f"header at {keep}": f"disk.tear(2, {keep}, kill=True, match='journal.a')"
        for keep in (1, 12, 31, 32)
    },
    **{
        f"record at {keep}": f"disk.tear(100, {keep}, kill=True, match='journal.b')"
        for keep in (0, 4, 47)
    },
}


@pytest.mark.parametrize("death", DEATHS)
def test_killed_process_loses_no_confirmed_record(tmp_path: Path, death: str) -> None:
    told = count_records_before_death(tmp_path, DEATHS[death])
    in_doubt = death.startswith("record")
    assert get_low(tmp_path) in {told, told + in_doubt}
