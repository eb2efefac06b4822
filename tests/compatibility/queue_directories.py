"""Directories of disk and disk-assisted queues: make them, and describe their contents.

``make_queues`` runs on the version to be recorded. ``observe_queue`` runs on that version, too, and
later on every newer one, which has to return the same.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

import turnlane
from tests.compatibility.comparison import mask
from tests.compatibility.running import TIMEOUT, encode_bytes, read_json, read_json_lines

TIMESTAMP: Final = 1_700_000_000_123_456
ROOT: Final = Path(__file__).parents[2]

SPILLING: Final[Mapping[str, Any]] = {
    "kind": "disk_assisted",
    "size": 100,
    "high_watermark": 50,
    "low_watermark": 20,
}

OPENED_WITH: Final[Mapping[str, Mapping[str, Any]]] = {
    "closed": {"kind": "disk"},
    "dropping": {"kind": "disk"},
    "killed": {"kind": "disk"},
    "torn": {"kind": "disk"},
    "damaged": {"kind": "disk"},
    "assisted": SPILLING,
    "assisted_dropped": SPILLING,
    "assisted_killed": SPILLING,
}
"""The settings with which each directory is opened to be observed."""

NEXT_SEQUENCES: Final[Mapping[str, Mapping[str, int]]] = {
    "closed": {"till-3": 40, "till-4": 17},
    "killed": {"till-3": 60, "till-4": 12},
    "torn": {"till-3": 60},
    "assisted": {"till-3": 80},
}
"""By directory and producer, the first number that the producer has not yet published."""


def make_block(first: int, count: int, *, is_wide: bool = False) -> pa.RecordBatch:
    """Events with every base column; a wide block has columns of the user's own."""
    numbers = range(first, first + count)
    block = turnlane.block_of(
        [b"\xff\x00" if number % 10 == 9 else b"event %d" % number for number in numbers],
        keys=[None if number % 5 == 4 else f"customer-{number % 3}" for number in numbers],
        headers=[{"via": "web", "n": str(number)} if number % 2 else None for number in numbers],
        severities=[number % 8 if number % 3 else None for number in numbers],
        sources=[f"10.0.0.{number % 4}" if number % 4 else None for number in numbers],
        timestamps=[TIMESTAMP + number for number in numbers],
    )
    if not is_wide:
        return block
    amounts: Any = pa.array([number * 1.5 for number in numbers], pa.float64())
    labels: Any = pa.array([[f"l{number}", "x"] for number in numbers], pa.list_(pa.string()))
    return block.append_column("amount", amounts).append_column("labels", labels)


# ── making ───────────────────────────────────────────────────────────────────────────────────────


def make_queues(root: Path) -> None:
    """Make one directory for each name in ``OPENED_WITH``, below ``root``."""
    _make_closed(root / "closed")
    _make_dropping(root / "dropping")
    for name in KILLED:
        command = [sys.executable, "-m", "tests.compatibility.queue_directories", name]
        subprocess.run([*command, str(root / name)], cwd=ROOT, check=False)
    shutil.copytree(root / "killed", root / "torn")
    last = max((root / "torn").glob("*.chunk"))
    os.truncate(last, last.stat().st_size - 100)
    _make_damaged(root / "damaged")
    _make_assisted(root / "assisted")
    _make_assisted_dropped(root / "assisted_dropped")


def _open(path: Path, **knobs: Any) -> turnlane.Queue:
    given = {"kind": "disk", "durability": "always", "chunk_size": "4Ki", "compression": "none"}
    return turnlane.open_queue(path=path, name=path.name, **(given | knobs))


def _make_closed(path: Path) -> None:
    """Write several chunks, plain and compressed, with two schemas and acks out of order."""
    with _open(path) as queue:
        _publish(queue, "till-3", 0, 30)
        _publish(queue, "till-4", 0, 17)
        returned, done, dead, part = (queue.get(10, timeout=5) for _ in range(4))
        done.done()
        dead.dead()
        part.done()
        returned.release()
    with _open(path, compression="snappy") as queue:
        _publish(queue, "till-3", 30, 10, is_wide=True)
        queue.producer(ack="persisted").publish_block(make_block(1000, 40, is_wide=True))
    with _open(path) as queue:
        queue.get(3, timeout=5).done()
        queue.get(3, timeout=5).release()


def _publish(
    queue: turnlane.Queue, producer_id: str, first: int, count: int, *, is_wide: bool = False
) -> None:
    producer = queue.producer(ack="persisted", producer_id=producer_id)
    for at in range(first, first + count, 10):
        block = make_block(at, min(10, first + count - at), is_wide=is_wide)
        producer.publish_block(block, sequence=at)


def _make_dropping(path: Path) -> None:
    """Drop events for every reason that a setting can cause."""
    with _open(path, size=20, full_behavior="drop_newest") as queue:
        queue.producer(ack="persisted").publish_block(make_block(0, 25))
    with _open(path, size=20, full_behavior="drop_oldest") as queue:
        queue.producer(ack="persisted").publish_block(make_block(100, 5))
    with _open(path, size=40, discard_mark=10, discard_severity=5) as queue:
        queue.producer(ack="persisted").publish_block(make_block(200, 8))
    with _open(path, sampling_interval=3) as queue:
        queue.producer(ack="persisted").publish_block(make_block(300, 9))


def _make_damaged(path: Path) -> None:
    """Damage one event: its frame is set aside, the others are read."""
    with _open(path) as queue:
        for first in range(0, 50, 10):
            queue.producer(ack="persisted").publish_block(make_block(first, 10))
    (chunk, *_) = sorted(path.glob("*.chunk"))
    data = bytearray(chunk.read_bytes())
    data[data.index(b"event 13")] ^= 1
    chunk.write_bytes(data)


def _make_assisted(path: Path) -> None:
    """Spill some events, settle some of these, and save the rest at the end."""
    with _open(path, **SPILLING) as queue:
        producer = queue.producer(producer_id="till-3")
        for at in range(0, 80, 10):
            producer.publish_block(make_block(at, 10), sequence=at)
        returned, done, dead = (queue.get(5, timeout=5) for _ in range(3))
        done.done()
        dead.dead()
        returned.release()


def _make_assisted_dropped(path: Path) -> None:
    """Drop the events in memory at the end; the queue counts them."""
    with _open(path, **SPILLING, save_on_shutdown=False) as queue:
        producer = queue.producer()
        for at in range(0, 80, 10):
            producer.publish_block(make_block(at, 10))


def _kill_disk(path: Path) -> None:
    """Leave a journal whose newest acks are records, not part of a snapshot."""
    queue = _open(path)
    _publish(queue, "till-3", 0, 60)
    _publish(queue, "till-4", 0, 12)
    first, second, third = (queue.get(7, timeout=5) for _ in range(3))
    third.done()
    second.dead()
    first.release()
    queue.get(2, timeout=5).done()
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_assisted(path: Path) -> None:
    """Leave only the events that were spilled."""
    queue = _open(path, **SPILLING)
    producer = queue.producer()
    for at in range(0, 80, 10):
        producer.publish_block(make_block(at, 10))
    queue.get(4, timeout=5).done()
    producer.try_publish_block(make_block(80, 10))
    os.kill(os.getpid(), signal.SIGKILL)


KILLED: Final[Mapping[str, Callable[[Path], None]]] = {
    "killed": _kill_disk,
    "assisted_killed": _kill_assisted,
}


# ── observing ────────────────────────────────────────────────────────────────────────────────────


def observe_queue(path: Path, name: str) -> dict[str, Any]:
    """Describe everything that users can see of a queue's directory. Settles all its events."""
    commands = _observe_with_commands(path)
    with turnlane.open_queue(path=path, name=name, **OPENED_WITH[name]) as queue:
        opened = queue.stats().ledger.as_dict()
        events = _drain(queue)
        drained = queue.stats().ledger.as_dict()
        repeated = {
            producer_id: _probe_sequence(queue, producer_id, at)
            for producer_id, at in NEXT_SEQUENCES.get(name, {}).items()
        }
    found = sorted(file.name for file in path.glob("quarantine/*"))
    return {
        "commands": commands,
        "opened": opened,
        "events": events,
        "drained": drained,
        "sequences": repeated,
        "quarantine": found,
    }


def _observe_with_commands(path: Path) -> dict[str, Any]:
    verified = read_json("queue", "verify", path, "--json")
    # The words are for people, and may change.
    varying = {"path", "what", "todo", "not_included", "notes"}
    return {
        "ledger": mask(read_json("queue", "ledger", path, "--json"), varying),
        "verify": mask(verified, varying),
        "peek": read_json_lines("queue", "peek", path, "--all", "--count", 30, "--json"),
    }


def _drain(queue: turnlane.Queue) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    deadline = time.monotonic() + TIMEOUT
    while queue.stats().ledger.pending:
        assert time.monotonic() < deadline, queue.stats()
        try:
            batch = queue.get(timeout=0.1)
        except turnlane.QueueEmpty:
            continue  # the queue finds out that the rest is missing
        block = batch.block
        own = [at for at, each in enumerate(block.schema.names) if each in ("amount", "labels")]
        for number, event in enumerate(batch):
            extra = {block.schema.names[at]: block.column(at)[number].as_py() for at in own}
            events.append(
                {
                    "offset": event.offset,
                    "attempt": batch.attempt,
                    "value": encode_bytes(event.value),
                    "key": event.key,
                    "headers": event.headers,
                    "timestamp": event.timestamp,
                    "severity": event.severity,
                    "source": event.source,
                    **{name: value for name, value in extra.items() if value is not None},
                }
            )
        batch.done()
    return events


def _probe_sequence(queue: turnlane.Queue, producer_id: str, at: int) -> dict[str, int]:
    """Publish the producer's last event again, then a new one."""
    producer = queue.producer(producer_id=producer_id)
    again = producer.publish_block(make_block(at - 1, 1), sequence=at - 1)
    new = producer.publish_block(make_block(at, 1), sequence=at)
    return {"at": at, "repeated": again.repeated, "accepted": new.accepted}


if __name__ == "__main__":
    KILLED[sys.argv[1]](Path(sys.argv[2]))
