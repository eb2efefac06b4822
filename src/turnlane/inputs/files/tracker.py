"""The followed files: found by scans, known from before, saved with their positions.

The positions file is written whole, in one durable step, before the first line of a file is
published, and then about every second. It contains only positions that the queue has acked, so it
may be behind the queue, never ahead of it.
"""

from __future__ import annotations

import enum
import fnmatch
import glob
import json
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from turnlane.databases.sqlite import find_database_inodes
from turnlane.errors import DirectoryUnusable
from turnlane.inputs.api import InputSettings
from turnlane.inputs.files.reader import (
    AckProgress,
    FileKey,
    FileReader,
    Fingerprint,
    SavedFile,
)
from turnlane.logs import get_logger
from turnlane.queues.api import FlowControl
from turnlane.queues.buffered import BufferedQueue
from turnlane.queues.settings import Kind
from turnlane.storage.disk_io import Disk
from turnlane.units import Duration, Size

log = get_logger(__name__)

VERSION = 1

MAX_GENERATIONS = 256
"""Generations of a file that are looked for in the queue when the positions file is lost."""

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".Z")
"""Files that a rotation has compressed: their lines were read before."""

MAX_WARNED = 10_000
"""The most paths that are remembered as warned about; with more, some warnings come again."""


class StartAt(enum.StrEnum):
    """Where to begin with files that are there when the input starts for the first time."""

    BEGINNING = "beginning"
    END = "end"


class FilesSettings(InputSettings):
    """Settings of the ``files`` input."""

    type: str = "files"
    flow: FlowControl = Field(FlowControl.FULL, description="Files can wait as long as needed.")
    paths: tuple[str, ...] = Field(
        min_length=1, description="Globs of the files to follow; ** is any depth of folders."
    )
    exclude: tuple[str, ...] = Field(
        (), description="Globs of files to ignore: of the name, or with a / of the whole path."
    )
    start_at: StartAt = Field(
        StartAt.BEGINNING,
        description="Where to begin with files that are there at the very first start.",
    )
    max_line_bytes: Size = Field(
        1 << 20, ge=1, description="Longer lines are split into events of this size, and counted."
    )
    scan_interval: Duration = Field(
        1.0, gt=0, description="How often to look for new, rotated and changed files."
    )
    rotate_wait: Duration = Field(
        10.0, description="How long a renamed or deleted file is still read after its last line."
    )
    partial_timeout: Duration | None = Field(
        None, description="Publish a last line without newline after this time; default: never."
    )
    ignore_older: Duration | None = Field(
        None, description="Ignore files that were last changed longer ago, until they change."
    )
    close_inactive: Duration = Field(
        300.0, description="Close files without new lines for this time; they are still watched."
    )
    forget_after: Duration = Field(
        2 * 86_400.0, description="Forget files that do not exist for this time."
    )
    read_buffer: Size = Field(
        1 << 20, ge=64, le=1 << 28, description="How much is read of a file at once."
    )
    offsets: bool = Field(
        default=False, description="Add a column file_offset: the byte at which a line begins."
    )

    @field_validator("paths", "exclude", mode="before")
    @classmethod
    def _wrap_single(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("paths")
    @classmethod
    def _make_absolute(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        if not all(paths):
            raise ValueError("an empty path matches nothing; write a glob such as /var/log/*.log")
        return tuple(map(os.path.abspath, paths))


class PositionsFile:
    """The saved positions, read once and written often. Used by one thread."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self._path = path
        self._disk = disk or Disk()
        self.exists = False
        """Whether the file exists and is readable."""
        self.was_damaged = False
        """Whether the file was unreadable: then no followed file counts as new."""
        self.is_complete = False
        """Whether the file has an entry for every file that was read."""

    def load(self) -> list[SavedFile]:
        """Return the saved positions. A damaged file is kept under another name.

        Raises ``DirectoryUnusable`` if the file cannot be read at all.
        """
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DirectoryUnusable(f"{self._path}: {error.strerror or error}") from error
        try:
            saved = json.loads(content)
            if saved["version"] != VERSION:
                raise ValueError(f"version {saved['version']} is not {VERSION}")  # noqa: TRY301
            files = [SavedFile.from_json(each) for each in saved["files"]]
            is_complete = bool(saved["complete"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            self.was_damaged = True
            aside = self._path.with_name(self._path.name + ".bad")
            try:
                self._disk.rename(self._path, aside)
            except OSError as failed:
                raise DirectoryUnusable(f"{self._path}: {failed.strerror or failed}") from failed
            log.error(  # noqa: TRY400 - the content is wrong, not the code
                "files.positions_damaged", path=self._path, error=error, kept_as=aside.name
            )
            return []
        self.exists = True
        self.is_complete = is_complete
        return files

    def save(self, files: Iterable[SavedFile], *, complete: bool) -> None:
        """Replace the saved positions. Raises ``OSError``."""
        self._disk.create_directory(self._path.parent)
        content: dict[str, Any] = {"version": VERSION, "complete": complete}
        content["files"] = [each.to_json() for each in files]
        self._disk.write_whole(self._path, json.dumps(content, separators=(",", ":")).encode())
        self.exists = True


class FileScanner:
    """Finds the files that match the globs. Warns once about a file that it cannot use."""

    def __init__(self, settings: FilesSettings, data: Path | None = None) -> None:
        """``data`` is the node's own directory, of which no file is followed."""
        self._settings = settings
        self._data = None if data is None else os.path.realpath(data)
        self.databases: set[FileKey] = set()
        """The files of SQLite databases that this process has open, as of the last scan."""
        self._in_data: dict[str, bool] = {}
        """By directory, in one scan: whether it is in the data directory."""
        self._warned: set[str] = set()

    def scan(self) -> dict[FileKey, tuple[str, os.stat_result]]:
        """Return path and status of all matching files. Of several names the first one counts."""
        found: dict[FileKey, tuple[str, os.stat_result]] = {}
        self._in_data.clear()
        self.databases = {FileKey(*each) for each in find_database_inodes()}
        for path in self._match_paths():
            try:
                status = os.stat(path)  # noqa: PTH116 - ten thousand times a second
            except (FileNotFoundError, NotADirectoryError):
                continue  # deleted since
            except OSError as error:
                if self.is_first_warning(path):
                    log.warning("files.stat_failed", path=path, error=error)
                continue
            if stat.S_ISREG(status.st_mode) and not self._is_ignored(path, status):
                found.setdefault(FileKey.of(status), (path, status))
        return found

    def _is_ignored(self, path: str, status: os.stat_result) -> bool:
        """Whether the node itself uses the file: opening and closing it would do harm."""
        hint = ""
        if FileKey.of(status) in self.databases:
            hint = "a SQLite database that this process uses: reading it would drop its locks"
        elif self._is_in_data(path):
            hint = "the data directory of this node"
        if hint and self.is_first_warning(path):
            log.warning("files.own_file_ignored", path=path, hint=hint)
        return bool(hint)

    def _is_in_data(self, path: str) -> bool:
        if self._data is None:
            return False
        directory = os.path.dirname(path)  # noqa: PTH120 - ten thousand times a second
        known = self._in_data.get(directory)
        if known is None:
            real = os.path.realpath(directory)
            known = real == self._data or real.startswith(self._data + os.sep)
            self._in_data[directory] = known
        return known

    def _match_paths(self) -> Iterator[str]:
        for pattern in self._settings.paths:
            for path in sorted(glob.iglob(pattern, recursive=True)):  # noqa: PTH207 - names
                if path.endswith(COMPRESSED):
                    hint = "compressed files are not read"
                    if self.is_first_warning(path):
                        log.warning("files.compressed_ignored", path=path, hint=hint)
                elif not self._is_excluded(path):
                    yield path

    def _is_excluded(self, path: str) -> bool:
        name = os.path.basename(path)  # noqa: PTH119 - ten thousand times a second
        return any(
            fnmatch.fnmatchcase(path if "/" in pattern else name, pattern)
            for pattern in self._settings.exclude
        )

    def is_first_warning(self, path: str) -> bool:
        """Whether no problem of the file was logged since :meth:`clear_warning`; counts as one."""
        if len(self._warned) > MAX_WARNED:
            self._warned.clear()
        if path in self._warned:
            return False
        self._warned.add(path)
        return True

    def clear_warning(self, path: str) -> None:
        """Log the next problem of this file again, because the file can be used now."""
        self._warned.discard(path)


class FileTracker:
    """All readers, and the saved state of files that are not followed now.

    The thread of the input owns it; only :meth:`mark_moved` may be called from any thread.
    """

    def __init__(
        self,
        settings: FilesSettings,
        scanner: FileScanner,
        queue: BufferedQueue,
        positions: PositionsFile,
    ) -> None:
        self.readers: dict[FileKey, FileReader] = {}
        self._settings = settings
        self._scanner = scanner
        self._queue = queue
        self._positions = positions
        self._saved: dict[FileKey, SavedFile] = {each.key: each for each in positions.load()}
        self._is_first_scan = True
        self._unsaved: set[FileReader] = set()
        """Readers with a new id; they may publish once the id is saved."""
        self._moved: set[FileReader] = set()
        """Readers whose acked position has moved since it was saved; guarded by the lock."""
        self._moved_lock = threading.Lock()
        self._retired: list[FileReader] = []
        """Readers of files that are no longer followed and still wait for acks."""
        self._save_failed = False

    # ── scanning ─────────────────────────────────────────────────────────────────────────────────

    def scan(self) -> None:
        """Find new files, renamed files, and files without a name."""
        found = self._scanner.scan()
        if self._is_first_scan:
            self._update_devices({key: path for key, (path, _) in found.items()})
        for key, (path, status) in found.items():
            reader = self.readers.get(key) or self._follow(key, path, status)
            if reader is not None:
                reader.path = path
                reader.missing_since = None
                reader.update_version(status)
        for reader in [each for key, each in self.readers.items() if key not in found]:
            if reader.key in self._scanner.databases:
                self.drop(reader, forget=True)
            else:
                self._handle_missing(reader)
        if self._is_first_scan:
            # Files that were renamed between two starts: the rest of them has to be read.
            for saved in [each for key, each in self._saved.items() if key not in found]:
                renamed = _find_inode(saved.path, saved.key.inode)
                if renamed is not None:
                    self._resume(saved, renamed).missing_since = time.monotonic()
        self._is_first_scan = False

    def _update_devices(self, found: dict[FileKey, str]) -> None:
        """Identify files by path and inode: a boot may change the numbers of devices."""
        by_path = {
            (saved.path, key.inode): key for key, saved in self._saved.items() if key not in found
        }
        for key, path in found.items():
            old = by_path.get((path, key.inode))
            if key not in self._saved and old is not None:
                saved = self._saved.pop(old)
                saved.key = key
                self._saved[key] = saved

    def _follow(self, key: FileKey, path: str, status: os.stat_result) -> FileReader | None:
        saved = self._saved.get(key)
        if saved is not None:
            return self._resume(saved, path)
        max_age = self._settings.ignore_older
        if max_age is not None and time.time() - status.st_mtime > max_age:
            return None
        source = path.encode(errors="surrogateescape").decode(errors="replace")
        reader = FileReader(key, path, source)
        reader.ask_queue = self._is_first_scan and not self._positions.is_complete
        known_before = self._positions.exists or self._positions.was_damaged
        is_first_start = self._is_first_scan and not known_before
        if is_first_start and self._settings.start_at is StartAt.END:
            reader.position = status.st_size
        self.readers[key] = reader
        return reader

    def _resume(self, saved: SavedFile, path: str) -> FileReader:
        reader = FileReader(saved.key, path, saved.source)
        reader.position = self._find_position(saved)
        reader.id, reader.head, reader.expected = saved.id, saved.head, saved
        reader.progress = AckProgress(saved.offset, saved.before)
        self.readers[reader.key] = reader
        return reader

    def _find_position(self, saved: SavedFile) -> int:
        """Return where to continue: as the queue says, or as saved if the queue does not know."""
        known = self._queue.get_known_sequence(saved.id)
        if known is None:
            return saved.offset
        is_durable = self._queue.settings.kind is Kind.DISK
        return known if is_durable else max(saved.offset, known)

    def _handle_missing(self, reader: FileReader) -> None:
        """Handle a file that was renamed or deleted. An open file is read to its end."""
        if reader.missing_since is None:
            reader.missing_since = time.monotonic()
        if reader.fd is None:
            # A file without a complete line has no fingerprint to identify it again.
            is_unknown = reader.id is None and reader.read_version is not None
            path = None if is_unknown else _find_inode(reader.path, reader.key.inode)
            if path is None:
                self.drop(reader)
            else:
                reader.path = path

    def drop(self, reader: FileReader, *, forget: bool = False) -> None:
        """Stop following a file; ``forget`` its saved state if the file no longer exists."""
        reader.close()
        self.readers.pop(reader.key, None)
        if forget:
            self._saved.pop(reader.key, None)
        elif not reader.progress.is_settled:
            self._retired.append(reader)

    # ── identity ─────────────────────────────────────────────────────────────────────────────────

    def identify(self, reader: FileReader, head: Fingerprint) -> None:
        """Give a reader its id, made of its first line. It may publish once the id is saved."""
        key, queue = reader.key, self._queue
        base = f"files/{self._settings.label}/{key.device}/{key.inode}/{head.length}-{head.digest}"
        known: str | None = None
        if reader.ask_queue and queue.has_numbered_producers:
            ids = (f"{base}/{generation}" for generation in reversed(range(MAX_GENERATIONS)))
            known = next((each for each in ids if queue.get_known_sequence(each) is not None), None)
        reader.ask_queue = False
        reader.head = head
        generation = 0
        while known is None and queue.get_known_sequence(f"{base}/{generation}") is not None:
            generation += 1
        reader.id = known or f"{base}/{generation}"
        if known is not None:
            reader.position = self._find_position(self._describe(reader))
            log.info("files.found_in_queue", path=reader.path, position=reader.position)
        reader.seek(reader.position)
        reader.progress = AckProgress(reader.position, Fingerprint.of(reader.before))
        self._saved[key] = self._describe(reader)
        self._unsaved.add(reader)

    def can_publish(self, reader: FileReader) -> bool:
        """Whether the reader has an id and the id is saved."""
        return reader.id is not None and reader not in self._unsaved

    def _describe(self, reader: FileReader) -> SavedFile:
        assert reader.id is not None
        return SavedFile(
            reader.key,
            reader.id,
            reader.path,
            reader.source,
            reader.head,
            reader.progress.offset,
            reader.progress.before,
            time.time(),
        )

    # ── saving ───────────────────────────────────────────────────────────────────────────────────

    def mark_moved(self, reader: FileReader) -> None:
        """Note that the acked position of a reader has moved. Safe from any thread."""
        with self._moved_lock:
            self._moved.add(reader)

    @property
    def must_save(self) -> bool:
        """Whether a file cannot publish before the positions are saved."""
        return bool(self._unsaved) or not self._positions.exists

    @property
    def has_changes(self) -> bool:
        """Whether there is anything new to save."""
        return bool(self._moved or self._unsaved)

    def save(self) -> bool:
        """Write the positions file; false if that fails, and then the next save tries again."""
        with self._moved_lock:
            moved, self._moved = self._moved, set()
        for reader in (*self._retired, *self.readers.values()):
            # The saved state stays until the file was compared with it.
            if reader.id is not None and reader.expected is None:
                self._saved[reader.key] = self._describe(reader)
        self._retired = [each for each in self._retired if not each.progress.is_settled]
        oldest = time.time() - self._settings.forget_after
        for key, saved in list(self._saved.items()):
            if saved.seen < oldest and key not in self.readers:
                del self._saved[key]
        # While a file still has to be looked up in the queue, the next start has to do it, too.
        asks_queue = self._is_first_scan or any(each.ask_queue for each in self.readers.values())
        try:
            self._positions.save(self._saved.values(), complete=not asks_queue)
        except OSError as error:
            with self._moved_lock:
                self._moved |= moved
            if not self._save_failed:
                log.warning("files.save_failed", input=self._settings.label, error=error)
            self._save_failed = True
            return False
        self._save_failed = False
        self._unsaved.clear()
        return True


def _find_inode(old_path: str, inode: int) -> str | None:
    """Return the new path of a file that was renamed within its directory."""
    directory = os.path.dirname(old_path)  # noqa: PTH120 - paths are text here
    try:
        with os.scandir(directory) as entries:
            return next((each.path for each in entries if each.inode() == inode), None)
    except OSError:
        return None  # the directory is gone; the next scan looks again
