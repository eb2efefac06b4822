"""Threads for blocking calls, so that an event loop never blocks; and deadlines on a thread."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import anyio

from turnlane.runtime import Closeable, start_thread

Result = TypeVar("Result")


class ThreadLimiter:
    """Runs the blocking calls of a server on at most ``most`` threads."""

    def __init__(self, most: int) -> None:
        self._limiter = anyio.CapacityLimiter(most)

    @property
    def is_exhausted(self) -> bool:
        """Whether a call would have to wait for a thread."""
        return self._limiter.available_tokens < 1

    async def run(self, call: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """Run a call on a thread; wait for a free one.

        A cancelled caller leaves at once; the call continues, and its result is dropped.
        """
        return await anyio.to_thread.run_sync(
            functools.partial(call, *args, **kwargs),
            abandon_on_cancel=True,
            limiter=self._limiter,
        )


class ThreadLimiterByQueue:
    """At most ``most`` threads for each queue, so calls that wait for one do not delay others."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_queue: dict[str, ThreadLimiter] = {}

    def of(self, queue: str) -> ThreadLimiter:
        """Return the limiter for calls that wait for this queue."""
        if queue not in self._by_queue:
            self._by_queue[queue] = ThreadLimiter(self._most)
        return self._by_queue[queue]


class DeadlineTimer(Closeable):
    """Ends blocks that take longer than ``seconds``. Safe to use from any thread.

    One thread with the given name serves all blocks until the timer is closed.
    """

    def __init__(self, seconds: float, name: str) -> None:
        self._seconds = seconds
        self._changed = threading.Condition()
        self._waiting: dict[object, tuple[float, Callable[[], object]]] = {}
        """The deadline and the callback of each block, in the order of the deadlines, which is the
        order of the starts."""
        self._closed = False
        self._thread = start_thread(name, self._run)

    @contextlib.contextmanager
    def limit(self, call_off: Callable[[], object]) -> Iterator[None]:
        """Call ``call_off`` on the thread of the timer if the block takes too long."""
        ticket = object()
        with self._changed:
            self._waiting[ticket] = time.monotonic() + self._seconds, call_off
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._waiting.pop(ticket, None)

    def close(self) -> None:
        """Stop the thread. Running blocks have no deadline any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (late := self._next()) is not None:
            late()

    def _next(self) -> Callable[[], object] | None:
        """Wait until a block is late and return its callback; ``None`` once closed."""
        with self._changed:
            while not self._closed:
                ticket = next(iter(self._waiting), None)
                if ticket is None:
                    self._changed.wait()
                    continue
                due, call_off = self._waiting[ticket]
                left = due - time.monotonic()
                if left <= 0:
                    del self._waiting[ticket]
                    return call_off
                self._changed.wait(left)
            return None
