"""The HTTP plane: the endpoints that curl, probes and Prometheus use, behind one server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache
from typing import Any, NotRequired, Self

from prometheus_client import CollectorRegistry, generate_latest
from pydantic import with_config
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typing_extensions import TypedDict

from turnlane.node.http.admin import AdminRoutes
from turnlane.node.http.consume import ConsumeRoutes
from turnlane.node.http.events import STRICT
from turnlane.node.http.openapi import make_document
from turnlane.node.http.publish import PublishRoutes
from turnlane.node.http.request import (
    PUBLIC,
    Access,
    Answer,
    Call,
    Endpoint,
    RequestContext,
    Scope,
    UncheckedParameters,
    json_response,
    list_endpoints,
)
from turnlane.node.http.tables import TableRoutes
from turnlane.node.metrics import CONTENT_TYPE, CountedInput, NodeCollector, TableCollector
from turnlane.node.node import Node
from turnlane.node.tables import Tables
from turnlane.runtime import Closeable
from turnlane.serving.address import Address
from turnlane.serving.auth import Authority, Right
from turnlane.serving.browsers import BrowserGuard
from turnlane.serving.http_problems import PROBLEM_HANDLERS, RETRY_AFTER
from turnlane.serving.http_server import WebServer, WebSettings

_RequestHandler = Callable[[Request], Awaitable[Response]]


class HttpPlane(Closeable):
    """Serves a node over HTTP. Stop it before the node is closed.

    ``inputs`` appear in the metrics. ``get_startup_blocker`` returns the part for which a
    starting node still waits, and ``None`` once the node is ready.
    """

    def __init__(
        self,
        node: Node,
        authority: Authority,
        settings: WebSettings,
        *,
        inputs: Sequence[CountedInput] = (),
        get_startup_blocker: Callable[[], str | None] = lambda: None,
        tables: Tables | None = None,
    ) -> None:
        served_tables = tables or Tables()
        self._context = context = RequestContext(node, authority, settings)
        metrics = CollectorRegistry()
        metrics.register(NodeCollector(node, inputs))
        metrics.register(TableCollector(served_tables))
        app = _make_app(
            context,
            (
                PublishRoutes(context),
                ConsumeRoutes(context),
                AdminRoutes(context),
                TableRoutes(context, served_tables),
                NodeRoutes(context, metrics, get_startup_blocker),
            ),
            BrowserGuard(authority, settings.listen),
        )
        self._server = WebServer(app, settings, "http", node.body_budget)

    @property
    def address(self) -> Address:
        """The address it listens on, with the real port once it was started."""
        return self._server.address

    @property
    def url(self) -> str:
        """The address as a URL."""
        return self._server.url

    def start(self) -> Self:
        """Return once it listens. Raises ``ConfigError`` if it cannot."""
        self._server.start()
        return self

    def stop(self, timeout: float) -> None:
        """Take no more requests; running requests get ``timeout`` seconds. Harmless if repeated."""
        self._context.stopping = True
        self._server.stop(timeout)

    def close(self) -> None:
        self.stop(0.0)


# ── the node's own endpoints ────────────────────────────────────────────────────────────────────


@with_config(STRICT)
class StatusJson(TypedDict):
    """The state of the node."""

    status: str
    reasons: NotRequired[list[str]]


class NodeRoutes:
    """Answers probes, scrapes and questions about the endpoints."""

    def __init__(
        self,
        context: RequestContext,
        metrics: CollectorRegistry,
        get_startup_blocker: Callable[[], str | None],
    ) -> None:
        self._context = context
        self._metrics = metrics
        self._get_startup_blocker = get_startup_blocker

    @Endpoint(
        "GET /healthz",
        tag="node",
        access=PUBLIC,
        answers={200: Answer("The process is alive.", StatusJson)},
    )
    async def healthz(self, _call: Call[UncheckedParameters]) -> Response:
        """Say whether the process is alive."""
        return json_response({"status": "ok"})

    @Endpoint(
        "GET /readyz",
        tag="node",
        access=PUBLIC,
        answers={
            200: Answer("The node takes events.", StatusJson),
            503: Answer("The node does not take events; `reasons` say why.", StatusJson),
        },
    )
    async def readyz(self, call: Call[UncheckedParameters]) -> Response:
        """Say whether the node takes events."""
        reasons = await self._context.threads.run(self._list_reasons)
        if not reasons:
            return json_response({"status": "ready"})
        # A probe has and needs no token; only a client with a token learns the reasons.
        may_know = self._context.authority.allows(call.bearer, Right.READ, None)
        status: StatusJson = {"status": "not ready", "reasons": reasons if may_know else []}
        answer = json_response(status, 503)
        answer.headers["retry-after"] = str(round(RETRY_AFTER))
        return answer

    def _list_reasons(self) -> list[str]:
        """Return the reasons why the node is not ready."""
        if self._context.node.closing or self._context.stopping:
            return ["the node is closing"]
        starting = self._get_startup_blocker()
        reasons = [] if starting is None else [f"the node is starting: {starting}"]
        return reasons + [
            f"queue {name!r} cannot write to its disk: {queue.storage_failure}"
            for name, queue in sorted(self._context.node.queues().items())
            if queue.storage_failure
        ]

    @Endpoint(
        "GET /metrics",
        tag="node",
        access=Access(Scope.NODE, (Right.READ,)),
        answers={200: Answer("The metrics.", str, "text/plain")},
    )
    async def metrics(self, _call: Call[UncheckedParameters]) -> Response:
        """Show metrics in the text format of Prometheus."""
        text = await self._context.threads.run(generate_latest, self._metrics)
        return Response(text, media_type=CONTENT_TYPE)

    @Endpoint(
        "GET /openapi.json",
        tag="node",
        access=PUBLIC,
        answers={200: Answer("OpenAPI 3.1.", dict[str, Any])},
    )
    async def openapi(self, _call: Call[UncheckedParameters]) -> Response:
        """Show this document."""
        return json_response(describe_plane())


@cache
def describe_plane() -> dict[str, Any]:
    """Return the OpenAPI document of the HTTP plane."""
    return make_document(
        list_endpoints(AdminRoutes, PublishRoutes, ConsumeRoutes, TableRoutes, NodeRoutes)
    )


# ── routes ──────────────────────────────────────────────────────────────────────────────────────


def _make_app(context: RequestContext, parts: Iterable[object], guard: BrowserGuard) -> Starlette:
    """Return the application. A path has one route, so that a 405 lists all its methods."""
    by_path: dict[str, dict[str, _RequestHandler]] = {}
    for part in parts:
        for found, answer in context.bind(part):
            methods = by_path.setdefault(found.path, {})
            methods.update(dict.fromkeys(found.methods, answer))

    def make_route(path: str, answers: dict[str, _RequestHandler]) -> Route:
        async def answer(request: Request) -> Response:
            guard.check(request.headers)
            return await answers[request.method](request)

        route = Route(path, answer, methods=list(answers))
        route.methods = set(answers)  # starlette adds HEAD by itself
        return route

    routes = [make_route(path, answers) for path, answers in by_path.items()]
    app = Starlette(routes=routes, exception_handlers=PROBLEM_HANDLERS)
    app.router.redirect_slashes = False
    return app
