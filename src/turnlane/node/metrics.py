"""The metrics of a node for Prometheus, under the prefix ``turnlane_``.

This module counts nothing. A scrape reads the numbers that queues, leases, commits, breakers,
inputs and table managers keep for themselves. Tables map the name of a metric to its help text and
to the function that reads its value from an object; ``None`` means that there is no value.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

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
from turnlane.memory import compute_memory_share
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

LOSS_REASONS: Final = [outcome.value for outcome in Outcome if outcome.is_loss]

DEPTH_CACHE_SECONDS: Final = 15.0
"""For how long the depth of a table is not read again: the database has to count its rows."""

TABLE_LABELS: Final = ("queue", "shard")

Some = TypeVar("Some")
MetricTable = Mapping[str, tuple[str, Callable[[Some], float | None]]]
LabelledValues = Iterable[tuple[Sequence[str], float | None]]


def build_metric(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    words: str,
    labels: Sequence[str],
    values: LabelledValues,
) -> Metric:
    """Return a metric with its values, each with the values of its labels."""
    metric = kind(f"turnlane_{name}", words, labels=labels)
    for label_values, value in values:
        if value is not None:
            metric.add_metric(label_values, value)
    return metric


def build_gauge(name: str, words: str, labels: Sequence[str], values: LabelledValues) -> Metric:
    """Return a gauge with its values."""
    return build_metric(GaugeMetricFamily, name, words, labels, values)


def build_counter(name: str, words: str, labels: Sequence[str], values: LabelledValues) -> Metric:
    """Return a counter with its values."""
    return build_metric(CounterMetricFamily, name, words, labels, values)


def build_metrics(
    gauges: MetricTable[Some],
    counters: MetricTable[Some],
    labels: Sequence[str],
    objects: Sequence[tuple[Sequence[str], Some]],
) -> Iterator[Metric]:
    """Yield the metrics of two tables, with one value for each object and its label values."""
    for kind, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (words, read) in table.items():
            values = [(label_values, read(each)) for label_values, each in objects]
            yield build_metric(kind, name, words, labels, values)


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

    breaker: ActionBreaker
    status: DestinationStatus
    activity: TaskActivity

    def total(self, name: str) -> int:
        return self.status.totals.get(name, 0)


_ACTION_GAUGES: Final[MetricTable[_ActionSnapshot]] = {
    "queue_workers_active": ("Tasks that deliver now.", lambda s: s.activity.tasks),
    "queue_workers_total": (
        "Tasks that the lane may run at a time.",
        lambda s: s.breaker.workers or s.breaker.most_tasks,
    ),
    "queue_preparers_active": ("Blocks being prepared.", lambda s: s.activity.preparing),
    "queue_senders_active": ("Threads that are sending.", lambda s: s.activity.sending),
    "queue_sends_inflight": ("Sends in progress.", lambda s: s.activity.sending),
    "queue_export_latency_ewma_seconds": (
        "Average duration of the recent sends.",
        lambda s: s.status.latency,
    ),
    "queue_backoff_seconds": ("Seconds until the next send may begin.", lambda s: s.status.wait),
}
_ACTION_COUNTERS: Final[MetricTable[_ActionSnapshot]] = {
    "circuit_breaker_open": ("Times the breaker has opened.", lambda s: s.status.opened),
    "circuit_breaker_rejected": ("Permits that were refused.", lambda s: s.status.rejected),
    "queue_retry": ("Sends of events whose earlier send failed.", lambda s: s.total("retries")),
    "queue_retry_success": ("Retries that succeeded.", lambda s: s.total("retry_successes")),
    "action_sends": ("Sends.", lambda s: s.total("sends")),
    "action_delivered_events": ("Events delivered.", lambda s: s.total("delivered")),
    "action_dead_events": ("Events that became dead letters.", lambda s: s.total("dead")),
    "action_rejected_records": (
        "Records of delivered events that the destination refused permanently.",
        lambda s: s.total("rejected"),
    ),
    "action_kept_events": ("Events kept for a later batch.", lambda s: s.total("kept")),
}

_FAILURE_COUNTERS: Final[
    Mapping[str, tuple[str, Callable[[DestinationStatus], Mapping[str, int]]]]
] = {
    "action_send_failures": ("Sends that failed, by the kind of error.", lambda s: s.failure_types),
    "queue_retry_failure": (
        "Retries that failed, by the kind of error.",
        lambda s: s.retry_failures,
    ),
}


def collect_action_metrics(breakers: Breakers) -> Iterator[Metric]:
    """Yield the present metrics of all actions."""
    found = {
        action: _ActionSnapshot(breaker, breaker.destination.get_status(), breaker.get_activity())
        for action, breaker in breakers.all().items()
    }
    objects = [([action], each) for action, each in found.items()]
    yield from build_metrics(_ACTION_GAUGES, _ACTION_COUNTERS, ["action"], objects)
    yield build_gauge(
        "circuit_breaker_state",
        "1 for the present state of the breaker.",
        ["action", "state"],
        [
            ([action, state], float(each.status.state is state))
            for action, each in found.items()
            for state in BreakerState
        ],
    )
    for name, (words, read) in _FAILURE_COUNTERS.items():
        yield build_counter(
            name,
            words,
            ["action", "error_type"],
            [
                ([action, error], count)
                for action, each in found.items()
                for error, count in read(each.status).items()
            ],
        )


# ── queues, commits and inputs ───────────────────────────────────────────────────────────────────


class InputCounters(Protocol):
    """The counters of an input; see ``turnlane.inputs.api.Counters``."""

    events: int
    bytes: int
    refused: int
    invalid: int
    dropped: int
    connections: int
    invalid_reasons: Counter[str]


_SUMMED_COUNTERS: Final = ("events", "bytes", "refused", "invalid", "dropped", "connections")
"""The counters of inputs with the same label that are added up."""


class LabelledSettings(Protocol):
    """The settings of an input, as far as its metrics need them."""

    @property
    def label(self) -> str: ...


class CountedInput(Protocol):
    """The parts of an input that its metrics need."""

    @property
    def settings(self) -> LabelledSettings: ...
    @property
    def counters(self) -> InputCounters: ...


_QUEUE_GAUGES: Final[MetricTable[Stats]] = {
    "queue_size": ("Events that count against the limit of the queue.", lambda s: s.size),
    "queue_bytes": ("Bytes that count against the limit of the queue.", lambda s: s.bytes),
    "queue_max_size": ("The most events that the queue holds.", lambda s: s.max_size),
    "queue_max_bytes": ("The most bytes that the queue holds.", lambda s: s.max_bytes),
    "queue_utilization_ratio": (
        "How full the queue is, 0 to 1, by the limit that is nearer.",
        lambda s: s.utilization,
    ),
    "queue_drain_seconds": (
        "Seconds until nothing is pending at the rates of the last minute; +Inf: the queue grows.",
        lambda s: s.drain_seconds,
    ),
    "queue_disk_available_bytes": (
        "Free bytes of the file system of the queue.",
        lambda s: s.disk_available_bytes,
    ),
    "queue_pending_events": ("Events that are not settled.", lambda s: s.ledger.pending),
    "queue_in_flight_events": ("Events read and not settled.", lambda s: s.in_flight),
    "queue_blocked_publishers": (
        "Publishers that wait for room, or above a delay mark.",
        lambda s: s.blocked_publishers,
    ),
    "fastqueue_inmemory_blocks": ("Unread blocks in memory.", lambda s: s.memory_blocks),
    "fastqueue_disk_bytes": ("Bytes of chunk files.", lambda s: s.disk_bytes),
}
_QUEUE_COUNTERS: Final[MetricTable[Stats]] = {
    "queue_push": ("Publish calls that put something into the queue.", lambda s: s.pushes),
    "queue_accepted_events": (
        "Events accepted since the queue was created.",
        lambda s: s.ledger.accepted,
    ),
    "queue_delivered_events": (
        "Events settled as delivered since the queue was created.",
        lambda s: s.ledger.delivered,
    ),
    "queue_dead_events": (
        "Events settled as undeliverable since the queue was created.",
        lambda s: s.ledger.dead,
    ),
    "queue_retry": (
        "By queue: batches released. By action: sends of events whose earlier send failed.",
        lambda s: s.releases,
    ),
    "queue_full": ("Times a publisher found the queue full.", lambda s: s.full_waits),
    "queue_disk_full": ("Times a write found no space.", lambda s: s.disk_full),
    "queue_disk_errors": ("Other failures to write or sync.", lambda s: s.disk_errors),
    "fastqueue_sync": ("Syncs of chunk files.", lambda s: s.syncs),
    "fastqueue_meta_sync": ("Syncs of the journal.", lambda s: s.meta_syncs),
    "fastqueue_chunk_rotations": ("Chunk files begun.", lambda s: s.rotations),
    "fastqueue_inmemory_flushes": ("Writes of blocks from memory to disk.", lambda s: s.flushes),
    "fastqueue_quarantined": ("Unreadable pieces set aside.", lambda s: s.quarantined),
}

_NODE_GAUGES: Final[MetricTable[Node]] = {
    "memory_limit_bytes": (
        "Bytes that the process may use, by node.memory_limit or by the system.",
        lambda _: compute_memory_share(1.0),
    ),
    "leases_active": ("Batches that remote consumers hold.", lambda n: len(n.leases)),
    "dead_letters_waiting": (
        "Dead letters in memory, because their queue is full.",
        lambda n: sum(n.commits.overflow.events().values()),
    ),
}
_NODE_COUNTERS: Final[MetricTable[Node]] = {
    "leases_expired": ("Leases that have expired.", lambda n: n.leases.expired),
    "commits": ("Commits applied.", lambda n: n.commits.total),
    "commits_repeated": ("Repeats of commits.", lambda n: n.commits.repeated),
}

_INPUT_GAUGES: Final[MetricTable[Counter[str]]] = {
    "input_connections": ("Open connections.", lambda c: c["connections"])
}
_INPUT_COUNTERS: Final[MetricTable[Counter[str]]] = {
    "input_events": ("Events published to a queue.", lambda c: c["events"]),
    "input_bytes": ("Bytes received.", lambda c: c["bytes"]),
    "input_refused": ("Requests or connections to repeat later.", lambda c: c["refused"]),
    "input_invalid": ("Invalid requests or messages.", lambda c: c["invalid"]),
    "input_dropped": ("Events lost because there was no room.", lambda c: c["dropped"]),
}


class NodeCollector(Collector):
    """Collects a node's metrics when it is scraped. Safe to use from any thread."""

    def __init__(self, node: Node, inputs: Sequence[CountedInput] = ()) -> None:
        self._node = node
        self._inputs = inputs

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the metrics depend on the queues, and no other collector has them."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics."""
        node = self._node
        yield from merge_metrics(
            [*self._collect_queue_metrics(), *collect_action_metrics(node.breakers)]
        )
        yield from build_metrics(_NODE_GAUGES, _NODE_COUNTERS, [], [([], node)])
        yield build_counter(
            "dead_letters_dropped",
            "Dead letters dropped, the oldest first, because memory was full too.",
            ["queue"],
            [([name], count) for name, count in sorted(node.commits.overflow.dropped.items())],
        )
        yield build_counter(
            "lane_stalls",
            "Times that a lane did nothing, although events waited, for its stall_timeout.",
            ["queue"],
            [([name], count) for name, count in sorted(node.lanes.get_stalls().items())],
        )
        # Several inputs may have the same label, but a series may exist only once.
        totals: dict[str, Counter[str]] = {}
        reasons: Counter[tuple[str, str]] = Counter()
        for each in self._inputs:
            label = each.settings.label
            total = totals.setdefault(label, Counter())
            for name in _SUMMED_COUNTERS:
                total[name] += getattr(each.counters, name)
            for reason, count in dict(each.counters.invalid_reasons).items():
                reasons[label, reason] += count
        inputs = [([label], total) for label, total in totals.items()]
        yield from build_metrics(_INPUT_GAUGES, _INPUT_COUNTERS, ["input"], inputs)
        yield build_counter(
            "input_invalid_reasons",
            "Invalid messages and connections, by reason, of inputs that tell the reason.",
            ["input", "reason"],
            [([label, reason], count) for (label, reason), count in sorted(reasons.items())],
        )

    def _collect_queue_metrics(self) -> Iterator[Metric]:
        queues = [queue for _, queue in sorted(self._node.queues().items())]
        stats = [([queue.name], queue.stats()) for queue in queues]
        yield from build_metrics(_QUEUE_GAUGES, _QUEUE_COUNTERS, ["queue"], stats)
        yield build_counter(
            "queue_dropped",
            "Events dropped, by reason.",
            ["queue", "reason"],
            [
                ([each.name, reason], each.ledger.dropped.get(reason, 0))
                for _, each in stats
                for reason in DROP_REASONS
            ],
        )
        losses = Counter(
            {
                each.name: sum(each.ledger.dropped.get(reason, 0) for reason in LOSS_REASONS)
                for _, each in stats
            }
        )
        # Dead letters that memory could not keep are in the ledger of their queue, if it exists.
        for name, count in self._node.commits.overflow.dropped.items():
            if name not in losses:
                losses[name] = count
        yield build_counter(
            "export_data_loss",
            "Events lost for good: the queue was full, or closed or killed before it stored them.",
            ["queue"],
            [([name], count) for name, count in sorted(losses.items())],
        )
        yield build_gauge(
            "queue_disk_failing",
            "1 if the last write to disk has failed.",
            ["queue"],
            [
                ([queue.name], float(bool(queue.storage_failure)))
                for queue in queues
                if queue.stored_id
            ],
        )


# ── queue tables ─────────────────────────────────────────────────────────────────────────────────

_TABLE_GAUGES: Final[MetricTable[Manager]] = {
    "table_leading": ("1 if this node leads the shard.", lambda m: float(m.can_fire)),
    "table_window_events": ("Events that wait in memory.", lambda m: m.waiting),
    "table_in_flight_events": ("Events fired and not settled.", lambda m: m.in_flight),
    "table_window_fill_ratio": (
        "How full the window is, 0 to 1.",
        lambda m: m.waiting / m.store.definition.settings.window_events,
    ),
    "table_receivers": ("Receivers of this node, local and remote.", lambda m: m.receivers),
}
_TABLE_COUNTERS: Final[MetricTable[Manager]] = {
    "table_fired": ("Events given to receivers.", lambda m: m.counts.fired),
    "table_acked": ("Events settled.", lambda m: m.counts.acked),
    "table_retried": ("Events fired again: nacked, or late.", lambda m: m.counts.retried),
    "table_dead": ("Events that had all their attempts.", lambda m: m.counts.dead),
    "table_unreadable": ("Unreadable rows, now dead letters.", lambda m: m.store.unreadable),
    "table_lost_acks": ("Acks received and not stored.", lambda m: m.lost_acks),
    "table_lost_leads": ("Times another manager took the lead.", lambda m: m.counts.lost_leads),
}
_TABLE_LAGS: Final[Mapping[str, tuple[str, Callable[[Manager], LagTotal]]]] = {
    "table_fire_lag_seconds": ("From due to fired.", lambda m: m.counts.fire_lag),
    "table_ack_lag_seconds": ("From due to acked.", lambda m: m.counts.ack_lag),
}


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
        yield build_gauge(
            "table_events",
            "Events in the table, by state.",
            [*TABLE_LABELS, "state"],
            [
                ([*labels, state], count)
                for labels, queue, _ in found
                for state, count in self._get_depth(labels, queue).items()
            ],
        )
        managers = [(labels, manager) for labels, _, manager in found]
        yield from build_metrics(_TABLE_GAUGES, _TABLE_COUNTERS, TABLE_LABELS, managers)
        for name, (words, get_lag) in _TABLE_LAGS.items():
            summary = SummaryMetricFamily(f"turnlane_{name}", words, labels=TABLE_LABELS)
            for labels, manager in managers:
                lag = get_lag(manager)
                summary.add_metric(labels, lag.events, lag.seconds)
            yield summary
        yield build_gauge("table_streams", "Remote receivers.", [], [([], self._tables.streams)])

    def _get_depth(self, labels: tuple[str, str], queue: TableQueue) -> dict[str, int]:
        """Return the number of events by state, at most ``DEPTH_CACHE_SECONDS`` old."""
        read_at, depth = self._depths.get(labels, (float("-inf"), {}))
        now = time.monotonic()
        if now - read_at < DEPTH_CACHE_SECONDS:
            return depth
        try:
            depth = queue.counts()
        except TurnlaneError as error:
            log.debug("table.depth_unknown", table=labels[0], shard=labels[1], error=error)
            depth = {}
        self._depths[labels] = (now, depth)
        return depth
