"""The gate of an action as its tasks see it: kept by a node, asked over Flight."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from turnlane.client.node_client import RemoteNode
from turnlane.delivery.breaker import AllowedSends, BreakerState
from turnlane.delivery.destination import SendPermit, SendReport
from turnlane.delivery.settings import DeliverySettings
from turnlane.errors import RetryLater
from turnlane.runtime import Closing

log = logging.getLogger(__name__)

HEARTBEAT: Final = 1.0
"""Seconds: so often the node hears what a task is doing, and the task what its share is."""
FIRST_BEAT: Final = 0.1
"""Sooner at the beginning: many tasks are short."""
_ITS_SETTINGS: Final = {
    *("backoff", "max_backoff", "jitter", "breaker_failures", "breaker_reset"),
    *("rate_limit", "max_time", "max_in_flight", "concurrency", "max_concurrency"),
}
"""Those that a breaker goes by."""

Doing = Callable[[], tuple[int, int]]
"""How much is being prepared, and how much is being sent."""


class RemoteDestinationState(Closing):
    """One task's way to the gate of its action. Calls raise what the node raises.

    As long as it is open the node counts the task as one that is at work, and a probe that it was
    given as under way.
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
    ) -> None:
        self._node = node
        self._doing = doing
        self._who: Mapping[str, Any] = {
            "action": action,
            "queue": queue,
            "task": uuid.uuid4().hex,
            "workers": workers,
            "settings": settings.model_dump(mode="json", include=_ITS_SETTINGS),
        }
        self._probe: str | None = None
        """Ours, and not reported on."""
        self._share: int | None = None
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="turnlane-gate", daemon=True)
        self._heart.start()

    def request_permit(self) -> SendPermit:
        """What may be sent now."""
        answer = self._say("permit")
        state, allowed = BreakerState(answer.pop("state")), AllowedSends(answer.pop("allowed"))
        permit = SendPermit(state, allowed, **answer)
        self._probe = permit.probe
        return permit

    def report(self, report: SendReport) -> None:
        """Tell how sends went."""
        if report.probe == self._probe:
            self._probe = None
        self._say("report", report=asdict(report))

    def claim(self, count: int, within: float) -> float:
        """Seconds until so many events may be sent; theirs, if it is no longer than ``within``."""
        return float(self._say("claim", count=count, within=within)["wait"])

    @property
    def share(self) -> int | None:
        """How many sends this task may have under way, as the node said last."""
        return self._share

    def close(self) -> None:
        """The task has ended."""
        self._closing.set()
        try:
            self._say("report", ended=True)
        except RetryLater as error:
            log.info("the node forgets this task by itself: %s", error)

    def _say(self, what: str, **more: Any) -> dict[str, Any]:
        preparing, sending = self._doing()
        doing = {"preparing": preparing, "sending": sending, "probe": self._probe}
        answer = self._node.act(what, body={**self._who, **doing, **more})
        self._share = answer.pop("share", None)
        return answer

    def _beat(self) -> None:
        wait = FIRST_BEAT
        while not self._closing.wait(min(wait, HEARTBEAT)):
            wait *= 2
            try:
                self._say("report")
            except RetryLater as error:
                log.info("the node does not hear from this task: %s", error)
