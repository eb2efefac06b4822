"""Copying by reference: all events are copied unchanged, although Spark sees only offsets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from tests.spark.nodes import Served, numbers, serving
from turnlane.delivery.settings import ROUTES
from turnlane.errors import RetryLater
from turnlane.events import block_of
from turnlane.intervals import MAX_GAP
from turnlane.node.commit_record import Commit
from turnlane.spark.batch_planning import TaskSpans
from turnlane.spark.by_reference import (
    SPAN_ROW_SCHEMA,
    CopyTask,
    decode_task_spans,
    encode_task_spans,
)
from turnlane.spark.nodes import Nodes
from turnlane.spark.options import LaneWriteOptions
from turnlane.spark.queue_reader import read_task_spans
from turnlane.spark.row_codec import RowBuilder, build_event_schema
from turnlane.spark.task import TaskResult

QUEUES = ("a", "b")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "data", {name: {} for name in ("main", *QUEUES)}) as node:
        yield node


def copy_events(node: Served, routes: dict[int, int]) -> TaskResult:
    """Copy the events at some offsets by their route bits, and commit the stages."""
    refs = pa.record_batch(
        {
            "partition": pa.array(np.zeros(len(routes), np.int32)),
            "offset": pa.array(list(routes), pa.int64()),
            ROUTES: pa.array(list(routes.values()), pa.int64()),
        }
    )
    options = LaneWriteOptions(endpoint=node.url, lane="main", run="1", copies=QUEUES)
    with ExitStack() as opened:
        done = CopyTask(options, opened).run(iter([refs.slice(0, 0), refs]))
    node.node.commits.commit(Commit(done.stages.get(0, ())))
    return done


def test_each_queue_gets_the_events_with_its_bit(node: Served) -> None:
    node.publish("main", numbers(0, 5000))
    copy_events(node, {at: at % 4 for at in range(5000) if at % 4})
    assert node.values("a") == [b"%d" % at for at in range(5000) if at % 4 in (1, 3)]
    assert node.values("b") == [b"%d" % at for at in range(5000) if at % 4 in (2, 3)]


def test_offsets_far_apart_are_copied(node: Served) -> None:
    count = 3 * MAX_GAP
    node.publish("main", numbers(0, count))
    copy_events(node, {0: 1, MAX_GAP + 7: 1, count - 1: 1})
    assert node.values("a") == [b"0", b"%d" % (MAX_GAP + 7), b"%d" % (count - 1)]


def test_events_with_different_columns_keep_all_of_them(node: Served) -> None:
    node.publish("main", [b"plain"], keys=["k"], sources=["here"], severities=[3])
    extra = block_of([b"more"]).append_column("colour", pa.array(["red"]))
    node.queue("main").producer(ack="persisted").publish_block(extra)
    copy_events(node, {0: 1, 1: 1})
    found: dict[bytes, dict[str, Any]] = {}
    at = 0
    while (piece := node.queue("a").read(at, 10)) is not None:
        at = piece[0] + piece[1].num_rows
        found |= {row["value"]: row for row in piece[1].to_pylist()}
    assert [found[b"plain"][name] for name in ("key", "source", "severity")] == ["k", "here", 3]
    assert found[b"more"]["colour"] == "red"


def test_settled_events_are_not_copied_and_the_others_are(node: Served) -> None:
    node.publish("main", numbers(0, 100))
    node.queue("main").settle(0, 50)
    copy_events(node, dict.fromkeys(range(100), 1))
    assert node.values("a") == numbers(50, 100)


@pytest.mark.parametrize("names", [["value"], []])
def test_spans_of_a_task_are_read_completely_or_raise(
    node: Served, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit settles only events that were read or had been settled before."""
    node.publish("main", numbers(0, 100))
    node.queue("main").settle(0, 50)
    nodes = Nodes.from_options(LaneWriteOptions(endpoint=node.url))
    share, maker = (
        TaskSpans(0, ((20, 90),)),
        RowBuilder(build_event_schema([*names, "offset"]), "main", 0),
    )
    (rows,) = read_task_spans(nodes, "main", share, maker)
    assert rows.column("offset").to_pylist() == list(range(50, 90))
    monkeypatch.setattr(nodes, "read", lambda *_: iter(()))
    with pytest.raises(RetryLater, match="event at offset 50 cannot be read"):
        list(read_task_spans(nodes, "main", share, maker))


def test_task_without_rows_has_no_stages(node: Served) -> None:
    assert copy_events(node, {}).stages == {}


@given(
    st.builds(
        lambda node, cuts, part, parts: TaskSpans(
            node, tuple(zip(cuts[::2], cuts[1::2], strict=False)), part, parts
        ),
        st.integers(0, 9),
        st.lists(st.integers(0, 1 << 60), min_size=2, unique=True).map(sorted),
        st.integers(0, 3),
        st.integers(1, 4),
    )
)
def test_task_spans_survive_encoding(share: TaskSpans) -> None:
    assert list(decode_task_spans(encode_task_spans(share, to_arrow_schema(SPAN_ROW_SCHEMA)))) == [
        share
    ]
