"""Bodies of HTTP requests, read within limits, and error answers as JSON problems (RFC 9457)."""

from __future__ import annotations

import asyncio
import json
import math
import zlib
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated, Any, Final, NotRequired, Protocol

from pydantic import ConfigDict, Field, with_config
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from typing_extensions import TypedDict

from turnlane.errors import (
    EventTooLarge,
    NoSuchBreaker,
    NoSuchLease,
    NoSuchQueue,
    NoSuchStage,
    NoSuchStream,
    NotAllowed,
    NotSupported,
    NumbersMissing,
    QueueClosed,
    QueueExists,
    QueueFull,
    RetryLater,
    TurnlaneError,
)
from turnlane.logs import get_logger

log = get_logger(__name__)

RETRY_AFTER: Final = 1.0
"""Seconds until the next attempt, for errors that do not say it."""

PROBLEM_TYPE: Final = "application/problem+json"

_INLINE_BYTES: Final = 1024
"""Up to this size a body is decompressed on the event loop: it becomes a megabyte at most."""

_STEP: Final = 64 * 1024
_MAX_MEMBERS: Final = 10_000
"""The most members of a gzip body: each costs time even if it is empty."""

_STATUS: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (QueueFull, 429),
    (NumbersMissing, 409),
    (RetryLater, 503),
    (QueueClosed, 503),
    (EventTooLarge, 413),
    (NoSuchQueue, 404),
    (NoSuchLease, 404),
    (NoSuchStage, 404),
    (NoSuchStream, 404),
    (NoSuchBreaker, 404),
    (QueueExists, 409),
    (NotSupported, 400),
    (TurnlaneError, 400),
    (ClientDisconnect, 400),
    (ValueError, 400),
    (OSError, 503),
)


class BodyLimits(Protocol):
    """The limits of a body."""

    @property
    def max_request_bytes(self) -> int:
        """The most bytes of the body as it arrives."""

    @property
    def max_decompressed_bytes(self) -> int:
        """The most bytes of the decompressed body."""


class BodyTooLarge(EventTooLarge):
    """The body of the request is larger than its limit."""


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """Return the whole body, decompressed if it is gzip or deflate.

    Raises ``BodyTooLarge`` (413), ``ValueError`` for a body that cannot be decompressed (400) and
    ``HTTPException`` for another encoding (415). Never uses more memory than the limits allow.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower() or "identity"
    if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
        raise HTTPException(
            415, f"content-encoding {encoding!r} is not supported; use gzip, deflate or none"
        )
    body = await _receive(request, limits.max_request_bytes)
    if encoding == "identity":
        return body
    most = limits.max_decompressed_bytes
    if len(body) <= _INLINE_BYTES:
        return decompress(body, most)
    return await asyncio.get_running_loop().run_in_executor(None, decompress, body, most)


async def _receive(request: Request, most: int) -> bytes:
    declared = request.headers.get("content-length", "")
    stream = request.stream()
    if declared.isdecimal() and int(declared) > most:
        await _drain(request, stream, most)
        raise _too_large(most)
    pieces: list[bytes] = []
    size = 0
    async for piece in stream:
        size += len(piece)
        if size > most:
            await _drain(request, stream, most)
            raise _too_large(most)
        pieces.append(piece)
    return b"".join(pieces)


async def _drain(request: Request, stream: AsyncIterator[bytes], most: int) -> None:
    """Read and ignore up to ``most`` bytes: a client that is still sending misses the answer."""
    if request.headers.get("expect") is not None:
        return
    async for piece in stream:
        most -= len(piece)
        if most < 0:
            return


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body is larger than {most} bytes (max_request_bytes); send it in parts"
    )


def decompress(body: bytes, most: int) -> bytes:
    """Decompress gzip, zlib or raw deflate data to at most ``most`` bytes. ``BodyTooLarge``."""
    try:
        return _inflate(body, most, 47)  # gzip or zlib, as its first bytes say
    except zlib.error as error:
        if body[:1] == b"\x1f":
            raise ValueError(f"the body is not valid gzip data: {error}") from None
    try:
        return _inflate(body, most, -15)  # some clients send raw data as deflate
    except zlib.error as error:
        raise ValueError(f"the body cannot be decompressed: {error}") from None


def _inflate(body: bytes, most: int, window: int) -> bytes:
    pieces: list[bytes] = []
    stream = zlib.decompressobj(window)
    members = 0
    at = 0
    while at < len(body):
        if stream.eof:  # a gzip file may have several members
            stream = zlib.decompressobj(window)
            members += 1
        given = body[at : at + _STEP]
        # One byte more than allowed shows that the body is too large.
        pieces.append(stream.decompress(given, most + 1))
        at += len(given) - len(stream.unused_data)
        most -= len(pieces[-1])
        if most < 0 or members > _MAX_MEMBERS:
            raise BodyTooLarge(
                "the decompressed body is too large (max_decompressed_bytes); send it in parts"
            )
    if body and not stream.eof:
        raise ValueError("the compressed data of the body is incomplete")
    return b"".join(pieces)


@with_config(ConfigDict(extra="forbid"))
class ProblemJson(TypedDict):
    """An error (RFC 9457)."""

    title: str
    status: int
    detail: Annotated[str, Field(description="The error, its place, and how to correct it.")]
    error: Annotated[str, Field(description="The kind of error, as the Python client raises it.")]
    expected: NotRequired[
        Annotated[int, Field(description="The lowest number of the producer that is missing.")]
    ]
    missing: NotRequired[
        Annotated[
            list[list[int]],
            Field(description="Missing numbers: the first and the last of each range."),
        ]
    ]


def get_status(error: Exception) -> int:
    """Return the HTTP status for an error."""
    if isinstance(error, HTTPException):
        return error.status_code
    if isinstance(error, NotAllowed):
        return 403 if error.known else 401
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def build_problem(error: Exception) -> Response:
    """Return the answer to an error: a JSON problem (RFC 9457) with the class of the error."""
    status = get_status(error)
    if status == 500:
        log.error("http.request_failed", exc_info=error)
    detail = "internal error, see the log" if status == 500 else _detail(error)
    content: ProblemJson = {
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "error": type(error).__name__,
    }
    if isinstance(error, NumbersMissing):
        content["expected"] = error.missing[0][0]
        content["missing"] = [[first, end - 1] for first, end in error.missing]
    headers = dict(getattr(error, "headers", None) or {})
    if status in (429, 503):
        headers["retry-after"] = str(get_retry_after(error))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status == 413:
        headers["connection"] = "close"  # the rest of the body may still arrive
    body = json.dumps(content, ensure_ascii=False).encode("utf-8", "backslashreplace")
    return Response(body, status, headers, media_type=PROBLEM_TYPE)


def get_retry_after(error: Exception) -> int:
    """Return after how many whole seconds the client should try again."""
    after = getattr(error, "after", None)
    return max(1, math.ceil(RETRY_AFTER if after is None else after))


async def answer_problem(_request: Request, error: Exception) -> Response:
    """Answer an error; the handler of :data:`PROBLEM_HANDLERS`."""
    return build_problem(error)


PROBLEM_HANDLERS: Final[dict[Any, Any]] = dict.fromkeys(
    (HTTPException, TurnlaneError, ClientDisconnect, ValueError, OSError), answer_problem
)
"""The ``exception_handlers`` of a Starlette application.

Any other error is a bug: uvicorn logs it and answers 500.
"""


def _detail(error: Exception) -> str:
    return str(error.detail) if isinstance(error, HTTPException) else str(error)
