"""The checkpoints of an action's queries: one is in use, those of earlier queries are removed.

What another query has committed meanwhile is missing from the state of an earlier one: should that
come back, it is to begin anew, and its state only takes room until then.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql.streaming.listener import StreamingQueryProgress

log = logging.getLogger(__name__)

NOTE: Final = "turnlane.json"
"""What turnlane knows of a checkpoint, beside what is Spark's in it."""
_GONE: Final = ".gone"
"""The end of the name of one that is being removed: what is left of it is of no use."""


def located(checkpoint: Path) -> str:
    """Where that is, as Spark takes it: a path alone may be one on Hadoop's own file system.

    Not by ``as_uri``: Hadoop reads nothing back that is escaped, and would look elsewhere.
    """
    return f"file://{checkpoint.absolute()}"


@dataclass(frozen=True, slots=True)
class Note:
    """What is written down of a checkpoint when its query starts for the first time."""

    number: int = 0
    """Larger than those of all that were there before it; 0 if nothing is written down."""
    stays: bool = True
    """Whether more than its query depends on it: files, which know their batches by it."""

    @classmethod
    def of(cls, checkpoint: Path) -> Note:
        """The one of a checkpoint; one that has none may be anybody's, and stays."""
        try:
            return cls(**json.loads((checkpoint / NOTE).read_text()))
        except (OSError, ValueError, TypeError):
            return cls()

    def write(self, checkpoint: Path) -> None:
        """Write it down, as a whole or not at all."""
        checkpoint.mkdir(parents=True, exist_ok=True)
        draft = checkpoint / f".{NOTE}"
        draft.write_text(json.dumps({"number": self.number, "stays": self.stays}))
        draft.replace(checkpoint / NOTE)


class Checkpoints:
    """Those of one action, below a directory.

    Only those of lanes that have ended may be there, and the one of the lane that has this object.
    """

    def __init__(self, directory: Path, action: str) -> None:
        self._directory = directory
        self._action = action

    def take(self, fingerprint: str, *, stays: bool) -> Path:
        """The checkpoint that a query is to start with, ready to be used.

        It is empty if another query has committed anything since this one ran, unless it stays.
        """
        path = self._directory / f"{self._action}-{fingerprint}"
        others = [each for each in self._all() if each != path]
        mine = Note.of(path)
        newer = any(Note.of(each).number > mine.number and _has_commits(each) for each in others)
        if newer and not stays:
            _remove(path)
        if not (path / NOTE).exists():
            last = max((Note.of(each).number for each in others), default=0)
            Note(last + 1, stays).write(path)
        return path

    def retire(self, used: Path | None) -> None:
        """Remove all but the one in use, and those that stay."""
        for each in self._all():
            if each != used and not Note.of(each).stays:
                log.info("%s: the checkpoint of an earlier query is removed", each.name)
                _remove(each)

    def _all(self) -> Iterator[Path]:
        """Other actions may have names that begin in the same way."""
        ours = re.compile(re.escape(self._action) + "-[0-9a-f]{12}")
        for each in sorted(self._directory.iterdir()) if self._directory.is_dir() else ():
            if ours.fullmatch(each.name):
                yield each
            elif each.suffix == _GONE and ours.fullmatch(each.stem):
                shutil.rmtree(each, ignore_errors=True)  # a kill came between


class Retiring:
    """Removes the checkpoints of earlier queries once the one that runs has done a batch.

    Before that it might never run, and whoever brings an earlier one back has lost nothing: all
    that it has not seen still waits in its queue.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._is_done = False
        self._used: Path | None = None
        """The one that the lane uses, if it uses one."""

    def take(self, fingerprint: str, *, stays: bool) -> Path:
        """The checkpoint that the lane is to use."""
        self._used = self._checkpoints.take(fingerprint, stays=stays)
        return self._used

    def __call__(self, progress: StreamingQueryProgress) -> None:
        """The query has come so far."""
        if self._is_done or not progress.numInputRows:
            return
        if self._used is None or _has_commits(self._used):
            self._is_done = True
            try:
                self._checkpoints.retire(self._used)
            except OSError as error:  # they only take room: no reason for a lane to fail
                log.warning("checkpoints of earlier queries cannot be removed: %s", error)


def _has_commits(checkpoint: Path) -> bool:
    """Whether a batch has been committed with it. Files that begin with a dot are no entries."""
    commits = checkpoint / "commits"
    return commits.is_dir() and any(not each.name.startswith(".") for each in commits.iterdir())


def _remove(checkpoint: Path) -> None:
    """Under another name, so that a kill never leaves half of one in its place."""
    gone = checkpoint.with_name(checkpoint.name + _GONE)
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(FileNotFoundError):
        checkpoint.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
