"""Lines, bodies and columns of texts: cut from a buffer and put together, a whole block at a time.

Nothing here handles a line by itself: numpy finds the newlines, and one pass over the bytes takes
them out. So even a short line costs only a few nanoseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turnlane.errors import EventTooLarge
from turnlane.events import BASE_SCHEMA, Block, build_values

Bytes = bytes | bytearray | memoryview
Octets = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]

_NEWLINE: Final = ord("\n")
_RETURN: Final = ord("\r")
_EMPTY = pa.scalar(b"", pa.large_binary())
_END_OF_LINE = pa.scalar(b"\n", pa.large_binary())


# ── lines of a buffer ────────────────────────────────────────────────────────────────────────────


class Lines(NamedTuple):
    """The lines of a buffer."""

    values: pa.Array[Any]
    """A binary column: the lines without their ends."""
    ends: Positions
    """For each line: the bytes of the buffer up to and including its end."""
    split: int
    """How many cuts are inside lines that are too long."""


def split_lines(data: bytes, longest: int, *, whole: bool = False) -> Lines | None:
    r"""Split at every ``\n`` or ``\r\n``; ``None`` if no line is complete.

    The bytes after the last newline are left over, except with ``whole``, when nothing more will
    come. A line of more than ``longest`` bytes is cut into pieces of that length, and so is the
    rest: never more than ``longest`` bytes are left over.
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
    # A search for two bytes at once would take as long as everything else.
    if not pieces and b"\r" not in data and np.diff(newlines, prepend=-1).max() - 1 <= longest:
        # Only ordinary lines: removing the newlines is enough.
        stops = newlines - np.arange(len(newlines))
        return Lines(_build_binary(data[:used].replace(b"\n", b""), stops), newlines + 1, 0)
    values, ends = _split_any(octets[: used + pieces], newlines, longest)
    return Lines(values, ends, len(ends) - len(newlines) - (1 if whole and rest else 0))


def _split_any(
    octets: Octets, newlines: Positions, longest: int
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
    # Each line becomes `counts` pieces.
    counts = np.maximum(1, -(-(stops - starts) // longest))
    line = np.repeat(np.arange(len(counts)), counts)
    piece = np.arange(len(line)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts[line] + piece * longest
    last = np.minimum(first + longest, stops[line])
    values = _build_binary(octets[keep].data, np.cumsum(last - first))
    return values, np.where(piece + 1 == counts[line], ends[line], last)


def _build_binary(body: bytes | memoryview, stops: Positions) -> pa.Array[Any]:
    offsets = np.zeros(len(stops) + 1, dtype=np.int32)
    offsets[1:] = stops
    buffers = [None, pa.py_buffer(offsets.data), pa.py_buffer(body)]
    return pa.Array.from_buffers(pa.binary(), len(stops), buffers, 0)


# ── bodies of requests ───────────────────────────────────────────────────────────────────────────

_SHORT_BODY: Final = 2048
"""Bytes: up to here the start of a vectorised search costs more than it saves."""
_DECODER: Final = json.JSONDecoder()
_SPACE: Final = re.compile(r"[ \t\n\r]*")


def split_body_lines(body: bytes) -> pa.Array[Any]:
    r"""Return the lines of a body without their ends (``\n`` or ``\r\n``), except empty lines."""
    if len(body) > _SHORT_BODY:
        return _split_long_body(body)
    *ended, last = body.split(b"\n")
    lines = [*(line.removesuffix(b"\r") for line in ended), last]
    return build_values([line for line in lines if line])


def _split_long_body(body: bytes) -> pa.Array[Any]:
    """Return the same without a step for each line."""
    lines = split_lines(body, max(1, len(body)), whole=True)
    if lines is None:
        return build_values([])
    _, offsets, content = lines.values.buffers()
    assert offsets is not None
    assert content is not None
    stops = np.frombuffer(memoryview(offsets), np.int32)[1 : len(lines.ends) + 1].astype(np.int64)
    return _build_binary(memoryview(content), stops[np.diff(stops, prepend=0) > 0])


def split_json_array(body: bytes) -> pa.Array[Any]:
    """Return the elements of a JSON array as written, or the one value that is not an array.

    Raises ``ValueError``.
    """
    try:
        text = body.decode()
        at = _skip_space(text, 0)
        if text[at : at + 1] == "[":
            elements = _list_elements(text, at + 1)
        else:
            json.loads(text)
            elements = [text.strip()]
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    return build_values([element.encode() for element in elements])


def _list_elements(text: str, at: int) -> list[str]:
    elements: list[str] = []
    at = _skip_space(text, at)
    if text[at : at + 1] == "]":
        at += 1
    else:
        while True:
            _, end = _DECODER.raw_decode(text, at)
            elements.append(text[at:end])
            end = _skip_space(text, end)
            at = _skip_space(text, end + 1)
            if text[end : end + 1] != ",":
                break
        if text[end : end + 1] != "]":
            raise json.JSONDecodeError("Expecting ',' or ']'", text, end)
    if _skip_space(text, at) != len(text):
        raise json.JSONDecodeError("Extra data", text, at)
    return elements


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


# ── blocks of events with common headers and source ──────────────────────────────────────────────

MAX_REPEATED_BYTES: Final = 1 << 28
"""The most bytes that a block repeats for its events: a small request must not become gigabytes."""
_FEW_EVENTS = 100
"""Up to here Python's own lists are faster."""
_HEADERS = BASE_SCHEMA.field("headers").type


def build_event_block(
    values: pa.Array[Any],
    *,
    keys: Sequence[str | None] | str | None = None,
    severities: Sequence[int | None] | None = None,
    headers: Mapping[str, str] | pa.Array[Any] | None = None,
    source: str | None = None,
) -> Block:
    """Return a block of these values; one key, one mapping of headers and the source are repeated.

    It has no ``timestamp``: events get theirs when they are published. Raises ``EventTooLarge``.
    """
    count = len(values)
    texts = [source or "", keys if isinstance(keys, str) else ""]
    if isinstance(headers, Mapping):
        texts += [*headers, *headers.values()]
    check_repeated_bytes(count * sum(map(len, texts)))
    columns: dict[str, pa.Array[Any]] = {"value": values}
    if isinstance(keys, str):
        columns["key"] = repeat_text(keys, count)
    elif keys is not None:
        columns["key"] = pa.array(keys, pa.string())
    if isinstance(headers, pa.Array):
        columns["headers"] = headers
    elif headers:
        columns["headers"] = _repeat_headers(headers, count)
    if severities is not None:
        columns["severity"] = pa.array(severities, pa.int8())
    if source is not None:
        columns["source"] = repeat_text(source, count)
    fields = [BASE_SCHEMA.field(name) for name in columns]
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))


def check_repeated_bytes(size: int) -> None:
    """Raise ``EventTooLarge`` if a block repeats too many bytes for its events."""
    if size > MAX_REPEATED_BYTES:
        raise EventTooLarge(
            f"the parts that the events have in common take {size} bytes, repeated for each event; "
            f"{MAX_REPEATED_BYTES} are allowed: send the events in parts"
        )


def _repeat_headers(headers: Mapping[str, str], count: int) -> pa.Array[Any]:
    names, texts = list(headers), list(headers.values())
    if count <= _FEW_EVENTS:
        return build_headers(names, *([text] * count for text in texts))
    rows = np.tile(np.arange(len(names)), count)
    return _build_maps(
        len(names), count, pa.array(names, pa.string()).take(rows),
        pa.array(texts, pa.string()).take(rows),
    )  # fmt: skip


def build_headers(names: Sequence[str], *columns: Sequence[str]) -> pa.Array[Any]:
    """Return a column of headers: every event has these names, with the texts of its columns."""
    count = len(columns[0])
    texts = [text for row in zip(*columns, strict=True) for text in row]
    return _build_maps(
        len(names), count, pa.array([*names] * count, pa.string()), pa.array(texts, pa.string())
    )


def _build_maps(width: int, count: int, names: Any, texts: Any) -> pa.Array[Any]:  # noqa: ANN401
    ends = pa.array(np.arange(count + 1, dtype=np.int32) * np.int32(width))
    column: pa.Array[Any] = pa.MapArray.from_arrays(ends, names, texts)
    assert column.type == _HEADERS
    return column


def repeat_text(text: str, count: int) -> pa.Array[Any]:
    """Return a column of ``count`` times the same text."""
    word = text.encode()
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(len(word))
    buffers = [None, pa.py_buffer(offsets.data), pa.py_buffer(word * count)]
    return pa.Array.from_buffers(pa.string(), count, buffers, 0)


# ── spans of a buffer ────────────────────────────────────────────────────────────────────────────


def copy_spans(buffer: Bytes, starts: Positions, ends: Positions) -> pa.BinaryArray:
    """Return a column of the spans of a buffer, which are in order and do not overlap."""
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
    return cast("pa.BinaryArray", parts.take(np.arange(0, 2 * count, 2, dtype=np.int32)))


def trim_ends(data: Octets, starts: Positions, ends: Positions) -> Positions:
    """Return the ends of the spans without one NUL and then without one newline."""
    for octet in (0, _NEWLINE):
        final = data.take(ends - 1, mode="clip") == octet
        if final.any():  # rare
            ends = ends - (final & (ends > starts))
    return ends


# ── columns of texts as one piece of memory ──────────────────────────────────────────────────────


class JoinedTexts(NamedTuple):
    """Texts one after another, without a Python object for any of them."""

    data: pa.Buffer
    ends: Positions
    """The end of each text in ``data``."""


NO_TEXTS = JoinedTexts(pa.py_buffer(b""), np.zeros(0, dtype=np.int64))


def to_large_binary(texts: Any) -> Any:  # noqa: ANN401
    """Return the column as bytes without a limit of their total length; null becomes empty."""
    values = texts.cast(pa.large_binary())
    return pc.fill_null(values, _EMPTY) if values.null_count else values


def join_columns(*parts: Any) -> Any:  # noqa: ANN401
    """Join columns and scalars row by row."""
    return pc.binary_join_element_wise(*parts, _EMPTY)


def join_texts(texts: Any) -> JoinedTexts:  # noqa: ANN401
    """Join the texts of a column made by :func:`to_large_binary` or :func:`join_columns`."""
    if not len(texts):
        return NO_TEXTS
    offsets, values = texts.buffers()[1:]
    bounds = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    first, last = int(bounds[0]), int(bounds[-1])
    data = values.slice(first, last - first) if values is not None else NO_TEXTS.data
    return JoinedTexts(data, bounds[1:] - first)


def join_lines(payloads: Any) -> pa.Buffer:  # noqa: ANN401
    """Join texts with a newline after each."""
    return join_texts(join_columns(to_large_binary(payloads), _END_OF_LINE)).data
