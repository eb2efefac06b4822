"""Batches: which events of a block are sent together, in which order, and how bad ones are found.

``BatchCutter`` cuts a block into batches (``SendBatch``) within the limits of events and bytes.
``OrderingGroups`` holds back batches whose events must follow others. ``BadRowSearch`` decides how
many rows of a batch to send next after the destination refused some. Nothing here does I/O or
waits; only the thread of a run uses it.

The search for bad rows. Rows are always tried in order, the first ones of a batch first. Rows that
were delivered are done. A refusal of several rows narrows the search to the first half of them, a
refusal of one row has found it. After the first find the whole rest is tried again at once; only if
finds are frequent do the trials get as small as the gaps between them. One bad row among ``n`` is
found with at most 2 · log2(n) sends. If few rows were refused together and all others of them are
delivered, the last one is known to be bad and is not sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from turnlane.delivery.results import BlockProgress, RowNumbers, RowState
from turnlane.delivery.settings import DeliverySettings, Ordering
from turnlane.events import Block
from turnlane.intervals import Span, convert_to_spans
from turnlane.key_hash import count_earlier_equals, hash_keys

Sizes = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

MAX_INFERRED: Final = 5
"""If at most this many rows were refused together, the last one left is not sent alone."""
DEFAULT_ORDERING_GROUPS: Final = 8
"""Ordering groups for events ordered by key if the concurrency is adaptive."""


@dataclass(frozen=True, slots=True)
class BadRowSearch:
    """The progress of a batch: ``left`` rows are open. Immutable; see the head of this module."""

    left: int
    suspect: int = 0
    """One of this many first rows was refused; 0 if no search is on."""
    most: int | None = None
    """More rows than this in one send were too large."""
    passed: int = 0
    """Rows that are settled, bad ones included."""
    found: int = 0
    """Bad rows found."""
    refused_together: int = 0
    """The number of rows of the refusal that began the search; 0 if the cause was uncertain."""
    passed_before: int = 0
    """``passed`` when the search began."""

    @property
    def trial(self) -> int:
        """The number of first rows to send next."""
        if self.suspect:
            trial = max(1, self.suspect // 2)
        elif self.found > 1:
            trial = max(1, self.passed // self.found)
        else:
            trial = self.left
        return min(trial, self.left, self.most or trial)

    @property
    def is_first_row_bad(self) -> bool:
        """Whether the first row must be the bad one, so that it need not be sent alone."""
        return self.suspect == 1 and 0 < self.refused_together <= MAX_INFERRED

    @property
    def has_no_delivery(self) -> bool:
        """Whether nothing was delivered since the search began, or there is no search."""
        return not self.suspect or self.passed == self.passed_before

    def after_delivery(self, count: int) -> Self:
        """Return the progress after the first ``count`` rows were delivered."""
        return replace(
            self,
            left=self.left - count,
            suspect=max(0, self.suspect - count),
            passed=self.passed + count,
        )

    def after_refusal(self, count: int, *, is_certain: bool = True) -> Self:
        """Return the progress after the first ``count`` rows were refused; one row is found bad.

        The refusal is not ``is_certain`` if the destination may be at fault after all.
        """
        if count == 1:
            return self._after_find()
        if self.suspect:
            return replace(self, suspect=count)
        together = count if is_certain else 0
        return replace(self, suspect=count, refused_together=together, passed_before=self.passed)

    def after_too_large(self, count: int) -> Self:
        """Return the progress after the first ``count`` rows were too large; one row is found bad.

        Otherwise half as many are tried. After a find the rest is tried whole again, because that
        row alone may have been too large.
        """
        if count == 1:
            return replace(self._after_find(), most=None)
        return replace(self, most=count // 2)

    def _after_find(self) -> Self:
        return replace(
            self, left=self.left - 1, suspect=0, passed=self.passed + 1, found=self.found + 1
        )


@dataclass(eq=False, slots=True)
class SendBatch:
    """Open rows of a block that are sent together. The first of them are tried first."""

    progress: BlockProgress
    block: Block
    numbers: RowNumbers
    """The numbers of the rows in the progress's block."""
    order: tuple[int, int]
    """The number of the block and of the first row: batches of lower order go first."""
    search: BadRowSearch
    ordering_group: int | None = None
    """Batches of one ordering group go one after another; ``None``: there is no order."""
    keys: Hashes | None = None
    """The hash of each row's key, if events of one key go one after another."""
    payload: Any = None
    """The result of ``prepare`` for the first ``prepared`` rows."""
    prepared: int = 0
    retries: int = 0
    tries: int = 0
    """How many times the first row was sent."""
    unknown_errors: int = 0
    """Attempts that failed with an unknown error since rows of it were last settled."""
    refusal: BaseException | None = None
    """The last refusal of the current search."""
    event_refs: set[str] = field(default_factory=set)
    """The events under which the destination's state remembers ``unknown_errors``."""

    def __lt__(self, other: SendBatch) -> bool:
        return self.order < other.order

    @property
    def left(self) -> int:
        """The number of open rows."""
        return len(self.numbers)

    def defer(self) -> None:
        """Leave all open rows to a later task."""
        self.progress.settle(self.numbers, RowState.DEFERRED)
        self.drop_first(self.left)

    def settle_delivered(self, count: int) -> None:
        """Settle the first ``count`` rows as delivered."""
        self.progress.settle(self.numbers[:count], RowState.DELIVERED)
        self.search = self.search.after_delivery(count)
        self.drop_first(count)

    def settle_dead(self, error: BaseException) -> None:
        """Settle the first row as dead; the search has counted it already."""
        attempts = max(self.unknown_errors, self.tries, 1)
        self.progress.settle_dead(self.block.slice(0, 1), self.numbers[:1], error, attempts)
        self.drop_first(1)

    def drop_first(self, count: int) -> None:
        """Remove the first ``count`` rows, which are settled.

        The other rows start with no attempts, unless the search for a bad row among them goes on:
        each event has its own attempts before it is dead.
        """
        self.block = self.block.slice(count)
        self.numbers = self.numbers[count:]
        if self.keys is not None:
            self.keys = self.keys[count:]
        self.tries = 0
        if not self.search.suspect:
            self.unknown_errors = 0
        self.discard_payload()

    def discard_payload(self) -> None:
        """Forget the prepared payload: other rows are sent next."""
        self.payload, self.prepared = None, 0

    def select(self, rows: npt.NDArray[np.int64]) -> SendBatch:
        """Return a batch of some of its rows."""
        numbers = np.asarray(self.numbers, dtype=np.int64)[rows]
        return SendBatch(
            self.progress,
            self.block.take(rows),
            numbers,
            (self.order[0], int(numbers[0])),
            BadRowSearch(len(rows)),
            self.ordering_group,
            None if self.keys is None else self.keys[rows],
            unknown_errors=self.unknown_errors,
            retries=self.retries,
            event_refs=self.event_refs,
        )


class BatchCutter:
    """Cuts the blocks of one run into batches.

    ``can_deliver_partly`` says that the destination may take some events of a batch and leave
    others. Then no batch has two events of which one must follow the other.
    """

    def __init__(
        self, settings: DeliverySettings, max_events: int, *, can_deliver_partly: bool = False
    ) -> None:
        self._settings = settings
        self._can_deliver_partly = can_deliver_partly
        one_by_one = can_deliver_partly and settings.ordering is Ordering.STRICT
        self._max_events = 1 if one_by_one else max_events
        fixed = settings.concurrency
        default = min(DEFAULT_ORDERING_GROUPS, settings.max_concurrency)
        self._ordering_groups = fixed if isinstance(fixed, int) else default
        self._blocks = 0

    def cut(
        self, progress: BlockProgress, attempts: Mapping[str, int], most: int | None
    ) -> list[SendBatch]:
        """Return the batches of a block.

        ``attempts`` are the remembered attempts of a permit; more events than ``most`` in one send
        were too large lately.
        """
        self._blocks += 1
        block = progress.block
        if self._settings.ordering is Ordering.KEY:
            groups = self._group_by_key(block)
        else:
            group = 0 if self._settings.ordering is Ordering.STRICT else None
            groups = iter([(block, range(block.num_rows), group, None)])
        batches = []
        for rows, numbers, group, keys in groups:
            sizes = estimate_payload_sizes(rows)
            for each in split_by_size(sizes, self._max_events, self._settings.batch_bytes):
                part = slice(each.start, each.stop)
                batch = SendBatch(
                    progress,
                    rows.slice(each.start, len(each)),
                    numbers[part],
                    (self._blocks, int(numbers[each.start])),
                    BadRowSearch(len(each), most=most),
                    group,
                    None if keys is None else keys[part],
                )
                if attempts:
                    _restore_attempts(batch, attempts)
                batches.append(batch)
        return batches

    def _group_by_key(
        self, block: Block
    ) -> Iterator[tuple[Block, RowNumbers, int | None, Hashes | None]]:
        """Group rows so that all rows of a key are in one ordering group, in their order.

        Yields some rows of a group, their numbers, their group and the hashes of their keys.
        """
        keys = _hash_keys(block)
        groups = (keys % np.uint64(self._ordering_groups)).astype(np.int64)
        # Rows of one key get rising turns, so that the n-th rows of all keys are grouped together.
        turns = count_earlier_equals(keys) if self._can_deliver_partly else np.zeros_like(groups)
        order = np.lexsort((turns, groups))
        rows = block.take(order)
        boundary = (np.diff(groups[order]) != 0) | (np.diff(turns[order]) != 0)
        ends = [*(np.flatnonzero(boundary) + 1).tolist(), len(order)] if len(order) else []
        for first, end in pairwise([0, *ends]):
            numbers = order[first:end]
            yield rows.slice(first, end - first), numbers, int(groups[numbers[0]]), keys[numbers]


def estimate_payload_sizes(block: Block) -> Sizes:
    """Return the approximate bytes of each event at the destination."""
    for name in ("payload", "value"):
        at = block.schema.get_field_index(name)
        if at >= 0:
            column: Any = block.column(at)
            lengths: Any = pc.fill_null(pc.binary_length(column), 0)
            return np.asarray(lengths, dtype=np.int64)
    return np.full(block.num_rows, block.nbytes // max(1, block.num_rows), dtype=np.int64)


def split_by_size(sizes: Sizes, max_events: int, max_bytes: int) -> list[range]:
    """Split rows into ranges within both limits; an event larger than ``max_bytes`` is alone."""
    ranges: list[range] = []
    ends = np.cumsum(sizes)
    first = before = 0
    while first < len(sizes):
        end = int(np.searchsorted(ends, before + max_bytes, side="right"))
        end = min(max(end, first + 1), first + max_events, len(sizes))
        ranges.append(range(first, end))
        first, before = end, int(ends[end - 1])
    return ranges


def _hash_keys(block: Block) -> Hashes:
    """Return the hash of each event's key. Events without a key are spread over all groups."""
    at = block.schema.get_field_index("key")
    if at < 0:
        return np.arange(block.num_rows, dtype=np.uint64)
    column = block.column(at)
    hashes = hash_keys(column)
    if column.null_count:
        missing = np.flatnonzero(np.asarray(column.is_null()))
        hashes[missing] = missing.astype(np.uint64)
    return hashes


def get_event_ref(block: Block) -> str | None:
    """Return ``partition/offset`` of the first event; ``None`` if the block has no offsets."""
    at = block.schema.get_field_index("offset")
    if at < 0:
        return None
    partition = block.schema.get_field_index("partition")
    node = block.column(partition)[0].as_py() if partition >= 0 else 0
    return f"{node}/{block.column(at)[0].as_py()}"


def get_spans_by_source(block: Block, mask: Mask | None = None) -> dict[str, list[Span]]:
    """Return the offsets of the events by ``queue/partition``; nothing if there are no offsets.

    ``mask`` says which events; without it, all.
    """
    names = block.schema.names
    if "offset" not in names or not (block.num_rows if mask is None else mask.any()):
        return {}
    chosen = slice(None) if mask is None else mask
    queue = block.column("queue")[0].as_py() if "queue" in names else ""
    offsets = np.asarray(block.column("offset"))[chosen]
    if "partition" not in names:
        return {f"{queue}/0": convert_to_spans(offsets)}
    partitions = np.asarray(block.column("partition"))[chosen]
    return {
        f"{queue}/{node}": convert_to_spans(offsets[partitions == node])
        for node in np.unique(partitions).tolist()
    }


def _restore_attempts(batch: SendBatch, attempts: Mapping[str, int]) -> None:
    """Set the remembered attempts of a batch. It may start with another event than last time."""
    at = batch.block.schema.get_field_index("offset")
    if at < 0:
        return
    offsets = np.asarray(batch.block.column(at))
    remembered = np.array([int(ref.partition("/")[2]) for ref in attempts], dtype=np.int64)
    for row in np.flatnonzero(np.isin(offsets, remembered)):
        event_ref = get_event_ref(batch.block.slice(int(row), 1))
        if event_ref is not None and event_ref in attempts:
            batch.event_refs.add(event_ref)
            batch.unknown_errors = max(batch.unknown_errors, attempts[event_ref])


class OrderingGroups:
    """The ordering groups of a run. One batch of a group is on its way, the others wait here.

    Batches without a group are never held back.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, deque[SendBatch]] = {}
        self._blocked_keys: Hashes = np.empty(0, dtype=np.uint64)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def enter(self, batch: SendBatch) -> SendBatch | None:
        """Return a batch that may go now; the given one may wait at the end of its group."""
        if batch.ordering_group is None:
            return batch
        if batch.ordering_group in self._waiting:
            self._waiting[batch.ordering_group].append(batch)
            return None
        self._waiting[batch.ordering_group] = deque()
        return self._remove_blocked(batch) or self.leave(batch)

    def put_back(self, batch: SendBatch) -> SendBatch | None:
        """Return the batch if it has no group; otherwise it waits at the head of its group."""
        if batch.ordering_group is None:
            return batch
        self._waiting[batch.ordering_group].appendleft(batch)
        return None

    def leave(self, batch: SendBatch) -> SendBatch | None:
        """Return the next batch of a group: the given one is settled."""
        if batch.ordering_group is None:
            return None
        waiting = self._waiting[batch.ordering_group]
        while waiting:
            following = self._remove_blocked(waiting.popleft())
            if following is not None:
                return following
        del self._waiting[batch.ordering_group]
        return None

    def block_keys(self, batch: SendBatch) -> None:
        """Defer later events of this batch's keys, because the batch itself is deferred."""
        if batch.keys is not None:
            self._blocked_keys = np.union1d(self._blocked_keys, batch.keys)

    def remove_all(self) -> list[SendBatch]:
        """Remove all waiting batches and return them."""
        batches = [batch for waiting in self._waiting.values() for batch in waiting]
        for waiting in self._waiting.values():
            waiting.clear()
        return batches

    def _remove_blocked(self, batch: SendBatch) -> SendBatch | None:
        """Defer the events of blocked keys; return a batch of the others, if there are any."""
        if batch.keys is None or not len(self._blocked_keys):
            return batch
        blocked = np.isin(batch.keys, self._blocked_keys)
        if not blocked.any():
            return batch
        if blocked.all():
            batch.defer()
            return None
        batch.select(np.flatnonzero(blocked)).defer()
        return batch.select(np.flatnonzero(~blocked))
