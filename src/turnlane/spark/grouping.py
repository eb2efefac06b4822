"""Events that look the same to all filters, as one row with the places of all of them. No I/O.

Of a million log messages Spark then sees a few hundred rows: one for every severity and source in a
block. What it decides for a row goes for all the places in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.delivery.columns import PLACES, PRIORITY, ROUTES
from turnlane.events import Block

Numbers = npt.NDArray[np.int64]

FEW_VALUES: Final = frozenset({"severity", "source", PRIORITY})
"""Columns that many events have in common."""
_WIDTH: Final = 4
"""Bytes of a place: its distance from the first offset of its block."""
_MOST_SHORT: Final = 1 << 16
"""So many numbers have room in 16 bits."""


def grouped(rows: Block, schema: pa.Schema) -> Block:
    """A row for each different look of a block's rows; ``offset`` is the first of the block."""
    looks = [name for name in schema.names if name not in ("partition", "offset", PLACES)]
    groups = _groups(rows, looks)
    order = np.argsort(groups, kind="stable")
    counts = np.bincount(groups)
    ends = np.cumsum(counts)
    offsets = np.asarray(rows.column("offset"))
    distances = (offsets[order] - offsets[0]).astype(np.int32)
    bounds = np.concatenate(([0], ends)).astype(np.int32) * _WIDTH
    buffers = [None, pa.py_buffer(bounds.data), pa.py_buffer(distances.data)]
    one_of_each = rows.take(pa.array(order[ends - counts]))
    arrays: list[pa.Array[Any]] = [
        pa.array(np.full(len(counts), offsets[0]))
        if name == "offset"
        else pa.Array.from_buffers(pa.binary(), len(counts), buffers)
        if name == PLACES
        else one_of_each.column(name)
        for name in schema.names
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _groups(rows: Block, names: list[str]) -> npt.NDArray[Any]:
    """A number for each row, the same for those that look the same; all from 0 on occur."""
    numbers: npt.NDArray[Any] = np.zeros(rows.num_rows, dtype=np.int32)
    count = 1
    for name in names:
        values, kinds = _encoded(rows.column(name))
        if count == 1:
            numbers, count = values, kinds
        elif kinds > 1:  # what all have in common tells none of them apart
            both = numbers.astype(np.int64) * kinds + values
            numbers, count = _encoded(pa.array(both))
    # Of numbers as short as that NumPy sorts ten times as many in the same time.
    return numbers.astype(np.uint16) if count <= _MOST_SHORT else numbers


def _encoded(values: Any) -> tuple[npt.NDArray[np.int32], int]:  # noqa: ANN401
    """Numbers instead of values, and how many different ones there are."""
    encoded = values.dictionary_encode(null_encoding="encode")
    return np.asarray(encoded.indices), len(encoded.dictionary)


def ungrouped(rows: Block) -> Iterator[tuple[Numbers, Numbers]]:
    """The offsets and routes of the events that rows stand for, block by block, in order."""
    firsts, routes = np.asarray(rows.column("offset")), np.asarray(rows.column(ROUTES))
    bounds, distances = _places(rows.column(PLACES))
    changes = np.flatnonzero(np.diff(firsts)) + 1
    for start, end in zip([0, *changes], [*changes, len(firsts)], strict=True):
        mine = distances[bounds[start] : bounds[end]]
        by_place = np.zeros(int(mine.max()) + 1, dtype=np.int64)
        by_place[mine] = np.repeat(routes[start:end], np.diff(bounds[start : end + 1]))
        there = np.flatnonzero(by_place)
        yield firsts[start] + there, by_place[there]


def _places(column: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:  # noqa: ANN401
    """Where each row's places begin and end, and the places of all."""
    _, bounds, contents = column.buffers()
    ends = np.frombuffer(bounds, np.int32)[column.offset : column.offset + len(column) + 1]
    return ends // _WIDTH, np.frombuffer(contents, np.int32)
