"""What a buffered queue and its storage exchange: ranges of events, calls, and answers.

A queue keeps the newest events in memory. Where they go from there, and what survives the process,
is the business of its :class:`Storage`: nothing (:class:`NoStorage`), a log on disk
(:mod:`turnlane.queues.disk`), a log for what memory cannot hold
(:mod:`turnlane.queues.disk_assisted`), or a node (:mod:`turnlane.queues.proxy`).

Both sides share the lock of the queue. A method whose docstring says "Under the lock." is called
with the lock held, does not wait, and does no I/O but appends to the journal. All other methods
are called without it and may take it.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import pyarrow as pa

from turnlane.errors import Bug
from turnlane.events import Block
from turnlane.intervals import Span
from turnlane.ledger import Outcome
from turnlane.queues.api import AckLevel, Batch, Durability, Place, Stats
from turnlane.storage.frames import ProducerSequence
from turnlane.storage.producer_sequences import AcceptedSequences


@dataclass(slots=True)
class BlockRange:
    """Events ``first`` to ``end - 1`` of a queue; ``blocks`` is ``None`` if they are elsewhere."""

    first: int
    end: int
    size: int
    """The bytes that the events count for."""
    blocks: Sequence[Block] | None
    attempt: int = 1
    """How often the events were handed out, this time included."""
    sequences: Sequence[ProducerSequence] = ()
    """For each numbered producer, the numbers that are complete with this range."""
    is_charged: bool = True
    """Whether the events count against the bounds of the queue."""
    is_recorded: bool = False
    """Whether the journal knows that the events are settled."""
    is_consecutive: bool = False
    """Whether one producer published all the events, with consecutive sequence numbers."""

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def charge(self) -> tuple[int, int]:
        """The events and bytes that the range takes of the bounds."""
        return (len(self), self.size) if self.is_charged else (0, 0)

    def copy(self) -> BlockRange:
        """Return a second range of the same events, which can be cut independently."""
        return BlockRange(  # by hand: dataclasses.replace() takes four times as long
            self.first,
            self.end,
            self.size,
            self.blocks,
            self.attempt,
            self.sequences,
            self.is_charged,
            self.is_recorded,
            self.is_consecutive,
        )

    def slice(self, first: int, end: int) -> BlockRange:
        """Return a range of the events ``first`` to ``end - 1``, which can be cut independently."""
        part = self.copy()
        if end < self.end:
            part = part.cut_head(end - self.first)
        if first > self.first:
            part.cut_head(first - self.first)
        return part

    def cut_head(self, events: int) -> BlockRange:
        """Cut off the first ``events`` events and return them; this range keeps the rest."""
        cut = self.first + events
        size = self.size * events // len(self)
        blocks, rest = (None, None) if self.blocks is None else _cut_blocks(self.blocks, events)
        head = self.copy()
        head.end, head.size, head.blocks = cut, size, blocks
        # Which number an event in the middle has is known only if the numbers are consecutive.
        rest_events = self.end - cut
        head.sequences = (
            [each.subtract(rest_events) for each in self.sequences] if self.is_consecutive else ()
        )
        self.first, self.size, self.blocks = cut, self.size - size, rest
        return head

    def split(self, size: int) -> list[BlockRange]:
        """Return the events in ranges of about ``size`` bytes."""
        count = min(len(self), round(self.size / size))
        if count <= 1:
            return [self]
        rest, step = self.copy(), -(-len(self) // count)
        return [rest.cut_head(min(step, len(rest))) for _ in range(0, len(self), step)]


def _cut_blocks(blocks: Sequence[Block], events: int) -> tuple[list[Block], list[Block]]:
    head: list[Block] = []
    rest = list(blocks)
    while events:
        block = rest.pop(0)
        if block.num_rows > events:
            rest.insert(0, block.slice(events))
            block = block.slice(0, events)
        head.append(block)
        events -= block.num_rows
    return head, rest


class LostRange(NamedTuple):
    """Offsets ``first`` to ``end - 1`` that storage can never read: corrupt or missing."""

    first: int
    end: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class StoredState:
    """What storage has of a queue when the queue is opened."""

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


class PositionsView(Protocol):
    """The offsets of the queue."""

    low: int
    """Everything below this offset is settled."""
    end: int
    """The offset that the next event gets."""

    def is_settled(self, first: int, end: int) -> bool:
        """Whether every offset of the range is settled."""

    def find_unsettled(self, first: int, end: int) -> list[Span]:
        """Return the parts of the range that are not settled."""


class WatermarkView(Protocol):
    """How far events are persisted, and the publishers that wait for it."""

    position: int
    served: int
    """How many publishers the last :meth:`StorageHost.mark_persisted` has woken."""

    @property
    def waiters(self) -> int:
        """How many publishers wait."""

    def find_awaited(self, limit: int) -> int:
        """Return the highest offset up to ``limit`` that a publisher waits for; 0 if none."""


class AdmissionView(Protocol):
    """What counts against the bounds."""

    events: int
    bytes: int
    is_held: bool
    """Whether every publisher is kept out, even if there is room."""

    @property
    def has_waiting_line(self) -> bool:
        """Whether publishers wait in line for room."""


class StorageHost(Protocol):
    """The queue, as its storage sees it.

    Everything but ``lock`` and :meth:`wait_persisted` is used under the lock.
    """

    lock: threading.Lock
    """The only lock of the queue. Storage may wait on conditions of this lock."""

    @property
    def positions(self) -> PositionsView:
        """The offsets of the queue."""

    @property
    def persisted(self) -> WatermarkView:
        """The watermark of the ``persisted`` level."""

    @property
    def admission(self) -> AdmissionView:
        """What counts against the bounds."""

    @property
    def sequences(self) -> Mapping[bytes, AcceptedSequences]:
        """The accepted sequence numbers by the key of the producer."""

    # The events in memory

    @property
    def unsealed_events(self) -> int:
        """How many events are in the open block, which storage has not seen yet."""

    def seal_open_block(self) -> None:
        """Seal the open block if it has events; this calls :meth:`Storage.on_sealed`."""

    def trim_buffer(self, stored_end: int, max_bytes: int) -> None:
        """Drop the oldest blocks below ``stored_end`` until the buffer has ``max_bytes``."""

    def ranges_in_memory(self, first: int) -> list[BlockRange]:
        """Return copies of the charged ranges from ``first`` on, oldest first.

        They are buffered, given back, or in flight; all have their contents.
        """

    def release_memory(self, end: int) -> None:
        """Give up contents and room of the events below ``end``, which storage now has."""

    def freed_ranges(self) -> list[Span]:
        """Return the batches in flight whose contents are neither in memory nor in storage."""

    # Reports

    def update_threshold(self) -> None:
        """Update the size at which publishers call :meth:`Storage.on_growth`."""

    def mark_persisted(self, end: int) -> None:
        """Report that everything below ``end`` is persisted."""

    def settle_delivered(self, offset: int, *, notify: bool) -> None:
        """Report that the node delivered everything below ``offset``."""

    def wait_persisted(self, end: int, timeout: float) -> None:
        """Wait until everything below ``end`` is persisted. Not under the lock."""

    def hold_publishers(self, *, hold: bool) -> None:
        """Keep every publisher out, even if there is room, or let them in again."""

    def lose(self, first: int, end: int) -> None:
        """Report that storage lost the events of the range."""

    def drop_unstored(self, first: int) -> list[Span]:
        """Settle all unsettled events from ``first`` on, and freed ones, as closed."""

    def fail(self, error: Exception, *levels: AckLevel) -> None:
        """Close the queue for publishers, who get ``error``; ``levels`` are never reached."""

    def set_durability(self, durability: Durability) -> None:
        """Say in later acks that this durability stands behind them."""


class TakenBatch(Protocol):
    """A batch out of the buffer, with the bytes that it counts for."""

    place: Place

    @property
    def block(self) -> Block:
        """The events."""

    @property
    def size(self) -> int:
        """The bytes that the events count for."""

    def free(self) -> None:
        """Give up the contents."""

    def done(self) -> None:
        """Settle the events as delivered."""


TakeBatch = Callable[[int, float], TakenBatch]
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

    def make_room(self) -> bool:
        """Begin to make room for publishers; true if they can expect some soon."""
        return False

    def urge(self, level: AckLevel) -> None:  # noqa: B027
        """A publisher waits for this level: reach it as soon as possible."""

    # Reading

    def fetch(self, wanted: BlockRange) -> list[Block] | LostRange:
        """Read the events of a range, from its first on, or as many as lie together.

        Only one thread calls this at a time. Returns nothing once the storage is closed. Raises
        ``OSError``; a later call may succeed.
        """
        raise Bug(f"offset {wanted.first} is neither in memory nor in storage")

    def read(self, first: int, end: int) -> tuple[int, Block] | LostRange | None:
        """Read events by offset, for readers that take nothing; ``None`` if there are none."""
        del first, end
        return None

    def get(self, max_events: int | None, timeout: float) -> Batch:
        """Get a batch from the node; only if :attr:`is_remote`."""
        raise Bug(f"no batch of {max_events} events in {timeout} s: the storage is not remote")

    # Acks

    def settle(self, settled: BlockRange, outcome: Outcome) -> None:  # noqa: B027
        """Record that a range is settled. Raises ``OSError``.

        Drops are also recorded under the lock.
        """

    def sync_settled(self, *, now: bool = False) -> None:  # noqa: B027
        """Sync the records if durability is ``always``, or if ``now``. Raises ``OSError``."""

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
