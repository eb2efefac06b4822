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
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import flight

from turnlane.errors import Bug, NotAllowed, QueueClosed, RetryLater, TurnlaneError

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
