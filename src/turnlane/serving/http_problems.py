"""Which HTTP status an error gets, and errors as JSON problems (RFC 9457)."""

from __future__ import annotations

import json
import math
from http import HTTPStatus
from typing import Annotated, Any, Final, NotRequired

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
