"""The task of a lane: delivers rows to outputs, and stages rows for queues and dead letters.

This is the first of the five layers between a task's rows and the bytes written;
``delivery.engine`` describes the others. There are two kinds of lanes:

- The **main lane** has any number of steps, and routes in each row. :func:`run_steps` gives each
  step its rows. An event is done if all its actions have it, or if a queue has what they could not
  deliver now. Otherwise nothing of it is staged, and it comes again as a whole.
- The **lane of an action** has one step and delivers all rows. It streams: the engine takes blocks
  while earlier ones are being sent.

An event that cannot be delivered now is *deferred*: the commit of the batch does not settle it. All
rows that a transform made of an event are deferred together. A row that can never be delivered is
*dead*: it is staged for the dead letter queue of its action, unless its event comes again.

:class:`StepDelivery` delivers for one step, and to the step's second output if the first is away.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turnlane.delivery.engine import GRACE, Engine
from turnlane.delivery.results import BlockResult, DeadLetter
from turnlane.delivery.settings import DIRECT, PAYLOAD, FailoverSettings, Ordering
from turnlane.delivery.workers import SendActivity
from turnlane.errors import RetryLater, StorageFailed
from turnlane.events import Block
from turnlane.intervals import convert_to_spans
from turnlane.logs import get_logger
from turnlane.outputs import api
from turnlane.pipeline.settings import FAILOVER
from turnlane.spark.by_reference import read_events
from turnlane.spark.nodes import BreakerClient, Nodes, split_by_node
from turnlane.spark.options import LaneWriteOptions
from turnlane.spark.row_codec import (
    QUEUE_COLUMN,
    Mask,
    add_rows_of_same_event,
    get_route_masks,
    group_rows_by_event,
    number_rows_of_events,
)
from turnlane.spark.steps import LaneStep
from turnlane.spark.task import (
    QueueTask,
    SpansByNode,
    TaskResult,
    decode_batches,
    extend_by_node,
)

log = get_logger(__name__)

Numbers = npt.NDArray[np.int64]

Deliver = Callable[[LaneStep, pa.RecordBatch], BlockResult]


class LaneTask(QueueTask):
    """A task of a lane."""

    drops_unrouted = True  # An event that no filter takes is settled.

    def __init__(self, options: LaneWriteOptions, opened: ExitStack) -> None:
        super().__init__(options, opened, of_lane=options.lane is not None)
        self._options = options
        self._opened = opened
        self._nodes = Nodes.from_options(options)
        self._breakers = BreakerClient(self._nodes)
        self._deliveries: dict[str, StepDelivery] = {}
        self._deferred: SpansByNode = {}
        self._dead: SpansByNode = {}
        self._dead_letter_error: StorageFailed | None = None

    def run(self, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        """Deliver and stage all rows."""
        options = self._options
        if not options.steps:
            return super().run(batches)
        if options.reads:
            queue = options.steps[0].source_queue
            self._deliver_all(read_events(self._nodes, queue, options.reads, batches))
            return self._finish()
        numbered = map(number_rows_of_events, decode_batches(group_rows_by_event(batches)))
        if options.routed:
            for rows in numbered:
                self._run_steps(rows)
        else:
            self._deliver_all(numbered)
        return self._finish()

    def _run_steps(self, rows: Block) -> None:
        """Deliver and stage a block of the main lane."""
        steps = self._options.steps
        routes = get_route_masks(rows, QUEUE_COLUMN) | get_route_masks(rows, DIRECT)
        no_rows = np.zeros(rows.num_rows, dtype=np.bool_)
        own = {step.action: routes.get(step.action, no_rows) for step in steps}
        result = run_steps(
            rows, steps, own, lambda step, part: self._get_delivery(step).deliver(part)
        )
        self._add_result(rows, result)
        others = {name: mask for name, mask in routes.items() if name not in own}
        for queue, mask in {**others, **result.queued}.items():
            self._stages.add(queue, _filter(rows, mask & ~result.deferred))

    def _deliver_all(self, blocks: Iterator[Block]) -> None:
        """Deliver all blocks of an action's lane."""
        (step,) = self._options.steps
        # Closed in any case: its end is the last that the destination's state learns of this task.
        with closing(self._get_delivery(step).run(blocks)) as results:
            for rows, result in results:
                deferred = np.zeros(rows.num_rows, dtype=np.bool_)
                deferred[result.deferred] = True
                dead = [DeadRows(step, letter, letter.numbers) for letter in result.dead]
                self._add_result(
                    rows, StepResult(add_rows_of_same_event(rows, deferred), dead=dead)
                )

    def _get_delivery(self, step: LaneStep) -> StepDelivery:
        if step.action not in self._deliveries:
            self._deliveries[step.action] = StepDelivery(step, self._breakers, self._opened)
        return self._deliveries[step.action]

    def _add_result(self, rows: Block, result: StepResult) -> None:
        """Note deferred events and stage dead letters."""
        names = rows.schema.names
        has_offsets = self._options.lane is not None and {"partition", "offset"} <= set(names)
        if result.deferred.any():
            if not has_offsets:  # The whole batch comes again.
                states = self._breakers.get_states([step.action for step in self._options.steps])
                errors = (each["error"] for each in states.values() if each["error"])
                count, why = int(result.deferred.sum()), next(errors, "no time left")
                raise RetryLater(f"{count} rows of a batch were not delivered: {why}")
            _add_offsets(self._deferred, rows, result.deferred)
        for dead in result.dead:
            # The dead letters of an event that comes again would come again, too.
            final = ~result.deferred[dead.numbers]
            if final.any() and self._dead_letter_error is None:
                try:
                    self._stages.add_dead_letters(dead.step, dead.letter, dead.numbers[final], rows)
                except StorageFailed as error:
                    self._defer_dead_rows(error, is_possible=has_offsets)
        if result.dead and has_offsets:
            _add_offsets(self._dead, rows, result.dead_mask)

    def _finish(self) -> TaskResult:
        if self._dead_letter_error is None:
            try:
                return TaskResult(self._stages.finish(), self._deferred, self._dead)
            except StorageFailed as error:
                self._defer_dead_rows(error, is_possible=bool(self._dead))
        self._stages.discard()
        extend_by_node(self._deferred, self._dead)
        return TaskResult({}, self._deferred, dead_letter_error=str(self._dead_letter_error))

    def _defer_dead_rows(self, error: StorageFailed, *, is_possible: bool) -> None:
        """Defer dead rows because a node's disk is full, so that delivered rows can be settled.

        Only in the lane of an action: the main lane has also staged rows for other queues.
        """
        if self._options.routed or not is_possible:
            raise error
        self._dead_letter_error = error


def _filter(rows: Block, mask: Mask) -> Block:
    return rows if mask.all() else rows.filter(pa.array(mask))


def _add_offsets(spans: SpansByNode, rows: Block, mask: Mask) -> None:
    chosen = _filter(rows, mask)
    for node, part in split_by_node(chosen) if chosen.num_rows else ():
        spans.setdefault(node, []).extend(convert_to_spans(np.asarray(part.column("offset"))))


# ── the steps of the main lane ──


@dataclass(slots=True)
class DeadRows:
    """Rows that an action can never deliver."""

    step: LaneStep
    letter: DeadLetter
    numbers: Numbers
    """Their numbers in the block."""


@dataclass(slots=True)
class StepResult:
    """What the steps have done with the rows of a block."""

    deferred: Mask
    """Rows whose events come again."""
    queued: dict[str, Mask] = field(default_factory=dict)
    """Rows for the queues of actions that could not deliver them now."""
    dead: list[DeadRows] = field(default_factory=list)

    @property
    def dead_mask(self) -> Mask:
        """Rows that at least one action gives up, and that no other action defers."""
        mask = np.zeros(len(self.deferred), dtype=np.bool_)
        for each in self.dead:
            mask[each.numbers] = True
        return mask & ~self.deferred


def run_steps(
    rows: pa.RecordBatch, steps: Sequence[LaneStep], routes: Mapping[str, Mask], deliver: Deliver
) -> StepResult:
    """Have each step deliver its rows, which ``routes`` names by action. No I/O of its own.

    A step and the steps with ``only_when_suspended`` after it form a group: each takes what those
    before it could not deliver. What the group leaves goes into the first queue that one of its
    steps has, or is deferred.
    """
    result = StepResult(np.zeros(rows.num_rows, dtype=np.bool_))
    left = np.zeros(rows.num_rows, dtype=np.bool_)
    """Rows that the steps of the current group could not deliver."""
    group_queue: str | None = None

    def add_to_queue(queue: str, mask: Mask) -> None:
        known = result.queued.get(queue)
        result.queued[queue] = mask.copy() if known is None else known | mask

    def close_group() -> None:
        if group_queue is None:
            result.deferred |= add_rows_of_same_event(rows, left)
        elif left.any():
            add_to_queue(group_queue, left)

    for step in steps:
        if not step.only_when_suspended:
            close_group()
            left, group_queue = np.zeros_like(left), None
        wanted = (left if step.only_when_suspended else ~result.deferred) & routes[step.action]
        if step.output is None:
            assert step.queue is not None
            add_to_queue(step.queue, wanted)
            left &= ~wanted
            continue
        group_queue = group_queue or step.queue
        numbers = np.flatnonzero(wanted)
        if not len(numbers):
            continue
        part = rows if len(numbers) == rows.num_rows else rows.take(numbers)
        outcome = deliver(step, part)
        result.dead += [DeadRows(step, letter, numbers[letter.numbers]) for letter in outcome.dead]
        left[numbers] = False
        left[numbers[outcome.deferred]] = True
    close_group()
    return result


# ── the delivery of one step ──


class StepDelivery:
    """Delivers for one step of a task, with a second output if the first stays away.

    Its outputs and engines are opened in ``opened`` and closed with the task.
    """

    def __init__(self, step: LaneStep, breakers: BreakerClient, opened: ExitStack) -> None:
        assert step.output is not None
        self._step = step
        self._breakers = breakers
        self._opened = opened
        self._engine = self._open_engine(step.action, step.output)
        self._second_engine: Engine | None = None
        self._order = _OrderGuard(step.delivery.ordering)
        self._deadline: float | None = None
        """Set with the first rows: Spark may take longer for them than a task may send."""

    def run(self, blocks: Iterable[Block]) -> Generator[tuple[Block, BlockResult]]:
        """Deliver all blocks of the task; yields each block with its result, in order."""
        taken: deque[Block] = deque()

        def prepare() -> Iterator[Block]:
            for block in blocks:
                self._start_time()
                taken.append(block)
                yield _prepare_rows(block, self._step)

        with closing(self._engine.run(prepare())) as results:
            for result in results:
                block = taken.popleft()
                final = self._fail_over(block, result)
                self._order.add_deferred(block, final.deferred)
                yield block, final

    def deliver(self, rows: Block) -> BlockResult:
        """Deliver rows of the task that come after all rows delivered before."""
        self._start_time()
        allowed = self._order.find_allowed(rows)
        if self._is_late or not len(allowed):
            return BlockResult(0, np.arange(rows.num_rows))
        part = rows if len(allowed) == rows.num_rows else rows.take(allowed)
        ((_, result),) = self.run([part])
        return _expand_result(result, allowed, rows.num_rows)

    def _start_time(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._step.delivery.max_time

    @property
    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _fail_over(self, block: Block, result: BlockResult) -> BlockResult:
        """Deliver deferred rows to the second output, if there is one and it is time for it."""
        failover = self._step.delivery.failover
        if failover is None or not len(result.deferred) or self._is_late:
            return result
        rest = block.take(result.deferred)
        allowed = self._order.find_allowed(rest)
        if not len(allowed) or not self._is_away(failover):
            return result
        output = failover.output
        settings = output if isinstance(output, dict) else output.model_dump(mode="json")
        if self._second_engine is None:
            self._second_engine = self._open_engine(f"{self._step.action}.{FAILOVER}", settings)
        rows = _prepare_rows(rest.take(allowed), self._step, settings)
        second = _expand_result(self._second_engine.deliver(rows), allowed, rest.num_rows)
        dead = [_renumber(letter, result.deferred) for letter in second.dead]
        deferred = result.deferred[second.deferred]
        return BlockResult(result.delivered + second.delivered, deferred, [*result.dead, *dead])

    def _is_away(self, failover: FailoverSettings) -> bool:
        """Whether the breaker of the first output has been open long enough."""
        action = self._step.action
        try:
            states = self._breakers.get_states([action])
        except RetryLater as error:
            log.warning("delivery.breaker_unknown", action=action, error=error)
            return False
        return float(states.get(action, {}).get("open_for") or 0.0) >= failover.after

    def _open_engine(self, name: str, settings: dict[str, Any]) -> Engine:
        kind = api.load(settings["type"])
        output = self._opened.enter_context(kind(kind.settings_type.model_validate(settings)))
        # At least the timeouts of the output: a send that is given up sooner may still arrive, and
        # its events would come again forever.
        timeouts = (getattr(output.settings, n, 0.0) for n in ("connect_timeout", "timeout"))
        grace = max(GRACE, sum(timeouts))
        activity = SendActivity()
        destination = self._breakers.open_destination(name, self._step, activity.get_counts)
        self._opened.enter_context(destination)
        engine = Engine(
            output,
            self._step.delivery,
            destination,
            grace=grace,
            can_deliver_partly=output.can_deliver_partly,
            activity=activity,
        )
        return self._opened.enter_context(engine)


class _OrderGuard:
    """Keeps rows from overtaking deferred rows, as the ordering of the action requires."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._is_stopped = False
        self._keys: set[str] = set()

    def find_allowed(self, rows: Block) -> Numbers:
        """Return the numbers of the rows that may be delivered."""
        if self._is_stopped:
            return np.empty(0, dtype=np.int64)
        if not self._keys:
            return np.arange(rows.num_rows)
        blocked = np.asarray(pc.is_in(rows.column("key"), pa.array(list(self._keys))))
        return np.flatnonzero(~blocked)

    def add_deferred(self, rows: Block, deferred: Numbers) -> None:
        """Note that some rows of a block are deferred."""
        if not len(deferred) or self._ordering is Ordering.NONE:
            return
        if self._ordering is Ordering.STRICT or "key" not in rows.schema.names:
            self._is_stopped = True
        else:
            keys = pc.unique(rows.column("key").take(deferred)).to_pylist()
            self._keys.update(key for key in keys if key is not None)


def _prepare_rows(rows: Block, step: LaneStep, output: dict[str, Any] | None = None) -> Block:
    """Return rows in the form for outputs: with their source queue and the output's payload."""
    names = rows.schema.names
    if DIRECT in names:  # In the main lane `queue` says where rows go.
        rows = rows.drop_columns([DIRECT, "queue"])
    if "queue" not in rows.schema.names and "offset" in names:
        rows = rows.append_column("queue", pa.repeat(pa.scalar(step.source_queue), rows.num_rows))
    payload_format = (output or step.output or {}).get("format")
    if payload_format == "raw" and PAYLOAD in names and "value" in names:
        at = rows.schema.get_field_index(PAYLOAD)
        rows = rows.set_column(at, PAYLOAD, rows.column("value"))
    return rows


def _expand_result(result: BlockResult, tried: Numbers, count: int) -> BlockResult:
    """Return the result of some of ``count`` rows for all of them; the others are deferred."""
    deferred = np.ones(count, dtype=np.bool_)
    deferred[tried] = False
    deferred[tried[result.deferred]] = True
    dead = [_renumber(letter, tried) for letter in result.dead]
    return BlockResult(result.delivered, np.flatnonzero(deferred), dead)


def _renumber(letter: DeadLetter, numbers: Numbers) -> DeadLetter:
    return replace(letter, numbers=numbers[letter.numbers])
