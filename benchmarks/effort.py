"""How much to measure, and where."""

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
    """The size of a run. ``scale`` shrinks it for tests, in which figures mean nothing."""

    directory: Path
    quick: bool = False
    scale: float = 1.0

    @property
    def is_trial(self) -> bool:
        """Whether it is for a test, which only wants to see that everything runs."""
        return self.scale < 0.1

    @property
    def rounds(self) -> int:
        """Turns of every contestant."""
        if self.is_trial:
            return 1
        return 3 if self.quick else 5

    @property
    def few_rounds(self) -> int:
        """Turns where no figure comes of it, only a line of a table."""
        return 1 if self.quick else self.rounds

    def unless_trial(self, usual: Thing, trial: Thing) -> Thing:
        """What is usual; in a trial as little as shows that it runs."""
        return trial if self.is_trial else usual

    def events(self, quick: int, full: int | None = None) -> int:
        """A number of events, in whole hundreds; without ``full``, four times as many there."""
        count = quick if self.quick else full or 4 * quick
        return max(1, round(count * self.scale / 100)) * 100

    def seconds(self, quick: float, full: float) -> float:
        """A duration."""
        return max(0.05, (quick if self.quick else full) * self.scale)

    @contextmanager
    def place(self) -> Iterator[Path]:
        """An empty directory that is gone afterwards, with its dirty pages."""
        path = Path(tempfile.mkdtemp(dir=self.directory))
        try:
            yield path
        finally:
            shutil.rmtree(path)
