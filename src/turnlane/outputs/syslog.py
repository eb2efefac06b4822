"""Output ``syslog``: sends events as messages over UDP, TCP or TLS, as RFC 5424 or RFC 3164.

A syslog receiver never confirms a message. Over TCP and TLS the output finds out as much as it can:
whether the receiver closed the connection, before and after a batch, and whether its TCP confirmed
every byte.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import ssl
import struct
import termios
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from turnlane.errors import Never, PartlyDelivered, RetryLater, TurnlaneError
from turnlane.events import Block
from turnlane.formats.lines import NO_TEXTS, JoinedTexts, join_texts, to_large_binary
from turnlane.formats.syslog import (
    FACILITIES,
    SEVERITIES,
    Facility,
    Severity,
    SyslogColumnNames,
    SyslogDefaults,
    format_rfc3164,
    format_rfc5424,
    frame_by_length,
    frame_by_newline,
)
from turnlane.outputs.api import Output, OutputSettings
from turnlane.outputs.connections import ClientTls, ConnectionPool, abort_connection, wait_readable
from turnlane.outputs.templates import make_event_ids
from turnlane.pacing import Backoff
from turnlane.serving.address import Address
from turnlane.units import Duration
from turnlane.validation import ConfigIssue, ContradictorySettings, SettingsModel

# ── sockets ──────────────────────────────────────────────────────────────────────────────────────

_HANDSHAKE_WAIT: Final = 1.0
"""Seconds to wait for the server's first bytes after a TLS 1.3 handshake."""
_CONFIRM_POLL: Final = Backoff(0.0002, 0.02)
"""Seconds between two looks whether the receiver's TCP confirmed everything."""


class StreamSocket:
    """A TCP or TLS connection to a receiver."""

    def __init__(self, settings: SyslogOutputSettings) -> None:
        self._settings = settings
        self._address = address = settings.address
        context = settings.tls.make_context() if settings.protocol == "tls" else None
        limit = settings.connect_timeout
        try:
            plain = socket.create_connection((address.host, address.port), limit)
        except OSError as error:
            raise _make_error(self._address, error) from error
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket = plain
            if context is not None:
                self._socket = tls = context.wrap_socket(plain, server_hostname=address.host)
                # In TLS 1.3 the client's handshake ends before the server has checked the client's
                # certificate. The server's first bytes are a session ticket, or a refusal: then
                # nothing may be sent.
                if tls.version() == "TLSv1.3" and not tls.pending():
                    wait_readable(tls, min(_HANDSHAKE_WAIT, limit))
        except OSError as error:
            plain.close()
            raise _make_error(self._address, error) from error
        self._socket.settimeout(settings.timeout)

    @property
    def is_open(self) -> bool:
        """Whether the receiver has not closed the connection, as far as is known here."""
        return self._find_error() is None

    def send(self, messages: JoinedTexts) -> None:
        """Send all messages and wait for the confirmation of TCP. Raises ``RetryLater``."""
        self._check_open()
        deadline = time.monotonic() + self._settings.timeout
        try:
            self._socket.sendall(memoryview(messages.data))
        except OSError as error:
            raise _make_error(self._address, error) from error
        looks = 1
        while self._settings.confirm and (count := _count_unconfirmed_bytes(self._socket)):
            self._check_open()
            if time.monotonic() > deadline:
                raise RetryLater(f"{self._address} has not confirmed {count} bytes in time")
            wait_readable(self._socket, _CONFIRM_POLL.get_wait(looks))  # also ends at a close
            looks += 1
        self._check_open()

    def _check_open(self) -> None:
        error = self._find_error()
        if error is not None:
            raise _make_error(self._address, error)

    def _find_error(self) -> OSError | None:
        """Return the error of the connection, if there is one. Drops bytes that were received."""
        try:
            self._socket.settimeout(0)
            while self._socket.recv(4096):
                pass
        except (BlockingIOError, ssl.SSLWantReadError):
            return None
        except OSError as error:
            return error
        finally:
            with contextlib.suppress(OSError):
                self._socket.settimeout(self._settings.timeout)
        return ConnectionResetError("the receiver closed the connection")

    def cancel(self) -> None:
        """Make a thread that sends fail."""
        abort_connection(self._socket)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class DatagramSocket:
    """Sends each message in its own datagram. Lost datagrams are hardly ever noticed."""

    def __init__(self, settings: SyslogOutputSettings) -> None:
        self._address = address = settings.address
        try:
            family, kind, proto, _, place = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_DGRAM
            )[0]
            self._socket = socket.socket(family, kind, proto)
        except OSError as error:
            raise _make_error(self._address, error) from error
        self._socket.settimeout(settings.timeout)
        try:
            self._socket.connect(place)
        except OSError as error:
            self._socket.close()
            raise _make_error(self._address, error) from error

    @property
    def is_open(self) -> bool:
        """Always true: UDP has no connection."""
        return True

    def send(self, messages: JoinedTexts) -> None:
        """Send the messages one by one. Raises ``PartlyDelivered`` if some are too large."""
        data, first = memoryview(messages.data), 0
        failures: dict[int, TurnlaneError] = {}
        for row, end in enumerate(messages.ends.tolist()):
            try:
                self._socket.send(data[first:end])
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise _make_error(self._address, error) from error
                failures[row] = Never(
                    f"the message of {end - first} bytes does not fit into a datagram"
                )
            first = end
        if failures:
            raise PartlyDelivered(failures)

    def cancel(self) -> None:
        """Do nothing: sending a datagram never waits long."""

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _make_error(address: Address, error: OSError) -> RetryLater:
    return RetryLater(f"{address}: {error.strerror or error}")


def _count_unconfirmed_bytes(connection: socket.socket) -> int:
    """Return the number of bytes that the receiver's TCP has not confirmed."""
    count: int = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
    return count


# ── the output ───────────────────────────────────────────────────────────────────────────────────


class SyslogColumns(SettingsModel):
    """The columns for the parts of a message. The defaults are the names of `parse: syslog`."""

    facility: str = Field(default="facility", description="A number from 0 to 23.")
    severity: str = Field(default="severity", description="A number from 0 to 7.")
    time: str = Field(default="time", description="If missing or null: `timestamp`.")
    hostname: str = Field(default="hostname", description="The host that the event comes from.")
    app_name: str = Field(default="app_name", description="The program; RFC 3164's tag.")
    proc_id: str = Field(default="proc_id", description="The process.")
    msg_id: str = Field(default="msg_id", description="The kind of message.")
    message: str = Field(
        default="message",
        description="The text. If missing or null: `value`. `payload` is the whole event as JSON.",
    )


class SyslogOutputSettings(OutputSettings):
    """The settings of the output ``syslog``."""

    address: Address = Field(description="The receiver.", examples=["logs.example.com:514"])
    protocol: Literal["udp", "tcp", "tls"] = Field(
        default="tcp", description="The transport. UDP loses messages without notice."
    )
    tls: ClientTls = Field(
        default_factory=ClientTls,
        description="For `tls`: the authorities to trust, and the certificate to present.",
    )
    format: Literal["rfc5424", "rfc3164", "raw"] = Field(
        default="rfc5424", description="The format of messages; `raw` sends the unchanged value."
    )
    framing: Literal["octet", "newline"] = Field(
        default="octet",
        description="How messages are separated over TCP and TLS: by their length before each one "
        "(`octet`), or by a newline after each one (`newline`), which replaces newlines inside "
        "messages by spaces.",
    )
    facility: Facility = Field(default="user", description="For events without a facility.")
    severity: Severity = Field(default="info", description="For events without a severity.")
    hostname: str | None = Field(
        default=None,
        min_length=1,
        description="For events without a host. Default: the name of the sending machine.",
    )
    app_name: str = Field(
        default="turnlane", min_length=1, description="For events without a program."
    )
    columns: SyslogColumns = Field(
        default_factory=SyslogColumns, description="The columns for the parts of a message."
    )
    event_id: str | None = Field(
        default=None,
        pattern=r"^[!#-<>-\\^-~]{1,32}$",
        description="For `rfc5424`: the element of structured data that contains the event's id, "
        "so that a receiver can drop repeated events. Its name should end in your enterprise "
        "number. Default: none.",
        examples=["event@32473"],
    )
    confirm: bool = Field(
        default=True,
        description="Over TCP and TLS: whether a batch counts as delivered only once the "
        "receiver's operating system has confirmed every byte.",
    )
    connect_timeout: Duration = Field(
        default=10.0, gt=0, description="How long it may take to connect."
    )
    timeout: Duration = Field(default=20.0, gt=0, description="How long a batch may take.")

    @property
    def wanted_columns(self) -> frozenset[str] | None:
        """None for raw values; otherwise any column."""
        return frozenset() if self.format == "raw" else None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        issues = []
        if self.tls != ClientTls() and self.protocol != "tls":
            issues.append(ConfigIssue("tls", f"needs protocol: tls, not {self.protocol}"))
        if self.event_id is not None and self.format != "rfc5424":
            message = f"needs format: rfc5424; {self.format} has no structured data"
            issues.append(ConfigIssue("event_id", message))
        if issues:
            raise ContradictorySettings(issues)
        return self


class SyslogOutput(Output):
    """Sends messages; keeps a connection for each thread that sends."""

    settings_type = SyslogOutputSettings
    settings: SyslogOutputSettings

    def __init__(self, settings: SyslogOutputSettings) -> None:
        super().__init__(settings)
        self._names = SyslogColumnNames(**settings.columns.model_dump())
        self._otherwise = SyslogDefaults(
            FACILITIES.index(settings.facility),
            SEVERITIES.index(settings.severity),
            settings.hostname or socket.gethostname(),
            settings.app_name,
        )
        kind = DatagramSocket if settings.protocol == "udp" else StreamSocket
        connect: Callable[[], StreamSocket | DatagramSocket] = partial(kind, settings)
        self._sockets = ConnectionPool(connect)

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """Return the framed messages in one buffer."""
        settings = self.settings
        match settings.format:
            case "raw":
                messages = to_large_binary(block.column("payload"))
            case "rfc3164":
                messages = format_rfc3164(block, self._names, self._otherwise)
            case "rfc5424":
                element = settings.event_id
                ids = None if element is None else make_event_ids(block)
                named_ids = None if element is None or ids is None else (element, ids)
                messages = format_rfc5424(block, self._names, self._otherwise, named_ids)
        if settings.protocol != "udp":
            is_counted = settings.framing == "octet"
            messages = frame_by_length(messages) if is_counted else frame_by_newline(messages)
        return join_texts(messages)

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        messages: JoinedTexts = prepared
        with self._sockets.borrow() as connection:
            connection.send(messages)

    def check(self) -> None:
        """Connect. With UDP, only look up the host: a receiver would not answer."""
        with self._sockets.borrow() as connection:
            connection.send(NO_TEXTS)

    def cancel(self) -> None:
        self._sockets.cancel()

    def close(self) -> None:
        self._sockets.close()
