"""A block of rows on its way through the steps of a lane: who gets which rows. No I/O.

An event is through if all its actions have it, or a queue has what they could not deliver now.
Otherwise it is held back as a whole, all the rows that a transform has made of it: nothing of it is
staged, and it comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.delivery.outcome import DeadLetter, Outcome
from turnlane.spark.siblings import Mask, with_siblings
from turnlane.spark.steps import Step

Deliver = Callable[[Step, pa.RecordBatch], Outcome]


@dataclass(slots=True)
class Buried:
    """Rows that an action can never deliver."""

    step: Step
    letter: DeadLetter
    rows: npt.NDArray[np.int64]
    """Their numbers in the block."""

    def only(self, mask: Mask) -> Buried:
        """Some of them."""
        return replace(self, rows=self.rows[mask])


@dataclass(slots=True)
class Passed:
    """What became of a block."""

    held: Mask
    """Rows whose events come again."""
    queued: dict[str, Mask] = field(default_factory=dict)
    """Rows that go into the queues of actions that could not deliver them now."""
    buried: list[Buried] = field(default_factory=list)

    @property
    def dead(self) -> Mask:
        """Rows that are given up for one action at least, and not held back for another."""
        mask = np.zeros(len(self.held), dtype=np.bool_)
        for each in self.buried:
            mask[each.rows] = True
        return mask & ~self.held


def passed(
    rows: pa.RecordBatch, steps: Sequence[Step], routes: Mapping[str, Mask], deliver: Deliver
) -> Passed:
    """Have all steps deliver what is theirs by ``routes``."""
    passage = _Passage(rows, routes, deliver)
    for step in steps:
        if not step.only_when_suspended:
            passage.close_group()
        passage.take(step)
    passage.close_group()
    return passage.result


class _Passage:
    def __init__(self, rows: pa.RecordBatch, routes: Mapping[str, Mask], deliver: Deliver) -> None:
        self._rows = rows
        self._routes = routes
        self._deliver = deliver
        self._left = np.zeros(rows.num_rows, dtype=np.bool_)
        """Rows that the steps of this group could not deliver so far."""
        self._queue: str | None = None
        """Where those may go."""
        self.result = Passed(np.zeros(rows.num_rows, dtype=np.bool_))

    def close_group(self) -> None:
        """No other step stands in for those before: what is left waits, here or in a queue."""
        if self._queue is None:
            self.result.held |= with_siblings(self._rows, self._left)
        elif self._left.any():
            self._into_queue(self._queue, self._left)
        self._left = np.zeros_like(self._left)
        self._queue = None

    def take(self, step: Step) -> None:
        """Have a step deliver its rows."""
        candidates = self._left if step.only_when_suspended else ~self.result.held
        wanted = candidates & self._routes[step.action]
        if step.output is None:
            assert step.queue is not None
            self._into_queue(step.queue, wanted)
            self._left &= ~wanted
            return
        self._queue = self._queue or step.queue
        numbers = np.flatnonzero(wanted)
        if not len(numbers):
            return
        part = self._rows if len(numbers) == self._rows.num_rows else self._rows.take(numbers)
        outcome = self._deliver(step, part)
        self.result.buried += [
            Buried(step, letter, numbers[letter.numbers]) for letter in outcome.dead
        ]
        self._left[numbers] = False
        self._left[numbers[outcome.kept]] = True

    def _into_queue(self, queue: str, mask: Mask) -> None:
        known = self.result.queued.get(queue)
        self.result.queued[queue] = mask.copy() if known is None else known | mask
