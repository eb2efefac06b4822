"""A web server for tests of outputs, which behaves, or misbehaves, as a test wants."""

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

import pyarrow as pa

TIMEOUT = 30.0


@dataclass
class ReceivedRequest:
    """A request that the server received, with its body decompressed."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Reply:
    """A response."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


Behaviour = Callable[["Handler"], Reply | None]
"""Reads a request and returns the response; ``None`` if it handled the connection itself."""


class Handler(BaseHTTPRequestHandler):
    """Handles one connection."""

    protocol_version = "HTTP/1.1"
    server: Server
    timeout = TIMEOUT

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def read(self) -> ReceivedRequest:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        encoding: Any = self.headers.get("content-encoding")
        if encoding is not None:
            body = pa.input_stream(pa.py_buffer(body), compression=encoding).read()
        headers = {name.lower(): value for name, value in self.headers.items()}
        return ReceivedRequest(self.command, self.path, headers, body)

    def reply(self, reply: Reply) -> None:
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def reset(self) -> None:
        """Reset the connection: the other side gets an error."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _answer(self) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError, TimeoutError, ValueError):
            answer = self.server.behave(self)
            if answer is not None:
                self.reply(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = _answer  # noqa: N815 - names of http.server

    def log_message(self, *_: Any) -> None: ...


class Server(ThreadingHTTPServer):
    """Records requests. ``behave`` makes the responses; by default it accepts everything."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, context: ssl.SSLContext | None = None, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.scheme = "http"
        self.connections = 0
        self.requests: list[ReceivedRequest] = []
        self.behave: Behaviour = self.accept
        self.ended = threading.Event()
        if context is not None:
            self.scheme = "https"
            # The thread of the connection does the handshake.
            self.socket = context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}"

    def accept(self, handler: Handler) -> Reply:
        self.requests.append(handler.read())
        return Reply()

    def set_replies(self, *replies: Reply) -> None:
        """Return these responses, one for each request; repeat the last one."""
        left = list(replies)

        def behave(handler: Handler) -> Reply:
            self.requests.append(handler.read())
            return left.pop(0) if len(left) > 1 else left[0]

        self.behave = behave

    def hang(self, handler: Handler) -> None:
        """Read the request and never answer."""
        self.requests.append(handler.read())
        self.ended.wait(TIMEOUT)
        handler.close_connection = True

    def reset_in_the_body(self, handler: Handler) -> None:
        """Reset the connection in the middle of the request."""
        handler.rfile.read(10)
        handler.reset()

    def reset_after_request(self, handler: Handler) -> None:
        """Read the request and reset the connection without an answer."""
        self.requests.append(handler.read())
        handler.reset()

    def answer_slowly(self, handler: Handler) -> None:
        """Answer one byte at a time, and never finish."""
        self.requests.append(handler.read())
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        while not self.ended.wait(0.02):
            handler.wfile.write(b" ")

    def send_garbage(self, handler: Handler) -> None:
        """Answer with bytes that are not HTTP."""
        self.requests.append(handler.read())
        handler.wfile.write(b"\x00\xff\x17 what?\r\n\r\n")
        handler.close_connection = True

    def refuse_before_reading(self, handler: Handler) -> None:
        """Answer 413 before the request is read."""
        handler.wfile.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        handler.wfile.flush()
        handler.connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while handler.connection.recv(1 << 16):
                pass
        handler.close_connection = True

    def handle_error(self, *_: Any) -> None: ...


@contextmanager
def run_server(context: ssl.SSLContext | None = None, *, port: int = 0) -> Iterator[Server]:
    """Run a server while the ``with`` block runs."""
    with Server(context, port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()


def get_unused_url() -> str:
    """Return a URL where no server listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"
