"""OTLP, the format of OpenTelemetry: export requests to events, and events to export requests.

The ``value`` of an event is always a complete export request in protobuf
(``ExportLogsServiceRequest`` or the same for metrics or traces). By default it contains one log
record, metric or span together with its resource and scope, so every event can be filtered, shed,
delivered or rejected by itself. Concatenated requests are one request, since protobuf merges
repeated fields: that is all :func:`joined` does, and so an output sends a whole batch as one
request.
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
from turnlane.errors import EventTooLarge
from turnlane.events import Block, build_values
from turnlane.formats.lines import (
    build_event_block,
    check_repeated_bytes,
    join_texts,
    to_large_binary,
)
from turnlane.plugins import require_extra

with require_extra("otlp", "OTLP"):
    from google.protobuf import json_format
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace

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
    """Which part of a request becomes one event."""

    RECORD = "record"
    """Each log record, metric (with all its data points) or span."""
    REQUEST = "request"
    """The whole request: the cheapest, with the severity of its worst record."""


class Malformed(ValueError):
    """The body is not an export request."""


class RecordColumns(NamedTuple):
    """The columns of a request's events."""

    values: list[bytes]
    keys: list[str | None]
    severities: list[int | None]


class _SignalNames(NamedTuple):
    """The names of a signal's messages and fields; their numbers are the same in all three."""

    request: Any
    response: Any
    resources: str
    scopes: str
    records: str
    rejected: str


_NAMES_BY_SIGNAL: Final = {
    Signal.LOGS: _SignalNames(
        logs.ExportLogsServiceRequest,
        logs.ExportLogsServiceResponse,
        "resource_logs",
        "scope_logs",
        "log_records",
        "rejected_log_records",
    ),
    Signal.METRICS: _SignalNames(
        metrics.ExportMetricsServiceRequest,
        metrics.ExportMetricsServiceResponse,
        "resource_metrics",
        "scope_metrics",
        "metrics",
        "rejected_data_points",
    ),
    Signal.TRACES: _SignalNames(
        trace.ExportTraceServiceRequest,
        trace.ExportTraceServiceResponse,
        "resource_spans",
        "scope_spans",
        "spans",
        "rejected_spans",
    ),
}

# Tags of fields on the wire: number and type in one byte.
_RESOURCES_TAG: Final = b"\x0a"
_SCOPES_TAG: Final = b"\x12"
_RECORDS_TAG: Final = b"\x12"

_ID_FIELDS: Final = frozenset(
    {"traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id"}
)

MAX_RECORDS: Final = 500_000
"""The most records of a request, with their scopes and resources: an empty one has two bytes, and
still takes microseconds. A request that takes longer than its sender waits would come again."""

_MAX_NAME: Final = 255
_TRACE_ID_BYTES: Final = 16
"""Keys are cut here: names and ids that are longer than OpenTelemetry allows."""

SEVERITIES: Final = (None, *[7] * 8, 6, *[5] * 3, *[4] * 4, 3, 2, *[1] * 2, *[0] * 4)
"""Syslog's severity by OTLP's severity number, 0 (unknown) to 24, as OpenTelemetry maps them."""


# ── decoding ────────────────────────────────────────────────────────────────────────────────────


def decode(signal: Signal, body: bytes, encoding: str = PROTOBUF) -> Any:  # noqa: ANN401
    """Return the export request of a body as its protobuf message. Raises ``Malformed``."""
    return _decode_message(_NAMES_BY_SIGNAL[signal].request, body, encoding)


def _decode_message(kind: Any, body: bytes, encoding: str) -> Any:  # noqa: ANN401
    name = kind.__name__
    if encoding != JSON:
        try:
            return kind.FromString(body)
        except DecodeError as error:
            raise Malformed(f"the body is not an {name} in protobuf: {error}") from None
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict):
            raise Malformed("it is not an object")
        _convert_ids(fields)
        return json_format.ParseDict(fields, kind(), ignore_unknown_fields=True)
    except (json_format.ParseError, ValueError, TypeError, AttributeError) as error:
        # The parser raises the last two for a list in the place of a message, for example.
        raise Malformed(f"the body is not an {name} in JSON: {error}") from None
    except RecursionError:
        raise Malformed(f"the body is not an {name} in JSON: it is nested too deeply") from None


def _convert_ids(node: Any) -> None:  # noqa: ANN401
    """Convert ids from hexadecimal (OTLP) to base64 (protobuf's JSON)."""
    if isinstance(node, list):
        for each in node:
            _convert_ids(each)
    elif isinstance(node, dict):
        for name, value in node.items():
            if name not in _ID_FIELDS or not isinstance(value, str):
                _convert_ids(value)
                continue
            try:
                node[name] = base64.b64encode(binascii.unhexlify(value)).decode()
            except ValueError:
                raise Malformed(f"{name} {value[:40]!r} is not hexadecimal") from None


# ── requests to events ──────────────────────────────────────────────────────────────────────────


def build_request_block(
    signal: Signal,
    request: Any,  # noqa: ANN401
    source: str | None = None,
    unit: SplitUnit = SplitUnit.RECORD,
) -> Block:
    """Return the events of a request, in its order, without timestamps. ``EventTooLarge``."""
    _check_record_count(signal, request)
    is_split = unit is SplitUnit.RECORD
    found = split_request(signal, request) if is_split else _keep_request(signal, request)
    return build_event_block(
        build_values(found.values),
        keys=found.keys,
        severities=found.severities if signal is Signal.LOGS else None,
        headers={SIGNAL_HEADER: signal.value, "content-type": PROTOBUF},
        source=source,
    )


def _check_record_count(signal: Signal, request: Any) -> None:  # noqa: ANN401
    """Raise ``EventTooLarge`` for a request with too many records, scopes and resources."""
    names = _NAMES_BY_SIGNAL[signal]
    resources = getattr(request, names.resources)
    count = len(resources)
    for resource in resources if count <= MAX_RECORDS else ():
        scopes = getattr(resource, names.scopes)
        count += len(scopes)
        if count <= MAX_RECORDS:
            count += sum(len(getattr(scope, names.records)) for scope in scopes)
        if count > MAX_RECORDS:
            break
    if count > MAX_RECORDS:
        raise EventTooLarge(
            f"the request has more than {MAX_RECORDS} records, scopes and resources; send it in "
            "parts"
        )


def split_request(signal: Signal, request: Any) -> RecordColumns:  # noqa: ANN401
    """Return a request for each record, with its resource and scope. Raises ``EventTooLarge``."""
    names = _NAMES_BY_SIGNAL[signal]
    found = RecordColumns([], [], [])
    repeated_bytes = 0
    for resource in getattr(request, names.resources):
        outer = _serialize_common(resource, "resource")
        for scope in getattr(resource, names.scopes):
            inner = _serialize_common(scope, "scope")
            records = getattr(scope, names.records)
            repeated_bytes += len(records) * (len(outer) + len(inner))
            check_repeated_bytes(repeated_bytes)
            found.values.extend(_wrap_records(outer, inner, records))
            if signal is Signal.METRICS:
                found.keys.extend(record.name[:_MAX_NAME] or None for record in records)
            else:
                ids = (record.trace_id[:_TRACE_ID_BYTES].hex() for record in records)
                found.keys.extend(each or None for each in ids)
            if signal is Signal.LOGS:
                numbers = (record.severity_number for record in records)
                found.severities.extend(map(get_syslog_severity, numbers))
    return found


def _serialize_common(group: Any, owner: str) -> bytes:  # noqa: ANN401
    """Return the common part of the records of a resource or scope: itself and its schema."""
    fields = {"schema_url": group.schema_url} if group.schema_url else {}
    if group.HasField(owner):
        fields[owner] = getattr(group, owner)
    serialized: bytes = type(group)(**fields).SerializeToString()
    return serialized


def _wrap_records(outer: bytes, inner: bytes, records: Iterable[Any]) -> Iterator[bytes]:
    """Yield each record in a request of its own, with its resource and scope."""
    heads: dict[int, bytes] = {}
    """By the length of the record, the only thing in which the heads differ."""
    for record in records:
        body = record.SerializeToString()
        head = heads.get(len(body))
        if head is None:
            size = encode_varint(len(body))
            scope_bytes = len(inner) + 1 + len(size) + len(body)
            scope_size = encode_varint(scope_bytes)
            total = encode_varint(len(outer) + 1 + len(scope_size) + scope_bytes)
            head = heads[len(body)] = b"".join(
                (_RESOURCES_TAG, total, outer, _SCOPES_TAG, scope_size, inner, _RECORDS_TAG, size)
            )
        yield head + body


def _keep_request(signal: Signal, request: Any) -> RecordColumns:  # noqa: ANN401
    if not count_records(signal, request):
        return RecordColumns([], [], [])
    worst: int | None = None
    if signal is Signal.LOGS:
        numbers = (record.severity_number for record in _iterate_records(signal, request))
        known = (each for each in map(get_syslog_severity, numbers) if each is not None)
        worst = min(known, default=None)
    return RecordColumns([request.SerializeToString()], [None], [worst])


def get_syslog_severity(number: int) -> int | None:
    """Return syslog's severity for OTLP's severity number; ``None`` for an undefined number."""
    return SEVERITIES[number] if 0 <= number < len(SEVERITIES) else None


def _iterate_records(signal: Signal, request: Any) -> Iterator[Any]:  # noqa: ANN401
    names = _NAMES_BY_SIGNAL[signal]
    for resource in getattr(request, names.resources):
        for scope in getattr(resource, names.scopes):
            yield from getattr(scope, names.records)


def count_records(signal: Signal, request: Any) -> int:  # noqa: ANN401
    """Count the records of a request as OTLP does: log records, spans, or data points."""
    if signal is not Signal.METRICS:
        return sum(1 for _ in _iterate_records(signal, request))
    total = 0
    for metric in _iterate_records(signal, request):
        kind = metric.WhichOneof("data")
        total += max(1, len(getattr(metric, kind).data_points) if kind else 0)
    return total


def joined(values: Sequence[bytes]) -> bytes:
    """Return one request with the records of all these requests of one signal, in order."""
    return b"".join(values)


# ── answers ─────────────────────────────────────────────────────────────────────────────────────


def encode_response(
    signal: Signal, encoding: str = PROTOBUF, *, rejected: int = 0, why: str = ""
) -> bytes:
    """Return the response to an accepted request, of which ``rejected`` records were refused."""
    names = _NAMES_BY_SIGNAL[signal]
    response = names.response()
    if rejected or why:
        setattr(response.partial_success, names.rejected, rejected)
        response.partial_success.error_message = why
    if encoding == JSON:
        return str(json_format.MessageToJson(response, indent=None)).encode()
    serialized: bytes = response.SerializeToString()
    return serialized


def decode_rejected(signal: Signal, body: bytes, encoding: str = PROTOBUF) -> tuple[int, str]:
    """Return how many records a response rejects, and why. Raises ``Malformed``."""
    names = _NAMES_BY_SIGNAL[signal]
    partial = _decode_message(names.response, body, encoding).partial_success
    return int(getattr(partial, names.rejected)), str(partial.error_message)


def encode_status(code: int, message: str, encoding: str = PROTOBUF, details: bytes = b"") -> bytes:
    """Return a ``google.rpc.Status``: OTLP's answer to a refused request.

    It is encoded by hand because its messages are in another distribution. ``details`` is a
    ``google.rpc.RetryInfo``, or empty.
    """
    if encoding == JSON:
        return json.dumps({"code": code, "message": message}).encode()
    content = b"\x08" + encode_varint(code) + encode_field(b"\x12", message.encode())
    if details:
        kind = encode_field(b"\x0a", b"type.googleapis.com/google.rpc.RetryInfo")
        content += encode_field(b"\x1a", kind + encode_field(b"\x12", details))
    return content


def encode_retry_info(seconds: float) -> bytes:
    """Return a ``google.rpc.RetryInfo``: retry after this time."""
    whole, nanos = divmod(round(seconds * 1_000_000_000), 1_000_000_000)
    return encode_field(b"\x0a", b"\x08" + encode_varint(whole) + b"\x10" + encode_varint(nanos))


def encode_field(tag: bytes, content: bytes) -> bytes:
    """Return a text or message as a field: its tag, its length, itself."""
    return tag + encode_varint(len(content)) + content


def encode_varint(number: int) -> bytes:
    """Return a number as protobuf writes lengths: seven bits a byte, the lowest first."""
    if number < 0x80:
        return number.to_bytes(1, "little")
    groups = bytearray()
    while number >= 0x80:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


# ── events as log records ────────────────────────────────────────────────────────────────────────
# They are encoded by the column. Protobuf writes a length before everything that is nested; lengths
# repeat, so each is encoded once, and the rest is joining columns of bytes.

Column = Any
"""An Arrow column."""

_NOT_ATTRIBUTES: Final = frozenset(
    {"value", "timestamp", "severity", "queue", "partition", "offset", PAYLOAD}
)
_SEVERITY_NUMBERS: Final = (21, 19, 18, 17, 13, 10, 9, 5)
"""OTLP's severity numbers by syslog's severity, as OpenTelemetry maps them."""
_SEVERITY_NAMES: Final = ("emerg", "alert", "crit", "err", "warning", "notice", "info", "debug")
_EMPTY: Final = pa.scalar(b"", pa.binary())

# Tags of fields on the wire, message by message: number and type in one byte.
_RESOURCE_LOGS: Final = b"\x0a"
_RESOURCE, _SCOPE_LOGS = b"\x0a", b"\x12"
_RESOURCE_ATTRIBUTE: Final = b"\x0a"
_SCOPE, _LOG_RECORD = b"\x0a", b"\x12"
_NAME: Final = b"\x0a"
_TIME, _SEVERITY_NUMBER, _SEVERITY_TEXT, _BODY = b"\x09", b"\x10", b"\x1a", b"\x2a"
_ATTRIBUTE, _OBSERVED_TIME = b"\x32", b"\x59"
_KEY, _VALUE = b"\x0a", b"\x12"
_STRING, _BOOL, _INT, _DOUBLE, _BYTES = b"\x0a", b"\x10", b"\x18", b"\x21", b"\x3a"


def encode_logs_request(
    block: Block, *, resource: Mapping[str, str], ids: Column = None, scope: str = "turnlane"
) -> bytes:
    """Return an export request with a log record for each event, in order.

    The value is the body, and the other columns are attributes; ``ids`` become ``log.record.uid``.
    """
    records = to_large_binary(_encode_fields(_LOG_RECORD, _encode_records(block, ids)))
    scope_field = encode_field(_SCOPE, encode_field(_NAME, scope.encode()))
    scope_logs = scope_field + join_texts(records).data.to_pybytes()
    attributes = b""
    for name, text in resource.items():
        value = encode_field(_VALUE, encode_field(_STRING, text.encode()))
        attributes += encode_field(_RESOURCE_ATTRIBUTE, encode_field(_KEY, name.encode()) + value)
    resource_field = encode_field(_RESOURCE, attributes) if attributes else b""
    return encode_field(_RESOURCE_LOGS, resource_field + encode_field(_SCOPE_LOGS, scope_logs))


def _encode_records(block: Block, ids: Column) -> Column:
    names = block.schema.names
    parts: list[Column] = []
    if "timestamp" in names:
        microseconds = block.column("timestamp").cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
        times = _encode_fixed64(pc.multiply(microseconds, 1000))
        parts += [_add_tag(_TIME, times), _add_tag(_OBSERVED_TIME, times)]
    if "severity" in names:
        severities = block.column("severity").cast(pa.int64())
        known: Any = pc.index_in(severities, pa.array(range(len(_SEVERITY_NUMBERS)), pa.int64()))
        numbers = pa.array([encode_varint(number) for number in _SEVERITY_NUMBERS], pa.binary())
        texts = pa.array([name.encode() for name in _SEVERITY_NAMES], pa.binary())
        parts += [
            _add_tag(_SEVERITY_NUMBER, numbers.take(known)),
            _encode_fields(_SEVERITY_TEXT, texts.take(known)),
        ]
    if "value" in names:
        parts.append(_encode_fields(_BODY, _encode_any_values(block.column("value"))))
    for name in names:
        if name not in _NOT_ATTRIBUTES and not name.startswith(OWN_PREFIX):
            parts += _encode_attributes(name, block.column(name))
    if ids is not None:
        parts += _encode_attributes("log.record.uid", ids)
    if not parts:
        return pa.repeat(_EMPTY, block.num_rows)
    return _join(*(part.fill_null(b"") for part in parts))


def _encode_attributes(name: str, column: Column) -> Sequence[Column]:
    """Return a column as attributes of its records; a map becomes one for each of its entries."""
    if pa.types.is_map(column.type):
        return [_encode_map(name, column)]
    values = _encode_any_values(column)
    if values is None:
        return []
    key = pa.scalar(encode_field(_KEY, name.encode()), pa.binary())
    return [_encode_fields(_ATTRIBUTE, _join(key, _encode_fields(_VALUE, values)))]


def _encode_map(name: str, maps: Column) -> Column:
    """Return all entries of each map as attributes side by side, each called ``name.key``."""
    lists = maps.cast(pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())])))
    entries = lists.flatten()
    names = _add_tag(f"{name}.".encode(), entries.field("key").cast(pa.binary()))
    values = _encode_any_values(entries.field("value").fill_null(""))
    pair = _join(_encode_fields(_KEY, names), _encode_fields(_VALUE, values))
    lengths = pc.list_value_length(lists).fill_null(0)
    ends = np.zeros(len(maps) + 1, np.int32)
    np.cumsum(lengths.to_numpy(zero_copy_only=False), out=ends[1:])
    offsets: Any = pa.array(ends)
    return pc.binary_join(pa.ListArray.from_arrays(offsets, _encode_fields(_ATTRIBUTE, pair)), b"")


def _encode_any_values(column: Column) -> Column:
    """Return each value as an ``AnyValue``; null stays null. ``None`` for types without one."""
    kind = column.type
    if pa.types.is_boolean(kind):
        bits = pa.array([b"\x00", b"\x01"], pa.binary())
        return _add_tag(_BOOL, bits.take(column.cast(pa.int8())))
    if pa.types.is_integer(kind):
        # Each different number is encoded once; a negative one as unsigned 64 bits.
        encoded = column.dictionary_encode()
        numbers = encoded.dictionary.to_pylist()
        texts = pa.array([encode_varint(each & (1 << 64) - 1) for each in numbers], pa.binary())
        return _add_tag(_INT, texts.take(encoded.indices))
    if pa.types.is_floating(kind):
        return _add_tag(_DOUBLE, _encode_fixed64(column.cast(pa.float64())))
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _encode_bytes(column.cast(pa.binary()))
    try:
        return _encode_fields(_STRING, column.cast(pa.string()).cast(pa.binary()))
    except pa.ArrowNotImplementedError:  # lists and structs, among others
        return None


def _encode_bytes(column: Column) -> Column:
    """Return bytes as text where they are UTF-8, which is nearly always, else as bytes."""
    texts = _encode_fields(_STRING, column)
    try:
        column.cast(pa.string())
    except pa.ArrowInvalid:
        is_text = pa.array([each is None or _is_text(each) for each in column.to_pylist()])
        return pc.if_else(is_text, texts, _encode_fields(_BYTES, column))
    return texts


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _encode_fields(tag: bytes, contents: Column) -> Column:
    """Write tag and length before each content; null stays null."""
    lengths: Any = pc.binary_length(contents)
    lengths = lengths.dictionary_encode()
    known = lengths.dictionary.to_pylist()
    heads = [None if each is None else tag + encode_varint(each) for each in known]
    return _join(pa.array(heads, pa.binary()).take(lengths.indices), contents)


def _add_tag(tag: bytes, contents: Column) -> Column:
    """Write bytes before each content, without a length; null stays null."""
    return _join(pa.scalar(tag, pa.binary()), contents)


def _join(*columns: Column) -> Column:
    return pc.binary_join_element_wise(*columns, _EMPTY)


def _encode_fixed64(column: Column) -> Column:
    """Return numbers of eight bytes as they are in memory; null stays null."""
    data = pa.py_buffer(column.fill_null(0).to_numpy().tobytes())
    found = pa.Array.from_buffers(pa.binary(8), len(column), [None, data]).cast(pa.binary())
    return pc.if_else(column.is_null(), None, found) if column.null_count else found
