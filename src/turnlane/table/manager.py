"""The manager: fires the events of one queue table on one shard, while it holds the lead.

Any number of managers may run for a table; one leads, the others wait for its lease to end. A
manager is one thread with one connection: everything it knows about events is owned by that thread,
and others talk to it through an inbox.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from turnlane.clock import BOOT_CLOCK, Clock
from turnlane.errors import (
    DatabaseDown,
    DatabaseReadOnly,
    LeadLost,
    NoSuchQueue,
    QueueClosed,
    RetryLater,
)
from turnlane.runtime import Closing
from turnlane.table.event import EVENT_COLUMNS, TableEvent
from turnlane.table.in_flight import Completion
from turnlane.table.leader import LeaderTerm, Vacuum
from turnlane.table.leader_state import ManagerCounts, ReceiverSlot2
from turnlane.table.lease import LeaderLease
from turnlane.table.receiver import Receiver
from turnlane.table.store import TableStore

# ── inbox ──
# The inbox: what other threads want of a manager.

Message = Callable[[], None]


class ManagerInbox:
    """Messages in their order. Put from any thread, read by the manager's."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()

    def put(self, message: Message) -> None:
        """Have something done."""
        self._messages.append(message)

    def read(self) -> None:
        """Do all that is there now. What fails because of the database is done again."""
        for _ in range(len(self._messages)):
            message = self._messages.popleft()
            try:
                message()
            except RetryLater:
                self._messages.appendleft(message)
                raise

    def empty(self) -> None:
        """Do whatever is there, on any thread: the manager's is gone."""
        while self._messages:
            with contextlib.suppress(IndexError):  # another thread took the last one
                self._messages.popleft()()


# ── presence ──
# Presence: whether the queue that a manager is for is there at all.

log = logging.getLogger(__name__)

MISSING_QUEUE_PAUSE: Final = 5.0
"""Seconds between looks for a queue that was dropped."""


class QueuePresence:
    """Says once that a queue is gone, and once that it is back. Used by the manager's thread."""

    def __init__(self, store: TableStore) -> None:
        self._store = store
        self._told: str | None = None

    def why_gone(self) -> str | None:
        """That the queue was dropped, in words, if the database says so."""
        try:
            defined = self._store.defined()
        except RetryLater as error:
            log.debug("nobody can say whether the queue is there: %s", error)
            return None
        except self._store.dialect.error as error:  # not even the list of queues is there
            return f"no queue can be found: {error}"
        return None if defined is not None else str(self._store.missing())

    def miss(self, why: str) -> None:
        """It is not there."""
        if self._told != why:
            self._told = why
            log.warning("%s; nothing fires until it is there again", why)

    def is_same(self) -> bool:
        """It is there, or again; whether it is the one that was there before."""
        if self._told is None:
            return True
        definition = self._store.definition
        if self._store.defined() != str(definition):
            self.miss(f"the queue {definition.name!r} was made anew, otherwise: open it again")
            return False
        self._told = None
        log.info("the queue %r is there again", definition.name)
        return True


INBOX_POLL = 0.005
"""Seconds between looks at the inbox while events are out: a wake-up for each ack would cost more
than the ack."""

WAKE_ACKS = 256
"""Acks that are worth a wake-up in any case."""

MAX_WAIT = 1.0


class Manager(Closing):
    """One shard's manager of one queue table. Call :meth:`start`, or :meth:`run_once` by hand."""

    def __init__(
        self,
        store: TableStore,
        clock: Clock = BOOT_CLOCK,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.store = store
        self.positions: Mapping[str, int] = {
            name: at for at, name in enumerate(store.definition.names, start=len(EVENT_COLUMNS))
        }
        self.counts = ManagerCounts()
        self.lost_acks = 0
        """Acks that were taken and will not be stored: their events fire again elsewhere."""
        self._clock = clock
        self._chance = chance
        self._lead = LeaderLease(store, store.definition.settings.lease, clock)
        self._presence = QueuePresence(store)
        self._vacuum = Vacuum(store.dialect, store.definition, clock)
        self._reign: LeaderTerm | None = None
        self._places: dict[Receiver, ReceiverSlot2] = {}
        self._inbox = ManagerInbox()
        self._acks: deque[TableEvent] = deque()
        self._enough = 1
        self._wake = threading.Event()
        self._poked = False
        self._closed = self._ended = False
        self._watch: Closing | None = None
        self._thread: threading.Thread | None = None

    # ── from any thread ──────────────────────────────────────────────────────────────────────────

    @property
    def fires(self) -> bool:
        """Whether this manager leads, and the database takes its writes."""
        return self._lead.fires

    @property
    def waiting(self) -> int:
        """How many events wait in memory."""
        reign = self._reign
        return 0 if reign is None else reign.stock.waiting

    @property
    def in_flight(self) -> int:
        """How many events are fired and not settled."""
        reign = self._reign
        return 0 if reign is None else len(reign.stock.flights)

    @property
    def receivers(self) -> int:
        """How many receivers it sends events to."""
        return len(self._places)

    def start(self) -> None:
        """Run on a thread until :meth:`close`."""
        self._watch = self.store.dialect.watch(self.store.definition.name, self._poke)
        name = f"turnlane-manager-{self.store.definition.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def attach(self, receiver: Receiver) -> None:
        """Send events to the receiver."""
        receiver.attached(self)
        self._tell(lambda: self._attach(receiver))

    def detach(self, receiver: Receiver) -> None:
        """Send no more events to the receiver; those that it has fire elsewhere."""
        self._tell(lambda: self._detach(receiver))

    def ack(self, events: list[TableEvent]) -> None:
        """Take acks; they are stored together with others, soon."""
        self._acks.extend(events)
        if len(self._acks) >= self._enough:
            self._wake.set()

    def ack_ids(self, ids: Sequence[int]) -> None:
        """Take acks by id; those of events that were never fired change nothing."""
        self._tell(lambda: self._leading(lambda reign: reign.landing.ack_ids(ids)))

    def nack(self, events: list[TableEvent], delay: float | None, error: str | None) -> None:
        """Have events fired again."""
        self._tell(lambda: self._leading(lambda reign: reign.landing.nack(events, delay, error)))

    def flush(self, timeout: float | None = None, receiver: Receiver | None = None) -> bool:
        """Wait until all acks taken so far are stored or lost; false if the time is over.

        Only those of a receiver, if it is given: one that somebody holds up is no other's matter.
        :attr:`lost_acks` says which; ``LeadLost`` is raised if they are lost while it waits.
        """
        waiter = Completion()
        self._tell(lambda: self._await_acks(waiter, receiver))
        return waiter.wait(timeout)

    def enqueue(self, rows: Sequence[Mapping[str, Any]], timeout: float | None = None) -> bool:
        """Store events in a transaction of the manager's own; false if the time is over.

        Those that are due at once are written as fired and sent off, with no way through the table.
        After the time is over they may still be stored: name events that must not be there twice.
        """
        self.store.inserts.check(rows)
        waiter = Completion()
        self._tell(lambda: self._enqueue(rows, waiter))
        return waiter.wait(timeout)

    def sweep(self) -> None:
        """Look through the table soon, for rows that others changed."""
        self._tell(lambda: self._leading(lambda reign: reign.reader.sweep_soon()))

    def close(self) -> None:
        """Store what acks there are, give the lead back, stop."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        if self._watch is not None:
            self._watch.close()
        self._end()

    # ── on the manager's thread ──────────────────────────────────────────────────────────────────

    def run_once(self) -> float:
        """Do what is due; returns in how many seconds there is more to do."""
        try:
            self._step()
        except LeadLost as error:
            self._lose(error)
        except NoSuchQueue as error:
            self._presence.miss(str(error))
            return MISSING_QUEUE_PAUSE
        except (DatabaseDown, DatabaseReadOnly) as error:
            log.warning("queue %s: %s", self.store.definition.name, error)
            self._lead.hold_up()
            if self._reign is not None:
                self._reign.reader.sweep_soon()
            return INBOX_POLL * 20
        return self._pause()

    def _step(self) -> None:
        self._lead.keep()
        if self._reign is None and not self._take_lead():
            self._inbox.read()
            return
        reign = self._reign
        assert reign is not None
        if self._poked:
            self._poked = False
            reign.reader.poke()
        self._take_acks(reign)
        self._inbox.read()
        reign.step(list(self._places.values()))
        self._vacuum.run_once(self.counts.acked)

    def _take_lead(self) -> bool:
        if self._clock.monotonic() < self._lead.next_time() or not self._lead.take():
            return False
        if not self._presence.is_same():
            self._lead.give_up()
            return False
        log.info("leading queue %s", self.store.definition.name)
        reign = LeaderTerm(
            self.store, self._lead, self, self.counts, clock=self._clock, chance=self._chance
        )
        reign.begin()
        for place in self._places.values():
            place.load = 0
        self._reign = reign
        return True

    def _lose(self, error: LeadLost) -> None:
        log.warning("queue %s: %s", self.store.definition.name, error)
        self.counts.lost_leads += 1
        self._lead.lose()
        reign, self._reign = self._reign, None
        if reign is not None:
            self.lost_acks += len(reign.stock.settling)
            reign.landing.abandon(error)
        self._drop_acks()

    def _pause(self) -> float:
        reign = self._reign
        if reign is None:
            when = self._lead.next_time()
        else:
            when = reign.next_time(list(self._places.values()))
            out = len(reign.stock.flights)
            self._enough = max(1, min(WAKE_ACKS, out // 2))
            if out:
                when = min(when, self._clock.monotonic() + INBOX_POLL)
        return min(MAX_WAIT, max(0.0, when - self._clock.monotonic()))

    def _take_acks(self, reign: LeaderTerm) -> None:
        """All acks that came before anything that is in the inbox now, and perhaps more."""
        taken = []
        while self._acks:
            taken.append(self._acks.popleft())
        if taken:
            reign.landing.ack(taken)

    def _leading(self, action: Callable[[LeaderTerm], None]) -> None:
        if self._reign is not None:
            action(self._reign)

    def _attach(self, receiver: Receiver) -> None:
        if receiver not in self._places:
            self._places[receiver] = ReceiverSlot2(
                receiver.prefetch, key_range=receiver.key_range, receiver=receiver
            )
            self._leading(lambda reign: reign.reader.sweep_soon())

    def _detach(self, receiver: Receiver) -> None:
        place = self._places.pop(receiver, None)
        reign = self._reign
        if place is not None and reign is not None:
            self._take_acks(reign)
            reign.landing.detach(place)

    def _drop_acks(self) -> None:
        while self._acks:
            self._acks.popleft().lost = True
            self.lost_acks += 1

    def _await_acks(self, waiter: Completion, receiver: Receiver | None) -> None:
        if self._reign is None:
            self._drop_acks()
            waiter.tell()
        else:
            self._take_acks(self._reign)
            seat = None if receiver is None else self._places.get(receiver)
            self._reign.stock.settling.wait(waiter, seat)

    def _enqueue(self, rows: Sequence[Mapping[str, Any]], waiter: Completion) -> None:
        try:
            self._fire_or_insert(rows)
        except LeadLost:
            raise
        except Exception as error:  # noqa: BLE001 - it is told to whoever enqueued
            waiter.tell(error)
        else:
            waiter.tell()

    def _fire_or_insert(self, rows: Sequence[Mapping[str, Any]]) -> None:
        reign = self._reign
        if reign is None or not reign.firing.fire_new(rows, list(self._places.values())):
            self.store.inserts.insert(rows)
            self._poked = True

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._closed:
            try:
                pause = self.run_once()
            except Exception as error:  # noqa: BLE001 - it is told there
                pause = self._start_anew(error)
            self._wake.wait(pause)
            self._wake.clear()

    def _start_anew(self, error: Exception) -> float:
        """Not an error of ours: what is in memory may be wrong. Begin anew from the table."""
        gone = self._presence.why_gone()
        if gone is not None:
            self._presence.miss(gone)
        else:
            log.error("queue %s: starting anew", self.store.definition.name, exc_info=error)
        self._lose(LeadLost("the manager failed"))
        return MAX_WAIT if gone is None else MISSING_QUEUE_PAUSE

    def _end(self) -> None:
        try:
            if self._reign is not None:
                self._take_acks(self._reign)
                self._reign.landing.finish()
            self._lead.give_up()
        except (DatabaseDown, DatabaseReadOnly, LeadLost) as error:
            log.warning("queue %s: not closed in order: %s", self.store.definition.name, error)
        if self._reign is not None:
            self.lost_acks += len(self._reign.stock.settling)
            self._reign.landing.abandon(QueueClosed("the manager is closed"))
            self._reign = None
        self._ended = True
        self._inbox.empty()  # nobody waits for a manager that is closed
        for receiver in list(self._places):
            receiver.left(self)
        self._vacuum.close()
        self.store.close()

    def _tell(self, message: Message) -> None:
        self._inbox.put(message)
        self._wake.set()
        if self._ended:
            self._inbox.empty()

    def _poke(self) -> None:
        self._poked = True
        self._wake.set()
