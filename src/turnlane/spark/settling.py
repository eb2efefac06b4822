"""Queries that keep their place in a checkpoint: what they have committed is settled after it."""

from __future__ import annotations

import json
import logging

from pyspark.sql.streaming.listener import StreamingQueryProgress

from turnlane.errors import RetryLater
from turnlane.spark.nodes import Nodes
from turnlane.spark.offsets import Place

log = logging.getLogger(__name__)


class Settling:
    """Settles what a query has committed to its checkpoint: it will never ask for it again.

    Always from where the query began: what an earlier run could not settle is settled by this one,
    and what the query has passed over is somebody else's.
    """

    def __init__(self, nodes: Nodes, queue: str) -> None:
        self._nodes = nodes
        self._queue = queue
        self._settled: dict[int, int] = {}
        self._late: set[int] = set()
        """Nodes that it was told of that they have not settled: once is enough."""

    def __call__(self, progress: StreamingQueryProgress) -> None:
        """The query has come so far."""
        for source in progress.sources:
            self.settle(Place.of(json.loads(source.endOffset) if source.endOffset else {}))

    def settle(self, place: Place) -> None:
        """Settle what the query has read on its way, on nodes that are still there."""
        for node, end in place.at.items():
            if node < self._nodes.count:
                self._settle(node, place.begun.get(node, 0), end)

    def _settle(self, node: int, first: int, end: int) -> None:
        if first >= end or self._settled.get(node) == end:
            return
        try:
            self._nodes.settle(node, self._queue, first, end)
        except RetryLater as error:  # tried again with the next look
            if node not in self._late:
                log.warning("node %d has not settled %s yet: %s", node, self._queue, error)
            self._late.add(node)
        else:
            self._settled[node] = end
            self._late.discard(node)
