"""The input ``http``: whatever is posted, to whichever path, becomes events."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Final, Literal, TypeVar

import pyarrow as pa
from pydantic import Field, field_validator
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from turnlane.errors import RetryLater
from turnlane.events import Event, build_values
from turnlane.formats.http_bodies import json_values, lines
from turnlane.formats.lines import block_of_values
from turnlane.inputs.api import Counters, Host, Input, InputSettings
from turnlane.inputs.publishers import THREADS, AnsweringPublisher, AnsweringSettings
from turnlane.serving.address import normalize_host
from turnlane.serving.auth import Authority, Right, parse_bearer
from turnlane.serving.http_body import PROBLEM_HANDLERS, build_problem, get_status, read_body
from turnlane.serving.http_server import WebServer, WebSettings
from turnlane.serving.threads import ThreadLimiterByQueue

# ── web ──
# What inputs that are web servers have in common: settings, tokens, threads, counting.

Result = TypeVar("Result")


class WebInputSettings(AnsweringSettings, WebSettings):
    """The settings of an input that is a web server."""


class WebInput(Input):
    """An input that is a web server. One of its own adds routes, and how it refuses."""

    settings_type: ClassVar[type[InputSettings]] = WebInputSettings
    settings: WebInputSettings

    def __init__(self, settings: WebInputSettings, host: Host) -> None:
        self._server = WebServer(self._app(), settings, settings.label)
        super().__init__(settings, host)
        self.publisher = AnsweringPublisher(host, settings)
        self._threads = ThreadLimiterByQueue(THREADS)
        self._authority = Authority(settings.tokens)

    @property
    def counters(self) -> Counters:
        """What it has seen; the connections are those of this moment."""
        self._counters.connections = self._server.connections
        return self._counters

    @counters.setter
    def counters(self, counters: Counters) -> None:
        self._counters = counters

    @abc.abstractmethod
    def routes(self) -> Sequence[BaseRoute]:
        """The paths that it answers."""

    def queues(self) -> Iterable[tuple[str, str]]:
        """The queues that it publishes to, each after the knob that names it."""
        return [("queue", self.settings.queue)]

    def refusal(self, _request: Request, error: Exception) -> Response:
        """The answer to an error."""
        return build_problem(error)

    # ── life ────────────────────────────────────────────────────────────────────────────────────

    @property
    def address(self) -> str:
        return str(self._server.address)

    def start(self) -> None:
        self.settings.check_exposed()
        for knob, name in self.queues():
            self.publisher.check(knob, name)
        self._server.start()

    def stop(self, timeout: float) -> None:
        self._server.stop(timeout)

    # ── requests ────────────────────────────────────────────────────────────────────────────────

    def authorize(self, request: Request, queue: str) -> None:
        """Raise ``NotAllowed`` unless the request's token allows it to publish."""
        self._authority.check(self.token_of(request), Right.PUBLISH, queue)

    def token_of(self, request: Request) -> str | None:
        """The secret that the request shows."""
        return parse_bearer(request.headers.get("authorization"))

    async def in_time(
        self, queue: str, call: Callable[..., Result], *args: Any, **kwargs: Any
    ) -> Result:
        """Run a call that blocks on a thread for the queue, its deadline behind its arguments.

        The time spent waiting for a thread counts: under pressure everybody is answered in time.
        """
        with _told_of_a_close():
            threads = self._threads.of(queue)
            return await threads.run(call, *args, self.publisher.deadline(), **kwargs)

    async def body_of(self, request: Request) -> bytes:
        """The request's body, unpacked, within the limits."""
        with _told_of_a_close():
            body = await read_body(request, self.settings)
        self.count(bytes=len(body))
        return body

    def _app(self) -> Starlette:
        handlers = dict.fromkeys(PROBLEM_HANDLERS, self._refuse)
        return Starlette(routes=self.routes(), exception_handlers=handlers)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        if get_status(error) in (429, 503):
            self.count(refused=1)
        else:
            self.count(invalid=1)
        return self.refusal(request, error)


@contextlib.contextmanager
def _told_of_a_close() -> Iterator[None]:
    """A server that cannot wait any longer cancels its requests: their senders are told.

    Left to uvicorn they would get a 500, which makes some senders drop what they hold.
    """
    try:
        yield
    except asyncio.CancelledError:
        raise RetryLater("the node is closing; send it again") from None


def source_of(request: Request) -> str | None:
    """Where the request came from."""
    return None if request.client is None else normalize_host(request.client.host)


PATH_HEADER: Final = "path"
"""The header of an event that says where it was posted to."""

_LINES: Final = frozenset(
    {"application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines",
     "application/json-lines", "application/jsonlines"}
)  # fmt: skip


class Split(enum.StrEnum):
    """What becomes one event."""

    AUTO = "auto"
    """As the content type says: JSON lines and text by line, JSON by element, others whole."""
    NONE = "none"
    """The body as it is."""
    LINES = "lines"
    """Each line that is not empty."""
    JSON = "json"
    """Each element of a JSON array, or the one JSON value that is none."""


class HttpSettings(WebInputSettings):
    """The settings of the input ``http``."""

    type: Literal["http"] = "http"
    routes: Mapping[str, str] = Field(
        default_factory=dict,
        description="Queues by path, first match first: `{/orders/*: orders}`; others: `queue`.",
    )
    split: Split = Field(Split.AUTO, description="What becomes one event.")
    keep_headers: tuple[str, ...] = Field(
        ("content-type",), description="Request headers that events keep."
    )
    key_header: str | None = Field(None, description="The request header with the events' key.")
    key_query: str | None = Field(None, description="The query parameter with the events' key.")
    status: Literal[200, 204] = Field(
        200, description="The answer to events that were taken; 204 has no body."
    )

    @field_validator("routes")
    @classmethod
    def _paths(cls, routes: Mapping[str, str]) -> Mapping[str, str]:
        for pattern in routes:
            if not pattern.startswith(("/", "*")):
                raise ValueError(f"{pattern!r} matches no path; write it as in /orders/*")
        return routes

    @field_validator("keep_headers")
    @classmethod
    def _lower(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.lower() for name in names)


class HttpInput(WebInput):
    """Takes POST and PUT; answers once the events have come as far as ``ack`` says.

    A request is taken whole or not at all, unless it is larger than the whole queue: one that is
    refused can be sent again as it was.
    """

    settings_type: ClassVar[type[InputSettings]] = HttpSettings
    settings: HttpSettings

    def routes(self) -> Sequence[BaseRoute]:
        return [Route("/{path:path}", self._take, methods=["POST", "PUT"])]

    def queues(self) -> Iterable[tuple[str, str]]:
        routes = self.settings.routes.items()
        return [*super().queues(), *((f"routes.{path}", queue) for path, queue in routes)]

    def queue_of(self, path: str) -> str:
        """The queue for what is posted to this path."""
        for pattern, queue in self.settings.routes.items():
            if fnmatchcase(path, pattern):
                return queue
        return self.settings.queue

    async def _take(self, request: Request) -> Response:
        path = str(request.scope["path"])
        queue = self.queue_of(path)
        self.authorize(request, queue)
        body = await self.body_of(request)
        events = await self.in_time(queue, self._publish, queue, path, request, body)
        self.count(events=events)
        if self.settings.status == 204:
            return Response(status_code=204)
        return JSONResponse({"events": events})

    def _publish(
        self, queue: str, path: str, request: Request, body: bytes, deadline: float
    ) -> int:
        values = self._cut(request.headers.get("content-type", ""))(body)
        if len(values) == 1:
            event = Event(
                values[0].as_py(),
                self._key(request),
                self._headers(path, request),
                source=source_of(request),
            )
            self.publisher.publish_one(queue, event, deadline)
            return 1
        block = block_of_values(
            values, keys=self._key(request), headers=self._headers(path, request),
            source=source_of(request),
        )  # fmt: skip
        self.publisher.publish(queue, block, deadline)
        return len(values)

    def _cut(self, content_type: str) -> Callable[[bytes], pa.Array[Any]]:
        split = self.settings.split
        if split is Split.AUTO:
            split = split_of(content_type)
        return {Split.LINES: lines, Split.JSON: json_values}.get(split, _whole)

    def _key(self, request: Request) -> str | None:
        key: str | None = None
        if self.settings.key_header is not None:
            key = request.headers.get(self.settings.key_header)
        if key is None and self.settings.key_query is not None:
            key = request.query_params.get(self.settings.key_query)
        return key

    def _headers(self, path: str, request: Request) -> dict[str, str]:
        kept = {name: request.headers.get(name) for name in self.settings.keep_headers}
        found = {name: text for name, text in kept.items() if text is not None}
        return {**found, PATH_HEADER: path}


def split_of(content_type: str) -> Split:
    """What a content type says about a body's events."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind in _LINES or kind.startswith("text/"):
        return Split.LINES
    return Split.JSON if kind == "application/json" or kind.endswith("+json") else Split.NONE


def _whole(body: bytes) -> pa.Array[Any]:
    return build_values([body])
