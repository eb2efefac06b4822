"""The way in: ``POST /queues/{queue}/events``."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turnlane.events import Block
from turnlane.node import http_queries as queries
from turnlane.node.flight.commands import checked
from turnlane.node.http_events import of_json, of_ndjson, of_raw, severity_of, timestamp_of
from turnlane.node.http_publishing import Numbered, Publishing
from turnlane.node.http_requests import Requests, json_response, token_of
from turnlane.queues.api import AckLevel
from turnlane.serving.auth import Right
from turnlane.storage.producer_sequences import Gaps

TIMEOUT: Final = 10.0
LONGEST_TIMEOUT: Final = 60.0
LONGEST_ID: Final = 256

_PARAMETERS: Final = ("ack", "timeout", "key", "source", "severity", "timestamp")

_AT_ONCE: Final = 64 * 1024
"""A body this small is decoded on the spot, a larger one on a thread."""


class PublishRoutes:
    """Takes events in."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._publishing = Publishing()

    def routes(self) -> list[Route]:
        """The routes."""
        return [Route("/queues/{queue}/events", self.publish, methods=["POST"])]

    async def publish(self, request: Request) -> Response:
        """Publish the request's events, all or none."""
        queue = self._requests.queue(request, Right.PUBLISH)
        queries.only(request, *_PARAMETERS)
        level = queries.choice(request, "ack", AckLevel, queue.usual_level)
        timeout = queries.seconds(request, "timeout", TIMEOUT, most=LONGEST_TIMEOUT)
        numbered = self._numbered(request)
        body = await self._requests.body(request)
        now = queue.time_ns() // 1000
        if len(body) <= _AT_ONCE:
            block = _block(request, body, now)
        else:
            block = await self._requests.threads.run(_block, request, body, now)
        done = await self._publishing.publish(queue, block, level, timeout, numbered)
        return json_response(
            {
                "accepted": done.accepted,
                "dropped": done.dropped,
                "repeated": done.repeated,
                "first": done.first if done.accepted else None,
                "ack": level,
            }
        )

    def _numbered(self, request: Request) -> Numbered | None:
        names = ("producer-id", "sequence", "sequence-gaps")
        producer, sequence, gaps = (request.headers.get(name) for name in names)
        if producer is None and sequence is None and gaps is None:
            return None
        if not producer or sequence is None:
            raise ValueError("headers Producer-Id and Sequence: give both or neither")
        if len(producer) > LONGEST_ID:
            raise ValueError(f"header Producer-Id: longer than {LONGEST_ID} characters")
        name = self._requests.authority.own(token_of(request), checked(producer))
        # Half of what 64 bits hold: the number of the last event has to fit as well.
        number = queries.number(sequence, "header Sequence", most=2**62)
        return Numbered(name, number, _gaps(gaps))


def _gaps(value: str | None) -> Gaps:
    if value is None:
        return Gaps.KEEP
    if value.strip().lower() != Gaps.SKIP.value:
        raise ValueError(f"header Sequence-Gaps: {value!r} is not 'skip', the only value")
    return Gaps.SKIP


def _block(request: Request, body: bytes, now: int) -> Block:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        _no_raw_parameters(request)
        return of_json(body, now)
    if kind in ("application/x-ndjson", "application/jsonl", "application/json-lines"):
        _no_raw_parameters(request)
        return of_ndjson(body, now)
    return _raw(request, body, now)


def _no_raw_parameters(request: Request) -> None:
    for name in _PARAMETERS[2:]:
        if name in request.query_params:
            raise ValueError(f"parameter {name!r}: JSON events have a field {name!r} of their own")


def _raw(request: Request, body: bytes, now: int) -> Block:
    given = queries.texts(request, *_PARAMETERS[2:])
    severity, stamp = given.get("severity"), given.get("timestamp")
    return of_raw(
        body,
        now,
        key=given.get("key"),
        source=given.get("source"),
        severity=None if severity is None else severity_of(_whole_or_text(severity)),
        timestamp=None if stamp is None else timestamp_of(_whole_or_text(stamp)),
    )


def _whole_or_text(text: str) -> int | str:
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() and len(digits) < 20 else text
