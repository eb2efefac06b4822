"""The inspection of a directory."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import turnlane
from turnlane.cli.console import format_value, say_table
from turnlane.events import block_of
from turnlane.storage.export import ExportFormat, convert_to_rows, export_to_file
from turnlane.storage.inspection import FastQueueInspection, QueueInspection, open_inspection
from turnlane.storage.walk import EventSlice, Selection, find_holder


def row_of(**columns: Any) -> dict[str, object]:
    (row,) = convert_to_rows(EventSlice(np.array([5]), False, pa.record_batch(columns)))
    json.dumps(row, allow_nan=False)
    return row


def test_columns_of_any_type_become_json() -> None:
    row = row_of(
        value=pa.array([b"\xff"]),
        far=pa.array([1 << 62], pa.timestamp("us", tz="UTC")),
        local=pa.array([0], pa.timestamp("ns")),
        none=pa.array([None], pa.timestamp("s")),
        nan=pa.array([float("nan")]),
        price=pa.array([decimal.Decimal("1.50")]),
        day=pa.array([dt.date(2026, 1, 2)]),
        nested=pa.array([{"a": [b"\x01"], "b": None}]),
        offset=pa.array([1]),
        settled=pa.array([True]),
    )
    assert row == {
        "offset": 5,
        "settled": False,
        "value_base64": "/w==",
        "far": "148108-07-06T14:00:27.387904Z",
        "local": "1970-01-01T00:00:00.000000000",
        "none": None,
        "nan": "nan",
        "price": "1.50",
        "day": "2026-01-02",
        "nested": {"a": ["AQ=="], "b": None},
        "offset_": 1,
        "settled_": True,
    }


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (b"plain", "plain"),
        ("grün\tund\n".encode(), "grün\\tund\\n"),
        (b"back\\slash", "back\\slash"),
        (b"\x1b[31mred", b"\x1b[31mred".hex()),
        (b"\xff\xfe", "fffe"),
    ],
)
def test_values_are_formatted_for_people(value: bytes | None, shown: str) -> None:
    assert format_value(value) == shown


def test_long_value_is_cut_between_characters() -> None:
    shown = format_value("ü".encode() * 10_000)
    assert set(shown) == {"ü"}


@pytest.mark.parametrize("said", ["\x1b[2Jgone", "two\nlines", "half a pair \ud800", "\u202eback"])
def test_control_characters_in_a_table_are_escaped(
    said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    say_table([("action", "left"), ("error", "left")], [["alerts", said]], elastic="error")
    _, row = capsys.readouterr().out.splitlines()
    assert row.split("  ")[1].rstrip() == said.encode("unicode_escape").decode()
    assert row.isprintable()


def test_holder_is_found_without_taking_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "queue"
    assert find_holder(path) is None
    with turnlane.open_queue(kind="disk", path=path):
        assert find_holder(path) == os.getpid()
    assert find_holder(path) is None


def test_settled_and_pending_events_are_distinguished(tmp_path: Path) -> None:
    with turnlane.open_queue(kind="disk", path=tmp_path / "q") as queue:
        queue.producer(ack="persisted").publish_block(block_of([b"%d" % n for n in range(10)]))
        first, second, third = queue.get(2), queue.get(3), queue.get(2)
        second.done()
        found = QueueInspection(tmp_path / "q")
        every = [
            (piece.offsets.tolist(), piece.settled)
            for piece in found.slices(Selection(settled=True))
        ]
        some = [piece.offsets.tolist() for piece in found.slices(Selection(first=1, end=7))]
        del first, third
    assert every == [([0, 1], False), ([2, 3, 4], True), ([5, 6, 7, 8, 9], False)]
    assert some == [[1], [5, 6]]


def test_end_is_the_maximum_of_log_and_journal(tmp_path: Path) -> None:
    with turnlane.open_queue(kind="disk", path=tmp_path / "q") as queue:
        queue.producer(ack="persisted").publish_block(block_of([b"%d" % n for n in range(10)]))
    found = QueueInspection(tmp_path / "q")
    assert found.end == 10
    for name in ("journal.a", "journal.b"):
        (tmp_path / "q" / name).unlink()
    found = QueueInspection(tmp_path / "q")
    assert list(found.slices(Selection(first=50))) == []
    assert found.end == 10


def test_never_written_events_are_missing_and_not_a_fault(tmp_path: Path) -> None:
    """Some events were settled from memory; the process died before it wrote the others."""
    script = """
import os, signal, sys, turnlane
from turnlane.events import block_of

knobs = {"durability": "interval", "sync_interval": "1h", "stale_flush": "1h"}
queue = turnlane.open_queue(kind="disk", path=sys.argv[1], **knobs)
queue.producer().publish_block(block_of([b"%d" % n for n in range(100)]))
first, second = queue.get(10), queue.get(20)
second.done()
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "q")], check=False)
    found = QueueInspection(tmp_path / "q")
    account = found.account()
    report = found.verify()
    assert account.ledger.adds_up
    assert report.clean
    if account.ledger.pending == 0:  # none of them was written
        assert (account.ledger.delivered, account.ledger.dropped) == (20, {"missing": 10})
        assert [finding.kind.value for finding in report.findings] == ["never_written"]


def test_export_uses_little_memory(tmp_path: Path) -> None:
    with turnlane.open_queue(kind="disk", path=tmp_path / "q", compression="none") as queue:
        producer = queue.producer()
        for _ in range(200):
            producer.publish_block(block_of([bytes(1000)] * 1000))
    script = """
import sys, resource, pathlib
from turnlane.storage.export import ExportFormat, export_to_file
from turnlane.storage.inspection import QueueInspection
from turnlane.storage.walk import Selection

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
queue, before = QueueInspection(pathlib.Path(sys.argv[1])), peak()
export_to_file(queue, Selection(), pathlib.Path(sys.argv[2]), ExportFormat.PARQUET)
print(peak() - before)
"""
    run = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "q", tmp_path / "x.parquet"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(run.stdout) < 150_000, "KiB, for 200 MB of events"


def test_fastqueue_directory_is_inspected(tmp_path: Path) -> None:
    (tmp_path / "0000000000000000").write_bytes((5).to_bytes(8, "little") + b"hello")
    found = open_inspection(tmp_path)
    assert isinstance(found, FastQueueInspection)
    done = export_to_file(found, Selection(), tmp_path / "x.jsonl", ExportFormat.JSONL)
    assert done.events == 1
