from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.trace.export import SpanExportResult

from tests.certificates import Certificates
from tests.contract.harness import PATIENCE, wait_until
from tests.inputs.otlp_senders import (
    make_log_records,
    make_logs_request,
    make_measurements,
    make_spans,
    parse_record,
    shut_down_after,
)
from tests.inputs.web_inputs import (
    HASTY,
    SECRET,
    TOKENS,
    act_when_refused,
    fill,
    make_input,
    open_node,
    read_events,
    read_values,
    run_web_input,
    settle_all,
)
from turnlane.errors import AddressTaken, ConfigError
from turnlane.inputs import otlp_grpc
from turnlane.inputs.otlp_grpc import parse_peer
from turnlane.inputs.publishers import THREADS
from turnlane.node.node import Node
from turnlane.serving.body_budget import BodyBudget
from turnlane.testing import FaultyDisk

LOGS = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"
GZIP = grpc.Compression.Gzip


@pytest.fixture
def address(node: Node) -> Iterator[str]:
    with run_web_input("otlp_grpc", node) as found:
        assert found.address is not None
        yield found.address


@contextmanager
def calling(address: str | None, method: str = LOGS) -> Iterator[Any]:
    """Return a method of the server that accepts and returns bytes."""
    with grpc.insecure_channel(str(address)) as channel:
        yield channel.unary_unary(method)


def is_taken(export: Any, body: bytes) -> bool:
    try:
        return bool(export(body) == b"")
    except grpc.RpcError:
        return False


def refusal_of(call: Any, body: bytes, **knobs: Any) -> Any:
    with pytest.raises(grpc.RpcError) as refused:
        call(body, timeout=30, **knobs)
    return refused.value


# ── the SDK's exporters ─────────────────────────────────────────────────────────────────────────


def test_sdk_exports_all_three_signals(address: str, node: Node) -> None:
    knobs: dict[str, Any] = {"endpoint": address, "insecure": True}
    with shut_down_after(OTLPLogExporter(**knobs, compression=GZIP)) as exporter:
        assert exporter.export(make_log_records("one", "two")) is LogRecordExportResult.SUCCESS
    with shut_down_after(OTLPMetricExporter(**knobs)) as exporter:
        assert exporter.export(make_measurements()) is MetricExportResult.SUCCESS
    with shut_down_after(OTLPSpanExporter(**knobs)) as exporter:
        assert exporter.export(make_spans()) is SpanExportResult.SUCCESS
    found = read_events(node)
    records = [parse_record(event) for event in found]
    assert [record.body.string_value for record in records[:2]] == ["one", "two"]
    assert [record.name for record in records[2:]] == ["orders", "stock", "inner", "outer"]
    assert [event.severity for event in found] == [3, 3, None, None, None, None]
    assert {event.source for event in found} == {"127.0.0.1"}


def test_sdk_retries_records_refused_by_a_full_queue(tmp_path: Path) -> None:
    with (
        open_node(tmp_path, size=2) as node,
        run_web_input("otlp_grpc", node, timeout=HASTY) as found,
    ):
        fill(node, 2)
        knobs: dict[str, Any] = {"endpoint": found.address, "insecure": True, "timeout": 30}
        with (
            act_when_refused(found, lambda: settle_all(node)),
            shut_down_after(OTLPLogExporter(**knobs)) as exporter,
        ):
            assert exporter.export(make_log_records("late")) is LogRecordExportResult.SUCCESS
        assert {parse_record(event).body.string_value for event in read_events(node)} == {"late"}


# ── refusals ────────────────────────────────────────────────────────────────────────────────────


def check_retry_info(refused: Any, code: grpc.StatusCode) -> None:
    """The refusal says when to retry, where the specification and the SDK look for it."""
    assert refused.code() is code
    trailers = dict(refused.trailing_metadata())
    found = Status.FromString(trailers["grpc-status-details-bin"])
    assert (found.code, found.message) == (code.value[0], refused.details())
    info = RetryInfo()
    assert found.details[0].Unpack(info)
    assert info.retry_delay.seconds >= 1
    assert RetryInfo.FromString(trailers["google.rpc.retryinfo-bin"]) == info


def test_full_queue_is_resource_exhausted_with_retry_info(tmp_path: Path) -> None:
    body = make_logs_request("x").SerializeToString()
    with (
        open_node(tmp_path, size=1) as node,
        run_web_input("otlp_grpc", node, timeout=HASTY) as found,
        calling(found.address) as export,
    ):
        fill(node, 1)
        check_retry_info(refusal_of(export, body), grpc.StatusCode.RESOURCE_EXHAUSTED)
        settle_all(node)
        wait_until(lambda: is_taken(export, body), "recovery")


def test_failing_disk_and_closed_queue_are_unavailable_with_retry_info(tmp_path: Path) -> None:
    body = make_logs_request("x" * 2**20).SerializeToString()
    disk = FaultyDisk()
    with (
        open_node(tmp_path, disk) as node,
        run_web_input("otlp_grpc", node, timeout=HASTY) as found,
        calling(found.address) as export,
    ):
        disk.fill()
        for _ in range(2):
            check_retry_info(refusal_of(export, body), grpc.StatusCode.UNAVAILABLE)
        disk.unfill()
        wait_until(lambda: is_taken(export, body), "recovery")
        node.queue("main").close()
        check_retry_info(refusal_of(export, body), grpc.StatusCode.UNAVAILABLE)


def test_dropped_queue_is_unavailable_until_it_is_recreated(node: Node) -> None:
    node.create("passing")
    body = make_logs_request("x").SerializeToString()
    with (
        run_web_input("otlp_grpc", node, queue="passing") as found,
        calling(found.address) as export,
    ):
        node.drop("passing")
        check_retry_info(refusal_of(export, body), grpc.StatusCode.UNAVAILABLE)
        node.create("passing")
        assert export(body) == b""


def test_records_too_large_for_the_queue_are_a_partial_success(tmp_path: Path) -> None:
    body = make_logs_request("small", "x" * 3000).SerializeToString()
    with (
        open_node(tmp_path, max_event_bytes="1Ki") as node,
        run_web_input("otlp_grpc", node) as found,
        calling(found.address) as export,
    ):
        response = ExportLogsServiceResponse.FromString(export(body))
        assert response.partial_success.rejected_log_records == 1
        assert len(read_values(node)) == 1


def test_malformed_request_is_an_invalid_argument(address: str, node: Node) -> None:
    with calling(address) as export:
        refused = refusal_of(export, b"\xff\xff\xff")
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "ExportLogsServiceRequest" in refused.details()
    assert read_values(node) == []


def test_other_methods_are_not_implemented(address: str) -> None:
    with calling(address, "/opentelemetry.proto.collector.logs.v1.LogsService/Import") as call:
        assert refusal_of(call, b"").code() is grpc.StatusCode.UNIMPLEMENTED


def test_oversize_and_compression_bomb_messages_are_refused(node: Node) -> None:
    with (
        run_web_input("otlp_grpc", node, max_message_bytes="1Mi") as found,
        calling(found.address) as export,
    ):
        for body, compression in ((bytes(50_000_000), GZIP), (bytes(2_000_000), None)):
            refused = refusal_of(export, body, compression=compression)
            assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in refused.details()
            # Without a time to retry: no exporter should send it again.
            assert "google.rpc.retryinfo-bin" not in dict(refused.trailing_metadata())
        assert export(make_logs_request("x").SerializeToString()) == b""


def test_only_tokens_with_the_publish_right_are_accepted(node: Node) -> None:
    with run_web_input("otlp_grpc", node, tokens=TOKENS) as found:
        knobs: dict[str, Any] = {"endpoint": found.address, "insecure": True}
        right = {"authorization": f"Bearer {SECRET}"}
        with shut_down_after(OTLPLogExporter(**knobs, headers=right)) as exporter:
            assert exporter.export(make_log_records("x")) is LogRecordExportResult.SUCCESS
        with calling(found.address) as export:
            for metadata in ((), (("authorization", "Bearer guess"),)):
                refused = refusal_of(export, b"", metadata=metadata)
                assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
    assert len(read_values(node)) == 1


RIGHT = (("authorization", f"Bearer {SECRET}"),)


@contextmanager
def silent_calls(address: str | None, count: int, metadata: Any = ()) -> Iterator[list[Any]]:
    """Start calls whose message never comes."""
    over = threading.Event()

    def nothing() -> Iterator[bytes]:
        over.wait()
        yield from ()

    with grpc.insecure_channel(str(address)) as channel:
        call = channel.stream_unary(LOGS)
        yield [call.future(nothing(), metadata=metadata) for _ in range(count)]
        over.set()


def codes_of(calls: list[Any]) -> set[grpc.StatusCode]:
    """Return the status codes of the calls."""
    return {call.exception(timeout=PATIENCE).code() for call in calls}


def test_silent_clients_without_a_token_do_not_delay_others(node: Node) -> None:
    """They are refused before a thread waits for their message."""
    with (
        run_web_input("otlp_grpc", node, tokens=TOKENS, body_timeout="1h") as found,
        silent_calls(found.address, THREADS) as calls,
        calling(found.address) as export,
    ):
        assert codes_of(calls) == {grpc.StatusCode.UNAUTHENTICATED}
        body = make_logs_request("x").SerializeToString()
        assert export(body, metadata=RIGHT, timeout=PATIENCE) == b""


def test_request_without_its_message_is_cancelled_after_body_timeout(node: Node) -> None:
    with (
        run_web_input("otlp_grpc", node, tokens=TOKENS, body_timeout=HASTY) as found,
        silent_calls(found.address, THREADS, RIGHT) as calls,
        calling(found.address) as export,
    ):
        assert codes_of(calls) == {grpc.StatusCode.CANCELLED}
        body = make_logs_request("x").SerializeToString()
        assert export(body, metadata=RIGHT, timeout=PATIENCE) == b""


@pytest.mark.parametrize(
    ("limit", "slow"), [(2**31, THREADS // 2), (128 * 2**20, 2)], ids=["2 GiB", "128 MiB"]
)
def test_silent_senders_never_block_all_threads(
    node: Node, monkeypatch: pytest.MonkeyPatch, limit: int, slow: int
) -> None:
    """With little memory for messages there are fewer that may arrive at a time."""
    monkeypatch.setattr(otlp_grpc, "SHORT_BODY_TIMEOUT", 0.1)
    node.body_budget = BodyBudget(limit)
    with (
        run_web_input(
            "otlp_grpc", node, tokens=TOKENS, body_timeout="1h", timeout=PATIENCE
        ) as found,
        silent_calls(found.address, THREADS, RIGHT) as calls,
        calling(found.address) as export,
    ):
        body = make_logs_request("x").SerializeToString()
        assert export(body, metadata=RIGHT, timeout=PATIENCE) == b""
        wait_until(
            lambda: len(cancelled(calls)) == THREADS - slow,
            "the others to be cut off",
        )
        assert {call.code() for call in cancelled(calls)} == {grpc.StatusCode.CANCELLED}


def cancelled(calls: list[Any]) -> list[Any]:
    return [call for call in calls if call.done()]


def test_newest_connections_over_the_limit_are_shut_down(node: Node) -> None:
    with (
        run_web_input("otlp_grpc", node, max_connections=1) as found,
        calling(found.address) as export,
    ):
        assert export(b"") == b""
        watch = getattr(found, "_watch")  # noqa: B009 - of this kind of input only
        wait_until(lambda: watch._known, "that it is the older one")
        host, _, port = str(found.address).rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE) as second:
            while second.recv(4096):  # HTTP/2 begins with settings
                pass
        assert export(b"", timeout=PATIENCE) == b""


def test_request_without_a_message_is_an_invalid_argument(address: str) -> None:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.stream_unary(LOGS)(iter(()), timeout=PATIENCE)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_tls_settings_enable_tls(node: Node, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    trusting = grpc.ssl_channel_credentials(certificates.ca.read_bytes())
    with run_web_input("otlp_grpc", node, tls=certificates.server_knob()) as found:
        knobs: dict[str, Any] = {"endpoint": found.address, "credentials": trusting}
        with shut_down_after(OTLPLogExporter(**knobs)) as exporter:
            assert exporter.export(make_log_records("x")) is LogRecordExportResult.SUCCESS
        with calling(found.address) as export:
            assert refusal_of(export, b"").code() is grpc.StatusCode.UNAVAILABLE


def test_client_ca_requires_client_certificates(node: Node, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    cert, key = (file.read_bytes() for file in certificates.client)
    ca = certificates.ca.read_bytes()
    with run_web_input("otlp_grpc", node, tls=certificates.server_knob(mutual=True)) as found:
        for credentials, welcome in (
            (grpc.ssl_channel_credentials(ca, key, cert), True),
            (grpc.ssl_channel_credentials(ca), False),
        ):
            with grpc.secure_channel(str(found.address), credentials) as channel:
                export = channel.unary_unary(LOGS)
                if welcome:
                    assert export(b"") == b""
                else:
                    assert refusal_of(export, b"").code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"queue": "absent"}, "queue: there is no queue 'absent'"),
        ({"listen": "0.0.0.0:0"}, "tls and tokens"),
        ({"tls": {"cert": "no.pem", "key": "no.pem"}}, "tls.cert: no.pem"),
    ],
)
def test_wrong_settings_are_reported_at_the_start(
    node: Node, knobs: dict[str, Any], named: str
) -> None:
    with make_input("otlp_grpc", node, **knobs) as found, pytest.raises(ConfigError, match=named):
        found.start()


def test_port_in_use_is_reported_at_the_start(node: Node, address: str) -> None:
    with (
        make_input("otlp_grpc", node, listen=address) as second,
        pytest.raises(AddressTaken, match="cannot listen"),
    ):
        second.start()


WITHOUT_EXTRAS = """
import sys
from turnlane.errors import ConfigError
from turnlane.inputs.api import load
for kind, gone in (("otlp", "opentelemetry.proto"), ("otlp_grpc", "grpc")):
    sys.modules[gone] = None
    try:
        load(kind)
    except ConfigError as error:
        print(error)
    del sys.modules[gone]
"""


def test_missing_extra_is_named_in_the_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert "pip install 'turnlane[otlp]'" in first
    assert "pip install 'turnlane[grpc]'" in second


def test_stopped_input_accepts_no_requests(node: Node) -> None:
    with run_web_input("otlp_grpc", node) as found, calling(found.address) as export:
        assert export(b"") == b""
        found.stop(1.0)
        assert refusal_of(export, b"").code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("peer", "source"),
    [
        ("ipv4:127.0.0.1:51200", "127.0.0.1"),
        ("ipv6:%5B::1%5D:51200", "::1"),
        ("ipv6:[::1]:51200", "::1"),
        ("ipv6:%5B::ffff:127.0.0.1%5D:51200", "127.0.0.1"),
        ("unix:/run/x", "unix:/run/x"),
    ],
)
def test_peer_is_reduced_to_its_address(peer: str, source: str) -> None:
    assert parse_peer(peer) == source


# ── fuzz ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with (
        open_node(tmp_path_factory.mktemp("fuzz"), durability="never") as node,
        run_web_input("otlp_grpc", node, timeout="10s") as found,
        calling(found.address) as export,
    ):
        yield export


@given(
    body=st.binary(max_size=200)
    | st.binary(max_size=50).map(lambda noise: make_logs_request("x").SerializeToString() + noise)
)
def test_random_bytes_get_a_documented_answer(lasting: Any, body: bytes) -> None:
    try:
        lasting(body)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT  # noqa: PT017 - or nothing at all
    assert lasting(make_logs_request("alive").SerializeToString()) == b""
