"""A disk that can be copied between two operations, as a killed process leaves it."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from turnlane.storage.disk_io import Buffers, Disk


class CopyableDisk(Disk):
    """A real disk on which everything that changes files waits while they are copied."""

    def __init__(self) -> None:
        self._changing = threading.Lock()

    def copy(self, directory: Path, copy: Path) -> Path:
        """Copy a directory as a kill at this moment would leave it; returns the copy."""
        with self._changing:
            shutil.copytree(directory, copy)
        return copy

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> int:
        with self._changing:
            return super().open(path, create=create, write=write)

    def write(self, fd: int, buffers: Buffers, at: int) -> None:
        with self._changing:
            super().write(fd, buffers, at)

    def truncate(self, fd: int, size: int) -> None:
        with self._changing:
            super().truncate(fd, size)

    def allocate(self, fd: int, size: int) -> None:
        with self._changing:
            super().allocate(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        with self._changing:
            super().rename(old, new)

    def unlink(self, path: Path) -> None:
        with self._changing:
            super().unlink(path)
