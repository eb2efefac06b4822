"""Bodies of HTTP requests, received and decompressed within limits."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Final, Protocol

import google_crc32c
import pyarrow as pa
from starlette.exceptions import HTTPException
from starlette.requests import Request

from turnlane.errors import EventTooLarge
from turnlane.serving.body_budget import BodyShare
from turnlane.storage.frames import parse_snappy_length

BODY_SHARE: Final = "turnlane.body_share"
"""The key of a request's :class:`BodyShare` in its scope."""

_INLINE_BYTES: Final = 1024
"""Up to this size a body is decompressed on the event loop: it becomes a megabyte at most."""

_STEP: Final = 64 * 1024
_PIECE_BYTES: Final = 1024 * 1024
"""The most bytes that are decompressed between two checks of the limits."""
_MAX_ENCODINGS: Final = 3
_GZIP_OR_ZLIB: Final = 47
_RAW_DEFLATE: Final = -15
_SNAPPY_STREAM: Final = b"\xff\x06\x00\x00sNaPpY"
_SNAPPY_EXPANSION: Final = 22
"""Snappy copies at most 64 bytes for three."""
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
    """Return the whole body without its content encodings.

    Raises ``BodyTooLarge`` (413), ``ValueError`` for a body that cannot be decompressed (400),
    ``HTTPException`` for another encoding (415) and ``TransportDown`` (503) if the node has too
    many bodies under way. Never uses more memory than the limits allow.
    """
    share: BodyShare = request.scope[BODY_SHARE]
    encodings = parse_encodings(request.headers.getlist("content-encoding"))
    body = await _receive(request, limits.max_request_bytes, share)
    if not encodings:
        return body
    most = limits.max_decompressed_bytes
    if len(body) <= _INLINE_BYTES:
        return decompress(body, most, encodings, share)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, decompress, body, most, encodings, share)


async def _receive(request: Request, most: int, share: BodyShare) -> bytes:
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
        # If this refuses the request, the server ignores the rest of its body.
        share.add(len(piece))
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


# ── content encodings ───────────────────────────────────────────────────────────────────────────

Pieces = Iterator[bytes]


def parse_encodings(headers: Sequence[str]) -> list[str]:
    """Return the encodings of a body in the order in which the sender applied them.

    Raises ``HTTPException`` (415) for an encoding that is not supported.
    """
    names = [name.strip().lower() for name in ",".join(headers).split(",")]
    encodings = [name for name in names if name not in ("", "identity")]
    unknown = [name for name in encodings if name not in _DECODERS]
    if unknown or len(encodings) > _MAX_ENCODINGS:
        allowed = ", ".join(_DECODERS)
        trouble = (
            f"{unknown[0]!r} is not supported" if unknown else f"has {len(encodings)} encodings"
        )
        raise HTTPException(
            415,
            f"content-encoding {trouble}; use none, or at most {_MAX_ENCODINGS} of {allowed}",
            {"accept-encoding": allowed},
        )
    return encodings


def decompress(
    body: bytes, most: int, encodings: Sequence[str] = ("gzip",), share: BodyShare | None = None
) -> bytes:
    """Undo the encodings of a body, the last one first; each result has at most ``most`` bytes.

    ``share`` counts the bytes. Raises ``BodyTooLarge``, ``ValueError`` and ``TransportDown``.
    """
    for encoding in reversed(encodings):
        try:
            body = _join(_DECODERS[encoding](body, most), most, share)
        except (zlib.error, OSError, pa.ArrowException) as error:
            raise ValueError(f"the body is not valid {encoding} data: {error}") from None
    return body


def _join(pieces: Pieces, most: int, share: BodyShare | None) -> bytes:
    found: list[bytes] = []
    for piece in pieces:
        most -= len(piece)
        if most < 0:
            raise _too_large_decompressed()
        if share is not None:
            share.add(len(piece))
        found.append(piece)
    return b"".join(found)


def _too_large_decompressed() -> BodyTooLarge:
    return BodyTooLarge(
        "the decompressed body is too large (max_decompressed_bytes); send it in parts"
    )


def _decode_deflate(body: bytes, _most: int) -> Pieces:
    """Decode gzip, zlib or raw deflate data: senders confuse their names."""
    try:
        zlib.decompressobj(_GZIP_OR_ZLIB).decompress(body[:2])
    except zlib.error:
        return _inflate(body, _RAW_DEFLATE)
    return _inflate(body, _GZIP_OR_ZLIB)


def _inflate(body: bytes, window: int) -> Pieces:
    stream = zlib.decompressobj(window)
    members = 0
    at = 0
    while at < len(body):
        if stream.eof:  # a gzip file may have several members
            stream = zlib.decompressobj(window)
            members += 1
            if members > _MAX_MEMBERS:
                raise _too_large_decompressed()
        given = body[at : at + _STEP]
        yield stream.decompress(given, _PIECE_BYTES)
        at += len(given) - len(stream.unused_data) - len(stream.unconsumed_tail)
    while not stream.eof and (rest := stream.decompress(b"", _PIECE_BYTES)):
        yield rest
    if body and not stream.eof:
        raise ValueError("the compressed data of the body is incomplete")


def _decode_zstd(body: bytes, _most: int) -> Pieces:
    stream = pa.input_stream(pa.py_buffer(body), compression="zstd")
    while piece := stream.read(_PIECE_BYTES):
        yield piece


def _decode_snappy(body: bytes, most: int) -> Pieces:
    """Decode the block format, or the framing format, which begins with its name."""
    if body.startswith(_SNAPPY_STREAM):
        yield from _decode_snappy_frames(body, most)
    elif body:
        yield _decode_snappy_block(body, most)


def _decode_snappy_frames(body: bytes, most: int) -> Pieces:
    if not body.startswith(_SNAPPY_STREAM):
        raise ValueError("the body does not begin as a framed snappy stream")
    at = 0
    while at < len(body):
        kind, size = body[at], int.from_bytes(body[at + 1 : at + 4], "little")
        chunk = body[at + 4 : at + 4 + size]
        at += 4 + size
        if at > len(body) or (kind <= 1 and size < 4):
            raise ValueError("the compressed data of the body is incomplete")
        if kind <= 1:
            piece = chunk[4:] if kind else _decode_snappy_block(chunk[4:], most)
            checksum = google_crc32c.value(piece)
            masked = ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
            if masked != int.from_bytes(chunk[:4], "little"):
                raise ValueError("a checksum in the compressed data of the body is wrong")
            yield piece
        elif kind < 0x80:
            raise ValueError(f"a chunk of the framed snappy data has the unknown type {kind}")


def _decode_snappy_block(block: bytes, most: int) -> bytes:
    length = parse_snappy_length(block)
    if length is None or length > len(block) * _SNAPPY_EXPANSION:
        raise ValueError("the body is not valid snappy data: its length is wrong")
    if length > most:
        raise _too_large_decompressed()
    return pa.Codec("snappy").decompress(block, decompressed_size=length, asbytes=True)


_DECODERS: Final[dict[str, Callable[[bytes, int], Pieces]]] = {
    "gzip": _decode_deflate,
    "x-gzip": _decode_deflate,
    "deflate": _decode_deflate,
    **({"zstd": _decode_zstd} if pa.Codec.is_available("zstd") else {}),
    **(
        {"snappy": _decode_snappy, "x-snappy-framed": _decode_snappy_frames}
        if pa.Codec.is_available("snappy")
        else {}
    ),
}
"""By name, as OpenTelemetry's collector uses them, among others."""
