"""Commit records: the files that make a commit durable, and the last epoch of each writer.

A commit becomes final when its record is on the disk. The record is one small JSON file that is
written as a whole. It keeps one number for all its life; numbers only grow. The file is called
``.commit`` while the commit has to be applied, and ``.failed`` once the rest of the commit waits
for a person or for another configuration.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import google_crc32c

from turnlane.errors import StorageFailed
from turnlane.ledger import Outcome
from turnlane.logs import get_logger
from turnlane.storage.disk_io import Disk

log = get_logger(__name__)

COMMIT_SUFFIX: Final = ".commit"
FAILED_SUFFIX: Final = ".failed"
NEW_SUFFIX: Final = ".new"
"""The suffix of a file that is being written. Such a file is not a record yet."""
WRITER_SUFFIX: Final = ".writer"

MAX_WRITERS: Final = 10_000
"""The node remembers this many writers and forgets the longest inactive ones first."""


class SettleRange(NamedTuple):
    """The offsets ``first`` to ``end - 1`` of a queue, which a commit settles."""

    queue: str
    first: int
    end: int
    outcome: Outcome = Outcome.DELIVERED


@dataclass(frozen=True, slots=True)
class Commit:
    """A request to publish ``stages``, each to its queue, and to settle ``ranges``.

    The request is a repeat, and nothing happens, if all its ranges are settled or if ``writer`` has
    committed this ``epoch`` or a later one. If only some ranges are settled, the commit continues.
    An ``exact`` commit is refused then, because its stages were made from all of the ranges.
    """

    stages: Sequence[str] = ()
    ranges: Sequence[SettleRange] = ()
    writer: str | None = None
    epoch: int = 0
    exact: bool = False


class CommitPart(NamedTuple):
    """One stage of a commit: its queue, and the sequence number of its first event."""

    stage: str
    queue: str
    sequence: int
    published: int | None = None
    """How many of its events the queue already has. Set if other commits may have used the
    sequence numbers of this part since."""
    source: str | None = None
    """The queue that holds the events, if the stage holds only references to them."""
    source_end: int = 0
    """References to this offset or a higher one mean other events and are ignored."""


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """The content of a commit record: everything that is needed to apply the commit."""

    parts: Sequence[CommitPart]
    ranges: Sequence[SettleRange]
    writer: str | None = None
    epoch: int = 0
    ids: Mapping[str, str] = field(default_factory=dict)
    """The ids of the queues, by name. A queue that was dropped and created again has a new id."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to apply."""
        return not self.parts and not self.ranges and self.writer is None

    @property
    def stages(self) -> list[str]:
        """The stages of its parts."""
        return [part.stage for part in self.parts]

    @property
    def queues(self) -> set[str]:
        """The names of all queues that it reads, publishes to or settles."""
        sources = {part.source for part in self.parts if part.source is not None}
        return sources | {part.queue for part in self.parts} | {each.queue for each in self.ranges}

    @property
    def locks(self) -> set[str]:
        """The names of the locks that the commit holds while it is applied."""
        return get_lock_names(self.parts, self.ranges, self.writer)

    def to_json(self) -> bytes:
        """Return the content of the record's file."""
        return json.dumps({each.name: getattr(self, each.name) for each in fields(self)}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> CommitPlan:
        """Parse a record.

        Raises ``ValueError``, ``KeyError``, ``TypeError`` or ``RecursionError`` if it is invalid.
        """
        values = json.loads(data)
        return cls(
            [CommitPart(*part) for part in values["parts"]],
            [SettleRange(*each[:3], *map(Outcome, each[3:])) for each in values["ranges"]],
            *(values[name] for name in ("writer", "epoch", "ids")),
        )


# ── names of locks ───────────────────────────────────────────────────────────────────────────────


class StageTarget(Protocol):
    """Events for a queue, possibly references to events of a source queue."""

    @property
    def queue(self) -> str: ...
    @property
    def source(self) -> str | None: ...


def get_lock_names(
    stages: Iterable[StageTarget], ranges: Sequence[SettleRange], writer: str | None
) -> set[str]:
    """Return the names of the locks of a commit.

    Each queue has one lock for publishing and one for settling, so a commit that fills a queue and
    a commit that empties it can run at the same time.
    """
    names = {name_settle_lock(each.queue) for each in ranges}
    for stage in stages:
        names.add(name_publish_lock(stage.queue))
        if stage.source is not None:
            names.add(name_settle_lock(stage.source))
    return names | ({f"writer {writer}"} if writer is not None else set())


def name_publish_lock(queue: str) -> str:
    """Return the name of the lock for publishing to a queue."""
    return f"into {queue}"


def name_settle_lock(queue: str) -> str:
    """Return the name of the lock for settling events of a queue."""
    return f"from {queue}"


# ── files ────────────────────────────────────────────────────────────────────────────────────────


class CommitLog:
    """The directory of commit records. Safe to use from any thread."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        self._directory = directory
        self._disk = disk
        self._lock = threading.Lock()
        self._last = max(map(_parse_number, self.list_records()), default=0)

    def append(self, plan: CommitPlan) -> Path:
        """Write the record of a commit, which makes the commit final.

        Raises ``StorageFailed``: then there is no record, and the commit did not happen.
        """
        with self._lock:
            self._last += 1
            path = self._directory / f"{self._last:020d}{COMMIT_SUFFIX}"
        try:
            self._disk.write_whole(path, plan.to_json())
        except OSError as error:
            if self._try_remove(path):
                raise StorageFailed(f"cannot commit: {error.strerror or error}") from error
            # The next start would find the record, so the commit has to happen: it was requested,
            # and everything was checked before.
            log.warning(
                "commit.unsynced_record_kept",
                record=path.name,
                error=error,
                hint="the record cannot be removed, so the commit is applied",
            )
        return path

    def _try_remove(self, path: Path) -> bool:
        """Remove a record that was not written properly; false if the next start may find it."""
        with contextlib.suppress(OSError):  # the next start removes it
            self._disk.unlink(path.with_name(path.name + NEW_SUFFIX))
        if not path.exists():
            return True
        try:
            self._disk.unlink(path)
        except OSError:
            return False
        return True

    def rewrite(self, path: Path, plan: CommitPlan) -> None:
        """Replace the plan of a record. Raises ``OSError``."""
        self._disk.write_whole(path, plan.to_json())

    def mark_failed(self, path: Path) -> Path:
        """Rename a record to ``.failed``, so that only a start tries it again. ``OSError``."""
        return self._rename(path, FAILED_SUFFIX)

    def mark_active(self, path: Path) -> Path:
        """Rename a ``.failed`` record to ``.commit``, to apply it again. Raises ``OSError``."""
        return self._rename(path, COMMIT_SUFFIX)

    def _rename(self, path: Path, suffix: str) -> Path:
        new = path.with_suffix(suffix)
        self._disk.rename(path, new)
        try:
            self._disk.sync_directory(self._directory)
        except OSError as error:
            # A power failure may undo the rename. The plan itself tells the next start enough.
            log.warning("commit.rename_not_synced", record=new, error=error)
        return new

    def remove(self, path: Path) -> None:
        """Remove the record of a commit that was applied completely."""
        try:
            self._disk.unlink(path)
        except OSError as error:
            log.warning(
                "commit.record_not_removed",
                record=path.name,
                error=error,
                hint="the next start applies it again, which changes nothing",
            )

    def list_records(self) -> list[Path]:
        """Return all records in the order in which they were written."""
        paths = [self._directory / name for name in self._disk.listing(self._directory)]
        records = [path for path in paths if path.suffix in (COMMIT_SUFFIX, FAILED_SUFFIX)]
        return sorted(records, key=_parse_number)

    def read(self, path: Path) -> CommitPlan | None:
        """Return the plan of a record; ``None`` if the file has no valid plan.

        Raises ``StorageFailed`` if the file cannot be read. It may hold a commit, and without that
        commit the sequence numbers of the following commits would be wrong.
        """
        try:
            return CommitPlan.from_json(path.read_bytes())
        except OSError as error:
            raise StorageFailed(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.error(  # noqa: TRY400 - the traceback says nothing more
                "commit.record_invalid", record=path, error=error
            )
            return None

    def remove_unfinished_files(self) -> None:
        """Delete the files that an earlier process did not finish writing."""
        for name in self._disk.listing(self._directory):
            if name.endswith(NEW_SUFFIX):
                try:
                    self._disk.unlink(self._directory / name)
                except OSError as error:
                    log.warning("commit.unfinished_file_not_removed", file=name, error=error)


def _parse_number(path: Path) -> int:
    return int(path.stem) if path.stem.isdecimal() else 0


def _encode_epoch(writer: str, epoch: int) -> bytes:
    values: dict[str, object] = {"writer": writer, "epoch": epoch}
    checksum = google_crc32c.value(json.dumps(values).encode())
    return json.dumps({**values, "crc": f"{checksum:08x}"}).encode()


def _decode_epoch(data: bytes, writer: str) -> int:
    """Return the epoch. Raises ``ValueError`` and others if the file is damaged."""
    values = json.loads(data)
    epoch: int = values["epoch"]
    # Files of older versions have no checksum.
    expected = _encode_epoch(writer, epoch) if "crc" in values else None
    if type(epoch) is not int or values["writer"] != writer or expected not in (None, data):
        raise ValueError("the content is damaged")
    return epoch


class WriterEpochs:
    """The last epoch that each writer has committed, one small file for each writer.

    It lets a commit recognize a repeat. The caller of :meth:`record` holds the writer's lock.
    """

    def __init__(self, directory: Path, disk: Disk) -> None:
        self._directory = directory
        self._disk = disk
        self._count = len(self._list_files())

    def get_epoch(self, writer: str) -> int | None:
        """Return the last epoch that a writer has committed, ``None`` if there is none.

        Raises ``StorageFailed`` if the file is damaged. Without the epoch, a batch that the writer
        repeats would be committed twice, so the writer has to wait until a person decides.
        """
        path = self._get_path(writer)
        try:
            return _decode_epoch(path.read_bytes(), writer)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise StorageFailed(
                f"{path}: cannot read the last epoch of the writer {writer!r}, "
                f"{type(error).__name__}: {error}; restore the file, or delete it if the writer "
                "will not repeat a batch that is in the queue"
            ) from error

    def record(self, writer: str, epoch: int) -> None:
        """Store the epoch that a writer has committed, if it is the highest.

        Raises ``OSError``, and ``StorageFailed`` as :meth:`get_epoch`.
        """
        known = self.get_epoch(writer)
        if known is not None and known >= epoch:
            return  # for example a commit of an earlier process whose record was not removed
        self._disk.write_whole(self._get_path(writer), _encode_epoch(writer, epoch))
        self._count += known is None
        if self._count > MAX_WRITERS:
            # Forget the oldest tenth, so that not every new writer causes a search.
            files = sorted(self._list_files(), key=lambda path: path.stat().st_mtime_ns)
            for path in files[: max(1, MAX_WRITERS // 10)]:
                self._disk.unlink(path)
            self._count = len(self._list_files())

    def _list_files(self) -> list[Path]:
        names = self._disk.listing(self._directory)
        return [self._directory / name for name in names if name.endswith(WRITER_SUFFIX)]

    def _get_path(self, writer: str) -> Path:
        name = hashlib.sha256(writer.encode()).hexdigest()[:32]
        return self._directory / (name + WRITER_SUFFIX)
