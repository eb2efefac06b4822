"""The node's metrics: names as the seed of this project has them, under ``turnlane_``.

Nothing is counted here. A scrape asks the queues, leases, commits and inputs for the numbers that
they keep anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from turnlane.node.action_metrics import metrics_of_actions
from turnlane.node.node import Node
from turnlane.queues.contract import Outcome
from turnlane.queues.stats import Stats
from turnlane.queues.stored import StoredQueue

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

DROPS: Final = [outcome.value for outcome in Outcome if outcome.is_drop]


class Counts(Protocol):
    """What an input has seen; see ``turnlane.inputs.contract.Counters``."""

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


class _Row(NamedTuple):
    """A metric with one value for each queue; ``None`` leaves the queue out."""

    name: str
    help: str
    value: Callable[[Stats], float | None]


_GAUGES: Final = (
    _Row("queue_size", "Events that count against the queue's bound.", lambda s: s.size),
    _Row("queue_bytes", "Bytes that count against the queue's bound.", lambda s: s.bytes),
    _Row("queue_max_size", "The most events the queue holds.", lambda s: s.max_size),
    _Row("queue_max_bytes", "The most bytes the queue holds.", lambda s: s.max_bytes),
    _Row(
        "queue_utilization_ratio",
        "How full the queue is, 0 to 1, by whichever bound is nearer.",
        lambda s: s.utilization,
    ),
    _Row(
        "queue_disk_available_bytes",
        "What the queue's file system still has free.",
        lambda s: s.disk_available_bytes,
    ),
    _Row(
        "queue_pending_events",
        "Events waiting, or handed out and not yet settled.",
        lambda s: s.ledger.pending,
    ),
    _Row(
        "queue_in_flight_events",
        "Events handed out and not yet settled.",
        lambda s: s.in_flight,
    ),
    _Row(
        "queue_blocked_publishers",
        "Publishers that stand in line for room.",
        lambda s: s.blocked_publishers,
    ),
    _Row(
        "fastqueue_inmemory_blocks",
        "Blocks held in memory and not handed out.",
        lambda s: s.memory_blocks,
    ),
    _Row("fastqueue_disk_bytes", "Bytes of chunk files.", lambda s: s.disk_bytes),
)

_COUNTERS: Final = (
    _Row("queue_push", "Publish calls that put something into the queue.", lambda s: s.pushes),
    _Row(
        "queue_accepted_events",
        "Events taken off a publisher's hands since the queue was created.",
        lambda s: s.ledger.accepted,
    ),
    _Row(
        "queue_delivered_events",
        "Events settled as delivered since the queue was created.",
        lambda s: s.ledger.delivered,
    ),
    _Row(
        "queue_dead_events",
        "Events settled as undeliverable since the queue was created.",
        lambda s: s.ledger.dead,
    ),
    _Row("queue_retry", "Batches given back to be read again.", lambda s: s.releases),
    _Row("queue_full", "Times a publisher found the queue full.", lambda s: s.full_waits),
    _Row("queue_disk_full", "Times a write found no space.", lambda s: s.disk_full),
    _Row("queue_disk_errors", "Other failures to write or sync.", lambda s: s.disk_errors),
    _Row("fastqueue_sync", "Syncs of chunk files.", lambda s: s.syncs),
    _Row("fastqueue_meta_sync", "Syncs of the journal.", lambda s: s.meta_syncs),
    _Row("fastqueue_chunk_rotations", "Chunk files begun.", lambda s: s.rotations),
    _Row(
        "fastqueue_inmemory_flushes",
        "Times blocks went from memory to the disk.",
        lambda s: s.flushes,
    ),
    _Row("fastqueue_quarantined", "Unreadable pieces set aside.", lambda s: s.quarantined),
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
        yield from self._of_queues()
        yield from metrics_of_actions(self._node.breakers)
        yield from self._of_node()
        yield from self._of_inputs()

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are known only when queues are, and clash with nobody's."""
        return ()

    def _of_queues(self) -> Iterator[Metric]:
        queues = sorted(self._node.queues().items())
        stats = [queue.stats() for _, queue in queues]
        for row in _GAUGES:
            yield _filled(_gauge(row.name, row.help, "queue"), row, stats)
        for row in _COUNTERS:
            yield _filled(_counter(row.name, row.help, "queue"), row, stats)
        dropped = _counter("queue_dropped", "Events dropped, by reason.", "queue", "reason")
        for each in stats:
            for reason in DROPS:
                dropped.add_metric([each.name, reason], each.ledger.dropped.get(reason, 0))
        yield dropped
        failing = _gauge("queue_disk_failing", "1 if the last write to disk has failed.", "queue")
        for name, queue in queues:
            if isinstance(queue, StoredQueue):
                failing.add_metric([name], float(queue.troubled))
        yield failing

    def _of_node(self) -> Iterator[Metric]:
        node = self._node
        for metric, value in (
            (
                _gauge("leases_active", "Batches in the hands of remote consumers."),
                len(node.leases),
            ),
            (_counter("leases_expired", "Leases that ran out."), node.leases.expired),
            (_counter("commits", "Commits carried out."), node.commits.total),
            (
                _gauge("dead_letters_waiting", "Dead letters in memory: their queue is full."),
                sum(node.commits.overflow.events().values()),
            ),
            (
                _counter("commits_repeated", "Commits that had been carried out before."),
                node.commits.repeated,
            ),
        ):
            metric.add_metric([], value)
            yield metric

    def _of_inputs(self) -> Iterator[Metric]:
        for field, words in _INPUT_COUNTERS:
            yield self._by_input(_counter(f"input_{field}", words, "input"), field)
        connections = _gauge("input_connections", "Connections open at this moment.", "input")
        yield self._by_input(connections, "connections")

    def _by_input(self, metric: GaugeMetricFamily | CounterMetricFamily, field: str) -> Metric:
        # Inputs may share a label, and a series may come only once.
        totals = Counter[str]()
        for each in self._inputs:
            totals[each.settings.label] += getattr(each.counters, field)
        for label, total in totals.items():
            metric.add_metric([label], total)
        return metric


def _gauge(name: str, words: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"turnlane_{name}", words, labels=labels)


def _counter(name: str, words: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"turnlane_{name}", words, labels=labels)


def _filled(
    metric: GaugeMetricFamily | CounterMetricFamily, row: _Row, stats: Sequence[Stats]
) -> Metric:
    for each in stats:
        value = row.value(each)
        if value is not None:
            metric.add_metric([each.name], value)
    return metric
