"""The directory of a queue on disk: its identity, its lock, and its quarantine."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

import pyarrow as pa

from turnlane.errors import DirectoryLocked, DirectoryUnusable, NotAQueue
from turnlane.logs import get_logger
from turnlane.runtime import Closeable
from turnlane.storage.disk_io import Disk
from turnlane.storage.segments import (
    WINDOW_BYTES,
    format_segment_name,
    list_segments,
    read_segment_schema,
)

FORMAT = 1
"""The version of ``docs/disk-format.md`` that this code reads and writes."""

IDENTITY_FILE = "queue.json"
LOCK_FILE = "lock"
QUARANTINE = "quarantine"

_PID_WIDTH = 20

log = get_logger(__name__)


class QueueDirectory(Closeable):
    """The directory of a queue. As a context manager it is closed at the end.

    :meth:`open` locks it against all other objects and processes until :meth:`close`;
    :meth:`read_only` takes no lock.
    """

    def __init__(self, path: Path, queue_id: str, name: str, release: Callable[[], None]) -> None:
        """Use :meth:`open` or :meth:`read_only`."""
        self.path = path
        self.queue_id = queue_id
        """32 hex digits; empty if a directory that was opened for reading does not tell it."""
        self.name = name
        """The name with which the queue was created."""
        self._release: Callable[[], None] | None = release

    @classmethod
    def open(cls, path: Path, disk: Disk, name: str | None = None) -> Self:
        """Lock the directory and find the queue's identity; create both if they are missing.

        ``name`` is for a new queue (default: the directory's name). Raises ``DirectoryLocked`` if
        another process holds it, ``DirectoryUnusable`` if it cannot be written, and ``NotAQueue``,
        before any change, if its format is unknown.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Before the lock file is created: a directory of an unknown format stays unchanged.
            _read_identity(path, disk) or _find_id_in_segments(path, disk)
            with contextlib.ExitStack() as held:
                held.callback(disk.close, lock_directory(path, disk))
                identity = _read_identity(path, disk) or _create_identity(path, disk, name)
                return cls(path, identity.queue_id, identity.name, held.pop_all().close)
        except OSError as error:
            raise DirectoryUnusable(f"{path}: {error.strerror or error}") from error

    @classmethod
    def read_only(cls, path: Path, disk: Disk) -> Self:
        """Look at a directory, whether it is locked or not; writes nothing.

        Raises ``NotAQueue`` if there is no queue, or one of an unknown format.
        """
        try:
            identity = _read_identity(path, disk)
            if identity is None and not list_segments(path, disk):
                raise NotAQueue(f"{path}: holds neither {IDENTITY_FILE} nor chunks")
        except OSError as error:
            raise NotAQueue(f"{path}: {error.strerror or error}") from error
        identity = identity or _Identity(_find_id_in_segments(path, disk) or "", path.name)
        return cls(path, identity.queue_id, identity.name, lambda: None)

    def close(self) -> None:
        """Release the directory; a second call is harmless."""
        release, self._release = self._release, None
        if release:
            release()


def lock_directory(path: Path, disk: Disk) -> int:
    """Lock a directory until the returned descriptor is closed.

    Raises ``DirectoryLocked``, which names the holder, or ``OSError``.
    """
    fd = disk.open(path / LOCK_FILE, create=True)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = bytes(disk.read(fd, _PID_WIDTH, 0)).decode(errors="replace").strip()
        disk.close(fd)
        own = holder == str(os.getpid())
        who = "this process: close() it first" if own else f"process {holder or 'unknown'}"
        raise DirectoryLocked(f"{path}: held by {who}") from None
    # The process id is only for people: a full disk must not keep the queue from opening. It
    # overwrites the former one; cutting the file first could free a block and not get it back.
    with contextlib.suppress(OSError):
        disk.write(fd, [f"{os.getpid():<{_PID_WIDTH}}\n".encode()], 0)
    return fd


# ── identity ─────────────────────────────────────────────────────────────────────────────────────


class _Identity(NamedTuple):
    queue_id: str
    name: str


def _read_identity(path: Path, disk: Disk) -> _Identity | None:
    """Return the content of ``queue.json``; ``None`` if it is missing or unreadable."""
    try:
        with disk.open_file(path / IDENTITY_FILE) as fd:
            data = bytes(disk.read(fd, min(disk.size(fd), 1 << 16), 0))
    except FileNotFoundError:
        return None
    try:
        values = json.loads(data)
        version = values["format"]
    except (ValueError, KeyError, TypeError):
        return None
    if version != FORMAT:
        raise NotAQueue(f"{path}: has format {version!r}; this turnlane reads format {FORMAT}")
    queue_id, name = values.get("queue_id"), values.get("name")
    if not isinstance(queue_id, str) or not isinstance(name, str) or not _is_id(queue_id):
        return None
    return _Identity(queue_id, name)


def _is_id(text: str) -> bool:
    return len(text) == 32 and not set(text) - set("0123456789abcdef")


def _create_identity(path: Path, disk: Disk, name: str | None) -> _Identity:
    """Write ``queue.json`` with the id that the segments have, or with a new one."""
    identity = _Identity(_find_id_in_segments(path, disk) or uuid.uuid4().hex, name or path.name)
    if (path / IDENTITY_FILE).exists():
        Quarantine(path, disk).move(path / IDENTITY_FILE)
    text = json.dumps({"format": FORMAT, **identity._asdict()})
    disk.write_whole(path / IDENTITY_FILE, text.encode() + b"\n")
    return identity


def _find_id_in_segments(path: Path, disk: Disk) -> str | None:
    """Return the id in the newest segment that has a readable one: older ones may be foreign."""
    for first in reversed(list_segments(path, disk)):
        try:
            with disk.open_file(path / format_segment_name(first)) as fd:
                schema = read_segment_schema(disk, fd)
        except FileNotFoundError:  # the running queue has just removed it
            continue
        if schema and _is_id(schema.queue_id):
            return schema.queue_id
    return None


# ── quarantine ───────────────────────────────────────────────────────────────────────────────────


class Quarantine:
    """The folder ``quarantine/`` of a queue, for bytes that could not be read.

    Nothing in it is ever overwritten or deleted. Safe to use from several threads at once.
    """

    def __init__(self, directory: Path, disk: Disk) -> None:
        self.path = directory / QUARANTINE
        self._disk = disk

    def copy(self, fd: int, byte: int, length: int, *, segment: int, kind: str) -> Path:
        """Copy a region of a segment to ``<segment>-<byte>.<kind>``; durable on return.

        A region that was copied before, and found again after a restart, is not copied twice.
        """
        target, is_new = self._copy(fd, byte, length, f"{segment:016x}-{byte:x}", f".{kind}")
        if is_new:
            log.warning(
                "quarantine.bytes_copied",
                file=format_segment_name(segment),
                byte=byte,
                length=length,
                copy=target,
            )
        return target

    def copy_file(self, path: Path) -> Path:
        """Copy a whole file here, under its name; durable on return."""
        with self._disk.open_file(path) as fd:
            return self._copy(fd, 0, self._disk.size(fd), path.name, "")[0]

    def move(self, path: Path) -> Path:
        """Move a whole file here; needs no space on the disk."""
        self._create_folder()
        target = next(each for each in self._names(path.name, "") if not each.exists())
        self._disk.rename(path, target)
        self._disk.sync_directory(self.path)
        self._disk.sync_directory(path.parent)
        log.warning("quarantine.file_moved", file=path, moved_to=target)
        return target

    def _create_folder(self) -> None:
        if not self.path.exists():
            self.path.mkdir(exist_ok=True)
            self._disk.sync_directory(self.path.parent)

    def _names(self, stem: str, suffix: str) -> Iterator[Path]:
        yield self.path / f"{stem}{suffix}"
        for number in itertools.count(1):
            yield self.path / f"{stem}.{number}{suffix}"

    def _copy(self, fd: int, byte: int, length: int, stem: str, suffix: str) -> tuple[Path, bool]:
        """Return the copy, and whether it is new."""
        self._create_folder()
        names = self._names(stem, suffix)
        while (target := next(names)).exists():
            if self._is_copy(fd, byte, length, target):
                return target, False
        # Under a temporary name until complete: an incomplete copy is never taken for a copy.
        partial = target.with_name(target.name + ".partial")
        try:
            with self._disk.open_file(partial, create=True, write=True) as out:
                self._disk.truncate(out, 0)
                for at, piece in self._read_pieces(fd, byte, length):
                    self._disk.write(out, [piece], at)
                self._disk.sync(out)
            self._disk.rename(partial, target)
            self._disk.sync_directory(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                self._disk.unlink(partial)
            raise
        return target, True

    def _is_copy(self, fd: int, byte: int, length: int, path: Path) -> bool:
        with self._disk.open_file(path) as other:
            if self._disk.size(other) != length:
                return False
            return all(
                piece.equals(self._disk.read(other, len(piece), at))
                for at, piece in self._read_pieces(fd, byte, length)
            )

    def _read_pieces(self, fd: int, byte: int, length: int) -> Iterator[tuple[int, pa.Buffer]]:
        at = 0
        while at < length:
            piece: pa.Buffer = self._disk.read(fd, min(WINDOW_BYTES, length - at), byte + at)
            if not len(piece):
                return
            yield at, piece
            at += len(piece)
