"""Clients of other protocols on a syslog input leave no events; every kind of text still does."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from tests.certificates import Certificates
from tests.contract.harness import wait_until
from tests.inputs.syslog_harness import (
    ANYWHERE,
    await_values,
    connect_to,
    connect_with_tls,
    get_port,
    make_tls_settings,
    run_syslog,
    send,
    send_datagrams,
)
from turnlane.formats.syslog import recognize_foreign
from turnlane.inputs.syslog import SyslogInput
from turnlane.node.metrics import NodeCollector
from turnlane.node.node import Node

TAG = b"app.access"
RECORD = b"\x82\xa7message\xa5hello\xa4code\xcc\xc8"
EVENT_TIME = b"\xd7\x00" + struct.pack("!II", 1_790_000_000, 5)
ENTRIES = b"\x92" + EVENT_TIME + RECORD

# Requests as the forward protocol of Fluentd specifies them.
FORWARD = {
    "message": b"\x93" + bytes([0xA0 + len(TAG)]) + TAG + b"\xce\x6a\xb1\x3b\x80" + RECORD,
    "message with EventTime": b"\x94\xaaapp.access" + EVENT_TIME + RECORD + b"\x80",
    "forward": b"\x92\xaaapp.access\x91" + ENTRIES,
    "packed forward": b"\x93\xaaapp.access\xc4" + bytes([len(ENTRIES)]) + ENTRIES + b"\x80",
    "packed forward of an old client": b"\x92\xaaapp.access\xd9" + bytes([len(ENTRIES)]) + ENTRIES,
    "long tag": b"\x93\xd9\x28" + b"kube.var.log.containers.shop-7d9f_x.log." + EVENT_TIME + RECORD,
}  # fmt: skip
_BEATS = b'2J\0\0\0\1\0\0\0\x11{"message":"hello"}'
BINARY = {
    "beats": b"2W\0\0\0\x01" + b"2C" + struct.pack("!I", len(zlib.compress(_BEATS))) + _BEATS,
    "mqtt": b"\x10\x10\x00\x04MQTT\x04\x02\x00\x3c\x00\x04shop",
    "kafka": b"\0\0\0\x23\0\x12\0\x03\0\0\0\x01\0\x07console" + b"\0\x12apache-kafka-java",
    "postgres": b"\0\0\0\x08\x04\xd2\x16\x2f",
    "remote desktop": b"\x03\x00\x00\x13\x0e\xe0\x00\x00\x00\x00\x00\x01\x00\x08\0\3\0\0\0",
    "noise": bytes(range(256)),
}  # fmt: skip

TEXT = {
    "any bytes after a priority": b"<13>Oct 11 22:14:15 host app: \x01\x02\x03\x04",
    "line": b"no priority at all",
    "UTF-8": "żółć, 日本語".encode(),
    "Latin-1": "Größe überschritten: Schlüssel §1".encode("latin-1"),
    "Windows-1252": b"\x93quoted\x94 \x96 \x92tis text",
    "Shift JIS": "メッセージ".encode("shift_jis"),
    "colours": b"\x1b[31mred\x1b[0m \x0304and mIRC's\x03 \x02bold\x02",
    "FIX": b"8=FIX.4.4\x019=65\x0135=A\x0149=BUYER\x0156=SELLER\x0134=1",
    "separators": b"\x1ea\x1fb\x1ec\x1fd\x1d\x1c",
    "STX and ETX": b"\x02weight 12.5 kg\x03",
    "JSON": b'{"method": "GET", "path": "/ HTTP/1.1"}',
    "request line of an access log": b"GET /index.html HTTP/1.1",
    "sentence": b"PROXY settings were changed",
    "small number": b"2W",
}


def assert_refused(found: SyslogInput, host: Node, reason: str) -> None:
    wait_until(lambda: found.counters.invalid_reasons[reason] == 1, reason)
    assert found.counters.invalid == 1
    wait_until(lambda: found.counters.connections == 0)
    assert host.queue("main").end == 0


def post(client: http.client.HTTPConnection) -> None:
    with contextlib.closing(client):
        client.request("POST", "/events", b"hello\nworld\n")
        client.getresponse()


def assert_closed(client: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert client.recv(1) == b""


@pytest.mark.parametrize("form", FORWARD)
def test_fluentd_on_the_tcp_input_is_closed_and_leaves_no_event(
    host: Node, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    with run_syslog(host, tcp=ANYWHERE) as found, connect_to(found) as client:
        client.sendall(FORWARD[form] * 3)
        assert_closed(client)
        assert_refused(found, host, "fluentd")
    messages = [each.getMessage() for each in caplog.records]
    lines = [each for each in messages if "input.connection_invalid" in each]
    assert len(lines) == 1
    assert "source=127.0.0.1" in lines[0]
    assert "looks like Fluentd's forward protocol" in lines[0]


def test_tls_client_on_the_tcp_input_is_closed_and_leaves_no_event(
    host: Node, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.create_default_context()
    with run_syslog(host, tcp=ANYWHERE) as found, connect_to(found) as client:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            context.wrap_socket(client, server_hostname="localhost")
        assert_refused(found, host, "tls")
    assert "looks like TLS" in caplog.text


@pytest.mark.parametrize("way", ["tcp", "tls"])
def test_http_client_on_the_input_is_closed_and_leaves_no_event(
    host: Node, way: str, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    tls = make_tls_settings(certificates, mutual=False)
    with run_syslog(host, tcp=ANYWHERE, tls=tls) as found:
        there = ("127.0.0.1", get_port(found, way))
        client: http.client.HTTPConnection = http.client.HTTPConnection(*there, timeout=20)
        if way == "tls":
            context = certificates.client_context()
            client = http.client.HTTPSConnection(*there, timeout=20, context=context)
        with pytest.raises((http.client.BadStatusLine, ConnectionError, ssl.SSLError)):
            post(client)
        assert_refused(found, host, "http")
    assert "looks like HTTP" in caplog.text


def test_plain_http_on_the_tls_listener_is_closed_with_the_hint(
    host: Node, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    with run_syslog(host, tls=make_tls_settings(certificates, mutual=False)) as found:
        client = http.client.HTTPConnection("127.0.0.1", get_port(found, "tls"), timeout=20)
        with pytest.raises((http.client.BadStatusLine, ConnectionError)):
            post(client)
        assert_refused(found, host, "http")
    assert "looks like HTTP" in caplog.text


@pytest.mark.parametrize("protocol", BINARY)
def test_binary_protocol_on_the_tcp_input_is_closed_and_leaves_no_event(
    host: Node, protocol: str
) -> None:
    with run_syslog(host, tcp=ANYWHERE) as found, connect_to(found) as client:
        client.sendall(BINARY[protocol])
        assert_closed(client)
        assert_refused(found, host, "beats" if protocol == "beats" else "binary")


def test_foreign_client_does_not_affect_others_in_the_same_round(host: Node) -> None:
    with run_syslog(host, tcp=ANYWHERE) as found, connect_to(found) as good:
        good.sendall(b"<13>before\n")
        send(found, FORWARD["message"])
        send(found, b"a line of another sender\n")
        good.sendall(b"<13>after\n")
        values = await_values(host.queue("main"), 3)
        assert sorted(values) == [b"<13>after", b"<13>before", b"a line of another sender"]  # type: ignore[type-var]
        assert found.counters.invalid == 1


@pytest.mark.parametrize("kind", TEXT)
def test_text_in_any_encoding_without_priority_is_published(host: Node, kind: str) -> None:
    with run_syslog(host, tcp=ANYWHERE) as found:
        send(found, TEXT[kind], b"\n")
        assert await_values(host.queue("main"), 1) == [TEXT[kind]]
        assert found.counters.invalid == 0


def test_counted_message_with_any_bytes_is_published(host: Node) -> None:
    with run_syslog(host, tcp=ANYWHERE) as found:
        send(found, b"12 <13>\0\1\2\3\4\5\6\x0e")
        assert await_values(host.queue("main"), 1) == [b"<13>\0\1\2\3\4\5\6\x0e"]


def test_text_that_arrives_byte_by_byte_is_published(host: Node) -> None:
    with run_syslog(host, tcp=ANYWHERE) as found, connect_to(found) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number, octet in enumerate(b"PROXY TCP is off\n", 1):
            client.sendall(bytes([octet]))
            wait_until(lambda count=number: found.counters.bytes == count)  # type: ignore[misc]
        assert await_values(host.queue("main"), 1) == [b"PROXY TCP is off"]


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=200))
def test_printable_text_is_never_foreign(text: str) -> None:
    assert recognize_foreign(text.encode()) is None
    assert recognize_foreign(text.encode("latin-1", "replace")) is None


@given(st.binary(max_size=300), st.integers(0, 191))
def test_message_with_a_priority_is_never_foreign(content: bytes, priority: int) -> None:
    assert recognize_foreign(b"<%d>" % priority + content) is None


def test_random_bytes_are_foreign() -> None:
    assert all(recognize_foreign(b"\0" + os.urandom(255)) for _ in range(1_000))


def test_binary_datagrams_are_counted_and_leave_no_event(
    host: Node, caplog: pytest.LogCaptureFixture
) -> None:
    with run_syslog(host, udp=ANYWHERE) as found:
        junk = [BINARY["noise"], BINARY["kafka"]]
        send_datagrams(found, b"<13>one", *junk, b"no priority", b"<13>\0\1\2\3\4")
        values = await_values(host.queue("main"), 3)
        assert values == [b"<13>one", b"no priority", b"<13>\0\1\2\3\4"]
        assert found.counters.invalid_reasons == {"binary": 2}
        assert found.counters.bytes == sum(map(len, junk)) + 27
    assert caplog.text.count("input.datagram_invalid") == 1


def test_invalid_reasons_are_a_metric(host: Node) -> None:
    with run_syslog(host, tcp=ANYWHERE, udp=ANYWHERE, max_message_bytes=480) as found:
        send(found, FORWARD["message"])
        send(found, b"x" * 1_000 + b"\n")
        send_datagrams(found, b"")
        wait_until(lambda: found.counters.invalid == 3)
        registry = CollectorRegistry()
        registry.register(NodeCollector(host, [found]))
        text = generate_latest(registry).decode()
    for reason in ("fluentd", "too_long", "empty"):
        name = "turnlane_input_invalid_reasons_total"
        assert f'{name}{{input="syslog",reason="{reason}"}} 1.0' in text
    assert 'turnlane_input_invalid_total{input="syslog"} 3.0' in text


def test_text_over_tls_is_published(host: Node, certificates: Certificates) -> None:
    with (
        run_syslog(host, tls=make_tls_settings(certificates, mutual=False)) as found,
        connect_with_tls(found, certificates) as client,
    ):
        client.sendall(b"no priority\n")
        assert await_values(host.queue("main"), 1) == [b"no priority"]
