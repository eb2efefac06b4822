"""Protobuf read by the column: every step takes the next field of all messages at once.

A message is a span of a buffer; so are the messages and texts inside it. Reading a thousand
messages takes as many steps as the longest of them has fields, not as there are messages.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.formats.spans import column

Octets = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

MAX_FIELDS: Final = 4096
"""Of one message. Each costs a step, however few messages are left to take it."""

VARINT, FIXED64, SPAN, FIXED32 = 0, 1, 2, 5
_WIDTHS: Final = np.array([0, 8, 0, 0, 0, 4, 0, 0])
_KNOWN: Final = np.array([True, True, True, False, False, True, False, False])
_HEX: Final = np.frombuffer(b"0123456789abcdef", np.uint8)


class Spans(NamedTuple):
    """Pieces of a buffer, each belonging to a row; in the order of rows."""

    rows: Places
    starts: Places
    ends: Places

    def where(self, chosen: Mask) -> Spans:
        """The chosen ones."""
        return Spans(self.rows[chosen], self.starts[chosen], self.ends[chosen])


class Fields(NamedTuple):
    """The fields of many messages: ``row`` says whose. In the order of rows, then as written."""

    rows: Places
    numbers: Places
    starts: Places
    ends: Places
    values: Numbers
    """Of a varint. A span's is its length."""

    def spans(self, chosen: Mask) -> Spans:
        """Where the chosen fields' contents are."""
        return Spans(self.rows[chosen], self.starts[chosen], self.ends[chosen])


def walk(data: Octets, starts: Places, ends: Places) -> tuple[Fields, Mask]:
    """All fields of the messages, and which messages are malformed (their rows are numbers)."""
    place = starts.astype(np.int64)
    limit = ends.astype(np.int64)
    bad = np.zeros(len(place), bool)
    rows = np.flatnonzero(place < limit)
    found: list[Fields] = []
    while rows.size and len(found) < MAX_FIELDS:
        fields, good = _step(data, rows, place[rows], limit[rows])
        bad[rows[~good]] = True
        rows = rows[good]
        place[rows] = fields.ends
        found.append(fields)
        rows = rows[fields.ends < limit[rows]]
    bad[rows] = True
    return _in_order(found), bad


def _step(data: Octets, rows: Places, place: Places, limit: Places) -> tuple[Fields, Mask]:
    """The field that starts at each place, and which of them are whole."""
    tags, behind = varints(data, place)
    kinds = (tags & np.uint64(7)).astype(np.int64)
    values, after = varints(data, behind)
    lengths = np.minimum(values, np.uint64(1 << 40)).astype(np.int64)
    spans = kinds == SPAN
    counted = spans | (kinds == VARINT)
    starts = np.where(spans, after, behind)
    ends = np.where(counted, after, behind + _WIDTHS[kinds]) + np.where(spans, lengths, 0)
    numbers = np.minimum(tags >> np.uint64(3), np.uint64(1 << 30)).astype(np.int64)
    good = _KNOWN[kinds] & (ends <= limit) & (numbers > 0)
    whole = Fields(rows, numbers, starts, ends, values)
    return Fields(*(each[good] for each in whole)), good


def varints(data: Octets, place: Places) -> tuple[Numbers, Places]:
    """The numbers written at these places, and where they end; beyond the data if unfinished."""
    octets = data.take(place, mode="clip")
    values = (octets & 0x7F).astype(np.uint64)
    ends = place + 1
    more = np.flatnonzero(octets >= 0x80)
    for shift in range(7, 70, 7):
        if not more.size:
            return values, ends
        octets = data.take(ends[more], mode="clip")
        values[more] |= (octets & 0x7F).astype(np.uint64) << np.uint64(shift)
        ends[more] += 1
        more = more[octets >= 0x80]
    ends[more] = np.iinfo(np.int32).max
    return values, ends


def _in_order(steps: list[Fields]) -> Fields:
    if not steps:
        none = np.zeros(0, np.int64)
        return Fields(none, none, none, none, none.astype(np.uint64))
    parts = [np.concatenate(column) for column in zip(*steps, strict=True)]
    order = np.argsort(parts[0], kind="stable")
    return Fields(*(part[order] for part in parts))


# ── from spans to Arrow ─────────────────────────────────────────────────────────────────────────


def texts(data: Octets, spans: Spans) -> pa.Array[Any]:
    """The spans as text, one for each; what is no UTF-8 is replaced."""
    if not len(spans.rows):
        return pa.array([], pa.string())
    raw = column(data, spans.starts, spans.ends)  # type: ignore[arg-type]
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        whole = [(each or b"").decode(errors="replace") for each in raw.to_pylist()]
        return pa.array(whole, pa.string())


def hexadecimal(data: Octets, spans: Spans, width: int) -> tuple[Spans, pa.Array[Any]]:
    """The spans that are so many bytes wide, and their digits."""
    wide = spans.where(spans.ends - spans.starts == width)
    octets = data[wide.starts[:, None] + np.arange(width)]
    digits = np.empty((len(wide.rows), 2 * width), np.uint8)
    digits[:, 0::2] = _HEX[octets >> 4]
    digits[:, 1::2] = _HEX[octets & 15]
    bounds = np.arange(0, digits.size + 1, 2 * width, dtype=np.int32)
    buffers = [None, pa.py_buffer(bounds.data), pa.py_buffer(digits.tobytes())]
    return wide, pa.Array.from_buffers(pa.string(), len(wide.rows), buffers)


def fixed(data: Octets, spans: Spans) -> Numbers:
    """The eight bytes of each span as a number."""
    octets = data[spans.starts[:, None] + np.arange(8)]
    return np.ascontiguousarray(octets).view("<u8").reshape(-1)


def picked(values: pa.Array[Any], index: Places) -> pa.Array[Any]:
    """The values at these places; null for a place that is not there."""
    if not len(values):
        nothing: pa.Array[Any] = pa.nulls(len(index), values.type)
        return nothing
    absent = (index < 0) | (index >= len(values))
    places: Any = pa.array(np.where(absent, 0, index), mask=absent)
    found: pa.Array[Any] = values.take(places)
    return found


def spread(rows: Places, values: pa.Array[Any], count: int) -> pa.Array[Any]:
    """A column of ``count`` rows: the values in theirs, the last one counts, null elsewhere."""
    index = np.full(count, -1, np.int64)
    index[rows] = np.arange(len(rows))
    return picked(values, index)


def maps(rows: Places, keys: pa.Array[Any], values: pa.Array[Any], count: int) -> pa.Array[Any]:
    """A column of maps: each pair in the map of its row; null is an empty text."""
    ends = np.zeros(count + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=count), out=ends[1:])
    offsets: Any = pa.array(ends)
    found: pa.Array[Any] = pa.MapArray.from_arrays(
        offsets, keys.fill_null(""), values.fill_null("")
    )
    return found
