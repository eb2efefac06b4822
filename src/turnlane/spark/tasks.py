"""One task's way of writing: it stages, and its driver commits what all tasks have staged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from turnlane.errors import SchemaMismatch
from turnlane.events import Block
from turnlane.queues.spans import Span
from turnlane.spark.columns import by_route, without_route
from turnlane.spark.hollows import emptied
from turnlane.spark.nodes import Nodes
from turnlane.spark.options import WriteOptions
from turnlane.spark.routing import QUEUE
from turnlane.spark.stages import Stages

Some = TypeVar("Some")

Places = dict[int, list[Span]]
"""Offsets, by node."""


@dataclass
class Staged(WriterCommitMessage):
    """What a task has done, by node: the ids of its stages, and the offsets it could not settle."""

    stages: dict[int, list[str]]
    kept: Places = field(default_factory=dict)
    dead: Places = field(default_factory=dict)
    trouble: str | None = None
    """Why dead letters could not be staged: their events are among those that are kept."""


class Task:
    """A task of anyone's own query: queues get stages."""

    drops_unrouted = False
    """Whether a row may go nowhere: in a query of one's own it would be lost in silence."""

    def __init__(self, options: WriteOptions, opened: ExitStack, *, of_lane: bool = False) -> None:
        self._queue = options.queue
        self._stages = Stages(Nodes.of(options), opened, of_lane=of_lane)

    def run(self, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Write everything."""
        for rows in filled(batches):
            self._stage(rows)
        return Staged(self._stages.finish())

    def _stage(self, rows: Block) -> None:
        if self._queue is not None:
            self._stages.add(self._queue, rows)
            return
        if not self.drops_unrouted:
            _check_routes(rows)
        for queue, part in by_route(rows, QUEUE):
            self._stages.add(queue, part)


def _check_routes(rows: Block) -> None:
    lost = without_route(rows, QUEUE)
    if lost:
        raise SchemaMismatch(
            f"{lost} of {rows.num_rows} rows name no queue in the column `queue`: leave them out "
            "with a filter, or name one; nothing of the batch is written"
        )


def filled(batches: Iterator[pa.RecordBatch]) -> Iterator[Block]:
    """The batches that have rows, as blocks."""
    return (emptied(rows) for rows in batches if rows.num_rows)


def all_of(messages: Sequence[WriterCommitMessage | None]) -> Staged:
    """What all tasks have done."""
    every = Staged({})
    for message in messages:
        if isinstance(message, Staged):
            join(every.stages, message.stages)
            join(every.kept, message.kept)
            join(every.dead, message.dead)
            every.trouble = every.trouble or message.trouble
    return every


def join(some: dict[int, list[Some]], more: Mapping[int, list[Some]]) -> None:
    """Add to what there is, node by node."""
    for node, each in more.items():
        some.setdefault(node, []).extend(each)
