"""Having events copied from the lane's queue into others: Spark has only seen where they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pyarrow as pa

from turnlane.client.stage_writer import COPIED, StageWriter
from turnlane.delivery.columns import ROUTES
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
                places = [part.column("offset"), part.column(ROUTES)]
                block = pa.RecordBatch.from_arrays(places, names=COPIED.names)
                self._writer(node).write(block.cast(COPIED))
        return Staged({node: each.finish_all() for node, each in self._writers.items()})

    def _writer(self, node: int) -> StageWriter:
        if node not in self._writers:
            assert self._options.lane is not None
            begun = self._nodes[node].copy(self._options.lane, self._options.copies)
            self._writers[node] = self._opened.enter_context(begun)
        return self._writers[node]
