"""The pipeline: the main lane, a lane for every action with a queue, and what they do."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamReader, DataStreamWriter
from pyspark.sql.types import BinaryType, ShortType, StructType

from turnlane.delivery.settings import PAYLOAD, PLACES, PRIORITY, ROUTES
from turnlane.outputs.spark import SparkSinkSettings
from turnlane.pipeline.settings import MAIN, ActionSettings, LaneSettings, PipelineSettings
from turnlane.spark import transforms
from turnlane.spark.checkpoints import Checkpoints, Retiring, located
from turnlane.spark.checks import check
from turnlane.spark.lane import GatesSeen, HeldUpHeldUp, Lane, LaneStatus, Listener, Rooms, Start
from turnlane.spark.nodes import Gates, Nodes
from turnlane.spark.options import WriteOptions, in_json, reading, writing
from turnlane.spark.parsing import looked_at
from turnlane.spark.reader import SHARES
from turnlane.spark.routing import Routes, is_deterministic, numbered, routed, with_payload
from turnlane.spark.row_codec import FEW_VALUES, filled
from turnlane.spark.session import UNMEASURED, set_to
from turnlane.spark.sinks import check_sink, patient, to_queue, to_sink, writes_once
from turnlane.spark.steps import (
    PLACE,
    Step,
    delivers_by_place,
    goes_by_place,
    payload_form,
    step_of_lane,
    steps_of_main,
    wanted_by_main,
    wanted_by_tasks,
    ways_of,
)
from turnlane.spark.stream_reader import Settling
from turnlane.spark.transforms import answer

QUERY: Final = {"transform", "sql", "watermark", "with_queues", "output_mode"}
"""The settings of an action on which the state of its query depends."""


class Pipeline:
    """Lanes over the queues of one endpoint.

    ``access`` are the options by which ``format("turnlane")`` reaches the nodes: the endpoint, and
    token and TLS where they are needed. ``prepare`` is called before a lane is started, or started
    again: a node that was away may lack what the lane needs.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        access: Mapping[str, str],
        spark: SparkSession,
        checkpoints: Path,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._prepare = prepare
        self._access = dict(access)
        self._spark = spark
        self._checkpoints = checkpoints
        self._remembering: frozenset[str] = frozenset()
        """The actions whose queries have to remember things between batches."""
        self._lanes: list[Lane] = []
        self._listener: Listener | None = None
        self._starting = threading.Lock()
        """One lane at a time: Spark's search for data sources and its views are everybody's."""

    def start(self, remembering: frozenset[str] | None = None) -> None:
        """Start every lane. Raises ``ConfigError`` if one of them could never run.

        ``remembering`` is what :meth:`check` has returned, if it was called before: to have Spark
        look at everything takes a while, and by now nothing else may run.
        """
        self._remembering = self.check() if remembering is None else remembering
        self._lanes = [Lane(MAIN, self._one_by_one(self._start_main), held_up=self._main_held_up())]
        self._lanes += [self._lane(action) for action in self._settings.with_lane]
        self._listener = Listener(self._spark, {lane.name: lane.tell for lane in self._lanes})
        self._listener.start()
        for lane in self._lanes:
            lane.start()

    def _one_by_one(self, start: Start) -> Start:
        def started(run: str) -> StreamingQuery:
            with self._starting:
                self._prepare()
                # Makes the session this thread's active one, in which alone Spark looks for
                # data sources written in Python.
                self._spark.createDataFrame([], "nothing string")
                return start(run)

        return started

    def stop(self, timeout: float = 30.0) -> list[str]:
        """Stop every lane; returns those that have not ended in time: they end when they can.

        What is not committed stays in its queue. Nothing else may run in the place of this
        pipeline before another call has returned none.
        """
        for lane in self._lanes:
            lane.ask_to_stop()
        deadline = time.monotonic() + timeout
        left = [
            lane.name
            for lane in self._lanes
            if not lane.stop(max(0.0, deadline - time.monotonic()))
        ]
        if self._listener is not None and not left:
            self._listener.stop()
            self._listener = None
        return left

    def status(self) -> list[LaneStatus]:
        """How the lanes are."""
        return [lane.status for lane in self._lanes]

    def check(self) -> frozenset[str]:
        """Have Spark look at every expression; returns the actions that have to remember things.

        Raises ``ConfigError``, which names the action.
        """
        return check(self._spark, self._settings)

    # ── the main lane ────────────────────────────────────────────────────────────────────────────

    def routed(self, source: DataFrame, wanted: Collection[str] | None = None) -> DataFrame:
        """Events with their routes."""
        settings = self._settings
        events = transforms.seen(source, settings, wanted)
        return routed(events, settings.actions, settings.dead_letters, settings.joined)

    def _start_main(self, run: str) -> StreamingQuery:
        steps = steps_of_main(self._settings)
        reader = self._read_lane(MAIN, run, self._settings.lane, steps, self._filled)
        wanted = wanted_by_main(self._settings)
        if wanted is not None and not steps and goes_by_place(self._settings):
            return self._start_copying(reader, wanted, run)
        rows = self.routed(reader.load(), wanted)
        if any(step.output is not None for step in steps):
            rows = with_payload(rows, "json" if wanted is None else "raw")
        return self._lane_query(
            transforms.stored(rows, self._settings), MAIN, run, self._settings.lane, steps
        )

    def _start_copying(
        self, reader: DataStreamReader, wanted: frozenset[str], run: str
    ) -> StreamingQuery:
        """Only what filters read goes through Spark, and out of it where each event is to go.

        Where that is the same for events that look the same, one row is enough for them.
        """
        settings = self._settings
        looks = looked_at(settings.parse, wanted) | (wanted & {"queue"})
        routes = Routes.of(settings.actions, joined=settings.joined).queued
        may_group = looks <= FEW_VALUES and "offset" not in wanted
        rows = self._numbered(reader, looks, grouped=may_group)
        if may_group and not is_deterministic(rows):
            rows = self._numbered(reader, looks, grouped=False)
        copies = in_json(list(routes))
        with set_to(self._spark, UNMEASURED):
            return self._lane_query(rows, MAIN, run, settings.lane, (), copies=copies)

    def _numbered(
        self, reader: DataStreamReader, looks: AbstractSet[str], *, grouped: bool
    ) -> DataFrame:
        """The places of events, or of groups of them, with their routes as bits."""
        kept = [*sorted(PLACE), PLACES] if grouped else sorted(PLACE)
        every = transforms.nothing(self._spark).schema
        every = every.add(PRIORITY, ShortType()).add(PLACES, BinaryType())
        source = reader.option("grouped", grouped).schema(_columns(every, {*looks, *kept}))
        settings = self._settings
        events = transforms.seen(source.load(), settings, wanted_by_main(settings))
        return numbered(events, settings.actions, settings.joined).select(*kept, ROUTES)

    @property
    def _filled(self) -> list[str]:
        """The queues that it fills."""
        return [action.name for action in self._settings.queued]

    def _main_held_up(self) -> HeldUpHeldUp:
        nodes = Nodes.of(WriteOptions.of(self._access))
        rooms = Rooms(nodes, self._filled)
        return HeldUpHeldUp(self._gates, ways_of(steps_of_main(self._settings)), rooms)

    # ── the others ───────────────────────────────────────────────────────────────────────────────

    def _lane(self, action: ActionSettings) -> Lane:
        if isinstance(action.output, SparkSinkSettings) or self._keeps_query(action):
            return self._durable_lane(action)
        start = self._one_by_one(partial(self._start_stateless, action))
        retiring = Retiring(Checkpoints(self._checkpoints, action.name))
        return Lane(action.name, start, retiring, self._held_up([step_of_lane(action)]))

    def _durable_lane(self, action: ActionSettings) -> Lane:
        settling = Settling(Nodes.of(WriteOptions.of(self._access)), action.name)
        retiring = Retiring(Checkpoints(self._checkpoints, action.name))
        start = self._one_by_one(partial(self._start_durable, patient(action), retiring))

        def watch(progress: StreamingQueryProgress) -> None:
            # With several queues Spark does not say which is which: their readers settle, later.
            if not action.with_queues:
                settling(progress)
            retiring(progress)

        return Lane(action.name, start, watch)

    def _keeps_query(self, action: ActionSettings) -> bool:
        """Whether a checkpoint is of this query and no other.

        That of SQL is even if it remembers nothing: its rows do not say of which events they are.
        """
        return action.sql is not None or action.name in self._remembering

    @cached_property
    def _gates(self) -> GatesSeen:
        """For all lanes. A pipeline that is only looked at has no nodes to ask."""
        return GatesSeen(Gates(Nodes.of(WriteOptions.of(self._access))))

    def _held_up(self, steps: Sequence[Step]) -> HeldUpHeldUp:
        return HeldUpHeldUp(self._gates, ways_of(steps))

    def _start_stateless(self, action: ActionSettings, run: str) -> StreamingQuery:
        """Its cursor in the node is the truth: the checkpoint is thrown away with the run."""
        steps = [step_of_lane(action)]
        reader = self._read_lane(action.name, run, action.lane, steps)
        wanted, form = wanted_by_tasks(action), payload_form(action)
        if wanted is not None and delivers_by_place(action):
            shares = reader.schema(SHARES).option("byPlace", value=True).load()
            reads = in_json(sorted(wanted))
            return self._lane_query(shares, action.name, run, action.lane, steps, reads=reads)
        reads_all = form != "raw" or action.transform is not None
        read = None if wanted is None or reads_all else wanted | {"value"}
        events = self._action_events(action, reader, read)
        rows = _only(transforms.storable(with_payload(events, form)), wanted)
        return self._lane_query(rows, action.name, run, action.lane, steps)

    def _start_durable(
        self, action: ActionSettings, retiring: Retiring, run: str
    ) -> StreamingQuery:
        """Its checkpoint holds state, or makes the sink exactly once: it stays."""
        del run  # it goes on where the one before has ended
        reader = self._read_durable(action.name, action.lane, consume=bool(action.with_queues))
        rows = self._action_events(action, reader)
        writes_files = isinstance(action.output, SparkSinkSettings) and bool(action.output.place)
        checkpoint = retiring.take(self._fingerprint(action), stays=writes_files)
        if isinstance(action.output, SparkSinkSettings):
            check_sink(self._spark, action.output, checkpoint)
            writer = to_sink(rows, action)
        elif writes_once(action):
            writer = to_queue(rows, action.output)
        else:
            # Spark's own sinks for Python take no updates: each batch is written as one.
            writer = rows.writeStream.foreachBatch(partial(self._deliver, action))
        writer = writer.outputMode(action.output_mode if action.sql else "append")
        return self._started(writer, action.name, action.lane, checkpoint)

    def _deliver(self, action: ActionSettings, rows: DataFrame, batch: int) -> None:
        del batch
        # Its rows are not to be read from the queue again: they may be of events of long ago.
        step = step_of_lane(action).model_copy(update={"rereads": False})
        options = {**self._access, "steps": in_json([step])}
        payloads = with_payload(rows, payload_form(action))
        filled(payloads).write.format("turnlane").options(**options).mode("append").save()

    def _action_events(
        self,
        action: ActionSettings,
        reader: DataStreamReader,
        wanted: AbstractSet[str] | None = None,
    ) -> DataFrame:
        schema = transforms.stored_schema(self._spark, self._settings)
        if wanted is not None and wanted <= set(schema.names):
            schema = _columns(schema, wanted)
        events = transforms.restored(reader.schema(schema).load(), self._settings)
        return answer(action, events, partial(self._joined, action))

    def _joined(self, action: ActionSettings, name: str) -> DataFrame:
        """A queue that an action's SQL joins with. Nobody else reads it: it is settled here."""
        reader = self._read_durable(name, action.lane, consume=True)
        if all(name != each.name for each in self._settings.queued):
            return reader.load()
        schema = transforms.stored_schema(self._spark, self._settings)
        return transforms.restored(reader.schema(schema).load(), self._settings)

    def _fingerprint(self, action: ActionSettings) -> str:
        """What a checkpoint belongs to; another one begins anew at the queue's cursor.

        A query that remembers things: another query has other state. And the files of a sink, which
        know their batches by the checkpoint's numbers, so nothing else may give them new ones.
        """
        parts: list[Any] = []
        if isinstance(action.output, SparkSinkSettings):
            parts += [action.output.format, action.output.place]
        if self._keeps_query(action):
            parse = self._settings.parse
            parts += [parse and parse.model_dump_json(), self._settings.transform]
            parts.append(action.model_dump_json(include=QUERY))
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

    # ── reading and writing ──────────────────────────────────────────────────────────────────────

    def _read_lane(
        self,
        lane: str,
        run: str,
        settings: LaneSettings,
        steps: Sequence[Step],
        into: Sequence[str] = (),
    ) -> DataStreamReader:
        return self._read(lane, settings).options(**reading(lane, run, settings, steps, into))

    def _read_durable(
        self, queue: str, settings: LaneSettings, *, consume: bool
    ) -> DataStreamReader:
        # A stateless lane that was here before has settled out of order, and nothing that is
        # settled may come back. A batch that is done again, after the driver died in the middle of
        # it, has the same rows all the same, as state and sinks need it: it is settled only once
        # Spark has noted that it is done, and nobody else settles events of a lane's queue, but to
        # be rid of them.
        return self._read(queue, settings).options(skipSettled=True, consume=consume)

    def _read(self, queue: str, settings: LaneSettings) -> DataStreamReader:
        options = {
            **self._access,
            "queue": queue,
            "includeHeaders": "true",
            "consume": "false",
            # Whoever has settled or purged events meanwhile has meant it: a lane goes on behind.
            "failOnDataLoss": "false",
            "maxOffsetsPerTrigger": str(settings.max_events),
            "minOffsetsPerTrigger": str(settings.min_events),
            "maxTriggerDelay": f"{settings.max_age}s",
            "workers": str(self._workers(settings)),
            "workerMinimumEvents": str(settings.worker_minimum_events),
        }
        return self._spark.readStream.format("turnlane").options(**options)

    def _workers(self, settings: LaneSettings) -> int:
        """How many tasks a lane may have at a time."""
        return settings.workers or self._spark.sparkContext.defaultParallelism

    def _lane_query(
        self,
        rows: DataFrame,
        lane: str,
        run: str,
        settings: LaneSettings,
        steps: Sequence[Step],
        **more: str,
    ) -> StreamingQuery:
        workers = self._workers(settings)
        told = [step.model_copy(update={"workers": workers}) for step in steps]
        options = {**self._access, **writing(lane, run, told), **more}
        writer = filled(rows).writeStream.format("turnlane").options(**options)
        runs = self._checkpoints / "runs" / lane
        shutil.rmtree(runs, ignore_errors=True)
        return self._started(writer, lane, settings, runs / run)

    def _started(
        self, writer: DataStreamWriter, name: str, settings: LaneSettings, checkpoint: Path
    ) -> StreamingQuery:
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", name)
        trigger = f"{settings.trigger} seconds"
        return (
            writer.queryName(name)
            .option("checkpointLocation", located(checkpoint))
            .trigger(processingTime=trigger)
            .start()
        )


def _columns(schema: StructType, names: AbstractSet[str]) -> StructType:
    return StructType([field for field in schema.fields if field.name in names])


def _only(rows: DataFrame, wanted: AbstractSet[str] | None) -> DataFrame:
    """Rows with the columns that tasks want; one that is not there is for a task to complain of."""
    if wanted is None or not wanted <= set(rows.columns):
        return rows
    return rows.select(PAYLOAD, *sorted(wanted))
