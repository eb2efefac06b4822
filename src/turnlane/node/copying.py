"""Copying within a node: events of one queue, staged for others, by their offsets.

Whoever routes events need not have them: where they are and where they go is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.closing import Closing
from turnlane.errors import RetryLater, SchemaMismatch
from turnlane.events import Block, gathered
from turnlane.node.by_offset import READ_EVENTS, read
from turnlane.node.staging import Stage
from turnlane.queues.holding import HoldingQueue
from turnlane.queues.spans import GAP, spans_of

Numbers = npt.NDArray[np.int64]
OpenStage = Callable[[str, pa.Schema], Stage]
Abort = Callable[[Sequence[str]], None]


class Copying(Closing):
    """Stages what offsets and routes say, until :meth:`finish`; given up without.

    An event that is settled meanwhile, dropped by its queue or by a person, is not copied.
    """

    def __init__(
        self, source: HoldingQueue, into: Sequence[str], stage: OpenStage, abort: Abort
    ) -> None:
        self._source = source
        self._into = into
        self._stage = stage
        self._abort = abort
        self._stages: dict[tuple[str, pa.Schema], Stage] = {}
        self._opened = ExitStack()
        self.events = 0

    def add(self, places: Block) -> None:
        """Stage events: by ``offset``, in order, and a bit of ``routes`` for each queue.

        Raises ``SchemaMismatch``, ``RetryLater``, and what :meth:`Stage.add` does.
        """
        offsets, routes = _numbers(places, "offset"), _numbers(places, "routes")
        if (np.diff(offsets) <= 0).any() or (offsets < 0).any():
            raise SchemaMismatch("`offset`: each is to be above the one before")
        for piece in _close_together(offsets):
            self._copy(offsets[piece], routes[piece])

    def finish(self) -> list[str]:
        """Make it last, all of it or nothing; returns the ids to commit it by."""
        finished: list[str] = []
        try:
            for stage in self._stages.values():
                finished.append(stage.finish())  # noqa: PERF401 - those before one that fails
        except OSError:
            self._abort(finished)  # nobody will hear of them
            raise
        return finished

    def close(self) -> None:
        """Let go of all files."""
        self._opened.close()

    def _copy(self, offsets: Numbers, routes: Numbers) -> None:
        blocks = read(self._source, int(offsets[0]), int(offsets[-1]) + 1)
        missing = np.ones(len(offsets), dtype=np.bool_)
        for first, block in gathered(blocks, READ_EVENTS):
            mine = slice(*np.searchsorted(offsets, (first, first + block.num_rows)))
            missing[mine] = False
            places, bits = offsets[mine] - first, routes[mine]
            for number, queue in enumerate(self._into):
                chosen = places[(bits >> number & 1).astype(np.bool_)]
                if len(chosen):
                    self._put(queue, _only(block, chosen))
        left = self._source.unsettled_of(spans_of(offsets[missing]))
        if left:  # whoever commits this settles them
            name = self._source.name
            raise RetryLater(f"queue {name!r} has an event at {left[0][0]} that cannot be read")

    def _put(self, queue: str, block: Block) -> None:
        key = queue, block.schema
        stage = self._stages.get(key)
        if stage is None:
            stage = self._stages[key] = self._opened.enter_context(self._stage(queue, block.schema))
        stage.add(block)
        self.events += block.num_rows


def _numbers(places: Block, name: str) -> Numbers:
    at = places.schema.get_field_index(name)
    if at < 0 or places.schema.field(at).type != pa.int64() or places.column(at).null_count:
        raise SchemaMismatch(f"`{name}` is to be a column of 64-bit integers without nulls")
    return np.asarray(places.column(at))


def _close_together(offsets: Numbers) -> Iterator[slice]:
    """Stretches without large gaps: what lies between is read, too."""
    cuts = (np.flatnonzero(np.diff(offsets) > GAP) + 1).tolist()
    ends = [*cuts, len(offsets)] if len(offsets) else []
    for first, end in zip([0, *cuts], ends, strict=False):
        yield slice(first, end)


def _only(block: Block, places: Numbers) -> Block:
    if len(places) == block.num_rows:
        return block
    mask = np.zeros(block.num_rows, dtype=np.bool_)
    mask[places] = True
    return block.filter(pa.array(mask))
