"""Queues with several shards, as their users have them: databases, and queues in all of them."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from turnlane.errors import (
    ConfigError,
    DatabaseDown,
    DatabaseReadOnly,
    LeadLost,
    ReshardUnderWay,
)
from turnlane.runtime import Closing
from turnlane.table.event import TableEvent
from turnlane.table.grammar import ScheduleStatement, parse, run_schedule_statement
from turnlane.table.manager import Manager
from turnlane.table.queue import Database, TableQueue
from turnlane.table.receiver import DEFAULT_PREFETCH, Receiver
from turnlane.table.reshard import Resharder, ReshardProgress, RowMover, find_plan
from turnlane.table.schedules import Schedule
from turnlane.table.shard_directory import ShardDirectory
from turnlane.table.shards import KeyRange, Shard, ShardMap, ShardSpec, keyspace_id
from turnlane.table.sql.dialect import Connection
from turnlane.table.url import dialect_of

log = logging.getLogger(__name__)

MAP_REFRESH_SECONDS: Final = 1.0
"""Seconds between two looks at whether there is a newer map."""

MAX_INSERT_ROWS: Final = 100_000
"""Events that ``put`` stores in one transaction at most."""


class ShardTransaction:
    """A transaction in the database that has a key; see :meth:`ShardedQueue.transaction`."""

    def __init__(self, queue: TableQueue, shard: Shard, connection: Connection) -> None:
        self.connection = connection
        """For whatever else is to be committed with the event."""
        self._queue = queue
        self._shard = shard

    def enqueue(self, row: Mapping[str, Any], **options: Any) -> int:
        """Insert an event; as :meth:`TableQueue.enqueue`. Its key must lie in this database."""
        self._check_key(row)
        return self._queue.enqueue(self.connection, row, **options)

    def ack(self, event: TableEvent) -> None:
        """Ack an event together with whatever else is committed here. Its key must lie here too.

        Raises ``LeadLost`` if it is not here to be acked: it was acked before, or it was moved to
        this database by a reshard since it was received, and fires again. Then nothing may be
        committed for it.
        """
        self._check_key(event.columns)
        if not self._queue.ack(self.connection, [event.id]):
            raise LeadLost(f"event {event.id} was acked before, or was moved and fires again")

    def _check_key(self, row: Mapping[str, Any]) -> None:
        key = row.get(self._queue.definition.shard_by or "")
        if not self._shard.key_range.contains(keyspace_id(key)):
            raise ValueError(f"the key {key!r} does not lie in shard {self._shard}")


class ShardedQueue(Closing):
    """A queue whose events lie in several databases, by key. Safe to use from any thread."""

    def __init__(self, sites: ShardDirectory, shards: ShardMap) -> None:
        self.definition = sites.definition
        if self.definition.shard_by is None and len(shards.shards) > 1:
            raise ConfigError("shards", f"{self.name!r} has no SHARD BY column to choose one by")
        self._sites = sites
        self._lock = threading.RLock()
        self._map = sites.newest(shards)
        self._queues: dict[Shard, TableQueue] = {}
        self._receivers: list[Receiver] = []
        self._managing = False
        self._over = threading.Event()
        self._follower = threading.Thread(
            target=self._follow, name=f"turnlane-shards-{self.name}", daemon=True
        )
        self._follower.start()

    @property
    def name(self) -> str:
        """The queue's name, the same in every database."""
        return self.definition.name

    @property
    def map(self) -> ShardMap:
        """The shards, as far as this process knows; it looks for a newer map every second."""
        return self._map

    # ── enqueueing ───────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def transaction(self, key: object) -> Iterator[ShardTransaction]:
        """A transaction in the database that has ``key``: committed at the end of the block."""
        shard = self._map.shard_of(keyspace_id(key))
        dialect = self._sites.dialect(shard)
        with (
            contextlib.closing(dialect.connect()) as connection,
            dialect.transaction(connection),
        ):
            yield ShardTransaction(self.queue(shard), shard, connection)

    def put(self, rows: Iterable[Mapping[str, Any]]) -> int:
        """Store events, each in the database that has its key; how many.

        Each database has a transaction of its own. If it raises, some may be stored: name events
        that must not be there twice.
        """
        column = self.definition.shard_by or ""  # then there is one shard, for all
        parts: dict[Shard, list[Mapping[str, Any]]] = {}
        for row in rows:
            shard = self._map.shard_of(keyspace_id(row.get(column)))
            parts.setdefault(shard, []).append(row)
        for shard, mine in parts.items():
            for at in range(0, len(mine), MAX_INSERT_ROWS):
                self.queue(shard).insert(mine[at : at + MAX_INSERT_ROWS])
        return sum(map(len, parts.values()))

    # ── schedules ────────────────────────────────────────────────────────────────────────────────

    def schedule(self, name: str, every: str, time_zone: str = "UTC", /, **columns: object) -> None:
        """Have an event recur, in the shard that has its key; as :meth:`TableQueue.schedule`."""
        home = self._map.shard_of(keyspace_id(columns.get(self.definition.shard_by or "")))
        self.queue(home).schedule(name, every, time_zone, **columns)
        for shard in self._map.shards:  # where one of this name and another key may be
            if shard != home:
                self.queue(shard).unschedule(name)

    def unschedule(self, name: str) -> bool:
        """Have it recur no more; false if there is no such schedule."""
        return sum(self.queue(shard).unschedule(name) for shard in self._map.shards) > 0

    def schedules(self) -> list[Schedule]:
        """What recurs, by name."""
        found = [each for shard in self._map.shards for each in self.queue(shard).schedules()]
        return sorted(found, key=lambda schedule: schedule.name)

    # ── receiving ────────────────────────────────────────────────────────────────────────────────

    def receive(self, key_range: str = "-", prefetch: int = DEFAULT_PREFETCH) -> Receiver:
        """A receiver of the events in a key range, of whichever shards; starts their managers."""
        receiver = Receiver(KeyRange.parse(key_range), prefetch)
        with self._lock:
            self._receivers = [each for each in self._receivers if not each.closed]
            self._receivers.append(receiver)
            self.manage()
            for shard in self._map.shards:
                # All of them: a row may have been inserted into a shard that is not its own.
                self.queue(shard).manager().attach(receiver)
        return receiver

    def manage(self) -> None:
        """Run a manager for every shard in this process, and move on what comes to retired ones."""
        with self._lock:
            self._managing = True
            for shard in self._map.shards:
                self.queue(shard).manager()

    def managers(self) -> dict[Shard, Manager]:
        """The managers that run in this process."""
        with self._lock:
            if not self._managing:
                return {}
            return {shard: self.queue(shard).manager() for shard in self._map.shards}

    # ── shards ───────────────────────────────────────────────────────────────────────────────────

    def queue(self, shard: Shard) -> TableQueue:
        """The queue's table in one database."""
        with self._lock:
            queue = self._queues.get(shard)
            if queue is None:
                queue = TableQueue(self._sites.dialect(shard), self.definition)
                self._queues[shard] = queue
            return queue

    def reshard(
        self,
        targets: Sequence[Shard | ShardSpec],
        tell: Callable[[ReshardProgress], None] = lambda _: None,
    ) -> int:
        """Split or merge shards: ``targets`` take the place of those that have their keys now.

        Their databases must be new to the queue. Returns how many events were moved. If it is
        interrupted, the same call, or :meth:`resume_reshard`, goes on where it was.
        """
        self.refresh()
        wanted = [Shard.of(each) for each in targets]
        moved = Resharder.begin(self._sites, self._map, wanted, tell).run()
        self.refresh()
        return moved

    def resume_reshard(
        self, tell: Callable[[ReshardProgress], None] = lambda _: None
    ) -> int | None:
        """Finish a reshard that was interrupted; ``None`` if there is none."""
        self.refresh()
        found = Resharder.resume(self._sites, self._map, tell)
        moved = None if found is None else found.run()
        self.refresh()
        return moved

    def forget_retired(self) -> list[Shard]:
        """Let go of the retired shards, so that their databases can be deleted; returns them.

        What is still there is moved on first. Make sure that nobody inserts there any more.
        """
        self.refresh()
        if find_plan(self._sites, self._map) is not None:
            raise ReshardUnderWay("a reshard is not finished; resume it first")
        retired = self._map.retired
        for shard in retired:
            self._sites.store(shard).shut()
            RowMover(self._sites, shard).drain(self._map.version)
            if self._sites.store(shard).left():
                raise ReshardUnderWay(f"somebody holds events in {shard}, or inserts them")
        following = self._map.without_retired()
        for shard in (*retired, *self._map.shards):
            self._sites.store(shard).keep_map(following)
        self.refresh()
        return list(retired)

    def refresh(self) -> None:
        """Look whether there is a newer map, and follow it."""
        newest = self._sites.newest(self._map)
        with self._lock:
            if newest.version <= self._map.version:
                return
            log.info("queue %s: map %d is in force", self.name, newest.version)
            self._map = newest
            if self._managing:
                self._manage_new()
            retired = [shard for shard in self._queues if shard not in newest.shards]
            leaving = [self._queues.pop(shard) for shard in retired]
        for queue in leaving:
            queue.close()

    def _manage_new(self) -> None:
        for shard in self._map.shards:
            if shard not in self._queues:
                manager = self.queue(shard).manager()
                for receiver in self._receivers:
                    if not receiver.closed:
                        manager.attach(receiver)

    # ── all shards ───────────────────────────────────────────────────────────────────────────────

    def counts(self) -> dict[str, int]:
        """How many events are in each state, in all shards."""
        total: dict[str, int] = {}
        for shard in self._map.shards:
            for state, count in self.queue(shard).counts().items():
                total[state] = total.get(state, 0) + count
        return total

    def retry(self) -> int:
        """Have all dead letters fired again; returns how many."""
        return sum(self.queue(shard).retry() for shard in self._map.shards)

    def close(self) -> None:
        """Stop the managers that run here. The tables stay."""
        self._over.set()
        self._follower.join()
        with self._lock:
            queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.close()
        self._sites.close()

    # ── following ────────────────────────────────────────────────────────────────────────────────

    def _follow(self) -> None:
        while not self._over.wait(MAP_REFRESH_SECONDS):
            self._try(self.refresh)
            for shard in self._map.retired if self._managing else ():
                self._try(functools.partial(self._move_on, shard))

    def _try(self, step: Callable[[], None]) -> None:
        """Another second is another chance, and one shard's trouble is no other's."""
        try:
            step()
        except (DatabaseDown, DatabaseReadOnly, LeadLost) as error:
            log.warning("queue %s: %s", self.name, error)
        except Exception:  # whatever a driver raises
            log.exception("queue %s: following the shards failed", self.name)

    def _move_on(self, shard: Shard) -> None:
        """Move what old clients insert into a retired shard, and finish what nobody finishes."""
        store = self._sites.store(shard)
        if store.is_led():
            return  # its manager is about to notice
        store.shut()
        plan = store.plan()
        if plan is not None:
            Resharder(self._sites, plan).run()
        RowMover(self._sites, shard).drain(self._map.version)


class ShardedDatabase(Closing):
    """Several databases with the same queues, each with a part of the keys."""

    def __init__(self, shards: ShardMap) -> None:
        self.shards = shards
        self._databases = [Database(dialect_of(shard.url)) for shard in shards.shards]
        self._queues: list[ShardedQueue] = []

    def sql(self, statement: str) -> list[str]:
        """Run a statement about queues in every database, one about a schedule where it belongs.

        Returns the names concerned; those of the queues that all of them have.
        """
        parsed = parse(statement)
        if isinstance(parsed, ScheduleStatement):
            return run_schedule_statement(parsed, self._opened, lambda: self.sql("SHOW QUEUES"))
        answers = [
            database.sql(statement, shard.first_id)
            for shard, database in zip(self.shards.shards, self._databases, strict=True)
        ]
        return [name for name in answers[0] if all(name in answer for answer in answers)]

    def queue(self, name: str) -> ShardedQueue:
        """The queue of this name. Raises ``NoSuchQueue``, and ``ConfigError`` if shards differ."""
        queue = self._opened(name)
        self._queues.append(queue)
        return queue

    def _opened(self, name: str) -> ShardedQueue:
        definitions = [database.catalog.definition(name) for database in self._databases]
        if any(str(each) != str(definitions[0]) for each in definitions):
            raise ConfigError("shards", f"the queue {name!r} is not the same in all of them")
        sites = ShardDirectory(definitions[0], [shard.url for shard in self.shards.shards])
        return ShardedQueue(sites, self.shards)

    def close(self) -> None:
        """Close all queues that were opened here."""
        for queue in self._queues:
            queue.close()
        for database in self._databases:
            database.close()


def connect_shards(shards: Iterable[Shard | ShardSpec]) -> ShardedDatabase:
    """The queue tables of several databases: pairs of a url and a key range.

    Together the ranges must hold every key exactly once. Raises ``ConfigError``.
    """
    return ShardedDatabase(ShardMap.of(shards))
