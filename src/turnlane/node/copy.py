"""Copies within a node: events of one queue, staged for other queues by their offsets.

A lane that only routes events does not need the events themselves. It sends offsets and routes, and
the node copies the events.
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
from turnlane.node.event_refs import OffsetArray, encode_references, read_referenced_events
from turnlane.node.staging import Stage
from turnlane.queues.api import AckLevel
from turnlane.queues.buffered import BufferedQueue
from turnlane.runtime import Closeable

OpenStage = Callable[[str, pa.Schema], Stage]
OpenReferenceStage = Callable[[str, BufferedQueue], Stage]
AbortStages = Callable[[Sequence[str]], None]

PERSIST_TIMEOUT: Final = 30.0
"""How long a copy waits until its referenced events are on disk, in seconds."""


class QueueCopy(Closeable):
    """Stages the events of given offsets and routes. Without :meth:`finish` nothing is kept.

    Events that are settled before the commit, for example by a purge, are not copied.
    """

    def __init__(self, source: BufferedQueue, into: Sequence[str], abort: AbortStages) -> None:
        self._source = source
        self._into = into
        self._abort = abort
        self._opened = ExitStack()
        self.events = 0

    def add(self, places: Block) -> None:
        """Stage events: ``offset`` ascending, and one bit of ``routes`` for each target queue.

        Raises ``SchemaMismatch``, ``RetryLater``, and what :meth:`Stage.add` does.
        """
        offsets, routes = _numbers(places, "offset"), _numbers(places, "routes")
        if (np.diff(offsets) <= 0).any() or (offsets < 0).any():
            raise SchemaMismatch("`offset`: offsets must be ascending and not negative")
        if len(offsets) and offsets[-1] >= self._source.end:
            raise SchemaMismatch(
                f"`offset`: {offsets[-1]} is beyond the end of the queue, {self._source.end}"
            )
        self._take(offsets, routes)

    @abstractmethod
    def _take(self, offsets: OffsetArray, routes: OffsetArray) -> None:
        """Stage these events, or remember them for :meth:`_stages`."""

    @abstractmethod
    def _stages(self) -> Sequence[Stage]:
        """Return all stages, ready to be finished."""

    def finish(self) -> list[str]:
        """Sync all stages, or none; return their ids for the commit."""
        finished: list[str] = []
        try:
            for stage in self._stages():
                finished.append(stage.finish())  # noqa: PERF401 - those before one that fails
        except OSError:
            self._abort(finished)  # the client never learns their ids
            raise
        return finished

    def close(self) -> None:
        """Close all files."""
        self._opened.close()


class CopyByValue(QueueCopy):
    """Stages the events themselves."""

    def __init__(
        self, source: BufferedQueue, into: Sequence[str], stage: OpenStage, abort: AbortStages
    ) -> None:
        super().__init__(source, into, abort)
        self._stage = stage
        self._by_schema: dict[tuple[str, pa.Schema], Stage] = {}

    def _take(self, offsets: OffsetArray, routes: OffsetArray) -> None:
        wanted = [_chosen(offsets, routes, number) for number in range(len(self._into))]
        for number, _, block in read_referenced_events(self._source, wanted):
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


class CopyByReference(QueueCopy):
    """Stages references to the events; the commit copies the events."""

    def __init__(
        self,
        source: BufferedQueue,
        into: Sequence[str],
        refer: OpenReferenceStage,
        abort: AbortStages,
    ) -> None:
        super().__init__(source, into, abort)
        self._refer = refer
        self._places: dict[str, list[tuple[Block, int]]] = {}
        """Encoded references and their number, by queue. Encoded, because batches are large."""
        self._end = 0

    def _take(self, offsets: OffsetArray, routes: OffsetArray) -> None:
        for number, queue in enumerate(self._into):
            chosen = _chosen(offsets, routes, number)
            if len(chosen):
                self._places.setdefault(queue, []).append((encode_references(chosen), len(chosen)))
                self._end = max(self._end, int(chosen[-1]) + 1)

    def _stages(self) -> Sequence[Stage]:
        # After a crash the offsets must still belong to the same events.
        if not self._source.wait_level(AckLevel.PERSISTED, self._end, PERSIST_TIMEOUT):
            raise RetryLater(f"queue {self._source.name!r} has not persisted its events yet")
        return [self._referring(queue) for queue in self._places]

    def _referring(self, queue: str) -> Stage:
        stage = self._opened.enter_context(self._refer(queue, self._source))
        for places, events in self._places[queue]:
            stage.add_references(places, events, self._source.estimate_size(events))
        self.events += stage.events
        return stage


def _chosen(offsets: OffsetArray, routes: OffsetArray, number: int) -> OffsetArray:
    """Return the offsets that go to one of the queues."""
    return offsets[(routes >> number & 1).astype(np.bool_)]


def _numbers(places: Block, name: str) -> OffsetArray:
    at = places.schema.get_field_index(name)
    if at < 0 or places.schema.field(at).type != pa.int64() or places.column(at).null_count:
        raise SchemaMismatch(f"`{name}` must be a column of 64-bit integers without nulls")
    return np.asarray(places.column(at))
