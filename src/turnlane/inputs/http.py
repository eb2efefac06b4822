"""Inputs that are web servers, and the input ``http``: every posted body becomes events."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Final, Literal, TypeVar

from pydantic import Field, field_validator
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from turnlane.errors import RetryLater
from turnlane.events import Event, build_values
from turnlane.formats.lines import build_event_block, split_body_lines, split_json_array
from turnlane.inputs.api import Counters, Host, Input, InputSettings
from turnlane.inputs.publishers import THREADS, RequestPublisher, RequestSettings
from turnlane.serving.address import normalize_host
from turnlane.serving.auth import Authority, Right, parse_bearer
from turnlane.serving.browsers import BrowserGuard
from turnlane.serving.http_body import read_body
from turnlane.serving.http_problems import PROBLEM_HANDLERS, build_problem, get_status
from turnlane.serving.http_server import ThreadLimiterByQueue, WebServer, WebSettings

Result = TypeVar("Result")


class WebInputSettings(RequestSettings, InputSettings, WebSettings):
    """The settings of an input that is a web server."""


class WebInput(Input):
    """An input that is a web server. Subclasses add routes and the form of refusals."""

    settings_type: ClassVar[type[InputSettings]] = WebInputSettings
    settings: WebInputSettings

    def __init__(self, settings: WebInputSettings, host: Host) -> None:
        handlers = dict.fromkeys(PROBLEM_HANDLERS, self._refuse)
        app = Starlette(routes=self.build_routes(), exception_handlers=handlers)
        body_budget = getattr(host, "body_budget", None)  # of a node; a program's host has none
        self._server = WebServer(app, settings, settings.label, body_budget)
        super().__init__(settings, host)
        self.publisher = RequestPublisher(host, settings, settings.ack)
        self._threads = ThreadLimiterByQueue(THREADS)
        self._authority = Authority(settings.tokens)
        self._guard = BrowserGuard(self._authority, settings.listen)

    @property
    def counters(self) -> Counters:
        """The counts of the input; ``connections`` is the current number."""
        self._counters.connections = self._server.connections
        return self._counters

    @counters.setter
    def counters(self, counters: Counters) -> None:
        self._counters = counters

    @abc.abstractmethod
    def build_routes(self) -> Sequence[BaseRoute]:
        """Return the routes that it answers."""

    def list_queues(self) -> Iterable[tuple[str, str]]:
        """Return the queues that it publishes to, each with the setting that names it."""
        return [("queue", self.settings.queue)]

    def build_refusal(self, _request: Request, error: Exception) -> Response:
        """Return the answer to an error."""
        return build_problem(error)

    @property
    def address(self) -> str:
        return str(self._server.address)

    def start(self) -> None:
        self.settings.check_exposed()
        for knob, name in self.list_queues():
            self.publisher.check_queue(knob, name)
        self._server.start()

    def stop(self, timeout: float) -> None:
        self._server.stop(timeout)

    # ── requests ────────────────────────────────────────────────────────────────────────────────

    def authorize(self, request: Request, queue: str) -> None:
        """Raise ``NotAllowed`` unless the request's token allows it to publish.

        Without tokens only web pages are refused.
        """
        self._guard.check(request.headers)
        self._authority.check(self.get_token(request), Right.PUBLISH, queue)

    def get_token(self, request: Request) -> str | None:
        """Return the token that the request shows."""
        return parse_bearer(request.headers.get("authorization"))

    async def run_in_time(
        self, queue: str, call: Callable[..., Result], *args: Any, **kwargs: Any
    ) -> Result:
        """Run a blocking call on a thread for the queue; the deadline is its last argument.

        The time spent waiting for a thread counts, so every request is answered in time under load.
        """

        def run(deadline: float) -> Result:
            with self.publisher.refuse_costly_request():
                return call(*args, deadline, **kwargs)

        with _refuse_when_closing():
            return await self._threads.of(queue).run(run, self.publisher.get_deadline())

    async def read_body(self, request: Request) -> bytes:
        """Return the decompressed body of the request, within the limits."""
        with _refuse_when_closing():
            body = await read_body(request, self.settings)
        self.count(bytes=len(body))
        return body

    async def _refuse(self, request: Request, error: Exception) -> Response:
        self.count(**{"refused" if get_status(error) in (429, 503) else "invalid": 1})
        return self.build_refusal(request, error)


@contextlib.contextmanager
def _refuse_when_closing() -> Iterator[None]:
    """Refuse a request that the closing server cancels: then its sender sends it again.

    uvicorn would answer 500, and then some senders drop their events.
    """
    try:
        yield
    except asyncio.CancelledError:
        raise RetryLater("the node is closing; send it again") from None


def get_source(request: Request) -> str | None:
    """Return the host that sent the request."""
    return None if request.client is None else normalize_host(request.client.host)


PATH_HEADER: Final = "path"
"""The header of an event with the path of its request."""

_LINES: Final = frozenset(
    {"application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines",
     "application/json-lines", "application/jsonlines"}
)  # fmt: skip


class Split(enum.StrEnum):
    """Which part of a body becomes one event."""

    AUTO = "auto"
    """By content type: each line of JSON lines or text, each element of JSON, others whole."""
    NONE = "none"
    """The body as it is."""
    LINES = "lines"
    """Each line that is not empty."""
    JSON = "json"
    """Each element of a JSON array, or the one JSON value that is not an array."""


class HttpInputSettings(WebInputSettings):
    """The settings of the input ``http``."""

    type: Literal["http"] = "http"
    routes: Mapping[str, str] = Field(
        default_factory=dict,
        description="Queues by path, first match first: `{/orders/*: orders}`; others: `queue`.",
    )
    split: Split = Field(Split.AUTO, description="Which part of a body becomes one event.")
    keep_headers: tuple[str, ...] = Field(
        ("content-type",), description="Request headers that events keep."
    )
    key_header: str | None = Field(None, description="The request header with the events' key.")
    key_query: str | None = Field(None, description="The query parameter with the events' key.")
    status: Literal[200, 204] = Field(
        200, description="The answer to accepted events; 204 has no body."
    )

    @field_validator("routes")
    @classmethod
    def _check_paths(cls, routes: Mapping[str, str]) -> Mapping[str, str]:
        for pattern in routes:
            if not pattern.startswith(("/", "*")):
                raise ValueError(f"{pattern!r} matches no path; write it as in /orders/*")
        return routes

    @field_validator("keep_headers")
    @classmethod
    def _lowercase(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.lower() for name in names)


class HttpInput(WebInput):
    """Accepts POST and PUT; answers once the events have reached the level ``ack``.

    A request is accepted whole or not at all, unless it is larger than the whole queue, so a sender
    can repeat a refused request as it was.
    """

    settings_type: ClassVar[type[InputSettings]] = HttpInputSettings
    settings: HttpInputSettings

    def build_routes(self) -> Sequence[BaseRoute]:
        return [Route("/{path:path}", self._handle, methods=["POST", "PUT"])]

    def list_queues(self) -> Iterable[tuple[str, str]]:
        routes = self.settings.routes.items()
        return [*super().list_queues(), *((f"routes.{path}", queue) for path, queue in routes)]

    def _find_queue(self, path: str) -> str:
        for pattern, queue in self.settings.routes.items():
            if fnmatchcase(path, pattern):
                return queue
        return self.settings.queue

    async def _handle(self, request: Request) -> Response:
        path = str(request.scope["path"])
        queue = self._find_queue(path)
        self.authorize(request, queue)
        body = await self.read_body(request)
        events = await self.run_in_time(queue, self._publish, queue, path, request, body)
        self.count(events=events)
        if self.settings.status == 204:
            return Response(status_code=204)
        return JSONResponse({"events": events})

    def _publish(
        self, queue: str, path: str, request: Request, body: bytes, deadline: float
    ) -> int:
        split = self.settings.split
        if split is Split.AUTO:
            split = choose_split(request.headers.get("content-type", ""))
        splitters = {Split.LINES: split_body_lines, Split.JSON: split_json_array}
        values = splitters[split](body) if split in splitters else build_values([body])
        key, headers = self._get_key(request), self._build_headers(path, request)
        source = get_source(request)
        if len(values) == 1:
            event = Event(values[0].as_py(), key, headers, source=source)
            self.publisher.publish_one(queue, event, deadline)
            return 1
        block = build_event_block(values, keys=key, headers=headers, source=source)
        self.publisher.publish(queue, block, deadline)
        return len(values)

    def _get_key(self, request: Request) -> str | None:
        key: str | None = None
        if self.settings.key_header is not None:
            key = request.headers.get(self.settings.key_header)
        if key is None and self.settings.key_query is not None:
            key = request.query_params.get(self.settings.key_query)
        return key

    def _build_headers(self, path: str, request: Request) -> dict[str, str]:
        kept = {name: request.headers.get(name) for name in self.settings.keep_headers}
        found = {name: text for name, text in kept.items() if text is not None}
        return {**found, PATH_HEADER: path}


def choose_split(content_type: str) -> Split:
    """Return how to split a body of this content type."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind in _LINES or kind.startswith("text/"):
        return Split.LINES
    return Split.JSON if kind == "application/json" or kind.endswith("+json") else Split.NONE
