"""Blocks as they come over Flight, none of them too large or damaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import pyarrow as pa
from pyarrow import flight

from turnlane.errors import EventTooLarge
from turnlane.events import Block

Chunks = Iterator[tuple[Block | None, pa.Buffer | None]]

EVENT_BYTES: Final = 64
"""What an event costs beside its contents, about: columns that a client left out are filled in,
and those it sends may take no room at all, as a column of type null does."""


def chunks_of(reader: flight.MetadataRecordBatchReader, most: int) -> Chunks:
    """What a client sends until it has no more; each block within ``most`` bytes.

    Arrow has unpacked a block by the time that it can be judged here.
    """
    while True:
        try:
            with _readable():
                chunk = reader.read_chunk()
        except StopIteration:
            return
        if chunk.data is not None:
            _check_size(chunk.data, most)
            # Offsets that point elsewhere, text that is none: nobody has looked at it so far, and
            # whoever reads it later must not fall over it.
            chunk.data.validate(full=True)
        yield chunk.data, chunk.app_metadata


def columns_of(reader: flight.MetadataRecordBatchReader) -> pa.Schema:
    """The schema of all blocks that a client will send."""
    with _readable():
        return reader.schema


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """What Arrow cannot make sense of is the client's fault, though to Arrow it is one of I/O."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"what was sent is not Arrow data: {error}") from None


def _check_size(block: Block, most: int) -> None:
    # Not nbytes, which follows offsets that nobody has checked so far.
    size = block.get_total_buffer_size() + EVENT_BYTES * block.num_rows
    if size > most:
        raise EventTooLarge(
            f"a block of {block.num_rows} events takes {size} bytes, {most} are allowed "
            "(max_block_bytes); send it in parts"
        )
