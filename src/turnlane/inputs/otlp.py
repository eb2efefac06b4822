"""OTLP export requests into a queue, and the input ``otlp``, which receives them over HTTP."""

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
from turnlane.events import get_values
from turnlane.formats.otlp import (
    JSON,
    PROTOBUF,
    Signal,
    SplitUnit,
    build_request_block,
    count_records,
    decode,
    encode_response,
    encode_status,
)
from turnlane.inputs.api import InputSettings
from turnlane.inputs.http import WebInput, WebInputSettings, get_source
from turnlane.inputs.publishers import RequestPublisher
from turnlane.serving.http_problems import build_problem


class AcceptedExport(NamedTuple):
    """An export request of which all records that fit are in the queue."""

    events: int
    """Events in the queue."""
    rejected: int
    """Log records, data points or spans that never fit: the sender must drop them."""
    why: str
    """The reason, if any were rejected."""


class ExportPublisher:
    """Publishes export requests into one queue, the same over HTTP and over gRPC."""

    def __init__(self, publisher: RequestPublisher, queue: str, unit: SplitUnit) -> None:
        self._publisher = publisher
        self._queue = queue
        self._unit = unit

    def publish(
        self,
        signal: Signal,
        body: bytes,
        deadline: float,
        *,
        encoding: str = PROTOBUF,
        source: str | None = None,
    ) -> AcceptedExport:
        """Publish the records of a request; blocks until they have reached the ack level.

        Raises ``Malformed``, or one of the errors of a queue, after which the sender should send
        it all again.
        """
        request = decode(signal, body, encoding)
        block = build_request_block(signal, request, source, self._unit)
        if not block.num_rows:
            return AcceptedExport(0, 0, "")
        result = self._publisher.publish_fitting(self._queue, block, deadline)
        if result.without_room.any():
            # Not a partial success: the sender would drop records that fit later.
            raise QueueFull(f"queue {self._queue!r} is full")
        if not result.too_large.any():
            return AcceptedExport(block.num_rows, 0, "")
        values = get_values([block.filter(pa.array(result.too_large))])
        rejected = sum(count_records(signal, decode(signal, value)) for value in values)
        return AcceptedExport(
            result.accepted, rejected, self._publisher.describe_limit(self._queue)
        )


# google.rpc.Code by HTTP status, for requests that were not accepted.
_CODES: Final = {400: 3, 401: 16, 403: 7, 404: 5, 405: 12, 413: 3, 415: 3, 429: 8, 503: 14}
_UNKNOWN: Final = 2


class OtlpSettings(WebInputSettings):
    """The settings of the input ``otlp``."""

    type: Literal["otlp"] = "otlp"
    split: SplitUnit = Field(
        SplitUnit.RECORD,
        description="One event for each `record`, or for the whole `request`.",
    )


class OtlpInput(WebInput):
    """Accepts exports over HTTP, and answers in the encoding of the request, as OTLP requires."""

    settings_type: ClassVar[type[InputSettings]] = OtlpSettings
    settings: OtlpSettings

    def build_routes(self) -> Sequence[BaseRoute]:
        return [
            Route(f"/v1/{signal}", self._handle, methods=["POST"], name=signal) for signal in Signal
        ]

    async def _handle(self, request: Request) -> Response:
        self.authorize(request, self.settings.queue)
        signal = Signal(request.scope["path"].rpartition("/")[2])
        encoding = _parse_encoding(request)
        body = await self.read_body(request)
        exports = ExportPublisher(self.publisher, self.settings.queue, self.settings.split)
        result = await self.run_in_time(
            self.settings.queue,
            exports.publish,
            signal,
            body,
            encoding=encoding,
            source=get_source(request),
        )
        self.count(events=result.events, invalid=1 if result.rejected else 0)
        content = encode_response(signal, encoding, rejected=result.rejected, why=result.why)
        return Response(content, media_type=encoding)

    def build_refusal(self, request: Request, error: Exception) -> Response:
        problem = build_problem(error)
        encoding = JSON if JSON in request.headers.get("content-type", "") else PROTOBUF
        text = error.detail if isinstance(error, HTTPException) else str(error)
        code = _CODES.get(problem.status_code, _UNKNOWN)
        headers = {
            name: value
            for name, value in problem.headers.items()
            if not name.startswith("content-")
        }
        content = encode_status(code, text, encoding)
        return Response(content, problem.status_code, headers, media_type=encoding)


def _parse_encoding(request: Request) -> str:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (PROTOBUF, JSON):
        raise HTTPException(415, f"content-type {kind!r} is not OTLP; use {PROTOBUF} or {JSON}")
    return kind
