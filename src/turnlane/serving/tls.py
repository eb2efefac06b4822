"""TLS, with certificates asked of clients too if wanted, for everything that listens."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from turnlane.errors import ConfigError

_REASONS: Final = {
    "KEY_VALUES_MISMATCH": "is not the key of {cert}",
    "NO_START_LINE": "holds no PEM block",
    "BAD_DECRYPT": "is encrypted with a passphrase, which is not supported",
}


class TlsSettings(BaseModel):
    """A server's certificate and key, and the authority of its clients' certificates."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cert: Path = Field(description="PEM file: the certificate, followed by its chain.")
    key: Path = Field(description="PEM file: the certificate's private key, not encrypted.")
    client_ca: Path | None = Field(
        default=None,
        description="PEM file: clients must show a certificate of one of these authorities.",
    )

    def context(self) -> ssl.SSLContext:
        """A server's context, TLS 1.2 or newer. Raises ``ConfigError`` naming the file."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _contents(self.cert, "tls.cert")
        _contents(self.key, "tls.key")
        self._load_certificate()
        try:
            # No passphrase: without this, OpenSSL would ask for one at the terminal.
            context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except ssl.SSLError as error:
            raise ConfigError("tls.key", f"{self.key} {self._said(error)}") from None
        if self.client_ca is not None:
            _contents(self.client_ca, "tls.client_ca")
            context.verify_mode = ssl.CERT_REQUIRED
            _load_authorities(context, self.client_ca, "tls.client_ca")
        return context

    def flight_arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``pyarrow.flight.FlightServerBase``, checked as by ``context``."""
        self.context()
        arguments: dict[str, Any] = {
            "tls_certificates": [(self.cert.read_bytes(), self.key.read_bytes())]
        }
        if self.client_ca is not None:
            arguments |= {"verify_client": True, "root_certificates": self.client_ca.read_bytes()}
        return arguments

    def _load_certificate(self) -> None:
        """Read the certificate alone, so that a bad one is not blamed on the key."""
        _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self.cert, "tls.cert")

    def _said(self, error: ssl.SSLError) -> str:
        words = _REASONS.get(error.reason or "", "is not a private key that can be used")
        return words.format(cert=self.cert)


def _contents(path: Path, knob: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(knob, f"{path}: {error.strerror or error}") from None


def _load_authorities(context: ssl.SSLContext, path: Path, knob: str) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise ConfigError(knob, f"{path} holds no certificate that can be read (PEM)") from None
