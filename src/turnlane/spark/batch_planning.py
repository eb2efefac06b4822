"""Decides which offsets a batch has and how its tasks divide them. Pure: the caller gives the time.

Two kinds of queries read queues:

- A user's query (``queue_reader``) reads every offset in order. Its position is an offset for each
  node, :class:`QueryPosition`, which Spark stores in the checkpoint. Its tasks read continuous
  ranges, :class:`NodeRange`.
- A lane (``lane_reader``) reads the events that are not settled yet. Events that earlier batches
  could not deliver lie scattered, so its tasks get several spans, :class:`TaskSpans`. Its batches
  get as large as the destination is fast, :class:`BatchSize`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Self

from turnlane.client.node_client import QueueEnds
from turnlane.delivery.settings import Ordering
from turnlane.intervals import Span, count_offsets, take_newest, take_oldest

Positions = Mapping[int, int]
"""An offset for each node, by the node's number."""

Offset = dict[str, Any]
"""A position in the form in which Spark stores it: JSON, compared as text."""

TAKEN_EVENTS: Final = "taken"
"""The field of a lane's offset that counts the events of all batches, repeated ones too. It changes
with every batch, also if a batch has nothing but repeated events."""
UNKNOWN_POSITION: Final = -1
"""The position on a node that has not answered since the query was created."""
START_FIELD: Final = "from"
QUEUE_IDS_FIELD: Final = "queues"
REQUEST_FIELD: Final = "request"


class BatchWait:
    """Waits for ``events`` events, but no longer than ``seconds`` after the first of them."""

    def __init__(self, events: int, seconds: float) -> None:
        self._events = events
        self._seconds = seconds
        self._since: float | None = None

    def compute_wait(self, events: int, now: float) -> float:
        """Return for how many seconds to wait for more events; 0 if a batch can start."""
        if not events or events >= self._events:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        wait = self._since + self._seconds - now
        if wait <= 0:
            self._since = None
        return max(0.0, wait)


# ── queries with a checkpoint ──


@dataclass(frozen=True)
class QueryPosition:
    """How far a query has read, by node. A node that is missing joined the endpoint later."""

    offsets: dict[int, int]
    starts: dict[int, int] = field(default_factory=dict)
    """Where the query began, on nodes that had older events then: it must not settle those."""
    queue_ids: dict[int, str] = field(default_factory=dict)
    """The ids of the queues that it reads; offsets of another queue mean other events. Checkpoints
    of older versions have none."""
    request: int = 0
    """The number of the last batch for which the lane has asked."""

    @classmethod
    def from_offset(cls, offset: Mapping[str, Any]) -> QueryPosition:
        """Decode an offset that Spark has stored."""
        parts = dict(offset)
        starts, queue_ids = parts.pop(START_FIELD, {}), parts.pop(QUEUE_IDS_FIELD, {})
        request = parts.pop(REQUEST_FIELD, 0)
        offsets, starts, queue_ids = (
            {int(node): each for node, each in part.items()} for part in (parts, starts, queue_ids)
        )
        return cls(offsets, starts, queue_ids, request)

    def to_offset(self) -> Offset:
        """Encode the position for Spark."""
        offset = _convert_keys_to_text(self.offsets)
        if self.starts:
            offset[START_FIELD] = _convert_keys_to_text(self.starts)
        if self.queue_ids:
            offset[QUEUE_IDS_FIELD] = _convert_keys_to_text(self.queue_ids)
        if self.request:
            offset[REQUEST_FIELD] = self.request
        return offset

    def start_at(self, first: Positions, ends: Mapping[int, QueueEnds]) -> QueryPosition:
        """Return the position after reading starts, or starts again, on some nodes."""
        later = {node: at for node, at in first.items() if at > ends[node].low}
        others = {node: at for node, at in self.starts.items() if node not in first}
        queue_ids = {node: ends[node].queue_id for node in first}
        return replace(
            self,
            offsets={**self.offsets, **first},
            starts=others | later,
            queue_ids=self.queue_ids | queue_ids,
        )

    def advance_to(self, offsets: Positions) -> QueryPosition:
        """Return the position after reading up to these offsets."""
        return replace(self, offsets={**self.offsets, **offsets})

    def add_queue_ids(self, ends: Mapping[int, QueueEnds]) -> QueryPosition:
        """Return the position with the ids of queues whose ids it does not have yet."""
        found = {node: each.queue_id for node, each in ends.items() if node in self.offsets}
        return replace(self, queue_ids={**self.queue_ids, **found, **self.queue_ids})

    def is_other_queue(self, node: int, queue_id: str) -> bool:
        """Whether the position is known to belong to another queue than the one with this id."""
        return self.queue_ids.get(node, queue_id) != queue_id


def _convert_keys_to_text(part: Mapping[int, Any]) -> dict[str, Any]:
    return {str(node): each for node, each in part.items()}


class NodeRange(NamedTuple):
    """Offsets ``first`` to ``end - 1`` of the queue on one node: the work of one task."""

    node: int
    first: int
    end: int


def limit_ends(start: Positions, end: Positions, limit: int | None) -> dict[int, int]:
    """Return how far to read from ``start`` towards ``end``: at most ``limit`` events in total.

    Every node gets an equal part of the limit; a node with fewer events leaves the rest to others.
    """
    backlog = {node: max(0, end[node] - start[node]) for node in start}
    if limit is None or sum(backlog.values()) <= limit:
        return {node: start[node] + backlog[node] for node in start}
    ends = {}
    left = limit
    for count, node in enumerate(sorted(backlog, key=backlog.__getitem__)):
        part = min(backlog[node], left // (len(backlog) - count))
        ends[node] = start[node] + part
        left -= part
    return ends


def cut_into_ranges(
    start: Positions, end: Positions, *, at_least: int, at_most: int, events_per_task: int
) -> list[NodeRange]:
    """Divide a batch among tasks: one for each ``events_per_task`` events, none without events.

    A range belongs to one node, so there may be more than ``at_most`` if there are more nodes. No
    range is empty, so there may be fewer than ``at_least``.
    """
    events = {node: end[node] - start[node] for node in start if end[node] > start[node]}
    wanted = min(max(at_least, -(-sum(events.values()) // events_per_task)), max(at_most, at_least))
    tasks = divide_tasks(wanted, events)
    ranges = []
    for node, count in sorted(events.items()):
        cuts = [start[node] + count * task // tasks[node] for task in range(tasks[node] + 1)]
        ranges += [NodeRange(node, *pair) for pair in itertools.pairwise(cuts)]
    return ranges


def divide_tasks(tasks: int, events: Positions) -> dict[int, int]:
    """Divide tasks among nodes by their number of events: at least 1, at most one per event."""
    divided = dict.fromkeys(events, 1)
    for _ in range(min(tasks, sum(events.values())) - len(events)):
        busiest = max(divided, key=lambda node: events[node] / divided[node])
        divided[busiest] += 1
    return divided


# ── lanes ──

PendingSpans = Mapping[int, Sequence[Span]]
"""By node, the offsets of events that are not settled."""


class TaskSpans(NamedTuple):
    """The work of one task: offsets of the queue on one node."""

    node: int
    spans: tuple[Span, ...]
    part: int = 0
    parts: int = 1
    """If several tasks have the same offsets, each delivers the keys that hash to its part."""


def select_batch(pending: PendingSpans, events: int, newest_share: float) -> dict[int, list[Span]]:
    """Select at most ``events`` of the pending events, in equal parts from all nodes.

    If there are more, a share ``newest_share`` of the batch is the newest events, the rest the
    oldest.
    """
    backlog = {node: count_offsets(spans) for node, spans in pending.items()}
    allowed = limit_ends(dict.fromkeys(backlog, 0), backlog, events)
    batch = {}
    for node, spans in pending.items():
        if backlog[node] <= allowed[node]:
            batch[node] = list(spans)
        else:
            newest_count = int(allowed[node] * newest_share)
            oldest = take_oldest(spans, allowed[node] - newest_count)
            batch[node] = oldest + take_newest(spans, newest_count)
    return batch


def split_into_tasks(
    batch: PendingSpans, ordering: Ordering, *, at_most: int, events_per_task: int
) -> list[TaskSpans]:
    """Divide a batch among tasks: one for each ``events_per_task`` events, none without events.

    With ``Ordering.KEY`` a key never is in two tasks; with ``Ordering.STRICT`` a node has one task.
    """
    counts = {node: count_offsets(spans) for node, spans in batch.items() if spans}
    tasks = divide_tasks(min(-(-sum(counts.values()) // events_per_task), at_most), counts)
    found: list[TaskSpans] = []
    for node, count in sorted(counts.items()):
        spans = tuple(batch[node])
        if ordering is Ordering.STRICT:
            found.append(TaskSpans(node, spans))
        elif ordering is Ordering.KEY:
            found += [TaskSpans(node, spans, part, tasks[node]) for part in range(tasks[node])]
        else:
            cuts = [count * task // tasks[node] for task in range(tasks[node] + 1)]
            for first, end in itertools.pairwise(cuts):
                piece = take_newest(take_oldest(spans, end), end - first)
                found.append(TaskSpans(node, tuple(piece)))
    return found


QUICK_SHARE: Final = 0.5
"""A batch that takes less than this share of its time could have been larger."""
GROWTH: Final = 4
SLOW_GROWTH: Final = 2
"""Growth after a batch that took its time but left no events: Spark may have taken that time."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The most events of a lane's next batch.

    A task stops sending after ``seconds`` and leaves the rest to the next batch. To read the rest
    again and again would cost more than to send it, so a batch has as many events as the
    destination takes in that time.
    """

    events: int
    least: int
    most: int
    seconds: float

    @classmethod
    def from_limits(cls, least: int, most: int, seconds: float) -> Self:
        """Create the size of the first batch: ``most``, because no rate is known."""
        return cls(most, min(least, most), most, seconds)

    def adjust(self, planned: int, deferred: int, elapsed: float) -> Self:
        """Return the size after a batch of ``planned`` events, of which ``deferred`` are left."""
        done = planned - deferred
        if not done:
            return self  # Nothing was sent, so the rate is still unknown.
        if not deferred:
            quick = elapsed < self.seconds * QUICK_SHARE
            events = self.events * (GROWTH if quick else SLOW_GROWTH)
        else:
            # Tasks sent for at most `seconds`; Spark used the rest of the time.
            sending = min(max(elapsed, 0.001), self.seconds)
            events = int(done / sending * self.seconds)
        return replace(self, events=max(self.least, min(events, self.most)))
