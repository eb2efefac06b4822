"""Syslog over UDP, TCP and TLS: messages are stored as they come, with source, time and severity.

The protocol has no answers for senders. While the queue has no room, senders over TCP and TLS wait;
messages over UDP are dropped and counted.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from turnlane.formats.framing import Framing
from turnlane.inputs.api import Host, Input, InputSettings
from turnlane.inputs.datagrams import Datagram, DatagramReader, Receive, set_receive_buffer
from turnlane.inputs.publishers import FireAndForgetPublisher
from turnlane.inputs.stream_server import StreamLimits, StreamListener, StreamReader
from turnlane.queues.api import FlowControl
from turnlane.serving.address import Address, check_exposure, normalize_host
from turnlane.serving.auth import TlsSettings
from turnlane.units import Duration, Size
from turnlane.validation import ConfigIssue, ContradictorySettings

MessageBytes = Annotated[Size, Field(ge=480, le=16 << 20)]
"""Every receiver has to accept 480 bytes (RFC 5424)."""


class SyslogTls(TlsSettings):
    """TLS for syslog: where, and with which certificates."""

    listen: Address = Field(description="Where to listen for TLS connections.")


class SyslogSettings(InputSettings):
    """The settings of a syslog input."""

    type: Literal["syslog"] = "syslog"
    tcp: Address | None = Field(None, description="Where to listen for TCP connections.")
    udp: Address | None = Field(None, description="Where to listen for UDP datagrams.")
    tls: SyslogTls | None = Field(
        None, description="Where to listen for TLS connections, and with which certificates."
    )
    insecure: bool = Field(
        default=False,
        description="Listen on a public address although any client can then send: without TLS, or "
        "without asking clients for a certificate.",
    )
    framing: Framing = Field(
        Framing.AUTO,
        description="How messages are separated over TCP and TLS: `newline`, `octet` (counted), "
        "or `auto`, decided message by message.",
    )
    max_message_bytes: MessageBytes = Field(
        64 << 10,
        description="A longer message is cut into pieces of this length, and counted as invalid.",
    )
    max_connections: int = Field(
        10_000, ge=1, description="One more is closed at once, and counted as refused."
    )
    idle_timeout: Duration | None = Field(
        None, description="Close a connection that is silent for this time. `null`: never."
    )
    message_timeout: Duration = Field(
        60.0,
        gt=0,
        description="Close a connection that needs longer for one message; keep the received part.",
    )
    proxy_protocol: bool = Field(
        default=False,
        description="Every TCP and TLS connection begins with a PROXY header (version 1 or 2), "
        "whose client is the `source` of its events.",
    )
    receive_buffer: Size = Field(
        8 << 20,
        description="How many bytes of unread UDP datagrams the operating system should hold.",
    )

    @model_validator(mode="after")
    def _check_listeners(self) -> Self:
        if self.tcp is None and self.udp is None and self.tls is None:
            raise ContradictorySettings(
                [ConfigIssue("tcp", "give at least one of tcp, udp and tls")]
            )
        return self

    def check_exposed(self) -> None:
        """Raise ``ConfigError`` if an address is public and unprotected."""
        tls = None if self.tls is None else self.tls.listen
        known = self.tls is not None and self.tls.client_ca is not None
        for knob, address in (("tcp", self.tcp), ("udp", self.udp), ("tls", tls)):
            if address is not None:
                check_exposure(
                    address,
                    tls=knob == "tls",
                    tokens=knob == "tls" and known,
                    insecure=self.insecure,
                    knob=knob,
                    by="tls.client_ca",
                )


class SyslogInput(Input):
    """Publishes syslog messages. One thread reads all streams, another one UDP."""

    settings_type: ClassVar[type[InputSettings]] = SyslogSettings
    settings: SyslogSettings

    def __init__(self, settings: SyslogSettings, host: Host) -> None:
        super().__init__(settings, host)
        self.addresses: dict[str, Address] = {}
        """The addresses by ``tcp``, ``udp`` and ``tls``, with the real ports."""
        self._readers: list[StreamReader | DatagramReader] = []
        self._stopped = False

    @property
    def address(self) -> str | None:
        return " ".join(f"{kind}://{address}" for kind, address in self.addresses.items()) or None

    def start(self) -> None:
        self.settings.check_exposed()
        with contextlib.ExitStack() as sockets:
            self._make_readers(sockets)
            sockets.pop_all()  # the readers close them from here
        for reader in self._readers:
            reader.start()

    def _make_readers(self, sockets: contextlib.ExitStack) -> None:
        settings = self.settings
        longest = settings.max_message_bytes
        publisher = FireAndForgetPublisher(self)
        publisher.check_fits(longest, "max_message_bytes")
        listeners = []
        if settings.tcp is not None:
            listeners.append(StreamListener(self._bind("tcp", settings.tcp, sockets)))
        if settings.tls is not None:
            context = settings.tls.context()
            bound = self._bind("tls", settings.tls.listen, sockets)
            listeners.append(StreamListener(bound, context))
        if settings.udp is not None:
            bound = self._bind("udp", settings.udp, sockets, socket.SOCK_DGRAM)
            set_receive_buffer(bound, settings.receive_buffer)
            dropping = FireAndForgetPublisher(self, FlowControl.NONE)
            receive = make_udp_receiver(bound)
            self._readers.append(DatagramReader(self, dropping, bound, receive, longest))
        if listeners:
            limits = StreamLimits(
                settings.framing,
                longest,
                settings.max_connections,
                settings.idle_timeout,
                settings.message_timeout,
                settings.proxy_protocol,
            )
            self._readers.append(StreamReader(self, publisher, listeners, limits))

    def _bind(
        self,
        knob: str,
        address: Address,
        sockets: contextlib.ExitStack,
        kind: int = socket.SOCK_STREAM,
    ) -> socket.socket:
        bound = sockets.enter_context(address.listen(kind, knob=knob))
        self.addresses[knob] = address.with_port(bound.getsockname()[1])
        return bound

    def stop(self, timeout: float) -> None:
        if self._stopped:
            return
        self._stopped = True
        deadline = time.monotonic() + timeout
        for reader in self._readers:
            reader.stop(deadline)
        for reader in self._readers:
            reader.publisher.finish(deadline)


def make_udp_receiver(bound: socket.socket) -> Receive:
    """Return the function that receives from a UDP socket."""

    def receive(space: memoryview) -> Datagram:
        size, sender = bound.recvfrom_into(space)
        return Datagram(size, normalize_host(sender[0]), truncated=False)

    return receive
