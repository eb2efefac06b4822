"""The positions file: which files there were, and how far they had come.

It is written whole, in one durable step, before a file's first line is published, and then every
second or so. It only ever says what the queue has acked, so it may be behind, never ahead.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any, Self

from turnlane.errors import DirectoryUnusable
from turnlane.inputs.files.identity import NOTHING, FileKey, Mark
from turnlane.queues.log.files import Disk

log = logging.getLogger(__name__)

VERSION = 1


@dataclasses.dataclass(slots=True)
class Entry:
    """What is remembered of one file."""

    key: FileKey
    id: str
    """The producer that publishes its lines."""
    path: str
    """Where it was last."""
    source: str
    """What it was called when it was first seen."""
    head: Mark
    offset: int
    """Every line below this byte is acked."""
    before: Mark
    """What stands just before that."""
    seen: float
    """When it was last there, in seconds since the epoch."""

    def written(self) -> dict[str, Any]:
        """As JSON can keep it."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def read(cls, written: dict[str, Any]) -> Self:
        """The entry that was written. Raises ``TypeError``, ``ValueError`` or ``KeyError``."""
        fields = dict(written)
        fields["key"] = FileKey(*map(int, fields["key"]))
        for name in ("head", "before"):
            length, digest = fields[name]
            fields[name] = Mark(int(length), str(digest))
        entry = cls(**fields)
        if not 0 <= entry.before.length <= int(entry.offset) < 1 << 62 or entry.head == NOTHING:
            raise ValueError(f"{entry.path}: offset {entry.offset} makes no sense")
        return entry


class PositionsFile:
    """The file, read once and written often. For one thread."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self._path = path
        self._disk = disk or Disk()
        self.found = False
        """Whether there was a file, and it could be read."""
        self.spoilt = False
        """Whether there was one that could not: then nothing counts as new."""
        self.complete = False
        """Whether every file that was read has an entry."""

    def load(self) -> list[Entry]:
        """What was saved. A file that makes no sense is kept under another name.

        Raises ``DirectoryUnusable`` if it cannot be read at all.
        """
        try:
            return self._load()
        except OSError as error:
            raise DirectoryUnusable(f"{self._path}: {error.strerror or error}") from error

    def _load(self) -> list[Entry]:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        try:
            saved = json.loads(content)
            if saved["version"] != VERSION:
                raise ValueError(f"version {saved['version']} is not {VERSION}")  # noqa: TRY301
            entries = [Entry.read(each) for each in saved["files"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self._put_aside(error)
            return []
        self.found = True
        self.complete = bool(saved["complete"])
        return entries

    def _put_aside(self, error: Exception) -> None:
        self.spoilt = True
        aside = self._path.with_name(self._path.name + ".bad")
        self._disk.rename(self._path, aside)
        log.error("%s makes no sense (%s); kept as %s", self._path, error, aside.name)

    def save(self, entries: list[Entry], *, complete: bool) -> None:
        """Replace what is saved. Raises ``OSError``."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        saved: dict[str, Any] = {"version": VERSION, "complete": complete}
        saved["files"] = [entry.written() for entry in entries]
        self._disk.write_whole(self._path, json.dumps(saved, separators=(",", ":")).encode())
        self.found = True
