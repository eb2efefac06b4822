"""The input ``otlp``: logs, metrics and traces from OpenTelemetry's exporters, over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, Literal, NamedTuple

import pyarrow as pa
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from turnlane.errors import QueueFull
from turnlane.events import Block, get_values
from turnlane.formats.otlp import (
    JSON,
    PROTOBUF,
    Grain,
    Signal,
    answer,
    block_of_request,
    count,
    decode,
    status,
)
from turnlane.inputs.api import InputSettings
from turnlane.inputs.http import WebInput, WebInputSettings, source_of
from turnlane.inputs.publishers import AnsweringPublisher, Mask
from turnlane.serving.http_body import build_problem

# ── export ──
# An OTLP export, taken: the same over HTTP and over gRPC.


class Export(NamedTuple):
    """What became of an export."""

    events: int
    """Events taken."""
    rejected: int
    """Log records, data points or spans that can never be taken: the sender must drop them."""
    why: str
    """The reason, if any were rejected."""


class Exports:
    """Takes export requests into one queue."""

    def __init__(self, publisher: AnsweringPublisher, queue: str, grain: Grain) -> None:
        self._publisher = publisher
        self._queue = queue
        self._grain = grain

    def take(
        self,
        signal: Signal,
        body: bytes,
        deadline: float,
        *,
        encoding: str = PROTOBUF,
        source: str | None = None,
    ) -> Export:
        """Publish what a request holds; blocks until that has come as far as the level asks.

        Raises ``Malformed``, or one of the errors of a queue, after which the sender should send
        it all again.
        """
        request = decode(signal, body, encoding)
        block = block_of_request(signal, request, source, self._grain)
        if not block.num_rows:
            return Export(0, 0, "")
        taken = self._publisher.publish_fitting(self._queue, block, deadline)
        if taken.full.any():
            # Not a partial success: its sender would drop what could come in later.
            raise QueueFull(f"queue {self._queue!r} is full")
        if not taken.too_large.any():
            return Export(block.num_rows, 0, "")
        why = self._publisher.limit(self._queue)
        return Export(taken.inside, _held_by(signal, block, taken.too_large), why)


def _held_by(signal: Signal, block: Block, rows: Mask) -> int:
    """What these events hold, as OTLP counts."""
    values = get_values([block.filter(pa.array(rows))])
    return sum(count(signal, decode(signal, value)) for value in values)


# google.rpc.Code by HTTP status; a status is the answer to whatever was not taken.
_CODES: Final = {400: 3, 401: 16, 403: 7, 404: 5, 405: 12, 413: 3, 415: 3, 429: 8, 503: 14}
_UNKNOWN: Final = 2


class OtlpSettings(WebInputSettings):
    """The settings of the input ``otlp``."""

    type: Literal["otlp"] = "otlp"
    split: Grain = Field(
        Grain.RECORD, description="What becomes one event: a `record`, or the whole `request`."
    )


class OtlpInput(WebInput):
    """Answers in the encoding of the request, as the OTLP specification says."""

    settings_type: ClassVar[type[InputSettings]] = OtlpSettings
    settings: OtlpSettings

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route(f"/v1/{signal}", self._take, methods=["POST"], name=signal) for signal in Signal
        ]

    async def _take(self, request: Request) -> Response:
        self.authorize(request, self.settings.queue)
        signal = Signal(request.scope["path"].rpartition("/")[2])
        encoding = _encoding(request)
        body = await self.body_of(request)
        exports = Exports(self.publisher, self.settings.queue, self.settings.split)
        done = await self.in_time(
            self.settings.queue,
            exports.take,
            signal,
            body,
            encoding=encoding,
            source=source_of(request),
        )
        self.count(events=done.events, invalid=1 if done.rejected else 0)
        content = answer(signal, encoding, rejected=done.rejected, why=done.why)
        return Response(content, media_type=encoding)

    def refusal(self, request: Request, error: Exception) -> Response:
        plain = build_problem(error)
        encoding = JSON if JSON in request.headers.get("content-type", "") else PROTOBUF
        text = error.detail if isinstance(error, HTTPException) else str(error)
        code = _CODES.get(plain.status_code, _UNKNOWN)
        headers = {
            name: value for name, value in plain.headers.items() if not name.startswith("content-")
        }
        content = status(code, text, encoding)
        return Response(content, plain.status_code, headers, media_type=encoding)


def _encoding(request: Request) -> str:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (PROTOBUF, JSON):
        raise HTTPException(415, f"content-type {kind!r}; OTLP is {PROTOBUF} or {JSON}")
    return kind
