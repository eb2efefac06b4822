"""Which events may enter a queue, and when: bounds, the waiting line, policies.

Events in the queue count against two bounds, in events and in bytes. A request that does not fit
waits in line, first come first served; the thread that makes room puts the first request in and
wakes its publisher. Before that, policies may drop events of a request (sampling, load shedding) or
slow its publisher down (flow control). In a full queue that does not block, they drop the oldest or
the newest events.

The lock of the queue guards all of this; only :meth:`Admission.wait_in_line` is called without it.

:class:`FastPathLimits` are what makes a single publish cheap. A producer compares two numbers with
them under the lock. Below the limits nothing can apply to an event: no bound, no mark, no policy,
no line to overtake. Everything that may apply either lowers the limits when the queue is opened,
or sets them to -1 while it lasts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turnlane.errors import QueueClosed, QueueFull
from turnlane.events import Block
from turnlane.ledger import Outcome
from turnlane.queues.api import FlowControl, FullBehavior
from turnlane.queues.settings import QueueSettings

if TYPE_CHECKING:
    from turnlane.queues.producer import BufferedProducer, PublishRequest

UNBOUNDED: Final = 1 << 62
"""Stands for a bound that is not set."""

SPILL_SECONDS = 1.0
"""How long a queue that drops when full waits for storage to make room."""

MAX_SEVERITY = 7
"""Debug, as in syslog; 0 is an emergency."""


class Deadline(NamedTuple):
    """The time that a publisher has for everything that it waits for; ``None`` is no limit."""

    seconds: float | None
    until: float | None

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """Return the deadline that many seconds from now."""
        return NO_DEADLINE if seconds is None else cls(seconds, time.monotonic() + seconds)

    @property
    def left(self) -> float | None:
        """The seconds that are left, at least 0."""
        return None if self.until is None else max(0.0, self.until - time.monotonic())


NO_DEADLINE: Final = Deadline(None, None)


class WaitingPublisher:
    """A publisher in the waiting line."""

    __slots__ = ("_signal", "is_refused", "is_woken", "request")

    def __init__(self, request: PublishRequest) -> None:
        self.request = request
        self.is_woken = False
        self.is_refused = False
        self._signal = threading.Lock()
        self._signal.acquire()

    def wait(self, timeout: float | None) -> bool:
        """Block until the request is in or refused; false on timeout."""
        return self._signal.acquire(timeout=-1 if timeout is None else max(timeout, 0))

    def admit(self) -> None:
        """Put the request in and wake its publisher."""
        if not self.request.is_inside:  # interrupted before, between the two lines
            self.request.enter()
        self.is_woken = True
        self._signal.release()

    def refuse(self) -> None:
        """Wake the publisher though its request is not in: the queue was closed."""
        self.is_woken = self.is_refused = True
        self._signal.release()


class FillLevel(NamedTuple):
    """A number of events, and the same share of the bound in bytes."""

    events: int
    bytes: int


class FastPathLimits:
    """Below these, an event needs no closer look. ``bytes`` is -1 while every event needs one."""

    __slots__ = ("bytes", "events", "usual_bytes")

    def __init__(self, events: int, usual_bytes: int) -> None:
        self.events = events
        self.bytes = self.usual_bytes = usual_bytes


class Admission:
    """The bounds, the waiting line and the policies of one queue.

    ``evict(events)`` drops that many of the oldest unread events and says whether there were any;
    ``drop_unwritten()`` does so for publishers who are held because memory has to replace the disk;
    ``on_full()`` tells storage and consumers, and returns whether storage makes room.
    """

    def __init__(
        self,
        settings: QueueSettings,
        lock: threading.Lock,
        *,
        evict: Callable[[int], bool],
        drop_unwritten: Callable[[], bool],
        on_full: Callable[[], bool],
    ) -> None:
        self._lock = lock
        self._evict = evict
        self._drop_unwritten = drop_unwritten
        self._on_full = on_full
        self.events = 0
        self.bytes = 0
        self.line: deque[WaitingPublisher] = deque()
        self.full_waits = 0
        """How often a publisher found the queue full."""
        self.is_closed = False
        self.is_held = False
        """Whether every publisher is kept out, even if there is room."""
        self.failure: Exception | None = None
        """The error that the queue failed with."""
        self._seen = 0
        self._delayed: dict[FlowControl, deque[threading.Condition]]
        self._delayed = {flow: deque() for flow in FlowControl}
        """The publishers that flow control slows down, first come first."""
        self.limits = {flow: FastPathLimits(-1, -1) for flow in FlowControl}
        """By the flow control of a publisher."""
        self.set_bounds(settings)

    def set_bounds(self, settings: QueueSettings) -> None:
        """Use the bounds and marks of these settings, and let publishers in that fit now."""
        self._settings = settings
        self.max_events = UNBOUNDED if settings.size is None else settings.size
        self.max_bytes = UNBOUNDED if settings.max_bytes is None else settings.max_bytes
        marks = settings.marks
        self._discard_level = self.level_of(marks.discard)
        self._delay_levels = {
            FlowControl.NONE: None,
            FlowControl.LIGHT: self.level_of(marks.light_delay),
            FlowControl.FULL: self.level_of(marks.full_delay),
        }
        for flow, limits in self.limits.items():
            limits.events, limits.usual_bytes = self._find_limits(flow)
        self._admit_waiting()
        self.wake_delayed()

    @property
    def blocks(self) -> bool:
        """Whether publishers wait when the queue is full, and nothing is dropped."""
        return self._settings.full_behavior is FullBehavior.BLOCK

    @property
    def can_drop(self) -> bool:
        """Whether a policy may drop events that publishers have to be told of."""
        settings = self._settings
        is_sampling = settings.sampling_interval > 1
        return not self.blocks or is_sampling or settings.discard_severity is not None

    # The fast path

    def _find_limits(self, flow: FlowControl) -> tuple[int, int]:
        if self._settings.sampling_interval > 1:
            return -1, -1
        levels = [
            FillLevel(self.max_events, self.max_bytes),
            self._discard_level,
            self._delay_levels[flow],
            self.level_of(self._settings.marks.high),
        ]
        known = [level for level in levels if level is not None]
        return min(level.events for level in known), min(level.bytes for level in known)

    def _update_limits(self) -> None:
        closer_look = self.is_closed or self.is_held or self.blocked
        for limits in self.limits.values():
            limits.bytes = -1 if closer_look else limits.usual_bytes

    def level_of(self, mark: int | None) -> FillLevel | None:
        """Return a mark in events, with the same share of the bound in bytes."""
        if mark is None:
            return None
        bounded = self.max_events != UNBOUNDED
        return FillLevel(mark, self.max_bytes * mark // self.max_events if bounded else UNBOUNDED)

    def _reaches(self, level: FillLevel) -> bool:
        return self.events >= level.events or self.bytes >= level.bytes

    # Room

    @property
    def blocked(self) -> int:
        """How many publishers wait, in line or slowed down."""
        return len(self.line) + sum(map(len, self._delayed.values()))

    @property
    def has_waiting_line(self) -> bool:
        """Whether publishers wait in line for room."""
        return bool(self.line)

    @property
    def needed_room(self) -> tuple[int, int]:
        """The events and bytes of the first request in line; nothing without a line."""
        return (self.line[0].request.events, self.line[0].request.size) if self.line else (0, 0)

    def fits(self, events: int, size: int) -> bool:
        """Whether there is room and publishers are let in; the line does not matter here."""
        return not self.is_held and self.has_room(events, size)

    def has_room(self, events: int, size: int) -> bool:
        """Whether the bounds leave room for the events."""
        return self.events + events <= self.max_events and self.bytes + size <= self.max_bytes

    def charge(self, events: int, size: int) -> None:
        """Count events against the bounds."""
        self.events += events
        self.bytes += size

    def refund(self, events: int, size: int) -> None:
        """Give room back and let publishers in."""
        self.events -= events
        # The size of events that were read back is an average: errors must not add up.
        self.bytes = max(0, self.bytes - size) if self.events else 0
        if self.line:
            self._admit_waiting()
        self.wake_delayed()

    def estimate_size(self, events: int) -> int:
        """Return the bytes of this many events, by the average size."""
        return self.bytes * events // max(1, self.events)

    def hold(self, *, hold: bool) -> None:
        """Keep every publisher out, even if there is room, or let them in again."""
        if hold is not self.is_held:
            self.is_held = hold
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Admit from the front of the line while there is room."""
        while self.line and self.fits(self.line[0].request.events, self.line[0].request.size):
            self.line[0].admit()  # if this is interrupted, the publisher is still in line
            self.line.popleft()
        self._update_limits()

    # Closeable

    def close(self) -> None:
        """Refuse every later request; the publishers in line are woken."""
        self.is_closed = True
        while self.line:
            self.line.popleft().refuse()
        self._update_limits()
        self.wake_delayed()

    def fail(self, error: Exception) -> None:
        """Close, and give publishers this error."""
        self.failure = error
        self.close()

    def check_failure(self) -> None:
        """Raise the error that the queue failed with, if it did."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def check_open(self) -> None:
        """Raise ``QueueClosed`` if the queue takes no more events, or why it failed."""
        self.check_failure()
        if self.is_closed:
            raise QueueClosed(f"queue {self._settings.name!r} is closed")

    # A request

    def admit(
        self, request: PublishRequest, flow: FlowControl, deadline: Deadline, *, blocking: bool
    ) -> WaitingPublisher | None:
        """Put a request in, drop it, or put it in line; returns the place in line.

        It is not in and has no place if it does not fit and the publisher does not block.
        """
        request.prepare()
        self._apply_policies(request, flow, deadline)
        self.check_open()
        request.producer.check_not_cancelled()
        if not request.events and not request.is_repeat:
            request.skip()
            return None
        if request.is_repeat or (not self.line and self.fits(request.events, request.size)):
            request.enter()
            return None
        self.full_waits += 1
        is_making_room = self._on_full()
        if blocking and (self.blocks or is_making_room):
            waiting = WaitingPublisher(request)
            self.line.append(waiting)
            self._update_limits()
            return waiting
        if not self.blocks:
            self.drop_or_enter(request)
        return None

    def wait_in_line(self, waiting: WaitingPublisher, deadline: Deadline) -> None:
        """Wait until a request is in. Raises ``QueueFull``, ``QueueClosed``. Not under the lock."""
        if not self.blocks and deadline.seconds is None:
            deadline = Deadline.after(SPILL_SECONDS)
        if not waiting.wait(deadline.left):
            with self._lock:
                if not waiting.is_woken:
                    self.line.remove(waiting)
                    self._admit_waiting()  # the next request may be smaller, and fit
                    if not self.blocks:
                        self.drop_or_enter(waiting.request)
                        return
                    name, seconds = self._settings.name, deadline.seconds
                    raise QueueFull(f"queue {name!r} had no room for {seconds:g} s")
        if waiting.is_refused:
            self.check_open()

    def refuse_waiting(self, producer: object) -> None:
        """Refuse the requests of a producer that are in line; slowed-down publishers look again."""
        for turns in self._delayed.values():
            for turn in turns:
                turn.notify()
        for waiting in [each for each in self.line if each.request.producer is producer]:
            self.line.remove(waiting)
            waiting.refuse()
        self._admit_waiting()

    def _apply_policies(
        self, request: PublishRequest, flow: FlowControl, deadline: Deadline
    ) -> None:
        """Drop what sampling and load shedding drop; slow the publisher down.

        The request counts the drops until it is in the queue, or given up as a whole: a request
        that is refused for lack of room comes again.
        """
        interval = self._settings.sampling_interval
        if interval > 1:
            before, self._seen = self._seen, self._seen + request.events
            request.dropped_by_policy[Outcome.SAMPLED] = request.keep_sample(before, interval)
        severity, level = self._settings.discard_severity, self._discard_level
        if severity is not None and level is not None and self._reaches(level):
            request.dropped_by_policy[Outcome.SEVERITY] = request.keep_important(severity)
        if request.events:
            self._slow_down(request.producer, flow, deadline)

    def _slow_down(self, producer: BufferedProducer, flow: FlowControl, deadline: Deadline) -> None:
        """Wait until the queue is below the delay mark, first come first served."""
        level, line = self._delay_levels[flow], self._delayed[flow]
        if level is None or not (line or self._reaches(level)):
            return
        limits = [self._settings.light_delay] if flow is FlowControl.LIGHT else []
        limits += [] if deadline.left is None else [deadline.left]
        turn = threading.Condition(self._lock)
        line.append(turn)
        self._update_limits()  # or others would overtake
        try:
            is_below = turn.wait_for(
                lambda: (
                    self.is_closed
                    or producer.is_cancelled
                    or (line[0] is turn and not self._reaches(level))
                ),
                min(limits, default=None),
            )
        finally:
            line.remove(turn)
            self._update_limits()
            self.wake_delayed()  # the next one looks once this one is in the queue
        if not is_below and flow is FlowControl.FULL:
            name, seconds = self._settings.name, deadline.seconds
            raise QueueFull(f"queue {name!r} was above full_delay_mark for {seconds:g} s")

    def wake_delayed(self) -> None:
        """Wake the first publisher of each flow control that was slowed down; all, if closed."""
        for line in self._delayed.values():
            for turn in line:
                turn.notify()
                if not self.is_closed:
                    break

    def drop_or_enter(self, request: PublishRequest) -> None:
        """Put a request into a full queue that does not block, at the cost of events."""
        self.check_open()
        if self._settings.full_behavior is FullBehavior.DROP_OLDEST:
            while self.is_held and self._drop_unwritten():
                pass
            # Publishers that are still held do not lack room: dropping would not let them in.
            while not self.is_held and not self.has_room(request.events, request.size):
                excess = self.bytes + request.size - self.max_bytes
                by_bytes = -(-excess * self.events // max(1, self.bytes))  # by the average size
                surplus = max(1, self.events + request.events - self.max_events, by_bytes)
                if not self._evict(surplus):
                    break
        if not self.fits(request.events, request.size):
            room = 0 if self.is_held else max(0, self.max_events - self.events)
            dropped = request.keep_first(room)
            if not self.fits(request.events, request.size):
                dropped += request.keep_first(0)
            request.dropped_by_policy[Outcome.NEWEST] = dropped
        if request.events:
            request.enter()
        else:
            request.skip()


Rows = npt.NDArray[np.int64]
"""Which events of a block, in order."""


def sample_rows(events: int, before: int, interval: int) -> Rows:
    """Return every ``interval``-th of ``events`` events, counted on from ``before`` others."""
    return np.arange(-before % interval, events, interval)


def find_important_rows(block: Block, severity: int) -> Rows:
    """Return the events that are more important than ``severity``, or have no severity.

    Severities count downwards: 0 is an emergency, 7 is debug.
    """
    if "severity" not in block.schema.names:
        return np.arange(block.num_rows)
    less: pa.BooleanArray = pc.less(block.column("severity"), pa.scalar(severity, pa.int8()))
    return np.flatnonzero(less.fill_null(fill_value=True).to_numpy(zero_copy_only=False))


def check_severities(block: Block) -> None:
    """Raise ``ValueError`` if the severity of an event is not from 0 to 7."""
    at = block.schema.get_field_index("severity")
    if at < 0 or block.column(at).null_count == block.num_rows:
        return
    known = block.column(at)
    numbers = np.asarray(known.drop_null() if known.null_count else known)
    for worst in (int(numbers.min()), int(numbers.max())):
        if not 0 <= worst <= MAX_SEVERITY:
            raise ValueError(
                f"severity {worst} is not between 0 (emergency) and {MAX_SEVERITY} (debug)"
            )
