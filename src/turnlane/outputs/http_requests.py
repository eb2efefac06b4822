"""The part that outputs over HTTP share: settings, authentication, and sending requests.

An output makes requests of a block in ``prepare``; its :class:`RequestSender` sends them one after
another, and calls the output to read the responses. If one of several requests is refused, the bad
events are found here by sending each half again: the lane would have to send the whole block again,
although the other requests were delivered.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import AfterValidator, BaseModel, Field, model_validator

from turnlane import __version__
from turnlane.errors import Never, PartlyDelivered, RetryLater, TurnlaneError
from turnlane.events import Block
from turnlane.outputs.connections import ClientTls
from turnlane.outputs.http_client import HttpClient, HttpLimits, HttpResponse, get_response_error
from turnlane.runtime import Closeable, read_secret
from turnlane.units import Duration
from turnlane.validation import ConfigIssue, ContradictorySettings, SettingsModel

Headers: TypeAlias = Mapping[str, bytes]
BlockRows: TypeAlias = npt.NDArray[np.int64]
"""Numbers of rows of a block, ascending."""
RowErrors: TypeAlias = dict[int, TurnlaneError]
"""Errors by the number of the row."""

IDEMPOTENCY_KEY: Final = "Idempotency-Key"
_FIXED_HEADERS: Final = {"User-Agent": f"turnlane/{__version__}".encode()}
_COMPRESSION_LEVEL: Final = 1
"""The fastest level: 340 MB/s with gzip and 920 MB/s with zstd. Events resemble each other, so
higher levels save little and take several times as long."""

# ── settings ─────────────────────────────────────────────────────────────────────────────────────


class HttpAuthSettings(SettingsModel):
    """How to make the ``Authorization`` header. The secret itself is never in a configuration."""

    token_env: str | None = Field(
        default=None, description="The environment variable that has the token."
    )
    token_file: Path | None = Field(default=None, description="The file that has the token.")
    scheme: str = Field(
        default="Bearer",
        pattern=r"^[A-Za-z][A-Za-z0-9-]*$",
        description="The word before the token, such as `ApiKey` for Elasticsearch.",
    )
    username: str | None = Field(
        default=None,
        pattern=r"^[^:\x00-\x1f]+$",
        description="The user, with a password instead of a token (basic authentication).",
    )
    password_env: str | None = Field(
        default=None, description="The environment variable that has the password."
    )
    password_file: Path | None = Field(default=None, description="The file that has the password.")

    @model_validator(mode="after")
    def _check_one_secret(self) -> Self:
        names = ("token_env", "token_file", "password_env", "password_file")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"not {' and '.join(given)}" if given else "and none is set"
            message = f"set exactly one of {', '.join(names)}, {found}"
            raise ContradictorySettings([ConfigIssue(given[-1] if given else "token_env", message)])
        if (self.username is not None) != given[0].startswith("password"):
            message = "set username together with password_env or password_file"
            raise ContradictorySettings([ConfigIssue("username", message)])
        return self

    def make_header(self) -> str:
        """Return the header's value. Raises ``RetryLater`` while the secret is not there."""
        if self.username is None:
            return f"{self.scheme} {_read_line('token', self.token_env, self.token_file)}"
        password = _read_line("password", self.password_env, self.password_file)
        pair = base64.b64encode(f"{self.username}:{password}".encode()).decode()
        return f"Basic {pair}"


def _read_line(kind: str, variable: str | None, file: Path | None) -> str:
    """Return a secret that fits into a header: one line of text."""
    secret = read_secret(kind, variable, file)
    assert secret is not None
    if not secret.strip().isprintable():
        raise RetryLater(f"the {kind} in {variable or file} is not one line of text")
    return secret.strip()


def _check_url(url: str) -> str:
    """Return a URL whose host no event can change, and which contains no secrets."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be a URL such as https://host:8443/path")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not contain a user or a password; set them under auth")
    if "{" in parts.netloc:
        raise ValueError("must not have a {column} in its host; only path and query may have one")
    _ = parts.port  # raises ValueError if it is not a number
    return url


def _check_base_url(url: str) -> str:
    """Return a URL to which paths are appended, without a slash at its end."""
    if "?" in url or "#" in url or "{" in url:
        raise ValueError("must be a URL without ?, # and {, such as https://host:8443")
    return url.rstrip("/")


HttpUrl = Annotated[str, AfterValidator(_check_url)]
BaseHttpUrl = Annotated[HttpUrl, AfterValidator(_check_base_url)]
HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")]  # RFC 9110
HeaderText = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$")]


class RequestOutputSettings(BaseModel):
    """The settings that all outputs over HTTP have."""

    url: HttpUrl = Field(description="The URL of the requests.")
    headers: dict[HeaderName, HeaderText] = Field(
        default={}, repr=False, description="Headers of every request."
    )
    auth: HttpAuthSettings | None = Field(
        default=None, description="A token or a password to authenticate with."
    )
    tls: ClientTls = Field(
        default_factory=ClientTls,
        description="For https: the authorities to trust, and the certificate to present.",
    )
    compression: Literal["none", "gzip", "zstd"] = Field(
        default="none", description="How the bodies of requests are compressed."
    )
    connect_timeout: Duration = Field(
        default=10.0, gt=0, description="How long it may take to connect."
    )
    timeout: Duration = Field(
        default=30.0, gt=0, description="How long a request may take, from start to end."
    )

    @property
    def is_encrypted(self) -> bool:
        """Whether requests are sent over TLS."""
        return self.url.startswith("https:")

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if "tls" in self.model_fields_set and not self.is_encrypted and self.tls != ClientTls():
            raise ContradictorySettings(
                [ConfigIssue("tls", "needs a url that begins with https://")]
            )
        return self


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request, ready to be sent."""

    url: str
    body: Any
    """A bytes-like object, already compressed."""
    headers: Headers
    rows: BlockRows
    """The rows of the block that it delivers."""
    rebuild: Callable[[BlockRows], HttpRequest]
    """Makes the same request for fewer rows."""
    context: Any = None
    """Anything that the output needs to read the response."""

    def split(self) -> tuple[HttpRequest, HttpRequest]:
        """Return two requests that deliver the two halves of the rows."""
        middle = len(self.rows) // 2
        return self.rebuild(self.rows[:middle]), self.rebuild(self.rows[middle:])


def select_rows(block: Block, rows: BlockRows) -> Block:
    """Return these rows of a block; the block itself if that is all of them."""
    return block if len(rows) == block.num_rows else block.take(rows)


_ALL_URLS: Final = ""
"""The key of an error that requests to every URL would get."""
MAX_SEND_SECONDS: Final = 5.0
"""After this time, a send of many requests starts no further one."""
_OUT_OF_TIME: Final = RetryLater("the send reached its time limit", after=0.0, alone=True)


class RequestSender(Closeable):
    """Sends the requests of one output. Several threads may send at a time.

    ``check_response`` reads a response with a good status, and raises if the destination did not
    take everything. ``headers`` are the headers of all requests; default: those of the settings.
    """

    def __init__(
        self,
        settings: RequestOutputSettings,
        check_response: Callable[[HttpRequest, HttpResponse], None],
        *,
        method: str = "POST",
        headers: Headers | None = None,
        max_response_bytes: int = 1 << 16,
    ) -> None:
        self._settings = settings
        self._check_response = check_response
        self._method = method
        if headers is None:
            headers = {name: text.encode() for name, text in settings.headers.items()}
        self.headers = headers
        limits = HttpLimits(settings.connect_timeout, settings.timeout, max_response_bytes)
        self._client = HttpClient(settings.url, settings.tls, limits)

    def encode_body(
        self,
        body: pa.Buffer | bytes,
        content_type: str,
        key: str | None = None,
        headers: Headers | None = None,
    ) -> tuple[Any, Headers]:
        """Return the compressed body and the headers for it.

        ``headers``, by default those of all requests, replace headers of the same name.
        """
        added = {"Content-Type": content_type.encode()}
        if key is not None:
            added[IDEMPOTENCY_KEY] = key.encode()
        compression = self._settings.compression
        if compression != "none":
            added["Content-Encoding"] = compression.encode()
            body = pa.Codec(compression, compression_level=_COMPRESSION_LEVEL).compress(body)
        return body, _merge_headers(added, self.headers if headers is None else headers)

    def request_once(
        self,
        url: str,
        body: Any = None,  # noqa: ANN401
        headers: Headers | None = None,
        method: str | None = None,
    ) -> HttpResponse:
        """Send a request and return the response, also an error response.

        Raises ``RetryLater`` if there is no response.
        """
        sent = _merge_headers(_FIXED_HEADERS, self.headers if headers is None else headers)
        if self._settings.auth is not None:
            authorization = self._settings.auth.make_header().encode()
            sent = _merge_headers(sent, {"Authorization": authorization})
        return self._client.request(method or self._method, url, sent, body)

    def send(self, prepared: Sequence[HttpRequest]) -> None:
        """Send the requests one after another; each row of the block is in one of them.

        After an error that may pass, no request is sent that would fail in the same way. Raises
        one error if all rows failed with it, or the errors of the rows that failed.
        """
        errors: RowErrors = {}
        url_errors: dict[str, TurnlaneError] = {}
        deadline = time.monotonic() + MAX_SEND_SECONDS
        for number, request in enumerate(prepared):
            if number and time.monotonic() >= deadline:
                url_errors.setdefault(_ALL_URLS, _OUT_OF_TIME)
            errors |= self._send_request(request, url_errors, is_single=len(prepared) == 1)
        if errors:
            first = next(iter(errors.values()))
            is_for_all = all(each is first for each in errors.values())
            if is_for_all and len(errors) == sum(len(each.rows) for each in prepared):
                raise first
            raise PartlyDelivered(errors)

    def _send_request(
        self, request: HttpRequest, url_errors: dict[str, TurnlaneError], *, is_single: bool
    ) -> RowErrors:
        """Send a request, and its halves if it is refused; return the errors of its rows."""
        error = url_errors.get(_ALL_URLS) or url_errors.get(request.url)
        if error is None:
            url = _ALL_URLS
            try:
                response = self.request_once(request.url, request.body, request.headers)
                if response.is_about_url:
                    url = request.url
                self._check_response(request, require_success(response, request.url))
                return {}
            except RetryLater as failure:
                error = url_errors[url] = failure  # other requests would get it too
            except TurnlaneError as failure:
                error = failure
        if isinstance(error, PartlyDelivered):
            return {int(request.rows[at]): each for at, each in error.failures.items()}
        if isinstance(error, Never) and not is_single and len(request.rows) > 1:
            first, second = request.split()
            errors = self._send_request(first, url_errors, is_single=False)
            return errors | self._send_request(second, url_errors, is_single=False)
        return dict.fromkeys(request.rows.tolist(), error)

    def cancel(self) -> None:
        self._client.cancel()

    def close(self) -> None:
        self._client.close()


def require_success(response: HttpResponse, url: str) -> HttpResponse:
    """Return the response if its status is good; otherwise raise the error that it means."""
    error = get_response_error(response, url, time.time())
    if error is not None:
        raise error
    return response


def _merge_headers(headers: Headers, others: Headers) -> Headers:
    """Return all headers; ``others`` replace headers of the same name in any case."""
    replaced = {name.lower() for name in others}
    remaining = {name: value for name, value in headers.items() if name.lower() not in replaced}
    return {**remaining, **others}
