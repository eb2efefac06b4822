"""The publish endpoint: ``POST /queues/{queue}/events``.

The events of a request are published as a whole or not at all. A request that waits for an ack
does not hold a thread: all requests for a queue and level share one producer. Its acks come on a
thread of the queue and wake, in the event loop, the requests that they cover. So one sync of the
disk answers all requests that came before it, and waiting costs a future.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import Annotated, Any, Final, NamedTuple, Self

from pydantic import Field, model_validator, with_config
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from turnlane.errors import (
    AckPending,
    EventTooLarge,
    QueueClosed,
    QueueFull,
    StorageFailed,
    TransportDown,
)
from turnlane.events import Block
from turnlane.node.flight.messages import check_producer_id
from turnlane.node.http.events import (
    STRICT,
    NewEvent,
    build_raw_block,
    decode_json,
    decode_ndjson,
    parse_timestamp,
)
from turnlane.node.http.request import (
    Access,
    Answer,
    Body,
    Call,
    CountJson,
    Endpoint,
    Header,
    NoParameters,
    ParsedText,
    RequestContext,
    Scope,
    check_texts,
    choice,
    duration,
    json_response,
    whole_number,
)
from turnlane.queues.api import Ack, AckLevel, Published
from turnlane.queues.buffered import BufferedQueue
from turnlane.serving.auth import Right
from turnlane.serving.http_server import ThreadLimiterByQueue
from turnlane.storage.producer_sequences import GapPolicy

LONGEST_TIMEOUT: Final = 60.0
LONGEST_ID: Final = 256

THREADS: Final = 64
"""The most concurrent requests of a queue that wait for room, have sequence numbers, or go to a
queue that may drop their events."""

_LOOK_AGAIN: Final = 1.0
"""Seconds after which a waiting request checks that its queue is still open."""

_AT_ONCE: Final = 64 * 1024
"""Bytes of a body that is decoded in the event loop; a larger body is decoded on a thread."""

_HEADER_PREFIX: Final = b"x-turnlane-"

# ── the endpoint ────────────────────────────────────────────────────────────────────────────────


def _check_producer_id(text: str) -> str:
    if len(text) > LONGEST_ID:
        raise ValueError(f"longer than {LONGEST_ID} characters")
    return check_producer_id(text)


def _parse_gap_policy(text: str) -> GapPolicy:
    if text.strip().lower() != GapPolicy.SKIP.value:
        raise ValueError(f"{text[:40]!r} is not 'skip', the only value")
    return GapPolicy.SKIP


def _parse_timestamp_text(text: str) -> int:
    digits = text.removeprefix("-")
    is_whole = digits.isascii() and digits.isdecimal() and len(digits) < 20
    try:
        return parse_timestamp(int(text) if is_whole else text)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("timestamp: ")) from None


class RawFields(NoParameters):
    """The fields of an event whose value is the body of the request."""

    key: str | None = Field(None, description="A raw event's key. Not with JSON.")
    source: str | None = Field(None, description="A raw event's source. Not with JSON.")
    severity: Annotated[int | None, whole_number(0, 7)] = Field(
        None, description="A raw event's severity. Not with JSON."
    )
    timestamp: Annotated[
        int | None,
        ParsedText(_parse_timestamp_text, {"type": "string", "examples": ["2026-01-31T12:00:00Z"]}),
    ] = Field(
        None,
        description="A raw event's time: ISO 8601 with a zone, or microseconds. Not with JSON.",
    )


class PublishParameters(RawFields):
    """How to publish, and the fields of a raw event."""

    ack: Annotated[AckLevel | None, choice(AckLevel)] = Field(
        None,
        description="How far the events must have come before the answer. Default: persisted for "
        "disk queues, accepted for the others.",
    )
    timeout: Annotated[float, duration(most=LONGEST_TIMEOUT)] = Field(
        "10s", validate_default=True, description="How long to wait for room and ack; at most 60s."
    )
    producer_id: Annotated[
        str | None,
        Header("Producer-Id"),
        ParsedText(_check_producer_id, {"type": "string", "minLength": 1, "maxLength": LONGEST_ID}),
    ] = Field(
        None,
        description="Together with Sequence: the queue does not take an event twice that it has "
        "from this producer.",
    )
    # Half of the numbers that 64 bits hold: the number of the last event has to fit as well.
    sequence: Annotated[int | None, Header("Sequence"), whole_number(0, 2**62)] = Field(
        None, description="The number of the first event among all that the producer published."
    )

    sequence_gaps: Annotated[
        GapPolicy | None,
        Header("Sequence-Gaps"),
        ParsedText(_parse_gap_policy, {"type": "string", "enum": [GapPolicy.SKIP.value]}),
    ] = Field(
        None,
        description="Lower numbers that the queue does not have will not come: count them as "
        "taken.",
    )

    @model_validator(mode="after")
    def _check_both(self) -> Self:
        given = (self.producer_id, self.sequence, self.sequence_gaps)
        if given != (None, None, None) and (not self.producer_id or self.sequence is None):
            raise ValueError("headers Producer-Id and Sequence: give both or neither")
        return self


@with_config(STRICT)
class PublishedJson(TypedDict):
    """The result of publishing."""

    accepted: Annotated[CountJson, Field(description="Events that are now in the queue.")]
    dropped: Annotated[CountJson, Field(description="Events that the queue's policy dropped.")]
    repeated: Annotated[CountJson, Field(description="Events that the queue had already.")]
    first: Annotated[CountJson | None, Field(description="The offset of the first accepted event.")]
    ack: AckLevel


class PublishRoutes:
    """Publishes the events of requests."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._threads = ThreadLimiterByQueue(THREADS)
        self._waiters: dict[tuple[str, AckLevel], _LevelWaiters] = {}

    @Endpoint(
        "POST /queues/{queue}/events",
        tag="events",
        access=Access(Scope.QUEUE, (Right.PUBLISH,)),
        body=Body(
            {
                "application/json": NewEvent | list[NewEvent],
                "application/x-ndjson": Annotated[
                    str, Field(description="A NewEvent on each line.")
                ],
                "*/*": Any,
            },
            required=False,
            description="May be compressed: `Content-Encoding: gzip`, `deflate`, `zstd` or "
            "`snappy`. A body that is neither JSON nor JSON lines is the value of one event, even "
            "if it is empty.",
        ),
        answers={200: Answer("The events have come as far as asked.", PublishedJson)},
        own_errors=(409, 429),
    )
    async def publish(self, call: Call[PublishParameters]) -> Response:
        """Publish events: all of the request, or none."""
        queue = call.find_queue()
        asked = call.parameters
        level = queue.usual_level if asked.ack is None else asked.ack
        numbered = self._number(call)
        body = await call.read_body()
        now = queue.time_ns() // 1000
        if len(body) <= _AT_ONCE:
            block = _decode_block(call, body, now)
        else:
            block = await self._context.threads.run(_decode_block, call, body, now)
        done = await self._publish(queue, block, level, asked.timeout, numbered)
        answer: PublishedJson = {
            "accepted": done.accepted,
            "dropped": done.dropped,
            "repeated": done.repeated,
            "first": done.first if done.accepted else None,
            "ack": level,
        }
        return json_response(answer)

    async def _publish(
        self,
        queue: BufferedQueue,
        block: Block,
        level: AckLevel,
        timeout: float,  # noqa: ASYNC109 - as everywhere else
        numbered: Numbered | None,
    ) -> Published:
        """Publish a block as a whole or not at all, and wait until it has reached ``level``.

        Raises ``QueueFull``, ``StorageFailed``, ``EventTooLarge``, ``TransportDown``,
        ``NumbersMissing``: nothing was published;
        ``AckPending``, ``QueueClosed``: it may have been.
        """
        if not block.num_rows:
            return Published(-1, 0, 0, 0)
        if block.num_rows > queue.max_events or block.nbytes > queue.max_bytes:
            raise EventTooLarge(
                f"{block.num_rows} events of {block.nbytes} bytes are more than queue "
                f"{queue.name!r} holds ({queue.max_events} events, {queue.max_bytes} bytes); send "
                "fewer at a time"
            )
        deadline = time.monotonic() + timeout
        threads = self._threads.of(queue.name)
        # A queue that may drop events journals the drop before the answer: it needs a thread too.
        if numbered is not None or queue.can_drop:
            if threads.is_exhausted:
                raise TransportDown("the queue has too many such requests at a time", after=1.0)
            return await threads.run(_publish, queue, block, level, deadline, numbered)
        key = queue.name, level
        waiters = self._waiters.get(key)
        if waiters is None or waiters.queue is not queue:  # dropped and created again
            waiters = self._waiters[key] = _LevelWaiters(queue, level, asyncio.get_running_loop())
        published = waiters.producer.try_publish_block(block)
        if published is None:  # the queue is full: wait for room, unless too many requests do
            if threads.is_exhausted:
                raise build_full_error(queue)
            return await threads.run(_publish, queue, block, level, deadline)
        if level is not AckLevel.ACCEPTED and published.accepted:
            await waiters.wait(published.first + published.accepted, deadline)
        return published

    def _number(self, call: Call[PublishParameters]) -> Numbered | None:
        producer, sequence = call.parameters.producer_id, call.parameters.sequence
        if producer is None or sequence is None:
            return None
        name = self._context.authority.qualify_name(call.bearer, producer)
        return Numbered(name, sequence, call.parameters.sequence_gaps or GapPolicy.KEEP)


def _decode_block(call: Call[PublishParameters], body: bytes, now: int) -> Block:
    kind = call.request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        _refuse_raw_fields(call.request)
        return decode_json(body, now)
    if kind in ("application/x-ndjson", "application/jsonl", "application/json-lines"):
        _refuse_raw_fields(call.request)
        return decode_ndjson(body, now)
    return _decode_raw(call, body, now)


def _refuse_raw_fields(request: Request) -> None:
    for name in RawFields.model_fields:
        if name in request.query_params:
            raise ValueError(f"parameter {name!r}: JSON events have a field {name!r} of their own")


def _decode_raw(call: Call[PublishParameters], body: bytes, now: int) -> Block:
    """Return a block of one event. A parameter goes before a header ``X-Turnlane-*``."""
    given: RawFields = call.parameters
    in_headers = _read_header_fields(call.request)
    return build_raw_block(
        body,
        now,
        key=in_headers.key if given.key is None else given.key,
        source=in_headers.source if given.source is None else given.source,
        severity=in_headers.severity if given.severity is None else given.severity,
        timestamp=in_headers.timestamp if given.timestamp is None else given.timestamp,
    )


_NO_FIELDS: Final = RawFields.model_validate({})


def _read_header_fields(request: Request) -> RawFields:
    """Return the fields that headers ``X-Turnlane-*`` give. Raises ``ValueError``."""
    found: dict[str, str] = {}
    for header, value in request.scope["headers"]:
        if header.startswith(_HEADER_PREFIX):
            name = header.removeprefix(_HEADER_PREFIX).decode("latin-1")
            if name not in RawFields.model_fields:
                raise ValueError(f"header X-Turnlane-{name[:80]}: there is no such header")
            try:
                found.setdefault(name, value.decode())
            except UnicodeDecodeError:
                raise ValueError(f"header X-Turnlane-{name.capitalize()}: not UTF-8") from None
    if not found:
        return _NO_FIELDS
    return check_texts(RawFields, found, lambda name: f"header X-Turnlane-{name.capitalize()}")


# ── publishing and waiting for acks ─────────────────────────────────────────────────────────────


class Numbered(NamedTuple):
    """A producer's id, and the number of the block's first event among all it published."""

    producer: str
    sequence: int
    gaps: GapPolicy = GapPolicy.KEEP


class _LevelWaiters:
    """The requests that wait for one level of one queue, in the order of their offsets.

    Only the event loop uses it, except for the callback of the producer.
    """

    def __init__(
        self, queue: BufferedQueue, level: AckLevel, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.queue = queue
        self._level = level
        self._loop = loop
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()
        on_ack = None if level is AckLevel.ACCEPTED else self._on_ack
        self.producer = queue.producer(ack=level, on_ack=on_ack)

    async def wait(self, end: int, deadline: float) -> None:
        """Wait until all events below ``end`` have reached the level.

        Raises ``AckPending``, ``QueueClosed``, ``StorageFailed``.
        """
        acked: asyncio.Future[int] = self._loop.create_future()
        self._waiting.append((end, acked))
        # Without this the queue would wait for more events before it syncs.
        self.queue.urge(self._level, end)
        while not acked.done():
            left = deadline - time.monotonic()
            if self.queue.closed:
                raise QueueClosed(f"queue {self.queue.name!r} was closed before the ack")
            if left <= 0:
                raise AckPending(
                    f"the events are in queue {self.queue.name!r}, but not yet {self._level}"
                )
            await asyncio.wait([acked], timeout=min(left, _LOOK_AGAIN))
        if acked.result() and self.queue.blocks_when_full:
            # An ack does not say whose events were lost: all requests send again, and none loses.
            raise StorageFailed(f"queue {self.queue.name!r} lost events to a failing disk")

    def _on_ack(self, ack: Ack) -> None:
        with contextlib.suppress(RuntimeError):  # the server has stopped: no request waits
            self._loop.call_soon_threadsafe(self._wake, ack)

    def _wake(self, ack: Ack) -> None:
        while self._waiting and self._waiting[0][0] <= ack.end:
            _, acked = self._waiting.popleft()
            if not acked.done():
                acked.set_result(ack.dropped)


def build_full_error(queue: BufferedQueue) -> QueueFull | StorageFailed:
    """Return the error that says why the queue takes nothing at this moment."""
    if queue.storage_failure:
        return StorageFailed(f"queue {queue.name!r} cannot write to its disk")
    return QueueFull(f"queue {queue.name!r} is full")


def _publish(
    queue: BufferedQueue,
    block: Block,
    level: AckLevel,
    deadline: float,
    numbered: Numbered | None = None,
) -> Published:
    """Publish and wait, on a thread."""
    seconds = max(0.0, deadline - time.monotonic())
    name, sequence, gaps = numbered or (None, None, GapPolicy.KEEP)
    producer = queue.producer(ack=level, producer_id=name, gaps=gaps)
    try:
        return producer.publish_block(block, sequence=sequence, timeout=seconds)
    except QueueFull as error:
        raise build_full_error(queue) from error
