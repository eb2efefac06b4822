"""Where a streaming query is, as its checkpoint keeps it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Self

from turnlane.delivery.settings import Ordering
from turnlane.intervals import Span, count_of, newest_of, oldest_of

# ── batch_wait ──
# How long a reader waits until there is enough for a batch. Pure: it is told the time.


class BatchWait:
    """A wait for so many events, but no longer than so many seconds from the first of them."""

    def __init__(self, events: int, seconds: float) -> None:
        self._events = events
        self._seconds = seconds
        self._since: float | None = None

    def left(self, events: int, now: float) -> float:
        """The seconds that are left to wait for more; 0 if what there is makes a batch."""
        if not events or events >= self._events:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        left = self._since + self._seconds - now
        if left <= 0:
            self._since = None
        return max(0.0, left)


# ── ranges ──
# Which offsets a batch has, and how they are shared among tasks. Pure.

Positions = Mapping[int, int]
"""An offset for each node, by its number."""


class Extent(NamedTuple):
    """How far a queue goes on one node: ``low`` to ``end - 1``."""

    low: int
    end: int
    queue_id: str
    """Tells it from others of its name: one that is made anew has another."""


class Slice(NamedTuple):
    """Offsets ``first`` to ``end - 1`` of the queue on one node: the work of one task."""

    node: int
    first: int
    end: int


def admitted(start: Positions, end: Positions, limit: int | None) -> dict[int, int]:
    """How far to read, given how far one could: at most ``limit`` events, shared fairly.

    Every node gets the same share; what one does not need goes to the others.
    """
    backlog = {node: max(0, end[node] - start[node]) for node in start}
    if limit is None or sum(backlog.values()) <= limit:
        return {node: start[node] + backlog[node] for node in start}
    ends = {}
    left = limit
    for count, node in enumerate(sorted(backlog, key=backlog.__getitem__)):
        share = min(backlog[node], left // (len(backlog) - count))
        ends[node] = start[node] + share
        left -= share
    return ends


def apportioned(pieces: int, events: Positions) -> dict[int, int]:
    """So many pieces shared among nodes by their events: each has one, none more than events."""
    shares = dict.fromkeys(events, 1)
    for _ in range(min(pieces, sum(events.values())) - len(events)):
        largest = max(shares, key=lambda node: events[node] / shares[node])
        shares[largest] += 1
    return shares


def sliced(
    start: Positions, end: Positions, *, at_least: int, at_most: int, per: int
) -> list[Slice]:
    """Cut a batch into tasks: one more for every ``per`` events, none if there are none.

    No slice holds events of two nodes, so there may be more than ``at_most`` if there are more
    nodes than that. None is empty, so there may be fewer than ``at_least``.
    """
    events = {node: end[node] - start[node] for node in start if end[node] > start[node]}
    wanted = min(max(at_least, -(-sum(events.values()) // per)), max(at_most, at_least))
    pieces_of = apportioned(wanted, events)
    slices = []
    for node, count in sorted(events.items()):
        pieces = pieces_of[node]
        cuts = [start[node] + count * piece // pieces for piece in range(pieces + 1)]
        slices += [Slice(node, *pair) for pair in itertools.pairwise(cuts)]
    return slices


Offset = dict[str, Any]
"""As Spark has it: offsets by node, and beside them where reading began, and in which queues."""

TAKEN: Final = "taken"
"""The part of a lane's offset that counts events, those that come again too: it changes with each
batch, also if there is nothing new and something left to do."""
UNHEARD: Final = -1
"""The position on a node that has been away since the query was made."""
BEGUN: Final = "from"
QUEUES: Final = "queues"


@dataclass(frozen=True)
class Place:
    """How far a query has come, by node; a node that is missing was added to the endpoint later."""

    at: dict[int, int]
    begun: dict[int, int] = field(default_factory=dict)
    """Where it began, on nodes that had older events then: those are not the query's to settle."""
    queues: dict[int, str] = field(default_factory=dict)
    """The ids of the queues that it reads: offsets say nothing of others of their name. Checkpoints
    of old have none."""

    @classmethod
    def of(cls, offset: Mapping[str, Any]) -> Place:
        """What an offset of Spark's says."""
        at = {node: each for node, each in offset.items() if node not in (BEGUN, QUEUES)}
        begun, queues = offset.get(BEGUN, {}), offset.get(QUEUES, {})
        return cls(_by_number(at), _by_number(begun), _by_number(queues))

    def begin(self, first: Positions, extents: Mapping[int, Extent]) -> Place:
        """The place once reading begins on some nodes, or begins anew."""
        later = {node: at for node, at in first.items() if at > extents[node].low}
        others = {node: at for node, at in self.begun.items() if node not in first}
        queues = {node: extents[node].queue_id for node in first}
        return Place({**self.at, **first}, others | later, self.queues | queues)

    def knowing(self, extents: Mapping[int, Extent]) -> Place:
        """The same, with the ids of queues whose ids it has not known yet."""
        found = {node: each.queue_id for node, each in extents.items() if node in self.at}
        return replace(self, queues={**self.queues, **found, **self.queues})

    def is_other(self, node: int, queue_id: str) -> bool:
        """Whether this is known not to be the queue whose offsets these are."""
        return self.queues.get(node, queue_id) != queue_id

    def moved(self, at: Positions) -> Place:
        """The same, farther on."""
        return replace(self, at={**self.at, **at})

    def offset(self) -> Offset:
        """The same for Spark, for which offsets are the same if their texts are."""
        parts = {BEGUN: _by_text(self.begun), QUEUES: _by_text(self.queues)}
        return _by_text(self.at) | {name: part for name, part in parts.items() if part}


def _by_number(part: Mapping[str, Any]) -> dict[int, Any]:
    return {int(node): each for node, each in part.items()}


def _by_text(part: Mapping[int, Any]) -> dict[str, Any]:
    return {str(node): each for node, each in part.items()}


# ── shares ──
# Which offsets a lane's batch has, and how they are shared among its tasks. Pure.
#
# What is left over from earlier batches lies scattered, so that a task has spans of offsets
# rather
# than one range.

Waiting = Mapping[int, Sequence[Span]]
"""By node, the offsets of events that wait."""


class Share(NamedTuple):
    """The work of one task: offsets of the queue on one node."""

    node: int
    spans: tuple[Span, ...]
    part: int = 0
    parts: int = 1
    """Of several tasks with the same offsets, each has the keys of one part."""


def batch_of(waiting: Waiting, events: int, newest: float) -> dict[int, list[Span]]:
    """At most so many of the events that wait, fairly from all nodes.

    Where there are more, ``newest`` is the share of the newest ones.
    """
    backlog = {node: count_of(spans) for node, spans in waiting.items()}
    allowed = admitted(dict.fromkeys(backlog, 0), backlog, events)
    return {node: _cut(spans, allowed[node], newest) for node, spans in waiting.items()}


def _cut(spans: Sequence[Span], events: int, newest: float) -> list[Span]:
    if count_of(spans) <= events:
        return list(spans)
    fresh = int(events * newest)
    return oldest_of(spans, events - fresh) + newest_of(spans, fresh)


def shared(batch: Waiting, ordering: Ordering, *, at_most: int, per: int) -> list[Share]:
    """Cut a batch into tasks: one more for every ``per`` events, none if there are none.

    Events of one key are never in two tasks if that matters, and with a strict order each node has
    one task.
    """
    counts = {node: count_of(spans) for node, spans in batch.items() if spans}
    pieces_of = apportioned(min(-(-sum(counts.values()) // per), at_most), counts)
    shares: list[Share] = []
    for node, count in sorted(counts.items()):
        spans, pieces = tuple(batch[node]), pieces_of[node]
        if ordering is Ordering.STRICT:
            shares.append(Share(node, spans))
        elif ordering is Ordering.KEY:
            shares += [Share(node, spans, part, pieces) for part in range(pieces)]
        else:
            shares += [Share(node, piece) for piece in _pieces(spans, count, pieces)]
    return shares


def _pieces(spans: Sequence[Span], count: int, pieces: int) -> Iterator[tuple[Span, ...]]:
    cuts = [count * piece // pieces for piece in range(pieces + 1)]
    for first, end in itertools.pairwise(cuts):
        yield tuple(newest_of(oldest_of(spans, end), end - first))


# ── sizing ──
# How large a lane's next batch is, by how the last one went. Pure.

QUICK: Final = 0.5
"""A batch that takes less than this share of its time could have been larger."""
GROWTH: Final = 4
SLOW_GROWTH: Final = 2
"""Of one that took its time but left nothing over: it may have been Spark that took it."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The most events of the next batch.

    A task stops after ``seconds`` and leaves the rest to the next batch; reading what is left over
    again and again would cost more than sending it, so that a batch has what can be sent in time.
    """

    events: int
    least: int
    most: int
    seconds: float

    @classmethod
    def at_first(cls, least: int, most: int, seconds: float) -> Self:
        """As long as nothing is known: the most."""
        return cls(most, min(least, most), most, seconds)

    def after(self, planned: int, kept: int, took: float) -> Self:
        """After a batch of so many events, of which some were kept, that took so long."""
        done = planned - kept
        if not done:
            return self  # nothing could be sent: that says nothing of how fast it is
        if not kept:
            grown = self.events * (GROWTH if took < self.seconds * QUICK else SLOW_GROWTH)
        else:
            # Tasks were sending for no longer than that; the rest of the time was Spark's.
            sending = min(max(took, 0.001), self.seconds)
            grown = int(done / sending * self.seconds)
        return replace(self, events=max(self.least, min(grown, self.most)))
