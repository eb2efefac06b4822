"""What a node's errors are on this side: the same classes that the node raised."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator

import pyarrow as pa
from pyarrow import flight

from turnlane import errors
from turnlane.errors import ConfigError, NotSupported, RetryLater, TransportDown, TurnlaneError

_NAMED = re.compile(
    r"turnlane:(\w+): (.*?)(?:\. (?:Detail|gRPC client debug context): |$)", re.DOTALL
)


def failure(error: Exception, place: str) -> Exception:
    """The error that the node at ``place`` meant; ``TransportDown`` if it was none of its own."""
    name, message, after = _details(error)
    if name == ValueError.__name__:
        return ValueError(message)
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TurnlaneError):
        return _rebuilt(kind, message, after)
    if isinstance(error, NotImplementedError):
        return NotSupported(f"what listens at {place} is not a turnlane node")
    return TransportDown(f"{place}: {_first_line(error)}")


def _details(error: Exception) -> tuple[str, str, float | None]:
    try:
        found = json.loads(getattr(error, "extra_info", b"") or b"{}")
        if "error" in found:
            return str(found["error"]), str(found.get("message", "")), found.get("after")
    except (ValueError, TypeError):
        pass  # not ours, or cut off on the way: the message says it too
    match = _NAMED.search(str(error))
    return (match[1], match[2], None) if match else ("", "", None)


def _rebuilt(kind: type[TurnlaneError], message: str, after: float | None) -> TurnlaneError:
    if issubclass(kind, RetryLater):
        return kind(message, after=after)
    if issubclass(kind, ConfigError):
        knob, _, rest = message.partition(": ")
        return kind(knob, rest)
    return kind(message)


def _first_line(error: Exception) -> str:
    text = str(error).partition(" gRPC client debug context")[0].partition("\n")[0]
    return text.removesuffix(".") or type(error).__name__


@contextlib.contextmanager
def understood(place: str) -> Iterator[None]:
    """Whatever Flight raises within is raised as what the node meant."""
    try:
        yield
    except (flight.FlightError, pa.ArrowException, NotImplementedError) as error:
        raise failure(error, place) from None
