"""The rows that a transform makes of one event are numbered."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from turnlane.events import Block
from turnlane.outputs.templates import make_event_ids
from turnlane.spark.row_codec import group_rows_by_event, number_rows_of_events, to_block


def rows(*offsets: int, partition: int = 0) -> Block:
    return pa.RecordBatch.from_pydict(
        {
            "value": pa.array([b"%d" % offset for offset in offsets], pa.binary()),
            "queue": pa.array(["orders"] * len(offsets)),
            "partition": pa.array([partition] * len(offsets), pa.int32()),
            "offset": pa.array(offsets, pa.int64()),
        }
    )


def ids(*blocks: Block) -> list[str]:
    found = []
    for block in group_rows_by_event(iter(blocks)):
        texts = make_event_ids(number_rows_of_events(block))
        assert texts is not None
        found += texts.to_pylist()
    return [str(text).removeprefix("orders/") for text in found]


def test_first_row_has_the_event_id_and_others_a_number() -> None:
    found = ids(rows(5, 6, 6, 6, 7, 8, 8))
    assert found == ["0/5", "0/6", "0/6.1", "0/6.2", "0/7", "0/8", "0/8.1"]


def test_rows_of_an_event_in_several_blocks_are_numbered() -> None:
    found = ids(rows(5, 6), rows(6), rows(6, 7), rows(8))
    assert found == ["0/5", "0/6", "0/6.1", "0/6.2", "0/7", "0/8"]


def test_same_offset_on_another_node_is_another_event() -> None:
    found = ids(rows(5, 5), rows(5, 5, partition=1))
    assert found == ["0/5", "0/5.1", "1/5", "1/5.1"]


def test_single_rows_of_events_are_not_changed() -> None:
    for block in (rows(5, 6), rows(9), rows(2, 3), rows(1, 0), rows()):
        assert number_rows_of_events(block) is block


def test_rows_without_partition_or_offset_are_not_changed() -> None:
    block = rows(1, 1)
    odd = block.set_column(3, "offset", pa.array([1, None], pa.int64()))
    for each in (block.drop_columns(["offset"]), odd):
        assert number_rows_of_events(each) is each


def test_queue_does_not_store_row_numbers() -> None:
    assert "turnlane_row" not in to_block(number_rows_of_events(rows(1, 1))).schema.names


@given(st.lists(st.integers(1, 4), min_size=1, max_size=30), st.sets(st.integers(1, 29)))
def test_ids_are_distinct_for_any_blocks(counts: list[int], cuts: set[int]) -> None:
    offsets = np.repeat(np.arange(len(counts)), counts)
    blocks = [rows(*part.tolist()) for part in np.split(offsets, sorted(cuts))]
    found = ids(*blocks)
    assert found == ids(rows(*offsets.tolist()))
    assert len(set(found)) == len(offsets)
