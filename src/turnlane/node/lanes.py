"""Lanes: which range each is working on, so that a commit can move its cursor.

The reader that plans a batch and the sink that commits it are in different processes; the node is
where they meet. A lane is one run at a time: a run that was superseded, a driver that was thought
dead, say, can neither plan nor commit.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from turnlane.errors import LaneTaken
from turnlane.node.commits import Range


@dataclass(slots=True)
class _Lane:
    run: str
    queue: str
    first: int
    end: int
    committed: bool = False


class Lanes:
    """The lanes of a node. They are forgotten with the process: a lane starts at its cursor."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._retired: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def plan(self, lane: str, run: str, queue: str, first: int, end: int) -> None:
        """The lane works on ``first`` to ``end - 1`` now. Raises ``LaneTaken``."""
        with self._lock:
            self._check(lane, run)
            known = self._lanes.get(lane)
            if known is not None and known.run == run and not known.committed:
                # A batch of this run whose commit did not get here: it is done with, too.
                first = min(first, known.first)
            elif known is not None and known.run != run:
                self._retired.add((lane, known.run))
            self._lanes[lane] = _Lane(run, queue, first, end)

    def queue_of(self, lane: str) -> str | None:
        """The queue that a lane was last planned to read."""
        known = self._lanes.get(lane)
        return None if known is None else known.queue

    def planned(self, lane: str, run: str) -> Range:
        """What a commit of this run settles, or has settled.

        Raises ``LaneTaken``, also if nothing was planned: the node was started anew since, and what
        the run has read may be read again by the next one.
        """
        with self._lock:
            self._check(lane, run)
            known = self._lanes.get(lane)
            if known is None or known.run != run:
                raise LaneTaken(f"this run of lane {lane!r} is unknown here: start the lane anew")
            return Range(known.queue, known.first, known.end)

    def is_committed(self, lane: str) -> bool:
        """Whether what was planned last is settled."""
        known = self._lanes.get(lane)
        return known is not None and known.committed

    def committed(self, lane: str, run: str) -> None:
        """What was planned is settled."""
        with self._lock:
            known = self._lanes.get(lane)
            if known is not None and known.run == run:
                known.committed = True

    def _check(self, lane: str, run: str) -> None:
        if (lane, run) in self._retired:
            raise LaneTaken(f"lane {lane!r} has been started anew since: this run of it is over")
