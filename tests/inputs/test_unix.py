"""A unix datagram socket as an input, with messages of the C library and of logger."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.harness import wait_until
from tests.inputs.syslog_harness import await_events, await_values, run_logger, send_to_socket
from turnlane.errors import AddressTaken, ConfigError
from turnlane.inputs.datagrams import UnixInput, UnixSettings
from turnlane.node.node import Node


@contextmanager
def bound(host: Node, path: Path, **knobs: Any) -> Iterator[UnixInput]:
    settings = UnixSettings.model_validate({"queue": "main", "path": path, **knobs})
    with UnixInput(settings, host) as source:
        source.start()
        yield source
        source.stop(10.0)


def test_logger_messages_are_published(host: Node, tmp_path: Path) -> None:
    path = tmp_path / "log"
    with bound(host, path, credentials=True, mode="0600") as source:
        assert source.address == f"unix://{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        run_logger("-u", path, "-p", "user.err", "the message")
        [event] = await_events(host.queue("main"), 1)
    assert event.value is not None
    assert event.value.startswith(b"<11>")
    assert event.value.endswith(b"the message")
    assert event.severity == 3
    assert event.source is not None
    assert f"uid={os.getuid()}" in event.source
    assert not path.exists()


def test_without_credentials_the_source_is_the_path(host: Node, tmp_path: Path) -> None:
    with bound(host, tmp_path / "log"):
        send_to_socket(tmp_path / "log", b"<13>a\n", b"<13>b\0")
        events = await_events(host.queue("main"), 2)
    assert [event.value for event in events] == [b"<13>a", b"<13>b"]
    assert {event.source for event in events} == {str(tmp_path / "log")}


def test_stop_persists_sent_messages(host: Node, tmp_path: Path) -> None:
    with bound(host, tmp_path / "log", flow="full") as source:
        send_to_socket(tmp_path / "log", *[b"<13>hello"] * 3_000)
        source.stop(20.0)
        assert source.counters.events == 3_000
    await_values(host.queue("main"), 3_000)


def test_full_queue_drops_and_counts(host: Node, tmp_path: Path) -> None:
    with bound(host, tmp_path / "log", queue="narrow", ack="accepted") as source:
        send_to_socket(tmp_path / "log", *[b"<13>hello"] * 30)
        wait_until(lambda: source.counters.events + source.counters.dropped == 30)
        assert source.counters.events == 10


def test_too_long_message_is_cut_and_counted(host: Node, tmp_path: Path) -> None:
    with bound(host, tmp_path / "log", max_message_bytes="64Ki") as source:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            client.sendto(b"x" * 100_000, str(tmp_path / "log"))
        assert list(map(len, filter(None, await_values(host.queue("main"), 2)))) == [65_536, 34_464]
        assert source.counters.invalid == 1


@pytest.mark.parametrize("credentials", [False, True])
def test_attached_descriptors_do_not_stay_open(
    host: Node, tmp_path: Path, credentials: bool
) -> None:
    """Otherwise any sender could use up the descriptors of the node."""
    with (
        bound(host, tmp_path / "log", credentials=credentials),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client,
    ):
        client.connect(str(tmp_path / "log"))
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            socket.send_fds(client, [b"<13>a"], [0, 1, 2])
        await_values(host.queue("main"), 20)
        assert len(os.listdir("/proc/self/fd")) < before + 20


def test_stale_socket_is_replaced(host: Node, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stale:
        stale.bind(str(tmp_path / "log"))
    with bound(host, tmp_path / "log"):
        send_to_socket(tmp_path / "log", b"<13>a")
        await_values(host.queue("main"), 1)


def test_socket_in_use_or_a_file_is_not_replaced(host: Node, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for name, words in (("file", "not a socket"), ("log", "in use"), ("no/such", "No such file")):
        with (
            bound(host, tmp_path / "log"),
            pytest.raises((AddressTaken, ConfigError), match=words),
            bound(host, tmp_path / name),
        ):
            pass
    assert (tmp_path / "file").read_text() == "precious"
