"""Batching: how many of a block's events go together. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from turnlane.delivery.outcome import Fate, Numbers, Tally
from turnlane.delivery.settings import DeliverySettings, Ordering
from turnlane.events import Block
from turnlane.key_hash import key_hashes, repeats

Sizes = npt.NDArray[np.int64]


def event_sizes(block: Block) -> Sizes:
    """The bytes of every event, as the destination will see them, about."""
    for name in ("payload", "value"):
        at = block.schema.get_field_index(name)
        if at >= 0:
            return _lengths(block.column(at))
    return np.full(block.num_rows, block.nbytes // max(1, block.num_rows), dtype=np.int64)


def _lengths(column: Any) -> Sizes:  # noqa: ANN401 - an array of any kind of bytes or text
    lengths: Any = pc.fill_null(pc.binary_length(column), 0)
    return np.asarray(lengths, dtype=np.int64)


def batches(sizes: Sizes, most_events: int, most_bytes: int) -> list[range]:
    """Stretches of rows within both bounds; an event that is too large for one goes alone."""
    found: list[range] = []
    ends = np.cumsum(sizes)
    first = before = 0
    while first < len(sizes):
        end = int(np.searchsorted(ends, before + most_bytes, side="right"))
        end = min(max(end, first + 1), first + most_events, len(sizes))
        found.append(range(first, end))
        first, before = end, int(ends[end - 1])
    return found


# ── splitting ──
# Splitting: which of a batch's events a destination will not have, found with few sends. Pure.
#
# The first events are tried, always in order. What passed is behind us; a refusal of several
# narrows
# the search to these, a refusal of one has found it. Behind the first find all the rest goes in
# one
# piece again; only where finds are frequent the pieces get as small as the gaps between them.
#
# One of ``n`` is found with 2 · log2(n) sends at most. If that leaves no send for the last one
# that
# is left, where few were refused together, it is known without: all the others have gone.

FEW: Final = 5
"""Among so many that were refused together the last one is not sent alone to make sure."""


@dataclass(frozen=True, slots=True)
class Search:
    """How far a batch has got: ``left`` events are still to go."""

    left: int
    suspect: int = 0
    """Among so many first ones is one that was refused."""
    most: int | None = None
    """More than so many at a time were too large."""
    passed: int = 0
    """Events behind us, found ones included."""
    found: int = 0
    together: int = 0
    """So many were refused when this search began; 0 if that was not sure to be their fault."""
    before: int = 0
    """What was behind us then."""

    @property
    def trial(self) -> int:
        """How many of the first events to send next."""
        if self.suspect:
            trial = max(1, self.suspect // 2)
        elif self.found > 1:
            trial = max(1, self.passed // self.found)
        else:
            trial = self.left
        return min(trial, self.left, self.most or trial)

    @property
    def is_known(self) -> bool:
        """Whether the first event is the one, without its being sent alone."""
        return self.suspect == 1 and 0 < self.together <= FEW

    @property
    def is_fruitless(self) -> bool:
        """Whether nothing has gone since the search began, if there is one."""
        return not self.suspect or self.passed == self.before

    def delivered(self, count: int) -> Self:
        """After the first ``count`` have gone: whatever is wrong is behind them."""
        return replace(
            self,
            left=self.left - count,
            suspect=max(0, self.suspect - count),
            passed=self.passed + count,
        )

    def refused(self, count: int, *, sure: bool = True) -> Self:
        """After a refusal of the first ``count``; one that was alone is found, and gone.

        It is not ``sure`` if it may be the destination's fault after all.
        """
        if count == 1:
            return self._gone()
        if self.suspect:
            return replace(self, suspect=count)
        return replace(self, suspect=count, together=count if sure else 0, before=self.passed)

    def too_large(self, count: int) -> Self:
        """After the first ``count`` were too large: half of them, or one that is found, and gone.

        What was too large may have been that one alone, so the rest is tried whole again.
        """
        return replace(self._gone(), most=None) if count == 1 else replace(self, most=count // 2)

    def _gone(self) -> Self:
        return replace(
            self,
            left=self.left - 1,
            suspect=0,
            passed=self.passed + 1,
            found=self.found + 1,
        )


# ── piece ──
# A piece of a block on its way: the events that go together, as far as they are not settled.

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


# ── cutting ──
# Cutting: of a block, the pieces that go together, and which of them go one after another.

TRACKS = 8
"""Of events ordered by key, so many go side by side where the concurrency is not fixed."""


class Cutter:
    """Cuts blocks, one after another, as the settings say.

    If the destination may take some events of a piece and leave others, no piece has two events of
    which one must not pass the other.
    """

    def __init__(
        self, settings: DeliverySettings, most_events: int, *, takes_apart: bool = False
    ) -> None:
        self._settings = settings
        self._takes_apart = takes_apart
        one_by_one = takes_apart and settings.ordering is Ordering.STRICT
        self._most_events = 1 if one_by_one else most_events
        fixed = settings.concurrency
        self._tracks = fixed if isinstance(fixed, int) else min(TRACKS, settings.max_concurrency)
        self._block = 0

    def cut(self, tally: Tally, attempts: Mapping[str, int], most: int | None) -> list[Piece]:
        """The pieces of a block. ``most`` is what was not too large lately."""
        self._block += 1
        if self._settings.ordering is Ordering.KEY:
            pieces = list(self._by_key(tally))
        else:
            track = 0 if self._settings.ordering is Ordering.STRICT else None
            rows = tally.block
            pieces = [
                self._piece(tally, rows.slice(each.start, len(each)), each, track)
                for each in self._batches(rows)
            ]
        for piece in pieces:
            piece.search = Search(piece.left, most=most)
            if attempts:
                _recall(piece, attempts)
        return pieces

    def _batches(self, rows: Block) -> list[range]:
        return batches(event_sizes(rows), self._most_events, self._settings.batch_bytes)

    def _by_key(self, tally: Tally) -> Iterator[Piece]:
        """Rows of one track stand together, in their order; a key's are all on one track."""
        keys = _keys(tally.block)
        tracks = (keys % np.uint64(self._tracks)).astype(np.int64)
        turns = repeats(keys) if self._takes_apart else np.zeros(len(keys), dtype=np.int64)
        order = np.lexsort((turns, tracks))
        rows = tally.block.take(order)
        apart = (np.diff(tracks[order]) != 0) | (np.diff(turns[order]) != 0)
        ends = [*(np.flatnonzero(apart) + 1).tolist(), len(order)] if len(order) else []
        for first, end in pairwise([0, *ends]):
            part, track = rows.slice(first, end - first), int(tracks[order[first]])
            for each in self._batches(part):
                at = slice(first + each.start, first + each.stop)
                yield self._piece(
                    tally, part.slice(each.start, len(each)), order[at], track, keys[order[at]]
                )

    def _piece(
        self,
        tally: Tally,
        rows: Block,
        numbers: range | npt.NDArray[np.int64],
        track: int | None,
        keys: Hashes | None = None,
    ) -> Piece:
        order = (self._block, int(numbers[0]))
        return Piece(tally, rows, numbers, order, Search(len(numbers)), track, keys)


def _keys(block: Block) -> Hashes:
    """The hash of every event's key. Events without one belong to nobody: they are spread."""
    at = block.schema.get_field_index("key")
    if at < 0:
        return np.arange(block.num_rows, dtype=np.uint64)
    column = block.column(at)
    hashes = key_hashes(column)
    if column.null_count:
        missing = np.flatnonzero(np.asarray(column.is_null()))
        hashes[missing] = missing.astype(np.uint64)
    return hashes


def place_of(block: Block) -> str | None:
    """Where the first event is: ``partition/offset``, if the block says so."""
    at = block.schema.get_field_index("offset")
    if at < 0:
        return None
    partition = block.schema.get_field_index("partition")
    node = block.column(partition)[0].as_py() if partition >= 0 else 0
    return f"{node}/{block.column(at)[0].as_py()}"


def _recall(piece: Piece, attempts: Mapping[str, int]) -> None:
    """What the gate remembers of a piece: it may begin elsewhere than last time."""
    at = piece.block.schema.get_field_index("offset")
    if at < 0:
        return
    offsets = np.asarray(piece.block.column(at))
    known = np.array([int(place.partition("/")[2]) for place in attempts], dtype=np.int64)
    for row in np.flatnonzero(np.isin(offsets, known)):
        place = place_of(piece.block.slice(int(row), 1))
        if place is not None and place in attempts:
            piece.places.add(place)
            piece.unknown = max(piece.unknown, attempts[place])


# ── tracks ──
# Tracks: pieces that go one after another, because their events have an order.


class Tracks:
    """All tracks of a run. Of every track one piece is on its way, and the others wait here."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Piece]] = {}
        self._blocked: Hashes = np.empty(0, dtype=np.uint64)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def enter(self, piece: Piece) -> Piece | None:
        """The piece if it may go now; otherwise it waits at the end of its track."""
        if piece.track is None:
            return piece
        if piece.track in self._waiting:
            self._waiting[piece.track].append(piece)
            return None
        self._waiting[piece.track] = deque()
        return self._unblocked(piece) or self.leave(piece)

    def put_back(self, piece: Piece) -> Piece | None:
        """The piece if it has no track; otherwise it waits at the head of its track."""
        if piece.track is None:
            return piece
        self._waiting[piece.track].appendleft(piece)
        return None

    def leave(self, piece: Piece) -> Piece | None:
        """A piece is through, or kept; returns the next of its track."""
        if piece.track is None:
            return None
        waiting = self._waiting[piece.track]
        while waiting:
            following = self._unblocked(waiting.popleft())
            if following is not None:
                return following
        del self._waiting[piece.track]
        return None

    def block(self, piece: Piece) -> None:
        """This piece is kept, so later events of its keys will be."""
        if piece.keys is not None:
            self._blocked = np.union1d(self._blocked, piece.keys)

    def drain(self) -> list[Piece]:
        """Take away all that wait."""
        rest = [piece for waiting in self._waiting.values() for piece in waiting]
        for waiting in self._waiting.values():
            waiting.clear()
        return rest

    def _unblocked(self, piece: Piece) -> Piece | None:
        """What may go of a piece; the events of blocked keys are kept."""
        if piece.keys is None or not len(self._blocked):
            return piece
        blocked = np.isin(piece.keys, self._blocked)
        if not blocked.any():
            return piece
        if blocked.all():
            piece.settle(Fate.KEPT)
            return None
        piece.part(np.flatnonzero(blocked)).settle(Fate.KEPT)
        return piece.part(np.flatnonzero(~blocked))
