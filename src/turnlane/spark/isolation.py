"""Isolation: finds the events that a lane's own code cannot handle, and gives them up.

A lane's code is its transform, its filters and its SQL. If it raises at one event, Spark can only
fail the whole batch, and would fail it again after each restart. So after such a failure the lane
searches: it applies the code to the waiting events, as a batch query that writes nothing, halves
the events that fail until each bad event stands alone, and commits these as dead letters. One
commit of a node stages the letters and settles the events, so a kill changes nothing: either the
event is a dead letter, or it still waits.

An event is given up only if it fails alone, twice, and others pass before and after that: a killed
worker or a lack of memory fails good events too. If none passes, the code is at fault: the lane
is suspended, nothing is given up, and it tries again later.

This also works for a lane with a checkpoint, although Spark repeats its batch with the same
offsets: the lane's reader leaves out settled events, so the batch comes again without the bad
event. State that Spark has kept from earlier batches takes no part in the search. So a failure
that depends on it is not found, and the lane keeps failing until the code is changed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # has none
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from turnlane.delivery.results import STEP_FAILED, DeadLetter
from turnlane.errors import RetryLater
from turnlane.intervals import RangeSet, Span, take_newest, take_oldest
from turnlane.logs import get_logger
from turnlane.spark.errors import describe_failure, has_own_error
from turnlane.spark.nodes import LaneNodes, Nodes
from turnlane.spark.steps import LaneStep
from turnlane.spark.task import StageSet

log = get_logger(__name__)

SEARCH_SECONDS: Final = 60.0
"""After this time a search ends if it has found a bad event: the next failure continues it."""
SAMPLES: Final = 20
"""If so many events have failed and none has passed, so many others are tried before the code is
at fault."""
OFFSETS_SHOWN: Final = 5
"""The most bad events that a log line names, and whose first failing step is looked for."""
UNKNOWN_STEP: Final = "the lane's code"


class EventSpan(NamedTuple):
    """Offsets ``first`` to ``end - 1`` of a queue on one node."""

    queue: str
    node: int
    first: int
    end: int

    def __str__(self) -> str:
        last = "" if self.end == self.first + 1 else f" to {self.end - 1}"
        return f"{self.queue} {self.first}{last}"


Events = Sequence[EventSpan]


class CodeStep(NamedTuple):
    """A step of a lane's code: its name, and a function that applies all steps up to it."""

    name: str
    build: Callable[[Events], DataFrame]


class SearchResult(NamedTuple):
    """What a search has found."""

    bad: list[tuple[EventSpan, str]]
    """The events that fail alone, each with its error."""
    has_passed: bool
    """Whether any event has passed."""


class Isolation(NamedTuple):
    """What became of the events at which a lane has failed."""

    dead: int = 0
    """How many are dead letters now."""
    code_error: str | None = None
    """Why no event passes: then none was given up."""


class SearchEnded(RetryLater):
    """A search was given up: the lane or Spark was stopped, or other things than the code fail."""


# ── the search: no Spark in it ──


def find_bad_events(
    events: Events,
    try_events: Callable[[Events], str | None],
    get_time: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Find the events that fail alone; ``try_events`` returns the error of some events.

    The oldest come first. The search ends early after ``SEARCH_SECONDS``, or if no event passes.
    Raises ``SearchEnded`` if events that had passed fail at the end.
    """
    bad: list[tuple[EventSpan, str]] = []
    passed: Events = ()
    deadline = get_time() + SEARCH_SECONDS

    def find_error(piece: Events) -> str | None:
        nonlocal passed
        error = try_events(piece)
        if error is None:
            passed = piece
        return error

    def is_over() -> bool:
        if passed or len(bad) != SAMPLES:
            return bool(bad and passed) and get_time() > deadline
        rest = _take(events, _count(events) - len(bad), newest=True)
        return all(find_error([each]) is not None for each in _take_samples(rest))

    def search(piece: Events, *, must_fail: bool = False) -> bool:
        """Search in some events; returns whether to continue with those after them."""
        count = _count(piece)
        # If one half passes, the other must fail: it is tried only if it is a single event.
        error = "unknown" if must_fail and count > 1 else find_error(piece)
        if error is not None and count == 1:
            bad.append((piece[0], error))
        elif error is not None:
            before = len(bad)
            if not search(_take(piece, count // 2, newest=False)):
                return False
            newer = _take(piece, count - count // 2, newest=True)
            return search(newer, must_fail=len(bad) == before)
        return not is_over()

    if events:
        search(events)
    return SearchResult(_try_again(bad, passed, try_events) if passed else bad, bool(passed))


def _try_again(
    bad: list[tuple[EventSpan, str]], passed: Events, try_events: Callable[[Events], str | None]
) -> list[tuple[EventSpan, str]]:
    """Return the bad events that fail again. Raises ``SearchEnded`` if others fail now, too."""
    tried = [(event, try_events([event])) for event, _ in bad]
    again = [(event, error) for event, error in tried if error is not None]
    error = try_events(passed) if again else None
    if error is not None:
        raise SearchEnded(f"events that passed fail now, so no event is given up: {error}")
    return again


def _count(events: Events) -> int:
    return sum(each.end - each.first for each in events)


def _take(events: Events, count: int, *, newest: bool) -> list[EventSpan]:
    """Return the first or the last ``count`` events of a list."""
    taken: list[EventSpan] = []
    for each in reversed(events) if newest else events:
        take = take_newest if newest else take_oldest
        taken += [each._replace(first=a, end=b) for a, b in take([each[2:]], count)]
        count -= each.end - each.first
        if count <= 0:
            break
    return taken[::-1] if newest else taken


def _take_samples(events: Events) -> list[EventSpan]:
    """Return single events, evenly distributed; the newest first."""
    count = _count(events)
    wanted = sorted({count * at // SAMPLES for at in range(1, SAMPLES + 1)} - {0}, reverse=True)
    return [_take(_take(events, at, newest=False), 1, newest=True)[0] for at in wanted]


# ── with Spark and the nodes ──


class EventIsolation:
    """Isolates the bad events of one lane. Used by the lane's thread while no query of it runs.

    ``queues`` are the queues that the lane reads. The last of the steps is all of the lane's code.
    """

    def __init__(
        self,
        nodes: Nodes,
        queues: Sequence[str],
        steps: Sequence[CodeStep],
        letters: LaneStep,
        max_events: int,
    ) -> None:
        self._nodes = nodes
        self._queues = queues
        self._steps = steps
        self._letters = letters
        self._max_events = max_events

    def isolate(self, is_stopped: Callable[[], bool]) -> Isolation:
        """Search for bad events among those that wait, and give them up.

        Raises ``RetryLater`` and other errors of nodes. Then the events of some queues may be dead
        letters: each queue has a commit of its own, and the log names its events after it.
        """
        lane = self._letters.action
        waiting = self._find_waiting()
        try_events = partial(self._try, is_stopped, self._steps[-1])
        bad, has_passed = find_bad_events(waiting, try_events)
        if not bad:
            offsets = ", ".join(map(str, waiting[:OFFSETS_SHOWN]))
            log.warning("lane.not_isolated", lane=lane, among=offsets, hint="each event passes")
            return Isolation()
        if not has_passed:
            step, error = self._find_step(is_stopped, *bad[0])
            count = _count(waiting)
            who = "no event passes" if count > 1 else "the only waiting event does not pass"
            then = f"{count:,} events wait" if count > 1 else "it is given up once others pass"
            why = f"{who} {step}: {error}; {then}"
            log.warning("lane.suspended", lane=lane, reason=why, offset=str(bad[0][0]))
            return Isolation(code_error=why)
        shown, rest = bad[:OFFSETS_SHOWN], bad[OFFSETS_SHOWN:]
        reasons = [(span, *self._find_step(is_stopped, span, error)) for span, error in shown]
        reasons += [(span, UNKNOWN_STEP, error) for span, error in rest]
        for queue, found in groupby(sorted(reasons), key=lambda each: each[0].queue):
            letters = list(found)
            self._give_up(queue, letters)
            log.warning(
                "lane.events_dead",
                lane=lane,
                events=len(letters),
                offsets=", ".join(str(each) for each, _, _ in letters[:OFFSETS_SHOWN]),
                queue=self._letters.dead_letters,
                step=letters[0][1],
                reason=letters[0][2],
                hint=f"turnlane dlq show {lane} CONFIG",
            )
        return Isolation(len(bad))

    def _find_waiting(self) -> list[EventSpan]:
        found: list[EventSpan] = []
        for queue in self._queues:
            calls = {
                node: partial(self._nodes[node].unsettled, queue, self._max_events)
                for node in range(self._nodes.count)
            }
            for node, each in sorted(self._nodes.ask_all(f"isolate {queue}", calls, 0.0).items()):
                found += [EventSpan(queue, node, *span) for span in each.spans]
        return found

    def _try(self, is_stopped: Callable[[], bool], step: CodeStep, events: Events) -> str | None:
        """Apply the code up to a step to some events; returns the error, if it raises one."""
        if is_stopped():
            raise SearchEnded("the lane was stopped")
        try:
            step.build(events).write.format("noop").mode("overwrite").save()
        except (PySparkException, Py4JJavaError) as error:
            if has_own_error(error) or is_stopped() or _is_spark_stopped():
                raise SearchEnded(describe_failure(error)) from error
            return describe_failure(error)
        return None

    def _find_step(
        self, is_stopped: Callable[[], bool], event: EventSpan, error: str
    ) -> tuple[str, str]:
        """Return the first step at which an event fails, and its error there."""
        for step in self._steps[:-1]:
            found = self._try(is_stopped, step, [event])
            if found is not None:
                return step.name, found
        return self._steps[-1].name, error

    def _give_up(self, queue: str, letters: Sequence[tuple[EventSpan, str, str]]) -> None:
        """Commit events of one queue as dead letters: all of a node, or none."""
        spans: dict[int, list[Span]] = {}
        for event, _, _ in letters:
            spans.setdefault(event.node, []).append((event.first, event.end))
        step = self._letters.model_copy(update={"source_queue": queue, "rereads": True})
        # The plan begins a run of the lane: an earlier run can no longer commit these events.
        lane = LaneNodes(self._nodes, step.action, uuid.uuid4().hex)
        planned = lane.plan_batch(queue, spans, 1)
        left = {node: RangeSet(each) for node, each in planned.items()}
        only = np.zeros(1, dtype=np.int64)
        with ExitStack() as opened:
            stages = StageSet(self._nodes, opened, of_lane=True)
            for (_, node, first, _), name, error in letters:
                if first in left.get(node, ()):
                    row = pa.RecordBatch.from_pydict({"partition": [node], "offset": [first]})
                    letter = DeadLetter(row, only, STEP_FAILED, f"{name}: {error}", 1)
                    stages.add_dead_letters(step, letter, only, row)
            lane.commit(stages.finish(), {}, planned)


def _is_spark_stopped() -> bool:
    context = SparkContext._active_spark_context  # noqa: SLF001
    jvm_context = None if context is None else context._jsc  # noqa: SLF001
    return jvm_context is None or bool(jvm_context.sc().isStopped())
