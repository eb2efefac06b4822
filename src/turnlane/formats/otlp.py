"""OTLP, OpenTelemetry's own format: export requests in, events out, and back again.

An event's ``value`` is always a complete export request in protobuf (``ExportLogsServiceRequest``
and its sisters). By default it holds one log record, metric or span together with its resource and
scope, so every event can be filtered, shed, delivered or buried by itself. Requests can be joined
by writing one behind the other, since protobuf merges repeated fields: that is all :func:`joined`
does, and why an output can send a whole batch on as a single request.
"""

from __future__ import annotations

import base64
import binascii
import enum
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from turnlane.delivery.settings import OWN_PREFIX, PAYLOAD
from turnlane.events import Block, build_values
from turnlane.formats.lines import (
    build_event_block,
    check_repeated_bytes,
    join_texts,
    to_large_binary,
)

try:
    from google.protobuf import json_format
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace
except ImportError as missing:
    raise ImportError(
        f"OTLP needs {missing.name}: pip install 'turnlane[otlp]'", name=missing.name
    ) from missing

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
SIGNAL_HEADER: Final = "signal"
"""The header of an event that says which of the three its value is."""


class Signal(enum.StrEnum):
    """The three kinds of telemetry, named as in the paths of OTLP over HTTP."""

    LOGS = "logs"
    METRICS = "metrics"
    TRACES = "traces"


class SplitUnit(enum.StrEnum):
    """What becomes one event."""

    RECORD = "record"
    """Each log record, metric (with all its data points) or span."""
    REQUEST = "request"
    """The request as it came: the cheapest, with the severity of its worst record."""


class Malformed(ValueError):
    """The body is not an export request."""


class RecordColumns(NamedTuple):
    """The columns of a request's events."""

    values: list[bytes]
    keys: list[str | None]
    severities: list[int | None]


class _Shape(NamedTuple):
    """How the messages of a signal are called; their numbers are the same in all three."""

    request: Any
    response: Any
    resources: str
    scopes: str
    records: str
    rejected: str


_SHAPES: Final = {
    Signal.LOGS: _Shape(
        logs.ExportLogsServiceRequest,
        logs.ExportLogsServiceResponse,
        "resource_logs",
        "scope_logs",
        "log_records",
        "rejected_log_records",
    ),
    Signal.METRICS: _Shape(
        metrics.ExportMetricsServiceRequest,
        metrics.ExportMetricsServiceResponse,
        "resource_metrics",
        "scope_metrics",
        "metrics",
        "rejected_data_points",
    ),
    Signal.TRACES: _Shape(
        trace.ExportTraceServiceRequest,
        trace.ExportTraceServiceResponse,
        "resource_spans",
        "scope_spans",
        "spans",
        "rejected_spans",
    ),
}

# Fields as they stand on the wire: number and type in one byte.
_RESOURCES: Final = b"\x0a"
_SCOPES: Final = b"\x12"
_RECORDS: Final = b"\x12"

_ID_FIELDS: Final = frozenset(
    {"traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id"}
)

_LONGEST_NAME: Final = 255
_TRACE_ID: Final = 16
"""Names and ids longer than OpenTelemetry allows do not make endless keys."""

SEVERITIES: Final = (None, *[7] * 8, 6, *[5] * 3, *[4] * 4, 3, 2, *[1] * 2, *[0] * 4)
"""By OTLP's severity number, from 0 (unknown) to 24: syslog's severity, as OpenTelemetry's own
table of syslog severities has it, read backwards."""


# ── decoding ────────────────────────────────────────────────────────────────────────────────────


def decode(signal: Signal, body: bytes, encoding: str = PROTOBUF) -> Any:  # noqa: ANN401
    """The export request in a body, as its protobuf message. Raises ``Malformed``."""
    kind = _SHAPES[signal].request
    if encoding == JSON:
        return _from_json(body, kind())
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise Malformed(f"this is no {kind.__name__} in protobuf: {error}") from None


def _from_json(body: bytes, message: Any) -> Any:  # noqa: ANN401
    name = type(message).__name__
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict):
            raise Malformed("an object is needed")
        _ids_to_base64(fields)
        return json_format.ParseDict(fields, message, ignore_unknown_fields=True)
    except (json_format.ParseError, ValueError, TypeError, AttributeError) as error:
        # The last two are what the parser makes of a list where a message is needed, and so on.
        raise Malformed(f"this is no {name} in JSON: {error}") from None
    except RecursionError:
        raise Malformed(f"this is no {name} in JSON: it is nested too deeply") from None


def _ids_to_base64(node: Any) -> None:  # noqa: ANN401
    """OTLP writes ids in hexadecimal, where protobuf's JSON has base64."""
    if isinstance(node, list):
        for each in node:
            _ids_to_base64(each)
    elif isinstance(node, dict):
        for name, value in node.items():
            if name in _ID_FIELDS and isinstance(value, str):
                node[name] = _base64_of(name, value)
            else:
                _ids_to_base64(value)


def _base64_of(name: str, digits: str) -> str:
    try:
        return base64.b64encode(binascii.unhexlify(digits)).decode()
    except ValueError:
        raise Malformed(f"{name} {digits[:40]!r} is not hexadecimal") from None


# ── requests to events ──────────────────────────────────────────────────────────────────────────


def build_request_block(
    signal: Signal,
    request: Any,  # noqa: ANN401
    source: str | None = None,
    grain: SplitUnit = SplitUnit.RECORD,
) -> Block:
    """The events of a request, in its order. They get their time when they are published."""
    found = split_request(signal, request) if grain is SplitUnit.RECORD else _whole(signal, request)
    headers = {SIGNAL_HEADER: signal.value, "content-type": PROTOBUF}
    return build_event_block(
        build_values(found.values),
        keys=found.keys,
        severities=found.severities if signal is Signal.LOGS else None,
        headers=headers,
        source=source,
    )


def split_request(signal: Signal, request: Any) -> RecordColumns:  # noqa: ANN401
    """A request for each record, with its resource and scope. Raises ``EventTooLarge``."""
    shape = _SHAPES[signal]
    found = RecordColumns([], [], [])
    shared = 0
    for resource in getattr(request, shape.resources):
        outer = _shell(resource, "resource")
        for scope in getattr(resource, shape.scopes):
            inner = _shell(scope, "scope")
            records = getattr(scope, shape.records)
            shared += len(records) * (len(outer) + len(inner))
            check_repeated_bytes(shared)
            found.values.extend(_wrapped(outer, inner, records))
            _annotate(signal, records, found)
    return found


def _shell(group: Any, owner: str) -> bytes:  # noqa: ANN401
    """What a resource's or scope's records have in common: itself and its schema."""
    kept = {"schema_url": group.schema_url} if group.schema_url else {}
    if group.HasField(owner):
        kept[owner] = getattr(group, owner)
    serialised: bytes = type(group)(**kept).SerializeToString()
    return serialised


def _wrapped(outer: bytes, inner: bytes, records: Iterable[Any]) -> Iterator[bytes]:
    """The records, each in a request of its own: messages are written within messages."""
    heads: dict[int, bytes] = {}  # by the record's length: all that they differ in
    for record in records:
        body = record.SerializeToString()
        head = heads.get(len(body))
        if head is None:
            head = heads[len(body)] = _head(outer, inner, len(body))
        yield head + body


def _head(outer: bytes, inner: bytes, length: int) -> bytes:
    """The bytes before a record of this many bytes."""
    size = encode_varint(length)
    scope_size = len(inner) + 1 + len(size) + length
    scope = encode_varint(scope_size)
    total = encode_varint(len(outer) + 1 + len(scope) + scope_size)
    return b"".join((_RESOURCES, total, outer, _SCOPES, scope, inner, _RECORDS, size))


def _annotate(signal: Signal, records: Iterable[Any], found: RecordColumns) -> None:
    if signal is Signal.METRICS:
        found.keys.extend(record.name[:_LONGEST_NAME] or None for record in records)
    else:
        found.keys.extend(record.trace_id[:_TRACE_ID].hex() or None for record in records)
    if signal is Signal.LOGS:
        found.severities.extend(get_syslog_severity(record.severity_number) for record in records)


def _whole(signal: Signal, request: Any) -> RecordColumns:  # noqa: ANN401
    if not count_records(signal, request):
        return RecordColumns([], [], [])
    worst: int | None = None
    if signal is Signal.LOGS:
        known = (
            get_syslog_severity(record.severity_number) for record in _records(signal, request)
        )
        worst = min((each for each in known if each is not None), default=None)
    return RecordColumns([request.SerializeToString()], [None], [worst])


def get_syslog_severity(number: int) -> int | None:
    """Syslog's severity for OTLP's severity number; ``None`` for an undefined number."""
    return SEVERITIES[number] if 0 <= number < len(SEVERITIES) else None


# ── counting, joining ───────────────────────────────────────────────────────────────────────────


def _records(signal: Signal, request: Any) -> Iterator[Any]:  # noqa: ANN401
    shape = _SHAPES[signal]
    for resource in getattr(request, shape.resources):
        for scope in getattr(resource, shape.scopes):
            yield from getattr(scope, shape.records)


def count_records(signal: Signal, request: Any) -> int:  # noqa: ANN401
    """How much a request holds, as OTLP counts: log records, spans, or data points of metrics."""
    if signal is Signal.METRICS:
        return sum(max(1, _points(metric)) for metric in _records(signal, request))
    return sum(1 for _ in _records(signal, request))


def _points(metric: Any) -> int:  # noqa: ANN401
    kind = metric.WhichOneof("data")
    return len(getattr(metric, kind).data_points) if kind else 0


def joined(values: Sequence[bytes]) -> bytes:
    """One request that holds everything the requests of one signal hold, in order."""
    return b"".join(values)


# ── answers ─────────────────────────────────────────────────────────────────────────────────────


def encode_response(
    signal: Signal, encoding: str = PROTOBUF, *, rejected: int = 0, why: str = ""
) -> bytes:
    """The response to a request that was taken, all of it or all but ``rejected`` records."""
    shape = _SHAPES[signal]
    response = shape.response()
    if rejected or why:
        setattr(response.partial_success, shape.rejected, rejected)
        response.partial_success.error_message = why
    if encoding == JSON:
        return str(json_format.MessageToJson(response, indent=None)).encode()
    serialised: bytes = response.SerializeToString()
    return serialised


def decode_rejected(signal: Signal, body: bytes, encoding: str = PROTOBUF) -> tuple[int, str]:
    """How many records a response says were not taken, and why. Raises ``Malformed``."""
    shape = _SHAPES[signal]
    if encoding == JSON:
        response = _from_json(body, shape.response())
    else:
        try:
            response = shape.response.FromString(body)
        except DecodeError as error:
            raise Malformed(f"this is no {shape.response.__name__}: {error}") from None
    partly = response.partial_success
    return int(getattr(partly, shape.rejected)), str(partly.error_message)


def encode_status(code: int, message: str, encoding: str = PROTOBUF, details: bytes = b"") -> bytes:
    """A ``google.rpc.Status``: what OTLP answers to a request that was not taken.

    It is written by hand because its messages come with another distribution. ``details`` is one
    message of the kind ``google.rpc.RetryInfo``, if any.
    """
    if encoding == JSON:
        return json.dumps({"code": code, "message": message}).encode()
    found = b"\x08" + encode_varint(code) + encode_field(b"\x12", message.encode())
    if details:
        kind = b"type.googleapis.com/google.rpc.RetryInfo"
        found += encode_field(b"\x1a", encode_field(b"\x0a", kind) + encode_field(b"\x12", details))
    return found


def encode_retry_info(seconds: float) -> bytes:
    """A ``google.rpc.RetryInfo``: retry after this time."""
    whole, nanos = divmod(round(seconds * 1_000_000_000), 1_000_000_000)
    return encode_field(b"\x0a", b"\x08" + encode_varint(whole) + b"\x10" + encode_varint(nanos))


def encode_field(tag: bytes, content: bytes) -> bytes:
    """A text or a message inside another: its tag, its length, itself."""
    return tag + encode_varint(len(content)) + content


def encode_varint(number: int) -> bytes:
    """A number as protobuf writes lengths: seven bits a byte, the lowest first."""
    if number < 0x80:
        return number.to_bytes(1, "little")
    groups = bytearray()
    while number >= 0x80:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


# ── otlp_logs ──
# Events as OTLP log records, written by the column.
#
# Protobuf puts a length before everything that is nested. Lengths repeat, so each is written
# once,
# and everything else is joining columns of bytes.

Column = Any
"""An Arrow column."""

_NOT_ATTRIBUTES: Final = frozenset(
    {"value", "timestamp", "severity", "queue", "partition", "offset", PAYLOAD}
)
_NUMBERS: Final = (21, 19, 18, 17, 13, 10, 9, 5)
"""OTLP's severity numbers by syslog's severity, as OpenTelemetry's own table has them."""
_PLACES: Final = pa.array(range(len(_NUMBERS)), pa.int64())
_NAMES: Final = ("emerg", "alert", "crit", "err", "warning", "notice", "info", "debug")

# Fields as they stand on the wire, message by message: number and type in one byte.
_RESOURCE_LOGS: Final = b"\x0a"
_RESOURCE, _SCOPE_LOGS = b"\x0a", b"\x12"
_RESOURCE_ATTRIBUTE: Final = b"\x0a"
_SCOPE, _OTLP_LOGS_RECORDS = b"\x0a", b"\x12"
_NAME: Final = b"\x0a"
_TIME, _NUMBER, _LEVEL, _BODY = b"\x09", b"\x10", b"\x1a", b"\x2a"
_ATTRIBUTE, _SEEN = b"\x32", b"\x59"
_KEY, _VALUE = b"\x0a", b"\x12"
_TEXT, _TRUTH, _WHOLE, _REAL, _BYTES = b"\x0a", b"\x10", b"\x18", b"\x21", b"\x3a"


def encode_logs_request(
    block: Block, *, resource: Mapping[str, str], ids: Column = None, scope: str = "turnlane"
) -> bytes:
    """An export request that holds a log record for each event, in order.

    The value is the body, and what else there is of the event are attributes; ``ids`` become
    ``log.record.uid``.
    """
    records = _fields(_OTLP_LOGS_RECORDS, _otlp_logs_records(block, ids))
    inside = (
        encode_field(_SCOPE, encode_field(_NAME, scope.encode()))
        + join_texts(to_large_binary(records)).data.to_pybytes()
    )
    about = b"".join(
        encode_field(
            _RESOURCE_ATTRIBUTE,
            encode_field(_KEY, name.encode())
            + encode_field(_VALUE, encode_field(_TEXT, text.encode())),
        )
        for name, text in resource.items()
    )
    group = (encode_field(_RESOURCE, about) if about else b"") + encode_field(_SCOPE_LOGS, inside)
    return encode_field(_RESOURCE_LOGS, group)


def _otlp_logs_records(block: Block, ids: Column) -> Column:
    names = block.schema.names
    parts: list[Column] = []
    if "timestamp" in names:
        microseconds = block.column("timestamp").cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
        times = _fixed(pc.multiply(microseconds, 1000))
        parts += [_marked(_TIME, times), _marked(_SEEN, times)]
    if "severity" in names:
        parts += _severities(block.column("severity"))
    if "value" in names:
        parts.append(_fields(_BODY, _any(block.column("value"))))
    for name in names:
        if name not in _NOT_ATTRIBUTES and not name.startswith(OWN_PREFIX):
            parts.extend(_attributes(name, block.column(name)))
    if ids is not None:
        parts.extend(_attributes("log.record.uid", ids))
    return _joined(parts, block.num_rows)


def _severities(column: Column) -> list[Column]:
    place = column.cast(pa.int64())
    known: Any = pc.index_in(place, _PLACES)
    numbers = pa.array([encode_varint(number) for number in _NUMBERS], pa.binary()).take(known)
    names = pa.array([name.encode() for name in _NAMES], pa.binary()).take(known)
    return [_marked(_NUMBER, numbers), _fields(_LEVEL, names)]


# ── attributes ───────────────────────────────────────────────────────────────────────────────────


def _attributes(name: str, column: Column) -> Sequence[Column]:
    """A column as attributes of its records; a map is as many as it has entries."""
    if pa.types.is_map(column.type):
        return [_entries(name, column)]
    values = _any(column)
    if values is None:
        return []
    key = pa.scalar(encode_field(_KEY, name.encode()), pa.binary())
    pairs = pc.binary_join_element_wise(key, _fields(_VALUE, values), _NOTHING)
    return [_fields(_ATTRIBUTE, pairs)]


def _entries(name: str, maps: Column) -> Column:
    """All entries of a map as attributes, side by side, each called ``name.key``."""
    lists = maps.cast(pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())])))
    entries = lists.flatten()
    keys = _fields(_KEY, _marked(f"{name}.".encode(), entries.field("key").cast(pa.binary())))
    values = _fields(_VALUE, _any(entries.field("value").fill_null("")))
    pairs = _fields(_ATTRIBUTE, pc.binary_join_element_wise(keys, values, _NOTHING))
    lengths = pc.list_value_length(lists).fill_null(0)
    ends = np.zeros(len(maps) + 1, np.int32)
    np.cumsum(lengths.to_numpy(zero_copy_only=False), out=ends[1:])
    offsets: Any = pa.array(ends)
    return pc.binary_join(pa.ListArray.from_arrays(offsets, pairs), b"")


def _any(column: Column) -> Column:
    """Each value as an ``AnyValue``; null stays null. ``None`` for types that are no attribute."""
    kind = column.type
    if pa.types.is_boolean(kind):
        truths = pa.array([b"\x00", b"\x01"], pa.binary()).take(column.cast(pa.int8()))
        return _marked(_TRUTH, truths)
    if pa.types.is_integer(kind):
        return _marked(_WHOLE, _varints(column))
    if pa.types.is_floating(kind):
        return _marked(_REAL, _fixed(column.cast(pa.float64())))
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _bytes(column.cast(pa.binary()))
    try:
        return _fields(_TEXT, column.cast(pa.string()).cast(pa.binary()))
    except pa.ArrowNotImplementedError:  # lists and structs, among others
        return None


def _bytes(column: Column) -> Column:
    """Bytes as the text that they nearly always are; as bytes where they are none."""
    try:
        column.cast(pa.string())
    except pa.ArrowInvalid:
        is_text = pa.array([each is None or _is_text(each) for each in column.to_pylist()])
        texts = _fields(_TEXT, column)
        return pc.if_else(is_text, texts, _fields(_BYTES, column))
    return _fields(_TEXT, column)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


# ── the wire ─────────────────────────────────────────────────────────────────────────────────────

_NOTHING: Final = pa.scalar(b"", pa.binary())


def _fields(tag: bytes, contents: Column) -> Column:
    """Contents with tag and length before each; null stays null."""
    lengths: Any = pc.binary_length(contents)
    lengths = lengths.dictionary_encode()
    heads = [
        None if each is None else tag + encode_varint(each)
        for each in lengths.dictionary.to_pylist()
    ]
    head = pa.array(heads, pa.binary()).take(lengths.indices)
    return pc.binary_join_element_wise(head, contents, _NOTHING)


def _marked(tag: bytes, contents: Column) -> Column:
    """Contents with something before each, and no length; null stays null."""
    return pc.binary_join_element_wise(pa.scalar(tag, pa.binary()), contents, _NOTHING)


def _varints(column: Column) -> Column:
    """Whole numbers, each different one written once; a negative one as 64 bits have it."""
    encoded = column.dictionary_encode()
    written = [encode_varint(number & (1 << 64) - 1) for number in encoded.dictionary.to_pylist()]
    return pa.array(written, pa.binary()).take(encoded.indices)


def _fixed(column: Column) -> Column:
    """Numbers of eight bytes, as they are."""
    data = pa.py_buffer(column.fill_null(0).to_numpy().tobytes())
    found = pa.Array.from_buffers(pa.binary(8), len(column), [None, data]).cast(pa.binary())
    return pc.if_else(column.is_null(), None, found) if column.null_count else found


def _joined(parts: Sequence[Column], count: int) -> Column:
    """Fields side by side; of null nothing is written at all."""
    if not parts:
        return pa.repeat(_NOTHING, count)
    filled = [part.fill_null(b"") for part in parts]
    return pc.binary_join_element_wise(*filled, _NOTHING)
