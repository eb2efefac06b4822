"""Writes FastQueue directories by the description of the format, and reads them back.

The writer shares nothing with the reader.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pyarrow as pa

from turnlane.events import BASE_SCHEMA
from turnlane.storage.fastqueue import FastQueueDirectory, FastQueueFault

Block = tuple[int, bytes]


def encode_block(value: bytes, *, snappy: bool) -> bytes:
    data = pa.Codec("snappy").compress(value).to_pybytes() if snappy else value
    return struct.pack("<Q", len(data) | snappy << 63) + data


class Writer:
    """Writes as FastQueue does: chunks named by position, rotation, JSON metadata."""

    def __init__(self, path: Path, *, chunk_size: int = 1 << 20) -> None:
        self.path = path
        self.chunk_size = chunk_size
        self.position = 0
        self.blocks: list[Block] = []
        self._file: Path | None = None

    def chunk(self, position: int) -> Path:
        return self.path / f"{position // self.chunk_size * self.chunk_size:016x}"

    def put(self, value: bytes, *, snappy: bool = True) -> int:
        return self.put_raw(encode_block(value, snappy=snappy), value)

    def put_raw(self, data: bytes, value: bytes | None = None) -> int:
        """Append bytes; ``value`` is the event that a reader should return for them, if any."""
        if self._file and self.position % self.chunk_size + len(data) > self.chunk_size:
            self.position = (self.position // self.chunk_size + 1) * self.chunk_size
            self._file = None
        self._file = self._file or self.chunk(self.position)
        with self._file.open("ab") as file:
            file.write(data)
        position = self.position
        self.position += len(data)
        if value is not None:
            self.blocks.append((position, value))
        return position

    def restart(self, position: int) -> None:
        """Continue as FastQueue does after a crash: at the offset in the metadata."""
        self._file = self.chunk(position)
        with self._file.open("ab") as file:
            file.truncate(position % self.chunk_size)
        self.position = position

    def metadata(
        self, *, reader: int = 0, writer: int | None = None, version: int = 2, **more: int
    ) -> None:
        fields = {
            "name": "fastqueue",
            "reader_offset": reader,
            "writer_offset": self.position if writer is None else writer,
            "version": version,
            **more,
        }
        (self.path / "fastqueue.meta").write_text(json.dumps(fields, indent=2))


def read(path: Path, start: int | None = None, batch_events: int = 1024) -> list[Block]:
    found = []
    for batch in FastQueueDirectory.open(path).blocks(start=start, batch_events=batch_events):
        assert batch.schema.equals(BASE_SCHEMA)
        assert batch.num_rows <= batch_events
        found += [
            (int(dict(row["headers"])["fastqueue.position"]), row["value"])
            for row in batch.to_pylist()
        ]
    return found


def list_faults(path: Path) -> list[FastQueueFault]:
    return list(FastQueueDirectory.open(path).faults())


def get_only_fault(path: Path) -> FastQueueFault:
    (fault,) = list_faults(path)
    return fault
