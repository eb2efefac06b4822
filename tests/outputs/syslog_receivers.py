"""rsyslogd as the receiver of syslog messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.certificates import Certificates
from tests.contract.harness import wait_until
from tests.inputs.syslog_harness import run_configured_rsyslogd
from tests.ports import free_port

_FIELDS = ("pri", "hostname", "app-name", "procid", "msgid", "msg")


class ReceivedMessages:
    """The messages that a receiver wrote to a file."""

    def __init__(self, port: int, file: Path) -> None:
        self.address = f"127.0.0.1:{port}"
        self._file = file

    def messages(self, count: int) -> list[dict[str, str]]:
        """Wait for ``count`` messages and return them."""
        wait_until(lambda: len(self._lines()) >= count, f"{count} messages at rsyslogd", 60)
        found = [json.loads(line) for line in self._lines()]
        assert len(found) == count
        return found

    def _lines(self) -> list[bytes]:
        text = self._file.read_bytes() if self._file.exists() else b""
        return text[: text.rfind(b"\n") + 1].splitlines()


@contextmanager
def run_rsyslogd(
    place: Path, protocol: str, certificates: Certificates | None = None
) -> Iterator[ReceivedMessages]:
    """Run an rsyslogd that writes the parsed parts of each message to a file."""
    place.mkdir()
    udp = free_port()
    port_file = place / "port"
    listener = (
        f'module(load="imudp") input(type="imudp" address="127.0.0.1" port="{udp}")'
        if protocol == "udp"
        else f'module(load="imtcp" {_tls(certificates)}) '
        f'input(type="imtcp" address="127.0.0.1" port="0" listenPortFileName="{port_file}")'
    )
    config = f"""
        global(workDirectory="{place}" maxMessageSize="64k" {_files(certificates)}
               parser.escapeControlCharactersOnReceive="off")
        {listener}
        template(name="all" type="string" string="{_template()}")
        action(type="omfile" file="{place / "out"}" template="all" asyncWriting="off")
        """
    with run_configured_rsyslogd(place, config):
        if protocol != "udp":
            wait_until(
                lambda: port_file.exists() and port_file.read_text().strip() != "", "its port", 60
            )
        yield ReceivedMessages(
            udp if protocol == "udp" else int(port_file.read_text()), place / "out"
        )


def _template() -> str:
    fields = ["timereported:::jsonf,date-rfc3339", *(f"{name}:::jsonf" for name in _FIELDS)]
    return "{" + ",".join(f"%{field}%" for field in fields) + "}\\n"


def _tls(certificates: Certificates | None) -> str:
    if certificates is None:
        return ""
    return 'StreamDriver.Name="gtls" StreamDriver.Mode="1" StreamDriver.AuthMode="x509/certvalid"'


def _files(certificates: Certificates | None) -> str:
    if certificates is None:
        return ""
    cert, key = certificates.server
    return (
        f'defaultNetstreamDriverCAFile="{certificates.ca}" '
        f'defaultNetstreamDriverCertFile="{cert}" defaultNetstreamDriverKeyFile="{key}"'
    )
