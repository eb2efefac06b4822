"""The gate: what all tasks of an action know together about its destination.

A task asks it for a permit when it begins and after a failure, and tells it how sends went:
failures at once, successes at the end. The node has a :class:`LocalGate` for every action and
hands it out to tasks; used by itself it is the gate of a single process.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.delivery.breaker import Allowed, Backoff, Breaker, State
from turnlane.delivery.error_policy import error_type, said_when
from turnlane.delivery.limits import Bucket, burst_of
from turnlane.delivery.settings import DeliverySettings
from turnlane.errors import RetryLater

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


# ── liaison ──
# Between one run of an engine and its gate: permits asked for in time, reports sent in time.

log = logging.getLogger(__name__)

WEIGHT = 0.2
"""Of the last send, in the time that a send takes of late."""


class Liaison:
    """What a run knows of its gate. Used by the run's own thread only."""

    def __init__(self, gate: Gate, clock: Clock) -> None:
        self._gate = gate
        self._clock = clock
        self._failing = False
        self._probing = False
        self._counts: Counter[str] = Counter()
        self._retry_failures: Counter[str] = Counter()
        self._attempts: dict[str, int] = {}
        self._latency: float | None = None
        self.not_before = 0.0
        """Before this nothing may be sent; it is infinite if the gate does not answer."""
        self.permit = self._asked()

    def may_send(self, limit: int, in_flight: int) -> bool:
        """Whether one more send may begin; asks again where a wait is over."""
        if self.permit.allowed is Allowed.NONE and not self._waits():
            self.permit = self._asked()
        match self.permit.allowed:
            case Allowed.ALL:
                share = self.share
                return in_flight < (limit if share is None else min(limit, share))
            case Allowed.PROBE:
                return not self._probing
            case Allowed.NONE:
                return False

    def sending(self) -> str | None:
        """A send begins; if it is the probe, its token is to come back with the outcome."""
        self._probing = self.permit.probe is not None
        return self.permit.probe

    @property
    def share(self) -> int | None:
        """How many sends may be under way, if other tasks have a part in that."""
        return self._gate.share

    @property
    def is_shut_out(self) -> bool:
        """Whether the breaker is open, and it is not yet time for a probe."""
        return self.permit.state is State.OPEN and self._waits()

    @property
    def unused_probe(self) -> str | None:
        """The token of a probe that is ours to send and has not been sent."""
        return None if self._probing else self.permit.probe

    def answered(self, token: str | None, seconds: float) -> None:
        """The destination answered, if only to refuse what it was sent."""
        self._note_success(seconds)
        # While there is a probe to report on, nothing else may be told with it.
        if token is not None or self._failing or self.permit.probe is not None:
            self._failing = False
            self._report(token)
            self._ask(token)

    def answered_partly(self, token: str | None, seconds: float, error: BaseException) -> None:
        """The destination took some events and wants others later: told at once, as a failure."""
        self._failing = True
        self._note_success(seconds)
        self._counts["partial"] += 1
        self._report(token, error=_text(error))
        self._ask(token)

    def failed(self, token: str | None, error: BaseException) -> None:
        """A send failed: told at once, and it may change what is permitted."""
        self._failing = True
        self._counts["failures"] += 1
        self._report(token, retry_after=said_when(error), error=_text(error))
        if not self._waits():
            self._ask(token)

    def unsaid(self, token: str | None) -> None:
        """A send told nothing about the destination."""
        if token is not None:
            self._report(token)
            self._ask(token)

    def retried(self, error: BaseException | None) -> None:
        """Something was sent again, and went well or did not."""
        self._counts["retries"] += 1
        if error is None:
            self._counts["retry_successes"] += 1
        else:
            self._retry_failures[error_type(error)] += 1

    def remember(self, place: str, attempts: int) -> None:
        """How often events from this place on failed with an error that nobody knows; 0: never."""
        self._attempts[place] = attempts

    def count(self, **counts: int) -> None:
        """What became of events, and of records in them: by the names that a report has."""
        self._counts.update(counts)

    def end(self, concurrency: int) -> None:
        """The run is over: the last report. A probe that was not used, or not heard of, ends."""
        if self._probing:
            self._counts["failures"] += 1
        error = "a send did not end in time" if self._probing else None
        self._report(self.permit.probe, error=error, concurrency=concurrency)

    def _note_success(self, seconds: float) -> None:
        self._counts["successes"] += 1
        late = self._latency
        self._latency = seconds if late is None else late + WEIGHT * (seconds - late)

    def _waits(self) -> bool:
        return self._clock.monotonic() < self.not_before

    def _ask(self, token: str | None) -> None:
        """Ask again, but never while there is a probe to report on."""
        if self.permit.probe == token or self.permit.probe is None:
            self.permit = self._asked()

    def _asked(self) -> Permit:
        self._probing = False
        try:
            permit = self._gate.permit()
        except RetryLater as error:
            log.warning("no permit to be had, events are kept: %s", error)
            permit = Permit(State.OPEN, Allowed.NONE, wait=math.inf)
        waits = permit.allowed is Allowed.NONE
        self.not_before = self._clock.monotonic() + permit.wait if waits else 0.0
        return permit

    def _report(
        self,
        token: str | None,
        *,
        retry_after: float | None = None,
        error: str | None = None,
        concurrency: int | None = None,
    ) -> None:
        report = Report(
            probe=token,
            retry_after=retry_after,
            error=error,
            concurrency=concurrency,
            latency=self._latency,
            attempts=self._attempts,
            retry_failures=dict(self._retry_failures),
            **self._counts,
        )
        self._counts, self._retry_failures, self._attempts = Counter(), Counter(), {}
        try:
            self._gate.report(report)
        except RetryLater as lost:
            log.warning("how sends went could not be reported: %s", lost)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# ── quota ──
# A quota: what one run may send of the rate that its action has.


ASK_AGAIN: Final = 1.0
"""Seconds: after a claim that came to nothing, another one is made no sooner."""


class Quota:
    """Claims tokens of the gate as they are needed. Used by the run's own thread only."""

    def __init__(self, gate: Gate, clock: Clock) -> None:
        self._gate = gate
        self._clock = clock
        self._claimed = 0
        """Tokens that are ours: from ``_from`` on."""
        self._from = 0.0
        self._ask_at = -math.inf
        self._refused = 0.0

    def wait(self, count: int, until: float) -> float:
        """Seconds until ``count`` events may be sent: 0 if they may now.

        Nothing is claimed that comes only after ``until``.
        """
        now = self._clock.monotonic()
        if count > self._claimed:
            if now < self._ask_at:
                return self._refused
            wait = self._asked(count - self._claimed, until - now)
            if wait > until - now:
                self._ask_at, self._refused = now + ASK_AGAIN, wait
                return wait
            self._claimed = count
            self._from = max(self._from, now + wait)
        return max(0.0, self._from - now)

    def take(self, count: int) -> None:
        """So many are sent, for which there was nothing to wait."""
        self._claimed -= count

    def _asked(self, count: int, within: float) -> float:
        try:
            return self._gate.claim(count, max(0.0, within))
        except RetryLater as error:
            log.warning("no word of how much may be sent, events are kept: %s", error)
            return math.inf
