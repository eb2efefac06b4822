"""The node's metrics: names as the seed of this project has them, under ``turnlane_``.

Nothing is counted here. A scrape asks the queues, leases, commits and inputs for the numbers that
they keep anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from turnlane.node.action_metrics import metrics_of_actions
from turnlane.node.metric_rows import Family, Row, counter, gauge, joined, read
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
            if isinstance(queue, StoredQueue):
                failing.add_metric([name], float(queue.troubled))
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
