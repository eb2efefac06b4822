"""Writers: how far each has committed, so that what it repeats is not committed again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

from turnlane.queues.log.files import Disk

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
