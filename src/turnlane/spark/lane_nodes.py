"""The nodes as a lane uses them: what waits there, what it works on, and what it has done."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

from turnlane.client.gate import Doing, RemoteGate
from turnlane.client.remote import RemoteNode, Spans, Unsettled
from turnlane.errors import LaneTaken, TransportDown
from turnlane.queues.spans import Span
from turnlane.spark.nodes import Nodes
from turnlane.spark.shares import Waiting
from turnlane.spark.steps import Step
from turnlane.spark.suspension import Breakers

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

BATCH_SECONDS: Final = 5.0
"""How long nodes may take over a batch, which would have to come again without their answers."""
ALONE_SECONDS: Final = 300.0
"""How long the commit of a batch may take where there is one node, for which all has to wait."""
COMMIT_SECONDS: Final = 60.0
"""The same where there are others, whose events go on without it."""


class LaneNodes:
    """All nodes, for one run of a lane. Raises what they raise, and ``TransportDown``."""

    def __init__(
        self, nodes: Nodes, lane: str, run: str, queue: str, into: Sequence[str] = ()
    ) -> None:
        self._nodes = nodes
        self._lane = lane
        self._run = run
        self._queue = queue
        self._into = into

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
                into=self._into,
            )
            for number in range(self._nodes.count)
        }
        return self._nodes.answers(f"lane {self._lane}", questions, timeout)

    def plan(self, batch: Waiting, count: int) -> dict[int, list[tuple[int, int]]]:
        """Tell the nodes what the lane works on; returns what of it there is to do.

        One that has gone away meanwhile is left out. It may have heard of the batch all the same,
        and must not settle by its commit what nobody reads: so all that have answered are told once
        more, and by the number of that the commit knows them. ``count`` is another one for every
        batch.
        """
        if self._nodes.count == 1:
            return {0: self._plan(0, batch.get(0, ()), count)}
        planned = self._planned(batch, 2 * count)
        self._planned(planned, 2 * count + 1)
        return planned

    def _planned(self, batch: Waiting, number: int) -> dict[int, list[Span]]:
        asked = {
            node: self._nodes.ask(node, partial(self._plan, node, spans, number))
            for node, spans in batch.items()
        }
        return self._nodes.heard(asked, BATCH_SECONDS)

    def _plan(self, node: int, spans: Spans, number: int) -> list[Span]:
        return self._nodes[node].plan(self._lane, self._run, self._queue, spans, number)


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

        Also on one that got nothing: its cursor moves all the same. If it does not hear of that,
        what it had comes again.
        """
        commit = partial(self._commit, stages, kept, dead)
        if self._nodes.count == 1:
            commit(0, batch=None, timeout=ALONE_SECONDS)
        else:
            self._commit_on_each(stages.keys(), commit)

    def _commit(
        self,
        stages: Mapping[int, list[str]],
        kept: Mapping[int, Spans],
        dead: Mapping[int, Spans],
        node: int,
        *,
        batch: int | None,
        timeout: float,
    ) -> bool:
        """The part of one node."""
        return self._nodes[node].commit(
            stages.get(node, ()),
            lane=self._lane,
            run=self._run,
            kept=kept.get(node, ()),
            dead=dead.get(node, ()),
            batch=batch,
            timeout=timeout,
        )

    def _commit_on_each(self, stages: AbstractSet[int], commit: Callable[..., bool]) -> None:
        """On those that have stages, which have to answer, and on those told of the batch."""
        heard = self._heard()
        batch = max(heard.values())
        if batch < 0:
            if stages:
                raise TransportDown(f"no node that answers knows this batch of {self._lane!r}")
            return  # Spark's first batch is empty where nothing waits: nobody was told of it
        told = {node for node, number in heard.items() if number == batch} | stages
        asked = {
            node: self._nodes.ask(node, partial(commit, node, batch=batch, timeout=COMMIT_SECONDS))
            for node in told
        }
        self._let_settle({node: each for node, each in asked.items() if node not in stages})
        for node in stages:
            asked[node].result()

    def _let_settle(self, asked: Mapping[int, Future[bool]]) -> None:
        """Give nodes without stages the time to settle."""
        try:
            self._nodes.heard(asked, BATCH_SECONDS)
        except (TransportDown, LaneTaken) as error:
            log.warning("a node did not hear of lane %s: %s", self._lane, error)

    def _heard(self) -> dict[int, int]:
        """Of which batch nodes have heard last: some only of earlier ones, or of none."""
        numbers = range(self._nodes.count)
        questions = {number: partial(self._number, number) for number in numbers}
        return self._nodes.answers(f"batch {self._lane}", questions, BATCH_SECONDS)

    def _number(self, node: int) -> int:
        """The batch that a node has been told of twice: see ``LaneNodes.plan``."""
        try:
            planned = self._nodes[node].planned(self._lane, self._run)
        except LaneTaken:
            return -1
        return planned if planned % 2 else -1


class Gates:
    """The breakers of actions, kept by the first node that answers."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def status(self, actions: Sequence[str]) -> Breakers:
        """How the breakers of these actions are."""
        if not actions:
            return {}
        about = f"breakers {' '.join(actions)}"
        return self._first(about, lambda node: node.breakers(actions))

    def gate(self, action: str, step: Step, doing: Doing) -> RemoteGate:
        """A task's way to the breaker of its action, or of that action's second output."""
        node = self._first("ping", _answering)
        return RemoteGate(node, action, step.reads, step.delivery, doing, workers=step.workers)

    def _first(self, about: str, call: Callable[[RemoteNode], Answer]) -> Answer:
        """The answer of the first node that gives one."""
        nodes = range(self._nodes.count)
        questions = {node: partial(call, self._nodes[node]) for node in nodes}
        found = self._nodes.answers(about, questions, 0.0)
        return found[min(found)]


def _answering(node: RemoteNode) -> RemoteNode:
    node.ping()
    return node


def open_for(breakers: Mapping[str, Any], action: str) -> float:
    """For how long the breaker of an action has been open, in seconds."""
    return float(breakers.get(action, {}).get("open_for") or 0.0)
