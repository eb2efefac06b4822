"""Breakers over HTTP: seen, and closed by hand."""

from __future__ import annotations

import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turnlane.node import http_queries as queries
from turnlane.node.http_requests import Requests, json_response, token_of
from turnlane.serving.auth import Right

log = logging.getLogger(__name__)


class BreakerRoutes:
    """Shows breakers to those who may read their queues; those who administer them may reset."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/breakers", self.all, methods=["GET"]),
            Route("/breakers/{action}/reset", self.reset, methods=["POST"]),
        ]

    async def all(self, request: Request) -> Response:
        """Every breaker that the token may see."""
        queries.only(request)
        bearer = token_of(request)
        self._requests.authority.identify(bearer)
        return json_response({"breakers": self._visible(bearer)})

    def _visible(self, bearer: str | None) -> dict[str, dict[str, Any]]:
        authority = self._requests.authority
        return {
            action: breaker.as_dict()
            for action, breaker in self._requests.node.breakers.all().items()
            if authority.allows(bearer, Right.READ, breaker.queue)
        }

    async def reset(self, request: Request) -> Response:
        """Close a breaker."""
        queries.only(request)
        bearer = token_of(request)
        self._requests.authority.identify(bearer)
        action: str = request.path_params["action"]
        breaker = self._requests.node.breakers.of(action)
        self._requests.authority.check(bearer, Right.ADMIN, breaker.queue)
        breaker.gate.reset()
        log.info("breaker %s was reset", action)
        return json_response(breaker.as_dict())
