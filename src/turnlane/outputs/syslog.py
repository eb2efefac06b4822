"""Output ``syslog``: events as messages over UDP, TCP or TLS, in the form of either RFC."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import select
import socket
import ssl
import struct
import termios
import time
from typing import Any, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnlane.errors import Never, PartlyDelivered, RetryLater, TurnlaneError
from turnlane.events import Block
from turnlane.formats.lines import NOTHING, Strung, large, strung
from turnlane.formats.syslog import (
    FACILITIES,
    SEVERITIES,
    Facility,
    Names,
    Otherwise,
    Severity,
    newline_ended,
    octet_counted,
    rfc3164,
    rfc5424,
)
from turnlane.outputs.api import Output, OutputSettings, ids_of
from turnlane.outputs.http_connections import ClientTls, hang_up
from turnlane.outputs.pool import Pool
from turnlane.serving.address import Address
from turnlane.units import Duration
from turnlane.validation import Contradiction, Problem

# ── syslog_sockets ──
# Sockets to a syslog receiver, which never says that it has got anything.
#
# What can be known is found out all the same: whether the other side has hung up, before and
# after a
# batch, and whether its TCP has confirmed every byte.

_GREETING_SECONDS: Final = 1.0
_SHORTEST_LOOK: Final = 0.0002
_LONGEST_LOOK: Final = 0.02


class Limits(NamedTuple):
    """How long things may take, in seconds."""

    connect: float
    send: float


class StreamSocket:
    """A TCP or TLS connection."""

    def __init__(
        self, address: Address, limits: Limits, tls: ClientTls | None, *, confirm: bool
    ) -> None:
        self._address = address
        self._limits = limits
        self._confirm = confirm
        context = tls.context() if tls is not None else None
        try:
            plain = socket.create_connection((address.host, address.port), limits.connect)
        except OSError as error:
            raise self._failed(error) from error
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket = self._secured(plain, context) if context is not None else plain
        except OSError as error:
            plain.close()
            raise self._failed(error) from error
        self._socket.settimeout(limits.send)

    def _secured(self, plain: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        secured = context.wrap_socket(plain, server_hostname=self._address.host)
        # In TLS 1.3 the client is through before the server has looked at its certificate. What
        # comes first is a ticket for the next time, or a refusal: then nothing must be sent.
        if secured.version() == "TLSv1.3" and not secured.pending():
            _readable(secured, min(_GREETING_SECONDS, self._limits.connect))
        return secured

    @property
    def is_open(self) -> bool:
        """Whether the other side has not hung up, as far as is known here."""
        return self._trouble() is None

    def send(self, messages: Strung) -> None:
        """Send all of it, and wait until the other side's TCP has it. Raises ``RetryLater``."""
        if (trouble := self._trouble()) is not None:
            raise self._failed(trouble)
        deadline = time.monotonic() + self._limits.send
        try:
            self._socket.sendall(memoryview(messages.data))
        except OSError as error:
            raise self._failed(error) from error
        if self._confirm:
            self._await_confirmation(deadline)
        if (trouble := self._trouble()) is not None:
            raise self._failed(trouble)

    def _await_confirmation(self, deadline: float) -> None:
        look = _SHORTEST_LOOK
        while unconfirmed := _unconfirmed(self._socket):
            if (trouble := self._trouble()) is not None:
                raise self._failed(trouble)
            if time.monotonic() > deadline:
                raise RetryLater(f"{self._address} has not confirmed {unconfirmed} bytes in time")
            _readable(self._socket, look)  # woken early if it hangs up
            look = min(2 * look, _LONGEST_LOOK)

    def _trouble(self) -> OSError | None:
        """What is known to be wrong. What the other side might say is no answer, and is dropped."""
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
                self._socket.settimeout(self._limits.send)
        return ConnectionResetError("it has hung up")

    def _failed(self, error: OSError) -> RetryLater:
        return RetryLater(f"{self._address}: {error.strerror or error}")

    def cancel(self) -> None:
        """Have whoever sends fail."""
        hang_up(self._socket)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class DatagramSocket:
    """Sends each message in a datagram of its own, and hardly ever hears of one that is lost."""

    def __init__(self, address: Address, limits: Limits) -> None:
        self._address = address
        try:
            family, kind, proto, _, place = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_DGRAM
            )[0]
            self._socket = socket.socket(family, kind, proto)
        except OSError as error:
            raise self._failed(error) from error
        self._socket.settimeout(limits.send)
        try:
            self._socket.connect(place)
        except OSError as error:
            self._socket.close()
            raise self._failed(error) from error

    @property
    def is_open(self) -> bool:
        """Nobody can know."""
        return True

    def send(self, messages: Strung) -> None:
        """Send them one by one: a datagram is a message, and a call to the system."""
        data, first = memoryview(messages.data), 0
        failures: dict[int, TurnlaneError] = {}
        for row, end in enumerate(messages.ends.tolist()):
            try:
                self._socket.send(data[first:end])
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise self._failed(error) from error
                failures[row] = Never(f"{end - first} bytes do not fit into a datagram")
            first = end
        if failures:
            raise PartlyDelivered(failures)

    def _failed(self, error: OSError) -> RetryLater:
        return RetryLater(f"{self._address}: {error.strerror or error}")

    def cancel(self) -> None:
        """Nothing: a datagram waits for nobody."""

    def close(self) -> None:
        """Let go."""
        self._socket.close()


def _readable(connection: socket.socket, timeout: float) -> None:
    """Wait until there is something to read, or an end."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.poll(timeout * 1000)


def _unconfirmed(connection: socket.socket) -> int:
    """How many bytes the other side's TCP has not confirmed."""
    count: int = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
    return count


class SyslogColumns(BaseModel):
    """The columns that the parts of a message come from: as `parse: syslog` calls them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    facility: str = Field(default="facility", description="A number from 0 to 23.")
    severity: str = Field(default="severity", description="A number from 0 to 7.")
    time: str = Field(default="time", description="Where it is missing or null: `timestamp`.")
    hostname: str = Field(default="hostname", description="The host that the event is of.")
    app_name: str = Field(default="app_name", description="The program; RFC 3164's tag.")
    proc_id: str = Field(default="proc_id", description="The process.")
    msg_id: str = Field(default="msg_id", description="The kind of message.")
    message: str = Field(
        default="message",
        description="The text. Where it is missing or null: `value`. `payload` is the whole event "
        "as JSON.",
    )


class SyslogOutputSettings(OutputSettings):
    """The settings of a syslog output."""

    address: Address = Field(description="The receiver.", examples=["logs.example.com:514"])
    protocol: Literal["udp", "tcp", "tls"] = Field(
        default="tcp", description="UDP loses messages without a word."
    )
    tls: ClientTls = Field(
        default_factory=ClientTls, description="For `tls`: whom to trust, and what to show."
    )
    format: Literal["rfc5424", "rfc3164", "raw"] = Field(
        default="rfc5424", description="How messages look; `raw` sends the value as it is."
    )
    framing: Literal["octet", "newline"] = Field(
        default="octet",
        description="How messages end over TCP and TLS: their length comes before them, or a "
        "newline after them; then newlines within become spaces.",
    )
    facility: Facility = Field(default="user", description="For events that do not say.")
    severity: Severity = Field(default="info", description="For events that do not say.")
    hostname: str | None = Field(
        default=None,
        min_length=1,
        description="For events that do not say. Default: the machine that sends.",
    )
    app_name: str = Field(
        default="turnlane", min_length=1, description="For events that do not say."
    )
    columns: SyslogColumns = Field(
        default_factory=SyslogColumns, description="Which columns say it."
    )
    event_id: str | None = Field(
        default=None,
        pattern=r"^[!#-<>-\\^-~]{1,32}$",
        description="For `rfc5424`: the element of structured data in which messages have the "
        "event's id, by which a receiver can drop repeats. Its name is to have your enterprise's "
        "number. Default: none.",
        examples=["event@32473"],
    )
    confirm: bool = Field(
        default=True,
        description="Over TCP and TLS: whether a batch is done only once the receiver's operating "
        "system has confirmed all of it.",
    )
    connect_timeout: Duration = Field(
        default=10.0, gt=0, description="How long it may take to connect."
    )
    timeout: Duration = Field(default=20.0, gt=0, description="How long a batch may take.")

    @property
    def wants(self) -> frozenset[str] | None:
        """Whatever a message is made of."""
        return frozenset() if self.format == "raw" else None

    @model_validator(mode="after")
    def _tls_only_with_tls(self) -> Self:
        if self.tls != ClientTls() and self.protocol != "tls":
            raise Contradiction([Problem("tls", f"means nothing with protocol: {self.protocol}")])
        return self

    @model_validator(mode="after")
    def _ids_only_in_structured_data(self) -> Self:
        if self.event_id is not None and self.format != "rfc5424":
            why = f"means nothing with format: {self.format}, which has no structured data"
            raise Contradiction([Problem("event_id", why)])
        return self


class SyslogOutput(Output):
    """Keeps a connection for each sender."""

    settings_type = SyslogOutputSettings
    settings: SyslogOutputSettings

    def __init__(self, settings: SyslogOutputSettings) -> None:
        super().__init__(settings)
        self._names = Names(**settings.columns.model_dump())
        self._otherwise = Otherwise(
            FACILITIES.index(settings.facility),
            SEVERITIES.index(settings.severity),
            settings.hostname or socket.gethostname(),
            settings.app_name,
        )
        self._sockets: Pool[StreamSocket | DatagramSocket] = Pool(self._connect)

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """The messages as they are sent, in one piece of memory."""
        settings = self.settings
        messages = self._messages(block)
        if settings.protocol != "udp":
            octets = settings.framing == "octet"
            messages = octet_counted(messages) if octets else newline_ended(messages)
        return strung(messages)

    def _messages(self, block: Block) -> Any:  # noqa: ANN401
        element = self.settings.event_id
        match self.settings.format:
            case "raw":
                return large(block.column("payload"))
            case "rfc3164":
                return rfc3164(block, self._names, self._otherwise)
            case "rfc5424":
                found = None if element is None else ids_of(block)
                ids = None if element is None or found is None else (element, found)
                return rfc5424(block, self._names, self._otherwise, ids)

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        messages: Strung = prepared
        with self._sockets.borrowed() as connection:
            connection.send(messages)

    def check(self) -> None:
        """Connect. With UDP only the name is looked up: nobody would answer."""
        with self._sockets.borrowed() as connection:
            connection.send(NOTHING)

    def cancel(self) -> None:
        self._sockets.cancel()

    def close(self) -> None:
        self._sockets.close()

    def _connect(self) -> StreamSocket | DatagramSocket:
        settings = self.settings
        limits = Limits(settings.connect_timeout, settings.timeout)
        if settings.protocol == "udp":
            return DatagramSocket(settings.address, limits)
        tls = settings.tls if settings.protocol == "tls" else None
        return StreamSocket(settings.address, limits, tls, confirm=settings.confirm)
