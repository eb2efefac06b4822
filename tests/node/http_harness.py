"""A node with its HTTP plane, for tests over real sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from turnlane.node.http import HttpPlane
from turnlane.node.node import Node
from turnlane.queues.buffered import BufferedQueue
from turnlane.serving.auth import Authority, TokenSettings
from turnlane.serving.http_server import WebSettings
from turnlane.testing import FaultyDisk

QUEUES: Mapping[str, Mapping[str, Any]] = {
    "orders": {"durability": "always"},
    "memory": {"kind": "memory"},
}


@dataclass
class HttpNode:
    """The node, its HTTP plane and a client."""

    node: Node
    plane: HttpPlane
    http: httpx.Client
    disk: FaultyDisk

    @property
    def orders(self) -> BufferedQueue:
        return self.node.queue("orders")

    def post(self, content: Any, queue: str = "orders", **more: Any) -> httpx.Response:
        """Publish text or bytes as one raw event, other values as JSON."""
        kind = "content" if isinstance(content, bytes | str) else "json"
        return self.http.post(f"/queues/{queue}/events", **{kind: content}, **more)

    def take(self, queue: str = "orders", **params: Any) -> httpx.Response:
        return self.http.get(f"/queues/{queue}/events", params=params)


@contextlib.contextmanager
def serve_http(
    data: Path,
    queues: Mapping[str, Mapping[str, Any]] = QUEUES,
    *,
    tokens: tuple[TokenSettings, ...] = (),
    client: Mapping[str, Any] | None = None,
    get_startup_blocker: Callable[[], str | None] = lambda: None,
    **knobs: Any,
) -> Iterator[HttpNode]:
    """Serve a node with these queues."""
    disk = FaultyDisk()
    settings = WebSettings(**{"listen": ":0"} | knobs)
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(Node(data, queues, disk=disk))
        plane = HttpPlane(
            node, Authority(tokens), settings, get_startup_blocker=get_startup_blocker
        )
        stack.enter_context(plane.start())
        http = httpx.Client(base_url=plane.url, timeout=30, **(client or {}))
        yield HttpNode(node, plane, stack.enter_context(http), disk)
