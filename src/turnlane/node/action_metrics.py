"""The metrics of actions: how their deliveries go, as tasks have told their breakers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from prometheus_client.core import Metric

from turnlane.delivery.breaker import State
from turnlane.delivery.gate import GateStatus
from turnlane.node.breakers import Activity, Breaker, Breakers
from turnlane.node.metric_rows import Row, counter, gauge, read


class _Seen(NamedTuple):
    """An action at one moment."""

    action: str
    breaker: Breaker
    status: GateStatus
    activity: Activity

    def total(self, name: str) -> int:
        return self.status.totals.get(name, 0)


_GAUGES: Final[tuple[Row[_Seen], ...]] = (
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
_COUNTERS: Final[tuple[Row[_Seen], ...]] = (
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
        _Seen(action, breaker, breaker.gate.status(), breaker.activity())
        for action, breaker in breakers.all().items()
    ]
    yield from read(_GAUGES, _COUNTERS, ["action"], [([each.action], each) for each in seen])
    yield _states(seen)
    yield _retry_failures(seen)


def _states(seen: list[_Seen]) -> Metric:
    words = "1 for the state that the breaker is in."
    metric = gauge("circuit_breaker_state", words, "action", "state")
    for each in seen:
        for state in State:
            metric.add_metric([each.action, state], float(each.status.state is state))
    return metric


def _retry_failures(seen: list[_Seen]) -> Metric:
    words = "Sends again that failed, by what went wrong."
    metric = counter("queue_retry_failure", words, "action", "error_type")
    for each in seen:
        for error, count in each.status.retry_failures.items():
            metric.add_metric([each.action, error], count)
    return metric
