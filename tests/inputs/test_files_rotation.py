"""Every line is read once, in order, when files are renamed, copied, truncated or deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.harness import wait_until
from tests.inputs.files_harness import append, await_condition, make_lines, make_values, run_input
from turnlane.inputs.files import FilesInput

WRITER = """
import pathlib, sys
directory, lines, each = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:])
path = directory / "app.log"
for start in range(0, lines, each):
    with open(path, "ab", buffering=0) as file:
        for first in range(start, start + each, 100):
            data = b"".join(b"line %d\\n" % number for number in range(first, first + 100))
            file.write(data[:333])
            file.write(data[333:])
        path.rename(directory / f"app.log.{start}")
"""


def test_fast_writer_with_renames_loses_no_line(tmp_path: Path) -> None:
    """Renames are faster than scans; the old names match the glob, so no line is missed."""
    logs, total, each = tmp_path / "logs", 100_000, 2_000
    logs.mkdir()
    orders = [sys.executable, "-c", WRITER, str(logs), str(total), str(each)]
    with run_input(tmp_path / "data", logs / "app.log*") as running:
        with subprocess.Popen(orders) as writer:
            lines = running.await_lines(total)
        assert writer.returncode == 0
    numbers = [int(line.split()[1]) for line in lines]
    # The lines of each file are in order; the order of the files is undefined.
    assert sorted(numbers, key=lambda number: number // each) == list(range(total))


def test_open_file_renamed_beyond_the_globs_is_read_to_its_end(tmp_path: Path) -> None:
    """An open file is read to its end, although it has no path that matches."""
    log, total = tmp_path / "app.log", 0
    with run_input(tmp_path / "data", log) as running:
        for _ in range(20):
            with log.open("ab", buffering=0) as file:
                file.write(make_lines(total, total + 10))
                inode = log.stat().st_ino
                await_condition(lambda i=inode: i in held(running.input))  # type: ignore[misc]
                for first in range(total + 10, total + 5000, 10):
                    file.write(make_lines(first, first + 10))
                total += 5000
            log.rename(tmp_path / f"kept.{total}")
        assert sorted(running.await_lines(total)) == sorted(make_values(0, total))


def held(running: FilesInput) -> set[int]:
    return {reader.key.inode for reader in list(running._open)}


def test_renamed_file_is_read_until_rotate_wait_is_over(tmp_path: Path) -> None:
    log, old = tmp_path / "a.log", tmp_path / "a.old"
    log.write_bytes(make_lines(0, 10))
    with run_input(tmp_path / "data", log, rotate_wait=0.3) as running:
        running.await_lines(10)
        log.rename(old)
        log.write_bytes(make_lines(100, 110))
        append(old, make_lines(10, 15) + b"no newline")  # the writer has not noticed the rotation
        lines = running.await_lines(26)
        assert [line for line in lines if line not in make_values(100, 110)] == [
            *make_values(0, 15),
            b"no newline",
        ]
        assert {source for source, _ in running.rows()} == {str(log)}
        await_condition(lambda: len(running.input._tracker.readers) == 1)


def test_deleted_file_is_read_to_its_end_and_closed(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"one\n")
        with run_input(tmp_path / "data", log) as running:
            running.await_lines(1)
            log.unlink()
            writer.write(b"two\nthree")
            assert running.await_lines(3) == [b"one", b"two", b"three"]
            await_condition(lambda: not running.input._open)
            log.write_bytes(b"four\n")
            assert running.await_lines(4)[-1] == b"four"


def test_truncated_file_is_read_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(make_lines(0, 100))
    with run_input(tmp_path / "data", log) as running:
        running.await_lines(100)
        os.truncate(log, 0)
        running.await_rounds()
        append(log, make_lines(0, 10))
        assert running.await_lines(110) == make_values(0, 100) + make_values(0, 10)
        assert running.input.counters.truncated == 1


def test_refilled_file_longer_than_before_is_read_from_its_start(tmp_path: Path) -> None:
    """Between two rounds the file became longer than before: only its content shows the change."""
    log = tmp_path / "a.log"
    log.write_bytes(b"same first line\n" + make_lines(0, 100))
    with run_input(tmp_path / "data", log, scan_interval=0.2) as running:
        running.await_lines(101)
        for start in (1000, 5000):
            running.await_rounds(1)
            shutil.copy(log, tmp_path / f"copy.{start}")
            with log.open("r+b") as file:
                file.truncate()
                file.write(b"same first line\n" + make_lines(start, start * 2))
            running.await_lines(sum((101, 1001, *([5001] * (start == 5000)))))
        assert running.lines()[101:1102] == [b"same first line", *make_values(1000, 2000)]
        assert running.lines()[1102:] == [b"same first line", *make_values(5000, 10_000)]
        assert running.input.counters.truncated == 2


@pytest.mark.parametrize("seen", [False, True], ids=["at once", "after it was seen"])
def test_writer_without_append_after_truncation_adds_no_line_of_zeros(
    tmp_path: Path, *, seen: bool
) -> None:
    """Without O_APPEND the file has a hole after a truncation: its zeros are not a line."""
    log = tmp_path / "a.log"
    with log.open("wb", buffering=0) as writer:
        writer.write(make_lines(0, 20_000))
        with run_input(tmp_path / "data", log) as running:
            running.await_lines(20_000)
            (reader,) = running.input._open
            os.truncate(log, 0)
            if seen:
                wait_until(lambda: reader.position == 0, "the truncation to be seen")
            writer.write(make_lines(20_000, 20_010))
            assert running.await_lines(20_010) == make_values(0, 20_010)


@pytest.mark.parametrize("hole", [8192, 8199, 65_536])
def test_hole_of_any_length_is_skipped(tmp_path: Path, hole: int) -> None:
    """A hole that ends with a page leaves no zeros in the data."""
    log = tmp_path / "a.log"
    with log.open("wb", buffering=0) as writer:
        writer.write(b"x" * (hole - 1) + b"\n")
        with run_input(tmp_path / "data", log) as running:
            running.await_lines(1)
            os.truncate(log, 0)
            writer.write(make_lines(0, 10))
            assert running.await_lines(11)[1:] == make_values(0, 10)


def test_fast_copytruncate_keeps_order_and_repeats_no_line(tmp_path: Path) -> None:
    """Lines written between copy and truncation are lost by the rotation, not by the reader."""
    log = tmp_path / "a.log"
    with (
        run_input(tmp_path / "data", log, scan_interval=0.01) as running,
        log.open("ab", buffering=0) as writer,
    ):
        written = 0
        for _ in range(20):
            for _ in range(50):
                writer.write(make_lines(written, written + 100))
                written += 100
            running.await_lines(written)  # so the rotation loses nothing
            shutil.copy(log, tmp_path / "copy")
            os.truncate(log, 0)
        assert running.await_lines(written) == make_values(0, written)
        await_condition(lambda: running.input.counters.truncated > 0)


def test_reused_inode_is_read_as_another_file(tmp_path: Path) -> None:
    """Inode and first line are the same: only the bytes before the position differ."""
    log = tmp_path / "a.log"
    log.write_bytes(b"head\n" + make_lines(0, 50))
    with run_input(tmp_path / "data", log, close_inactive=0) as running:
        running.await_lines(51)
        await_condition(lambda: not running.input._open)
        replaced_in_place(log, b"head\n" + make_lines(500, 600))
        assert running.await_lines(152)[51:] == [b"head", *make_values(500, 600)]


def replaced_in_place(path: Path, data: bytes) -> None:
    """Simulate a new file with the inode of a deleted file."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def test_folder_that_disappears_and_returns_is_followed(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "a.log").write_bytes(b"one\n")
    with run_input(tmp_path / "data", logs / "*.log") as running:
        running.await_lines(1)
        logs.rename(tmp_path / "away")
        await_condition(lambda: not running.input._tracker.readers)
        append(tmp_path / "away" / "a.log", b"two\n")
        (tmp_path / "away").rename(logs)
        assert running.await_lines(2) == [b"one", b"two"]
        shutil.rmtree(logs)
        await_condition(lambda: not running.input._tracker.readers)
        logs.mkdir()
        (logs / "a.log").write_bytes(b"three\n")
        assert running.await_lines(3)[-1] == b"three"
