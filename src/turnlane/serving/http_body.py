"""Bodies of HTTP requests, received and decompressed within limits."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from typing import Final, Protocol

from starlette.exceptions import HTTPException
from starlette.requests import Request

from turnlane.errors import EventTooLarge

_INLINE_BYTES: Final = 1024
"""Up to this size a body is decompressed on the event loop: it becomes a megabyte at most."""

_STEP: Final = 64 * 1024
_MAX_MEMBERS: Final = 10_000
"""The most members of a gzip body: each costs time even if it is empty."""


class BodyLimits(Protocol):
    """The limits of a body."""

    @property
    def max_request_bytes(self) -> int:
        """The most bytes of the body as it arrives."""

    @property
    def max_decompressed_bytes(self) -> int:
        """The most bytes of the decompressed body."""


class BodyTooLarge(EventTooLarge):
    """The body of the request is larger than its limit."""


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """Return the whole body, decompressed if it is gzip or deflate.

    Raises ``BodyTooLarge`` (413), ``ValueError`` for a body that cannot be decompressed (400) and
    ``HTTPException`` for another encoding (415). Never uses more memory than the limits allow.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower() or "identity"
    if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
        raise HTTPException(
            415, f"content-encoding {encoding!r} is not supported; use gzip, deflate or none"
        )
    body = await _receive(request, limits.max_request_bytes)
    if encoding == "identity":
        return body
    most = limits.max_decompressed_bytes
    if len(body) <= _INLINE_BYTES:
        return decompress(body, most)
    return await asyncio.get_running_loop().run_in_executor(None, decompress, body, most)


async def _receive(request: Request, most: int) -> bytes:
    declared = request.headers.get("content-length", "")
    stream = request.stream()
    if declared.isdecimal() and int(declared) > most:
        await _drain(request, stream, most)
        raise _too_large(most)
    pieces: list[bytes] = []
    size = 0
    async for piece in stream:
        size += len(piece)
        if size > most:
            await _drain(request, stream, most)
            raise _too_large(most)
        pieces.append(piece)
    return b"".join(pieces)


async def _drain(request: Request, stream: AsyncIterator[bytes], most: int) -> None:
    """Read and ignore up to ``most`` bytes: a client that is still sending misses the answer."""
    if request.headers.get("expect") is not None:
        return
    async for piece in stream:
        most -= len(piece)
        if most < 0:
            return


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body is larger than {most} bytes (max_request_bytes); send it in parts"
    )


def decompress(body: bytes, most: int) -> bytes:
    """Decompress gzip, zlib or raw deflate data to at most ``most`` bytes. ``BodyTooLarge``."""
    try:
        return _inflate(body, most, 47)  # gzip or zlib, as its first bytes say
    except zlib.error as error:
        if body[:1] == b"\x1f":
            raise ValueError(f"the body is not valid gzip data: {error}") from None
    try:
        return _inflate(body, most, -15)  # some clients send raw data as deflate
    except zlib.error as error:
        raise ValueError(f"the body cannot be decompressed: {error}") from None


def _inflate(body: bytes, most: int, window: int) -> bytes:
    pieces: list[bytes] = []
    stream = zlib.decompressobj(window)
    members = 0
    at = 0
    while at < len(body):
        if stream.eof:  # a gzip file may have several members
            stream = zlib.decompressobj(window)
            members += 1
        given = body[at : at + _STEP]
        # One byte more than allowed shows that the body is too large.
        pieces.append(stream.decompress(given, most + 1))
        at += len(given) - len(stream.unused_data)
        most -= len(pieces[-1])
        if most < 0 or members > _MAX_MEMBERS:
            raise BodyTooLarge(
                "the decompressed body is too large (max_decompressed_bytes); send it in parts"
            )
    if body and not stream.eof:
        raise ValueError("the compressed data of the body is incomplete")
    return b"".join(pieces)
