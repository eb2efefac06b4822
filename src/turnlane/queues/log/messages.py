"""Record batch messages, without copying the events.

``batch.serialize()`` copies every byte into one buffer. Arrow's stream writer hands its sink the
very buffers of the batch instead, with a few bytes of metadata before and padding between: the same
message, ready for a vectored write.
"""

from __future__ import annotations

from io import IOBase
from typing import cast

import pyarrow as pa

from turnlane.queues.log.frames import Data


class _Sink:
    """What Arrow takes for a file; it keeps what is written."""

    closed = False

    def __init__(self) -> None:
        self.pieces: list[Data] = []

    def write(self, piece: Data) -> int:
        self.pieces.append(piece)
        return len(piece)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing is open."""


class Messages:
    """Turns blocks of one schema into messages. For one thread."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._sink = _Sink()
        self._writer = pa.ipc.new_stream(
            pa.PythonFile(cast("IOBase", self._sink), mode="w"), schema
        )
        # The writer precedes its first batch with the schema, which has a frame of its own.
        self._writer.write_batch(_empty(schema))
        self._sink.pieces = []

    def message(self, block: pa.RecordBatch) -> list[Data]:
        """The block as an encapsulated message, in pieces; they share the block's memory."""
        self._writer.write_batch(block)
        pieces, self._sink.pieces = self._sink.pieces, []
        return _joined(pieces)


def _joined(pieces: list[Data]) -> list[Data]:
    """The same bytes with the small pieces before a large one made one."""
    joined: list[Data] = []
    small = b""
    for piece in pieces:
        if isinstance(piece, bytes):
            small += piece
            continue
        if small:
            joined.append(small)
            small = b""
        joined.append(piece)
    return [*joined, small] if small else joined


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=schema)
