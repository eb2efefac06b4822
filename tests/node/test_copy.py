"""Tests of copies within a node: refused requests, and the cleanup of incomplete copies."""

from __future__ import annotations

import errno
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from tests.contract.harness import wait_until
from tests.node.conftest import Serve, ServedNode
from tests.spark.nodes import numbers
from turnlane.client.node_client import StageWriter
from turnlane.errors import NoSuchQueue, RetryLater, SchemaMismatch, StorageFailed
from turnlane.events import block_of
from turnlane.intervals import COPY_SCHEMA
from turnlane.node import event_refs as places_module
from turnlane.testing import FaultyDisk


def build_references(offsets: list[int], routes: list[int] | None = None) -> pa.RecordBatch:
    bits = [1] * len(offsets) if routes is None else routes
    columns: list[Any] = [pa.array(offsets, pa.int64()), pa.array(bits, pa.int64())]
    return pa.RecordBatch.from_arrays(columns, schema=COPY_SCHEMA)


def test_copies_are_in_their_queue_once_they_are_committed(served: ServedNode) -> None:
    served.node.queue("disk").producer().publish_block(block_of(numbers(0, 10)))
    node = served.client().nodes[0]
    with node.copy("disk", ["memory"]) as copy:
        copy.write(build_references([1, 3]))
        copy.write(build_references([5, 7], [1, 0]))
        stages = copy.finish_all()
    assert served.node.queue("memory").end == 0
    assert node.commit(stages, [("disk", 0, 10)])
    (block,) = (block for _, block in served.client().read("memory"))
    assert block.column("value").to_pylist() == [b"1", b"3", b"5"]


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (pa.record_batch({"offset": pa.array([1])}), "`routes` must be"),
        (pa.record_batch({"offset": pa.array([1.0]), "routes": pa.array([1])}), "`offset` must"),
        (pa.record_batch({"offset": pa.array([1, None]), "routes": pa.array([1, 1])}), "nulls"),
        (build_references([2, 2]), "must be ascending"),
        (build_references([-1, 2]), "must be ascending"),
    ],
    ids=["no routes", "no integers", "nulls", "twice", "negative"],
)
def test_invalid_offsets_and_routes_are_refused(
    served: ServedNode, block: pa.RecordBatch, said: str
) -> None:
    writer, answers = (
        served.client().nodes[0].put({"copy": "disk", "into": ["memory"]}, block.schema)
    )
    writer.write_batch(block)
    writer.done_writing()
    with pytest.raises(flight.FlightError, match=said) as failure:
        read_answer(writer, answers)
    assert SchemaMismatch.__name__ in str(failure.value)
    assert len(served.node.staging) == 0


@pytest.mark.parametrize(("source", "target"), [("nowhere", "memory"), ("disk", "nowhere")])
def test_unknown_queue_is_named(served: ServedNode, source: str, target: str) -> None:
    served.node.queue("disk").producer().publish_block(block_of([b"a"]))
    copy = served.client().nodes[0].copy(source, [target])
    with pytest.raises(NoSuchQueue, match="nowhere"):
        copy_events(copy, [0])
    copy.close()


def test_unreadable_event_is_not_skipped(
    served: ServedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.node.queue("memory").producer().publish_block(block_of(numbers(0, 10)))
    monkeypatch.setattr(places_module, "read_range", lambda *_: iter(()))
    with (
        served.client().nodes[0].copy("memory", ["disk"]) as copy,
        pytest.raises(RetryLater, match="an event at 3 that cannot be read"),
    ):
        copy_events(copy, [3])
    assert not list(served.node.staging.directory.iterdir())


def test_aborted_copy_leaves_no_stage(served: ServedNode) -> None:
    served.node.queue("disk").producer().publish_block(block_of(numbers(0, 10)))
    with served.client().nodes[0].copy("disk", ["memory"]) as copy:
        copy.write(build_references([1, 3]))
    wait_until(lambda: not list(served.node.staging.directory.iterdir()), "its files to be gone")


def test_full_disk_is_reported_and_leaves_no_stage(serve: Serve) -> None:
    disk = FaultyDisk()
    served = serve(disk=disk)
    served.node.queue("disk").producer().publish_block(block_of(numbers(0, 10)))
    with served.client().nodes[0].copy("disk", ["memory"]) as copy:
        disk.fail("write", error=errno.ENOSPC, match=".stage")
        with pytest.raises(StorageFailed, match="space"):
            copy_events(copy, [1])
    assert not list(served.node.staging.directory.iterdir())


def test_failed_finish_of_one_stage_discards_all_stages(serve: Serve) -> None:
    disk = FaultyDisk()
    served = serve(disk=disk)
    served.node.queue("disk").producer().publish_block(block_of(numbers(0, 10)))
    with served.client().nodes[0].copy("disk", ["memory", "slow"]) as copy:
        copy.write(build_references([1], [3]))
        disk.fail("sync", 2, match=".stage")
        with pytest.raises(StorageFailed):
            copy.finish_all()
    assert len(served.node.staging) == 0
    assert not list(served.node.staging.directory.iterdir())


def copy_events(copy: StageWriter, offsets: list[int]) -> list[str]:
    copy.write(build_references(offsets))
    return copy.finish_all()


def read_answer(writer: flight.FlightStreamWriter, answers: flight.FlightMetadataReader) -> None:
    answers.read()
    writer.close()
