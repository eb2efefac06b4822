"""The gate: what all tasks of an action know together about its destination.

A task asks it for a permit when it begins and after a failure, and tells it how sends went:
failures at once, successes at the end. The node has a :class:`LocalGate` for every action and
hands it out to tasks; used by itself it is the gate of a single process.
"""

from __future__ import annotations

import random
import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.delivery.backoff import Backoff
from turnlane.delivery.breaker import Allowed, Breaker, State
from turnlane.delivery.rate import Bucket, burst_of
from turnlane.delivery.settings import DeliverySettings

MOST_ATTEMPTS: Final = 10_000
"""Places of events whose attempts are remembered; beyond that the oldest begin anew."""


@dataclass(frozen=True, slots=True)
class Permit:
    """What may be sent now."""

    state: State
    allowed: Allowed
    wait: float = 0.0
    """Seconds until it is worth asking again, where nothing is allowed."""
    probe: str | None = None
    """The token to report with, where a probe is allowed."""
    concurrency: int | None = None
    """How many sends at a time did well lately."""
    attempts: Mapping[str, int] = field(default_factory=dict)
    """How often events failed whose error nobody knows, by the place of the first:
    ``partition/offset``."""


@dataclass(frozen=True, slots=True)
class Report:
    """How sends went since the last report."""

    successes: int = 0
    """Sends that the destination answered, also with a refusal of what was sent."""
    partial: int = 0
    """Those of them that took some events, and want others later."""
    failures: int = 0
    retry_after: float | None = None
    """When the destination wants to hear from us again, in seconds, if it said so."""
    probe: str | None = None
    """The probe's token. With neither successes nor failures the probe was not used."""
    error: str | None = None
    """The last failure, for people."""
    attempts: Mapping[str, int] = field(default_factory=dict)
    """As in :class:`Permit`; 0 forgets."""
    concurrency: int | None = None
    delivered: int = 0
    """Events; so are the next two."""
    dead: int = 0
    kept: int = 0
    rejected: int = 0
    """Records inside of delivered events that the destination refused for good."""
    retries: int = 0
    """Sends of what had been sent before; those that went well, and those that did not."""
    retry_successes: int = 0
    retry_failures: Mapping[str, int] = field(default_factory=dict)
    """By what went wrong."""
    latency: float | None = None
    """Seconds that a send takes, of late."""


class Gate(Protocol):
    """What an engine needs to know. Calls may take a round trip, and raise ``RetryLater``."""

    def permit(self) -> Permit:
        """What may be sent now. A probe that it grants is the caller's until it reports on it."""

    def report(self, report: Report) -> None:
        """Tell how sends went."""

    def claim(self, count: int, within: float) -> float:
        """Seconds until so many events may be sent; theirs, if it is no longer than ``within``.

        All tasks of an action claim from one rate, and only if it has a ``rate_limit``.
        """

    @property
    def share(self) -> int | None:
        """How many sends this task may have under way; ``None``: as many as its settings say.

        Known without asking. It may change at any time, for other tasks come and go.
        """


@dataclass(frozen=True, slots=True)
class GateStatus:
    """A gate as people see it."""

    state: State
    wait: float
    failures: int
    """In a row."""
    open_for: float | None
    """Seconds since it opened."""
    error: str | None
    opened: int
    rejected: int
    """Permits that were refused."""
    concurrency: int | None
    latency: float | None
    totals: Mapping[str, int]
    """``sends``, ``failures``, ``delivered``, ``dead``, ``kept``, ``rejected``, ``retries``,
    ``retry_successes``."""
    retry_failures: Mapping[str, int]


class LocalGate:
    """The gate of an action, in this process. Safe to use from any thread."""

    def __init__(
        self,
        settings: DeliverySettings,
        *,
        clock: Clock = SYSTEM_CLOCK,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._backoff = Backoff.of(settings)
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        self._breaker = Breaker(settings.breaker_failures, settings.breaker_reset)
        self._bucket = _bucket_of(settings, clock.monotonic())
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._concurrency: int | None = None
        self._latency: float | None = None
        self._error: str | None = None
        self._rejected = 0
        self._totals: Counter[str] = Counter()
        self._retry_failures: Counter[str] = Counter()

    def permit(self) -> Permit:
        """What may be sent now; a probe is given to one asker only."""
        with self._lock:
            now = self._clock.monotonic()
            permit = self._seen(now)
            if permit.allowed is Allowed.NONE:
                self._rejected += 1
            if permit.allowed is not Allowed.PROBE:
                return permit
            token = uuid.uuid4().hex
            self._breaker = self._breaker.lend(now, token)
            return self._seen(now, token)

    def look(self) -> Permit:
        """What a permit would say; no probe is given away, and nothing counted."""
        with self._lock:
            return self._seen(self._clock.monotonic())

    def report(self, report: Report) -> None:
        """Tell how sends went."""
        with self._lock:
            self._count(report)
            self._judge(report)

    def claim(self, count: int, within: float) -> float:
        """Seconds until so many events may be sent; theirs, if it is no longer than ``within``."""
        with self._lock:
            if self._bucket is None:
                return 0.0
            return self._bucket.claim(count, within, self._clock.monotonic())

    @property
    def share(self) -> int | None:
        """Whoever uses this gate by itself shares with nobody."""
        return None

    def renew(self, token: str) -> None:
        """Whoever has this probe is alive: nobody else gets one for another while."""
        with self._lock:
            self._breaker = self._breaker.renewed(self._clock.monotonic(), token)

    def govern(self, settings: DeliverySettings) -> None:
        """Go by other settings from now on; what is known of the destination stays known."""
        with self._lock:
            self._backoff = Backoff.of(settings)
            self._breaker = self._breaker.governed(
                settings.breaker_failures, settings.breaker_reset
            )
            now = self._clock.monotonic()
            if self._bucket is None:
                self._bucket = _bucket_of(settings, now)
            elif settings.rate_limit is not None:
                self._bucket.governed(settings.rate_limit, burst_of(settings) or 1, now)

    def reset(self) -> None:
        """Close the breaker: a person says that the destination is back."""
        with self._lock:
            self._breaker = self._breaker.closed()

    def status(self) -> GateStatus:
        """All that is known."""
        with self._lock:
            now = self._clock.monotonic()
            since = self._breaker.open_since
            return GateStatus(
                state=self._breaker.state(now),
                wait=self._breaker.wait(now),
                failures=self._breaker.failures,
                open_for=None if since is None else now - since,
                error=self._error,
                opened=self._breaker.opened,
                rejected=self._rejected,
                concurrency=self._concurrency,
                latency=self._latency,
                totals=dict(self._totals),
                retry_failures=dict(self._retry_failures),
            )

    def _seen(self, now: float, token: str | None = None) -> Permit:
        return Permit(
            self._breaker.state(now),
            Allowed.PROBE if token else self._breaker.allowed(now),
            0.0 if token else self._breaker.wait(now),
            token,
            self._concurrency,
            dict(self._attempts),
        )

    def _judge(self, report: Report) -> None:
        """Successes first: what failed among them, or after, decides when to go on."""
        if report.partial:
            self._breaker = self._breaker.partly(
                self._clock.monotonic(), self._partial_wait(), report.probe
            )
            self._error = report.error
        elif report.successes:
            self._breaker = self._breaker.succeeded(report.probe)
            if not report.failures:
                self._error = None
        if report.failures:
            now = self._clock.monotonic()
            said = report.retry_after
            wait = self._backoff.wait(self._breaker.failures + 1, self._chance(), said)
            self._breaker = self._breaker.failed(
                now, wait, said=said is not None, token=report.probe
            )
            self._error = report.error
        elif report.probe is not None and not report.successes:
            self._breaker = self._breaker.released(report.probe)

    def _partial_wait(self) -> float:
        """As after a failure, but never for so long that those suffer who would be taken."""
        wait = self._backoff.wait(self._breaker.partial + 1, self._chance())
        return min(wait, self._breaker.reset_time)

    def _count(self, report: Report) -> None:
        self._totals.update(
            sends=report.successes + report.failures,
            failures=report.failures,
            delivered=report.delivered,
            dead=report.dead,
            kept=report.kept,
            rejected=report.rejected,
            retries=report.retries,
            retry_successes=report.retry_successes,
        )
        self._retry_failures.update(report.retry_failures)
        self._concurrency = report.concurrency or self._concurrency
        self._latency = report.latency if report.latency is not None else self._latency
        for place, attempts in report.attempts.items():
            self._attempts.pop(place, None)
            if attempts:
                self._attempts[place] = attempts
        while len(self._attempts) > MOST_ATTEMPTS:
            self._attempts.popitem(last=False)


def _bucket_of(settings: DeliverySettings, now: float) -> Bucket | None:
    burst = burst_of(settings)
    if burst is None or settings.rate_limit is None:
        return None
    return Bucket(settings.rate_limit, burst, now)
