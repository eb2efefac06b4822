"""The dead letters of actions: list them, send them again, throw them away."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turnlane.client.node_client import RemoteNode, UnsettledSpans
from turnlane.delivery.results import DEAD_LETTER_COLUMNS
from turnlane.errors import ConfigError, NoSuchQueue, RetryLater
from turnlane.events import Block
from turnlane.intervals import convert_to_spans, find_inside, merge_near_spans

Mask = npt.NDArray[np.bool_]

REASON, TIME, KEY = "dead_reason", "dead_time", "key"
_READING: Final = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """A filter for dead letters. Fields that are ``None`` match every letter."""

    reason: str | None = None
    """The class of the error, such as `Never`."""
    since: datetime | None = None
    until: datetime | None = None
    key: str | None = None
    where: str | None = None
    """A condition in the SQL of SQLite, over columns of numbers, text, times or bytes."""

    def mask(self, block: Block) -> Mask:
        """Return which rows of a block match. Raises ``ConfigError`` for an invalid condition."""
        chosen = np.ones(block.num_rows, dtype=np.bool_)
        for name, wanted in ((REASON, self.reason), (KEY, self.key)):
            if wanted is not None:
                chosen &= _fill_nulls(
                    pc.equal(_column(block, name, pa.string()), pa.scalar(wanted))
                )
        stamp = pa.timestamp("us", tz="UTC")
        if self.since is not None:
            times = _column(block, TIME, stamp)
            chosen &= _fill_nulls(pc.greater_equal(times, pa.scalar(self.since, stamp)))
        if self.until is not None:
            times = _column(block, TIME, stamp)
            chosen &= _fill_nulls(pc.less(times, pa.scalar(self.until, stamp)))
        if self.where is not None and chosen.any():
            chosen &= _match_condition(block, self.where)
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


def _fill_nulls(condition: Any) -> Mask:  # noqa: ANN401 - a column
    """Return a condition as a mask; null is false."""
    return np.asarray(condition.fill_null(pa.scalar(value=False)))


def _match_condition(block: Block, condition: str) -> Mask:
    names = [field.name for field in block.schema if _is_plain(field.type)]
    table = sqlite3.connect(":memory:")
    try:
        columns = ", ".join(f'"{name.replace(chr(34), chr(34) * 2)}"' for name in names)
        table.execute(f"CREATE TABLE letters ({columns})")
        marks = ", ".join("?" * len(names))
        insert = f"INSERT INTO letters VALUES ({marks})"  # noqa: S608 - marks are question marks
        table.executemany(insert, _rows(block, names))
        # The condition comes from the user. It may read these letters and do nothing else.
        table.set_authorizer(_authorize_read)
        query = f"SELECT rowid - 1 FROM letters WHERE ({condition}\n)"  # noqa: S608 - see above
        found = table.execute(query)
        mask = np.zeros(block.num_rows, dtype=np.bool_)
        mask[[number for (number,) in found]] = True
        return mask
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise ConfigError("where", f"{error}; the columns are: {', '.join(names)}") from None
    finally:
        table.close()


def _authorize_read(action: int, *_: object) -> int:
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
    """Return the values for SQLite: bytes as text, times as ISO 8601."""
    if pa.types.is_timestamp(column.type):
        # Not with Python's datetime, which ends in the year 9999 and has only microseconds.
        times = pc.strftime(column.cast(pa.timestamp(column.type.unit)), "%Y-%m-%dT%H:%M:%S")
        zone = "Z" if column.type.tz else ""
        return [None if each is None else f"{each}{zone}" for each in times.to_pylist()]
    values = column.to_pylist()
    return [each.decode(errors="replace") if isinstance(each, bytes) else each for each in values]


SUFFIX: Final = ".dead"
STEP: Final = 10_000
STEP_BYTES: Final = 64 << 20
"""About how many letters, and bytes of letters, are handled in one step."""

Offsets = npt.NDArray[np.int64]
Advance = Callable[[int], object]


class SelectedLetters(NamedTuple):
    """The matching dead letters of one step."""

    letters: Block
    offsets: list[int]


@dataclass(slots=True)
class LetterSummary:
    """A summary of the letters of one action with the same reason."""

    action: str
    reason: str | None
    events: int
    first: datetime | None
    last: datetime | None


class DeadLetters:
    """The dead letters of one action on one node that existed at the first access.

    Later letters are left out: an event that is sent again may become a letter again, and a person
    who confirms a purge has seen only the letters of that moment.
    """

    def __init__(self, node: RemoteNode, action: str) -> None:
        self.action = action
        self.queue = f"{action}{SUFFIX}"
        self._node = node
        self._end: int | None = None

    @classmethod
    def all(cls, node: RemoteNode) -> list[DeadLetters]:
        """Return the dead letters of all actions of a node."""
        names = [name for name in sorted(node.queues()) if name.endswith(SUFFIX)]
        return [cls(node, name.removesuffix(SUFFIX)) for name in names]

    def count(self) -> int:
        """Return the number of letters."""
        return self._look(1).pending

    def chosen(self, choice: LetterFilter, limit: int | None = None) -> Iterator[SelectedLetters]:
        """Yield the matching letters in order, at most ``limit``. Raises ``NoSuchQueue``."""
        left = limit
        for block, offsets in self._waiting():
            numbers = np.flatnonzero(choice.mask(block))[:left]
            if len(numbers):
                yield SelectedLetters(block.take(numbers), offsets[numbers].tolist())
                left = None if left is None else left - len(numbers)
            if left == 0:
                return

    def _waiting(self) -> Iterator[tuple[Block, Offsets]]:
        """Yield all letters with their offsets, one step at a time."""
        at = 0
        while spans := self._look(STEP, at).spans:
            at = spans[-1][1]
            blocks: list[Block] = []
            places: list[Offsets] = []
            size = 0
            for first, block in self._read(spans):
                waiting = find_inside(spans, first, block.num_rows)
                if waiting.any():
                    blocks.append(block.filter(pa.array(waiting)))
                    places.append(np.flatnonzero(waiting) + first)
                    size += blocks[-1].nbytes
                if size >= STEP_BYTES:
                    yield _merge_blocks(blocks), np.concatenate(places)
                    blocks, places, size = [], [], 0
            if blocks:
                yield _merge_blocks(blocks), np.concatenate(places)

    def _read(self, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Block]]:
        """Yield blocks with these offsets, and possibly some offsets between them."""
        for hull in merge_near_spans(spans):
            yield from self._node.read(self.queue, *hull)

    def _look(self, events: int, first: int = 0) -> UnsettledSpans:
        """Return the unsettled letters from ``first`` on, without those after the first access."""
        found = self._node.unsettled(self.queue, events, first=first)
        if self._end is None:
            self._end = found.end
        end = self._end
        return found._replace(spans=[(at, min(to, end)) for at, to in found.spans if at < end])

    def summaries(self) -> list[LetterSummary]:
        """Return a summary for each reason."""
        counts: Counter[str | None] = Counter()
        times: dict[str | None, list[datetime]] = {}
        for letters, _ in self.chosen(LetterFilter()):
            for reason, time in zip(_values(letters, REASON), _values(letters, TIME), strict=True):
                counts[reason] += 1
                if time is not None:
                    known = times.setdefault(reason, [time, time])
                    times[reason] = [min(known[0], time), max(known[1], time)]
        return [
            LetterSummary(self.action, reason, count, *times.get(reason, (None, None)))
            for reason, count in counts.most_common()
        ]

    def replay(self, choice: LetterFilter, target: str, limit: int | None, advance: Advance) -> int:
        """Publish the original events of matching letters to a queue; return the number.

        Each step is one commit of the node: it publishes the events and settles their letters, or
        does neither. A crash loses no event and sends none twice.
        """
        if target not in self._node.queues():
            raise NoSuchQueue(f"there is no queue {target!r} to send them to; choose another one")
        done = 0
        for letters, offsets in self.chosen(choice, limit):
            events = _restore_events(letters)
            with self._node.stage(target, events.schema) as stage:
                stage.write(events)
                stage_id = stage.finish()
            ranges = [(self.queue, *span) for span in convert_to_spans(np.array(offsets))]
            try:
                is_mine = self._node.commit([stage_id], ranges, exact=True)
            except RetryLater:
                self._node.abort([stage_id])
                raise
            done += len(offsets) if is_mine else 0  # else another replay has sent them
            advance(len(offsets))
        return done

    def purge(self, choice: LetterFilter, limit: int | None, advance: Advance) -> int:
        """Throw matching letters away, with an entry in the audit log; return the number."""
        done = 0
        for _, offsets in self.chosen(choice, limit):
            done += self._node.purge(
                self.queue, convert_to_spans(np.array(offsets)), f"dlq: {choice}"
            )
            advance(len(offsets))
        return done


def _merge_blocks(blocks: Sequence[Block]) -> Block:
    """Join blocks, of which later ones may have more columns."""
    tables = [pa.Table.from_batches([block]) for block in blocks]
    (merged,) = pa.concat_tables(tables, promote_options="default").combine_chunks().to_batches()
    return merged


def _restore_events(letters: Block) -> Block:
    """Return the original events of letters."""
    return letters.select(
        [name for name in letters.schema.names if name not in DEAD_LETTER_COLUMNS.names]
    )


def _values(block: Block, name: str) -> list[Any]:
    at = block.schema.get_field_index(name)
    return [None] * block.num_rows if at < 0 else block.column(at).to_pylist()
