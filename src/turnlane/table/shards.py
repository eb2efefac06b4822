"""Shards: which database has which part of the key space. Pure.

A map has a version and is never changed: a reshard makes the next one. Every database of a queue
keeps all maps, so that whoever knows one of them finds the newest.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, Self
from urllib.parse import urlsplit, urlunsplit

from turnlane.errors import ConfigError

# ── keyspace ──
# The key space: where a key lies in it, and the ranges that shards and receivers take of it.
#
# A key hashes to a 64-bit id: the first eight bytes of the MD5 of its text, which PostgreSQL,
# MySQL
# and Python compute alike. Databases have no unsigned 64-bit column in common, so ids are stored
# shifted down by 2^63: they sort as the unsigned ones do.

KEYSPACE_SIZE: Final = 2**64
KEYSPACE_SHIFT: Final = 2**63


def keyspace_id(key: object) -> int:
    """The id of a key, as it is stored: between -2^63 and 2^63 - 1. No key is an empty one."""
    text = "" if key is None else str(key)
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") - KEYSPACE_SHIFT


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Ids from ``start`` up to, not including, ``end``; both unsigned."""

    start: int = 0
    end: int = KEYSPACE_SIZE

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= KEYSPACE_SIZE:
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
        return cls(
            int(start.ljust(16, "0"), 16), int(end.ljust(16, "0"), 16) if end else KEYSPACE_SIZE
        )

    def split(self, parts: int) -> list[Self]:
        """The range in so many parts of the same size, or fewer if there are not so many ids."""
        count = min(parts, self.end - self.start)
        width = self.end - self.start
        bounds = [self.start + width * at // count for at in range(count + 1)]
        return [type(self)(start, end) for start, end in pairwise(bounds)]

    @property
    def is_everything(self) -> bool:
        """Whether every id lies in the range."""
        return self.start == 0 and self.end == KEYSPACE_SIZE

    @property
    def stored(self) -> tuple[int, int]:
        """The first and the last id of the range, as the database has them."""
        return self.start - KEYSPACE_SHIFT, self.end - 1 - KEYSPACE_SHIFT

    def contains(self, stored_id: int) -> bool:
        """Whether an id, as it is stored, lies in the range."""
        return self.start <= stored_id + KEYSPACE_SHIFT < self.end

    def overlaps(self, other: KeyRange) -> bool:
        """Whether some id lies in both."""
        return self.start < other.end and other.start < self.end

    def __str__(self) -> str:
        return f"{_bound(self.start)}-{_bound(self.end % KEYSPACE_SIZE)}"


WHOLE_KEYSPACE: Final = KeyRange()


def subtract_ranges(ranges: Iterable[KeyRange], gone: Iterable[KeyRange]) -> list[KeyRange]:
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


ShardSpec = tuple[str, str]
"""A shard as people give it: an address and a key range."""

IDS_PER_SHARD: Final = 2**40
"""To a shard: so many events it may have had before its ids would be another's. (JavaScript has no
whole numbers above 2**53: with these, they are good for 8,192 shards.)"""


def address_of(url: str) -> str:
    """An address without its password: how a database is known to others."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}@{host}"))


@dataclass(frozen=True, slots=True)
class Shard:
    """A database that has the events of a key range."""

    url: str = field(repr=False, compare=False)
    key_range: KeyRange = WHOLE_KEYSPACE
    address: str = field(init=False)
    """Its address without the password; no two shards of a queue have the same."""
    number: int = field(default=0, repr=False, compare=False)
    """No other shard that the queue ever had has the same, once it is in a map."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", address_of(self.url))

    @classmethod
    def of(cls, given: Shard | ShardSpec) -> Shard:
        """A shard from an address and a range as text. Raises ``ConfigError``."""
        if isinstance(given, Shard):
            return given
        url, key_range = given
        try:
            return cls(url, KeyRange.parse(key_range))
        except ValueError as error:
            raise ConfigError("range", str(error)) from None

    @property
    def first_id(self) -> int:
        """Where the ids of its events begin; they reach into no other shard's.

        So an id that was given out before a reshard means no other event afterwards.
        """
        return self.number * IDS_PER_SHARD + 1

    def __str__(self) -> str:
        return f"{self.key_range} at {self.address}"


@dataclass(frozen=True, slots=True)
class ShardMap:
    """All shards of a queue, by key range; the whole key space, each key once."""

    shards: tuple[Shard, ...]
    retired: tuple[Shard, ...] = ()
    """Shards that were split or merged: nobody fires there, and what still comes is moved on."""
    version: int = 0
    numbered: int = 0
    """How many numbers were given to shards so far."""

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "shards", tuple(sorted(self.shards, key=lambda each: each.key_range.start))
        )
        self._check_ranges()
        addresses = [shard.address for shard in (*self.shards, *self.retired)]
        for address in addresses:
            if addresses.count(address) > 1:
                raise ConfigError("shards", f"{address} stands there twice")

    def _check_ranges(self) -> None:
        reached = 0
        for shard in self.shards:
            start, end = shard.key_range.start, shard.key_range.end
            if start > reached:
                raise ConfigError("shards", f"no shard has the keys {KeyRange(reached, start)}")
            if start < reached:
                twice = KeyRange(start, min(reached, end))
                raise ConfigError("shards", f"more than one shard has the keys {twice}")
            reached = end
        if reached < KEYSPACE_SIZE:
            raise ConfigError("shards", f"no shard has the keys {KeyRange(reached, KEYSPACE_SIZE)}")

    @classmethod
    def of(cls, given: Iterable[Shard | ShardSpec]) -> Self:
        """A first map. Raises ``ConfigError`` unless it has every key exactly once."""
        shards = sorted(map(Shard.of, given), key=lambda each: each.key_range.start)
        return cls(_numbered(shards, 0), numbered=len(shards))

    def shard_of(self, keyspace_id: int) -> Shard:
        """The shard that has a key, by its id as it is stored."""
        starts = [shard.key_range.start for shard in self.shards]
        return self.shards[bisect_right(starts, keyspace_id + KEYSPACE_SHIFT) - 1]

    def resharded(self, targets: Sequence[Shard]) -> ShardMap:
        """The next map: ``targets`` take the place of the shards that have their keys now.

        Raises ``ConfigError`` unless they have all keys of those shards, and no others.
        """
        sources = self.sources_of(targets)
        kept = [shard for shard in self.shards if shard not in sources]
        return ShardMap(
            (*kept, *_numbered(targets, self.numbered)),
            (*self.retired, *sources),
            self.version + 1,
            self.numbered + len(targets),
        )

    def without_retired(self) -> ShardMap:
        """The next map: nobody looks after the retired shards any more."""
        return replace(self, retired=(), version=self.version + 1)

    def sources_of(self, targets: Sequence[Shard]) -> list[Shard]:
        """The shards whose keys the targets take over."""
        return [
            shard
            for shard in self.shards
            if any(shard.key_range.overlaps(target.key_range) for target in targets)
        ]

    # ── as it is kept ────────────────────────────────────────────────────────────────────────────

    def to_json(self) -> str:
        """The map as databases keep it: without passwords."""
        return json.dumps(
            {
                "version": self.version,
                "numbered": self.numbered,
                "shards": [_written(shard) for shard in self.shards],
                "retired": [_written(shard) for shard in self.retired],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A map from what :meth:`to_json` wrote."""
        values = json.loads(text)
        shards, retired = (tuple(map(_read, values[part])) for part in ("shards", "retired"))
        # Maps of earlier versions have no numbers: all their shards' ids begin at 1.
        numbered = values.get("numbered", len(shards) + len(retired))
        return cls(shards, retired, values["version"], numbered)


def _written(shard: Shard) -> dict[str, Any]:
    return {"url": shard.address, "range": str(shard.key_range), "number": shard.number}


def _read(values: dict[str, Any]) -> Shard:
    key_range = KeyRange.parse(values["range"])
    return Shard(values["url"], key_range, number=values.get("number", 0))


def _numbered(shards: Iterable[Shard], first: int) -> tuple[Shard, ...]:
    return tuple(replace(shard, number=number) for number, shard in enumerate(shards, start=first))
