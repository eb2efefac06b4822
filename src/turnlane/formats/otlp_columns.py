"""The telemetry in OTLP events as columns, decoded by the batch.

It takes events of one record each, as the input writes them unless it is told ``split: request``.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from turnlane.formats.lines import copy_spans

# ── protobuf_columns ──
# Protobuf read by the column: every step takes the next field of all messages at once.
#
# A message is a span of a buffer; so are the messages and texts inside it. Reading a thousand
# messages takes as many steps as the longest of them has fields, not as there are messages.

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


def parse_fields(data: Octets, starts: Places, ends: Places) -> tuple[Fields, Mask]:
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
    tags, behind = read_varints(data, place)
    kinds = (tags & np.uint64(7)).astype(np.int64)
    values, after = read_varints(data, behind)
    lengths = np.minimum(values, np.uint64(1 << 40)).astype(np.int64)
    spans = kinds == SPAN
    counted = spans | (kinds == VARINT)
    starts = np.where(spans, after, behind)
    ends = np.where(counted, after, behind + _WIDTHS[kinds]) + np.where(spans, lengths, 0)
    numbers = np.minimum(tags >> np.uint64(3), np.uint64(1 << 30)).astype(np.int64)
    good = _KNOWN[kinds] & (ends <= limit) & (numbers > 0)
    whole = Fields(rows, numbers, starts, ends, values)
    return Fields(*(each[good] for each in whole)), good


def read_varints(data: Octets, place: Places) -> tuple[Numbers, Places]:
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


def read_texts(data: Octets, spans: Spans) -> pa.Array[Any]:
    """The spans as text; bytes that are not UTF-8 are replaced."""
    if not len(spans.rows):
        return pa.array([], pa.string())
    raw = copy_spans(data, spans.starts, spans.ends)  # type: ignore[arg-type]
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        whole = [(each or b"").decode(errors="replace") for each in raw.to_pylist()]
        return pa.array(whole, pa.string())


def read_hex(data: Octets, spans: Spans, width: int) -> tuple[Spans, pa.Array[Any]]:
    """The spans that have this many bytes, and their digits."""
    wide = spans.where(spans.ends - spans.starts == width)
    octets = data[wide.starts[:, None] + np.arange(width)]
    digits = np.empty((len(wide.rows), 2 * width), np.uint8)
    digits[:, 0::2] = _HEX[octets >> 4]
    digits[:, 1::2] = _HEX[octets & 15]
    bounds = np.arange(0, digits.size + 1, 2 * width, dtype=np.int32)
    buffers = [None, pa.py_buffer(bounds.data), pa.py_buffer(digits.tobytes())]
    return wide, pa.Array.from_buffers(pa.string(), len(wide.rows), buffers)


def read_fixed64(data: Octets, spans: Spans) -> Numbers:
    """The eight bytes of each span as a number."""
    octets = data[spans.starts[:, None] + np.arange(8)]
    return np.ascontiguousarray(octets).view("<u8").reshape(-1)


def pick_values(values: pa.Array[Any], index: Places) -> pa.Array[Any]:
    """The values at these places; null for a place that is not there."""
    if not len(values):
        nothing: pa.Array[Any] = pa.nulls(len(index), values.type)
        return nothing
    absent = (index < 0) | (index >= len(values))
    places: Any = pa.array(np.where(absent, 0, index), mask=absent)
    found: pa.Array[Any] = values.take(places)
    return found


def place_in_rows(rows: Places, values: pa.Array[Any], count: int) -> pa.Array[Any]:
    """A column of ``count`` rows: the values in theirs, the last one counts, null elsewhere."""
    index = np.full(count, -1, np.int64)
    index[rows] = np.arange(len(rows))
    return pick_values(values, index)


def build_maps(
    rows: Places, keys: pa.Array[Any], values: pa.Array[Any], count: int
) -> pa.Array[Any]:
    """A column of maps: each pair in the map of its row; null is an empty text."""
    ends = np.zeros(count + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=count), out=ends[1:])
    offsets: Any = pa.array(ends)
    found: pa.Array[Any] = pa.MapArray.from_arrays(
        offsets, keys.fill_null(""), values.fill_null("")
    )
    return found


TEXT: Final = pa.string()
PAIRS: Final = pa.map_(pa.string(), pa.string())
TIME: Final = pa.timestamp("us", tz="UTC")
COLUMNS: Final[dict[str, pa.DataType]] = {
    "signal": TEXT, "time": TIME, "end_time": TIME, "trace_id": TEXT, "span_id": TEXT,
    "parent_span_id": TEXT, "name": TEXT, "kind": TEXT, "severity_text": TEXT, "body": TEXT,
    "attributes": PAIRS, "scope": TEXT, "resource": PAIRS, "status": TEXT, "parse_error": TEXT,
}  # fmt: skip

SIGNALS: Final = pa.array(["logs", "metrics", "traces"])
(
    _TRACE, _SPAN, _PARENT, _NAME, _TIME, _SEEN, _END, _KIND, _LEVEL, _BODY, _PAIRS, _STATUS, _DATA,
) = range(1, 14)  # fmt: skip
# What a field of a record means, by signal and by its number.
_MEANINGS: Final = np.zeros((3, 18), np.int64)
_MEANINGS[0, [9, 10, 12, 1, 11, 3, 5, 6]] = (
    _TRACE, _SPAN, _NAME, _TIME, _SEEN, _LEVEL, _BODY, _PAIRS,
)  # fmt: skip
_MEANINGS[1, [1, 5, 7, 9, 10, 11]] = _NAME, _DATA, _DATA, _DATA, _DATA, _DATA
_MEANINGS[2, [1, 2, 4, 5, 6, 7, 8, 9, 15]] = (
    _TRACE, _SPAN, _PARENT, _NAME, _KIND, _TIME, _END, _PAIRS, _STATUS,
)  # fmt: skip
_KINDS: Final = pa.array([None, "internal", "server", "client", "producer", "consumer"], TEXT)
# By the number of the field that holds the points.
_METRIC_KINDS: Final = pa.array(
    [None] * 5 + ["gauge", None, "sum", None, "histogram", "exponential_histogram", "summary"], TEXT
)
_STATUSES: Final = pa.array([None, "ok", "error"], TEXT)
_STRING, _BOOL, _INT, _DOUBLE = 1, 2, 3, 4


def decode_columns(values: pa.Array[Any], signals: pa.Array[Any]) -> pa.StructArray:
    """The columns of these events; ``signals`` are their headers of that name."""
    return _ColumnDecoder(values, signals).columns()


class _ColumnDecoder:
    """One batch of events on its way to columns."""

    def __init__(self, values: pa.Array[Any], signals: pa.Array[Any]) -> None:
        self.count = len(values)
        self.signals = signals
        self.errors: list[tuple[Mask, str]] = []
        buffers: list[Any] = values.buffers()
        _, bounds, contents = buffers
        self.data: Octets = np.frombuffer(contents or b"\0", np.uint8)
        if not self.data.size:
            self.data = np.zeros(1, np.uint8)
        ends = np.frombuffer(bounds, np.int32)[values.offset : values.offset + self.count + 1]
        missing: Mask = values.is_null().to_numpy(zero_copy_only=False)
        signal = pc.index_in(signals, SIGNALS).fill_null(-1)
        self.kinds: Places = signal.to_numpy(zero_copy_only=False).astype(np.int64)
        self._refuse(missing, "there is no value")
        self._refuse(self.kinds < 0, "its header `signal` is not logs, metrics or traces")
        whole = Spans(np.arange(self.count), ends[:-1].astype(np.int64), ends[1:].astype(np.int64))
        self.values = whole.where(~missing & (self.kinds >= 0))

    def columns(self) -> pa.StructArray:
        group = self._fields(self._only(self._fields(self.values), 1))
        scope = self._fields(self._only(group, 2))
        record = self._fields(self._only(scope, 2))
        found = self._record(record)
        resource = self._fields(group.spans(group.numbers == 1))
        found["resource"] = self._pairs(resource.spans(resource.numbers == 1))
        owner = self._fields(scope.spans(scope.numbers == 1))
        found["scope"] = self._text(owner.spans(owner.numbers == 1))
        found["signal"] = self.signals
        found["parse_error"] = self._reasons()
        arrays = [found[name].cast(kind) for name, kind in COLUMNS.items()]
        return pa.StructArray.from_arrays(arrays, names=list(COLUMNS))

    def _record(self, record: Fields) -> dict[str, pa.Array[Any]]:
        meanings = _MEANINGS[self.kinds[record.rows], np.minimum(record.numbers, 17)]

        def spans(meaning: int) -> Spans:
            return record.spans(meanings == meaning)

        bodies = spans(_BODY)
        return {
            "time": pc.coalesce(self._time(spans(_TIME)), self._time(spans(_SEEN))),
            "end_time": self._time(spans(_END)),
            "trace_id": self._hex(spans(_TRACE), 16),
            "span_id": self._hex(spans(_SPAN), 8),
            "parent_span_id": self._hex(spans(_PARENT), 8),
            "name": self._text(spans(_NAME)),
            "kind": pc.coalesce(
                self._named(record, meanings == _KIND, record.values, _KINDS),
                self._named(record, meanings == _DATA, record.numbers, _METRIC_KINDS),
            ),
            "severity_text": self._text(spans(_LEVEL)),
            "body": place_in_rows(bodies.rows, self._any(bodies), self.count),
            "attributes": self._pairs(spans(_PAIRS)),
            "status": self._status(spans(_STATUS)),
        }

    # ── messages ────────────────────────────────────────────────────────────────────────────────

    def _fields(self, spans: Spans) -> Fields:
        """The fields of these messages, each with the row of its event."""
        fields, bad = parse_fields(self.data, spans.starts, spans.ends)
        self._refuse(self._rows(spans.rows[bad]), "its protobuf is malformed")
        return fields._replace(rows=spans.rows[fields.rows])

    def _only(self, fields: Fields, number: int) -> Spans:
        """The message that each event has under this number. An event must have just one."""
        spans = fields.spans(fields.numbers == number)
        held = np.bincount(spans.rows, minlength=self.count)
        several = "it holds several records; let the input split them (split: record)"
        self._refuse(held > 1, several)
        self._refuse(self._rows(self.values.rows) & (held == 0), "it holds no record")
        return spans.where(held[spans.rows] == 1)

    def _rows(self, rows: Places) -> Mask:
        mask = np.zeros(self.count, bool)
        mask[rows] = True
        return mask

    def _refuse(self, rows: Mask, why: str) -> None:
        self.errors.append((rows, why))

    def _reasons(self) -> pa.Array[Any]:
        """The first reason for each event that was refused."""
        why = pa.array([reason for _, reason in self.errors], TEXT)
        index = np.full(self.count, -1, np.int64)
        for at in reversed(range(len(self.errors))):
            index[self.errors[at][0]] = at
        return pick_values(why, index)

    # ── contents ────────────────────────────────────────────────────────────────────────────────

    def _text(self, spans: Spans) -> pa.Array[Any]:
        filled = spans.where(spans.ends > spans.starts)
        return place_in_rows(filled.rows, read_texts(self.data, filled), self.count)

    def _hex(self, spans: Spans, width: int) -> pa.Array[Any]:
        wide, digits = read_hex(self.data, spans, width)
        return place_in_rows(wide.rows, digits, self.count)

    def _time(self, spans: Spans) -> pa.Array[Any]:
        whole = spans.where(spans.ends - spans.starts == 8)
        micros = (read_fixed64(self.data, whole) // np.uint64(1000)).astype(np.int64)
        return place_in_rows(whole.rows, pa.array(micros, mask=micros == 0).cast(TIME), self.count)

    def _named(
        self, fields: Fields, chosen: Mask, numbers: Places | Numbers, names: pa.Array[Any]
    ) -> pa.Array[Any]:
        """The names that go with these numbers, each in the row of its field."""
        found = pick_values(names, numbers[chosen].astype(np.int64))
        return place_in_rows(fields.rows[chosen], found, self.count)

    def _status(self, spans: Spans) -> pa.Array[Any]:
        inside = self._fields(spans)
        return self._named(inside, inside.numbers == 3, inside.values, _STATUSES)

    def _pairs(self, spans: Spans) -> pa.Array[Any]:
        """A map for each event, of the key-value messages in these spans."""
        count = len(spans.rows)
        fields, bad = parse_fields(self.data, spans.starts, spans.ends)
        self._refuse(self._rows(spans.rows[bad]), "its attributes are malformed")
        named, valued = (fields.spans(fields.numbers == number) for number in (1, 2))
        keys = place_in_rows(named.rows, read_texts(self.data, named), count)
        owned = valued._replace(rows=spans.rows[valued.rows])
        values = place_in_rows(valued.rows, self._any(owned), count)
        return build_maps(spans.rows, keys, values, self.count)

    def _any(self, spans: Spans) -> pa.Array[Any]:
        """The text of each ``AnyValue``: as it is, or as JSON writes it; null for none."""
        count = len(spans.rows)
        fields, bad = parse_fields(self.data, spans.starts, spans.ends)
        self._refuse(self._rows(spans.rows[bad]), "a value in it is malformed")
        kinds = fields.numbers
        plain = fields.spans(kinds == _STRING)
        number = fields.values[kinds == _INT].view(np.int64)
        double = fields.spans((kinds == _DOUBLE) & (fields.ends - fields.starts == 8))
        nested = fields.spans(kinds > _DOUBLE)
        parts = [
            (plain.rows, read_texts(self.data, plain)),
            (fields.rows[kinds == _BOOL], _truths(fields.values[kinds == _BOOL])),
            (fields.rows[kinds == _INT], pa.array(number).cast(TEXT)),
            (double.rows, pa.array(read_fixed64(self.data, double).view(np.float64)).cast(TEXT)),
            (nested.rows, self._nested(spans, nested)),
        ]
        rows = np.concatenate([rows for rows, _ in parts])
        return place_in_rows(rows, pa.concat_arrays([values for _, values in parts]), count)

    def _nested(self, spans: Spans, nested: Spans) -> pa.Array[Any]:
        """Lists, maps and bytes, which are rare, one by one."""
        found: list[str | None] = []
        for row in nested.rows:
            raw = self.data[spans.starts[row] : spans.ends[row]].tobytes()
            try:
                found.append(_json(AnyValue.FromString(raw)))
            except (DecodeError, RecursionError):
                found.append(None)
        return pa.array(found, TEXT)


def _truths(values: Any) -> pa.Array[Any]:  # noqa: ANN401
    return pick_values(pa.array(["false", "true"]), (values != 0).astype(np.int64))


def _json(value: Any) -> str:  # noqa: ANN401
    if value.WhichOneof("value") == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any) -> Any:  # noqa: ANN401
    kind = value.WhichOneof("value")
    match kind:
        case None:
            return None
        case "array_value":
            return [_plain(each) for each in value.array_value.values]
        case "kvlist_value":
            return {pair.key: _plain(pair.value) for pair in value.kvlist_value.values}
        case "bytes_value":
            return base64.b64encode(value.bytes_value).decode()
        case _:
            return getattr(value, kind)
