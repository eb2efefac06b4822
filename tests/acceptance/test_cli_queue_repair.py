"""`turnlane queue repair`: does it mend what can be mended, and lose nothing that can be read?"""

from __future__ import annotations

import os
import pty
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.queue_commands import (
    KILLED,
    chunks,
    contents,
    drained,
    fault_of,
    flip,
    frames,
    harm_by_cutting,
    harm_by_deleting,
    harm_header,
    harm_payload,
    harm_schema,
    in_json,
    rows_exported,
    succeeded,
    turnlane_queue,
)
from turnlane.storage.frames import HEADER_SIZE

Harm = Callable[[Path], int]


def harm_several(path: Path) -> int:
    return harm_payload(path) + harm_header(path) + harm_schema(path)


HARMS = [harm_payload, harm_header, harm_schema, harm_by_deleting, harm_by_cutting, harm_several]


@pytest.mark.parametrize("harm", HARMS)
def test_repaired_queue_is_clean_and_keeps_readable_events(stopped: Path, harm: Harm) -> None:
    lost = harm(stopped)
    readable = [row["value"].encode() for row in rows_exported(stopped)]
    assert len(readable) == 185 - lost
    visible = harm is not harm_payload  # the ledger reads headers only
    assert in_json("ledger", stopped, code=int(visible))["adds_up"] is not visible
    result = in_json("repair", stopped)
    assert (result["saved"], sum(result["lost"].values())) == (185 - lost, lost)
    assert in_json("verify", stopped)["clean"] is True
    assert in_json("ledger", stopped)["pending"] == 185 - lost
    assert drained(stopped) == readable


def test_repair_never_deletes_unreadable_data(stopped: Path) -> None:
    chunk = chunks(stopped)[1]
    frame = frames(chunk)[0]
    flip(chunk, frame.byte + HEADER_SIZE)
    damaged = chunk.read_bytes()[frame.byte : frame.byte + frame.header.stored_size]
    result = in_json("repair", stopped)
    (kept,) = result["set_aside"]
    assert (stopped / kept).read_bytes() == damaged


def test_dry_run_of_repair_changes_nothing(stopped: Path) -> None:
    harm_payload(stopped)
    before = contents(stopped)
    said = succeeded("repair", stopped, "--dry-run")
    assert "repair copies the bytes to quarantine" in said
    assert "nothing was changed" in said
    assert contents(stopped) == before
    assert in_json("repair", stopped, "--dry-run")["repaired"] is False


def test_repair_recovers_acks_behind_a_damaged_record(killed: Path, tmp_path: Path) -> None:
    """A killed queue's journal: the first of its two records breaks, the second still counts."""
    path = tmp_path / "acks"
    script = KILLED.replace("get(30).done()", "get(30).done()\nqueue.get(20).done()")
    subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    journal = max(path.glob("journal.?"), key=lambda file: file.read_bytes()[8:16][::-1])
    length = struct.unpack_from("<Q", journal.read_bytes(), 16)[0]
    first_record = 32 + length + -length % 8
    damaged_at = first_record + 48  # behind the position record comes the first ack
    flip(journal, damaged_at + 20)
    fault = fault_of(path)
    assert (fault["file"], fault["byte"]) == (journal.name, damaged_at)
    before = journal.read_bytes()
    result = in_json("repair", path)
    assert result["recovered_acks"] == 1
    assert before in [(path / name).read_bytes() for name in result["set_aside"]]
    assert in_json("verify", path)["clean"] is True
    assert drained(path) == [b"%d" % n for n in [*range(30), *range(50, 100)]]


@pytest.mark.parametrize(("which", "reason"), [(1, "corrupt"), (-1, "missing")])
def test_verify_reports_the_same_counts_as_repair(stopped: Path, which: int, reason: str) -> None:
    """A damaged end of the last chunk is a torn tail; in any other chunk it is damage."""
    chunk = chunks(stopped)[which]
    os.truncate(chunk, frames(chunk)[-1].byte + 50)
    fault = fault_of(stopped)
    assert (fault["kind"], fault["events"]) == ("truncated", 10)
    assert fault["todo"].endswith(f"counts the events as {reason}")
    assert in_json("repair", stopped)["lost"] == {reason: 10}


def test_repair_cuts_a_torn_tail(killed: Path) -> None:
    with chunks(killed)[-1].open("ab") as file:
        file.write(b"torn!")
    (kept,) = in_json("repair", killed)["set_aside"]
    assert (killed / kept).read_bytes() == b"torn!"
    assert in_json("verify", killed)["clean"] is True
    assert drained(killed) == [b"%d" % n for n in range(30, 100)]


def test_repair_of_a_clean_queue_changes_nothing(stopped: Path) -> None:
    before = contents(stopped)
    assert "there is nothing to repair" in succeeded("repair", stopped)
    result = in_json("repair", stopped)
    assert result.pop("path") == str(stopped)
    assert result == {
        "dry_run": False,
        "repaired": False,
        "saved": 185,
        "lost": {},
        "recovered_acks": 0,
        "set_aside": [],
        "findings": [],
    }
    assert contents(stopped) == before


def test_repair_of_a_running_queue_is_refused(running: Path) -> None:
    run = turnlane_queue("repair", running)
    assert run.returncode == 75
    assert f"held by process {os.getpid()}" in run.stderr


@pytest.mark.parametrize(("answer", "asked"), [("n", True), ("y", True), ("", False)])
def test_repair_asks_for_confirmation_only_on_a_terminal(
    stopped: Path, answer: str, asked: bool
) -> None:
    harm_payload(stopped)
    command = [sys.executable, "-m", "turnlane", "queue", "repair", str(stopped)]
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    run = subprocess.run(
        command if asked else [*command, "--yes"],
        stdin=theirs,
        capture_output=True,
        text=True,
        check=False,
    )
    os.close(ours)
    os.close(theirs)
    assert ("Repair?" in run.stderr) is asked
    refused = answer == "n"
    assert run.returncode == (1 if refused else 0)
    assert ("repaired: " in run.stdout) is not refused
