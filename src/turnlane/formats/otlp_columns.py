"""The telemetry in OTLP events as columns, decoded a batch at a time.

Events have one record each, as the input writes them without ``split: request``.

Protobuf is read by the column: every step reads the next field of all messages at once. A message
is a span of a buffer, and so are the messages and texts inside it. To read a thousand messages
takes as many steps as the longest of them has fields.
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

Octets = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

MAX_FIELDS: Final = 4096
"""The most fields of one message. Each costs a step, even if few messages are left."""

_VARINT, _SPAN = 0, 2
_WIDTHS: Final = np.array([0, 8, 0, 0, 0, 4, 0, 0])
_IS_KNOWN_TYPE: Final = np.array([True, True, True, False, False, True, False, False])
_HEX: Final = np.frombuffer(b"0123456789abcdef", np.uint8)


class Spans(NamedTuple):
    """Parts of a buffer, each of one row; in the order of rows."""

    rows: Positions
    starts: Positions
    ends: Positions

    def where(self, chosen: Mask) -> Spans:
        """Return the chosen spans."""
        return Spans(self.rows[chosen], self.starts[chosen], self.ends[chosen])


class Fields(NamedTuple):
    """The fields of many messages; in the order of rows, then as written."""

    rows: Positions
    numbers: Positions
    starts: Positions
    ends: Positions
    values: Numbers
    """The value of a varint; the length of a span."""

    def get_spans(self, chosen: Mask) -> Spans:
        """Return the contents of the chosen fields."""
        return Spans(self.rows[chosen], self.starts[chosen], self.ends[chosen])


def parse_fields(data: Octets, starts: Positions, ends: Positions) -> tuple[Fields, Mask]:
    """Return all fields of the messages, and which messages are malformed.

    The row of a field is the position of its message.
    """
    place = starts.astype(np.int64)
    limit = ends.astype(np.int64)
    is_bad = np.zeros(len(place), bool)
    rows = np.flatnonzero(place < limit)
    steps: list[Fields] = []
    while rows.size and len(steps) < MAX_FIELDS:
        fields, good = _read_next_fields(data, rows, place[rows], limit[rows])
        is_bad[rows[~good]] = True
        rows = rows[good]
        place[rows] = fields.ends
        steps.append(fields)
        rows = rows[fields.ends < limit[rows]]
    is_bad[rows] = True
    if not steps:
        none = np.zeros(0, np.int64)
        return Fields(none, none, none, none, none.astype(np.uint64)), is_bad
    columns = [np.concatenate(parts) for parts in zip(*steps, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return Fields(*(column[order] for column in columns)), is_bad


def _read_next_fields(
    data: Octets, rows: Positions, place: Positions, limit: Positions
) -> tuple[Fields, Mask]:
    """Return the complete fields that start at these places, and which of them are complete."""
    tags, behind = read_varints(data, place)
    kinds = (tags & np.uint64(7)).astype(np.int64)
    values, after = read_varints(data, behind)
    lengths = np.minimum(values, np.uint64(1 << 40)).astype(np.int64)
    is_span = kinds == _SPAN
    has_varint = is_span | (kinds == _VARINT)
    starts = np.where(is_span, after, behind)
    ends = np.where(has_varint, after, behind + _WIDTHS[kinds]) + np.where(is_span, lengths, 0)
    numbers = np.minimum(tags >> np.uint64(3), np.uint64(1 << 30)).astype(np.int64)
    good = _IS_KNOWN_TYPE[kinds] & (ends <= limit) & (numbers > 0)
    return Fields(*(each[good] for each in (rows, numbers, starts, ends, values))), good


def read_varints(data: Octets, place: Positions) -> tuple[Numbers, Positions]:
    """Return the numbers at these places and their ends; incomplete ones end beyond the data."""
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


# ── from spans to Arrow ─────────────────────────────────────────────────────────────────────────


def read_texts(data: Octets, spans: Spans) -> pa.Array[Any]:
    """Return the spans as text; bytes that are not UTF-8 are replaced."""
    if not len(spans.rows):
        return pa.array([], pa.string())
    raw = copy_spans(data, spans.starts, spans.ends)  # type: ignore[arg-type]
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [(each or b"").decode(errors="replace") for each in raw.to_pylist()]
        return pa.array(texts, pa.string())


def read_fixed64(data: Octets, spans: Spans) -> Numbers:
    """Return the eight bytes of each span as a number."""
    octets = data[spans.starts[:, None] + np.arange(8)]
    return np.ascontiguousarray(octets).view("<u8").reshape(-1)


def pick_values(values: pa.Array[Any], index: Positions) -> pa.Array[Any]:
    """Return the values at these positions; null for a position that does not exist."""
    if not len(values):
        nulls: pa.Array[Any] = pa.nulls(len(index), values.type)
        return nulls
    absent = (index < 0) | (index >= len(values))
    positions: Any = pa.array(np.where(absent, 0, index), mask=absent)
    found: pa.Array[Any] = values.take(positions)
    return found


def place_in_rows(rows: Positions, values: pa.Array[Any], count: int) -> pa.Array[Any]:
    """Return a column of ``count`` rows with the last value of each row, null elsewhere."""
    index = np.full(count, -1, np.int64)
    index[rows] = np.arange(len(rows))
    return pick_values(values, index)


# ── telemetry ───────────────────────────────────────────────────────────────────────────────────

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
    _TRACE, _SPAN_ID, _PARENT, _NAME, _TIME, _SEEN, _END, _KIND, _LEVEL, _BODY, _PAIRS, _STATUS,
    _DATA,
) = range(1, 14)  # fmt: skip
# The meaning of a record's field, by signal and by its number.
_MEANINGS: Final = np.zeros((3, 18), np.int64)
_MEANINGS[0, [9, 10, 12, 1, 11, 3, 5, 6]] = (
    _TRACE, _SPAN_ID, _NAME, _TIME, _SEEN, _LEVEL, _BODY, _PAIRS,
)  # fmt: skip
_MEANINGS[1, [1, 5, 7, 9, 10, 11]] = _NAME, _DATA, _DATA, _DATA, _DATA, _DATA
_MEANINGS[2, [1, 2, 4, 5, 6, 7, 8, 9, 15]] = (
    _TRACE, _SPAN_ID, _PARENT, _NAME, _KIND, _TIME, _END, _PAIRS, _STATUS,
)  # fmt: skip
_KINDS: Final = pa.array([None, "internal", "server", "client", "producer", "consumer"], TEXT)
# By the number of the field with the points.
_METRIC_KINDS: Final = pa.array(
    [None] * 5 + ["gauge", None, "sum", None, "histogram", "exponential_histogram", "summary"], TEXT
)
_STATUSES: Final = pa.array([None, "ok", "error"], TEXT)
_STRING, _BOOL, _INT, _DOUBLE = 1, 2, 3, 4


def decode_columns(values: pa.Array[Any], signals: pa.Array[Any]) -> pa.StructArray:
    """Return the columns of these events; ``signals`` are their headers of that name."""
    return _ColumnDecoder(values, signals).decode()


class _ColumnDecoder:
    """Decodes one batch of events, and collects the reasons for events that cannot be decoded."""

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
        self.kinds: Positions = signal.to_numpy(zero_copy_only=False).astype(np.int64)
        self.errors += [
            (missing, "there is no value"),
            (self.kinds < 0, "its header `signal` is not logs, metrics or traces"),
        ]
        spans = Spans(np.arange(self.count), ends[:-1].astype(np.int64), ends[1:].astype(np.int64))
        self.values = spans.where(~missing & (self.kinds >= 0))

    def decode(self) -> pa.StructArray:
        group = self._parse(self._get_only(self._parse(self.values), 1))
        scope = self._parse(self._get_only(group, 2))
        record = self._parse(self._get_only(scope, 2))
        found = self._decode_record(record)
        resource = self._parse(group.get_spans(group.numbers == 1))
        found["resource"] = self._decode_pairs(resource.get_spans(resource.numbers == 1))
        owner = self._parse(scope.get_spans(scope.numbers == 1))
        found["scope"] = self._decode_texts(owner.get_spans(owner.numbers == 1))
        found["signal"] = self.signals
        # The first reason of each event.
        reasons = pa.array([reason for _, reason in self.errors], TEXT)
        index = np.full(self.count, -1, np.int64)
        for at in reversed(range(len(self.errors))):
            index[self.errors[at][0]] = at
        found["parse_error"] = pick_values(reasons, index)
        arrays = [found[name].cast(kind) for name, kind in COLUMNS.items()]
        return pa.StructArray.from_arrays(arrays, names=list(COLUMNS))

    def _decode_record(self, record: Fields) -> dict[str, pa.Array[Any]]:
        meanings = _MEANINGS[self.kinds[record.rows], np.minimum(record.numbers, 17)]

        def spans(meaning: int) -> Spans:
            return record.get_spans(meanings == meaning)

        bodies, status = spans(_BODY), self._parse(spans(_STATUS))
        return {
            "time": pc.coalesce(self._decode_times(spans(_TIME)), self._decode_times(spans(_SEEN))),
            "end_time": self._decode_times(spans(_END)),
            "trace_id": self._decode_hex(spans(_TRACE), 16),
            "span_id": self._decode_hex(spans(_SPAN_ID), 8),
            "parent_span_id": self._decode_hex(spans(_PARENT), 8),
            "name": self._decode_texts(spans(_NAME)),
            "kind": pc.coalesce(
                self._decode_names(record, meanings == _KIND, record.values, _KINDS),
                self._decode_names(record, meanings == _DATA, record.numbers, _METRIC_KINDS),
            ),
            "severity_text": self._decode_texts(spans(_LEVEL)),
            "body": place_in_rows(bodies.rows, self._decode_any_values(bodies), self.count),
            "attributes": self._decode_pairs(spans(_PAIRS)),
            "status": self._decode_names(status, status.numbers == 3, status.values, _STATUSES),
        }

    # ── messages ────────────────────────────────────────────────────────────────────────────────

    def _parse(self, spans: Spans, reason: str = "its protobuf is malformed") -> Fields:
        """Return the fields of these messages, each with the row of its event."""
        fields = self._parse_by_position(spans, reason)
        return fields._replace(rows=spans.rows[fields.rows])

    def _parse_by_position(self, spans: Spans, reason: str) -> Fields:
        """Return the fields of these messages, each with the position of its message."""
        fields, is_bad = parse_fields(self.data, spans.starts, spans.ends)
        self.errors.append((self._mask_rows(spans.rows[is_bad]), reason))
        return fields

    def _get_only(self, fields: Fields, number: int) -> Spans:
        """Return the message with this number of each event, which must have just one."""
        spans = fields.get_spans(fields.numbers == number)
        counts = np.bincount(spans.rows, minlength=self.count)
        several = "it has several records; let the input split them (split: record)"
        self.errors += [
            (counts > 1, several),
            (self._mask_rows(self.values.rows) & (counts == 0), "it has no record"),
        ]
        return spans.where(counts[spans.rows] == 1)

    def _mask_rows(self, rows: Positions) -> Mask:
        mask = np.zeros(self.count, bool)
        mask[rows] = True
        return mask

    # ── contents ────────────────────────────────────────────────────────────────────────────────

    def _decode_texts(self, spans: Spans) -> pa.Array[Any]:
        spans = spans.where(spans.ends > spans.starts)
        return place_in_rows(spans.rows, read_texts(self.data, spans), self.count)

    def _decode_hex(self, spans: Spans, width: int) -> pa.Array[Any]:
        """Return spans of ``width`` bytes as hexadecimal digits."""
        spans = spans.where(spans.ends - spans.starts == width)
        octets = self.data[spans.starts[:, None] + np.arange(width)]
        digits = np.empty((len(spans.rows), 2 * width), np.uint8)
        digits[:, 0::2] = _HEX[octets >> 4]
        digits[:, 1::2] = _HEX[octets & 15]
        bounds = np.arange(0, digits.size + 1, 2 * width, dtype=np.int32)
        buffers = [None, pa.py_buffer(bounds.data), pa.py_buffer(digits.tobytes())]
        texts = pa.Array.from_buffers(pa.string(), len(spans.rows), buffers)
        return place_in_rows(spans.rows, texts, self.count)

    def _decode_times(self, spans: Spans) -> pa.Array[Any]:
        spans = spans.where(spans.ends - spans.starts == 8)
        micros = (read_fixed64(self.data, spans) // np.uint64(1000)).astype(np.int64)
        times = pa.array(micros, mask=micros == 0).cast(TIME)
        return place_in_rows(spans.rows, times, self.count)

    def _decode_names(
        self, fields: Fields, chosen: Mask, numbers: Positions | Numbers, names: pa.Array[Any]
    ) -> pa.Array[Any]:
        """Return the names of these numbers, each in the row of its field."""
        found = pick_values(names, numbers[chosen].astype(np.int64))
        return place_in_rows(fields.rows[chosen], found, self.count)

    def _decode_pairs(self, spans: Spans) -> pa.Array[Any]:
        """Return a map for each event, made of the key-value messages in these spans."""
        count = len(spans.rows)
        fields = self._parse_by_position(spans, "its attributes are malformed")
        keys, values = (fields.get_spans(fields.numbers == number) for number in (1, 2))
        key_texts = place_in_rows(keys.rows, read_texts(self.data, keys), count)
        decoded = self._decode_any_values(values._replace(rows=spans.rows[values.rows]))
        value_texts = place_in_rows(values.rows, decoded, count)
        ends = np.zeros(self.count + 1, np.int32)
        np.cumsum(np.bincount(spans.rows, minlength=self.count), out=ends[1:])
        offsets: Any = pa.array(ends)
        found: pa.Array[Any] = pa.MapArray.from_arrays(
            offsets, key_texts.fill_null(""), value_texts.fill_null("")
        )
        return found

    def _decode_any_values(self, spans: Spans) -> pa.Array[Any]:
        """Return each ``AnyValue`` as text: as it is, or as JSON; null without a value."""
        fields = self._parse_by_position(spans, "a value in it is malformed")
        kinds = fields.numbers
        strings = fields.get_spans(kinds == _STRING)
        booleans = (fields.values[kinds == _BOOL] != 0).astype(np.int64)
        doubles = fields.get_spans((kinds == _DOUBLE) & (fields.ends - fields.starts == 8))
        nested = fields.rows[kinds > _DOUBLE]
        parts: list[tuple[Positions, pa.Array[Any]]] = [
            (strings.rows, read_texts(self.data, strings)),
            (fields.rows[kinds == _BOOL], pick_values(pa.array(["false", "true"]), booleans)),
            (
                fields.rows[kinds == _INT],
                pa.array(fields.values[kinds == _INT].view(np.int64)).cast(TEXT),
            ),
            (
                doubles.rows,
                pa.array(read_fixed64(self.data, doubles).view(np.float64)).cast(TEXT),
            ),
            (nested, pa.array([self._decode_nested(spans, row) for row in nested], TEXT)),
        ]
        rows = np.concatenate([rows for rows, _ in parts])
        texts = pa.concat_arrays([texts for _, texts in parts])
        return place_in_rows(rows, texts, len(spans.rows))

    def _decode_nested(self, spans: Spans, at: int) -> str | None:
        """Return a list, a map or bytes, which are rare, as text."""
        raw = self.data[spans.starts[at] : spans.ends[at]].tobytes()
        try:
            plain = _to_plain(AnyValue.FromString(raw))
        except (DecodeError, RecursionError):
            return None
        if isinstance(plain, str):
            return plain  # bytes as base64
        return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def _to_plain(value: Any) -> Any:  # noqa: ANN401
    kind = value.WhichOneof("value")
    match kind:
        case None:
            return None
        case "array_value":
            return [_to_plain(each) for each in value.array_value.values]
        case "kvlist_value":
            return {pair.key: _to_plain(pair.value) for pair in value.kvlist_value.values}
        case "bytes_value":
            return base64.b64encode(value.bytes_value).decode()
        case _:
            return getattr(value, kind)
