"""Tests of the HTTP server that all listeners use: TLS, limits, timeouts, bodies and problems."""

from __future__ import annotations

import contextlib
import gzip
import socket
import ssl
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import httpx
import pyarrow as pa
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn import Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tests.certificates import Certificates
from tests.contract.harness import wait_until
from turnlane.errors import (
    AddressTaken,
    ConfigError,
    NoSuchQueue,
    NotAllowed,
    QueueClosed,
    QueueExists,
    QueueFull,
    SchemaMismatch,
    StorageFailed,
)
from turnlane.serving.auth import TlsSettings
from turnlane.serving.http_body import BodyTooLarge, decompress, read_body
from turnlane.serving.http_problems import PROBLEM_HANDLERS, build_problem
from turnlane.serving.http_server import UVICORN_INTERNALS, WebServer, WebSettings

# ── TLS ─────────────────────────────────────────────────────────────────────────────────────────


def test_unusable_tls_file_is_named(certificates: Certificates, tmp_path: Path) -> None:
    junk, missing = tmp_path / "junk", tmp_path / "missing"
    junk.write_text("junk")
    (cert, _), (_, other) = certificates.server, certificates.stranger
    for fields, said in (
        ({"cert": missing}, rf"tls.cert: {missing}: No such file"),
        ({"key": missing}, rf"tls.key: {missing}: No such file"),
        ({"cert": junk}, rf"tls.cert: {junk} contains no certificate"),
        ({"key": junk}, rf"tls.key: {junk} "),
        ({"key": other}, rf"tls.key: {other} is not the key of {cert}"),
        ({"client_ca": junk}, rf"tls.client_ca: {junk} contains no certificate"),
    ):
        settings = TlsSettings(**certificates.server_knob() | fields)
        with pytest.raises(ConfigError, match=said):
            settings.context()


def test_flight_gets_the_same_certificates(certificates: Certificates) -> None:
    plain = TlsSettings(**certificates.server_knob()).build_flight_arguments()
    assert plain == {"tls_certificates": [tuple(file.read_bytes() for file in certificates.server)]}
    mutual = TlsSettings(**certificates.server_knob(mutual=True)).build_flight_arguments()
    assert mutual["verify_client"] is True
    assert mutual["root_certificates"] == certificates.ca.read_bytes()


# ── the server ──────────────────────────────────────────────────────────────────────────────────


async def echo_length(request: Request) -> Response:
    body = await read_body(request, request.app.state.limits)
    return PlainTextResponse(str(len(body)))


async def large(_request: Request) -> Response:
    return Response(b"x" * (64 * 2**20))


async def bug(_request: Request) -> Response:
    raise KeyError("a bug")


@contextlib.contextmanager
def serve_app(**knobs: Any) -> Iterator[WebServer]:
    settings = WebSettings(**{"listen": ":0", "idle_timeout": "30s"} | knobs)
    routes = [
        Route("/", echo_length, methods=["GET", "POST"]),
        Route("/large", large),
        Route("/bug", bug),
    ]
    app = Starlette(routes=routes, exception_handlers=PROBLEM_HANDLERS)
    app.state.limits = settings
    with WebServer(app, settings, "test").start() as server:
        yield server


def open_connection(server: WebServer) -> socket.socket:
    return socket.create_connection((server.address.host, server.address.port), timeout=20)


def wait_until_closed(sock: socket.socket) -> bool:
    """Wait until the server has closed the connection."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def test_server_serves_a_real_port_and_stops_twice() -> None:
    with serve_app() as server:
        assert server.address.port > 0
        assert httpx.post(server.url, content=b"12345").text == "5"
        server.stop(1.0)
        with pytest.raises(ConnectionRefusedError):
            open_connection(server)


def test_uvicorn_has_the_internals_that_the_server_overrides() -> None:
    """If this fails, read the changes of uvicorn before you raise its version limit."""
    with serve_app() as server, open_connection(server) as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhalf")
        live = server._server
        assert live is not None
        connections: Any = live.server_state.connections
        wait_until(lambda: any(each.cycle for each in connections))
        (connection,) = connections
        parts: list[tuple[type, object]] = [
            (HttpToolsProtocol, connection),
            (RequestResponseCycle, connection.cycle),
            (Server, live),
            (ServerState, live.server_state),
        ]
        assert [kind.__name__ for kind, _ in parts] == list(UVICORN_INTERNALS)
        for kind, part in parts:
            assert isinstance(part, kind)
            for name in UVICORN_INTERNALS[kind.__name__]:
                # The class of uvicorn itself: our subclass has the methods anyway.
                assert hasattr(kind, name) or name in vars(part), f"{kind.__name__}.{name}"
    assert "servers" in Server.shutdown.__code__.co_names, "it closes the servers set here"


def test_answers_on_a_kept_connection_are_not_delayed() -> None:
    """Nagle's algorithm would delay the body of every answer by about 40 ms."""
    with serve_app() as server, httpx.Client(base_url=server.url) as client:
        client.post("/", content=b"1")
        took = []
        for _ in range(20):
            began = time.monotonic()
            client.post("/", content=b"1")
            took.append(time.monotonic() - began)
    assert min(took) < 0.03


def test_port_in_use_is_a_temporary_error() -> None:
    with serve_app() as server, pytest.raises(AddressTaken, match="listen: cannot listen on"):
        WebServer(lambda *_: None, WebSettings(listen=server.address)).start()  # type: ignore[arg-type]


def test_idle_and_slow_clients_are_disconnected() -> None:
    with (
        serve_app(idle_timeout="300ms") as server,
        open_connection(server) as idle,
        open_connection(server) as slow,
    ):
        done = threading.Event()

        def send_slowly() -> None:
            slow.sendall(b"GET / HTTP/1.1\r\n")
            with contextlib.suppress(OSError):
                while not done.wait(0.05):
                    slow.sendall(b"a: b\r\n")

        dripping = threading.Thread(target=send_slowly)
        dripping.start()
        assert httpx.post(server.url, content=b"1").text == "1"
        assert wait_until_closed(idle)
        assert wait_until_closed(slow)
        done.set()
        dripping.join()
        wait_until(lambda: server.connections == 0)


def test_stopped_or_slow_body_is_disconnected() -> None:
    with serve_app(idle_timeout="300ms") as server, open_connection(server) as stuck:
        stuck.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nabc")
        assert wait_until_closed(stuck)
        wait_until(lambda: server.connections == 0)


def test_idle_kept_connection_is_closed() -> None:
    with serve_app(idle_timeout="300ms") as server, open_connection(server) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        assert wait_until_closed(sock)


def test_client_that_does_not_read_its_answer_is_disconnected() -> None:
    with serve_app(idle_timeout="300ms") as server, open_connection(server) as sock:
        sock.sendall(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        wait_until(lambda: server.connections == 1)
        wait_until(lambda: server.connections == 0)


def test_slow_answer_does_not_disconnect_the_client() -> None:
    release = threading.Event()

    async def late(_request: Request) -> Response:
        from anyio import to_thread

        await to_thread.run_sync(release.wait)
        return PlainTextResponse("late")

    app = Starlette(routes=[Route("/", late)])
    settings = WebSettings(listen=":0", idle_timeout="200ms")  # type: ignore[arg-type]
    with WebServer(app, settings).start() as server, open_connection(server) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        with open_connection(server) as other:
            assert wait_until_closed(other)  # the timeout has passed
        release.set()
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")


def test_connections_beyond_the_limit_are_refused_until_others_close() -> None:
    with serve_app(max_connections=2) as server:
        with (
            open_connection(server) as one,
            open_connection(server),
            open_connection(server) as third,
        ):
            assert b"503 Service Unavailable" in third.recv(1000)
            one.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert one.recv(1000).startswith(b"HTTP/1.1 200")
        wait_until(lambda: server.connections == 0)
        assert httpx.get(server.url).status_code == 200


@pytest.mark.parametrize("head", [b"x: " + b"y" * 5000, b"\r\n".join([b"x: y"] * 1000)])
@pytest.mark.parametrize("ending", [b"\r\n\r\n", b""])
def test_headers_beyond_the_limit_are_refused(head: bytes, ending: bytes) -> None:
    with serve_app(max_header_bytes="2Ki") as server, open_connection(server) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n" + head + ending)
        assert sock.recv(100).startswith(b"HTTP/1.1 431 ")
        assert wait_until_closed(sock)


def test_trailers_have_the_same_limit() -> None:
    with serve_app(max_header_bytes="2Ki") as server, open_connection(server) as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n")
        sock.sendall(b"\r\n".join([b"x: y"] * 1000) + b"\r\n\r\n")
        assert wait_until_closed(sock)


@pytest.mark.parametrize(
    "junk", [b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"]
)
def test_invalid_request_is_answered_and_disconnected(junk: bytes) -> None:
    with serve_app() as server, open_connection(server) as sock:
        sock.sendall(junk)
        assert sock.recv(100).startswith(b"HTTP/1.1 400")
        assert wait_until_closed(sock)


def test_pipelined_requests_are_answered_in_order() -> None:
    with serve_app() as server, open_connection(server) as sock:
        request = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
        sock.sendall(b"".join(request % (size, b"x" * size) for size in (1, 2, 3)))
        sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
        bodies = [part.rpartition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200")][1:]
        assert bodies == [b"1", b"2", b"3", b"0"]


def test_stop_lets_requests_finish_until_the_timeout() -> None:
    begun, release = threading.Event(), threading.Event()

    async def wait(request: Request) -> Response:
        from anyio import to_thread

        begun.set()
        await to_thread.run_sync(release.wait, abandon_on_cancel=True)
        return PlainTextResponse("done")

    app = Starlette(routes=[Route("/", wait)])
    for finishes in (True, False):
        begun.clear()
        release.clear()
        server = WebServer(app, WebSettings(listen=":0")).start()  # type: ignore[arg-type]
        with open_connection(server) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert begun.wait(10)
            stopping = threading.Thread(target=server.stop, args=(20.0 if finishes else 0.0,))
            stopping.start()
            if finishes:
                release.set()
                assert sock.recv(1000).startswith(b"HTTP/1.1 200")
            stopping.join(10)
            assert not stopping.is_alive()
            assert wait_until_closed(sock)
        release.set()


# ── TLS, served ─────────────────────────────────────────────────────────────────────────────────


def test_tls_server_refuses_plain_text(certificates: Certificates) -> None:
    tls = TlsSettings(**certificates.server_knob())
    with serve_app(tls=tls) as server:
        assert httpx.get(server.url, verify=certificates.client_context()).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http"))
        with pytest.raises(httpx.ConnectError, match=r"self-signed|unable to get local issuer"):
            httpx.get(server.url, verify=ssl.create_default_context())


def test_mutual_tls_requires_a_certificate_of_its_authority(certificates: Certificates) -> None:
    tls = TlsSettings(**certificates.server_knob(mutual=True))
    with serve_app(tls=tls) as server:
        friend = certificates.client_context(certificates.client)
        assert httpx.get(server.url, verify=friend).status_code == 200
        for identity in (None, certificates.stranger):
            context = certificates.client_context(identity)
            with pytest.raises((httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError)):
                httpx.get(server.url, verify=context)
        old = certificates.client_context(certificates.client)
        old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url, verify=old)


def test_missing_tls_handshake_is_disconnected(certificates: Certificates) -> None:
    tls = TlsSettings(**certificates.server_knob())
    with serve_app(tls=tls, idle_timeout="300ms") as server, open_connection(server) as sock:
        assert wait_until_closed(sock)


# ── bodies ──────────────────────────────────────────────────────────────────────────────────────


def test_gzip_and_deflate_bodies_are_unpacked() -> None:
    text = b"hello " * 1000
    raw = zlib.compressobj(wbits=-15)
    bodies = {
        "gzip": [gzip.compress(text), gzip.compress(text[:7]) + gzip.compress(text[7:])],
        "deflate": [zlib.compress(text), raw.compress(text) + raw.flush()],
        "identity": [text],
    }
    with serve_app() as server, httpx.Client(base_url=server.url) as client:
        for encoding, variants in bodies.items():
            for body in variants:
                answer = client.post("/", content=body, headers={"content-encoding": encoding})
                assert (answer.status_code, answer.text) == (200, "6000")


def pack(name: Literal["snappy", "zstd"], body: bytes) -> bytes:
    packed: bytes = pa.Codec(name).compress(body, asbytes=True)
    return packed


def frame_snappy(*chunks: bytes) -> bytes:
    """Return chunks in snappy's framing format, the first one uncompressed."""
    framed = b"\xff\x06\x00\x00sNaPpY\xfe\x02\x00\x00\x00\x00"  # the name, and padding
    for number, chunk in enumerate(chunks):
        checksum = google_crc32c.value(chunk)
        masked = ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
        data = masked.to_bytes(4, "little") + (pack("snappy", chunk) if number else chunk)
        framed += bytes([0 if number else 1]) + len(data).to_bytes(3, "little") + data
    return framed


TEXT = b"some text, and more of it " * 5000
FRAMED = frame_snappy(TEXT[:60_000], TEXT[60_000:])


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("zstd", pack("zstd", TEXT)),
        ("ZSTD", pack("zstd", TEXT[:9]) + pack("zstd", TEXT[9:])),
        ("snappy", pack("snappy", TEXT)),
        ("snappy", FRAMED),
        ("x-snappy-framed", FRAMED),
        ("gzip, deflate", zlib.compress(gzip.compress(TEXT))),
        ("identity, zstd,, gzip", gzip.compress(pack("zstd", TEXT))),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_body_in_any_supported_encoding_is_unpacked(encoding: str, body: bytes) -> None:
    with serve_app() as server:
        answer = httpx.post(server.url, content=body, headers={"content-encoding": encoding})
        assert (answer.status_code, answer.text) == (200, str(len(TEXT)))
        if ", " in encoding:
            headers = [("content-encoding", each) for each in encoding.split(", ")]
            assert httpx.post(server.url, content=body, headers=headers).text == answer.text


def test_snappy_of_another_library_is_unpacked() -> None:
    """A block that is written by hand, from the description of the format."""
    block = b"\x0a\x00a\x22\x01\x00"  # ten bytes: "a", then nine copied from one byte before
    assert decompress(block, 100, ["snappy"]) == b"a" * 10


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", b"junk"),
        ("gzip", gzip.compress(TEXT)[:-9]),
        ("gzip", b"\x1f\x8b"),
        ("zstd", b"junk"),
        ("zstd", pack("zstd", TEXT)[:-3]),
        ("zstd", pack("zstd", TEXT) + b"junk"),
        ("snappy", b"junk"),
        ("snappy", b"\xff" * 20),
        ("snappy", pack("snappy", TEXT)[:-3]),
        ("snappy", FRAMED[:-3]),
        ("snappy", FRAMED.replace(b"some text", b"same text", 1)),
        ("snappy", FRAMED + b"\x02\x00\x00\x00"),
        ("snappy", FRAMED + b"\x00\x01\x00\x00x"),
        ("x-snappy-framed", pack("snappy", TEXT)),
        ("gzip, deflate", gzip.compress(TEXT)),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_body_with_a_wrong_encoding_is_a_bad_request(encoding: str, body: bytes) -> None:
    with serve_app() as server:
        answer = httpx.post(server.url, content=body, headers={"content-encoding": encoding})
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("encoding", ["br", "gzip, br", "gzip;q=1", ", ".join(["gzip"] * 4)])
def test_unknown_encoding_is_unsupported(encoding: str) -> None:
    with serve_app() as server:
        answer = httpx.post(server.url, content=b"", headers={"content-encoding": encoding})
        assert answer.status_code == 415
        assert "zstd" in answer.headers["accept-encoding"]


def test_body_over_the_limit_is_refused() -> None:
    def yield_chunks() -> Iterator[bytes]:
        for _ in range(12):
            yield b"x" * 1000

    with serve_app(max_request_bytes=10_000) as server:
        assert httpx.post(server.url, content=b"x" * 10_000).text == "10000"
        for content in (b"x" * 10_001, yield_chunks()):
            answer = httpx.post(server.url, content=content)
            assert (answer.status_code, answer.json()["error"]) == (413, "BodyTooLarge")
        with open_connection(
            server
        ) as sock:  # a client with "Expect: 100-continue" gets the answer before it sends
            head = (
                b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
            )
            sock.sendall(head % 10**12)
            assert sock.recv(1000).startswith(b"HTTP/1.1 413")
            assert wait_until_closed(sock)


def test_compression_bomb_is_refused_without_unpacking_it() -> None:
    zeros = bytes(64 * 2**20)
    bomb = gzip.compress(zeros, 1)
    nested = gzip.compress(b"") * 50_000
    bombs = [("gzip", bomb), ("gzip", nested)]
    bombs += [("zstd", pack("zstd", zeros)), ("snappy", pack("snappy", zeros))]
    bombs += [("snappy", frame_snappy(*[zeros[: 2**16]] * 1024))]
    tracemalloc.start()
    try:
        for encoding, body in bombs:
            with pytest.raises(BodyTooLarge):
                decompress(body, 2**20, [encoding])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20
    with serve_app(max_decompressed_bytes="1Mi") as server:
        answer = httpx.post(server.url, content=bomb, headers={"content-encoding": "gzip"})
        assert answer.status_code == 413


# ── problems ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "status", "after"),
    [
        (QueueFull("full", after=2.1), 429, "3"),
        (QueueFull("full"), 429, "1"),
        (StorageFailed("disk"), 503, "1"),
        (QueueClosed("closed"), 503, "1"),
        (BodyTooLarge("large"), 413, None),
        (NoSuchQueue("no"), 404, None),
        (QueueExists("other"), 409, None),
        (NotAllowed("who"), 401, None),
        (ConfigError("knob", "wrong"), 400, None),
        (SchemaMismatch("type"), 400, None),
        (ValueError("wrong"), 400, None),
        (KeyError("bug"), 500, None),
    ],
)
def test_error_becomes_its_status(error: Exception, status: int, after: str | None) -> None:
    answer = build_problem(error)
    assert (answer.status_code, answer.headers.get("retry-after")) == (status, after)
    assert ("www-authenticate" in answer.headers) == (status == 401)
    assert (b"bug" in answer.body) is False


def test_bug_is_answered_with_500_and_the_server_continues() -> None:
    with serve_app() as server:
        assert httpx.get(f"{server.url}/bug").status_code == 500
        assert httpx.get(server.url).status_code == 200
