"""Steps: the files of commits that can no longer be taken back.

Each is one file all its life, named by a number that only grows: ``.commit`` while it is to be
carried out, ``.failed`` once what is left of it waits for a person or another configuration.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import Final

from turnlane.errors import StorageFailed
from turnlane.node.commit import Plan
from turnlane.queues.log.files import Disk

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
