"""A contestant of a comparison: a queue that takes events and gives them back."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar


class Contestant(abc.ABC):
    """A queue, opened in an empty directory for one measurement and closed afterwards.

    Where possible, ``put`` is the queue's own method: then only its cost is measured.
    """

    label: ClassVar[str]
    events: ClassVar[int]
    """The events of a measurement, one by one; it takes a fraction of a second."""
    put: Callable[[bytes], object]

    @abc.abstractmethod
    def __init__(self, directory: Path, expected: int) -> None:
        """Open the queue with room for ``expected`` events."""

    def put_block(self, values: Sequence[bytes]) -> None:
        """Put several events in with one call, if the queue can do it."""
        for value in values:
            self.put(value)

    def secure(self) -> None:
        """Wait until all events are on the disk; a queue in memory returns at once."""
        return

    def drain(self, count: int) -> None:
        """Take out and settle ``count`` events."""
        raise NotImplementedError

    @abc.abstractmethod
    def close(self) -> None:
        """Close files and end threads."""
