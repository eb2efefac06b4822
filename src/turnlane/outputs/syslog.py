"""Output ``syslog``: events as messages over UDP, TCP or TLS, in the form of either RFC."""

from __future__ import annotations

import socket
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnlane.events import Block
from turnlane.formats.syslog_writing import (
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
from turnlane.formats.texts import NOTHING, Strung, large, strung
from turnlane.outputs.contract import Output, OutputSettings
from turnlane.outputs.identity import ids_of
from turnlane.outputs.pool import Pool
from turnlane.outputs.syslog_sockets import DatagramSocket, Limits, StreamSocket
from turnlane.outputs.tls import ClientTls
from turnlane.problems import Contradiction, Problem
from turnlane.quantities import Duration
from turnlane.serving.address import Address


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
