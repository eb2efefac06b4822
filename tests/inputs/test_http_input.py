from __future__ import annotations

import gzip
import json
import socket
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from tests.certificates import Certificates
from tests.contract.harness import wait_until
from tests.inputs.web_inputs import (
    HASTY,
    SECRET,
    TOKENS,
    WEB,
    fill,
    make_input,
    open_node,
    read_events,
    read_values,
    run_web_input,
    settle_all,
)
from turnlane.errors import AddressTaken, ConfigError
from turnlane.inputs.http import Split, choose_split, get_source
from turnlane.inputs.publishers import THREADS
from turnlane.node.node import Node
from turnlane.testing import FaultyDisk


@pytest.fixture
def url(node: Node) -> Iterator[str]:
    with run_web_input("http", node, routes={"/orders/*": "orders"}) as found:
        yield f"http://{found.address}"


def post(url: str, body: bytes, kind: str | None = None, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    if kind is not None:
        named["content-type"] = kind
    return WEB.post(url, content=body, headers=named)


# ── events ───────────────────────────────────────────────────────────────────────


def test_forwarded_header_of_a_local_client_does_not_change_the_source(node: Node) -> None:
    forwarded = {"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https"}
    with run_web_input("http", node) as found:
        url = f"http://{found.address}/"
        assert WEB.post(url, content=b"x", headers=forwarded).status_code == 200
    (event,) = read_events(node)
    assert event.source == "127.0.0.1"


@pytest.mark.parametrize(
    ("kind", "body", "events"),
    [
        (None, b"a\nb", [b"a\nb"]),
        ("application/octet-stream", b"\x00\xff\n", [b"\x00\xff\n"]),
        ("application/x-www-form-urlencoded", b"a=1&b=2", [b"a=1&b=2"]),
        ("application/octet-stream", b"", [b""]),
        ("text/plain", b"a\r\n\nb\n", [b"a", b"b"]),
        ("text/plain; charset=utf-8", b"\n\r\n", []),
        ("application/x-ndjson", b'{"a": 1}\n{"a":2}', [b'{"a": 1}', b'{"a":2}']),
        ("application/json", b'{"a": [1, 2]}', [b'{"a": [1, 2]}']),
        ("application/json", b'[1.50, {"a":  2}, []]', [b"1.50", b'{"a":  2}', b"[]"]),
        ("application/json", b" [ ] ", []),
        ("application/cloudevents-batch+json", b'["x"]', [b'"x"']),
    ],
)
def test_body_is_split_by_its_content_type(
    url: str, node: Node, kind: str | None, body: bytes, events: list[bytes]
) -> None:
    answer = post(url, body, kind)
    assert (answer.status_code, answer.json()) == (200, {"events": len(events)})
    assert read_values(node) == events


@pytest.mark.parametrize(
    ("split", "events"),
    [("none", [b"[1,\n2]"]), ("lines", [b"[1,", b"2]"]), ("json", [b"1", b"2"])],
)
def test_split_setting_overrules_the_content_type(
    node: Node, split: str, events: list[bytes]
) -> None:
    with run_web_input("http", node, split=split) as found:
        post(f"http://{found.address}/", b"[1,\n2]", "text/plain").raise_for_status()
    assert read_values(node) == events


def test_routes_choose_the_queue_by_path(url: str, node: Node) -> None:
    for path in ("/orders/new", "/orders", "/", "/a/b%20c"):
        post(url + path, b"x").raise_for_status()
    paths = [(event.headers or {})["path"] for event in read_events(node)]
    assert paths == ["/orders", "/", "/a/b c"]
    assert [event.headers for event in read_events(node, "orders")] == [{"path": "/orders/new"}]


def test_event_has_key_listed_headers_and_source(node: Node) -> None:
    knobs: dict[str, Any] = {
        "keep_headers": ["X-Tenant", "X-Absent"], "key_header": "x-key", "key_query": "key",
    }  # fmt: skip
    with run_web_input("http", node, **knobs) as found:
        url = f"http://{found.address}/?key=from-query"
        post(url, b"1", "text/plain", X_Tenant="acme", X_Other="no").raise_for_status()
        post(url, b"2", "text/plain", X_Key="from-header").raise_for_status()
    first, second = read_events(node)
    assert first.headers == {"x-tenant": "acme", "path": "/"}
    assert (first.key, second.key) == ("from-query", "from-header")
    assert first.source == "127.0.0.1"


def test_status_204_answers_without_a_body(node: Node) -> None:
    with run_web_input("http", node, status=204) as found:
        answer = WEB.put(f"http://{found.address}/x", content=b"x")
    assert (answer.status_code, answer.content) == (204, b"")
    assert read_values(node) == [b"x"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_bodies_are_decompressed(url: str, node: Node, encoding: str) -> None:
    packed = gzip.compress(b"a\nb\n") if encoding == "gzip" else zlib.compress(b"a\nb\n")
    post(url, packed, "text/plain", content_encoding=encoding).raise_for_status()
    assert read_values(node) == [b"a", b"b"]


def test_curl_can_post_events(url: str, node: Node) -> None:
    command = ["curl", "-sS", "--fail", "-H", "content-type: application/json"]
    done = subprocess.run(
        [*command, "--data-binary", '[{"id": 1}, {"id": 2}]', f"{url}/orders/web"],
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout) == {"events": 2}
    assert read_values(node, "orders") == [b'{"id": 1}', b'{"id": 2}']


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        ("", Split.NONE),
        ("TEXT/Plain", Split.LINES),
        ("application/jsonl ; x=y", Split.LINES),
        ("application/problem+json", Split.JSON),
        ("image/png", Split.NONE),
    ],
)
def test_content_type_is_parsed_without_case_and_parameters(kind: str, split: Split) -> None:
    assert choose_split(kind) is split


# ── refusals ─────────────────────────────────────────────────────────────────────────────


def test_other_methods_are_refused(url: str) -> None:
    answer = WEB.get(url)
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == {"POST", "PUT"}


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"[1,", {"content_type": "application/json"}, 400),
        (b"\xff", {"content_type": "application/json"}, 400),
        (b"[" * 100_000, {"content_type": "application/json"}, 400),
        (b"not gzip", {"content_encoding": "gzip"}, 400),
        (gzip.compress(b"x" * 999, mtime=0)[:-9], {"content_encoding": "gzip"}, 400),
        (b"x", {"content_encoding": "br"}, 415),
    ],
)
def test_malformed_body_is_refused(
    url: str, node: Node, body: bytes, headers: dict[str, str], status: int
) -> None:
    assert post(url, body, **headers).status_code == status
    assert read_values(node) == []


def test_long_key_repeated_for_many_events_is_refused(node: Node) -> None:
    with run_web_input("http", node, key_header="x-key") as found:
        url = f"http://{found.address}"
        answer = post(url, b"a\n" * 10_000, "text/plain", x_key="k" * 50_000)
        assert answer.status_code == 413
        assert "in parts" in answer.json()["detail"]
        assert post(url, b"a\n" * 100, "text/plain", x_key="k" * 50_000).status_code == 200


def test_oversize_and_compression_bomb_bodies_are_refused(node: Node) -> None:
    bomb = gzip.compress(bytes(50_000_000))
    with run_web_input(
        "http", node, max_request_bytes="100Ki", max_decompressed_bytes="1Mi"
    ) as found:
        url = f"http://{found.address}/"
        assert post(url, bomb, content_encoding="gzip").status_code == 413
        assert post(url, bytes(200_000)).status_code == 413
        assert post(url, b"still there").status_code == 200
        assert found.counters.invalid == 2
    assert read_values(node) == [b"still there"]


def test_event_too_large_for_the_queue_refuses_the_whole_request(tmp_path: Path) -> None:
    with open_node(tmp_path, max_event_bytes="1Ki") as node, run_web_input("http", node) as found:
        url = f"http://{found.address}/"
        answer = post(url, b"small\n" + b"x" * 2000 + b"\n", "text/plain")
        assert (answer.status_code, answer.json()["error"]) == (413, "EventTooLarge")
        assert "1024 bytes" in answer.json()["detail"]
        assert read_values(node) == []


def test_only_tokens_with_the_publish_right_are_accepted(node: Node) -> None:
    with run_web_input("http", node, tokens=TOKENS, routes={"/orders": "orders"}) as found:
        url = f"http://{found.address}"
        right, wrong = f"Bearer {SECRET}", "Bearer guess"
        assert post(url, b"1").status_code == 401
        assert post(url, b"2", authorization=wrong).status_code == 401
        assert post(f"{url}/orders", b"3", authorization=right).status_code == 403
        assert post(url, b"4", authorization=right).status_code == 200
    assert read_values(node) == [b"4"]
    assert read_values(node, "orders") == []


@pytest.mark.parametrize("host", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_source_is_the_same_on_ipv4_and_ipv6_sockets(host: str) -> None:
    """A socket for all addresses shows IPv4 addresses in a special form."""
    assert get_source(Request({"type": "http", "client": (host, 51200)})) == "127.0.0.1"


def test_tls_settings_enable_https(node: Node, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    trusting = certificates.client_context()
    with run_web_input("http", node, tls=certificates.server_knob()) as found:
        url = f"https://{found.address}/"
        assert httpx.post(url, content=b"x", verify=trusting).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.post(url, content=b"y")
    assert read_values(node) == [b"x"]


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"queue": "absent"}, "queue: there is no queue 'absent'"),
        ({"routes": {"/a": "absent"}}, "routes./a: there is no queue 'absent'"),
        ({"listen": "0.0.0.0:0"}, "tls and tokens"),
    ],
)
def test_wrong_settings_are_reported_at_the_start(
    node: Node, knobs: dict[str, Any], named: str
) -> None:
    with make_input("http", node, **knobs) as found, pytest.raises(ConfigError, match=named):
        found.start()


def test_port_in_use_is_reported_at_the_start(node: Node) -> None:
    with (
        run_web_input("http", node) as first,
        make_input("http", node, listen=first.address) as second,
        pytest.raises(AddressTaken, match="cannot listen"),
    ):
        second.start()


def test_route_that_matches_no_path_is_refused(node: Node) -> None:
    with pytest.raises(ValueError, match="matches no path"):
        make_input("http", node, routes={"orders/*": "orders"})


# ── pressure and faults ─────────────────────────────────────────────────────────────────────────


def test_full_queue_answers_429_until_there_is_room(tmp_path: Path) -> None:
    with open_node(tmp_path, size=10) as node, run_web_input("http", node, timeout=HASTY) as found:
        url = f"http://{found.address}/"
        fill(node, 10)
        refused = post(url, b"x")
        assert (refused.status_code, refused.json()["error"]) == (429, "QueueFull")
        assert int(refused.headers["retry-after"]) >= 1
        assert found.counters.refused == 1
        settle_all(node)
        wait_until(lambda: post(url, b"y").status_code == 200, "recovery")
        assert set(read_values(node)) == {b"y"}
        assert found.counters.events == 1


def test_full_disk_answers_503_until_there_is_space(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with open_node(tmp_path, disk) as node, run_web_input("http", node, timeout=HASTY) as found:
        url = f"http://{found.address}/"
        wait_until(lambda: post(url, b"before").status_code == 200)
        disk.fill()
        refused = [post(url, b"x" * 2**20) for _ in range(3)]
        assert {answer.status_code for answer in refused} == {503}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        disk.unfill()
        wait_until(lambda: post(url, b"after").status_code == 200, "recovery")
        assert read_values(node)[0] == b"before"
        assert read_values(node)[-1] == b"after"


def test_answer_waits_until_events_are_on_disk(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with open_node(tmp_path, disk) as node, run_web_input("http", node, timeout=HASTY) as found:
        disk.fail("sync", times=None)
        assert post(f"http://{found.address}/", b"x").status_code == 503
        disk.clear()
        wait_until(lambda: post(f"http://{found.address}/", b"y").status_code == 200, "recovery")
    with open_node(tmp_path) as node:
        assert b"y" in read_values(node)


def test_closing_node_answers_503(node: Node) -> None:
    with run_web_input("http", node) as found:
        node.queue("main").close()
        answer = post(f"http://{found.address}/", b"x")
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)


def test_many_requests_for_a_full_queue_are_answered_in_time(tmp_path: Path) -> None:
    with open_node(tmp_path, size=1) as node, run_web_input("http", node, timeout="300ms") as found:
        fill(node, 1)
        url = f"http://{found.address}/"
        begun = time.monotonic()
        with ThreadPoolExecutor(150) as crowd:  # more than the input has threads
            answers = list(crowd.map(lambda _: post(url, b"x").status_code, range(150)))
        assert set(answers) <= {429, 503}
        assert time.monotonic() - begun < 30
        settle_all(node)
        wait_until(lambda: post(url, b"x").status_code == 200, "recovery")


def test_many_requests_for_a_full_queue_do_not_delay_another_queue(tmp_path: Path) -> None:
    routes = {"/orders/*": "orders"}
    with (
        open_node(tmp_path, size=1) as node,
        run_web_input("http", node, routes=routes) as found,
        ThreadPoolExecutor(THREADS) as crowd,
    ):
        fill(node, 1)
        main = node.queue("main")
        url = f"http://{found.address}"
        waiting = [crowd.submit(post, f"{url}/", b"x") for _ in range(THREADS)]
        wait_until(lambda: main.stats().blocked_publishers == THREADS, "the crowd")
        assert post(f"{url}/orders/1", b"y").status_code == 200
        main.close()
        assert {each.result().status_code for each in waiting} == {503}


def test_dropped_queue_answers_503_until_it_is_recreated(node: Node) -> None:
    """If the answer were 404, senders would drop their events."""
    node.create("passing")
    with run_web_input("http", node, queue="passing") as found:
        url = f"http://{found.address}/"
        node.drop("passing")
        answer = post(url, b"x")
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        node.create("passing")
        assert post(url, b"x").status_code == 200


def test_stop_answers_accepted_requests(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with open_node(tmp_path, disk) as node, make_input("http", node) as found:
        found.start()
        url = f"http://{found.address}/"
        disk.delay("sync", seconds=0.3)
        answers: list[int] = []
        sender = threading.Thread(target=lambda: answers.append(post(url, b"x").status_code))
        sender.start()
        wait_until(lambda: node.queue("main").end == 1, "publishing")
        found.stop(10.0)
        sender.join()
        assert answers == [200]
        assert read_values(node) == [b"x"]
        with pytest.raises(httpx.ConnectError):
            post(url, b"y")


def test_close_never_answers_500(tmp_path: Path) -> None:
    with open_node(tmp_path, size=1) as node, make_input("http", node, timeout="2s") as found:
        found.start()
        fill(node, 1)
        url = f"http://{found.address}/"

        def told(_: int) -> int | None:
            try:
                return post(url, b"x").status_code
            except httpx.TransportError:
                return None

        with ThreadPoolExecutor(8) as crowd:
            answers = crowd.map(told, range(8))
            wait_until(lambda: node.queue("main").stats().blocked_publishers == 8, "a crowd")
            found.close()
            assert set(answers) <= {503, None}


def test_request_is_answered_without_nagle_delay(node: Node) -> None:
    with run_web_input("http", node, ack="accepted") as found, httpx.Client() as client:
        answers = [client.post(f"http://{found.address}/", content=b"x") for _ in range(30)]
    # On one connection, Nagle's delay alone would be 40 ms for each request.
    assert min(answer.elapsed.total_seconds() for answer in answers) < 0.035


def test_client_disconnect_does_not_affect_others(url: str, node: Node) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as rude:
        rude.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf")
    assert post(url, b"x").status_code == 200
    assert read_values(node) == [b"x"]


# ── fuzz ────────────────────────────────────────────────────────────────────────────────────────

KINDS = ["application/json", "application/x-ndjson", "text/plain", "application/octet-stream"]
TEXT = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        open_node(tmp_path_factory.mktemp("fuzz"), durability="never") as node,
        run_web_input("http", node, timeout="10s", key_header="x-key") as found,
    ):
        yield f"http://{found.address}"


@given(
    body=st.binary(max_size=300) | st.text(st.sampled_from('[]{}",:1 \n\\u'), max_size=60),
    kind=st.sampled_from(KINDS) | TEXT,
    encoding=st.sampled_from(["identity", "gzip", "deflate"]) | TEXT,
    key=TEXT,
    path=st.text(max_size=20).map(quote),
)
def test_random_request_gets_a_documented_answer(
    lasting: str, *, body: bytes | str, kind: str, encoding: str, key: str, path: str
) -> None:
    headers = {"content-type": kind, "content-encoding": encoding, "x-key": key}
    answer = WEB.post(f"{lasting}/{path}", content=body, headers=headers)
    assert answer.status_code in {
        200,
        400,
        404,
        415,
    }  # 404: a path with a line break matches no route
    assert WEB.post(lasting, content=b"alive").status_code == 200


@given(garbage=st.binary(min_size=1, max_size=200))
def test_bytes_that_are_not_http_do_not_affect_others(lasting: str, garbage: bytes) -> None:
    host, _, port = lasting.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as rude:
        rude.sendall(garbage)
    assert WEB.post(lasting, content=b"alive").status_code == 200
