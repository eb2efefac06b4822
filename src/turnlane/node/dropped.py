"""Dropped queues: what is in them must not come back, whenever the process ends.

The node's list of queues says which are to go; then the directory gets a name that no queue has,
and is deleted, which may take long. Whichever of this was not done, the next start does.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from pathlib import Path
from typing import Final

from turnlane.errors import NotAQueue, StorageFailed
from turnlane.queues.log.directory import QueueDirectory
from turnlane.queues.log.files import Disk

log = logging.getLogger(__name__)

PREFIX: Final = ".dropped-"


class Dropped:
    """The directories of dropped queues, beside those of the others."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        self._directory = directory
        self._disk = disk
        self.ids: dict[str, str] = {}
        """By name, the identity of queues that are to go and whose directory may still be there."""

    def put_away(self, name: str) -> Path | None:
        """Let nobody find the queue again, if it is to go; returns what is left to delete.

        Raises ``StorageFailed``.
        """
        path = self._directory / name
        away = None
        if name not in self.ids:
            return None
        if _identity(path, self._disk) == self.ids[name]:  # else it is another one by now
            away = path.with_name(PREFIX + uuid.uuid4().hex)
            try:
                self._disk.rename(path, away)
                self._disk.sync_directory(self._directory)
            except OSError as error:
                message = f"cannot put {path} away: {error.strerror or error}"
                raise StorageFailed(message) from error
        del self.ids[name]
        return away

    def sweep(self) -> None:
        """Delete what an earlier process has put away and not deleted."""
        for path in self._directory.glob(PREFIX + "*"):
            delete(path)


def _identity(path: Path, disk: Disk) -> str | None:
    try:
        return QueueDirectory.read_only(path, disk).queue_id
    except NotAQueue:
        return None


def delete(path: Path) -> None:
    """Delete what was put away. If that cannot be, it is said, and left to the next start."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        log.warning("a dropped queue is left to be deleted by the next start: %s", error)
