"""Batching: how many of a block's events go together. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from turnlane.events import Block

Sizes = npt.NDArray[np.int64]


def event_sizes(block: Block) -> Sizes:
    """The bytes of every event, as the destination will see them, about."""
    for name in ("payload", "value"):
        at = block.schema.get_field_index(name)
        if at >= 0:
            return _lengths(block.column(at))
    return np.full(block.num_rows, block.nbytes // max(1, block.num_rows), dtype=np.int64)


def _lengths(column: Any) -> Sizes:  # noqa: ANN401 - an array of any kind of bytes or text
    lengths: Any = pc.fill_null(pc.binary_length(column), 0)
    return np.asarray(lengths, dtype=np.int64)


def batches(sizes: Sizes, most_events: int, most_bytes: int) -> list[range]:
    """Stretches of rows within both bounds; an event that is too large for one goes alone."""
    found: list[range] = []
    ends = np.cumsum(sizes)
    first = before = 0
    while first < len(sizes):
        end = int(np.searchsorted(ends, before + most_bytes, side="right"))
        end = min(max(end, first + 1), first + most_events, len(sizes))
        found.append(range(first, end))
        first, before = end, int(ends[end - 1])
    return found
