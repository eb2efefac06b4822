"""`turnlane queue …` as users run it: the real command, on real directories in every condition."""

from __future__ import annotations

import base64
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer.main

import turnlane
from turnlane.cli.app import app
from turnlane.events import block_of, values_of
from turnlane.queues.log.chunks import Whole, scan
from turnlane.queues.log.files import Disk
from turnlane.queues.log.frames import HEADER_SIZE

ROOT = Path(__file__).parents[2]
COMMANDS = ("peek", "verify", "repair", "export", "ledger")
CHUNK_0 = "0000000000000000.chunk"
NOBODY = 65534

Run = subprocess.CompletedProcess[str]
Row = dict[str, Any]

KILLED = """
import os, signal, sys, turnlane
from turnlane.events import block_of, values_of

queue = turnlane.open_queue(kind="disk", path=sys.argv[1], durability="always")
queue.producer(ack="persisted").publish_block(block_of([b"%d" % n for n in range(100)]))
queue.get(30).done()
os.kill(os.getpid(), signal.SIGKILL)
"""


def turnlane_queue(*args: object, **options: Any) -> Run:
    command = [sys.executable, "-m", "turnlane", "queue", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def succeeded(*args: object) -> str:
    run = turnlane_queue(*args)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def in_json(*args: object, code: int = 0) -> Row:
    run = turnlane_queue(*args, "--json")
    assert run.returncode == code, run.stdout + run.stderr
    result: Row = json.loads(run.stdout)
    return result


def lines_in_json(*args: object) -> list[Row]:
    return [json.loads(line) for line in succeeded(*args).splitlines()]


def values(count: int, first: int = 0) -> list[bytes]:
    return [b"event %d" % number for number in range(first, first + count)]


def fill(path: Path, blocks: int = 20, **knobs: Any) -> turnlane.Queue:
    """A queue of several chunks, ten events a frame, still open."""
    queue = turnlane.open_queue(
        kind="disk", path=path, durability="always", chunk_size="2Ki", compression="none", **knobs
    )
    producer = queue.producer(ack="persisted")
    for number in range(blocks):
        producer.publish_block(block_of(values(10, 10 * number), timestamps=1_700_000_000_123_456))
    return queue


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """200 events, the first 15 settled."""
    queue = fill(tmp_path / "orders", name="orders")
    queue.get(15).done()
    queue.close()
    return tmp_path / "orders"


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """100 events, the first 30 settled, by a process that was killed."""
    path = tmp_path / "killed"
    run = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert run.returncode == -signal.SIGKILL
    return path


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    with fill(tmp_path / "running") as queue:
        queue.get(15).done()
        yield tmp_path / "running"


@pytest.fixture
def fastqueue(tmp_path: Path) -> Path:
    """Three blocks as FastQueue writes them, the first of which it has handed out."""
    path = tmp_path / "fast"
    path.mkdir()
    blocks = [struct.pack("<Q", len(data)) + data for data in (b"first", b"second", b"\xff\x00")]
    (path / f"{0:016x}").write_bytes(b"".join(blocks))
    ends = {"reader_offset": len(blocks[0]), "writer_offset": sum(map(len, blocks))}
    counts = {"entry_count": 2, "total_bytes": 8}
    (path / "fastqueue.meta").write_text(json.dumps({"version": 2, **ends, **counts}))
    return path


def chunks(path: Path) -> list[Path]:
    return sorted(path.glob("*.chunk"))


def frames(chunk: Path) -> list[Whole]:
    """The frames with events in a chunk, in order."""
    fd = os.open(chunk, os.O_RDONLY)
    try:
        found = [item for item in scan(Disk(), fd, 0, 0) if isinstance(item, Whole)]
    finally:
        os.close(fd)
    return found[1:]


def flip(path: Path, byte: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def fault_of(path: Path) -> Row:
    """The only fault that verify finds."""
    report = in_json("verify", path, code=1)
    assert report["clean"] is False
    (fault,) = [finding for finding in report["findings"] if finding["fault"]]
    assert isinstance(fault, dict)
    return fault


def drained(path: Path) -> list[bytes | None]:
    found: list[bytes | None] = []
    with turnlane.open_queue(kind="disk", path=path) as queue:
        while queue.stats().ledger.pending:
            with queue.get() as batch:
                found += values_of([batch.block])
    return found


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


# ── peek ─────────────────────────────────────────────────────────────────────────────────────────


def test_peek_shows_the_next_unsettled_events(stopped: Path) -> None:
    shown = succeeded("peek", stopped).splitlines()
    assert shown[0].split() == ["offset", "time", "key", "value"]
    assert [line.split()[0] for line in shown[1:]] == [str(n) for n in range(15, 25)]
    assert shown[1].split() == ["15", "2023-11-14", "22:13:20.123", "event", "15"]


def test_peek_in_json(stopped: Path) -> None:
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


def test_peek_from_an_offset_and_at_settled_ones(stopped: Path) -> None:
    rows = lines_in_json("peek", stopped, "--json", "--all", "--from", 13, "-n", 4)
    assert [(row["offset"], row["settled"]) for row in rows] == [
        (13, True),
        (14, True),
        (15, False),
        (16, False),
    ]
    assert "yes" in succeeded("peek", stopped, "--all")
    assert lines_in_json("peek", stopped, "--json", "--from", 199)[0]["value"] == "event 199"


def test_peek_at_what_is_not_text(tmp_path: Path) -> None:
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


def test_peek_gives_values_what_the_other_columns_leave(tmp_path: Path) -> None:
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


def test_peek_beyond_the_end_says_so(stopped: Path, fastqueue: Path) -> None:
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


def test_peek_at_an_empty_queue(tmp_path: Path) -> None:
    turnlane.open_queue(kind="disk", path=tmp_path / "q").close()
    assert "nothing is pending" in succeeded("peek", tmp_path / "q")
    assert succeeded("peek", tmp_path / "q", "--json") == ""


def test_peek_passes_over_damage_and_says_so(stopped: Path) -> None:
    frame = frames(chunks(stopped)[0])[1]
    flip(chunks(stopped)[0], frame.byte + HEADER_SIZE + 3)
    run = turnlane_queue("peek", stopped, "--json", "-n", 3)
    assert [json.loads(line)["offset"] for line in run.stdout.splitlines()] == [20, 21, 22]
    assert "5 events among these cannot be read" in run.stderr


# ── verify ───────────────────────────────────────────────────────────────────────────────────────


def test_a_sound_queue_verifies_as_clean(stopped: Path) -> None:
    report = in_json("verify", stopped)
    assert report["clean"] is True
    assert report["findings"] == []
    assert (report["events"], report["pending"], report["frames"]) == (200, 185, 20)
    assert succeeded("verify", stopped).splitlines()[-1] == "clean"


def test_progress_is_shown_in_a_terminal_and_nowhere_else(stopped: Path) -> None:
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
    assert (fault["byte"], fault["length"]) == (frame.byte, frame.header.stored)
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
    assert (fault["byte"], fault["length"]) == (frame.byte, frame.header.stored)
    assert (fault["first"], fault["events"]) == (frame.header.first, 10)


def test_verify_finds_damage_in_the_very_last_frame(stopped: Path) -> None:
    chunk = chunks(stopped)[-1]
    frame = frames(chunk)[-1]
    flip(chunk, frame.byte + 1)
    fault = fault_of(stopped)
    assert (fault["file"], fault["byte"], fault["events"]) == (chunk.name, frame.byte, 10)


def test_damage_to_settled_events_is_only_noted(stopped: Path) -> None:
    frame = frames(chunks(stopped)[0])[0]
    flip(chunks(stopped)[0], frame.byte + HEADER_SIZE)
    report = in_json("verify", stopped)
    (note,) = report["findings"]
    assert (note["fault"], note["byte"], note["kind"]) == (False, frame.byte, "corrupt_payload")


def test_a_damaged_schema_costs_the_whole_chunk(stopped: Path) -> None:
    flip(chunks(stopped)[1], 40)
    fault = fault_of(stopped)
    assert (fault["kind"], fault["file"], fault["byte"]) == ("schema", chunks(stopped)[1].name, 0)
    following = int(chunks(stopped)[2].stem, 16)
    assert fault["events"] == following - int(chunks(stopped)[1].stem, 16)


def test_verify_names_a_chunk_that_is_missing(stopped: Path) -> None:
    gone, following = chunks(stopped)[1:3]
    gone.unlink()
    fault = fault_of(stopped)
    assert (fault["kind"], fault["file"]) == ("missing", gone.name)
    assert (fault["first"], fault["end"]) == (int(gone.stem, 16), int(following.stem, 16))


@pytest.mark.parametrize("which", [0, -1])
def test_verify_names_the_first_or_last_chunk_if_that_is_missing(stopped: Path, which: int) -> None:
    gone = chunks(stopped)[which]
    lost = sum(frame.header.count for frame in frames(gone))
    gone.unlink()
    fault = fault_of(stopped)
    assert (fault["kind"], fault["byte"]) == ("missing", 0)
    if which:
        assert (fault["file"], fault["events"]) == (gone.name, lost)
    else:
        assert (fault["first"], fault["events"]) == (15, lost - 15)


def test_verify_names_a_chunk_that_was_cut_short(stopped: Path) -> None:
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


def test_a_torn_tail_is_a_note(killed: Path) -> None:
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


def test_a_running_queue_can_be_looked_at(running: Path) -> None:
    report = in_json("verify", running)
    assert (report["running"], report["clean"], report["pending"]) == (os.getpid(), True, 185)
    assert lines_in_json("peek", running, "--json")[0]["offset"] == 15
    ledger = in_json("ledger", running)
    assert (ledger["accepted"], ledger["delivered"], ledger["pending"]) == (200, 15, 185)
    assert f"process {os.getpid()}" in ledger["not_included"]


# ── repair ───────────────────────────────────────────────────────────────────────────────────────

Harm = Callable[[Path], int]


def harm_payload(path: Path) -> int:
    flip(chunks(path)[1], frames(chunks(path)[1])[0].byte + HEADER_SIZE)
    return 10


def harm_header(path: Path) -> int:
    flip(chunks(path)[1], frames(chunks(path)[1])[1].byte)
    return 10


def harm_schema(path: Path) -> int:
    lost = sum(frame.header.count for frame in frames(chunks(path)[2]))
    flip(chunks(path)[2], 5)
    return lost


def harm_by_deleting(path: Path) -> int:
    lost = sum(frame.header.count for frame in frames(chunks(path)[-1]))
    chunks(path)[-1].unlink()
    return lost


def harm_by_cutting(path: Path) -> int:
    os.truncate(chunks(path)[1], frames(chunks(path)[1])[-1].byte + 8)
    return 10


def harm_several(path: Path) -> int:
    return harm_payload(path) + harm_header(path) + harm_schema(path)


HARMS = [harm_payload, harm_header, harm_schema, harm_by_deleting, harm_by_cutting, harm_several]


@pytest.mark.parametrize("harm", HARMS)
def test_a_repaired_queue_is_clean_and_keeps_all_that_can_be_read(
    stopped: Path, harm: Harm
) -> None:
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


def rows_exported(path: Path) -> list[Row]:
    return [json.loads(line) for line in turnlane_queue("export", path).stdout.splitlines()]


def test_repair_never_deletes_what_cannot_be_read(stopped: Path) -> None:
    chunk = chunks(stopped)[1]
    frame = frames(chunk)[0]
    flip(chunk, frame.byte + HEADER_SIZE)
    damaged = chunk.read_bytes()[frame.byte : frame.byte + frame.header.stored]
    result = in_json("repair", stopped)
    (kept,) = result["set_aside"]
    assert (stopped / kept).read_bytes() == damaged


def test_a_dry_run_only_says_what_it_would_do(stopped: Path) -> None:
    harm_payload(stopped)
    before = contents(stopped)
    said = succeeded("repair", stopped, "--dry-run")
    assert "repair copies the bytes to quarantine" in said
    assert "nothing was changed" in said
    assert contents(stopped) == before
    assert in_json("repair", stopped, "--dry-run")["repaired"] is False


def test_acks_behind_a_damaged_record_are_recovered(killed: Path, tmp_path: Path) -> None:
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
def test_verify_says_how_repair_will_count(stopped: Path, which: int, reason: str) -> None:
    """The end of the last chunk is a torn tail; that of any other is damage in the middle."""
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


def test_there_may_be_nothing_to_repair(stopped: Path) -> None:
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


def test_a_running_queue_is_not_repaired(running: Path) -> None:
    run = turnlane_queue("repair", running)
    assert run.returncode == 75
    assert f"held by process {os.getpid()}" in run.stderr


@pytest.mark.parametrize(("answer", "asked"), [("n", True), ("y", True), ("", False)])
def test_repair_asks_only_at_a_terminal(stopped: Path, answer: str, asked: bool) -> None:
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


# ── export ───────────────────────────────────────────────────────────────────────────────────────


def publish_typed(path: Path) -> list[pa.RecordBatch]:
    """Two blocks, the second with columns of its own, so that two chunks differ in schema."""
    plain = block_of(
        [b"a", b"\xff", b""],
        timestamps=[1, 2, 3],
        keys=["k", None, ""],
        headers=[{"h": "1"}, None, {}],
        severities=[1, None, 7],
        sources=["s", None, None],
    )
    extra = pa.record_batch(
        {
            "value": pa.array([b"b", b"c"], pa.binary()),
            "timestamp": pa.array([4, 5], pa.timestamp("us", tz="UTC")),
            "amount": pa.array([1.5, None], pa.float64()),
            "tags": pa.array([["x", "y"], []], pa.list_(pa.string())),
            "offset": pa.array([7, 8], pa.int32()),
        }
    )
    with turnlane.open_queue(kind="disk", path=path, durability="always") as queue:
        producer = queue.producer(ack="persisted")
        producer.publish_block(plain)
        producer.publish_block(extra)
    return [plain, extra]


def test_parquet_keeps_what_was_published(tmp_path: Path) -> None:
    plain, extra = publish_typed(tmp_path / "q")
    target = tmp_path / "events.parquet"
    assert in_json("export", tmp_path / "q", "--output", target) == {
        "output": str(target),
        "format": "parquet",
        "events": 5,
        "unreadable": 0,
    }
    table = pq.read_table(target)
    assert table.column("offset").to_pylist() == [0, 1, 2, 3, 4]
    for name in plain.schema.names:
        assert table.schema.field(name).type == plain.schema.field(name).type
        assert table.column(name).to_pylist()[:3] == plain.column(name).to_pylist()
    assert table.schema.field("amount").type == pa.float64()
    assert table.column("amount").to_pylist() == [None, None, None, 1.5, None]
    assert table.column("tags").to_pylist()[3:] == extra.column("tags").to_pylist()
    assert table.column("offset_").to_pylist()[3:] == [7, 8]
    assert table.column("value").to_pylist()[3:] == [b"b", b"c"]


def test_json_lines_keep_what_was_published(tmp_path: Path) -> None:
    plain, extra = publish_typed(tmp_path / "q")
    target = tmp_path / "events.jsonl"
    succeeded("export", tmp_path / "q", "-o", target)
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert rows == lines_in_json("export", tmp_path / "q")
    found = [
        row["value"].encode() if "value" in row else base64.b64decode(row["value_base64"])
        for row in rows
    ]
    assert found == plain.column("value").to_pylist() + extra.column("value").to_pylist()
    assert [row["headers"] for row in rows] == [{"h": "1"}, None, {}, None, None]
    assert [row["severity"] for row in rows] == [1, None, 7, None, None]
    assert rows[0]["timestamp"] == "1970-01-01T00:00:00.000001Z"
    assert (rows[3]["amount"], rows[3]["tags"], rows[3]["offset_"]) == (1.5, ["x", "y"], 7)


def test_export_of_a_range_and_of_settled_events(stopped: Path, tmp_path: Path) -> None:
    pending = lines_in_json("export", stopped)
    assert [row["offset"] for row in pending] == list(range(15, 200))
    assert [row["value"].encode() for row in pending] == values(185, 15)
    some = lines_in_json("export", stopped, "--from", 38, "--to", 42)
    assert [row["offset"] for row in some] == [38, 39, 40, 41]
    succeeded("export", stopped, "--all", "-o", tmp_path / "all.parquet")
    table = pq.read_table(tmp_path / "all.parquet")
    assert table.column("settled").to_pylist() == [True] * 15 + [False] * 185


def test_a_damaged_queue_is_exported_as_far_as_it_goes(stopped: Path, tmp_path: Path) -> None:
    lost = harm_payload(stopped)
    run = turnlane_queue("export", stopped, "-o", tmp_path / "rest.parquet")
    assert run.returncode == 1
    assert f"{lost} events cannot be read" in run.stderr
    assert pq.read_table(tmp_path / "rest.parquet").num_rows == 185 - lost


def test_export_does_not_replace_a_file_unless_told_to(stopped: Path, tmp_path: Path) -> None:
    target = tmp_path / "events.jsonl"
    target.write_text("precious")
    run = turnlane_queue("export", stopped, "-o", target)
    assert (run.returncode, target.read_text()) == (1, "precious")
    assert "--force" in run.stderr
    succeeded("export", stopped, "-o", target, "--force")
    assert len(target.read_text().splitlines()) == 185


def test_an_export_that_fails_leaves_nothing(stopped: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    kind = pa.month_day_nano_interval()
    with turnlane.open_queue(kind="disk", path=stopped) as queue:
        column = pa.array([(1, 2, 3)], kind)
        block = pa.record_batch({"value": pa.array([b"x"], pa.binary()), "span": column})
        queue.producer(ack="persisted").publish_block(block)
    run = turnlane_queue("export", stopped, "-o", tmp_path / "out" / "x.parquet")
    assert run.returncode == 1
    assert "--format jsonl" in run.stderr
    assert list((tmp_path / "out").iterdir()) == []
    assert len(rows_exported(stopped)) == 186


@pytest.mark.parametrize("options", [["-o", "events.txt"], ["--format", "parquet"]])
def test_an_export_has_to_know_its_format(stopped: Path, options: list[str]) -> None:
    run = turnlane_queue("export", stopped, *options)
    assert run.returncode == 2


def test_an_export_of_a_range_that_ends_before_it_begins(stopped: Path) -> None:
    run = turnlane_queue("export", stopped, "--from", 50, "--to", 40)
    assert (run.returncode, run.stdout) == (2, "")
    assert "--from 50 is beyond --to 40" in run.stderr
    assert succeeded("export", stopped, "--from", 40, "--to", 40) == ""


def test_an_export_into_no_directory_names_the_file_asked_for(
    stopped: Path, tmp_path: Path
) -> None:
    target = tmp_path / "nowhere" / "events.jsonl"
    run = turnlane_queue("export", stopped, "-o", target)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == f"turnlane: {target}: No such file or directory\n"


# ── ledger ───────────────────────────────────────────────────────────────────────────────────────


def test_the_ledger_adds_up(stopped: Path) -> None:
    ledger = in_json("ledger", stopped)
    assert ledger["accepted"] == 200
    assert (ledger["delivered"], ledger["dead"], ledger["dropped"]) == (15, 0, {})
    assert (ledger["pending"], ledger["adds_up"]) == (185, True)
    shown = succeeded("ledger", stopped)
    assert re.search(r"^accepted +200$", shown, re.MULTILINE)
    assert "200 accepted = 15 delivered + 0 dead + 185 pending" in shown
    assert "not included: " in shown


def test_the_ledger_of_a_killed_queue_adds_up(killed: Path) -> None:
    ledger = in_json("ledger", killed)
    assert (ledger["accepted"], ledger["delivered"], ledger["pending"]) == (100, 30, 70)


def test_the_ledger_counts_drops_by_reason(tmp_path: Path) -> None:
    knobs: Row = {"size": 10, "full_behavior": "drop_oldest"}
    with turnlane.open_queue(kind="disk", path=tmp_path / "q", **knobs) as queue:
        producer = queue.producer()
        for value in values(25):
            producer.publish(value)
        expected = queue.stats().ledger.as_dict()
    ledger = in_json("ledger", tmp_path / "q")
    assert {name: ledger[name] for name in expected} == expected
    assert ledger["dropped"]["oldest"] > 0


def test_a_ledger_that_does_not_add_up_says_so(stopped: Path) -> None:
    lost = harm_by_deleting(stopped)
    ledger = in_json("ledger", stopped, code=1)
    assert (ledger["adds_up"], ledger["unaccounted"]) == (False, lost)
    assert "≠" in turnlane_queue("ledger", stopped).stdout


# ── FastQueue ────────────────────────────────────────────────────────────────────────────────────


def test_a_fastqueue_directory_can_be_looked_at(fastqueue: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("command", ["ledger", "repair"])
def test_a_fastqueue_directory_is_only_read(fastqueue: Path, command: str) -> None:
    run = turnlane_queue(command, fastqueue)
    assert (run.returncode, run.stdout) == (1, "")
    assert "FastQueue" in run.stderr


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("command", COMMANDS)
def test_errors_without_a_traceback(command: str, tmp_path: Path, stopped: Path) -> None:
    nowhere = turnlane_queue(command, tmp_path / "nowhere")
    assert nowhere.returncode == 2
    assert "does not exist" in nowhere.stderr
    empty = turnlane_queue(command, tmp_path)
    assert empty.returncode == 1
    assert "holds neither queue.json nor chunks" in empty.stderr
    (stopped / "queue.json").write_text('{"format": 99}')
    newer = turnlane_queue(command, stopped)
    assert newer.returncode == 1
    assert "format is 99" in newer.stderr
    for run in (nowhere, empty, newer):
        assert "Traceback" not in run.stderr
        assert run.stdout == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_directory_that_may_not_be_read(command: str) -> None:
    is_root = os.geteuid() == 0
    unprivileged = f"from turnlane.cli import app, main; import os; os.setuid({NOBODY}); main()"
    start = ["-c", unprivileged] if is_root else ["-m", "turnlane"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # what is asked for can be seen, but not looked into
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


def test_a_reader_that_has_seen_enough(stopped: Path) -> None:
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


def test_an_interrupted_export_leaves_nothing_behind(stopped: Path, tmp_path: Path) -> None:
    """The first block is interrupted as Ctrl-C would do it, at a moment that is always the same."""
    interrupt = (
        "import os, signal, turnlane.queues.inspection.export as export\n"
        # A shell's background job, as CI may be, has Ctrl-C ignored from the start.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "export.rows = lambda piece: os.kill(os.getpid(), signal.SIGINT)\n"
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


def test_version_and_help() -> None:
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
        for option in [*parameter.opts, *parameter.secondary_opts]:
            if option.startswith("-") and "completion" not in option:
                assert f"`{option}" in section or f", {option}" in section, f"{name} {option}"
                assert parameter.help, f"{name} {option} has no help"


def section_of(page: str, name: str) -> str:
    _, _, rest = page.partition(f"\n## {name}\n")
    assert rest, f"docs/cli.md has no section {name}"
    return rest.partition("\n## ")[0]
