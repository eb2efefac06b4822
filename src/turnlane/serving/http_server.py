"""An HTTP server on a thread of its own, with limits on connections, headers, bodies and threads.

uvicorn parses requests and sends answers, and leaves limits to a proxy in front of it. This module
adds them, and no client holds resources for nothing: the headers have to arrive within the idle
timeout and fit their limit, a body has to keep arriving, the client has to read the answer, and the
number of connections is bounded.

Only the callbacks of the parser distinguish headers from a body. uvicorn has no public interface to
them, so :class:`HttpConnection` is a subclass of uvicorn's protocol, and ``_UvicornServer`` is a
subclass of uvicorn's server. :data:`UVICORN_INTERNALS` lists everything that both use, a test
checks it, and ``pyproject.toml`` bounds uvicorn to versions that pass all tests. To raise the
bound, read the changes of these classes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, Self, TypeVar

import anyio
import httptools
import uvicorn
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from turnlane.errors import ConfigError
from turnlane.logs import get_logger
from turnlane.runtime import Closeable, start_thread
from turnlane.serving.address import Address
from turnlane.serving.auth import TlsSettings
from turnlane.serving.body_budget import BodyBudget
from turnlane.serving.http_body import BODY_SHARE
from turnlane.serving.proxy_header import (
    HEADER_SECONDS,
    InvalidProxyHeader,
    ProxyHeader,
    ProxyHeaderReader,
    is_proxy_header,
)
from turnlane.units import Duration, Size

log = get_logger(__name__)

BACKLOG = 1024
"""Connections that the operating system holds before they are accepted."""

_ABORT_SECONDS = 5.0
"""Seconds in which a server that stops has to close its last connections."""

UVICORN_INTERNALS: Final = {
    "HttpToolsProtocol": (
        *("connection_made", "data_received", "pause_writing", "resume_writing", "shutdown"),
        *("on_message_begin", "on_header", "on_headers_complete", "on_body"),
        *("on_message_complete", "on_response_complete"),
        *("loop", "transport", "connections", "client", "cycle", "headers", "url"),
    ),
    "RequestResponseCycle": ("more_body", "response_complete"),
    "Server": (
        *("run", "startup", "main_loop", "on_tick", "shutdown"),
        *("config", "server_state", "started", "should_exit", "lifespan", "servers"),
    ),
    "ServerState": ("connections",),
}
"""The methods and attributes of uvicorn that this package overrides, reads or sets."""

_NEVER: Final = math.inf

_MIN_BODY_BYTES: Final = 64 * 1024
"""A body that brings fewer bytes than this within the idle timeout is too slow."""

_BUSY: Final = "too many connections"
_LARGE: Final = "the request's headers are too large"
_PROXIED: Final = "the connection begins with a PROXY header; set `proxy_protocol: true`"
_ACCEPT_PAUSE_SECONDS: Final = 1.0
"""How long to accept no connections after a failure: most likely no file descriptors are left."""


class WebSettings(BaseModel):
    """The address and the limits of a web server."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    listen: Address = Field(description="The address to listen on.", examples=["127.0.0.1:8088"])
    tls: TlsSettings | None = Field(
        default=None, description="Certificate and key; default: no TLS."
    )
    max_request_bytes: Size = Field(
        default=16 * 2**20, ge=1, description="The largest body of a request."
    )
    max_decompressed_bytes: Size = Field(
        default=64 * 2**20, ge=1, description="The largest decompressed body of a request."
    )
    max_header_bytes: Size = Field(
        default=64 * 2**10, ge=1024, description="The most bytes of a request's line and headers."
    )
    max_connections: int = Field(default=1000, ge=1, description="The most connections at a time.")
    idle_timeout: Duration = Field(
        default=60.0, gt=0, description="How long a client may keep the server waiting."
    )
    proxy_protocol: bool = Field(
        default=False,
        description="Every connection begins with a PROXY header (version 1 or 2) of a balancer, "
        "which tells the address of the client.",
    )


Result = TypeVar("Result")


class ThreadLimiter:
    """Runs the blocking calls of a server on at most ``most`` threads."""

    def __init__(self, most: int) -> None:
        self._limiter = anyio.CapacityLimiter(most)

    @property
    def is_exhausted(self) -> bool:
        """Whether a call would have to wait for a thread."""
        return self._limiter.available_tokens < 1

    async def run(self, call: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """Run a call on a thread; wait for a free one.

        A cancelled caller leaves at once; the call continues, and its result is dropped.
        """
        return await anyio.to_thread.run_sync(
            functools.partial(call, *args, **kwargs),
            abandon_on_cancel=True,
            limiter=self._limiter,
        )


class ThreadLimiterByQueue:
    """At most ``most`` threads for each queue, so calls that wait for one do not delay others."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_queue: dict[str, ThreadLimiter] = {}

    def of(self, queue: str) -> ThreadLimiter:
        """Return the limiter for calls that wait for this queue."""
        if queue not in self._by_queue:
            self._by_queue[queue] = ThreadLimiter(self._most)
        return self._by_queue[queue]


class HttpConnection(HttpToolsProtocol):
    """A connection with a deadline for the next bytes of its client. Only the loop uses it."""

    def __init__(
        self, limits: WebSettings, proxied: tuple[str, int] | None = None, **parts: Any
    ) -> None:
        """``proxied`` is the client that a balancer named."""
        super().__init__(**parts)
        self.limits = limits
        self._proxied = proxied
        self._is_new = True
        """Whether no bytes have arrived."""
        self._deadline = _NEVER
        self._in_headers = True
        """Whether the next bytes belong to the headers of a request."""
        self._head_bytes = 0
        self._body_bytes = 0

    def abort_if_late(self, now: float) -> None:
        """Abort the connection if the deadline of its client is over."""
        if now >= self._deadline:
            self._deadline = _NEVER
            self.transport.abort()

    # ── called by uvicorn and the parser ────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client = self._proxied or self.client
        self._restart_deadline()
        if len(self.connections) > self.limits.max_connections:
            self._refuse(b"503 Service Unavailable", _BUSY, b"retry-after: 1\r\n")

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        is_new, self._is_new = self._is_new, False
        if is_new and is_proxy_header(data):
            log.warning("web.connection_invalid", client=self.client, hint=_PROXIED)
            self._refuse(b"400 Bad Request", _PROXIED)
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._head_bytes > self.limits.max_header_bytes:
            self._refuse(b"431 Request Header Fields Too Large", _LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._restart_deadline()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        # Trailers arrive here, too, one by one and after the check of the headers.
        if not self._in_headers and self._count_head_bytes() > self.limits.max_header_bytes:
            raise httptools.HttpParserError(_LARGE)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._body_bytes = 0
        if self._count_head_bytes() > self.limits.max_header_bytes:
            self._refuse(b"431 Request Header Fields Too Large", _LARGE)
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        super().on_body(body)
        self._body_bytes += len(body)
        if self._body_bytes >= _MIN_BODY_BYTES:
            self._restart_deadline()

    def on_message_complete(self) -> None:
        self._in_headers = True
        self._head_bytes = 0
        if self.transport.is_closing():
            return
        super().on_message_complete()
        self._deadline = _NEVER if not self.cycle.response_complete else self._next_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._deadline = _NEVER if self._is_answering() else self._next_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._deadline = self._next_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._deadline = _NEVER if self._is_answering() else self._next_deadline()

    # ── deadlines and refusals ──────────────────────────────────────────────────────────────────

    def _restart_deadline(self) -> None:
        """Give the client one idle timeout for its next bytes."""
        self._body_bytes = 0
        self._deadline = self._next_deadline()

    def _next_deadline(self) -> float:
        return self.loop.time() + self.limits.idle_timeout

    def _is_answering(self) -> bool:
        """Return whether the request is complete and its answer is not."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def _count_head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _refuse(self, status: bytes, reason: str, *headers: bytes) -> None:
        body = reason.encode()
        head = (
            b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n%bconnection: close"
        )
        self.transport.write(head % (status, len(body), b"".join(headers)) + b"\r\n\r\n" + body)
        self.transport.close()


class WebServer(Closeable):
    """Serves an application on a thread with an event loop. Start and stop it once."""

    def __init__(
        self,
        app: ASGIApp,
        settings: WebSettings,
        name: str = "web",
        body_budget: BodyBudget | None = None,
    ) -> None:
        self.settings = settings
        self._app = app
        self._body_budget = body_budget or BodyBudget()
        self._name = name
        self._address = settings.listen
        self._server: _UvicornServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> Address:
        """The address it listens on, with the real port once it was started."""
        return self._address

    @property
    def url(self) -> str:
        """The address as a URL."""
        return f"{'https' if self.settings.tls else 'http'}://{self._address}"

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return 0 if self._server is None else len(self._server.server_state.connections)

    def start(self) -> Self:
        """Return once it listens. Raises ``ConfigError`` or ``AddressTaken``."""
        tls = None if self.settings.tls is None else self.settings.tls.context()
        bound = self.settings.listen.listen()
        self._address = self.settings.listen.with_port(bound.getsockname()[1])
        self._server = _UvicornServer(self._answer, self.settings, tls)
        self._thread = start_thread(f"turnlane-{self._name}", self._server.run_on, bound)
        self._server.ready.wait()
        if self._server.failure is not None:
            self._thread.join()
            raise ConfigError(
                "listen", f"cannot serve on {self._address}: {self._server.failure}"
            ) from self._server.failure
        return self

    def stop(self, timeout: float) -> None:
        """Take no more requests; those under way have ``timeout`` seconds. May be repeated."""
        if self._server is None or self._thread is None:
            return
        self._server.begin_stop(timeout)
        self._thread.join(timeout + _ABORT_SECONDS)
        if self._thread.is_alive():
            log.warning(
                "web.stop_timeout",
                address=self._address,
                hint="its thread ends with the process",
            )

    def close(self) -> None:
        self.stop(0.0)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; its body uses memory of the budget until then."""
        with self._body_budget.open_share() as scope[BODY_SHARE]:
            await self._app(scope, receive, send)


class _UvicornServer(uvicorn.Server):
    """uvicorn's server on a given socket, with limited connections."""

    def __init__(self, app: ASGIApp, settings: WebSettings, tls: ssl.SSLContext | None) -> None:
        config = uvicorn.Config(
            app,
            interface="asgi3",
            http="httptools",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # else any local client could choose the source of its events
            timeout_keep_alive=max(1, round(settings.idle_timeout)),
        )
        super().__init__(config)
        self.ready = threading.Event()
        self.failure: BaseException | None = None
        self._settings = settings
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_event = asyncio.Event()
        self._proxied_tasks: set[asyncio.Task[None]] = set()
        """Accept connections of balancers, and read their PROXY headers."""

    def run_on(self, bound: socket.socket) -> None:
        """Serve until :meth:`begin_stop`. Sets ``ready`` once it listens or has failed."""
        try:
            with bound:
                self.run(sockets=[bound])
        except Exception as error:  # noqa: BLE001 - `start` raises it
            self.failure = error
        finally:
            self.ready.set()

    def begin_stop(self, timeout: float) -> None:
        """Begin to stop, from any thread."""
        # Not 0: uvicorn would then log an error even if no request is under way.
        self.config.timeout_graceful_shutdown = max(timeout, 0.01)  # type: ignore[assignment]
        self.should_exit = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop_event.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = loop = asyncio.get_running_loop()
        await self.lifespan.startup()
        make = functools.partial(
            HttpConnection,
            self._settings,
            config=self.config,
            server_state=self.server_state,
            app_state={},
        )
        limits: dict[str, Any] = {}
        if self._tls is not None:
            limits["ssl_handshake_timeout"] = self._settings.idle_timeout
            limits["ssl_shutdown_timeout"] = min(self._settings.idle_timeout, _ABORT_SECONDS)
        self.servers = []
        for each in sockets or ():
            if self._settings.proxy_protocol:
                each.setblocking(False)  # noqa: FBT003 - the socket's own interface
                each.listen(BACKLOG)
                connect = functools.partial(self._connect_proxied, make, limits)
                self._keep_task(self._accept_proxied(each, connect))
            else:
                self.servers.append(
                    await loop.create_server(
                        make, sock=each, ssl=self._tls, backlog=BACKLOG, **limits
                    )
                )
        self.started = True
        self.ready.set()

    async def main_loop(self) -> None:
        """Update the date header and check the deadlines of clients until :meth:`begin_stop`."""
        tick = min(0.5, self._settings.idle_timeout / 4)
        while not await self.on_tick(0):
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, HttpConnection):
                    connection.abort_if_late(now)
            try:
                await asyncio.wait_for(self._stop_event.wait(), tick)
            except TimeoutError:
                continue

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        proxied = list(self._proxied_tasks)
        for task in proxied:
            task.cancel()
        await asyncio.gather(*proxied, return_exceptions=True)
        await super().shutdown(sockets)
        # Abort the connections that are still open: a transport must not outlive its loop.
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        while self.server_state.connections:  # noqa: ASYNC110 - the next turn of the loop removes them
            await asyncio.sleep(0)

    # ── connections of balancers ────────────────────────────────────────────────────────────────
    # The header comes before a TLS handshake, so asyncio gets a connection only after it.

    def _keep_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._proxied_tasks.add(task)
        task.add_done_callback(self._proxied_tasks.discard)

    async def _accept_proxied(
        self,
        listener: socket.socket,
        connect: Callable[[socket.socket, object], Coroutine[Any, Any, None]],
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(listener)
            except ConnectionError:
                continue  # closed by the client before it was accepted
            except OSError as error:
                log.warning("web.accept_failed", error=error)
                await asyncio.sleep(_ACCEPT_PAUSE_SECONDS)
                continue
            if len(self._proxied_tasks) > self._settings.max_connections:
                accepted.close()
            else:
                self._keep_task(connect(accepted, peer))

    async def _connect_proxied(
        self,
        make: Callable[..., asyncio.Protocol],
        limits: dict[str, Any],
        accepted: socket.socket,
        peer: object,
    ) -> None:
        """Read the header of a connection, and hand the connection over to HTTP."""
        with contextlib.ExitStack() as stack:
            stack.callback(accepted.close)
            header = await _read_proxy_header(accepted, peer)
            if header is None:
                return
            stack.pop_all()  # the transport closes it from here
        with contextlib.suppress(OSError):  # the TLS handshake has failed
            await asyncio.get_running_loop().connect_accepted_socket(
                functools.partial(make, proxied=header.client), accepted, ssl=self._tls, **limits
            )


async def _read_proxy_header(accepted: socket.socket, peer: object) -> ProxyHeader | None:
    """Return the header of a connection; ``None`` if there is no valid one in time."""
    reader = ProxyHeaderReader()
    error: Exception | str
    try:
        async with asyncio.timeout(HEADER_SECONDS):
            while (header := reader.receive(accepted)) is None:
                await anyio.wait_readable(accepted)
        return header
    except TimeoutError:
        error = f"no PROXY header within {HEADER_SECONDS:g} seconds"
    except (InvalidProxyHeader, OSError) as refused:
        if not reader.has_begun:
            return None  # a balancer that checks whether the server is alive may send nothing
        error = refused
    log.warning("web.connection_invalid", client=peer, error=error)
    return None
