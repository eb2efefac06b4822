"""The size of a run: how much to measure, and in which directory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Effort:
    """The size of a run. Tests use a small ``scale``; their figures mean nothing."""

    directory: Path
    quick: bool = False
    scale: float = 1.0

    @property
    def is_trial(self) -> bool:
        """Whether the run is a test, which only shows that everything works."""
        return self.scale < 0.1

    @property
    def rounds(self) -> int:
        """The number of turns of every contestant."""
        if self.is_trial:
            return 1
        return 3 if self.quick else 5

    @property
    def few_rounds(self) -> int:
        """The number of turns if the result is only a line of a table, and no figure."""
        return 1 if self.quick else self.rounds

    def choose(self, usual: Thing, trial: Thing) -> Thing:
        """Return ``usual``, or ``trial`` in a test."""
        return trial if self.is_trial else usual

    def events(self, quick: int, full: int | None = None) -> int:
        """Return a number of events, in hundreds; ``full`` is four times ``quick`` by default."""
        count = quick if self.quick else full or 4 * quick
        return max(1, round(count * self.scale / 100)) * 100

    def seconds(self, quick: float, full: float) -> float:
        """Return a duration."""
        return max(0.05, (quick if self.quick else full) * self.scale)

    @contextmanager
    def place(self) -> Iterator[Path]:
        """Create an empty directory, and remove it afterwards together with its dirty pages."""
        path = Path(tempfile.mkdtemp(dir=self.directory))
        try:
            yield path
        finally:
            shutil.rmtree(path)
