"""One chunk file of FastQueue's, read block by block, whatever state it is in.

Blocks have no checksum: a length is believed if the file is long enough for it, and after a corrupt
one there is nothing to go by but what the metadata says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cramjam

from turnlane.closing import Closing
from turnlane.events import MAX_BLOCK_BYTES
from turnlane.queues.log.files import Disk

WORD = 8
SNAPPY = 1 << 63
RESERVED = 1 << 62
LENGTH = RESERVED - 1

SNAPPY_RATIO = 22
"""The most that snappy can expand: a copy of 64 bytes is 3 bytes long."""

HOLE_BYTES = 4096
"""So many zeros are a page that was never written, not hundreds of empty blocks in a row."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong at a byte of a file."""

    file: Path
    byte: int
    what: str


class Span(NamedTuple):
    """Where a block lies in its chunk; known to lie within the file."""

    at: int
    length: int
    snappy: bool

    @property
    def end(self) -> int:
        return self.at + WORD + self.length


class ChunkReader(Closing):
    """One chunk file, open. ``OSError`` passes through; everything else wrong is a fault."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._fd = disk.open(path, write=False)
        self.size = disk.size(self._fd)

    def close(self) -> None:
        self._disk.close(self._fd)

    def spans(self, overlap: int, boundaries: Sequence[int]) -> Iterator[Span | Fault]:
        """The chunk's blocks, in order.

        ``overlap``: bytes of this chunk that the one before already covers. FastQueue leaves
        zeros there. ``boundaries``: bytes at which the metadata says that a block begins; the only
        places to go on from once a length is corrupt.
        """
        at = overlap if 0 < overlap <= self._end_of_zeros(0) else 0
        while at < self.size:
            span = self._span(at)
            if isinstance(span, Fault):
                yield span
                later = (other for other in boundaries if other > at and self._believable(other))
                at = next(later, self.size)
                continue
            hole = 0 if span.length or span.snappy else self._hole(at)
            if hole:
                yield Fault(self._path, at, f"{hole} bytes of zeros: never written")
                at += hole
            else:
                yield span
                at = span.end

    def value(self, span: Span) -> bytes | Fault:
        """The block's data, decompressed."""
        if span.length > MAX_BLOCK_BYTES:
            what = f"block of {span.length} bytes is larger than an event can be"
            return Fault(self._path, span.at, what)
        data = self._read(span.at + WORD, span.length)
        if len(data) < span.length:
            return Fault(self._path, span.at, "the file was cut while it was read")
        if not span.snappy:
            return data
        claimed = _snappy_length(data)
        if claimed is None or claimed > min(SNAPPY_RATIO * len(data), MAX_BLOCK_BYTES):
            return Fault(self._path, span.at, "snappy data begins with a length that cannot be")
        try:
            return bytes(cramjam.snappy.decompress_raw(data))
        except cramjam.DecompressionError as error:
            return Fault(self._path, span.at, f"block cannot be decompressed: {error}")

    def _span(self, at: int) -> Span | Fault:
        left = self.size - at - WORD
        head = self._read(at, WORD)
        if len(head) < WORD:
            return Fault(self._path, at, f"torn: {len(head)} of {WORD} bytes of a block's length")
        word = int.from_bytes(head, "little")
        length = word & LENGTH
        if word & RESERVED:
            return Fault(self._path, at, f"corrupt length {word:#018x}: bit 62 is set")
        if length > MAX_BLOCK_BYTES and length > left:
            return Fault(self._path, at, f"corrupt length {length}: {left} bytes follow")
        if length > left:
            what = f"torn, or its length corrupt: block of {length} bytes, of which {left} follow"
            return Fault(self._path, at, what)
        return Span(at, length, bool(word & SNAPPY))

    def _hole(self, at: int) -> int:
        """How many zeros from ``at`` on were never written; 0 if they are empty blocks.

        A hole can have any length, so what follows it may begin anywhere: the first byte that is
        not zero is the lowest of its length, or one of those above it.
        """
        end = self._end_of_zeros(at)
        empty_blocks = end - at < HOLE_BYTES
        if end == self.size:
            return 0 if empty_blocks else end - at
        if empty_blocks and self._believable(end - (end - at) % WORD):
            return 0
        for begin in range(end, max(at, end - WORD), -1):
            if self._believable(begin):
                return begin - at
        return 0 if empty_blocks else end - at

    def _believable(self, at: int) -> bool:
        """Whether a block seems to begin here: it decompresses, or another one follows it."""
        if not 0 <= at < self.size:
            return False
        span = self._span(at)
        if isinstance(span, Fault) or span.length == 0:
            return False
        if span.snappy:
            return not isinstance(self.value(span), Fault)
        return span.end == self.size or not isinstance(self._span(span.end), Fault)

    def _end_of_zeros(self, at: int) -> int:
        while piece := self._read(at, HOLE_BYTES):
            rest = piece.lstrip(b"\0")
            if rest:
                return at + len(piece) - len(rest)
            at += len(piece)
        return self.size

    def _read(self, at: int, length: int) -> bytes:
        return self._disk.read(self._fd, min(length, max(self.size - at, 0)), at).to_pybytes()


def _snappy_length(data: bytes) -> int | None:
    """The length that snappy data claims to have when decompressed: a varint of up to 5 bytes."""
    length = 0
    for place, byte in enumerate(data[:5]):
        length |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:  # the last byte has its top bit clear
            return length
    return None
