"""Files that only grow: which lines of which files are published, in which pieces."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.contract.harness import wait_until
from tests.inputs.files_harness import (
    append,
    await_condition,
    make_lines,
    make_values,
    open_test_queue,
    run_input,
    settings,
)
from turnlane.errors import NoSuchQueue
from turnlane.formats.lines import split_lines
from turnlane.inputs.api import load
from turnlane.inputs.files import FilesInput
from turnlane.inputs.files import input as files_input


def plainly_cut(data: bytes, longest: int, *, whole: bool) -> tuple[list[bytes], int]:
    """Split line by line as ``split_lines`` does; return the lines and the used bytes."""
    lines, used = [], 0
    for line in data.splitlines(keepends=True) if b"\r" not in data else _split(data):
        body = line.removesuffix(b"\n")
        ended = body != line
        body = body.removesuffix(b"\r") if ended else body
        if not ended and not whole:
            while len(data) - used > longest:
                lines.append(data[used : used + longest])
                used += longest
            break
        pieces = [body[at : at + longest] for at in range(0, len(body), longest)] or [b""]
        lines += pieces
        used += len(line)
    return lines, used


def _split(data: bytes) -> list[bytes]:
    pieces = data.split(b"\n")
    return [piece + b"\n" for piece in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])


@given(
    st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"0123456789"])).map(b"".join),
    st.integers(1, 12),
    st.booleans(),
)
def test_vectorised_split_equals_a_split_line_by_line(
    data: bytes, longest: int, whole: bool
) -> None:
    expected, used = plainly_cut(data, longest, whole=whole)
    lines = split_lines(data, longest, whole=whole)
    if lines is None:
        assert not expected
    else:
        assert lines.values.to_pylist() == expected
        assert lines.ends[-1] == used
        assert (lines.ends[1:] > lines.ends[:-1]).all()
        lines.values.validate(full=True)


def test_type_files_loads_the_input() -> None:
    assert load("files") is FilesInput


def test_lines_are_published_in_order_with_their_source(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(make_lines(0, 1000))
    with run_input(tmp_path / "data", tmp_path / "*.log") as running:
        running.await_lines(1000)
        append(log, make_lines(1000, 2000))
        assert running.await_lines(2000) == make_values(0, 2000)
        assert {source for source, _ in running.rows()} == {str(log)}
        await_condition(lambda: running.input.counters.events == 2000)
        assert running.input.counters.bytes == log.stat().st_size


def test_events_have_arrival_time_and_file_offset(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"a\nbcd\r\n\ne\n")
    with run_input(tmp_path / "data", log, offsets=True) as running:
        running.await_lines(4)
        found = running.queue.read(0, 10)
        assert found is not None
        assert found[1].column("file_offset").to_pylist() == [0, 2, 7, 8]
        assert found[1].column("timestamp").null_count == 0


def test_partial_line_waits_for_its_newline(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"one\ntw")
    with run_input(tmp_path / "data", log) as running:
        running.await_lines(1)
        append(log, b"o, and")
        running.await_rounds()
        assert running.lines() == [b"one"]
        append(log, b" more\n")
        assert running.await_lines(2) == [b"one", b"two, and more"]


def test_partial_line_is_published_after_partial_timeout(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"one\ntw")
    with run_input(tmp_path / "data", log, partial_timeout=0.1) as running:
        assert running.await_lines(2) == [b"one", b"tw"]
        append(log, b"\nthree\n")  # the newline ends the published line
        assert running.await_lines(3) == [b"one", b"tw", b"three"]
        append(log, b"four\n")
        assert running.await_lines(4)[3] == b"four"
        assert running.input.counters.truncated == 0


def test_file_of_one_partial_line_is_published_after_partial_timeout(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"only")
    with run_input(tmp_path / "data", log, partial_timeout=0.1) as running:
        assert running.await_lines(1) == [b"only"]


def test_long_lines_are_split_and_counted(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 250 + b"\nshort\n" + b"y" * 130)
    with run_input(tmp_path / "data", log, max_line_bytes=100, read_buffer=64) as running:
        lines = running.await_lines(5)
        assert [len(line) for line in lines] == [100, 100, 50, 5, 100]
        append(log, b"z\n")
        assert running.await_lines(6)[5] == b"y" * 30 + b"z"
        await_condition(lambda: running.input.counters.split == 3)


def test_line_longer_than_the_read_buffer_is_published_whole(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 5000 + b"\n" + make_lines(0, 50))
    with run_input(tmp_path / "data", log, read_buffer=64) as running:
        assert running.await_lines(51) == [b"x" * 5000, *make_values(0, 50)]


def test_lines_larger_than_the_event_limit_are_split(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 10_000 + b"\n")
    data = tmp_path / "data"
    with (
        open_test_queue(data, max_event_bytes=4096) as queue,
        run_input(data, log, queue=queue) as running,
    ):
        await_condition(lambda: running.input.counters.split == 2)
        assert b"".join(running.lines()) == b"x" * 10_000


def test_blocks_larger_than_the_queue_enter_in_parts(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(make_lines(0, 5000))
    data = tmp_path / "data"
    taken: list[bytes] = []
    with open_test_queue(data, size=64) as queue, run_input(data, log, queue=queue):
        while len(taken) < 5000:
            with queue.get(timeout=10) as batch:
                taken += [event.value or b"" for event in batch]
    assert taken == make_values(0, 5000)


def test_globs_match_nested_folders_except_excluded_files(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for name in ("a.log", "x/b.log", "x/y/c.log", "x/debug.log", "old/d.log", "e.txt"):
        (logs / name).parent.mkdir(parents=True, exist_ok=True)
        (logs / name).write_bytes(name.encode() + b"\n")
    exclude = ("debug*", f"{logs}/old/*")
    with run_input(tmp_path / "data", f"{logs}/**/*.log", exclude=exclude) as running:
        running.await_lines(3)
        (logs / "new").mkdir()
        (logs / "new" / "f.log").write_bytes(b"new/f.log\n")
        lines = running.await_lines(4)
    assert sorted(lines) == [b"a.log", b"new/f.log", b"x/b.log", b"x/y/c.log"]


def test_globs_without_a_match_wait_for_files(tmp_path: Path) -> None:
    later = tmp_path / "nowhere" / "a.log"
    with run_input(tmp_path / "data", later) as running:
        running.await_rounds()
        assert running.queue.end == 0
        later.parent.mkdir()
        later.write_bytes(b"here\n")
        assert running.await_lines(1) == [b"here"]


def test_compressed_files_are_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.log.1.gz").write_bytes(gzip.compress(b"no\n"))
    (tmp_path / "a.log").write_bytes(b"yes\n")
    with run_input(tmp_path / "data", tmp_path / "a.log*") as running:
        assert running.await_lines(1) == [b"yes"]
        running.await_rounds()
    assert caplog.text.count("files.compressed_ignored") == 1


def test_file_with_two_names_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"once\n")
    (tmp_path / "b.log").symlink_to(tmp_path / "a.log")
    (tmp_path / "c.log").hardlink_to(tmp_path / "a.log")
    (tmp_path / "d.log").symlink_to(tmp_path / "nowhere")
    (tmp_path / "e.log").mkdir()
    os.mkfifo(tmp_path / "f.log")
    with run_input(tmp_path / "data", tmp_path / "*.log") as running:
        running.await_lines(1)
        running.await_rounds()
        assert running.rows() == [(str(tmp_path / "a.log"), b"once")]


def test_switched_symlink_leads_to_the_new_file(tmp_path: Path) -> None:
    link = tmp_path / "current.log"
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(name.encode() + b"\n")
    link.symlink_to(tmp_path / "one")
    with run_input(tmp_path / "data", link) as running:
        running.await_lines(1)
        fresh = tmp_path / "fresh"
        fresh.symlink_to(tmp_path / "two")
        fresh.replace(link)
        running.await_lines(2)
        append(tmp_path / "two", b"three\n")
        assert running.await_lines(3) == [b"one", b"two", b"three"]


def test_start_at_end_skips_only_old_lines_of_old_files(tmp_path: Path) -> None:
    old, new = tmp_path / "old.log", tmp_path / "new.log"
    old.write_bytes(make_lines(0, 10))
    for start, expected in ((10, 2), (11, 4)):  # `start_at` applies only to the first start
        with run_input(tmp_path / "data", tmp_path / "*.log", start_at="end") as running:
            append(old, make_lines(start, start + 1))
            append(new, b"new\n")
            running.await_lines(expected)
    with run_input(tmp_path / "data", tmp_path / "*.log", start_at="end") as running:
        (tmp_path / "newer.log").write_bytes(b"newer\n")
        lines = running.await_lines(5)
    assert sorted(lines) == [b"line 10", b"line 11", b"new", b"new", b"newer"]


def test_files_older_than_ignore_older_are_ignored_until_they_change(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"old\n")
    os.utime(log, (0, 0))
    with run_input(tmp_path / "data", log, ignore_older="1h") as running:
        running.await_rounds()
        assert running.queue.end == 0
        append(log, b"new\n")
        assert running.await_lines(2) == [b"old", b"new"]


def test_path_that_is_not_utf8_becomes_a_readable_source(tmp_path: Path) -> None:
    with (tmp_path / os.fsdecode(b"caf\xe9.log")).open("wb") as file:
        file.write(b"hello\n")
    for _ in range(2):
        with run_input(tmp_path / "data", tmp_path / "*.log") as running:
            running.await_lines(1)
            assert running.rows()[0][0].endswith("caf�.log")


def test_idle_files_are_closed_and_still_followed(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"one\n")
    with run_input(tmp_path / "data", log, close_inactive=0) as running:
        running.await_lines(1)
        await_condition(lambda: not running.input._open)
        append(log, b"two\n")
        assert running.await_lines(2) == [b"one", b"two"]


def test_more_files_than_the_open_limit_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_input, "_compute_max_open_files", lambda: 100)  # far fewer than files
    logs = [tmp_path / f"{number}.log" for number in range(2000)]
    for log in logs:
        log.write_bytes(b"first of " + log.name.encode() + b"\n")
    with run_input(tmp_path / "data", tmp_path / "*.log") as running:
        running.await_lines(2000)
        wait_until(lambda: len(running.input._open) <= 100, "files to be closed again", 60)
        for log in logs[::10]:
            append(log, b"second of " + log.name.encode() + b"\n")
        lines = running.await_lines(2200)
    assert len(set(lines)) == 2200
    with run_input(tmp_path / "data", tmp_path / "*.log") as running:
        append(logs[7], b"third\n")
        assert running.await_lines(2201)[-1] == b"third"


def test_wrong_settings_are_refused() -> None:
    assert settings("a.log").paths == (str(Path("a.log").absolute()),)
    for wrong in ({"paths": ()}, {"paths": ("",)}, {"scan_interval": 0}, {"max_line_bytes": 0}):
        with pytest.raises(ValidationError):
            settings("x", **wrong)


def test_missing_queue_is_reported_at_the_start(tmp_path: Path) -> None:
    class Nobody:
        data = tmp_path

        def queue(self, name: str) -> None:
            raise NoSuchQueue(name)

    with pytest.raises(NoSuchQueue):
        FilesInput(settings("x"), Nobody()).start()  # type: ignore[arg-type]
