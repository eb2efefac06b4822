"""Balancers in front of inputs: the PROXY header gives the source, and is never an event."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.certificates import Certificates
from tests.contract.harness import wait_until
from tests.inputs.syslog_harness import (
    ANYWHERE,
    await_events,
    connect_to,
    find_program,
    get_port,
    make_tls_settings,
    run_syslog,
)
from tests.inputs.web_inputs import read_events, run_web_input
from tests.ports import free_port
from turnlane.inputs.api import Input
from turnlane.inputs.syslog import SyslogInput
from turnlane.node.node import Node
from turnlane.serving.proxy_header import InvalidProxyHeader, ProxyHeader, parse_proxy_header

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"


def make_v2(command: int, family: int, rest: bytes) -> bytes:
    return SIGNATURE + struct.pack("!BBH", command, family, len(rest)) + rest


def pack_v4(host: str, port: int) -> bytes:
    return socket.inet_aton(host) + socket.inet_aton("192.0.2.1") + struct.pack("!HH", port, 514)


IPV6 = socket.inet_pton(socket.AF_INET6, "2001:db8::7") + bytes(16) + struct.pack("!HH", 4711, 514)
MAPPED = socket.inet_pton(socket.AF_INET6, "::ffff:1.2.3.4") + bytes(16) + bytes(4)
EXTENSION = b"\x04\x00\x03abc"
HEADERS: dict[bytes, tuple[str, int] | None] = {
    b"PROXY TCP4 203.0.113.9 192.0.2.1 4711 514\r\n": ("203.0.113.9", 4711),
    b"PROXY TCP6 2001:db8::7 ::1 4711 514\r\n": ("2001:db8::7", 4711),
    b"PROXY TCP6 ::ffff:1.2.3.4 ::1 1 2\r\n": ("1.2.3.4", 1),
    b"PROXY UNKNOWN\r\n": None,
    b"PROXY UNKNOWN ffff::1 ffff::2 65535 65535\r\n": None,
    make_v2(0x21, 0x11, pack_v4("203.0.113.9", 4711)): ("203.0.113.9", 4711),
    make_v2(0x21, 0x11, pack_v4("203.0.113.9", 1) + EXTENSION): ("203.0.113.9", 1),
    make_v2(0x21, 0x21, IPV6): ("2001:db8::7", 4711),
    make_v2(0x21, 0x21, MAPPED): ("1.2.3.4", 0),
    make_v2(0x21, 0x31, bytes(216)): None,
    make_v2(0x21, 0x00, b""): None,
    make_v2(0x20, 0x00, b""): None,
    make_v2(0x20, 0x11, pack_v4("203.0.113.9", 1)): None,
}
BAD_HEADERS = [
    b"<13>no header\n",
    b"\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    b"PROXYTCP4 1.2.3.4 1.2.3.4 1 2\r\n",
    b"PROXY TCP4 1.2.3.4 1.2.3.4 1\r\n",
    b"PROXY TCP4 1.2.3.4 ::1 1 2\r\n",
    b"PROXY TCP4 1.2.3.4.5 1.2.3.4 1 2\r\n",
    b"PROXY TCP5 1.2.3.4 1.2.3.4 1 2\r\n",
    b"PROXY TCP4 1.2.3.4 1.2.3.4 1 65536\r\n",
    b"PROXY TCP4 1.2.3.4 1.2.3.4 one 2\r\n",
    b"PROXY TCP4 \xff 1.2.3.4 1 2\r\n",
    b"PROXY " + b"x" * 200,
    make_v2(0x11, 0x11, pack_v4("1.2.3.4", 1)),
    make_v2(0x22, 0x11, pack_v4("1.2.3.4", 1)),
    make_v2(0x21, 0x11, b"short"),
    make_v2(0x21, 0x41, bytes(40)),
    make_v2(0x21, 0x11, bytes(5_000)),
]


# ── the header ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("header", HEADERS)
def test_header_gives_the_client_and_its_own_size(header: bytes) -> None:
    found = ProxyHeader(len(header), HEADERS[header])
    assert parse_proxy_header(header) == found
    assert parse_proxy_header(header + b"<13>and more\r\n") == found
    assert {parse_proxy_header(header[:end]) for end in range(len(header))} == {None}


@pytest.mark.parametrize("header", BAD_HEADERS)
def test_bad_header_is_refused(header: bytes) -> None:
    with pytest.raises(InvalidProxyHeader):
        parse_proxy_header(header)


@given(
    st.sampled_from([b"", b"PROXY ", b"PROXY TCP4 ", SIGNATURE, SIGNATURE + b"\x21\x11"]),
    st.binary(),
)
def test_any_bytes_are_a_header_or_refused(start: bytes, rest: bytes) -> None:
    with contextlib.suppress(InvalidProxyHeader):
        header = parse_proxy_header(start + rest)
        assert header is None or header.size <= len(start + rest)


# ── syslog ──────────────────────────────────────────────────────────────────────────────────────


def connect_behind_proxy(
    found: SyslogInput, way: str, header: bytes, certificates: Certificates
) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", get_port(found, way)), timeout=20)
    client.sendall(header)
    if way == "tcp":
        return client
    return certificates.client_context().wrap_socket(client, server_hostname="127.0.0.1")


@contextlib.contextmanager
def run_proxied(host: Node, certificates: Certificates, **knobs: Any) -> Iterator[SyslogInput]:
    tls = make_tls_settings(certificates, mutual=False)
    knobs = {"tcp": ANYWHERE, "tls": tls, "proxy_protocol": True, **knobs}
    with run_syslog(host, **knobs) as found:
        yield found


@pytest.mark.parametrize("way", ["tcp", "tls"])
@pytest.mark.parametrize("header", HEADERS)
def test_header_gives_the_source_of_events(
    host: Node, certificates: Certificates, way: str, header: bytes
) -> None:
    client = HEADERS[header]
    with (
        run_proxied(host, certificates) as found,
        connect_behind_proxy(found, way, header, certificates) as sender,
    ):
        sender.sendall(b"<13>one\n<13>two\n")
        events = await_events(host.queue("main"), 2)
        assert [event.value for event in events] == [b"<13>one", b"<13>two"]
        assert {event.source for event in events} == {client[0] if client else "127.0.0.1"}
        assert found.counters.invalid == 0


def test_header_that_arrives_byte_by_byte_gives_the_source(
    host: Node, certificates: Certificates
) -> None:
    header = make_v2(0x21, 0x11, pack_v4("203.0.113.9", 4711) + EXTENSION)
    with run_proxied(host, certificates) as found, connect_to(found) as sender:
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for octet in header + b"<13>one\n":
            sender.sendall(bytes([octet]))
        [event] = await_events(host.queue("main"), 1)
        assert (event.value, event.source) == (b"<13>one", "203.0.113.9")


@pytest.mark.parametrize("way", ["tcp", "tls"])
@pytest.mark.parametrize(
    "sent", [b"<13>no header\n", b"PROXY TCP4 1.2.3.4 nonsense 1 2\r\n<13>x\n"]
)
def test_connection_without_a_valid_header_is_closed_and_logged(
    host: Node, certificates: Certificates, caplog: pytest.LogCaptureFixture, way: str, sent: bytes
) -> None:
    with run_proxied(host, certificates) as found:
        with socket.create_connection(("127.0.0.1", get_port(found, way)), timeout=20) as sender:
            sender.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                assert sender.recv(1) == b""
        assert found.counters.invalid_reasons == {"proxy_header": 1}
        wait_until(lambda: found.counters.connections == 0)
        assert host.queue("main").end == 0
    assert caplog.text.count("input.connection_invalid") == 1


def test_connection_without_any_byte_is_closed_without_a_log(
    host: Node, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    with run_proxied(host, certificates) as found:
        with connect_to(found):
            wait_until(lambda: found.counters.connections == 1)
        wait_until(lambda: found.counters.connections == 0)
        assert (found.counters.invalid, found.counters.refused) == (0, 0)
    assert not caplog.records


@pytest.mark.parametrize("sent", [b"", b"PROXY TCP4 "])
def test_header_that_does_not_come_in_time_closes_the_connection(
    host: Node, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("turnlane.inputs.stream_server.HEADER_SECONDS", 0.1)
    with run_proxied(host, certificates) as found, connect_to(found) as sender:
        sender.sendall(sent)
        assert sender.recv(1) == b""
        assert found.counters.refused == 1


@pytest.mark.parametrize("way", ["tcp", "tls"])
@pytest.mark.parametrize("header", [next(iter(HEADERS)), make_v2(0x20, 0x00, b"")])
def test_header_without_the_setting_is_refused_with_a_hint(
    host: Node,
    certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
    way: str,
    header: bytes,
) -> None:
    with run_proxied(host, certificates, proxy_protocol=False) as found:
        with socket.create_connection(("127.0.0.1", get_port(found, way)), timeout=20) as sender:
            sender.sendall(header + b"<13>one\n")
            with contextlib.suppress(ConnectionResetError):
                assert sender.recv(1) == b""
        assert found.counters.invalid_reasons == {"proxy_header": 1}
        assert host.queue("main").end == 0
    assert "set `proxy_protocol: true`" in caplog.text


# ── HTTP ────────────────────────────────────────────────────────────────────────────────────────


def get_web_port(found: Input) -> int:
    return int(str(found.address).rpartition(":")[2])


def post_behind_proxy(found: Input, header: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """Post two events on one connection; return the answers."""
    request = b"POST /?queue=main HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n"
    with socket.create_connection(("127.0.0.1", get_web_port(found)), timeout=20) as plain:
        # In one segment with the header: the request must not be taken for a part of it.
        first = request + b"\r\none"
        plain.sendall(header if tls else header + first)
        client = tls.wrap_socket(plain, server_hostname="127.0.0.1") if tls else plain
        with client:
            client.sendall((first if tls else b"") + request + b"connection: close\r\n\r\ntwo")
            answers = b""
            while received := client.recv(65_536):
                answers += received
            return answers


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("header", [*HEADERS][:2] + [*HEADERS][5:6] + [*HEADERS][-2:])
def test_header_before_http_gives_the_source(
    node: Node, certificates: Certificates, header: bytes, *, secure: bool
) -> None:
    client = HEADERS[header]
    knobs: dict[str, Any] = {"tls": certificates.server_knob()} if secure else {}
    with run_web_input("http", node, proxy_protocol=True, **knobs) as found:
        tls = certificates.client_context() if secure else None
        assert post_behind_proxy(found, header, tls).count(b"HTTP/1.1 200") == 2
        events = read_events(node)
        assert [event.value for event in events] == [b"one", b"two"]
        assert {event.source for event in events} == {client[0] if client else "127.0.0.1"}


@pytest.mark.parametrize("kind", ["http", "elasticsearch", "otlp"])
def test_http_without_the_header_is_closed_and_logged(
    node: Node, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with run_web_input(kind, node, proxy_protocol=True) as found:
        with pytest.raises(httpx.TransportError):
            httpx.post(f"http://127.0.0.1:{get_web_port(found)}/", content=b"one", timeout=20)
        wait_until(lambda: "web.connection_invalid" in caplog.text)
        assert read_events(node) == []
    assert "does not begin with a PROXY header" in caplog.text


def test_http_header_that_does_not_come_in_time_closes_the_connection(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("turnlane.serving.http_server.HEADER_SECONDS", 0.1)
    with run_web_input("http", node, proxy_protocol=True) as found:
        there = ("127.0.0.1", get_web_port(found))
        with socket.create_connection(there, timeout=20) as client:
            client.sendall(b"PROXY TCP4")
            assert client.recv(1) == b""
    assert "no PROXY header within 0.1 seconds" in caplog.text


def test_http_header_without_the_setting_is_refused_with_a_hint(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    with run_web_input("http", node) as found:
        answer = post_behind_proxy(found, next(iter(HEADERS)))
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"proxy_protocol: true" in answer
        assert read_events(node) == []
    assert "proxy_protocol: true" in caplog.text


def test_http_server_with_unfinished_headers_stops(node: Node) -> None:
    with contextlib.ExitStack() as clients:
        with run_web_input("http", node, proxy_protocol=True) as found:
            for _ in range(5):
                there = ("127.0.0.1", get_web_port(found))
                client = clients.enter_context(socket.create_connection(there, timeout=20))
                client.sendall(b"PROXY TCP4")
            assert b"HTTP/1.1 200" in post_behind_proxy(found, next(iter(HEADERS)))
        assert client.recv(1) == b""


def test_http_connections_above_the_limit_are_closed_while_headers_are_missing(node: Node) -> None:
    with (
        contextlib.ExitStack() as clients,
        run_web_input("http", node, proxy_protocol=True, max_connections=3) as found,
    ):
        there = ("127.0.0.1", get_web_port(found))
        waiting = [
            clients.enter_context(socket.create_connection(there, timeout=20)) for _ in range(3)
        ]
        with socket.create_connection(there, timeout=20) as another:
            assert another.recv(1) == b""
        for client in waiting:
            client.close()
        wait_until(lambda: _is_answered(found))


def _is_answered(found: Input) -> bool:
    try:
        return b"HTTP/1.1 200" in post_behind_proxy(found, next(iter(HEADERS)))
    except ConnectionError:
        return False


# ── a real balancer ─────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def run_haproxy(place: Path, target: int, mode: str, send: str) -> Iterator[int]:
    """Run HAProxy in front of a port, and yield its own port."""
    port = free_port()
    config = place / "haproxy.cfg"
    config.write_text(f"""
        global
            maxconn 100
        defaults
            mode {mode}
            timeout connect 20s
            timeout client 60s
            timeout server 60s
        frontend front
            bind 127.0.0.1:{port}
            default_backend back
        backend back
            server node 127.0.0.1:{target} {send} check check-send-proxy inter 100ms
""")
    with (place / "said").open("wb") as said:
        balancer = subprocess.Popen(
            [find_program("haproxy"), "-db", "-f", config], stdout=said, stderr=said
        )
    try:
        wait_until(lambda: _is_listening(port) or balancer.poll() is not None, "HAProxy", 60)
        assert balancer.poll() is None, (place / "said").read_text()
        yield port
    finally:
        balancer.terminate()
        balancer.wait(60)


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("version", ["send-proxy", "send-proxy-v2"])
def test_events_behind_haproxy_have_the_source_of_their_client(
    host: Node, certificates: Certificates, tmp_path: Path, version: str
) -> None:
    with (
        run_proxied(host, certificates) as found,
        run_haproxy(tmp_path, get_port(found), "tcp", version) as port,
        socket.create_connection(
            ("127.0.0.1", port), timeout=20, source_address=("127.0.0.77", 0)
        ) as client,
    ):
        client.sendall(b"<13>through the balancer\n")
        [event] = await_events(host.queue("main"), 1)
        assert (event.value, event.source) == (b"<13>through the balancer", "127.0.0.77")
        assert found.counters.invalid == 0


@pytest.mark.parametrize("version", ["send-proxy", "send-proxy-v2"])
def test_requests_behind_haproxy_have_the_source_of_their_client(
    node: Node, tmp_path: Path, version: str
) -> None:
    with (
        run_web_input("http", node, proxy_protocol=True) as found,
        run_haproxy(tmp_path, get_web_port(found), "tcp", version) as port,
    ):
        transport = httpx.HTTPTransport(local_address="127.0.0.77")
        with httpx.Client(transport=transport, timeout=20) as client:
            assert client.post(f"http://127.0.0.1:{port}/", content=b"one").status_code == 200
        [event] = read_events(node)
        assert (event.value, event.source) == (b"one", "127.0.0.77")
