"""Errors on their way over Arrow Flight: the class goes along, so that the client raises it again.

Flight has few kinds of error and no room for ours, so that every message begins with
``turnlane:QueueFull:``, and the same stands as JSON in the error's extra information. Kinds are
chosen for clients that know nothing of turnlane: *unavailable* is worth another try, *server
error* is not.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import flight
from pydantic import BaseModel, ConfigDict, Field

from turnlane.errors import Bug, ConfigError, NotAllowed, QueueClosed, RetryLater, TurnlaneError
from turnlane.memory_limit import memory_limit
from turnlane.node.flight.commands import MAX_WAIT
from turnlane.units import Duration, Size

log = logging.getLogger(__name__)

MAX_MESSAGE = 2000
"""Characters: gRPC sends messages in headers, which must not grow beyond 8 KiB."""


def flight_error(error: Exception) -> flight.FlightError:
    """The error as Flight sends it."""
    name = type(error).__name__ if isinstance(error, TurnlaneError) else ValueError.__name__
    text = str(error)[:MAX_MESSAGE]
    details: dict[str, object] = {"error": name, "message": text}
    if isinstance(error, RetryLater) and error.after is not None:
        details["after"] = error.after
    kind: Any = _kind_of(error)  # its stubs know of no arguments
    made: flight.FlightError = kind(
        f"turnlane:{name}: {text}", extra_info=json.dumps(details).encode()
    )
    return made


def _kind_of(error: Exception) -> type[flight.FlightError]:
    if isinstance(error, NotAllowed):
        known = error.known
        return flight.FlightUnauthorizedError if known else flight.FlightUnauthenticatedError
    # A queue is closed because its node is being stopped: that one comes back.
    if isinstance(error, RetryLater | QueueClosed):
        return flight.FlightUnavailableError
    if isinstance(error, Bug):
        return flight.FlightInternalError
    # Not ArrowInvalid, which would be INVALID_ARGUMENT: pyarrow sends a traceback along with it,
    # and with that the paths of this machine.
    return flight.FlightServerError


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Whatever is raised within goes to the client in a form it understands."""
    try:
        yield
    except flight.FlightError:
        raise
    except (TurnlaneError, ValueError, pa.ArrowException) as error:
        raise flight_error(error) from None
    except Exception:
        log.exception("a Flight call failed")
        raise flight_error(Bug("the node failed; its log says why")) from None


# ── flight_limits ──
# What the Flight plane puts up with.

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
        """``max_memory`` in bytes."""
        if self.max_memory is not None:
            return self.max_memory
        try:
            return int(memory_limit() * _SHARE_OF_MEMORY)
        except ConfigError:
            return sys.maxsize  # the system does not say what there is
