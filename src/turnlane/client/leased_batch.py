"""Batches that a node has lent: settled by their lease, which is kept up while they are held."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence

from turnlane.client.node_client import RemoteNode
from turnlane.errors import BatchFreed, NoSuchLease, TransportDown, TurnlaneError
from turnlane.events import Block, conform_block, join_blocks
from turnlane.queues.api import Batch, Place

log = logging.getLogger(__name__)

EXTEND_SECONDS = 5.0
"""How long a node may take to extend a lease: there are others to be extended."""


class LeasedBatch(Batch):
    """A batch from a node. If its lease runs out, its events go to another consumer."""

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
        """Tell the node; raises ``TransportDown`` if it did not answer: then call it again."""
        with self._lock:
            if self._settled:
                return
            try:
                self._node.act(verb, lease=self.lease)
            except TransportDown:
                self._in_doubt = True
                raise
            except NoSuchLease:
                # The node may have heard the call whose answer was lost. If instead the lease has
                # run out, the events come again: late, not lost.
                if not self._in_doubt:
                    self._forget()
                    raise
            self._forget()

    def _forget(self) -> None:
        self._settled = True
        self._keeper.forget(self)

    def give_back(self) -> None:
        """Release it, freed or not, if the node can be told; else it comes back in time."""
        try:
            self._settle("release")
        except TurnlaneError as error:
            log.info("a lease could not be given back, it will run out: %s", error)

    def extend(self) -> None:
        """Keep the lease for longer. A failure is logged: there is nobody to be told."""
        try:
            self._node.act("extend", timeout=EXTEND_SECONDS, body={"lease": self.lease})
        except NoSuchLease:
            if not self._settled:
                log.warning("a lease on %d events has run out: they come again", len(self))
            self._keeper.forget(self)
        except TurnlaneError as error:
            log.info("a lease could not be extended, trying again: %s", error)


class LeaseKeeper:
    """Extends the leases of all batches in this process that somebody still holds."""

    def __init__(self, lease: float) -> None:
        self._every = lease / 3
        self._held: weakref.WeakSet[LeasedBatch] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, batch: LeasedBatch) -> None:
        """Extend this one too, until it is settled or nobody has it any more."""
        with self._lock:
            self._held.add(batch)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="turnlane-leases", daemon=True
                )
                self._thread.start()

    def forget(self, batch: LeasedBatch) -> None:
        """It is settled."""
        with self._lock:
            self._held.discard(batch)

    def held(self) -> list[LeasedBatch]:
        """The batches in somebody's hands."""
        with self._lock:
            return list(self._held)

    def close(self) -> None:
        """Extend no more."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._every):
            for batch in self.held():
                batch.extend()
                del batch  # or it would be held from here until the next round
