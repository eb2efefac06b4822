"""The way out, batch by batch: taking, settling, giving back.

A batch that is out holds what its events count for until they are settled, by itself or by offset:
so nothing is counted twice, and what is settled does not come back.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import insort
from collections.abc import Iterable
from typing import Final, NamedTuple

from turnlane.errors import AckNotStored, BatchFreed, QueueClosed, QueueEmpty
from turnlane.events import Block, conform_block, join_blocks
from turnlane.intervals import (
    RangeSet,
    Span,
    count_offsets,
    is_overlapping,
    take_newest,
    take_oldest,
)
from turnlane.ledger import Outcome
from turnlane.queues.api import AckLevel
from turnlane.queues.buffer import BatchState, HeldBatch, Portion
from turnlane.queues.core import Intake
from turnlane.queues.knobs import Kind

log = logging.getLogger(__name__)


class Handing(Intake):
    """A queue that hands out batches; :class:`HoldingQueue` has the rest."""

    # ── consuming ───────────────────────────────────────────────────────────────────────────────

    def get(self, max_events: int | None = None, timeout: float | None = None) -> HeldBatch:
        if max_events is not None and max_events < 1:
            msg = f"max_events is {max_events}; a batch has at least one event"
            raise ValueError(msg)
        deadline = None if timeout is None else time.monotonic() + timeout
        largest = self.settings.dequeue_batch_size
        limit = self._pace.limit(largest if max_events is None else min(max_events, largest))
        if not self._getting.acquire(timeout=-1 if timeout is None else max(timeout, 0)):
            raise self._nothing_to_read()
        try:
            while True:
                with self.lock:
                    portion = self._await_portion(limit, deadline)
                    if portion.pieces is not None:
                        return self._hand_out(portion)
                found = self.fetch(portion)
                if found is not None:
                    with self.lock:
                        whole = self.positions.unsettled(found.first, found.end)
                        if not self._closed and whole == [(found.first, found.end)]:
                            return self._hand_out(found)
                        # Closed, or settled by offset meanwhile: what is left comes next.
                        self.give_back(found)
        finally:
            self._getting.release()

    def _nothing_to_read(self) -> QueueEmpty:
        return QueueEmpty(f"queue {self.name!r} had nothing to read in the time allowed")

    def _await_portion(self, limit: int, deadline: float | None) -> Portion:
        """The next portion, once there is one and it may be taken. Under the lock."""
        while True:
            self.check_readable()
            ready = self._backlog()
            if not ready:
                self._ready_since = None
            elif self._ready_since is None:
                self._ready_since = time.monotonic()
            pause = self._pause(ready, limit)
            if ready and not pause:
                portion = self.next_portion(limit)
                if portion is not None:
                    self._ready_since = None
                    self._pace.took(len(portion))
                    return portion
            self._rest(ready, limit, pause, deadline)

    def _pause(self, ready: int, limit: int) -> float:
        """How long to leave what is ready alone: the pace, or a batch that may yet fill up."""
        pause = self._pace.delay()
        if pause > 0:
            return min(pause, 1.0)  # and look again: the wall clock may jump
        wanted = min(self.settings.minimum_batch_size, limit)
        since = self._ready_since
        if since is None or ready >= wanted or self._finished or self.gate.line:
            return 0.0
        return max(0.0, since + self.settings.minimum_batch_timeout - time.monotonic())

    def check_readable(self) -> None:
        """Raise ``QueueClosed`` if there is nothing to read and never will be."""
        if self._closed or (self._finished and not self.positions.pending):
            msg = f"queue {self.name!r} is closed" + ("" if self._closed else " and drained")
            raise QueueClosed(msg)

    def _rest(self, ready: int, limit: int, pause: float, deadline: float | None) -> None:
        """Sleep until there is reason to look again."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise self._nothing_to_read()
        wanted = min(self.settings.minimum_batch_size, limit) if ready else 1
        waits = [seconds for seconds in (pause or None, left) if seconds is not None]
        self._wait_for_end(self.positions.end + max(1, wanted - ready), min(waits, default=None))

    def _wait_for_end(self, end: int, timeout: float | None) -> None:
        """Sleep until the queue reaches ``end``, or anything else of note happens."""
        thread = threading.get_ident()
        self._hunger[thread] = end
        self.rest_heed()
        self._readable.wait(timeout)
        self._hunger.pop(thread, None)
        self.rest_heed()

    def next_portion(self, limit: int) -> Portion | None:
        """Cut the next portion: what was given back comes first. Under the lock."""
        if self.returned:
            if len(self.returned[0]) > limit:
                return self.returned[0].head(limit)
            return self.returned.pop(0)
        first, end = self.positions.next_fresh(limit)
        if first >= end:
            return None
        if first < self.tail.first:
            end = min(end, self.tail.first)
            portion = self.stored_portion(first, end)
        else:
            portion = self.tail.take(first, end)
        self.positions.take(end)
        return portion

    def _hand_out(self, portion: Portion) -> HeldBatch:
        batch = HeldBatch(self, portion)
        self.out[portion.first] = batch
        return batch

    def give_back(self, portion: Portion) -> None:
        """Have what is not settled of a portion read again, before anything newer. Under the lock.

        What is settled was settled by offset, which has given its room back.
        """
        for first, end in self.positions.unsettled(portion.first, portion.end):
            insort(self.returned, portion.part(first, end), key=lambda each: each.first)
        # All: whoever waits for the end to move would swallow a wake-up meant for a consumer.
        self._readable.notify_all()

    def free_batch(self, batch: HeldBatch) -> None:
        """Give up a batch's contents; their room is free again."""
        with self.lock:
            if batch.state is BatchState.OUT and not batch.freed:
                batch.freed = True
                batch.portion.pieces = None
                events = batch.charged_events if self.free_returns_events else 0
                size, batch.charged_bytes = batch.charged_bytes, 0
                batch.charged_events -= events
                self.refund(events, size)

    def settle_batch(self, batch: HeldBatch, outcome: Outcome) -> None:
        """Settle a batch for good: recorded first, then visible."""
        with self.lock:
            self._await_settlings(batch)
            if batch.state is not BatchState.OUT:
                return
            if self._closed:
                msg = f"queue {self.name!r} was closed before this batch was done"
                raise QueueClosed(msg)
            batch.state = BatchState.SETTLING
        try:
            self.record_settled(batch.portion, outcome)
            self.sync_settled()
        except BaseException as error:  # also what is raised into the thread from outside
            with self.lock:
                batch.state = BatchState.OUT
                self._drained.notify_all()
            if not isinstance(error, OSError):
                raise
            msg = f"could not record that batch {batch.place.first} is {outcome}: {error}"
            raise AckNotStored(msg) from error
        with self.lock:
            batch.state = BatchState.SETTLED
            self.out.pop(batch.place.first, None)
            self.settle_portion(batch.portion, outcome, batch.charged_events, batch.charged_bytes)
            self._drained.notify_all()

    def _await_settlings(self, batch: HeldBatch) -> None:
        """Who settles first decides what becomes of an event, here as in the journal."""
        first, end = batch.place.first, batch.place.end
        while any(is_overlapping(span, (first, end)) for span in self._settlings):
            self._drained.wait()

    def release_batch(self, batch: HeldBatch) -> None:
        """Take a batch back to be read again."""
        with self.lock:
            if batch.state is not BatchState.OUT or self._closed:
                return
            if batch.freed:
                msg = f"batch {batch.place.first} was freed and cannot be released"
                raise BatchFreed(msg)
            batch.state = BatchState.RELEASED
            self.out.pop(batch.place.first, None)
            batch.portion.attempt += 1
            self._releases += 1
            self.give_back(batch.portion)
        self.record_returned(batch.portion)

    def settle_range(self, first: int, end: int, outcome: Outcome, *, recorded: bool) -> None:
        """Settle what is not settled of a range, wherever its events are. Under the lock."""
        for span in self.positions.unsettled(first, end):
            events, size = self._uncharge_range(*span)
            portion = Portion(*span, size, None, recorded=recorded)
            self.settle_portion(portion, outcome, events, size)
        for batch in list(self.out.values()):
            whole = self.positions.is_settled(batch.place.first, batch.place.end)
            if whole and batch.state is BatchState.OUT:
                batch.state = BatchState.SETTLED
                del self.out[batch.place.first]
        self.tail.forget_below(self.positions.low)

    def _uncharge_range(self, first: int, end: int) -> tuple[int, int]:
        """Have a range, which is about to be settled, count no more; returns what it did."""
        charges = [self.tail.uncharge(first, end)]
        stored = max(0, min(end, self.tail.first) - first)
        for batch in self.out.values():
            start, stop = max(first, batch.place.first), min(end, batch.place.end)
            if start < stop:
                charges.append(batch.uncharge(stop - start, self.pending_of(batch)))
                stored -= stop - start
        for portion in self._unreturn(first, end):
            charges.append(portion.charge)
            stored -= len(portion)
        # The rest is on disk, or a consumer is just reading it from there: see get().
        charges.append(self.stored_portion(first, first + stored).charge)
        return sum(events for events, _ in charges), sum(size for _, size in charges)

    def _unreturn(self, first: int, end: int) -> list[Portion]:
        """Take a range out of what was given back; returns it."""
        taken: list[Portion] = []
        kept: list[Portion] = []
        for portion in self.returned:
            for cut in (first, end):
                if portion.first < cut < portion.end:
                    head = portion.head(cut - portion.first)
                    (taken if first <= head.first < end else kept).append(head)
            (taken if first <= portion.first < end else kept).append(portion)
        self.returned[:] = kept
        return taken

    def settle_portion(self, portion: Portion, outcome: Outcome, events: int, size: int) -> None:
        """Settle offsets, tell who follows, give the room back. Under the lock."""
        fresh = self.positions.settle(portion.first, portion.end)
        self.totals.add(outcome, fresh)
        if outcome.is_drop:
            for mark in self.watermarks.values():
                mark.lose(portion.first, portion.end)
        low = self.positions.low
        for level in (AckLevel.PERSISTED, AckLevel.DELIVERED):
            self.acks.send(self.watermarks[level].advance(low))
        self.refund(events, size)
        self.settled()
        if self._finished and not self.positions.pending:
            self._readable.notify_all()
            self._drained.notify_all()

    def evict(self, events: int) -> bool:
        """Drop the oldest unread events; false if there are none. Under the lock."""
        portion = self.next_portion(events)
        if portion is None:
            return False
        return self.drop_oldest(portion)

    def drop_oldest(self, portion: Portion) -> bool:
        """Drop a portion, unless that cannot be recorded: then it comes back. Under the lock."""
        try:
            self.record_settled(portion, Outcome.OLDEST)
        except OSError as error:
            log.warning("queue %s cannot drop its oldest events: %s", self.name, error)
            self.give_back(portion)
            return False
        self.settle_portion(portion, Outcome.OLDEST, *portion.charge)
        self.drops_unsynced = True
        return True

    def _backlog(self) -> int:
        return sum(map(len, self.returned)) + self.positions.fresh

    def await_backlog(self, timeout: float) -> int:
        """Wait until events are ready to be taken; returns how many. 0 on timeout or close."""
        with self.lock:
            if not self._backlog() and not self._closed:
                self._wait_for_end(self.positions.end + 1, timeout)
            return self._backlog()

    def wake(self) -> None:
        """Have everybody who waits for events look again."""
        with self.lock:
            self._readable.notify_all()


# ── holding ──
# What the kinds that hold events have in common: everything but where the events wait.
#
# The life of an event here: published into the tail's open block → sealed into a portion →
# handed
# out in a batch → settled. Storage sees portions when they are sealed, and is asked for the
# contents
# of portions that have left memory. A kind adds its storage by overriding the hooks at the end
# of
# :class:`turnlane.queues.core.Intake`; memory has few to add.


MAX_SPANS: Final = 4096
"""The most spans of offsets that a reader is told at a time."""


class Unsettled(NamedTuple):
    """What waits in a queue, for a reader that keeps no place of its own."""

    spans: list[Span]
    """As much of it as was asked for, in order."""
    pending: int
    """How many events there are in all."""
    end: int


class HoldingQueue(Handing):
    """A queue that holds events between publish and get. See the module's docstring."""

    @property
    def usual_level(self) -> AckLevel:
        """The highest level that comes by itself.

        Other kinds than ``disk`` persist only when they have to, which may wait for a consumer.
        """
        return AckLevel.PERSISTED if self.settings.kind is Kind.DISK else AckLevel.ACCEPTED

    # ── reading by offset, for readers that keep their own place ────────────────────────────────

    def read(self, first: int, max_events: int) -> tuple[int, Block] | None:
        """Events from offset ``first`` on, not taken from the queue; ``None`` if there are none.

        What was settled or handed out may be gone: then the block starts later.
        """
        while True:
            with self.lock:
                first = max(first, self.positions.low)
                end = min(self.positions.end, first + max_events)
                if first >= end:
                    return None
                if first >= self.tail.first:
                    return first, conform_block(join_blocks(self.tail.look(first, end)))
                end = min(end, self.tail.first)
            found = self.read_stored(first, end)
            if found is not None:
                return found
            first = end

    def settle(self, first: int, end: int, outcome: Outcome = Outcome.DELIVERED) -> None:
        """Settle a range that was read by offset. Raises ``AckNotStored``, ``QueueClosed``."""
        with self.lock:
            self._await_others((first, end))
            if self._closed:
                msg = f"queue {self.name!r} is closed"
                raise QueueClosed(msg)
            spans = self.positions.unsettled(first, min(end, self.positions.end))
            portions = [
                Portion(*span, self.average_size(span[1] - span[0]), None) for span in spans
            ]
            self._settlings.append((first, end))
        try:
            for portion in portions:
                self._record_or_fail(portion, outcome)
                with self.lock:
                    # Not more than was recorded, and of that only what nobody settled meanwhile.
                    span = (portion.first, portion.end)
                    self.settle_range(*span, outcome, recorded=portion.recorded)
        finally:
            with self.lock:
                self._settlings.remove((first, end))
                self._drained.notify_all()

    def _await_others(self, span: Span) -> None:
        """Who settles first decides what becomes of an event, here as in the journal."""
        while any(is_overlapping(span, other) for other in self._being_settled()):
            self._drained.wait()

    def _being_settled(self) -> list[Span]:
        out = self.out.values()
        batches = [batch.place for batch in out if batch.state is BatchState.SETTLING]
        return self._settlings + [(place.first, place.end) for place in batches]

    def _record_or_fail(self, portion: Portion, outcome: Outcome) -> None:
        try:
            self.record_settled(portion, outcome)
            self.sync_settled()
        except OSError as error:
            msg = f"could not record that offsets from {portion.first} on are {outcome}: {error}"
            raise AckNotStored(msg) from error

    def is_settled(self, first: int, end: int) -> bool:
        """Whether every offset of the range is settled."""
        with self.lock:
            return self.positions.is_settled(first, end)

    def unsettled(self, events: int, newest: int = 0, first: int = 0) -> Unsettled:
        """The oldest events from ``first`` on that are not settled, at most ``events``.

        If there are more, ``newest`` of those are the newest ones instead. Offsets that lie
        scattered are told at most :data:`MAX_SPANS` spans at a time.
        """
        with self.lock:
            end, pending = self.positions.end, self.positions.pending
            spans = self.positions.unsettled(first, end)
        if pending <= events:
            newest = 0
        chosen = RangeSet(take_newest(spans[-MAX_SPANS // 2 :], newest))
        room = MAX_SPANS - len(chosen)
        for span in take_oldest(spans[:room], events - count_offsets(chosen)):
            chosen.add(*span)
        return Unsettled(list(chosen), pending, end)

    def unsettled_of(self, spans: Iterable[Span]) -> list[Span]:
        """What of these offsets is not settled."""
        with self.lock:
            end = self.positions.end
            return [
                left
                for first, stop in spans
                for left in self.positions.unsettled(first, min(stop, end))
            ]

    def wait_beyond(self, offset: int, timeout: float) -> int:
        """Wait until the queue's end is beyond ``offset``; returns the end either way."""
        deadline = time.monotonic() + timeout
        with self.lock:
            while self.positions.end <= offset and not self._finished:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._wait_for_end(offset + 1, left)
            return self.positions.end

    # ── closing ─────────────────────────────────────────────────────────────────────────────────

    def finish(self) -> None:
        with self.lock:
            self._finished = True
            self.gate.close()
            self.door.calm()
            self._readable.notify_all()

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        self.finish()
        with self.lock:
            if drain:
                limit = self.settings.shutdown_timeout if timeout is None else timeout
                self._drain(limit)
            first, self._closed = not self._closed, True
            if first:
                self._closer = threading.get_ident()
        if first:
            try:
                self._close()
            finally:
                self._close_ended.set()
        elif self._closer != threading.get_ident() and not self.acks.is_here():
            # Whoever closes may then count on it, whoever was first. Not from within that close,
            # nor from a callback, for which it may be waiting.
            self._close_ended.wait()

    def _drain(self, limit: float) -> None:
        """Wait until everything is settled; under the lock."""
        if not self._drained.wait_for(lambda: not self.positions.pending or self._closed, limit):
            count = self.positions.pending
            log.warning("queue %s: %d events are left after draining %g s", self.name, count, limit)

    def _close(self) -> None:
        with self.lock:
            self._readable.notify_all()
            self._drained.notify_all()
            # A done() that is under way still counts; without this it would be lost and acked.
            limit = self.settings.shutdown_timeout
            self._drained.wait_for(lambda: not self._being_settled(), limit)
        try:
            self.close_storage()
        finally:
            with self.lock:
                for mark in self.watermarks.values():
                    mark.abandon()
            self.acks.stop(self.settings.shutdown_timeout)
