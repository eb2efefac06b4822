"""Results: what happened to each row of a block, and dead letters as a queue stores them.

Every row of a block ends in exactly one state: delivered, dead (it can never be delivered) or
deferred (a later task delivers it). ``BlockProgress`` collects the states while the rows are on
their way; ``BlockResult`` is the final account.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.events import Block
from turnlane.logs import get_logger
from turnlane.runtime import Closeable

log = get_logger(__name__)

RowNumbers: TypeAlias = range | npt.NDArray[np.int64]
"""Numbers of rows in a block. Mostly they are consecutive."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Rows that can never be delivered, all for the same reason."""

    rows: Block
    numbers: npt.NDArray[np.int64]
    """Their row numbers in the block."""
    error: str
    """The name of the error's class."""
    text: str
    """The error's message."""
    attempts: int


@dataclass(frozen=True, slots=True)
class BlockResult:
    """What happened to the rows of a block."""

    delivered: int
    """The number of rows that the destination has."""
    deferred: npt.NDArray[np.int64]
    """The numbers of the rows that a later task delivers, ascending."""
    dead: list[DeadLetter] = field(default_factory=list)


class RowState(enum.IntEnum):
    """What happened to a row."""

    OPEN = 0
    DELIVERED = 1
    DEAD = 2
    DEFERRED = 3


class BlockProgress:
    """The state of each row of a block on its way. Not safe to use from several threads."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.open = block.num_rows
        """The number of rows that have no final state yet."""
        self._states = np.zeros(block.num_rows, dtype=np.uint8)
        self._dead: list[DeadLetter] = []

    def settle(self, numbers: RowNumbers, state: RowState) -> None:
        """Set the final state of these rows. A row is settled once."""
        at = slice(numbers.start, numbers.stop) if isinstance(numbers, range) else numbers
        assert not self._states[at].any(), "BUG: a row was settled twice"
        self._states[at] = state
        self.open -= len(numbers)

    def settle_dead(
        self, rows: Block, numbers: RowNumbers, error: BaseException, attempts: int
    ) -> None:
        """Settle these rows as dead, with the error that says why."""
        self.settle(numbers, RowState.DEAD)
        name = type(error).__name__
        positions = np.asarray(numbers, dtype=np.int64)
        self._dead.append(DeadLetter(rows, positions, name, str(error) or name, attempts))

    def get_result(self) -> BlockResult:
        """Return the final account. No row may be open."""
        assert not self.open
        delivered = int(np.count_nonzero(self._states == RowState.DELIVERED))
        return BlockResult(delivered, np.flatnonzero(self._states == RowState.DEFERRED), self._dead)


# ── dead letters ─────────────────────────────────────────────────────────────────────────────────

_FIELDS: list[pa.Field[Any]] = [
    pa.field("dead_action", pa.string()),
    pa.field("dead_reason", pa.string()),
    pa.field("dead_error", pa.string()),
    pa.field("dead_attempts", pa.int32()),
    pa.field("dead_time", pa.timestamp("us", tz="UTC")),
    pa.field("dead_config", pa.string()),
]
DEAD_LETTER_COLUMNS = pa.schema(_FIELDS)
"""The columns that a dead letter has in addition to the columns of its event."""
STEP_FAILED: Final = "StepFailed"
"""The reason of dead letters that a lane's own code could not handle."""
SUMMARY_SECONDS: Final = 60.0
"""The least time between two log lines about the dead letters of an action."""


def make_dead_letter_block(
    letters: Sequence[DeadLetter], action: str, time_ns: int, config: str | None = None
) -> Block:
    """Return one block with the rows of all letters, of which there is at least one.

    ``config`` is the version of the configuration under which the action delivered.
    """
    table = pa.Table.from_batches([letter.rows for letter in letters]).combine_chunks()
    (rows,) = table.to_batches()
    count = len(letters)
    values: dict[str, Sequence[object]] = {
        "dead_action": [action] * count,
        "dead_reason": [letter.error for letter in letters],
        "dead_error": [letter.text for letter in letters],
        "dead_attempts": [letter.attempts for letter in letters],
        "dead_time": [time_ns // 1000] * count,
        "dead_config": [config] * count,
    }
    # An event from a dead letter queue already has these columns: it gets new ones.
    rows = rows.select([name for name in rows.schema.names if name not in values])
    letter_of_row = np.repeat(np.arange(count), [letter.rows.num_rows for letter in letters])
    for added in DEAD_LETTER_COLUMNS:
        column: Any = pa.array(values[added.name], added.type)
        rows = rows.append_column(added, column.take(letter_of_row))
    return rows


class DeadLetterLog(Closeable):
    """Logs new dead letters: the first of an action at once, the next ones together, each minute.

    Safe to use from any thread.
    """

    def __init__(self, seconds: float = SUMMARY_SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._timers: dict[str, threading.Timer] = {}
        """By action: what logs its next summary."""
        self._waiting: dict[str, tuple[int, str, str]] = {}
        """By action: the number of letters of the next summary, their queue and the last reason."""

    def add(self, action: str, events: int, queue: str, reason: str) -> None:
        """Note that a queue has new dead letters of an action."""
        with self._lock:
            before = self._waiting.get(action, (0, "", ""))[0]
            self._waiting[action] = (before + events, queue, reason)
            if action not in self._timers:
                self._log(action)

    def _log(self, action: str) -> None:
        """Log what waits of an action, and the next summary later. Under the lock."""
        events, queue, reason = self._waiting.pop(action)
        log.warning(
            "delivery.events_dead",
            action=action,
            events=events,
            queue=queue,
            reason=reason,
            hint=f"turnlane dlq show {action} CONFIG",
        )
        timer = threading.Timer(self._seconds, self._end_pause, [action])
        timer.daemon = True
        self._timers[action] = timer
        timer.start()

    def _end_pause(self, action: str) -> None:
        with self._lock:
            if self._timers.pop(action, None) is not None and action in self._waiting:
                self._log(action)

    def close(self) -> None:
        """Log what waits."""
        with self._lock:
            for action in list(self._waiting):
                self._log(action)
            for timer in self._timers.values():
                timer.cancel()
            self._timers.clear()
