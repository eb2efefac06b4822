"""A web server in a thread of its own, with limits."""

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
from turnlane.runtime import Closing
from turnlane.serving.address import Address
from turnlane.serving.auth import TlsSettings
from turnlane.serving.connection import Connection
from turnlane.units import Duration, Size

log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the operating system holds before they are accepted."""

_LAST_MOMENTS = 5.0
"""How long a server that was told to stop at once may take to let go of everything."""


class WebSettings(BaseModel):
    """Where a web server listens, and what it puts up with."""

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


class WebServer(Closing):
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
        """Where it listens, the port as it really is once it was started."""
        return self._address

    @property
    def url(self) -> str:
        """The address as a URL."""
        return f"{'https' if self.settings.tls else 'http'}://{self._address}"

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return 0 if self._server is None else len(self._server.server_state.connections)

    def start(self) -> Self:
        """Returns once it listens. Raises ``ConfigError`` or ``AddressTaken``."""
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
        """Take no more requests; those under way have ``timeout`` seconds. Twice is harmless."""
        if self._server is None or self._thread is None:
            return
        self._server.give_up(timeout)
        self._thread.join(timeout + _LAST_MOMENTS)
        if self._thread.is_alive():
            log.warning(
                "the web server on %s did not stop in time and is left alone", self._address
            )

    def close(self) -> None:
        self.stop(0.0)


class _Server(uvicorn.Server):
    """uvicorn's server on a socket of ours, with connections of ours."""

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
        self._leave = asyncio.Event()

    def run_on(self, bound: socket.socket) -> None:
        """Serve until told to stop. ``ready`` is set once it listens, or has failed."""
        try:
            with bound:
                self.run(sockets=[bound])
        except Exception as error:  # noqa: BLE001 - handed to the thread that started this one
            self.failure = error
        finally:
            self.ready.set()

    def give_up(self, timeout: float) -> None:
        """Begin to stop, from any thread."""
        # Never 0: uvicorn would report even those as cut off who were not there.
        self.config.timeout_graceful_shutdown = max(timeout, 0.01)  # type: ignore[assignment]
        self.should_exit = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._leave.set)

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
            limits["ssl_shutdown_timeout"] = min(self._settings.idle_timeout, _LAST_MOMENTS)
        self.servers = [
            await loop.create_server(make, sock=each, ssl=self._tls, backlog=BACKLOG, **limits)
            for each in sockets or ()
        ]
        self.started = True
        self.ready.set()

    async def main_loop(self) -> None:
        """Keep the clock of the date header, and the clients' deadlines, until told to stop."""
        tick = min(0.5, self._settings.idle_timeout / 4)
        while not await self.on_tick(0):
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.cut_if_late(now)
            try:
                await asyncio.wait_for(self._leave.wait(), tick)
            except TimeoutError:
                continue

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        # Whoever has not left by now is shown out; a transport left open would outlive its loop.
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        while self.server_state.connections:  # noqa: ASYNC110 - each leaves in the loop's next turn
            await asyncio.sleep(0)
