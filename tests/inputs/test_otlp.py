from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf import json_format
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.trace.export import SpanExportResult

from tests.certificates import Certificates
from tests.contract.harness import wait_until
from tests.inputs.otlp_senders import (
    make_log_records,
    make_logs_request,
    make_measurements,
    make_spans,
    parse_record,
    parse_request,
    shut_down_after,
)
from tests.inputs.web_inputs import (
    HASTY,
    SECRET,
    TOKENS,
    WEB,
    act_when_refused,
    fill,
    open_node,
    read_events,
    read_values,
    run_web_input,
    settle_all,
)
from turnlane.node.node import Node
from turnlane.testing import FaultyDisk

PROTOBUF = "application/x-protobuf"
JSON = "application/json"


@pytest.fixture
def url(node: Node) -> Iterator[str]:
    with run_web_input("otlp", node) as found:
        yield f"http://{found.address}"


def post(url: str, body: bytes, kind: str = PROTOBUF, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return WEB.post(url, content=body, headers={"content-type": kind, **named})


# ── the SDK's exporters ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("compression", list(Compression))
def test_sdk_exports_logs(url: str, node: Node, compression: Compression) -> None:
    with shut_down_after(OTLPLogExporter(f"{url}/v1/logs", compression=compression)) as exporter:
        done = exporter.export(make_log_records("one", "two"))
    assert done is LogRecordExportResult.SUCCESS
    found = read_events(node)
    assert [parse_record(event).body.string_value for event in found] == ["one", "two"]
    assert [event.severity for event in found] == [3, 3]
    assert found[0].headers == {"signal": "logs", "content-type": PROTOBUF}
    assert found[0].source == "127.0.0.1"


def test_sdk_exports_metrics(url: str, node: Node) -> None:
    with shut_down_after(OTLPMetricExporter(f"{url}/v1/metrics")) as exporter:
        assert exporter.export(make_measurements()) is MetricExportResult.SUCCESS
    counter, gauge = read_events(node)
    assert (counter.key, gauge.key) == ("orders", "stock")
    assert [point.as_int for point in parse_record(counter).sum.data_points] == [1, 2]
    assert [point.as_int for point in parse_record(gauge).gauge.data_points] == [7]


def test_sdk_exports_traces(url: str, node: Node) -> None:
    sent = make_spans()
    with shut_down_after(OTLPSpanExporter(f"{url}/v1/traces")) as exporter:
        assert exporter.export(sent) is SpanExportResult.SUCCESS
    found = read_events(node)
    assert [parse_record(event).name for event in found] == ["inner", "outer"]
    assert {event.key for event in found} == {f"{sent[0].context.trace_id:032x}"}


def test_split_request_keeps_the_request_whole(node: Node) -> None:
    with (
        run_web_input("otlp", node, split="request") as found,
        shut_down_after(OTLPLogExporter(f"http://{found.address}/v1/logs")) as exporter,
    ):
        exporter.export(make_log_records("one", "two"))
    [event] = read_events(node)
    [resource] = parse_request(event).resource_logs
    assert len(resource.scope_logs[0].log_records) == 2
    assert event.severity == 3


def test_sdk_retries_records_refused_by_a_full_queue(tmp_path: Path) -> None:
    with open_node(tmp_path, size=2) as node, run_web_input("otlp", node, timeout=HASTY) as found:
        fill(node, 2)
        with (
            act_when_refused(found, lambda: settle_all(node)),
            shut_down_after(
                OTLPLogExporter(f"http://{found.address}/v1/logs", timeout=30)
            ) as exporter,
        ):
            assert exporter.export(make_log_records("late")) is LogRecordExportResult.SUCCESS
        assert {parse_record(event).body.string_value for event in read_events(node)} == {"late"}


def test_sdk_retries_records_refused_by_a_full_disk(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with open_node(tmp_path, disk) as node, run_web_input("otlp", node, timeout=HASTY) as found:
        disk.fill()
        with (
            act_when_refused(found, disk.unfill),
            shut_down_after(
                OTLPLogExporter(f"http://{found.address}/v1/logs", timeout=30)
            ) as exporter,
        ):
            assert (
                exporter.export(make_log_records("late" * 2**18)) is LogRecordExportResult.SUCCESS
            )
        # At least once: records that were in the queue but not on disk in time were sent again.
        assert {parse_record(event).body.string_value for event in read_events(node)} == {
            "late" * 2**18
        }


# ── encodings and answers ───────────────────────────────────────────────────────────────────────


def test_json_follows_the_mapping_of_the_specification(url: str, node: Node) -> None:
    body = {
        "resourceLogs": [{
            "resource": {"attributes": [{"key": "a", "value": {"stringValue": "b"}}]},
            "scopeLogs": [{
                "scope": {"name": "s"},
                "logRecords": [{
                    "timeUnixNano": "1544712660300000000",
                    "observedTimeUnixNano": 1544712660300000000,
                    "severityNumber": 10,
                    "traceId": "5B8EFFF798038103D269B633813FC60C",
                    "spanId": "eee19b7ec3c1b174",
                    "body": {"bytesValue": "AAE="},
                    "inventedField": {"x": [1]},
                }],
            }],
        }]
    }  # fmt: skip
    answer = post(f"{url}/v1/logs", json.dumps(body).encode(), f"{JSON}; charset=utf-8")
    assert (answer.status_code, answer.headers["content-type"]) == (200, JSON)
    assert answer.json() == {}
    [event] = read_events(node)
    record = parse_request(event).resource_logs[0].scope_logs[0].log_records[0]
    assert record.trace_id.hex() == "5b8efff798038103d269b633813fc60c"
    assert record.span_id.hex() == "eee19b7ec3c1b174"
    assert record.time_unix_nano == record.observed_time_unix_nano == 1544712660300000000
    assert record.body.bytes_value == b"\x00\x01"
    assert (event.severity, event.key) == (5, "5b8efff798038103d269b633813fc60c")


def test_protobuf_is_answered_in_protobuf(url: str) -> None:
    answer = post(f"{url}/v1/logs", make_logs_request("x").SerializeToString())
    assert (answer.status_code, answer.headers["content-type"]) == (200, PROTOBUF)
    assert answer.content == b""


def test_empty_request_succeeds(url: str, node: Node) -> None:
    for signal in ("logs", "metrics", "traces"):
        assert post(f"{url}/v1/{signal}", b"").status_code == 200
        assert post(f"{url}/v1/{signal}", b"{}", JSON).status_code == 200
    assert read_values(node) == []


@pytest.mark.parametrize("kind", [PROTOBUF, JSON])
def test_records_too_large_for_the_queue_are_a_partial_success(tmp_path: Path, kind: str) -> None:
    request = make_logs_request("small", "x" * 3000, "also small")
    body = request.SerializeToString()
    if kind == JSON:
        body = json_format.MessageToJson(request).encode()
    with open_node(tmp_path, max_event_bytes="1Ki") as node, run_web_input("otlp", node) as found:
        answer = post(f"http://{found.address}/v1/logs", body, kind)
        assert len(read_values(node)) == 2
        assert (found.counters.events, found.counters.invalid) == (2, 1)
    response = ExportLogsServiceResponse()
    if kind == JSON:
        json_format.Parse(answer.content, response)
    else:
        response.ParseFromString(answer.content)
    assert answer.status_code == 200
    assert response.partial_success.rejected_log_records == 1
    assert "1024 bytes" in response.partial_success.error_message


def test_rejected_metrics_are_counted_by_data_point(tmp_path: Path) -> None:
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="large")
    for number in range(300):
        metric.gauge.data_points.add(as_int=number)
    with open_node(tmp_path, max_event_bytes="1Ki") as node, run_web_input("otlp", node) as found:
        answer = post(f"http://{found.address}/v1/metrics", request.SerializeToString())
        assert read_values(node) == []
    response = ExportMetricsServiceResponse.FromString(answer.content)
    assert response.partial_success.rejected_data_points == 300


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"\xff\xff\xff", PROTOBUF),
        (b"\x0a\x05abc", PROTOBUF),
        (b"nonsense", JSON),
        (b"[]", JSON),
        (b'{"resourceLogs": 1}', JSON),
        (b'{"resourceLogs": [1]}', JSON),
        (b'{"resourceLogs": [{"scopeLogs": [{"logRecords": [{"traceId": "xyz"}]}]}]}', JSON),
        (b'{"resourceLogs": [{"schemaUrl": "\\ud800"}]}', JSON),
        (b'{"a":' * 50_000, JSON),
        (b"\xff", JSON),
    ],
)
def test_malformed_request_answers_400_with_a_status(
    url: str, node: Node, body: bytes, kind: str
) -> None:
    answer = post(f"{url}/v1/logs", body, kind)
    assert (answer.status_code, answer.headers["content-type"]) == (400, kind)
    if kind == JSON:
        assert answer.json()["code"] == 3
        assert "ExportLogsServiceRequest" in answer.json()["message"]
    else:
        found = Status.FromString(answer.content)
        assert found.code == 3
        assert "ExportLogsServiceRequest" in found.message
    assert read_values(node) == []


def test_other_types_paths_and_methods_are_refused(url: str) -> None:
    assert post(f"{url}/v1/logs", b"", "text/plain").status_code == 415
    assert post(f"{url}/v1/profiles", b"").status_code == 404
    assert WEB.get(f"{url}/v1/logs").status_code == 405
    assert post(f"{url}/v1/logs", b"", content_encoding="br").status_code == 415


def test_oversize_and_compression_bomb_bodies_are_refused(node: Node) -> None:
    with run_web_input(
        "otlp", node, max_request_bytes="100Ki", max_decompressed_bytes="1Mi"
    ) as found:
        url = f"http://{found.address}/v1/logs"
        bomb = gzip.compress(bytes(50_000_000))
        assert post(url, bomb, content_encoding="gzip").status_code == 413
        assert post(url, bytes(200_000)).status_code == 413
        assert post(url, b"not gzip", content_encoding="gzip").status_code == 400
        assert post(url, make_logs_request("x").SerializeToString()).status_code == 200


# ── pressure, tokens, TLS ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [PROTOBUF, JSON])
def test_full_queue_answers_429_with_retry_after(tmp_path: Path, kind: str) -> None:
    request = make_logs_request("x")
    body = request.SerializeToString()
    if kind == JSON:
        body = json_format.MessageToJson(request).encode()
    with open_node(tmp_path, size=1) as node, run_web_input("otlp", node, timeout=HASTY) as found:
        fill(node, 1)
        url = f"http://{found.address}/v1/logs"
        answer = post(url, body, kind)
        assert (answer.status_code, answer.headers["content-type"]) == (429, kind)
        assert int(answer.headers["retry-after"]) >= 1
        settle_all(node)
        wait_until(lambda: post(url, body, kind).status_code == 200, "recovery")


def test_failing_disk_and_closed_queue_answer_503_with_retry_after(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with open_node(tmp_path, disk) as node, run_web_input("otlp", node, timeout=HASTY) as found:
        url, body = f"http://{found.address}/v1/logs", make_logs_request("x").SerializeToString()
        disk.fail("sync", times=None)
        failed = post(url, body)
        disk.clear()
        wait_until(lambda: post(url, body).status_code == 200, "recovery")
        node.queue("main").close()
        closed = post(url, body)
    for answer in (failed, closed):
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert Status.FromString(answer.content).code == 14


def test_only_tokens_with_the_publish_right_are_accepted(node: Node) -> None:
    with run_web_input("otlp", node, tokens=TOKENS) as found:
        url = f"http://{found.address}/v1/logs"
        assert post(url, b"", authorization="Bearer guess").status_code == 401
        headers = {"authorization": f"Bearer {SECRET}"}
        with shut_down_after(OTLPLogExporter(url, headers=headers)) as exporter:
            assert exporter.export(make_log_records("x")) is LogRecordExportResult.SUCCESS
        with shut_down_after(OTLPLogExporter(url)) as exporter:
            assert exporter.export(make_log_records("y")) is LogRecordExportResult.FAILURE
    assert len(read_values(node)) == 1


def test_tls_settings_enable_https(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)  # requests would prefer it to `verify`
    certificates = Certificates(tmp_path)
    with run_web_input("otlp", node, tls=certificates.server_knob()) as found:
        url = f"https://{found.address}/v1/logs"
        with shut_down_after(
            OTLPLogExporter(url, certificate_file=str(certificates.ca))
        ) as exporter:
            assert exporter.export(make_log_records("x")) is LogRecordExportResult.SUCCESS


# ── fuzz ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        open_node(tmp_path_factory.mktemp("fuzz"), durability="never") as node,
        run_web_input("otlp", node, timeout="10s") as found,
    ):
        yield f"http://{found.address}"


NAMES = st.sampled_from(
    ["resourceLogs", "scopeLogs", "logRecords", "body", "traceId", "severityNumber", "resource",
     "attributes", "key", "value", "arrayValue", "values", "resourceSpans", "scopeSpans", "spans"]
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
NODES: Any = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4)
)


@given(
    body=st.binary(max_size=200)
    | NODES.map(lambda node: json.dumps(node).encode())
    | st.binary(max_size=50).map(lambda noise: make_logs_request("x").SerializeToString() + noise),
    kind=st.sampled_from([PROTOBUF, JSON]),
    signal=st.sampled_from(["logs", "metrics", "traces"]),
    encoding=st.sampled_from(["identity", "identity", "gzip"]),
)
def test_random_bytes_get_a_documented_answer(
    lasting: str, *, body: bytes, kind: str, signal: str, encoding: str
) -> None:
    answer = post(f"{lasting}/v1/{signal}", body, kind, content_encoding=encoding)
    assert answer.status_code in {200, 400}
    assert answer.headers["content-type"] == kind
    alive = make_logs_request("alive").SerializeToString()
    assert post(f"{lasting}/v1/logs", alive).status_code == 200
