"""Queues that a node has on disk and does not open: no longer configured, or of another kind now.

Nobody reads what waits in them, and nothing would ever say so.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from turnlane.errors import NotAQueue
from turnlane.node.dropped import PREFIX
from turnlane.queues.inspection.inspection import Inspection
from turnlane.queues.inspection.walk import Stretch, Walk
from turnlane.queues.log.files import Disk

log = logging.getLogger(__name__)


class Forgotten(NamedTuple):
    """A queue that is not open and still holds events."""

    path: Path
    pending: int


def forgotten(directory: Path, opened: Collection[Path], disk: Disk) -> Iterator[Forgotten]:
    """The queues below ``directory`` that hold events, those that are open left out."""
    try:
        names = disk.listing(directory)
    except FileNotFoundError:
        return  # no queue was ever on disk
    for path in sorted(directory / name for name in names):
        if path in opened or not path.is_dir() or path.name.startswith(PREFIX):
            continue
        try:
            pending = _pending(Inspection(path, disk))
        except (NotAQueue, OSError) as error:
            log.warning("cannot tell whether events wait in %s: %s", path, error)
            continue
        if pending:
            yield Forgotten(path, pending)


def _pending(queue: Inspection) -> int:
    """How many events are not settled. Reads one chunk, however many there are."""
    low = queue.low(queue.state)
    end = max(queue.state.floor, _end(queue))
    return end - low - queue.settled.overlap(low, end) if end > low else 0


def _end(queue: Inspection) -> int:
    """The end of the log: offsets are consecutive, so the last chunk knows it."""
    last = [chunk for chunk in queue.chunks if chunk.is_last]
    walk = Walk(queue.disk, last, lambda _first, _end: False)
    return max((item.end for item in walk if isinstance(item, Stretch)), default=0)
