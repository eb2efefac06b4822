"""The batch that the holding kinds of queue hand out."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from turnlane.errors import BatchFreed
from turnlane.events import Block, conform, join
from turnlane.queues.contract import Batch, Outcome, Place

if TYPE_CHECKING:
    from turnlane.queues.portion import Portion


class BatchState(enum.Enum):
    """Where a batch is in its short life."""

    OUT = enum.auto()
    SETTLING = enum.auto()
    SETTLED = enum.auto()
    RELEASED = enum.auto()


class Settler(Protocol):
    """The queue that a batch goes back to."""

    def free_batch(self, batch: HeldBatch) -> None:
        """Give up the contents."""

    def settle_batch(self, batch: HeldBatch, outcome: Outcome) -> None:
        """Settle for good."""

    def release_batch(self, batch: HeldBatch) -> None:
        """Take back."""


class HeldBatch(Batch):
    """A portion in a consumer's hands. Its fields change only under the queue's lock."""

    __slots__ = ("_queue", "charged_bytes", "charged_events", "freed", "place", "portion", "state")

    def __init__(self, queue: Settler, portion: Portion) -> None:
        self._queue = queue
        self.portion = portion
        self.place = Place(portion.first, portion.end, portion.attempt)
        self.state = BatchState.OUT
        self.freed = False
        self.charged_events, self.charged_bytes = portion.charge

    def uncharge(self, events: int, of: int) -> tuple[int, int]:
        """Have so many of its ``of`` unsettled events count no more; returns what they did."""
        size = self.charged_bytes * events // of
        events = min(events, self.charged_events)
        self.charged_events -= events
        self.charged_bytes -= size
        return events, size

    @property
    def block(self) -> Block:
        pieces = self._pieces()
        if len(pieces) > 1:
            self.portion.pieces = pieces = [join(pieces)]
        return conform(pieces[0])

    @property
    def blocks(self) -> Sequence[Block]:
        return [conform(piece) for piece in self._pieces()]

    def _pieces(self) -> Sequence[Block]:
        pieces = self.portion.pieces
        if self.freed or pieces is None:
            msg = f"batch {self.place.first} was freed; its contents are gone"
            raise BatchFreed(msg)
        return pieces

    def free(self) -> None:
        self._queue.free_batch(self)

    def done(self) -> None:
        self._queue.settle_batch(self, Outcome.DELIVERED)

    def dead(self) -> None:
        self._queue.settle_batch(self, Outcome.DEAD)

    def release(self) -> None:
        self._queue.release_batch(self)
