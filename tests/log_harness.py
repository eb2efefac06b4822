"""Helpers for tests of the log: open it, append numbered events, read all of it."""

from __future__ import annotations

from pathlib import Path

from turnlane.events import block_of, get_values
from turnlane.storage.disk_io import Disk
from turnlane.storage.encoder import CompressionMode, CompressionPolicy
from turnlane.storage.frames import LogPosition
from turnlane.storage.log import Log
from turnlane.storage.reader import StoredEvents, UnreadableRange

QUEUE_ID = "ab" * 16
CHUNK_0 = "0000000000000000.chunk"


def open_log(
    directory: Path,
    disk: Disk | None = None,
    *,
    hint: LogPosition | None = None,
    floor: int = 0,
    segment_size: int = 1 << 20,
    mode: CompressionMode = "none",
    queue_id: str = QUEUE_ID,
    durable: bool = True,
) -> Log:
    return Log(
        directory,
        disk or Disk(),
        queue_id=queue_id,
        segment_size=segment_size,
        compression=CompressionPolicy(mode),
        hint=hint,
        floor=floor,
        durable=durable,
    )


def build_values(first: int, count: int) -> list[bytes]:
    return [b"event %d" % offset for offset in range(first, first + count)]


def append_events(log: Log, count: int, blocks: int = 1) -> None:
    for _ in range(blocks):
        log.append(log.end, block_of(build_values(log.end, count), timestamps=1))


def start_segment(log: Log) -> None:
    """Start a new segment, so that the former can be removed. No effect without events."""
    active = log._active.segment
    if active is not None and active.first < log.end:
        log._start_segment(log.end, log.schema)


def read_all(
    log: Log, offset: int = 0, max_events: int = 1000
) -> list[bytes | UnreadableRange | None]:
    """Return the values from ``offset`` on, and the unreadable ranges."""
    reader = log.create_reader()
    found: list[bytes | UnreadableRange | None] = []
    while (result := reader.read(offset, max_events)) is not None:
        if isinstance(result, StoredEvents):
            assert result.first == offset
            assert 0 < result.block.num_rows <= max_events
            found += get_values([result.block])
            offset += result.block.num_rows
        else:
            assert result.first == offset
            found.append(result)
            offset = result.end
    reader.close()
    return found


def write_three_frames(directory: Path) -> tuple[Path, list[int]]:
    """Write a segment of three frames of ten events; return the bytes where they begin and end."""
    log = open_log(directory)
    places = []
    for _ in range(3):
        append_events(log, 10)
        places.append(log.position.byte)
    log.close()
    return directory / CHUNK_0, places


def read_quarantine(directory: Path) -> bytes:
    """Return all bytes in quarantine."""
    folder = directory / "quarantine"
    files = sorted(folder.iterdir()) if folder.exists() else []
    return b"".join(path.read_bytes() for path in files)


def flip_bit(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 0x40
    path.write_bytes(bytes(data))
