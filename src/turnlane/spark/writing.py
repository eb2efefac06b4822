"""Writing to queues with Spark: tasks stage, the driver commits: a batch is all or nothing.

A lane's tasks deliver, too. What they could not deliver now is kept: the commit leaves it alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from turnlane.delivery.outcome import Outcome
from turnlane.errors import RetryLater
from turnlane.events import Block
from turnlane.queues.spans import Span, spans_of
from turnlane.spark.columns import by_route, routes_of
from turnlane.spark.delivering import Delivery
from turnlane.spark.hollows import emptied
from turnlane.spark.lane_nodes import Gates, LaneCommit
from turnlane.spark.nodes import Nodes, by_partition
from turnlane.spark.options import WriteOptions
from turnlane.spark.passage import Buried, Mask, Passed, passed
from turnlane.spark.routing import DIRECT, QUEUE
from turnlane.spark.stages import Stages
from turnlane.spark.steps import Step

Some = TypeVar("Some")

Places = dict[int, list[Span]]
"""Offsets, by node."""


@dataclass
class Staged(WriterCommitMessage):
    """What a task has done, by node: the ids of its stages, and the offsets it could not settle."""

    stages: dict[int, list[str]]
    kept: Places = field(default_factory=dict)
    dead: Places = field(default_factory=dict)


class Task:
    """One task's way of writing: outputs are called, and queues get stages."""

    def __init__(self, options: WriteOptions, opened: ExitStack) -> None:
        self._options = options
        self._opened = opened
        nodes = Nodes.of(options)
        self._gates = Gates(nodes)
        self._stages = Stages(nodes, opened, of_lane=options.lane is not None)
        self._deliveries: dict[str, Delivery] = {}
        self._kept: Places = {}
        self._dead: Places = {}

    def run(self, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Write everything."""
        filled = (emptied(rows) for rows in batches if rows.num_rows)
        if not self._options.steps:
            for rows in filled:
                self._queue(rows)
        elif self._options.routed:
            for rows in filled:
                self._pass_on(rows)
        else:
            self._deliver_all(filled)
        return Staged(self._stages.finish(), self._kept, self._dead)

    def _queue(self, rows: Block) -> None:
        if self._options.queue is not None:
            self._stages.add(self._options.queue, rows)
            return
        for queue, part in by_route(rows, QUEUE):
            self._stages.add(queue, part)

    # ── the main lane ────────────────────────────────────────────────────────────────────────────

    def _pass_on(self, rows: Block) -> None:
        steps = self._options.steps
        routes = routes_of(rows, QUEUE) | routes_of(rows, DIRECT)
        nobody = np.zeros(rows.num_rows, dtype=np.bool_)
        mine = {step.action: routes.get(step.action, nobody) for step in steps}
        result = passed(rows, steps, mine, self._deliver)
        self._note(rows, result)
        others = {name: mask for name, mask in routes.items() if name not in mine}
        for queue, mask in {**others, **result.queued}.items():
            self._stages.add(queue, _only(rows, mask & ~result.held))

    def _deliver(self, step: Step, rows: Block) -> Outcome:
        return self._delivery(step).deliver(rows)

    # ── the lane of an action ────────────────────────────────────────────────────────────────────

    def _deliver_all(self, batches: Iterator[Block]) -> None:
        (step,) = self._options.steps
        for rows, outcome in self._delivery(step).run(batches):
            held = np.zeros(rows.num_rows, dtype=np.bool_)
            held[outcome.kept] = True
            buried = [Buried(step, letter, letter.numbers) for letter in outcome.dead]
            self._note(rows, Passed(held, buried=buried))

    # ── both ─────────────────────────────────────────────────────────────────────────────────────

    def _delivery(self, step: Step) -> Delivery:
        known = self._deliveries.get(step.action)
        if known is None:
            known = Delivery(step, self._gates, self._opened)
            self._deliveries[step.action] = known
        return known

    def _note(self, rows: Block, result: Passed) -> None:
        """Keep what was not delivered now, and stage what never will be."""
        if result.held.any():
            if not self._has_places(rows):
                raise self._late(int(result.held.sum()))
            _add(self._kept, rows, result.held)
        for buried in result.buried:
            # Of an event that comes again, dead letters would come again, too.
            left = ~result.held[buried.rows]
            if left.any():
                self._stages.bury(buried.only(left), rows)
        if result.buried and self._has_places(rows):
            _add(self._dead, rows, result.dead)

    def _has_places(self, rows: Block) -> bool:
        return self._options.lane is not None and {"partition", "offset"} <= set(rows.schema.names)

    def _late(self, count: int) -> RetryLater:
        """Why rows that cannot be told from others have to come again, with all the batch."""
        known = self._gates.status([step.action for step in self._options.steps])
        why = next((each["error"] for each in known.values() if each["error"]), "no time left")
        return RetryLater(f"{count} rows of a batch were not delivered: {why}")


def _only(rows: Block, mask: Mask) -> Block:
    return rows if mask.all() else rows.filter(pa.array(mask))


def _add(places: Places, rows: Block, mask: Mask) -> None:
    """Note the offsets of some rows."""
    chosen = _only(rows, mask)
    for node, part in by_partition(chosen) if chosen.num_rows else ():
        places.setdefault(node, []).extend(spans_of(np.asarray(part.column("offset"))))


def _written(options: WriteOptions, batches: Iterator[pa.RecordBatch]) -> Staged:
    with ExitStack() as opened:
        return Task(options, opened).run(batches)


def _all(messages: Sequence[WriterCommitMessage | None]) -> Staged:
    """What all tasks have done."""
    every = Staged({})
    for message in messages:
        if isinstance(message, Staged):
            _join(every.stages, message.stages)
            _join(every.kept, message.kept)
            _join(every.dead, message.dead)
    return every


def _join(some: dict[int, list[Some]], more: Mapping[int, list[Some]]) -> None:
    for node, each in more.items():
        some.setdefault(node, []).extend(each)


class BatchWriter(DataSourceArrowWriter):
    """Appends to queues, once."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(  # type: ignore[override]  # as Spark's own Arrow writers have it
        self, iterator: Iterator[pa.RecordBatch]
    ) -> WriterCommitMessage:
        return _written(self._options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        nodes = Nodes.of(self._options)
        for node, stages in _all(messages).stages.items():
            nodes.commit(node, stages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        nodes = Nodes.of(self._options)
        for node, stages in _all(messages).stages.items():
            nodes.abort(node, stages)


class StreamWriter(DataSourceStreamArrowWriter):
    """Appends a batch at a time: exactly once if the query has an id, or is a lane."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(  # type: ignore[override]  # as Spark's own Arrow writers have it
        self, iterator: Iterator[pa.RecordBatch]
    ) -> WriterCommitMessage:
        return _written(self._options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        nodes, options = Nodes.of(self._options), self._options
        done = _all(messages)
        if options.lane is not None and options.run is not None:
            # Rows of one event may have been in two tasks, kept in one and dead in the other: the
            # node takes it for kept then.
            LaneCommit(nodes, options.lane, options.run).commit(done.stages, done.kept, done.dead)
            return
        writer = options.writer_id or options.checkpoint_location
        for node, ids in done.stages.items():
            nodes.commit(node, ids, writer=writer, epoch=batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        del batchId
        nodes = Nodes.of(self._options)
        for node, stages in _all(messages).stages.items():
            nodes.abort(node, stages)
