"""The dead letters of actions: looked at, sent again, thrown away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.client.letters import REASON, TIME, Choice
from turnlane.client.remote import RemoteNode, Unsettled
from turnlane.delivery.dead_letters import COLUMNS
from turnlane.errors import NoSuchQueue, RetryLater
from turnlane.events import Block
from turnlane.queues.spans import hulls, inside, spans_of

SUFFIX: Final = ".dead"
STEP: Final = 10_000
STEP_BYTES: Final = 64 << 20
"""Letters, and bytes of theirs, that are sent again or thrown away at a time, about."""

Offsets = npt.NDArray[np.int64]
Advance = Callable[[int], object]


class Chosen(NamedTuple):
    """Dead letters that were chosen, of one piece of their queue."""

    letters: Block
    offsets: list[int]


@dataclass(slots=True)
class Summary:
    """The letters of one action that have one reason."""

    action: str
    reason: str | None
    events: int
    first: datetime | None
    last: datetime | None


class DeadLetters:
    """The dead letters of one action, on one node: those that were there at the first look.

    An event that is sent again may be back before the last one is sent, and what a person has
    agreed to throw away is what there was then.
    """

    def __init__(self, node: RemoteNode, action: str) -> None:
        self.action = action
        self.queue = f"{action}{SUFFIX}"
        self._node = node
        self._end: int | None = None

    @classmethod
    def all(cls, node: RemoteNode) -> list[DeadLetters]:
        """Those of all actions of a node."""
        names = [name for name in sorted(node.queues()) if name.endswith(SUFFIX)]
        return [cls(node, name.removesuffix(SUFFIX)) for name in names]

    def count(self) -> int:
        """How many there are."""
        return self._look(1).pending

    def chosen(self, choice: Choice, limit: int | None = None) -> Iterator[Chosen]:
        """The chosen ones, in their order, at most ``limit``. Raises ``NoSuchQueue``."""
        left = limit
        for block, offsets in self._waiting():
            numbers = np.flatnonzero(choice.mask(block))[:left]
            if len(numbers):
                yield Chosen(block.take(numbers), offsets[numbers].tolist())
                left = None if left is None else left - len(numbers)
            if left == 0:
                return

    def _waiting(self) -> Iterator[tuple[Block, Offsets]]:
        """All letters, a step at a time, with their offsets."""
        at = 0
        while spans := self._look(STEP, at).spans:
            at = spans[-1][1]
            blocks: list[Block] = []
            places: list[Offsets] = []
            size = 0
            for first, block in self._read(spans):
                waiting = inside(spans, first, block.num_rows)
                if waiting.any():
                    blocks.append(block.filter(pa.array(waiting)))
                    places.append(np.flatnonzero(waiting) + first)
                    size += blocks[-1].nbytes
                if size >= STEP_BYTES:
                    yield _merged(blocks), np.concatenate(places)
                    blocks, places, size = [], [], 0
            if blocks:
                yield _merged(blocks), np.concatenate(places)

    def _read(self, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Block]]:
        """Blocks that have these offsets, and maybe some between them."""
        for hull in hulls(spans):
            yield from self._node.read(self.queue, *hull)

    def _look(self, events: int, first: int = 0) -> Unsettled:
        """What waits from ``first`` on, of what was there at the first look."""
        found = self._node.unsettled(self.queue, events, first=first)
        if self._end is None:
            self._end = found.end
        end = self._end
        return found._replace(spans=[(at, min(to, end)) for at, to in found.spans if at < end])

    def summaries(self) -> list[Summary]:
        """What there is, by reason."""
        counts: Counter[str | None] = Counter()
        times: dict[str | None, list[datetime]] = {}
        for letters, _ in self.chosen(Choice()):
            for reason, time in zip(_values(letters, REASON), _values(letters, TIME), strict=True):
                counts[reason] += 1
                if time is not None:
                    known = times.setdefault(reason, [time, time])
                    times[reason] = [min(known[0], time), max(known[1], time)]
        return [
            Summary(self.action, reason, count, *times.get(reason, (None, None)))
            for reason, count in counts.most_common()
        ]

    def replay(self, choice: Choice, target: str, limit: int | None, advance: Advance) -> int:
        """Put chosen letters into a queue again, as the events they were; returns how many.

        Each step is one commit of the node: the events are in the queue, and their letters are
        settled, or neither. Whatever dies meanwhile, no event is lost, and none comes twice.
        """
        if target not in self._node.queues():
            raise NoSuchQueue(f"there is no queue {target!r} to send them to; name another one")
        done = 0
        for letters, offsets in self.chosen(choice, limit):
            events = _events(letters)
            with self._node.stage(target, events.schema) as stage:
                stage.write(events)
                stage_id = stage.finish()
            ranges = [(self.queue, *span) for span in spans_of(np.array(offsets))]
            try:
                is_mine = self._node.commit([stage_id], ranges, exact=True)
            except RetryLater:
                self._node.abort([stage_id])
                raise
            done += len(offsets) if is_mine else 0  # else somebody else has sent them just now
            advance(len(offsets))
        return done

    def purge(self, choice: Choice, limit: int | None, advance: Advance) -> int:
        """Throw chosen letters away, which the node writes down; returns how many."""
        done = 0
        for _, offsets in self.chosen(choice, limit):
            done += self._node.purge(self.queue, spans_of(np.array(offsets)), f"dlq: {choice}")
            advance(len(offsets))
        return done


def _merged(blocks: Sequence[Block]) -> Block:
    """One block of several, of which later ones may have columns that earlier ones lack."""
    tables = [pa.Table.from_batches([block]) for block in blocks]
    (merged,) = pa.concat_tables(tables, promote_options="default").combine_chunks().to_batches()
    return merged


def _events(letters: Block) -> Block:
    """Letters as the events they were."""
    return letters.select([name for name in letters.schema.names if name not in COLUMNS.names])


def _values(block: Block, name: str) -> list[Any]:
    at = block.schema.get_field_index(name)
    return [None] * block.num_rows if at < 0 else block.column(at).to_pylist()
