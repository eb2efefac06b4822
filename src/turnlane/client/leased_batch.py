"""Batches of a node, settled by their lease. A thread extends the lease while they are held."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

from turnlane.client.node_client import RemoteNode
from turnlane.errors import BatchFreed, NoSuchLease, TransportDown, TurnlaneError
from turnlane.events import Block, conform_block, join_blocks
from turnlane.logs import get_logger
from turnlane.queues.api import Batch, Place
from turnlane.runtime import PeriodicThread

log = get_logger(__name__)

EXTEND_SECONDS = 5.0
"""How long a node may take to extend a lease. Short, because other leases wait."""


class LeasedBatch(Batch):
    """A batch of a node. If its lease expires, another consumer gets its events."""

    def __init__(
        self, node: RemoteNode, keeper: LeaseKeeper, lease: str, place: Place, blocks: list[Block]
    ) -> None:
        self.place = place
        self.lease = lease
        self._node = node
        self._keeper = keeper
        self._blocks: list[Block] | None = blocks
        self._settled = False
        self._in_doubt = False
        self._lock = threading.Lock()

    @property
    def block(self) -> Block:
        blocks = self._contents()
        if len(blocks) > 1:
            self._blocks = blocks = [join_blocks(blocks)]
        return conform_block(blocks[0])

    @property
    def blocks(self) -> Sequence[Block]:
        return [conform_block(block) for block in self._contents()]

    def _contents(self) -> list[Block]:
        if self._blocks is None:
            raise BatchFreed(f"batch {self.place.first} was freed; its contents are gone")
        return self._blocks

    def free(self) -> None:
        self._blocks = None

    def done(self) -> None:
        self._settle("done")

    def dead(self) -> None:
        self._settle("dead")

    def release(self) -> None:
        if self._blocks is None and not self._settled:
            raise BatchFreed(f"batch {self.place.first} was freed and cannot be released")
        self._settle("release")

    def _settle(self, verb: str) -> None:
        """Settle the batch on the node. After ``TransportDown`` call it again."""
        with self._lock:
            if self._settled:
                return
            try:
                self._node.act(verb, lease=self.lease)
            except TransportDown:
                self._in_doubt = True
                raise
            except NoSuchLease:
                # The node may have received the call whose answer was lost. If the lease has
                # expired instead, another consumer gets the events: they are not lost.
                if not self._in_doubt:
                    self._forget()
                    raise
            self._forget()

    def _forget(self) -> None:
        self._settled = True
        self._keeper.remove(self)

    def give_back(self) -> None:
        """Release the batch, freed or not. After an error its lease expires."""
        try:
            self._settle("release")
        except TurnlaneError as error:
            log.info("lease.release_failed", error=error, hint="the lease will expire")

    def extend(self) -> None:
        """Extend the lease. Errors are only logged."""
        try:
            self._node.act("extend", timeout=EXTEND_SECONDS, body={"lease": self.lease})
        except NoSuchLease:
            if not self._settled:
                log.warning(
                    "lease.expired", events=len(self), hint="another consumer gets the events"
                )
            self._keeper.remove(self)
        except TurnlaneError as error:
            log.info("lease.extend_failed", error=error, hint="tried again")


class LeaseKeeper:
    """Extends the leases of all batches that this process still holds, on one thread."""

    def __init__(self, lease: float) -> None:
        self._every = lease / 3
        self._held: weakref.WeakSet[LeasedBatch] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: PeriodicThread | None = None

    def add(self, batch: LeasedBatch) -> None:
        """Extend the lease of a batch until it is settled or garbage."""
        with self._lock:
            self._held.add(batch)
            if self._thread is None:
                self._thread = PeriodicThread("turnlane-leases", self._extend_all, self._every)

    def remove(self, batch: LeasedBatch) -> None:
        """Stop extending the lease of a batch."""
        with self._lock:
            self._held.discard(batch)

    def list_batches(self) -> list[LeasedBatch]:
        """Return the batches that are still held."""
        with self._lock:
            return list(self._held)

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._thread.close()

    def _extend_all(self) -> None:
        for batch in self.list_batches():
            batch.extend()
