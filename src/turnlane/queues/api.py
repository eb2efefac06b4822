"""The contract that every kind of queue keeps.

A queue has two ends. A :class:`Producer` publishes, and hears in publish order how far its events
have come. A consumer takes a :class:`Batch` and settles it with ``done()``, or gives it back with
``release()``. Kinds differ in where events wait, never in these rules.

A proxy queue sends its events to a node. :class:`Transport` and :class:`NodeConnection` are what it
needs for that; clients implement them, and tests replace them.
"""

from __future__ import annotations

import abc
import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol, Self, TypedDict, TypeVar

from turnlane.errors import ConfigError
from turnlane.events import Block, Event, iterate_events
from turnlane.ledger import Ledger
from turnlane.pacing import estimate_drain_seconds
from turnlane.runtime import Closeable


class AckLevel(enum.StrEnum):
    """How far an event has come. A producer hears of it at the level that it asks for."""

    ACCEPTED = "accepted"
    """The event is in the queue."""
    PERSISTED = "persisted"
    """The event survives a crash. A queue without a disk acks this level on delivery."""
    DELIVERED = "delivered"
    """A consumer has settled the event."""


class FullBehavior(enum.StrEnum):
    """What publishing does when the queue is full."""

    BLOCK = "block"
    DROP_NEWEST = "drop_newest"
    DROP_OLDEST = "drop_oldest"


class Durability(enum.StrEnum):
    """How safe an event was when it was acked."""

    ALWAYS = "always"
    """Synced to the disk before the ack."""
    INTERVAL = "interval"
    """Synced to the disk, at most one sync interval after acceptance."""
    NEVER = "never"
    """Written to the operating system: the event survives the process, not a power loss."""
    MEMORY = "memory"
    """In memory only: the event is lost with the process."""


class FlowControl(enum.StrEnum):
    """How a producer behaves before the queue is full."""

    NONE = "none"
    """The source cannot wait (UDP): events are published at once, up to the bound."""
    LIGHT = "light"
    """The source can be slowed down (TCP): it waits a moment above ``light_delay_mark``."""
    FULL = "full"
    """The source can wait without limit (files): it waits above ``full_delay_mark``."""


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
    """The next events of a producer, in publish order, have reached its level.

    The counts of all acks add up to the number of published events, unless the queue was closed.
    """

    count: int
    """How many events reached the level."""
    dropped: int
    """How many events were dropped instead."""
    end: int
    """Every event of this producer below this offset is covered by this ack or an earlier one."""
    level: AckLevel
    durability: Durability


class Published(NamedTuple):
    """The result of publishing a block."""

    first: int
    """The offset of the first event in the queue."""
    accepted: int
    """How many events are in the queue now."""
    dropped: int
    """How many events the policies of the queue dropped."""
    repeated: int
    """How many events the queue had already: the producer sent them again."""


AckCallback = Callable[[Ack], None]


@dataclass(frozen=True, slots=True)
class Place:
    """The offsets of a batch, ``first`` to ``end - 1``, and the number of the attempt."""

    first: int
    end: int
    attempt: int = 1

    def __len__(self) -> int:
        return self.end - self.first


class EventFields(TypedDict, total=False):
    """The optional arguments of :meth:`Producer.try_publish`, for producers that pass them on."""

    headers: Mapping[str, str] | None
    timestamp: int | None
    severity: int | None
    source: str | None


class Producer(Closeable):
    """The publishing end. Several threads may share it; the acks then cover all of them."""

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
        """Publish one event; true if the queue has it, false if a policy dropped it.

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

        ``sequence`` is the number of the first event among all events that this producer ever
        published. The queue leaves out events that it has already. Blocks may come in any order;
        ``NumbersMissing`` if they leave too many gaps.
        """

    @abc.abstractmethod
    def try_publish_block(self, block: Block, *, sequence: int | None = None) -> Published | None:
        """Publish the whole block without blocking, or nothing of it (``None``)."""

    @abc.abstractmethod
    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all events of this producer have reached its level; false on timeout."""

    @abc.abstractmethod
    def close(self, *, cancel: bool = False) -> None:
        """Stop publishing. Acks of published events still come.

        With ``cancel``, events of this producer that are only in the queue's memory and that no
        consumer has got leave the queue. The ledger counts them as dropped (``cancelled``). They
        are never acked: an :class:`Ack` counts them as ``dropped``. Blocked publish calls of this
        producer raise ``QueueClosed``, also those that wait for the ack of a cancelled event.
        Events on disk, in flight, or given back by a consumer stay.
        """


class Batch(abc.ABC):
    """Events that a consumer holds, until it calls ``done()``, ``dead()`` or ``release()``.

    As a context manager it is done when the ``with`` block ends, and released when it raises.
    """

    place: Place

    @property
    @abc.abstractmethod
    def block(self) -> Block:
        """The events, in order. Raises ``BatchFreed`` after :meth:`free`."""

    @property
    @abc.abstractmethod
    def blocks(self) -> Sequence[Block]:
        """The events as they are in memory, without a copy: :attr:`block` in pieces."""

    @abc.abstractmethod
    def free(self) -> None:
        """Give up the contents, which are stored elsewhere; counts and acks stay."""

    @abc.abstractmethod
    def done(self) -> None:
        """Settle the batch as delivered. A second call does nothing."""

    @abc.abstractmethod
    def dead(self) -> None:
        """Settle the batch as undeliverable; the caller has stored it as dead letters."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give the batch back, to be handed out again. Not after :meth:`free`."""

    @property
    def attempt(self) -> int:
        """How often the batch was handed out, this time included."""
        return self.place.attempt

    def __len__(self) -> int:
        return len(self.place)

    def __iter__(self) -> Iterator[Event]:
        return iterate_events(self.block, self.place.first)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.done()
        else:
            self.release()


Consumer = Callable[[Batch], None]
"""Takes a batch. If it returns, the batch is done; if it raises, nothing was delivered."""


class Queue(Closeable):
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
        """Make a producer. ``on_ack`` runs on a thread of its own, never in a publish call.

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
        """Close. Remaining events stay on disk; in a queue without a disk they count as dropped.

        With ``drain``, first :meth:`finish` and wait until consumers have settled everything, for
        ``timeout`` seconds at most (default: ``shutdown_timeout``). Nothing is acked by a close.
        A second call does nothing, and returns when the first one does.
        """

    @abc.abstractmethod
    def stats(self) -> Stats:
        """Return the ledger, gauges and counters at this moment."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the queue, for logs, metrics and the ``queue`` column."""

    @property
    @abc.abstractmethod
    def closed(self) -> bool:
        """Whether the queue was closed, and not merely finished."""


@dataclass(frozen=True, slots=True)
class Stats:
    """The state of one queue at one moment. Fields are gauges unless marked as counters."""

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
    """Publishers that wait for room, or because of a delay mark."""
    memory_blocks: int
    """Blocks in memory that are not handed out."""
    pushes: int
    """Counter: publish calls that put events into the queue."""
    full_waits: int
    """Counter: times a publisher found the queue full."""
    releases: int
    """Counter: batches that consumers gave back."""
    disk_bytes: int = 0
    """Bytes of chunk files."""
    disk_available_bytes: int | None = None
    """Free bytes of the file system."""
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
    """Counter: unreadable pieces that were set aside."""
    rate_in: float | None = None
    """Events that were accepted per second in the last minute; ``None`` if not known yet."""
    rate_out: float | None = None
    """Events that were delivered or became dead letters per second in the last minute."""
    rate_dropped: float | None = None
    """Events that were dropped per second in the last minute."""
    trouble: str = ""
    """Why the queue cannot write to its disk; empty if it can."""

    @property
    def utilization(self) -> float:
        """How full the queue is, 0 to 1, by the bound that is nearer."""
        ratios = [
            used / limit
            for used, limit in ((self.size, self.max_size), (self.bytes, self.max_bytes))
            if limit
        ]
        return min(1.0, max(ratios, default=0.0))

    @property
    def drain_seconds(self) -> float | None:
        """Seconds until nothing is pending, at the present rates; infinite if the queue grows."""
        if self.rate_in is None or self.rate_out is None:
            return None
        leaving = self.rate_out + (self.rate_dropped or 0.0)  # dropped events were accepted too
        return estimate_drain_seconds(self.ledger.pending, self.rate_in, leaving)

    def as_dict(self) -> dict[str, object]:
        """Return the stats as values for JSON, which has no infinite number."""
        drain = self.drain_seconds
        return asdict(self) | {
            "ledger": self.ledger.as_dict(),
            "utilization": self.utilization,
            "drain_seconds": None if drain is None or math.isinf(drain) else drain,
        }


class NodeProgress(NamedTuple):
    """How far the node has come with the events of a producer.

    Each field is a sequence number: all events of the producer below it have reached the level. A
    report replaces all reports before it.
    """

    accepted: int
    persisted: int
    delivered: int


class NodeConnection(Protocol):
    """An open stream to the node. One thread sends while another listens."""

    @property
    def resume_at(self) -> int:
        """One more than the highest number that the node had when the stream was opened."""

    @property
    def durability(self) -> Durability:
        """The durability of the node for the ``persisted`` level."""

    def send(self, sequence: int, block: Block) -> None:
        """Send a block whose first event has this number. Blocks while the node is busy.

        Raises ``TransportDown``; the node may have the block even then.
        """

    def urge(self) -> None:
        """Ask the node to persist everything soon: a publisher waits. Raises ``TransportDown``."""

    def progress(self, timeout: float) -> NodeProgress | None:
        """Wait for a report; ``None`` if none came in time. Raises ``TransportDown``."""

    def close(self) -> None:
        """Close. Threads in :meth:`send` or :meth:`progress` get ``TransportDown``.

        Any thread may call it, and more than once.
        """


class Transport(Protocol):
    """Connects to one queue of a node."""

    def connect(self, producer_id: str) -> NodeConnection:
        """Open a stream for a numbered producer. Raises ``TransportDown``.

        After that the node takes nothing from earlier streams of the same producer: their events
        would have numbers that the new stream gives to other events.
        """

    def get(self, max_events: int | None, timeout: float) -> Batch:
        """Take a batch from the queue of the node; ``QueueEmpty`` if none came in time."""
