"""Do the rows that a transform has made of one event stay together?"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlane.events import Block, join_blocks
from turnlane.spark.row_codec import add_rows_of_same_event, get_route_masks, group_rows_by_event


def rows(*offsets: int, partition: int = 0, first: int = 0) -> Block:
    """Rows of these events, numbered from ``first`` on; every second one has a route."""
    numbers = range(first, first + len(offsets))
    return pa.RecordBatch.from_pydict(
        {
            "number": pa.array(numbers, pa.int64()),
            "queue": pa.array([["a"] * (at % 2) for at in numbers], pa.list_(pa.string())),
            "partition": pa.array([partition] * len(offsets), pa.int32()),
            "offset": pa.array(offsets, pa.int64()),
        }
    )


def chosen(block: Block, *numbers: int) -> list[int]:
    mask = np.isin(np.arange(block.num_rows), numbers)
    found: list[int] = np.flatnonzero(add_rows_of_same_event(block, mask)).tolist()
    return found


def cut(*blocks: Block) -> list[Any]:
    return [block.column("offset").to_pylist() for block in group_rows_by_event(iter(blocks))]


def test_mask_is_extended_to_all_rows_of_an_event() -> None:
    block = rows(5, 6, 6, 7, 6)
    assert chosen(block, 2) == [1, 2, 4]
    assert chosen(block, 0, 4) == [0, 1, 2, 4]
    assert chosen(block) == []


def test_same_offset_on_another_node_is_another_event() -> None:
    block = join_blocks([rows(5, 5), rows(5, 5, partition=1)])
    assert chosen(block, 0) == [0, 1]
    assert chosen(block, 3) == [2, 3]
    assert chosen(block, 0, 3) == [0, 1, 2, 3]


@pytest.mark.parametrize("lost", ["partition", "offset"])
def test_rows_without_partition_or_offset_are_single(lost: str) -> None:
    block = rows(5, 5, 5).drop_columns([lost])
    assert chosen(block, 1) == [1]
    assert [each.num_rows for each in group_rows_by_event(iter([block, block]))] == [3, 3]


def test_last_event_of_a_block_gets_its_rows_from_the_next() -> None:
    assert cut(rows(5, 6), rows(6, 6, 7), rows(8)) == [[5, 6, 6, 6], [7], [8]]
    assert cut(rows(5, 6), rows(6), rows(), rows(6), rows(6, 7)) == [[5, 6, 6, 6, 6], [7]]
    assert cut(rows(5), rows(5, partition=1)) == [[5], [5]]
    assert cut(rows(5, 5), rows(5)) == [[5, 5, 5]]
    assert cut(rows()) == cut() == []


def test_blocks_of_single_rows_are_not_copied() -> None:
    blocks = [rows(5, 6), rows(7, 8), rows(2)]
    for block, found in zip(blocks, group_rows_by_event(iter(blocks)), strict=True):
        mine, given = (each.column("offset").buffers()[1] for each in (found, block))
        assert mine is not None
        assert given is not None
        assert mine.address == given.address


@given(st.lists(st.integers(1, 4), min_size=1, max_size=30), st.sets(st.integers(1, 60)))
def test_each_event_is_in_one_block_and_no_row_is_lost(counts: list[int], cuts: set[int]) -> None:
    offsets = np.repeat(np.arange(len(counts)), counts)
    edges = [0, *sorted(cuts & set(range(len(offsets)))), len(offsets)]
    blocks = [rows(*offsets[first:end].tolist(), first=first) for first, end in pairwise(edges)]
    found = list(group_rows_by_event(iter(blocks)))
    assert [n for each in found for n in each.column("number").to_pylist()] == list(
        range(len(offsets))
    )
    events = [set(each.column("offset").to_pylist()) for each in found]
    assert sum(map(len, events)) == len(counts)
    for each in found:
        odd = np.asarray(each.column("number")) % 2 == 1
        assert (get_route_masks(each, "queue").get("a", np.zeros_like(odd)) == odd).all()
