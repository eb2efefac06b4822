"""Events as a lane hands them to an output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from turnlane.events import Block, block_of


def handed(
    values: Sequence[bytes], first: int = 0, *, queue: str = "orders", **columns: Any
) -> Block:
    """Events with their place and their payload, which is the value. ``columns`` are Arrow's."""
    block = block_of(values, timestamps=1_795_000_000_123_456)
    count = len(values)
    places: dict[str, Any] = {
        "partition": pa.array(np.zeros(count, dtype=np.int32)),
        "offset": pa.array(np.arange(first, first + count, dtype=np.int64)),
        "queue": pa.array([queue] * count, pa.string()),
        "payload": block.column("value"),
        **columns,
    }
    for name, column in places.items():
        at = block.schema.get_field_index(name)
        there = at >= 0
        block = block.set_column(at, name, column) if there else block.append_column(name, column)
    return block


def numbered(first: int, end: int) -> list[bytes]:
    """Values that tell their place."""
    return [b"event %d" % number for number in range(first, end)]
