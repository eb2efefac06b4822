"""A restarted input continues exactly at its position, also without its positions file."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.inputs.files_harness import (
    StubHost,
    append,
    await_condition,
    make_lines,
    make_values,
    open_test_queue,
    run_input,
    settings,
)
from tests.queue_internals import state_of, store_of
from turnlane.errors import DirectoryUnusable
from turnlane.inputs.files import FilesInput
from turnlane.inputs.files.reader import FileReader, LineBatch


def saved(data: Path) -> Path:
    return data / "inputs" / "files.json"


def rewrite(data: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(saved(data).read_text())
    change(content)
    saved(data).write_text(json.dumps(content))


def test_restarted_input_continues_at_its_position(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    for start in range(0, 50, 10):
        append(log, make_lines(start, start + 10))
        with run_input(tmp_path / "data", log) as running:
            assert running.await_lines(start + 10) == make_values(0, start + 10)


def behind(data: Path) -> None:
    """Make the positions file older than the queue."""

    def change(content: dict[str, Any]) -> None:
        content["files"][0].update(offset=0, before=[0, "e4a6a0577479b2b4"])

    rewrite(data, change)


def missing(data: Path) -> None:
    saved(data).unlink()


def garbage(data: Path) -> None:
    saved(data).write_bytes(b'{"version": 1, "files": [{"key"')


def of_another_version(data: Path) -> None:
    rewrite(data, lambda content: content.update(version=99))


def senseless(data: Path) -> None:
    rewrite(data, lambda content: content["files"][0].update(offset=-5))


def mistyped(data: Path) -> None:
    rewrite(data, lambda content: content["files"][0].update(offset="600"))


def shortened(data: Path) -> None:
    rewrite(data, lambda content: content.pop("complete"))


@pytest.mark.parametrize(
    "harm", [behind, missing, garbage, of_another_version, senseless, mistyped, shortened]
)
@pytest.mark.parametrize("start_at", ["beginning", "end"])
def test_damaged_positions_file_is_replaced_by_the_queue(
    tmp_path: Path, harm: Callable[[Path], None], start_at: str
) -> None:
    log, data = tmp_path / "a.log", tmp_path / "data"
    with run_input(data, log, start_at=start_at) as running:
        log.write_bytes(make_lines(0, 100))
        running.await_lines(100)
    harm(data)
    append(log, make_lines(100, 110))
    with run_input(data, log, start_at=start_at) as running:
        assert running.await_lines(110) == make_values(0, 110)
        running.await_rounds()
        append(log, make_lines(110, 120))
        assert running.await_lines(120) == make_values(0, 120)
    kept = saved(data).with_name("files.json.bad").exists()
    assert kept == (harm not in {behind, missing})


def test_lost_positions_of_a_truncated_file_come_from_the_queue(tmp_path: Path) -> None:
    log, data = tmp_path / "a.log", tmp_path / "data"
    with run_input(data, log) as running:
        for generation in range(1, 4):
            log.write_bytes(b"same\n" + b"x\n" * (generation % 2))
            running.await_rounds()
            append(log, make_lines(0, generation))
            last = b"line %d" % (generation - 1)
            await_condition(lambda last=last: running.lines()[-1:] == [last])  # type: ignore[misc]
        count = running.queue.end
    saved(data).unlink()
    append(log, b"next\n")
    with run_input(data, log) as running:
        assert running.await_lines(count + 1)[-1] == b"next"


def test_file_renamed_between_two_runs_is_read_to_its_end(tmp_path: Path) -> None:
    """The rest of the old file is found under its new name, which no glob matches."""
    log, data = tmp_path / "a.log", tmp_path / "data"
    log.write_bytes(make_lines(0, 10))
    with run_input(data, log) as running:
        running.await_lines(10)
    append(log, make_lines(10, 20))
    log.rename(tmp_path / "rotated-away")
    log.write_bytes(make_lines(100, 105))
    with run_input(data, log) as running:
        lines = running.await_lines(25)
        assert sorted(lines) == sorted(make_values(0, 20) + make_values(100, 105))
        await_condition(lambda: len(running.input._tracker.readers) == 1)
    with run_input(data, log) as running:
        running.await_rounds()
        assert running.queue.end == 25


@pytest.mark.parametrize("refill", [make_lines(500, 505), make_lines(500, 1000)])
def test_file_truncated_between_two_runs_is_read_from_its_start(
    tmp_path: Path, refill: bytes
) -> None:
    log, data = tmp_path / "a.log", tmp_path / "data"
    log.write_bytes(b"head\n" + make_lines(0, 100))
    with run_input(data, log) as running:
        running.await_lines(101)
    log.write_bytes(b"head\n" + refill)
    with run_input(data, log) as running:
        lines = running.await_lines(102 + refill.count(b"\n"))
        assert lines[101:] == [b"head", *refill.splitlines()]


def test_reused_inode_under_another_name_is_not_read(tmp_path: Path) -> None:
    """Only the content shows that the file with the other name is not the old one."""
    log, data = tmp_path / "a.log", tmp_path / "data"
    log.write_bytes(make_lines(0, 100))
    with run_input(data, log) as running:
        running.await_lines(100)
    secret = tmp_path / "secret"
    log.rename(secret)
    with secret.open("r+b") as file:
        file.write(b"secret\n" * 1000)
    with run_input(data, log) as running:
        await_condition(lambda: not running.input._tracker.readers)
        assert running.queue.end == 100


def test_changed_device_number_keeps_the_positions(tmp_path: Path) -> None:
    log, data = tmp_path / "a.log", tmp_path / "data"
    log.write_bytes(make_lines(0, 10))
    with run_input(data, log) as running:
        running.await_lines(10)

    def reboot(content: dict[str, Any]) -> None:
        content["files"][0]["key"][0] += 1

    rewrite(data, reboot)
    append(log, make_lines(10, 20))
    for _ in range(2):
        with run_input(data, log) as running:
            assert running.await_lines(20) == make_values(0, 20)


def test_partial_line_published_before_a_restart_is_not_repeated(tmp_path: Path) -> None:
    log, data = tmp_path / "a.log", tmp_path / "data"
    log.write_bytes(b"one\ntwo")
    with run_input(data, log, partial_timeout=0.05) as running:
        running.await_lines(2)
    append(log, b"\nthree\n")
    with run_input(data, log) as running:
        assert running.await_lines(3) == [b"one", b"two", b"three"]


def test_deleted_files_are_forgotten_after_forget_after(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for number in range(3):
        (tmp_path / f"{number}.log").write_bytes(b"x%d\n" % number)
    with run_input(data, tmp_path / "*.log") as running:
        running.await_lines(3)
    (tmp_path / "0.log").unlink()
    (tmp_path / "new.log").write_bytes(b"new\n")
    with run_input(data, tmp_path / "*.log", forget_after="0s") as running:
        running.await_lines(4)
    paths = {Path(entry["path"]).name for entry in json.loads(saved(data).read_text())["files"]}
    assert paths == {"1.log", "2.log", "new.log"}


def test_more_files_than_producers_of_the_queue_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions are saved before the queue forgets its least active producers."""
    for module in ("turnlane.queues.state", "turnlane.inputs.files.input"):
        monkeypatch.setattr(f"{module}.MAX_SEQUENCES", 20)
    data = tmp_path / "data"
    for number in range(100):
        (tmp_path / f"{number}.log").write_bytes(b"line %d\n" % number)
    with open_test_queue(data, sync_interval=0.01) as queue:
        for _ in range(2):
            killed = FilesInput(settings(tmp_path / "*.log"), StubHost(data, queue))
            killed.prepare()
            most = 0
            publish = killed._publish

            def watched(reader: FileReader, batch: LineBatch) -> bool:
                nonlocal most
                most = max(most, len(killed._published_since_save))  # noqa: B023 - called before the next
                return publish(reader, batch)  # noqa: B023

            monkeypatch.setattr(killed, "_publish", watched)
            while killed.run_round():
                pass
            assert most < 20
            for reader in list(killed._open):
                reader.close()
            assert len(state_of(queue).sequences) == 20
            assert queue.end == 100


@pytest.mark.parametrize(
    "knobs",
    [
        {"kind": "disk", "sync_interval": 3600.0},
        {"kind": "disk_assisted", "size": 100, "high_watermark": 20, "low_watermark": 15},
    ],
    ids=["disk", "disk_assisted"],
)
def test_kill_after_a_part_of_a_block_is_settled_or_on_disk_skips_no_line(
    tmp_path: Path, knobs: dict[str, Any]
) -> None:
    """The queue must not take the number of an event inside of a block for a byte of the file."""
    log, data, left = tmp_path / "a.log", tmp_path / "data", tmp_path / "left"
    log.write_bytes(make_lines(0, 1))
    with open_test_queue(data, **knobs) as queue, run_input(data, log, queue=queue) as running:
        running.await_lines(1)
        if knobs["kind"] == "disk":  # the next sync is an hour away
            await_condition(lambda: store_of(queue).log.synced_end == 1)
        append(log, make_lines(1, 24))
        running.await_lines(24)
        queue.get(5).done()
        if knobs["kind"] == "disk_assisted":
            await_condition(lambda: store_of(queue).log.end > 0)
        shutil.copytree(data, left)  # as a kill leaves it
    with open_test_queue(left, **knobs) as queue, run_input(left, log, queue=queue) as running:
        await_condition(lambda: set(running.lines()) >= set(make_values(5, 24)))


def test_memory_queue_gets_undelivered_lines_again(tmp_path: Path) -> None:
    log, data = tmp_path / "a.log", tmp_path / "data"
    log.write_bytes(make_lines(0, 100))
    with (
        open_test_queue(data, kind="memory") as queue,
        run_input(data, log, queue=queue, read_buffer=64) as running,
    ):
        running.await_lines(100)
        taken: list[bytes] = []
        while len(taken) < 40:
            with queue.get(8) as batch:
                taken += [event.value or b"" for event in batch]
        reader = next(iter(running.input._tracker.readers.values()))
        await_condition(lambda: reader.progress.offset > 0)
    with (
        open_test_queue(data, kind="memory") as queue,
        run_input(data, log, queue=queue) as running,
    ):
        await_condition(lambda: running.lines()[-1:] == make_values(99, 100))
        lines = running.lines()
    first = int(lines[0].split()[1])
    assert 0 < first <= 40, "what was delivered is not read again, but for the last block"
    assert lines == make_values(first, 100)


def test_memory_queue_with_ack_accepted_gets_no_line_again(tmp_path: Path) -> None:
    log, data = tmp_path / "a.log", tmp_path / "data"
    log.write_bytes(make_lines(0, 100))
    with (
        open_test_queue(data, kind="memory") as queue,
        run_input(data, log, queue=queue, ack="accepted") as running,
    ):
        running.await_lines(100)
        reader = next(iter(running.input._tracker.readers.values()))
        await_condition(lambda: reader.progress.offset == log.stat().st_size)
    append(log, b"next\n")
    with (
        open_test_queue(data, kind="memory") as queue,
        run_input(data, log, queue=queue, ack="accepted") as running,
    ):
        assert running.await_lines(1) == [b"next"]


def test_unreadable_positions_are_reported_at_the_start(tmp_path: Path) -> None:
    data = tmp_path / "data"
    saved(data).mkdir(parents=True)

    class Nowhere:
        def __init__(self) -> None:
            self.data = data

        def queue(self, name: str) -> Any:
            return queue

    with open_test_queue(data) as queue, pytest.raises(DirectoryUnusable, match=r"files\.json"):
        FilesInput(settings("x"), Nowhere()).start()


def test_inputs_with_similar_names_have_separate_positions(tmp_path: Path) -> None:
    labels = ["web/x", "web_x", "web%2Fx"]
    logs = [tmp_path / f"{number}.log" for number in range(3)]
    for log in logs:
        append(log, make_lines(0, 5))
    with open_test_queue(tmp_path / "data", kind="memory") as queue:
        for _ in range(2):
            with contextlib.ExitStack() as started:
                every = [
                    started.enter_context(
                        run_input(tmp_path / "data", log, queue=queue, name=label, ack="accepted")
                    )
                    for label, log in zip(labels, logs, strict=True)
                ]
                await_condition(lambda: queue.end >= 15)
                for each in every:
                    each.await_rounds()
        assert queue.end == 15
