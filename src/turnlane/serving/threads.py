"""Threads for calls that block, so that an event loop never does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import anyio

Result = TypeVar("Result")


class Threads:
    """So many threads at most for the blocking calls of one server."""

    def __init__(self, most: int) -> None:
        self._limiter = anyio.CapacityLimiter(most)

    @property
    def exhausted(self) -> bool:
        """Whether a call would have to wait for a thread."""
        return self._limiter.available_tokens < 1

    async def run(self, call: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """Run a call on one of the threads; waits for a free one.

        A caller that is cancelled leaves at once; the call goes on and its result is dropped.
        """
        return await anyio.to_thread.run_sync(
            functools.partial(call, *args, **kwargs),
            abandon_on_cancel=True,
            limiter=self._limiter,
        )


class ThreadsByQueue:
    """So many threads for each queue: those who wait for one hold up nobody else's."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_queue: dict[str, Threads] = {}

    def of(self, queue: str) -> Threads:
        """The threads for calls that wait for this queue."""
        if queue not in self._by_queue:
            self._by_queue[queue] = Threads(self._most)
        return self._by_queue[queue]
