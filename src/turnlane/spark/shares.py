"""Which offsets a lane's batch has, and how they are shared among its tasks. Pure.

What is left over from earlier batches lies scattered, so that a task has spans of offsets rather
than one range.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from turnlane.delivery.settings import Ordering
from turnlane.queues.spans import Span, count_of, newest_of, oldest_of
from turnlane.spark.ranges import admitted, apportioned

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
