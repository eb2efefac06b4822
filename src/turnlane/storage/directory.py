"""The directory of a queue on disk: who it belongs to, and who holds it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

import pyarrow as pa

from turnlane.errors import DirectoryLocked, DirectoryUnusable, NotAQueue
from turnlane.runtime import Closing
from turnlane.storage.disk_io import Disk
from turnlane.storage.segments import WINDOW, chunk_name, list_chunks, read_schema

# ── quarantine ──
# Where bytes go that could not be read: copied aside, never overwritten, never deleted.

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


FORMAT = 1
"""The version of ``docs/disk-format.md`` that this code reads and writes."""

IDENTITY = "queue.json"
LOCK = "lock"

_PID_WIDTH = 20


class QueueDirectory(Closing):
    """A queue's directory. As a context manager it is closed at the end.

    :meth:`open` holds it for this object alone, in this process and all others, until
    :meth:`close`; :meth:`read_only` holds nothing.
    """

    def __init__(self, path: Path, queue_id: str, name: str, release: Callable[[], None]) -> None:
        """Use :meth:`open` or :meth:`read_only`."""
        self.path = path
        self.queue_id = queue_id
        """32 hex digits; empty if nothing in a directory that was opened for reading tells it."""
        self.name = name
        """The name the queue was created with."""
        self._release: Callable[[], None] | None = release

    @classmethod
    def open(cls, path: Path, disk: Disk, name: str | None = None) -> Self:
        """Lock the directory, made if need be, and find the queue's identity, or give it one.

        ``name`` is for a new queue (default: the directory's). Raises ``DirectoryLocked`` if
        someone else holds it, ``DirectoryUnusable`` if it cannot be written, and ``NotAQueue``,
        having changed nothing, if its format is unknown.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Before the lock file is made: a format that is unknown is left as it was found.
            _read_identity(path, disk) or _id_in_chunks(path, disk)
            with contextlib.ExitStack() as held:
                held.callback(disk.close, lock(path, disk))
                identity = _read_identity(path, disk) or _give_identity(path, disk, name)
                return cls(path, identity.queue_id, identity.name, held.pop_all().close)
        except OSError as error:
            raise DirectoryUnusable(f"{path}: {error.strerror or error}") from error

    @classmethod
    def read_only(cls, path: Path, disk: Disk) -> Self:
        """Look at a directory, held by somebody or not; writes nothing.

        Raises ``NotAQueue`` if there is no queue, or none of a format that is known.
        """
        try:
            identity = _read_identity(path, disk)
            if identity is None and not list_chunks(path, disk):
                raise NotAQueue(f"{path}: holds neither {IDENTITY} nor chunks")
        except OSError as error:
            raise NotAQueue(f"{path}: {error.strerror or error}") from error
        identity = identity or _Identity(_id_in_chunks(path, disk) or "", path.name)
        return cls(path, identity.queue_id, identity.name, lambda: None)

    def close(self) -> None:
        """Let go of the directory; a second call is harmless."""
        release, self._release = self._release, None
        if release:
            release()


class _Identity(NamedTuple):
    queue_id: str
    name: str


def lock(path: Path, disk: Disk) -> int:
    """Lock a directory for as long as the descriptor that is returned is open.

    Raises ``DirectoryLocked``, which names the holder, or ``OSError``.
    """
    fd = disk.open(path / LOCK, create=True)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = bytes(disk.read(fd, _PID_WIDTH, 0)).decode(errors="replace").strip()
        disk.close(fd)
        own = holder == str(os.getpid())
        who = "this process: close() it first" if own else f"process {holder or 'unknown'}"
        raise DirectoryLocked(f"{path}: held by {who}") from None
    # The number is for people only: a full disk must not keep the queue from opening. It is
    # written over the former one, never cut first, for a full disk gives no block back.
    with contextlib.suppress(OSError):
        disk.write(fd, [f"{os.getpid():<{_PID_WIDTH}}\n".encode()], 0)
    return fd


def _read_identity(path: Path, disk: Disk) -> _Identity | None:
    """What queue.json says; nothing if it is missing or unreadable."""
    try:
        fd = disk.open(path / IDENTITY, write=False)
    except FileNotFoundError:
        return None
    try:
        data = bytes(disk.read(fd, min(disk.size(fd), 1 << 16), 0))
    finally:
        disk.close(fd)
    return _parse_identity(path, data)


def _parse_identity(path: Path, data: bytes) -> _Identity | None:
    try:
        values = json.loads(data)
        known = values["format"]
    except (ValueError, KeyError, TypeError):
        return None
    if known != FORMAT:
        raise NotAQueue(f"{path}: its format is {known!r}; this turnlane knows {FORMAT}")
    queue_id, name = values.get("queue_id"), values.get("name")
    if not isinstance(queue_id, str) or not isinstance(name, str) or not _is_id(queue_id):
        return None
    return _Identity(queue_id, name)


def _is_id(text: str) -> bool:
    return len(text) == 32 and not set(text) - set("0123456789abcdef")


def _give_identity(path: Path, disk: Disk, name: str | None) -> _Identity:
    """Write queue.json, with the id that the chunks have, or a new one."""
    identity = _Identity(_id_in_chunks(path, disk) or uuid.uuid4().hex, name or path.name)
    if (path / IDENTITY).exists():
        Quarantine(path, disk).move(path / IDENTITY)
    text = json.dumps({"format": FORMAT, **identity._asdict()})
    disk.write_whole(path / IDENTITY, text.encode() + b"\n")
    return identity


def _id_in_chunks(path: Path, disk: Disk) -> str | None:
    """The queue id in the newest chunk that has a readable one: older ones may be foreign."""
    for first in reversed(list_chunks(path, disk)):
        try:
            fd = disk.open(path / chunk_name(first), write=False)
        except FileNotFoundError:  # removed by its holder, while someone else only looks
            continue
        try:
            schema = read_schema(disk, fd)
        finally:
            disk.close(fd)
        if schema and _is_id(schema.queue_id):
            return schema.queue_id
    return None
