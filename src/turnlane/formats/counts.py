"""Many counted messages at once: their lengths guessed from their distances, then checked."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnlane.formats.spans import Octets, Places

MAX_DIGITS: Final = 9
"""A longer number is no length."""
_POWERS: Final = 10 ** np.arange(1, MAX_DIGITS + 1)
_SPACE, _ZERO, _LESS = (ord(each) for each in " 0<")


class Chain(NamedTuple):
    """Messages that follow each other without a gap."""

    starts: Places
    ends: Places
    whole: bool
    """Whether there may be more of them after the marks that were looked at."""


def find_marks(data: Octets) -> Places:
    """Where ``<`` follows a digit and a space: the beginnings of counted messages, or so."""
    marks: Places = np.flatnonzero(data[2:] == _LESS) + 2
    marks = marks[data[marks - 1] == _SPACE]
    digits: NDArray[np.bool_] = data[marks - 2] - np.uint8(_ZERO) <= 9
    return marks[digits]


def chain(data: Octets, marks: Places, at: int, longest: int) -> Chain:
    """The messages that begin with the length written ``at`` a place.

    A message of n octets is followed by the digits of the next one's length, a space and the next
    mark; how many digits follows from that message's own distance. The guess holds up to the first
    message before whose mark another number is written: what is checked is the whole chain of
    lengths from a known beginning, so a wrong guess can cost time and nothing else.
    """
    gaps = np.diff(marks) - 1
    digits = _digits(gaps[:-1] - _digits(gaps[1:]))
    lengths = gaps[: max(0, len(digits) - 1)] - digits[1:]
    digits, marks = digits[: len(lengths)], marks[: len(lengths)]
    if not len(lengths) or marks[0] - 1 - digits[0] != at:
        return Chain(marks[:0], marks[:0], whole=False)
    right = _written(data, marks, digits) == lengths
    right &= (_digits(lengths) == digits) & (lengths <= longest)
    count = len(right) if right.all() else int(right.argmin())
    return Chain(marks[:count], marks[:count] + lengths[:count], count == len(right))


def _written(data: Octets, marks: Places, digits: Places) -> Places:
    """The numbers of so many digits that stand before the marks; -1 where there is none."""
    value = np.zeros(len(marks), np.int64)
    valid = np.ones(len(marks), bool)
    for at in range(int(digits.max())):
        octets = data.take(marks - 2 - at, mode="clip") - np.uint8(_ZERO)
        within = digits > at
        valid &= ~within | (octets <= 9)
        value += np.where(within, octets, 0) * np.int64(10**at)
    return np.where(valid, value, -1)


def _digits(numbers: Places) -> Places:
    """How many decimal digits they have; at least one."""
    found: Places = np.searchsorted(_POWERS, numbers, "right") + 1
    return found
