"""Which sequence numbers of a producer a queue has taken.

A number below the highest is a repeat only if the queue took it: a request can be refused, or come
later than another one, while a higher number is accepted. So the queue keeps the numbers as runs:
all numbers below ``low``, and separate runs above it. A producer that counts in order has no runs,
and one comparison tells that its next block is new.

Runs are bounded. What happens at the bound is the choice of the producer: see :class:`Gaps`.

Numbered events that are in a queue and not yet safe in its log.

The log keeps their producers' numbers with them. If they are settled first, they may never come
to the log, and the journal has to note the numbers with the settlement: otherwise, after a kill,
their producer would send them again and they would be new.

A stamp may stand for all numbers before it, so it cannot be noted while an older event of the same
producer would be lost in a kill: that one has to be sent again and let in. Nor can the numbers in
between be noted one by one: after a kill a stream goes on after the highest number that the queue
has, and would not send the older event again. So the older event is written first. So is a block
that policies have thinned, before a part of it is settled: nobody knows its numbers singly.
"""

from __future__ import annotations

import enum
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from turnlane.intervals import Ranges
from turnlane.storage.frames import Stamp

MAX_RUNS = 128
"""Runs above ``low`` that a producer may have: more than a client has requests under way."""

KEPT_RUNS = 1024
"""Runs that are kept whatever happens: publishers that stood in line may add to ``MAX_RUNS``."""


class Gaps(enum.Enum):
    """What a queue does about numbers that a producer leaves out."""

    KEEP = "keep"
    """A number that was left out may come later. A gap beyond the bound is refused."""
    FORGET = "forget"
    """A number that was left out may come later. Beyond the bound, the lowest gap is closed."""
    SKIP = "skip"
    """Numbers only grow: a number that was left out does not come, and counts as taken."""


class Accepted:
    """The numbers of one producer that a queue has taken. Not thread-safe."""

    __slots__ = ("low", "runs")

    def __init__(self, low: int = 0, runs: Iterable[tuple[int, int]] = ()) -> None:
        self.low = low
        """All numbers below it are taken."""
        self.runs = Ranges()
        """The numbers above ``low`` that are taken."""
        for first, end in runs:
            self.add(first, end)

    @property
    def end(self) -> int:
        """One more than the highest number."""
        return self.runs.end if self.runs else self.low

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The ranges below ``end`` that are missing."""
        return self.runs.missing(self.low, self.end)

    def add(self, first: int, end: int) -> None:
        """Take ``[first, end)``."""
        if first > self.low:
            self.runs.add(first, end)
            self.close_gaps(KEPT_RUNS)
        elif end > self.low:
            self.low = end
            self._join_low()

    def update(self, other: Accepted) -> None:
        """Take all that the other one has."""
        for first, end in other:
            self.add(first, end)

    def close_gaps(self, most: int) -> None:
        """Count the lowest gaps as taken, until no more than ``most`` runs are left."""
        while len(self.runs) > most:
            self.low = next(iter(self.runs))[1]
            self._join_low()

    def _join_low(self) -> None:
        if self.runs:
            self.low = self.runs.end_of_run(self.low)
            self.runs.drop_below(self.low)

    def missing(self, first: int, end: int) -> list[tuple[int, int]]:
        """The ranges of ``[first, end)`` that are not taken."""
        return self.runs.missing(max(first, self.low), end)

    def holds(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """For each number whether it is taken."""
        held = numbers < self.low
        for first, end in self.runs:
            held |= (numbers >= first) & (numbers < end)
        return held

    def start_of_run(self, number: int) -> int:
        """The first number of the run that has ``number``; 0 if ``low`` is above it."""
        return 0 if number < self.low else self.runs.start_of_run(number)

    def is_apart(self, first: int, end: int) -> bool:
        """Whether ``[first, end)`` would be a run of its own."""
        return first > self.low and not self.runs.touches(first, end)

    def copy(self) -> Accepted:
        """An independent copy."""
        clone = Accepted(self.low)
        clone.runs = self.runs.copy()
        return clone

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """All that is taken, as ranges."""
        return iter([(0, self.low), *self.runs] if self.low else list(self.runs))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Accepted) and list(self) == list(other)

    def __hash__(self) -> int:
        raise TypeError("Accepted can change and cannot be hashed")

    def __repr__(self) -> str:
        return f"Accepted({self.low}, {list(self.runs)})"


@dataclass(frozen=True, slots=True, eq=False)
class Numbered:
    """Events ``first`` to ``end - 1`` of one producer, and the stamp that completes them."""

    first: int
    end: int
    stamp: Stamp
    consecutive: bool
    """Whether their numbers follow on each other: policies have taken nothing out."""

    def upto(self, offset: int) -> Stamp | None:
        """What may be noted if everything below ``offset`` is settled or safe."""
        if offset >= self.end:
            return self.stamp
        if offset <= self.first or not self.consecutive:
            return None
        return self.stamp.before(self.end - offset)


class Unstamped:
    """By producer, what is not safe yet. Thread-safe; takes no other lock under its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: deque[Numbered] = deque()
        """In offset order, those that were noted included."""
        self._waiting: dict[bytes, deque[Numbered]] = {}
        """Those that were not noted, by producer."""
        self._safe = 0

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, numbered: Numbered) -> None:
        """Events came in, behind all others."""
        with self._lock:
            self._all.append(numbered)
            self._waiting.setdefault(numbered.stamp.producer, deque()).append(numbered)

    def forget_below(self, offset: int) -> None:
        """Everything below is safe in the log, with its stamps."""
        with self._lock:
            self._safe = max(self._safe, offset)
            while self._all and self._all[0].end <= offset:
                self._drop(self._all.popleft())

    def due(
        self, first: int, end: int, settled_to: Callable[[int], int]
    ) -> tuple[list[Stamp], list[Numbered]]:
        """What is to be noted along with the settling of ``[first, end)``, and what it completes.

        A producer's number not before everything older *of this producer* is settled or safe: it
        may have to be sent again and be let in. ``settled_to`` says how far everything from an
        offset on is settled, these included.
        """
        stamps: list[Stamp] = []
        complete: list[Numbered] = []
        if self._all:
            with self._lock:
                for producer in self._producers(first, end):
                    stamps += self._reached(producer, settled_to, complete)
        return stamps, complete

    def unsafe_end(self, first: int, end: int, settled_to: Callable[[int], int]) -> int:
        """How far events have to be safe for all numbers in ``[first, end)`` to be due; 0 if so."""
        with self._lock:
            producers = self._producers(first, end)
            return max((self._unsafe_end(each, end, settled_to) for each in producers), default=0)

    def _unsafe_end(self, producer: bytes, end: int, settled_to: Callable[[int], int]) -> int:
        for numbered in self._waiting.get(producer, ()):
            if numbered.first >= end:
                break
            wanted = min(numbered.end, end) if numbered.consecutive else numbered.end
            if settled_to(max(numbered.first, self._safe)) < wanted:
                return wanted
        return 0

    def _producers(self, first: int, end: int) -> list[bytes]:
        found: dict[bytes, None] = {}
        at = bisect_right(self._all, first, key=lambda each: each.end)
        while at < len(self._all) and self._all[at].first < end:
            found[self._all[at].stamp.producer] = None
            at += 1
        return list(found)

    def _reached(
        self, producer: bytes, settled_to: Callable[[int], int], complete: list[Numbered]
    ) -> list[Stamp]:
        reached = Accepted()
        for numbered in self._waiting.get(producer, ()):
            stamp = numbered.upto(settled_to(max(numbered.first, self._safe)))
            if stamp is not None:
                reached.add(stamp.first, stamp.next_sequence)
            if stamp is not numbered.stamp:
                break
            complete.append(numbered)
        return [Stamp(producer, end, first) for first, end in reached]

    def noted(self, complete: list[Numbered]) -> None:
        """The journal has their stamps."""
        with self._lock:
            for numbered in complete:
                self._drop(numbered)

    def _drop(self, numbered: Numbered) -> None:
        """Take out the oldest of a producer; nothing if it is out already."""
        producer = numbered.stamp.producer
        waiting = self._waiting.get(producer)
        if waiting and waiting[0] is numbered:
            waiting.popleft()
            if not waiting:
                del self._waiting[producer]
