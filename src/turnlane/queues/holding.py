"""What the kinds that hold events have in common: everything but where the events wait.

The life of an event here: published into the tail's open block → sealed into a portion → handed
out in a batch → settled. Storage sees portions when they are sealed, and is asked for the contents
of portions that have left memory. A kind adds its storage by overriding the hooks at the end of
:class:`turnlane.queues.intake.Intake`; memory has few to add.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import Final, NamedTuple

from turnlane.errors import AckNotStored, QueueClosed
from turnlane.events import Block, conform, join
from turnlane.queues.batch import BatchState
from turnlane.queues.contract import AckLevel, Outcome
from turnlane.queues.handing import Handing
from turnlane.queues.kinds import Kind
from turnlane.queues.portion import Portion
from turnlane.queues.ranges import Ranges
from turnlane.queues.spans import Span, count_of, newest_of, oldest_of, overlap

log = logging.getLogger(__name__)

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
                    return first, conform(join(self.tail.look(first, end)))
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
        while any(overlap(span, other) for other in self._being_settled()):
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
        chosen = Ranges(newest_of(spans[-MAX_SPANS // 2 :], newest))
        room = MAX_SPANS - len(chosen)
        for span in oldest_of(spans[:room], events - count_of(chosen)):
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
