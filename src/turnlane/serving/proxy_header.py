"""The PROXY protocol, versions 1 and 2: a balancer says in front of a connection who its client is.

The header comes before everything else, also before a TLS handshake. :class:`ProxyHeaderReader`
looks at the bytes that have arrived and takes only those of the header, so that TLS and HTTP find
the rest of the stream untouched in the socket.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from typing import Final, NamedTuple

from turnlane.serving.address import normalize_host

HEADER_SECONDS: Final = 10.0
"""How long the header of a new connection may take."""

_SIGNATURE: Final = b"\r\n\r\n\0\r\nQUIT\n"
"""The beginning of version 2; version 1 is a line of text."""
_LINE_START: Final = b"PROXY "
_MAX_LINE_BYTES: Final = 107
_FIXED: Final = struct.Struct("!12sBBH")
"""Version 2: signature, version and command, family and transport, number of bytes that follow."""
_MAX_BYTES: Final = 4_096
"""The longest header, with its extensions, which are skipped."""
_LOCAL, _PROXY = 0x20, 0x21
_ADDRESSES: Final = {1: struct.Struct("!4s4sHH"), 2: struct.Struct("!16s16sHH")}
"""By address family: the addresses of client and balancer, and their ports."""
_FAMILIES_WITHOUT_HOST: Final = (0, 3)
"""The family is not known, or it is a unix socket."""
_IP_VERSIONS: Final = {b"TCP4": 4, b"TCP6": 6}


class InvalidProxyHeader(ValueError):
    """A connection does not begin with a valid PROXY header."""


class ProxyHeader(NamedTuple):
    """A complete header."""

    size: int
    """How many bytes of the stream it takes."""
    client: tuple[str, int] | None
    """Host and port; ``None``: the balancer speaks for itself, or does not know the client."""


def is_proxy_header(data: bytes) -> bool:
    """Whether a stream begins with a PROXY header, as far as its first bytes tell."""
    return data.startswith((_SIGNATURE, b"PROXY TCP4 ", b"PROXY TCP6 ", b"PROXY UNKNOWN"))


def parse_proxy_header(data: bytes) -> ProxyHeader | None:
    """Return the header at the beginning of ``data``; ``None`` if its rest is missing.

    Raises :class:`InvalidProxyHeader`.
    """
    if data.startswith(_SIGNATURE):
        return _parse_binary(data)
    if data.startswith(_LINE_START):
        return _parse_line(data)
    if _SIGNATURE.startswith(data) or _LINE_START.startswith(data):
        return None
    raise InvalidProxyHeader("the connection does not begin with a PROXY header")


def _parse_line(data: bytes) -> ProxyHeader | None:
    line, end, _ = data[:_MAX_LINE_BYTES].partition(b"\r\n")
    if not end:
        if len(data) < _MAX_LINE_BYTES:
            return None
        raise InvalidProxyHeader(f"the PROXY line has no end within {_MAX_LINE_BYTES} bytes")
    fields = line.split(b" ")
    size = len(line) + len(end)
    if fields[1] == b"UNKNOWN":
        return ProxyHeader(size, None)
    try:
        _, protocol, host, balancer, port, balancer_port = fields
        for address in (host, balancer):
            if ipaddress.ip_address(address.decode("ascii")).version != _IP_VERSIONS[protocol]:
                raise InvalidProxyHeader(f"the PROXY line {line!r} has addresses of two families")
        ports = [int(port), int(balancer_port)]
    except (ValueError, KeyError):
        raise InvalidProxyHeader(f"the PROXY line {line!r} is not valid") from None
    if not all(0 <= each < 1 << 16 for each in ports):
        raise InvalidProxyHeader(f"the PROXY line {line!r} has a port above 65535")
    return ProxyHeader(size, (normalize_host(host.decode("ascii")), ports[0]))


def _parse_binary(data: bytes) -> ProxyHeader | None:
    if len(data) < _FIXED.size:
        return None
    _, command, family, rest = _FIXED.unpack_from(data)
    size = _FIXED.size + rest
    if command not in (_LOCAL, _PROXY):
        raise InvalidProxyHeader(f"the PROXY header has version and command {command:#04x}")
    if size > _MAX_BYTES:
        raise InvalidProxyHeader(f"the PROXY header has {size} bytes, more than {_MAX_BYTES}")
    if len(data) < size:
        return None
    if command == _LOCAL or family >> 4 in _FAMILIES_WITHOUT_HOST:
        return ProxyHeader(size, None)
    addresses = _ADDRESSES.get(family >> 4)
    if addresses is None or rest < addresses.size:
        raise InvalidProxyHeader(f"the PROXY header has no addresses of family {family:#04x}")
    packed, _, port, _ = addresses.unpack_from(data, _FIXED.size)
    host = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
    return ProxyHeader(size, (normalize_host(host), port))


class ProxyHeaderReader:
    """Reads the header of one connection, and no byte more."""

    def __init__(self) -> None:
        self._received = b""

    @property
    def has_begun(self) -> bool:
        """Whether any byte has arrived."""
        return bool(self._received)

    def receive(self, connection: socket.socket) -> ProxyHeader | None:
        """Return the header from a socket that does not block; ``None`` if its rest is missing.

        Raises :class:`InvalidProxyHeader`, also if the connection has ended, and ``OSError``.
        """
        try:
            arrived = connection.recv(_MAX_BYTES, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return None
        if not arrived:
            raise InvalidProxyHeader("the connection has ended before its PROXY header")
        before, self._received = len(self._received), self._received + arrived
        header = parse_proxy_header(self._received)
        taken = len(self._received) if header is None else header.size
        connection.recv(taken - before)
        self._received = self._received[:taken]
        return header
