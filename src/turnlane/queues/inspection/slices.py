"""Events as an inspection hands them out: a block, each one's offset, whether it is settled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable

    from turnlane.queues.inspection.findings import Report

Offsets = npt.NDArray[np.int64]

EVERYTHING = 1 << 63
"""Beyond every offset."""


class Slice(NamedTuple):
    """Events with their offsets; all of them settled, or none."""

    offsets: Offsets
    settled: bool
    block: pa.RecordBatch


class Selection(NamedTuple):
    """Which events: offsets ``[first, end)``, and whether also those that are settled."""

    first: int | None = None
    end: int = EVERYTHING
    settled: bool = False


class Inspected(Protocol):
    """What can be asked of any directory, turnlane's or FastQueue's. Nothing is ever written."""

    @property
    def name(self) -> str:
        """What the queue is called."""

    @property
    def size(self) -> int:
        """The bytes that a look at everything has to go through."""

    @property
    def schema(self) -> pa.Schema:
        """All columns that any event may have, base columns first."""

    def slices(self, selection: Selection, advance: Callable[[int], None] = ...) -> Iterator[Slice]:
        """The events selected, oldest first; ``advance`` hears of bytes gone through."""

    @property
    def end(self) -> int:
        """Beyond the last event, as far as the last ``slices()`` has seen."""

    def unreadable(self, selection: Selection) -> int:
        """How many events of the selection the last ``slices()`` could not read."""

    def verify(self, advance: Callable[[int], None] = ...) -> Report:
        """Check every byte."""


def ignore(_bytes: int) -> None:
    """For those who do not want to hear how far it has come."""
