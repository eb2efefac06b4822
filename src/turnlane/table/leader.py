"""The collector: looks after old events, apart from the window and on a slower schedule.

Fired events that no manager remembers (the one that fired them is gone) are given their retry;
acked ones are deleted when their retention is over, a few at a time; events that wait for a group
whose last member was acked by plain SQL are let go; so are those that wait in order behind one that
somebody settled in the table.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from turnlane.clock import Clock
from turnlane.errors import DatabaseDown, DatabaseReadOnly, NameTaken
from turnlane.runtime import Closing
from turnlane.table.definition import Definition, TableSettings
from turnlane.table.dispatcher import EventDispatcher
from turnlane.table.event import TableEvent
from turnlane.table.fenced_writes import BATCH_SIZE
from turnlane.table.fetcher import FIRST_POSITION, Fetcher, RowFinder
from turnlane.table.leader_state import LeaderState, ManagerCounts, ManagerHandle2, ReceiverSlot2
from turnlane.table.lease import LeaderLease
from turnlane.table.settlement import Settlement
from turnlane.table.sql.dialect import Dialect, Row
from turnlane.table.sql.session import Session
from turnlane.table.store import TableStore
from turnlane.table.window import EventCache

COLLECT_SECONDS: Final = 10.0
"""Between two rounds; at most, for queues with short timeouts."""

COLLECT_BEHIND_SECONDS: Final = 0.1
"""Seconds between rounds while there is more to do than a round does."""

FULL_COLLECT_SECONDS: Final = 3600.0
COLLECT_LOOKBACK: Final = 86_400 * 1_000_000_000
"""Fired events are looked for a day back, and now and then without a limit."""


class Collector:
    """One shard's collector, called by the manager. Times are passed in, monotonic."""

    def __init__(
        self,
        store: TableStore,
        settings: TableSettings,
        stock: EventCache,
        retry: Callable[[list[Row]], None],
    ) -> None:
        self._store = store
        self._timeout = settings.ack_timeout
        self._retention = round(settings.retention * 1e9)
        self._every = min(COLLECT_SECONDS, settings.ack_timeout / 2)
        self._stock = stock
        self._retry = retry
        self._next = float("-inf")
        self._patient_until = float("-inf")
        self._next_full = float("-inf")
        self.collected = 0
        self.purged = 0

    def start(self, now: float, *, cautious: bool) -> None:
        """The lead was taken: what the last leader fired may still be acked in time."""
        self._patient_until = now + self._timeout if cautious else now
        self._next = now + self._every
        self._next_full = float("-inf")

    def next_time(self) -> float:
        """When the next round is due."""
        return self._next

    def run_once(self, token: int, now: float, database_now: int) -> bool:
        """One round, if it is due; whether events were let go that the window lacks."""
        if now < self._next:
            return False
        more = self._collect(now, database_now)
        purged = self._store.purge(token, database_now - self._retention)
        self.purged += purged
        released = self._store.release_groups(token)
        self._free_keys(database_now)
        more = more or purged == BATCH_SIZE
        self._next = now + (COLLECT_BEHIND_SECONDS if more else self._every)
        return released > 0

    def _free_keys(self, database_now: int) -> None:
        """Let no key wait for a retry that somebody acked or cancelled in the table."""
        away = self._stock.away()
        if away:
            self._stock.gone(set(away) - self._store.standing(away), database_now)

    def _collect(self, now: float, database_now: int) -> bool:
        if now < self._patient_until:
            return False
        since = database_now - COLLECT_LOOKBACK
        if now >= self._next_full:
            since = FIRST_POSITION[0]
            self._next_full = now + FULL_COLLECT_SECONDS
        until = database_now - round(self._timeout * 1e9)
        rows = self._store.old_fired(since, until, BATCH_SIZE + len(self._stock.flights))
        forgotten = [row for row in rows if not self._stock.knows(row[0])]
        if forgotten:
            self._retry(forgotten)
            self.collected += len(forgotten)
        return len(forgotten) >= BATCH_SIZE


# ── timetable ──
# The timetable: has recurring events put into the queue when their time comes.
#
# It looks at the schedules every few seconds, so that one that is made or dropped elsewhere is
# known,
# and otherwise when the next of them is due. What was missed while nobody led comes once.

log = logging.getLogger(__name__)

SCHEDULE_SECONDS: Final = 5.0
"""Between two looks."""

SCHEDULE_PAUSE: Final = 60.0
"""Seconds before a schedule is tried again that could not be carried out."""

SCHEDULES_PER_STEP: Final = 100
"""Schedules that are carried out in one step: each is a transaction."""


class ScheduleRunner:
    """One shard's timetable, called by the manager. Times are passed in, monotonic."""

    def __init__(self, store: TableStore) -> None:
        self._store = store
        self._next = float("-inf")
        self._failed: dict[str, float] = {}
        """When to try again."""

    def next_time(self) -> float:
        """When there is something to do."""
        return self._next

    def run_once(self, token: int, now: float, database_now: int) -> bool:
        """Carry out what is due; whether the table may have new events."""
        if now < self._next:
            return False
        self._failed = {name: until for name, until in self._failed.items() if until > now}
        try:
            listed = self._store.schedules.soon(SCHEDULE_SECONDS)
        except self._store.dialect.error as error:
            self._complain(error)
            self._next = now + SCHEDULE_PAUSE
            return False
        soon = [each for each in listed if each[0] not in self._failed]
        due = [name for name, next_at in soon if next_at <= database_now]
        for name in due[:SCHEDULES_PER_STEP]:
            self._fire(token, name, now)
        waits = [(next_at - database_now) / 1e9 for _, next_at in soon[len(due) :]]
        self._next = now + min([0.0 if len(due) > SCHEDULES_PER_STEP else SCHEDULE_SECONDS, *waits])
        return bool(due)

    def _fire(self, token: int, name: str, now: float) -> None:
        """One that somebody has spoilt holds up no other."""
        try:
            self._store.fire_schedule(token, name)
        except (ValueError, NameTaken, self._store.dialect.error) as error:
            self._complain(error, f" {name}")
            self._failed[name] = now + SCHEDULE_PAUSE

    def _complain(self, error: Exception, which: str = "s") -> None:
        log.error("queue %s: schedule%s: %s", self._store.definition.name, which, error)


# ── reign ──
# A reign: what a manager does and knows while it leads. Ends with the lead, and is forgotten.
#
# All of it runs on the manager's thread, a short step at a time.


class LeaderTerm:
    """One period of leading a shard's table."""

    def __init__(
        self,
        store: TableStore,
        lead: LeaderLease,
        court: ManagerHandle2,
        counts: ManagerCounts,
        *,
        clock: Clock,
        chance: Callable[[], float],
    ) -> None:
        assert lead.token is not None
        self.stock = EventCache(store.definition)
        self._realm = LeaderState(store, lead, lead.token, court, counts, clock, self.stock)
        self._intake = Fetcher(self._realm)
        self.firing = EventDispatcher(self._realm)
        self.landing = Settlement(self._realm, chance, self.reader)
        self.collector = Collector(
            store, store.definition.settings, self.stock, self.landing.collected
        )
        self.timetable = ScheduleRunner(store)

    @property
    def reader(self) -> RowFinder:
        """Where it is in the table."""
        return self._intake.reader

    def begin(self) -> None:
        """Read what there is to know."""
        realm = self._realm
        now = realm.clock.monotonic()
        last_id = self.reader.start()
        if not realm.lead.clean:
            self.firing.doubt(last_id)
        self.collector.start(now, cautious=not realm.lead.clean)
        if self.stock.order is not None:
            for row in realm.store.read_retried(realm.token):
                self.stock.order.retried(TableEvent(row, realm.court, now))

    def step(self, places: Sequence[ReceiverSlot2]) -> None:
        """Do what is due now. Raises as the store does; then it may be called again."""
        realm = self._realm
        now = realm.clock.monotonic()
        self.landing.store_acks(now)
        self.landing.look_after(now)
        if self.stock.flights:
            realm.lead.keep(proven=True)
        if self.timetable.run_once(realm.token, now, realm.now()):
            self.reader.poke()
        if places:
            self._intake.read(now, places)
            self.firing.fire(places)
        if self.collector.run_once(realm.token, now, realm.now()):
            self.reader.sweep_soon()
        self._intake.listen()

    def next_time(self, places: Sequence[ReceiverSlot2]) -> float:
        """When the next step is due; monotonic."""
        times = [
            self.collector.next_time(),
            self.timetable.next_time(),
            self._realm.lead.next_time(),
            self.landing.next_time(),
        ]
        if places:
            now = self._realm.clock.monotonic()
            times += [self._intake.next_time(), self.firing.next_time(places, now)]
        return min(times)


# ── vacuum ──
# The vacuum: gives the room of rows that are gone to new ones, where the database does not.
#
# PostgreSQL keeps deleted rows until a vacuum. Its own looks at a table once a minute and takes
# its
# time: by then a queue that is busy has grown to a gigabyte, of which every new row gets a page
# that
# nobody has in memory. Done after every few hundred thousand events, it finds little, all of it
# in
# memory, and the table stays as small as what waits in it.


VACUUM_AFTER_EVENTS: Final = 200_000
"""Events that were settled since the last one; for fewer, the database's own is good enough."""

VACUUM_REST_FACTOR: Final = 9
"""So many times as long as one took nothing is done: it goes through the whole table, and finds
nothing to give back while somebody has a transaction open."""


class Vacuum(Closing):
    """One table's vacuum, on a thread and a connection of its own. Called by the manager."""

    def __init__(self, dialect: Dialect, definition: Definition, clock: Clock) -> None:
        self._statements: Sequence[str] = dialect.vacuum(definition)
        self._session = Session(dialect)
        self._clock = clock
        self._name = definition.name
        self._settled = 0
        self._not_before = float("-inf")
        self._closing = False
        self._thread: threading.Thread | None = None

    def run_once(self, settled: int) -> bool:
        """Begin if enough events were settled, of so many in all; whether it did. Does not wait."""
        if (
            not self._statements
            or settled - self._settled < VACUUM_AFTER_EVENTS
            or (self._thread is not None and self._thread.is_alive())
            or self._clock.monotonic() < self._not_before
        ):
            return False
        self._settled = settled
        self._thread = threading.Thread(
            target=self._run, name=f"turnlane-vacuum-{self._name}", daemon=True
        )
        self._thread.start()
        return True

    def close(self) -> None:
        """Have one that is under way end at once."""
        while self._thread is not None and self._thread.is_alive():
            self._closing = True
            self._session.cancel()  # again: it may not have begun
            self._thread.join(0.1)
        self._session.close()

    def _run(self) -> None:
        started = self._clock.monotonic()
        try:
            for statement in self._statements:
                self._session.change(statement)
        except (DatabaseDown, DatabaseReadOnly, self._session.dialect.error) as error:
            if not (self._closing and isinstance(error, DatabaseDown)):
                # The database's own comes in any case.
                log.warning("queue %s: no vacuum: %s", self._name, error)
        ended = self._clock.monotonic()
        self._not_before = ended + VACUUM_REST_FACTOR * (ended - started)
