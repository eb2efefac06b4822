"""Between one run of an engine and its gate: permits asked for in time, reports sent in time."""

from __future__ import annotations

import logging
import math
from collections import Counter

from turnlane.clock import Clock
from turnlane.delivery.breaker import Allowed, State
from turnlane.delivery.gate import Gate, Permit, Report
from turnlane.delivery.verdict import error_type, said_when
from turnlane.errors import RetryLater

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
