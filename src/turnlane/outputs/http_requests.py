"""What outputs that speak HTTP have in common: where to, how, and what comes of it."""

from __future__ import annotations

import abc
import base64
import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Self
from urllib.parse import urlsplit

import cramjam
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from turnlane import __version__
from turnlane.errors import Never, PartlyDelivered, RetryLater, TurnlaneError
from turnlane.events import Block
from turnlane.outputs.api import Output, OutputSettings
from turnlane.outputs.http_connections import Answer, ClientTls, Limits, WebClient, error_of
from turnlane.runtime import revealed
from turnlane.units import Duration
from turnlane.validation import Contradiction, Problem

# ── web_auth ──
# Who we are to a web server: a token or a password, kept in the environment or in a file.


class AuthSettings(BaseModel):
    """The header ``Authorization``. The secret itself never stands in a configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    def _one_secret(self) -> Self:
        given = [
            name
            for name in ("token_env", "token_file", "password_env", "password_file")
            if getattr(self, name) is not None
        ]
        if len(given) != 1:
            said = f"not {' and '.join(given)}" if given else "and there is none"
            message = f"one of token_env, token_file, password_env, password_file, {said}"
            raise Contradiction([Problem(given[-1] if given else "token_env", message)])
        if (self.username is not None) != given[0].startswith("password"):
            message = "belongs to a password: username with password_env or password_file"
            raise Contradiction([Problem("username", message)])
        return self

    def header(self) -> str:
        """The header's value. Raises ``RetryLater`` while the secret is not there."""
        if self.username is None:
            return f"{self.scheme} {_line('token', self.token_env, self.token_file)}"
        password = _line("password", self.password_env, self.password_file)
        pair = base64.b64encode(f"{self.username}:{password}".encode()).decode()
        return f"Basic {pair}"


def _line(what: str, variable: str | None, file: Path | None) -> str:
    """The secret, which a header can hold only if it is on one line."""
    found = revealed(what, variable, file)
    assert found is not None
    if not found.strip().isprintable():
        raise RetryLater(f"the {what} in {variable or file} is not one line of text")
    return found.strip()


# ── web_bodies ──
# Bodies of requests, made smaller.

_LEVEL: Final = 1
"""The fastest: of events, which look alike, the usual levels leave hardly less, in several times as
long."""


class Compression(enum.StrEnum):
    """How a body is made smaller."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"


def compressed(body: Any, how: Compression) -> Any:  # noqa: ANN401 - whatever is bytes
    """The body as it is sent."""
    match how:
        case Compression.GZIP:
            return memoryview(cramjam.gzip.compress(body, _LEVEL))
        case Compression.ZSTD:
            return memoryview(cramjam.zstd.compress(body, _LEVEL))
        case _:
            return body


Headers = Mapping[str, bytes]
Rows = npt.NDArray[np.int64]
Failures = dict[int, TurnlaneError]
"""By row."""

KEY_HEADER: Final = "Idempotency-Key"
_ALWAYS: Final = {"User-Agent": f"turnlane/{__version__}".encode()}
_EVERYWHERE: Final = ""
_NO_TIME: Final = RetryLater("there was no time for it", after=0.0, alone=True)
_NAME: Final = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"  # what RFC 9110 allows in a header's name


def _address(url: str) -> str:
    """An address as a setting: with a host that no event can change, and without secrets."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is an address such as https://host:8443/path")
    if parts.username is not None or parts.password is not None:
        raise ValueError("has a user or a password in it, which belong into auth")
    if "{" in parts.netloc:
        raise ValueError("has a {column} in its host; only the path and what follows may have")
    _ = parts.port  # raises ValueError for one that is none
    return url


def _base(url: str) -> str:
    """An address that paths are put behind."""
    if "?" in url or "#" in url or "{" in url:
        raise ValueError("is an address without ?, # and {, such as https://host:8443")
    return url.rstrip("/")


WebAddress = Annotated[str, AfterValidator(_address)]
BaseAddress = Annotated[WebAddress, AfterValidator(_base)]
HeaderName = Annotated[str, Field(pattern=_NAME)]
HeaderText = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$")]


class WebOutputSettings(OutputSettings):
    """The settings of every output that speaks HTTP."""

    url: WebAddress = Field(description="Where requests go.")
    headers: dict[HeaderName, HeaderText] = Field(
        default={}, repr=False, description="Headers of every request."
    )
    auth: AuthSettings | None = Field(default=None, description="A token or a password to show.")
    tls: ClientTls = Field(
        default_factory=ClientTls, description="For https: whom to trust, and what to show."
    )
    compression: Compression = Field(
        default=Compression.NONE, description="How bodies are made smaller."
    )
    connect_timeout: Duration = Field(
        default=10.0, gt=0, description="How long it may take to connect."
    )
    timeout: Duration = Field(default=30.0, gt=0, description="How long a request may take in all.")

    @property
    def is_safe(self) -> bool:
        """Whether requests are encrypted."""
        return self.url.startswith("https:")

    @model_validator(mode="after")
    def _tls_only_for_https(self) -> Self:
        if "tls" in self.model_fields_set and not self.is_safe and self.tls != ClientTls():
            raise Contradiction([Problem("tls", "is for https://, and the url is none")])
        return self


@dataclass(frozen=True, slots=True)
class Request:
    """One request, ready to be sent."""

    url: str
    body: Any
    """Whatever is bytes, compressed already."""
    headers: Headers
    rows: Rows
    """Which rows of the block it delivers, in order."""
    part: Callable[[Rows], Request]
    """The same for fewer rows."""
    about: Any = None
    """What its output has to remember until the answer is there."""

    def halves(self) -> tuple[Request, Request]:
        """Two requests that do the same together."""
        middle = len(self.rows) // 2
        return self.part(self.rows[:middle]), self.part(self.rows[middle:])


def chosen(block: Block, rows: Rows) -> Block:
    """These rows of a block, which are in order: itself, if that is all."""
    return block if len(rows) == block.num_rows else block.take(rows)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The requests that deliver a block."""

    rows: int
    requests: Sequence[Request]


class WebOutput(Output):
    """An output that sends requests. One of its own makes them, and reads the answers."""

    settings_type: ClassVar[type[OutputSettings]] = WebOutputSettings
    settings: WebOutputSettings
    method = "POST"
    longest_answer: ClassVar[int] = 1 << 16
    """Bytes of an answer that are read."""
    longest_run: ClassVar[float] = 5.0
    """Seconds: after that, a send of many requests begins no other one of them."""

    def __init__(self, settings: WebOutputSettings) -> None:
        super().__init__(settings)
        limits = Limits(settings.connect_timeout, settings.timeout, self.longest_answer)
        self._client = WebClient(settings.url, settings.tls, limits)

    # ── for the output itself ───────────────────────────────────────────────────────────────────

    @abc.abstractmethod
    def understand(self, request: Request, answer: Answer) -> None:
        """Look at a good answer; raises if not everything was taken."""

    def headers(self) -> Headers:
        """The headers that the settings want, as far as they are the same for all requests."""
        return {name: text.encode() for name, text in self.settings.headers.items()}

    def packed(
        self,
        body: pa.Buffer | bytes,
        kind: str,
        key: str | None = None,
        wanted: Headers | None = None,
    ) -> tuple[Any, Headers]:
        """A body as it is sent, and the headers that go with it; those that are wanted win."""
        headers = {"Content-Type": kind.encode()}
        if key is not None:
            headers[KEY_HEADER] = key.encode()
        how = self.settings.compression
        if how is not Compression.NONE:
            headers["Content-Encoding"] = how.value.encode()
        return compressed(body, how), _over(headers, self.headers() if wanted is None else wanted)

    def exchange(
        self,
        url: str,
        body: Any = None,  # noqa: ANN401
        headers: Headers | None = None,
        method: str | None = None,
    ) -> Answer:
        """Send, and have the answer, whatever it is. Raises ``RetryLater`` if there is none."""
        sent = _over(_ALWAYS, self.headers() if headers is None else headers)
        if self.settings.auth is not None:
            sent = _over(sent, {"Authorization": self.settings.auth.header().encode()})
        return self._client.request(method or self.method, url, sent, body)

    def good(self, answer: Answer, url: str) -> Answer:
        """The answer, if it is a good one; else raises what it means."""
        error = error_of(answer, url, time.time())
        if error is not None:
            raise error
        return answer

    # ── sending ─────────────────────────────────────────────────────────────────────────────────

    def send(self, prepared: Prepared) -> None:
        """Send the requests in turn.

        After one that may be repeated later, no other is tried that would fare the same. If one of
        several is refused, the events to blame are looked for here: the lane could only say that
        some of the whole block are.
        """
        alone = len(prepared.requests) == 1
        failures: Failures = {}
        trouble: dict[str, TurnlaneError] = {}  # by address
        end = time.monotonic() + self.longest_run
        for number, request in enumerate(prepared.requests):
            if number and time.monotonic() >= end:
                trouble.setdefault(_EVERYWHERE, _NO_TIME)
            failures |= self._failures(request, trouble, alone=alone)
        _raise(failures, prepared.rows)

    def _failures(
        self, request: Request, trouble: dict[str, TurnlaneError], *, alone: bool
    ) -> Failures:
        """Send a request, and its halves if need be; the rows that failed."""
        error = trouble.get(_EVERYWHERE) or trouble.get(request.url)
        if error is None:
            error = self._tried(request, trouble)
        if error is None:
            return {}
        if isinstance(error, PartlyDelivered):
            return {int(request.rows[at]): each for at, each in error.failures.items()}
        if isinstance(error, Never) and not alone and len(request.rows) > 1:
            first, second = request.halves()
            found = self._failures(first, trouble, alone=False)
            return found | self._failures(second, trouble, alone=False)
        return dict.fromkeys(request.rows.tolist(), error)

    def _tried(self, request: Request, trouble: dict[str, TurnlaneError]) -> TurnlaneError | None:
        """Send one request; the error, if it failed. Trouble that others will have is noted."""
        where = _EVERYWHERE
        try:
            answer = self.exchange(request.url, request.body, request.headers)
            if answer.blames_address:
                where = request.url
            self.understand(request, self.good(answer, request.url))
        except RetryLater as error:
            trouble[where] = error
            return error
        except TurnlaneError as error:
            return error
        return None

    def cancel(self) -> None:
        self._client.cancel()

    def close(self) -> None:
        self._client.close()


def _over(headers: Headers, others: Headers) -> Headers:
    """Headers with others over them, whose names may be written differently."""
    names = {name.lower() for name in others}
    kept = {name: value for name, value in headers.items() if name.lower() not in names}
    return {**kept, **others}


def _raise(failures: Failures, rows: int) -> None:
    """Raise what says it best: nothing, one error for all, or one for each row that failed."""
    if not failures:
        return
    first = next(iter(failures.values()))
    if len(failures) == rows and all(each is first for each in failures.values()):
        raise first
    raise PartlyDelivered(failures)
