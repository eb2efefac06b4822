"""OTLP requests cut into events and joined again."""

from __future__ import annotations

from typing import Any

import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from turnlane.errors import EventTooLarge
from turnlane.events import BASE_SCHEMA, get_values
from turnlane.formats.otlp import (
    Malformed,
    Signal,
    SplitUnit,
    build_request_block,
    count_records,
    decode,
    encode_retry_info,
    encode_status,
    encode_varint,
    get_syslog_severity,
    joined,
)

RECORDS = st.lists(st.tuples(st.text(max_size=200), st.integers(0, 30)), max_size=4)
SCOPES = st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3), RECORDS), max_size=3)
RESOURCES = st.lists(st.tuples(st.text(max_size=200), st.text(max_size=3), SCOPES), max_size=3)


@st.composite
def logs_requests(draw: st.DrawFn) -> ExportLogsServiceRequest:
    request = ExportLogsServiceRequest()
    for attribute, schema, scopes in draw(RESOURCES):
        resource = request.resource_logs.add(schema_url=schema)
        if attribute:
            resource.resource.attributes.add(key="a").value.string_value = attribute
        for name, scope_schema, records in scopes:
            scope = resource.scope_logs.add(schema_url=scope_schema)
            scope.scope.name = name
            for text, number in records:
                record = scope.log_records.add(severity_number=number)
                record.body.string_value = text
    return request


def flat(request: ExportLogsServiceRequest) -> list[tuple[Any, ...]]:
    """Every record with what belongs to it."""
    return [
        (resource.resource, resource.schema_url, scope.scope, scope.schema_url, record)
        for resource in request.resource_logs
        for scope in resource.scope_logs
        for record in scope.log_records
    ]


@given(logs_requests(), st.sampled_from(SplitUnit))
def test_split_events_join_to_the_request(
    request: ExportLogsServiceRequest, unit: SplitUnit
) -> None:
    block = build_request_block(Signal.LOGS, request, "here", unit)
    whole = ExportLogsServiceRequest.FromString(joined(get_values([block])))
    assert flat(whole) == flat(request)
    for field in block.schema:
        assert field.type == BASE_SCHEMA.field(field.name).type
    if unit is SplitUnit.RECORD:
        assert block.num_rows == count_records(Signal.LOGS, request)
        numbers = [record.severity_number for *_, record in flat(request)]
        assert block.column("severity").to_pylist() == [
            get_syslog_severity(each) for each in numbers
        ]


def test_whole_request_has_the_severity_of_its_worst_record() -> None:
    request = ExportLogsServiceRequest()
    scope = request.resource_logs.add().scope_logs.add()
    for number in (0, 9, 17, 13):
        scope.log_records.add(severity_number=number)
    block = build_request_block(Signal.LOGS, request, None, SplitUnit.REQUEST)
    assert block.column("severity").to_pylist() == [3]


@pytest.mark.parametrize(
    ("number", "severity"),
    [(0, None), (1, 7), (8, 7), (9, 6), (10, 5), (13, 4), (17, 3), (18, 2), (19, 1), (21, 0),
     (24, 0), (25, None), (-1, None)],
)  # fmt: skip
def test_severity_numbers_map_to_syslog_severities(number: int, severity: int | None) -> None:
    assert get_syslog_severity(number) == severity


def test_keys_are_trace_ids_and_metric_names() -> None:
    traces = ExportTraceServiceRequest()
    traces.resource_spans.add().scope_spans.add().spans.add(trace_id=b"\x01" * 16)
    block = build_request_block(Signal.TRACES, traces)
    assert block.column("key").to_pylist() == ["01" * 16]
    metrics = ExportMetricsServiceRequest()
    scope = metrics.resource_metrics.add().scope_metrics.add()
    scope.metrics.add(name="orders").sum.data_points.add()
    scope.metrics.add()
    block = build_request_block(Signal.METRICS, metrics)
    assert block.column("key").to_pylist() == ["orders", None]
    scope.metrics.add(name="x" * 2000)
    block = build_request_block(Signal.METRICS, metrics)
    assert block.column("key").to_pylist() == ["orders", None, "x" * 255]
    assert count_records(Signal.METRICS, metrics) == 3


@given(st.integers(0, 2**63 - 1))
def test_varints_equal_those_of_protobuf(number: int) -> None:
    code = number % 2**31
    assert b"\x08" + encode_varint(code) == (Status(code=code).SerializeToString() or b"\x08\x00")


def test_status_is_readable_by_googles_messages() -> None:
    found = Status.FromString(encode_status(8, "full", details=encode_retry_info(1.25)))
    info = RetryInfo()
    assert found.details[0].Unpack(info)
    assert (found.code, found.message) == (8, "full")
    assert (info.retry_delay.seconds, info.retry_delay.nanos) == (1, 250_000_000)


def test_body_that_is_not_a_request_is_malformed() -> None:
    for signal in Signal:
        with pytest.raises(Malformed, match="Export"):
            decode(signal, b"\xff")


def test_large_resource_repeated_for_many_records_is_refused() -> None:
    """A few megabytes would else become terabytes."""
    request = ExportLogsServiceRequest()
    resource = request.resource_logs.add()
    resource.resource.attributes.add(key="a").value.string_value = "x" * 100_000
    for _ in range(10):
        scope = resource.scope_logs.add()
        scope.log_records.extend([LogRecord()] * 500)
    with pytest.raises(EventTooLarge, match="in parts"):
        build_request_block(Signal.LOGS, request)
    assert build_request_block(Signal.LOGS, request, unit=SplitUnit.REQUEST).num_rows == 1
