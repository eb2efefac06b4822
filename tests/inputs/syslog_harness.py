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

import trustme

from tests.conftest import skip_or_fail
from tests.contract.harness import wait_until
from turnlane.events import Event, events_of
from turnlane.inputs.syslog import SyslogInput, SyslogSettings
from turnlane.node.node import Node
from turnlane.queues.holding import HoldingQueue

ANYWHERE = "127.0.0.1:0"


@contextmanager
def listening(host: Node, **knobs: Any) -> Iterator[SyslogInput]:
    """A syslog input that listens; stopped properly at the end."""
    knobs = {"queue": "main", **knobs}
    with SyslogInput(SyslogSettings.model_validate(knobs), host) as found:
        found.start()
        yield found
        found.stop(10.0)


def port(source: SyslogInput, kind: str = "tcp") -> int:
    return source.addresses[kind].port


def connected(source: SyslogInput) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port(source)), timeout=20)


def send(source: SyslogInput, *messages: bytes) -> None:
    """Send over a connection of its own and close it."""
    with connected(source) as client:
        client.sendall(b"".join(messages))


def send_datagrams(source: SyslogInput, *messages: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        for message in messages:
            client.sendto(message, ("127.0.0.1", port(source, "udp")))


def events_in(queue: HoldingQueue) -> list[Event]:
    found: list[Event] = []
    while (read := queue.read(queue.low + len(found), 100_000)) is not None:
        found += events_of(read[1], read[0])
    return found


def arrived(queue: HoldingQueue, count: int) -> list[Event]:
    """What is in the queue once there is so much; and there is no more."""
    wait_until(lambda: queue.end >= count, f"{count} events in the queue")
    found = events_in(queue)
    assert len(found) == count
    return found


def values_in(queue: HoldingQueue, count: int) -> list[bytes | None]:
    return [event.value for event in arrived(queue, count)]


def program(name: str) -> str:
    """Where a program is; tests that need it are skipped here without it, and fail in CI."""
    found = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
    if found is None:
        skip_or_fail(f"{name} is not installed")
    return found


def logger(*arguments: object) -> None:
    """Run util-linux' logger."""
    subprocess.run([program("logger"), *map(str, arguments)], check=True, timeout=20)


@contextmanager
def rsyslogd(place: Path, action: str, settings: str = "") -> Iterator[Path]:
    """A real rsyslogd that does ``action`` with whatever is sent to the unix socket it yields."""
    place.mkdir()
    door = place / "log"
    (place / "rsyslog.conf").write_text(
        f"""
        global(workDirectory="{place}" {settings})
        module(load="imuxsock" SysSock.Use="off")
        input(type="imuxsock" Socket="{door}" RateLimit.Interval="0" ParseTrusted="off")
        template(name="sent" type="string" string="<%PRI%>%MSG:2:$%")
        action({action} template="sent" action.resumeRetryCount="-1" action.resumeInterval="1")
        """
    )
    with (place / "said").open("wb") as said:
        daemon = subprocess.Popen(
            [program("rsyslogd"), "-n", "-f", place / "rsyslog.conf", "-i", place / "pid"],
            stdout=said,
            stderr=said,
        )
    try:
        wait_until(door.exists, "rsyslogd's socket")
        yield door
    finally:
        daemon.terminate()
        daemon.wait(20)


def say(door: Path, *messages: bytes) -> None:
    """Send to a unix datagram socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.connect(str(door))
        for message in messages:
            client.send(message)


class Certificates:
    """An authority, a server's certificate of it, and clients' ones, as files."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._authority = trustme.CA()
        self.ca = place / "ca.pem"
        self._authority.cert_pem.write_to_path(self.ca)
        self.server = self._issue("server", self._authority)
        self.client = self._issue("client", self._authority)
        self.stranger = self._issue("stranger", trustme.CA())

    def _issue(self, name: str, authority: trustme.CA) -> tuple[Path, Path]:
        issued = authority.issue_cert("127.0.0.1", "localhost", common_name=name)
        cert, key = self._place / f"{name}.pem", self._place / f"{name}.key"
        for index, part in enumerate(issued.cert_chain_pems):
            part.write_to_path(cert, append=index > 0)
        issued.private_key_pem.write_to_path(key)
        return cert, key

    def listener(self, *, mutual: bool) -> dict[str, Any]:
        """The ``tls`` knob."""
        cert, key = self.server
        knob = {"listen": ANYWHERE, "cert": cert, "key": key}
        return {**knob, "client_ca": self.ca} if mutual else knob

    def connect(
        self, source: SyslogInput, identity: tuple[Path, Path] | None = None
    ) -> ssl.SSLSocket:
        """A client's TLS connection, with a certificate of its own or without."""
        context = ssl.create_default_context(cafile=self.ca)
        if identity is not None:
            context.load_cert_chain(*identity)
        plain = socket.create_connection(("127.0.0.1", port(source, "tls")), timeout=20)
        try:
            return context.wrap_socket(plain, server_hostname="127.0.0.1")
        except BaseException:
            plain.close()
            raise
