"""A lane's task: it delivers. What it could not deliver now is kept: the commit leaves it alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import chain

import numpy as np
import pyarrow as pa

from turnlane.delivery.columns import DIRECT, PAYLOAD
from turnlane.delivery.outcome import Outcome
from turnlane.errors import RetryLater, StorageFailed
from turnlane.events import Block
from turnlane.queues.spans import spans_of
from turnlane.spark.columns import RowMaker, event_schema, routes_of
from turnlane.spark.delivering import Delivery
from turnlane.spark.lane_nodes import Gates
from turnlane.spark.lane_options import LaneWriteOptions
from turnlane.spark.nodes import Nodes, by_partition
from turnlane.spark.passage import Buried, Passed, passed
from turnlane.spark.routing import QUEUE
from turnlane.spark.row_numbers import with_numbers
from turnlane.spark.share_reading import share_events, shares_in
from turnlane.spark.siblings import Mask, together, with_siblings
from turnlane.spark.steps import Step
from turnlane.spark.tasks import Places, Staged, Task, filled, join


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
