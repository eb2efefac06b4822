"""The ways out: leases on batches, a look without taking, settling by offset."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turnlane.errors import QueueEmpty
from turnlane.ledger import Outcome
from turnlane.node import http_queries as queries
from turnlane.node.http_events import parsed_object, to_json
from turnlane.node.http_requests import Requests, json_bytes, json_response, token_of
from turnlane.node.leases import Lease
from turnlane.queues.buffered import BufferedQueue
from turnlane.serving.auth import Right
from turnlane.serving.threads import Threads

POLLS: Final = 256
"""Requests at a time that wait for events, each on a thread."""

EVENTS: Final = 100
MOST_EVENTS: Final = 10_000
PEEK_BYTES: Final = 16 << 20
"""A look that has found as much looks no further."""
LONGEST_WAIT: Final = 60.0
LEASE: Final = 30.0
SHORTEST_LEASE: Final = 0.1
LONGEST_LEASE: Final = 3600.0

_SLICE: Final = 1.0
"""A request waits in slices, and looks between them whether there is still a point."""


class ConsumeRoutes:
    """Gives events out."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._polls = Threads(POLLS)

    def routes(self) -> list[Route]:
        """The routes."""
        get = Route("/queues/{queue}/events", self.take, methods=["GET"])
        assert get.methods is not None
        get.methods.discard("HEAD")  # which would take events and show nobody
        return [
            get,
            Route("/queues/{queue}/peek", self.peek, methods=["GET"]),
            Route("/queues/{queue}/settle", self.settle, methods=["POST"]),
            Route("/leases/{lease}/{verb}", self.end, methods=["POST"]),
        ]

    async def take(self, request: Request) -> Response:
        """Lease the next events to the client, once there are some."""
        queue = self._requests.queue(request, Right.READ)
        queries.only(request, "max_events", "wait", "lease")
        most = queries.whole(request, "max_events", EVENTS, least=1, most=MOST_EVENTS)
        wait = queries.seconds(request, "wait", 0.0, most=LONGEST_WAIT)
        seconds = _lease_seconds(request, LEASE)
        assert seconds is not None
        deadline = time.monotonic() + wait
        while True:
            left = deadline - time.monotonic()
            answer = await self._polls.run(
                self._take,
                queue,
                most,
                min(max(left, 0.0), _SLICE),
                seconds,
                _holder(request),
            )
            if answer is not None:
                break
            if left <= 0 or self._requests.stopping or await request.is_disconnected():
                return Response(status_code=204)
        lease, body = answer
        if await request.is_disconnected():
            await self._requests.threads.run(self._requests.node.leases.release, lease.id)
        return Response(body, media_type="application/json")

    def _take(
        self, queue: BufferedQueue, most: int, wait: float, seconds: float, holder: str
    ) -> tuple[Lease, bytes] | None:
        try:
            lease = self._requests.node.leases.take(queue, most, wait, seconds, holder)
        except QueueEmpty:
            return None
        try:
            return lease, json_bytes(_leased(lease))
        except BaseException:
            self._requests.node.leases.release(lease.id)
            raise

    async def end(self, request: Request) -> Response:
        """Settle a lease, give it back, or keep it for longer."""
        verb = self._verb(request)
        if verb is None:
            return Response(status_code=404)
        await self._requests.threads.run(verb)
        return Response(status_code=204)

    def _verb(self, request: Request) -> Callable[[], None] | None:
        """What is to be done with the lease, if the request may do it."""
        lease_id, name = request.path_params["lease"], request.path_params["verb"]
        leases = self._requests.node.leases
        bearer = token_of(request)
        self._requests.authority.identify(bearer)
        verbs: dict[str, Callable[[str], None]] = {
            "done": leases.done,
            "dead": leases.dead,
            "release": leases.release,
        }
        if name not in verbs and name != "extend":
            return None
        queries.only(request, *(("lease",) if name == "extend" else ()))
        seconds = _lease_seconds(request, None)
        lease = leases.find(lease_id)
        self._requests.authority.check(bearer, Right.READ, lease.queue)
        if name == "extend":
            return lambda: leases.extend(lease_id, seconds)
        return lambda: verbs[name](lease_id)

    async def peek(self, request: Request) -> Response:
        """Show events and leave them where they are."""
        queue = self._requests.queue(request, Right.READ)
        queries.only(request, "first", "max")
        first = queries.whole(request, "first", 0)
        most = queries.whole(request, "max", EVENTS, least=1, most=MOST_EVENTS)
        body = await self._requests.threads.run(_peek, queue, first, most)
        return Response(body, media_type="application/json")

    async def settle(self, request: Request) -> Response:
        """Settle a range of offsets."""
        queue = self._requests.queue(request, Right.READ)
        queries.only(request)
        asked = parsed_object(await self._requests.body(request))
        for name in asked:
            if name not in ("first", "end", "outcome"):
                raise ValueError(f"{name[:80]!r}: no such field; there are: first, end, outcome")
        first, end = _offset(asked, "first"), _offset(asked, "end")
        if first > end:
            raise ValueError(f"end: {end} is before first, {first}")
        outcome = asked.get("outcome", "delivered")
        if outcome not in ("delivered", "dead"):
            raise ValueError("outcome: one of delivered, dead")
        await self._requests.threads.run(queue.settle, first, end, Outcome(outcome))
        return json_response({"low": queue.low, "end": queue.end})


def _offset(asked: dict[str, Any], name: str) -> int:
    value = asked.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= queries.LARGEST:
        raise ValueError(f"{name}: an offset, which is a whole number from 0 on")
    return value


def _peek(queue: BufferedQueue, first: int, most: int) -> bytes:
    events: list[dict[str, Any]] = []
    size = 0
    while len(events) < most and size < PEEK_BYTES:  # one read ends where a stored block ends
        found = queue.read(first, most - len(events))
        if found is None:
            break
        start, block = found
        events += to_json(block, start)
        size += block.nbytes
        first = start + len(block)
    return json_bytes({"low": queue.low, "end": queue.end, "events": events})


def _leased(lease: Lease) -> dict[str, Any]:
    place = lease.batch.place
    return {
        "lease": lease.id,
        "first": place.first,
        "attempt": place.attempt,
        "events": to_json(lease.batch.block, place.first),
    }


def _lease_seconds(request: Request, default: float | None) -> float | None:
    if default is None and "lease" not in request.query_params:
        return None
    return queries.seconds(request, "lease", LEASE, least=SHORTEST_LEASE, most=LONGEST_LEASE)


def _holder(request: Request) -> str:
    return "http" if request.client is None else f"{request.client.host}:{request.client.port}"
