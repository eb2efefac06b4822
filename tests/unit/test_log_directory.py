"""The directory of a queue: its identity, its lock, and errors."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import pyarrow as pa
import pytest

from turnlane.errors import DirectoryLocked, DirectoryUnusable, NotAQueue
from turnlane.storage.directory import QueueDirectory
from turnlane.storage.disk_io import Disk
from turnlane.storage.frames import FrameKind, encode_frame
from turnlane.storage.segments import format_segment_name
from turnlane.testing import FaultyDisk

DISK = Disk()
ID = "0123456789abcdef" * 2
OTHER = "f" * 32


def write_chunk(path: Path, first: int, queue_id: str, form: bytes = b"1") -> None:
    marks: dict[bytes | str, bytes | str] = {
        b"turnlane.queue_id": queue_id.encode(),
        b"turnlane.format": form,
    }
    payload = pa.schema([("value", pa.binary())], marks).serialize()
    frame = encode_frame(FrameKind.SCHEMA, first, 0, [payload])
    (path / format_segment_name(first)).write_bytes(
        b"".join(bytes(memoryview(piece)) for piece in frame)
    )


def content(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def test_new_directory_gets_a_permanent_identity(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "orders"
    with QueueDirectory.open(path, DISK) as made:
        checked = f"1\n{made.queue_id}\norders"
        assert json.loads((path / "queue.json").read_bytes()) == {
            "format": 1,
            "queue_id": made.queue_id,
            "name": "orders",
            "crc": f"{google_crc32c.value(checked.encode()):08x}",
        }
        assert len(bytes.fromhex(made.queue_id)) == 16
    with QueueDirectory.open(path, DISK, name="another") as found:
        assert (found.queue_id, found.name) == (made.queue_id, "orders")


def test_two_queues_have_two_ids(tmp_path: Path) -> None:
    with (
        QueueDirectory.open(tmp_path / "a", DISK, "x") as a,
        QueueDirectory.open(tmp_path / "b", DISK) as b,
    ):
        assert a.queue_id != b.queue_id
        assert a.name == "x"


def test_directory_can_be_opened_once_in_a_process(tmp_path: Path) -> None:
    with (
        QueueDirectory.open(tmp_path, DISK),
        pytest.raises(DirectoryLocked, match=rf"{tmp_path}: held by this process"),
    ):
        QueueDirectory.open(tmp_path, DISK)
    QueueDirectory.open(tmp_path, DISK).close()


def test_directory_is_locked_until_its_process_ends(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from turnlane.storage.directory import QueueDirectory\n"
        "from turnlane.storage.disk_io import Disk\n"
        "held = QueueDirectory.open(Path(sys.argv[1]), Disk())\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DirectoryLocked, match=rf"process {holder.pid}$"):
            QueueDirectory.open(tmp_path, DISK)
        holder.kill()
    QueueDirectory.open(tmp_path, DISK).close()


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    directory = QueueDirectory.open(tmp_path, DISK)
    directory.close()
    with QueueDirectory.open(tmp_path, DISK):
        directory.close()
        with pytest.raises(DirectoryLocked):
            QueueDirectory.open(tmp_path, DISK)


def test_file_instead_of_a_directory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(DirectoryUnusable, match=rf"{path}: File exists"):
        QueueDirectory.open(path, DISK)


@pytest.mark.parametrize("op", ["open", "write", "sync", "rename", "sync_directory"])
def test_unwritable_directory_is_named_and_not_locked(tmp_path: Path, op: str) -> None:
    disk = FaultyDisk()
    match = {"open": "lock", "sync_directory": ""}.get(op, "queue.json")
    disk.fail(op, error=errno.EROFS, match=match)
    with pytest.raises(DirectoryUnusable, match=rf"{tmp_path}: Read-only file system"):
        QueueDirectory.open(tmp_path, disk)
    QueueDirectory.open(tmp_path, disk).close()


def test_directory_opens_on_a_full_disk(tmp_path: Path) -> None:
    QueueDirectory.open(tmp_path, DISK).close()
    (tmp_path / "lock").unlink()
    disk = FaultyDisk()
    disk.fill()
    with QueueDirectory.open(tmp_path, disk), pytest.raises(DirectoryLocked, match="unknown"):
        QueueDirectory.open(tmp_path, disk)


@pytest.mark.parametrize("known", [2, "1", None])
@pytest.mark.parametrize("opening", [QueueDirectory.open, QueueDirectory.read_only])
def test_unknown_format_is_refused_without_a_change(
    tmp_path: Path, known: object, opening: Callable[[Path, Disk], QueueDirectory]
) -> None:
    text = json.dumps({"format": known, "queue_id": ID, "name": "orders"})
    (tmp_path / "queue.json").write_text(text)
    before = content(tmp_path)
    with pytest.raises(NotAQueue, match="format"):
        opening(tmp_path, DISK)
    assert content(tmp_path) == before


@pytest.mark.parametrize("opening", [QueueDirectory.open, QueueDirectory.read_only])
def test_chunks_of_an_unknown_format_are_refused_without_a_change(
    tmp_path: Path, opening: Callable[[Path, Disk], QueueDirectory]
) -> None:
    write_chunk(tmp_path, 0, ID, form=b"2")
    before = content(tmp_path)
    with pytest.raises(NotAQueue, match="format 2"):
        opening(tmp_path, DISK)
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "[]",
        "7",
        '{"queue_id": "x"}',
        '{"format": 1, "queue_id": "../x", "name": "a"}',
    ],
)
def test_lost_identity_is_taken_from_the_newest_readable_chunk(
    tmp_path: Path, text: str | None
) -> None:
    write_chunk(tmp_path, 0, OTHER)
    write_chunk(tmp_path, 100, ID)
    (tmp_path / format_segment_name(200)).write_bytes(b"garbage")
    if text is not None:
        (tmp_path / "queue.json").write_text(text)
    assert QueueDirectory.read_only(tmp_path, DISK).queue_id == ID
    with QueueDirectory.open(tmp_path, DISK) as found:
        assert found.queue_id == ID
    assert json.loads((tmp_path / "queue.json").read_bytes())["queue_id"] == ID
    if text is not None:
        assert (tmp_path / "quarantine" / "queue.json").read_text() == text


def test_reading_needs_no_lock_and_writes_nothing(tmp_path: Path) -> None:
    with QueueDirectory.open(tmp_path, DISK) as held:
        before = content(tmp_path)
        with QueueDirectory.read_only(tmp_path, DISK) as seen:
            assert (seen.queue_id, seen.name) == (held.queue_id, held.name)
        assert content(tmp_path) == before


@pytest.mark.parametrize("name", [".", "absent"])
def test_reading_another_directory_raises_and_creates_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotAQueue, match=str(tmp_path)):
        QueueDirectory.read_only(tmp_path / name, DISK)
    assert not content(tmp_path)
    assert not (tmp_path / "absent").exists()


def test_directory_with_only_chunks_can_be_read(tmp_path: Path) -> None:
    (tmp_path / format_segment_name(0)).write_bytes(b"garbage")
    assert not QueueDirectory.read_only(tmp_path, DISK).queue_id
