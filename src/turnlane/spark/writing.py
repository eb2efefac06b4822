"""Writing to queues with Spark: tasks stage, the driver commits: a batch is all or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from turnlane.errors import StorageFailed
from turnlane.spark.lane_nodes import LaneCommit
from turnlane.spark.lane_options import LaneWriteOptions
from turnlane.spark.lasting import lasting
from turnlane.spark.nodes import Nodes
from turnlane.spark.options import WriteOptions
from turnlane.spark.tasks import Staged, Task, all_of
from turnlane.spark.writers import writer_of

if TYPE_CHECKING:
    from turnlane.spark.copying import CopyTask


class Writing:
    """What batch and stream have in common."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    # Spark's own Arrow writers, too, take batches where their base classes have rows.
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """A task's part: called where the rows are."""
        with lasting("write"), ExitStack() as opened:
            return task_of(self._options, opened).run(iterator)

    def _discard(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        nodes = Nodes.of(self._options)
        for node, stages in all_of(messages).stages.items():
            nodes.abort(node, stages)


def task_of(options: WriteOptions, opened: ExitStack) -> Task | CopyTask:
    """What a task does by its options."""
    if not isinstance(options, LaneWriteOptions):
        return Task(options, opened)
    # Of Spark's processes only those that write need to know how to deliver.
    from turnlane.spark.copying import CopyTask
    from turnlane.spark.lane_tasks import LaneTask

    return (LaneTask if options.copies is None else CopyTask)(options, opened)


class BatchWriter(Writing, DataSourceArrowWriter):  # type: ignore[misc]  # write()
    """Appends to queues, once."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        nodes = Nodes.of(self._options)
        for node, stages in all_of(messages).stages.items():
            nodes.commit(node, stages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._discard(messages)


class StreamWriter(Writing, DataSourceStreamArrowWriter):  # type: ignore[misc]  # write()
    """Appends a batch at a time: exactly once if the query has an id, or is a lane."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        with lasting("commit"):
            self._commit(all_of(messages), batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        del batchId
        self._discard(messages)

    def _commit(self, done: Staged, batch: int) -> None:
        nodes, options = Nodes.of(self._options), self._options
        if isinstance(options, LaneWriteOptions) and options.lane and options.run:
            _commit_lane(LaneCommit(nodes, options.lane, options.run), done)
            return
        writer = writer_of(options.writer_id, options.checkpoint_location)
        for node, ids in done.stages.items():
            nodes.commit(node, ids, writer=writer, epoch=batch)


def _commit_lane(lane: LaneCommit, done: Staged) -> None:
    # Rows of one event may have been in two tasks, kept in one and dead in the other: the node
    # takes it for kept then.
    lane.commit(done.stages, done.kept, done.dead)
    if done.trouble is not None:
        # The lane tells of it, and begins anew after a while, each time a longer one.
        raise StorageFailed(f"dead letters: {done.trouble}")
