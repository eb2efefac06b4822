"""The nodes behind a query, by number: the same in the driver, in tasks and in sinks.

Spark runs each of these in a Python process of its own and uses the processes again, so the
connections are kept for as long as the process lives.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from turnlane.client.remote import Credentials, RemoteNode, StageWriter
from turnlane.client.url import Url
from turnlane.errors import TransportDown
from turnlane.events import Block
from turnlane.spark.options import SourceOptions
from turnlane.spark.ranges import Positions

log = logging.getLogger(__name__)


class Extent(NamedTuple):
    """How far a queue goes on one node: ``low`` to ``end - 1``."""

    low: int
    end: int


class Nodes:
    """All nodes of an endpoint. Raises what they raise, and ``TransportDown``."""

    def __init__(self, endpoint: str, credentials: Credentials) -> None:
        url = Url.parse(endpoint)
        self._nodes = [
            RemoteNode(place, location, credentials)
            for place, location in zip(url.places, url.locations(), strict=True)
        ]
        self._waiting = ThreadPoolExecutor(len(self._nodes), "turnlane-wait")

    @classmethod
    def of(cls, options: SourceOptions) -> Nodes:
        """The nodes that options name; the same object for the same options."""
        credentials = Credentials(
            options.secret(), options.tls_ca, options.tls_cert, options.tls_key
        )
        return _nodes(options.endpoint, credentials)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._nodes)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────

    def extents(self, queue: str) -> dict[int, Extent]:
        """How far the queue goes, on every node."""
        ends = [node.wait(queue, -1, 0.0) for node in self._nodes]
        return {number: Extent(each.low, each.end) for number, each in enumerate(ends)}

    def wait(self, queue: str, beyond: Positions, timeout: float) -> dict[int, Extent]:
        """Wait until a node has more than it had; those that are away are left out.

        One that answers at once does not keep the others waiting: they are asked again next time.
        """
        extents = self._answers(queue, beyond, 0.0)
        if any(extent.end > beyond[node] for node, extent in extents.items()) or not timeout:
            return extents
        return self._answers(queue, beyond, timeout)

    def _answers(self, queue: str, beyond: Positions, timeout: float) -> dict[int, Extent]:
        asked = {
            node: self._waiting.submit(self._nodes[node].wait, queue, offset, timeout)
            for node, offset in beyond.items()
            if node < self.count
        }
        extents = {}
        for node, answer in asked.items():
            try:
                ends = answer.result()
            except TransportDown as error:
                if self.count == 1:
                    raise
                log.warning("going on without node %d: %s", node, error)
            else:
                extents[node] = Extent(ends.low, ends.end)
        return extents

    def bytes_per_event(self, queue: str) -> float:
        """The average size of an event that waits, at least 1."""
        sizes = [1.0]
        for node in self._nodes:
            stats = node.stats(queue)[queue]
            sizes.append(stats["bytes"] / max(1, stats["size"]))
        return max(sizes)

    def read(self, node: int, queue: str, first: int, end: int) -> Iterator[tuple[int, Block]]:
        """Blocks of a range, with their first offsets."""
        return self._nodes[node].read(queue, first, end)

    def offsets_at(self, queue: str, milliseconds: int) -> dict[int, int]:
        """On every node, the offset of the first event of a time or later.

        By bisection, for which events are taken to have come in the order of their timestamps.
        """
        return {
            number: self._offset_at(node, queue, milliseconds * 1000)
            for number, node in enumerate(self._nodes)
        }

    def _offset_at(self, node: RemoteNode, queue: str, microseconds: int) -> int:
        ends = node.wait(queue, -1, 0.0)
        low, high = ends.low, ends.end
        while low < high:
            middle = (low + high) // 2
            stamp = _first_timestamp(node.read(queue, middle, middle + 1))
            if stamp is not None and stamp >= microseconds:
                high = middle
            else:
                low = middle + 1
        return low

    def settle(self, node: int, queue: str, end: int) -> None:
        """Everything before ``end`` is done with."""
        low = self._nodes[node].wait(queue, -1, 0.0).low
        if low < end:
            self._nodes[node].settle(queue, low, end)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    def stage(self, node: int, queue: str, schema: pa.Schema) -> StageWriter:
        """Begin to stage blocks for a queue."""
        return self._nodes[node].stage(queue, schema)

    def commit(
        self, node: int, stages: Sequence[str], *, writer: str | None = None, epoch: int = 0
    ) -> None:
        """Publish stages; a repeat of a writer's epoch does nothing."""
        self._nodes[node].commit(stages, writer=writer, epoch=epoch)

    def abort(self, node: int, stages: Sequence[str]) -> None:
        """Give stages up. One that cannot be reached gives them up by itself, in time."""
        try:
            self._nodes[node].abort(stages)
        except TransportDown as error:
            log.warning("node %d keeps %d stages for now: %s", node, len(stages), error)

    # ── lanes ────────────────────────────────────────────────────────────────────────────────────

    def plan(self, lane: str, run: str, queue: str, start: Positions, end: Positions) -> None:
        """Tell the nodes what a lane works on, for its sink to commit; also those with nothing."""
        for node, first in start.items():
            try:
                self._nodes[node].plan(lane, run, queue, first, end[node])
            except TransportDown as error:
                if end[node] > first:
                    raise
                log.warning("node %d did not hear of lane %s: %s", node, lane, error)

    def commit_lane(self, node: int, stages: Sequence[str], lane: str, run: str) -> None:
        """Publish stages and move the lane's cursor over what it was planned to read."""
        try:
            self._nodes[node].commit(stages, lane=lane, run=run)
        except TransportDown as error:
            if stages or self.count == 1:
                raise
            # It had nothing for this batch, or nothing that passed: its cursor moves with the next.
            log.warning("node %d did not hear of lane %s: %s", node, lane, error)


@cache
def _nodes(endpoint: str, credentials: Credentials) -> Nodes:
    return Nodes(endpoint, credentials)


def _first_timestamp(blocks: Iterator[tuple[int, Block]]) -> int | None:
    for _, block in blocks:
        stamps = block.column("timestamp").cast(pa.int64())
        return int(np.asarray(stamps)[0])
    return None


def by_partition(rows: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
    """Rows by the node that they came from."""
    numbers = np.asarray(rows.column("partition"))
    found = np.unique(numbers)
    if len(found) == 1:
        return [(int(found[0]), rows)]
    return [(int(each), rows.take(np.flatnonzero(numbers == each))) for each in found]
