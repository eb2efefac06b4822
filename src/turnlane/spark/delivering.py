"""Delivering in a task: an action's output and its engine, and a second one if that stays away."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turnlane.delivery.columns import DIRECT, PAYLOAD
from turnlane.delivery.engine import GRACE, Engine
from turnlane.delivery.outcome import DeadLetter, Outcome
from turnlane.delivery.settings import FailoverSettings, Ordering
from turnlane.errors import RetryLater
from turnlane.events import Block
from turnlane.outputs import registry
from turnlane.outputs.contract import Output, OutputSettings
from turnlane.pipeline.settings import FAILOVER
from turnlane.spark.lane_nodes import Gates, open_for
from turnlane.spark.steps import Step

log = logging.getLogger(__name__)

Numbers = npt.NDArray[np.int64]


class Delivery:
    """What a task delivers for one action. Made when there is something, closed with the task."""

    def __init__(self, step: Step, gates: Gates, opened: ExitStack) -> None:
        assert step.output is not None
        self._step = step
        self._gates = gates
        self._opened = opened
        self._engine = self._made(step.action, step.output)
        self._second: Engine | None = None
        self._order = _Order(step.delivery.ordering)
        self._until = time.monotonic() + step.delivery.max_time

    def run(self, blocks: Iterable[Block]) -> Generator[tuple[Block, Outcome]]:
        """Deliver blocks, all that the task has; gives each back with what became of it."""
        taken: deque[Block] = deque()

        def handed() -> Iterator[Block]:
            for block in blocks:
                taken.append(block)
                yield _handed(block, self._step)

        with closing(self._engine.run(handed())) as outcomes:
            for outcome in outcomes:
                block = taken.popleft()
                final = self._failed_over(block, outcome)
                self._order.note(block, final.kept)
                yield block, final

    def deliver(self, rows: Block) -> Outcome:
        """Deliver some of the task's rows: those before have had their chance."""
        tried = self._order.allowed(rows)
        if self._is_late or not len(tried):
            return Outcome(0, np.arange(rows.num_rows))
        part = rows if len(tried) == rows.num_rows else rows.take(tried)
        ((_, outcome),) = self.run([part])
        return _of_all(outcome, tried, rows.num_rows)

    @property
    def _is_late(self) -> bool:
        return time.monotonic() > self._until

    # ── the second output ────────────────────────────────────────────────────────────────────────

    def _failed_over(self, block: Block, outcome: Outcome) -> Outcome:
        failover = self._step.delivery.failover
        if failover is None or not len(outcome.kept) or self._is_late:
            return outcome
        rest = block.take(outcome.kept)
        tried = self._order.allowed(rest)
        if not len(tried) or not self._is_away(failover):
            return outcome
        second = _of_all(self._by_second(rest.take(tried), failover), tried, rest.num_rows)
        dead = [_renumbered(letter, outcome.kept) for letter in second.dead]
        kept = outcome.kept[second.kept]
        return Outcome(outcome.delivered + second.delivered, kept, [*outcome.dead, *dead])

    def _by_second(self, rows: Block, failover: FailoverSettings) -> Outcome:
        output = _plain(failover.output)
        if self._second is None:
            self._second = self._made(f"{self._step.action}.{FAILOVER}", output)
        return self._second.deliver(_handed(rows, self._step, output))

    def _is_away(self, failover: FailoverSettings) -> bool:
        action = self._step.action
        try:
            return open_for(self._gates.status([action]), action) >= failover.after
        except RetryLater as error:
            log.warning("no word of how %s is, events are kept: %s", action, error)
            return False

    def _made(self, name: str, settings: dict[str, Any]) -> Engine:
        kind = registry.load(settings["type"])
        output = self._opened.enter_context(kind(kind.settings_type.model_validate(settings)))
        counted = Counted(output)
        gate = self._gates.gate(name, self._step, counted.doing)
        self._opened.enter_context(gate)
        engine = Engine(
            counted,
            self._step.delivery,
            gate,
            grace=_grace_of(output.settings),
            takes_apart=output.takes_apart,
        )
        return self._opened.enter_context(engine)


def _grace_of(settings: OutputSettings) -> float:
    """How long a send may take: what its output allows. Given up sooner, it would come for ever."""
    limits = (getattr(settings, knob, 0.0) for knob in ("connect_timeout", "timeout"))
    return max(GRACE, sum(limits))


class Counted:
    """An output that knows how much of it is being done."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._preparing = 0
        self._sending = 0

    def doing(self) -> tuple[int, int]:
        """How much is being prepared, and how much is being sent."""
        return self._preparing, self._sending

    @property
    def rejected(self) -> int:
        """As the output says."""
        return self._output.rejected

    def prepare(self, block: Block) -> Any:  # noqa: ANN401 - whatever the output makes
        """As the output does."""
        with self._lock:
            self._preparing += 1
        try:
            return self._output.prepare(block)
        finally:
            with self._lock:
                self._preparing -= 1

    def send(self, prepared: Any) -> None:  # noqa: ANN401 - whatever the output makes
        """As the output does."""
        with self._lock:
            self._sending += 1
        try:
            self._output.send(prepared)
        finally:
            with self._lock:
                self._sending -= 1

    def cancel(self) -> None:
        """As the output does."""
        self._output.cancel()


class _Order:
    """Which rows may not be tried any more: others before them wait."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._stopped = False
        self._keys: set[str] = set()

    def allowed(self, rows: Block) -> Numbers:
        """The numbers of the rows that may be tried."""
        if self._stopped:
            return np.empty(0, dtype=np.int64)
        if not self._keys:
            return np.arange(rows.num_rows)
        late = np.asarray(pc.is_in(rows.column("key"), pa.array(list(self._keys))))
        return np.flatnonzero(~late)

    def note(self, rows: Block, kept: Numbers) -> None:
        """Some rows wait."""
        if not len(kept) or self._ordering is Ordering.NONE:
            return
        if self._ordering is Ordering.STRICT or "key" not in rows.schema.names:
            self._stopped = True
        else:
            keys = pc.unique(rows.column("key").take(kept)).to_pylist()
            self._keys.update(key for key in keys if key is not None)


def _handed(rows: Block, step: Step, output: dict[str, Any] | None = None) -> Block:
    """Rows as outputs get them: with the queue they come from, and the payload they want."""
    names = rows.schema.names
    if DIRECT in names:  # in the main lane `queue` says where rows go
        rows = rows.drop_columns([DIRECT, "queue"])
    if "queue" not in rows.schema.names and "offset" in names:
        rows = rows.append_column("queue", pa.repeat(pa.scalar(step.reads), rows.num_rows))
    form = (output or step.output or {}).get("format")
    if form == "raw" and PAYLOAD in names and "value" in names:
        at = rows.schema.get_field_index(PAYLOAD)
        rows = rows.set_column(at, PAYLOAD, rows.column("value"))
    return rows


def _of_all(outcome: Outcome, tried: Numbers, count: int) -> Outcome:
    """What became of some rows, in the numbers of all; those that were not tried are kept."""
    untried = np.ones(count, dtype=np.bool_)
    untried[tried] = False
    untried[tried[outcome.kept]] = True
    dead = [_renumbered(letter, tried) for letter in outcome.dead]
    return Outcome(outcome.delivered, np.flatnonzero(untried), dead)


def _renumbered(letter: DeadLetter, numbers: Numbers) -> DeadLetter:
    return DeadLetter(
        letter.rows, numbers[letter.numbers], letter.error, letter.text, letter.attempts
    )


def _plain(output: Any) -> dict[str, Any]:  # noqa: ANN401 - settings, or what they were in JSON
    plain: dict[str, Any] = output if isinstance(output, dict) else output.model_dump(mode="json")
    return plain
