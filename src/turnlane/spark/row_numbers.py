"""The rows that a transform has made of one event, numbered, so that they can be told apart.

They come one after another, in the same order whenever the event is read: a transform works row by
row. One that spreads an event's rows over tasks, by ``repartition``, gives them the same numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.events import Block
from turnlane.outputs.identity import ROW
from turnlane.repeats import repeats
from turnlane.spark.siblings import have_places

Numbers = npt.NDArray[np.int64]


class RowNumbers:
    """Numbers the rows of one task, block by block: an event's rows may be in two of them."""

    def __init__(self) -> None:
        self._last = (-1, -1)
        """The place of the last event so far, and how many rows of it there were."""
        self._count = 0

    def on(self, rows: Block) -> Block:
        """The rows, with a column of numbers if there are several of one event."""
        if not have_places(rows):
            return rows
        partitions = np.asarray(rows.column("partition"))
        offsets = np.asarray(rows.column("offset"))
        numbers = _numbers(partitions, offsets)
        last, count = (int(partitions[-1]), int(offsets[-1])), 1
        if offsets[0] == self._last[1] or numbers is not None:
            numbers = np.zeros(len(offsets), dtype=np.int64) if numbers is None else numbers
            numbers[(partitions == self._last[0]) & (offsets == self._last[1])] += self._count
            count = int(numbers[-1]) + 1
        self._last, self._count = last, count
        if numbers is None or not numbers.any():
            return rows
        return rows.append_column(ROW, pa.array(numbers, pa.int32()))


def _numbers(partitions: Numbers, offsets: Numbers) -> Numbers | None:
    """How many rows of the same event are before each; ``None`` if all are of different ones."""
    if (np.diff(offsets) > 0).all():
        return None
    return repeats(offsets, partitions)
