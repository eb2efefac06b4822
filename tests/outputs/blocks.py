"""Blocks as a lane passes them to an output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from turnlane.events import Block, block_of


def make_block(
    values: Sequence[bytes], first: int = 0, *, queue: str = "orders", **columns: Any
) -> Block:
    """Return events with positions and payloads (the values). ``columns`` are Arrow arrays."""
    block = block_of(values, timestamps=1_795_000_000_123_456)
    count = len(values)
    added: dict[str, Any] = {
        "partition": pa.array(np.zeros(count, dtype=np.int32)),
        "offset": pa.array(np.arange(first, first + count, dtype=np.int64)),
        "queue": pa.array([queue] * count, pa.string()),
        "payload": block.column("value"),
        **columns,
    }
    for name, column in added.items():
        at = block.schema.get_field_index(name)
        block = block.set_column(at, name, column) if at >= 0 else block.append_column(name, column)
    return block


def make_values(first: int, end: int) -> list[bytes]:
    """Return values that contain their numbers."""
    return [b"event %d" % number for number in range(first, end)]
