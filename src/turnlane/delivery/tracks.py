"""Tracks: pieces that go one after another, because their events have an order."""

from __future__ import annotations

from collections import deque

import numpy as np

from turnlane.delivery.outcome import Fate
from turnlane.delivery.piece import Hashes, Piece


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
