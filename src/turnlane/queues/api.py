"""The one contract that every kind of queue keeps.

A queue has two ends. A :class:`Producer` publishes and hears, in the order in which it published,
how far its events have come. A consumer takes a :class:`Batch` and settles it: ``done()``, or
``release()`` to have it read again. Kinds differ in where events wait, never in these rules.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import NamedTuple, Protocol, Self, TypeVar

from turnlane.errors import ConfigError
from turnlane.events import Block, Event, events_of
from turnlane.ledger import Ledger
from turnlane.runtime import Closing


class AckLevel(enum.StrEnum):
    """How far an event has to come before its producer hears of it."""

    ACCEPTED = "accepted"
    """The queue holds it."""
    PERSISTED = "persisted"
    """It would survive a crash. A queue that keeps nothing on disk says so on delivery."""
    DELIVERED = "delivered"
    """A consumer has settled it."""


class FullBehavior(enum.StrEnum):
    """What publishing does when the queue is full."""

    BLOCK = "block"
    DROP_NEWEST = "drop_newest"
    DROP_OLDEST = "drop_oldest"


class Durability(enum.StrEnum):
    """What stood behind an ack at the moment it was given."""

    ALWAYS = "always"
    """Synced to the disk before anyone was told."""
    INTERVAL = "interval"
    """Synced to the disk, at most one sync interval after it was accepted."""
    NEVER = "never"
    """Written to the operating system: survives the process, not a power loss."""
    MEMORY = "memory"
    """In memory only: gone with the process."""


class FlowControl(enum.StrEnum):
    """How a producer behaves before the queue is full."""

    NONE = "none"
    """It cannot wait (UDP): published at once, up to the bound."""
    LIGHT = "light"
    """It can be slowed down (TCP): waits a moment above ``light_delay_mark``."""
    FULL = "full"
    """It can wait as long as needed (files): waits above ``full_delay_mark``."""


Choice = TypeVar("Choice", bound=enum.StrEnum)


def parse_choice(kind: type[Choice], knob: str, value: str) -> Choice:
    """Return the member that a word names. Raises ``ConfigError``, which lists the words."""
    try:
        return kind(value)
    except ValueError:
        words = ", ".join(kind)
        raise ConfigError(knob, f"{value!r} is not one of {words}") from None


@dataclass(frozen=True, slots=True)
class Ack:
    """What a producer is told: so many more of its events, in publish order, came this far.

    Published events are always ``count`` plus ``dropped`` in the end, unless the queue was closed.
    """

    count: int
    dropped: int
    end: int
    """Every event of this producer below this offset is covered by this ack or an earlier one."""
    level: AckLevel
    durability: Durability


class Published(NamedTuple):
    """What became of a published block."""

    first: int
    """The offset of its first event in the queue."""
    accepted: int
    """How many of its events are now in the queue."""
    dropped: int
    """How many the queue's policy shed."""
    repeated: int
    """How many were already there: sent again by a producer that had not heard the ack."""


AckCallback = Callable[[Ack], None]


@dataclass(frozen=True, slots=True)
class Place:
    """A batch's offsets, ``first`` to ``end - 1``, and how often it was handed out."""

    first: int
    end: int
    attempt: int = 1

    def __len__(self) -> int:
        return self.end - self.first


class Producer(Closing):
    """The publishing end. Safe to use from several threads; acks then cover all of them."""

    @abc.abstractmethod
    def publish(
        self,
        value: bytes,
        key: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timestamp: int | None = None,
        severity: int | None = None,
        source: str | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Publish one event; true if the queue has it, false if its policy dropped it.

        Blocks while the queue is full, first come first served, for ``timeout`` seconds at most
        (default: the queue's ``full_timeout``), then raises ``QueueFull``. A producer whose level
        is above ``accepted`` and that has no callback returns only once that level is reached, or
        raises ``AckPending`` after ``timeout``.
        ``timestamp`` is in microseconds since the epoch (default: now), ``severity`` from 0
        (emergency) to 7 (debug).
        """

    @abc.abstractmethod
    def try_publish(
        self,
        value: bytes,
        key: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timestamp: int | None = None,
        severity: int | None = None,
        source: str | None = None,
    ) -> bool:
        """Like :meth:`publish`, but never blocks: false when there is no room at this moment."""

    @abc.abstractmethod
    def publish_block(
        self, block: Block, *, sequence: int | None = None, timeout: float | None = None
    ) -> Published:
        """Publish a block of events; a block larger than the queue goes in piece by piece.

        ``sequence`` numbers the block's first event among all that this producer ever published:
        what the queue already has from it is not taken twice. Blocks may come in any order;
        ``NumbersMissing`` if they leave too many gaps.
        """

    @abc.abstractmethod
    def try_publish_block(self, block: Block, *, sequence: int | None = None) -> Published | None:
        """Publish the whole block without blocking, or nothing of it (``None``)."""

    @abc.abstractmethod
    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all this producer published has reached its level; false on timeout."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop publishing. Acks for what was published still come."""


class Batch(abc.ABC):
    """Events handed to a consumer, to be settled by exactly one of its verbs.

    As a context manager it is done when the block ends well and released when it raises.
    """

    place: Place

    @property
    @abc.abstractmethod
    def block(self) -> Block:
        """The events, in order. Raises ``BatchFreed`` after :meth:`free`."""

    @property
    @abc.abstractmethod
    def blocks(self) -> Sequence[Block]:
        """The events as they lie in memory, never copied: :attr:`block` in pieces."""

    @abc.abstractmethod
    def free(self) -> None:
        """Give up the contents once somebody else has them; counts and acks stay."""

    @abc.abstractmethod
    def done(self) -> None:
        """Settle the batch as delivered. A second call is harmless."""

    @abc.abstractmethod
    def dead(self) -> None:
        """Settle the batch as undeliverable; the caller has kept it as dead letters."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give the batch back to be read again, its attempt counted. Not after :meth:`free`."""

    @property
    def attempt(self) -> int:
        """1 when handed out for the first time."""
        return self.place.attempt

    def __len__(self) -> int:
        return len(self.place)

    def __iter__(self) -> Iterator[Event]:
        return events_of(self.block, self.place.first)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.done()
        else:
            self.release()


Consumer = Callable[[Batch], None]
"""The passive end: takes a batch. Returning means done; raising means nothing was delivered."""


class Queue(Closing):
    """A queue of events. Every method may be called from any thread."""

    @abc.abstractmethod
    def producer(
        self,
        *,
        ack: AckLevel | str = AckLevel.ACCEPTED,
        on_ack: AckCallback | None = None,
        flow: FlowControl | str = FlowControl.NONE,
        producer_id: str | None = None,
    ) -> Producer:
        """Make a producer. ``on_ack`` runs on a thread of its own, never on the publisher's.

        Raises ``QueueClosed`` once the queue takes no more events.
        """

    @abc.abstractmethod
    def get(self, max_events: int | None = None, timeout: float | None = None) -> Batch:
        """Take the next batch, oldest first; released batches come before fresh ones.

        Blocks until there is one; ``QueueEmpty`` after ``timeout`` seconds, ``QueueClosed`` once
        the queue is closed, or finished and drained.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Take no more events; consumers go on until everything is settled."""

    @abc.abstractmethod
    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Close for good; what is left stays on disk, or is counted as dropped if in memory.

        With ``drain``, first :meth:`finish` and wait until consumers have settled everything, for
        ``timeout`` seconds at most (default: ``shutdown_timeout``). Nothing is acked by a close.
        A second call is harmless, and returns when the first has.
        """

    @abc.abstractmethod
    def stats(self) -> Stats:
        """The ledger, gauges and counters at this moment."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The queue's name, for logs, metrics and the ``queue`` column."""

    @property
    @abc.abstractmethod
    def closed(self) -> bool:
        """Whether the queue was closed, and not merely finished."""


# ── stats ──
# What a queue says of itself: the ledger, gauges, counters.


@dataclass(frozen=True, slots=True)
class Stats:
    """A consistent picture of one queue at one moment. Gauges unless said otherwise."""

    name: str
    kind: str
    ledger: Ledger
    size: int
    """Events that count against the bound."""
    bytes: int
    """Bytes that count against the bound."""
    max_size: int | None
    max_bytes: int | None
    in_flight: int
    """Events handed out and not yet settled."""
    blocked_publishers: int
    """Those that wait for room, or above a delay mark."""
    memory_blocks: int
    """Blocks held in memory, not handed out."""
    pushes: int
    """Counter: publish calls that put something into the queue."""
    full_waits: int
    """Counter: times a publisher found the queue full."""
    releases: int
    """Counter: batches given back to be read again."""
    disk_bytes: int = 0
    """Bytes of chunk files."""
    disk_available_bytes: int | None = None
    """What the file system still has free."""
    disk_full: int = 0
    """Counter: times a write found no space."""
    disk_errors: int = 0
    """Counter: other failures to write or sync."""
    syncs: int = 0
    """Counter: chunk syncs."""
    meta_syncs: int = 0
    """Counter: journal syncs."""
    rotations: int = 0
    """Counter: chunks started."""
    flushes: int = 0
    """Counter: times blocks went from memory to the disk."""
    quarantined: int = 0
    """Counter: unreadable pieces set aside."""

    trouble: str = ""
    """Why the queue cannot write to its disk; empty if it can."""

    @property
    def utilization(self) -> float:
        """How full the queue is, 0 to 1, by whichever bound is nearer."""
        ratios = [
            used / limit
            for used, limit in ((self.size, self.max_size), (self.bytes, self.max_bytes))
            if limit
        ]
        return min(1.0, max(ratios, default=0.0))

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self) | {"ledger": self.ledger.as_dict(), "utilization": self.utilization}


# ── transport ──
# What a proxy queue needs of the way to its node: clients implement it, tests break it.


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
