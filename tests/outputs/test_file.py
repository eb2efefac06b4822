"""Is every line complete and in exactly one file, with rotation and after kills?"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from tests.contract.harness import Task, wait_until
from tests.outputs.blocks import make_block, make_values
from turnlane.errors import StorageFailed
from turnlane.outputs.file import MIN_UNCACHED_BYTES, FileOutput, FileOutputSettings
from turnlane.testing import ManualClock

NOON = 1_795_003_200_000_000_000  # 2026-11-18T12:00:00Z


def make_output(path: Path, clock: ManualClock | None = None, **knobs: Any) -> FileOutput:
    settings = FileOutputSettings.model_validate({"type": "file", "path": path, **knobs})
    return FileOutput(settings) if clock is None else FileOutput(settings, clock)


def write(output: FileOutput, first: int, end: int) -> None:
    output.send(output.prepare(make_block(make_values(first, end))))


def read_text(path: Path) -> bytes:
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes())
    if path.suffix == ".zst":
        stream: Any = pa.CompressedInputStream(str(path), "zstd")
        with stream:
            return bytes(stream.read())
    return path.read_bytes()


def list_files(folder: Path) -> list[str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in found)


def read_lines(folder: Path) -> list[bytes]:
    return b"".join(read_text(folder / name) for name in list_files(folder)).splitlines()


def test_events_are_appended_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events"
    with make_output(path, sync=True) as output:
        output.check()
        write(output, 0, 3)
        output.send(output.prepare(make_block([])))
        write(output, 3, 5)
    assert path.read_bytes().splitlines() == make_values(0, 5)


@pytest.mark.parametrize(("compress", "ending"), [("none", ""), ("gzip", ".gz"), ("zstd", ".zst")])
def test_full_file_is_numbered_and_compressed(tmp_path: Path, compress: str, ending: str) -> None:
    with make_output(tmp_path / "events", rotate_size=100, compress=compress) as output:
        for first in range(0, 40, 5):
            write(output, first, first + 5)  # 40 or 45 bytes
    rotated = [f"events.{number}{ending}" for number in range(1, 4)]
    assert list_files(tmp_path) == sorted(["events", *rotated])
    in_order = [*rotated, "events"]
    found = b"".join(read_text(tmp_path / name) for name in in_order)
    assert found.splitlines() == make_values(0, 40)
    assert all(len(read_text(tmp_path / name)) <= 100 for name in rotated)


def test_batch_larger_than_rotate_size_stays_in_one_file(tmp_path: Path) -> None:
    with make_output(tmp_path / "events", rotate_size=100) as output:
        write(output, 0, 100)
        write(output, 100, 101)
    assert (tmp_path / "events.1").read_bytes().splitlines() == make_values(0, 100)
    assert (tmp_path / "events").read_bytes().splitlines() == make_values(100, 101)


def test_path_with_time_rotates_when_the_time_changes(tmp_path: Path) -> None:
    clock = ManualClock(time_ns=NOON)
    with make_output(tmp_path / "%Y-%m-%d" / "%H%%.log", clock, compress="gzip") as output:
        write(output, 0, 2)
        clock.advance(3600)
        write(output, 2, 4)
        clock.advance(86_400)
        write(output, 4, 6)
    assert list_files(tmp_path) == [
        "2026-11-18/12%.log.gz",
        "2026-11-18/13%.log.gz",
        "2026-11-19/13%.log",
    ]
    assert read_lines(tmp_path) == make_values(0, 6)


def test_keep_removes_the_oldest_files_and_no_files_of_others(tmp_path: Path) -> None:
    clock = ManualClock(time_ns=NOON)
    others = ["alerts.log", "2026-11-1.log", "2026-11-18.log.old", "2026-11-18.log.1.bz2"]
    for name in others:
        (tmp_path / name).write_text("of another program\n")
    with make_output(
        tmp_path / "%Y-%m-%d.log", clock, rotate_size=20, compress="zstd", keep=3
    ) as output:
        for number in range(8):
            write(output, number, number + 1)
            output.close()  # wait for the cleanup: the last written file is the youngest
            clock.advance(43_200)
    ours = set(list_files(tmp_path)) - set(others)
    kept = [read_text(tmp_path / name).splitlines() for name in sorted(ours)]
    assert kept == [make_values(1, 3), make_values(3, 5), make_values(5, 7), make_values(7, 8)]
    assert set(others) < set(list_files(tmp_path))


def test_next_rotation_compresses_files_of_a_killed_task(tmp_path: Path) -> None:
    """One task was killed before compressing, one before it removed the original."""
    (tmp_path / "events.1").write_bytes(b"event 0\n")
    (tmp_path / "events.2").write_bytes(b"event 1\n")
    (tmp_path / "events.2.gz").write_bytes(gzip.compress(b"event 1\n"))
    (tmp_path / ".events.1.gz.unfinished").write_bytes(b"half")
    (tmp_path / "events").write_bytes(b"event 2\n")
    with make_output(tmp_path / "events", rotate_size=10, compress="gzip") as output:
        write(output, 3, 4)
    # A file that may be a copy is kept.
    assert Counter(read_lines(tmp_path)) == Counter([*make_values(0, 4), b"event 1"])
    assert all(name == "events" or name.endswith(".gz") for name in list_files(tmp_path))


def start_writer(
    knobs: dict[str, Any], name: str, batches: int, width: int
) -> subprocess.Popen[bytes]:
    arguments = [json.dumps(knobs), name, str(batches), str(width)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.outputs.file_writer", *arguments],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )


def test_several_processes_write_to_one_rotating_file_without_loss(tmp_path: Path) -> None:
    """No line is lost, repeated or torn, and no file is rotated twice."""
    knobs = {
        "type": "file",
        "path": str(tmp_path / "events"),
        "rotate_size": "10k",
        "compress": "gzip",
    }
    writers = [start_writer(knobs, name, 100, 20) for name in "abc"]
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    expected = [
        b"%s %d %d %s" % (name.encode(), number, at, b"x" * 20)
        for name in "abc"
        for number in range(100)
        for at in range(10)
    ]
    assert sorted(read_lines(tmp_path)) == sorted(expected)
    rotated = [name for name in list_files(tmp_path) if name != "events"]
    assert len(rotated) == len({re.findall(r"\d+", name)[0] for name in rotated})
    sizes = [len(read_text(tmp_path / name)) for name in rotated]
    largest = max(len(line) + 1 for line in expected) * 10  # a batch
    assert all(10_000 - largest < size <= 10_000 for size in sizes), (
        "each file was rotated when it was full"
    )


def test_killed_writer_loses_no_reported_line(tmp_path: Path) -> None:
    knobs = {"type": "file", "path": str(tmp_path / "events"), "rotate_size": "20M"}
    reported: dict[str, int] = {}
    for name in "ab":
        writer = start_writer(
            knobs, name, -1, 100_000
        )  # a batch has a megabyte, so that most kills tear one
        assert writer.stdout is not None
        reported[name] = read_number(writer.stdout, enough=5)
        writer.kill()
        rest = writer.communicate(timeout=60)[0].split()
        reported[name] = int(rest[-1]) if rest else reported[name]
    with make_output(tmp_path / "events", rotate_size="20M") as output:
        write(output, 0, 1)
    lines = read_lines(tmp_path)
    whole = re.compile(rb"[ab] \d+ \d x{100000}")
    torn = [line for line in lines if not whole.fullmatch(line) and line != b"event 0"]
    assert all(re.fullmatch(rb"[ab]( (\d+( (\d( x*)?)?)?)?)?", line) for line in torn)
    assert len({line[:1] for line in torn}) == len(torn), "at most one for each kill"
    found = Counter(tuple(line.split()[:3]) for line in lines if line not in torn)
    for name, last in reported.items():
        for number in range(last + 1):
            for at in range(10):
                assert found[name.encode(), b"%d" % number, b"%d" % at] == 1


def read_number(stream: IO[bytes], enough: int) -> int:
    return next(number for number in map(int, stream) if number >= enough)


@pytest.mark.parametrize(
    "left", [b"half", b"event 0\n" + b"x" * 200_000, bytes(1_000_000)], ids=["half", "long", "nuls"]
)
def test_existing_contents_of_a_file_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, left: bytes
) -> None:
    """Half a line of a killed task looks like the last line of another program."""
    path = tmp_path / "events"
    path.write_bytes(left)
    with make_output(path) as output:
        write(output, 1, 2)
        write(output, 2, 3)
    assert path.read_bytes() == left + b"\nevent 1\nevent 2\n"
    assert caplog.text.count("file.last_line_incomplete") == 1


def test_incomplete_last_line_is_ended_before_rotation(tmp_path: Path) -> None:
    (tmp_path / "events").write_bytes(b"half")
    with make_output(tmp_path / "events", rotate_size=10) as output:
        write(output, 0, 1)
    assert (tmp_path / "events.1").read_bytes() == b"half\n"
    assert (tmp_path / "events").read_bytes() == b"event 0\n"


def test_failed_write_leaves_no_part_of_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes some bytes and is full afterwards."""
    output = make_output(tmp_path / "events")
    write(output, 0, 2)
    real, calls = os.write, [0]

    def full(fd: int, data: memoryview) -> int:
        calls[0] += 1
        if calls[0] > 1:
            raise OSError(28, "No space left on device")
        return real(fd, data[:5])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(StorageFailed, match="No space left"):
            write(output, 2, 4)
    write(output, 2, 4)
    assert (tmp_path / "events").read_bytes().splitlines() == make_values(0, 4)


def test_file_that_cannot_be_written_raises_a_retryable_error(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    output = make_output(tmp_path / "events")
    with pytest.raises(StorageFailed, match="Is a directory"):
        write(output, 0, 1)
    with pytest.raises(StorageFailed, match="Is a directory"):
        output.check()


def test_events_can_be_written_to_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    output = make_output(tmp_path / "pipe", rotate_size=1)
    writing = Task(lambda: write(output, 0, 3))
    with (tmp_path / "pipe").open("rb") as pipe:
        assert pipe.read().splitlines() == make_values(0, 3)
    wait_until(lambda: not writing.running, "the writer to be done")


def test_failing_device_reports_the_reason() -> None:
    """A device cannot be truncated after a failed write."""
    with pytest.raises(StorageFailed, match="/dev/full: No space left on device"):
        write(make_output(Path("/dev/full")), 0, 1)


LARGE_BATCH = 300_000
"""Lines of several megabytes, which are written past the page cache."""


def test_large_batch_is_appended_past_the_page_cache(tmp_path: Path) -> None:
    with make_output(tmp_path / "events") as output:
        write(output, 0, 2)
        write(output, 2, LARGE_BATCH)
        write(output, LARGE_BATCH, LARGE_BATCH + 2)
    assert (tmp_path / "events").stat().st_size > MIN_UNCACHED_BYTES
    assert (tmp_path / "events").read_bytes().splitlines() == make_values(0, LARGE_BATCH + 2)


def test_large_batch_can_be_written_to_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writing = Task(lambda: write(make_output(tmp_path / "pipe"), 0, LARGE_BATCH))
    with (tmp_path / "pipe").open("rb") as pipe:
        assert pipe.read().splitlines() == make_values(0, LARGE_BATCH)
    wait_until(lambda: not writing.running, "the writer to be done")


@pytest.mark.parametrize(
    "answer",
    [
        OSError(errno.EOPNOTSUPP, "Operation not supported"),
        OSError(errno.EINVAL, "Invalid argument"),
        NotImplementedError("pwritev2: flags unavailable on this platform"),
    ],
)
def test_kernel_without_uncached_writes_gets_plain_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Exception
) -> None:
    def fail(*_: Any) -> int:
        raise answer

    monkeypatch.setattr(os, "pwritev", fail)
    with make_output(tmp_path / "events") as output:
        write(output, 0, LARGE_BATCH)
    assert (tmp_path / "events").read_bytes().splitlines() == make_values(0, LARGE_BATCH)


def test_full_disk_leaves_no_part_of_a_large_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = make_output(tmp_path / "events")
    write(output, 0, 2)
    real, calls = os.pwritev, [0]

    def full(fd: int, pieces: list[memoryview], place: int, flags: int) -> int:
        calls[0] += 1
        if calls[0] > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, [pieces[0][: MIN_UNCACHED_BYTES // 2]], place, flags)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", full)
        with pytest.raises(StorageFailed, match="No space left"):
            write(output, 2, LARGE_BATCH)
    assert (tmp_path / "events").read_bytes().splitlines() == make_values(0, 2)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"path": "%x.log"}, "%x is not supported; use %Y"),
        ({"path": "out%"}, "% is not supported"),
        ({"path": "a", "keep": 3}, "needs rotate_size"),
        ({"path": "a%%", "compress": "gzip"}, "needs rotate_size"),
    ],
)
def test_impossible_settings_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FileOutputSettings.model_validate({"type": "file", **knobs})
