"""Tests of the HTTP plane with generated requests: every answer is in the document."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case
from schemathesis.specs.openapi import checks

from tests.node.http_harness import HttpNode, serve_http
from turnlane.node.http import describe_plane

DOCUMENTED = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
    checks.negative_data_rejection,
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpNode]:
    queues: dict[str, dict[str, Any]] = {"0": {"size": 1000, "full_behavior": "drop_oldest"}}
    with serve_http(tmp_path_factory.mktemp("node"), queues) as running:
        yield running


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as kept:
        yield kept


@schemathesis.serializer("application/x-ndjson")
def build_lines(_ctx: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


schema = schemathesis.openapi.from_dict(describe_plane())
# All boundaries of all schemas need ten times as many requests, so not in every run.
schema.config.phases.coverage.enabled = "CI" in os.environ


@schema.parametrize()
@settings(
    max_examples=15,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_in_the_document(
    case: Case[Any], shared: HttpNode, session: requests.Session
) -> None:
    if "queue" in (case.path_parameters or {}) and len(str(case.path_parameters["queue"])) > 3:
        case.path_parameters["queue"] = "0"  # otherwise nearly every queue would be unknown
    for wait in ("wait", "timeout"):
        if case.query and wait in case.query:
            case.query[wait] = "0"
    answer = case.call(base_url=shared.plane.url, session=session)
    assert answer.status_code < 500 or answer.status_code == 503
    case.validate_response(answer, checks=DOCUMENTED)


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE"]),
    path=st.text(st.characters(codec="ascii", min_codepoint=33), max_size=30),
    query=st.text(st.characters(codec="ascii", min_codepoint=33), max_size=30),
    headers=st.dictionaries(
        st.sampled_from(
            ["content-type", "content-encoding", "authorization", "producer-id", "sequence"]
        ),
        st.text(st.characters(codec="latin-1", categories=["L", "N", "P"]), max_size=20),
    ),
    body=st.binary(max_size=100),
)
def test_no_generated_request_is_a_server_error(
    shared: HttpNode, *, method: str, path: str, query: str, headers: dict[str, str], body: bytes
) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    place = (shared.plane.address.host, shared.plane.address.port)
    url = b"/queues/0/%b?%b" % (path.encode(), query.encode())
    with socket.create_connection(place, timeout=20) as sock:
        lines = [b"%b %b HTTP/1.1" % (method.encode(), url), b"host: x", b"connection: close"]
        lines += [b"%b: %b" % (name.encode(), value) for name, value in encoded.items()]
        sock.sendall(b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body]))
        status = sock.makefile("rb").readline().split()[1]
    assert status.startswith((b"2", b"4"))


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(junk=st.binary(min_size=1, max_size=300))
def test_bytes_that_are_not_http_do_no_harm(shared: HttpNode, junk: bytes) -> None:
    place = (shared.plane.address.host, shared.plane.address.port)
    with socket.create_connection(place, timeout=20) as sock:
        sock.sendall(junk + b"\r\n\r\n")
    assert shared.http.get("/healthz").status_code == 200
