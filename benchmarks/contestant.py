"""What takes part in a comparison: something that events are put into and taken out of."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar


class Contestant(abc.ABC):
    """Opened in an empty directory, used for one measurement, closed.

    ``put`` is the thing's own method wherever possible, so that only its own cost is measured.
    """

    label: ClassVar[str]
    events: ClassVar[int]
    """How many events make a measurement of a fraction of a second, one by one."""
    put: Callable[[bytes], object]

    @abc.abstractmethod
    def __init__(self, directory: Path, expected: int) -> None:
        """Open it, ready for ``expected`` events."""

    def put_block(self, values: Sequence[bytes]) -> None:
        """Put several in at once, where that can be done."""
        for value in values:
            self.put(value)

    def secure(self) -> None:
        """Return once everything is as safe as it ever gets here; without a disk, at once."""
        return

    def drain(self, count: int) -> None:
        """Take out and settle ``count`` events."""
        raise NotImplementedError

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of files and threads."""
