"""Choosing dead letters: by reason, time, key, or a condition in SQL. No I/O."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turnlane.errors import ConfigError
from turnlane.events import Block

Mask = npt.NDArray[np.bool_]

REASON, TIME, KEY = "dead_reason", "dead_time", "key"
_READING: Final = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}


@dataclass(frozen=True, slots=True)
class Choice:
    """Which dead letters are meant; what is not given does not matter."""

    reason: str | None = None
    """The class of the error, as `Never`."""
    since: datetime | None = None
    until: datetime | None = None
    key: str | None = None
    where: str | None = None
    """A condition in SQLite's SQL, over the columns that are numbers, texts, times or bytes."""

    def mask(self, block: Block) -> Mask:
        """Which rows of a block are chosen. Raises ``ConfigError`` for a wrong condition."""
        chosen = np.ones(block.num_rows, dtype=np.bool_)
        for name, wanted in ((REASON, self.reason), (KEY, self.key)):
            if wanted is not None:
                chosen &= _is(pc.equal(_column(block, name, pa.string()), pa.scalar(wanted)))
        stamp = pa.timestamp("us", tz="UTC")
        if self.since is not None:
            times = _column(block, TIME, stamp)
            chosen &= _is(pc.greater_equal(times, pa.scalar(self.since, stamp)))
        if self.until is not None:
            times = _column(block, TIME, stamp)
            chosen &= _is(pc.less(times, pa.scalar(self.until, stamp)))
        if self.where is not None and chosen.any():
            chosen &= _where(block, self.where)
        return chosen

    def __str__(self) -> str:
        given = {
            "reason": self.reason,
            "since": self.since and self.since.isoformat(),
            "until": self.until and self.until.isoformat(),
            "key": self.key,
            "where": self.where,
        }
        parts = [f"{name} {value}" for name, value in given.items() if value is not None]
        return ", ".join(parts) or "all"


def _column(block: Block, name: str, kind: Any) -> Any:  # noqa: ANN401 - a type and a column
    at = block.schema.get_field_index(name)
    return pa.nulls(block.num_rows, kind) if at < 0 else block.column(at).cast(kind)


def _is(condition: Any) -> Mask:  # noqa: ANN401 - a column
    """Null is no."""
    return np.asarray(condition.fill_null(pa.scalar(value=False)))


def _where(block: Block, condition: str) -> Mask:
    names = [field.name for field in block.schema if _is_plain(field.type)]
    table = sqlite3.connect(":memory:")
    try:
        columns = ", ".join(f'"{name.replace(chr(34), chr(34) * 2)}"' for name in names)
        table.execute(f"CREATE TABLE letters ({columns})")
        marks = ", ".join("?" * len(names))
        insert = f"INSERT INTO letters VALUES ({marks})"  # noqa: S608 - marks are question marks
        table.executemany(insert, _rows(block, names))
        # The condition is the user's own, but it is to read these letters and nothing else.
        table.set_authorizer(_only_reading)
        query = f"SELECT rowid - 1 FROM letters WHERE ({condition}\n)"  # noqa: S608 - see above
        found = table.execute(query)
        mask = np.zeros(block.num_rows, dtype=np.bool_)
        mask[[number for (number,) in found]] = True
        return mask
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise ConfigError("where", f"{error}; there are: {', '.join(names)}") from None
    finally:
        table.close()


def _only_reading(action: int, *_: object) -> int:
    return sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY


def _is_plain(kind: pa.DataType) -> bool:
    types = pa.types
    checks = (
        types.is_integer,
        types.is_floating,
        types.is_boolean,
        types.is_string,
        types.is_large_string,
        types.is_binary,
        types.is_large_binary,
        types.is_timestamp,
    )
    return any(check(kind) for check in checks)


def _rows(block: Block, names: list[str]) -> Iterator[tuple[object, ...]]:
    return zip(*(_plain(block.column(name)) for name in names), strict=True)


def _plain(column: Any) -> list[Any]:  # noqa: ANN401 - a column
    """Values as SQLite has them: bytes as the text they mostly are, times as ISO 8601."""
    if pa.types.is_timestamp(column.type):
        # Not by way of Python's datetime: that ends in the year 9999, and with microseconds.
        times = pc.strftime(column.cast(pa.timestamp(column.type.unit)), "%Y-%m-%dT%H:%M:%S")
        zone = "Z" if column.type.tz else ""
        return [None if each is None else f"{each}{zone}" for each in times.to_pylist()]
    values = column.to_pylist()
    return [each.decode(errors="replace") if isinstance(each, bytes) else each for each in values]
