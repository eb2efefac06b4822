"""How far one file's lines have come, as the queue's acks tell it."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from turnlane.inputs.files.identity import NOTHING, Mark
from turnlane.queues.contract import Ack


class _Step(NamedTuple):
    """Lines that were published: their end in the queue, and in the file."""

    end: int
    offset: int
    before: Mark


class Progress:
    """The acked position of a file. Steps come from one thread, acks from another."""

    def __init__(self, offset: int = 0, before: Mark = NOTHING) -> None:
        self._lock = threading.Lock()
        self._steps: deque[_Step] = deque()
        self._end = 0
        self.offset = offset
        """Every line below this byte has reached the level, or was dropped by policy."""
        self.before = before
        self.lost = False
        """Whether the queue has lost lines that it had accepted, behind ``offset``."""

    @property
    def settled(self) -> bool:
        """Whether nothing is on its way."""
        return not self._steps

    def published(self, end: int | None, offset: int, before: Mark) -> None:
        """Lines up to byte ``offset`` are in the queue, below its offset ``end``.

        ``end`` is ``None`` if the queue's policy has dropped them all: no ack will come.
        """
        with self._lock:
            if end is None:
                end = self._steps[-1].end if self._steps else self._end
            self._steps.append(_Step(end, offset, before))
            self._settle()

    def acked(self, ack: Ack, *, drops_are_losses: bool) -> None:
        """The queue tells how far it has come."""
        with self._lock:
            if ack.dropped and drops_are_losses:
                self.lost = True
            self._end = max(self._end, ack.end)
            self._settle()

    def _settle(self) -> None:
        while not self.lost and self._steps and self._steps[0].end <= self._end:
            _, self.offset, self.before = self._steps.popleft()
