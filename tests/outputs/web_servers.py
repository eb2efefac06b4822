"""A web server for outputs that does what a test tells it to, whatever is wrong with that."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import cramjam

PATIENCE = 30.0


@dataclass
class Seen:
    """A request as the server saw it; its body is unpacked."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Reply:
    """An answer."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


Behaviour = Callable[["Handler"], Reply | None]
"""Reads a request and gives the answer; ``None`` if it has dealt with the connection itself."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Server
    timeout = PATIENCE

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def read(self) -> Seen:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        match self.headers.get("content-encoding"):
            case "gzip":
                body = bytes(cramjam.gzip.decompress(body))
            case "zstd":
                body = bytes(cramjam.zstd.decompress(body))
        headers = {name.lower(): value for name, value in self.headers.items()}
        return Seen(self.command, self.path, headers, body)

    def reply(self, reply: Reply) -> None:
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def reset(self) -> None:
        """End the connection so that the other side is told of an error."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _answer(self) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError, TimeoutError, ValueError):
            answer = self.server.behave(self)
            if answer is not None:
                self.reply(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = _answer  # noqa: N815 - as http.server has it

    def log_message(self, *_: Any) -> None: ...


class Server(ThreadingHTTPServer):
    """Listens, remembers what it was sent, and behaves as it is told; well, by default."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, context: ssl.SSLContext | None = None, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.scheme = "http"
        self.connections = 0
        self.seen: list[Seen] = []
        self.behave: Behaviour = self.well
        self.ended = threading.Event()
        if context is not None:
            self.scheme = "https"
            # The handshake is left to the connection's own thread.
            self.socket = context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}"

    def well(self, handler: Handler) -> Reply:
        self.seen.append(handler.read())
        return Reply()

    def answers(self, *replies: Reply) -> None:
        """Give these answers, one for each request; the last one again and again."""
        left = list(replies)

        def behave(handler: Handler) -> Reply:
            self.seen.append(handler.read())
            return left.pop(0) if len(left) > 1 else left[0]

        self.behave = behave

    def hang(self, handler: Handler) -> None:
        """Take the request and say nothing."""
        self.seen.append(handler.read())
        self.ended.wait(PATIENCE)
        handler.close_connection = True

    def reset_in_the_body(self, handler: Handler) -> None:
        """Go away in the middle of the request."""
        handler.rfile.read(10)
        handler.reset()

    def vanish(self, handler: Handler) -> None:
        """Take the request, and go away without a word."""
        self.seen.append(handler.read())
        handler.reset()

    def drip(self, handler: Handler) -> None:
        """Answer a byte at a time, never all of it."""
        self.seen.append(handler.read())
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        while not self.ended.wait(0.02):
            handler.wfile.write(b" ")

    def garbage(self, handler: Handler) -> None:
        """Say what is no HTTP."""
        self.seen.append(handler.read())
        handler.wfile.write(b"\x00\xff\x17 what?\r\n\r\n")
        handler.close_connection = True

    def refuse_early(self, handler: Handler) -> None:
        """Say that it is too large before it was read."""
        handler.wfile.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        handler.wfile.flush()
        handler.connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while handler.connection.recv(1 << 16):
                pass
        handler.close_connection = True

    def handle_error(self, *_: Any) -> None: ...


@contextmanager
def served(context: ssl.SSLContext | None = None, *, port: int = 0) -> Iterator[Server]:
    """A server that listens."""
    with Server(context, port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()


def unused_url() -> str:
    """An address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"
