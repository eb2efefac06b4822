"""The manager: fires the events of one queue table on one shard while it holds the lease.

A manager is one thread with one connection. That thread owns all knowledge about events, which
lives in a :class:`~turnlane.table.leader.LeaderTerm` (the design text on lease, term, fence, window
and collector is there). Other threads talk to it in three ways: requests go through an inbox, acks
through a deque of their own because there are many, and a few attributes may be read.

The manager survives every failure of the database. It stops firing, and keeps acks in memory, until
it has renewed the lease. After an unexpected error it throws the term away and begins a new one
from the table.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
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
from turnlane.logs import get_logger
from turnlane.runtime import Closeable, start_thread
from turnlane.table.leader import LeaderTerm, Vacuum
from turnlane.table.leader_state import LeaderState, ManagerCounts, ReceiverSlot
from turnlane.table.lease import LeaderLease
from turnlane.table.queue_sql import CHANNEL
from turnlane.table.receiver import EVENT_COLUMNS, Receiver, TableEvent
from turnlane.table.store import TableStore

log = get_logger(__name__)

MISSING_QUEUE_PAUSE: Final = 5.0
"""Seconds between checks for a queue that was dropped."""

INBOX_POLL = 0.005
"""Seconds between reads of the inbox while events are in flight: a wake-up for each ack would cost
more than the ack."""

WAKE_ACKS = 256
"""This many acks always wake the manager."""

MAX_WAIT = 1.0

Request = Callable[[], None]


class Manager(Closeable):
    """One shard's manager of one queue table. Call :meth:`start`, or :meth:`run_once` by hand."""

    def __init__(
        self,
        store: TableStore,
        clock: Clock = BOOT_CLOCK,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.store = store
        self.positions: Mapping[str, int] = {
            name: at
            for at, name in enumerate(store.definition.column_names, start=len(EVENT_COLUMNS))
        }
        self.counts = ManagerCounts()
        self.lost_acks = 0
        """Acks that were taken and cannot be stored: their events fire again elsewhere."""
        self._name = store.definition.name
        self._clock = clock
        self._chance = chance
        self._lease = LeaderLease(store, store.definition.settings.lease, clock)
        self._missing_reason: str | None = None
        """Why the queue does not exist, once that was logged."""
        self._vacuum = Vacuum(store.dialect, store.definition, clock)
        self._term: LeaderTerm | None = None
        self._slots: dict[Receiver, ReceiverSlot] = {}
        self._requests: deque[Request] = deque()
        """The inbox: any thread adds, the manager's thread runs them in order."""
        self._acks: deque[TableEvent] = deque()
        self._wake_acks = 1
        """How many waiting acks wake the thread."""
        self._wake = threading.Event()
        self._has_new_rows = False
        self._is_closed = self._has_ended = False
        self._watch: Closeable | None = None
        self._thread: threading.Thread | None = None

    # ── for any thread ───────────────────────────────────────────────────────────────────────────

    @property
    def can_fire(self) -> bool:
        """Whether this manager leads, and the database takes its writes."""
        return self._lease.can_fire

    @property
    def waiting(self) -> int:
        """How many events wait in memory."""
        term = self._term
        return 0 if term is None else term.state.waiting

    @property
    def in_flight(self) -> int:
        """How many events are fired and not settled."""
        term = self._term
        return 0 if term is None else len(term.state.in_flight)

    @property
    def receivers(self) -> int:
        """How many receivers it sends events to."""
        return len(self._slots)

    def start(self) -> None:
        """Run on a thread until :meth:`close`."""
        self._watch = self.store.dialect.watch(
            CHANNEL, self.store.definition.name, self._notice_new_rows
        )
        self._thread = start_thread(f"turnlane-manager-{self._name}", self._run)

    def attach(self, receiver: Receiver) -> None:
        """Send events to the receiver."""
        receiver.add_manager(self)
        self._request(lambda: self._attach(receiver))

    def detach(self, receiver: Receiver) -> None:
        """Send no more events to the receiver; its events fire elsewhere."""
        self._request(lambda: self._detach(receiver))

    def ack(self, events: list[TableEvent]) -> None:
        """Take acks; they are stored soon, together with others."""
        self._acks.extend(events)
        if len(self._acks) >= self._wake_acks:
            self._wake.set()

    def ack_ids(self, ids: Sequence[int]) -> None:
        """Take acks by id; acks of events that were never fired change nothing."""
        self._request_of_leader(lambda term: term.settlement.ack_ids(ids))

    def nack(self, events: list[TableEvent], delay: float | None, error: str | None) -> None:
        """Fire events again."""
        self._request_of_leader(lambda term: term.settlement.nack(events, delay, error))

    def flush(self, timeout: float | None = None, receiver: Receiver | None = None) -> bool:
        """Wait until all present acks are stored or lost; false if the time is over.

        With ``receiver``, only its acks: a locked row of another receiver does not matter.
        :attr:`lost_acks` counts lost acks; raises ``LeadLost`` if some are lost during the wait.
        """
        waiter: Future[None] = Future()
        self._request(lambda: self._await_acks(waiter, receiver))
        return _wait_for(waiter, timeout)

    def enqueue(self, rows: Sequence[Mapping[str, Any]], timeout: float | None = None) -> bool:
        """Store events in a transaction of the manager; false if the time is over.

        Events that are due at once are written as fired and sent, without reading them from the
        table. After the time is over they may still be stored: give a name to events that must not
        be stored twice.
        """
        self.store.inserter.check_rows(rows)
        waiter: Future[None] = Future()
        self._request(lambda: self._enqueue(rows, waiter))
        return _wait_for(waiter, timeout)

    def sweep(self) -> None:
        """Read through the table soon: rows were changed by others."""
        self._request_of_leader(lambda term: term.finder.sweep_soon())

    def close(self) -> None:
        """Store the acks, release the lease, stop."""
        self._is_closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        if self._watch is not None:
            self._watch.close()
        self._end()

    # ── one step ─────────────────────────────────────────────────────────────────────────────────

    def run_once(self) -> float:
        """Do the work that is due; returns the seconds until there is more."""
        try:
            self._step()
        except LeadLost as error:
            self._lose_lead(error)
        except NoSuchQueue as error:
            self._report_missing(str(error))
            return MISSING_QUEUE_PAUSE
        except (DatabaseDown, DatabaseReadOnly) as error:
            log.warning("table.database_failed", queue=self._name, error=error)
            self._lease.suspend()
            if self._term is not None:
                self._term.finder.sweep_soon()
            return INBOX_POLL * 20
        return self._get_pause()

    def _step(self) -> None:
        self._lease.renew_if_due()
        if self._term is None and not self._take_lead():
            self._run_requests()
            return
        term = self._term
        assert term is not None
        if self._has_new_rows:
            self._has_new_rows = False
            term.finder.poll_soon()
        self._take_acks(term)
        self._run_requests()
        term.step(list(self._slots.values()))
        self._vacuum.run_once(self.counts.acked)

    def _take_lead(self) -> bool:
        if self._clock.monotonic() < self._lease.get_next_time() or not self._lease.acquire():
            return False
        if not self._is_same_queue():
            self._lease.release()
            return False
        log.info("table.lead_taken", queue=self._name, term=self._lease.token)
        state = LeaderState(self.store, self._lease, self, self.counts, self._clock)
        term = LeaderTerm(state, self._chance)
        term.begin()
        for slot in self._slots.values():
            slot.load = 0
        self._term = term
        return True

    def _lose_lead(self, error: LeadLost) -> None:
        log.warning("table.lead_lost", queue=self._name, error=error)
        self.counts.lost_leads += 1
        self._lease.forget()
        term, self._term = self._term, None
        if term is not None:
            self.lost_acks += len(term.state.ack_buffer)
            term.settlement.abandon(error)
        self._drop_acks()

    def _get_pause(self) -> float:
        term = self._term
        if term is None:
            time = self._lease.get_next_time()
        else:
            time = term.get_next_time(list(self._slots.values()))
            in_flight = len(term.state.in_flight)
            self._wake_acks = max(1, min(WAKE_ACKS, in_flight // 2))
            if in_flight:
                time = min(time, self._clock.monotonic() + INBOX_POLL)
        return min(MAX_WAIT, max(0.0, time - self._clock.monotonic()))

    def _take_acks(self, term: LeaderTerm) -> None:
        """Take all acks that came before the requests in the inbox, and perhaps more."""
        taken = []
        while self._acks:
            taken.append(self._acks.popleft())
        if taken:
            term.settlement.ack(taken)

    # ── whether the queue exists ─────────────────────────────────────────────────────────────────

    def _find_absence(self) -> str | None:
        """Return an error text if the database says that the queue does not exist."""
        try:
            definition = self.store.read_definition()
        except RetryLater as error:
            log.debug("table.presence_unknown", queue=self._name, error=error)
            return None
        except self.store.dialect.error as error:  # the list of queues does not exist either
            return f"no queue can be found: {error}"
        return None if definition is not None else str(self.store.make_missing_error())

    def _report_missing(self, reason: str) -> None:
        if self._missing_reason != reason:
            self._missing_reason = reason
            hint = "nothing fires until it exists again"
            log.warning("table.queue_missing", queue=self._name, error=reason, hint=hint)

    def _is_same_queue(self) -> bool:
        """Whether a queue that was missing has the definition that this manager knows."""
        if self._missing_reason is None:
            return True
        if self.store.read_definition() != str(self.store.definition):
            self._report_missing(
                f"the queue {self._name!r} was created again with another definition: open it again"
            )
            return False
        self._missing_reason = None
        log.info("table.queue_found_again", queue=self._name)
        return True

    # ── requests, on the manager's thread ────────────────────────────────────────────────────────

    def _run_requests(self) -> None:
        """Run the requests that are here now. If the database fails, the request runs again."""
        for _ in range(len(self._requests)):
            request = self._requests.popleft()
            try:
                request()
            except RetryLater:
                self._requests.appendleft(request)
                raise

    def _drain_requests(self) -> None:
        """Run all requests on the calling thread: the manager's thread is gone."""
        while True:
            try:
                request = self._requests.popleft()
            except IndexError:  # another thread may have taken the last one
                return
            request()

    def _attach(self, receiver: Receiver) -> None:
        if receiver not in self._slots:
            self._slots[receiver] = ReceiverSlot(
                receiver.prefetch, key_range=receiver.key_range, receiver=receiver
            )
            if self._term is not None:
                self._term.finder.sweep_soon()

    def _detach(self, receiver: Receiver) -> None:
        slot = self._slots.pop(receiver, None)
        if slot is not None and self._term is not None:
            self._take_acks(self._term)
            self._term.settlement.release_slot(slot)

    def _drop_acks(self) -> None:
        while self._acks:
            self._acks.popleft().ack_lost = True
            self.lost_acks += 1

    def _await_acks(self, waiter: Future[None], receiver: Receiver | None) -> None:
        if self._term is None:
            self._drop_acks()
            waiter.set_result(None)
        else:
            self._take_acks(self._term)
            slot = None if receiver is None else self._slots.get(receiver)
            self._term.state.ack_buffer.add_waiter(waiter, slot)

    def _enqueue(self, rows: Sequence[Mapping[str, Any]], waiter: Future[None]) -> None:
        term, slots = self._term, list(self._slots.values())
        try:
            if term is None or not term.dispatcher.send_new(rows, slots):
                self.store.inserter.insert_rows(rows)
                self._has_new_rows = True
        except LeadLost:
            raise
        except Exception as error:  # noqa: BLE001 - the waiting thread raises it
            waiter.set_exception(error)
        else:
            waiter.set_result(None)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._is_closed:
            try:
                pause = self.run_once()
            except Exception as error:  # noqa: BLE001 - logged there
                pause = self._restart(error)
            self._wake.wait(pause)
            self._wake.clear()

    def _restart(self, error: Exception) -> float:
        """End the term after an unexpected error: the state in memory may be wrong."""
        absence = self._find_absence()
        if absence is not None:
            self._report_missing(absence)
        else:
            log.error("table.manager_restarted", queue=self._name, exc_info=error)
        self._lose_lead(LeadLost("the manager failed"))
        return MAX_WAIT if absence is None else MISSING_QUEUE_PAUSE

    def _end(self) -> None:
        try:
            if self._term is not None:
                self._take_acks(self._term)
                self._term.settlement.finish()
            self._lease.release()
        except (DatabaseDown, DatabaseReadOnly, LeadLost) as error:
            log.warning("table.close_incomplete", queue=self._name, error=error)
        if self._term is not None:
            self.lost_acks += len(self._term.state.ack_buffer)
            self._term.settlement.abandon(QueueClosed("the manager is closed"))
            self._term = None
        self._has_ended = True
        self._drain_requests()  # no thread may wait for a manager that is closed
        for receiver in list(self._slots):
            receiver.remove_manager(self)
        self._vacuum.close()
        self.store.close()

    def _request_of_leader(self, action: Callable[[LeaderTerm], None]) -> None:
        """Request an action that has no effect unless this manager leads."""

        def act() -> None:
            if self._term is not None:
                action(self._term)

        self._request(act)

    def _request(self, request: Request) -> None:
        self._requests.append(request)
        self._wake.set()
        if self._has_ended:
            self._drain_requests()

    def _notice_new_rows(self) -> None:
        self._has_new_rows = True
        self._wake.set()


def _wait_for(waiter: Future[None], timeout: float | None) -> bool:
    """Wait for the manager's thread; false if the time is over. Raises the reported error."""
    if not wait([waiter], timeout).done:
        return False
    waiter.result()
    return True
