"""The metrics of a node for Prometheus, under the prefix ``turnlane_``.

This module counts nothing. A scrape reads the numbers that queues, leases, commits, breakers,
inputs and table managers keep for themselves.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from turnlane.delivery.breaker import BreakerState
from turnlane.delivery.destination import DestinationStatus
from turnlane.errors import TurnlaneError
from turnlane.ledger import Outcome
from turnlane.logs import get_logger
from turnlane.node.breakers import ActionBreaker, Breakers, TaskActivity
from turnlane.node.node import Node
from turnlane.node.tables import Tables
from turnlane.queues.api import Stats
from turnlane.table.leader_state import LagTotal
from turnlane.table.manager import Manager
from turnlane.table.queue import TableQueue

log = get_logger(__name__)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

DROP_REASONS: Final = [outcome.value for outcome in Outcome if outcome.is_drop]

DEPTH_CACHE_SECONDS: Final = 15.0
"""For how long the depth of a table is not read again: the database has to count its rows."""

TABLE_LABELS: Final = ("queue", "shard")

Some = TypeVar("Some")

Family = GaugeMetricFamily | CounterMetricFamily


class MetricRow(NamedTuple, Generic[Some]):
    """A metric, and the function that reads its value from an object; ``None``: no value."""

    name: str
    help: str
    value: Callable[[Some], float | None]


def create_gauge(name: str, words: str, *labels: str) -> GaugeMetricFamily:
    """Return a gauge without values."""
    return GaugeMetricFamily(f"turnlane_{name}", words, labels=labels)


def create_counter(name: str, words: str, *labels: str) -> CounterMetricFamily:
    """Return a counter without values."""
    return CounterMetricFamily(f"turnlane_{name}", words, labels=labels)


def build_metrics(
    gauges: Iterable[MetricRow[Some]],
    counters: Iterable[MetricRow[Some]],
    labels: Sequence[str],
    seen: Sequence[tuple[Sequence[str], Some]],
) -> Iterator[Metric]:
    """Yield the metrics of rows, with one value for each object in ``seen`` and its labels."""
    for row in gauges:
        yield _add_values(create_gauge(row.name, row.help, *labels), row, seen)
    for row in counters:
        yield _add_values(create_counter(row.name, row.help, *labels), row, seen)


def _add_values(
    metric: Family, row: MetricRow[Some], seen: Sequence[tuple[Sequence[str], Some]]
) -> Metric:
    for labels, each in seen:
        value = row.value(each)
        if value is not None:
            metric.add_metric(labels, value)
    return metric


def merge_metrics(metrics: Iterable[Metric]) -> list[Metric]:
    """Return the metrics in their order, merged by name even if their labels differ.

    Prometheus rejects two metrics with the same name.
    """
    found: dict[str, Metric] = {}
    for metric in metrics:
        known = found.setdefault(metric.name, metric)
        if known is not metric:
            known.samples.extend(metric.samples)
    return list(found.values())


# ── actions ──────────────────────────────────────────────────────────────────────────────────────


class _ActionSnapshot(NamedTuple):
    """The state of an action at one moment, as its tasks have reported it."""

    action: str
    breaker: ActionBreaker
    status: DestinationStatus
    activity: TaskActivity

    def total(self, name: str) -> int:
        return self.status.totals.get(name, 0)


_ACTION_METRICS_GAUGES: Final[tuple[MetricRow[_ActionSnapshot], ...]] = (
    MetricRow(
        "queue_workers_active", "Tasks that deliver at this moment.", lambda s: s.activity.tasks
    ),
    MetricRow("queue_preparers_active", "Blocks being prepared.", lambda s: s.activity.preparing),
    MetricRow("queue_senders_active", "Threads that are sending.", lambda s: s.activity.sending),
    MetricRow("queue_sends_inflight", "Sends under way.", lambda s: s.activity.sending),
    MetricRow(
        "queue_export_latency_ewma_seconds",
        "How long a send takes of late.",
        lambda s: s.status.latency,
    ),
    MetricRow(
        "queue_backoff_seconds", "For how long nothing is to be sent.", lambda s: s.status.wait
    ),
)
_ACTION_METRICS_COUNTERS: Final[tuple[MetricRow[_ActionSnapshot], ...]] = (
    # It rarely changes, and Prometheus clients accept this name only for a counter.
    MetricRow(
        "queue_workers",
        "Tasks that the lane may have at a time.",
        lambda s: s.breaker.workers or s.breaker.most_tasks,
    ),
    MetricRow("circuit_breaker_open", "Times the breaker has opened.", lambda s: s.status.opened),
    MetricRow(
        "circuit_breaker_rejected", "Permits that were refused.", lambda s: s.status.rejected
    ),
    MetricRow("queue_retry", "Sends of what had been sent before.", lambda s: s.total("retries")),
    MetricRow(
        "queue_retry_success", "Sends again that went well.", lambda s: s.total("retry_successes")
    ),
    MetricRow("action_sends", "Sends.", lambda s: s.total("sends")),
    MetricRow("action_send_failures", "Sends that failed.", lambda s: s.total("failures")),
    MetricRow("action_delivered_events", "Events delivered.", lambda s: s.total("delivered")),
    MetricRow("action_dead_events", "Events that became dead letters.", lambda s: s.total("dead")),
    MetricRow(
        "action_rejected_records",
        "Records inside of delivered events that the destination refused for good.",
        lambda s: s.total("rejected"),
    ),
    MetricRow("action_kept_events", "Events left for another time.", lambda s: s.total("kept")),
)


def collect_action_metrics(breakers: Breakers) -> Iterator[Metric]:
    """Yield the present metrics of all actions."""
    seen = [
        _ActionSnapshot(action, breaker, breaker.gate.get_status(), breaker.activity())
        for action, breaker in breakers.all().items()
    ]
    yield from build_metrics(
        _ACTION_METRICS_GAUGES,
        _ACTION_METRICS_COUNTERS,
        ["action"],
        [([each.action], each) for each in seen],
    )
    yield _states(seen)
    yield _retry_failures(seen)


def _states(seen: list[_ActionSnapshot]) -> Metric:
    words = "1 for the state that the breaker is in."
    metric = create_gauge("circuit_breaker_state", words, "action", "state")
    for each in seen:
        for state in BreakerState:
            metric.add_metric([each.action, state], float(each.status.state is state))
    return metric


def _retry_failures(seen: list[_ActionSnapshot]) -> Metric:
    words = "Sends again that failed, by what went wrong."
    metric = create_counter("queue_retry_failure", words, "action", "error_type")
    for each in seen:
        for error, count in each.status.retry_failures.items():
            metric.add_metric([each.action, error], count)
    return metric


# ── queues, commits and inputs ───────────────────────────────────────────────────────────────────


class InputCounters(Protocol):
    """The counters of an input; see ``turnlane.inputs.api.Counters``."""

    events: int
    bytes: int
    refused: int
    invalid: int
    dropped: int
    connections: int


class LabelledSettings(Protocol):
    """Settings with a label."""

    @property
    def label(self) -> str:
        """The label of the input."""


class CountedInput(Protocol):
    """The parts of an input that its metrics need."""

    @property
    def settings(self) -> LabelledSettings:
        """The settings, which have the label."""

    @property
    def counters(self) -> InputCounters:
        """The counters."""


_GAUGES: Final[tuple[MetricRow[Stats], ...]] = (
    MetricRow("queue_size", "Events that count against the queue's bound.", lambda s: s.size),
    MetricRow("queue_bytes", "Bytes that count against the queue's bound.", lambda s: s.bytes),
    MetricRow("queue_max_size", "The most events the queue holds.", lambda s: s.max_size),
    MetricRow("queue_max_bytes", "The most bytes the queue holds.", lambda s: s.max_bytes),
    MetricRow(
        "queue_utilization_ratio",
        "How full the queue is, 0 to 1, by whichever bound is nearer.",
        lambda s: s.utilization,
    ),
    MetricRow(
        "queue_disk_available_bytes",
        "What the queue's file system still has free.",
        lambda s: s.disk_available_bytes,
    ),
    MetricRow(
        "queue_pending_events",
        "Events waiting, or handed out and not yet settled.",
        lambda s: s.ledger.pending,
    ),
    MetricRow(
        "queue_in_flight_events",
        "Events handed out and not yet settled.",
        lambda s: s.in_flight,
    ),
    MetricRow(
        "queue_blocked_publishers",
        "Publishers that wait for room, or above a delay mark.",
        lambda s: s.blocked_publishers,
    ),
    MetricRow(
        "fastqueue_inmemory_blocks",
        "Blocks held in memory and not handed out.",
        lambda s: s.memory_blocks,
    ),
    MetricRow("fastqueue_disk_bytes", "Bytes of chunk files.", lambda s: s.disk_bytes),
)

_COUNTERS: Final[tuple[MetricRow[Stats], ...]] = (
    MetricRow("queue_push", "Publish calls that put something into the queue.", lambda s: s.pushes),
    MetricRow(
        "queue_accepted_events",
        "Events taken off a publisher's hands since the queue was created.",
        lambda s: s.ledger.accepted,
    ),
    MetricRow(
        "queue_delivered_events",
        "Events settled as delivered since the queue was created.",
        lambda s: s.ledger.delivered,
    ),
    MetricRow(
        "queue_dead_events",
        "Events settled as undeliverable since the queue was created.",
        lambda s: s.ledger.dead,
    ),
    MetricRow(
        "queue_retry",
        "By queue: batches given back to be read again. By action: sends of what was sent before.",
        lambda s: s.releases,
    ),
    MetricRow("queue_full", "Times a publisher found the queue full.", lambda s: s.full_waits),
    MetricRow("queue_disk_full", "Times a write found no space.", lambda s: s.disk_full),
    MetricRow("queue_disk_errors", "Other failures to write or sync.", lambda s: s.disk_errors),
    MetricRow("fastqueue_sync", "Syncs of chunk files.", lambda s: s.syncs),
    MetricRow("fastqueue_meta_sync", "Syncs of the journal.", lambda s: s.meta_syncs),
    MetricRow("fastqueue_chunk_rotations", "Chunk files begun.", lambda s: s.rotations),
    MetricRow(
        "fastqueue_inmemory_flushes",
        "Times blocks went from memory to the disk.",
        lambda s: s.flushes,
    ),
    MetricRow("fastqueue_quarantined", "Unreadable pieces set aside.", lambda s: s.quarantined),
)

_INPUT_COUNTERS: Final = (
    ("events", "Events taken into a queue."),
    ("bytes", "Bytes received."),
    ("refused", "Requests or connections that were told to come back later."),
    ("invalid", "Requests or messages that made no sense."),
    ("dropped", "Events lost for want of room."),
)


class NodeCollector(Collector):
    """Collects a node's metrics when it is scraped. Safe to use from any thread."""

    def __init__(self, node: Node, inputs: Sequence[CountedInput] = ()) -> None:
        self._node = node
        self._inputs = inputs

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics."""
        yield from merge_metrics([*self._of_queues(), *collect_action_metrics(self._node.breakers)])
        yield from self._of_node()
        yield from self._of_inputs()

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the metrics depend on the queues, and no other collector has them."""
        return ()

    def _of_queues(self) -> Iterator[Metric]:
        queues = sorted(self._node.queues().items())
        stats = [queue.stats() for _, queue in queues]
        yield from build_metrics(
            _GAUGES, _COUNTERS, ["queue"], [([each.name], each) for each in stats]
        )
        dropped = create_counter("queue_dropped", "Events dropped, by reason.", "queue", "reason")
        for each in stats:
            for reason in DROP_REASONS:
                dropped.add_metric([each.name, reason], each.ledger.dropped.get(reason, 0))
        yield dropped
        failing = create_gauge(
            "queue_disk_failing", "1 if the last write to disk has failed.", "queue"
        )
        for name, queue in queues:
            if queue.stored_id:
                failing.add_metric([name], float(bool(queue.storage_failure)))
        yield failing

    def _of_node(self) -> Iterator[Metric]:
        node = self._node
        for metric, value in (
            (
                create_gauge("leases_active", "Batches in the hands of remote consumers."),
                len(node.leases),
            ),
            (create_counter("leases_expired", "Leases that ran out."), node.leases.expired),
            (create_counter("commits", "Commits carried out."), node.commits.total),
            (
                create_gauge(
                    "dead_letters_waiting", "Dead letters in memory: their queue is full."
                ),
                sum(node.commits.overflow.events().values()),
            ),
            (
                create_counter("commits_repeated", "Commits that had been carried out before."),
                node.commits.repeated,
            ),
        ):
            metric.add_metric([], value)
            yield metric
        words = "Dead letters that memory could not keep either: the oldest of those that waited."
        dropped = create_counter("dead_letters_dropped", words, "queue")
        for name, events in sorted(node.commits.overflow.dropped.items()):
            dropped.add_metric([name], events)
        yield dropped

    def _of_inputs(self) -> Iterator[Metric]:
        for field, words in _INPUT_COUNTERS:
            yield self._by_input(create_counter(f"input_{field}", words, "input"), field)
        connections = create_gauge("input_connections", "Connections open at this moment.", "input")
        yield self._by_input(connections, "connections")

    def _by_input(self, metric: Family, field: str) -> Metric:
        # Several inputs may have the same label, but a series may exist only once.
        totals = Counter[str]()
        for each in self._inputs:
            totals[each.settings.label] += getattr(each.counters, field)
        for label, total in totals.items():
            metric.add_metric([label], total)
        return metric


# ── queue tables ─────────────────────────────────────────────────────────────────────────────────

_TABLE_METRICS_GAUGES: Final[tuple[MetricRow[Manager], ...]] = (
    MetricRow("table_leading", "1 if this node leads the shard.", lambda m: float(m.can_fire)),
    MetricRow("table_window_events", "Events that wait in memory.", lambda m: m.waiting),
    MetricRow(
        "table_in_flight_events", "Events that are fired and not settled.", lambda m: m.in_flight
    ),
    MetricRow(
        "table_window_fill_ratio",
        "How full the window is, 0 to 1.",
        lambda m: m.waiting / m.store.definition.settings.window_events,
    ),
    MetricRow(
        "table_receivers", "Receivers of this node, in process or elsewhere.", lambda m: m.receivers
    ),
)

_TABLE_METRICS_COUNTERS: Final[tuple[MetricRow[Manager], ...]] = (
    MetricRow("table_fired", "Events given to receivers.", lambda m: m.counts.fired),
    MetricRow("table_acked", "Events settled.", lambda m: m.counts.acked),
    MetricRow("table_retried", "Events fired again: nacked, or late.", lambda m: m.counts.retried),
    MetricRow("table_dead", "Events that had all their attempts.", lambda m: m.counts.dead),
    MetricRow(
        "table_unreadable",
        "Rows set aside as dead letters because they cannot be read.",
        lambda m: m.store.unreadable,
    ),
    MetricRow("table_lost_acks", "Acks taken and not stored.", lambda m: m.lost_acks),
    MetricRow(
        "table_lost_leads", "Times another manager took the lead.", lambda m: m.counts.lost_leads
    ),
)

_LAGS: Final[tuple[tuple[str, str, Callable[[Manager], LagTotal]], ...]] = (
    ("fire_lag_seconds", "From due to fired.", lambda m: m.counts.fire_lag),
    ("ack_lag_seconds", "From due to acked.", lambda m: m.counts.ack_lag),
)


class TableCollector(Collector):
    """Collects the metrics of a node's queue tables when it is scraped."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._depths: dict[tuple[str, str], tuple[float, dict[str, int]]] = {}

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the metrics depend on the tables."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics of all tables."""
        found = [
            ((name, str(shard.key_range)), table.queue.queue(shard), manager)
            for name, table in sorted(self._tables.all().items())
            if table.is_open
            for shard, manager in table.queue.managers().items()
        ]
        depth = create_gauge(
            "table_events", "Events in the table, by state.", *TABLE_LABELS, "state"
        )
        for labels, queue, _ in found:
            for state, count in self._depth(labels, queue).items():
                depth.add_metric([*labels, state], count)
        yield depth
        yield from _of_managers([(labels, manager) for labels, _, manager in found])
        streams = create_gauge("table_streams", "Receivers elsewhere.")
        streams.add_metric([], self._tables.streams)
        yield streams

    def _depth(self, labels: tuple[str, str], queue: TableQueue) -> dict[str, int]:
        asked, depth = self._depths.get(labels, (float("-inf"), {}))
        now = time.monotonic()
        if now - asked < DEPTH_CACHE_SECONDS:
            return depth
        try:
            depth = queue.counts()
        except TurnlaneError as error:
            log.debug("table.depth_unknown", table=labels[0], shard=labels[1], error=error)
            depth = {}
        self._depths[labels] = (now, depth)
        return depth


def _of_managers(managers: list[tuple[tuple[str, str], Manager]]) -> Iterator[Metric]:
    yield from build_metrics(_TABLE_METRICS_GAUGES, _TABLE_METRICS_COUNTERS, TABLE_LABELS, managers)
    for name, words, lag_of in _LAGS:
        summary = SummaryMetricFamily(f"turnlane_table_{name}", words, labels=TABLE_LABELS)
        for labels, manager in managers:
            lag = lag_of(manager)
            summary.add_metric(labels, lag.events, lag.seconds)
        yield summary
