"""Delivering in a task: an action's output and its engine, and a second one if that stays away."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turnlane.client.node_client import StageWriter
from turnlane.delivery.engine import GRACE, Engine
from turnlane.delivery.outcome import DeadLetter, Outcome
from turnlane.delivery.settings import DIRECT, PAYLOAD, PLACES, ROUTES, FailoverSettings, Ordering
from turnlane.errors import RetryLater, StorageFailed
from turnlane.events import Block
from turnlane.intervals import COPIED, spans_of
from turnlane.outputs import api
from turnlane.outputs.api import Output, OutputSettings
from turnlane.pipeline.settings import FAILOVER
from turnlane.spark.nodes import Gates, Nodes, by_partition, open_for
from turnlane.spark.options import LaneWriteOptions
from turnlane.spark.reader import share_events, shares_in
from turnlane.spark.routing import QUEUE
from turnlane.spark.row_codec import (
    Mask,
    RowMaker,
    event_schema,
    routes_of,
    together,
    ungrouped,
    with_numbers,
    with_siblings,
)
from turnlane.spark.steps import Step
from turnlane.spark.task import Buried, Passed, Places, Staged, Task, filled, join, passed

# ── copying ──
# Having events copied from the lane's queue into others: Spark has only seen where they are.


class CopyTask:
    """A task of the main lane whose rows are places and routes. Events are as the queue has them.

    Each node copies its own: not an event leaves it.
    """

    def __init__(self, options: LaneWriteOptions, opened: ExitStack) -> None:
        self._options = options
        self._opened = opened
        self._nodes = Nodes.of(options)
        self._writers: dict[int, StageWriter] = {}

    def run(self, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Copy everything."""
        for rows in batches:
            for node, part in by_partition(rows) if rows.num_rows else ():
                for places in _places(part):
                    self._writer(node).write(places)
        return Staged({node: each.finish_all() for node, each in self._writers.items()})

    def _writer(self, node: int) -> StageWriter:
        if node not in self._writers:
            assert self._options.lane is not None
            begun = self._nodes[node].copy(self._options.lane, self._options.copies or ())
            self._writers[node] = self._opened.enter_context(begun)
        return self._writers[node]


def _places(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """What a node has to know: offsets, in order, and their routes."""
    if PLACES in rows.schema.names:
        for offsets, routes in ungrouped(rows):
            yield _copied(pa.array(offsets), pa.array(routes))
    else:
        yield _copied(rows.column("offset"), rows.column(ROUTES))


def _copied(*columns: pa.Array[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns), names=COPIED.names).cast(COPIED)


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
        kind = api.load(settings["type"])
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


# ── lane_tasks ──
# A lane's task: it delivers. What it could not deliver now is kept: the commit leaves it alone.


class LaneTask(Task):
    """A task of a lane: outputs are called, too."""

    drops_unrouted = True  # an event that no filter takes goes nowhere, and is settled

    def __init__(self, options: LaneWriteOptions, opened: ExitStack) -> None:
        super().__init__(options, opened, of_lane=options.lane is not None)
        self._options = options
        self._opened = opened
        self._gates = Gates(Nodes.of(options))
        self._deliveries: dict[str, Delivery] = {}
        self._kept: Places = {}
        self._dead: Places = {}
        self._trouble: StorageFailed | None = None

    def run(self, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Write everything."""
        if not self._options.steps:
            return super().run(batches)
        if self._options.reads:
            self._deliver_all(self._read(batches))
            return self._finished()
        numbered = map(with_numbers, filled(together(batches)))
        if self._options.routed:
            for rows in numbered:
                self._pass_on(rows)
        else:
            self._deliver_all(numbered)
        return self._finished()

    # ── the main lane ────────────────────────────────────────────────────────────────────────────

    def _pass_on(self, rows: Block) -> None:
        steps = self._options.steps
        routes = routes_of(rows, QUEUE) | routes_of(rows, DIRECT)
        nobody = np.zeros(rows.num_rows, dtype=np.bool_)
        mine = {step.action: routes.get(step.action, nobody) for step in steps}
        result = passed(rows, steps, mine, self._deliver)
        self._note(rows, result)
        others = {name: mask for name, mask in routes.items() if name not in mine}
        for queue, mask in {**others, **result.queued}.items():
            self._stages.add(queue, _only(rows, mask & ~result.held))

    def _deliver(self, step: Step, rows: Block) -> Outcome:
        return self._delivery(step).deliver(rows)

    # ── the lane of an action ────────────────────────────────────────────────────────────────────

    def _read(self, batches: Iterator[pa.RecordBatch]) -> Iterator[Block]:
        """The events of the shares that rows stand for; their values are their payloads."""
        nodes, queue = Nodes.of(self._options), self._options.steps[0].reads
        schema = event_schema(["value", *self._options.reads])
        for share in chain.from_iterable(map(shares_in, batches)):
            maker = RowMaker(schema, queue, share.node)
            for rows in share_events(nodes, queue, share, maker):
                yield rows.append_column(PAYLOAD, rows.column("value"))

    def _deliver_all(self, batches: Iterator[Block]) -> None:
        (step,) = self._options.steps
        # Closed whatever happens: its end is what the gate hears last of this task.
        with closing(self._delivery(step).run(batches)) as results:
            for rows, outcome in results:
                held = np.zeros(rows.num_rows, dtype=np.bool_)
                held[outcome.kept] = True
                buried = [Buried(step, letter, letter.numbers) for letter in outcome.dead]
                self._note(rows, Passed(with_siblings(rows, held), buried=buried))

    # ── both ─────────────────────────────────────────────────────────────────────────────────────

    def _delivery(self, step: Step) -> Delivery:
        known = self._deliveries.get(step.action)
        if known is None:
            known = Delivery(step, self._gates, self._opened)
            self._deliveries[step.action] = known
        return known

    def _note(self, rows: Block, result: Passed) -> None:
        """Keep what was not delivered now, and stage what never will be."""
        if result.held.any():
            if not self._has_places(rows):
                raise self._late(int(result.held.sum()))
            _add(self._kept, rows, result.held)
        for buried in result.buried:
            # Of an event that comes again, dead letters would come again, too.
            left = ~result.held[buried.rows]
            if left.any():
                self._bury(buried.only(left), rows)
        if result.buried and self._has_places(rows):
            _add(self._dead, rows, result.dead)

    def _bury(self, buried: Buried, rows: Block) -> None:
        if self._trouble is None:
            try:
                self._stages.bury(buried, rows)
            except StorageFailed as error:
                self._keep_dead(error, may=self._has_places(rows))

    def _finished(self) -> Staged:
        if self._trouble is None:
            try:
                return Staged(self._stages.finish(), self._kept, self._dead)
            except StorageFailed as error:
                self._keep_dead(error, may=bool(self._dead))
        self._stages.give_up()
        join(self._kept, self._dead)
        return Staged({}, self._kept, trouble=str(self._trouble))

    def _keep_dead(self, error: StorageFailed, *, may: bool) -> None:
        """A node's disk is full: keep what is dead, so that what was delivered is settled.

        Only in the lane of an action: the main lane has also staged what goes into other queues.
        """
        if self._options.routed or not may:
            raise error
        self._trouble = error

    def _has_places(self, rows: Block) -> bool:
        return self._options.lane is not None and {"partition", "offset"} <= set(rows.schema.names)

    def _late(self, count: int) -> RetryLater:
        """Why rows that cannot be told from others have to come again, with all the batch."""
        known = self._gates.status([step.action for step in self._options.steps])
        why = next((each["error"] for each in known.values() if each["error"]), "no time left")
        return RetryLater(f"{count} rows of a batch were not delivered: {why}")


def _only(rows: Block, mask: Mask) -> Block:
    return rows if mask.all() else rows.filter(pa.array(mask))


def _add(places: Places, rows: Block, mask: Mask) -> None:
    """Note the offsets of some rows."""
    chosen = _only(rows, mask)
    for node, part in by_partition(chosen) if chosen.num_rows else ():
        places.setdefault(node, []).extend(spans_of(np.asarray(part.column("offset"))))
