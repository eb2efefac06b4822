"""The key space, and the shards that divide it between databases. Pure.

A key hashes to a 64-bit id: the first eight bytes of the MD5 of its text, which PostgreSQL, MySQL
and Python compute alike. The databases have no common unsigned 64-bit column type, so ids are
stored minus 2^63, which keeps their order.

A map assigns every id to one shard. It has a version and never changes: a reshard makes the next
map. Every database of a queue keeps all maps, so a client that knows an old map finds the newest.
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

from turnlane.databases import remove_password
from turnlane.errors import ConfigError

# ── the key space ────────────────────────────────────────────────────────────────────────────────

KEYSPACE_SIZE: Final = 2**64
KEYSPACE_SHIFT: Final = 2**63


def keyspace_id(key: object) -> int:
    """Return the stored id of a key, between -2^63 and 2^63 - 1; ``None`` is the empty key."""
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
            raise ValueError(f"{self} is not a key range: it is empty")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a range in the notation of Vitess: ``-80``, ``80-``, ``40-80``; ``-`` is all keys.

        The bounds are the leading bytes of an id in hexadecimal.
        """
        match = re.fullmatch(r"((?:[0-9a-fA-F]{2}){0,8})-((?:[0-9a-fA-F]{2}){0,8})", text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is not a key range; write hexadecimal bytes, such as -80, 40-80 or 80-"
            )
        start, end = match.groups()
        last = int(end.ljust(16, "0"), 16) if end else KEYSPACE_SIZE
        return cls(int(start.ljust(16, "0"), 16), last)

    def split(self, parts: int) -> list[Self]:
        """Split the range into ``parts`` equal parts, or fewer if it has fewer ids."""
        count = min(parts, self.end - self.start)
        width = self.end - self.start
        bounds = [self.start + width * at // count for at in range(count + 1)]
        return [type(self)(start, end) for start, end in pairwise(bounds)]

    @property
    def is_whole(self) -> bool:
        """Whether every id lies in the range."""
        return self.start == 0 and self.end == KEYSPACE_SIZE

    @property
    def stored_bounds(self) -> tuple[int, int]:
        """The first and the last id of the range, as the database stores them."""
        return self.start - KEYSPACE_SHIFT, self.end - 1 - KEYSPACE_SHIFT

    def contains(self, stored_id: int) -> bool:
        """Whether a stored id lies in the range."""
        return self.start <= stored_id + KEYSPACE_SHIFT < self.end

    def overlaps(self, other: KeyRange) -> bool:
        """Whether an id lies in both ranges."""
        return self.start < other.end and other.start < self.end

    def __str__(self) -> str:
        return f"{_format_bound(self.start)}-{_format_bound(self.end % KEYSPACE_SIZE)}"


def _format_bound(value: int) -> str:
    """Return the shortest whole bytes in hexadecimal; an empty text for an open end."""
    digits = f"{value:016x}"
    while digits.endswith("00"):
        digits = digits[:-2]
    return digits


WHOLE_KEYSPACE: Final = KeyRange()


def subtract_ranges(ranges: Iterable[KeyRange], removed: Iterable[KeyRange]) -> list[KeyRange]:
    """Return the parts of ``ranges`` that lie in none of ``removed``."""
    left = list(ranges)
    for hole in removed:
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


# ── shards ───────────────────────────────────────────────────────────────────────────────────────

ShardSpec = tuple[str, str]
"""A shard as users write it: a url and a key range."""

IDS_PER_SHARD: Final = 2**40
"""Event ids of a shard, more than it ever gives out. (JavaScript has no exact integers above 2^53:
up to there, 8,192 shards have ids.)"""


@dataclass(frozen=True, slots=True)
class Shard:
    """A database that has the events of a key range."""

    url: str = field(repr=False, compare=False)
    key_range: KeyRange = WHOLE_KEYSPACE
    address: str = field(init=False)
    """The url without the password; unique among the shards of a queue."""
    number: int = field(default=0, repr=False, compare=False)
    """Unique among all shards that the queue ever had, once the shard is in a map."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", remove_password(self.url))

    @classmethod
    def from_spec(cls, spec: Shard | ShardSpec) -> Shard:
        """Make a shard of a url and a range in text. Raises ``ConfigError``."""
        if isinstance(spec, Shard):
            return spec
        url, key_range = spec
        try:
            return cls(url, KeyRange.parse(key_range))
        except ValueError as error:
            raise ConfigError("range", str(error)) from None

    @property
    def first_id(self) -> int:
        """The first id of its events; the ids of different shards never overlap.

        So an id from before a reshard never names another event afterwards.
        """
        return self.number * IDS_PER_SHARD + 1

    def __str__(self) -> str:
        return f"{self.key_range} at {self.address}"


def _number_shards(shards: Iterable[Shard], first: int) -> tuple[Shard, ...]:
    return tuple(replace(shard, number=number) for number, shard in enumerate(shards, start=first))


# ── maps ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ShardMap:
    """All shards of a queue, by key range. Every key belongs to exactly one shard."""

    shards: tuple[Shard, ...]
    retired: tuple[Shard, ...] = ()
    """Shards that were split or merged: they fire nothing, and new rows are moved away."""
    version: int = 0
    used_numbers: int = 0
    """How many numbers were given to shards."""

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "shards", tuple(sorted(self.shards, key=lambda each: each.key_range.start))
        )
        covered = 0
        for shard in self.shards:
            start, end = shard.key_range.start, shard.key_range.end
            if start > covered:
                raise ConfigError("shards", f"no shard has the keys {KeyRange(covered, start)}")
            if start < covered:
                twice = KeyRange(start, min(covered, end))
                raise ConfigError("shards", f"more than one shard has the keys {twice}")
            covered = end
        if covered < KEYSPACE_SIZE:
            missing = KeyRange(covered, KEYSPACE_SIZE)
            raise ConfigError("shards", f"no shard has the keys {missing}")
        addresses = [shard.address for shard in (*self.shards, *self.retired)]
        for address in addresses:
            if addresses.count(address) > 1:
                raise ConfigError("shards", f"{address} is used by two shards")

    @classmethod
    def from_shards(cls, specs: Iterable[Shard | ShardSpec]) -> Self:
        """Make a first map. Raises ``ConfigError`` unless it has every key exactly once."""
        shards = sorted(map(Shard.from_spec, specs), key=lambda each: each.key_range.start)
        return cls(_number_shards(shards, 0), used_numbers=len(shards))

    def find_shard(self, keyspace_id: int) -> Shard:
        """Return the shard of a key, by its stored id."""
        starts = [shard.key_range.start for shard in self.shards]
        return self.shards[bisect_right(starts, keyspace_id + KEYSPACE_SHIFT) - 1]

    def plan_reshard(self, targets: Sequence[Shard]) -> ShardMap:
        """Return the next map, in which ``targets`` replace the shards that have their keys now.

        Raises ``ConfigError`` unless they cover exactly the keys of these shards.
        """
        sources = [
            shard
            for shard in self.shards
            if any(shard.key_range.overlaps(target.key_range) for target in targets)
        ]
        others = [shard for shard in self.shards if shard not in sources]
        return ShardMap(
            (*others, *_number_shards(targets, self.used_numbers)),
            (*self.retired, *sources),
            self.version + 1,
            self.used_numbers + len(targets),
        )

    def drop_retired(self) -> ShardMap:
        """Return the next map, which no longer names the retired shards."""
        return replace(self, retired=(), version=self.version + 1)

    def to_json(self) -> str:
        """Return the map as databases keep it, without passwords."""

        def encode(shards: Iterable[Shard]) -> list[dict[str, Any]]:
            return [
                {"url": shard.address, "range": str(shard.key_range), "number": shard.number}
                for shard in shards
            ]

        return json.dumps(
            {
                "version": self.version,
                "numbered": self.used_numbers,
                "shards": encode(self.shards),
                "retired": encode(self.retired),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the text of :meth:`to_json`."""
        values = json.loads(text)
        # Maps of earlier versions have no numbers: the ids of all their shards begin at 1.
        shards, retired = (
            tuple(
                Shard(each["url"], KeyRange.parse(each["range"]), number=each.get("number", 0))
                for each in values[key]
            )
            for key in ("shards", "retired")
        )
        used_numbers = values.get("numbered", len(shards) + len(retired))
        return cls(shards, retired, values["version"], used_numbers)
