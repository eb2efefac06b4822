"""What takes part in a comparison: something that events are put into and taken out of."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar


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

    def ready(self, values: Sequence[bytes]) -> Any:
        """Values in the form in which :meth:`put_block` takes them."""
        return values

    def put_block(self, block: Any) -> None:
        """Put in what :meth:`ready` gave."""
        for value in block:
            self.put(value)

    def secure(self) -> None:
        """Return once everything is as safe as it ever gets here."""

    def drain(self, count: int) -> None:
        """Take out and settle ``count`` events."""
        raise NotImplementedError

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of files and threads."""
