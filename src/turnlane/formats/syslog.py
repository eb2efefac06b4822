"""Syslog as it comes in: messages told apart, and how important each of them is.

No message is parsed or changed on the way into a queue; only its priority is looked at, so that a
queue under pressure can shed what matters least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.formats.framing import IN_LINE, Cut, Found, Framing, cut, find
from turnlane.formats.spans import column, trimmed

__all__ = ["IN_LINE", "Cut", "Found", "Framing", "cut", "find", "priorities", "severities", "whole"]

Numbers = npt.NDArray[np.uint16]
Mask = npt.NDArray[np.bool_]

_LESS, _GREATER, _ZERO = (ord(each) for each in "<>0")
_MAX_PRIORITY: Final = 191
_LONGEST: Final = len("<191>")


def whole(messages: Sequence[bytes]) -> pa.BinaryArray:
    """A column of messages that arrived one by one, each without the NUL and newline at its end."""
    sizes = np.fromiter(map(len, messages), dtype=np.int64, count=len(messages))
    ends = np.cumsum(sizes)
    starts = ends - sizes
    joined = b"".join(messages)
    ends = trimmed(np.frombuffer(joined, np.uint8), starts, ends) if joined else ends
    return column(joined, starts, ends)


def severities(values: pa.BinaryArray) -> pa.Int8Array:
    """The severity in each message's ``<PRI>``, 0 (emergency) to 7 (debug); null without one."""
    numbers, missing = _priorities(values)
    return pa.array((numbers & 7).astype(np.int8), pa.int8(), mask=missing)


def priorities(values: pa.BinaryArray) -> pa.Int16Array:
    """The number in each message's ``<PRI>``; null without one, or if it is too large."""
    numbers, missing = _priorities(values)
    return pa.array(numbers.astype(np.int16), pa.int16(), mask=missing)


def _priorities(values: pa.BinaryArray) -> tuple[Numbers, Mask | None]:
    """The numbers, and which of them are none, if any."""
    count = len(values)
    _, offsets, contents = values.buffers()
    if offsets is None or contents is None or not count or not contents.size:
        return np.zeros(count, np.uint16), np.ones(count, np.bool_)
    data = np.frombuffer(memoryview(contents), np.uint8)
    bounds = np.frombuffer(memoryview(offsets), np.int32)[values.offset : values.offset + count + 1]
    less, one, two, three, four = _beginnings(data, bounds[:-1].astype(np.intp))
    ones, tens, hundreds = (each - np.uint8(_ZERO) for each in (one, two, three))
    # A byte below "0" wraps to a large number: a digit is what is at most 9.
    digits = ones <= 9
    short = digits & (two == _GREATER)
    digits &= tens <= 9
    middle = digits & (three == _GREATER)
    long = digits & (hundreds <= 9) & (four == _GREATER)
    two_digits = np.uint16(10) * ones + tens
    priority = np.where(short, ones, two_digits)
    priority = np.where(long, np.uint16(10) * two_digits + hundreds, priority)
    width = np.uint8(3) * short + np.uint8(4) * middle + np.uint8(5) * long
    valid = (less == _LESS) & (width > 0) & (width <= np.diff(bounds))
    valid &= priority <= _MAX_PRIORITY
    return priority, None if valid.all() else ~valid


def _beginnings(data: npt.NDArray[np.uint8], starts: npt.NDArray[np.intp]) -> list[Any]:
    """The first five bytes of each message; of a shorter one, some are of others."""
    if len(data) < _LONGEST:
        data = np.concatenate((data, np.zeros(_LONGEST, np.uint8)))
    return [data[at:].take(starts, mode="clip") for at in range(_LONGEST)]
