"""Decoding by the column gives what protobuf's own decoder gives, record by record."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from turnlane.formats.otlp import Signal, split_request
from turnlane.formats.otlp_columns import COLUMNS, decode_columns

TEXTS = ["", "a", "ümläut", "x" * 200, "line\nbreak"]


def any_value(choice: random.Random, depth: int = 0) -> AnyValue:  # noqa: PLR0911
    match choice.randrange(8 if depth < 3 else 5):
        case 0:
            return AnyValue(string_value=choice.choice(TEXTS))
        case 1:
            return AnyValue(bool_value=choice.random() < 0.5)
        case 2:
            return AnyValue(int_value=choice.choice([0, -1, 5, 2**62, -(2**63)]))
        case 3:
            return AnyValue(double_value=choice.choice([0.0, 1.5, -1e100]))
        case 4:
            return AnyValue()
        case 5:
            return AnyValue(bytes_value=choice.randbytes(choice.randrange(9)))
        case 6:
            found = AnyValue()
            found.array_value.values.extend(any_value(choice, depth + 1) for _ in range(2))
            return found
        case _:
            found = AnyValue()
            found.kvlist_value.values.extend(pairs(choice, depth + 1))
            return found


def pairs(choice: random.Random, depth: int = 0) -> list[KeyValue]:
    names = choice.sample(["a", "b.c", "ü", "d", "e"], choice.randrange(5))
    return [KeyValue(key=name, value=any_value(choice, depth)) for name in names]


def request_of(signal: Signal, choice: random.Random, records: int) -> Any:
    kinds: dict[Signal, Any] = {
        Signal.LOGS: ExportLogsServiceRequest,
        Signal.METRICS: ExportMetricsServiceRequest,
        Signal.TRACES: ExportTraceServiceRequest,
    }
    request = kinds[signal]()
    group = getattr(request, f"resource_{'spans' if signal is Signal.TRACES else signal}").add()
    group.resource.attributes.extend(pairs(choice))
    scope = getattr(group, f"scope_{'spans' if signal is Signal.TRACES else signal}").add()
    scope.scope.name = choice.choice(TEXTS)
    for _ in range(records):
        match signal:
            case Signal.LOGS:
                record = scope.log_records.add()
                record.observed_time_unix_nano = choice.choice([0, 1_700_000_000_123_456_789])
                record.severity_text = choice.choice(TEXTS)
                record.severity_number = choice.randrange(25)
                if choice.random() < 0.7:
                    record.body.CopyFrom(any_value(choice))
                record.time_unix_nano = choice.choice([0, 1_600_000_000_123_456_789])
                record.event_name = choice.choice(TEXTS)
            case Signal.METRICS:
                record = scope.metrics.add()
                record.name = choice.choice(TEXTS)
                record.unit = "s"
                kind = choice.choice(["gauge", "sum", "histogram", "summary", None])
                if kind:
                    getattr(record, kind).data_points.add()
            case Signal.TRACES:
                record = scope.spans.add()
                record.name = choice.choice(TEXTS)
                record.kind = choice.randrange(6)
                record.parent_span_id = choice.choice([b"", choice.randbytes(8)])
                record.start_time_unix_nano = 1_600_000_000_123_456_789
                record.end_time_unix_nano = 1_600_000_001_000_000_000
                record.status.code = choice.randrange(3)
                record.events.add().name = "event"
        if signal is not Signal.METRICS:
            record.attributes.extend(pairs(choice))
            record.trace_id = choice.choice([b"", choice.randbytes(16)])
            record.span_id = choice.choice([b"", choice.randbytes(8)])
    return request


def text_of(value: AnyValue) -> str | None:
    plain = plain_of(value)
    if plain is None or isinstance(plain, str):
        return plain
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def plain_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    match kind:
        case None:
            return None
        case "array_value":
            return [plain_of(each) for each in value.array_value.values]
        case "kvlist_value":
            return {pair.key: plain_of(pair.value) for pair in value.kvlist_value.values}
        case "bytes_value":
            return base64.b64encode(value.bytes_value).decode()
        case _:
            return getattr(value, kind)


def same(found: str | None, wanted: str | None) -> bool:
    """Numbers are written in more than one way."""
    try:
        return found == wanted or float(found or "") == float(wanted or "")
    except ValueError:
        return False


def events(seed: int) -> tuple[list[bytes], list[str]]:
    choice = random.Random(seed)
    values: list[bytes] = []
    signals: list[str] = []
    for _ in range(60):
        signal = choice.choice(list(Signal))
        found = split_request(signal, request_of(signal, choice, choice.randrange(1, 5))).values
        values += found
        signals += [signal.value] * len(found)
    return values, signals


@pytest.mark.parametrize("seed", range(4))
def test_column_decoder_agrees_with_protobuf(seed: int) -> None:
    values, signals = events(seed)
    # A slice: the batch's buffers hold more than the batch.
    whole = pa.array([b"before", *values], pa.binary()).slice(1)
    rows = rows_of(whole, pa.array(signals, pa.string()))
    for value, signal, row in zip(values, signals, rows, strict=True):
        assert row["parse_error"] is None
        check(Signal(signal), value, row)


def rows_of(values: pa.Array[Any], signals: pa.Array[Any]) -> list[dict[str, Any]]:
    columns: Any = decode_columns(values, signals)
    found: list[dict[str, Any]] = columns.to_pylist()
    return found


def check(signal: Signal, value: bytes, row: dict[str, Any]) -> None:
    match signal:
        case Signal.LOGS:
            (group,) = ExportLogsServiceRequest.FromString(value).resource_logs
            (scope,) = group.scope_logs
            (record,) = scope.log_records
            assert row["name"] == (record.event_name or None)
            assert row["severity_text"] == (record.severity_text or None)
            wanted = text_of(record.body) if record.HasField("body") else None
            assert same(row["body"], wanted), (row["body"], wanted)
            nanos = record.time_unix_nano or record.observed_time_unix_nano
            assert micros(row["time"]) == nanos // 1000
        case Signal.METRICS:
            (group,) = ExportMetricsServiceRequest.FromString(value).resource_metrics
            (scope,) = group.scope_metrics
            (record,) = scope.metrics
            assert row["name"] == (record.name or None)
            assert row["kind"] == record.WhichOneof("data")
        case Signal.TRACES:
            (group,) = ExportTraceServiceRequest.FromString(value).resource_spans
            (scope,) = group.scope_spans
            (record,) = scope.spans
            kinds = [None, "internal", "server", "client", "producer", "consumer"]
            assert row["kind"] == kinds[record.kind]
            assert row["status"] == [None, "ok", "error"][record.status.code]
            assert row["parent_span_id"] == (record.parent_span_id.hex() or None)
            assert micros(row["time"]) == record.start_time_unix_nano // 1000
            assert micros(row["end_time"]) == record.end_time_unix_nano // 1000
    if signal is not Signal.METRICS:
        assert row["trace_id"] == (record.trace_id.hex() or None)
        assert row["span_id"] == (record.span_id.hex() or None)
        check_pairs(row["attributes"], record.attributes)
    check_pairs(row["resource"], group.resource.attributes)
    assert row["scope"] == (scope.scope.name or None)


def check_pairs(found: list[tuple[str, str]], wanted: Any) -> None:
    by_key = sorted(wanted, key=lambda pair: pair.key)
    assert [key for key, _ in sorted(found)] == [pair.key for pair in by_key]
    for (_, text), pair in zip(sorted(found), by_key, strict=True):
        assert same(text, text_of(pair.value) or ""), (text, pair)


def micros(moment: Any) -> int:
    return 0 if moment is None else round(moment.timestamp() * 1_000_000)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_events_do_not_affect_others(seed: int) -> None:
    values, signals = events(seed)
    choice = random.Random(seed)
    damaged = []
    for value in values:
        octets = bytearray(value)
        if octets and choice.random() < 0.5:
            match choice.randrange(3):
                case 0:
                    octets = octets[: choice.randrange(len(octets))]
                case 1:
                    octets[choice.randrange(len(octets))] = choice.randrange(256)
                case _:
                    octets += choice.randbytes(choice.randrange(1, 20))
        damaged.append(bytes(octets))
    rows = rows_of(pa.array(damaged, pa.binary()), pa.array(signals))
    for value, whole, signal, row in zip(damaged, values, signals, rows, strict=True):
        if value == whole:
            check(Signal(signal), value, row)


def test_event_without_exactly_one_record_has_a_parse_error() -> None:
    choice = random.Random(1)
    several = request_of(Signal.LOGS, choice, 3).SerializeToString()
    none = request_of(Signal.LOGS, choice, 0).SerializeToString()
    values = pa.array([several, none, b"", None, b"\xff\xff", several], pa.binary())
    signals = pa.array(["logs", "logs", "traces", "logs", "logs", None], pa.string())
    found = [row["parse_error"] for row in rows_of(values, signals)]
    assert "several records" in found[0]
    assert found[1] == found[2] == "it has no record"
    assert found[3] == "there is no value"
    assert found[4] == "its protobuf is malformed"
    assert "header `signal`" in found[5]


def test_empty_batch_has_all_columns() -> None:
    found = decode_columns(pa.array([], pa.binary()), pa.array([], pa.string()))
    assert [field.name for field in found.type] == list(COLUMNS)
    assert len(found) == 0
