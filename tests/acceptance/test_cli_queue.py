"""`turnlane queue …` as users run it: the real command, on real directories in every condition."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import typer.main

import turnlane
from tests.acceptance.queue_commands import (
    Row,
    chunks,
    fault_of,
    flip,
    frames,
    harm_by_deleting,
    in_json,
    lines_in_json,
    succeeded,
    turnlane_queue,
    values,
)
from turnlane.cli.app import app
from turnlane.errors import NotAQueue
from turnlane.events import block_of
from turnlane.storage.frames import HEADER_SIZE

ROOT = Path(__file__).parents[2]
COMMANDS = ("peek", "verify", "repair", "export", "ledger")
NOBODY = 65534


# ── peek ─────────────────────────────────────────────────────────────────────────────────────────


def test_peek_shows_the_next_unsettled_events(stopped: Path) -> None:
    shown = succeeded("peek", stopped).splitlines()
    assert shown[0].split() == ["offset", "time", "key", "value"]
    assert [line.split()[0] for line in shown[1:]] == [str(n) for n in range(15, 25)]
    assert shown[1].split() == ["15", "2023-11-14", "22:13:20.123", "event", "15"]


def test_peek_with_json_prints_one_object_per_event(stopped: Path) -> None:
    first, second = lines_in_json("peek", stopped, "--json", "--count", 2)
    assert first == {
        "offset": 15,
        "settled": False,
        "key": None,
        "value": "event 15",
        "headers": None,
        "timestamp": "2023-11-14T22:13:20.123456Z",
        "severity": None,
        "source": None,
    }
    assert second["offset"] == 16


def test_peek_from_an_offset_shows_settled_events_too(stopped: Path) -> None:
    rows = lines_in_json("peek", stopped, "--json", "--all", "--from", 13, "-n", 4)
    assert [(row["offset"], row["settled"]) for row in rows] == [
        (13, True),
        (14, True),
        (15, False),
        (16, False),
    ]
    assert "yes" in succeeded("peek", stopped, "--all")
    assert lines_in_json("peek", stopped, "--json", "--from", 199)[0]["value"] == "event 199"


def test_peek_shows_binary_values_in_hex(tmp_path: Path) -> None:
    with turnlane.open_queue(kind="disk", path=tmp_path / "q") as queue:
        producer = queue.producer(ack="persisted")
        producer.publish(b"\xff\x00", headers={"via": "web"}, key="k")
        producer.publish("grün\n".encode())
        producer.publish(b"x" * 10_000)
    raw, text, long = lines_in_json("peek", tmp_path / "q", "--json")
    assert base64.b64decode(raw["value_base64"]) == b"\xff\x00"
    assert "value" not in raw
    assert raw["headers"] == {"via": "web"}
    assert text["value"] == "grün\n"
    assert long["value"] == "x" * 10_000
    shown = turnlane_queue("peek", tmp_path / "q", env={**os.environ, "COLUMNS": "60"}).stdout
    assert "ff00" in shown
    assert "grün\\n" in shown
    assert all(len(line) <= 60 for line in shown.splitlines())


def test_peek_cuts_values_to_the_width_of_the_terminal(tmp_path: Path) -> None:
    with turnlane.open_queue(kind="disk", path=tmp_path / "q") as queue:
        block = block_of([b"v" * 110], timestamps=1_700_000_000_123_456, keys=["customer-7"])
        queue.producer().publish_block(block)
    for width in (80, 60):
        run = turnlane_queue("peek", tmp_path / "q", env={**os.environ, "COLUMNS": str(width)})
        row = run.stdout.splitlines()[1]
        assert row.split()[:3] == ["0", "2023-11-14", "22:13:20.123"]
        assert row.split()[3] == "customer-7"
        assert re.fullmatch("v+…", row.split()[4])
        assert len(row) == width


def test_peek_beyond_the_end_is_reported(stopped: Path, fastqueue: Path) -> None:
    said = "offset 500 is beyond the end: the queue ends before offset 200"
    assert succeeded("peek", stopped, "--from", 500).strip() == said
    run = turnlane_queue("peek", stopped, "--from", 500, "--json")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", f"turnlane: {said}\n")
    assert "beyond the end" in succeeded("peek", stopped, "--all", "--from", 200)
    assert "beyond the end" in succeeded("peek", fastqueue, "--from", 500)
    with turnlane.open_queue(kind="disk", path=stopped) as queue:
        while queue.stats().ledger.pending:
            queue.get().done()
    assert "nothing is pending from offset 30 on" in succeeded("peek", stopped, "--from", 30)


def test_peek_at_an_empty_queue_says_that_nothing_is_pending(tmp_path: Path) -> None:
    turnlane.open_queue(kind="disk", path=tmp_path / "q").close()
    assert "nothing is pending" in succeeded("peek", tmp_path / "q")
    assert succeeded("peek", tmp_path / "q", "--json") == ""


def test_peek_skips_damaged_events_and_reports_them(stopped: Path) -> None:
    frame = frames(chunks(stopped)[0])[1]
    flip(chunks(stopped)[0], frame.byte + HEADER_SIZE + 3)
    run = turnlane_queue("peek", stopped, "--json", "-n", 3)
    assert [json.loads(line)["offset"] for line in run.stdout.splitlines()] == [20, 21, 22]
    assert "5 events among these cannot be read" in run.stderr


# ── ledger ───────────────────────────────────────────────────────────────────────────────────────


def test_ledger_of_a_stopped_queue_adds_up(stopped: Path) -> None:
    ledger = in_json("ledger", stopped)
    assert ledger["accepted"] == 200
    assert (ledger["delivered"], ledger["dead"], ledger["dropped"]) == (15, 0, {})
    assert (ledger["pending"], ledger["adds_up"]) == (185, True)
    shown = succeeded("ledger", stopped)
    assert re.search(r"^accepted +200$", shown, re.MULTILINE)
    assert "200 accepted = 15 delivered + 0 dead + 185 pending" in shown
    assert "not included: " in shown


def test_ledger_of_a_killed_queue_adds_up(killed: Path) -> None:
    ledger = in_json("ledger", killed)
    assert (ledger["accepted"], ledger["delivered"], ledger["pending"]) == (100, 30, 70)


def test_ledger_counts_drops_by_reason(tmp_path: Path) -> None:
    knobs: Row = {"size": 10, "full_behavior": "drop_oldest"}
    with turnlane.open_queue(kind="disk", path=tmp_path / "q", **knobs) as queue:
        producer = queue.producer()
        for value in values(25):
            producer.publish(value)
        expected = queue.stats().ledger.as_dict()
    ledger = in_json("ledger", tmp_path / "q")
    assert {name: ledger[name] for name in expected} == expected
    assert ledger["dropped"]["oldest"] > 0


def test_ledger_that_does_not_add_up_is_reported(stopped: Path) -> None:
    lost = harm_by_deleting(stopped)
    ledger = in_json("ledger", stopped, code=1)
    assert (ledger["adds_up"], ledger["unaccounted"]) == (False, lost)
    assert "≠" in turnlane_queue("ledger", stopped).stdout


# ── FastQueue ────────────────────────────────────────────────────────────────────────────────────


def test_fastqueue_directory_can_be_inspected(fastqueue: Path, tmp_path: Path) -> None:
    second, third = lines_in_json("peek", fastqueue, "--json")
    assert (second["offset"], second["value"], second["settled"]) == (13, "second", False)
    assert base64.b64decode(third["value_base64"]) == b"\xff\x00"
    every = lines_in_json("peek", fastqueue, "--json", "--all")
    assert [(row["offset"], row["settled"]) for row in every] == [
        (0, True),
        (13, False),
        (27, False),
    ]
    assert in_json("verify", fastqueue)["clean"] is True
    succeeded("export", fastqueue, "-o", tmp_path / "x.parquet")
    table = pq.read_table(tmp_path / "x.parquet")
    assert table.column("value").to_pylist() == [b"second", b"\xff\x00"]


def test_verify_names_the_byte_of_a_fault_in_a_fastqueue_directory(fastqueue: Path) -> None:
    chunk = fastqueue / f"{0:016x}"
    flip(chunk, 13 + 7, bit=6)
    fault = fault_of(fastqueue)
    assert (fault["file"], fault["byte"]) == (chunk.name, 13)


@pytest.mark.parametrize("version", [1, 2])
def test_fastqueue_directory_is_imported_into_a_new_queue(
    fastqueue: Path, tmp_path: Path, version: int
) -> None:
    meta = fastqueue / "fastqueue.meta"
    fields = json.loads(meta.read_bytes())
    if version == 1:
        fields = {name: fields[name] for name in ("reader_offset", "writer_offset")}
    meta.write_text(json.dumps(fields | {"version": version}))
    assert "2 events" in succeeded("import", fastqueue, tmp_path / "new")
    with turnlane.open_queue(kind="disk", path=tmp_path / "new") as queue:
        assert [event.value for event in queue.get(timeout=5)] == [b"second", b"\xff\x00"]
    assert in_json("import", fastqueue, tmp_path / "all", "--all")["events"] == 3
    again = turnlane_queue("import", fastqueue, tmp_path / "new")
    assert (again.returncode, "exists" in again.stderr) == (2, True)
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("kind", ["disk", "disk_assisted"])
def test_fastqueue_directory_is_refused_as_a_queue_and_not_changed(
    fastqueue: Path, kind: str
) -> None:
    before = {file.name: file.read_bytes() for file in fastqueue.iterdir()}
    with pytest.raises(NotAQueue, match=f"turnlane queue import {fastqueue}"):
        turnlane.open_queue(kind=kind, path=fastqueue)
    assert {file.name: file.read_bytes() for file in fastqueue.iterdir()} == before


@pytest.mark.parametrize("command", ["ledger", "repair"])
def test_repair_of_a_fastqueue_directory_is_refused(fastqueue: Path, command: str) -> None:
    run = turnlane_queue(command, fastqueue)
    assert (run.returncode, run.stdout) == (1, "")
    assert "FastQueue" in run.stderr


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("command", COMMANDS)
def test_error_is_printed_without_a_traceback(command: str, tmp_path: Path, stopped: Path) -> None:
    nowhere = turnlane_queue(command, tmp_path / "nowhere")
    assert nowhere.returncode == 2
    assert "does not exist" in nowhere.stderr
    empty = turnlane_queue(command, tmp_path)
    assert empty.returncode == 1
    assert "holds neither queue.json nor chunks" in empty.stderr
    (stopped / "queue.json").write_text('{"format": 99}')
    newer = turnlane_queue(command, stopped)
    assert newer.returncode == 1
    assert "has format 99" in newer.stderr
    for run in (nowhere, empty, newer):
        assert "Traceback" not in run.stderr
        assert run.stdout == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_unreadable_directory_is_reported(command: str) -> None:
    is_root = os.geteuid() == 0
    unprivileged = f"from turnlane.cli import app, main; import os; os.setuid({NOBODY}); main()"
    start = ["-c", unprivileged] if is_root else ["-m", "turnlane"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # the directory is visible but not readable
        path = Path(folder) / "queue"
        turnlane.open_queue(kind="disk", path=path).close()
        path.chmod(0o700 if is_root else 0o000)
        run = subprocess.run(
            [sys.executable, *start, "queue", command, path],
            capture_output=True,
            text=True,
            check=False,
        )
        path.chmod(0o700)
    assert (run.returncode, run.stdout) == (1, "")
    assert "Permission denied" in run.stderr
    assert "Traceback" not in run.stderr


def test_closed_pipe_ends_the_command_quietly(stopped: Path) -> None:
    command = f"{sys.executable} -m turnlane queue export {stopped} | head -n 1"
    many = turnlane.open_queue(kind="disk", path=stopped)
    many.producer(ack="persisted").publish_block(block_of(values(20_000)))
    many.close()
    run = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (141, "")
    assert json.loads(run.stdout)["offset"] == 15


def test_interrupted_export_leaves_no_file(stopped: Path, tmp_path: Path) -> None:
    """The first block is interrupted as Ctrl-C would do it, at a moment that is always the same."""
    interrupt = (
        "import os, signal, turnlane.storage.export as export\n"
        # A shell's background job, as CI may be, has Ctrl-C ignored from the start.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "export.convert_to_rows = lambda piece: os.kill(os.getpid(), signal.SIGINT)\n"
        "from turnlane.cli import main; main()"
    )
    target = tmp_path / "out" / "events.jsonl"
    target.parent.mkdir()
    command = [sys.executable, "-c", interrupt, "queue", "export", str(stopped), "-o", str(target)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 130
    assert "Traceback" not in run.stderr
    assert list(target.parent.iterdir()) == []


# ── help ─────────────────────────────────────────────────────────────────────────────────────────


def test_version_and_help_are_printed() -> None:
    for start in (["-m", "turnlane"], ["-c", "from turnlane.cli import main; main()"]):
        run = subprocess.run(
            [sys.executable, *start, "--version"], capture_output=True, text=True, check=True
        )
        assert run.stdout == f"turnlane {turnlane.__version__}\n"
    installed = Path(sys.executable).with_name("turnlane")
    run = subprocess.run([installed, "--help"], capture_output=True, text=True, check=True)
    assert "queue" in run.stdout
    assert turnlane_queue().returncode == 2


def command_tree() -> Iterator[tuple[str, Any]]:
    def below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield name, command
        for child, inner in getattr(command, "commands", {}).items():
            yield from below(f"{name} {child}", inner)

    return below("turnlane", typer.main.get_command(app))


@pytest.mark.parametrize(("name", "command"), list(command_tree()))
def test_every_command_and_option_is_documented(name: str, command: Any) -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    section = page if name in {"turnlane", "turnlane queue"} else section_of(page, name)
    assert command.help, name
    for parameter in command.params:
        if getattr(parameter, "hidden", False):  # between `turnlane run` and its node
            continue
        for option in [*parameter.opts, *parameter.secondary_opts]:
            if option.startswith("-") and "completion" not in option:
                assert f"`{option}" in section or f", {option}" in section, f"{name} {option}"
                assert parameter.help, f"{name} {option} has no help"


def section_of(page: str, name: str) -> str:
    _, _, rest = page.partition(f"\n## {name}\n")
    assert rest, f"docs/cli.md has no section {name}"
    return rest.partition("\n## ")[0]
