"""Cutting a buffer into lines, all of them at once.

Nothing here looks at a line by itself: numpy finds the newlines, and one pass over the bytes takes
them out. So a line costs a few nanoseconds, however short it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from turnlane.errors import EventTooLarge
from turnlane.events import BASE_SCHEMA, Block

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
    """The lines that :func:`cut` has found, without empty ones; nothing is copied."""
    _, offsets, body = values.buffers()
    assert offsets is not None
    assert body is not None
    stops = np.frombuffer(memoryview(offsets), np.int32)[1 : len(values) + 1].astype(np.int64)
    return _binary(memoryview(body), stops[np.diff(stops, prepend=0) > 0])


def _longest(newlines: Positions) -> int:
    return int(np.diff(newlines, prepend=-1).max()) - 1


def _cut_plain(data: bytes, newlines: Positions) -> Lines:
    """Only ordinary lines: removing the newlines is enough."""
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


# ── columns ──
# Blocks of events that came together: each its own value, all the same headers and source.

MOST_SHARED: Final = 1 << 28
"""What may be written again for each event of a block, in bytes: a few lines of a request must not
become gigabytes."""
_FEW = 100
"""Events: up to here Python's own lists are the quicker way."""
_HEADERS = BASE_SCHEMA.field("headers").type


def block_of_values(
    values: pa.Array[Any],
    *,
    keys: Sequence[str | None] | str | None = None,
    severities: Sequence[int | None] | None = None,
    headers: Mapping[str, str] | pa.Array[Any] | None = None,
    source: str | None = None,
) -> Block:
    """A block of these values; a single key, headers and the source are every event's.

    It has no ``timestamp``: events get theirs when they are published. Raises ``EventTooLarge``.
    """
    count = len(values)
    texts = [source or "", keys if isinstance(keys, str) else ""]
    if isinstance(headers, Mapping):
        texts += [*headers, *headers.values()]
    check_shared(count * sum(map(len, texts)))
    columns: dict[str, pa.Array[Any]] = {"value": values}
    if isinstance(keys, str):
        columns["key"] = repeated(keys, count)
    elif keys is not None:
        columns["key"] = pa.array(keys, pa.string())
    if isinstance(headers, pa.Array):
        columns["headers"] = headers
    elif headers:
        columns["headers"] = same_headers(headers, count)
    if severities is not None:
        columns["severity"] = pa.array(severities, pa.int8())
    if source is not None:
        columns["source"] = repeated(source, count)
    fields = [BASE_SCHEMA.field(name) for name in columns]
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))


def check_shared(size: int) -> None:
    """Raise ``EventTooLarge`` if it takes too much to write what events have in common for each."""
    if size > MOST_SHARED:
        raise EventTooLarge(
            f"what the events have in common takes {size} bytes, written for each of them; "
            f"{MOST_SHARED} are allowed: send them in parts"
        )


def same_headers(headers: Mapping[str, str], count: int) -> pa.Array[Any]:
    """A column of ``count`` times the same headers."""
    names, texts = list(headers), list(headers.values())
    if count <= _FEW:
        return headers_of(names, *([text] * count for text in texts))
    rows = np.tile(np.arange(len(names)), count)
    return _maps(
        len(names), count, pa.array(names, pa.string()).take(rows),
        pa.array(texts, pa.string()).take(rows),
    )  # fmt: skip


def headers_of(names: Sequence[str], *columns: Sequence[str]) -> pa.Array[Any]:
    """A column of headers that all events have, from one column of texts for each name."""
    count = len(columns[0])
    texts = [text for row in zip(*columns, strict=True) for text in row]
    return _maps(
        len(names), count, pa.array([*names] * count, pa.string()), pa.array(texts, pa.string())
    )


def _maps(width: int, count: int, names: Any, texts: Any) -> pa.Array[Any]:  # noqa: ANN401
    ends = pa.array(np.arange(count + 1, dtype=np.int32) * np.int32(width))
    column: pa.Array[Any] = pa.MapArray.from_arrays(ends, names, texts)
    assert column.type == _HEADERS
    return column


def repeated(text: str, count: int) -> pa.Array[Any]:
    """A column of ``count`` times the same text."""
    word = text.encode()
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(len(word))
    buffers = [None, pa.py_buffer(offsets.data), pa.py_buffer(word * count)]
    return pa.Array.from_buffers(pa.string(), count, buffers, 0)


# ── spans ──
# Messages as places in a buffer, and the column that is made of them.

Bytes = bytes | bytearray | memoryview
Octets = NDArray[np.uint8]
Places = NDArray[np.int64]

_ENDINGS: Final = (ord("\0"), ord("\n"))


def column(buffer: Bytes, starts: Places, ends: Places) -> pa.BinaryArray:
    """A copy of the spans of a buffer, which are in order and do not overlap."""
    count = len(starts)
    # Arrow's spans touch, so the gaps are elements too; taking every other one leaves them out.
    bounds = np.empty(2 * count, np.int32)
    bounds[0::2] = starts
    bounds[1::2] = ends
    parts = pa.Array.from_buffers(
        pa.binary(),
        max(0, 2 * count - 1),
        [None, pa.py_buffer(bounds.data), pa.py_buffer(buffer)],
    )
    taken = parts.take(np.arange(0, 2 * count, 2, dtype=np.int32))
    return cast("pa.BinaryArray", taken)


def trimmed(data: Octets, starts: Places, ends: Places) -> Places:
    """The ends of the spans without one NUL and, after that, without one newline."""
    for octet in _ENDINGS:
        final = data.take(ends - 1, mode="clip") == octet
        if final.any():  # hardly ever
            ends = ends - (final & (ends > starts))
    return ends


# ── texts ──
# A column of texts as one piece of memory, without a Python object for any of them.

_EMPTY = pa.scalar(b"", pa.large_binary())
_TEXTS_NEWLINE = pa.scalar(b"\n", pa.large_binary())


class Strung(NamedTuple):
    """Texts one after another."""

    data: pa.Buffer
    ends: npt.NDArray[np.int64]
    """Where each of them ends in ``data``."""


NOTHING = Strung(pa.py_buffer(b""), np.zeros(0, dtype=np.int64))
"""No texts at all."""


def large(texts: Any) -> Any:  # noqa: ANN401
    """The column as bytes that may be of any length; null is empty."""
    whole = texts.cast(pa.large_binary())
    return pc.fill_null(whole, _EMPTY) if whole.null_count else whole


def joined(*parts: Any) -> Any:  # noqa: ANN401
    """Texts made of several columns, or of scalars, row by row."""
    return pc.binary_join_element_wise(*parts, _EMPTY)


def strung(texts: Any) -> Strung:  # noqa: ANN401
    """The texts of a column made by :func:`large` or :func:`joined`."""
    if not len(texts):
        return NOTHING
    offsets, values = texts.buffers()[1:]
    bounds = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    first, last = int(bounds[0]), int(bounds[-1])
    data = values.slice(first, last - first) if values is not None else NOTHING.data
    return Strung(data, bounds[1:] - first)


def lines_of(payloads: Any) -> pa.Buffer:  # noqa: ANN401
    """Texts, each with a newline after it."""
    return strung(joined(large(payloads), _TEXTS_NEWLINE)).data
