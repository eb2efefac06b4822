"""The HTTP plane: everything that curl, a probe or Prometheus needs of a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turnlane.node.http_admin import AdminRoutes
from turnlane.node.http_breakers import BreakerRoutes
from turnlane.node.http_browsers import Browsers
from turnlane.node.http_consume import ConsumeRoutes
from turnlane.node.http_publish import PublishRoutes
from turnlane.node.http_requests import Requests, json_response, token_of
from turnlane.node.http_tables import TableRoutes
from turnlane.node.metrics import CONTENT_TYPE, CountedInput, NodeCollector, TableCollector
from turnlane.node.node import Node
from turnlane.node.openapi import document
from turnlane.node.tables import Tables
from turnlane.runtime import Closing
from turnlane.serving.address import Address
from turnlane.serving.auth import Authority, Right
from turnlane.serving.http_body import PROBLEM_HANDLERS, RETRY_AFTER
from turnlane.serving.web import WebServer, WebSettings


class HttpPlane(Closing):
    """Serves a node over HTTP. Stop it before the node is closed.

    ``inputs`` appear in the metrics. ``waiting_for`` says what the node still waits for before it
    is ready, if anything.
    """

    def __init__(
        self,
        node: Node,
        authority: Authority,
        settings: WebSettings,
        *,
        inputs: Sequence[CountedInput] = (),
        waiting_for: Callable[[], str | None] = lambda: None,
        tables: Tables | None = None,
    ) -> None:
        self._node = node
        self._tables = tables or Tables()
        self._waiting_for = waiting_for
        self._requests = Requests(node, authority, settings)
        self._metrics = CollectorRegistry()
        self._metrics.register(NodeCollector(node, inputs))
        self._metrics.register(TableCollector(self._tables))
        self._server = WebServer(self._app(Browsers(authority, settings.listen)), settings, "http")

    @property
    def address(self) -> Address:
        """Where it listens, the port as it really is once it was started."""
        return self._server.address

    @property
    def url(self) -> str:
        """The address as a URL."""
        return self._server.url

    def start(self) -> Self:
        """Returns once it listens. Raises ``ConfigError`` if it cannot."""
        self._server.start()
        return self

    def stop(self, timeout: float) -> None:
        """Take no more requests; those under way have ``timeout`` seconds. Twice is harmless."""
        self._requests.stopping = True
        self._server.stop(timeout)

    def close(self) -> None:
        self.stop(0.0)

    def _app(self, browsers: Browsers) -> Starlette:
        parts = (PublishRoutes, ConsumeRoutes, AdminRoutes, BreakerRoutes)
        routes = [route for part in parts for route in part(self._requests).routes()]
        routes += TableRoutes(self._requests, self._tables).routes()
        own = (
            ("/healthz", self._healthz),
            ("/readyz", self._readyz),
            ("/metrics", self._show_metrics),
            ("/openapi.json", self._openapi),
        )
        routes += [Route(path, answer, methods=["GET"]) for path, answer in own]
        app = Starlette(routes=_merged(routes, browsers), exception_handlers=PROBLEM_HANDLERS)
        app.router.redirect_slashes = False
        return app

    async def _healthz(self, _request: Request) -> Response:
        return json_response({"status": "ok"})

    async def _readyz(self, request: Request) -> Response:
        reasons = await self._requests.threads.run(self._reasons)
        if not reasons:
            return json_response({"status": "ready"})
        # A probe has no token and needs none; what is wrong is for those who have one.
        authority = self._requests.authority
        may_know = authority.allows(token_of(request), Right.READ, None)
        content = {"status": "not ready", "reasons": reasons if may_know else []}
        answer = json_response(content, 503)
        answer.headers["retry-after"] = str(round(RETRY_AFTER))
        return answer

    def _reasons(self) -> list[str]:
        """Why the node is not ready."""
        if self._node.closing or self._requests.stopping:
            return ["the node is closing"]
        starting = self._waiting_for()
        reasons = [] if starting is None else [f"the node is starting: {starting}"]
        return reasons + [
            f"queue {name!r} cannot write to its disk: {queue.storage_failure}"
            for name, queue in sorted(self._node.queues().items())
            if queue.storage_failure
        ]

    async def _show_metrics(self, request: Request) -> Response:
        self._requests.authority.check(token_of(request), Right.READ, None)
        text = await self._requests.threads.run(generate_latest, self._metrics)
        return Response(text, media_type=CONTENT_TYPE)

    async def _openapi(self, _request: Request) -> Response:
        return json_response(document())


def _merged(routes: Sequence[Route], browsers: Browsers) -> list[Route]:
    """One route for each path, so that a wrong method is told which there are."""
    by_path: dict[str, dict[str, Any]] = {}
    for route in routes:
        by_path.setdefault(route.path, {}).update(
            dict.fromkeys(sorted(route.methods or ()), route.endpoint)
        )
    return [_route(path, endpoints, browsers) for path, endpoints in by_path.items()]


def _route(path: str, endpoints: dict[str, Any], browsers: Browsers) -> Route:
    async def answer(request: Request) -> Response:
        browsers.check(request.headers)
        response: Response = await endpoints[request.method](request)
        return response

    route = Route(path, answer, methods=list(endpoints))
    route.methods = set(endpoints)
    return route
