"""The node's metrics: names as the seed of this project has them, under ``turnlane_``.

Nothing is counted here. A scrape asks the queues, leases, commits and inputs for the numbers that
they keep anyway.
"""

from __future__ import annotations

import logging
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
from turnlane.node.breakers import Activity, Breaker, Breakers
from turnlane.node.node import Node
from turnlane.node.tables import Tables
from turnlane.queues.api import Stats
from turnlane.table.leader_state import LagTotal
from turnlane.table.manager import Manager
from turnlane.table.queue import TableQueue

# ── metric_rows ──
# What the node's metrics are made of: rows that say how a value is read off something.

Some = TypeVar("Some")

Family = GaugeMetricFamily | CounterMetricFamily


class Row(NamedTuple, Generic[Some]):
    """A metric with one value for each of many; ``None`` leaves one out."""

    name: str
    help: str
    value: Callable[[Some], float | None]


def gauge(name: str, words: str, *labels: str) -> GaugeMetricFamily:
    """A gauge without values yet."""
    return GaugeMetricFamily(f"turnlane_{name}", words, labels=labels)


def counter(name: str, words: str, *labels: str) -> CounterMetricFamily:
    """A counter without values yet."""
    return CounterMetricFamily(f"turnlane_{name}", words, labels=labels)


def read(
    gauges: Iterable[Row[Some]],
    counters: Iterable[Row[Some]],
    labels: Sequence[str],
    seen: Sequence[tuple[Sequence[str], Some]],
) -> Iterator[Metric]:
    """The metrics of rows, with the values of all that was seen, each behind its labels'."""
    for row in gauges:
        yield _filled(gauge(row.name, row.help, *labels), row, seen)
    for row in counters:
        yield _filled(counter(row.name, row.help, *labels), row, seen)


def _filled(metric: Family, row: Row[Some], seen: Sequence[tuple[Sequence[str], Some]]) -> Metric:
    for labels, each in seen:
        value = row.value(each)
        if value is not None:
            metric.add_metric(labels, value)
    return metric


def joined(metrics: Iterable[Metric]) -> list[Metric]:
    """Metrics in their order; those of one name as one, whatever their labels are.

    Two of a name would be a mistake to whoever reads them.
    """
    found: dict[str, Metric] = {}
    for metric in metrics:
        known = found.setdefault(metric.name, metric)
        if known is not metric:
            known.samples.extend(metric.samples)
    return list(found.values())


# ── action_metrics ──
# The metrics of actions: how their deliveries go, as tasks have told their breakers.


class _Seen(NamedTuple):
    """An action at one moment."""

    action: str
    breaker: Breaker
    status: DestinationStatus
    activity: Activity

    def total(self, name: str) -> int:
        return self.status.totals.get(name, 0)


_ACTION_METRICS_GAUGES: Final[tuple[Row[_Seen], ...]] = (
    Row("queue_workers_active", "Tasks that deliver at this moment.", lambda s: s.activity.tasks),
    Row("queue_preparers_active", "Blocks being prepared.", lambda s: s.activity.preparing),
    Row("queue_senders_active", "Threads that are sending.", lambda s: s.activity.sending),
    Row("queue_sends_inflight", "Sends under way.", lambda s: s.activity.sending),
    Row(
        "queue_export_latency_ewma_seconds",
        "How long a send takes of late.",
        lambda s: s.status.latency,
    ),
    Row("queue_backoff_seconds", "For how long nothing is to be sent.", lambda s: s.status.wait),
)
_ACTION_METRICS_COUNTERS: Final[tuple[Row[_Seen], ...]] = (
    # It hardly ever changes, and with this name Prometheus takes it for nothing but a counter.
    Row(
        "queue_workers",
        "Tasks that the lane may have at a time.",
        lambda s: s.breaker.workers or s.breaker.most_tasks,
    ),
    Row("circuit_breaker_open", "Times the breaker has opened.", lambda s: s.status.opened),
    Row("circuit_breaker_rejected", "Permits that were refused.", lambda s: s.status.rejected),
    Row("queue_retry", "Sends of what had been sent before.", lambda s: s.total("retries")),
    Row("queue_retry_success", "Sends again that went well.", lambda s: s.total("retry_successes")),
    Row("action_sends", "Sends.", lambda s: s.total("sends")),
    Row("action_send_failures", "Sends that failed.", lambda s: s.total("failures")),
    Row("action_delivered_events", "Events delivered.", lambda s: s.total("delivered")),
    Row("action_dead_events", "Events that became dead letters.", lambda s: s.total("dead")),
    Row(
        "action_rejected_records",
        "Records inside of delivered events that the destination refused for good.",
        lambda s: s.total("rejected"),
    ),
    Row("action_kept_events", "Events left for another time.", lambda s: s.total("kept")),
)


def metrics_of_actions(breakers: Breakers) -> Iterator[Metric]:
    """The metrics at this moment."""
    seen = [
        _Seen(action, breaker, breaker.gate.get_status(), breaker.activity())
        for action, breaker in breakers.all().items()
    ]
    yield from read(
        _ACTION_METRICS_GAUGES,
        _ACTION_METRICS_COUNTERS,
        ["action"],
        [([each.action], each) for each in seen],
    )
    yield _states(seen)
    yield _retry_failures(seen)


def _states(seen: list[_Seen]) -> Metric:
    words = "1 for the state that the breaker is in."
    metric = gauge("circuit_breaker_state", words, "action", "state")
    for each in seen:
        for state in BreakerState:
            metric.add_metric([each.action, state], float(each.status.state is state))
    return metric


def _retry_failures(seen: list[_Seen]) -> Metric:
    words = "Sends again that failed, by what went wrong."
    metric = counter("queue_retry_failure", words, "action", "error_type")
    for each in seen:
        for error, count in each.status.retry_failures.items():
            metric.add_metric([each.action, error], count)
    return metric


CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

DROPS: Final = [outcome.value for outcome in Outcome if outcome.is_drop]


class Counts(Protocol):
    """What an input has seen; see ``turnlane.inputs.api.Counters``."""

    events: int
    bytes: int
    refused: int
    invalid: int
    dropped: int
    connections: int


class Labelled(Protocol):
    """Settings that name what they are the settings of."""

    @property
    def label(self) -> str:
        """The name."""


class CountedInput(Protocol):
    """An input, as far as metrics go: what it is called, and what it has seen."""

    @property
    def settings(self) -> Labelled:
        """Its settings, for its name."""

    @property
    def counters(self) -> Counts:
        """What it has seen."""


_GAUGES: Final[tuple[Row[Stats], ...]] = (
    Row("queue_size", "Events that count against the queue's bound.", lambda s: s.size),
    Row("queue_bytes", "Bytes that count against the queue's bound.", lambda s: s.bytes),
    Row("queue_max_size", "The most events the queue holds.", lambda s: s.max_size),
    Row("queue_max_bytes", "The most bytes the queue holds.", lambda s: s.max_bytes),
    Row(
        "queue_utilization_ratio",
        "How full the queue is, 0 to 1, by whichever bound is nearer.",
        lambda s: s.utilization,
    ),
    Row(
        "queue_disk_available_bytes",
        "What the queue's file system still has free.",
        lambda s: s.disk_available_bytes,
    ),
    Row(
        "queue_pending_events",
        "Events waiting, or handed out and not yet settled.",
        lambda s: s.ledger.pending,
    ),
    Row(
        "queue_in_flight_events",
        "Events handed out and not yet settled.",
        lambda s: s.in_flight,
    ),
    Row(
        "queue_blocked_publishers",
        "Publishers that wait for room, or above a delay mark.",
        lambda s: s.blocked_publishers,
    ),
    Row(
        "fastqueue_inmemory_blocks",
        "Blocks held in memory and not handed out.",
        lambda s: s.memory_blocks,
    ),
    Row("fastqueue_disk_bytes", "Bytes of chunk files.", lambda s: s.disk_bytes),
)

_COUNTERS: Final[tuple[Row[Stats], ...]] = (
    Row("queue_push", "Publish calls that put something into the queue.", lambda s: s.pushes),
    Row(
        "queue_accepted_events",
        "Events taken off a publisher's hands since the queue was created.",
        lambda s: s.ledger.accepted,
    ),
    Row(
        "queue_delivered_events",
        "Events settled as delivered since the queue was created.",
        lambda s: s.ledger.delivered,
    ),
    Row(
        "queue_dead_events",
        "Events settled as undeliverable since the queue was created.",
        lambda s: s.ledger.dead,
    ),
    Row(
        "queue_retry",
        "By queue: batches given back to be read again. By action: sends of what was sent before.",
        lambda s: s.releases,
    ),
    Row("queue_full", "Times a publisher found the queue full.", lambda s: s.full_waits),
    Row("queue_disk_full", "Times a write found no space.", lambda s: s.disk_full),
    Row("queue_disk_errors", "Other failures to write or sync.", lambda s: s.disk_errors),
    Row("fastqueue_sync", "Syncs of chunk files.", lambda s: s.syncs),
    Row("fastqueue_meta_sync", "Syncs of the journal.", lambda s: s.meta_syncs),
    Row("fastqueue_chunk_rotations", "Chunk files begun.", lambda s: s.rotations),
    Row(
        "fastqueue_inmemory_flushes",
        "Times blocks went from memory to the disk.",
        lambda s: s.flushes,
    ),
    Row("fastqueue_quarantined", "Unreadable pieces set aside.", lambda s: s.quarantined),
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
        """The metrics at this moment."""
        yield from joined([*self._of_queues(), *metrics_of_actions(self._node.breakers)])
        yield from self._of_node()
        yield from self._of_inputs()

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are known only when queues are, and clash with nobody's."""
        return ()

    def _of_queues(self) -> Iterator[Metric]:
        queues = sorted(self._node.queues().items())
        stats = [queue.stats() for _, queue in queues]
        yield from read(_GAUGES, _COUNTERS, ["queue"], [([each.name], each) for each in stats])
        dropped = counter("queue_dropped", "Events dropped, by reason.", "queue", "reason")
        for each in stats:
            for reason in DROPS:
                dropped.add_metric([each.name, reason], each.ledger.dropped.get(reason, 0))
        yield dropped
        failing = gauge("queue_disk_failing", "1 if the last write to disk has failed.", "queue")
        for name, queue in queues:
            if queue.stored_id:
                failing.add_metric([name], float(bool(queue.storage_failure)))
        yield failing

    def _of_node(self) -> Iterator[Metric]:
        node = self._node
        for metric, value in (
            (
                gauge("leases_active", "Batches in the hands of remote consumers."),
                len(node.leases),
            ),
            (counter("leases_expired", "Leases that ran out."), node.leases.expired),
            (counter("commits", "Commits carried out."), node.commits.total),
            (
                gauge("dead_letters_waiting", "Dead letters in memory: their queue is full."),
                sum(node.commits.overflow.events().values()),
            ),
            (
                counter("commits_repeated", "Commits that had been carried out before."),
                node.commits.repeated,
            ),
        ):
            metric.add_metric([], value)
            yield metric
        words = "Dead letters that memory could not keep either: the oldest of those that waited."
        dropped = counter("dead_letters_dropped", words, "queue")
        for name, events in sorted(node.commits.overflow.dropped.items()):
            dropped.add_metric([name], events)
        yield dropped

    def _of_inputs(self) -> Iterator[Metric]:
        for field, words in _INPUT_COUNTERS:
            yield self._by_input(counter(f"input_{field}", words, "input"), field)
        connections = gauge("input_connections", "Connections open at this moment.", "input")
        yield self._by_input(connections, "connections")

    def _by_input(self, metric: Family, field: str) -> Metric:
        # Inputs may share a label, and a series may come only once.
        totals = Counter[str]()
        for each in self._inputs:
            totals[each.settings.label] += getattr(each.counters, field)
        for label, total in totals.items():
            metric.add_metric([label], total)
        return metric


# ── table_metrics ──
# Metrics of queue tables, by queue and shard. Nothing is counted here: managers are asked.

log = logging.getLogger(__name__)

FRESH: Final = 15.0
"""Seconds for which a table's depth is not asked for again: the database has to count its rows."""

LABELS: Final = ("queue", "shard")


_TABLE_METRICS_GAUGES: Final[tuple[Row[Manager], ...]] = (
    Row("table_leading", "1 if this node leads the shard.", lambda m: float(m.fires)),
    Row("table_window_events", "Events that wait in memory.", lambda m: m.waiting),
    Row("table_in_flight_events", "Events that are fired and not settled.", lambda m: m.in_flight),
    Row(
        "table_window_fill_ratio",
        "How full the window is, 0 to 1.",
        lambda m: m.waiting / m.store.definition.settings.window_events,
    ),
    Row(
        "table_receivers", "Receivers of this node, in process or elsewhere.", lambda m: m.receivers
    ),
)

_TABLE_METRICS_COUNTERS: Final[tuple[Row[Manager], ...]] = (
    Row("table_fired", "Events given to receivers.", lambda m: m.counts.fired),
    Row("table_acked", "Events settled.", lambda m: m.counts.acked),
    Row("table_retried", "Events fired again: nacked, or late.", lambda m: m.counts.retried),
    Row("table_dead", "Events that had all their attempts.", lambda m: m.counts.dead),
    Row(
        "table_unreadable",
        "Rows set aside as dead letters because they cannot be read.",
        lambda m: m.store.unreadable,
    ),
    Row("table_lost_acks", "Acks taken and not stored.", lambda m: m.lost_acks),
    Row("table_lost_leads", "Times another manager took the lead.", lambda m: m.counts.lost_leads),
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
        """Nothing: what there is depends on the tables."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The metrics at this moment."""
        found = [
            ((name, str(shard.key_range)), table.queue.queue(shard), manager)
            for name, table in sorted(self._tables.all().items())
            if table.is_open
            for shard, manager in table.queue.managers().items()
        ]
        depth = gauge("table_events", "Events in the table, by state.", *LABELS, "state")
        for labels, queue, _ in found:
            for state, count in self._depth(labels, queue).items():
                depth.add_metric([*labels, state], count)
        yield depth
        yield from _of_managers([(labels, manager) for labels, _, manager in found])
        streams = gauge("table_streams", "Receivers elsewhere.")
        streams.add_metric([], self._tables.streams)
        yield streams

    def _depth(self, labels: tuple[str, str], queue: TableQueue) -> dict[str, int]:
        asked, depth = self._depths.get(labels, (float("-inf"), {}))
        now = time.monotonic()
        if now - asked < FRESH:
            return depth
        try:
            depth = queue.counts()
        except TurnlaneError as error:
            log.debug("the depth of %s is not known: %s", labels, error)
            depth = {}
        self._depths[labels] = (now, depth)
        return depth


def _of_managers(managers: list[tuple[tuple[str, str], Manager]]) -> Iterator[Metric]:
    yield from read(_TABLE_METRICS_GAUGES, _TABLE_METRICS_COUNTERS, LABELS, managers)
    for name, words, lag_of in _LAGS:
        summary = SummaryMetricFamily(f"turnlane_table_{name}", words, labels=LABELS)
        for labels, manager in managers:
            lag = lag_of(manager)
            summary.add_metric(labels, lag.events, lag.seconds)
        yield summary
