"""``format("turnlane")``: a queue, of one node or of several, as a table that grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from turnlane.errors import ConfigError, StorageFailed
from turnlane.spark.lane_reader import LaneReader
from turnlane.spark.nodes import LaneCommit, Nodes
from turnlane.spark.options import (
    LaneReadOptions,
    LaneWriteOptions,
    ReadOptions,
    WriteOptions,
    read_options,
    with_path,
    write_options,
    writer_of,
)
from turnlane.spark.reader import BatchReader, PruningReader
from turnlane.spark.row_codec import check_writable, read_schema
from turnlane.spark.session import lasting
from turnlane.spark.stream_reader import StreamReader
from turnlane.spark.task import Staged, Task, all_of

if TYPE_CHECKING:
    from turnlane.spark.lane_task import CopyTask

# ── writing ──
# Writing to queues with Spark: tasks stage, the driver commits: a batch is all or nothing.


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
    from turnlane.spark.lane_task import CopyTask, LaneTask

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


class TurnlaneSource(DataSource):
    """What Spark asks for a reader or a writer."""

    @classmethod
    def name(cls) -> str:
        return "turnlane"

    def schema(self) -> str:
        return read_schema(include_headers=self._reading().include_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._reading()
        return (PruningReader if options.push_filters else BatchReader)(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        options = self._reading()
        if isinstance(options, LaneReadOptions):
            return LaneReader(options, schema)
        if "ending_offsets" in options.model_fields_set:
            raise ConfigError("endingOffsets", "is for batch queries; a stream reads on")
        return StreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001
        if overwrite:
            raise ConfigError("mode", "is append: a queue is only ever appended to")
        return BatchWriter(self._writing(schema))

    def streamWriter(  # noqa: N802
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceStreamWriter:
        del overwrite  # results that change are written anew, as further events
        with lasting("plan"):
            return StreamWriter(self._writing(schema))

    def _reading(self) -> ReadOptions:
        return read_options(with_path(self.options, "queue"))

    def _writing(self, schema: StructType) -> WriteOptions:
        options = write_options(with_path(self.options, "queue"))
        if not (isinstance(options, LaneWriteOptions) and options.has_own_rows):
            check_writable(schema, needs_route=options.queue is None)
        return options
