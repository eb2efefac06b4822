"""The metrics of actions: how their deliveries go, as tasks have told their breakers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from turnlane.delivery.breaker import State
from turnlane.delivery.gate import GateStatus
from turnlane.node.breakers import Activity, Breaker, Breakers


class _Seen(NamedTuple):
    """An action at one moment."""

    action: str
    breaker: Breaker
    status: GateStatus
    activity: Activity

    def total(self, name: str) -> int:
        return self.status.totals.get(name, 0)


class _Row(NamedTuple):
    """A metric with one value for each action; ``None`` leaves the action out."""

    name: str
    help: str
    value: Callable[[_Seen], float | None]


_GAUGES: Final = (
    _Row("queue_workers_active", "Tasks that deliver at this moment.", lambda s: s.activity.tasks),
    _Row(
        "queue_workers_total",
        "The most tasks that delivered at a time.",
        lambda s: s.breaker.most_tasks,
    ),
    _Row("queue_preparers_active", "Blocks being prepared.", lambda s: s.activity.preparing),
    _Row("queue_senders_active", "Threads that are sending.", lambda s: s.activity.sending),
    _Row("queue_sends_inflight", "Sends under way.", lambda s: s.activity.sending),
    _Row(
        "queue_export_latency_ewma_seconds",
        "How long a send takes of late.",
        lambda s: s.status.latency,
    ),
    _Row("queue_backoff_seconds", "For how long nothing is to be sent.", lambda s: s.status.wait),
)
_COUNTERS: Final = (
    _Row("circuit_breaker_open", "Times the breaker has opened.", lambda s: s.status.opened),
    _Row("circuit_breaker_rejected", "Permits that were refused.", lambda s: s.status.rejected),
    _Row(
        "queue_retry_success", "Sends again that went well.", lambda s: s.total("retry_successes")
    ),
    _Row("action_sends", "Sends.", lambda s: s.total("sends")),
    _Row("action_retries", "Sends of what had been sent before.", lambda s: s.total("retries")),
    _Row("action_send_failures", "Sends that failed.", lambda s: s.total("failures")),
    _Row("action_delivered_events", "Events delivered.", lambda s: s.total("delivered")),
    _Row("action_dead_events", "Events that became dead letters.", lambda s: s.total("dead")),
    _Row("action_kept_events", "Events left for another time.", lambda s: s.total("kept")),
)


def metrics_of_actions(breakers: Breakers) -> Iterator[Metric]:
    """The metrics at this moment."""
    seen = [
        _Seen(action, breaker, breaker.gate.status(), breaker.activity())
        for action, breaker in breakers.all().items()
    ]
    for row in _GAUGES:
        yield _filled(
            GaugeMetricFamily(f"turnlane_{row.name}", row.help, labels=["action"]), row, seen
        )
    for row in _COUNTERS:
        yield _filled(
            CounterMetricFamily(f"turnlane_{row.name}", row.help, labels=["action"]), row, seen
        )
    yield _states(seen)
    yield _retry_failures(seen)


def _filled(
    metric: GaugeMetricFamily | CounterMetricFamily, row: _Row, seen: list[_Seen]
) -> Metric:
    for each in seen:
        value = row.value(each)
        if value is not None:
            metric.add_metric([each.action], value)
    return metric


def _states(seen: list[_Seen]) -> Metric:
    metric = GaugeMetricFamily(
        "turnlane_circuit_breaker_state",
        "1 for the state that the breaker is in.",
        labels=["action", "state"],
    )
    for each in seen:
        for state in State:
            metric.add_metric([each.action, state], float(each.status.state is state))
    return metric


def _retry_failures(seen: list[_Seen]) -> Metric:
    metric = CounterMetricFamily(
        "turnlane_queue_retry_failure",
        "Sends again that failed, by the class of the error.",
        labels=["action", "error_type"],
    )
    for each in seen:
        for error, count in each.status.retry_failures.items():
            metric.add_metric([each.action, error], count)
    return metric
