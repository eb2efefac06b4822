"""Do the stand-ins fail as planned, and only then?"""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from turnlane.testing import FaultyDisk, ManualClock, PowerCutDisk


def test_manual_clock_moves_only_on_command() -> None:
    clock = ManualClock(time_ns=5_000_000_000, monotonic=10.0)
    assert (clock.time_ns(), clock.monotonic()) == (5_000_000_000, 10.0)
    clock.advance(1.5)
    assert (clock.time_ns(), clock.monotonic()) == (6_500_000_000, 11.5)


def test_jump_moves_only_the_wall_clock() -> None:
    clock = ManualClock(time_ns=5_000_000_000, monotonic=10.0)
    clock.jump(-2)
    assert (clock.time_ns(), clock.monotonic()) == (3_000_000_000, 10.0)


def test_negative_advance_is_refused() -> None:
    with pytest.raises(ValueError, match="jump"):
        ManualClock().advance(-1)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


def get_write_error(disk: FaultyDisk, fd: int, at: int = 0, data: bytes = b"x") -> int | None:
    """Return the errno of a write; ``None`` if it succeeded."""
    try:
        disk.write(fd, [data], at)
    except OSError as error:
        return error.errno
    return None


def test_fault_hits_the_nth_call_as_often_as_planned(disk: FaultyDisk, tmp_path: Path) -> None:
    fd = disk.open(tmp_path / "file", create=True)
    disk.fail("write", nth=2, times=2, error=errno.EROFS)
    outcomes = [get_write_error(disk, fd) for _ in range(4)]
    assert outcomes == [None, errno.EROFS, errno.EROFS, None]
    assert disk.operations["write"] == 4


def test_fault_without_end_lasts_until_cleared(disk: FaultyDisk, tmp_path: Path) -> None:
    fd = disk.open(tmp_path / "file", create=True)
    disk.fail("write", times=None)
    assert [get_write_error(disk, fd) for _ in range(3)] == [errno.EIO] * 3
    disk.clear()
    assert get_write_error(disk, fd) is None


def test_fault_with_match_hits_only_matching_files(disk: FaultyDisk, tmp_path: Path) -> None:
    good = disk.open(tmp_path / "good", create=True)
    bad = disk.open(tmp_path / "bad", create=True)
    disk.fail("sync", match="bad")
    disk.sync(good)
    with pytest.raises(OSError, match="bad"):
        disk.sync(bad)


def test_every_operation_can_fail(disk: FaultyDisk, tmp_path: Path) -> None:
    path = tmp_path / "file"
    fd = disk.open(path, create=True)
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: disk.open(path),
        "write": lambda: disk.write(fd, [b"x"], 0),
        "read": lambda: disk.read(fd, 1, 0),
        "sync": lambda: disk.sync(fd),
        "sync_directory": lambda: disk.sync_directory(tmp_path),
        "truncate": lambda: disk.truncate(fd, 0),
        "allocate": lambda: disk.allocate(fd, 8),
        "size": lambda: disk.size(fd),
        "rename": lambda: disk.rename(path, path),
        "unlink": lambda: disk.unlink(path),
        "listing": lambda: disk.listing(tmp_path),
        "free_bytes": lambda: disk.free_bytes(tmp_path),
        "close": lambda: disk.close(fd),
    }
    for op, call in calls.items():
        disk.fail(op)
        with pytest.raises(OSError, match="Input/output"):
            call()


def test_unknown_operation_is_refused(disk: FaultyDisk) -> None:
    with pytest.raises(ValueError, match="no operation 'fsync'; there are allocate"):
        disk.fail("fsync")


def test_torn_write_keeps_its_beginning(disk: FaultyDisk, tmp_path: Path) -> None:
    fd = disk.open(tmp_path / "file", create=True)
    disk.tear(nth=2, keep_bytes=3)
    disk.write(fd, [b"....."], 0)
    with pytest.raises(OSError, match="Input/output"):
        disk.write(fd, [b"ab", b"cd"], 0)
    assert (tmp_path / "file").read_bytes() == b"abc.."


def test_full_disk_writes_the_part_that_fits(disk: FaultyDisk, tmp_path: Path) -> None:
    fd = disk.open(tmp_path / "file", create=True)
    disk.fill(after_bytes=5)
    assert disk.free_bytes(tmp_path) == 5
    with pytest.raises(OSError, match="No space"):
        disk.write(fd, [b"abc", b"defg"], 0)
    assert (tmp_path / "file").read_bytes() == b"abcde"


def test_full_disk_accepts_allocated_bytes(disk: FaultyDisk, tmp_path: Path) -> None:
    fd = disk.open(tmp_path / "file", create=True)
    disk.allocate(fd, 100)
    disk.fill()
    assert get_write_error(disk, fd, 0, bytes(100)) is None
    assert get_write_error(disk, fd, 100) == errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        disk.allocate(fd, 101)


@pytest.mark.parametrize("way", ["unlink", "truncate", "rename", "drain", "unfill"])
def test_deleted_files_free_space(disk: FaultyDisk, tmp_path: Path, way: str) -> None:
    fd = disk.open(tmp_path / "file", create=True)
    other = disk.open(tmp_path / "other", create=True)
    disk.write(other, [bytes(10)], 0)
    disk.fill()
    assert get_write_error(disk, fd) == errno.ENOSPC
    {
        "unlink": lambda: disk.unlink(tmp_path / "other"),
        "truncate": lambda: disk.truncate(other, 0),
        "rename": lambda: disk.rename(tmp_path / "file", tmp_path / "other"),
        "drain": lambda: disk.drain(10),
        "unfill": disk.unfill,
    }[way]()
    assert get_write_error(disk, fd, 0, bytes(10)) is None
    assert get_write_error(disk, fd, 10) == (None if way == "unfill" else errno.ENOSPC)


def test_delayed_call_does_not_delay_others(disk: FaultyDisk, tmp_path: Path) -> None:
    slow = disk.open(tmp_path / "slow", create=True)
    fast = disk.open(tmp_path / "fast", create=True)
    disk.delay("sync", seconds=0.5, match="slow")
    thread = threading.Thread(target=disk.sync, args=(slow,))
    thread.start()
    disk.sync(fast)
    assert thread.is_alive()
    thread.join()


@pytest.mark.parametrize(
    ("plan", "left"),
    [
        ("disk.kill('write', nth=2)", b"...."),
        ("disk.tear(nth=2, keep_bytes=2, kill=True)", b"ab.."),
    ],
)
def test_planned_kill_kills_the_process(tmp_path: Path, plan: str, left: bytes) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from turnlane.testing import FaultyDisk\n"
        "disk = FaultyDisk()\n"
        f"{plan}\n"
        "fd = disk.open(Path(sys.argv[1]), create=True)\n"
        "disk.write(fd, [b'....'], 0)\n"
        "disk.write(fd, [b'abcd'], 0)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    path = tmp_path / "file"
    ended = subprocess.run([sys.executable, "-c", program, str(path)], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_bytes() == left


def draw_power_cuts(disk: PowerCutDisk, directory: Path) -> set[tuple[tuple[str, bytes], ...]]:
    """Return the states of a directory that 100 power cuts leave: names and contents."""
    states = set()
    for seed in range(100):
        copy = directory.with_name(f"copy-{seed}")
        disk.draw_power_cut(directory, copy, random.Random(seed))
        states.add(tuple((path.name, path.read_bytes()) for path in sorted(copy.iterdir())))
    return states


def test_power_cut_leaves_any_part_of_the_unsynced_sectors(tmp_path: Path) -> None:
    (tmp_path / "queue").mkdir()
    disk = PowerCutDisk()
    fd = disk.open(tmp_path / "queue/file", create=True)
    disk.write(fd, [b"-" * 1024], 0)
    disk.sync(fd)
    disk.sync_directory(tmp_path / "queue")
    disk.write(fd, [b"ab"], 511)
    contents = {content for ((_, content),) in draw_power_cuts(disk, tmp_path / "queue")}
    disk.close(fd)
    middles = {content[510:514] for content in contents}
    assert middles == {b"----", b"-a--", b"--b-", b"-ab-"}
    assert {content[:510] + content[514:] for content in contents} == {b"-" * 1020}


def test_power_cut_undoes_unsynced_names(tmp_path: Path) -> None:
    """A new file, a replaced one and a deleted one, independently of each other."""
    directory = tmp_path / "queue"
    directory.mkdir()
    for name in ("old", "deleted"):
        (directory / name).write_bytes(name.encode())
    disk = PowerCutDisk()
    with disk.open_file(directory / "new", create=True, write=True) as fd:
        disk.write(fd, [b"new"], 0)
        disk.sync(fd)
    disk.rename(directory / "new", directory / "old")
    disk.unlink(directory / "deleted")
    states = draw_power_cuts(disk, directory)
    before = (("deleted", b"deleted"), ("old", b"old"))
    created = (("deleted", b"deleted"), ("new", b"new"), ("old", b"old"))
    assert states == {
        before,
        created,
        (("deleted", b"deleted"), ("old", b"new")),
        *(state[1:] for state in (before, created)),
        (("old", b"new"),),
    }
    disk.sync_directory(directory)
    disk.draw_power_cut(directory, tmp_path / "synced", random.Random(0))
    assert [path.name for path in (tmp_path / "synced").iterdir()] == ["old"]
