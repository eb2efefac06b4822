"""What log and journal hand to each other, apart so that neither has to import the other."""

from __future__ import annotations

from typing import NamedTuple


class Position(NamedTuple):
    """A place in the log: byte `byte` of the chunk named `chunk`, where offset `end` comes next."""

    chunk: int
    byte: int
    end: int


class Stamp(NamedTuple):
    """What a producer has published: its hashed id (16 bytes) and a range of its numbers.

    From ``first`` to ``next_sequence - 1``; with ``first`` 0 all numbers below ``next_sequence``.
    """

    producer: bytes
    next_sequence: int
    first: int = 0

    def before(self, events: int) -> Stamp:
        """Its stamp so many events earlier, if their numbers follow on each other."""
        return Stamp(self.producer, self.next_sequence - events, self.first)
