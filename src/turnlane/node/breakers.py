"""Circuit breakers: the state of destinations that all tasks of an action share.

Tasks are short and run on many machines. The node knows whether a destination works, so the tasks
act as one: one task probes, and no task sends before the backoff is over. The state is in memory
only. After a restart of the node, the tasks find out again that a destination is down.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from turnlane.delivery.destination import LocalDestinationState, SendPermit, SendReport
from turnlane.delivery.settings import DeliverySettings
from turnlane.errors import NoSuchBreaker

TASK_COUNT_SECONDS: Final = 60.0
"""For how many seconds the highest number of tasks is remembered."""
TASK_SECONDS: Final = 5.0
"""After this time without a report a task has died: other tasks may use its share."""


class SendShares:
    """Divides the allowed concurrent sends of an action among its tasks. Pure, not thread-safe.

    Each task gets the same share of the limit, computed from the highest recent number of tasks:
    the tasks of a batch do not begin at the same moment, and the first one must not get everything.
    A send in progress belongs to its task until it ends, so the total never exceeds the limit.
    Times are monotonic.
    """

    def __init__(self) -> None:
        self._given: dict[str, int] = {}
        self._most = 0
        self._until = 0.0

    def compute(
        self, task: str, limit: int, busy: Mapping[str, int], now: float, most: int | None = None
    ) -> int:
        """Return the share of a task, at most ``most``, which is all that the task can use.

        ``busy`` has all live tasks and the number of their current sends. The share is 0 while the
        other tasks use the whole limit.
        """
        if len(busy) >= self._most or now > self._until:
            self._most, self._until = len(busy), now + TASK_COUNT_SECONDS
        self._given = {each: given for each, given in self._given.items() if each in busy}
        others = sum(given for each, given in self._given.items() if each != task)
        fair = max(1, limit // self._most)
        share = max(0, min(fair, limit - others, most or limit))
        self._given[task] = max(share, busy[task])
        return share


class TaskActivity(NamedTuple):
    """The present work of the tasks of an action."""

    tasks: int
    preparing: int
    sending: int


class BreakerRequest(NamedTuple):
    """A request of a task that delivers for an action."""

    action: str
    queue: str
    """The queue that the lane reads. The right to read it is needed for the request."""
    task: str
    settings: DeliverySettings
    preparing: int = 0
    sending: int = 0
    """The number of blocks that the task is preparing and sending."""
    probe: str | None = None
    """The id of the probe that the task is sending."""
    workers: int = 0
    """How many tasks the lane may run at a time; 0: unknown."""


class _Task(NamedTuple):
    reported_at: float
    preparing: int
    sending: int


@dataclass(slots=True)
class ActionBreaker:
    """The destination state of one action, and its tasks."""

    queue: str
    settings: DeliverySettings
    destination: LocalDestinationState
    tasks: dict[str, _Task] = field(default_factory=dict)
    most_tasks: int = 0
    workers: int = 0
    """How many tasks the lane may run at a time, from the last request."""
    shares: SendShares = field(default_factory=SendShares)

    def as_dict(self) -> dict[str, Any]:
        """Return the state for JSON."""
        return {
            "queue": self.queue,
            **self.get_activity()._asdict(),
            **asdict(self.destination.get_status()),
        }

    def get_activity(self) -> TaskActivity:
        """Return the present work of the live tasks."""
        alive = self.get_live_tasks(time.monotonic()).values()
        return TaskActivity(
            len(alive), sum(task.preparing for task in alive), sum(task.sending for task in alive)
        )

    def get_live_tasks(self, now: float) -> dict[str, _Task]:
        """Return the tasks that have reported within ``TASK_SECONDS``."""
        return {
            key: task
            for key, task in list(self.tasks.items())
            if task.reported_at > now - TASK_SECONDS
        }


class Breakers:
    """The breakers of a node, created at the first request. Safe to use from any thread."""

    def __init__(self) -> None:
        self._breakers: dict[str, ActionBreaker] = {}
        self._lock = threading.Lock()

    def permit(self, request: BreakerRequest) -> SendPermit:
        """Return what a task may send now."""
        return self._update(request).destination.request_permit()

    def report(self, request: BreakerRequest, report: SendReport) -> None:
        """Take the results of a task's sends into account."""
        self._update(request).destination.report(report)

    def claim(self, request: BreakerRequest, count: int, within: float) -> float:
        """Return the seconds until a task may send ``count`` events under the rate limit.

        The events are reserved for the task if the wait is at most ``within`` seconds.
        """
        return self._update(request).destination.claim(count, within)

    def share(self, request: BreakerRequest) -> int:
        """Return how many concurrent sends a task may have, of the limit of its action."""
        now = time.monotonic()
        found = self._update(request)
        with self._lock:
            busy = {key: task.sending for key, task in found.get_live_tasks(now).items()}
            busy.setdefault(request.task, request.sending)
            limit, most = request.settings.max_in_flight, request.settings.most_sends
            return found.shares.compute(request.task, limit, busy, now, most)

    def leave(self, request: BreakerRequest) -> None:
        """Remove a task that has ended."""
        self._update(request).tasks.pop(request.task, None)

    def _update(self, request: BreakerRequest) -> ActionBreaker:
        """Return the breaker for a request, with the settings and the activity of the request.

        A change of the settings keeps the state of the destination: two pipelines with different
        settings must not reset it with every request.
        """
        now = time.monotonic()
        with self._lock:
            found = self._breakers.get(request.action)
            if found is None:
                found = ActionBreaker(
                    request.queue, request.settings, LocalDestinationState(request.settings)
                )
                self._breakers[request.action] = found
            elif found.settings != request.settings:
                found.destination.apply_settings(request.settings)
                found.settings = request.settings
            found.queue = request.queue
            found.workers = request.workers
            if request.probe is not None:
                found.destination.renew_probe(request.probe)
            found.tasks[request.task] = _Task(now, request.preparing, request.sending)
            found.tasks = found.get_live_tasks(now)
            found.most_tasks = max(found.most_tasks, len(found.tasks))
        return found

    def of(self, action: str) -> ActionBreaker:
        """Return the breaker of an action. Raises ``NoSuchBreaker``."""
        found = self._breakers.get(action)
        if found is None:
            known = ", ".join(sorted(self._breakers)) or "none"
            raise NoSuchBreaker(f"no task has delivered for {action!r} yet; there are: {known}")
        return found

    def all(self) -> dict[str, ActionBreaker]:
        """Return all breakers by action."""
        with self._lock:
            return dict(sorted(self._breakers.items()))
