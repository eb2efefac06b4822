"""FastQueue's metadata file: where reading and writing were, as of a second ago or so."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from turnlane.queues.log.files import Disk

METADATA_FILE = "fastqueue.meta"
METADATA_BYTES = 1 << 16
"""Far more than the six fields need; a larger file is not metadata."""


@dataclass(frozen=True, slots=True)
class FastQueueMetadata:
    """What ``fastqueue.meta`` says: a hint, up to a second old and not in step with the data."""

    version: int
    reader_offset: int
    """Position of the first block that FastQueue had not handed out."""
    writer_offset: int
    """Position at which FastQueue would have written next."""
    entry_count: int | None = None
    """Blocks waiting, those in memory only included; version 1 does not say."""
    total_bytes: int | None = None
    """Their size before compression; version 1 does not say."""
    name: str = ""


class BadMetadata(Exception):
    """The metadata cannot be used; the message says why."""


def load_metadata(disk: Disk, path: Path) -> FastQueueMetadata:
    """Read the file. Raises ``BadMetadata``."""
    try:
        fd = disk.open(path, write=False)
        try:
            raw = disk.read(fd, METADATA_BYTES, 0).to_pybytes()
        finally:
            disk.close(fd)
        fields = json.loads(raw)
    except FileNotFoundError:
        raise BadMetadata("missing; everything counts as unread") from None
    except OSError as error:
        raise BadMetadata(f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise BadMetadata("is not JSON; everything counts as unread") from None
    return _metadata_from(fields)


def _metadata_from(fields: object) -> FastQueueMetadata:
    if not isinstance(fields, dict):
        raise BadMetadata("is not a JSON object; everything counts as unread")
    reader, writer = _number(fields, "reader_offset"), _number(fields, "writer_offset")
    if reader is None or writer is None:
        raise BadMetadata("has no offsets that make sense; everything counts as unread")
    version = _number(fields, "version") or 1
    # FastQueue leaves a count of 0 out, so from version 2 on a missing count means none.
    unsaid = None if version == 1 else 0
    count, size = _number(fields, "entry_count"), _number(fields, "total_bytes")
    return FastQueueMetadata(
        version=version,
        reader_offset=reader,
        writer_offset=writer,
        entry_count=unsaid if count is None else count,
        total_bytes=unsaid if size is None else size,
        name=str(fields.get("name", "")),
    )


def _number(fields: dict[str, object], name: str) -> int | None:
    value = fields.get(name)
    if type(value) is int and 0 <= value < 1 << 63:
        return value
    return None
