"""The destination state of an action, kept by a node, for the tasks that deliver."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from turnlane.client.node_client import RemoteNode
from turnlane.delivery.breaker import AllowedSends, BreakerState
from turnlane.delivery.destination import FailedOffsets, SendPermit, SendReport, SpansBySource
from turnlane.delivery.settings import DeliverySettings
from turnlane.errors import RetryLater
from turnlane.logs import get_logger
from turnlane.runtime import Closeable, PeriodicThread

log = get_logger(__name__)

HEARTBEAT: Final = 1.0
"""Seconds between two reports of a task's activity; each answer has the task's share of sends."""
FIRST_BEAT: Final = 0.1
"""Seconds until the first report. Shorter, because many tasks are short."""
_ITS_SETTINGS: Final = {
    *("backoff", "backoff_multiplier", "max_backoff", "jitter"),
    *("breaker_failures", "breaker_reset"),
    *("rate_limit", "max_time", "max_in_flight", "concurrency", "max_concurrency"),
}
"""The settings that a breaker uses."""

Doing = Callable[[], tuple[int, int]]
"""Returns how many blocks the task is preparing and how many it is sending."""


class RemoteDestinationState(Closeable):
    """The access of one task to the destination state of its action.

    Calls raise the errors of the node. While it is open, the node counts the task as active, and
    its probe as in progress.

    ``find_settled`` returns settled events. With it, the first permit has the node forget failed
    events that were settled without a send: purged, or given up by a lane.
    """

    def __init__(
        self,
        node: RemoteNode,
        action: str,
        queue: str,
        settings: DeliverySettings,
        doing: Doing = lambda: (0, 0),
        *,
        workers: int = 0,
        find_settled: Callable[[], SpansBySource] | None = None,
    ) -> None:
        self._node = node
        self._doing = doing
        self._find_settled = find_settled
        self._who: Mapping[str, Any] = {
            "action": action,
            "queue": queue,
            "task": uuid.uuid4().hex,
            "workers": workers,
            "settings": settings.model_dump(mode="json", include=_ITS_SETTINGS),
        }
        self._probe: str | None = None
        """The id of the probe that this task has and did not report yet."""
        self._share: int | None = None
        self._pause = FIRST_BEAT
        self._heartbeat = PeriodicThread("turnlane-gate", self._beat, FIRST_BEAT)

    def request_permit(self) -> SendPermit:
        """Return what the task may send now."""
        answer = self._say("permit")
        state, allowed = BreakerState(answer.pop("state")), AllowedSends(answer.pop("allowed"))
        permit = SendPermit(state, allowed, **answer)
        self._probe = permit.probe
        if not permit.failed or self._find_settled is None:
            return permit
        failed = FailedOffsets(permit.failed)
        settled = failed.find(self._find_settled())
        self._find_settled = None
        if settled:
            failed.remove(settled)
            self._say("report", report=asdict(SendReport(settled=settled)))
        return replace(permit, failed=failed.get_spans())

    def report(self, report: SendReport) -> None:
        """Report the results of sends."""
        if report.probe == self._probe:
            self._probe = None
        self._say("report", report=asdict(report))

    def claim(self, count: int, within: float) -> float:
        """Return the seconds until ``count`` events may be sent under the rate limit.

        The events are reserved if the wait is at most ``within`` seconds.
        """
        return float(self._say("claim", count=count, within=within)["wait"])

    @property
    def share(self) -> int | None:
        """How many concurrent sends this task may have, from the last answer of the node."""
        return self._share

    def close(self) -> None:
        """Report that the task has ended."""
        self._heartbeat.stop()
        try:
            self._say("report", ended=True)
        except RetryLater as error:
            log.info(
                "breaker.leave_failed", error=error, hint="the node forgets the task by itself"
            )

    def _say(self, what: str, **more: Any) -> dict[str, Any]:
        preparing, sending = self._doing()
        doing = {"preparing": preparing, "sending": sending, "probe": self._probe}
        answer = self._node.act(what, body={**self._who, **doing, **more})
        self._share = answer.pop("share", None)
        return answer

    def _beat(self) -> float:
        """Report that the task still runs; return the pause, which doubles up to ``HEARTBEAT``."""
        self._pause = min(2 * self._pause, HEARTBEAT)
        try:
            self._say("report")
        except RetryLater as error:
            log.info("breaker.heartbeat_failed", error=error)
        return self._pause
