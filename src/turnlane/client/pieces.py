"""Blocks in pieces that a node takes, however many events were gathered in one."""

from __future__ import annotations

from collections.abc import Iterator

from turnlane.events import Block

SEND_BYTES = 64 << 20
"""A node refuses blocks beyond its ``max_block_bytes``, and holds each of them in memory."""


def pieces_of(block: Block) -> Iterator[Block]:
    """The block, halved until each piece has at most ``SEND_BYTES``, or is a single event."""
    rows = block.num_rows
    if rows > 1 and block.nbytes > SEND_BYTES:
        for half in (block.slice(0, rows // 2), block.slice(rows // 2)):
            yield from pieces_of(half)
    else:
        yield block
