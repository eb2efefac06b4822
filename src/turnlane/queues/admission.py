"""Who may come in: the bounds of a queue, the line of publishers in front of it, load shedding."""

from __future__ import annotations

import abc
import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turnlane.errors import NumbersMissing, QueueClosed
from turnlane.events import Block, get_event_sizes
from turnlane.ledger import Outcome
from turnlane.queues.acks import Ticket
from turnlane.queues.api import Published
from turnlane.storage.frames import ProducerSequence
from turnlane.storage.producer_sequences import MAX_RUNS, GapPolicy

if TYPE_CHECKING:
    from turnlane.queues.producer import HoldingProducer

UNBOUNDED = 1 << 62


class Entry(abc.ABC):
    """One event or one block that wants in."""

    events: int
    size: int
    inside = False
    """Whether it is in the queue."""

    @abc.abstractmethod
    def enter(self) -> None:
        """Put it into the queue. Called once, under the queue's lock, when there is room."""


class Waiter:
    """A publisher in the line. Whoever makes room puts its entry in and wakes it."""

    __slots__ = ("_signal", "entry", "refused", "woken")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.woken = False
        self.refused = False
        self._signal = threading.Lock()
        self._signal.acquire()

    def wait(self, timeout: float | None) -> bool:
        """Block until let in or refused; false on timeout."""
        return self._signal.acquire(timeout=-1 if timeout is None else max(timeout, 0))

    def admit(self) -> None:
        """Put the entry in and wake its publisher."""
        if not self.entry.inside:  # interrupted before, between the two lines
            self.entry.enter()
        self.woken = True
        self._signal.release()

    def refuse(self) -> None:
        """Wake the publisher empty-handed: the queue was closed."""
        self.woken = self.refused = True
        self._signal.release()


class Level(NamedTuple):
    """A fill level: so many events, or the same share of the bound in bytes."""

    events: int
    bytes: int


class Calm:
    """What the fast path of publishing compares with: below it, nothing needs a closer look.

    ``bytes`` is -1 whenever everybody has to look closer.
    """

    __slots__ = ("bytes", "events", "usual_bytes")

    def __init__(self, events: int, usual_bytes: int) -> None:
        self.events = events
        self.bytes = self.usual_bytes = usual_bytes


class Gate:
    """What is inside counts against two bounds; what does not fit stands in line.

    Belongs to a queue and is only touched under its lock.
    """

    __slots__ = (
        "_calms",
        "_closed",
        "_delayed",
        "_failure",
        "_held",
        "bytes",
        "depth",
        "line",
        "max_bytes",
        "size",
    )

    def __init__(self, size: int | None, max_bytes: int | None) -> None:
        self.size = UNBOUNDED if size is None else size
        self.max_bytes = UNBOUNDED if max_bytes is None else max_bytes
        self.depth = 0
        self.bytes = 0
        self.line: deque[Waiter] = deque()
        self._held = False
        self._closed = False
        self._failure: Exception | None = None
        self._delayed = 0
        self._calms: list[Calm] = []

    def level(self, mark: int) -> Level:
        """A mark in events, and its share of the bound in bytes."""
        share = UNBOUNDED if self.size == UNBOUNDED else self.max_bytes * mark // self.size
        return Level(mark, share)

    def reaches(self, level: Level) -> bool:
        """Whether the queue is as full, by whichever bound is nearer."""
        return self.depth >= level.events or self.bytes >= level.bytes

    def calm(self, below: list[Level]) -> Calm:
        """Calm below all these levels and the bounds, as long as nobody is kept out."""
        bounds = [Level(self.size, self.max_bytes), *below]
        calm = Calm(min(each.events for each in bounds), min(each.bytes for each in bounds))
        self._calms.append(calm)
        self._look()
        return calm

    @property
    def blocked(self) -> int:
        """How many publishers wait, in line or slowed down."""
        return len(self.line) + self._delayed

    def delay(self, publishers: int) -> None:
        """So many more publishers are slowed down, or fewer: nobody may overtake them unseen."""
        self._delayed += publishers
        self._look()

    def fits(self, events: int, size: int) -> bool:
        """Whether there is room and nobody is kept out, the line left aside."""
        return not self._held and self.has_room(events, size)

    def has_room(self, events: int, size: int) -> bool:
        """Whether the bounds allow for it."""
        return self.depth + events <= self.size and self.bytes + size <= self.max_bytes

    @property
    def held(self) -> bool:
        """Whether everybody is kept out, whatever the room."""
        return self._held

    @property
    def room(self) -> int:
        """How many more events the bound in events lets in."""
        return 0 if self._held else max(0, self.size - self.depth)

    def charge(self, events: int, size: int) -> None:
        """Count events against the bounds."""
        self.depth += events
        self.bytes += size

    def refund(self, events: int, size: int) -> None:
        """Give room back and let in who stands first in line."""
        self.depth -= events
        # Sizes of what was read back from disk are averages: they must not add up to a drift.
        self.bytes = max(0, self.bytes - size) if self.depth else 0
        if self.line:
            self.let_in()

    def hold(self, *, held: bool) -> None:
        """Keep everybody out, whatever the room (the disk is full, say), or stop doing so."""
        if held is not self._held:
            self._held = held
            self.let_in()

    def let_in(self) -> None:
        """Admit from the front of the line as long as there is room. Nobody overtakes."""
        while self.line and self.fits(self.line[0].entry.events, self.line[0].entry.size):
            self.line[0].admit()  # if that is interrupted, the publisher still stands in line
            self.line.popleft()
        self._look()

    def join(self, entry: Entry) -> Waiter:
        """Stand at the end of the line."""
        waiter = Waiter(entry)
        self.line.append(waiter)
        self._look()
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Give up standing in line; the next may be smaller and fit."""
        self.line.remove(waiter)
        self.let_in()

    def close(self) -> None:
        """Send everybody in line away."""
        self._closed = True
        while self.line:
            self.line.popleft().refuse()
        self._look()

    def fail(self, error: Exception) -> None:
        """Close for this reason, which whoever comes is told."""
        self._failure = error
        self.close()

    @property
    def closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._closed

    def check_sound(self) -> None:
        """Raise what the queue has failed with, if so."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def check_open(self, name: str) -> None:
        """Raise ``QueueClosed`` if so, or what the queue has failed with."""
        self.check_sound()
        if self._closed:
            msg = f"queue {name!r} is closed"
            raise QueueClosed(msg)

    def _look(self) -> None:
        restless = self._closed or self._held or self.line or self._delayed
        for calm in self._calms:
            calm.bytes = -1 if restless else calm.usual_bytes


Rows = npt.NDArray[np.int64]
"""Which events of a block, in order."""


def sampled(events: int, seen: int, interval: int) -> Rows:
    """One of ``interval`` events, counted on from ``seen`` events before."""
    return np.arange(-seen % interval, events, interval)


MAX_SEVERITY = 7
"""Debug, as in syslog; 0 is an emergency."""


def check_severities(block: Block) -> None:
    """Raise ``ValueError`` if any event's severity is not from 0 to 7."""
    at = block.schema.get_field_index("severity")
    if at < 0 or block.column(at).null_count == block.num_rows:
        return
    known = block.column(at)
    numbers = np.asarray(known.drop_null() if known.null_count else known)
    for worst in (int(numbers.min()), int(numbers.max())):
        if not 0 <= worst <= MAX_SEVERITY:
            msg = f"severity {worst} is not between 0 (emergency) and {MAX_SEVERITY} (debug)"
            raise ValueError(msg)


def important(block: Block, severity: int) -> Rows:
    """All events but those as unimportant as ``severity`` or more so.

    Severities count downwards: 0 is an emergency, 7 is debug. Events without one are kept.
    """
    if "severity" not in block.schema.names:
        return np.arange(block.num_rows)
    less: pa.BooleanArray = pc.less(block.column("severity"), pa.scalar(severity, pa.int8()))
    return np.flatnonzero(less.fill_null(fill_value=True).to_numpy(zero_copy_only=False))


# ── entries ──
# What stands at a queue's door: one event, or one block of events.

Annotations = tuple[str | None, Mapping[str, str] | None, int | None, str | None]


class PublishEntry(Entry):
    """Something a producer publishes; once ``inside``, ``ticket`` is what it has to wait for."""

    def __init__(self, producer: HoldingProducer) -> None:
        self.producer = producer
        self.ticket: Ticket | None = None
        self.inside = False
        self.screened: dict[Outcome, int] = {}
        """What the queue's policies have taken out of it, and the ledger does not know yet."""

    @property
    @abc.abstractmethod
    def largest_event(self) -> int:
        """The size of its largest event."""

    @property
    def is_repeat(self) -> bool:
        """Whether the queue has all of it already."""
        return False

    def drop_repeats(self) -> None:
        """Leave out what the queue has from this producer already."""

    def check_gaps(self) -> None:
        """Raise ``NumbersMissing`` if its producer leaves out too many numbers."""

    def skip(self) -> None:
        """Nothing of it goes in, and it need not be sent again. Under the queue's lock."""
        self._count_screened()

    def _count_screened(self) -> None:
        for outcome, events in self.screened.items():
            self.producer.queue.dropped_at_door(outcome, events)
        self.screened.clear()

    @abc.abstractmethod
    def sample(self, seen: int, interval: int) -> int:
        """Keep one of ``interval`` events; returns how many that drops."""

    @abc.abstractmethod
    def shed(self, severity: int) -> int:
        """Drop events no more important than ``severity``; returns how many."""

    @abc.abstractmethod
    def keep(self, events: int) -> int:
        """Keep only the first ``events``; returns how many that drops."""


class EventEntry(PublishEntry):
    """A single event."""

    def __init__(
        self,
        producer: HoldingProducer,
        value: bytes,
        stamp: int,
        size: int,
        rest: Annotations,
    ) -> None:
        super().__init__(producer)
        self.events = 1
        self.size = size
        self._value = value
        self._stamp = stamp
        self._rest = rest

    @property
    def largest_event(self) -> int:
        return self.size

    def enter(self) -> None:
        queue = self.producer.queue
        first = queue.append_event(self._value, self._stamp, self.size, self._rest)
        self.ticket = self.producer.entered(first, first + 1)
        self.inside = True
        self._count_screened()

    def sample(self, seen: int, interval: int) -> int:
        return self.keep(0 if seen % interval else 1)

    def shed(self, severity: int) -> int:
        own = self._rest[2]
        return self.keep(0 if own is not None and own >= severity else 1)

    def keep(self, events: int) -> int:
        dropped = max(0, self.events - events)
        self.events -= dropped
        return dropped


_PADDING = 64
"""Arrow rounds its buffers up to this."""


def size_of(block: Block) -> int:
    """The bytes of the block. Arrow's ``nbytes`` says the same, at more cost than all the rest."""
    at = block.schema.get_field_index("value")
    values = block.column(max(0, at))
    if at < 0 or values.offset:
        return block.nbytes
    offsets = values.buffers()[1]
    whole = offsets is not None and offsets.size < 4 * (len(values) + 1) + _PADDING
    return block.get_total_buffer_size() if whole else block.nbytes


class BlockEntry(PublishEntry):
    """A block, possibly numbered by its producer so that repeats can be told."""

    def __init__(
        self, producer: HoldingProducer, block: Block, size: int, sequence: int | None
    ) -> None:
        super().__init__(producer)
        self.published = Published(-1, 0, 0, 0)
        self._sequence = sequence
        self._end_sequence = None if sequence is None else sequence + block.num_rows
        self._numbers: Rows | None = None
        """Its events' sequence numbers, where they no longer follow on each other."""
        self._block = block
        self.events = block.num_rows
        self.size = size

    def drop_repeats(self) -> None:
        producer_id = self.producer.hashed_id
        if self._sequence is None or producer_id is None:
            return
        accepted = self.producer.queue.sequences.get(producer_id)
        if accepted is None or self._sequence >= accepted.end:
            return  # in order, as nearly all are
        before = self.events
        if self._numbers is None:
            self._keep_missing(accepted.missing(self._sequence, self._sequence + self.events))
        else:
            new = np.flatnonzero(~accepted.holds(self._numbers))
            if len(new) < self.events:
                self._numbers = self._numbers[new]
                self._replace(self._block.take(new))
        repeated = self.published.repeated + before - self.events
        self.published = self.published._replace(repeated=repeated)

    def _keep_missing(self, missing: list[tuple[int, int]]) -> None:
        """Keep the events with these numbers."""
        assert self._sequence is not None
        start = self._sequence
        if len(missing) > 1:
            self._numbers = np.concatenate([np.arange(first, end) for first, end in missing])
            self._replace(self._block.take(self._numbers - start))
        elif not missing:
            self._replace(self._block.slice(0, 0))
        elif missing[0] != (start, self._end_sequence):
            first, end = missing[0]
            self._sequence, self._end_sequence = first, end
            self._replace(self._block.slice(first - start, end - first))

    def check_gaps(self) -> None:
        producer_id = self.producer.hashed_id
        if (
            self._sequence is None
            or producer_id is None
            or self.producer.gaps is not GapPolicy.KEEP
        ):
            return
        accepted = self.producer.queue.sequences.get(producer_id)
        if accepted is None or len(accepted.runs) < MAX_RUNS:
            return
        if self.events and accepted.is_apart(self._sequence, self._sequence + self.events):
            raise NumbersMissing.of(self.producer.queue.name, accepted.gaps)

    def _replace(self, block: Block) -> None:
        self._block = block
        self.events = block.num_rows
        self.size = size_of(block)

    @property
    def largest_event(self) -> int:
        if self.events == 1:
            return self.size
        return int(get_event_sizes(self._block).max(initial=0))

    @property
    def is_repeat(self) -> bool:
        return not self.events and self.published.repeated > 0 and not self.published.dropped

    def enter(self) -> None:
        queue = self.producer.queue
        # Again, now that it is this entry's turn: the same block may have come in by another
        # connection while it stood in line.
        self.drop_repeats()
        stamp = self._number()
        first = queue.end
        if self.events:
            consecutive = self._numbers is None
            queue.append_block(self._block, self.size, stamp, consecutive=consecutive)
        self.published = self.published._replace(first=first, accepted=self.events)
        self.ticket = self.producer.entered(first, first + self.events)
        self.inside = True
        self._count_screened()

    def skip(self) -> None:
        super().skip()
        self._number()

    def _number(self) -> ProducerSequence | None:
        producer_id = self.producer.hashed_id
        first, end = self._sequence, self._end_sequence
        if producer_id is None or first is None or end is None:
            return None
        return self.producer.queue.numbered(producer_id, first, end, self.producer.gaps)

    def sample(self, seen: int, interval: int) -> int:
        return self._keep_rows(sampled(self.events, seen, interval))

    def shed(self, severity: int) -> int:
        return self._keep_rows(important(self._block, severity))

    def keep(self, events: int) -> int:
        kept = max(0, events)
        return self._reduce(self._block.slice(0, kept), slice(kept))

    def _keep_rows(self, rows: Rows) -> int:
        return self._reduce(self._block.take(rows), rows) if len(rows) < self.events else 0

    def _reduce(self, block: Block, rows: Rows | slice) -> int:
        dropped = self.events - block.num_rows
        if dropped and self._sequence is not None:
            if self._numbers is None:
                self._numbers = np.arange(self._sequence, self._sequence + self.events)
            self._numbers = self._numbers[rows]
        self._replace(block)
        self.published = self.published._replace(dropped=self.published.dropped + dropped)
        return dropped
