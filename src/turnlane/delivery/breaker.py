"""The circuit breaker of an action: whether its destination is worth trying. Pure.

closed     sends go; after a failure they wait for the backoff
open       nothing goes: as many failures in a row as it takes, and none of the waits is over
half-open  the wait is over: one probe goes, and its outcome decides

The probe is lent: whoever has it may die, so it comes back by itself after a time in which nothing
was heard of it. Whoever lives renews it, however long the send takes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self

from turnlane.delivery.settings import DeliverySettings
from turnlane.retry import doubled

LEASE: Final = 60.0
"""How long a probe may be away unheard of before another one goes."""
ASK_AGAIN: Final = 1.0
"""How soon to ask again while somebody else has the probe."""


class State(enum.StrEnum):
    """Whether sends go."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Allowed(enum.StrEnum):
    """How much may be sent."""

    ALL = "all"
    PROBE = "probe"
    """One send, whose outcome is reported with the probe's token."""
    NONE = "none"


class Probe(NamedTuple):
    """A probe under way: who may report on it, and until when."""

    token: str
    expires: float


@dataclass(frozen=True, slots=True)
class Breaker:
    """A breaker at one moment; what happens makes another one of it. Times are monotonic."""

    threshold: int
    reset_time: float
    failures: int = 0
    """In a row. Those of sends that were under way together count once."""
    partial: int = 0
    """Sends in a row of which the destination wants some events later; counted in the same way."""
    not_before: float = 0.0
    said: bool = False
    """Whether ``not_before`` is what the destination said, which no success changes."""
    open_since: float | None = None
    """When it opened; none while it is closed."""
    probe: Probe | None = None
    opened: int = 0
    """How often it opened."""

    def state(self, now: float) -> State:
        """The state at ``now``."""
        if self.open_since is None:
            return State.CLOSED
        return State.OPEN if now < self.not_before else State.HALF_OPEN

    def wait(self, now: float) -> float:
        """Seconds until something may be sent: 0 if it may now."""
        if now < self.not_before:
            return self.not_before - now
        if self.open_since is not None and self.probe is not None and now < self.probe.expires:
            return min(ASK_AGAIN, self.probe.expires - now)
        return 0.0

    def allowed(self, now: float) -> Allowed:
        """How much may be sent at ``now``."""
        if self.wait(now) > 0:
            return Allowed.NONE
        return Allowed.ALL if self.open_since is None else Allowed.PROBE

    def lend(self, now: float, token: str) -> Self:
        """Give the probe away, under this token; only where ``allowed`` says so."""
        assert self.allowed(now) is Allowed.PROBE
        return replace(self, probe=Probe(token, now + LEASE))

    def renewed(self, now: float, token: str) -> Self:
        """Whoever has the probe is alive, and still waits for its outcome."""
        return replace(self, probe=Probe(token, now + LEASE)) if self._is_probe(token) else self

    def governed(self, threshold: int, reset_time: float) -> Self:
        """Go by other settings from now on; what is known of the destination stays known."""
        return replace(self, threshold=threshold, reset_time=reset_time)

    def succeeded(self, token: str | None = None) -> Self:
        """After a send that the destination answered; of an open breaker only the probe counts."""
        if self.open_since is not None and not self._is_probe(token):
            return self
        kept = self.not_before if self.said else 0.0
        return replace(self, failures=0, partial=0, not_before=kept, open_since=None, probe=None)

    def partly(self, now: float, wait: float, token: str | None = None) -> Self:
        """After a send of which some events are wanted later: stay away for ``wait`` seconds.

        The destination is there, so this opens nothing, and closes what was open.
        """
        if self.open_since is not None and not self._is_probe(token):
            return self
        answered = replace(self, failures=0, open_since=None, probe=None)
        if now < self.not_before:
            return answered
        return replace(answered, partial=self.partial + 1, not_before=now + wait, said=False)

    def failed(
        self, now: float, wait: float, *, said: bool = False, token: str | None = None
    ) -> Self:
        """After a send that failed: stay away for ``wait`` seconds."""
        if self.open_since is not None:
            return self._probe_failed(now, wait, said=said) if self._is_probe(token) else self
        until = now + wait
        if now < self.not_before:
            # It was under way when another one failed, and tells nothing new but how long to wait.
            later = said and until > self.not_before
            return replace(self, not_before=until, said=True) if later else self
        failures = self.failures + 1
        if failures < self.threshold:
            return replace(self, failures=failures, not_before=until, said=said)
        return replace(
            self,
            failures=failures,
            not_before=now + max(wait, self.reset_time),
            said=False,
            open_since=now,
            opened=self.opened + 1,
        )

    def released(self, token: str) -> Self:
        """After a probe that was never sent: the next asker gets it."""
        return replace(self, probe=None) if self._is_probe(token) else self

    def closed(self) -> Self:
        """As new: a person says that the destination is back."""
        return type(self)(self.threshold, self.reset_time, opened=self.opened)

    def _is_probe(self, token: str | None) -> bool:
        return self.probe is not None and self.probe.token == token

    def _probe_failed(self, now: float, wait: float, *, said: bool) -> Self:
        return replace(
            self,
            failures=self.failures + 1,
            not_before=now + (wait if said else max(wait, self.reset_time)),
            said=False,
            probe=None,
        )


# ── backoff ──
# Backoff: how long to stay away from a destination that failed. Pure.

LONGEST_SAID: Final = 86_400.0
"""A destination that says "in a year" is asked again after a day."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double from ``first`` up to ``cap``, each changed by chance by ``jitter``."""

    first: float
    cap: float
    jitter: float

    @classmethod
    def of(cls, settings: DeliverySettings) -> Self:
        """The backoff that the settings describe."""
        return cls(settings.backoff, settings.max_backoff, settings.jitter)

    def wait(self, failures: int, chance: float, said: float | None = None) -> float:
        """Seconds to wait after so many failures in a row; ``chance`` is from 0 to 1.

        ``said`` is when the destination wants to hear from us again, if it said so. It knows best,
        and is never asked sooner; but one that says "at once" over and over is still left alone
        for a while.
        """
        if said is not None:
            least = max(min(said, LONGEST_SAID), self.first * (1 - self.jitter))
            return least * (1 + self.jitter * chance)
        wait = doubled(self.first, self.cap, failures)
        return min(self.cap, wait * (1 + self.jitter * (2 * chance - 1)))
