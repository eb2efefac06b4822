"""Tests of access over HTTP: tokens, rights, TLS and web pages."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.certificates import Certificates
from tests.node.http_harness import HttpNode, serve_http
from turnlane.serving.auth import TlsSettings, TokenSettings

QUEUES: dict[str, dict[str, Any]] = {"web-1": {}, "db": {}}

TOKENS = tuple(
    TokenSettings.model_validate({"name": name, "secret": name * 3, "rights": rights} | more)
    for name, rights, more in (
        ("pub", {"web-*": ["publish"]}, {}),
        ("sub", {"web-*": ["read"]}, {}),
        ("adm", {"web-*": ["admin"]}, {}),
        ("all", {"*": ["publish", "read", "admin"]}, {}),
        ("old", {"*": ["publish", "read", "admin"]}, {"expires": datetime(2020, 1, 1, tzinfo=UTC)}),
    )
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpNode]:
    with serve_http(tmp_path_factory.mktemp("node"), QUEUES, tokens=TOKENS) as running:
        yield running


def send_request(
    at: HttpNode, token: str | None, method: str, path: str, **more: Any
) -> tuple[int, httpx.Response]:
    headers = {} if token is None else {"authorization": f"Bearer {token * 3}"}
    answer = at.http.request(method, path, headers=headers, **more)
    return answer.status_code, answer


OPERATIONS = [
    ("POST", "/queues/web-1/events", "pub"),
    ("GET", "/queues/web-1/events", "sub"),
    ("GET", "/queues/web-1/peek", "sub"),
    ("POST", "/queues/web-1/settle", "sub"),
    ("GET", "/queues/web-1", "sub"),
    ("GET", "/queues/web-1", "adm"),
    ("PUT", "/queues/web-1", "adm"),
    ("DELETE", "/queues/web-1", "adm"),
    ("GET", "/metrics", "all"),
    ("GET", "/queues", "pub"),
]


@pytest.mark.parametrize(("method", "path", "right"), OPERATIONS)
def test_every_operation_needs_a_valid_token_with_its_right(
    shared: HttpNode, method: str, path: str, right: str
) -> None:
    for token in (None, "wrong", "old"):
        status, answer = send_request(shared, token, method, path)
        assert (status, answer.headers["www-authenticate"]) == (401, "Bearer"), token
        assert "old" * 3 not in answer.text
    assert send_request(shared, right, method, path)[0] not in (401, 403)
    others = {"pub", "sub", "adm"} - {
        token for *what, token in OPERATIONS if what == [method, path]
    }
    for token in others if path != "/queues" else ():
        assert send_request(shared, token, method, path)[0] == 403, token


@pytest.mark.parametrize("path", ["/queues/db/events", "/queues/no-such-queue/events"])
def test_token_learns_nothing_about_other_queues(shared: HttpNode, path: str) -> None:
    assert send_request(shared, "pub", "POST", path)[0] == 403
    assert send_request(shared, "sub", "GET", path)[0] == 403


def test_list_has_only_the_queues_of_the_token(shared: HttpNode) -> None:
    for token, names in (("pub", ["web-1"]), ("all", ["db", "web-1"])):
        listed = send_request(shared, token, "GET", "/queues")[1].json()["queues"]
        assert [each["name"] for each in listed] == names


def test_lease_is_settled_only_with_the_right_on_its_queue(shared: HttpNode) -> None:
    send_request(shared, "all", "POST", "/queues/db/events", content=b"x")
    lease = send_request(shared, "all", "GET", "/queues/db/events")[1].json()["lease"]
    assert send_request(shared, None, "POST", f"/leases/{lease}/done")[0] == 401
    assert send_request(shared, None, "POST", "/leases/nope/done")[0] == 401
    assert send_request(shared, "sub", "POST", f"/leases/{lease}/done")[0] == 403
    assert send_request(shared, "all", "POST", f"/leases/{lease}/done")[0] == 204


def test_probe_without_a_token_learns_only_the_status(shared: HttpNode) -> None:
    for path in ("/healthz", "/readyz", "/openapi.json"):
        assert send_request(shared, None, "GET", path)[0] == 200
    shared.node.closing = True
    try:
        for token, reasons in ((None, []), ("all", ["the node is closing"])):
            status, answer = send_request(shared, token, "GET", "/readyz")
            assert (status, answer.json()["reasons"]) == (503, reasons)
    finally:
        shared.node.closing = False


def test_wrong_token_is_refused_before_the_body_is_read(shared: HttpNode) -> None:
    status, _ = send_request(
        shared, "wrong", "POST", "/queues/web-1/events", content=b"x" * 5_000_000
    )
    assert status == 401


@pytest.mark.parametrize("mutual", [False, True])
def test_http_plane_serves_tls(tmp_path: Path, mutual: bool) -> None:
    certificates = Certificates(tmp_path)
    tls = TlsSettings(**certificates.server_knob(mutual=mutual))
    context = certificates.client_context(certificates.client if mutual else None)
    with serve_http(tmp_path / "node", QUEUES, tls=tls, client={"verify": context}) as at:
        assert at.post(b"x", "db").json()["ack"] == "persisted"
        if mutual:
            stranger = certificates.client_context(certificates.stranger)
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{at.plane.url}/healthz", verify=stranger)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{at.plane.address}/healthz")


@pytest.fixture(scope="module")
def unguarded_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpNode]:
    """A node without tokens."""
    with serve_http(tmp_path_factory.mktemp("open")) as running:
        yield running


FOREIGN = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {
        "origin": "http://evil.example",
        "host": "evil.example",
    },  # a name that resolves to this machine
    {"host": "evil.example:8088"},
    {"sec-fetch-site": "cross-site"},
]


@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "settle"), ("POST", "events"), ("GET", "events")]
)
def test_web_page_cannot_use_a_node_without_tokens(
    unguarded_node: HttpNode, headers: dict[str, str], method: str, path: str
) -> None:
    """The browser sends its requests from the user's machine, like curl."""
    unguarded_node.post(b"x")
    before = unguarded_node.orders.stats().ledger
    answer = unguarded_node.http.request(
        method,
        f"/queues/orders/{path}",
        content=None if method == "GET" else b'{"first": 0, "end": 1000000}',
        headers={"content-type": "text/plain", **headers},
    )
    assert (answer.status_code, answer.json()["error"]) == (403, "NotAllowed")
    assert unguarded_node.orders.stats().ledger == before


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "127.9.9.9:80", "[::1]:8088"])
def test_names_of_this_machine_are_allowed(unguarded_node: HttpNode, host: str) -> None:
    own = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    assert unguarded_node.post(b"x", headers=own).status_code == 200
    assert unguarded_node.post(b"x", headers={"host": host}).status_code == 200


def test_web_page_with_a_token_is_allowed(shared: HttpNode) -> None:
    headers = {"authorization": "Bearer allallall", **FOREIGN[0]}
    assert shared.http.post("/queues/db/events", content=b"x", headers=headers).status_code == 200


def test_producers_of_different_tokens_are_independent(shared: HttpNode) -> None:
    """Otherwise another client could turn the next events of a producer into repeats."""

    def publish(token: str, sequence: int) -> dict[str, Any]:
        answer = shared.http.post(
            "/queues/web-1/events",
            content=b"x",
            headers={
                "authorization": f"Bearer {token * 3}",
                "producer-id": "web-1",
                "sequence": str(sequence),
            },
        )
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    assert publish("pub", 0)["accepted"] == 1
    assert publish("all", 10**9)["accepted"] == 1
    assert publish("pub", 1)["accepted"] == 1
    assert publish("pub", 1)["repeated"] == 1
