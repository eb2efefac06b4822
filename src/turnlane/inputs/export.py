"""An OTLP export, taken: the same over HTTP and over gRPC."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from turnlane.errors import QueueFull
from turnlane.events import Block, values_of
from turnlane.formats.otlp import PROTOBUF, Grain, Signal, block_of_request, count, decode
from turnlane.inputs.answering import AnsweringPublisher, Mask


class Export(NamedTuple):
    """What became of an export."""

    events: int
    """Events taken."""
    rejected: int
    """Log records, data points or spans that can never be taken: the sender must drop them."""
    why: str
    """The reason, if any were rejected."""


class Exports:
    """Takes export requests into one queue."""

    def __init__(self, publisher: AnsweringPublisher, queue: str, grain: Grain) -> None:
        self._publisher = publisher
        self._queue = queue
        self._grain = grain

    def take(
        self,
        signal: Signal,
        body: bytes,
        deadline: float,
        *,
        encoding: str = PROTOBUF,
        source: str | None = None,
    ) -> Export:
        """Publish what a request holds; blocks until that has come as far as the level asks.

        Raises ``Malformed``, or one of the errors of a queue, after which the sender should send
        it all again.
        """
        request = decode(signal, body, encoding)
        block = block_of_request(signal, request, source, self._grain)
        if not block.num_rows:
            return Export(0, 0, "")
        taken = self._publisher.publish_fitting(self._queue, block, deadline)
        if taken.full.any():
            # Not a partial success: its sender would drop what could come in later.
            raise QueueFull(f"queue {self._queue!r} is full")
        if not taken.too_large.any():
            return Export(block.num_rows, 0, "")
        why = self._publisher.limit(self._queue)
        return Export(taken.inside, _held_by(signal, block, taken.too_large), why)


def _held_by(signal: Signal, block: Block, rows: Mask) -> int:
    """What these events hold, as OTLP counts."""
    values = values_of([block.filter(pa.array(rows))])
    return sum(count(signal, decode(signal, value)) for value in values)
