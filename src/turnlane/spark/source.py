"""``format("turnlane")``: a queue, of one node or of several, as a table that grows.

Spark imports this module in every Python process, so it has to stay light: what only some processes
need is imported late. For writing, tasks stage rows and the driver commits the stages, so a batch
is written as a whole or not at all (``task``).
"""

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
from turnlane.spark.by_reference import CopyTask
from turnlane.spark.lane_reader import LaneReader
from turnlane.spark.nodes import LaneNodes, Nodes
from turnlane.spark.options import (
    LaneReadOptions,
    LaneWriteOptions,
    ReadOptions,
    WriteOptions,
    find_writer_id,
    merge_path,
    parse_read_options,
    parse_write_options,
)
from turnlane.spark.queue_reader import FilteringBatchReader, QueueBatchReader, QueueStreamReader
from turnlane.spark.row_codec import check_writable, get_read_schema
from turnlane.spark.session import end_quietly_with_query, freeze_gc_after
from turnlane.spark.task import QueueTask, merge_results

if TYPE_CHECKING:
    from turnlane.spark.lane_task import LaneTask


class TurnlaneSource(DataSource):
    """Creates the readers and writers that Spark asks for."""

    @classmethod
    def name(cls) -> str:
        return "turnlane"

    def schema(self) -> str:
        options = self._parse_read_options()
        return get_read_schema(include_headers=options.include_headers, parse=options.parse)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._parse_read_options()
        return (FilteringBatchReader if options.push_filters else QueueBatchReader)(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        end_quietly_with_query()
        options = self._parse_read_options()
        if isinstance(options, LaneReadOptions):
            return LaneReader(options, schema)
        if "ending_offsets" in options.model_fields_set:
            raise ConfigError("endingOffsets", "is for batch queries; a stream has no end")
        return QueueStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001
        if overwrite:
            raise ConfigError("mode", 'only "append" is supported, not "overwrite"')
        return QueueBatchWriter(self._parse_write_options(schema))

    def streamWriter(  # noqa: N802
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceStreamWriter:
        del overwrite  # Results that change are written again, as further events.
        with freeze_gc_after("plan"):
            return QueueStreamWriter(self._parse_write_options(schema))

    def _parse_read_options(self) -> ReadOptions:
        return parse_read_options(merge_path(self.options, "queue"))

    def _parse_write_options(self, schema: StructType) -> WriteOptions:
        options = parse_write_options(merge_path(self.options, "queue"))
        if not (isinstance(options, LaneWriteOptions) and options.has_lane_rows):
            check_writable(schema, needs_route=options.queue is None)
        return options


class QueueWriter:
    """The part that batch and stream writers share."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    # Like Spark's own Arrow writers, it takes batches where the base classes declare rows.
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of a task; Spark calls it in the task."""
        with freeze_gc_after("write"), ExitStack() as opened:
            return create_task(self._options, opened).run(iterator)

    def _abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        nodes = Nodes.from_options(self._options)
        for node, stages in merge_results(messages).stages.items():
            nodes.abort(node, stages)


def create_task(options: WriteOptions, opened: ExitStack) -> QueueTask | CopyTask | LaneTask:
    """Create the task that the options describe."""
    if not isinstance(options, LaneWriteOptions):
        return QueueTask(options, opened)
    if options.copies is not None:
        return CopyTask(options, opened)
    # Only processes that deliver need the delivery engine.
    from turnlane.spark.lane_task import LaneTask

    return LaneTask(options, opened)


class QueueBatchWriter(QueueWriter, DataSourceArrowWriter):  # type: ignore[misc]  # write()
    """Appends to queues, once."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        nodes = Nodes.from_options(self._options)
        for node, stages in merge_results(messages).stages.items():
            nodes.commit(node, stages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._abort(messages)


class QueueStreamWriter(QueueWriter, DataSourceStreamArrowWriter):  # type: ignore[misc]  # write()
    """Appends batches: exactly once if the query has a writer id, or is a lane."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        with freeze_gc_after("commit"):
            self._commit(messages, batchId)

    def _commit(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        options, result = self._options, merge_results(messages)
        nodes = Nodes.from_options(options)
        if isinstance(options, LaneWriteOptions) and options.lane and options.run:
            lane = LaneNodes(nodes, options.lane, options.run)
            # Rows of one event may be in two tasks, deferred in one and dead in the other: then
            # the node defers the event.
            lane.commit(result.stages, result.deferred, result.dead)
            if result.dead_letter_error is not None:
                # The lane fails with this reason and starts again, each time after a longer wait.
                raise StorageFailed(f"dead letters: {result.dead_letter_error}")
            return
        writer = find_writer_id(options.writer_id, options.checkpoint_location)
        for node, stages in result.stages.items():
            nodes.commit(node, stages, writer=writer, epoch=batch)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        del batchId
        self._abort(messages)
