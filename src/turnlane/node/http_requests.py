"""What the operations of the HTTP plane share: the node, the rights, threads, the body's limits."""

from __future__ import annotations

import json
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from turnlane.node.node import Node
from turnlane.queues.buffered import BufferedQueue
from turnlane.serving.auth import Authority, Right, bearer_of
from turnlane.serving.http_body import BodyLimits, read_body
from turnlane.serving.threads import Threads

THREADS: Final = 32
"""Calls at a time that touch disks and do not wait for anybody."""


class Requests:
    """The node as a request sees it."""

    def __init__(self, node: Node, authority: Authority, limits: BodyLimits) -> None:
        self.node = node
        self.authority = authority
        self.threads = Threads(THREADS)
        self.stopping = False
        """Set when the server is to stop: whoever waits for events waits no longer."""
        self._limits = limits

    def allowed(self, request: Request, *rights: Right) -> str:
        """The path's queue, if the request has one of the rights on it. Raises ``NotAllowed``."""
        queue: str = request.path_params["queue"]
        bearer = token_of(request)
        if not any(self.authority.allows(bearer, right, queue) for right in rights[1:]):
            self.authority.check(bearer, rights[0], queue)
        return queue

    def queue(self, request: Request, *rights: Right) -> BufferedQueue:
        """The queue itself. Raises ``NotAllowed``, ``NoSuchQueue``."""
        return self.node.queue(self.allowed(request, *rights))

    async def body(self, request: Request) -> bytes:
        """The request's body, within the limits."""
        return await read_body(request, self._limits)


def token_of(request: Request) -> str | None:
    """The bearer token that the request shows."""
    return bearer_of(request.headers.get("authorization"))


def json_response(content: object, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(json_bytes(content), status, media_type="application/json")


def json_bytes(content: object) -> bytes:
    """JSON as it is sent. Numbers that JSON has no form for are a bug."""
    text: str = json.dumps(content, ensure_ascii=False, allow_nan=False, default=_plain)
    return text.encode()


def _plain(value: object) -> Any:  # noqa: ANN401 - anything JSON has
    return str(value)
