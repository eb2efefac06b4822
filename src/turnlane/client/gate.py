"""The gate of an action as its tasks see it: kept by a node, asked over Flight."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from turnlane.client.remote import RemoteNode
from turnlane.closing import Closing
from turnlane.delivery.breaker import Allowed, State
from turnlane.delivery.gate import Permit, Report
from turnlane.delivery.settings import DeliverySettings
from turnlane.errors import RetryLater

log = logging.getLogger(__name__)

HEARTBEAT: Final = 5.0
"""Seconds: so often the node hears from a task that has nothing else to say."""
_ITS_SETTINGS: Final = {
    *("backoff", "max_backoff", "jitter", "breaker_failures", "breaker_reset"),
    *("rate_limit", "max_time"),
}
"""Those that a breaker goes by: a change of others does not make it a new one."""

Doing = Callable[[], tuple[int, int]]
"""How much is being prepared, and how much is being sent."""


class RemoteGate(Closing):
    """One task's way to the gate of its action. Calls raise what the node raises.

    As long as it is open the node counts the task as one that is at work.
    """

    def __init__(
        self,
        node: RemoteNode,
        action: str,
        queue: str,
        settings: DeliverySettings,
        doing: Doing = lambda: (0, 0),
    ) -> None:
        self._node = node
        self._doing = doing
        self._who: Mapping[str, Any] = {
            "action": action,
            "queue": queue,
            "task": uuid.uuid4().hex,
            "settings": settings.model_dump(mode="json", include=_ITS_SETTINGS),
        }
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="turnlane-gate", daemon=True)
        self._heart.start()

    def permit(self) -> Permit:
        """What may be sent now."""
        answer = self._say("permit")
        state, allowed = State(answer.pop("state")), Allowed(answer.pop("allowed"))
        return Permit(state, allowed, **answer)

    def report(self, report: Report) -> None:
        """Tell how sends went."""
        self._say("report", report=asdict(report))

    def claim(self, count: int, within: float) -> float:
        """Seconds until so many events may be sent; theirs, if it is no longer than ``within``."""
        return float(self._say("claim", count=count, within=within)["wait"])

    def close(self) -> None:
        """The task has ended."""
        self._closing.set()
        try:
            self._say("report", ended=True)
        except RetryLater as error:
            log.info("the node forgets this task by itself: %s", error)

    def _say(self, what: str, **more: Any) -> dict[str, Any]:
        preparing, sending = self._doing()
        body = {**self._who, "preparing": preparing, "sending": sending, **more}
        return self._node.act(what, body=body)

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT):
            try:
                self._say("report")
            except RetryLater as error:
                log.info("the node does not hear from this task: %s", error)
