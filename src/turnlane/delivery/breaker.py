"""The circuit breaker of an action: whether its destination is worth trying. Pure.

closed     sends go; after a failure they wait for the backoff
open       nothing goes: too many sends in a row failed, and the wait after the last is not over
half-open  the wait is over: one probe goes, and its result decides

The probe is lent to one task under a token. A task may die with it, so the probe is free again if
the task is silent for ``PROBE_LEASE`` seconds. A task that is alive renews it, however long the
send takes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self

PROBE_LEASE: Final = 60.0
"""Seconds without news of a probe after which another task may send one."""
PROBE_POLL: Final = 1.0
"""Seconds after which a task asks again while another task has the probe."""


class BreakerState(enum.StrEnum):
    """Whether sends go."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class AllowedSends(enum.StrEnum):
    """How much may be sent."""

    ALL = "all"
    PROBE = "probe"
    """One send, whose result is reported with the probe's token."""
    NONE = "none"


class Probe(NamedTuple):
    """A probe in progress: the token to report it with, and when it is free again."""

    token: str
    expires: float


@dataclass(frozen=True, slots=True)
class CircuitBreaker:
    """A breaker at one moment; each event returns a changed copy. Times are monotonic seconds."""

    threshold: int
    """The number of failures in a row that opens it; 0: it never opens."""
    reset_time: float
    """Seconds that it stays open at least."""
    failures: int = 0
    """Failures in a row. Failures of sends that were in progress together count once."""
    partial: int = 0
    """Sends in a row that the destination took only in part; counted in the same way."""
    not_before: float = 0.0
    """Nothing may be sent before this time."""
    is_requested: bool = False
    """Whether the destination asked for ``not_before``. A success does not change it then."""
    open_since: float | None = None
    """When it opened; ``None`` while it is closed."""
    probe: Probe | None = None
    opened: int = 0
    """How many times it opened."""

    def get_state(self, now: float) -> BreakerState:
        """Return the state at ``now``."""
        if self.open_since is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.not_before else BreakerState.HALF_OPEN

    def get_wait(self, now: float) -> float:
        """Return the seconds until a send may be allowed: 0 if it is now."""
        if now < self.not_before:
            return self.not_before - now
        if self.open_since is not None and self.probe is not None and now < self.probe.expires:
            return min(PROBE_POLL, self.probe.expires - now)
        return 0.0

    def get_allowed(self, now: float) -> AllowedSends:
        """Return how much may be sent at ``now``."""
        if self.get_wait(now) > 0:
            return AllowedSends.NONE
        return AllowedSends.ALL if self.open_since is None else AllowedSends.PROBE

    def lend_probe(self, now: float, token: str) -> Self:
        """Lend the probe under this token. ``get_allowed`` must have returned ``PROBE``."""
        assert self.get_allowed(now) is AllowedSends.PROBE
        return replace(self, probe=Probe(token, now + PROBE_LEASE))

    def renew_probe(self, now: float, token: str) -> Self:
        """Extend the lease: the task with the probe is alive and still waits for the result."""
        if not self._is_probe(token):
            return self
        return replace(self, probe=Probe(token, now + PROBE_LEASE))

    def release_probe(self, token: str) -> Self:
        """Take back a probe that was never sent: the next task that asks gets it."""
        return replace(self, probe=None) if self._is_probe(token) else self

    def with_limits(self, threshold: int, reset_time: float) -> Self:
        """Change the settings. The state is kept, unless this switches the breaker off."""
        changed = replace(self, threshold=threshold, reset_time=reset_time)
        return changed if threshold else replace(changed, open_since=None, probe=None)

    def record_success(self, token: str | None = None) -> Self:
        """Record an answer of the destination. While the breaker is open only the probe counts."""
        if self.open_since is not None and not self._is_probe(token):
            return self
        not_before = self.not_before if self.is_requested else 0.0
        return replace(
            self, failures=0, partial=0, not_before=not_before, open_since=None, probe=None
        )

    def record_partial(self, now: float, wait: float, token: str | None = None) -> Self:
        """Record that the destination took only some events: send nothing for ``wait`` seconds.

        The destination is available, so this never opens the breaker and closes an open one.
        """
        if self.open_since is not None and not self._is_probe(token):
            return self
        answered = replace(self, failures=0, open_since=None, probe=None)
        if now < self.not_before:
            return answered
        return replace(
            answered, partial=self.partial + 1, not_before=now + wait, is_requested=False
        )

    def record_failure(
        self, now: float, wait: float, *, is_requested: bool = False, token: str | None = None
    ) -> Self:
        """Record a failed send: send nothing for ``wait`` seconds.

        ``is_requested`` says that the destination asked for this wait.
        """
        if self.open_since is not None:
            if not self._is_probe(token):
                return self
            return replace(
                self,
                failures=self.failures + 1,
                not_before=now + (wait if is_requested else max(wait, self.reset_time)),
                is_requested=False,
                probe=None,
            )
        until = now + wait
        if now < self.not_before:
            # The send was in progress when another one failed: only a longer wait is news.
            is_later = is_requested and until > self.not_before
            return replace(self, not_before=until, is_requested=True) if is_later else self
        failures = self.failures + 1
        if not self.threshold or failures < self.threshold:
            return replace(self, failures=failures, not_before=until, is_requested=is_requested)
        return replace(
            self,
            failures=failures,
            not_before=now + max(wait, self.reset_time),
            is_requested=False,
            open_since=now,
            opened=self.opened + 1,
        )

    def reset(self) -> Self:
        """Close it and forget all failures: a person says that the destination is back."""
        return type(self)(self.threshold, self.reset_time, opened=self.opened)

    def _is_probe(self, token: str | None) -> bool:
        return self.probe is not None and self.probe.token == token
