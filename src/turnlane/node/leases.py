"""Leases: batches of remote consumers, which may die without a message.

A remote consumer settles its batch by the id of its lease. If the lease expires first, the batch is
released, and another consumer gets it with a higher attempt count.
"""

from __future__ import annotations

import heapq
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from turnlane.errors import NoSuchLease, QueueClosed
from turnlane.logs import get_logger
from turnlane.queues.api import Batch, Queue
from turnlane.runtime import Closeable, start_thread

log = get_logger(__name__)

MAX_STALE_ENTRIES = 1000
"""The heap is rebuilt when it has this many outdated entries more than there are leases."""


@dataclass(slots=True)
class BatchLease:
    """A batch that a consumer holds until ``expires`` (monotonic seconds)."""

    queue: str
    batch: Batch
    expires: float
    seconds: float
    holder: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Leases(Closeable):
    """All leases of a node. Safe to use from any thread."""

    def __init__(self) -> None:
        self.expired = 0
        """The number of leases that have expired."""
        self._leases: dict[str, BatchLease] = {}
        self._due: list[tuple[float, str]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._sweeper = start_thread("turnlane-leases", self._sweep)

    def take(
        self, queue: Queue, max_events: int | None, wait: float, seconds: float, holder: str
    ) -> BatchLease:
        """Take a batch from the queue under a new lease. Raises like :meth:`Queue.get`."""
        batch = queue.get(max_events, timeout=wait)
        lease = BatchLease(queue.name, batch, 0.0, seconds, holder)
        if self._add(lease):
            return lease
        batch.release()
        raise QueueClosed("the node is closing")

    def find(self, lease_id: str) -> BatchLease:
        """Return the lease with this id. Raises ``NoSuchLease``."""
        with self._changed:
            return self._find(lease_id)

    def extend(self, lease_id: str, seconds: float | None = None) -> None:
        """Extend a lease, counted from now; by default for as long as it was taken for."""
        with self._changed:
            lease = self._find(lease_id)
            lease.seconds = lease.seconds if seconds is None else seconds
            lease.expires = time.monotonic() + lease.seconds
            self._push(lease)

    def done(self, lease_id: str) -> None:
        """Settle the batch as delivered. Raises ``NoSuchLease`` if the lease has expired."""
        self._end(lease_id, lambda batch: batch.done())

    def dead(self, lease_id: str) -> None:
        """Settle the batch as undeliverable."""
        self._end(lease_id, lambda batch: batch.dead())

    def release(self, lease_id: str) -> None:
        """Release the batch, so that another consumer gets it."""
        self._end(lease_id, lambda batch: batch.release())

    def close(self) -> None:
        """Release all batches. May be called again."""
        with self._changed:
            self._closed = True
            held, self._leases = list(self._leases.values()), {}
            self._changed.notify_all()
        for lease in held:
            lease.batch.release()
        self._sweeper.join()

    def __len__(self) -> int:
        return len(self._leases)

    def _find(self, lease_id: str) -> BatchLease:
        lease = self._leases.get(lease_id)
        if lease is None:
            raise NoSuchLease(
                f"lease {lease_id!r} is unknown: its batch was settled, or the lease has expired"
            )
        return lease

    def _end(self, lease_id: str, verb: Callable[[Batch], None]) -> None:
        """Settle a batch; if that fails, put the lease back, so that the call can be repeated.

        Until the batch is settled the lease can neither expire nor be ended by another call.
        """
        with self._changed:
            lease = self._find(lease_id)
            del self._leases[lease_id]
        try:
            verb(lease.batch)
        except BaseException:
            if not self._add(lease):
                lease.batch.release()
            raise

    def _add(self, lease: BatchLease) -> bool:
        """Start or restart the time of a lease; false if the node is closing."""
        with self._changed:
            if self._closed:
                return False
            lease.expires = time.monotonic() + lease.seconds
            self._leases[lease.id] = lease
            self._push(lease)
            return True

    def _push(self, lease: BatchLease) -> None:
        heapq.heappush(self._due, (lease.expires, lease.id))
        if len(self._due) > MAX_STALE_ENTRIES + 2 * len(self._leases):
            self._due = [(each.expires, each.id) for each in self._leases.values()]
            heapq.heapify(self._due)
        self._changed.notify_all()

    def _sweep(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                expired = self._pop_expired()
                if not expired:
                    left = self._due[0][0] - time.monotonic() if self._due else None
                    self._changed.wait(left)
            for lease in expired:
                log.warning("lease.expired", holder=lease.holder, queue=lease.queue)
                lease.batch.release()

    def _pop_expired(self) -> list[BatchLease]:
        """Remove and return the expired leases. Skip the outdated entries of the heap."""
        expired = []
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, lease_id = heapq.heappop(self._due)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires <= now:
                del self._leases[lease_id]
                expired.append(lease)
        self.expired += len(expired)
        return expired
