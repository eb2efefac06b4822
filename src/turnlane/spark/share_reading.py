"""Reading a share of a lane's queue: by the task that hands it to Spark, or by the one that sends.

Where Spark has nothing to do with the events themselves, their way through Java and back would cost
more than all the rest. Then what goes through it is the share, and the sending task reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from turnlane.client.keys import nodes_of
from turnlane.errors import RetryLater
from turnlane.events import Block, gathered
from turnlane.queues.ranges import Ranges
from turnlane.queues.spans import hulls, inside
from turnlane.spark.columns import RowMaker
from turnlane.spark.nodes import Nodes
from turnlane.spark.options import ROWS_PER_BATCH
from turnlane.spark.shares import Share

SHARES: Final = StructType(
    [
        StructField("partition", IntegerType()),
        StructField("part", IntegerType()),
        StructField("parts", IntegerType()),
        StructField("first", LongType()),
        StructField("end", LongType()),
    ]
)
"""Shares as rows: one for each span."""


def share_events(
    nodes: Nodes, queue: str, share: Share, maker: RowMaker, rows_per_batch: int = ROWS_PER_BATCH
) -> Iterator[Block]:
    """The events of a share, as ``maker`` makes rows of them.

    The commit that follows settles all of them, so that all have to be there, but for those that
    were settled meanwhile. Raises ``RetryLater``.
    """
    columns = maker.stored | {"key"} if share.parts > 1 else maker.stored
    missing = Ranges(share.spans)
    for hull in hulls(share.spans):
        blocks = nodes.read(share.node, queue, *hull, columns)
        for first, block in gathered(blocks, rows_per_batch):
            missing.remove(first, first + block.num_rows)
            chosen = inside(share.spans, first, block.num_rows)
            if share.parts > 1:
                chosen &= _of_part(block, first, share)
            rows = maker.rows(block, first)
            yield rows if chosen.all() else rows.filter(pa.array(chosen))
    _check_settled(nodes, share.node, queue, missing)


def _check_settled(nodes: Nodes, node: int, queue: str, missing: Ranges) -> None:
    spans = list(missing)
    if not spans:
        return
    unsettled = Ranges(nodes.unsettled(node, queue, spans[0][0], spans[-1][1]))
    left = [part for span in spans for part in unsettled.within(*span)]
    if left:
        raise RetryLater(f"queue {queue!r} has an event at {left[0][0]} that cannot be read")


def _of_part(block: Block, first: int, share: Share) -> Any:  # noqa: ANN401 - a mask
    """Which rows have a key of this part; those without any are shared by their offsets."""
    places = np.arange(first, first + block.num_rows) % share.parts
    if "key" not in block.schema.names:
        return places == share.part
    parts = nodes_of(block.column("key"), share.parts)
    return np.where(parts < 0, places, parts) == share.part


def share_rows(share: Share, schema: pa.Schema) -> pa.RecordBatch:
    """A share as rows of :data:`SHARES`."""
    rows = [(share.node, share.part, share.parts, *span) for span in share.spans]
    columns = [
        pa.array(column, field.type)
        for field, column in zip(schema, zip(*rows, strict=True), strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def shares_in(rows: pa.RecordBatch) -> Iterator[Share]:
    """The shares that rows of :data:`SHARES` are."""
    values = zip(*(rows.column(name).to_pylist() for name in SHARES.names), strict=True)
    for (node, part, parts), spans in groupby(values, key=lambda row: row[:3]):
        yield Share(node, tuple(span[3:] for span in spans), part, parts)
