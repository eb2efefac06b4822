"""Having events copied from the lane's queue into others: Spark has only seen where they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

from turnlane.client.stage_writer import StageWriter
from turnlane.delivery.columns import PLACES, ROUTES
from turnlane.queues.spans import COPIED
from turnlane.spark.grouping import ungrouped
from turnlane.spark.lane_options import LaneWriteOptions
from turnlane.spark.nodes import Nodes, by_partition
from turnlane.spark.tasks import Staged


class CopyTask:
    """A task of the main lane whose rows are places and routes. Events are as the queue has them.

    Each node copies its own: not an event leaves it.
    """

    def __init__(self, options: LaneWriteOptions, opened: ExitStack) -> None:
        self._options = options
        self._opened = opened
        self._nodes = Nodes.of(options)
        self._writers: dict[int, StageWriter] = {}

    def run(self, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Copy everything."""
        for rows in batches:
            for node, part in by_partition(rows) if rows.num_rows else ():
                for places in _places(part):
                    self._writer(node).write(places)
        return Staged({node: each.finish_all() for node, each in self._writers.items()})

    def _writer(self, node: int) -> StageWriter:
        if node not in self._writers:
            assert self._options.lane is not None
            begun = self._nodes[node].copy(self._options.lane, self._options.copies or ())
            self._writers[node] = self._opened.enter_context(begun)
        return self._writers[node]


def _places(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """What a node has to know: offsets, in order, and their routes."""
    if PLACES in rows.schema.names:
        for offsets, routes in ungrouped(rows):
            yield _copied(pa.array(offsets), pa.array(routes))
    else:
        yield _copied(rows.column("offset"), rows.column(ROUTES))


def _copied(*columns: pa.Array[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns), names=COPIED.names).cast(COPIED)
