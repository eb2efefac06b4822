"""Bearer tokens with rights on queues, and TLS settings, for everything that listens."""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, SecretStr, model_validator

from turnlane.errors import ConfigError, NotAllowed
from turnlane.validation import ConfigIssue, ContradictorySettings

ANY_QUEUE: Final = "*"


class Right(enum.StrEnum):
    """A right on a queue. No right includes another."""

    PUBLISH = "publish"
    READ = "read"
    """Read, consume and settle events."""
    ADMIN = "admin"
    """Create, change and drop the queue."""


class TokenSettings(BaseModel):
    """A token: its secret, and its rights by pattern of queue names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, description="The name of the token in logs.")
    secret: SecretStr | None = Field(
        default=None, description="The secret itself; better use secret_env or secret_file."
    )
    secret_env: str | None = Field(
        default=None, description="The environment variable that holds it."
    )
    secret_file: Path | None = Field(default=None, description="The file that holds it.")
    rights: Mapping[str, tuple[Right, ...]] = Field(
        description="Rights by queue; `*` and `?` stand for any characters."
    )
    expires: AwareDatetime | None = Field(default=None, description="When it becomes invalid.")

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        given = [self.secret, self.secret_env, self.secret_file]
        if sum(each is not None for each in given) != 1:
            problem = "give exactly one of secret, secret_env and secret_file"
            raise ContradictorySettings([ConfigIssue("secret", problem)])
        return self

    def read_secret(self) -> bytes:
        """Return the secret. Raises ``ConfigError`` if it is missing or unreadable."""
        knob = f"tokens.{self.name}"
        if self.secret_env is not None:
            secret = os.environ.get(self.secret_env, "")
            where = f"environment variable {self.secret_env}"
        elif self.secret_file is not None:
            where = str(self.secret_file)
            try:
                secret = self.secret_file.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(knob, f"cannot read the secret: {where}: {error}") from None
        else:
            where, secret = "secret", self.secret.get_secret_value() if self.secret else ""
        if not secret:
            raise ConfigError(knob, f"{where} is empty or not set")
        return secret.encode()


class _Token(NamedTuple):
    name: str
    digest: bytes
    rights: Mapping[str, tuple[Right, ...]]
    expires: datetime | None

    def __repr__(self) -> str:
        return f"token {self.name}"


class Authority:
    """Checks tokens and their rights. Without any token, every client may do everything."""

    def __init__(
        self, tokens: Iterable[TokenSettings] = (), *, now: Callable[[], float] = time.time
    ) -> None:
        """Read all secrets. Raises ``ConfigError``."""
        self._now = now
        self._tokens = tuple(
            _Token(each.name, _digest(each.read_secret()), each.rights, each.expires)
            for each in tokens
        )
        if len({token.digest for token in self._tokens}) < len(self._tokens):
            raise ConfigError("tokens", "two tokens have the same secret")

    @property
    def has_tokens(self) -> bool:
        """Whether a token is needed at all."""
        return bool(self._tokens)

    def check(self, bearer: str | None, right: Right, queue: str | None) -> None:
        """Raise ``NotAllowed`` unless the token gives the right on the queue.

        ``bearer`` is the token alone (see :func:`parse_bearer`). ``queue=None`` asks for the
        right on the whole node: on every queue.
        """
        if not self._tokens:
            return
        token = self._find_token(bearer)
        if not _has_right(token, right, queue):
            what = "every queue" if queue is None else f"queue {queue!r}"
            raise _refusal(f"{token!r} does not give the right to {right} on {what}", known=True)

    def allows(self, bearer: str | None, right: Right, queue: str | None) -> bool:
        """Whether :meth:`check` would pass."""
        try:
            self.check(bearer, right, queue)
        except NotAllowed:
            return False
        return True

    def identify(self, bearer: str | None) -> str | None:
        """Return the name of a valid token, ``None`` without tokens. Raises ``NotAllowed``."""
        return self._find_token(bearer).name if self._tokens else None

    def qualify_name(self, bearer: str | None, name: str) -> str:
        """Return a client's name, made different from the same name under another token."""
        token = self.identify(bearer)
        return name if token is None else f"{token}\n{name}"

    def _find_token(self, bearer: str | None) -> _Token:
        if bearer is None:
            raise _refusal("a token is needed: send Authorization: Bearer …", known=False)
        digest = _digest(bearer.encode("utf-8", "surrogateescape"))
        found: _Token | None = None
        # Compare with every token: the time must not reveal anything about a secret.
        for token in self._tokens:
            if hmac.compare_digest(token.digest, digest):
                found = token
        if found is None:
            raise _refusal("the token is unknown", known=False)
        if found.expires is not None and found.expires.timestamp() <= self._now():
            raise _refusal(f"{found!r} has expired", known=False)
        return found


def parse_bearer(header: str | None) -> str | None:
    """Return the token of an ``Authorization`` header, ``None`` if there is none."""
    kind, _, token = (header or "").strip().partition(" ")
    return token.strip() or None if kind.lower() == "bearer" else None


def _has_right(token: _Token, right: Right, queue: str | None) -> bool:
    """Whether a pattern of the token gives the right; for the whole node, only ``*`` does."""
    patterns = [pattern for pattern, rights in token.rights.items() if right in rights]
    if queue is None:
        return ANY_QUEUE in patterns
    return any(fnmatchcase(queue, pattern) for pattern in patterns)


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _refusal(message: str, *, known: bool) -> NotAllowed:
    error = NotAllowed(message)
    error.known = known
    return error


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────

_REASONS: Final = {
    "KEY_VALUES_MISMATCH": "is not the key of {cert}",
    "NO_START_LINE": "contains no PEM block",
    "BAD_DECRYPT": "is encrypted with a passphrase, which is not supported",
}


class TlsSettings(BaseModel):
    """The certificate and key of a server, and the authorities of its clients' certificates."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cert: Path = Field(description="PEM file: the certificate, followed by its chain.")
    key: Path = Field(description="PEM file: the certificate's private key, not encrypted.")
    client_ca: Path | None = Field(
        default=None,
        description="PEM file: clients must show a certificate of one of these authorities.",
    )

    def context(self) -> ssl.SSLContext:
        """Return the context of a server, TLS 1.2 or newer. Raises ``ConfigError``."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _check_readable(self.cert, "tls.cert")
        _check_readable(self.key, "tls.key")
        # Read the certificate alone first: then an error in it is not reported for the key.
        _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self.cert, "tls.cert")
        try:
            # No passphrase: without this, OpenSSL would ask for one at the terminal.
            context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except ssl.SSLError as error:
            reason = _REASONS.get(error.reason or "", "is not a private key that can be used")
            raise ConfigError("tls.key", f"{self.key} {reason.format(cert=self.cert)}") from None
        if self.client_ca is not None:
            _check_readable(self.client_ca, "tls.client_ca")
            context.verify_mode = ssl.CERT_REQUIRED
            _load_authorities(context, self.client_ca, "tls.client_ca")
        return context

    def build_flight_arguments(self) -> dict[str, Any]:
        """Return the TLS arguments of ``FlightServerBase``. Raises ``ConfigError``."""
        self.context()
        arguments: dict[str, Any] = {
            "tls_certificates": [(self.cert.read_bytes(), self.key.read_bytes())]
        }
        if self.client_ca is not None:
            arguments |= {"verify_client": True, "root_certificates": self.client_ca.read_bytes()}
        return arguments


def _check_readable(path: Path, knob: str) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(knob, f"{path}: {error.strerror or error}") from None


def _load_authorities(context: ssl.SSLContext, path: Path, knob: str) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise ConfigError(knob, f"{path} contains no certificate that can be read (PEM)") from None
