"""Lanes: the offsets that each lane is working on, so that its commit can settle them.

The reader that plans a batch and the sink that commits it are in different processes; both talk to
the node. A lane has one run at a time. A run that was replaced, for example of a driver that was
thought to be dead, can neither plan nor commit.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from turnlane.errors import LaneTaken
from turnlane.intervals import RangeSet, Span, count_offsets
from turnlane.ledger import Outcome
from turnlane.node.commit_record import SettleRange

MAX_RETIRED_RUNS: Final = 100
"""How many replaced runs of a lane are remembered. Runs follow each other in seconds at least, so
an older run has no batch in progress."""
MAX_LANES: Final = 10_000
"""How many lanes are remembered. The longest inactive lane is forgotten and has to restart."""


class LanePlan(NamedTuple):
    """The offsets that a lane reads as one batch."""

    queue: str
    spans: Sequence[Span]
    batch: int = 0
    """The number of the batch in its run. A lane of several nodes does not always reach all."""
    queue_id: str = ""
    """The id of the queue: in another queue of that name the offsets mean other events."""

    def get_settle_ranges(self, kept: Iterable[Span], dead: Iterable[Span]) -> list[SettleRange]:
        """Return the ranges that the commit settles: all except those kept for a later batch."""
        left = RangeSet(self.spans)
        for span in kept:
            left.remove(*span)
        given_up = [part for span in RangeSet(dead) for part in left.within(*span)]
        for span in given_up:
            left.remove(*span)
        ranges = [SettleRange(self.queue, *span) for span in left]
        return ranges + [SettleRange(self.queue, *span, Outcome.DEAD) for span in given_up]


@dataclass(slots=True)
class LaneRun:
    """The present run of a lane, with its last plan."""

    run: str
    planned: LanePlan
    retired: deque[str]
    """The runs that were replaced and could still send requests."""
    committed: bool = False
    """Whether the plan is committed."""
    kept: int = 0
    """How many events the last commit has kept."""


class Lanes:
    """The lanes of a node, in memory only: after a restart a lane begins at its cursor."""

    def __init__(self) -> None:
        self._lanes: dict[str, LaneRun] = {}
        """The longest inactive lane first."""
        self._stalls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count_stall(self, queue: str) -> None:
        """Count a time that the lane of a queue did nothing although events waited."""
        with self._lock:
            self._stalls[queue] += 1

    def get_stalls(self) -> dict[str, int]:
        """Return how often lanes have stalled, by queue."""
        with self._lock:
            return dict(self._stalls)

    def plan(self, lane: str, run: str, planned: LanePlan) -> None:
        """Store the plan of a lane, in place of the one before. Raises ``LaneTaken``."""
        with self._lock:
            self._check(lane, run)
            known = self._lanes.pop(lane, None)
            retired = deque[str](maxlen=MAX_RETIRED_RUNS) if known is None else known.retired
            if known is not None and known.run != run:
                retired.append(known.run)
            self._lanes[lane] = LaneRun(run, planned, retired)
            if len(self._lanes) > MAX_LANES:
                del self._lanes[next(iter(self._lanes))]

    def find(self, lane: str) -> LaneRun | None:
        """Return the present run of a lane, ``None`` if the lane is unknown."""
        return self._lanes.get(lane)

    def get_plan(self, lane: str, run: str) -> LanePlan:
        """Return the last plan of a run.

        Raises ``LaneTaken``, also if there is no plan: then the node was restarted since, and the
        next run may read the same events again.
        """
        with self._lock:
            self._check(lane, run)
            known = self._lanes.get(lane)
            if known is None or known.run != run:
                raise LaneTaken(f"this run of lane {lane!r} is unknown here: restart the lane")
            return known.planned

    def mark_committed(self, lane: str, run: str, kept: Iterable[Span] = ()) -> None:
        """Note that the plan of a run is committed, except for the ``kept`` offsets."""
        with self._lock:
            known = self._lanes.get(lane)
            if known is not None and known.run == run:
                known.committed = True
                known.kept = count_offsets(kept)

    def _check(self, lane: str, run: str) -> None:
        known = self._lanes.get(lane)
        if known is not None and run in known.retired:
            raise LaneTaken(f"lane {lane!r} was restarted: this run of it is over")
