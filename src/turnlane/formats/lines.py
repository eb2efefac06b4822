"""Cutting a buffer into lines, all of them at once.

Nothing here looks at a line by itself: numpy finds the newlines, and one pass over the bytes takes
them out. So a line costs a few nanoseconds, however short it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_NEWLINE = 10
_RETURN = 13

Positions = npt.NDArray[np.int64]


class Lines(NamedTuple):
    """The lines of a buffer."""

    values: pa.Array[Any]
    """A binary column: the lines without what ends them."""
    ends: Positions
    """For each line, how many bytes of the buffer are used up by it and those before it."""
    split: int
    """How many cuts were made inside lines, because they were longer than allowed."""


def cut(data: bytes, longest: int, *, whole: bool = False) -> Lines | None:
    r"""Cut at every ``\n`` or ``\r\n``; ``None`` if no line is complete.

    What follows the last newline is left, unless ``whole`` says that nothing more will come. A line
    of more than ``longest`` bytes is cut into pieces of that length, and so is what is left: there
    are never more than ``longest`` bytes left over.
    """
    if not data:
        return None
    octets = np.frombuffer(data, dtype=np.uint8)
    newlines = np.flatnonzero(octets == _NEWLINE)
    used = int(newlines[-1]) + 1 if len(newlines) else 0
    rest = len(data) - used
    pieces = rest if whole else (rest - 1) // longest * longest if rest > longest else 0
    if not used + pieces:
        return None
    # Looking for two bytes at once would take as long as everything else.
    if not pieces and b"\r" not in data and _longest(newlines) <= longest:
        return _cut_plain(data, newlines)
    values, ends = _cut_any(octets[: used + pieces], newlines, longest)
    return Lines(values, ends, len(ends) - len(newlines) - (1 if whole and rest else 0))


def without_empty(values: pa.Array[Any]) -> pa.Array[Any]:
    """The lines that :func:`cut` has found, but for empty ones; nothing is copied."""
    _, offsets, body = values.buffers()
    assert offsets is not None
    assert body is not None
    stops = np.frombuffer(memoryview(offsets), np.int32)[1 : len(values) + 1].astype(np.int64)
    return _binary(memoryview(body), stops[np.diff(stops, prepend=0) > 0])


def _longest(newlines: Positions) -> int:
    return int(np.diff(newlines, prepend=-1).max()) - 1


def _cut_plain(data: bytes, newlines: Positions) -> Lines:
    """Nothing but lines of the usual kind: taking the newlines out is all there is to do."""
    body = data[: int(newlines[-1]) + 1].replace(b"\n", b"")
    stops = newlines - np.arange(len(newlines))
    return Lines(_binary(body, stops), newlines + 1, 0)


def _cut_any(
    octets: npt.NDArray[np.uint8], newlines: Positions, longest: int
) -> tuple[pa.Array[Any], Positions]:
    ends = newlines + 1
    stops = newlines
    if not len(ends) or ends[-1] < len(octets):
        ends, stops = np.append(ends, len(octets)), np.append(stops, len(octets))
    starts = np.concatenate(([0], ends[:-1]))
    returns = (stops > starts) & (ends > stops) & (octets[stops - 1] == _RETURN)
    keep = np.ones(len(octets), dtype=bool)
    keep[newlines] = False
    keep[stops[returns] - 1] = False
    stops = stops - returns
    counts = np.maximum(1, -(-(stops - starts) // longest))
    lengths, ends = _in_pieces(starts, stops, ends, counts, longest)
    return _binary(octets[keep].data, np.cumsum(lengths)), ends


def _in_pieces(
    starts: Positions, stops: Positions, ends: Positions, counts: Positions, longest: int
) -> tuple[Positions, Positions]:
    """The lengths and ends of all pieces, ``counts`` of them for each line."""
    line = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(line)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts[line] + within * longest
    last = np.minimum(first + longest, stops[line])
    return last - first, np.where(within + 1 == counts[line], ends[line], last)


def _binary(body: bytes | memoryview, stops: Positions) -> pa.Array[Any]:
    offsets = np.zeros(len(stops) + 1, dtype=np.int32)
    offsets[1:] = stops
    buffers = [None, pa.py_buffer(offsets.data), pa.py_buffer(body)]
    return pa.Array.from_buffers(pa.binary(), len(stops), buffers, 0)
