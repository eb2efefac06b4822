"""Frames: what a chunk file is made of, and the only code that knows their bytes.

A header has a checksum of its own, so that a damaged length can never lead a reader astray: the
damage ends at the next header that holds.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, NamedTuple, get_args

import cramjam
import google_crc32c
import numpy as np
import pyarrow as pa

from turnlane.errors import ConfigError

# ── position ──
# What log and journal hand to each other, apart so that neither has to import the other.


class Position(NamedTuple):
    """A place in the log: byte `byte` of the chunk named `chunk`, where offset `end` comes next."""

    chunk: int
    byte: int
    end: int


class Stamp(NamedTuple):
    """What a producer has published: its hashed id (16 bytes) and a range of its numbers.

    From ``first`` to ``next_sequence - 1``; with ``first`` 0 all numbers below ``next_sequence``.
    """

    producer: bytes
    next_sequence: int
    first: int = 0

    def before(self, events: int) -> Stamp:
        """Its stamp so many events earlier, if their numbers follow on each other."""
        return Stamp(self.producer, self.next_sequence - events, self.first)


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


# ── compression ──
# Whether to compress a frame: only where everything waits for the disk, and would wait less.
#
# Compressing costs ``1/C`` seconds a byte and saves the writing of ``1 - r`` of it, at ``1/W``
# seconds a byte. On a fast disk, or with data that does not shrink, that is a loss: so measure.
# It is
# one, too, where the disk has time to spare, and the processor that compresses has none.

Mode = Literal["auto", "snappy", "none"]

SMALLEST = 512
"""Frames below this many bytes are never compressed: their header outweighs the gain."""
TRIAL_EVERY = 64
"""How often ``auto`` tries again, in frames, whatever it believes."""
TRIAL_BYTES = 256 * 1024
"""A trial needs no more than this: a part of a frame compresses as the whole does."""
BUSY = 0.8
"""The share of its time that a writer waits for the disk before less to write would help. No more
is compressed than keeps it there."""
_PAUSE = 2.0
"""Seconds: a writer that was silent for so long had nothing to do, which says nothing of a disk."""
_COMPRESSION_SNAPPY = pa.Codec("snappy")
_WEIGHT = 0.2
"""How much the latest measurement counts in a moving average."""


def pays(ratio: float, compress_speed: float, write_speed: float) -> bool:
    """Whether compressing and writing less is faster than writing it all. Speeds in bytes/s."""
    return 1 / compress_speed < (1 - ratio) / write_speed


class Compression:
    """The policy of one log. Used by its writer thread only."""

    def __init__(self, mode: Mode = "auto", *, timer: Callable[[], float] = perf_counter) -> None:
        if mode not in get_args(Mode):
            raise ConfigError("compression", f"{mode!r} is none of auto, snappy, none")
        self.mode = mode
        self._timer = timer
        self._frames = 0
        self._ratio: float | None = None
        self._compress_speed: float | None = None
        self._write_speed: float | None = None
        self._wrote_at = timer()
        self._waited: float | None = None
        self._passed: float | None = None
        """Seconds that writes took, and those from each to the next."""

    def pack(self, pieces: Sequence[Data]) -> pa.Buffer | None:
        """The pieces compressed as one, or none if they are better stored as they are."""
        size = sum(len(piece) for piece in pieces)
        if self.mode == "none" or size < SMALLEST:
            return None
        if self.mode == "auto" and not self._wanted(pieces):
            return None
        packed = self._compressed(_joined(pieces))
        return packed if len(packed) < size else None

    def wrote(self, size: int, seconds: float) -> None:
        """Learn how fast the disk takes bytes, syncing included, and how busy that keeps it."""
        now = self._timer()
        since = max(seconds, now - self._wrote_at)
        self._wrote_at = now
        if since - seconds < _PAUSE:
            self._waited = _moved(self._waited, seconds)
            self._passed = _moved(self._passed, since)
        if size and seconds > 0:
            self._write_speed = _moved(self._write_speed, size / seconds)

    def _wanted(self, pieces: Sequence[Data]) -> bool:
        if self._frames % TRIAL_EVERY == 0:
            whole = _joined(pieces)
            self._compressed(whole.slice(0, min(TRIAL_BYTES, len(whole))))
        self._frames += 1
        if self._ratio is None or self._compress_speed is None or self._write_speed is None:
            return False
        if not self._waited or not self._passed or self._waited < BUSY * self._passed:
            return False
        return pays(self._ratio, self._compress_speed, self._write_speed)

    def _compressed(self, data: pa.Buffer) -> pa.Buffer:
        started = self._timer()
        packed = _COMPRESSION_SNAPPY.compress(data)
        seconds = self._timer() - started
        self._ratio = _moved(self._ratio, len(packed) / len(data))
        if seconds > 0:
            self._compress_speed = _moved(self._compress_speed, len(data) / seconds)
        return packed


def _joined(pieces: Sequence[Data]) -> pa.Buffer:
    if len(pieces) == 1:
        return pa.py_buffer(pieces[0])
    return pa.py_buffer(b"".join(memoryview(piece) for piece in pieces))


def _moved(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)
