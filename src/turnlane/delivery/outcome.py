"""What became of a block: every row is delivered, dead or kept, and one of them only."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.events import Block

Numbers: TypeAlias = range | npt.NDArray[np.int64]
"""Numbers of rows: in one stretch, mostly."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Rows that can never be delivered, all for the same reason."""

    rows: Block
    numbers: npt.NDArray[np.int64]
    """Their row numbers in the block that was to be delivered."""
    error: str
    """The class of the error."""
    text: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a block."""

    delivered: int
    """How many rows the destination has."""
    kept: npt.NDArray[np.int64]
    """The numbers of the rows that are to be delivered another time, ascending."""
    dead: list[DeadLetter] = field(default_factory=list)


class Fate(enum.IntEnum):
    """What became of a row."""

    OPEN = 0
    DELIVERED = 1
    DEAD = 2
    KEPT = 3


class Tally:
    """Collects what becomes of the rows of a block. Not safe to use from several threads."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.open = block.num_rows
        """Rows whose fate is not known yet."""
        self._fates = np.zeros(block.num_rows, dtype=np.uint8)
        self._dead: list[DeadLetter] = []

    def settle(self, numbers: Numbers, fate: Fate) -> None:
        """Note what became of these rows. That happens to a row once."""
        at = slice(numbers.start, numbers.stop) if isinstance(numbers, range) else numbers
        assert not self._fates[at].any(), "a row has one fate"
        self._fates[at] = fate
        self.open -= len(numbers)

    def bury(self, rows: Block, numbers: Numbers, error: BaseException, attempts: int) -> None:
        """Note that these rows are dead, and of what."""
        self.settle(numbers, Fate.DEAD)
        places = np.asarray(numbers, dtype=np.int64)
        name = type(error).__name__
        self._dead.append(DeadLetter(rows, places, name, str(error) or name, attempts))

    def outcome(self) -> Outcome:
        """The result, once no row is open."""
        assert not self.open
        delivered = int(np.count_nonzero(self._fates == Fate.DELIVERED))
        return Outcome(delivered, np.flatnonzero(self._fates == Fate.KEPT), self._dead)


# ── dead_letters ──
# Dead letters: the events that cannot be delivered, with the reason, as a queue keeps them.

_FIELDS: list[pa.Field[Any]] = [
    pa.field("dead_action", pa.string()),
    pa.field("dead_reason", pa.string()),
    pa.field("dead_error", pa.string()),
    pa.field("dead_attempts", pa.int32()),
    pa.field("dead_time", pa.timestamp("us", tz="UTC")),
    pa.field("dead_config", pa.string()),
]
COLUMNS = pa.schema(_FIELDS)
"""What a dead letter has beside the columns of its event."""


def dead_letter_block(
    letters: Sequence[DeadLetter], action: str, time_ns: int, config: str | None = None
) -> Block:
    """One block of all these letters, of which there is at least one.

    ``config`` is the version of the configuration that they were delivered by.
    """
    table = pa.Table.from_batches([letter.rows for letter in letters]).combine_chunks()
    (rows,) = table.to_batches()
    same = len(letters)
    values: dict[str, Sequence[object]] = {
        "dead_action": [action] * same,
        "dead_reason": [letter.error for letter in letters],
        "dead_error": [letter.text for letter in letters],
        "dead_attempts": [letter.attempts for letter in letters],
        "dead_time": [time_ns // 1000] * same,
        "dead_config": [config] * same,
    }
    # An event that comes from a queue of dead letters has these columns: it gets new ones.
    rows = rows.select([name for name in rows.schema.names if name not in values])
    which = np.repeat(np.arange(same), [letter.rows.num_rows for letter in letters])
    for added in COLUMNS:
        column: Any = pa.array(values[added.name], added.type)
        rows = rows.append_column(added, column.take(which))
    return rows
