"""Which files there are: the globs, less what is excluded."""

from __future__ import annotations

import fnmatch
import glob
import logging
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from turnlane.inputs.files.identity import FileKey

log = logging.getLogger(__name__)

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".Z")
"""What rotation leaves behind when it compresses: its lines were read before."""

MOST_COMPLAINTS = 10_000
"""So many files with trouble are remembered; with more, some things are said again."""


class Sight(NamedTuple):
    """A file as a scan has seen it."""

    path: str
    status: os.stat_result

    @property
    def key(self) -> FileKey:
        """Which file it is."""
        return FileKey.of(self.status)


class Watch:
    """Looks for files. What cannot be used is said once in the log, not at every scan."""

    def __init__(self, paths: tuple[str, ...], exclude: tuple[str, ...]) -> None:
        self._paths = paths
        self._exclude = exclude
        self._complained: set[str] = set()

    def scan(self) -> dict[FileKey, Sight]:
        """All files that match, each once however many names it has: the first name counts."""
        found: dict[FileKey, Sight] = {}
        for path in self._matches():
            try:
                status = os.stat(path)  # noqa: PTH116 - ten thousand times a second
            except (FileNotFoundError, NotADirectoryError):
                continue  # gone since
            except OSError as error:
                self.complain(path, f"cannot be looked at: {error.strerror}")
                continue
            if stat.S_ISREG(status.st_mode):
                sight = Sight(path, status)
                found.setdefault(sight.key, sight)
        return found

    def _matches(self) -> Iterator[str]:
        for pattern in self._paths:
            for path in sorted(glob.iglob(pattern, recursive=True)):  # noqa: PTH207 - names
                if path.endswith(COMPRESSED):
                    self.complain(path, "is compressed and is not read")
                elif not self._excluded(path):
                    yield path

    def _excluded(self, path: str) -> bool:
        name = os.path.basename(path)  # noqa: PTH119 - ten thousand times a second
        return any(
            fnmatch.fnmatchcase(path if "/" in pattern else name, pattern)
            for pattern in self._exclude
        )

    def complain(self, path: str, what: str) -> None:
        """Say what is wrong with a file, once."""
        if len(self._complained) > MOST_COMPLAINTS:
            self._complained.clear()
        if path not in self._complained:
            self._complained.add(path)
            log.warning("%s %s", path, what)

    def satisfied(self, path: str) -> None:
        """The file can be used: the next trouble with it is news."""
        self._complained.discard(path)


def find_inode(directory: str, inode: int) -> str | None:
    """Where in a directory a file has gone that had another name before."""
    try:
        with os.scandir(directory) as entries:
            return next((each.path for each in entries if each.inode() == inode), None)
    except OSError:
        return None  # the directory is gone; it is looked for again when it is back
