"""What of a queue a table has got: ranges of offsets, in a table beside it.

They are written in the transaction that writes the rows. Events are delivered in no particular
order, and some are kept for later, so one number would not do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from turnlane.intervals import Ranges
from turnlane.outputs.sql_rows import Offsets, Stream
from turnlane.table.notes import DELIVERED_TABLE

TABLE: Final = DELIVERED_TABLE
_LOCK: Final = -1
"""The ``first`` of a row that is no range: whoever has it locked is alone with the stream."""

Execute = Callable[[str, Sequence[Any]], Sequence[Any]]
"""Runs a statement, whose parameters are ``?``, and returns the rows that it gives."""


def runs_of(offsets: Offsets) -> list[tuple[int, int]]:
    """Offsets, in any order, as ranges ``[first, end)``."""
    if not len(offsets):
        return []
    ordered = np.unique(offsets)
    breaks = np.flatnonzero(np.diff(ordered) != 1)
    firsts = ordered[np.concatenate(([0], breaks + 1))]
    lasts = ordered[np.concatenate((breaks, [len(ordered) - 1]))]
    return list(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))


def not_in(offsets: Offsets, known: Ranges) -> npt.NDArray[np.bool_]:
    """Which of the offsets are in none of the ranges."""
    if not known:
        return np.ones(len(offsets), dtype=bool)
    firsts, ends = np.array(list(known), dtype=np.int64).T
    at = np.searchsorted(firsts, offsets, side="right") - 1
    fresh: npt.NDArray[np.bool_] = (at < 0) | (offsets >= ends[at])
    return fresh


class Delivered:
    """The ranges of one target, in one connection's transactions."""

    def __init__(self, target: str, quote: Callable[[str], str], execute: Execute) -> None:
        self._target = target
        self._execute = execute
        self._table = TABLE
        self._names = [quote(name) for name in ("target", "queue", "partition", "first", "end")]
        *key, self._first, self._end = self._names
        self._stream = " AND ".join(f"{name} = ?" for name in key)

    def is_there(self) -> bool:
        """Whether there is the table; fails if not."""
        self._execute(f"SELECT 1 FROM {self._table} WHERE 1 = 0", [])  # noqa: S608 - names are ours
        return True

    def create(self) -> None:
        """Make the table; a transaction of its own, which fails if another is quicker."""
        target, queue, partition, first, end = self._names
        self._execute(
            f"CREATE TABLE {self._table} ({target} VARCHAR(200) NOT NULL, "
            f"{queue} VARCHAR(200) NOT NULL, {partition} INTEGER NOT NULL, "
            f"{first} BIGINT NOT NULL, {end} BIGINT NOT NULL, "
            f"PRIMARY KEY ({target}, {queue}, {partition}, {first}))",
            [],
        )

    def is_ready(self, stream: Stream) -> bool:
        """Whether there is a row to lock."""
        return bool(self._select(stream, f"{self._first} = ?", [_LOCK]))

    def make_ready(self, stream: Stream) -> None:
        """Make that row; a transaction of its own, which fails if another is quicker."""
        self._insert(stream, [(_LOCK, _LOCK)])

    def lock(self, stream: Stream, suffix: str) -> bool:
        """Be alone with a stream until the transaction ends; false if the row is gone."""
        return bool(self._select(stream, f"{self._first} = ?", [_LOCK], suffix))

    def touching(self, stream: Stream, offsets: Offsets) -> Ranges:
        """The ranges that hold some of the offsets or lie beside them."""
        return Ranges(self._select(stream, self._touching, self._bounds(offsets)))

    def note(self, stream: Stream, offsets: Offsets, known: Ranges) -> None:
        """Add offsets to the ranges that :meth:`touching` has found, merging what can be."""
        merged = known.copy()
        for first, end in runs_of(offsets):
            merged.add(first, end)
        before, after = set(known), set(merged)
        for first, _ in sorted(before - after):
            self._execute(
                f"DELETE FROM {self._table} WHERE {self._stream} AND {self._first} = ?",  # noqa: S608
                [self._target, *stream, first],
            )
        self._insert(stream, sorted(after - before))

    @property
    def _touching(self) -> str:
        return f"{self._first} >= 0 AND {self._end} >= ? AND {self._first} <= ?"

    @staticmethod
    def _bounds(offsets: Offsets) -> list[int]:
        return [int(offsets.min()), int(offsets.max()) + 1]

    def _select(
        self, stream: Stream, condition: str, values: Sequence[Any], suffix: str = ""
    ) -> Sequence[Any]:
        return self._execute(
            f"SELECT {self._first}, {self._end} FROM {self._table} "  # noqa: S608 - names are ours
            f"WHERE {self._stream} AND {condition}{suffix}",
            [self._target, *stream, *values],
        )

    def _insert(self, stream: Stream, ranges: Sequence[tuple[int, int]]) -> None:
        for first, end in ranges:
            self._execute(
                f"INSERT INTO {self._table} ({', '.join(self._names)}) VALUES (?, ?, ?, ?, ?)",  # noqa: S608
                [self._target, *stream, first, end],
            )
