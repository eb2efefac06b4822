"""`turnlane queue verify`: it finds every fault and names its place."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.queue_commands import (
    CHUNK_0,
    chunks,
    contents,
    fault_of,
    fill,
    flip,
    frames,
    in_json,
    lines_in_json,
    succeeded,
    turnlane_queue,
)
from turnlane.storage.frames import HEADER_SIZE


def test_undamaged_queue_verifies_as_clean(stopped: Path) -> None:
    report = in_json("verify", stopped)
    assert report["clean"] is True
    assert report["findings"] == []
    assert (report["events"], report["pending"], report["frames"]) == (200, 185, 20)
    assert succeeded("verify", stopped).splitlines()[-1] == "clean"


def test_progress_is_shown_only_on_a_terminal(stopped: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "turnlane", "queue", "verify", str(stopped)]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, check=True)
    os.close(theirs)
    assert b"verifying" in os.read(ours, 1 << 16)
    os.close(ours)
    assert run.stdout.splitlines()[-1] == "clean"
    assert turnlane_queue("verify", stopped).stderr == ""


def test_verify_changes_nothing(killed: Path) -> None:
    with chunks(killed)[-1].open("ab") as file:
        file.write(b"torn")
    before = contents(killed)
    for command in ("verify", "peek", "export", "ledger", "repair --dry-run"):
        succeeded(*command.split(), killed)
    assert contents(killed) == before


@pytest.mark.parametrize("where", [HEADER_SIZE, HEADER_SIZE + 40])
def test_verify_names_the_frame_with_damaged_content(stopped: Path, where: int) -> None:
    chunk = chunks(stopped)[2]
    frame = frames(chunk)[1]
    flip(chunk, frame.byte + where)
    fault = fault_of(stopped)
    assert (fault["kind"], fault["file"]) == ("corrupt_payload", chunk.name)
    assert (fault["byte"], fault["length"]) == (frame.byte, frame.header.stored_size)
    lost = (frame.header.first, frame.header.end, 10)
    assert (fault["first"], fault["end"], fault["events"]) == lost
    text = turnlane_queue("verify", stopped).stdout
    assert f"FAULT {chunk.name}, byte {frame.byte}: " in text
    assert "1 fault, 10 events lost" in text


@pytest.mark.parametrize("where", [0, 8, 16, 20, 24])
def test_verify_names_the_frame_with_a_damaged_header(stopped: Path, where: int) -> None:
    chunk = chunks(stopped)[1]
    frame = frames(chunk)[0]
    flip(chunk, frame.byte + where)
    fault = fault_of(stopped)
    assert (fault["kind"], fault["file"]) == ("corrupt_header", chunk.name)
    assert (fault["byte"], fault["length"]) == (frame.byte, frame.header.stored_size)
    assert (fault["first"], fault["events"]) == (frame.header.first, 10)


def test_verify_finds_damage_in_the_last_frame(stopped: Path) -> None:
    chunk = chunks(stopped)[-1]
    frame = frames(chunk)[-1]
    flip(chunk, frame.byte + 1)
    fault = fault_of(stopped)
    assert (fault["file"], fault["byte"], fault["events"]) == (chunk.name, frame.byte, 10)


def test_damage_to_settled_events_is_a_note(stopped: Path) -> None:
    frame = frames(chunks(stopped)[0])[0]
    flip(chunks(stopped)[0], frame.byte + HEADER_SIZE)
    report = in_json("verify", stopped)
    (note,) = report["findings"]
    assert (note["fault"], note["byte"], note["kind"]) == (False, frame.byte, "corrupt_payload")


def test_damaged_schema_loses_the_whole_chunk(stopped: Path) -> None:
    flip(chunks(stopped)[1], 40)
    fault = fault_of(stopped)
    assert (fault["kind"], fault["file"], fault["byte"]) == ("schema", chunks(stopped)[1].name, 0)
    following = int(chunks(stopped)[2].stem, 16)
    assert fault["events"] == following - int(chunks(stopped)[1].stem, 16)


def test_verify_names_a_missing_chunk(stopped: Path) -> None:
    gone, following = chunks(stopped)[1:3]
    gone.unlink()
    fault = fault_of(stopped)
    assert (fault["kind"], fault["file"]) == ("missing", gone.name)
    assert (fault["first"], fault["end"]) == (int(gone.stem, 16), int(following.stem, 16))


@pytest.mark.parametrize("which", [0, -1])
def test_verify_names_a_missing_first_or_last_chunk(stopped: Path, which: int) -> None:
    gone = chunks(stopped)[which]
    lost = sum(frame.header.count for frame in frames(gone))
    gone.unlink()
    fault = fault_of(stopped)
    assert (fault["kind"], fault["byte"]) == ("missing", 0)
    if which:
        assert (fault["file"], fault["events"]) == (gone.name, lost)
    else:
        assert (fault["first"], fault["events"]) == (15, lost - 15)


def test_verify_names_a_truncated_chunk(stopped: Path) -> None:
    chunk = chunks(stopped)[1]
    frame = frames(chunk)[-1]
    os.truncate(chunk, frame.byte + 50)
    fault = fault_of(stopped)
    assert (fault["kind"], fault["file"], fault["byte"]) == ("truncated", chunk.name, frame.byte)
    assert fault["events"] == 10


def test_verify_finds_a_chunk_of_another_queue(stopped: Path, tmp_path: Path) -> None:
    fill(tmp_path / "other").close()
    shutil.copy(tmp_path / "other" / CHUNK_0, stopped / "000000000000ffff.chunk")
    fault = fault_of(stopped)
    assert (fault["kind"], fault["file"]) == ("foreign", "000000000000ffff.chunk")


def test_torn_tail_is_a_note(killed: Path) -> None:
    chunk = chunks(killed)[-1]
    size = chunk.stat().st_size
    with chunk.open("ab") as file:
        file.write(b"half a frame")
    report = in_json("verify", killed)
    (note,) = report["findings"]
    assert note["what"] == "torn tail, will be cut at next open"
    assert (note["fault"], note["file"], note["byte"]) == (False, chunk.name, size)
    assert note["length"] == len(b"half a frame")


def test_verify_checks_queue_json_and_the_journal(stopped: Path) -> None:
    (stopped / "queue.json").write_text("{")
    assert fault_of(stopped)["file"] == "queue.json"
    succeeded("repair", stopped)
    flip(stopped / "journal.a", 3)
    assert (fault_of(stopped)["file"], fault_of(stopped)["byte"]) == ("journal.a", 0)
    succeeded("repair", stopped)
    flip(stopped / "journal.b", 50)
    assert (fault_of(stopped)["file"], fault_of(stopped)["byte"]) == ("journal.b", 32)
    (stopped / "journal.b").unlink()
    assert "missing" in fault_of(stopped)["what"]


def test_running_queue_can_be_inspected(running: Path) -> None:
    report = in_json("verify", running)
    assert (report["running"], report["clean"], report["pending"]) == (os.getpid(), True, 185)
    assert lines_in_json("peek", running, "--json")[0]["offset"] == 15
    ledger = in_json("ledger", running)
    assert (ledger["accepted"], ledger["delivered"], ledger["pending"]) == (200, 15, 185)
    assert f"process {os.getpid()}" in ledger["not_included"]
