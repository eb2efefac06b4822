"""Stages: what a task has for queues, on the nodes' disks until the driver commits it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from turnlane.client.node_client import StageWriter
from turnlane.delivery.outcome import DeadLetter, Outcome, dead_letter_block
from turnlane.delivery.settings import DeadLetterSettings
from turnlane.errors import RetryLater, SchemaMismatch
from turnlane.events import Block
from turnlane.intervals import Span, hulls, inside, spans_of
from turnlane.spark.nodes import Nodes, by_content, by_partition
from turnlane.spark.options import WriteOptions
from turnlane.spark.routing import QUEUE
from turnlane.spark.row_codec import Mask, as_block, by_route, emptied, with_siblings, without_route
from turnlane.spark.steps import Step

# ── passage ──
# A block of rows on its way through the steps of a lane: who gets which rows. No I/O.
#
# An event is through if all its actions have it, or a queue has what they could not deliver now.
# Otherwise it is held back as a whole, all the rows that a transform has made of it: nothing of
# it is
# staged, and it comes again.

Deliver = Callable[[Step, pa.RecordBatch], Outcome]


@dataclass(slots=True)
class Buried:
    """Rows that an action can never deliver."""

    step: Step
    letter: DeadLetter
    rows: npt.NDArray[np.int64]
    """Their numbers in the block."""

    def only(self, mask: Mask) -> Buried:
        """Some of them."""
        return replace(self, rows=self.rows[mask])


@dataclass(slots=True)
class Passed:
    """What became of a block."""

    held: Mask
    """Rows whose events come again."""
    queued: dict[str, Mask] = field(default_factory=dict)
    """Rows that go into the queues of actions that could not deliver them now."""
    buried: list[Buried] = field(default_factory=list)

    @property
    def dead(self) -> Mask:
        """Rows that are given up for one action at least, and not held back for another."""
        mask = np.zeros(len(self.held), dtype=np.bool_)
        for each in self.buried:
            mask[each.rows] = True
        return mask & ~self.held


def passed(
    rows: pa.RecordBatch, steps: Sequence[Step], routes: Mapping[str, Mask], deliver: Deliver
) -> Passed:
    """Have all steps deliver what is theirs by ``routes``."""
    passage = _Passage(rows, routes, deliver)
    for step in steps:
        if not step.only_when_suspended:
            passage.close_group()
        passage.take(step)
    passage.close_group()
    return passage.result


class _Passage:
    def __init__(self, rows: pa.RecordBatch, routes: Mapping[str, Mask], deliver: Deliver) -> None:
        self._rows = rows
        self._routes = routes
        self._deliver = deliver
        self._left = np.zeros(rows.num_rows, dtype=np.bool_)
        """Rows that the steps of this group could not deliver so far."""
        self._queue: str | None = None
        """Where those may go."""
        self.result = Passed(np.zeros(rows.num_rows, dtype=np.bool_))

    def close_group(self) -> None:
        """No other step stands in for those before: what is left waits, here or in a queue."""
        if self._queue is None:
            self.result.held |= with_siblings(self._rows, self._left)
        elif self._left.any():
            self._into_queue(self._queue, self._left)
        self._left = np.zeros_like(self._left)
        self._queue = None

    def take(self, step: Step) -> None:
        """Have a step deliver its rows."""
        candidates = self._left if step.only_when_suspended else ~self.result.held
        wanted = candidates & self._routes[step.action]
        if step.output is None:
            assert step.queue is not None
            self._into_queue(step.queue, wanted)
            self._left &= ~wanted
            return
        self._queue = self._queue or step.queue
        numbers = np.flatnonzero(wanted)
        if not len(numbers):
            return
        part = self._rows if len(numbers) == self._rows.num_rows else self._rows.take(numbers)
        outcome = self._deliver(step, part)
        self.result.buried += [
            Buried(step, letter, numbers[letter.numbers]) for letter in outcome.dead
        ]
        self._left[numbers] = False
        self._left[numbers[outcome.kept]] = True

    def _into_queue(self, queue: str, mask: Mask) -> None:
        known = self.result.queued.get(queue)
        self.result.queued[queue] = mask.copy() if known is None else known | mask


log = logging.getLogger(__name__)

NOWHERE: Final = DeadLetterSettings(memory_events=0)


class Stages:
    """The stages of one task: for every queue, on every node, one for each form of blocks.

    A lane's events stay on their node, whose commit also moves the cursor; others spread.
    """

    def __init__(self, nodes: Nodes, opened: ExitStack, *, of_lane: bool) -> None:
        self._nodes = nodes
        self._opened = opened
        self._of_lane = of_lane
        self._stages: dict[tuple[int, str, pa.Schema], StageWriter] = {}

    def add(self, queue: str, rows: Block) -> None:
        """Stage rows for a queue."""
        if not rows.num_rows:
            return
        for node, piece in self._by_node(rows):
            self._put(node, queue, as_block(piece))

    def bury(self, buried: Buried, rows: Block) -> None:
        """Stage rows of one action for its dead letters; ``rows`` is the block they are of."""
        step, letter = buried.step, buried.letter
        assert step.dead_letters is not None
        dead = rows.take(buried.rows)
        for node, piece in self._by_node(dead):
            blocks = self._originals(node, step.reads, piece) if step.rereads else [as_block(piece)]
            letters = [
                DeadLetter(block, letter.numbers, letter.error, letter.text, letter.attempts)
                for block in blocks
            ]
            for each in letters:
                block = dead_letter_block([each], step.action, time.time_ns(), step.version)
                self._put(node, step.dead_letters, block, step.delivery.dead_letters)

    def finish(self) -> dict[int, list[str]]:
        """Wait until all is on the nodes' disks; returns what is to be committed, by node."""
        stages: dict[int, list[str]] = {}
        for (node, _, _), stage in self._stages.items():
            stages.setdefault(node, []).extend(stage.finish_all())
        return stages

    def give_up(self) -> None:
        """Nothing of it is wanted any more."""
        for (node, _, _), stage in self._stages.items():
            try:
                stage.close()
                if stage.ids is not None:
                    self._nodes.abort(node, stage.ids)
            except RetryLater as error:
                log.info("the node forgets a stage by itself: %s", error)
        self._stages.clear()

    def _by_node(self, rows: Block) -> Sequence[tuple[int, Block]]:
        if self._nodes.count == 1:
            return [(0, rows)]
        if self._of_lane and "partition" in rows.schema.names:
            return by_partition(rows)
        return by_content(rows, self._nodes.count)

    def _put(
        self, node: int, queue: str, block: Block, waiting: DeadLetterSettings = NOWHERE
    ) -> None:
        """Stage a block; ``waiting`` says where it may wait if its queue cannot take it."""
        key = node, queue, block.schema
        stage = self._stages.get(key)
        if stage is None:
            diskless = waiting.on_disk_error == "memory"
            stage = self._nodes[node].stage(
                queue, block.schema, waiting.memory_events, diskless=diskless
            )
            self._stages[key] = self._opened.enter_context(stage)
        stage.write(block)

    def _originals(self, node: int, queue: str, rows: Block) -> list[Block]:
        """Events as they are in the queue: a transform may have made others of them."""
        if "offset" not in rows.schema.names:
            return [as_block(rows)]
        spans = spans_of(np.asarray(rows.column("offset")))
        found: list[Block] = []
        for hull in hulls(spans):
            for first, block in self._nodes.read(node, queue, *hull):
                chosen = inside(spans, first, block.num_rows)
                if chosen.any():
                    found.append(block.filter(pa.array(chosen)))
        return found


# ── tasks ──
# One task's way of writing: it stages, and its driver commits what all tasks have staged.

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
