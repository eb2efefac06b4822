"""Where bytes go that could not be read: copied aside, never overwritten, never deleted."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from turnlane.queues.log.chunks import WINDOW, chunk_name
from turnlane.queues.log.files import Disk

_log = logging.getLogger(__name__)


class Quarantine:
    """The folder ``quarantine/`` of one queue. Safe to use from several threads at once."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        self.path = directory / "quarantine"
        self._disk = disk

    def copy(self, fd: int, byte: int, length: int, *, chunk: int, kind: str) -> Path:
        """Copy a region of a chunk to ``<chunk>-<byte>.<kind>``; durable when this returns.

        A region that was copied before (and found again after a restart) is not copied twice.
        """
        self._make()
        for path in self._names(f"{chunk:016x}-{byte:x}", f".{kind}"):
            if not path.exists():
                self._copy(fd, byte, length, path)
                _log.warning(
                    "%d unreadable bytes of %s at byte %d were kept as %s",
                    length,
                    chunk_name(chunk),
                    byte,
                    path,
                )
                return path
            if self._same(fd, byte, length, path):
                return path
        raise AssertionError("there is always another name")

    def keep(self, path: Path) -> Path:
        """Copy a whole file here, under its name; durable when this returns."""
        self._make()
        fd = self._disk.open(path, write=False)
        try:
            size = self._disk.size(fd)
            for target in self._names(path.name, ""):
                if not target.exists():
                    self._copy(fd, 0, size, target)
                    return target
                if self._same(fd, 0, size, target):
                    return target
        finally:
            self._disk.close(fd)
        raise AssertionError("there is always another name")

    def move(self, path: Path) -> Path:
        """Move a whole file here; needs no room on the disk."""
        self._make()
        for target in self._names(path.name, ""):
            if not target.exists():
                self._disk.rename(path, target)
                self._disk.sync_directory(self.path)
                self._disk.sync_directory(path.parent)
                _log.warning("%s was moved to %s: it could not be read", path, target)
                return target
        raise AssertionError("there is always another name")

    def _make(self) -> None:
        if not self.path.exists():
            self.path.mkdir(exist_ok=True)
            self._disk.sync_directory(self.path.parent)

    def _names(self, stem: str, suffix: str) -> Iterator[Path]:
        yield self.path / f"{stem}{suffix}"
        for number in itertools.count(1):
            yield self.path / f"{stem}.{number}{suffix}"

    def _copy(self, fd: int, byte: int, length: int, path: Path) -> None:
        # Under another name until complete, so that a copy cut short is never taken for one.
        partial = path.with_name(path.name + ".partial")
        try:
            self._fill(partial, fd, byte, length)
            self._disk.rename(partial, path)
            self._disk.sync_directory(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                self._disk.unlink(partial)
            raise

    def _fill(self, path: Path, fd: int, byte: int, length: int) -> None:
        out = self._disk.open(path, create=True)
        try:
            self._disk.truncate(out, 0)
            for at, piece in self._pieces(fd, byte, length):
                self._disk.write(out, [piece], at)
            self._disk.sync(out)
        finally:
            self._disk.close(out)

    def _same(self, fd: int, byte: int, length: int, path: Path) -> bool:
        other = self._disk.open(path, write=False)
        try:
            if self._disk.size(other) != length:
                return False
            return all(
                piece.equals(self._disk.read(other, len(piece), at))
                for at, piece in self._pieces(fd, byte, length)
            )
        finally:
            self._disk.close(other)

    def _pieces(self, fd: int, byte: int, length: int) -> Iterator[tuple[int, pa.Buffer]]:
        at = 0
        while at < length:
            piece: pa.Buffer = self._disk.read(fd, min(WINDOW, length - at), byte + at)
            if not len(piece):
                return
            yield at, piece
            at += len(piece)
