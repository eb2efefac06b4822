"""The rows that a transform has made of one event, numbered, so that they can be told apart.

They come one after another, in the same order whenever the event is read: a transform works row by
row. One that spreads an event's rows over tasks, by ``repartition``, gives them the same numbers.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from turnlane.events import Block
from turnlane.outputs.identity import PLACE, ROW
from turnlane.repeats import repeats
from turnlane.spark.siblings import have_places


def with_numbers(rows: Block) -> Block:
    """The rows, with a column of numbers if there are several of one event; it has all of those."""
    if not have_places(rows):
        return rows
    partitions, offsets = (np.asarray(rows.column(name)) for name in PLACE)
    if (np.diff(offsets) > 0).all():
        return rows
    numbers = repeats(offsets, partitions)
    return rows.append_column(ROW, pa.array(numbers, pa.int32())) if numbers.any() else rows
