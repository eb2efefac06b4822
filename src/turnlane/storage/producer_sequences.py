"""The sequence numbers of a producer that a queue has accepted.

A number below the highest is a repeat only if the queue has accepted it: a request can be refused,
or come later than another one, while a higher number is accepted. So the queue keeps the numbers as
runs: all numbers below ``low``, and separate runs above it. A producer that counts in order has no
runs, and one comparison shows that its next block is new.

The number of runs is limited. At the limit the queue does what the producer chose: see
:class:`GapPolicy`.

:class:`UnwrittenSequences` are events with sequence numbers that are in a queue and not yet safe in
its log.

The log stores the producers' sequence numbers with the events. If events are settled before they
are written, they may never reach the log, and the journal must record their numbers with the
settlement: otherwise, after a kill, the producer would send them again and they would be new.

A recorded number may stand for all numbers before it. So it cannot be recorded while an older event
of the same producer would be lost in a kill: the producer must be able to send that event again.
Nor can the numbers in between be recorded one by one: after a kill a stream continues after the
highest number that the queue has, and would not send the older event again. So the older event is
written to the log first. The same holds for a block from which policies have dropped events, before
a part of it is settled: the numbers of its single events are unknown.
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

from turnlane.intervals import RangeSet
from turnlane.storage.frames import ProducerSequence

MAX_RUNS = 128
"""Runs above ``low`` that a producer may have: more than a client has requests in progress."""

KEPT_RUNS = 1024
"""The hard limit: publishers that were waiting in line may exceed ``MAX_RUNS``."""


class GapPolicy(enum.Enum):
    """What a queue does about numbers that a producer leaves out."""

    KEEP = "keep"
    """A number that was left out may come later. A gap beyond the limit is refused."""
    FORGET = "forget"
    """A number that was left out may come later. Beyond the limit, the lowest gap is closed."""
    SKIP = "skip"
    """Numbers only grow: a number that was left out never comes, and counts as accepted."""
    POSITIONS = "positions"
    """As ``SKIP``. The number after a block is a position in the producer's source, for example a
    byte of a file, and the numbers inside of a block have no meaning. So a part of a block has no
    number: the producer would continue at a wrong position."""

    @property
    def can_skip(self) -> bool:
        """Whether a number that was left out counts as accepted."""
        return self in (GapPolicy.SKIP, GapPolicy.POSITIONS)


class AcceptedSequences:
    """The numbers of one producer that a queue has accepted. Not thread-safe."""

    __slots__ = ("low", "runs")

    def __init__(self, low: int = 0, runs: Iterable[tuple[int, int]] = ()) -> None:
        self.low = low
        """All numbers below it are accepted."""
        self.runs = RangeSet()
        """The accepted numbers above ``low``."""
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
        """Accept ``[first, end)``."""
        if first > self.low:
            self.runs.add(first, end)
            self.close_gaps(KEPT_RUNS)
        elif end > self.low:
            self.low = end
            self._join_low()

    def update(self, other: AcceptedSequences) -> None:
        """Accept all numbers of the other one."""
        for first, end in other:
            self.add(first, end)

    def close_gaps(self, most: int) -> None:
        """Count the lowest gaps as accepted, until at most ``most`` runs are left."""
        while len(self.runs) > most:
            self.low = next(iter(self.runs))[1]
            self._join_low()

    def _join_low(self) -> None:
        if self.runs:
            self.low = self.runs.end_of_run(self.low)
            self.runs.drop_below(self.low)

    def missing(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of ``[first, end)`` that are not accepted."""
        return self.runs.missing(max(first, self.low), end)

    def holds(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return for each number whether it is accepted."""
        held = numbers < self.low
        for first, end in self.runs:
            held |= (numbers >= first) & (numbers < end)
        return held

    def start_of_run(self, number: int) -> int:
        """Return the first number of the run that has ``number``; 0 if ``low`` is above it."""
        return 0 if number < self.low else self.runs.start_of_run(number)

    def is_apart(self, first: int, end: int) -> bool:
        """Whether ``[first, end)`` would be a separate run."""
        return first > self.low and not self.runs.touches(first, end)

    def copy(self) -> AcceptedSequences:
        """Return an independent copy."""
        clone = AcceptedSequences(self.low)
        clone.runs = self.runs.copy()
        return clone

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over all accepted ranges."""
        return iter([(0, self.low), *self.runs] if self.low else list(self.runs))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AcceptedSequences) and list(self) == list(other)

    def __hash__(self) -> int:
        raise TypeError("AcceptedSequences can change and cannot be hashed")

    def __repr__(self) -> str:
        return f"AcceptedSequences({self.low}, {list(self.runs)})"


FindSettledEnd = Callable[[int], int]
"""Returns the end of the settled run that begins at an offset; the offset if it is not settled."""


@dataclass(frozen=True, slots=True, eq=False)
class SequencedRange:
    """Events ``first`` to ``end - 1`` of one producer, and their sequence numbers."""

    first: int
    end: int
    sequence: ProducerSequence
    is_consecutive: bool
    """Whether their numbers are consecutive: policies have dropped nothing between them."""

    def get_recordable(self, offset: int) -> ProducerSequence | None:
        """Return the numbers to record if everything below ``offset`` is settled or safe."""
        if offset >= self.end:
            return self.sequence
        if offset <= self.first or not self.is_consecutive:
            return None
        return self.sequence.subtract(self.end - offset)


class UnwrittenSequences:
    """By producer, the ranges that are not safe yet. Thread-safe; takes no other lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: deque[SequencedRange] = deque()
        """All ranges in offset order, including recorded ones."""
        self._waiting: dict[bytes, deque[SequencedRange]] = {}
        """Those that were not recorded, by producer."""
        self._safe_end = 0

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def add(self, new: SequencedRange) -> None:
        """Add a range after all others."""
        with self._lock:
            self._ranges.append(new)
            self._waiting.setdefault(new.sequence.producer, deque()).append(new)

    def forget_below(self, offset: int) -> None:
        """Forget the ranges below ``offset``: they are safe in the log, with their numbers."""
        with self._lock:
            self._safe_end = max(self._safe_end, offset)
            while self._ranges and self._ranges[0].end <= offset:
                self._remove_waiting(self._ranges.popleft())

    def collect_due(
        self, first: int, end: int, find_settled_end: FindSettledEnd
    ) -> tuple[list[ProducerSequence], list[SequencedRange]]:
        """Return the numbers to record with the settlement of ``[first, end)``.

        Also returns the ranges that are complete with it, for :meth:`remove`. A producer's number
        is due once everything older *of this producer* is settled or safe. ``find_settled_end``
        counts ``[first, end)`` as settled.
        """
        sequences: list[ProducerSequence] = []
        complete: list[SequencedRange] = []
        if self._ranges:
            with self._lock:
                for producer in self._find_producers(first, end):
                    sequences += self._collect_of(producer, find_settled_end, complete)
        return sequences, complete

    def _collect_of(
        self, producer: bytes, find_settled_end: FindSettledEnd, complete: list[SequencedRange]
    ) -> list[ProducerSequence]:
        due = AcceptedSequences()
        for waiting in self._waiting.get(producer, ()):
            settled_end = find_settled_end(max(waiting.first, self._safe_end))
            sequence = waiting.get_recordable(settled_end)
            if sequence is not None:
                due.add(sequence.first, sequence.next_sequence)
            if sequence is not waiting.sequence:
                break
            complete.append(waiting)
        return [ProducerSequence(producer, end, first) for first, end in due]

    def find_unsafe_end(self, first: int, end: int, find_settled_end: FindSettledEnd) -> int:
        """Return how far the log must be safe for all numbers in ``[first, end)`` to be due.

        0 if they are due now.
        """
        with self._lock:
            return max(
                (
                    self._find_unsafe_end_of(producer, end, find_settled_end)
                    for producer in self._find_producers(first, end)
                ),
                default=0,
            )

    def _find_unsafe_end_of(
        self, producer: bytes, end: int, find_settled_end: FindSettledEnd
    ) -> int:
        for waiting in self._waiting.get(producer, ()):
            if waiting.first >= end:
                break
            wanted = min(waiting.end, end) if waiting.is_consecutive else waiting.end
            if find_settled_end(max(waiting.first, self._safe_end)) < wanted:
                return wanted
        return 0

    def _find_producers(self, first: int, end: int) -> list[bytes]:
        found: dict[bytes, None] = {}
        at = bisect_right(self._ranges, first, key=lambda each: each.end)
        while at < len(self._ranges) and self._ranges[at].first < end:
            found[self._ranges[at].sequence.producer] = None
            at += 1
        return list(found)

    def remove(self, complete: list[SequencedRange]) -> None:
        """Remove ranges whose numbers the journal has recorded."""
        with self._lock:
            for each in complete:
                self._remove_waiting(each)

    def _remove_waiting(self, oldest: SequencedRange) -> None:
        """Remove the oldest range of a producer; no effect if it was removed before."""
        producer = oldest.sequence.producer
        waiting = self._waiting.get(producer)
        if waiting and waiting[0] is oldest:
            waiting.popleft()
            if not waiting:
                del self._waiting[producer]
