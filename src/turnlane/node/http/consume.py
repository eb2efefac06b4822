"""Consumer endpoints: leases on batches, looking without taking, settling by offset."""

from __future__ import annotations

import time
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator, with_config
from starlette.responses import Response
from typing_extensions import TypedDict

from turnlane.errors import QueueEmpty
from turnlane.ledger import Outcome
from turnlane.node.event_refs import read_unsettled
from turnlane.node.http.events import STRICT, EventJson, encode_events
from turnlane.node.http.request import (
    LARGEST,
    READ_QUEUE,
    Access,
    Answer,
    Call,
    Endpoint,
    Expected,
    NoParameters,
    RequestContext,
    Scope,
    duration,
    encode_json,
    json_response,
    whole_number,
)
from turnlane.node.leases import BatchLease
from turnlane.queues.buffered import BufferedQueue
from turnlane.serving.auth import Right
from turnlane.serving.http_server import ThreadLimiter

POLLS: Final = 256
"""The most concurrent requests that wait for events, each on a thread."""

EVENTS: Final = 100
MOST_EVENTS: Final = 10_000
PEEK_BYTES: Final = 16 << 20
"""A peek stops reading after this many bytes."""
LONGEST_WAIT: Final = 60.0
SHORTEST_LEASE: Final = 0.1
LONGEST_LEASE: Final = 3600.0

_READ_LEASE: Final = Access(Scope.TOKEN, (Right.READ,))
"""The handler finds the lease and then checks the right on the queue of its events."""

_SLICE: Final = 1.0
"""Seconds of one wait. Between two waits a request checks that its client is still there."""

_LEASE: Final = duration(SHORTEST_LEASE, most=LONGEST_LEASE)

OffsetJson = Annotated[int, Strict(), Field(ge=0, le=LARGEST)]
_OFFSET: Final = Expected("an offset, which is a whole number from 0 on")


class TakeParameters(NoParameters):
    """How many events to take, and for how long."""

    max_events: Annotated[int, whole_number(1, MOST_EVENTS)] = Field(
        EVENTS, description="The most events to take."
    )
    wait: Annotated[float, duration(most=LONGEST_WAIT)] = Field(
        "0s", validate_default=True, description="How long to wait for events; at most 60s."
    )
    lease: Annotated[float, _LEASE] = Field(
        "30s", validate_default=True, description="How long the lease lasts: 100ms to 1h."
    )


class ExtendParameters(NoParameters):
    """For how much longer."""

    lease: Annotated[float | None, _LEASE] = Field(
        None, description="How long the lease lasts, 100ms to 1h. Default: as long as before."
    )


class PeekParameters(NoParameters):
    """Which events to show."""

    first: Annotated[int, whole_number()] = Field(0, description="The offset to begin at.")
    max: Annotated[int, whole_number(1, MOST_EVENTS)] = Field(
        EVENTS, description="The most events to show."
    )


class RangeJson(BaseModel):
    """A range of offsets, and how to settle it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: Annotated[OffsetJson, _OFFSET]
    end: Annotated[OffsetJson, _OFFSET] = Field(description="One beyond the last.")
    outcome: Annotated[Literal["delivered", "dead"], Expected("one of delivered, dead")] = (
        "delivered"
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.first > self.end:
            raise ValueError(f"end: {self.end} is before first, {self.first}")
        return self


@with_config(STRICT)
class LeasedJson(TypedDict):
    """A lease with its events."""

    lease: str
    first: OffsetJson
    attempt: Annotated[int, Field(ge=1, le=LARGEST, description="1 for events never read before.")]
    events: list[EventJson]


LowJson = Annotated[OffsetJson, Field(description="Everything below this offset is settled.")]
EndJson = Annotated[OffsetJson, Field(description="The offset that the next event will get.")]


@with_config(STRICT)
class PeekedJson(TypedDict):
    """The positions of a queue with some of its events."""

    low: LowJson
    end: EndJson
    events: list[EventJson]


@with_config(STRICT)
class EndsJson(TypedDict):
    """The positions of a queue."""

    low: LowJson
    end: EndJson


class ConsumeRoutes:
    """Gives events to consumers."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._polls = ThreadLimiter(POLLS)

    @Endpoint(
        "GET /queues/{queue}/events",
        tag="events",
        access=READ_QUEUE,
        answers={
            200: Answer("Events, to settle under `/leases/{lease}`.", LeasedJson),
            204: Answer("No events came in the time allowed."),
        },
        allows_head=False,  # it would take events and show them to no one
    )
    async def take(self, call: Call[TakeParameters]) -> Response:
        """Take the next events under a lease; they come back if it runs out."""
        queue = call.find_queue()
        asked = call.parameters
        request = call.request
        client = request.client
        holder = "http" if client is None else f"{client.host}:{client.port}"
        deadline = time.monotonic() + asked.wait
        while True:
            left = deadline - time.monotonic()
            answer = await self._polls.run(
                self._take,
                queue,
                asked.max_events,
                min(max(left, 0.0), _SLICE),
                asked.lease,
                holder,
            )
            if answer is not None:
                break
            if left <= 0 or self._context.stopping or await request.is_disconnected():
                return Response(status_code=204)
        lease, body = answer
        if await request.is_disconnected():
            await self._context.threads.run(self._context.node.leases.release, lease.id)
        return Response(body, media_type="application/json")

    def _take(
        self, queue: BufferedQueue, most: int, wait: float, seconds: float, holder: str
    ) -> tuple[BatchLease, bytes] | None:
        try:
            lease = self._context.node.leases.take(queue, most, wait, seconds, holder)
        except QueueEmpty:
            return None
        try:
            place = lease.batch.place
            answer: LeasedJson = {
                "lease": lease.id,
                "first": place.first,
                "attempt": place.attempt,
                "events": encode_events(lease.batch.block, place.first),
            }
            return lease, encode_json(answer)
        except BaseException:
            self._context.node.leases.release(lease.id)
            raise

    @Endpoint(
        "GET /queues/{queue}/peek",
        tag="events",
        access=READ_QUEUE,
        answers={200: Answer("The events from there on.", PeekedJson)},
    )
    async def peek(self, call: Call[PeekParameters]) -> Response:
        """Look at unsettled events without taking them."""
        asked = call.parameters
        body = await self._context.threads.run(_peek, call.find_queue(), asked.first, asked.max)
        return Response(body, media_type="application/json")

    @Endpoint(
        "POST /queues/{queue}/settle",
        tag="events",
        access=READ_QUEUE,
        answers={200: Answer("The range is settled.", EndsJson)},
    )
    async def settle(self, call: Call[NoParameters, RangeJson]) -> Response:
        """Settle a range of offsets, for readers that keep their own place."""
        queue = call.find_queue()
        asked = await call.read_json()
        outcome = Outcome(asked.outcome)
        await self._context.threads.run(queue.settle, asked.first, asked.end, outcome)
        answer: EndsJson = {"low": queue.low, "end": queue.end}
        return json_response(answer)

    @Endpoint("POST /leases/{lease}/done", tag="leases", access=_READ_LEASE)
    async def done(self, call: Call) -> Response:
        """Settle the lease's events as delivered."""
        lease = self._find_lease(call)
        await self._context.threads.run(self._context.node.leases.done, lease)
        return Response(status_code=204)

    @Endpoint("POST /leases/{lease}/dead", tag="leases", access=_READ_LEASE)
    async def dead(self, call: Call) -> Response:
        """Settle the lease's events as undeliverable."""
        lease = self._find_lease(call)
        await self._context.threads.run(self._context.node.leases.dead, lease)
        return Response(status_code=204)

    @Endpoint("POST /leases/{lease}/release", tag="leases", access=_READ_LEASE)
    async def release(self, call: Call) -> Response:
        """Give the lease's events back, so that a consumer can read them again."""
        lease = self._find_lease(call)
        await self._context.threads.run(self._context.node.leases.release, lease)
        return Response(status_code=204)

    @Endpoint("POST /leases/{lease}/extend", tag="leases", access=_READ_LEASE)
    async def extend(self, call: Call[ExtendParameters]) -> Response:
        """Keep the lease for longer, counted from now."""
        lease, seconds = self._find_lease(call), call.parameters.lease
        await self._context.threads.run(self._context.node.leases.extend, lease, seconds)
        return Response(status_code=204)

    def _find_lease(self, call: Call | Call[ExtendParameters]) -> str:
        """Return the id of the lease in the path, if the token may read its queue."""
        lease_id: str = call.request.path_params["lease"]
        call.check_right(self._context.node.leases.find(lease_id).queue)
        return lease_id


def _peek(queue: BufferedQueue, first: int, most: int) -> bytes:
    events: list[EventJson] = []
    size = 0
    for start, block in read_unsettled(queue, first, queue.end, most):
        events += encode_events(block.slice(0, most - len(events)), start)
        size += block.nbytes
        if len(events) >= most or size >= PEEK_BYTES:
            break
    answer: PeekedJson = {"low": queue.low, "end": queue.end, "events": events}
    return encode_json(answer)
