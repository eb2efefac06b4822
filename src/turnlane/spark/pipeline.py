"""The pipeline: runs the main lane and a lane for every action with a queue.

``lane_shape`` decides how each lane runs; this module builds the Spark queries. In all shapes, a
query reads with ``format("turnlane")`` and options for lanes, and most write with it, too:

- Lanes **without a checkpoint** of their own. Their cursor in the node is the truth. Spark insists
  on a checkpoint, so each run gets a new one, which is removed with the run.
- Lanes **with a checkpoint**: the queue is settled after Spark has committed a batch.

Lanes start one at a time, because Spark's search for data sources and its views are shared.

:class:`PipelineRunner` replaces a pipeline with another one while events keep arriving. It checks
the new one before it stops any lane, so an invalid configuration changes nothing. Only the lanes
that depend on something that has changed are replaced (``Pipeline._get_main_settings`` and
``_get_lane_settings``). Filters belong to the main lane, outputs to the lanes of their actions.
While a lane is replaced, its events wait in their queues.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # has none
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamReader, DataStreamWriter
from pyspark.sql.types import BinaryType, StructField, StructType

from turnlane.client.node_client import RemoteNode
from turnlane.delivery.settings import GROUP_OFFSETS, PAYLOAD, ROUTES
from turnlane.errors import (
    DirectoryUnusable,
    NotAQueue,
    QueueExists,
    RetryLater,
    StorageFailed,
    TurnlaneError,
)
from turnlane.logs import get_logger
from turnlane.outputs.spark import SparkSinkSettings
from turnlane.pipeline.settings import (
    DEAD_LETTERS,
    MAIN,
    ActionSettings,
    LaneSettings,
    PipelineSettings,
)
from turnlane.spark.by_reference import SPAN_ROW_SCHEMA
from turnlane.spark.checkpoints import Checkpoints, to_spark_uri
from turnlane.spark.checks import check_pipeline
from turnlane.spark.idle_watermark import IdleWatermark
from turnlane.spark.isolation import CodeStep, EventIsolation, Events
from turnlane.spark.lane import (
    BlockedReason,
    BreakerPoller,
    FullQueuePoller,
    Lane,
    LaneLimits,
    LaneState,
    LaneStatus,
    LaneWatch,
    RunningLanes,
    StartQuery,
    WaitingEvents,
)
from turnlane.spark.lane_shape import (
    EVENT_REF_COLUMNS,
    LaneShape,
    build_lane_step,
    build_main_steps,
    can_copy_by_reference,
    choose_action_shape,
    choose_main_shape,
    find_columns_for_filters,
    find_filter_columns,
    find_task_columns,
    get_payload_format,
    has_own_query,
)
from turnlane.spark.nodes import BreakerClient, Nodes
from turnlane.spark.options import (
    WriteOptions,
    build_lane_read_options,
    build_lane_write_options,
    find_batch_wait,
    to_json,
)
from turnlane.spark.parsing import load_events
from turnlane.spark.queue_reader import QuerySettler
from turnlane.spark.routing import RouteConditions, add_payload, add_route_bits, add_routes
from turnlane.spark.row_codec import encode_nulls, list_read_columns
from turnlane.spark.session import NO_ARROW_BYTE_LIMIT, override_settings, register_sources
from turnlane.spark.sinks import (
    check_sink,
    select_sink_columns,
    with_file_batching,
    write_to_queue,
    write_to_sink,
)
from turnlane.spark.steps import LaneStep, list_required_paths
from turnlane.spark.transforms import (
    apply_action,
    apply_transform,
    drop_variants,
    get_queue_schema,
    get_user_version,
    is_deterministic,
    restore_from_queue,
    select_queue_columns,
    use_try_casts,
)

log = get_logger(__name__)

QUERY_SETTINGS: Final = {"transform", "sql", "watermark", "with_queues", "output_mode"}
"""The settings of an action on which the state of its query depends."""
EMPTY_BATCHES: Final = "spark.sql.streaming.noDataMicroBatches.enabled"
"""Spark's setting by which it runs batches without events to remove state."""
CREATE_SECONDS: Final = 10.0
"""How long a node may take to create queues before the others go on without it."""
STOP_SECONDS: Final = 30.0
"""How long lanes may take to end."""
STATS_SECONDS: Final = 5.0
"""How long to wait for the state of a node's queues."""

Read = Callable[[str], DataStreamReader | DataFrameReader]
"""Returns the reader of a queue: of a stream, or of some of its events."""
LaneSnapshot = tuple[LaneState, str | None, str | None, str | None, bool]
"""The parts of a lane's status whose changes are reported: state, reason, suspension, stall, and
whether it has collected events once: a lane that collects does so before each batch."""


class Pipeline:
    """The lanes over the queues of one endpoint.

    ``access`` are the options by which ``format("turnlane")`` reaches the nodes: the endpoint, and
    token and TLS if needed. ``prepare`` is called before a lane starts or restarts: a node that was
    away may lack queues that the lane needs. It returns the queues that no lane can use, and why.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        access: Mapping[str, str],
        spark: SparkSession,
        checkpoints: Path,
        prepare: Callable[[], Mapping[str, str]] = dict,
        *,
        running: RunningLanes | None = None,
    ) -> None:
        """``running`` has the lanes of the pipeline that this pipeline replaces."""
        self._settings = settings
        self._prepare = prepare
        self._access = dict(access)
        self._spark = spark
        self._checkpoints = checkpoints
        self._stateful_actions: frozenset[str] = frozenset()
        self._running = running or RunningLanes(spark)
        self._start_lock = self._running.start_lock

    def check(self) -> frozenset[str]:
        """Have Spark check every expression; returns the actions whose queries keep state.

        Raises ``ConfigError``, which names the action.
        """
        return check_pipeline(self._spark, self._settings)

    def start(self) -> None:
        """Start every lane. Raises ``ConfigError`` if one of them could never run."""
        self._running.replace(self.create_lanes(self.check()), 0.0)

    def create_lanes(self, stateful_actions: frozenset[str]) -> list[Lane]:
        """Create all lanes, without starting them; the argument is the result of :meth:`check`."""
        self._stateful_actions = stateful_actions
        actions = map(self._create_lane, self._settings.actions_with_lane)
        return [self._create_main_lane(), *actions]

    def stop(self, timeout: float = 30.0) -> list[str]:
        """Stop every lane; returns the lanes that have not ended in time: they end when they can.

        Uncommitted events stay in their queues. No other pipeline may run instead of this one
        before a call has returned an empty list.
        """
        return self._running.replace((), timeout)

    def status(self) -> list[LaneStatus]:
        """Return the states of the lanes."""
        return self._running.status()

    def _start_alone(self, start: StartQuery, queues: Sequence[str]) -> StartQuery:
        """Return a function that starts a query while no other lane starts one.

        It raises ``StorageFailed`` if one of ``queues``, which the query needs, cannot be used.
        """

        def start_query(run: str) -> StreamingQuery:
            with self._start_lock:
                unusable = self._prepare()
                for name in queues:
                    if name in unusable:
                        raise StorageFailed(unusable[name])
                # Makes the session active in this thread: Spark looks for data sources written in
                # Python only in the active session.
                self._spark.createDataFrame([], "nothing string")
                return start(run)

        return start_query

    @cached_property
    def _nodes(self) -> Nodes:
        return Nodes.from_options(WriteOptions.from_spark(self._access))

    @cached_property
    def _breakers(self) -> BreakerPoller:
        """Shared by all lanes. Created late: a pipeline that is only checked has no nodes."""
        return BreakerPoller(BreakerClient(self._nodes))

    # ── the main lane ──

    def _create_main_lane(self) -> Lane:
        steps = build_main_steps(self._settings)
        full_queues = FullQueuePoller(self._nodes, self._list_queues())
        blocked = BlockedReason(self._breakers, list_required_paths(steps), full_queues)
        watch = self._watch(MAIN, self._settings.lane, steps)
        start = self._start_alone(self._start_main, [MAIN, *self._list_queues()])
        isolation = self._isolate_in_main()
        return Lane(
            MAIN,
            start,
            get_suspension=blocked,
            watch=watch,
            isolation=isolation,
            settings=self._get_main_settings(steps),
        )

    def _get_main_settings(self, steps: Sequence[LaneStep]) -> object:
        """Return everything that the main lane depends on.

        Of an action whose output it does not call, that is the way to its queue.
        """
        settings = self._settings
        return (
            self._access,
            self._checkpoints,
            (settings.parse, settings.transform, get_user_version(settings.transform)),
            settings.lane,
            [
                (action.name, action.filter, action.is_discard, action.is_direct)
                for action in settings.actions
            ],
            (settings.dead_letters, settings.joined_queues),
            [step.model_copy(update={"version": ""}) for step in steps],
            (find_filter_columns(settings), can_copy_by_reference(settings)),
        )

    def _start_main(self, run: str) -> StreamingQuery:
        settings, steps = self._settings, build_main_steps(self._settings)
        options = build_lane_read_options(MAIN, run, settings.lane, steps, self._list_queues())
        reader = self._read(MAIN, settings.lane).options(**options)

        def has_random_filters() -> bool:
            return not is_deterministic(self._select_route_bits(reader, grouped=True))

        shape = choose_main_shape(settings, has_random_filters)
        if shape is not LaneShape.ROUTE_ROWS:
            return self._start_copying(reader, run, grouped=shape is LaneShape.COPY_GROUPS)
        rows = self._route(self._load_main(reader))
        if any(step.output is not None for step in steps):
            is_raw = find_filter_columns(settings) is not None
            rows = add_payload(rows, "raw" if is_raw else "json")
        rows = select_queue_columns(rows, settings)
        return self._start_lane_query(rows, MAIN, run, settings.lane, steps)

    def _load_main(self, reader: DataStreamReader | DataFrameReader) -> DataFrame:
        """Load events of the main queue as actions see them, with the columns that they need."""
        words = find_filter_columns(self._settings)
        wanted = None if words is None else words | set(list_read_columns())
        return apply_transform(load_events(reader, self._settings.parse, wanted), self._settings)

    def _route(self, events: DataFrame) -> DataFrame:
        settings = self._settings
        return add_routes(events, settings.actions, settings.dead_letters, settings.joined_queues)

    def _isolate_in_main(self) -> EventIsolation | None:
        """Return how to find events that the transform or a filter cannot handle."""
        settings = self._settings
        if not settings.has_code:
            return None

        def step(name: str, apply: Callable[[DataFrame], DataFrame]) -> CodeStep:
            def build(events: Events) -> DataFrame:
                with self._start_lock:
                    return apply(self._load_main(self._read_events(MAIN, events)))

            return CodeStep(name, build)

        steps = [
            step(f"the filter of {action.name}", partial(_select_condition, action.filter))
            for action in settings.actions
            if action.filter is not None
        ]
        if settings.transform is not None:
            steps.insert(0, step(f"the transform {settings.transform}", lambda events: events))
        # The columns of payloads and queues: those that the lane does not need are not computed.
        whole = step("the lane", lambda events: select_queue_columns(self._route(events), settings))
        letters = LaneStep(action=MAIN, source_queue=MAIN, dead_letters=DEAD_LETTERS)
        limit = settings.lane.max_events
        return EventIsolation(self._nodes, [MAIN], [*steps, whole], letters, limit)

    def _start_copying(
        self, reader: DataStreamReader, run: str, *, grouped: bool
    ) -> StreamingQuery:
        """Start the main lane by reference: see ``by_reference``."""
        settings = self._settings
        rows = self._select_route_bits(reader, grouped=grouped)
        routes = RouteConditions.from_actions(settings.actions, joined=settings.joined_queues)
        copies = to_json(list(routes.queued))
        with override_settings(self._spark, NO_ARROW_BYTE_LIMIT):
            return self._start_lane_query(rows, MAIN, run, settings.lane, (), copies=copies)

    def _select_route_bits(self, reader: DataStreamReader, *, grouped: bool) -> DataFrame:
        """Return the offsets of events, or of groups of them, with their routes as bits."""
        settings = self._settings
        refs = [StructField(GROUP_OFFSETS, BinaryType())] if grouped else []
        wanted = find_columns_for_filters(settings) | EVENT_REF_COLUMNS
        reader = reader.option("grouped", grouped)
        events = load_events(reader, settings.parse, wanted, refs)
        routed = add_route_bits(events, settings.actions, settings.joined_queues)
        columns = [*sorted(EVENT_REF_COLUMNS), *(each.name for each in refs)]
        return routed.select(*columns, ROUTES)

    def _list_queues(self) -> list[str]:
        """Return the queues that the main lane writes to."""
        return [action.name for action in self._settings.queued_actions]

    # ── the lanes of actions ──

    def _create_lane(self, action: ActionSettings) -> Lane:
        is_stateful = action.name in self._stateful_actions
        shape = choose_action_shape(action, is_stateful=is_stateful)
        checkpoints = Checkpoints(self._checkpoints, action.name)
        queues = [action.name, *action.with_queues]
        if not shape.has_checkpoint:
            start = self._start_alone(partial(self._start_delivering, action, shape), queues)
            steps = [build_lane_step(action)]
            blocked = BlockedReason(self._breakers, list_required_paths(steps))
            watch = self._watch(action.name, action.lane, steps)
            isolation = self._isolate_in_action(action)
            return Lane(
                action.name,
                start,
                checkpoints.on_progress,
                blocked,
                watch,
                isolation=isolation,
                settings=self._get_lane_settings(action),
            )
        action = with_file_batching(action)
        settler = QuerySettler(self._nodes, action.name)
        idle = self._create_idle_watermark(action)

        def on_progress(progress: StreamingQueryProgress) -> None:
            # Spark does not say which of several queues a progress is of: their readers settle
            # them, a batch later.
            if not action.with_queues:
                settler.on_progress(progress)
            if idle is not None:
                idle.on_progress(progress)
            checkpoints.on_progress(progress)

        start = partial(self._start_with_checkpoint, action, shape, checkpoints)
        watch = self._watch(action.name, action.lane, has_checkpoint=True)
        start = self._start_alone(start, queues)
        isolation = self._isolate_in_action(action)
        return Lane(
            action.name,
            start,
            on_progress,
            watch=watch,
            isolation=isolation,
            on_poll=None if idle is None else idle.check,
            settings=self._get_lane_settings(action),
            queues=queues,
        )

    def _create_idle_watermark(self, action: ActionSettings) -> IdleWatermark | None:
        """Return how the watermark of an action moves on by the clock, if it does."""
        if not self._can_move_watermark(action) or action.idle_after is None:
            return None
        return IdleWatermark(
            self._spark,
            self._nodes,
            [action.name, *action.with_queues],
            self._get_request_file(action),
            idle_after=action.idle_after,
            delay=action.watermark or 0.0,
            trigger=action.lane.trigger,
        )

    def _get_request_file(self, action: ActionSettings) -> Path:
        """Return the file by which the lane of an action asks its reader for a batch."""
        return self._checkpoints / f"{action.name}.request"

    def _can_move_watermark(self, action: ActionSettings) -> bool:
        """Whether rows wait for the watermark of an action, and Spark can move it without events.

        With other output modes than ``append``, no row waits for it.
        """
        is_append = action.sql is None or action.output_mode == "append"
        has_empty_batches = self._spark.conf.get(EMPTY_BATCHES, "true") == "true"
        return action.name in self._stateful_actions and is_append and has_empty_batches

    def _get_lane_settings(self, action: ActionSettings) -> object:
        """Return everything that the lane of an action depends on.

        The main lane evaluates the filter. The settings of a queue that exists do not change.
        """
        own = action.model_copy(update={"filter": None, "queue": None})
        parse = self._settings.parse
        return (
            self._access,
            self._checkpoints,
            own,
            # Some defaults depend on the output.
            (build_lane_step(own), with_file_batching(own).lane),
            get_user_version(action.transform),
            (self._queue_schema, parse and parse.format),
            action.name in self._stateful_actions,
            self._compute_fingerprint(action),
            [name in self._list_queues() for name in action.with_queues],
        )

    @cached_property
    def _queue_schema(self) -> StructType:
        """The columns of the actions' queues."""
        return get_queue_schema(self._spark, self._settings)

    def _isolate_in_action(self, action: ActionSettings) -> EventIsolation | None:
        """Return how to find events that the transform or SQL of an action cannot handle."""
        if action.dead_letters is None or (action.transform is None and action.sql is None):
            return None

        def step(name: str, changed: ActionSettings, *, is_last: bool = False) -> CodeStep:
            def build(events: Events) -> DataFrame:
                with self._start_lock:
                    read = partial(self._read_events, events=events)
                    if is_last and not isinstance(action.output, SparkSinkSettings):
                        return self._make_payloads(changed, read)
                    rows = self._apply_action(changed, read)
                    return select_sink_columns(rows, action.output) if is_last else rows

            return CodeStep(name, build)

        steps = [step("the output's columns", action, is_last=True)]
        if action.sql is not None:
            steps.insert(0, step("the sql", action))
        if action.transform is not None:
            without_sql = action.model_copy(update={"sql": None})
            steps.insert(0, step(f"the transform {action.transform}", without_sql))
        queues = [action.name, *action.with_queues]
        letters = build_lane_step(action)
        return EventIsolation(self._nodes, queues, steps, letters, action.lane.max_events)

    def _watch(
        self,
        queue: str,
        settings: LaneSettings,
        steps: Sequence[LaneStep] = (),
        *,
        has_checkpoint: bool = False,
    ) -> LaneWatch:
        """Return how the lane of a queue notices that it has stalled."""
        wanted, age = find_batch_wait(settings, steps)
        patience = settings.stall_timeout + settings.trigger
        limits = LaneLimits(wanted, age, patience, can_interrupt=not has_checkpoint)
        waiting = WaitingEvents(self._nodes, queue, has_checkpoint=has_checkpoint)
        watch = LaneWatch(limits, waiting.count, partial(self._count_stall, queue))
        return watch if has_checkpoint else replace(watch, count_settled=waiting.count_settled)

    def _count_stall(self, queue: str) -> None:
        """Have every node that answers count a stall of a lane."""
        calls = {n: partial(self._nodes[n].report_stall, queue) for n in range(self._nodes.count)}
        try:
            self._nodes.ask_all(f"stalled {queue}", calls, 0.0)
        except TurnlaneError as error:  # A node of an older version cannot count it.
            log.info("lane.stall_not_counted", lane=queue, error=error)

    def _start_delivering(
        self, action: ActionSettings, shape: LaneShape, run: str
    ) -> StreamingQuery:
        """Start a lane whose cursor in the node is the truth."""
        steps = [build_lane_step(action)]
        options = build_lane_read_options(action.name, run, action.lane, steps)
        reader = self._read(action.name, action.lane).options(**options)
        if shape is LaneShape.DELIVER_BY_REFERENCE:
            columns = find_task_columns(action)
            assert columns is not None
            spans = reader.schema(SPAN_ROW_SCHEMA).option("byPlace", value=True).load()
            reads = to_json(sorted(columns))
            return self._start_lane_query(spans, action.name, run, action.lane, steps, reads=reads)
        rows = self._make_payloads(action, lambda _: reader)
        return self._start_lane_query(rows, action.name, run, action.lane, steps)

    def _make_payloads(self, action: ActionSettings, read: Read) -> DataFrame:
        """Return the rows of an action's lane as tasks deliver them."""
        columns, payload_format = find_task_columns(action), get_payload_format(action)
        reads_all = columns is None or payload_format != "raw" or action.transform is not None
        events = self._apply_action(
            action, read, None if columns is None or reads_all else columns | {"value"}
        )
        rows = drop_variants(add_payload(events, payload_format))
        if columns is not None and columns <= set(rows.columns):
            # If a column is missing, the task reports it.
            rows = rows.select(PAYLOAD, *sorted(columns))
        return rows

    def _start_with_checkpoint(
        self, action: ActionSettings, shape: LaneShape, checkpoints: Checkpoints, run: str
    ) -> StreamingQuery:
        """Start a lane whose checkpoint is the truth: it continues where the last run ended."""
        del run
        # Spark does not say which of several queues a progress is of, so their readers settle them.
        consume = bool(action.with_queues)
        read = partial(self._read_with_checkpoint, action=action, consume=consume)
        rows = self._apply_action(action, read)
        sink = action.output if isinstance(action.output, SparkSinkSettings) else None
        writes_files = sink is not None and bool(sink.place)
        checkpoint = checkpoints.prepare(self._compute_fingerprint(action), stays=writes_files)
        if sink is not None:
            check_sink(self._spark, sink, checkpoint)
            writer = write_to_sink(rows, action)
        elif shape is LaneShape.QUEUE_SINK:
            writer = write_to_queue(rows, action.output)
        else:
            writer = rows.writeStream.foreachBatch(partial(self._deliver_batch, action))
        writer = writer.outputMode(action.output_mode if action.sql else "append")
        return self._start_query(writer, action.name, action.lane, checkpoint)

    def _deliver_batch(self, action: ActionSettings, rows: DataFrame, batch: int) -> None:
        del batch
        # Dead letters are not read from the queue again: the rows may be of events of long ago.
        step = build_lane_step(action).model_copy(update={"rereads": False})
        options = {**self._access, "steps": to_json([step])}
        payloads = add_payload(rows, get_payload_format(action))
        encode_nulls(payloads).write.format("turnlane").options(**options).mode("append").save()

    def _apply_action(
        self,
        action: ActionSettings,
        read: Read,
        columns: AbstractSet[str] | None = None,
    ) -> DataFrame:
        """Return the rows of an action's lane, made of all columns of its queue or of some."""
        schema = self._queue_schema
        if columns is not None and columns <= set(schema.names):
            schema = _select_fields(schema, columns)
        source = read(action.name).schema(schema).load()
        events = restore_from_queue(source, self._settings)
        return apply_action(action, events, partial(self._read_joined_queue, read))

    def _read_joined_queue(self, read: Read, name: str) -> DataFrame:
        """Read a queue that an action's SQL joins with. Only this reader settles it."""
        reader = read(name)
        if name not in self._list_queues():
            return reader.load()
        return restore_from_queue(reader.schema(self._queue_schema).load(), self._settings)

    def _compute_fingerprint(self, action: ActionSettings) -> str:
        """Return the name of an action's checkpoint: another name starts at the queue's cursor.

        It depends on the query if the query has state or SQL, and on the place of a sink's files,
        which know their batches by the numbers of the checkpoint.
        """
        parts: list[Any] = []
        if isinstance(action.output, SparkSinkSettings):
            parts += [action.output.format, action.output.place]
        if has_own_query(action, is_stateful=action.name in self._stateful_actions):
            parse = self._settings.parse
            parts += [parse and parse.model_dump_json(), self._settings.transform]
            parts.append(action.model_dump_json(include=QUERY_SETTINGS))
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

    # ── reading and writing ──

    def _read_with_checkpoint(
        self, queue: str, action: ActionSettings, *, consume: bool
    ) -> DataStreamReader:
        # `skipSettled`, because a lane without a checkpoint may have read this queue before: it
        # settles out of order, and settled events must not come back. Still, a batch that is
        # repeated after the driver died has the same rows, as state and sinks require: it is
        # settled only after Spark has noted that it is done, and no other client settles events of
        # a lane's queue, except to remove them.
        reader = self._read(queue, action.lane).options(skipSettled=True, consume=consume)
        if action.idle_after is None or not self._can_move_watermark(action):
            return reader
        # A joined queue need not have a batch of its own.
        request = self._get_request_file(action)
        return reader.option("request", str(request)) if queue == action.name else reader

    def _read_events(self, queue: str, events: Events) -> DataFrameReader:
        """Read some events as they are now, to find the one that makes a lane fail."""
        # Makes the session active in this thread, as in `_start_alone`.
        self._spark.createDataFrame([], "nothing string")
        options = {
            **self._access,
            "queue": queue,
            "includeHeaders": "true",
            "skipSettled": "true",
            "failOnDataLoss": "false",
            "spans": to_json([each[1:] for each in events if each.queue == queue]),
        }
        return self._spark.read.format("turnlane").options(**options)

    def _read(self, queue: str, settings: LaneSettings) -> DataStreamReader:
        options = {
            **self._access,
            "queue": queue,
            "includeHeaders": "true",
            "consume": "false",
            # Events that people have settled or purged are no loss: the lane continues after them.
            "failOnDataLoss": "false",
            "maxOffsetsPerTrigger": str(settings.max_events),
            "minOffsetsPerTrigger": str(settings.min_events),
            "maxTriggerDelay": f"{settings.max_age}s",
            "workers": str(self._get_workers(settings)),
            "workerMinimumEvents": str(settings.worker_minimum_events),
        }
        return self._spark.readStream.format("turnlane").options(**options)

    def _get_workers(self, settings: LaneSettings) -> int:
        """Return how many tasks a lane may have at a time."""
        return settings.get_workers(self._spark.sparkContext.defaultParallelism)

    def _start_lane_query(
        self,
        rows: DataFrame,
        lane: str,
        run: str,
        settings: LaneSettings,
        steps: Sequence[LaneStep],
        **more: str,
    ) -> StreamingQuery:
        """Start the query of a lane without a checkpoint of its own."""
        workers = self._get_workers(settings)
        steps = [step.model_copy(update={"workers": workers}) for step in steps]
        options = {**self._access, **build_lane_write_options(lane, run, steps), **more}
        writer = encode_nulls(rows).writeStream.format("turnlane").options(**options)
        runs = self._checkpoints / "runs" / lane
        shutil.rmtree(runs, ignore_errors=True)
        return self._start_query(writer, lane, settings, runs / run)

    def _start_query(
        self, writer: DataStreamWriter, name: str, settings: LaneSettings, checkpoint: Path
    ) -> StreamingQuery:
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", name)
        return (
            writer.queryName(name)
            .option("checkpointLocation", to_spark_uri(checkpoint))
            .trigger(processingTime=f"{settings.trigger} seconds")
            .start()
        )


def _select_condition(condition: str, events: DataFrame) -> DataFrame:
    return events.select(F.expr(use_try_casts(condition)))


def _select_fields(schema: StructType, names: AbstractSet[str]) -> StructType:
    return StructType([field for field in schema.fields if field.name in names])


# ── replacing a running pipeline ──


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline to run, and the nodes to run it on."""

    settings: PipelineSettings
    queues: Mapping[str, Mapping[str, Any]]
    """The queues that the nodes must have, with their settings."""
    access: Mapping[str, str]
    """The options by which ``format("turnlane")`` reaches the nodes."""
    checkpoints: Path


class LanesStillRunning(RetryLater):
    """Lanes that were stopped have not ended yet."""

    def __init__(self, names: Sequence[str], troubles: Sequence[str] = ()) -> None:
        lanes = ("lane " if len(names) == 1 else "lanes ") + ", ".join(names)
        have = "has" if len(names) == 1 else "have"
        why = "".join(f"; {trouble}" for trouble in troubles)
        super().__init__(f"{lanes} of the earlier configuration {have} not ended yet{why}")


class PipelineRunner:
    """Runs one plan at a time. ``start`` and ``stop`` may be called from any thread."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._plan: PipelinePlan | None = None
        """The newest plan; its lanes may not all run yet."""
        self._is_complete = False
        """Whether all lanes of the plan run, and no other lanes."""
        self._lanes = RunningLanes(spark)
        self._reported: dict[str, LaneSnapshot] = {}
        self._lock = threading.RLock()
        """Held while lanes are started or stopped."""

    @property
    def plan(self) -> PipelinePlan | None:
        """The plan that runs; ``None`` while its lanes are replaced, and once they are stopped."""
        return self._plan if self._is_complete else None

    def start(self, plan: PipelinePlan) -> list[str]:
        """Replace the running plan by this plan; returns the lanes that have started.

        The plan is checked first: if it cannot run, ``ConfigError`` is raised and the running plan
        continues. A lane that is the same in both plans continues. The others start at the cursors
        of their queues, so uncommitted events come again. No event is left out, and none gets into
        a queue twice; an output may get a batch again.

        Raises ``LanesStillRunning`` if earlier lanes do not end in time. They were stopped, and no
        lane runs instead of them: try again.
        """
        with self._lock:
            register_sources(self._spark)
            pipeline = Pipeline(
                plan.settings,
                plan.access,
                self._spark,
                plan.checkpoints,
                self._create_missing_queues,
                running=self._lanes,
            )
            stateful_actions = pipeline.check()
            create_missing_queues(plan)
            lanes = pipeline.create_lanes(stateful_actions)
            unchanged = self._lanes.find_unchanged(lanes)
            earlier, self._plan, self._is_complete = self._plan or plan, plan, False
            for name in self._reported.keys() - unchanged:
                del self._reported[name]
            left = self._lanes.replace(lanes, STOP_SECONDS)
            if left:
                raise LanesStillRunning(left, list_queue_troubles(earlier))
            self._is_complete = True
            return [lane.name for lane in lanes if lane.name not in unchanged]

    def _create_missing_queues(self) -> Mapping[str, str]:
        """Create the queues of the newest plan, which may be newer than a lane that starts."""
        return {} if self._plan is None else create_missing_queues(self._plan)

    def stop(self, timeout: float = STOP_SECONDS) -> list[str]:
        """Stop all lanes; returns the lanes that have not ended in time.

        Uncommitted events stay in their queues.
        """
        with self._lock:
            self._is_complete = False
            self._reported.clear()
            return self._lanes.replace((), timeout)

    def abandon(self, timeout: float = 30.0) -> None:
        """Stop all lanes after Spark has died: their queries are gone, and every call fails."""
        with contextlib.suppress(Py4JError, OSError):
            self.stop(timeout)

    def status(self) -> list[LaneStatus]:
        """Return the states of the lanes."""
        return self._lanes.status()

    def list_changes(self) -> Iterator[LaneStatus]:
        """Yield the lanes whose state has changed since the last call."""
        for each in self.status():
            before = self._reported.get(each.name)
            has_collected = each.collecting is not None or (before is not None and before[4])
            now = (each.state, each.reason, each.suspended, each.stalled, has_collected)
            fails_again = (
                before is not None
                and before[:2] == (LaneState.WAITING, each.reason)
                and each.state in (LaneState.STARTING, LaneState.WAITING)
            )
            if before != now and not fails_again:
                self._reported[each.name] = now
                yield each


def create_missing_queues(plan: PipelinePlan) -> dict[str, str]:
    """Create the queues that are missing, on each node that answers.

    Returns the queues that a node cannot create or open, and why: lanes that do not need them can
    run. Existing queues are not changed. Raises other errors of the nodes, and ``TransportDown`` if
    no node answers.
    """
    nodes = Nodes.from_options(WriteOptions.from_spark(plan.access))
    calls = {n: partial(_create_queues, nodes[n], plan.queues) for n in range(nodes.count)}
    answers = nodes.ask_all("queues", calls, CREATE_SECONDS)
    return {name: why for unusable in answers.values() for name, why in unusable.items()}


def _create_queues(node: RemoteNode, queues: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    existing = node.queues()
    unusable: dict[str, str] = {}
    for name, knobs in queues.items():
        if name in existing:
            continue
        try:
            node.create_for_action(name, **knobs)
        except (
            QueueExists
        ):  # Another pipeline has created it just now, or this token does not see it.
            log.warning("queue.exists_with_other_settings", node=node.place, queue=name)
        except (StorageFailed, DirectoryUnusable, NotAQueue) as error:
            unusable[name] = str(error)
            log.warning("queue.unusable", node=node.place, queue=name, error=error)
        else:
            log.info("queue.created", node=node.place, queue=name)
    return unusable


def list_queue_troubles(plan: PipelinePlan) -> list[str]:
    """Return the troubles of a plan's queues that nodes report: lanes may wait for them."""
    nodes = Nodes.from_options(WriteOptions.from_spark(plan.access))
    calls = {n: nodes[n].stats for n in range(nodes.count)}
    try:
        answers = nodes.ask_all("troubles", calls, STATS_SECONDS)
    except TurnlaneError as error:
        return [str(error)]
    return [
        f"queue {name} cannot write to its disk: {stats['trouble']}"
        for answer in answers.values()
        for name, stats in answer.items()
        if name in plan.queues and stats.get("trouble")
    ]
