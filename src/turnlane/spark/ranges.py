"""Which offsets a batch has, and how they are shared among tasks. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

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
