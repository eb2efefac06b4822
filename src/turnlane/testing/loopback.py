"""A transport whose far end is a queue in the same process."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right

from turnlane.errors import QueueClosed, QueueFull, TransportDown
from turnlane.events import Block
from turnlane.queues.acks import AckWaiter
from turnlane.queues.api import AckLevel, Batch, Durability, NodeProgress
from turnlane.queues.buffered import BufferedQueue
from turnlane.storage.producer_sequences import GapPolicy

LOOK_SECONDS = 0.002
"""How often a loopback connection polls for progress."""
BUSY_SECONDS = 0.05
"""How long it waits at a full queue before checking whether it was closed."""


class LoopbackTransport:
    """The way to a node that is not there: the queue at the far end is in this process.

    For a proxy queue it looks like a network. While ``far_queue`` is full, sending blocks; once
    it takes no more events, the node cannot be reached. The far queue remains the test's own, to
    read from, to look into and to close.
    """

    def __init__(self, far_queue: BufferedQueue) -> None:
        self.far_queue = far_queue
        self._lock = threading.Lock()
        self._routes: dict[str, _Route] = {}

    def connect(self, producer_id: str) -> LoopbackConnection:
        """Open a stream. Raises ``TransportDown`` if the far queue is closed."""
        with self._lock:
            route = self._routes.setdefault(producer_id, _Route(self.far_queue))
        return LoopbackConnection(self.far_queue, producer_id, route)

    def get(self, max_events: int | None, timeout: float) -> Batch:
        """Take a batch from the far queue."""
        return self.far_queue.get(max_events, timeout)


class LoopbackConnection:
    """A stream to the far queue. Made by :meth:`LoopbackTransport.connect`."""

    def __init__(self, far_queue: BufferedQueue, producer_id: str, route: _Route) -> None:
        self._far_queue = far_queue
        self._route = route
        self._closed = threading.Event()
        self._told: NodeProgress | None = None
        self._urge: AckWaiter | None = None
        try:
            self._producer = far_queue.producer(producer_id=producer_id, gaps=GapPolicy.FORGET)
        except QueueClosed as error:
            raise TransportDown(f"queue {far_queue.name!r} takes no more events") from error
        self._resume_at = far_queue.known_sequence(producer_id) or 0
        route.reached(self._resume_at)

    @property
    def resume_at(self) -> int:
        """What the far queue has of this producer."""
        return self._resume_at

    @property
    def durability(self) -> Durability:
        """The far queue's."""
        return self._far_queue.durability

    def send(self, sequence: int, block: Block) -> None:
        """Publish to the far queue, however long it is full."""
        while not self._closed.is_set():
            try:
                self._producer.publish_block(block, sequence=sequence, timeout=BUSY_SECONDS)
            except QueueFull:
                continue  # the accepted part of the block is a repeat the next time
            except QueueClosed as error:
                raise TransportDown(str(error)) from error
            self._route.reached(sequence + block.num_rows)
            return
        raise TransportDown("the connection was closed")

    def urge(self) -> None:
        """Have the far queue make haste with all that it has by now."""
        self._far_queue.cancel_urge(self._urge)
        self._urge = self._far_queue.urge(AckLevel.PERSISTED, self._far_queue.end)

    def progress(self, timeout: float) -> NodeProgress | None:
        """Look at the far queue until it has come further than was last told."""
        deadline = time.monotonic() + timeout
        while not self._closed.is_set():
            progress = self._route.progress()
            if progress != self._told:
                self._told = progress
                return progress
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._closed.wait(min(left, LOOK_SECONDS))
        raise TransportDown("the connection was closed")

    def close(self) -> None:
        """Let go."""
        self._closed.set()
        self._far_queue.cancel_urge(self._urge)


class _Route:
    """Which sequence numbers of one producer lie below which offsets of the far queue."""

    def __init__(self, far_queue: BufferedQueue) -> None:
        self._far_queue = far_queue
        self._lock = threading.Lock()
        self._sequences = [0]
        self._offsets = [0]

    def reached(self, sequence: int) -> None:
        """All below ``sequence`` is in the far queue, and so below its end at this moment."""
        with self._lock:
            if sequence > self._sequences[-1]:
                self._sequences.append(sequence)
                self._offsets.append(self._far_queue.end)

    def progress(self) -> NodeProgress:
        """How far the far queue has come. Never too far: offsets are upper bounds."""
        persisted, delivered = self._far_queue.ack_positions()
        with self._lock:
            progress = NodeProgress(
                self._sequences[-1], self._below(persisted), self._below(delivered)
            )
            self._forget(progress.delivered)
        return progress

    def _below(self, offset: int) -> int:
        return self._sequences[bisect_right(self._offsets, offset) - 1]

    def _forget(self, delivered: int) -> None:
        """Only the last delivered position is needed."""
        passed = self._sequences.index(delivered)
        del self._sequences[:passed], self._offsets[:passed]
