"""Reading a queue by offset, in the node that has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from turnlane.events import Block, conform
from turnlane.queues.holding import HoldingQueue

READ_EVENTS: Final = 65_536
"""The most events of a block."""


def read(queue: HoldingQueue, first: int, end: int) -> Iterator[tuple[int, Block]]:
    """What a queue has of some offsets, block by block, with their first offsets."""
    while first < end:
        found = queue.read(first, min(READ_EVENTS, end - first))
        if found is None or found[0] >= end:
            return
        first, block = found
        yield first, conform(block.slice(0, end - first))
        first += block.num_rows
