"""The checkpoints of an action's queries: one is in use, earlier ones are removed.

A checkpoint belongs to one query, named by a fingerprint: after a change of the SQL, the action has
another query and another checkpoint. If the old query comes back later, its old checkpoint lacks
what the other query has committed in between. So it starts with an empty one, and the old one only
takes room until it is removed.

An exception are checkpoints that know the batches of files (``stays``): without them, Spark would
skip batches as repeats. They are never removed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from pyspark.sql.streaming.listener import StreamingQueryProgress

from turnlane.logs import get_logger
from turnlane.storage.disk_io import Disk

log = get_logger(__name__)

NOTE_FILE: Final = "turnlane.json"
"""The file of turnlane in a checkpoint, beside Spark's own files."""
_REMOVED_SUFFIX: Final = ".gone"
"""The suffix of a checkpoint that is being removed; a kill may leave a part of it."""


def to_spark_uri(checkpoint: Path) -> str:
    """Return the path as a URI: a path without a scheme may be on Hadoop's file system.

    Not by ``as_uri``, which escapes characters: Hadoop would not unescape them.
    """
    return f"file://{checkpoint.absolute()}"


@dataclass(frozen=True, slots=True)
class CheckpointNote:
    """The note that is written into a checkpoint when its query starts for the first time."""

    number: int = 0
    """Higher than the numbers of all checkpoints that existed before; 0 without a note."""
    stays: bool = True
    """Whether it must not be removed, because files know their batches by it."""

    @classmethod
    def read(cls, checkpoint: Path) -> CheckpointNote:
        """Read the note of a checkpoint. One without a note may belong to others, so it stays."""
        try:
            return cls(**json.loads((checkpoint / NOTE_FILE).read_text()))
        except (OSError, ValueError, TypeError):
            return cls()

    def write(self, checkpoint: Path) -> None:
        """Write the note atomically."""
        for each in (checkpoint.parent, checkpoint):  # Their state may contain parts of events.
            Disk().create_directory(each)
        draft = checkpoint / f".{NOTE_FILE}"
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(checkpoint / NOTE_FILE)


class Checkpoints:
    """The checkpoints of one action, below a directory. Owned by the lane of the action.

    The checkpoints of earlier queries are removed after the current query has committed a batch.
    Before that, the current query may never run. If its configuration is taken back then, the
    earlier query has lost nothing: all events that it has not seen are still in the queue.
    """

    def __init__(self, directory: Path, action: str) -> None:
        self._directory = directory
        self._action = action
        self._is_clean = False
        self._used: Path | None = None
        """The checkpoint of the lane, if it has one."""

    def prepare(self, fingerprint: str, *, stays: bool) -> Path:
        """Return the checkpoint for the lane's query, ready to be used.

        It is empty if another query has committed a batch since this query ran, unless it stays.
        """
        path = self._directory / f"{self._action}-{fingerprint}"
        others = [each for each in self._list() if each != path]
        number = CheckpointNote.read(path).number
        is_outdated = any(
            CheckpointNote.read(each).number > number and _has_commits(each) for each in others
        )
        if is_outdated and not stays:
            _remove(path)
        if not (path / NOTE_FILE).exists():
            last = max((CheckpointNote.read(each).number for each in others), default=0)
            CheckpointNote(last + 1, stays).write(path)
        self._used = path
        return path

    def on_progress(self, progress: StreamingQueryProgress) -> None:
        """Remove the other checkpoints if the query has committed a batch."""
        if self._is_clean or not progress.numInputRows:
            return
        if self._used is None or _has_commits(self._used):
            self._is_clean = True
            try:
                self.remove_unused()
            except OSError as error:  # They only take room: the lane continues.
                log.warning("checkpoint.remove_failed", error=error)

    def remove_unused(self) -> None:
        """Remove all checkpoints except the one in use and checkpoints that stay."""
        for each in self._list():
            if each != self._used and not CheckpointNote.read(each).stays:
                log.info("checkpoint.removed", action=self._action, checkpoint=each.name)
                _remove(each)

    def _list(self) -> Iterator[Path]:
        # The names of other actions may begin with the name of this one.
        own_name = re.compile(re.escape(self._action) + "-[0-9a-f]{12}")
        for each in sorted(self._directory.iterdir()) if self._directory.is_dir() else ():
            if own_name.fullmatch(each.name):
                yield each
            elif each.suffix == _REMOVED_SUFFIX and own_name.fullmatch(each.stem):
                shutil.rmtree(each, ignore_errors=True)  # A kill has interrupted the removal.


def _has_commits(checkpoint: Path) -> bool:
    """Whether a batch was committed with it. Files that begin with a dot are no entries."""
    commits = checkpoint / "commits"
    return commits.is_dir() and any(not each.name.startswith(".") for each in commits.iterdir())


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint under another name: a kill never leaves a part under its own name."""
    renamed = checkpoint.with_name(checkpoint.name + _REMOVED_SUFFIX)
    shutil.rmtree(renamed, ignore_errors=True)
    with suppress(FileNotFoundError):
        checkpoint.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)
