"""Frames: the bytes that a segment file consists of. No other module knows their layout.

A frame is a header of 32 bytes, a payload, and zeros up to the next multiple of 8.
``docs/disk-format.md`` is the contract. The header has a checksum of its own. So a reader never
follows a damaged length, and damage ends where the next valid header begins.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa

BufferLike = pa.Buffer | bytes

HEADER_SIZE = 32
_HEADER = struct.Struct("<QQIIII")
_CHECKED = struct.Struct("<QQII")
"""The part of the header that its checksum covers."""
_SEQUENCE = struct.Struct("<16sQ")
_COUNT = struct.Struct("<Q")
_FIRST = 1 << 63
"""Marks a number that begins a range; the producer's next number ends the range."""

_COMPRESSED = 1 << 63
_MARK = 1 << 62
_LENGTH = _MARK - 1
_KIND = 0xFF
_HAS_SEQUENCES = 0x100
_UNKNOWN_FLAGS = 0xFFFFFFFF & ~(_KIND | _HAS_SEQUENCES)

_MAX_EXPANSION = 64
"""Snappy turns 3 bytes into at most 64. A stream that claims a higher ratio is damaged."""

_SNAPPY = pa.Codec("snappy")
_ZEROS = bytes(8)


class FrameDamaged(ValueError):
    """The payload differs from its header's description, or Arrow cannot read it."""


class FrameKind(enum.IntEnum):
    """What the payload of a frame is."""

    EVENTS = 0
    SCHEMA = 1


class LogPosition(NamedTuple):
    """A place in the log: byte ``byte`` of the segment whose first offset is ``segment``.

    The event that comes next there has the offset ``end``.
    """

    segment: int
    byte: int
    end: int


class ProducerSequence(NamedTuple):
    """Sequence numbers that a producer has published: ``first`` to ``next_sequence - 1``.

    ``producer`` is the hash of its id (16 bytes). ``first`` 0 means all numbers below
    ``next_sequence``.
    """

    producer: bytes
    next_sequence: int
    first: int = 0

    def subtract(self, events: int) -> ProducerSequence:
        """Return the numbers before the last ``events``, which have consecutive numbers."""
        return ProducerSequence(self.producer, self.next_sequence - events, self.first)


@dataclass(slots=True)  # frozen, it would take three times as long to create: one per frame
class FrameHeader:
    """A valid header."""

    length: int
    """Bytes of the payload as stored."""
    is_compressed: bool
    first: int
    count: int
    kind: FrameKind
    has_sequences: bool
    payload_crc: int

    @property
    def end(self) -> int:
        """The offset after the frame's last event."""
        return self.first + self.count

    @property
    def stored_size(self) -> int:
        """The bytes that the frame takes in the file, header and padding included."""
        return HEADER_SIZE + (self.length + 7 & ~7)


def compute_checksum(pieces: Sequence[BufferLike]) -> int:
    """Return the CRC-32C over the pieces, one after the other."""
    crc = 0
    for piece in pieces:
        crc = google_crc32c.extend(crc, piece)
    return crc


# ── encoding ─────────────────────────────────────────────────────────────────────────────────────


def encode_frame(
    kind: FrameKind,
    first: int,
    count: int,
    payload: Sequence[BufferLike],
    *,
    is_compressed: bool = False,
    has_sequences: bool = False,
) -> list[BufferLike]:
    """Return the frame as buffers for one vectored write; nothing is copied.

    The caller has compressed ``payload``, sequences included, if ``is_compressed``.
    """
    length = sum(len(piece) for piece in payload)
    word = length | _MARK | (_COMPRESSED if is_compressed else 0)
    flags = kind | (_HAS_SEQUENCES if has_sequences else 0)
    checked = _CHECKED.pack(word, first, count, flags)
    crcs = struct.pack("<II", google_crc32c.value(checked), compute_checksum(payload))
    frame: list[BufferLike] = [checked + crcs, *payload]
    if length % 8:
        frame.append(_ZEROS[: -length % 8])
    return frame


def encode_sequences(sequences: Sequence[ProducerSequence]) -> bytes:
    """Return producers' sequences as the first bytes of a payload."""
    packed: list[bytes] = []
    for producer, next_sequence, first in sequences:
        if first:
            packed.append(_SEQUENCE.pack(producer, first | _FIRST))
        packed.append(_SEQUENCE.pack(producer, next_sequence))
    return _COUNT.pack(len(packed)) + b"".join(packed)


def compress(data: BufferLike) -> pa.Buffer:
    """Return the data compressed by snappy, in its raw format."""
    return _SNAPPY.compress(data)


# ── decoding ─────────────────────────────────────────────────────────────────────────────────────


def parse_header(data: BufferLike, at: int = 0) -> FrameHeader | None:
    """Return the header at byte ``at``; ``None`` if there is no valid one."""
    if len(data) - at < HEADER_SIZE:
        return None
    word, first, count, flags, header_crc, payload_crc = _HEADER.unpack_from(data, at)
    if not word & _MARK or flags & _UNKNOWN_FLAGS or flags & _KIND > FrameKind.SCHEMA:
        return None
    if google_crc32c.value(_CHECKED.pack(word, first, count, flags)) != header_crc:
        return None
    return FrameHeader(
        word & _LENGTH,
        bool(word & _COMPRESSED),
        first,
        count,
        FrameKind(flags & _KIND),
        bool(flags & _HAS_SEQUENCES),
        payload_crc,
    )


def find_header(data: BufferLike, start: int = 0) -> int | None:
    """Return the first byte at ``start`` plus a multiple of 8 that has a valid header."""
    words = np.frombuffer(memoryview(data), "<u8", count=(len(data) - start) // 8, offset=start)
    if len(words) < HEADER_SIZE // 8:
        return None
    # Checksums in Python are slow: NumPy first discards the words that cannot begin a header.
    flags = words[2:-1] >> np.uint64(32)
    plausible = (words[:-3] & np.uint64(_MARK)) != 0
    plausible &= (flags & np.uint64(_UNKNOWN_FLAGS)) == 0
    plausible &= (flags & np.uint64(_KIND)) <= FrameKind.SCHEMA
    for index in np.flatnonzero(plausible):
        at = start + 8 * int(index)
        if parse_header(data, at):
            return at
    return None


def get_decoded_length(header: FrameHeader, beginning: BufferLike) -> int:
    """Return the payload's length after decompression; the first 10 bytes are enough to tell."""
    if not header.is_compressed:
        return header.length
    length = parse_snappy_length(bytes(memoryview(beginning)[:10]))
    if length is None or length > header.length * _MAX_EXPANSION:
        raise FrameDamaged(f"{header.length} compressed bytes claim to be {length}")
    return length


def parse_snappy_length(data: bytes) -> int | None:
    """Return the length that raw snappy data claims to have when decompressed.

    It is a varint of up to 5 bytes; ``None`` if it does not end.
    """
    length = 0
    for index, byte in enumerate(data[:5]):
        length |= (byte & 0x7F) << 7 * index
        if byte < 0x80:  # the last byte has its top bit clear
            return length
    return None


def decompress(data: BufferLike, length: int) -> pa.Buffer:
    """Return raw snappy data decompressed to ``length`` bytes. Raises ``FrameDamaged``.

    Check ``length`` first: that much memory is allocated.
    """
    try:
        return _SNAPPY.decompress(data, decompressed_size=length)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise FrameDamaged(f"not snappy: {error}") from error


def decode_sequences(header: FrameHeader, payload: BufferLike) -> list[ProducerSequence]:
    """Return only the sequences of a stored payload, whose checksum the caller has verified."""
    return _split_payload(header, payload)[1]


def decode_events(
    header: FrameHeader, payload: BufferLike, schema: pa.Schema
) -> tuple[pa.RecordBatch, list[ProducerSequence]]:
    """Return the events and sequences of a stored payload, whose checksum the caller has verified.

    The events share the payload's memory unless it is compressed. Raises ``FrameDamaged``.
    """
    message, sequences = _split_payload(header, payload)
    try:
        block = pa.ipc.read_record_batch(message, schema)
        block.validate()
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise FrameDamaged(f"not a record batch of the segment's schema: {error}") from error
    if block.num_rows != header.count:
        raise FrameDamaged(f"{block.num_rows} events where the header says {header.count}")
    return block, sequences


def _split_payload(
    header: FrameHeader, payload: BufferLike
) -> tuple[pa.Buffer, list[ProducerSequence]]:
    """Return the Arrow message and the producers' sequences before it."""
    if header.is_compressed:
        data = decompress(payload, get_decoded_length(header, payload))
    else:
        data = pa.py_buffer(payload)
    if not header.has_sequences:
        return data, []
    if len(data) < _COUNT.size:
        raise FrameDamaged("the payload is too short for the count of sequences")
    end = _COUNT.size + _SEQUENCE.size * _COUNT.unpack_from(data)[0]
    if end > len(data):
        raise FrameDamaged("the payload is too short for its sequences")
    sequences: list[ProducerSequence] = []
    range_starts: dict[bytes, int] = {}
    for producer, number in _SEQUENCE.iter_unpack(memoryview(data)[_COUNT.size : end]):
        if number & _FIRST:
            range_starts[producer] = number & ~_FIRST
        else:
            first = range_starts.pop(producer, 0)
            sequences.append(ProducerSequence(producer, number, first))
    return data.slice(end), sequences
