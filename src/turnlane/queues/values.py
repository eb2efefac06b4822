"""One event as a publisher gives it: checked and measured before it goes anywhere."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from turnlane.queues.admission import MAX_SEVERITY

_MAX_MICROSECONDS = (1 << 63) // 1000
"""Timestamps are carried in nanoseconds, which have to fit 64 bits."""


def as_bytes(value: object) -> bytes:
    """An event's value, which nobody else can change any more."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    msg = f"an event's value is bytes, not {type(value).__name__}; encode it first"
    raise TypeError(msg)


def nanoseconds(timestamp: int) -> int:
    """A timestamp in microseconds as the queue carries it."""
    if not -_MAX_MICROSECONDS < operator.index(timestamp) < _MAX_MICROSECONDS:
        msg = f"timestamp {timestamp} is no number of microseconds since the epoch"
        raise ValueError(msg)
    return timestamp * 1000


def measured(
    key: str | None,
    headers: Mapping[str, str] | None,
    severity: int | None,
    source: str | None,
) -> int:
    """The size of an event's optional columns.

    Encoding here, and not only when the block is sealed, gives a wrong type or a lone surrogate
    back to the publisher who sent it instead of to the thread that seals everybody's events.
    """
    size = 0 if key is None else _encoded("key", key)
    if source is not None:
        size += _encoded("source", source)
    if headers is not None:
        if not isinstance(headers, Mapping):
            msg = f"headers are a mapping of text to text, not {type(headers).__name__}"
            raise TypeError(msg)
        for name, text in headers.items():
            size += _encoded("a header's name", name) + _encoded(f"header {name!r}", text) + 8
    if isinstance(severity, bool):
        msg = "severity is a number, not a bool"
        raise TypeError(msg)
    if severity is not None and not 0 <= operator.index(severity) <= MAX_SEVERITY:
        msg = f"severity {severity} is not between 0 (emergency) and {MAX_SEVERITY} (debug)"
        raise ValueError(msg)
    return size


def _encoded(what: str, text: object) -> int:
    """The bytes that a text takes."""
    if not isinstance(text, str):
        msg = f"{what} is text, not {type(text).__name__}"
        raise TypeError(msg)
    return len(text.encode())
