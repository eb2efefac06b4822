"""Leases: batches in the hands of consumers that may die without a word.

A batch that a remote consumer holds is settled by its lease's id. If the lease runs out first, the
batch is released and comes to somebody else, its attempt counted.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from turnlane.errors import NoSuchLease, QueueClosed
from turnlane.queues.api import Batch, Queue
from turnlane.runtime import Closing

log = logging.getLogger(__name__)

STALE = 1000
"""Entries of leases that were extended or are over, beyond as many as there are leases."""


@dataclass(slots=True)
class Lease:
    """A batch in somebody's hands until ``expires`` (monotonic seconds)."""

    queue: str
    batch: Batch
    expires: float
    seconds: float
    holder: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Leases(Closing):
    """All leases of a node. Safe to use from any thread."""

    def __init__(self) -> None:
        self.expired = 0
        """How many ran out."""
        self._leases: dict[str, Lease] = {}
        self._due: list[tuple[float, str]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._sweeper = threading.Thread(target=self._sweep, name="turnlane-leases", daemon=True)
        self._sweeper.start()

    def take(
        self, queue: Queue, max_events: int | None, wait: float, seconds: float, holder: str
    ) -> Lease:
        """Take a batch from the queue; raises as :meth:`Queue.get` does."""
        batch = queue.get(max_events, timeout=wait)
        lease = Lease(queue.name, batch, time.monotonic() + seconds, seconds, holder)
        with self._changed:
            if not self._closed:
                self._leases[lease.id] = lease
                self._push(lease)
                return lease
        batch.release()
        raise QueueClosed("the node is closing")

    def find(self, lease_id: str) -> Lease:
        """The lease of this id. Raises ``NoSuchLease``."""
        with self._changed:
            return self._find(lease_id)

    def extend(self, lease_id: str, seconds: float | None = None) -> None:
        """Keep a lease for longer, counted from now."""
        with self._changed:
            lease = self._find(lease_id)
            lease.seconds = lease.seconds if seconds is None else seconds
            lease.expires = time.monotonic() + lease.seconds
            self._push(lease)

    def done(self, lease_id: str) -> None:
        """Settle the batch as delivered. Raises ``NoSuchLease`` if it ran out before."""
        self._end(lease_id, lambda batch: batch.done())

    def dead(self, lease_id: str) -> None:
        """Settle the batch as undeliverable."""
        self._end(lease_id, lambda batch: batch.dead())

    def release(self, lease_id: str) -> None:
        """Give the batch back."""
        self._end(lease_id, lambda batch: batch.release())

    def close(self) -> None:
        """Give everything back; a second call is harmless."""
        with self._changed:
            self._closed = True
            held, self._leases = list(self._leases.values()), {}
            self._changed.notify_all()
        for lease in held:
            lease.batch.release()
        self._sweeper.join()

    def __len__(self) -> int:
        return len(self._leases)

    def _find(self, lease_id: str) -> Lease:
        lease = self._leases.get(lease_id)
        if lease is None:
            raise NoSuchLease(
                f"lease {lease_id!r} is unknown: settled before, or run out and given to another"
            )
        return lease

    def _end(self, lease_id: str, verb: Callable[[Batch], None]) -> None:
        """Settle a batch; if that fails, the lease is there to be ended again.

        While it is being recorded the lease can neither run out nor be ended twice.
        """
        with self._changed:
            lease = self._find(lease_id)
            del self._leases[lease_id]
        try:
            verb(lease.batch)
        except BaseException:
            self._take_back(lease)
            raise

    def _take_back(self, lease: Lease) -> None:
        with self._changed:
            closed = self._closed
            if not closed:
                lease.expires = time.monotonic() + lease.seconds
                self._leases[lease.id] = lease
                self._push(lease)
        if closed:
            lease.batch.release()

    def _push(self, lease: Lease) -> None:
        heapq.heappush(self._due, (lease.expires, lease.id))
        if len(self._due) > STALE + 2 * len(self._leases):
            self._due = [(each.expires, each.id) for each in self._leases.values()]
            heapq.heapify(self._due)
        self._changed.notify_all()

    def _sweep(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                over = self._over()
                if not over:
                    left = self._due[0][0] - time.monotonic() if self._due else None
                    self._changed.wait(left)
            for lease in over:
                log.warning("a lease of %s on queue %s ran out", lease.holder, lease.queue)
                lease.batch.release()

    def _over(self) -> list[Lease]:
        """Leases that have run out; entries of the heap that were extended or settled are stale."""
        over = []
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, lease_id = heapq.heappop(self._due)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires <= now:
                del self._leases[lease_id]
                over.append(lease)
        self.expired += len(over)
        return over
