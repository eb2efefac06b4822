"""Writing to queues with Spark: tasks stage, the driver commits: a batch is all or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from turnlane.client.remote import StageWriter
from turnlane.outputs import registry
from turnlane.outputs.contract import Output
from turnlane.spark.columns import as_block, by_route
from turnlane.spark.nodes import Nodes, by_partition
from turnlane.spark.options import WriteOptions


@dataclass
class Staged(WriterCommitMessage):
    """What a task has staged: by node, the ids of its stages."""

    stages: dict[int, list[str]]


class Task:
    """One task's way of writing: outputs are called, and every queue, on every node, gets a stage.

    Outputs first: if one fails nothing is committed, and all of the batch comes again.
    """

    def __init__(self, options: WriteOptions, opened: ExitStack) -> None:
        self._options = options
        self._opened = opened
        self._nodes = Nodes.of(options)
        self._outputs: dict[str, Output] = {}
        self._stages: dict[tuple[int, str], StageWriter] = {}
        self._next = 0

    def run(self, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Write everything."""
        for rows in batches:
            if not rows.num_rows:
                continue
            self._deliver(rows)
            for queue, part in self._by_queue(rows):
                for node, piece in self._by_node(part):
                    self._stage(node, queue, piece)
        stages: dict[int, list[str]] = {}
        for (node, _), stage in self._stages.items():
            stages.setdefault(node, []).append(stage.finish())
        return Staged(stages)

    def _deliver(self, rows: pa.RecordBatch) -> None:
        if not self._options.outputs:
            return
        if "direct" in rows.schema.names:
            parts = by_route(rows, "direct")
        else:
            parts = [(name, rows) for name in self._options.outputs]
        for action, part in parts:
            output = self._output(action)
            if self._options.outputs[action].get("format") == "raw":
                part = _raw(part)  # noqa: PLW2901 - the same rows
            output.send(output.prepare(part))

    def _output(self, action: str) -> Output:
        output = self._outputs.get(action)
        if output is None:
            given = self._options.outputs[action]
            kind = registry.load(given["type"])
            output = kind(kind.settings_type.model_validate(given))
            self._outputs[action] = self._opened.enter_context(output)
        return output

    def _by_queue(self, rows: pa.RecordBatch) -> Sequence[tuple[str, pa.RecordBatch]]:
        if self._options.queue is not None:
            return [(self._options.queue, rows)]
        if self._options.outputs and not self._options.routed:
            return []  # there it says where the rows came from
        return by_route(rows, "queue")

    def _by_node(self, rows: pa.RecordBatch) -> Sequence[tuple[int, pa.RecordBatch]]:
        """A lane's events stay on their node, whose commit also moves the cursor; others spread."""
        if self._nodes.count == 1:
            return [(0, rows)]
        if self._options.lane is not None and "partition" in rows.schema.names:
            return by_partition(rows)
        self._next = (self._next + 1) % self._nodes.count
        return [(self._next, rows)]

    def _stage(self, node: int, queue: str, rows: pa.RecordBatch) -> None:
        block = as_block(rows)
        stage = self._stages.get((node, queue))
        if stage is None:
            stage = self._nodes.stage(node, queue, block.schema)
            self._stages[node, queue] = self._opened.enter_context(stage)
        stage.write(block)


def _raw(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rows whose payload is the value: in the main lane it is made for all outputs at once."""
    if "value" not in rows.schema.names:
        return rows
    at = rows.schema.get_field_index("payload")
    return rows.set_column(at, "payload", rows.column("value"))


def _written(options: WriteOptions, batches: Iterator[pa.RecordBatch]) -> Staged:
    with ExitStack() as opened:
        return Task(options, opened).run(batches)


def _all(messages: Sequence[WriterCommitMessage | None]) -> dict[int, list[str]]:
    stages: dict[int, list[str]] = {}
    for message in messages:
        if isinstance(message, Staged):
            for node, ids in message.stages.items():
                stages.setdefault(node, []).extend(ids)
    return stages


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
        for node, stages in _all(messages).items():
            nodes.commit(node, stages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        nodes = Nodes.of(self._options)
        for node, stages in _all(messages).items():
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
        stages = _all(messages)
        if options.lane is not None and options.run is not None:
            # Every node, also one that got nothing: its cursor moves all the same.
            for node in range(nodes.count):
                nodes.commit_lane(node, stages.get(node, []), options.lane, options.run)
            return
        writer = options.writer_id or options.checkpoint_location
        for node, ids in stages.items():
            nodes.commit(node, ids, writer=writer, epoch=batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        del batchId
        nodes = Nodes.of(self._options)
        for node, stages in _all(messages).items():
            nodes.abort(node, stages)
