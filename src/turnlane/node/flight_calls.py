"""Who may call over Flight at all, and how many at a time.

Judged by a call's headers, before anything it sends is waited for: Arrow reads the first message
of a stream before it calls any method of ours, so that those would come too late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import pyarrow as pa
from pyarrow import flight

from turnlane.errors import TransportDown
from turnlane.node.flight_errors import translated
from turnlane.node.flight_limits import FlightLimits
from turnlane.serving.rights import Authority, bearer_of

BRINGING: Final = (flight.FlightMethod.DO_PUT, flight.FlightMethod.DO_EXCHANGE)
"""The calls whose clients send blocks."""

Headers = dict[str, list[str] | list[bytes]]


class Call(flight.ServerMiddleware):
    """One call: the token that came with it, and its place among all."""

    def __init__(self, token: str | None, leave: Callable[[], None]) -> None:
        self.token = token
        self._leave = leave

    def call_completed(self, exception: BaseException | None) -> None:
        """Make room for another."""
        del exception
        self._leave()


class Calls(flight.ServerMiddlewareFactory):
    """Lets calls in, or refuses them. Flight calls it from any thread."""

    def __init__(self, authority: Authority, limits: FlightLimits) -> None:
        self.running = 0
        self._authority = authority
        self._most = limits.max_calls
        self._memory = limits.memory()
        self._lock = threading.Lock()

    def start_call(self, info: flight.CallInfo, headers: Headers) -> Call:
        """A call begins. Raises what the client is refused with."""
        values = [each for each in headers.get("authorization", ()) if isinstance(each, str)]
        token = bearer_of(values[0] if values else None)
        with translated():
            self._authority.identify(token)
            if info.method in BRINGING and pa.total_allocated_bytes() > self._memory:
                raise TransportDown("the node is short of memory", after=1.0)
            self._enter()
        return Call(token, self._leave)

    def _enter(self) -> None:
        with self._lock:
            if self.running >= self._most:
                raise TransportDown("the node has too many calls at a time", after=1.0)
            self.running += 1

    def _leave(self) -> None:
        with self._lock:
            self.running -= 1
