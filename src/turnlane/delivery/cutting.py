"""Cutting: of a block, the pieces that go together, and which of them go one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from turnlane.delivery.batching import batches, event_sizes
from turnlane.delivery.outcome import Tally
from turnlane.delivery.piece import Hashes, Piece
from turnlane.delivery.settings import DeliverySettings, Ordering
from turnlane.delivery.splitting import Search
from turnlane.events import Block
from turnlane.hashing import key_hashes
from turnlane.repeats import repeats

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
