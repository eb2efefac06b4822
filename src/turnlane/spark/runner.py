"""Running a pipeline, and exchanging it for another one while events keep coming in."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from turnlane.client.node_client import RemoteNode
from turnlane.errors import QueueExists, RetryLater, TurnlaneError
from turnlane.pipeline.settings import PipelineSettings
from turnlane.spark.lane import LaneState, LaneStatus
from turnlane.spark.nodes import Nodes
from turnlane.spark.options import WriteOptions
from turnlane.spark.pipeline import Pipeline

log = logging.getLogger(__name__)

MAKE_SECONDS: Final = 10.0
"""How long a node may take to make queues before the others go on without it."""
TROUBLE_SECONDS: Final = 5.0
"""How long to wait for a node to say what is wrong with it."""

Change = tuple[str, LaneState, str | None, str | None]


@dataclass(frozen=True)
class Plan:
    """What is to run, and where."""

    settings: PipelineSettings
    queues: Mapping[str, Mapping[str, Any]]
    """The queues that the nodes must have, knobs by name."""
    access: Mapping[str, str]
    """How the nodes are reached: options of ``format("turnlane")``."""
    checkpoints: Path

    def pipeline(self, spark: SparkSession) -> Pipeline:
        """Its lanes, none of them started."""
        prepare = partial(make_queues, self)
        return Pipeline(self.settings, self.access, spark, self.checkpoints, prepare)


class LanesLeft(RetryLater):
    """Lanes that are told to stop have not ended yet."""

    def __init__(self, names: Sequence[str], troubles: Sequence[str] = ()) -> None:
        lanes = ("lane " if len(names) == 1 else "lanes ") + ", ".join(names)
        have = "has" if len(names) == 1 else "have"
        why = "".join(f"; {trouble}" for trouble in troubles)
        super().__init__(f"{lanes} of the configuration before {have} not ended yet{why}")


class Runner:
    """Runs one plan at a time. Safe to be stopped from any thread."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._plan: Plan | None = None
        self._is_stopping = False
        self._pipeline: Pipeline | None = None
        self._known: dict[str, Change] = {}
        self._exchanging = threading.RLock()

    @property
    def plan(self) -> Plan | None:
        """What runs; ``None`` as soon as its lanes are told to stop."""
        return None if self._is_stopping else self._plan

    def start(self, plan: Plan) -> None:
        """Start a plan, in the place of the one that runs.

        Everything is checked first: a plan that cannot run raises ``ConfigError``, and the one
        that runs is left alone. Lanes begin where their queues' cursors are, so whatever the lanes
        before had not committed comes again. Nothing is left out, and nothing gets into a queue
        twice; an output may get a batch again.

        Raises ``LanesLeft`` if lanes before it do not end in time. They are told to, and nothing
        runs in their place: to be tried again.
        """
        with self._exchanging:
            pipeline = plan.pipeline(self._spark)
            remembering = pipeline.check()
            make_queues(plan)
            left = self.stop()
            if left:
                raise LanesLeft(left, troubles(self._plan or plan))
            pipeline.start(remembering)
            self._plan, self._pipeline, self._is_stopping = plan, pipeline, False

    def stop(self, timeout: float = 30.0) -> list[str]:
        """Stop all lanes; returns those that have not ended in time.

        What is not committed stays in its queue.
        """
        with self._exchanging:
            if self._pipeline is None:
                return []
            self._is_stopping = True
            self._known.clear()
            left = self._pipeline.stop(timeout)
            if not left:
                self._pipeline = self._plan = None
            return left

    def status(self) -> list[LaneStatus]:
        """How the lanes are."""
        pipeline = self._pipeline
        return [] if pipeline is None else pipeline.status()

    def changes(self) -> Iterator[LaneStatus]:
        """The lanes that are no longer as they were when last asked."""
        for each in self.status():
            now = (each.name, each.state, each.reason, each.suspended)
            if self._known.get(each.name) != now and not self._is_repeat(each):
                self._known[each.name] = now
                yield each

    def _is_repeat(self, status: LaneStatus) -> bool:
        """A lane on its way from one failure to the next of the same kind is no news."""
        before = self._known.get(status.name)
        return (
            before is not None
            and before[1] is LaneState.WAITING
            and before[2] == status.reason
            and status.state in (LaneState.STARTING, LaneState.WAITING)
        )


def make_queues(plan: Plan) -> None:
    """Make the queues that the nodes lack, on each of them that answers.

    Those that are there stay as they are. Raises what the node raises, and ``TransportDown`` if no
    node answers.
    """
    nodes = Nodes.of(WriteOptions.of(plan.access))
    questions = {n: partial(_make_queues, nodes[n], plan.queues) for n in range(nodes.count)}
    nodes.answers("queues", questions, MAKE_SECONDS)


def _make_queues(node: RemoteNode, queues: Mapping[str, Mapping[str, Any]]) -> None:
    there = node.queues()
    for name, knobs in queues.items():
        if name in there:
            continue
        try:
            node.create_for_action(name, **knobs)
        except QueueExists:  # made by another pipeline just now, or hidden from this token
            log.warning("%s: queue %s is there with other settings", node.place, name)
        else:
            log.info("%s: queue %s made", node.place, name)


def troubles(plan: Plan) -> list[str]:
    """What is wrong with a plan's queues, as far as their nodes say: lanes may wait for it."""
    nodes = Nodes.of(WriteOptions.of(plan.access))
    questions = {n: nodes[n].stats for n in range(nodes.count)}
    try:
        answers = nodes.answers("troubles", questions, TROUBLE_SECONDS)
    except TurnlaneError as error:
        return [str(error)]
    return [
        f"queue {name} cannot write to its disk: {stats['trouble']}"
        for answer in answers.values()
        for name, stats in answer.items()
        if name in plan.queues and stats.get("trouble")
    ]
