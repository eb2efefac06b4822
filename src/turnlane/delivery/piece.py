"""A piece of a block on its way: the events that go together, as far as they are not settled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from turnlane.delivery.outcome import Fate, Numbers, Tally
from turnlane.delivery.splitting import Search
from turnlane.events import Block

Hashes = npt.NDArray[np.uint64]


@dataclass(eq=False, slots=True)
class Piece:
    """Rows of a block whose fate is open. The first of them are tried first."""

    tally: Tally
    block: Block
    numbers: Numbers
    """The row numbers in the tally's block."""
    order: tuple[int, int]
    """The number of its block, and of its first row: pieces of lower order go first."""
    search: Search
    track: int | None = None
    """Pieces of one track go one after another."""
    keys: Hashes | None = None
    """Of every row, where events of one key go one after another."""
    payload: Any = None
    """What ``prepare`` made of the first rows, ``prepared`` of them."""
    prepared: int = 0
    retries: int = 0
    tries: int = 0
    """How often its first row was sent."""
    unknown: int = 0
    """How often it failed with an error that nobody knows, since some of it went or was found."""
    refusal: BaseException | None = None
    """The last one, of what a search is about."""
    places: set[str] = field(default_factory=set)
    """Where the gate remembers ``unknown``."""

    def __lt__(self, other: Piece) -> bool:
        return self.order < other.order

    @property
    def left(self) -> int:
        """How many rows are open."""
        return len(self.numbers)

    def settle(self, fate: Fate) -> None:
        """All of it is delivered, or kept."""
        self.tally.settle(self.numbers, fate)
        self.cut(self.left)

    def deliver(self, count: int) -> None:
        """The first ``count`` rows are delivered."""
        self.tally.settle(self.numbers[:count], Fate.DELIVERED)
        self.search = self.search.delivered(count)
        self.cut(count)

    def bury(self, error: BaseException) -> None:
        """The first row is dead; the search has counted it."""
        self.tally.bury(
            self.block.slice(0, 1), self.numbers[:1], error, max(self.unknown, self.tries, 1)
        )
        self.cut(1)

    def cut(self, count: int) -> None:
        """Go on behind the first ``count`` rows, which are settled.

        Unless there is still one to be found whose fault it was, others begin with no attempts:
        each event has its own before it is dead.
        """
        self.block = self.block.slice(count)
        self.numbers = self.numbers[count:]
        if self.keys is not None:
            self.keys = self.keys[count:]
        self.tries = 0
        if not self.search.suspect:
            self.unknown = 0
        self.unprepare()

    def unprepare(self) -> None:
        """What was prepared is not what is to be sent next."""
        self.payload, self.prepared = None, 0

    def part(self, rows: npt.NDArray[np.int64]) -> Piece:
        """Some of its rows, as a piece of its own."""
        numbers = np.asarray(self.numbers, dtype=np.int64)[rows]
        return Piece(
            self.tally,
            self.block.take(rows),
            numbers,
            (self.order[0], int(numbers[0])),
            Search(len(rows)),
            self.track,
            None if self.keys is None else self.keys[rows],
            unknown=self.unknown,
            retries=self.retries,
            places=self.places,
        )
