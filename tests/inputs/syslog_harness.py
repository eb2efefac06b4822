"""Syslog inputs, and the programs that send to them."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.certificates import CertAndKey, Certificates
from tests.conftest import skip_or_fail
from tests.contract.harness import wait_until
from turnlane.events import Event, iterate_events
from turnlane.inputs.syslog import SyslogInput, SyslogSettings
from turnlane.node.node import Node
from turnlane.queues.buffered import BufferedQueue

ANYWHERE = "127.0.0.1:0"


@contextmanager
def run_syslog(host: Node, **knobs: Any) -> Iterator[SyslogInput]:
    """Run a syslog input, and stop it at the end."""
    knobs = {"queue": "main", **knobs}
    with SyslogInput(SyslogSettings.model_validate(knobs), host) as found:
        found.start()
        yield found
        found.stop(10.0)


def get_port(source: SyslogInput, kind: str = "tcp") -> int:
    return source.addresses[kind].port


def connect_to(source: SyslogInput) -> socket.socket:
    return socket.create_connection(("127.0.0.1", get_port(source)), timeout=20)


def send(source: SyslogInput, *messages: bytes) -> None:
    """Send over a new connection and close it."""
    with connect_to(source) as client:
        client.sendall(b"".join(messages))


def send_datagrams(source: SyslogInput, *messages: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        for message in messages:
            client.sendto(message, ("127.0.0.1", get_port(source, "udp")))


def read_events(queue: BufferedQueue) -> list[Event]:
    found: list[Event] = []
    while (read := queue.read(queue.low + len(found), 100_000)) is not None:
        found += iterate_events(read[1], read[0])
    return found


def await_events(queue: BufferedQueue, count: int) -> list[Event]:
    """Wait for ``count`` values, check that there are no more, and return them."""
    wait_until(lambda: queue.end >= count, f"{count} events in the queue")
    found = read_events(queue)
    assert len(found) == count
    return found


def await_values(queue: BufferedQueue, count: int) -> list[bytes | None]:
    return [event.value for event in await_events(queue, count)]


def find_program(name: str) -> str:
    """Return the path of a program. Without it, the test is skipped here and fails in CI."""
    found = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
    if found is None:
        skip_or_fail(f"{name} is not installed")
    return found


def run_logger(*arguments: object) -> None:
    """Run util-linux' logger."""
    subprocess.run([find_program("logger"), *map(str, arguments)], check=True, timeout=20)


@contextmanager
def run_configured_rsyslogd(place: Path, config: str) -> Iterator[None]:
    """Run a real rsyslogd; its output is in a file beside its configuration."""
    (place / "rsyslog.conf").write_text(config)
    with (place / "said").open("wb") as said:
        daemon = subprocess.Popen(
            [find_program("rsyslogd"), "-n", "-f", place / "rsyslog.conf", "-i", place / "pid"],
            stdout=said,
            stderr=said,
        )
    try:
        wait_until((place / "pid").exists, "rsyslogd", 60)
        yield
    finally:
        daemon.terminate()
        daemon.wait(60)


@contextmanager
def run_rsyslogd_with_action(place: Path, action: str, settings: str = "") -> Iterator[Path]:
    """Run an rsyslogd that applies ``action`` to messages of the unix socket that is yielded."""
    place.mkdir()
    door = place / "log"
    config = f"""
        global(workDirectory="{place}" {settings})
        module(load="imuxsock" SysSock.Use="off")
        input(type="imuxsock" Socket="{door}" RateLimit.Interval="0" ParseTrusted="off")
        template(name="sent" type="string" string="<%PRI%>%MSG:2:$%")
        action({action} template="sent" action.resumeRetryCount="-1" action.resumeInterval="1")
        """
    with run_configured_rsyslogd(place, config):
        wait_until(door.exists, "rsyslogd's socket")
        yield door


def send_to_socket(door: Path, *messages: bytes) -> None:
    """Send to a unix datagram socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.connect(str(door))
        for message in messages:
            client.send(message)


def make_tls_settings(certificates: Certificates, *, mutual: bool) -> dict[str, Any]:
    """Return the ``tls`` setting."""
    return {"listen": ANYWHERE, **certificates.server_knob(mutual=mutual)}


def connect_with_tls(
    source: SyslogInput, certificates: Certificates, identity: CertAndKey | None = None
) -> ssl.SSLSocket:
    """Open a TLS connection, with or without a client certificate."""
    context = certificates.client_context(identity)
    plain = socket.create_connection(("127.0.0.1", get_port(source, "tls")), timeout=20)
    try:
        return context.wrap_socket(plain, server_hostname="127.0.0.1")
    except BaseException:
        plain.close()
        raise
