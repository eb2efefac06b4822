"""What became of a block: every row is delivered, dead or kept, and one of them only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from turnlane.events import Block

Numbers: TypeAlias = range | npt.NDArray[np.int64]
"""Numbers of rows: in one stretch, mostly."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Rows that can never be delivered, all for the same reason."""

    rows: Block
    numbers: npt.NDArray[np.int64]
    """Their row numbers in the block that was to be delivered."""
    error: str
    """The class of the error."""
    text: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a block."""

    delivered: int
    """How many rows the destination has."""
    kept: npt.NDArray[np.int64]
    """The numbers of the rows that are to be delivered another time, ascending."""
    dead: list[DeadLetter] = field(default_factory=list)


class Fate(enum.IntEnum):
    """What became of a row."""

    OPEN = 0
    DELIVERED = 1
    DEAD = 2
    KEPT = 3


class Tally:
    """Collects what becomes of the rows of a block. Not safe to use from several threads."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.open = block.num_rows
        """Rows whose fate is not known yet."""
        self._fates = np.zeros(block.num_rows, dtype=np.uint8)
        self._dead: list[DeadLetter] = []

    def settle(self, numbers: Numbers, fate: Fate) -> None:
        """Note what became of these rows. That happens to a row once."""
        at = slice(numbers.start, numbers.stop) if isinstance(numbers, range) else numbers
        assert not self._fates[at].any(), "a row has one fate"
        self._fates[at] = fate
        self.open -= len(numbers)

    def bury(self, rows: Block, numbers: Numbers, error: BaseException, attempts: int) -> None:
        """Note that these rows are dead, and of what."""
        self.settle(numbers, Fate.DEAD)
        places = np.asarray(numbers, dtype=np.int64)
        name = type(error).__name__
        self._dead.append(DeadLetter(rows, places, name, str(error) or name, attempts))

    def outcome(self) -> Outcome:
        """The result, once no row is open."""
        assert not self.open
        delivered = int(np.count_nonzero(self._fates == Fate.DELIVERED))
        return Outcome(delivered, np.flatnonzero(self._fates == Fate.KEPT), self._dead)
