"""What tests of `turnlane queue …` share: the real command, and directories to run it on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import turnlane
from tests.process_server import run_command
from turnlane.events import block_of, get_values
from turnlane.storage.disk_io import Disk
from turnlane.storage.frames import HEADER_SIZE
from turnlane.storage.segments import ValidFrame, scan_segment

CHUNK_0 = "0000000000000000.chunk"

Run = subprocess.CompletedProcess[str]
Row = dict[str, Any]

KILLED = """
import os, signal, sys, turnlane
from turnlane.events import block_of, get_values

queue = turnlane.open_queue(kind="disk", path=sys.argv[1], durability="always")
queue.producer(ack="persisted").publish_block(block_of([b"%d" % n for n in range(100)]))
queue.get(30).done()
os.kill(os.getpid(), signal.SIGKILL)
"""


def turnlane_queue(*args: object, env: dict[str, str] | None = None) -> Run:
    if env is None:
        return run_command("queue", *map(str, args))
    command = [sys.executable, "-m", "turnlane", "queue", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


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


def chunks(path: Path) -> list[Path]:
    return sorted(path.glob("*.chunk"))


def frames(chunk: Path) -> list[ValidFrame]:
    """The frames with events in a chunk, in order."""
    fd = os.open(chunk, os.O_RDONLY)
    try:
        found = [item for item in scan_segment(Disk(), fd, 0, 0) if isinstance(item, ValidFrame)]
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
                found += get_values([batch.block])
    return found


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def rows_exported(path: Path) -> list[Row]:
    return [json.loads(line) for line in turnlane_queue("export", path).stdout.splitlines()]


# ── harm: each returns how many events are lost by it ────────────────────────────────────────────


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
