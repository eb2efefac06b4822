"""Errors and limits of the Flight plane.

Arrow Flight has only a few kinds of errors. So every message begins with the class of the error,
such as ``turnlane:QueueFull:``, and the extra information has the same as JSON: a turnlane client
raises the same class again. Other clients go by the kind: *unavailable* is worth another attempt,
*server error* is not.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import flight
from pydantic import BaseModel, ConfigDict, Field

from turnlane.errors import Bug, ConfigError, NotAllowed, QueueClosed, RetryLater, TurnlaneError
from turnlane.logs import get_logger
from turnlane.memory import memory_limit
from turnlane.node.flight.commands import MAX_WAIT
from turnlane.units import Duration, Size

log = get_logger(__name__)

MAX_MESSAGE = 2000
"""The most characters of a message: gRPC sends it in headers, which are limited to 8 KiB."""


def build_flight_error(error: Exception) -> flight.FlightError:
    """Return the error that Flight sends."""
    name = type(error).__name__ if isinstance(error, TurnlaneError) else ValueError.__name__
    text = str(error)[:MAX_MESSAGE]
    details: dict[str, object] = {"error": name, "message": text}
    if isinstance(error, RetryLater) and error.after is not None:
        details["after"] = error.after
    kind: Any = _kind_of(error)  # the stubs lack the arguments
    made: flight.FlightError = kind(
        f"turnlane:{name}: {text}", extra_info=json.dumps(details).encode()
    )
    return made


def _kind_of(error: Exception) -> type[flight.FlightError]:
    if isinstance(error, NotAllowed):
        known = error.known
        return flight.FlightUnauthorizedError if known else flight.FlightUnauthenticatedError
    # A queue is closed because the node is stopping; the node will start again.
    if isinstance(error, RetryLater | QueueClosed):
        return flight.FlightUnavailableError
    if isinstance(error, Bug):
        return flight.FlightInternalError
    # Not ArrowInvalid (INVALID_ARGUMENT): pyarrow adds a traceback to it, which shows the paths of
    # this machine.
    return flight.FlightServerError


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Convert every error of the block to an error that Flight sends to the client."""
    try:
        yield
    except flight.FlightError:
        raise
    except (TurnlaneError, ValueError, pa.ArrowException) as error:
        raise build_flight_error(error) from None
    except Exception:
        log.exception("flight.call_failed")
        raise build_flight_error(Bug("the node failed; its log says why")) from None


_SHARE_OF_MEMORY = 0.75


class FlightLimits(BaseModel):
    """Limits on calls, connections and blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    max_calls: int = Field(
        default=1000, ge=1, description="The most calls at a time; a consumer or publisher is one."
    )
    max_connections: int = Field(default=1000, ge=1, description="The most connections at a time.")
    idle_timeout: Duration = Field(
        default=600.0,
        gt=MAX_WAIT,
        description="How long a connection stays open on which nothing goes either way.",
    )
    max_block_bytes: Size = Field(
        default=512 * 2**20, ge=1, description="The largest block once it is unpacked."
    )
    max_memory: Size | None = Field(
        default=None,
        ge=1,
        description="No new stream may bring blocks while Arrow uses more memory than this; "
        "default: three quarters of what the process may use.",
    )

    def memory(self) -> int:
        """Return ``max_memory`` in bytes, or its default."""
        if self.max_memory is not None:
            return self.max_memory
        try:
            return int(memory_limit() * _SHARE_OF_MEMORY)
        except ConfigError:
            return sys.maxsize  # the system does not report its memory
