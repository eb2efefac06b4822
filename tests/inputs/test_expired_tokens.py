"""Expired tokens are refused by every input with tokens; valid ones are accepted."""

from __future__ import annotations

import json

import grpc
import pytest

from tests.inputs.otlp_senders import make_logs_request
from tests.inputs.web_inputs import WEB, read_values, run_web_input
from turnlane.node.node import Node

RIGHTS = {"main": ["publish"]}
TOKENS = (
    {"name": "old", "secret": "old", "rights": RIGHTS, "expires": "2020-01-01T00:00:00Z"},
    {"name": "new", "secret": "new", "rights": RIGHTS, "expires": "2999-01-01T00:00:00Z"},
)
EXPORT = make_logs_request("x").SerializeToString()
BULK = json.dumps({"index": {"_index": "a"}}) + "\n{}\n"
REQUESTS = {
    "http": ("", "text/plain", b"x"),
    "otlp": ("v1/logs", "application/x-protobuf", EXPORT),
    "elasticsearch": ("_bulk", "application/x-ndjson", BULK.encode()),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_expired_token_is_refused_over_http(node: Node, kind: str) -> None:
    path, content_type, body = REQUESTS[kind]

    def status(secret: str) -> int:
        headers = {"content-type": content_type, "authorization": f"Bearer {secret}"}
        url = f"http://{found.address}/{path}"
        return WEB.post(url, content=body, headers=headers).status_code

    with run_web_input(kind, node, tokens=TOKENS) as found:
        assert status("old") == 401
        assert read_values(node) == []
        assert status("new") == 200
    assert len(read_values(node)) == 1


def test_expired_token_is_refused_over_grpc(node: Node) -> None:
    method = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"
    with (
        run_web_input("otlp_grpc", node, tokens=TOKENS) as found,
        grpc.insecure_channel(str(found.address)) as channel,
    ):
        export = channel.unary_unary(method)
        with pytest.raises(grpc.RpcError) as refused:
            export(EXPORT, metadata=(("authorization", "Bearer old"),), timeout=30)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert read_values(node) == []
        assert export(EXPORT, metadata=(("authorization", "Bearer new"),), timeout=30) == b""
    assert len(read_values(node)) == 1
