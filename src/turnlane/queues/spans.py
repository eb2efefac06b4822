"""Offsets as lists of spans, in order: what readers and queues tell each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

GAP: Final = 4096
"""Spans no farther apart are read in one go: a few events too many cost less than a call."""

COPIED: Final = pa.schema([("offset", pa.int64()), ("routes", pa.int64())])
"""Where events are, and in bits into which queues they are to be copied."""
MOST_COPIES: Final = 62
"""So many queues have a bit, in Arrow and in Spark."""

Span = tuple[int, int]
"""Offsets ``first`` to ``end - 1``."""


def oldest_of(spans: Sequence[Span], events: int) -> list[Span]:
    """As many of the first offsets of some spans."""
    taken: list[Span] = []
    for first, end in spans:
        if events <= 0:
            break
        taken.append((first, min(end, first + events)))
        events -= end - first
    return taken


def newest_of(spans: Sequence[Span], events: int) -> list[Span]:
    """As many of the last offsets of some spans."""
    taken: list[Span] = []
    for first, end in reversed(spans):
        if events <= 0:
            break
        taken.append((max(first, end - events), end))
        events -= end - first
    return taken[::-1]


def overlap(one: Span, other: Span) -> bool:
    """Whether two spans have an offset in common."""
    return one[0] < other[1] and other[0] < one[1]


def count_of(spans: Iterable[Span]) -> int:
    """How many offsets there are in some spans."""
    return sum(end - first for first, end in spans)


def hulls(spans: Sequence[Span]) -> Iterator[Span]:
    """Ranges that hold all the spans, and little else."""
    first, end = spans[0]
    for start, stop in spans[1:]:
        if start - end > GAP:
            yield first, end
            first = start
        end = stop
    yield first, end


def inside(spans: Sequence[Span], first: int, count: int) -> npt.NDArray[np.bool_]:
    """Which of so many offsets from ``first`` on are in the spans; these are in order."""
    starts, ends = np.asarray(spans, dtype=np.int64).reshape(-1, 2).T
    offsets = np.arange(first, first + count, dtype=np.int64)
    at = np.searchsorted(ends, offsets, side="right")
    found: npt.NDArray[np.bool_] = offsets >= np.append(starts, np.iinfo(np.int64).max)[at]
    return found


def spans_of(offsets: npt.NDArray[np.int64]) -> list[Span]:
    """Offsets, in any order and some perhaps twice, as spans."""
    places = np.unique(offsets)
    if not len(places):
        return []
    breaks = np.flatnonzero(np.diff(places) > 1)
    firsts = places[np.concatenate(([0], breaks + 1))]
    ends = places[np.concatenate((breaks, [len(places) - 1]))] + 1
    return list(zip(firsts.tolist(), ends.tolist(), strict=True))
