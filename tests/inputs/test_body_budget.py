"""Tests of the memory for the bodies of HTTP requests, which all listeners of a node share."""

from __future__ import annotations

import contextlib
import gzip
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.contract.harness import wait_until
from tests.inputs.otlp_senders import make_logs_request
from tests.inputs.web_inputs import WEB, read_values, run_web_input
from turnlane.config import loads
from turnlane.errors import TransportDown
from turnlane.inputs.api import Input
from turnlane.node.http import HttpPlane
from turnlane.node.node import Node
from turnlane.service import Service
from turnlane.serving.auth import Authority
from turnlane.serving.body_budget import BodyBudget
from turnlane.serving.http_server import WebSettings

SENDERS = 1000
SENT = 256 * 1024
LIMIT = 32 * 2**20


@pytest.fixture
def small_node(node: Node) -> Node:
    """A node with little memory for bodies."""
    node.body_budget = BodyBudget(LIMIT)
    return node


@contextlib.contextmanager
def run_listeners(node: Node) -> Iterator[dict[str, str]]:
    """Run all kinds of HTTP listeners; return where each takes a body."""
    knobs: dict[str, Any] = {"listen": "127.0.0.1:0", "idle_timeout": "10m"}
    with contextlib.ExitStack() as stack:
        plane = HttpPlane(node, Authority(), WebSettings(**knobs))
        stack.enter_context(plane.start())
        paths = {"http": "/", "otlp": "/v1/logs", "elasticsearch": "/_bulk"}
        inputs: dict[str, Input] = {
            kind: stack.enter_context(run_web_input(kind, node, **knobs)) for kind in paths
        }
        urls = {kind: f"http://{each.address}{paths[kind]}" for kind, each in inputs.items()}
        yield {"plane": f"{plane.url}/queues/main/events", **urls}


def begin_request(url: str, sent: int, declared: int) -> socket.socket:
    """Send the headers of a request and a part of its body."""
    at = httpx.URL(url)
    sock = socket.create_connection((at.host, at.port), timeout=30)
    head = (
        f"POST {at.path} HTTP/1.1\r\nhost: {at.host}\r\ncontent-length: {declared}\r\n"
        "content-type: application/x-protobuf\r\n\r\n"
    )
    sock.sendall(head.encode() + bytes(sent))
    return sock


def find_answered(socks: list[socket.socket]) -> list[socket.socket]:
    poll = select.poll()
    by_number = {sock.fileno(): sock for sock in socks}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(0)]


def get_resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def test_thousand_slow_senders_use_no_more_memory_than_the_node_allows(small_node: Node) -> None:
    """They send 250 MiB together and never finish; without a limit the node keeps it all."""
    budget = small_node.body_budget
    with run_listeners(small_node) as urls, contextlib.ExitStack() as stack:
        places = list(urls.values())
        before = get_resident_bytes()
        socks = [
            stack.enter_context(begin_request(places[number % len(places)], SENT, 2 * SENT))
            for number in range(SENDERS)
        ]
        most = LIMIT // SENT
        wait_until(lambda: len(find_answered(socks)) >= SENDERS - most, "refusals")
        assert get_resident_bytes() - before < 4 * LIMIT
        assert 0 < budget.used <= LIMIT
        answered = find_answered(socks)
        for sock in answered:
            answer = sock.recv(65536).lower()
            assert answer.startswith(b"http/1.1 503")
            assert b"\r\nretry-after: 1\r\n" in answer
        assert WEB.get(str(httpx.URL(urls["plane"]).copy_with(path="/healthz"))).status_code == 200
        # A refused sender can finish its body on the same connection, and then send again.
        stack.pop_all()
        for sock in socks:
            if sock is not answered[0]:
                sock.close()
        wait_until(lambda: budget.used == 0, "all memory is free")
        with answered[0] as sock:
            sock.sendall(bytes(SENT))
            sock.sendall(b"GET /none HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert sock.recv(65536).startswith(b"HTTP/1.1 ")
        assert WEB.post(urls["http"], content=b"x").status_code == 200
    assert read_values(small_node) == [b"x"]


def test_decompressed_bytes_count_until_the_answer(node: Node) -> None:
    node.body_budget = BodyBudget(2**20)
    body = gzip.compress(bytes(2 * 2**20))
    with run_listeners(node) as urls, begin_request(urls["plane"], 1000, 2000):
        wait_until(lambda: node.body_budget.used == 1000, "the first body")
        answer = WEB.post(urls["http"], content=body, headers={"content-encoding": "gzip"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "node.http.max_memory" in answer.json()["detail"]
        wait_until(lambda: node.body_budget.used == 1000, "the memory is free again")


def test_body_larger_than_the_budget_is_accepted_if_it_is_the_only_one(node: Node) -> None:
    node.body_budget = BodyBudget(1000)
    with run_web_input("http", node) as found:
        for _ in range(2):
            answer = WEB.post(f"http://{found.address}", content=bytes(100_000))
            assert answer.status_code == 200
        wait_until(lambda: node.body_budget.used == 0, "all memory is free")


def test_messages_over_grpc_count_until_the_answer(node: Node) -> None:
    node.body_budget = BodyBudget(1000)
    body = make_logs_request("x" * 500).SerializeToString()
    with (
        run_listeners(node) as urls,
        run_web_input("otlp_grpc", node) as found,
        grpc.insecure_channel(str(found.address)) as channel,
    ):
        export = channel.unary_unary("/opentelemetry.proto.collector.logs.v1.LogsService/Export")
        with begin_request(urls["plane"], 900, 2000):
            wait_until(lambda: node.body_budget.used == 900, "the body over HTTP")
            with pytest.raises(grpc.RpcError) as refused:
                export(body, timeout=30)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "node.http.max_memory" in refused.value.details()
            assert node.body_budget.used == 900
        wait_until(lambda: node.body_budget.used == 0, "all memory is free")
        assert export(body, timeout=30) == b""
        wait_until(lambda: node.body_budget.used == 0, "all memory is free again")
    assert len(read_values(node)) == 1


def test_share_that_is_refused_takes_nothing() -> None:
    budget = BodyBudget(100)
    with budget.open_share() as first, budget.open_share() as second:
        first.add(60)
        with pytest.raises(TransportDown):
            second.add(41)
        second.add(40)
        assert budget.used == 100
    assert budget.used == 0


def test_setting_limits_all_listeners_of_a_service(tmp_path: Path) -> None:
    text = f"""
    node:
      data: {tmp_path}
      flight: {{enabled: false}}
      http: {{listen: "127.0.0.1:0", max_memory: 1Mi}}
    queues: {{main: {{}}}}
    """
    with Service(loads(text)).start() as service:
        assert service.node.body_budget.limit == 2**20
    assert BodyBudget().limit > 2**20
