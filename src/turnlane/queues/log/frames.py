"""Frames: what a chunk file is made of, and the only code that knows their bytes.

A header has a checksum of its own, so that a damaged length can never lead a reader astray: the
damage ends at the next header that holds.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import cramjam
import google_crc32c
import numpy as np
import pyarrow as pa

from turnlane.queues.log.position import Stamp

__all__ = [
    "HEADER_SIZE",
    "Data",
    "FrameDamaged",
    "FrameKind",
    "Header",
    "Stamp",
    "checksum",
    "decode_events",
    "decode_stamps",
    "decoded_length",
    "encode",
    "find_header",
    "pack_stamps",
    "parse_header",
]

Data = pa.Buffer | bytes

HEADER_SIZE = 32
_HEADER = struct.Struct("<QQIIII")
_CHECKED = struct.Struct("<QQII")
_STAMP = struct.Struct("<16sQ")
_COUNT = struct.Struct("<Q")
_FIRST = 1 << 63
"""Marks a number that begins a range; the producer's next number ends it."""

_SNAPPY = 1 << 63
_MARK = 1 << 62
_LENGTH = _MARK - 1
_KIND = 0xFF
_STAMPED = 0x100
_UNKNOWN_FLAGS = 0xFFFFFFFF & ~(_KIND | _STAMPED)

_MOST_EXPANSION = 64
"""Snappy's densest element makes 64 bytes of 3: a stream that claims more is not believed."""

_ZEROS = bytes(8)


class FrameDamaged(ValueError):
    """The payload is not what its header says, or not what Arrow can read."""


class FrameKind(enum.IntEnum):
    """What a frame's payload is."""

    EVENTS = 0
    SCHEMA = 1


@dataclass(slots=True)  # frozen, it would take thrice as long to make: one is made for each frame
class Header:
    """A frame's header, as far as it was found valid."""

    length: int
    snappy: bool
    first: int
    count: int
    kind: FrameKind
    stamped: bool
    payload_crc: int

    @property
    def end(self) -> int:
        """The offset after the frame's last event."""
        return self.first + self.count

    @property
    def stored(self) -> int:
        """The bytes that the frame takes in the file, padding included."""
        return HEADER_SIZE + (self.length + 7 & ~7)


def checksum(pieces: Sequence[Data]) -> int:
    """CRC-32C over the pieces, one after the other."""
    crc = 0
    for piece in pieces:
        crc = google_crc32c.extend(crc, piece)
    return crc


def encode(
    kind: FrameKind,
    first: int,
    count: int,
    payload: Sequence[Data],
    *,
    snappy: bool = False,
    stamped: bool = False,
) -> list[Data]:
    """The frame as buffers to be written one after the other; ``payload`` is taken as it is.

    Whoever compresses does it before, stamps included; so nothing is copied here.
    """
    length = sum(len(piece) for piece in payload)
    word = length | _MARK | (_SNAPPY if snappy else 0)
    checked = _CHECKED.pack(word, first, count, kind | (_STAMPED if stamped else 0))
    crcs = struct.pack("<II", google_crc32c.value(checked), checksum(payload))
    frame: list[Data] = [checked + crcs, *payload]
    if length % 8:
        frame.append(_ZEROS[: -length % 8])
    return frame


def pack_stamps(stamps: Sequence[Stamp]) -> bytes:
    """The stamps as the beginning of a payload."""
    packed: list[bytes] = []
    for producer, next_sequence, first in stamps:
        if first:
            packed.append(_STAMP.pack(producer, first | _FIRST))
        packed.append(_STAMP.pack(producer, next_sequence))
    return _COUNT.pack(len(packed)) + b"".join(packed)


def parse_header(data: Data, at: int = 0) -> Header | None:
    """The header at byte ``at``; none if these bytes are no header of turnlane's."""
    if len(data) - at < HEADER_SIZE:
        return None
    word, first, count, flags, header_crc, payload_crc = _HEADER.unpack_from(data, at)
    if not word & _MARK or flags & _UNKNOWN_FLAGS or flags & _KIND > FrameKind.SCHEMA:
        return None
    if google_crc32c.value(_CHECKED.pack(word, first, count, flags)) != header_crc:
        return None
    return Header(
        word & _LENGTH,
        bool(word & _SNAPPY),
        first,
        count,
        FrameKind(flags & _KIND),
        bool(flags & _STAMPED),
        payload_crc,
    )


def find_header(data: Data, start: int = 0) -> int | None:
    """The first multiple of 8, counted from ``start``, at which a valid header lies."""
    words = np.frombuffer(memoryview(data), "<u8", count=(len(data) - start) // 8, offset=start)
    if len(words) < HEADER_SIZE // 8:
        return None
    # Checksums in Python are slow: only words that could be a header at all come that far.
    flags = words[2:-1] >> np.uint64(32)
    plausible = (words[:-3] & np.uint64(_MARK)) != 0
    plausible &= (flags & np.uint64(_UNKNOWN_FLAGS)) == 0
    plausible &= (flags & np.uint64(_KIND)) <= FrameKind.SCHEMA
    for index in np.flatnonzero(plausible):
        at = start + 8 * int(index)
        if parse_header(data, at):
            return at
    return None


def decoded_length(header: Header, beginning: Data) -> int:
    """The payload's length once decompressed; its first 10 bytes tell."""
    if not header.snappy:
        return header.length
    length = 0
    for place, byte in enumerate(bytes(memoryview(beginning)[:10])):
        length |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            break
    if length > header.length * _MOST_EXPANSION:
        raise FrameDamaged(f"{header.length} compressed bytes claim to be {length}")
    return length


def decode_stamps(header: Header, payload: Data) -> list[Stamp]:
    """Only the stamps of a payload as stored, whose checksum held."""
    return _split(header, payload)[1]


def decode_events(
    header: Header, payload: Data, schema: pa.Schema
) -> tuple[pa.RecordBatch, list[Stamp]]:
    """The events and stamps of a payload as stored, whose checksum held. Copies nothing."""
    message, stamps = _split(header, payload)
    try:
        block = pa.ipc.read_record_batch(message, schema)
        block.validate()
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise FrameDamaged(f"not a record batch of the chunk's schema: {error}") from error
    if block.num_rows != header.count:
        raise FrameDamaged(f"{block.num_rows} events where the header says {header.count}")
    return block, stamps


def _split(header: Header, payload: Data) -> tuple[pa.Buffer, list[Stamp]]:
    data = _decompressed(header, payload) if header.snappy else pa.py_buffer(payload)
    if not header.stamped:
        return data, []
    if len(data) < _COUNT.size:
        raise FrameDamaged("no room for the stamps")
    end = _COUNT.size + _STAMP.size * _COUNT.unpack_from(data)[0]
    if end > len(data):
        raise FrameDamaged("more stamps than the payload has room for")
    return data.slice(end), _unpacked(memoryview(data)[_COUNT.size : end])


def _unpacked(pairs: memoryview) -> list[Stamp]:
    stamps: list[Stamp] = []
    begun: dict[bytes, int] = {}
    for producer, number in _STAMP.iter_unpack(pairs):
        if number & _FIRST:
            begun[producer] = number & ~_FIRST
        else:
            stamps.append(Stamp(producer, number, begun.pop(producer, 0)))
    return stamps


def _decompressed(header: Header, payload: Data) -> pa.Buffer:
    # Into Arrow's memory, for its pool uses it again and fresh memory costs page faults.
    buffer = pa.allocate_buffer(decoded_length(header, payload))
    try:
        written = cramjam.snappy.decompress_raw_into(payload, buffer)
    except (cramjam.DecompressionError, ValueError) as error:
        raise FrameDamaged(f"not snappy: {error}") from error
    if written != len(buffer):
        raise FrameDamaged("decompressed to another length than it says")
    return buffer
