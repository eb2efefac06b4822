"""Queries that keep their place in a checkpoint: what they have committed is settled after it."""

from __future__ import annotations

import json
import logging
from functools import partial
from typing import NamedTuple

from pyspark.sql.streaming.listener import StreamingQueryProgress

from turnlane.errors import RetryLater
from turnlane.spark.nodes import Nodes
from turnlane.spark.offsets import Place

log = logging.getLogger(__name__)


class _Settled(NamedTuple):
    """How far a queue is settled, and which one, if that is known."""

    end: int
    queue_id: str | None


class Settling:
    """Settles what a query has committed to its checkpoint: it will never ask for it again.

    Always from where the query began: what an earlier run could not settle is settled by this one,
    and what the query has passed over is somebody else's.
    """

    def __init__(self, nodes: Nodes, queue: str) -> None:
        self._nodes = nodes
        self._queue = queue
        self._settled: dict[int, _Settled] = {}
        self._is_late = False
        """Whether it was told of that something could not be settled: once is enough."""

    def __call__(self, progress: StreamingQueryProgress) -> None:
        """The query has come so far."""
        for source in progress.sources:
            self.settle(Place.of(json.loads(source.endOffset) if source.endOffset else {}))

    def settle(self, place: Place) -> None:
        """Settle what the query has read on its way, on nodes that are still there."""
        questions = {
            node: partial(self._settle, node, place.begun.get(node, 0), wanted)
            for node, end in place.at.items()
            if (wanted := _Settled(end, place.queues.get(node))) != self._settled.get(node)
            and node < self._nodes.count
            and place.begun.get(node, 0) < end
        }
        try:
            self._settled |= self._nodes.answers(f"settle {self._queue}", questions, 0.0)
        except RetryLater as error:  # tried again with the next look
            if not self._is_late:
                log.warning("%s is not settled yet: %s", self._queue, error)
            self._is_late = True
        else:
            self._is_late = False

    def _settle(self, node: int, first: int, wanted: _Settled) -> _Settled:
        self._nodes.settle(node, self._queue, first, *wanted)
        return wanted
