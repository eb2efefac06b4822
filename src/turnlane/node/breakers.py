"""Breakers: what all tasks of all executors know together about the destinations of actions.

Tasks come and go, on machines of their own; whether a destination is worth trying is known here,
so that they act as one: one of them probes, and none sends before the time has come. It is
forgotten with the process: then a destination that is away is found out again.
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

# ── shares ──
# Shares: how many sends each task of an action may have under way, of a limit for all. Pure.
#
# Each has the same share, as if there were as many tasks as there were of late: those of a batch
# do
# not begin at one moment, and whoever comes first is not to have it all. What a task still has
# under
# way is its own until it has ended, so that all together never have more than the limit.

LATELY: Final = 60.0
"""Seconds for which it counts how many tasks there were."""


class Shares:
    """The shares that were given away. Times are monotonic. Not safe from several threads."""

    def __init__(self) -> None:
        self._given: dict[str, int] = {}
        self._most = 0
        self._until = 0.0

    def of(
        self, task: str, limit: int, busy: Mapping[str, int], now: float, most: int | None = None
    ) -> int:
        """The share of a task; ``busy`` has all that are alive, and how much each is sending.

        It is nothing as long as the others have it all, and never more than ``most``, which is all
        that the task could use.
        """
        if len(busy) >= self._most or now > self._until:
            self._most, self._until = len(busy), now + LATELY
        self._given = {each: given for each, given in self._given.items() if each in busy}
        others = sum(given for each, given in self._given.items() if each != task)
        fair = max(1, limit // self._most)
        share = max(0, min(fair, limit - others, most or limit))
        self._given[task] = max(share, busy[task])
        return share


TASK_SECONDS: Final = 5.0
"""A task that has not been heard of for so long has died: what it could send, others may."""


class Activity(NamedTuple):
    """What tasks are doing at this moment."""

    tasks: int
    preparing: int
    sending: int


class Asker(NamedTuple):
    """Who asks for a permit: a task that delivers for an action."""

    action: str
    queue: str
    """The queue that its lane reads: who may read it may ask."""
    task: str
    settings: DeliverySettings
    preparing: int = 0
    sending: int = 0
    """How much it is doing."""
    probe: str | None = None
    """The probe that it has under way."""
    workers: int = 0
    """How many tasks its lane may have at a time, if it says so."""


class _Task(NamedTuple):
    heard: float
    preparing: int
    sending: int


@dataclass(slots=True)
class Breaker:
    """The gate of one action, and who is at work for it."""

    queue: str
    settings: DeliverySettings
    gate: LocalDestinationState
    tasks: dict[str, _Task] = field(default_factory=dict)
    most_tasks: int = 0
    workers: int = 0
    """How many there may be, as the last one said."""
    shares: Shares = field(default_factory=Shares)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"queue": self.queue, **self.activity()._asdict(), **asdict(self.gate.get_status())}

    def activity(self) -> Activity:
        """What its tasks are doing."""
        alive = self.alive(time.monotonic()).values()
        return Activity(
            len(alive),
            sum(task.preparing for task in alive),
            sum(task.sending for task in alive),
        )

    def alive(self, now: float) -> dict[str, _Task]:
        """Its tasks, without those that have died."""
        return {
            key: task for key, task in list(self.tasks.items()) if task.heard > now - TASK_SECONDS
        }


class Breakers:
    """The breakers of a node, made when they are first asked for. Safe to use from any thread."""

    def __init__(self) -> None:
        self._breakers: dict[str, Breaker] = {}
        self._lock = threading.Lock()

    def permit(self, asker: Asker) -> SendPermit:
        """What an action's task may send now."""
        return self._of(asker).gate.request_permit()

    def report(self, asker: Asker, report: SendReport) -> None:
        """A task tells how its sends went."""
        self._of(asker).gate.report(report)

    def claim(self, asker: Asker, count: int, within: float) -> float:
        """Seconds until a task may send so many events; theirs, if no longer than ``within``."""
        return self._of(asker).gate.claim(count, within)

    def share(self, asker: Asker) -> int:
        """How many sends a task may have under way, of those that all of its action may have."""
        now = time.monotonic()
        found = self._of(asker)
        with self._lock:
            busy = {key: task.sending for key, task in found.alive(now).items()}
            busy.setdefault(asker.task, asker.sending)
            limit, most = asker.settings.max_in_flight, asker.settings.most_sends
            return found.shares.of(asker.task, limit, busy, now, most)

    def leave(self, asker: Asker) -> None:
        """A task is through."""
        self._of(asker).tasks.pop(asker.task, None)

    def _of(self, asker: Asker) -> Breaker:
        """The breaker of whoever asks; it goes by the settings of whoever asked last.

        What is known of the destination stays known, or two pipelines with settings of their own
        would make each other forget it with every word.
        """
        now = time.monotonic()
        with self._lock:
            found = self._breakers.get(asker.action)
            if found is None:
                found = Breaker(asker.queue, asker.settings, LocalDestinationState(asker.settings))
                self._breakers[asker.action] = found
            elif found.settings != asker.settings:
                found.gate.apply_settings(asker.settings)
                found.settings = asker.settings
            found.queue = asker.queue
            found.workers = asker.workers
            if asker.probe is not None:
                found.gate.renew_probe(asker.probe)
            found.tasks[asker.task] = _Task(now, asker.preparing, asker.sending)
            found.tasks = found.alive(now)
            found.most_tasks = max(found.most_tasks, len(found.tasks))
        return found

    def of(self, action: str) -> Breaker:
        """The breaker of an action. Raises ``NoSuchBreaker``."""
        found = self._breakers.get(action)
        if found is None:
            known = ", ".join(sorted(self._breakers)) or "none"
            raise NoSuchBreaker(f"no task has delivered for {action!r} yet; there are: {known}")
        return found

    def all(self) -> dict[str, Breaker]:
        """All breakers by action."""
        with self._lock:
            return dict(sorted(self._breakers.items()))
