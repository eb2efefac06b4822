"""Whether to compress a frame: only where everything waits for the disk, and would wait less.

Compressing costs ``1/C`` seconds a byte and saves the writing of ``1 - r`` of it, at ``1/W``
seconds a byte. On a fast disk, or with data that does not shrink, that is a loss: so measure. It is
one, too, where the disk has time to spare, and the processor that compresses has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Literal, get_args

import pyarrow as pa

from turnlane.errors import ConfigError
from turnlane.queues.log.frames import Data

Mode = Literal["auto", "snappy", "none"]

SMALLEST = 512
"""Frames below this many bytes are never compressed: their header outweighs the gain."""
TRIAL_EVERY = 64
"""How often ``auto`` tries again, in frames, whatever it believes."""
TRIAL_BYTES = 256 * 1024
"""A trial needs no more than this: a part of a frame compresses as the whole does."""
BUSY = 0.8
"""The share of its time that a writer waits for the disk before less to write would help. No more
is compressed than keeps it there."""
_PAUSE = 2.0
"""Seconds: a writer that was silent for so long had nothing to do, which says nothing of a disk."""
_SNAPPY = pa.Codec("snappy")
_WEIGHT = 0.2
"""How much the latest measurement counts in a moving average."""


def pays(ratio: float, compress_speed: float, write_speed: float) -> bool:
    """Whether compressing and writing less is faster than writing it all. Speeds in bytes/s."""
    return 1 / compress_speed < (1 - ratio) / write_speed


class Compression:
    """The policy of one log. Used by its writer thread only."""

    def __init__(self, mode: Mode = "auto", *, timer: Callable[[], float] = perf_counter) -> None:
        if mode not in get_args(Mode):
            raise ConfigError("compression", f"{mode!r} is none of auto, snappy, none")
        self.mode = mode
        self._timer = timer
        self._frames = 0
        self._ratio: float | None = None
        self._compress_speed: float | None = None
        self._write_speed: float | None = None
        self._wrote_at = timer()
        self._waited: float | None = None
        self._passed: float | None = None
        """Seconds that writes took, and those from each to the next."""

    def pack(self, pieces: Sequence[Data]) -> pa.Buffer | None:
        """The pieces compressed as one, or none if they are better stored as they are."""
        size = sum(len(piece) for piece in pieces)
        if self.mode == "none" or size < SMALLEST:
            return None
        if self.mode == "auto" and not self._wanted(pieces):
            return None
        packed = self._compressed(_joined(pieces))
        return packed if len(packed) < size else None

    def wrote(self, size: int, seconds: float) -> None:
        """Learn how fast the disk takes bytes, syncing included, and how busy that keeps it."""
        now = self._timer()
        since = max(seconds, now - self._wrote_at)
        self._wrote_at = now
        if since - seconds < _PAUSE:
            self._waited = _moved(self._waited, seconds)
            self._passed = _moved(self._passed, since)
        if size and seconds > 0:
            self._write_speed = _moved(self._write_speed, size / seconds)

    def _wanted(self, pieces: Sequence[Data]) -> bool:
        if self._frames % TRIAL_EVERY == 0:
            whole = _joined(pieces)
            self._compressed(whole.slice(0, min(TRIAL_BYTES, len(whole))))
        self._frames += 1
        if self._ratio is None or self._compress_speed is None or self._write_speed is None:
            return False
        if not self._waited or not self._passed or self._waited < BUSY * self._passed:
            return False
        return pays(self._ratio, self._compress_speed, self._write_speed)

    def _compressed(self, data: pa.Buffer) -> pa.Buffer:
        started = self._timer()
        packed = _SNAPPY.compress(data)
        seconds = self._timer() - started
        self._ratio = _moved(self._ratio, len(packed) / len(data))
        if seconds > 0:
            self._compress_speed = _moved(self._compress_speed, len(data) / seconds)
        return packed


def _joined(pieces: Sequence[Data]) -> pa.Buffer:
    if len(pieces) == 1:
        return pa.py_buffer(pieces[0])
    return pa.py_buffer(b"".join(memoryview(piece) for piece in pieces))


def _moved(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)
