"""Chooses how a lane runs. This is the only place that decides it.

A lane reads a queue, makes something of the events and passes them on. Most of its cost is the way
of each row from Python into Java and back, and of each column in it. So a lane gets the cheapest
shape that its settings allow; :class:`LaneShape` lists the shapes with their reasons. The choice
depends only on settings, on whether Spark needs state for the action's query, and on whether a
filter is random. It does not depend on these:

- **The number of nodes.** Every shape works with several nodes: an event stays on its node.
- **Exactly once.** Outputs that write each event once know the events by queue, partition and
  offset, so those columns always are among the columns of tasks. A lane with a checkpoint has no
  such columns; its sink knows the batches by their numbers instead.
- **Several rows of one event,** which a transform may make. Tasks that deliver rows keep them
  together (``row_codec.group_rows_by_event``).

Column pruning is here as well, because the cheap shapes depend on which columns are needed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import Final

from turnlane.delivery.settings import POSITION_COLUMNS, DeliverySettings, Ordering
from turnlane.events import BASE_SCHEMA
from turnlane.formats.block_parsing import find_loaded_columns
from turnlane.intervals import MAX_COPY_TARGETS
from turnlane.outputs.api import OutputSettings
from turnlane.outputs.queue import QueueOutputSettings
from turnlane.outputs.spark import SparkSinkSettings
from turnlane.pipeline.settings import MAIN, ActionSettings, PipelineSettings
from turnlane.spark.by_reference import GROUPABLE_COLUMNS
from turnlane.spark.steps import LaneStep

EVENT_REF_COLUMNS: Final = frozenset(POSITION_COLUMNS)
"""The columns that say which event of the queue a row is."""


class LaneShape(StrEnum):
    """How a lane runs."""

    ROUTE_ROWS = "route_rows"
    """The main lane, in general: events travel through Spark, which parses them and adds their
    routes. Tasks call direct outputs and stage rows for the actions' queues. Needed if a queue
    stores parsed columns, or if a task calls an output."""
    COPY_EVENTS = "copy_events"
    """The main lane if all outputs take the raw value: Spark gets only the columns that filters
    read and the offset, and returns the routes of each offset. The node copies the events from
    queue to queue itself (``by_reference``)."""
    COPY_GROUPS = "copy_groups"
    """The same, with one row for all events of a block that look the same to the filters. Possible
    if filters read only columns with few values, such as the severity, and no filter is random."""
    DELIVER_ROWS = "deliver_rows"
    """The lane of an action, in general: events travel through Spark, which applies the transform
    and makes the payloads. Tasks deliver. The lane's cursor in the node is the truth: what a task
    cannot deliver now is not settled and comes again, so a slow event does not stop the others.
    Spark's checkpoint is removed with each run."""
    DELIVER_BY_REFERENCE = "deliver_by_reference"
    """The lane of an action whose outputs take the raw value and columns that every event has:
    Spark gets only spans of offsets, and tasks read the events themselves (``by_reference``)."""
    SPARK_SINK = "spark_sink"
    """Spark itself writes the output (``type: spark``). Its checkpoint makes files exactly once, so
    it stays, and the queue is settled after each batch of the checkpoint."""
    QUEUE_SINK = "queue_sink"
    """SQL, or a query with state, into a queue: rows cannot be settled one by one, because they do
    not say which events they come from. The checkpoint numbers the batches, and the queue's node
    takes no batch twice."""
    FOREACH_BATCH = "foreach_batch"
    """SQL, or a query with state, into any other output: as ``QUEUE_SINK``, but tasks deliver each
    batch. If a row cannot be delivered, the whole batch comes again."""

    @property
    def has_checkpoint(self) -> bool:
        """Whether Spark's checkpoint is the truth, and not the lane's cursor in the node."""
        return self in (LaneShape.SPARK_SINK, LaneShape.QUEUE_SINK, LaneShape.FOREACH_BATCH)


def choose_main_shape(
    settings: PipelineSettings, has_random_filters: Callable[[], bool]
) -> LaneShape:
    """Choose how the main lane runs; ``has_random_filters`` asks Spark, and only if it matters."""
    if build_main_steps(settings) or not can_copy_by_reference(settings):
        return LaneShape.ROUTE_ROWS
    if find_columns_for_filters(settings) <= GROUPABLE_COLUMNS and not has_random_filters():
        return LaneShape.COPY_GROUPS
    return LaneShape.COPY_EVENTS


def choose_action_shape(action: ActionSettings, *, is_stateful: bool) -> LaneShape:
    """Choose how the lane of an action runs; ``is_stateful`` says whether Spark keeps state."""
    if isinstance(action.output, SparkSinkSettings):
        return LaneShape.SPARK_SINK
    if has_own_query(action, is_stateful=is_stateful):
        # Spark's sinks for Python take no updates, and do not know a second output.
        is_plain = action.output_mode != "update" and action.delivery.failover is None
        to_queue = isinstance(action.output, QueueOutputSettings) and is_plain
        return LaneShape.QUEUE_SINK if to_queue else LaneShape.FOREACH_BATCH
    if can_deliver_by_reference(action):
        return LaneShape.DELIVER_BY_REFERENCE
    return LaneShape.DELIVER_ROWS


def has_own_query(action: ActionSettings, *, is_stateful: bool) -> bool:
    """Whether a checkpoint fits only this query of the action and no other.

    Also a checkpoint of SQL without state: the rows of SQL do not say which events they come from.
    """
    return action.sql is not None or is_stateful


def can_copy_by_reference(settings: PipelineSettings) -> bool:
    """Whether the main lane needs no more of an event than its filters read.

    There is a limit to the number of queues, which are bits of a number. And a queue that drops
    events by their severity needs the severity that parsing finds.
    """
    return (
        find_filter_columns(settings) is not None
        and len(settings.queued_actions) <= MAX_COPY_TARGETS
        and all(
            action.queue and action.queue.discard_mark is None for action in settings.queued_actions
        )
    )


def can_deliver_by_reference(action: ActionSettings) -> bool:
    """Whether the lane of an action needs nothing from Spark but a division into tasks."""
    columns = find_task_columns(action)
    return (
        action.transform is None
        and columns is not None
        and columns <= EVENT_REF_COLUMNS | set(BASE_SCHEMA.names)
        and get_payload_format(action) == "raw"
    )


# ── column pruning ──


def find_filter_columns(settings: PipelineSettings) -> frozenset[str] | None:
    """Return the words in the filters, if no other part reads parsed columns; ``None`` for all.

    The words include all columns that filters read; some words are no columns. In general the
    main lane needs every column that parsing makes, because the actions' queues store them. If all
    outputs take the raw value, only filters need parsed columns, and Spark need not even plan the
    others.
    """
    if settings.transform is not None or settings.dead_letters is not None:
        return None
    if not all(map(_needs_only_value, settings.actions)):
        return None
    text = " ".join(action.filter or "" for action in settings.actions)
    return None if "*" in text else frozenset(re.findall(r"\w+", text.lower()))


def _needs_only_value(action: ActionSettings) -> bool:
    if action.is_discard:
        return True
    if action.transform is not None or action.sql is not None:
        return False
    return get_payload_format(action) == "raw" and all(
        each.wanted_columns is not None and each.wanted_columns <= {"timestamp"}
        for each in _list_outputs(action)
    )


def find_columns_for_filters(settings: PipelineSettings) -> AbstractSet[str]:
    """Return the columns to load, from which all columns in filters can be computed.

    Only for settings with :func:`find_filter_columns`. The offset itself is no column with few
    values, so it is included if a filter reads it.
    """
    words = find_filter_columns(settings) or frozenset()
    return find_loaded_columns(settings.parse, words) | (words & {"queue", "offset"})


def find_task_columns(action: ActionSettings) -> frozenset[str] | None:
    """Return the columns beside ``payload`` that tasks need to deliver; ``None`` for all.

    Every column travels row by row into Java and from there to the task that sends. Dead letters
    need no columns: tasks read their events from the queue again.
    """
    if action.sql is not None:
        return None  # The rows belong to no queue, so nothing can be read again.
    outputs = _list_outputs(action)
    columns = set(EVENT_REF_COLUMNS)
    for each in outputs:
        if each.wanted_columns is None:
            return None
        columns |= each.wanted_columns
    if action.delivery.ordering is Ordering.KEY:
        columns.add("key")
    if get_payload_format(action) != "raw" and "raw" in map(_get_format, outputs):
        columns.add("value")  # The task makes the payloads of the raw output from it.
    return frozenset(columns)


def get_payload_format(action: ActionSettings) -> str:
    """Return the format of payloads: ``raw`` if all outputs of the action take it, else ``json``.

    Tasks can make raw payloads from the value, but they cannot make JSON.
    """
    return "raw" if set(map(_get_format, _list_outputs(action))) == {"raw"} else "json"


def _get_format(output: OutputSettings) -> str:
    return str(getattr(output, "format", "json"))


def _list_outputs(action: ActionSettings) -> Sequence[OutputSettings]:
    failover = action.delivery.failover
    return [action.output] if failover is None else [action.output, failover.output]


# ── steps ──


def build_main_steps(settings: PipelineSettings) -> list[LaneStep]:
    """Build the steps of the main lane: actions without a queue, or that try without it first."""
    return [
        LaneStep(
            action=action.name,
            source_queue=MAIN,
            output=action.output.model_dump(mode="json") if action.is_called_by_main else None,
            delivery=_apply_output_defaults(action),
            queue=None if action.is_direct else action.name,
            only_when_suspended=action.delivery.only_when_suspended,
            dead_letters=action.dead_letters,
            rereads=action.is_direct,
            version=_hash_settings(action),
        )
        for action in settings.actions
        if not action.is_discard
        if action.is_called_by_main or action.delivery.only_when_suspended
    ]


def build_lane_step(action: ActionSettings) -> LaneStep:
    """Build the only step of an action's lane."""
    return LaneStep(
        action=action.name,
        source_queue=action.name,
        output=action.output.model_dump(mode="json"),
        delivery=_apply_output_defaults(action),
        dead_letters=action.dead_letters,
        rereads=action.transform is not None or find_task_columns(action) is not None,
        version=_hash_settings(action),
    )


def _apply_output_defaults(action: ActionSettings) -> DeliverySettings:
    """Return the action's delivery settings, with the defaults of its output.

    With a second output there are none: the settings apply to both, which may differ in type.
    """
    given = action.delivery
    if given.failover is not None:
        return given
    defaults = action.output.delivery_defaults.items()
    return given.model_copy(
        update={name: value for name, value in defaults if name not in given.model_fields_set}
    )


def _hash_settings(action: ActionSettings) -> str:
    return hashlib.sha256(action.model_dump_json().encode()).hexdigest()[:12]
