"""The directory of a queue on disk: its identity, its lock, and its quarantine.

A queue that was taken for another one would set all its segments aside. So its id is in four
places, each with a checksum: in ``queue.json``, its copy, the segments and the journal. A file is
believed only if the others do not contradict it.
"""

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

import google_crc32c
import pyarrow as pa

from turnlane.errors import DirectoryLocked, DirectoryUnusable, NotAQueue
from turnlane.logs import get_logger
from turnlane.runtime import Closeable
from turnlane.storage.disk_io import Disk
from turnlane.storage.fastqueue import FastQueueDirectory
from turnlane.storage.journal_records import (
    HEADER_SIZE,
    JOURNAL_FILES,
    parse_header,
    parse_queue_id,
)
from turnlane.storage.segments import (
    WINDOW_BYTES,
    format_segment_name,
    list_segments,
    read_segment_schema,
)

FORMAT = 1
"""The version of ``docs/disk-format.md`` that this code reads and writes."""

IDENTITY_FILE = "queue.json"
IDENTITY_COPY = "queue.copy.json"
IDENTITY_FILES = (IDENTITY_FILE, IDENTITY_COPY)
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
        before any change, if its format is unknown or it does not tell whose segments it has.
        """
        try:
            disk.create_directory(path)
            # Before the lock file is created: a directory that is refused stays unchanged.
            _require_identity_of_segments(path, disk, name)
            with contextlib.ExitStack() as held:
                held.callback(disk.close, lock_directory(path, disk))
                identity = _require_identity_of_segments(path, disk, name)
                identity = _keep_identity(path, disk, identity, name or path.name)
                return cls(path, identity.queue_id, identity.name, held.pop_all().close)
        except OSError as error:
            raise DirectoryUnusable(f"{path}: {error.strerror or error}") from error

    @classmethod
    def read_only(cls, path: Path, disk: Disk) -> Self:
        """Look at a directory, whether it is locked or not; writes nothing.

        Raises ``NotAQueue`` if there is no queue, or one of an unknown format.
        """
        try:
            identity = _find_identity(path, disk)
            if identity is None and not list_segments(path, disk):
                raise NotAQueue(f"{path}: holds neither {IDENTITY_FILE} nor chunks")
        except OSError as error:
            raise NotAQueue(f"{path}: {error.strerror or error}") from error
        identity = identity or Identity("", path.name)
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


class Identity(NamedTuple):
    """What ``queue.json`` tells of a queue."""

    queue_id: str
    name: str

    def encode(self) -> bytes:
        """Return the content of ``queue.json``."""
        values = {"format": FORMAT, **self._asdict(), "crc": _compute_crc(FORMAT, *self)}
        return json.dumps(values).encode() + b"\n"


class IdentityFile(NamedTuple):
    """What one of the two files holds."""

    data: bytes | None
    """``None`` if there is no file."""
    identity: Identity | None
    """``None`` if it cannot be read, or its checksum is wrong."""
    has_checksum: bool


def read_identity_files(path: Path, disk: Disk) -> dict[str, IdentityFile]:
    """Read ``queue.json`` and its copy. Raises ``NotAQueue`` for an unknown format."""
    return {name: _read_identity_file(path / name, disk) for name in IDENTITY_FILES}


def _read_identity_file(path: Path, disk: Disk) -> IdentityFile:
    try:
        with disk.open_file(path) as fd:
            data = bytes(disk.read(fd, min(disk.size(fd), 1 << 16), 0))
    except FileNotFoundError:
        return IdentityFile(None, None, has_checksum=False)
    damaged = IdentityFile(data, None, has_checksum=False)
    try:
        values = json.loads(data)
        version, crc = values["format"], values.get("crc")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return damaged
    queue_id, name = values.get("queue_id"), values.get("name")
    if crc is not None and crc != _compute_crc(version, queue_id, name):
        return damaged
    if version != FORMAT:
        raise NotAQueue(f"{path}: has format {version!r}; this turnlane reads format {FORMAT}")
    if not isinstance(queue_id, str) or not isinstance(name, str) or not _is_id(queue_id):
        return damaged
    return IdentityFile(data, Identity(queue_id, name), has_checksum=crc is not None)


def _compute_crc(version: object, queue_id: object, name: object) -> str:
    text = f"{version}\n{queue_id}\n{name}"
    return f"{google_crc32c.value(text.encode(errors='surrogatepass')):08x}"


def _is_id(text: str) -> bool:
    return len(text) == 32 and not set(text) - set("0123456789abcdef")


def _require_identity_of_segments(path: Path, disk: Disk, name: str | None) -> Identity | None:
    """Return the identity; ``None`` only for a new queue. Raises ``NotAQueue``."""
    identity = _find_identity(path, disk, name)
    if identity is None and FastQueueDirectory.is_fastqueue(path):
        raise NotAQueue(
            f"{path}: is a FastQueue directory; copy its events into a new queue with "
            f"turnlane queue import {path} NEW_DIRECTORY"
        )
    if identity is None and list_segments(path, disk):
        raise NotAQueue(
            f"{path / IDENTITY_FILE}: is missing or damaged, and neither chunks nor journal "
            "tell the queue's id; restore the file, or move the chunks away"
        )
    return identity


def _find_identity(path: Path, disk: Disk, name: str | None = None) -> Identity | None:
    """Return the identity as ``docs/disk-format.md`` says; ``None`` if nothing tells it.

    Raises ``NotAQueue`` if the segments and the journal contradict ``queue.json`` and its copy.
    """
    files = list(read_identity_files(path, disk).values())
    signed = [file.identity for file in files if file.identity and file.has_checksum]
    unsigned = [file.identity for file in files if file.identity and not file.has_checksum]
    for identity in (*signed, *unsigned):
        if _is_confirmed(identity.queue_id, path, disk):
            return identity
    segments, journals = list(_read_segment_ids(path, disk)), list(_read_journal_ids(path, disk))
    common = [each for each in journals if each in segments]
    queue_id = next(iter([*common, *segments, *journals]), None)
    if queue_id is None:
        return None
    if signed:
        raise NotAQueue(
            f"{path / IDENTITY_FILE}: is of another queue than the chunks and the journal, which "
            f"have the id {queue_id}; restore it, or move {' and '.join(IDENTITY_FILES)} away"
        )
    # A file without a checksum that names a wrong id may still have the right name.
    return Identity(queue_id, unsigned[0].name if unsigned else name or path.name)


def _is_confirmed(queue_id: str, path: Path, disk: Disk) -> bool:
    """Whether a segment or the journal has this id, or none of them has any."""
    segments = _read_segment_ids(path, disk)
    newest = itertools.islice(segments, 1)
    is_contradicted = False
    for found in itertools.chain(newest, _read_journal_ids(path, disk), segments):
        if found == queue_id:
            return True
        is_contradicted = True
    return not is_contradicted


def _read_segment_ids(path: Path, disk: Disk) -> Iterator[str]:
    """Yield the ids in the readable segments, newest first."""
    for first in reversed(list_segments(path, disk)):
        file = path / format_segment_name(first)
        try:
            with disk.open_file(file) as fd:
                schema = read_segment_schema(disk, fd)
        except FileNotFoundError:  # the running queue has just removed it
            continue
        except NotAQueue as error:
            raise NotAQueue(f"{file}: {error}") from None
        if schema and _is_id(schema.queue_id):
            yield schema.queue_id


def _read_journal_ids(path: Path, disk: Disk) -> Iterator[str]:
    """Yield the ids in the readable snapshots of the journal."""
    for name in JOURNAL_FILES:
        with contextlib.suppress(FileNotFoundError), disk.open_file(path / name) as fd:
            header = parse_header(bytes(disk.read(fd, HEADER_SIZE, 0)))
            # Only the header claims this length: never allocate more than the file has.
            if header is None or header[1] > disk.size(fd) - HEADER_SIZE:
                continue
            _, length, checksum = header
            queue_id = parse_queue_id(bytes(disk.read(fd, length, HEADER_SIZE)), checksum)
            if queue_id and _is_id(queue_id):
                yield queue_id


def _keep_identity(path: Path, disk: Disk, found: Identity | None, name: str) -> Identity:
    """Write the identity, or a new one, into both files unless they have it already."""
    identity = found or Identity(uuid.uuid4().hex, name)
    data = identity.encode()
    for file_name, file in read_identity_files(path, disk).items():
        if file.data == data:
            continue
        try:
            if file.data is not None and file.identity != identity:
                Quarantine(path, disk).move(path / file_name)
            disk.write_whole(path / file_name, data)
        except OSError as error:
            if found is None:
                raise
            # A queue that tells its id must open on a full disk, too.
            log.warning("queue.identity_not_written", file=path / file_name, error=error)
    return identity


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
            self._disk.create_directory(self.path)
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
