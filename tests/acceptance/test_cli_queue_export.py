"""`turnlane queue export`: is everything in the file, as it was published?"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import turnlane
from tests.acceptance.queue_commands import (
    harm_payload,
    in_json,
    lines_in_json,
    rows_exported,
    succeeded,
    turnlane_queue,
    values,
)
from turnlane.events import block_of


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


def test_parquet_export_has_the_published_events(tmp_path: Path) -> None:
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


def test_json_lines_export_has_the_published_events(tmp_path: Path) -> None:
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


def test_export_of_a_range_has_settled_events_if_asked(stopped: Path, tmp_path: Path) -> None:
    pending = lines_in_json("export", stopped)
    assert [row["offset"] for row in pending] == list(range(15, 200))
    assert [row["value"].encode() for row in pending] == values(185, 15)
    some = lines_in_json("export", stopped, "--from", 38, "--to", 42)
    assert [row["offset"] for row in some] == [38, 39, 40, 41]
    succeeded("export", stopped, "--all", "-o", tmp_path / "all.parquet")
    table = pq.read_table(tmp_path / "all.parquet")
    assert table.column("settled").to_pylist() == [True] * 15 + [False] * 185


def test_export_of_a_damaged_queue_has_all_readable_events(stopped: Path, tmp_path: Path) -> None:
    lost = harm_payload(stopped)
    run = turnlane_queue("export", stopped, "-o", tmp_path / "rest.parquet")
    assert run.returncode == 1
    assert f"{lost} events cannot be read" in run.stderr
    assert pq.read_table(tmp_path / "rest.parquet").num_rows == 185 - lost


def test_export_replaces_a_file_only_with_force(stopped: Path, tmp_path: Path) -> None:
    target = tmp_path / "events.jsonl"
    target.write_text("precious")
    run = turnlane_queue("export", stopped, "-o", target)
    assert (run.returncode, target.read_text()) == (1, "precious")
    assert "--force" in run.stderr
    succeeded("export", stopped, "-o", target, "--force")
    assert len(target.read_text().splitlines()) == 185


def test_failed_export_leaves_no_file(stopped: Path, tmp_path: Path) -> None:
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
def test_export_without_a_known_format_is_refused(stopped: Path, options: list[str]) -> None:
    run = turnlane_queue("export", stopped, *options)
    assert run.returncode == 2


def test_export_of_a_reversed_range_is_refused(stopped: Path) -> None:
    run = turnlane_queue("export", stopped, "--from", 50, "--to", 40)
    assert (run.returncode, run.stdout) == (2, "")
    assert "--from 50 is beyond --to 40" in run.stderr
    assert succeeded("export", stopped, "--from", 40, "--to", 40) == ""


def test_export_into_a_missing_directory_names_the_file(stopped: Path, tmp_path: Path) -> None:
    target = tmp_path / "nowhere" / "events.jsonl"
    run = turnlane_queue("export", stopped, "-o", target)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == f"turnlane: {target}: No such file or directory\n"
