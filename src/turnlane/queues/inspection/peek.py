"""The next few events of a queue."""

from __future__ import annotations

from typing import NamedTuple

from turnlane.queues.inspection.slices import Inspected, Selection, Slice


class Peek(NamedTuple):
    """Events, and how many between them could not be read."""

    pieces: list[Slice]
    unreadable: int


def peek(queue: Inspected, selection: Selection, count: int) -> Peek:
    """The first ``count`` events of the selection; reads no further than it has to."""
    pieces: list[Slice] = []
    left = count
    slices = queue.slices(selection)
    for piece in slices:
        taken = Slice(piece.offsets[:left], piece.settled, piece.block.slice(0, left))
        pieces.append(taken)
        left -= len(taken.offsets)
        if not left:
            selection = selection._replace(end=int(taken.offsets[-1]) + 1)
            break
    return Peek(pieces, queue.unreadable(selection))
