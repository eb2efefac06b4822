"""Copying within a node: events of one queue, staged for others, by their offsets.

Whoever routes events need not have them: where they are and where they go is enough.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

import numpy as np
import pyarrow as pa

from turnlane.errors import RetryLater, SchemaMismatch
from turnlane.events import Block
from turnlane.node.event_refs import Numbers, copied, packed
from turnlane.node.staging import Stage
from turnlane.queues.api import AckLevel
from turnlane.queues.buffered import BufferedQueue
from turnlane.runtime import Closing

OpenStage = Callable[[str, pa.Schema], Stage]
Refer = Callable[[str, BufferedQueue], Stage]
Abort = Callable[[Sequence[str]], None]

SAFE_SECONDS: Final = 30.0
"""So long a copy waits until the events that it refers to are on disk."""


class Copying(Closing):
    """Stages what offsets and routes say, until :meth:`finish`; given up without.

    An event that is settled meanwhile, dropped by its queue or by a person, is not copied.
    """

    def __init__(self, source: BufferedQueue, into: Sequence[str], abort: Abort) -> None:
        self._source = source
        self._into = into
        self._abort = abort
        self._opened = ExitStack()
        self.events = 0

    def add(self, places: Block) -> None:
        """Stage events: by ``offset``, in order, and a bit of ``routes`` for each queue.

        Raises ``SchemaMismatch``, ``RetryLater``, and what :meth:`Stage.add` does.
        """
        offsets, routes = _numbers(places, "offset"), _numbers(places, "routes")
        if (np.diff(offsets) <= 0).any() or (offsets < 0).any():
            raise SchemaMismatch("`offset`: each is to be above the one before")
        if len(offsets) and offsets[-1] >= self._source.end:
            raise SchemaMismatch(f"`offset`: there is none at {offsets[-1]} yet")
        self._take(offsets, routes)

    @abstractmethod
    def _take(self, offsets: Numbers, routes: Numbers) -> None:
        """Stage these, or remember to."""

    @abstractmethod
    def _stages(self) -> Sequence[Stage]:
        """All stages, ready to be finished."""

    def finish(self) -> list[str]:
        """Make it last, all of it or nothing; returns the ids to commit it by."""
        finished: list[str] = []
        try:
            for stage in self._stages():
                finished.append(stage.finish())  # noqa: PERF401 - those before one that fails
        except OSError:
            self._abort(finished)  # nobody will hear of them
            raise
        return finished

    def close(self) -> None:
        """Let go of all files."""
        self._opened.close()


class CopyingEvents(Copying):
    """Stages the events themselves."""

    def __init__(
        self, source: BufferedQueue, into: Sequence[str], stage: OpenStage, abort: Abort
    ) -> None:
        super().__init__(source, into, abort)
        self._stage = stage
        self._by_schema: dict[tuple[str, pa.Schema], Stage] = {}

    def _take(self, offsets: Numbers, routes: Numbers) -> None:
        wanted = [_chosen(offsets, routes, number) for number in range(len(self._into))]
        for number, _, block in copied(self._source, wanted):
            self._put(self._into[number], block)

    def _stages(self) -> Sequence[Stage]:
        return list(self._by_schema.values())

    def _put(self, queue: str, block: Block) -> None:
        key = queue, block.schema
        stage = self._by_schema.get(key)
        if stage is None:
            stage = self._opened.enter_context(self._stage(queue, block.schema))
            self._by_schema[key] = stage
        stage.add(block)
        self.events += block.num_rows


class CopyingPlaces(Copying):
    """Stages where the events are: they are copied when it is committed."""

    def __init__(
        self, source: BufferedQueue, into: Sequence[str], refer: Refer, abort: Abort
    ) -> None:
        super().__init__(source, into, abort)
        self._refer = refer
        self._places: dict[str, list[tuple[Block, int]]] = {}
        """By queue, packed, and how many each: batches are large, and queues may be many."""
        self._end = 0

    def _take(self, offsets: Numbers, routes: Numbers) -> None:
        for number, queue in enumerate(self._into):
            chosen = _chosen(offsets, routes, number)
            if len(chosen):
                self._places.setdefault(queue, []).append((packed(chosen), len(chosen)))
                self._end = max(self._end, int(chosen[-1]) + 1)

    def _stages(self) -> Sequence[Stage]:
        # After a kill the places must still be those of the same events.
        if not self._source.wait_level(AckLevel.PERSISTED, self._end, SAFE_SECONDS):
            raise RetryLater(f"queue {self._source.name!r} has not persisted its events yet")
        return [self._referring(queue) for queue in self._places]

    def _referring(self, queue: str) -> Stage:
        stage = self._opened.enter_context(self._refer(queue, self._source))
        for places, events in self._places[queue]:
            stage.refer(places, events, self._source.estimate_size(events))
        self.events += stage.events
        return stage


def _chosen(offsets: Numbers, routes: Numbers, number: int) -> Numbers:
    """Those that go into one of the queues."""
    return offsets[(routes >> number & 1).astype(np.bool_)]


def _numbers(places: Block, name: str) -> Numbers:
    at = places.schema.get_field_index(name)
    if at < 0 or places.schema.field(at).type != pa.int64() or places.column(at).null_count:
        raise SchemaMismatch(f"`{name}` is to be a column of 64-bit integers without nulls")
    return np.asarray(places.column(at))
