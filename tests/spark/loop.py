"""A lane without Spark: its reader, tasks and sink, called as Spark calls them, in this process.

A lane treats bad destinations in the same way with and without Spark, but with Spark it takes
minutes.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, Self

import numpy as np
import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from turnlane.delivery.settings import DIRECT, ROUTES
from turnlane.pipeline.settings import MAIN, ActionSettings, LaneSettings, PipelineSettings
from turnlane.spark.batch_planning import TAKEN_EVENTS
from turnlane.spark.by_reference import SPAN_ROW_SCHEMA
from turnlane.spark.lane import BlockedReason, BreakerPoller, FullQueuePoller
from turnlane.spark.lane_reader import LaneReader
from turnlane.spark.lane_shape import (
    LaneShape,
    build_lane_step,
    build_main_steps,
    can_copy_by_reference,
    choose_action_shape,
    find_task_columns,
)
from turnlane.spark.nodes import BreakerClient, Nodes
from turnlane.spark.options import (
    LaneReadOptions,
    LaneWriteOptions,
    build_lane_read_options,
    build_lane_write_options,
    to_json,
)
from turnlane.spark.source import QueueStreamWriter
from turnlane.spark.steps import LaneStep, Suspension, list_required_paths

SCHEMA = (
    StructType()
    .add("key", StringType())
    .add("value", BinaryType())
    .add("timestamp", TimestampType())
    .add("severity", ByteType())
    .add("source", StringType())
    .add("queue", StringType())
    .add("partition", IntegerType())
    .add("offset", LongType())
)
Change = Callable[[pa.RecordBatch], pa.RecordBatch]


class Loop:
    """One run of a lane; :meth:`turn` runs one batch, if there are events for it."""

    def __init__(
        self,
        url: str,
        lane: str,
        settings: LaneSettings,
        steps: Sequence[LaneStep],
        change: Change,
        *,
        reads: Collection[str] = (),
        copies: Sequence[str] | None = None,
        into: Sequence[str] = (),
        cut: int | None = None,
    ) -> None:
        """``reads`` are the columns that tasks read by themselves; see ``LaneWriteOptions``.

        ``cut`` is the number of rows in the blocks of tasks; by default blocks are not cut.
        """
        self.lane = lane
        self.batches: list[int] = []
        """The number of events of each batch."""
        access, run = {"endpoint": url}, uuid.uuid4().hex
        knobs = {
            "queue": lane,
            "maxOffsetsPerTrigger": str(settings.max_events),
            "workerMinimumEvents": str(settings.worker_minimum_events),
            "workers": str(settings.workers or 2),
            "pollTimeout": "50ms",
        }
        knobs |= {
            "byPlace": str(bool(reads)),
            **build_lane_read_options(lane, run, settings, steps, into),
        }
        options = LaneReadOptions.from_spark({**access, **knobs})
        self.reader = LaneReader(options, SPAN_ROW_SCHEMA if reads else SCHEMA)
        more = {"reads": to_json(sorted(reads))}
        if copies is not None:
            more["copies"] = to_json(copies)
        self.writer = QueueStreamWriter(
            LaneWriteOptions.from_spark(
                {**access, **build_lane_write_options(lane, run, steps), **more}
            )
        )
        nodes = Nodes.from_options(options)
        self._blocked_reason = BlockedReason(
            BreakerPoller(BreakerClient(nodes)),
            list_required_paths(steps),
            FullQueuePoller(nodes, into),
        )
        self.change = change
        self._cut = cut
        self._offset = self.reader.initialOffset()

    def turn(self) -> bool:
        """Run a batch; returns whether there was one."""
        following = self.reader.latestOffset(self._offset, ReadAllAvailable())
        if following == self._offset:
            return False
        parts = self.reader.partitions(self._offset, following)
        with ThreadPoolExecutor(max(1, len(parts))) as tasks:
            messages = list(tasks.map(self._task, parts))
        self.writer.commit(messages, len(self.batches))
        self.batches.append(following[TAKEN_EVENTS] - self._offset[TAKEN_EVENTS])
        self._offset = following
        return True

    def _task(self, part: Any) -> Any:
        changed = map(self.change, self.reader.read(part))
        return self.writer.write(chain.from_iterable(map(self._blocks, changed)))

    def _blocks(self, rows: pa.RecordBatch) -> list[pa.RecordBatch]:
        size = self._cut or max(1, rows.num_rows)
        return [rows.slice(first, size) for first in range(0, rows.num_rows, size)]

    def suspension(self) -> Suspension | None:
        """Return why the lane does not send."""
        return self._blocked_reason()


class Pipe:
    """The lanes of a pipeline, each with a thread that runs batches until it is closed."""

    def __init__(
        self, url: str, *actions: ActionSettings, lane: LaneSettings | None = None
    ) -> None:
        settings = PipelineSettings(actions=actions)
        self.lanes = {MAIN: _main(url, settings, lane or LaneSettings())} | {
            action.name: _lane(url, action) for action in settings.queued_actions
        }
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(loop,)) for loop in self.lanes.values()
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert not self.errors, self.errors

    def _run(self, loop: Loop) -> None:
        while not self._stop.is_set():
            try:
                loop.turn()
            except BaseException as error:  # noqa: BLE001 - shown at the end
                self.errors.append(error)
                return


def _main(url: str, settings: PipelineSettings, lane: LaneSettings) -> Loop:
    steps = build_main_steps(settings)
    into = [action.name for action in settings.queued_actions]
    if steps or not can_copy_by_reference(settings):
        return Loop(url, MAIN, lane, steps, _router(settings.actions), into=into)
    copies = [action.name for action in settings.actions]
    return Loop(url, MAIN, lane, steps, _numberer(settings.actions), copies=copies, into=into)


def _lane(url: str, action: ActionSettings) -> Loop:
    steps, wanted = [build_lane_step(action)], find_task_columns(action)
    shape = choose_action_shape(action, is_stateful=False)
    if wanted is None or shape is not LaneShape.DELIVER_BY_REFERENCE:
        return Loop(url, action.name, action.lane, steps, with_payload)
    return Loop(url, action.name, action.lane, steps, lambda rows: rows, reads=wanted)


def with_payload(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows in the form for raw outputs."""
    return rows.append_column("payload", rows.column("value"))


def _router(actions: Sequence[ActionSettings]) -> Change:
    """Route by key: an event goes to the actions whose filter is the first word of its key."""

    def routed(rows: pa.RecordBatch) -> pa.RecordBatch:
        words = _words(rows)
        routes: dict[str, list[list[str]]] = {
            column: [
                [each.name for each in actions if each.filter == word and _is(each, column)]
                for word in words
            ]
            for column in ("queue", DIRECT)
        }
        rows = rows.drop_columns(["queue"])
        for column, names in routes.items():
            rows = rows.append_column(column, pa.array(names, pa.list_(pa.string())))
        going = np.array([bool(a or b) for a, b in zip(*routes.values(), strict=True)])
        return with_payload(rows.filter(pa.array(going)))

    return routed


def _numberer(actions: Sequence[ActionSettings]) -> Change:
    """Route in the same way, for a main lane that copies by reference."""

    def numbered(rows: pa.RecordBatch) -> pa.RecordBatch:
        bits = [
            sum(1 << at for at, each in enumerate(actions) if each.filter == word)
            for word in _words(rows)
        ]
        refs = rows.select(["partition", "offset"]).append_column(ROUTES, pa.array(bits))
        return refs.filter(pa.array(np.array(bits) != 0))

    return numbered


def _words(rows: pa.RecordBatch) -> list[str]:
    return [str(key).partition("-")[0] for key in rows.column("key").to_pylist()]


def _is(action: ActionSettings, column: str) -> bool:
    return action.is_called_by_main == (column == DIRECT)
