"""What keeps lanes from going on, for people: asked for once in a while, beside the lanes' work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

from turnlane.errors import RetryLater
from turnlane.spark.lane_nodes import Gates
from turnlane.spark.nodes import Nodes
from turnlane.spark.suspension import Breakers, Suspension, Ways, suspension

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
"""How often to ask."""


class GatesSeen:
    """The breakers of all lanes of a pipeline, asked for in one question once in a while.

    Safe from any thread; whoever comes while another one asks gets what was known before.
    """

    def __init__(self, gates: Gates) -> None:
        self._gates = gates
        self._actions: set[str] = set()
        self._asking = threading.Lock()
        self._asked = -LOOK_SECONDS
        self._known: Breakers = {}

    def include(self, actions: Iterable[str]) -> None:
        """Ask for the breakers of these, too."""
        self._actions |= set(actions)

    def status(self) -> Breakers:
        """How the breakers are, or were a moment ago."""
        if self._asking.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._asking.release()
        return self._known

    def _look(self) -> None:
        if time.monotonic() - self._asked < LOOK_SECONDS:
            return
        try:
            self._known = self._gates.status(sorted(self._actions))
        except RetryLater as error:
            log.info("no word of breakers: %s", error)
        self._asked = time.monotonic()


class Rooms:
    """Which of the queues that a lane fills is full, asked for once in a while. For one thread."""

    def __init__(self, nodes: Nodes, queues: Sequence[str]) -> None:
        self._nodes = nodes
        self._queues = queues
        self._asked = -LOOK_SECONDS
        self._full: str | None = None

    def full(self) -> str | None:
        """The first of them, on any node, or what it was a moment ago."""
        if self._queues and time.monotonic() - self._asked >= LOOK_SECONDS:
            try:
                self._full = self._look()
            except RetryLater as error:
                log.info("no word of room in queues: %s", error)
            self._asked = time.monotonic()
        return self._full

    def _look(self) -> str | None:
        nodes = range(self._nodes.count)
        questions = {node: partial(self._nodes[node].full, self._queues) for node in nodes}
        found = self._nodes.answers("room", questions, 0.0)
        return min((queue for full in found.values() for queue in full), default=None)


class HeldUp:
    """What keeps a lane from going on, for people."""

    def __init__(self, gates: GatesSeen, lane: Sequence[Ways], rooms: Rooms | None = None) -> None:
        self._gates = gates
        self._lane = lane
        self._rooms = rooms
        gates.include(way.action for ways in lane for way in ways)

    def __call__(self) -> Suspension | None:
        """What is known."""
        if self._lane:
            found = suspension(self._lane, self._gates.status())
            if found.why is not None:
                return found
        full = self._rooms.full() if self._rooms is not None else None
        return None if full is None else Suspension(0.0, why=f"queue {full!r} is full")
