"""The nodes as a lane uses them: what waits there, what it works on, and what it has done."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from turnlane.client.gate import Doing, RemoteGate
from turnlane.client.remote import RemoteNode, Spans, Unsettled
from turnlane.errors import LaneTaken, RetryLater, TransportDown
from turnlane.spark.nodes import Nodes
from turnlane.spark.shares import Waiting
from turnlane.spark.steps import Step
from turnlane.spark.suspension import Breakers, Suspension, Ways, suspension

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

LOOK_SECONDS: Final = 1.0
"""How often to see whether lanes are held up, for people."""


class LaneNodes:
    """All nodes, for one run of a lane. Raises what they raise, and ``TransportDown``."""

    def __init__(self, nodes: Nodes, lane: str, run: str, queue: str) -> None:
        self._nodes = nodes
        self._lane = lane
        self._run = run
        self._queue = queue

    def waiting(self, events: int, newest: int, timeout: float) -> dict[int, Unsettled]:
        """What waits, on every node that answers; waits until there is something."""
        if self._nodes.count > 1:  # one that has nothing is not to hold up the others
            found = self._waiting(events, newest, 0.0)
            if any(each.pending for each in found.values()):
                return found
        return self._waiting(events, newest, timeout)

    def _waiting(self, events: int, newest: int, timeout: float) -> dict[int, Unsettled]:
        questions = {
            number: partial(
                self._nodes[number].unsettled,
                self._queue,
                events,
                newest=newest,
                timeout=timeout,
                lane=self._lane,
            )
            for number in range(self._nodes.count)
        }
        return self._nodes.answers(f"lane {self._lane}", questions, timeout)

    def plan(self, batch: Waiting, count: int) -> dict[int, list[tuple[int, int]]]:
        """Tell the nodes what the lane works on; returns what of it there is to do.

        One that has gone away meanwhile is left out; by ``count``, another one for every batch, it
        is known by the commit that it has not heard of this one.
        """
        planned = {}
        for number in range(self._nodes.count):
            spans = batch.get(number, ())
            try:
                planned[number] = self._nodes[number].plan(
                    self._lane, self._run, self._queue, spans, count
                )
            except TransportDown as error:
                if self._nodes.count == 1:
                    raise
                log.warning("node %d did not hear of lane %s: %s", number, self._lane, error)
        return planned


class LaneCommit:
    """What a batch of a lane has come to, on all nodes."""

    def __init__(self, nodes: Nodes, lane: str, run: str) -> None:
        self._nodes = nodes
        self._lane = lane
        self._run = run

    def commit(
        self, stages: Mapping[int, list[str]], kept: Mapping[int, Spans], dead: Mapping[int, Spans]
    ) -> None:
        """Publish stages and settle what was planned, but for what is kept; on each node at once.

        Also on one that got nothing: its cursor moves all the same.
        """
        count = self._nodes.count
        batch = None if count == 1 else self._batch()
        for number in range(count):
            try:
                self._nodes[number].commit(
                    stages.get(number, ()),
                    lane=self._lane,
                    run=self._run,
                    kept=kept.get(number, ()),
                    dead=dead.get(number, ()),
                    batch=batch,
                )
            except (TransportDown, LaneTaken) as error:
                if number in stages or count == 1:
                    raise
                # It had nothing for this batch, or nothing that passed: what it had comes again.
                log.warning("node %d did not hear of lane %s: %s", number, self._lane, error)

    def _batch(self) -> int:
        """The batch that this is: some nodes may have heard only of earlier ones, or of none."""
        numbers = range(self._nodes.count)
        questions = {number: partial(self._heard, number) for number in numbers}
        return max(0, *self._nodes.answers(f"batch {self._lane}", questions, 0.0).values())

    def _heard(self, number: int) -> int:
        try:
            return self._nodes[number].planned(self._lane, self._run)
        except LaneTaken:
            return -1


class Gates:
    """The breakers of actions, kept by the first node that answers."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def status(self, actions: Sequence[str]) -> Breakers:
        """How the breakers of these actions are."""
        return self._first(lambda node: node.breakers(actions)) if actions else {}

    def gate(self, action: str, step: Step, doing: Doing) -> RemoteGate:
        """A task's way to the breaker of its action, or of that action's second output."""
        node = self._first(_answering)
        return RemoteGate(node, action, step.reads, step.delivery, doing, workers=step.workers)

    def _first(self, call: Callable[[RemoteNode], Answer]) -> Answer:
        for number in range(self._nodes.count - 1):
            try:
                return call(self._nodes[number])
            except TransportDown as error:
                log.warning("node %d keeps no breakers now: %s", number, error)
        return call(self._nodes[self._nodes.count - 1])


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


class HeldUp:
    """What keeps a lane from sending, for people."""

    def __init__(self, gates: GatesSeen, lane: Sequence[Ways]) -> None:
        self._gates = gates
        self._lane = lane
        gates.include(way.action for ways in lane for way in ways)

    def __call__(self) -> Suspension | None:
        """What is known."""
        if not self._lane:
            return None
        found = suspension(self._lane, self._gates.status())
        return found if found.why is not None else None


def _answering(node: RemoteNode) -> RemoteNode:
    node.ping()
    return node


def open_for(breakers: Mapping[str, Any], action: str) -> float:
    """For how long the breaker of an action has been open, in seconds."""
    return float(breakers.get(action, {}).get("open_for") or 0.0)
