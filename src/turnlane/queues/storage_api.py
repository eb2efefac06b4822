"""The two protocols between a buffered queue and its storage.

A queue keeps the newest events in memory. Its :class:`Storage` decides where they go from there and
which of them survive the process: :class:`NoStorage` keeps none, :mod:`turnlane.queues.disk` has a
log of all events, :mod:`turnlane.queues.disk_assisted` a log of the events that do not fit into
memory, and :mod:`turnlane.queues.proxy` sends events to a node. Storage reports to the queue, its
:class:`StorageHost`.

Both sides share the lock of the queue. A method whose docstring says "Under the lock." is called
with the lock held, does not wait, and does no I/O but appends to the journal. All other methods
are called without it and may take it.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from turnlane.errors import Bug
from turnlane.events import Block
from turnlane.intervals import RangeSet, Span
from turnlane.ledger import Outcome
from turnlane.queues.acks import Watermark
from turnlane.queues.admission import Admission
from turnlane.queues.api import AckLevel, Batch, Durability, Stats
from turnlane.queues.buffer import BlockRange, Buffer
from turnlane.queues.positions import BufferedBatch, InFlight, Positions
from turnlane.storage.producer_sequences import AcceptedSequences
from turnlane.storage.reader import UnreadableRange


@dataclass(frozen=True, slots=True)
class StoredState:
    """The part of a queue's state that storage has when the queue is opened."""

    queue_id: str = ""
    """The id that the queue keeps across restarts; empty if nothing survives one."""
    low: int = 0
    end: int = 0
    settled: Sequence[Span] = ()
    returned: Sequence[tuple[int, int, int]] = ()
    """The ranges that consumers gave back, with the number of their next attempt."""
    totals: Mapping[Outcome, int] = field(default_factory=dict)
    sequences: Mapping[bytes, AcceptedSequences] = field(default_factory=dict)
    """The accepted sequence numbers of every numbered producer."""
    columns: Mapping[str, pa.DataType] = field(default_factory=dict)
    """The Arrow type of every column."""
    bytes: int = 0
    """The bytes that the unsettled events count for."""


class StorageHost(Protocol):
    """The queue, as its storage sees it.

    Everything but ``lock`` and :meth:`wait_level` is used under the lock.
    """

    lock: threading.Lock
    """The only lock of the queue. Storage may wait on conditions of this lock."""
    positions: Positions
    buffer: Buffer
    """The events in memory that are not handed out. Sealing calls :meth:`Storage.on_sealed`."""
    in_flight: InFlight
    admission: Admission
    """The fill level. Storage can hold publishers back with :meth:`Admission.hold`."""
    persisted: Watermark
    """How far events are persisted, and the publishers that wait for it."""
    sequences: dict[bytes, AcceptedSequences]
    """The accepted sequence numbers by the key of the producer."""

    def list_ranges_in_memory(self, first: int) -> list[BlockRange]:
        """Return copies of the charged ranges from ``first`` on, oldest first.

        They are buffered, given back, or in flight; all have their contents.
        """

    def release_memory(self, end: int) -> None:
        """Give up contents and room of the events below ``end``, which storage now has."""

    def update_threshold(self) -> None:
        """Update the size at which publishers call :meth:`Storage.on_growth`."""

    def mark_persisted(self, end: int) -> None:
        """Report that everything below ``end`` is persisted."""

    def wait_level(self, level: AckLevel, end: int, timeout: float | None) -> bool:
        """Wait until everything below ``end`` has reached a level; false on timeout or close."""

    def find_awaited(self, first: int, end: int) -> RangeSet:
        """Return the events of a range of which publishers still have to hear."""

    def settle_delivered(self, first: int, end: int, *, notify: bool) -> None:
        """Report that the node delivered a range, or has promised to."""

    def lose(self, first: int, end: int, outcome: Outcome = Outcome.MISSING) -> None:
        """Report that storage lost the events of the range, or dropped them."""

    def drop_unstored(self, first: int) -> list[Span]:
        """Settle all unsettled events from ``first`` on, and freed ones, as closed."""

    def fail(self, error: Exception, *levels: AckLevel) -> None:
        """Close the queue for publishers, who get ``error``; ``levels`` are never reached."""

    def set_durability(self, durability: Durability) -> None:
        """Say in later acks that this durability stands behind them."""


TakeBatch = Callable[[int, float], BufferedBatch]
"""Takes a batch out of the buffer: the most events, and the seconds to wait."""


class Storage(abc.ABC):
    """Where the events of a queue go from memory, and what survives.

    The methods here do what a storage needs that stores nothing.
    """

    durability = Durability.MEMORY
    """What stands behind an ack of the ``persisted`` level."""
    charges_stored = True
    """Whether events that are only in storage count against the bounds of the queue."""
    charges_freed = True
    """Whether a freed batch still counts against the bound in events."""
    is_remote = False
    """Whether consumers get batches from :meth:`get` and not from the buffer."""
    failure = ""
    """Why storage cannot write at the moment; empty if it can."""
    wants_next_event = False
    """Whether :meth:`on_growth` has to be called for the very next event. Under the lock."""
    can_cancel = True
    """Whether events that are only in memory can leave the queue on request."""
    _host: StorageHost

    def recover(self) -> StoredState:
        """Return the stored state. Called once, before :meth:`start`."""
        return StoredState()

    def start(self, host: StorageHost, take: TakeBatch) -> None:
        """Begin to work for the queue. Called once."""
        del take
        self._host = host

    @abc.abstractmethod
    def close(self) -> None:
        """Store or give up the rest, and let go of everything. Called once."""

    # What happens in the queue. All under the lock.

    def on_sealed(self, sealed: BlockRange) -> None:  # noqa: B027 - a default, as are the others
        """A block joined the buffer."""

    def on_growth(self) -> None:  # noqa: B027
        """Events came in and the notify threshold was reached."""

    def on_settled(  # noqa: B027
        self, settled: BlockRange, fresh: Sequence[Span], outcome: Outcome
    ) -> None:
        """The ``fresh`` parts of a range were not settled before and are now."""

    def on_refused(self, outcome: Outcome, events: int) -> None:  # noqa: B027
        """Policies dropped events that never got an offset."""

    def find_unstored(self) -> int:
        """Return the offset from which on storage has no events, and is not about to."""
        return 0

    def make_room(self) -> bool:
        """Begin to make room for publishers; true if they can expect some soon."""
        return False

    def drop_unwritten(self) -> bool:
        """Drop the oldest unread events that only memory has, so that publishers may enter.

        False if that does not help: it is not for lack of memory that they are held.
        """
        return False

    def urge(self, level: AckLevel) -> None:  # noqa: B027
        """A publisher waits for this level: reach it as soon as possible."""

    # Reading

    def fetch(self, wanted: BlockRange) -> list[Block] | UnreadableRange:
        """Read the events of a range, from its first on, or as many as lie together.

        Only one thread calls this at a time. Returns nothing once the storage is closed. Raises
        ``OSError``; a later call may succeed.
        """
        raise Bug(f"offset {wanted.first} is neither in memory nor in storage")

    def read(self, first: int, end: int) -> tuple[int, Block] | UnreadableRange | None:
        """Read events by offset, for readers that take nothing; ``None`` if there are none."""
        del first, end
        return None

    def get(self, max_events: int | None, timeout: float) -> Batch:
        """Get a batch from the node; only if :attr:`is_remote`."""
        raise Bug(f"no batch of {max_events} events in {timeout} s: the storage is not remote")

    def count_undrained(self) -> int:
        """Return how many events a draining close waits for. Under the lock."""
        return self._host.positions.pending

    # Acks

    def settle(self, settled: BlockRange, outcome: Outcome) -> None:  # noqa: B027
        """Record that a range is settled. Raises ``OSError``.

        Drops are also recorded under the lock.
        """

    def sync_settled(self, *, now: bool = False) -> None:  # noqa: B027
        """Sync the records if durability is ``always``, or if ``now``. Raises ``OSError``."""

    def keep_drops(self, *, now: bool) -> None:  # noqa: B027
        """Make all drops so far durable if durability is ``always``, or if ``now``.

        Raises ``OSError``. Not under the lock.
        """

    def give_back(self, returned: BlockRange) -> None:  # noqa: B027
        """Record that a consumer gave a range back."""

    def describe(self, stats: Stats) -> Stats:
        """Return the stats with the part of the storage added."""
        return stats


class NoStorage(Storage):
    """Nothing leaves memory: the ``memory`` kind. An event is persisted once it is delivered."""

    def close(self) -> None:
        with self._host.lock:
            self._host.drop_unstored(0)
