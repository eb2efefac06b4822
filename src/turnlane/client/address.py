"""URLs of nodes, such as ``turnlane://host:port,host:port``, and the errors that nodes send.

A node sends the class of an error with it (see ``node/flight/messages.py``), so a client raises the
same class.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self

import pyarrow as pa
from pyarrow import flight

from turnlane import errors
from turnlane.errors import ConfigError, NotSupported, RetryLater, TransportDown, TurnlaneError
from turnlane.validation import get_message

_NAMED = re.compile(
    r"turnlane:(\w+): (.*?)(?:\. (?:Detail|gRPC client debug context): |$)", re.DOTALL
)


def convert_flight_error(error: Exception, place: str) -> Exception:
    """Return the error that the node at ``place`` raised; ``TransportDown`` for other errors."""
    name, message, after = _details(error)
    if name == ValueError.__name__:
        return ValueError(message)
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TurnlaneError):
        return _build_error(kind, message, after)
    if isinstance(error, NotImplementedError):
        return NotSupported(f"the server at {place} is not a turnlane node")
    return TransportDown(f"{place}: {_first_line(error)}")


def _details(error: Exception) -> tuple[str, str, float | None]:
    try:
        found = json.loads(getattr(error, "extra_info", b"") or b"{}")
        if "error" in found:
            return str(found["error"]), str(found.get("message", "")), found.get("after")
    except (ValueError, TypeError):
        pass  # not from a node, or truncated: the message has the same information
    match = _NAMED.search(str(error))
    return (match[1], match[2], None) if match else ("", "", None)


def _build_error(kind: type[TurnlaneError], message: str, after: float | None) -> TurnlaneError:
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
def raise_node_errors(place: str) -> Iterator[None]:
    """Convert the errors of Flight in the block to the errors that the node raised."""
    try:
        yield
    except (flight.FlightError, pa.ArrowException, NotImplementedError) as error:
        raise convert_flight_error(error, place) from None


DEFAULT_PORT: Final = 8815
SCHEMES: Final = {"turnlane": False, "turnlanes": True}
_HELP: Final = "write turnlane://host:port, with TLS turnlanes://host:port; several after commas"
_PLACE: Final = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class NodeUrl:
    """The addresses of one or more nodes, and whether to use TLS."""

    places: tuple[str, ...]
    """``host:port`` each."""
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse a URL. Raises ``ConfigError``."""
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in SCHEMES:
            raise ConfigError("url", f"{url!r} is not the URL of a node; {_HELP}")
        places = tuple(_parse_place(each.strip(), url) for each in rest.rstrip("/").split(","))
        if len(set(places)) < len(places):
            raise ConfigError("url", f"{url!r} names a node twice")
        return cls(places, SCHEMES[scheme])

    @classmethod
    def from_setting(cls, url: str) -> Self:
        """Parse the URL of a setting. Raises ``ValueError``; pydantic adds the setting's name."""
        try:
            return cls.parse(url)
        except ConfigError as error:
            raise ValueError(get_message(error)) from None

    def locations(self) -> list[str]:
        """Return the addresses in the form of Flight."""
        scheme = "grpc+tls" if self.tls else "grpc+tcp"
        return [f"{scheme}://{place}" for place in self.places]


def _parse_place(text: str, url: str) -> str:
    match = _PLACE.fullmatch(text)
    if match is None or int(match[2] or 1) > 65_535 or match[2] == "0":
        raise ConfigError("url", f"{text!r} in {url!r} is not host:port; {_HELP}")
    return f"{match[1]}:{match[2] or DEFAULT_PORT}"
