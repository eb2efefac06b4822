"""What a proxy queue needs of the way to its node: clients implement it, tests break it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from turnlane.events import Block
from turnlane.queues.contract import Batch, Durability


class Progress(NamedTuple):
    """How far the node has come with a producer's events.

    Each is a sequence number: all events of the producer below it got there. Cumulative, so that
    the newest report supersedes all before it.
    """

    accepted: int
    persisted: int
    delivered: int


class Connection(Protocol):
    """An open stream to the node. One thread sends while another listens."""

    @property
    def resume_at(self) -> int:
        """One more than the highest number that the node had when the stream was opened."""

    @property
    def durability(self) -> Durability:
        """What stands behind the node's ``persisted``."""

    def send(self, sequence: int, block: Block) -> None:
        """Send a block whose first event has this number. Blocks while the node is busy.

        Raises ``TransportDown``; then the node may or may not have it.
        """

    def urge(self) -> None:
        """Ask the node to persist soon what was sent: somebody waits. Raises ``TransportDown``."""

    def progress(self, timeout: float) -> Progress | None:
        """Wait for news; ``None`` if there was none in time. Raises ``TransportDown``."""

    def close(self) -> None:
        """Let go. Whoever is inside :meth:`send` or :meth:`progress` gets ``TransportDown``.

        Called from any thread, and more than once.
        """


class Transport(Protocol):
    """The way to one queue of a node."""

    def connect(self, producer_id: str) -> Connection:
        """Open a stream for a numbered producer. Raises ``TransportDown``.

        From now on the node takes nothing from earlier streams of the same producer: what they
        still carry would get numbers that the new stream gives to other events.
        """

    def get(self, max_events: int | None, timeout: float) -> Batch:
        """Take a batch from the node's queue; ``QueueEmpty`` if there was none in time."""
