"""Requests that no retry makes faster are refused for good: their senders must not repeat them."""

from __future__ import annotations

import grpc
import pytest

from tests.inputs.web_inputs import WEB, read_values, run_web_input
from turnlane.formats.otlp import MAX_RECORDS, encode_field
from turnlane.node.node import Node

PROTOBUF = "application/x-protobuf"
RESOURCES, SCOPES, RECORDS = b"\x0a", b"\x12", b"\x12"
EMPTY = 1_500_000


def wrap(scopes: bytes) -> bytes:
    return encode_field(RESOURCES, scopes)


@pytest.mark.parametrize(
    "body",
    [
        wrap(encode_field(SCOPES, (RECORDS + b"\0") * EMPTY)),
        wrap((SCOPES + b"\0") * EMPTY),
        (RESOURCES + b"\0") * EMPTY,
        wrap(encode_field(SCOPES, (RECORDS + b"\0") * (MAX_RECORDS // 2))) * 2,
    ],
    ids=["records", "scopes", "resources", "records in two resources"],
)
@pytest.mark.parametrize("split", ["record", "request"])
def test_otlp_request_with_too_many_empty_parts_is_refused_for_good(
    node: Node, body: bytes, split: str
) -> None:
    with run_web_input("otlp", node, split=split) as found:
        for signal in ("logs", "metrics", "traces"):
            url = f"http://{found.address}/v1/{signal}"
            answer = WEB.post(url, content=body, headers={"content-type": PROTOBUF})
            assert (answer.status_code, "retry-after" in answer.headers) == (413, False)
            assert b"send it in parts" in answer.content
        assert found.counters.invalid == 3
    assert read_values(node) == []


def test_otlp_message_with_too_many_empty_records_is_an_invalid_argument(node: Node) -> None:
    body = wrap(encode_field(SCOPES, (RECORDS + b"\0") * EMPTY))
    with (
        run_web_input("otlp_grpc", node) as found,
        grpc.insecure_channel(str(found.address)) as channel,
    ):
        export = channel.unary_unary("/opentelemetry.proto.collector.logs.v1.LogsService/Export")
        with pytest.raises(grpc.RpcError) as refused:
            export(body, timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert read_values(node) == []


def test_otlp_request_with_many_records_is_accepted(node: Node) -> None:
    body = wrap(encode_field(SCOPES, (RECORDS + b"\0") * 10_000))
    with run_web_input("otlp", node) as found:
        url = f"http://{found.address}/v1/logs"
        assert WEB.post(url, content=body, headers={"content-type": PROTOBUF}).status_code == 200
    assert len(read_values(node)) == 10_000


@pytest.mark.parametrize(
    ("kind", "path", "content_type", "body"),
    [
        ("http", "/", "application/json", b"[" + b"1," * 200_000 + b"1]"),
        ("elasticsearch", "/a/_bulk", "application/x-ndjson", b'{"index":{}}\n{}\n' * 50_000),
        (
            "otlp",
            "/v1/logs",
            "application/json",
            b'{"resourceLogs":[{"scopeLogs":[{"logRecords":[%b{}]}]}]}' % (b"{}," * 50_000),
        ),
    ],
    ids=["http", "elasticsearch", "otlp"],
)
def test_request_that_takes_longer_than_the_timeout_is_refused_for_good(
    node: Node, kind: str, path: str, content_type: str, body: bytes
) -> None:
    with run_web_input(kind, node, timeout="10ms") as found:
        url = f"http://{found.address}{path}"
        answer = WEB.post(url, content=body, headers={"content-type": content_type})
        assert (answer.status_code, "retry-after" in answer.headers) == (413, False)
        assert b"send it in parts" in answer.content
    assert read_values(node) == []
