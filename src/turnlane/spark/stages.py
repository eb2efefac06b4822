"""Stages: what a task has for queues, on the nodes' disks until the driver commits it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import numpy as np
import pyarrow as pa

from turnlane.client.stage_writer import StageWriter
from turnlane.delivery.dead_letters import dead_letter_block
from turnlane.delivery.outcome import DeadLetter
from turnlane.delivery.settings import DeadLetterSettings
from turnlane.errors import RetryLater
from turnlane.events import Block
from turnlane.queues.spans import hulls, inside, spans_of
from turnlane.spark.columns import as_block
from turnlane.spark.nodes import Nodes, by_content, by_partition
from turnlane.spark.passage import Buried

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
