"""Steps: the files of commits that can no longer be taken back.

Each is one file all its life, named by a number that only grows: ``.commit`` while it is to be
carried out, ``.failed`` once what is left of it waits for a person or another configuration.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from turnlane.errors import StorageFailed
from turnlane.ledger import Outcome
from turnlane.storage.disk_io import Disk

# ── commit ──
# A commit as it is asked for, and the plan of it that its file has.


class Range(NamedTuple):
    """Offsets ``first`` to ``end - 1`` of a queue, to be settled."""

    queue: str
    first: int
    end: int
    outcome: Outcome = Outcome.DELIVERED


@dataclass(frozen=True, slots=True)
class Commit:
    """Publish ``stages``, each to the queue it was staged for, and settle ``ranges``.

    It is a repeat, and nothing happens, if all its ranges are settled, or if ``writer`` has
    committed this ``epoch`` or a later one. If only some are settled it goes on, unless it is to be
    ``exact``: then it is refused, for what is staged was made of all of them.
    """

    stages: Sequence[str] = ()
    ranges: Sequence[Range] = ()
    writer: str | None = None
    epoch: int = 0
    exact: bool = False


class Part(NamedTuple):
    """A stage as the file has it: into which queue, and under which numbers."""

    stage: str
    queue: str
    sequence: int
    there: int | None = None
    """How many of its events the queue has, if others may have used its numbers since."""
    source: str | None = None
    """The queue that has its events, if the stage has only their places."""
    source_end: int = 0
    """Places from here on are those of other events."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A commit as its file has it: all that carrying it out needs."""

    parts: Sequence[Part]
    ranges: Sequence[Range]
    writer: str | None = None
    epoch: int = 0
    ids: Mapping[str, str] = field(default_factory=dict)
    """By name, which queues are meant: one that was dropped and made anew is another one."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to carry out."""
        return not self.parts and not self.ranges and self.writer is None

    def to_json(self) -> bytes:
        """The file's contents."""
        values = {
            "parts": self.parts,
            "ranges": self.ranges,
            "writer": self.writer,
            "epoch": self.epoch,
            "ids": self.ids,
        }
        return json.dumps(values).encode()

    @property
    def stages(self) -> list[str]:
        """The stages of its parts."""
        return [part.stage for part in self.parts]

    @property
    def queues(self) -> set[str]:
        """All queues that it has to do with."""
        sources = {part.source for part in self.parts if part.source is not None}
        return sources | {part.queue for part in self.parts} | {each.queue for each in self.ranges}

    @property
    def keys(self) -> set[str]:
        """What it must have for itself."""
        return keys_of(self.parts, self.ranges, self.writer)

    @classmethod
    def of_json(cls, data: bytes) -> Plan:
        """The plan of a file. ``ValueError``, ``KeyError`` or ``TypeError`` if it has none."""
        values = json.loads(data)
        return cls(
            [Part(*part) for part in values["parts"]],
            [Range(*each[:3], *map(Outcome, each[3:])) for each in values["ranges"]],
            values["writer"],
            values["epoch"],
            values["ids"],
        )


class Staged(Protocol):
    """What is to be published into a queue, perhaps from another one."""

    @property
    def queue(self) -> str: ...
    @property
    def source(self) -> str | None: ...


def keys_of(stages: Iterable[Staged], ranges: Sequence[Range], writer: str | None) -> set[str]:
    """What a commit must have for itself; emptying a queue and filling it are apart."""
    keys = {out_of(each.queue) for each in ranges}
    for stage in stages:
        keys.add(into(stage.queue))
        if stage.source is not None:
            keys.add(out_of(stage.source))
    return keys | ({f"writer {writer}"} if writer is not None else set())


def into(queue: str) -> str:
    """The key of whoever fills a queue."""
    return f"into {queue}"


def out_of(queue: str) -> str:
    """The key of whoever empties a queue."""
    return f"from {queue}"


log = logging.getLogger(__name__)

COMMIT: Final = ".commit"
FAILED: Final = ".failed"
NEW: Final = ".new"
"""What a file is called that is being written: it was never a step."""


class Steps:
    """The directory of these files."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        self._directory = directory
        self._disk = disk
        self._lock = threading.Lock()
        self._last = max(map(_number, self.left()), default=0)

    def take(self, plan: Plan) -> Path:
        """Take the step. Raises ``StorageFailed``: then it is not taken."""
        with self._lock:
            self._last += 1
            path = self._directory / f"{self._last:020d}{COMMIT}"
        try:
            self._disk.write_whole(path, plan.to_json())
        except OSError as error:
            if self._is_removed(path):
                raise StorageFailed(f"cannot commit: {error.strerror or error}") from error
            # The next start would find it, so it is taken: all was checked, and it was asked for.
            log.warning("a commit that was not synced cannot be removed: it goes on: %s", error)
        return path

    def _is_removed(self, path: Path) -> bool:
        """Whether the next start will not find what may be there, whatever the error was."""
        with contextlib.suppress(OSError):  # the next start sweeps it up
            self._disk.unlink(path.with_name(path.name + NEW))
        if not path.exists():
            return True
        try:
            self._disk.unlink(path)
        except OSError:
            return False
        return True

    def rewrite(self, path: Path, plan: Plan) -> None:
        """Replace a plan by what is left of it. Raises ``OSError``."""
        self._disk.write_whole(path, plan.to_json())

    def set_aside(self, path: Path) -> Path:
        """Carry it out no more. Raises ``OSError``."""
        return self._renamed(path, FAILED)

    def take_up(self, path: Path) -> Path:
        """Carry it out after all. Raises ``OSError``."""
        return self._renamed(path, COMMIT)

    def _renamed(self, path: Path, suffix: str) -> Path:
        new = path.with_suffix(suffix)
        self._disk.rename(path, new)
        try:
            self._disk.sync_directory(self._directory)
        except OSError as error:
            # A power cut may undo it. The plan says all that the next start has to know then.
            log.warning("%s is not synced: %s", new, error)
        return new

    def remove(self, path: Path) -> None:
        """It is through."""
        try:
            self._disk.unlink(path)
        except OSError as error:
            # The next start carries it out again, which changes nothing.
            log.warning("a commit that is through cannot be removed: %s", error)

    def left(self) -> list[Path]:
        """All, in the order in which they were taken."""
        paths = [self._directory / name for name in self._disk.listing(self._directory)]
        return sorted((path for path in paths if path.suffix in (COMMIT, FAILED)), key=_number)

    def read(self, path: Path) -> Plan | None:
        """The plan of a file, ``None`` if it is none. Raises ``StorageFailed``.

        What cannot be read at all may be a commit: without it the numbers of those that follow
        would be wrong.
        """
        try:
            return Plan.of_json(path.read_bytes())
        except OSError as error:
            raise StorageFailed(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            log.error("%s is no commit that could be carried out: %s", path, error)  # noqa: TRY400
            return None

    def sweep(self) -> None:
        """Delete what was being written when an earlier process ended."""
        for name in self._disk.listing(self._directory):
            if name.endswith(NEW):
                try:
                    self._disk.unlink(self._directory / name)
                except OSError as error:
                    log.warning("%s cannot be removed: %s", name, error)


def _number(path: Path) -> int:
    return int(path.stem) if path.stem.isdecimal() else 0


# ── writers ──
# Writers: how far each has committed, so that what it repeats is not committed again.

SUFFIX: Final = ".writer"
MAX_WRITERS: Final = 10_000
"""So many are remembered; the longest silent are forgotten first."""


class Writers:
    """The last epoch of each writer, in a small file. Whoever notes one has the writer's key."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        self._directory = directory
        self._disk = disk
        self._count = len(self._files())

    def epoch_of(self, writer: str) -> int | None:
        """The last epoch that a writer has committed."""
        try:
            values = json.loads(self._path(writer).read_bytes())
        except FileNotFoundError:
            return None
        epoch: int = values["epoch"]
        return epoch

    def note(self, writer: str, epoch: int) -> None:
        """A writer has committed an epoch, if not a later one. Raises ``OSError``."""
        known = self.epoch_of(writer)
        if known is not None and known >= epoch:
            return  # a commit of an earlier process that could not be removed, say
        values = json.dumps({"writer": writer, "epoch": epoch})
        self._disk.write_whole(self._path(writer), values.encode())
        self._count += known is None
        if self._count > MAX_WRITERS:
            self._forget()

    def _forget(self) -> None:
        """Forget a tenth of them, so that not every new one has to look for the oldest."""
        files = sorted(self._files(), key=lambda path: path.stat().st_mtime_ns)
        for path in files[: max(1, MAX_WRITERS // 10)]:
            self._disk.unlink(path)
        self._count = len(self._files())

    def _files(self) -> list[Path]:
        names = self._disk.listing(self._directory)
        return [self._directory / name for name in names if name.endswith(SUFFIX)]

    def _path(self, writer: str) -> Path:
        name = hashlib.sha256(writer.encode()).hexdigest()[:32]
        return self._directory / (name + SUFFIX)
