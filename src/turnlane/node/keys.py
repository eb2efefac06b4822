"""Keys: what a commit has for itself while it is under way.

A claim has all its keys or none. Were they taken one by one, a commit that waits for one of them
could keep another from the very commit that would end its waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from turnlane.errors import QueueClosed, RetryLater


class Claim:
    """Some keys, and whoever has them."""

    __slots__ = ("keys", "stuck")

    def __init__(self, keys: Iterable[str], stuck: str = "") -> None:
        self.keys = frozenset(keys)
        self.stuck = stuck
        """Why nobody works on it any more though it is not through; until then empty."""


class Keys:
    """The claims on keys. Safe to use from any thread."""

    def __init__(self) -> None:
        self._line: list[Claim] = []
        """Those who have their keys, and those of a start that come after each other."""
        self._changed = threading.Condition()
        self._closing = False

    def take(self, keys: Iterable[str]) -> Claim:
        """Wait until nobody has any of these keys, and have them.

        Raises ``RetryLater`` if that takes until the next start, ``QueueClosed`` at the node's end.
        """
        claim = Claim(keys)
        with self._changed:
            self._await_free(claim, lambda: self._line)
            if self._closing:
                raise QueueClosed("the node is closing")
            self._line.append(claim)
        return claim

    def join(self, keys: Iterable[str], stuck: str = "") -> Claim:
        """Have these keys, after those who have some of them now."""
        claim = Claim(keys, stuck)
        with self._changed:
            self._line.append(claim)
        return claim

    def is_first(self, claim: Claim) -> bool:
        """Whether nobody who came before has any of its keys."""
        with self._changed:
            return not any(claim.keys & other.keys for other in self._before(claim))

    def await_first(self, claim: Claim) -> None:
        """Wait until it is its turn. Raises what :meth:`take` does."""
        with self._changed:
            self._await_free(claim, lambda: self._before(claim))

    def release(self, claim: Claim) -> None:
        """It is through, or has come to nothing."""
        with self._changed:
            self._line.remove(claim)
            self._changed.notify_all()

    def await_unused(self, key: str, seconds: float) -> bool:
        """Wait, no longer than that, until nobody works on anything with this key; says if so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_used(key), seconds)

    def _is_used(self, key: str) -> bool:
        return any(key in claim.keys and not claim.stuck for claim in self._line)

    def keep(self, claim: Claim, why: str) -> None:
        """It is not through and nobody works on it: its keys are taken until the next start."""
        with self._changed:
            claim.stuck = why
            self._changed.notify_all()

    def stop(self) -> None:
        """Let nobody else have a key."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def await_ended(self) -> None:
        """Wait until nobody works on anything."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_busy)

    @property
    def is_busy(self) -> bool:
        """Whether anybody has a key and works on something."""
        return not all(claim.stuck for claim in self._line)

    def _before(self, claim: Claim) -> list[Claim]:
        return self._line[: self._line.index(claim)]

    def _await_free(self, claim: Claim, others: Callable[[], list[Claim]]) -> None:
        while rivals := [other for other in others() if claim.keys & other.keys]:
            if self._closing:
                raise QueueClosed("the node is closing")
            for rival in rivals:
                if rival.stuck:
                    raise RetryLater(rival.stuck)
            self._changed.wait()
