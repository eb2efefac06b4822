"""What the tasks of an action know together about its destination, and how a run uses it.

``DestinationState`` is the shared part: circuit breaker, rate limit, and how many sends each task
may have in progress. ``LocalDestinationState`` is the state itself. A node has one for every
action, and its tasks reach it through a ``RemoteDestinationState`` (``client/destination.py``);
used directly it serves a single process.

``DestinationClient`` is one run's side of it. It asks for a permit when the run starts and after a
failure, and reports how sends went: failures at once, because other tasks must stop too, successes
together at the end.
"""

from __future__ import annotations

import math
import random
import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol

from turnlane.clock import SYSTEM_CLOCK, Clock
from turnlane.delivery.breaker import AllowedSends, BreakerState, CircuitBreaker
from turnlane.delivery.error_policy import AttemptSignal, get_error_type, get_retry_after
from turnlane.delivery.limits import get_burst
from turnlane.delivery.settings import DeliverySettings
from turnlane.errors import RetryLater
from turnlane.intervals import RangeSet, Span
from turnlane.logs import get_logger
from turnlane.pacing import Backoff, TokenBucket

log = get_logger(__name__)

MAX_REMEMBERED_ATTEMPTS: Final = 10_000
"""Events whose attempts are remembered. Beyond that the oldest start again from zero."""
MAX_REMEMBERED_SPANS: Final = 1000
"""Spans of events whose send failed. Beyond that the oldest are forgotten: they count as new."""
LATENCY_WEIGHT: Final = 0.2
"""The weight of the last send in the moving average of the seconds that a send takes."""
_COUNTED: Final = (
    "failures",
    "delivered",
    "dead",
    "kept",
    "rejected",
    "retries",
    "retry_successes",
)
"""The counts of a report that are added up, besides the sends."""
CLAIM_RETRY: Final = 1.0
"""Seconds after a refused claim on the rate before the next claim."""


SpansBySource = Mapping[str, Sequence[Span]]
"""Offsets of events, by ``queue/partition``."""


class FailedOffsets:
    """The events that are not settled and of which a send failed. Not thread-safe."""

    def __init__(self, spans: SpansBySource = MappingProxyType({})) -> None:
        self._offsets: dict[str, RangeSet] = {}
        self.add(spans)

    def __bool__(self) -> bool:
        return bool(self._offsets)

    def add(self, spans: SpansBySource) -> None:
        """Add events whose send failed."""
        for source, its_spans in spans.items():
            known = self._offsets.setdefault(source, RangeSet())
            for first, end in its_spans:
                known.add(first, end)
            for first, end in list(known)[:-MAX_REMEMBERED_SPANS]:
                known.remove(first, end)

    def remove(self, spans: SpansBySource) -> None:
        """Remove events that are settled."""
        for source, its_spans in spans.items():
            known = self._offsets.get(source, RangeSet())
            for first, end in its_spans:
                known.remove(first, end)
            if not known:
                self._offsets.pop(source, None)

    def find(self, spans: SpansBySource) -> dict[str, list[Span]]:
        """Return those of the events that are in here."""
        found = {
            source: [part for span in its_spans for part in self._offsets[source].within(*span)]
            for source, its_spans in spans.items()
            if source in self._offsets
        }
        return {source: parts for source, parts in found.items() if parts}

    def get_spans(self) -> dict[str, list[Span]]:
        """Return all events."""
        return {source: list(known) for source, known in self._offsets.items()}


@dataclass(frozen=True, slots=True)
class SendPermit:
    """What may be sent now. A node sends it to tasks: the names of the fields are fixed."""

    state: BreakerState
    allowed: AllowedSends
    wait: float = 0.0
    """Seconds until it is worth asking again, if nothing is allowed."""
    probe: str | None = None
    """The token to report with, if a probe is allowed."""
    concurrency: int | None = None
    """The number of concurrent sends that worked well lately."""
    attempts: Mapping[str, int] = field(default_factory=dict)
    """How many times events failed with an unknown error, by the first event of a batch:
    ``partition/offset``."""
    failed: SpansBySource = field(default_factory=dict)
    """Events of which a send failed, in whichever task: sending them again is a retry."""


@dataclass(frozen=True, slots=True)
class SendReport:
    """How sends went since the last report. Tasks send it to a node: the names are fixed."""

    successes: int = 0
    """Sends that the destination answered, also by refusing the events."""
    partial: int = 0
    """Successes in which the destination took some events and wants others later."""
    failures: int = 0
    retry_after: float | None = None
    """Seconds after which the destination asked to be tried again, if it did."""
    probe: str | None = None
    """The probe's token. With neither successes nor failures the probe was not used."""
    error: str | None = None
    """The last failure, for people."""
    error_type: str | None = None
    """The type of the last failure, for metrics."""
    attempts: Mapping[str, int] = field(default_factory=dict)
    """As in :class:`SendPermit`; 0 forgets the event."""
    concurrency: int | None = None
    delivered: int = 0
    """Events delivered; ``dead`` and ``kept`` (deferred) count events too."""
    dead: int = 0
    kept: int = 0
    rejected: int = 0
    """Records inside delivered events that the destination refused for good."""
    failed: SpansBySource = field(default_factory=dict)
    """Events of which a send failed; ``settled`` are those of them that have been settled since."""
    settled: SpansBySource = field(default_factory=dict)
    retries: int = 0
    """Sends of events of which an earlier send failed, in whichever task."""
    retry_successes: int = 0
    retry_failures: Mapping[str, int] = field(default_factory=dict)
    """Retries that failed, by the type of the error."""
    latency: float | None = None
    """Seconds that a send takes, as a moving average."""


class DestinationState(Protocol):
    """The state that the tasks of an action share.

    A call may take a round trip to a node, and raises ``RetryLater`` if the node is not there.
    """

    def request_permit(self) -> SendPermit:
        """Return what may be sent now. A probe belongs to the caller until it reports on it."""

    def report(self, report: SendReport) -> None:
        """Record how sends went."""

    def claim(self, count: int, within: float) -> float:
        """Return the seconds until ``count`` events may be sent; claim them if ``within`` allows.

        All tasks of an action claim from one rate. Only for actions with a ``rate_limit``.
        """

    @property
    def share(self) -> int | None:
        """How many sends this task may have in progress; ``None``: as many as its settings say.

        Reading it is cheap. It changes when other tasks start and end.
        """


@dataclass(frozen=True, slots=True)
class DestinationStatus:
    """The state as people see it. The names of the fields are part of the HTTP API."""

    state: BreakerState
    wait: float
    failures: int
    """In a row."""
    open_for: float | None
    """Seconds since the breaker opened."""
    error: str | None
    opened: int
    """How many times the breaker opened."""
    rejected: int
    """Permits that allowed nothing."""
    concurrency: int | None
    latency: float | None
    totals: Mapping[str, int]
    """``sends``, ``failures``, ``delivered``, ``dead``, ``kept``, ``rejected``, ``retries``,
    ``retry_successes``."""
    retry_failures: Mapping[str, int]
    failure_types: Mapping[str, int]
    """The failures by the type of the error."""


class LocalDestinationState:
    """The state of an action's destination. One lock guards all of it; any thread may call."""

    def __init__(
        self,
        settings: DeliverySettings,
        *,
        clock: Clock = SYSTEM_CLOCK,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        self._backoff = make_backoff(settings)
        self._breaker = CircuitBreaker(settings.breaker_failures, settings.breaker_reset)
        self._bucket = _make_bucket(settings, clock.monotonic())
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._failed = FailedOffsets()
        self._concurrency: int | None = None
        self._latency: float | None = None
        self._error: str | None = None
        self._rejected = 0
        self._totals: Counter[str] = Counter()
        self._retry_failures: Counter[str] = Counter()
        self._failure_types: Counter[str] = Counter()

    def request_permit(self) -> SendPermit:
        with self._lock:
            now = self._clock.monotonic()
            permit = self._make_permit(now)
            if permit.allowed is AllowedSends.NONE:
                self._rejected += 1
            if permit.allowed is not AllowedSends.PROBE:
                return permit
            token = uuid.uuid4().hex
            self._breaker = self._breaker.lend_probe(now, token)
            return self._make_permit(now, token)

    def report(self, report: SendReport) -> None:
        with self._lock:
            self._count(report)
            self._update_breaker(report)

    def claim(self, count: int, within: float) -> float:
        with self._lock:
            if self._bucket is None:
                return 0.0
            return self._bucket.claim(count, within, self._clock.monotonic())

    @property
    def share(self) -> int | None:
        """``None``: in a single process there are no other tasks to share with."""
        return None

    def renew_probe(self, token: str) -> None:
        """Extend the lease of a probe: the task that has it is alive."""
        with self._lock:
            self._breaker = self._breaker.renew_probe(self._clock.monotonic(), token)

    def apply_settings(self, settings: DeliverySettings) -> None:
        """Use other settings. Everything known about the destination is kept."""
        with self._lock:
            self._backoff = make_backoff(settings)
            self._breaker = self._breaker.with_limits(
                settings.breaker_failures, settings.breaker_reset
            )
            now = self._clock.monotonic()
            if self._bucket is None:
                self._bucket = _make_bucket(settings, now)
            elif settings.rate_limit is not None:
                self._bucket.set_rate(settings.rate_limit, get_burst(settings) or 1, now)

    def reset(self) -> None:
        """Close the breaker: a person says that the destination is back."""
        with self._lock:
            self._breaker = self._breaker.reset()

    def get_status(self) -> DestinationStatus:
        """Return everything that is known."""
        with self._lock:
            now = self._clock.monotonic()
            since = self._breaker.open_since
            return DestinationStatus(
                state=self._breaker.get_state(now),
                wait=self._breaker.get_wait(now),
                failures=self._breaker.failures,
                open_for=None if since is None else now - since,
                error=self._error,
                opened=self._breaker.opened,
                rejected=self._rejected,
                concurrency=self._concurrency,
                latency=self._latency,
                totals=dict(self._totals),
                retry_failures=dict(self._retry_failures),
                failure_types=dict(self._failure_types),
            )

    def _make_permit(self, now: float, token: str | None = None) -> SendPermit:
        return SendPermit(
            self._breaker.get_state(now),
            AllowedSends.PROBE if token else self._breaker.get_allowed(now),
            0.0 if token else self._breaker.get_wait(now),
            token,
            self._concurrency,
            dict(self._attempts),
            self._failed.get_spans(),
        )

    def _update_breaker(self, report: SendReport) -> None:
        # Successes first: a failure among them, or after them, decides when the next send goes.
        if report.partial:
            # As after a failure, but capped: the destination would take other events sooner.
            wait = self._backoff.get_wait(self._breaker.partial + 1, self._chance())
            self._breaker = self._breaker.record_partial(
                self._clock.monotonic(), min(wait, self._breaker.reset_time), report.probe
            )
            self._error = report.error
        elif report.successes:
            self._breaker = self._breaker.record_success(report.probe)
            if not report.failures:
                self._error = None
        if report.failures:
            now = self._clock.monotonic()
            requested = report.retry_after
            wait = self._backoff.get_wait(self._breaker.failures + 1, self._chance(), requested)
            self._breaker = self._breaker.record_failure(
                now, wait, is_requested=requested is not None, token=report.probe
            )
            self._error = report.error
        elif report.probe is not None and not report.successes:
            self._breaker = self._breaker.release_probe(report.probe)

    def _count(self, report: SendReport) -> None:
        self._totals["sends"] += report.successes + report.failures
        self._totals.update({name: getattr(report, name) for name in _COUNTED})
        self._retry_failures.update(report.retry_failures)
        if report.failures:
            self._failure_types[report.error_type or "unknown"] += report.failures
        self._failed.add(report.failed)
        self._failed.remove(report.settled)
        self._concurrency = report.concurrency or self._concurrency
        self._latency = report.latency if report.latency is not None else self._latency
        for event_ref, attempts in report.attempts.items():
            self._attempts.pop(event_ref, None)
            if attempts:
                self._attempts[event_ref] = attempts
        while len(self._attempts) > MAX_REMEMBERED_ATTEMPTS:
            self._attempts.popitem(last=False)


def make_backoff(settings: DeliverySettings) -> Backoff:
    """Return the backoff that the settings describe."""
    return Backoff.from_jitter(
        settings.backoff, settings.max_backoff, settings.jitter, settings.backoff_multiplier
    )


def _make_bucket(settings: DeliverySettings, now: float) -> TokenBucket | None:
    burst = get_burst(settings)
    if burst is None or settings.rate_limit is None:
        return None
    return TokenBucket(settings.rate_limit, burst, now)


class DestinationClient:
    """One run's view of its destination's state. Only the run's own thread uses it.

    If the state cannot be reached, nothing may be sent: the run defers its events.
    """

    def __init__(self, state: DestinationState, clock: Clock, *, has_rate_limit: bool) -> None:
        self._state = state
        self._clock = clock
        self._quota = RateQuota(state, clock) if has_rate_limit else None
        self._has_failed = False
        self._is_probe_sent = False
        self._counts: Counter[str] = Counter()
        self._retry_failures: Counter[str] = Counter()
        self._attempts: dict[str, int] = {}
        self._new_failed, self._new_settled = FailedOffsets(), FailedOffsets()
        """What the next report says about failed sends."""
        self._latency: float | None = None
        self.not_before = 0.0
        """Nothing may be sent before this time; infinite if the state cannot be reached."""
        self.permit = self._request_permit()
        self._failed = FailedOffsets(self.permit.failed)
        """Events of which a send failed: in other tasks before this run began, or in this run."""

    # ── before a send ────────────────────────────────────────────────────────────────────────────

    def can_send(self, limit: int, in_flight: int) -> bool:
        """Whether one more send may start. Asks for a new permit when a wait is over."""
        if self.permit.allowed is AllowedSends.NONE and not self._is_waiting():
            self.permit = self._request_permit()
        match self.permit.allowed:
            case AllowedSends.ALL:
                share = self.share
                return in_flight < (limit if share is None else min(limit, share))
            case AllowedSends.PROBE:
                return not self._is_probe_sent
            case AllowedSends.NONE:
                return False

    def get_rate_wait(self, count: int, until: float) -> float:
        """Return the seconds until the rate limit allows ``count`` events; 0 if it does now.

        Claims no tokens that would come only after ``until``.
        """
        return 0.0 if self._quota is None else self._quota.get_wait(count, until)

    def start_send(self, count: int) -> str | None:
        """Record that ``count`` events are sent; return the probe's token if this is the probe.

        The token must be reported together with the result of the send.
        """
        if self._quota is not None:
            self._quota.take(count)
        self._is_probe_sent = self.permit.probe is not None
        return self.permit.probe

    @property
    def share(self) -> int | None:
        """How many sends this task may have in progress; ``None``: no limit but its settings."""
        return self._state.share

    @property
    def is_breaker_open(self) -> bool:
        """Whether the breaker is open and it is too early for a probe."""
        return self.permit.state is BreakerState.OPEN and self._is_waiting()

    @property
    def unused_probe(self) -> str | None:
        """The token of a probe that this run has and has not sent."""
        return None if self._is_probe_sent else self.permit.probe

    # ── after a send ─────────────────────────────────────────────────────────────────────────────

    def on_attempt(
        self, signal: AttemptSignal, token: str | None, seconds: float, error: BaseException | None
    ) -> None:
        """Record what an attempt says about the destination.

        Reports failures and partial answers at once: they may change what all tasks are permitted.
        """
        text = None if error is None else f"{type(error).__name__}: {error}"
        error_type = None if error is None else get_error_type(error)
        if signal in (AttemptSignal.ANSWERED, AttemptSignal.PARTIAL):
            self._counts["successes"] += 1
            average = seconds if self._latency is None else self._latency
            self._latency = average + LATENCY_WEIGHT * (seconds - average)
        match signal:
            case AttemptSignal.ANSWERED:
                # While this run has a probe, a report is about one send only: this success must
                # not be reported later with the probe's token.
                if token is None and not self._has_failed and self.permit.probe is None:
                    return
                self._has_failed = False
                self._report(token)
            case AttemptSignal.PARTIAL:
                self._has_failed = True
                self._counts["partial"] += 1
                self._report(token, error=text)
            case AttemptSignal.FAILED:
                self._has_failed = True
                self._counts["failures"] += 1
                retry_after = None if error is None else get_retry_after(error)
                self._report(token, retry_after=retry_after, error=text, error_type=error_type)
                if self._is_waiting():
                    return
            case AttemptSignal.NONE:
                if token is None:
                    return
                self._report(token)  # gives the probe back
        # Unless this run has another probe to report on first, it needs a new permit.
        if self.permit.probe in (token, None):
            self.permit = self._request_permit()

    @property
    def has_any_failed(self) -> bool:
        """Whether there are unsettled events of which a send failed."""
        return bool(self._failed)

    def has_failed(self, sent: SpansBySource) -> bool:
        """Whether an earlier send of some of these events failed, in this task or another one."""
        return bool(self._failed.find(sent))

    def remember_failed(self, sent: SpansBySource) -> None:
        """Remember that a send of these events failed, for this run and for later tasks."""
        self._failed.add(sent)
        self._new_failed.add(sent)

    def forget_settled(self, settled: SpansBySource) -> None:
        """Forget which of these events had failed: they will not be sent again."""
        found = self._failed.find(settled)
        self._failed.remove(found)
        self._new_failed.remove(found)
        self._new_settled.add(found)

    def count_retry(self, error: BaseException | None) -> None:
        """Count that events were sent again, and whether that failed."""
        self._counts["retries"] += 1
        if error is None:
            self._counts["retry_successes"] += 1
        else:
            self._retry_failures[get_error_type(error)] += 1

    def remember_attempts(self, event_ref: str, attempts: int) -> None:
        """Remember how many times the batch that starts with this event failed; 0 forgets it."""
        self._attempts[event_ref] = attempts

    def count(self, **counts: int) -> None:
        """Add to the counts of the next report, by the names of its fields."""
        self._counts.update(counts)

    def finish(self, concurrency: int) -> None:
        """Send the last report of the run. A probe that did not end in time counts as failed."""
        error = error_type = None
        if self._is_probe_sent:
            self._counts["failures"] += 1
            error, error_type = "a send did not end in time", "timeout"
        self._report(self.permit.probe, error=error, error_type=error_type, concurrency=concurrency)

    def _is_waiting(self) -> bool:
        return self._clock.monotonic() < self.not_before

    def _request_permit(self) -> SendPermit:
        self._is_probe_sent = False
        try:
            permit = self._state.request_permit()
        except RetryLater as error:
            log.warning("delivery.permit_unavailable", error=error, hint="the events are deferred")
            permit = SendPermit(BreakerState.OPEN, AllowedSends.NONE, wait=math.inf)
        waits = permit.allowed is AllowedSends.NONE
        self.not_before = self._clock.monotonic() + permit.wait if waits else 0.0
        return permit

    def _report(
        self,
        token: str | None,
        *,
        retry_after: float | None = None,
        error: str | None = None,
        error_type: str | None = None,
        concurrency: int | None = None,
    ) -> None:
        report = SendReport(
            probe=token,
            retry_after=retry_after,
            error=error,
            error_type=error_type,
            concurrency=concurrency,
            latency=self._latency,
            attempts=self._attempts,
            failed=self._new_failed.get_spans(),
            settled=self._new_settled.get_spans(),
            retry_failures=dict(self._retry_failures),
            **self._counts,
        )
        self._counts, self._retry_failures, self._attempts = Counter(), Counter(), {}
        self._new_failed, self._new_settled = FailedOffsets(), FailedOffsets()
        try:
            self._state.report(report)
        except RetryLater as failure:
            log.warning("delivery.report_lost", error=failure)


class RateQuota:
    """The tokens of the action's rate that one run has claimed. Only the run's thread uses it."""

    def __init__(self, state: DestinationState, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        self._claimed = 0
        """Tokens that this run may use from the time ``_usable_at``."""
        self._usable_at = 0.0
        self._ask_at = -math.inf
        self._refused_wait = 0.0

    def get_wait(self, count: int, until: float) -> float:
        """Return the seconds until ``count`` events may be sent; claim the missing tokens.

        Claims no tokens that would come only after ``until``.
        """
        now = self._clock.monotonic()
        if count > self._claimed:
            if now < self._ask_at:
                return self._refused_wait
            try:
                wait = self._state.claim(count - self._claimed, max(0.0, until - now))
            except RetryLater as error:
                log.warning("delivery.rate_unavailable", error=error, hint="events are deferred")
                wait = math.inf
            if wait > until - now:
                self._ask_at, self._refused_wait = now + CLAIM_RETRY, wait
                return wait
            self._claimed = count
            self._usable_at = max(self._usable_at, now + wait)
        return max(0.0, self._usable_at - now)

    def take(self, count: int) -> None:
        """Use tokens for which ``get_wait`` returned 0."""
        self._claimed -= count
