"""One limit for the memory of all bodies of HTTP and gRPC requests under way in a node.

Every listener limits the body of a single request, but a thousand senders may all stop just before
the end of their bodies. So the HTTP plane and all HTTP and OTLP inputs of a node take the bytes of
bodies, received and decompressed, from one budget, and give them back when the request is answered.
Bytes count when they arrive, not when a header announces them: a sender that sends nothing takes
nothing.

A request that is the only one with a body is never refused, since its listener limits it. So a
sender whose request is larger than the budget does not repeat it without end.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from turnlane.errors import TransportDown
from turnlane.memory import compute_memory_share

SHARE_OF_MEMORY = 0.25


class BodyBudget:
    """The memory of all bodies under way. Safe to use from any thread."""

    def __init__(self, limit: int | None = None) -> None:
        """``limit`` is in bytes; the default is a quarter of what the process may use."""
        self.limit = compute_memory_share(SHARE_OF_MEMORY) if limit is None else limit
        self.used = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def open_share(self) -> Iterator[BodyShare]:
        """Return the share of one request, which ends with the block."""
        share = BodyShare(self)
        try:
            yield share
        finally:
            with self._lock:
                self.used -= share.held

    def take(self, share: BodyShare, size: int) -> None:
        """Add ``size`` bytes to a share. Raises ``TransportDown`` if they are too many."""
        with self._lock:
            if self.used + size > self.limit and self.used > share.held:
                raise TransportDown(
                    f"all requests under way have {self.used} bytes of bodies, and "
                    f"{self.limit} are allowed (node.http.max_memory): send it again later",
                    after=1.0,
                )
            share.held += size
            self.used += size


class BodyShare:
    """The bytes of one request. One thread at a time uses it."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.held = 0

    def add(self, size: int) -> None:
        """Take more bytes. Raises ``TransportDown`` (503) if the budget is used up."""
        self._budget.take(self, size)
