"""A leader's term: everything that a manager does and knows while it holds the lease.

Any number of managers may run for one table of one shard. They compete for the *lease*, a row in
the database (:mod:`turnlane.table.lease`). The holder leads; the others wait until the lease is
released or its time is over.

**Term.** A term begins when a manager acquires the lease and ends when it releases or loses it.
Every term has a token, and all its knowledge about events is in one :class:`LeaderTerm`, which is
thrown away at the end of the term. The next leader starts from the table alone, so no knowledge has
to be handed over.

**Fence.** A leader that was paused may not notice that its lease is over. Every write therefore
checks the token in the same transaction (:mod:`turnlane.table.store`): after a takeover, writes of
the old leader fail with ``LeadLost`` and change nothing. Its receivers may still have events, which
fire again elsewhere; their acks to the old leader are lost, and ``flush()`` says so.

**Window.** The leader keeps the events in memory that are due within the next seconds
(:mod:`turnlane.table.window`). The fetcher fills the window from the table, the dispatcher sends
due events to receivers, the settlement stores acks and retries the rest::

    table ── fetcher ──> window ── dispatcher ──> in flight ── settlement ──> table
             RowFinder             ReceiverSlot                ack buffer

**Marks.** Usually an event costs no write until its ack, which deletes the row. If the leader dies
in between, the row still has the state ``to_be_fired`` and the next leader sends it again. Rows of
events that stay in flight for a second are marked as ``fired``, with the attempt counted.

**Collector.** Fired rows that no leader knows (the leader that fired them is gone) are found by the
collector, on a slower schedule. A new leader waits for one ``ack_timeout`` before it collects them,
unless the last leader released the lease: receivers may still ack them.

All of it runs on the manager's thread, one short step at a time; no lock is needed. Only the vacuum
has a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from turnlane.clock import Clock
from turnlane.databases import Dialect, Row, Session
from turnlane.errors import DatabaseDown, DatabaseReadOnly, NameTaken
from turnlane.logs import get_logger
from turnlane.runtime import Closeable, start_thread
from turnlane.table.definition import Definition
from turnlane.table.dispatcher import EventDispatcher
from turnlane.table.fetcher import FIRST_POSITION, Fetcher, RowFinder
from turnlane.table.leader_state import LeaderState, ReceiverSlot
from turnlane.table.queue_sql import get_queue_sql
from turnlane.table.receiver import TableEvent
from turnlane.table.settlement import Settlement
from turnlane.table.store import BATCH_SIZE, TableStore

log = get_logger(__name__)

COLLECT_SECONDS: Final = 10.0
"""Between two rounds of the collector; less for queues with short timeouts."""

COLLECT_BEHIND_SECONDS: Final = 0.1
"""Between rounds while there is more to do than one round does."""

FULL_COLLECT_SECONDS: Final = 3600.0
COLLECT_LOOKBACK: Final = 86_400 * 1_000_000_000
"""Fired events are searched one day back, and once an hour without a limit."""

SCHEDULE_SECONDS: Final = 5.0
"""Between two reads of the schedules."""

SCHEDULE_PAUSE: Final = 60.0
"""Seconds before a schedule that failed is tried again."""

SCHEDULES_PER_STEP: Final = 100
"""Schedules that one step fires: each needs a transaction."""

VACUUM_AFTER_EVENTS: Final = 200_000
"""Events to settle between two vacuums; below that, the vacuum of the database is enough."""

VACUUM_REST_FACTOR: Final = 9
"""A vacuum is followed by a pause of this many times its duration: it reads the whole table, and
finds nothing to free while a transaction is open."""


class LeaderTerm:
    """One term of one manager: its parts, and one step of their work."""

    def __init__(self, state: LeaderState, chance: Callable[[], float]) -> None:
        self.state = state
        self._fetcher = Fetcher(state)
        self.dispatcher = EventDispatcher(state)
        self.settlement = Settlement(state, chance, self.finder)
        self.collector = Collector(state, self.settlement.retry_forgotten)
        self.schedule_runner = ScheduleRunner(state.store)

    @property
    def finder(self) -> RowFinder:
        """The read positions in the table."""
        return self._fetcher.finder

    def begin(self) -> None:
        """Read the state of the table, once."""
        state = self.state
        now = state.clock.monotonic()
        last_id = self.finder.start()
        if not state.lease.was_released:
            self.dispatcher.doubtful_until = last_id
        if state.key_order is not None:
            for row in state.store.read_retried(state.token):
                state.key_order.mark_busy(TableEvent(row, state.manager, now))

    def step(self, slots: Sequence[ReceiverSlot]) -> None:
        """Do the work that is due now. If it raises an error of the store, it may be repeated."""
        state = self.state
        now = state.clock.monotonic()
        self.settlement.store_due_acks(now)
        self.settlement.check_in_flight(now)
        if state.in_flight:
            state.lease.renew_if_due(needs_write_proof=True)
        if self.schedule_runner.run_once(state.token, now, state.now()):
            self.finder.poll_soon()
        if slots:
            self._fetcher.read(now, slots)
            self.dispatcher.send_due(slots)
        if self.collector.run_once(now):
            self.finder.sweep_soon()
        self._fetcher.update_listening()

    def get_next_time(self, slots: Sequence[ReceiverSlot]) -> float:
        """Return when the next step is due, in monotonic seconds."""
        times = [
            self.collector.next_time,
            self.schedule_runner.next_time,
            self.state.lease.get_next_time(),
            self.settlement.get_next_time(),
        ]
        if slots:
            now = self.state.clock.monotonic()
            times += [self._fetcher.get_next_time(), self.dispatcher.get_next_time(slots, now)]
        return min(times)


class Collector:
    """Looks after old events on a slow schedule. Times are passed in, monotonic.

    It retries fired events that no manager knows, deletes acked events after their retention, and
    releases events that users settled others for by plain SQL: events that wait for a group, and
    events that wait behind one of their key.
    """

    def __init__(self, state: LeaderState, retry: Callable[[list[Row]], None]) -> None:
        self._state = state
        self._retry = retry
        timeout, now = state.settings.ack_timeout, state.clock.monotonic()
        self._interval = min(COLLECT_SECONDS, timeout / 2)
        self.next_time = now + self._interval
        # Unless the last leader released the lease, its receivers may still ack.
        self._not_before = now if state.lease.was_released else now + timeout
        self._next_full = float("-inf")

    def run_once(self, now: float) -> bool:
        """Do one round, if it is due; whether events were released that the window lacks."""
        if now < self.next_time:
            return False
        state = self._state
        has_more = self._retry_forgotten(now)
        old = state.now() - round(state.settings.retention * 1e9)
        has_more |= state.store.delete_old_acked(state.token, old) == BATCH_SIZE
        released = state.store.release_groups(state.token)
        if state.key_order is not None:
            # A key may wait for a retry, far off, which a user acked or cancelled in the table.
            busy = [each for each in state.key_order.busy_ids if not state.is_cached(each)]
            settled = set(busy) - state.store.find_open(busy)
            state.window.add(state.key_order.release_ids(settled), state.now())
        self.next_time = now + (COLLECT_BEHIND_SECONDS if has_more else self._interval)
        return released > 0

    def _retry_forgotten(self, now: float) -> bool:
        """Retry fired events that no manager knows; whether there are more."""
        if now < self._not_before:
            return False
        state = self._state
        since = state.now() - COLLECT_LOOKBACK
        if now >= self._next_full:
            since = FIRST_POSITION[0]
            self._next_full = now + FULL_COLLECT_SECONDS
        until = state.now() - round(state.settings.ack_timeout * 1e9)
        rows = state.store.read_old_fired(since, until, BATCH_SIZE + len(state.in_flight))
        forgotten = [row for row in rows if not state.is_cached(row[0])]
        if forgotten:
            self._retry(forgotten)
        return len(forgotten) >= BATCH_SIZE


class ScheduleRunner:
    """Inserts the events of schedules when they are due. Times are passed in, monotonic.

    It reads the schedules every few seconds, so that it knows schedules that another process
    created or dropped, and also when the next one is due. If occurrences were missed while no
    manager led, one of them is inserted.
    """

    def __init__(self, store: TableStore) -> None:
        self._store = store
        self.next_time = float("-inf")
        self._paused: dict[str, float] = {}
        """Schedules that failed, with the times to try them again."""

    def run_once(self, token: int, now: float, database_now: int) -> bool:
        """Fire the schedules that are due; whether the table may have new events."""
        if now < self.next_time:
            return False
        self._paused = {name: until for name, until in self._paused.items() if until > now}
        queue = self._store.definition.name
        try:
            listed = self._store.schedules.list_due_within(SCHEDULE_SECONDS)
        except self._store.dialect.error as error:
            log.error("table.schedules_unreadable", queue=queue, error=error)  # noqa: TRY400
            self.next_time = now + SCHEDULE_PAUSE
            return False
        soon = [each for each in listed if each[0] not in self._paused]
        due = [name for name, next_at in soon if next_at <= database_now]
        for name in due[:SCHEDULES_PER_STEP]:
            try:
                self._store.fire_schedule(token, name)
            except (ValueError, NameTaken, self._store.dialect.error) as error:
                # A schedule that a user broke must not stop the others.
                log.error(  # noqa: TRY400 - the traceback says nothing more
                    "table.schedule_failed", queue=queue, schedule=name, error=error
                )
                self._paused[name] = now + SCHEDULE_PAUSE
        waits = [(next_at - database_now) / 1e9 for _, next_at in soon[len(due) :]]
        pause = 0.0 if len(due) > SCHEDULES_PER_STEP else SCHEDULE_SECONDS
        self.next_time = now + min([pause, *waits])
        return bool(due)


class Vacuum(Closeable):
    """Frees the space of deleted rows for new ones, where the database does not. Own thread.

    PostgreSQL keeps deleted rows until a vacuum. Its autovacuum checks a table once a minute and
    takes its time: by then a busy queue has grown to a gigabyte, and every new row gets a page that
    is not in memory. A vacuum after every few hundred thousand events finds little to do, all of it
    in memory, and the table stays as small as its waiting events. The manager calls it.
    """

    def __init__(self, dialect: Dialect, definition: Definition, clock: Clock) -> None:
        self.statements: Sequence[str] = get_queue_sql(dialect).vacuum(definition)
        self._session = Session(dialect)
        self._clock = clock
        self._name = definition.name
        self._settled = 0
        self._not_before = float("-inf")
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def run_once(self, settled: int) -> bool:
        """Start a vacuum if enough of all ``settled`` events are new; whether it did. No wait."""
        if (
            not self.statements
            or settled - self._settled < VACUUM_AFTER_EVENTS
            or (self._thread is not None and self._thread.is_alive())
            or self._clock.monotonic() < self._not_before
        ):
            return False
        self._settled = settled
        self._thread = start_thread(f"turnlane-vacuum-{self._name}", self._run)
        return True

    def close(self) -> None:
        """Cancel a running vacuum."""
        while self._thread is not None and self._thread.is_alive():
            self._is_closing = True
            self._session.cancel()  # repeatedly: the statement may not have begun
            self._thread.join(0.1)
        self._session.close()

    def _run(self) -> None:
        started = self._clock.monotonic()
        try:
            for statement in self.statements:
                self._session.change(statement)
        except (DatabaseDown, DatabaseReadOnly, self._session.dialect.error) as error:
            if not (self._is_closing and isinstance(error, DatabaseDown)):
                log.warning(
                    "table.vacuum_failed",
                    queue=self._name,
                    error=error,
                    hint="the vacuum of the database frees the space later",
                )
        ended = self._clock.monotonic()
        self._not_before = ended + VACUUM_REST_FACTOR * (ended - started)
