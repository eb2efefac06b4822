"""Telemetry for the tests of the OTLP inputs: from OpenTelemetry's SDK, and made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk._logs import LoggerProvider, ReadableLogRecord
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from turnlane.events import Event

SHOP = Resource({"service.name": "shop"})
REQUESTS: dict[str, Any] = {
    "logs": ExportLogsServiceRequest,
    "metrics": ExportMetricsServiceRequest,
    "traces": ExportTraceServiceRequest,
}


def make_log_records(*bodies: str) -> list[ReadableLogRecord]:
    """Return the SDK's log records of these messages, all with severity error."""
    kept: Any = InMemoryLogRecordExporter()  # type: ignore[no-untyped-call]
    provider = LoggerProvider(resource=SHOP)
    provider.add_log_record_processor(SimpleLogRecordProcessor(kept))
    for body in bodies:
        record = LogRecord(body=body, severity_number=SeverityNumber.ERROR)
        provider.get_logger("orders").emit(record)
    provider.shutdown()
    return list(kept.get_finished_logs())


def make_measurements() -> MetricsData:
    """Return a counter with two data points, and a gauge."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], SHOP)
    meter = provider.get_meter("orders")
    counter = meter.create_counter("orders")
    counter.add(1, {"kind": "new"})
    counter.add(2, {"kind": "paid"})
    meter.create_gauge("stock").set(7)
    found = reader.get_metrics_data()
    provider.shutdown()
    assert found is not None
    return found


def make_spans() -> list[ReadableSpan]:
    """Return an inner and an outer span."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=SHOP)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("orders")
    with tracer.start_as_current_span("outer"), tracer.start_as_current_span("inner"):
        pass
    provider.shutdown()
    return list(kept.get_finished_spans())


@contextmanager
def shut_down_after(exporter: Any) -> Iterator[Any]:
    """Yield an exporter, and shut it down at the end."""
    try:
        yield exporter
    finally:
        exporter.shutdown()


def parse_request(event: Event) -> Any:
    """Return the export request in an event."""
    assert event.headers is not None
    return REQUESTS[event.headers["signal"]].FromString(event.value)


def parse_record(event: Event) -> Any:
    """Return the one record of an event; check that its resource and scope are unchanged."""
    [resource] = list(next(value for _, value in parse_request(event).ListFields()))
    [name] = [each.value.string_value for each in resource.resource.attributes]
    assert name == "shop"
    [scope] = list(next(v for f, v in resource.ListFields() if f.name.startswith("scope_")))
    assert scope.scope.name == "orders"
    [record] = list(next(v for f, v in scope.ListFields() if f.name != "scope"))
    return record


def make_logs_request(*bodies: str) -> ExportLogsServiceRequest:
    """Return a request made by hand."""
    request = ExportLogsServiceRequest()
    scope = request.resource_logs.add().scope_logs.add()
    for body in bodies:
        scope.log_records.add().body.string_value = body
    return request
