"""Addresses to listen on, and the rule that only the safe ones are public."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self

from pydantic.json_schema import JsonSchemaValue

from turnlane.errors import AddressTaken, ConfigError
from turnlane.quantities import Written

LOOPBACK: Final = "127.0.0.1"

_HELP: Final = "write host:port, such as 127.0.0.1:8088, [::1]:8088, or :8088 for this machine only"
_FORM: Final = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9._*-]*)):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Address(Written):
    """A host and a port; port 0 lets the operating system choose one."""

    schema: ClassVar[JsonSchemaValue] = {
        "type": "string",
        "pattern": f"^(?:{_FORM.pattern})$",
        "description": "an address: host:port",
        "examples": ["127.0.0.1:8088", "[::1]:8088", ":8088"],
    }

    host: str
    port: int

    @classmethod
    def parse(cls, value: object) -> Self:
        """An address from ``127.0.0.1:8088``, ``[::1]:514``, ``*:80`` (everywhere) or ``:8088``."""
        if isinstance(value, cls):
            return value
        match = _FORM.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None or int(match[3]) > 65_535:
            raise ValueError(f"{value!r} is not an address; {_HELP}")
        host = match[1] or match[2] or LOOPBACK
        return cls("0.0.0.0" if host == "*" else host, int(match[3]))  # noqa: S104 - asked for

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. A name other than ``localhost`` might be any."""
        if self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def with_port(self, port: int) -> Self:
        """The same host with the port that was really given."""
        return replace(self, port=port)

    def listen(self, kind: int = socket.SOCK_STREAM, *, knob: str = "listen") -> socket.socket:
        """A bound socket, not yet listening.

        Raises ``ConfigError``, or ``AddressTaken`` if another has it, naming ``knob``.
        """
        try:
            family, _, proto, _, place = socket.getaddrinfo(self.host, self.port, type=kind)[0]
        except OSError as error:
            raise ConfigError(knob, f"{self}: there is no such host ({error.strerror})") from None
        # With its protocol named: asyncio turns Nagle's delay (40 ms an answer) off only then.
        bound = socket.socket(family, kind, proto)
        try:
            if kind == socket.SOCK_STREAM:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(place)
        except OSError as error:
            bound.close()
            trouble = AddressTaken if error.errno == errno.EADDRINUSE else ConfigError
            raise trouble(knob, f"cannot listen on {self}: {error.strerror}") from None
        return bound

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def named(host: str) -> str:
    """A sender's host in the one form for it: one that came by IPv4 to IPv6's socket, as IPv4."""
    return host.removeprefix("::ffff:")


def check_exposed(
    address: Address,
    *,
    tls: bool,
    tokens: bool,
    insecure: bool,
    knob: str = "listen",
    by: str = "tokens",
) -> None:
    """Refuse to serve others than this machine unprotected, unless told to. ``ConfigError``.

    ``by`` is the setting by which clients are told from strangers.
    """
    if address.is_loopback or insecure or (tls and tokens):
        return
    missing = " and ".join(word for word, there in (("tls", tls), (by, tokens)) if not there)
    raise ConfigError(
        knob,
        f"{address} can be reached from outside, which needs {missing}: configure that, listen on "
        f"{LOOPBACK}:{address.port}, or force it with insecure: true",
    )
