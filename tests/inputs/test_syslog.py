"""The syslog input with real, mixed and broken senders, and with a full queue."""

from __future__ import annotations

import contextlib
import errno
import logging
import logging.handlers
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as tried
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.certificates import Certificates
from tests.conftest import skip_or_fail
from tests.contract.harness import wait_until
from tests.inputs.syslog_harness import (
    ANYWHERE,
    await_events,
    await_values,
    connect_to,
    connect_with_tls,
    get_port,
    make_tls_settings,
    read_events,
    run_logger,
    run_rsyslogd_with_action,
    run_syslog,
    send,
    send_datagrams,
    send_to_socket,
)
from tests.queue_internals import state_of
from turnlane.errors import AddressTaken, ConfigError, StorageFailed
from turnlane.formats import framing
from turnlane.inputs import stream_server
from turnlane.inputs.api import load
from turnlane.inputs.datagrams import DatagramReader
from turnlane.inputs.publishers import FireAndForgetPublisher
from turnlane.inputs.syslog import SyslogInput, SyslogSettings, make_udp_receiver
from turnlane.node.node import Node
from turnlane.queues.api import FlowControl
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.producer import BufferedProducer
from turnlane.testing import FaultyDisk

DOGGED = 'type="omfwd" target="127.0.0.1" protocol="tcp"'

# ── real senders ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", ["--rfc3164", "--rfc5424"])
@pytest.mark.parametrize("way", [["--udp"], ["--tcp"], ["--tcp", "--octet-count"]])
def test_logger_messages_are_published(host: Node, form: str, way: list[str]) -> None:
    started = time.time_ns() // 1000
    with run_syslog(host, tcp=ANYWHERE, udp=ANYWHERE) as source:
        there = get_port(source, way[0].strip("-"))
        run_logger("-n", "127.0.0.1", "-P", there, *way, form, "-p", "user.warning", "the message")
        [event] = await_events(host.queue("main"), 1)
    assert event.value is not None
    assert event.value.startswith(b"<12>1 20" if form == "--rfc5424" else b"<12>")
    assert event.value.endswith(b"the message")
    assert (event.severity, event.source) == (4, "127.0.0.1")
    assert event.timestamp is not None
    assert started <= event.timestamp <= time.time_ns() // 1000


@pytest.mark.parametrize("framing", ["traditional", "octet-counted"])
def test_rsyslogd_forwards_everything_in_order(host: Node, tmp_path: Path, framing: str) -> None:
    messages = [b"<%d>x: number %d" % (number % 192, number) for number in range(500)]
    with run_syslog(host, tcp=ANYWHERE) as source:
        action = f'{DOGGED} port="{get_port(source)}" TCP_Framing="{framing}"'
        with run_rsyslogd_with_action(tmp_path / "rsyslog", action) as door:
            send_to_socket(door, *messages)
            events = await_events(host.queue("main"), 500)
    assert [event.value for event in events] == [each.replace(b"x: ", b"") for each in messages]
    assert [event.severity for event in events] == [number % 192 % 8 for number in range(500)]


def test_rsyslogd_forwards_over_mutual_tls(host: Node, tmp_path: Path) -> None:
    if not list(Path("/usr/lib").glob("*/rsyslog/lmnsd_gtls.so")):
        skip_or_fail("rsyslog-gnutls is not installed")
    files = Certificates(tmp_path)
    cert, key = files.client
    settings = (
        f'DefaultNetstreamDriverCAFile="{files.ca}" DefaultNetstreamDriverCertFile="{cert}" '
        f'DefaultNetstreamDriverKeyFile="{key}"'
    )
    with run_syslog(host, tls=make_tls_settings(files, mutual=True)) as source:
        action = (
            f'{DOGGED} port="{get_port(source, "tls")}" StreamDriver="gtls" StreamDriverMode="1" '
            'StreamDriverAuthMode="x509/name" StreamDriverPermittedPeers="localhost" '
            'TCP_Framing="octet-counted"'
        )
        with run_rsyslogd_with_action(tmp_path / "rsyslog", action, settings) as door:
            send_to_socket(door, *(b"<13>x: number %d" % number for number in range(200)))
            values = await_values(host.queue("main"), 200)
    assert values == [b"<13>number %d" % number for number in range(200)]


def test_python_syslog_handler_messages_are_published(host: Node) -> None:
    with run_syslog(host, tcp=ANYWHERE, udp=ANYWHERE) as source:
        for kind, type_ in (("tcp", socket.SOCK_STREAM), ("udp", socket.SOCK_DGRAM)):
            there = ("127.0.0.1", get_port(source, kind))
            handler = logging.handlers.SysLogHandler(there, socktype=type_)
            for number in range(3):
                text = f"{kind} {number}"
                handler.emit(logging.LogRecord("app", logging.WARNING, "", 1, text, (), None))
            handler.close()
        events = await_events(host.queue("main"), 6)
    assert {event.value for event in events} == {
        b"<12>%s %d" % (kind, number) for kind in (b"tcp", b"udp") for number in range(3)
    }
    assert {event.severity for event in events} == {4}


# ── mixed, malformed, slow ───────────────────────────────────────────────────────────────────────


def test_clients_with_different_framings_are_served_together(host: Node) -> None:
    lines = [b"<14>line %d" % number for number in range(2_000)]
    counted = [b"<15>counted\n%d" % number for number in range(2_000)]
    framed = [b"%d %s" % (len(each), each) for each in counted]
    streams = [
        b"\n".join(lines),
        b"".join(framed),
        b"".join(framed[:500]) + b"\n".join(lines[:100]) + b"\n" + b"".join(framed[500:900]),
    ]
    with run_syslog(host, tcp=ANYWHERE) as source:
        senders = [threading.Thread(target=send, args=(source, each)) for each in streams]
        for each in senders:
            each.start()
        for each in senders:
            each.join()
        wait_until(lambda: source.counters.bytes == sum(map(len, streams)))
        wait_until(lambda: source.counters.connections == 0)
    sent = [*lines, *counted, *counted[:900], *lines[:100]]
    assert Counter(event.value for event in read_events(host.queue("main"))) == Counter(sent)


def test_garbage_after_a_message_is_published_and_does_not_affect_others(host: Node) -> None:
    garbage = (
        b"<13>first\n"
        + bytes(range(256)) * 40
        + b"99999999999 <x\n0 <1>\n-5 <2>\n12 \n"
        + b"\xff\x00\n" * 9
    )
    with run_syslog(host, tcp=ANYWHERE) as source, connect_to(source) as good:
        send(source, garbage)
        good.sendall(b"<13>after the garbage\n")
        wait_until(lambda: source.counters.connections == 1)
        good.sendall(b"8 <13>last\n")
        wait_until(lambda: source.counters.bytes == len(garbage) + 33)
    values = [event.value or b"" for event in read_events(host.queue("main"))]
    assert {b"<13>after the garbage", b"<13>last"} <= set(values)
    assert b"".join(values).count(b"\x01\x02\x03") == 40


@tried(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.lists(st.binary(max_size=200), max_size=5))
def test_random_bytes_do_not_affect_the_input(host: Node, garbage: list[bytes]) -> None:
    queue = host.queue("main")
    with run_syslog(host, tcp=ANYWHERE, udp=ANYWHERE) as source:
        before = queue.end
        send(source, *garbage)
        send_datagrams(source, *garbage)
        send(source, b"<13>still there\n")
        wait_until(lambda: source.counters.bytes == 2 * len(b"".join(garbage)) + 16)
        wait_until(lambda: source.counters.connections == 0)
        source.stop(10.0)
        assert source.counters.events == queue.end - before
    found = queue.read(before, 1_000_000)
    assert found is not None
    assert b"<13>still there" in found[1].column("value").to_pylist()


def test_too_long_message_is_published_in_pieces(host: Node) -> None:
    with run_syslog(host, tcp=ANYWHERE, udp=ANYWHERE, max_message_bytes=1_000) as source:
        send(source, b"a" * 2_500, b"\n<13>next\n")
        assert await_values(host.queue("main"), 4) == [
            *(b"a" * size for size in (1_000, 1_000, 500)),
            b"<13>next",
        ]
        send_datagrams(source, b"b" * 1_500, b"", b"<13>c\n\0")
        assert await_values(host.queue("main"), 7)[4:] == [b"b" * 1_000, b"b" * 500, b"<13>c"]
        assert source.counters.invalid == 3


def test_reset_connection_keeps_its_received_messages(host: Node) -> None:
    with run_syslog(host, tcp=ANYWHERE) as source:
        client = connect_to(source)
        client.sendall(b"<13>whole\n100 <13>half")
        wait_until(lambda: source.counters.bytes == 22)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        assert await_values(host.queue("main"), 2) == [b"<13>whole", b"<13>half"]
        assert source.counters.invalid == 1


def test_client_disconnect_inside_a_long_message_does_not_affect_others(host: Node) -> None:
    with (
        run_syslog(host, tcp=ANYWHERE, max_message_bytes=480) as source,
        connect_to(source) as good,
    ):
        good.sendall(b"<13>before\n")
        with connect_to(source) as bad:
            bad.sendall(b"2000 <" + b"x" * 479)
            await_values(host.queue("main"), 2)
        wait_until(lambda: source.counters.invalid == 2)  # too long, and ended early
        good.sendall(b"<13>after\n")
        send(source, b"<13>another client\n")
        values = await_values(host.queue("main"), 4)
    assert {b"<13>before", b"<13>after", b"<13>another client"} < set(values)


def test_framing_error_closes_only_its_connection(
    host: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def find(buffer: memoryview, *given: Any, **knobs: Any) -> Any:
        if b"bad" in bytes(buffer):
            raise IndexError("planned")
        return framing.find_messages(buffer, *given, **knobs)

    monkeypatch.setattr(stream_server, "find_messages", find)
    with run_syslog(host, tcp=ANYWHERE) as source, connect_to(source) as good:
        with connect_to(source) as bad:
            bad.sendall(b"<13>bad\n")
            assert bad.recv(1) == b""
        good.sendall(b"<13>good\n")
        assert await_values(host.queue("main"), 1) == [b"<13>good"]
        assert source.counters.invalid == 1
    assert "planned" in caplog.text


def test_slow_client_does_not_delay_others(host: Node) -> None:
    with run_syslog(host, tcp=ANYWHERE) as source, connect_to(source) as slow:
        for octet in b"17 <13>a slow":
            slow.sendall(bytes([octet]))
            send(source, b"<13>a quick one\n")
        slow.sendall(b" client")
        values = await_values(host.queue("main"), 14)
    assert values.count(b"<13>a quick one") == 13
    assert b"<13>a slow client" in values


def test_idle_connections_cost_no_threads(host: Node) -> None:
    with run_syslog(host, tcp=ANYWHERE) as source:
        threads = threading.active_count()
        idle = [connect_to(source) for _ in range(300)]
        wait_until(lambda: source.counters.connections == 300)
        assert threading.active_count() == threads
        for each in idle:
            each.sendall(b"<13>all at once\n")
        await_values(host.queue("main"), 300)
        for each in idle:
            each.close()


def test_silent_connection_is_closed_after_idle_timeout(host: Node) -> None:
    with (
        run_syslog(host, tcp=ANYWHERE, idle_timeout="100ms") as source,
        connect_to(source) as client,
    ):
        client.sendall(b"<13>unfinished")
        assert client.recv(1) == b""
        assert await_values(host.queue("main"), 1) == [b"<13>unfinished"]


@pytest.mark.parametrize("begun", [b"<12>half a mess", b"999 <12>half a mess"])
def test_unfinished_message_closes_the_connection_after_message_timeout(
    host: Node, begun: bytes
) -> None:
    with (
        run_syslog(host, tcp=ANYWHERE, message_timeout="100ms") as source,
        connect_to(source) as quiet,
        connect_to(source) as client,
    ):
        quiet.sendall(b"<12>all of it\n")
        await_events(host.queue("main"), 1)
        client.sendall(begun)
        assert client.recv(1) == b""
        assert await_values(host.queue("main"), 2)[1] == b"<12>half a mess"
        quiet.sendall(b"<12>and more\n")  # without an unfinished message it may stay silent
        assert await_values(host.queue("main"), 3)[2] == b"<12>and more"


def test_slowly_dripping_message_closes_the_connection_after_message_timeout(host: Node) -> None:
    sent: list[bytes] = []

    def drip() -> bool:
        """Send an octet whenever the last one was read; return whether the connection has ended."""
        with contextlib.suppress(OSError):
            if source.counters.bytes == len(sent):
                client.send(b"x")
                sent.append(b"x")
        return source.counters.connections == 0

    with run_syslog(host, tcp=ANYWHERE, message_timeout="100ms") as source:
        with connect_to(source) as client:
            wait_until(lambda: source.counters.connections == 1)
            wait_until(drip)
        assert len(sent) > 1


def test_client_with_unread_bytes_is_not_idle(host: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the queue is full no client is read, but its bytes have arrived."""
    monkeypatch.setattr("turnlane.inputs.stream_server.SWEEP_SECONDS", 0.01)
    queue = host.queue("narrow")
    with (
        run_syslog(host, queue="narrow", tcp=ANYWHERE, idle_timeout=0.5) as source,
        connect_to(source) as first,
        connect_to(source) as second,
    ):
        wait_until(lambda: source.counters.connections == 2)
        second.sendall(b"<13>x\n" * 11)
        wait_until(lambda: bool(state_of(queue).admission.line))
        first.sendall(b"<13>not lost\n")
        full_since = time.monotonic()
        wait_until(lambda: time.monotonic() > full_since + 0.7)
        taken: list[bytes | None] = []
        while len(taken) < 12:
            with queue.get(timeout=20) as batch:
                taken += [event.value for event in batch]
    assert taken[-1] == b"<13>not lost"


def test_connection_over_the_limit_is_closed_at_once(host: Node) -> None:
    with run_syslog(host, tcp=ANYWHERE, max_connections=2) as source:
        first, second = connect_to(source), connect_to(source)
        with connect_to(source) as third:
            assert third.recv(1) == b""
        assert source.counters.refused == 1
        first.close()
        wait_until(lambda: source.counters.connections == 1)
        send(source, b"<13>there is room again\n")
        await_values(host.queue("main"), 1)
        second.close()


def test_missing_file_descriptors_only_delay_new_connections(
    host: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, fails = socket.socket.accept, [errno.EMFILE, errno.ECONNABORTED]

    def accept(self: socket.socket) -> Any:
        if fails:
            number = fails.pop()
            raise OSError(number, "planned") from None
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with run_syslog(host, tcp=ANYWHERE) as source:
        send(source, b"<13>a\n")
        await_values(host.queue("main"), 1)
    assert not fails


def test_missing_file_descriptors_do_not_break_a_stop(
    host: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = Certificates(tmp_path)

    def accept(self: socket.socket) -> Any:
        raise OSError(errno.EMFILE, "planned")

    with (
        run_syslog(host, tcp=ANYWHERE, tls=make_tls_settings(files, mutual=False)) as source,
        connect_to(source) as client,
    ):
        wait_until(lambda: source.counters.connections == 1)
        monkeypatch.setattr(socket.socket, "accept", accept)
        client.sendall(b"<13>the last")
        source.stop(5.0)
    assert await_values(host.queue("main"), 1) == [b"<13>the last"]
    assert "input.reader_failed" not in caplog.text


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────


def test_tls_connection_publishes_large_amounts(host: Node, tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    messages = [b"<13>number %d " % number + b"x" * 100 for number in range(15_000)]
    with run_syslog(host, tls=make_tls_settings(files, mutual=False)) as source:
        with connect_with_tls(source, files) as client:
            client.sendall(b"\n".join(messages))
            client.unwrap()
        assert await_values(host.queue("main"), 15_000) == messages


def test_stop_publishes_decrypted_bytes_of_tls(
    host: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operating system has handed these bytes over to TLS."""
    monkeypatch.setattr("turnlane.inputs.stream_server.READ_BYTES", 1)
    monkeypatch.setattr("turnlane.inputs.stream_server.MIN_SHARE_BYTES", 6)
    files = Certificates(tmp_path)
    queue = host.queue("narrow")
    with (
        run_syslog(host, queue="narrow", tls=make_tls_settings(files, mutual=False)) as source,
        connect_with_tls(source, files) as client,
    ):
        client.sendall(b"<13>x\n" * 15)  # one record
        wait_until(lambda: bool(state_of(queue).admission.line))
        stopping = threading.Thread(target=source.stop, args=(20.0,))
        stopping.start()
        taken = 0
        while taken < 15:
            with queue.get(timeout=5) as batch:
                taken += len(batch)
        stopping.join()
    assert source.counters.dropped == 0


@pytest.mark.parametrize("identity", ["nobody", "stranger"])
def test_client_without_a_valid_certificate_is_refused(
    host: Node, tmp_path: Path, identity: str
) -> None:
    files = Certificates(tmp_path)
    shown = files.stranger if identity == "stranger" else None
    with run_syslog(host, tls=make_tls_settings(files, mutual=True)) as source:
        with pytest.raises(OSError), connect_with_tls(source, files, shown) as client:  # noqa: PT012
            client.sendall(b"<13>let me in\n")
            client.recv(1)
        wait_until(lambda: source.counters.refused == 1)
        with connect_with_tls(source, files, files.client) as client:
            client.sendall(b"<13>a friend\n")
        assert await_values(host.queue("main"), 1) == [b"<13>a friend"]


def test_stuck_handshake_is_closed_and_does_not_delay_others(
    host: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnlane.inputs.stream_server.HANDSHAKE_SECONDS", 0.1)
    files = Certificates(tmp_path)
    with run_syslog(host, tls=make_tls_settings(files, mutual=False)) as source:
        there = ("127.0.0.1", get_port(source, "tls"))
        with (
            socket.create_connection(there, timeout=20) as stuck,
            connect_with_tls(source, files) as client,
        ):
            client.sendall(b"<13>not stuck\n")
            await_values(host.queue("main"), 1)
            assert stuck.recv(1) == b""
        with socket.create_connection(there, timeout=20) as plain:
            plain.sendall(b"<13>no TLS at all\n" * 50)
            wait_until(lambda: source.counters.refused == 2)


# ── no room ──────────────────────────────────────────────────────────────────────────────────────


def test_full_disk_makes_senders_wait_and_loses_nothing(tmp_path: Path) -> None:
    disk = FaultyDisk()
    knobs = {"durability": "always", "memory_bytes": "256Ki", "write_buffer": "64Ki"}
    knobs |= {"compression": "none"}  # otherwise everything would fit
    messages = [b"<13>%06d %s" % (number, b"x" * 500) for number in range(16_000)]
    with Node(tmp_path, {"main": knobs}, disk=disk) as node:
        queue = node.queue("main")
        assert isinstance(queue, BufferedQueue)
        with run_syslog(node, tcp=ANYWHERE) as source:
            disk.fill(1_000_000)
            sender = threading.Thread(target=send, args=(source, b"\n".join(messages)))
            sender.start()
            wait_until(lambda: bool(queue.storage_failure), "a disk that is full")
            assert queue.end < len(messages)
            disk.unfill()
            sender.join()
            wait_until(lambda: source.counters.connections == 0)
        assert source.counters.dropped == 0
        assert source.counters.events == len(messages)
        assert [event.value for event in read_events(queue)] == messages


def test_tcp_sender_waits_for_a_full_queue(host: Node) -> None:
    queue = host.queue("narrow")
    with run_syslog(host, queue="narrow", tcp=ANYWHERE) as source:
        send(source, *(b"<13>%d\n" % number for number in range(100)))
        taken: list[bytes | None] = []
        while len(taken) < 100:
            with queue.get(timeout=20) as batch:
                taken += [event.value for event in batch]
    assert taken == [b"<13>%d" % number for number in range(100)]
    assert source.counters.dropped == 0


def test_stop_with_a_full_queue_counts_dropped_messages(
    host: Node, caplog: pytest.LogCaptureFixture
) -> None:
    with run_syslog(host, queue="narrow", tcp=ANYWHERE, ack="accepted") as source:
        send(source, *(b"<13>%d\n" % number for number in range(100)))
        wait_until(lambda: bool(state_of(host.queue("narrow")).admission.line))
        source.stop(0.2)
        assert source.counters.events == 10
        assert source.counters.dropped == 90
    assert "input.events_dropped" in caplog.text


def test_full_queue_drops_udp_messages_and_counts_them(host: Node) -> None:
    with run_syslog(host, queue="narrow", udp=ANYWHERE, ack="accepted") as source:
        for number in range(30):
            send_datagrams(source, b"<13>%d" % number)
        wait_until(lambda: source.counters.events + source.counters.dropped == 30)
        assert source.counters.events == 10
    values = [event.value for event in read_events(host.queue("narrow"))]
    assert values == [b"<13>%d" % number for number in range(10)]


def test_datagrams_wait_in_failover_memory_while_the_disk_fails(tmp_path: Path) -> None:
    """Their senders cannot wait, and without this memory every datagram would be dropped."""
    disk = FaultyDisk()
    messages = [b"<13>%06d" % number for number in range(500)]
    with Node(tmp_path, {"main": {"failover_memory": "16Mi"}}, disk=disk) as node:
        queue = node.queue("main")
        with run_syslog(node, udp=ANYWHERE) as source:
            disk.fail("write", times=None)
            send_datagrams(source, messages[0])
            wait_until(lambda: bool(queue.storage_failure), "a disk that fails")
            for message in messages[1:]:
                send_datagrams(source, message)
            wait_until(lambda: source.counters.events + source.counters.dropped == 500)
            assert source.counters.dropped == 0
            disk.clear()
            wait_until(lambda: not queue.storage_failure, "a disk that works")
    with Node(tmp_path, {"main": {}}) as node:
        assert [event.value for event in read_events(node.queue("main"))] == messages


def test_datagrams_dropped_by_the_kernel_are_counted(host: Node) -> None:
    settings = SyslogSettings.model_validate({"queue": "main", "udp": ANYWHERE})
    source = SyslogInput(settings, host)
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    bound.bind(("127.0.0.1", 0))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    publisher = FireAndForgetPublisher(source, FlowControl.NONE)
    reader = DatagramReader(source, publisher, bound, make_udp_receiver(bound), 1_000)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        for _ in range(200):
            client.sendto(b"<13>hello", bound.getsockname())
    reader.start()
    wait_until(lambda: source.counters.events + source.counters.dropped == 200)
    assert 0 < source.counters.events < 200
    reader.stop(time.monotonic() + 5)


def test_load_shedding_uses_the_priority(tmp_path: Path) -> None:
    knobs = {"kind": "memory", "size": 100, "discard_mark": 5, "discard_severity": 5}
    with Node(tmp_path, {"main": knobs}) as node:
        with run_syslog(node, tcp=ANYWHERE, ack="accepted") as source:
            send(source, *(b"<11>error %d\n" % number for number in range(10)))
            wait_until(lambda: node.queue("main").end == 10)
            send(source, b"<15>debug\n<11>another error\n<14>info\n")
            values = await_values(node.queue("main"), 11)
        assert values[-1] == b"<11>another error"


# ── starting and stopping ────────────────────────────────────────────────────────────────────────


def test_stop_persists_received_messages(host: Node) -> None:
    with run_syslog(host, tcp=ANYWHERE, udp=ANYWHERE) as source:
        held = [connect_to(source) for _ in range(20)]
        for client in held:
            client.sendall(b"<13>%s\n" % (b"x" * 50) * 500 + b"<13>unfinished")
        send_datagrams(source, *[b"<13>datagram"] * 50)
        source.stop(20.0)
        assert source.counters.connections == 0
    for client in held:
        client.close()
    values = [event.value for event in read_events(host.queue("main"))]
    assert len(values) == 20 * 501 + 50
    assert values.count(b"<13>unfinished") == 20
    assert host.queue("main").stats().ledger.accepted == len(values)


def test_sender_without_pauses_does_not_delay_a_stop(host: Node) -> None:
    over = threading.Event()

    def chatter(client: socket.socket) -> None:
        try:
            while not over.is_set():
                client.sendall(b"<13>and another thing\n" * 1_000)
        except OSError:
            pass

    with run_syslog(host, tcp=ANYWHERE) as source, connect_to(source) as client:
        talking = threading.Thread(target=chatter, args=(client,))
        talking.start()
        wait_until(lambda: source.counters.events > 10_000)
        started = time.monotonic()
        source.stop(60.0)
        assert time.monotonic() - started < 30.0
        over.set()
        talking.join()


def test_closed_queue_ends_the_input_and_counts_drops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Node(tmp_path) as node:
        node.create("main")
        with run_syslog(node, tcp=ANYWHERE) as source, connect_to(source) as client:
            client.sendall(b"<13>a\n")
            wait_until(lambda: source.counters.events == 1)
            node.drop("main")
            client.sendall(b"<13>b\n")
            assert client.recv(1) == b""
            assert source.counters.dropped == 1
    assert "closed" in caplog.text


def test_failing_queue_is_retried_with_one_warning(
    host: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("turnlane.inputs.publishers.RETRY_SECONDS", 0.0)
    real, tries = BufferedProducer.publish_block, list[int]()

    def publish_block(self: BufferedProducer, block: Any, **knobs: Any) -> Any:
        tries.append(1)
        if len(tries) < 10:
            raise StorageFailed("planned")
        return real(self, block, **knobs)

    monkeypatch.setattr(BufferedProducer, "publish_block", publish_block)
    with run_syslog(host, tcp=ANYWHERE) as source:
        send(source, b"<13>a\n")
        assert await_values(host.queue("main"), 1) == [b"<13>a"]
    (waiting,) = [each for each in caplog.messages if each.startswith("input.publish_waits")]
    assert "planned" in waiting


def test_unexpected_error_is_logged_and_closes_connections(
    host: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: FireAndForgetPublisher, block: object) -> None:
        raise RuntimeError("planned")

    monkeypatch.setattr(FireAndForgetPublisher, "publish", broken)
    with run_syslog(host, tcp=ANYWHERE) as source, connect_to(source) as client:
        client.sendall(b"<13>a\n")
        assert client.recv(1) == b""
    assert "input.reader_failed" in caplog.text


@pytest.mark.parametrize(
    ("knobs", "knob"),
    [
        ({"tcp": "0.0.0.0:0"}, "tcp"),
        ({"udp": "0.0.0.0:0"}, "udp"),
        ({"tls": {"listen": "0.0.0.0:0", "cert": "c", "key": "k"}}, "tls"),
        ({"tls": {"listen": ANYWHERE, "cert": "c", "key": "k"}}, "tls.cert"),
        ({"tcp": ANYWHERE, "max_message_bytes": "16Mi", "queue": "tiny"}, "max_message_bytes"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(
    host: Node, knobs: dict[str, Any], knob: str
) -> None:
    host.create("tiny", kind="memory", max_event_bytes="1Mi")
    settings = SyslogSettings.model_validate({"queue": "main", **knobs})
    with SyslogInput(settings, host) as source, pytest.raises(ConfigError) as error:
        source.start()
    assert error.value.knob == knob


def test_insecure_allows_a_public_address(host: Node) -> None:
    with run_syslog(host, tcp="0.0.0.0:0", insecure=True) as source:
        assert source.address == f"tcp://0.0.0.0:{get_port(source)}"
        send(source, b"<13>a\n")
        await_values(host.queue("main"), 1)


def test_port_in_use_is_reported(host: Node) -> None:
    with run_syslog(host, tcp=ANYWHERE) as source:
        there = f"127.0.0.1:{get_port(source)}"
        settings = SyslogSettings.model_validate({"queue": "main", "tcp": there})
        with SyslogInput(settings, host) as second, pytest.raises(AddressTaken, match="in use"):
            second.start()


def test_settings_without_an_address_are_refused() -> None:
    with pytest.raises(ValidationError, match="at least one of tcp, udp and tls"):
        SyslogSettings.model_validate({"queue": "main"})


@pytest.mark.parametrize("kind", ["syslog", "stdin", "unix"])
def test_type_syslog_loads_the_input(kind: str) -> None:
    found = load(kind)
    assert found.settings_type.model_fields["type"].default == kind
