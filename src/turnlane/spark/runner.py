"""Runs a pipeline, and replaces it with another one while events keep arriving.

A replacement is checked before the running pipeline is stopped, so an invalid configuration changes
nothing. Between the two pipelines, events wait in their queues.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from turnlane.client.node_client import RemoteNode
from turnlane.errors import QueueExists, RetryLater, TurnlaneError
from turnlane.logs import get_logger
from turnlane.pipeline.settings import PipelineSettings
from turnlane.spark.lane import LaneState, LaneStatus
from turnlane.spark.nodes import Nodes
from turnlane.spark.options import WriteOptions
from turnlane.spark.pipeline import Pipeline

log = get_logger(__name__)

CREATE_SECONDS: Final = 10.0
"""How long a node may take to create queues before the others go on without it."""
STATS_SECONDS: Final = 5.0
"""How long to wait for the state of a node's queues."""

LaneSnapshot = tuple[LaneState, str | None, str | None]
"""The parts of a lane's status whose changes are reported: state, reason, suspension."""


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline to run, and the nodes to run it on."""

    settings: PipelineSettings
    queues: Mapping[str, Mapping[str, Any]]
    """The queues that the nodes must have, with their settings."""
    access: Mapping[str, str]
    """The options by which ``format("turnlane")`` reaches the nodes."""
    checkpoints: Path

    def create_pipeline(self, spark: SparkSession) -> Pipeline:
        """Create the pipeline, with no lane started."""
        prepare = partial(create_missing_queues, self)
        return Pipeline(self.settings, self.access, spark, self.checkpoints, prepare)


class LanesStillRunning(RetryLater):
    """Lanes that were stopped have not ended yet."""

    def __init__(self, names: Sequence[str], troubles: Sequence[str] = ()) -> None:
        lanes = ("lane " if len(names) == 1 else "lanes ") + ", ".join(names)
        have = "has" if len(names) == 1 else "have"
        why = "".join(f"; {trouble}" for trouble in troubles)
        super().__init__(f"{lanes} of the earlier configuration {have} not ended yet{why}")


class PipelineRunner:
    """Runs one plan at a time. ``start`` and ``stop`` may be called from any thread."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._plan: PipelinePlan | None = None
        self._is_stopping = False
        self._pipeline: Pipeline | None = None
        self._reported: dict[str, LaneSnapshot] = {}
        self._lock = threading.RLock()
        """Held while a pipeline is started or stopped."""

    @property
    def plan(self) -> PipelinePlan | None:
        """The plan that runs; ``None`` as soon as its lanes are stopped."""
        return None if self._is_stopping else self._plan

    def start(self, plan: PipelinePlan) -> None:
        """Start a plan instead of the one that runs.

        The plan is checked first: if it cannot run, ``ConfigError`` is raised and the running plan
        continues. Lanes start at the cursors of their queues, so uncommitted events come again. No
        event is left out, and none gets into a queue twice; an output may get a batch again.

        Raises ``LanesStillRunning`` if earlier lanes do not end in time. They were stopped, and no
        lane runs instead of them: try again.
        """
        with self._lock:
            pipeline = plan.create_pipeline(self._spark)
            stateful_actions = pipeline.check()
            create_missing_queues(plan)
            left = self.stop()
            if left:
                raise LanesStillRunning(left, list_queue_troubles(self._plan or plan))
            pipeline.start(stateful_actions)
            self._plan, self._pipeline, self._is_stopping = plan, pipeline, False

    def stop(self, timeout: float = 30.0) -> list[str]:
        """Stop all lanes; returns those that have not ended in time.

        Uncommitted events stay in their queues.
        """
        with self._lock:
            if self._pipeline is None:
                return []
            self._is_stopping = True
            self._reported.clear()
            left = self._pipeline.stop(timeout)
            if not left:
                self._pipeline = self._plan = None
            return left

    def status(self) -> list[LaneStatus]:
        """Return the states of the lanes."""
        pipeline = self._pipeline
        return [] if pipeline is None else pipeline.status()

    def list_changes(self) -> Iterator[LaneStatus]:
        """Yield the lanes whose state has changed since the last call."""
        for each in self.status():
            now = (each.state, each.reason, each.suspended)
            if self._reported.get(each.name) != now and not self._is_repeat(each):
                self._reported[each.name] = now
                yield each

    def _is_repeat(self, status: LaneStatus) -> bool:
        """Whether a lane fails again for the reason that was reported."""
        before = self._reported.get(status.name)
        return (
            before is not None
            and before[0] is LaneState.WAITING
            and before[1] == status.reason
            and status.state in (LaneState.STARTING, LaneState.WAITING)
        )


def create_missing_queues(plan: PipelinePlan) -> None:
    """Create the queues that are missing, on each node that answers.

    Existing queues are not changed. Raises the errors of the nodes, and ``TransportDown`` if no
    node answers.
    """
    nodes = Nodes.from_options(WriteOptions.from_spark(plan.access))
    calls = {n: partial(_create_queues, nodes[n], plan.queues) for n in range(nodes.count)}
    nodes.ask_all("queues", calls, CREATE_SECONDS)


def _create_queues(node: RemoteNode, queues: Mapping[str, Mapping[str, Any]]) -> None:
    existing = node.queues()
    for name, knobs in queues.items():
        if name in existing:
            continue
        try:
            node.create_for_action(name, **knobs)
        except (
            QueueExists
        ):  # Another pipeline has created it just now, or this token does not see it.
            log.warning("queue.exists_with_other_settings", node=node.place, queue=name)
        else:
            log.info("queue.created", node=node.place, queue=name)


def list_queue_troubles(plan: PipelinePlan) -> list[str]:
    """Return the troubles of a plan's queues that nodes report: lanes may wait for them."""
    nodes = Nodes.from_options(WriteOptions.from_spark(plan.access))
    calls = {n: nodes[n].stats for n in range(nodes.count)}
    try:
        answers = nodes.ask_all("troubles", calls, STATS_SECONDS)
    except TurnlaneError as error:
        return [str(error)]
    return [
        f"queue {name} cannot write to its disk: {stats['trouble']}"
        for answer in answers.values()
        for name, stats in answer.items()
        if name in plan.queues and stats.get("trouble")
    ]
