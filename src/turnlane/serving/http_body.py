"""The bodies of requests, read within limits, and the answers to what goes wrong."""

from __future__ import annotations

import asyncio
import json
import logging
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

log = logging.getLogger(__name__)

RETRY_AFTER: Final = 1.0
"""Seconds, for a refusal that knows no better."""

PROBLEM_TYPE: Final = "application/problem+json"

_AT_ONCE: Final = 1024
"""So few compressed bytes are unpacked on the spot: they become a megabyte at most."""

_STEP: Final = 64 * 1024
_MOST_MEMBERS: Final = 10_000
"""Each costs time even if it is empty."""

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
    """What a body is held to."""

    @property
    def max_request_bytes(self) -> int:
        """As it comes."""

    @property
    def max_decompressed_bytes(self) -> int:
        """Once it is unpacked."""


class BodyTooLarge(EventTooLarge):
    """The request's body is larger than is allowed."""


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """The whole body, unpacked if it is gzip or deflate.

    Raises ``BodyTooLarge`` (413), ``ValueError`` for a body that cannot be unpacked (400) and
    ``HTTPException`` for another encoding (415). Never holds more than the limits allow.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower() or "identity"
    if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
        raise HTTPException(415, f"content-encoding {encoding!r}; use gzip, deflate or none")
    body = await _received(request, limits.max_request_bytes)
    if encoding == "identity":
        return body
    most = limits.max_decompressed_bytes
    if len(body) <= _AT_ONCE:
        return unpacked(body, most)
    return await asyncio.get_running_loop().run_in_executor(None, unpacked, body, most)


async def _received(request: Request, most: int) -> bytes:
    declared = request.headers.get("content-length", "")
    stream = request.stream()
    if declared.isdecimal() and int(declared) > most:
        await _let_finish(request, stream, most)
        raise _too_large(most)
    pieces: list[bytes] = []
    size = 0
    async for piece in stream:
        size += len(piece)
        if size > most:
            await _let_finish(request, stream, most)
            raise _too_large(most)
        pieces.append(piece)
    return b"".join(pieces)


async def _let_finish(request: Request, stream: AsyncIterator[bytes], most: int) -> None:
    """Read on for a while: a client that is still sending does not see the answer."""
    if request.headers.get("expect") is not None:
        return
    async for piece in stream:
        most -= len(piece)
        if most < 0:
            return


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request's body is larger than {most} bytes; send it in parts")


def unpacked(body: bytes, most: int) -> bytes:
    """gzip, zlib or raw deflate data, unpacked; never makes more than ``most`` bytes."""
    try:
        return _inflated(body, most, 47)  # gzip or zlib, as its first bytes say
    except zlib.error as error:
        if body[:1] == b"\x1f":
            raise ValueError(f"the body is not gzip as it claims: {error}") from None
    try:
        return _inflated(body, most, -15)  # which some clients call deflate
    except zlib.error as error:
        raise ValueError(f"the body cannot be unpacked: {error}") from None


def _inflated(body: bytes, most: int, window: int) -> bytes:
    pieces: list[bytes] = []
    stream = zlib.decompressobj(window)
    members = 0
    at = 0
    while at < len(body):
        if stream.eof:  # a gzip file may have several members
            stream = zlib.decompressobj(window)
            members += 1
        given = body[at : at + _STEP]
        # One byte beyond what is allowed tells too large from just large enough.
        pieces.append(stream.decompress(given, most + 1))
        at += len(given) - len(stream.unused_data)
        most -= len(pieces[-1])
        if most < 0 or members > _MOST_MEMBERS:
            raise BodyTooLarge("the request's body is too large once it is unpacked")
    if body and not stream.eof:
        raise ValueError("the body ends in the middle of its compressed data")
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


def status_of(error: Exception) -> int:
    """The status that an error is answered with."""
    if isinstance(error, HTTPException):
        return error.status_code
    if isinstance(error, NotAllowed):
        return 403 if error.known else 401
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def problem(error: Exception) -> Response:
    """The answer to an error, as a JSON problem (RFC 9457) that also names its class."""
    status = status_of(error)
    if status == 500:
        log.error("a request failed", exc_info=error)
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
        headers["retry-after"] = str(retry_after(error))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status == 413:
        headers["connection"] = "close"  # the rest of the body may still be coming
    body = json.dumps(content, ensure_ascii=False).encode("utf-8", "backslashreplace")
    return Response(body, status, headers, media_type=PROBLEM_TYPE)


def retry_after(error: Exception) -> int:
    """Whole seconds after which to try again."""
    after = getattr(error, "after", None)
    return max(1, math.ceil(RETRY_AFTER if after is None else after))


async def answer_problem(_request: Request, error: Exception) -> Response:
    """The handler of :data:`PROBLEM_HANDLERS`."""
    return problem(error)


PROBLEM_HANDLERS: Final[dict[Any, Any]] = dict.fromkeys(
    (HTTPException, TurnlaneError, ClientDisconnect, ValueError, OSError), answer_problem
)
"""``exception_handlers`` of a Starlette application: errors are answered by :func:`problem`.

Any other is a bug: uvicorn logs it and answers 500.
"""


def _detail(error: Exception) -> str:
    return str(error.detail) if isinstance(error, HTTPException) else str(error)
