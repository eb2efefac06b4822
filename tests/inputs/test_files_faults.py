"""No line is lost when the disk, the queue or a file fails."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from tests.contract.harness import assert_never
from tests.inputs.files_harness import (
    append,
    await_condition,
    make_lines,
    make_values,
    open_test_queue,
    run_input,
)
from turnlane.inputs.files.reader import AckProgress
from turnlane.queues.api import Ack, AckLevel, Durability
from turnlane.testing import FaultyDisk


def lost(count: int, end: int) -> Ack:
    return Ack(0, count, end, AckLevel.PERSISTED, Durability.ALWAYS)


def test_full_disk_delays_lines_and_loses_none(tmp_path: Path) -> None:
    log, data, disk = tmp_path / "a.log", tmp_path / "data", FaultyDisk()
    with (
        open_test_queue(data, disk, sync_interval=0.01, chunk_size="64Ki") as queue,
        run_input(data, log, queue=queue, disk=disk) as running,
    ):
        log.write_bytes(make_lines(0, 10))
        running.await_lines(10)
        disk.fill(1000)
        for start in range(10, 60_010, 5000):
            append(log, make_lines(start, start + 5000))
        await_condition(lambda: queue.stats().disk_full > 0)
        disk.unfill()
        assert running.await_lines(60_010) == make_values(0, 60_010)
    with run_input(data, log) as running:
        append(log, b"next\n")
        assert running.await_lines(60_011)[-1] == b"next"


def test_new_file_is_not_published_before_its_id_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a kill could make it a new file again, although the queue has its lines."""
    data, disk = tmp_path / "data", FaultyDisk()
    old, new = tmp_path / "old.log", tmp_path / "new.log"
    old.write_bytes(b"one\n")
    with run_input(data, tmp_path / "*.log", disk=disk) as running:
        running.await_lines(1)
        disk.fail("sync", error=errno.EIO, times=None, match="files.json")
        new.write_bytes(b"new\n")
        await_condition(lambda: "files.save_failed" in caplog.text)
        append(old, b"two\n")
        assert running.await_lines(2) == [b"one", b"two"]
        assert_never(lambda: running.queue.end > 2)
        disk.clear()
        assert running.await_lines(3)[-1] == b"new"
    assert caplog.text.count("files.save_failed") == 1


def test_unreadable_file_does_not_affect_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = tmp_path / "bad.log", tmp_path / "good.log"
    bad.symlink_to("/proc/self/mem")  # no process can read its first byte
    good.write_bytes(b"one\n")
    with run_input(tmp_path / "data", tmp_path / "*.log") as running:
        running.await_lines(1)
        await_condition(lambda: running.input.counters.failed > 2)
        append(good, b"two\n")
        running.await_lines(2)
        bad.unlink()
        bad.write_bytes(b"well again\n")
        assert running.await_lines(3)[-1] == b"well again"
    assert caplog.text.count("files.read_failed") == 1


def test_symlink_loop_does_not_affect_other_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A link to itself cannot be opened, and not even examined."""
    (tmp_path / "loop.log").symlink_to("loop.log")
    good = tmp_path / "other.log"
    good.write_bytes(b"one\n")
    with run_input(tmp_path / "data", tmp_path / "*.log") as seen:
        assert seen.await_lines(1) == [b"one"]
    assert f"files.stat_failed path={tmp_path}/loop.log" in caplog.text


def test_file_deleted_while_the_queue_is_full_is_read(tmp_path: Path) -> None:
    data, log = tmp_path / "data", tmp_path / "a.log"
    log.write_bytes(make_lines(0, 100))
    taken: list[bytes] = []
    with (
        open_test_queue(data, size=20) as queue,
        run_input(data, tmp_path / "*.log", queue=queue) as running,
    ):
        await_condition(lambda: queue.end >= 20)
        short = tmp_path / "short.log"
        short.write_bytes(b"short\n")
        await_condition(
            lambda: any(reader.path == str(short) for reader in list(running.input._open))
        )
        short.unlink()
        while len(taken) < 101:
            with queue.get(timeout=10) as batch:
                taken += [event.value or b"" for event in batch]
    assert sorted(taken) == sorted([*make_values(0, 100), b"short"])


def test_stop_with_a_full_queue_returns_soon(tmp_path: Path) -> None:
    data, log = tmp_path / "data", tmp_path / "a.log"
    log.write_bytes(make_lines(0, 100))
    with open_test_queue(data, size=20) as queue:
        with run_input(data, log, queue=queue) as running:
            await_condition(lambda: queue.end >= 20)
            began = time.monotonic()
            running.input.stop(0.0)
            assert time.monotonic() - began < 4
            assert not running.input._open
        before = queue.end
        with run_input(data, log, queue=queue):
            taken: list[bytes] = []
            while len(taken) < 100:
                with queue.get(timeout=10) as batch:
                    taken += [event.value or b"" for event in batch]
    assert taken == make_values(0, 100), f"the first {before} were there before"


def test_closed_queue_ends_the_input(tmp_path: Path) -> None:
    data, log = tmp_path / "data", tmp_path / "a.log"
    log.write_bytes(b"one\n")
    with open_test_queue(data) as queue, run_input(data, log, queue=queue) as running:
        running.await_lines(1)
        queue.close()
        append(log, b"two\n")
        thread = running.input._thread
        assert thread is not None
        await_condition(lambda: not thread.is_alive())
    with run_input(data, log) as running:
        assert running.await_lines(2) == [b"one", b"two"]


def test_unexpected_error_is_logged_and_reading_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"one\n")
    with run_input(tmp_path / "data", log) as running:
        running.await_lines(1)
        with monkeypatch.context() as patch:
            patch.setattr(running.input._scanner, "scan", lambda: 1 // 0)
            await_condition(lambda: "ZeroDivisionError" in caplog.text)
        append(log, b"two\n")
        assert running.await_lines(2) == [b"one", b"two"]


def test_lines_lost_by_the_queue_are_read_again(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(make_lines(0, 10))
    with run_input(tmp_path / "data", log) as running:
        running.await_lines(10)
        reader = next(iter(running.input._tracker.readers.values()))
        await_condition(lambda: reader.progress.is_settled)
        acked, end = reader.progress.offset, running.queue.end
        append(log, make_lines(10, 15))
        running.await_lines(15)
        # Simulate a loss after a failed sync: the last five lines were never acked.
        again = AckProgress(acked, reader.progress.before)
        again.handle_ack(lost(5, end + 5), drops_are_losses=True)
        reader.progress = again
        assert running.await_lines(20) == make_values(0, 15) + make_values(10, 15)


def test_loss_stops_the_acked_position() -> None:
    progress = AckProgress()
    mark = progress.before
    progress.add_published(10, 100, mark)
    progress.add_published(None, 120, mark)  # all dropped by policy: no ack comes
    progress.add_published(20, 200, mark)
    progress.handle_ack(
        Ack(10, 0, 10, AckLevel.PERSISTED, Durability.ALWAYS), drops_are_losses=True
    )
    assert progress.offset == 120
    progress.handle_ack(lost(10, 20), drops_are_losses=False)
    assert (progress.offset, progress.is_settled) == (200, True)
    progress.add_published(None, 250, mark)
    assert progress.offset == 250
    progress.add_published(30, 300, mark)
    progress.handle_ack(lost(10, 30), drops_are_losses=True)
    assert (progress.offset, progress.has_losses) == (250, True)
