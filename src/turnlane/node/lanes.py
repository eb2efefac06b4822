"""Lanes: which offsets each is working on, so that a commit can settle them.

The reader that plans a batch and the sink that commits it are in different processes; the node is
where they meet. A lane is one run at a time: a run that was superseded, a driver that was thought
dead, say, can neither plan nor commit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from turnlane.errors import LaneTaken
from turnlane.intervals import Ranges, Span, count_of
from turnlane.ledger import Outcome
from turnlane.node.commit_record import Range

RETIRED: Final = 100
"""So many runs of a lane that are over are remembered; they follow each other in seconds at least,
and none that old has a batch under way."""
MAX_LANES: Final = 10_000
"""So many lanes are remembered; the longest silent is forgotten first, and has to start anew."""


class Planned(NamedTuple):
    """What a lane reads."""

    queue: str
    spans: Sequence[Span]
    batch: int = 0
    """Which of the run's batches it is. A lane of several nodes does not always reach all."""
    queue_id: str = ""
    """Which queue of that name it is: in another these are the offsets of other events."""

    def settled_by(self, kept: Iterable[Span], dead: Iterable[Span]) -> list[Range]:
        """What its commit settles: all of it but what is kept for a later batch."""
        left = Ranges(self.spans)
        for span in kept:
            left.remove(*span)
        given_up = [part for span in Ranges(dead) for part in left.within(*span)]
        for span in given_up:
            left.remove(*span)
        ranges = [Range(self.queue, *span) for span in left]
        return ranges + [Range(self.queue, *span, Outcome.DEAD) for span in given_up]


@dataclass(slots=True)
class _Lane:
    run: str
    planned: Planned
    retired: deque[str]
    """The runs that were superseded: those that could still turn up."""
    committed: bool = False
    kept: int = 0


class Lanes:
    """The lanes of a node. They are forgotten with the process: a lane starts at its cursor."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        """The longest silent first."""
        self._lock = threading.Lock()

    def plan(self, lane: str, run: str, planned: Planned) -> None:
        """The lane works on these offsets now, and on no others. Raises ``LaneTaken``."""
        with self._lock:
            self._check(lane, run)
            known = self._lanes.pop(lane, None)
            retired = deque[str](maxlen=RETIRED) if known is None else known.retired
            if known is not None and known.run != run:
                retired.append(known.run)
            self._lanes[lane] = _Lane(run, planned, retired)
            if len(self._lanes) > MAX_LANES:
                del self._lanes[next(iter(self._lanes))]

    def queue_of(self, lane: str) -> str | None:
        """The queue that a lane was last planned to read."""
        known = self._lanes.get(lane)
        return None if known is None else known.planned.queue

    def planned(self, lane: str, run: str) -> Planned:
        """What a commit of this run settles, or has settled.

        Raises ``LaneTaken``, also if nothing was planned: the node was started anew since, and what
        the run has read may be read again by the next one.
        """
        with self._lock:
            self._check(lane, run)
            known = self._lanes.get(lane)
            if known is None or known.run != run:
                raise LaneTaken(f"this run of lane {lane!r} is unknown here: start the lane anew")
            return known.planned

    def is_committed(self, lane: str) -> bool:
        """Whether what was planned last is settled."""
        known = self._lanes.get(lane)
        return known is not None and known.committed

    def committed(self, lane: str, run: str, kept: Iterable[Span] = ()) -> None:
        """What was planned is settled, but for what was kept."""
        with self._lock:
            known = self._lanes.get(lane)
            if known is not None and known.run == run:
                known.committed = True
                known.kept = count_of(kept)

    def kept(self, lane: str) -> int:
        """How many events the last commit of a lane has kept."""
        known = self._lanes.get(lane)
        return 0 if known is None else known.kept

    def _check(self, lane: str, run: str) -> None:
        known = self._lanes.get(lane)
        if known is not None and run in known.retired:
            raise LaneTaken(f"lane {lane!r} has been started anew since: this run of it is over")
