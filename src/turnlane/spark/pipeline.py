"""The pipeline: the main lane, a lane for every action with a queue, and what they do."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamReader, DataStreamWriter

from turnlane.errors import ConfigError, RetryLater
from turnlane.formats.parse_settings import Format
from turnlane.outputs.spark import SparkSinkSettings
from turnlane.pipeline.settings import MAIN, ActionSettings, LaneSettings, PipelineSettings
from turnlane.spark.columns import names_read, read_schema
from turnlane.spark.hollows import filled
from turnlane.spark.lane import Lane, LaneStatus, Start
from turnlane.spark.lane_nodes import Gates, HeldUp
from turnlane.spark.lane_options import in_json, reading, writing
from turnlane.spark.needs import wanted_by_main
from turnlane.spark.nodes import Nodes
from turnlane.spark.options import WriteOptions
from turnlane.spark.parsing import parsed
from turnlane.spark.payloads import PAYLOAD, with_payload
from turnlane.spark.routing import DIRECT, routed
from turnlane.spark.sink_files import in_few_files, patient
from turnlane.spark.sinks import check_sink
from turnlane.spark.steps import Step, step_of_lane, steps_of_main, ways_of

log = logging.getLogger(__name__)

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
        self._lanes: list[Lane] = []
        self._starting = threading.Lock()
        """One lane at a time: Spark's search for data sources and its views are everybody's."""

    def start(self) -> None:
        """Start every lane. Raises ``ConfigError`` if one of them could never run."""
        self.check()
        held_up = self._held_up(steps_of_main(self._settings))
        self._lanes = [Lane(MAIN, self._one_by_one(self._start_main), held_up=held_up)]
        self._lanes += [self._lane(action) for action in self._settings.queued]
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

    def stop(self, timeout: float = 30.0) -> None:
        """Stop every lane; what is not committed stays in its queue."""
        for lane in self._lanes:
            lane.ask_to_stop()
        deadline = time.monotonic() + timeout
        for lane in self._lanes:
            lane.stop(max(0.0, deadline - time.monotonic()))

    def status(self) -> list[LaneStatus]:
        """How the lanes are."""
        return [lane.status for lane in self._lanes]

    # ── checking ─────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Have Spark look at every expression. Raises ``ConfigError``, which names the action."""
        # In a session of its own: views made here are no business of the lanes that run.
        spark = self._spark.newSession()
        base = spark.createDataFrame([], read_schema(include_headers=True))
        plain = self._checked("parse", lambda: parsed(base, self._settings.parse))
        events = self._checked("transform", lambda: self._transformed(plain))
        for at, action in enumerate(self._settings.actions):
            where = f"actions[{at}]"
            if action.filter is not None:
                self._checked(f"{where}.filter", partial(events.where, action.filter))
            if action.transform is not None:
                self._checked(f"{where}.transform", partial(_called, action.transform, events))
            if action.sql is not None:
                queues = self._settings.queued
                others = {each.name: events for each in queues if each.name in action.with_queues}
                others = {**dict.fromkeys(action.with_queues, base), **others}
                self._checked(f"{where}.sql", partial(answer, action, events, others))

    def _checked(self, place: str, make: Callable[[], DataFrame]) -> DataFrame:
        try:
            made = make()
            made.schema  # noqa: B018 - analyses the plan
        except ConfigError as error:  # it knows what is wrong, not where
            raise ConfigError(place, str(error).removeprefix(f"{error.knob}: ")) from error
        except Exception as error:
            raise ConfigError(place, _first_words(error)) from error
        return made

    # ── the main lane ────────────────────────────────────────────────────────────────────────────

    def events(self, source: DataFrame, wanted: Collection[str] | None = None) -> DataFrame:
        """Events as actions see them: parsed, as far as that is ``wanted``, and transformed."""
        return self._transformed(parsed(source, self._settings.parse, wanted))

    def _transformed(self, events: DataFrame) -> DataFrame:
        if self._settings.transform is None:
            return events
        return _called(self._settings.transform, events)

    def routed(self, source: DataFrame, wanted: Collection[str] | None = None) -> DataFrame:
        """Events with their routes."""
        events = self.events(source, wanted)
        return routed(events, self._settings.actions, self._settings.dead_letters)

    def _start_main(self, run: str) -> StreamingQuery:
        steps = steps_of_main(self._settings)
        reader = self._read_lane(MAIN, run, self._settings.lane, steps)
        wanted = wanted_by_main(self._settings)
        rows = self.routed(reader.load(), wanted)
        if any(step.output is not None for step in steps):
            rows = with_payload(rows, "json" if wanted is None else "raw")
        return self._lane_query(self._stored(rows), MAIN, run, self._settings.lane, steps)

    # ── the others ───────────────────────────────────────────────────────────────────────────────

    def _lane(self, action: ActionSettings) -> Lane:
        if isinstance(action.output, SparkSinkSettings) or action.is_stateful:
            settling = Settling(Nodes.of(WriteOptions.of(self._access)), action.name)
            start = self._one_by_one(partial(self._start_durable, patient(action)))
            # With several queues Spark does not say which is which: their readers settle, later.
            return Lane(action.name, start, None if action.with_queues else settling)
        start = self._one_by_one(partial(self._start_stateless, action))
        return Lane(action.name, start, held_up=self._held_up([step_of_lane(action)]))

    def _held_up(self, steps: Sequence[Step]) -> HeldUp:
        return HeldUp(Gates(Nodes.of(WriteOptions.of(self._access))), ways_of(steps))

    def _start_stateless(self, action: ActionSettings, run: str) -> StreamingQuery:
        """Its cursor in the node is the truth: the checkpoint is thrown away with the run."""
        steps = [step_of_lane(action)]
        reader = self._read_lane(action.name, run, action.lane, steps)
        events = self._action_events(action, reader)
        rows = _storable(with_payload(events, _payload_form(action)))
        return self._lane_query(rows, action.name, run, action.lane, steps)

    def _start_durable(self, action: ActionSettings, run: str) -> StreamingQuery:
        """Its checkpoint holds state, or makes the sink exactly once: it stays."""
        del run  # it goes on where the one before has ended
        reader = self._read(action.name, action.lane)
        rows = self._action_events(action, reader.option("consume", bool(action.with_queues)))
        checkpoint = self._checkpoints / f"{action.name}-{self._fingerprint(action)}"
        if isinstance(action.output, SparkSinkSettings):
            check_sink(self._spark, action.output, checkpoint)
            writer = _to_sink(rows, action)
        else:
            # Spark's own sinks for Python take no updates: each batch is written as one.
            writer = rows.writeStream.foreachBatch(partial(self._deliver, action))
        writer = writer.outputMode(action.output_mode if action.sql else "append")
        return self._started(writer, action.name, action.lane, checkpoint)

    def _deliver(self, action: ActionSettings, rows: DataFrame, batch: int) -> None:
        del batch
        options = {**self._access, "steps": in_json([step_of_lane(action)])}
        payloads = with_payload(rows, _payload_form(action))
        filled(payloads).write.format("turnlane").options(**options).mode("append").save()

    def _action_events(self, action: ActionSettings, reader: DataStreamReader) -> DataFrame:
        events = self._restored(reader.schema(self._stored_schema()).load())
        if action.transform is not None:
            events = _called(action.transform, events)
        if action.sql is None:
            return events
        return self._queried(action, events)

    def _queried(self, action: ActionSettings, events: DataFrame) -> DataFrame:
        assert action.sql is not None
        if action.watermark is not None:
            events = events.withWatermark("timestamp", f"{action.watermark} seconds")
        events.createOrReplaceTempView("events")
        for name in action.with_queues:
            other = self._read(name, action.lane).option("consume", value=True)
            if any(name == each.name for each in self._settings.queued):
                other = other.schema(self._stored_schema())
            other.load().createOrReplaceTempView(name)
        return self._spark.sql(action.sql)

    def _stored_schema(self) -> Any:  # noqa: ANN401
        """The columns of action queues: those of events once they are parsed and transformed."""
        base = self._spark.createDataFrame([], read_schema(include_headers=True))
        return self._stored(self.events(base)).schema

    def _stored(self, events: DataFrame) -> DataFrame:
        """Events without columns that no queue keeps: what only filters have read is left out."""
        if wanted_by_main(self._settings) is None:
            return _storable(events)
        kept = {*names_read(), DIRECT, PAYLOAD}
        return events.select(*(name for name in events.columns if name in kept))

    def _restored(self, events: DataFrame) -> DataFrame:
        """Events with the columns that no queue stores made again."""
        if self._settings.parse is None or self._settings.parse.format != Format.JSON:
            return events
        return events.withColumn("data", F.try_parse_json(F.col("value").cast("string")))

    def _fingerprint(self, action: ActionSettings) -> str:
        """What a checkpoint belongs to; another one begins anew at the queue's cursor.

        A query that remembers things: another query has other state. And the files of a sink, which
        know their batches by the checkpoint's numbers, so nothing else may give them new ones.
        """
        parts: list[Any] = []
        if isinstance(action.output, SparkSinkSettings):
            parts += [action.output.format, action.output.place]
        if action.is_stateful:
            parse = self._settings.parse
            parts += [parse and parse.model_dump_json(), self._settings.transform]
            parts.append(action.model_dump_json(include=QUERY))
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

    # ── reading and writing ──────────────────────────────────────────────────────────────────────

    def _read_lane(
        self, lane: str, run: str, settings: LaneSettings, steps: Sequence[Step]
    ) -> DataStreamReader:
        return self._read(lane, settings).options(**reading(lane, run, settings, steps))

    def _read(self, queue: str, settings: LaneSettings) -> DataStreamReader:
        options = {
            **self._access,
            "queue": queue,
            "includeHeaders": "true",
            "consume": "false",
            "maxOffsetsPerTrigger": str(settings.max_events),
            "minOffsetsPerTrigger": str(settings.min_events),
            "maxTriggerDelay": f"{settings.max_age}s",
            "workers": str(settings.workers or self._spark.sparkContext.defaultParallelism),
            "workerMinimumEvents": str(settings.worker_minimum_events),
        }
        return self._spark.readStream.format("turnlane").options(**options)

    def _lane_query(
        self,
        rows: DataFrame,
        lane: str,
        run: str,
        settings: LaneSettings,
        steps: Sequence[Step],
    ) -> StreamingQuery:
        options = {**self._access, **writing(lane, run, steps)}
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
            .option("checkpointLocation", str(checkpoint))
            .trigger(processingTime=trigger)
            .start()
        )


def _payload_form(action: ActionSettings) -> str:
    """What payloads are made of: values as they are only if all the action's outputs want them so.

    Tasks can make raw payloads of others, but not the other way round.
    """
    failover = action.delivery.failover
    outputs = [action.output] if failover is None else [action.output, failover.output]
    forms = {str(getattr(output, "format", "json")) for output in outputs}
    return "raw" if forms == {"raw"} else "json"


def _to_sink(rows: DataFrame, action: ActionSettings) -> DataStreamWriter:
    settings = action.output
    if settings.columns:
        rows = rows.selectExpr(*settings.columns)
    rows = in_few_files(rows, action)
    writer = rows.writeStream.format(settings.format).options(**settings.options)
    if settings.path is not None:
        writer = writer.option("path", settings.path)
    return writer.partitionBy(*settings.partition_by) if settings.partition_by else writer


class Settling:
    """Settles what a query has committed to its checkpoint: it will never ask for it again."""

    def __init__(self, nodes: Nodes, queue: str) -> None:
        self._nodes = nodes
        self._queue = queue
        self._settled: dict[int, int] = {}
        self._late: set[int] = set()
        """Nodes that it was told of that they have not settled: once is enough."""

    def __call__(self, query: StreamingQuery) -> None:
        """Look how far the query has come."""
        progress = query.lastProgress
        for source in progress.sources if progress is not None else ():
            offsets = json.loads(source.endOffset) if source.endOffset else {}
            for node, offset in offsets.items():
                self._settle(int(node), int(offset))

    def _settle(self, node: int, offset: int) -> None:
        if offset <= self._settled.get(node, 0):
            return
        try:
            self._nodes.settle(node, self._queue, offset)
        except RetryLater as error:  # tried again with the next look
            if node not in self._late:
                log.warning("node %d has not settled %s yet: %s", node, self._queue, error)
            self._late.add(node)
        else:
            self._settled[node] = offset
            self._late.discard(node)


def _storable(events: DataFrame) -> DataFrame:
    """Events without columns that a queue has no type for; what they were made of is kept."""
    variants = [
        field.name for field in events.schema.fields if field.dataType.typeName() == "variant"
    ]
    return events.drop(*variants)


def answer(action: ActionSettings, events: DataFrame, others: Mapping[str, DataFrame]) -> DataFrame:
    """What an action's transform and SQL make of a table of events; ``others`` are its joins.

    The views that this takes stay in the session of the events.
    """
    if action.transform is not None:
        events = _called(action.transform, events)
    if action.sql is None:
        return events
    for name, view in {**others, "events": events}.items():
        view.createOrReplaceTempView(name)
    return events.sparkSession.sql(action.sql)


def _called(name: str, events: DataFrame) -> DataFrame:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError("transform", f"{name}: {error}") from error
    made = found(events)
    if not isinstance(made, DataFrame):
        raise ConfigError("transform", f"{name} returned {type(made).__name__}, not a DataFrame")
    return made


def _first_words(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
