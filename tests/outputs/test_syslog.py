"""Every message arrives complete, and a receiver that fails loses none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.certificates import Certificates
from tests.contract.harness import wait_until
from tests.inputs.syslog_harness import await_values, get_port, make_tls_settings, run_syslog
from tests.outputs.blocks import make_block, make_values
from tests.outputs.syslog_receivers import run_rsyslogd
from tests.ports import free_port
from turnlane.errors import Never, PartlyDelivered, RetryLater
from turnlane.formats.lines import join_texts, to_large_binary
from turnlane.formats.syslog import frame_by_length, frame_by_newline
from turnlane.node.node import Node
from turnlane.outputs.syslog import SyslogOutput, SyslogOutputSettings

DATED = "2026-11-18T11:06:40.123456Z"


def make_output(address: str, **knobs: Any) -> SyslogOutput:
    given_ = {"type": "syslog", "address": address, **knobs}
    return SyslogOutput(SyslogOutputSettings.model_validate(given_))


def send(output: SyslogOutput, *values: bytes, **columns: Any) -> None:
    output.send(output.prepare(make_block(values, **columns)))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path / "data", {"main": {"durability": "always"}}) as node:
        yield node


# ── real receivers ───────────────────────────────────────────────────────────────────────────────


def test_rsyslogd_reads_rfc5424_over_tcp(tmp_path: Path) -> None:
    columns = {
        "facility": pa.array([23, None, 99], pa.int8()),
        "severity": pa.array([3, None, 9], pa.int8()),
        "hostname": pa.array(["web 1", None, ""]),
        "app_name": pa.array(["shop", None, "ü" * 40]),
        "proc_id": pa.array(["42", None, None]),
        "msg_id": pa.array(["ORDER", None, None]),
        "message": pa.array(["two\nlines ü", None, ""]),
    }
    with (
        run_rsyslogd(tmp_path / "rsyslog", "tcp") as received,
        make_output(received.address, facility="mail", severity="notice", hostname="me") as output,
    ):
        output.check()
        send(output, b"raw", b"no message but a value", b"raw", **columns)
        first, second, third = received.messages(3)
    assert first == {
        "pri": str(23 * 8 + 3),
        "timereported": DATED,
        "hostname": "web_1",
        "app-name": "shop",
        "procid": "42",
        "msgid": "ORDER",
        "msg": "two\nlines ü",
    }
    assert second["pri"] == third["pri"] == str(2 * 8 + 5)
    assert (second["hostname"], second["app-name"]) == ("me", "turnlane")
    assert second["msg"] == "no message but a value"
    assert (third["hostname"], third["app-name"]) == ("me", "_" * 48)


def test_event_id_setting_adds_ids_to_structured_data() -> None:
    with make_output("a:514", event_id="event@32473", framing="newline", hostname="me") as output:
        data = bytes(output.prepare(make_block([b"x", b"y"], 7, queue='a"]\\b')).data)
        (none,) = bytes(
            output.prepare(make_block([b"x"]).drop_columns(["partition", "offset"])).data
        ).splitlines()
    start = f"<14>1 {DATED} me turnlane - - ".encode()
    assert data.splitlines() == [
        start + rb'[event@32473 id="a\"\]\\b/0/7"] x',
        start + rb'[event@32473 id="a\"\]\\b/0/8"] y',
    ]
    assert none == start + b"- x"


@pytest.mark.parametrize("protocol", ["udp", "tcp"])
def test_rsyslogd_reads_rfc3164(tmp_path: Path, protocol: str) -> None:
    columns = {"proc_id": pa.array(["42", None]), "app_name": pa.array(["shop", "cron"])}
    with (
        run_rsyslogd(tmp_path / "rsyslog", protocol) as received,
        make_output(
            received.address, protocol=protocol, format="rfc3164", framing="newline", hostname="me"
        ) as output,
    ):
        output.check()
        send(output, b"two\nlines", b"another", **columns)
        first, second = received.messages(2)
    between = "\n" if protocol == "udp" else " "
    assert first["msg"].strip() == f"two{between}lines"
    assert (first["pri"], first["hostname"], first["app-name"]) == ("14", "me", "shop")
    assert (first["procid"], second["procid"]) == ("42", "-")
    assert "11-18T11:06:40" in first["timereported"]


def test_rsyslogd_receives_over_mutual_tls(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    with (
        run_rsyslogd(tmp_path / "rsyslog", "tls", certificates) as received,
        make_output(received.address, protocol="tls", tls=certificates.client_knob()) as output,
    ):
        output.check()
        send(output, *make_values(0, 500))
        send(output, *make_values(500, 1000))
        found = received.messages(1000)
    assert [each["msg"].encode() for each in found] == make_values(0, 1000)


@pytest.mark.parametrize("framing", ["octet", "newline"])
def test_raw_values_arrive_unchanged(host: Node, framing: str) -> None:
    values = [b"<11>1 - - - - - - any \xff bytes", b"and no syslog"]
    with run_syslog(host, tcp="127.0.0.1:0", framing=framing) as source:
        with make_output(f"127.0.0.1:{get_port(source)}", format="raw", framing=framing) as output:
            send(output, values[0], b"", values[1])
        assert await_values(host.queue("main"), 2) == values


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_octet_counts_equal_the_lengths_of_messages(values: list[bytes]) -> None:
    data = bytes(join_texts(frame_by_length(to_large_binary(pa.array(values, pa.binary())))).data)
    found = []
    while data:
        count, _, rest = data.partition(b" ")
        found.append(rest[: int(count)])
        data = rest[int(count) :]
    assert found == [value for value in values if value]


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_newlines_inside_messages_are_replaced(values: list[bytes]) -> None:
    data = bytes(join_texts(frame_by_newline(to_large_binary(pa.array(values, pa.binary())))).data)
    assert data.split(b"\n")[:-1] == [value.replace(b"\n", b" ") for value in values]


# ── receivers that fail ──────────────────────────────────────────────────────────────────────────


class Receiver:
    """Accepts connections, which the test handles."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def accept(self) -> socket.socket:
        self._listener.settimeout(60)
        connection, _ = self._listener.accept()
        connection.settimeout(60)
        return connection

    def close(self) -> None:
        self._listener.close()


@contextmanager
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    try:
        yield found
    finally:
        found.close()


def test_connection_is_reused_and_replaced_after_the_peer_closes_it() -> None:
    with receiver() as peer, make_output(peer.address, format="raw", framing="newline") as output:
        send(output, b"one")
        first = peer.accept()
        send(output, b"two")
        with first, first.makefile("rb") as stream:
            assert [stream.readline(), stream.readline()] == [b"one\n", b"two\n"]
        # The receiver restarts: the next batch must not use the closed connection.
        send(output, b"three")
        with peer.accept() as second, second.makefile("rb") as stream:
            assert stream.readline() == b"three\n"


def test_batch_is_not_lost_if_the_peer_closes_without_reading() -> None:
    """The reset may come during the send, during the wait or after it: the send fails."""
    with receiver() as peer, make_output(peer.address, format="raw") as output:
        send(output, b"one")
        connection = peer.accept()

        def reset() -> None:
            connection.recv(1 << 20)
            connection.recv(1)  # the second batch has started
            connection.close()  # unread bytes cause a reset

        thread = threading.Thread(target=reset)
        thread.start()
        with pytest.raises(RetryLater, match=peer.address):
            send(output, *[b"x" * 1_000_000] * 30)
        thread.join()


def test_unconfirmed_bytes_are_not_delivered() -> None:
    """The batch fits into the send buffer, and the receiver does not read."""
    with receiver() as peer, make_output(peer.address, format="raw", timeout="500ms") as output:
        peer._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with pytest.raises(RetryLater, match=r"not confirmed \d+ bytes|timed out"):
            send(output, b"x" * 300_000)
        peer.accept().close()


def test_without_confirm_the_send_buffer_is_enough() -> None:
    with receiver() as peer:
        peer._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with make_output(peer.address, format="raw", confirm=False) as output:
            send(output, b"x" * 100_000)
            peer.accept().close()


def test_unavailable_peer_is_retryable() -> None:
    for address in (f"127.0.0.1:{free_port()}", "no-such-host.invalid:514"):
        for protocol in ("tcp", "tls"):
            with make_output(address, protocol=protocol) as output:
                with pytest.raises(RetryLater, match=address):
                    send(output, b"one")
                with pytest.raises(RetryLater, match=address):
                    output.check()
    with (
        make_output("no-such-host.invalid:514", protocol="udp") as output,
        pytest.raises(RetryLater),
    ):
        send(output, b"one")


def test_unusable_udp_address_is_retryable() -> None:
    with make_output("255.255.255.255:514", protocol="udp") as output, pytest.raises(RetryLater):
        output.check()


def test_udp_port_without_a_listener_is_reported() -> None:
    with make_output(f"127.0.0.1:{free_port()}", protocol="udp") as output:

        def refused() -> bool:
            try:
                send(output, b"one")
            except RetryLater:
                return True
            return False

        wait_until(refused, "the refusal to come back")


def test_message_too_large_for_a_datagram_does_not_stop_others() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(("127.0.0.1", 0))
        peer.settimeout(20)
        address = f"127.0.0.1:{peer.getsockname()[1]}"
        with make_output(address, protocol="udp", format="raw") as output:
            with pytest.raises(PartlyDelivered) as caught:
                send(output, b"one", b"x" * 70_000, b"three")
            assert [peer.recv(100), peer.recv(100)] == [b"one", b"three"]
    assert list(caught.value.failures) == [1]
    assert isinstance(caught.value.failures[1], Never)


@pytest.mark.parametrize("identity", ["none", "stranger"])
def test_refused_client_certificate_loses_no_batch(
    host: Node, tmp_path: Path, identity: str
) -> None:
    """In TLS 1.3 the refusal comes after the handshake: a batch could be on its way by then."""
    certificates = Certificates(tmp_path)
    tls: dict[str, Any] = {"ca": certificates.ca}
    if identity == "stranger":
        tls["cert"], tls["key"] = certificates.stranger
    with run_syslog(host, tls=make_tls_settings(certificates, mutual=True)) as source:
        address = f"127.0.0.1:{get_port(source, 'tls')}"
        with make_output(address, protocol="tls", tls=tls) as output:
            with pytest.raises(RetryLater, match=address):
                output.check()
            with pytest.raises(RetryLater, match=address):
                send(output, b"one")


def test_untrusted_server_gets_no_events(host: Node, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    with run_syslog(host, tls=make_tls_settings(certificates, mutual=False)) as source:
        address = f"127.0.0.1:{get_port(source, 'tls')}"
        with (
            make_output(address, protocol="tls") as output,
            pytest.raises(RetryLater, match="certificate"),
        ):
            send(output, b"one")
        with make_output(address, protocol="tls", tls={"verify": False}, format="raw") as output:
            send(output, b"<14>two")
        missing = {"ca": tmp_path / "missing.pem"}
        with (
            make_output(address, protocol="tls", tls=missing) as output,
            pytest.raises(RetryLater, match=r"missing\.pem: No such file"),
        ):
            output.check()
        assert await_values(host.queue("main"), 1) == [b"<14>two"]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"address": "nowhere"}, "not an address"),
        ({"address": "a:514", "tls": {"ca": "x"}}, "needs protocol: tls, not tcp"),
        ({"address": "a:514", "tls": {"cert": "x"}}, "belong together"),
        ({"address": "a:514", "facility": "local9"}, "local7"),
        ({"address": "a:514", "columns": {"massage": "x"}}, "massage"),
        ({"address": "a:514", "event_id": "e@1", "format": "rfc3164"}, "no structured data"),
        ({"address": "a:514", "event_id": "a=b"}, "pattern"),
        ({"address": "a:514", "event_id": "a]b"}, "pattern"),
    ],
)
def test_impossible_settings_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SyslogOutputSettings.model_validate({"type": "syslog", **knobs})
