"""A web server in a thread of its own, with limits on connections, headers and bodies."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
import threading
from typing import Any, Self

import uvicorn
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp

from turnlane.errors import ConfigError
from turnlane.runtime import Closeable
from turnlane.serving.address import Address
from turnlane.serving.auth import TlsSettings
from turnlane.serving.connection import Connection
from turnlane.units import Duration, Size

log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the operating system holds before they are accepted."""

_ABORT_SECONDS = 5.0
"""Seconds in which a server that stops has to close its last connections."""


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
        default=64 * 2**20, ge=1, description="The largest body of a request once it is unpacked."
    )
    max_header_bytes: Size = Field(
        default=64 * 2**10, ge=1024, description="The most bytes of a request's line and headers."
    )
    max_connections: int = Field(default=1000, ge=1, description="The most connections at a time.")
    idle_timeout: Duration = Field(
        default=60.0, gt=0, description="How long a client may keep the server waiting."
    )


class WebServer(Closeable):
    """Serves an application on a thread with an event loop. Start and stop it once."""

    def __init__(self, app: ASGIApp, settings: WebSettings, name: str = "web") -> None:
        self.settings = settings
        self._app = app
        self._name = name
        self._address = settings.listen
        self._server: _Server | None = None
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
        self._server = _Server(self._app, self.settings, tls)
        self._thread = threading.Thread(
            target=self._server.run_on, args=(bound,), name=f"turnlane-{self._name}", daemon=True
        )
        self._thread.start()
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
                "web.stop_timeout address=%s (its thread ends with the process)", self._address
            )

    def close(self) -> None:
        self.stop(0.0)


class _Server(uvicorn.Server):
    """uvicorn's server on a given socket, with limited connections.

    See ``connection.py`` for the parts of uvicorn that it overrides.
    """

    def __init__(self, app: ASGIApp, settings: WebSettings, tls: ssl.SSLContext | None) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=max(1, round(settings.idle_timeout)),
        )
        super().__init__(config)
        self.ready = threading.Event()
        self.failure: BaseException | None = None
        self._settings = settings
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_event = asyncio.Event()

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
            Connection,
            self._settings,
            config=self.config,
            server_state=self.server_state,
            app_state={},
        )
        limits: dict[str, Any] = {}
        if self._tls is not None:
            limits["ssl_handshake_timeout"] = self._settings.idle_timeout
            limits["ssl_shutdown_timeout"] = min(self._settings.idle_timeout, _ABORT_SECONDS)
        self.servers = [
            await loop.create_server(make, sock=each, ssl=self._tls, backlog=BACKLOG, **limits)
            for each in sockets or ()
        ]
        self.started = True
        self.ready.set()

    async def main_loop(self) -> None:
        """Update the date header and check the deadlines of clients until :meth:`begin_stop`."""
        tick = min(0.5, self._settings.idle_timeout / 4)
        while not await self.on_tick(0):
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.abort_if_late(now)
            try:
                await asyncio.wait_for(self._stop_event.wait(), tick)
            except TimeoutError:
                continue

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        # Abort the connections that are still open: a transport must not outlive its loop.
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        while self.server_state.connections:  # noqa: ASYNC110 - the next turn of the loop removes them
            await asyncio.sleep(0)
