"""The key space: where a key lies in it, and the ranges that shards and receivers take of it.

A key hashes to a 64-bit id: the first eight bytes of the MD5 of its text, which PostgreSQL, MySQL
and Python compute alike. Databases have no unsigned 64-bit column in common, so ids are stored
shifted down by 2^63: they sort as the unsigned ones do.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Self

SPACE: Final = 2**64
SHIFT: Final = 2**63


def keyspace_id(key: object) -> int:
    """The id of a key, as it is stored: between -2^63 and 2^63 - 1. No key is an empty one."""
    text = "" if key is None else str(key)
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") - SHIFT


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Ids from ``start`` up to, not including, ``end``; both unsigned."""

    start: int = 0
    end: int = SPACE

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= SPACE:
            raise ValueError(f"{self} is not a key range: it holds nothing")

    @classmethod
    def parse(cls, text: str) -> Self:
        """A range as Vitess writes it: ``-80``, ``80-``, ``40-80``, and ``-`` for everything.

        The bounds are the leading bytes of an id in hexadecimal.
        """
        match = re.fullmatch(r"((?:[0-9a-fA-F]{2}){0,8})-((?:[0-9a-fA-F]{2}){0,8})", text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is not a key range; write hexadecimal bytes, such as -80, 40-80 or 80-"
            )
        start, end = match.groups()
        return cls(int(start.ljust(16, "0"), 16), int(end.ljust(16, "0"), 16) if end else SPACE)

    def split(self, parts: int) -> list[Self]:
        """The range in so many parts of the same size, or fewer if there are not so many ids."""
        count = min(parts, self.end - self.start)
        width = self.end - self.start
        bounds = [self.start + width * at // count for at in range(count + 1)]
        return [type(self)(start, end) for start, end in pairwise(bounds)]

    @property
    def is_everything(self) -> bool:
        """Whether every id lies in the range."""
        return self.start == 0 and self.end == SPACE

    @property
    def stored(self) -> tuple[int, int]:
        """The first and the last id of the range, as the database has them."""
        return self.start - SHIFT, self.end - 1 - SHIFT

    def contains(self, stored_id: int) -> bool:
        """Whether an id, as it is stored, lies in the range."""
        return self.start <= stored_id + SHIFT < self.end

    def overlaps(self, other: KeyRange) -> bool:
        """Whether some id lies in both."""
        return self.start < other.end and other.start < self.end

    def __str__(self) -> str:
        return f"{_bound(self.start)}-{_bound(self.end % SPACE)}"


EVERYTHING: Final = KeyRange()


def without(ranges: Iterable[KeyRange], gone: Iterable[KeyRange]) -> list[KeyRange]:
    """What is left of ranges when others are cut out of them."""
    left = list(ranges)
    for hole in gone:
        bounds = [
            pair
            for each in left
            for pair in (
                (each.start, min(each.end, hole.start)),
                (max(each.start, hole.end), each.end),
            )
        ]
        left = [KeyRange(start, end) for start, end in bounds if start < end]
    return left


def _bound(value: int) -> str:
    """The shortest whole bytes that say it; nothing for an end that is open."""
    digits = f"{value:016x}"
    while digits.endswith("00"):
        digits = digits[:-2]
    return digits
