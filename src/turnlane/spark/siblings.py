"""The rows that a transform has made of one event: they go on together, or none of them does. Pure.

They come one after another in a task, but Spark cuts its rows into blocks wherever it likes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.events import Block, join
from turnlane.outputs.identity import PLACE

Mask = npt.NDArray[np.bool_]


def have_places(rows: Block) -> bool:
    """Whether rows say where they come from; those that SQL has made of many do not."""
    columns: list[Any] = [rows.column(name) for name in PLACE if name in rows.schema.names]
    whole = all(pa.types.is_integer(each.type) and not each.null_count for each in columns)
    return whole and len(columns) == len(PLACE) and bool(rows.num_rows)


def with_siblings(rows: Block, mask: Mask) -> Mask:
    """Some rows, and all others of their events."""
    if not mask.any() or not have_places(rows):
        return mask
    partitions, offsets = (np.asarray(rows.column(name)) for name in PLACE)
    if (np.diff(offsets) > 0).all():
        return mask
    found = np.zeros_like(mask)
    for partition in np.unique(partitions[mask]):
        there = partitions == partition
        found |= there & np.isin(offsets, offsets[there & mask])
    return found


def together(blocks: Iterator[Block]) -> Iterator[Block]:
    """The same rows, cut so that all of one event are in one block; blocks without rows left out.

    A block waits for the next one, which may go on with its last event.
    """
    waiting: list[Block] = []
    for block in blocks:
        if not block.num_rows:
            continue
        more = _going_on(waiting[-1], block) if waiting else block.num_rows
        if more:
            waiting.append(block.slice(0, more))
        if more < block.num_rows:
            yield join(waiting)
            waiting = [block.slice(more)]
    if waiting:
        yield join(waiting)


def _going_on(before: Block, block: Block) -> int:
    """How many rows at a block's beginning are of the event that the one before ends with."""
    if not have_places(before) or not have_places(block):
        return 0
    others = np.zeros(block.num_rows, dtype=np.bool_)
    for name in PLACE:
        last, here = before.column(name)[-1].as_py(), block.column(name)
        if here[0].as_py() != last:
            return 0
        others |= np.asarray(here) != last
    return int(others.argmax()) if others.any() else block.num_rows
