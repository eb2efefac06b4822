"""Do rows that stand for many events stand for exactly those?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from turnlane.delivery.settings import GROUP_OFFSETS, PRIORITY, ROUTES
from turnlane.spark.by_reference import group_rows, ungroup_rows

TYPES: dict[str, Any] = {
    "partition": pa.int32(),
    "offset": pa.int64(),
    "severity": pa.int8(),
    "source": pa.string(),
    PRIORITY: pa.int16(),
}
SEEN = pa.schema(TYPES)
GROUPED = SEEN.append(pa.field(GROUP_OFFSETS, pa.binary()))

looks = st.tuples(
    st.none() | st.integers(0, 7),
    st.none() | st.sampled_from(["", "a", "b"]),
    st.none() | st.integers(0, 191),
)
events = st.lists(st.tuples(st.integers(1, 20), looks), min_size=1, max_size=200)
"""Their distance from the one before, and how they look."""


def block_of(some: list[tuple[int, Any]], start: int) -> pa.RecordBatch:
    offsets = start + np.cumsum([gap for gap, _ in some])
    rows = [
        dict(zip(SEEN.names, (3, int(at), *look), strict=True))
        for at, (_, look) in zip(offsets, some, strict=True)
    ]
    return pa.RecordBatch.from_pylist(rows, SEEN)


def routed(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Routes by all that filters see; what goes nowhere is left out."""
    routes = [route_of(row) for row in rows.to_pylist()]
    column: pa.Array[Any] = pa.array(routes, pa.int64())
    return rows.append_column(ROUTES, column).filter(pa.array(np.array(routes) != 0))


def route_of(row: dict[str, Any]) -> int:
    return hash((row["severity"], row["source"], row[PRIORITY])) % 4


@given(st.lists(events, min_size=1, max_size=4), st.integers(0, 1 << 40))
def test_grouped_events_have_the_routes_of_single_rows(
    blocks: list[list[tuple[int, Any]]], start: int
) -> None:
    expected: list[tuple[int, int]] = []
    parts = []
    for number, some in enumerate(blocks):
        block = block_of(some, start + number * 10_000)
        every = [(row["offset"], route_of(row)) for row in block.to_pylist()]
        expected += [each for each in every if each[1]]
        parts.append(routed(group_rows(block, GROUPED)))
    joined: Any = pa.Table.from_batches(parts).combine_chunks().to_batches()
    found = [
        (offset, route)
        for rows in joined
        for offsets, routes in ungroup_rows(rows)
        for offset, route in zip(offsets.tolist(), routes.tolist(), strict=True)
    ]
    assert found == expected


@given(events)
def test_events_with_equal_columns_are_one_row(some: list[tuple[int, Any]]) -> None:
    rows = group_rows(block_of(some, 0), GROUPED)
    assert rows.num_rows == len({look for _, look in some})


def test_more_groups_than_16_bits_are_distinguished() -> None:
    count = 70_000
    sources = [str(number) for number in range(count)]
    columns: list[Any] = [
        pa.array([3] * count, pa.int32()),
        pa.array(np.arange(count)),
        pa.nulls(count, pa.int8()),
        pa.array(sources),
        pa.nulls(count, pa.int16()),
    ]
    rows = group_rows(pa.RecordBatch.from_arrays(columns, schema=SEEN), GROUPED)
    assert rows.num_rows == count
    assert set(rows.column("source").to_pylist()) == set(sources)
