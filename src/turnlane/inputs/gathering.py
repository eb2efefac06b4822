"""What an input has received, on its way to becoming one block.

Bytes are received into one buffer, whoever they come from; messages are places in it, until all of
them are made a block together. That costs the same for one sender as for a thousand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from turnlane.events import BASE_SCHEMA, Block
from turnlane.formats.spans import Places, column

Severities = Callable[[pa.BinaryArray], pa.Int8Array]

_FIELDS = ("value", "timestamp", "severity", "source")
_SCHEMA = pa.schema([BASE_SCHEMA.field(name) for name in _FIELDS])


def no_severities(values: pa.BinaryArray) -> pa.Int8Array:
    """The severities of messages that have none."""
    return pa.nulls(len(values), pa.int8())


class Gathering:
    """A buffer to receive into, and the messages found in it so far. For one thread."""

    def __init__(self, size: int, severities: Severities) -> None:
        self._memory = memoryview(bytearray(size))
        self._severities = severities
        self._at = 0
        self._starts: list[Places] = []
        self._ends: list[Places] = []
        self._sources: list[str | None] = []
        self._counts: list[int] = []
        # The first block of a process takes 100 ms, for Arrow to get ready: not at a sender's cost.
        self.take(np.array([0]), np.array([1]), 1, None)
        self.block()

    @property
    def room(self) -> int:
        """How many more bytes can be received."""
        return len(self._memory) - self._at

    def space(self, rest: bytes = b"") -> memoryview:
        """The free part of the buffer, with ``rest`` at its beginning."""
        free = self._memory[self._at :]
        free[: len(rest)] = rest
        return free

    def take(self, starts: Places, ends: Places, used: int, source: str | None) -> None:
        """Messages are in the first ``used`` bytes of the free part, which is free no longer."""
        self.take_each(starts, ends, used, [source], [len(starts)])

    def take_each(
        self,
        starts: Places,
        ends: Places,
        used: int,
        sources: Sequence[str | None],
        counts: Sequence[int],
    ) -> None:
        """The same, with ``counts[n]`` messages from ``sources[n]``."""
        if len(starts):
            self._starts.append(starts + self._at)
            self._ends.append(ends + self._at)
            self._sources += sources
            self._counts += counts
            self._at += used

    def block(self) -> Block | None:
        """All messages as one block, arrived now; the buffer is free again."""
        if not self._starts:
            return None
        values = column(self._memory, np.concatenate(self._starts), np.concatenate(self._ends))
        arrays = [
            values,
            pa.array(np.full(len(values), time.time_ns() // 1000)).view(_SCHEMA.field(1).type),
            self._severities(values),
            self._source_of_each(),
        ]
        self._at = 0
        self._starts, self._ends, self._sources, self._counts = [], [], [], []
        return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)

    def _source_of_each(self) -> pa.StringArray:
        sources = pa.array(self._sources, pa.string())
        if len(sources) == 1:
            return pa.repeat(sources[0], self._counts[0])
        return sources.take(np.repeat(np.arange(len(sources), dtype=np.int32), self._counts))
