"""Queues: listed, looked at, made and dropped."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turnlane.errors import ConfigError
from turnlane.node import http_queries as queries
from turnlane.node.http_events import parsed_object
from turnlane.node.http_requests import Requests, json_response, token_of
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.settings import QueueSettings
from turnlane.serving.auth import Right
from turnlane.validation import did_you_mean


class AdminRoutes:
    """Administers queues."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/queues", self.all, methods=["GET"]),
            Route("/queues/{queue}", self.one, methods=["GET"]),
            Route("/queues/{queue}", self.make, methods=["PUT"]),
            Route("/queues/{queue}", self.drop, methods=["DELETE"]),
        ]

    async def all(self, request: Request) -> Response:
        """Every queue that the token has some right on."""
        queries.only(request)
        bearer = token_of(request)
        self._requests.authority.identify(bearer)
        shown = await self._requests.threads.run(self._visible, bearer)
        return json_response({"instance": self._requests.node.instance, "queues": shown})

    def _visible(self, bearer: str | None) -> list[dict[str, Any]]:
        authority = self._requests.authority
        return [
            _shown(queue)
            for name, queue in sorted(self._requests.node.queues().items())
            if any(authority.allows(bearer, right, name) for right in Right)
        ]

    async def one(self, request: Request) -> Response:
        """One queue."""
        queue = self._requests.queue(request, Right.READ, Right.ADMIN)
        queries.only(request)
        return json_response(await self._requests.threads.run(_shown, queue))

    async def make(self, request: Request) -> Response:
        """Make a queue of the knobs in the body; one that is there with the same is fine."""
        name = self._requests.allowed(request, Right.ADMIN)
        queries.only(request)
        knobs = _knobs(parsed_object(await self._requests.body(request)))
        shown, is_new = await self._requests.threads.run(self._make, name, knobs)
        return json_response(shown, 201 if is_new else 200)

    def _make(self, name: str, knobs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        is_new = name not in self._requests.node.queues()
        return _shown(self._requests.node.create(name, **knobs)), is_new

    async def drop(self, request: Request) -> Response:
        """Drop a queue with everything in it."""
        name = self._requests.allowed(request, Right.ADMIN)
        queries.only(request)
        await self._requests.threads.run(self._requests.node.drop, name)
        return Response(status_code=204)


def _knobs(given: dict[str, Any]) -> dict[str, Any]:
    known = QueueSettings.model_fields.keys() - {"name", "path"}
    for knob in given:
        if knob not in known:
            raise ConfigError(knob[:80], f"there is no such knob{did_you_mean(knob, known)}")
    return given


def _shown(queue: BufferedQueue) -> dict[str, Any]:
    settings = queue.settings.model_dump(mode="json", exclude={"path", "name"}, exclude_none=True)
    return {
        "name": queue.name,
        "low": queue.low,
        "end": queue.end,
        "settings": settings,
        "stats": queue.stats().as_dict(),
    }
