"""The fast path of lanes: Spark sees references to events, and the events never enter Java.

Why it exists
    An event that travels through Spark is copied from Arrow into Java rows and back, which costs
    more than everything else that a lane does. Many pipelines do not need it: a filter looks at the
    severity, and the output takes the bytes as they arrived.

When it applies
    ``lane_shape`` decides it:

    - ``COPY_EVENTS``: the main lane, if all outputs take the raw value. Spark gets the offset of
      each event and the columns that filters read. It returns the offset and the routes, a bit for
      each queue (``routing.add_route_bits``). :class:`CopyTask` sends both to the node, which
      copies the events from queue to queue: no event leaves the node.
    - ``COPY_GROUPS``: the same, if filters read only columns with few values. The reader makes one
      row of all events of a block that look the same (:func:`group_rows`), with the list of their
      offsets. Of a million log messages, Spark sees a few hundred rows: one for each severity and
      source in a block. What Spark decides for a row holds for all offsets in it, which is why a
      filter must not be random.
    - ``DELIVER_BY_REFERENCE``: the lane of an action, if its outputs take the raw value and columns
      that every event has. Spark gets only the spans of offsets that a task has to deliver
      (:func:`encode_task_spans`), and the task reads the events itself (:func:`read_events`).

Nothing else changes: settling, staging, delivery and dead letters work as with rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from turnlane.client.node_client import StageWriter
from turnlane.delivery.settings import GROUP_OFFSETS, PAYLOAD, ROUTES
from turnlane.events import Block
from turnlane.intervals import COPY_SCHEMA
from turnlane.spark.batch_planning import TaskSpans
from turnlane.spark.nodes import Nodes, split_by_node
from turnlane.spark.options import LaneWriteOptions
from turnlane.spark.queue_reader import read_task_spans
from turnlane.spark.row_codec import RowBuilder, build_event_schema
from turnlane.spark.task import TaskResult

Numbers = npt.NDArray[np.int64]

GROUPABLE_COLUMNS: Final = frozenset({"severity", "facility", "source"})
"""Columns with few different values: events that agree in them can share a row."""
_OFFSET_WIDTH: Final = 4
"""The bytes of an offset in a group: its distance from the first offset of the block."""
_MAX_UINT16: Final = 1 << 16


# ── copying: the main lane ──


class CopyTask:
    """A task of the main lane whose rows are offsets and routes: the nodes copy the events."""

    def __init__(self, options: LaneWriteOptions, opened: ExitStack) -> None:
        self._options = options
        self._opened = opened
        self._nodes = Nodes.from_options(options)
        self._writers: dict[int, StageWriter] = {}

    def run(self, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        """Have the nodes copy all events; returns the stages for the driver to commit."""
        for rows in batches:
            for node, part in split_by_node(rows) if rows.num_rows else ():
                self._copy(node, part)
        return TaskResult({node: each.finish_all() for node, each in self._writers.items()})

    def _copy(self, node: int, rows: pa.RecordBatch) -> None:
        if node not in self._writers:
            assert self._options.lane is not None
            writer = self._nodes[node].copy(self._options.lane, self._options.copies or ())
            self._writers[node] = self._opened.enter_context(writer)
        parts: Iterable[tuple[Any, Any]] = [(rows.column("offset"), rows.column(ROUTES))]
        if GROUP_OFFSETS in rows.schema.names:
            parts = ((pa.array(each), pa.array(routes)) for each, routes in ungroup_rows(rows))
        for offsets, routes in parts:
            block = pa.RecordBatch.from_arrays([offsets, routes], names=COPY_SCHEMA.names)
            self._writers[node].write(block.cast(COPY_SCHEMA))


def group_rows(rows: Block, schema: pa.Schema) -> Block:
    """Make one row of all rows of a block that agree in every column but the offset.

    ``offset`` is the first offset of the block; ``GROUP_OFFSETS`` has the distances from it.
    """
    compared = [name for name in schema.names if name not in ("partition", "offset", GROUP_OFFSETS)]
    groups = _number_groups(rows, compared)
    order = np.argsort(groups, kind="stable")
    counts = np.bincount(groups)
    ends = np.cumsum(counts)
    offsets = np.asarray(rows.column("offset"))
    distances = (offsets[order] - offsets[0]).astype(np.int32)
    bounds = np.concatenate(([0], ends)).astype(np.int32) * _OFFSET_WIDTH
    buffers = [None, pa.py_buffer(bounds.data), pa.py_buffer(distances.data)]
    one_of_each = rows.take(pa.array(order[ends - counts]))
    arrays: list[pa.Array[Any]] = [
        pa.array(np.full(len(counts), offsets[0]))
        if name == "offset"
        else pa.Array.from_buffers(pa.binary(), len(counts), buffers)
        if name == GROUP_OFFSETS
        else one_of_each.column(name)
        for name in schema.names
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _number_groups(rows: Block, names: list[str]) -> npt.NDArray[Any]:
    """Return the number of each row's group; all numbers from 0 on occur."""
    numbers: npt.NDArray[Any] = np.zeros(rows.num_rows, dtype=np.int32)
    count = 1
    for name in names:
        values, kinds = _encode(rows.column(name))
        if count == 1:
            numbers, count = values, kinds
        elif kinds > 1:  # A column with one value does not distinguish rows.
            both = numbers.astype(np.int64) * kinds + values
            numbers, count = _encode(pa.array(both))
    # NumPy sorts 16-bit numbers ten times faster than longer ones.
    return numbers.astype(np.uint16) if count <= _MAX_UINT16 else numbers


def _encode(values: Any) -> tuple[npt.NDArray[np.int32], int]:  # noqa: ANN401
    """Return a number for each value, and the number of different values."""
    encoded = values.dictionary_encode(null_encoding="encode")
    return np.asarray(encoded.indices), len(encoded.dictionary)


def ungroup_rows(rows: Block) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield the offsets, in order, and the routes of the events in groups, block by block."""
    firsts, routes = np.asarray(rows.column("offset")), np.asarray(rows.column(ROUTES))
    column: Any = rows.column(GROUP_OFFSETS)
    _, ends, contents = column.buffers()
    bounds = np.frombuffer(ends, np.int32)[column.offset : column.offset + len(column) + 1]
    bounds, distances = bounds // _OFFSET_WIDTH, np.frombuffer(contents, np.int32)
    changes = np.flatnonzero(np.diff(firsts)) + 1
    for start, end in zip([0, *changes], [*changes, len(firsts)], strict=True):
        mine = distances[bounds[start] : bounds[end]]
        by_distance = np.zeros(int(mine.max()) + 1, dtype=np.int64)
        by_distance[mine] = np.repeat(routes[start:end], np.diff(bounds[start : end + 1]))
        present = np.flatnonzero(by_distance)
        yield firsts[start] + present, by_distance[present]


# ── delivering: the lane of an action ──

SPAN_ROW_SCHEMA: Final = StructType(
    [
        StructField("partition", IntegerType()),
        StructField("part", IntegerType()),
        StructField("parts", IntegerType()),
        StructField("first", LongType()),
        StructField("end", LongType()),
    ]
)
"""The rows that travel through Spark: one for each span of offsets."""


def encode_task_spans(task: TaskSpans, schema: pa.Schema) -> pa.RecordBatch:
    """Encode the work of a task as rows of :data:`SPAN_ROW_SCHEMA`."""
    rows = [(task.node, task.part, task.parts, *span) for span in task.spans]
    columns = [
        pa.array(column, field.type)
        for field, column in zip(schema, zip(*rows, strict=True), strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def decode_task_spans(rows: pa.RecordBatch) -> Iterator[TaskSpans]:
    """Decode rows of :data:`SPAN_ROW_SCHEMA`."""
    values = zip(*(rows.column(name).to_pylist() for name in SPAN_ROW_SCHEMA.names), strict=True)
    for (node, part, parts), spans in groupby(values, key=lambda row: row[:3]):
        yield TaskSpans(node, tuple(span[3:] for span in spans), part, parts)


def read_events(
    nodes: Nodes, queue: str, columns: Iterable[str], batches: Iterator[pa.RecordBatch]
) -> Iterator[Block]:
    """Read the events of the spans in ``batches``, with the value as payload."""
    schema = build_event_schema(["value", *columns])
    for rows in batches:
        for task in decode_task_spans(rows):
            builder = RowBuilder(schema, queue, task.node)
            for events in read_task_spans(nodes, queue, task, builder):
                yield events.append_column(PAYLOAD, events.column("value"))
