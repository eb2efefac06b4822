"""Writing tasks: a task stages its rows on the nodes, and the driver commits all stages at once.

A stage is on a node's disk, but not in its queue, until the driver commits it. So a batch is in the
queues as a whole or not at all, even if tasks fail. :class:`QueueTask` is the task of a
user's query; lanes have ``lane_task.LaneTask`` and ``by_reference.CopyTask``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from turnlane.client.node_client import StageWriter
from turnlane.delivery.results import DeadLetter, make_dead_letter_block
from turnlane.delivery.settings import DeadLetterSettings
from turnlane.errors import RetryLater, SchemaMismatch
from turnlane.events import Block
from turnlane.intervals import Span, convert_to_spans, find_inside, merge_near_spans
from turnlane.logs import get_logger
from turnlane.spark.nodes import Nodes, split_by_content, split_by_node
from turnlane.spark.options import WriteOptions
from turnlane.spark.row_codec import (
    QUEUE_COLUMN,
    count_unrouted,
    decode_nulls,
    split_by_route,
    to_block,
)
from turnlane.spark.steps import LaneStep

log = get_logger(__name__)

NO_MEMORY: Final = DeadLetterSettings(memory_events=0)

Some = TypeVar("Some")

SpansByNode = dict[int, list[Span]]


@dataclass
class TaskResult(WriterCommitMessage):
    """The result of a task, by node, for the driver to commit."""

    stages: dict[int, list[str]]
    """The ids of the stages to publish."""
    deferred: SpansByNode = field(default_factory=dict)
    """Offsets that must not be settled: the events come again."""
    dead: SpansByNode = field(default_factory=dict)
    """Offsets of events for which the task has staged dead letters."""
    dead_letter_error: str | None = None
    """Why dead letters could not be staged: their events are among ``deferred``."""


def merge_results(messages: Sequence[WriterCommitMessage | None]) -> TaskResult:
    """Return the results of all tasks as one."""
    merged = TaskResult({})
    for message in messages:
        if isinstance(message, TaskResult):
            extend_by_node(merged.stages, message.stages)
            extend_by_node(merged.deferred, message.deferred)
            extend_by_node(merged.dead, message.dead)
            merged.dead_letter_error = merged.dead_letter_error or message.dead_letter_error
    return merged


def extend_by_node(lists: dict[int, list[Some]], more: Mapping[int, list[Some]]) -> None:
    """Append lists to lists, node by node."""
    for node, each in more.items():
        lists.setdefault(node, []).extend(each)


class StageSet:
    """The stages of one task: for each queue, on each node, one for each schema of blocks.

    The events of a lane stay on their node, because the node's commit also moves the lane's
    cursor. Other rows are divided among nodes by their content.
    """

    def __init__(self, nodes: Nodes, opened: ExitStack, *, of_lane: bool) -> None:
        self._nodes = nodes
        self._opened = opened
        self._of_lane = of_lane
        self._stages: dict[tuple[int, str, pa.Schema], StageWriter] = {}

    def add(self, queue: str, rows: Block) -> None:
        """Stage rows for a queue."""
        for node, piece in self._split(rows) if rows.num_rows else ():
            self._write(node, queue, to_block(piece))

    def add_dead_letters(
        self, step: LaneStep, letter: DeadLetter, numbers: npt.NDArray[np.int64], rows: Block
    ) -> None:
        """Stage some rows of a block for the dead letters of a step."""
        assert step.dead_letters is not None
        for node, piece in self._split(rows.take(numbers)):
            blocks = [to_block(piece)]
            if step.rereads and "offset" in piece.schema.names:
                blocks = self._read_originals(node, step.source_queue, piece)
            for block in blocks:
                own = DeadLetter(block, letter.numbers, letter.error, letter.text, letter.attempts)
                dead = make_dead_letter_block([own], step.action, time.time_ns(), step.version)
                self._write(node, step.dead_letters, dead, step.delivery.dead_letters)

    def finish(self) -> dict[int, list[str]]:
        """Wait until all rows are on the nodes' disks; returns the stages to commit, by node."""
        stages: dict[int, list[str]] = {}
        for (node, _, _), stage in self._stages.items():
            stages.setdefault(node, []).extend(stage.finish_all())
        return stages

    def discard(self) -> None:
        """Remove all stages."""
        for (node, _, _), stage in self._stages.items():
            try:
                stage.close()
                if stage.ids is not None:
                    self._nodes.abort(node, stage.ids)
            except RetryLater as error:  # The node removes the stage by itself later.
                log.info("stages.discard_failed", node=node, error=error)
        self._stages.clear()

    def _split(self, rows: Block) -> Sequence[tuple[int, Block]]:
        if self._nodes.count == 1:
            return [(0, rows)]
        if self._of_lane and "partition" in rows.schema.names:
            return split_by_node(rows)
        return split_by_content(rows, self._nodes.count)

    def _write(
        self, node: int, queue: str, block: Block, fallback: DeadLetterSettings = NO_MEMORY
    ) -> None:
        """Stage a block; ``fallback`` says whether it may wait in memory if the queue is full."""
        key = node, queue, block.schema
        stage = self._stages.get(key)
        if stage is None:
            diskless = fallback.on_disk_error == "memory"
            stage = self._nodes[node].stage(
                queue, block.schema, fallback.memory_events, diskless=diskless
            )
            self._stages[key] = self._opened.enter_context(stage)
        stage.write(block)

    def _read_originals(self, node: int, queue: str, rows: Block) -> list[Block]:
        """Read the events of rows from the queue: a transform may have changed the rows."""
        spans = convert_to_spans(np.asarray(rows.column("offset")))
        found: list[Block] = []
        for hull in merge_near_spans(spans):
            for first, block in self._nodes.read(node, queue, *hull):
                mask = find_inside(spans, first, block.num_rows)
                if mask.any():
                    found.append(block.filter(pa.array(mask)))
        return found


class QueueTask:
    """A task of a user's query: stages rows for the queue of the options or of each row."""

    drops_unrouted = False
    """Whether a row without a queue is dropped. In a user's query that is an error."""

    def __init__(self, options: WriteOptions, opened: ExitStack, *, of_lane: bool = False) -> None:
        self._queue = options.queue
        self._stages = StageSet(Nodes.from_options(options), opened, of_lane=of_lane)

    def run(self, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        """Stage all rows."""
        for rows in decode_batches(batches):
            if self._queue is not None:
                self._stages.add(self._queue, rows)
                continue
            unrouted = 0 if self.drops_unrouted else count_unrouted(rows, QUEUE_COLUMN)
            if unrouted:
                raise SchemaMismatch(
                    f"{unrouted} of {rows.num_rows} rows name no queue in the column `queue`: "
                    "leave them out with a filter, or name one; nothing of the batch is written"
                )
            for queue, part in split_by_route(rows, QUEUE_COLUMN):
                self._stages.add(queue, part)
        return TaskResult(self._stages.finish())


def decode_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[Block]:
    """Yield the batches that have rows, with their nulls."""
    return (decode_nulls(rows) for rows in batches if rows.num_rows)
