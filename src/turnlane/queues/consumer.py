"""The consuming end of a buffered queue: batches out, and back.

A settlement is recorded first, without the lock, and visible afterwards. If two threads settle the
same event, by batch or by offset, the first one decides its outcome, in memory as in the journal:
the second waits until the first is through.
"""

from __future__ import annotations

import datetime as dt
import threading
import time

from turnlane.clock import Clock
from turnlane.errors import AckNotStored, BatchFreed, QueueClosed, QueueEmpty, StorageFailed
from turnlane.intervals import is_overlapping
from turnlane.ledger import Outcome
from turnlane.logs import get_logger
from turnlane.queues.buffer import BlockRange
from turnlane.queues.positions import BatchState, BufferedBatch
from turnlane.queues.state import QueueState
from turnlane.storage.reader import UnreadableRange
from turnlane.units import TimeWindow

log = get_logger(__name__)


class DequeuePace:
    """When the next batch may be taken: the dequeue rate and the dequeue time window."""

    __slots__ = ("_clock", "_not_before", "_rate", "_window")

    def __init__(self, rate: float | None, window: TimeWindow | None, clock: Clock) -> None:
        self._rate = rate
        self._window = window
        self._clock = clock
        self._not_before = 0.0

    def limit_batch(self, events: int) -> int:
        """Limit a batch to the events of a second: a low rate is not one burst and a long wait."""
        return events if self._rate is None else max(1, min(events, int(self._rate)))

    def delay(self) -> float:
        """Return the seconds until a batch may be taken; 0 if now."""
        delay = 0.0 if self._rate is None else self._not_before - self._clock.monotonic()
        if self._window is not None:
            now = dt.datetime.fromtimestamp(self._clock.time_ns() / 1e9).astimezone()
            delay = max(delay, self._window.seconds_until_open(now.time()))
        return max(0.0, delay)

    def count(self, events: int) -> None:
        """Events were handed out: the next batch waits in proportion."""
        if self._rate is not None:
            start = max(self._not_before, self._clock.monotonic())
            self._not_before = start + events / self._rate


class ConsumerSide:
    """Hands out batches and settles events. Every method may be called from any thread."""

    def __init__(self, state: QueueState, clock: Clock) -> None:
        self._state = state
        self._settings = state.settings
        self._storage = state.storage
        self._pace = DequeuePace(self._settings.dequeue_rate, self._settings.dequeue_window, clock)
        self._getting = threading.Lock()
        """Held by the one consumer that waits for a batch, or fetches it from storage."""
        self._ready_since: float | None = None
        """Since when events wait for a fuller batch, over all calls of ``get()``."""

    # ── batches ─────────────────────────────────────────────────────────────────────────────────

    def get(self, max_events: int | None = None, timeout: float | None = None) -> BufferedBatch:
        """Take the next batch. See :meth:`turnlane.queues.api.Queue.get`."""
        if max_events is not None and max_events < 1:
            raise ValueError(f"max_events is {max_events}; a batch has at least one event")
        deadline = None if timeout is None else time.monotonic() + timeout
        largest = self._settings.dequeue_batch_size
        limit = self._pace.limit_batch(largest if max_events is None else min(max_events, largest))
        if not self._getting.acquire(timeout=-1 if timeout is None else max(timeout, 0)):
            raise self._nothing_to_read()
        state = self._state
        try:
            while True:
                with state.lock:
                    taken = self._await_next(limit, deadline)
                    if taken.blocks is not None:
                        return self._hand_out(taken)
                fetched = self._fetch(taken)
                if fetched is None:
                    continue
                with state.lock:
                    unsettled = state.positions.find_unsettled(fetched.first, fetched.end)
                    if not state.is_closed and unsettled == [(fetched.first, fetched.end)]:
                        return self._hand_out(fetched)
                    # Closed, or partly settled by offset since: the rest comes next.
                    state.give_back(fetched)
        finally:
            self._getting.release()

    def _nothing_to_read(self) -> QueueEmpty:
        name = self._settings.name
        return QueueEmpty(f"queue {name!r} had nothing to read in the time allowed")

    def _await_next(self, limit: int, deadline: float | None) -> BlockRange:
        """Wait for the next range that may be taken, and return it. Under the lock."""
        state = self._state
        while True:
            self.check_readable()
            ready = state.backlog
            if not ready:
                self._ready_since = None
            elif self._ready_since is None:
                self._ready_since = time.monotonic()
            pause = self._pause(ready, limit)
            if ready and not pause:
                taken = state.take_next(limit)
                if taken is not None:
                    self._ready_since = None
                    self._pace.count(len(taken))
                    return taken
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise self._nothing_to_read()
            wanted = min(self._settings.minimum_batch_size, limit) if ready else 1
            waits = [seconds for seconds in (pause or None, left) if seconds is not None]
            state.wait_for_end(
                state.positions.end + max(1, wanted - ready), min(waits, default=None)
            )

    def _pause(self, ready: int, limit: int) -> float:
        """Return how long to wait though events are ready: for the pace, or for a fuller batch."""
        pause = self._pace.delay()
        if pause > 0:
            return min(pause, 1.0)  # then look again: the wall clock may jump
        state, since = self._state, self._ready_since
        wanted = min(self._settings.minimum_batch_size, limit)
        if (
            since is None
            or ready >= wanted
            or state.is_finished
            or state.admission.has_waiting_line
        ):
            return 0.0
        return max(0.0, since + self._settings.minimum_batch_timeout - time.monotonic())

    def check_readable(self) -> None:
        """Raise ``QueueClosed`` if there is nothing to read and never will be."""
        state = self._state
        if state.is_closed or (state.is_finished and not state.positions.pending):
            drained = "" if state.is_closed else " and drained"
            raise QueueClosed(f"queue {self._settings.name!r} is closed{drained}")

    def _hand_out(self, events: BlockRange) -> BufferedBatch:
        batch = BufferedBatch(self, events)
        self._state.in_flight.add(batch)
        return batch

    def _fetch(self, wanted: BlockRange) -> BlockRange | None:
        """Bring contents from storage, as many as lie together; ``None`` if none can be read."""
        state = self._state
        try:
            while len(wanted):
                found = self._storage.fetch(wanted)
                if not isinstance(found, UnreadableRange):
                    break
                end = min(found.end, wanted.end)
                self._settle_unreadable(wanted, found.first, end, found.outcome)
                wanted.cut_head(end - wanted.first)
            else:
                return None
        except BaseException as error:
            with state.lock:
                state.give_back(wanted)
            if not isinstance(error, OSError):
                raise
            name = self._settings.name
            raise StorageFailed(
                f"queue {name!r} cannot read offset {wanted.first}: {error}"
            ) from error
        if not found:  # the queue was closed
            with state.lock:
                state.give_back(wanted)
            return None
        rows = sum(block.num_rows for block in found)
        if rows < len(wanted):
            rest, wanted = wanted, wanted.cut_head(rows)
            with state.lock:
                # As if it had not been taken: the next batch need not end where this one would.
                is_fresh = rest.attempt == 1 and state.positions.unread(rest.first, rest.end)
                if not is_fresh:
                    state.give_back(rest)
        wanted.blocks = found
        return wanted

    def _settle_unreadable(
        self, wanted: BlockRange, first: int, end: int, outcome: Outcome
    ) -> None:
        """Settle offsets that can never be read, unless they are settled."""
        state = self._state
        with state.lock:
            spans = state.positions.find_unsettled(first, end)
        for start, stop in spans:
            share = wanted.size * (stop - start) // len(wanted)
            lost = BlockRange(start, stop, share, None, is_charged=wanted.is_charged)
            self._storage.settle(lost, outcome)
            self._storage.sync_settled()
            with state.lock:
                for span in state.positions.find_unsettled(start, stop):
                    part = lost.slice(*span)
                    state.settle(part, outcome, *part.charge)
            log.error(
                "queue.events_unreadable",
                queue=self._settings.name,
                first=start,
                end=stop,
                outcome=outcome,
            )

    def free_batch(self, batch: BufferedBatch) -> None:
        """Give up the contents of a batch, and their room."""
        with self._state.lock:
            if batch.state is BatchState.IN_FLIGHT and not batch.is_freed:
                batch.is_freed = True
                batch.events.blocks = None
                events = 0 if self._storage.charges_freed else batch.charged_events
                size, batch.charged_bytes = batch.charged_bytes, 0
                batch.charged_events -= events
                self._state.admission.refund(events, size)

    def settle_batch(self, batch: BufferedBatch, outcome: Outcome) -> None:
        """Settle a batch. Raises ``AckNotStored``, ``QueueClosed``."""
        state = self._state
        first, end = batch.place.first, batch.place.end
        with state.lock:
            while any(is_overlapping(span, (first, end)) for span in state.in_flight.settling):
                state.changed.wait()
            if batch.state is not BatchState.IN_FLIGHT:
                return
            if state.is_closed:
                name = self._settings.name
                raise QueueClosed(f"queue {name!r} was closed before this batch was done")
            batch.state = BatchState.SETTLING
        try:
            self._storage.settle(batch.events, outcome)
            self._storage.sync_settled()
        except BaseException as error:  # also an exception that another thread raises in this one
            with state.lock:
                batch.state = BatchState.IN_FLIGHT
                state.changed.notify_all()
            if not isinstance(error, OSError):
                raise
            raise AckNotStored(
                f"could not record that batch {first} is {outcome}: {error}"
            ) from error
        with state.lock:
            batch.state = BatchState.SETTLED
            state.in_flight.remove(batch)
            state.settle(batch.events, outcome, batch.charged_events, batch.charged_bytes)
            state.changed.notify_all()

    def release_batch(self, batch: BufferedBatch) -> None:
        """Take a batch back, to be handed out again."""
        state = self._state
        with state.lock:
            if batch.state is not BatchState.IN_FLIGHT or state.is_closed:
                return
            if batch.is_freed:
                raise BatchFreed(f"batch {batch.place.first} was freed and cannot be released")
            batch.state = BatchState.RELEASED
            state.in_flight.remove(batch)
            batch.events.attempt += 1
            state.releases += 1
            state.give_back(batch.events)
        self._storage.give_back(batch.events)
