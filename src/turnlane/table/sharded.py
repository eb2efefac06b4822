"""Queues in several databases, as users see them.

A :class:`ShardedQueue` has a :class:`TableQueue` for each shard of the newest map. A thread of its
own looks for a newer map every second, and follows it: it starts managers for new shards, attaches
the receivers to them, and closes the queues of retired shards. In processes that run managers, the
thread also moves rows that clients with an old map insert into retired shards.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from turnlane.databases import Connection
from turnlane.errors import (
    ConfigError,
    DatabaseDown,
    DatabaseReadOnly,
    LeadLost,
    ReshardUnderWay,
)
from turnlane.logs import get_logger
from turnlane.runtime import Closeable, PeriodicThread
from turnlane.table.grammar import ScheduleStatement, parse
from turnlane.table.manager import Manager
from turnlane.table.queue import Database, TableQueue, run_schedule_statement
from turnlane.table.queue_sql import load_queue_dialect
from turnlane.table.receiver import DEFAULT_PREFETCH, Receiver, TableEvent
from turnlane.table.reshard import ProgressCallback, Resharder, RowMover, find_plan
from turnlane.table.schedules import Schedule
from turnlane.table.shard_directory import ShardDirectory
from turnlane.table.shards import KeyRange, Shard, ShardMap, ShardSpec, keyspace_id

log = get_logger(__name__)

MAP_REFRESH_SECONDS: Final = 1.0
"""Seconds between two searches for a newer map."""

MAX_INSERT_ROWS: Final = 100_000
"""Events that ``put`` stores in one transaction at most."""


class ShardTransaction:
    """A transaction in the database that has a key; see :meth:`ShardedQueue.transaction`."""

    def __init__(self, queue: TableQueue, shard: Shard, connection: Connection) -> None:
        self.connection = connection
        """For the user's own statements, which are committed with the event."""
        self._queue = queue
        self._shard = shard

    def enqueue(self, row: Mapping[str, Any], **options: Any) -> int:
        """Insert an event; as :meth:`TableQueue.enqueue`. Its key must lie in this database."""
        self._check_key(row)
        return self._queue.enqueue(self.connection, row, **options)

    def ack(self, event: TableEvent) -> None:
        """Ack an event in this transaction. Its key must lie in this database.

        Raises ``LeadLost`` if the event is not here to be acked: it was acked before, or a reshard
        moved it to this database since it was received, and it fires again. Then do not commit the
        work that was done for it.
        """
        self._check_key(event.columns)
        if not self._queue.ack(self.connection, [event.id]):
            raise LeadLost(f"event {event.id} was acked before, or was moved and fires again")

    def _check_key(self, row: Mapping[str, Any]) -> None:
        key = row.get(self._queue.definition.shard_by or "")
        if not self._shard.key_range.contains(keyspace_id(key)):
            raise ValueError(f"the key {key!r} does not lie in shard {self._shard}")


class ShardedQueue(Closeable):
    """A queue whose events lie in several databases, by key. Thread-safe.

    One lock guards the map, the queues and the receivers; the follower thread takes it too.
    """

    def __init__(self, directory: ShardDirectory, shards: ShardMap) -> None:
        self.definition = directory.definition
        if self.definition.shard_by is None and len(shards.shards) > 1:
            raise ConfigError("shards", f"{self.name!r} has no SHARD BY column to choose one by")
        self._directory = directory
        self._lock = threading.RLock()
        self._map = directory.find_newest_map(shards)
        self._queues: dict[Shard, TableQueue] = {}
        self._receivers: list[Receiver] = []
        self._runs_managers = False
        self._follower = PeriodicThread(
            f"turnlane-shards-{self.name}", self._follow, MAP_REFRESH_SECONDS
        )

    @property
    def name(self) -> str:
        """The queue's name, the same in every database."""
        return self.definition.name

    @property
    def map(self) -> ShardMap:
        """The newest map that this process knows; it looks for a newer one every second."""
        return self._map

    # ── enqueueing ───────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def transaction(self, key: object) -> Iterator[ShardTransaction]:
        """Open a transaction in the database that has ``key``; the end of the block commits it."""
        shard = self._map.find_shard(keyspace_id(key))
        dialect = self._directory.get_dialect(shard)
        with (
            contextlib.closing(dialect.connect()) as connection,
            dialect.transaction(connection),
        ):
            yield ShardTransaction(self.queue(shard), shard, connection)

    def put(self, rows: Iterable[Mapping[str, Any]]) -> int:
        """Store events, each in the database that has its key; returns how many.

        Each database has its own transaction. If this raises, some events may be stored: give a
        name to events that must not be stored twice.
        """
        column = self.definition.shard_by or ""  # without a key there is one shard
        by_shard: dict[Shard, list[Mapping[str, Any]]] = {}
        for row in rows:
            shard = self._map.find_shard(keyspace_id(row.get(column)))
            by_shard.setdefault(shard, []).append(row)
        for shard, mine in by_shard.items():
            for at in range(0, len(mine), MAX_INSERT_ROWS):
                self.queue(shard).insert(mine[at : at + MAX_INSERT_ROWS])
        return sum(map(len, by_shard.values()))

    # ── schedules ────────────────────────────────────────────────────────────────────────────────

    def schedule(self, name: str, every: str, time_zone: str = "UTC", /, **columns: object) -> None:
        """Create a schedule in the shard that has its key; as :meth:`TableQueue.schedule`."""
        key = columns.get(self.definition.shard_by or "")
        owner = self._map.find_shard(keyspace_id(key))
        self.queue(owner).schedule(name, every, time_zone, **columns)
        for shard in self._map.shards:  # one of this name with another key may be there
            if shard != owner:
                self.queue(shard).unschedule(name)

    def unschedule(self, name: str) -> bool:
        """Delete a schedule; false if there is none."""
        return sum(self.queue(shard).unschedule(name) for shard in self._map.shards) > 0

    def schedules(self) -> list[Schedule]:
        """Return the schedules of all shards, by name."""
        found = [each for shard in self._map.shards for each in self.queue(shard).schedules()]
        return sorted(found, key=lambda schedule: schedule.name)

    # ── receiving ────────────────────────────────────────────────────────────────────────────────

    def receive(self, key_range: str = "-", prefetch: int = DEFAULT_PREFETCH) -> Receiver:
        """Return a receiver of the events in a key range of all shards; starts their managers."""
        receiver = Receiver(KeyRange.parse(key_range), prefetch)
        with self._lock:
            self._receivers = [each for each in self._receivers if not each.closed]
            self._receivers.append(receiver)
            self.manage()
            for shard in self._map.shards:
                # All shards: a row may have been inserted into a shard that lacks its key.
                self.queue(shard).manager().attach(receiver)
        return receiver

    def manage(self) -> None:
        """Run a manager for every shard in this process, and empty retired shards."""
        with self._lock:
            self._runs_managers = True
            for shard in self._map.shards:
                self.queue(shard).manager()

    def managers(self) -> dict[Shard, Manager]:
        """Return the managers that run in this process, by shard."""
        with self._lock:
            if not self._runs_managers:
                return {}
            return {shard: self.queue(shard).manager() for shard in self._map.shards}

    # ── all shards ───────────────────────────────────────────────────────────────────────────────

    def queue(self, shard: Shard) -> TableQueue:
        """Return the queue's table in one database."""
        with self._lock:
            queue = self._queues.get(shard)
            if queue is None:
                queue = TableQueue(self._directory.get_dialect(shard), self.definition)
                self._queues[shard] = queue
            return queue

    def counts(self) -> dict[str, int]:
        """Return how many events are in each state, in all shards."""
        total: dict[str, int] = {}
        for shard in self._map.shards:
            for state, count in self.queue(shard).counts().items():
                total[state] = total.get(state, 0) + count
        return total

    def retry(self) -> int:
        """Fire all dead letters again; returns how many."""
        return sum(self.queue(shard).retry() for shard in self._map.shards)

    def close(self) -> None:
        """Stop the managers that run here. The tables stay."""
        self._follower.close()
        with self._lock:
            queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.close()
        self._directory.close()

    # ── resharding ───────────────────────────────────────────────────────────────────────────────

    def reshard(
        self, targets: Sequence[Shard | ShardSpec], tell: ProgressCallback = lambda _: None
    ) -> int:
        """Split or merge shards: ``targets`` replace the shards that have their keys now.

        Their databases must be new to the queue. Returns how many events were moved. If it is
        interrupted, the same call, or :meth:`resume_reshard`, resumes it.
        """
        self.refresh()
        shards = [Shard.from_spec(each) for each in targets]
        moved = Resharder.begin(self._directory, self._map, shards, tell).run()
        self.refresh()
        return moved

    def resume_reshard(self, tell: ProgressCallback = lambda _: None) -> int | None:
        """Finish a reshard that was interrupted; ``None`` if there is none."""
        self.refresh()
        plan = find_plan(self._directory, self._map)
        moved = None if plan is None else Resharder(self._directory, plan, tell).run()
        self.refresh()
        return moved

    def forget_retired(self) -> list[Shard]:
        """Remove the retired shards from the map, so that their databases can be deleted.

        Moves the events that are left there first, and returns the shards. Make sure that no client
        inserts there any more.
        """
        self.refresh()
        if find_plan(self._directory, self._map) is not None:
            raise ReshardUnderWay("a reshard is not finished; resume it first")
        retired = self._map.retired
        for shard in retired:
            store = self._directory.get_store(shard)
            store.close_lease()
            RowMover(self._directory, shard).drain(self._map.version)
            if store.count_rows():
                raise ReshardUnderWay(
                    f"{shard} is not empty: a client has locked events there, or inserts them"
                )
        following = self._map.drop_retired()
        for shard in (*retired, *self._map.shards):
            self._directory.get_store(shard).save_map(following)
        self.refresh()
        return list(retired)

    # ── following the map ────────────────────────────────────────────────────────────────────────

    def refresh(self) -> None:
        """Look for a newer map, and follow it."""
        newest = self._directory.find_newest_map(self._map)
        with self._lock:
            if newest.version <= self._map.version:
                return
            log.info("table.map_changed", queue=self.name, version=newest.version)
            self._map = newest
            for shard in newest.shards if self._runs_managers else ():
                if shard not in self._queues:
                    manager = self.queue(shard).manager()
                    for receiver in self._receivers:
                        if not receiver.closed:
                            manager.attach(receiver)
            retired = [shard for shard in self._queues if shard not in newest.shards]
            leaving = [self._queues.pop(shard) for shard in retired]
        for queue in leaving:
            queue.close()

    def _follow(self) -> None:
        self._try(self.refresh)
        for shard in self._map.retired if self._runs_managers else ():
            self._try(functools.partial(self._empty_retired, shard))

    def _try(self, step: Callable[[], None]) -> None:
        """Run a step; a failure is logged and must not stop the others. It runs again soon."""
        try:
            step()
        except (DatabaseDown, DatabaseReadOnly, LeadLost) as error:
            log.warning("table.map_refresh_failed", queue=self.name, error=error)
        except Exception:  # drivers raise errors of any type
            log.exception("table.map_refresh_failed", queue=self.name)

    def _empty_retired(self, shard: Shard) -> None:
        """Move rows of clients with an old map away, and finish a reshard whose process died."""
        store = self._directory.get_store(shard)
        if store.has_leader():
            return  # its manager is about to notice the new map
        store.close_lease()
        plan = store.read_plan()
        if plan is not None:
            Resharder(self._directory, plan).run()
        RowMover(self._directory, shard).drain(self._map.version)


class ShardedDatabase(Closeable):
    """Several databases with the same queues, each with a part of the keys."""

    def __init__(self, shards: ShardMap) -> None:
        self.shards = shards
        self._databases = [Database(load_queue_dialect(shard.url)) for shard in shards.shards]
        self._queues: list[ShardedQueue] = []

    def sql(self, statement: str) -> list[str]:
        """Run a statement about queues in every database, one about a schedule in its shard.

        Returns the names concerned; for ``SHOW QUEUES``, the queues that all databases have.
        """
        parsed = parse(statement)
        if isinstance(parsed, ScheduleStatement):
            return run_schedule_statement(parsed, self._open, lambda: self.sql("SHOW QUEUES"))
        answers = [
            database.sql(statement, shard.first_id)
            for shard, database in zip(self.shards.shards, self._databases, strict=True)
        ]
        return [name for name in answers[0] if all(name in answer for answer in answers)]

    def queue(self, name: str) -> ShardedQueue:
        """Open a queue. Raises ``NoSuchQueue``, and ``ConfigError`` if the shards differ."""
        queue = self._open(name)
        self._queues.append(queue)
        return queue

    def _open(self, name: str) -> ShardedQueue:
        definitions = [database.catalog.get_definition(name) for database in self._databases]
        if any(str(each) != str(definitions[0]) for each in definitions):
            raise ConfigError("shards", f"the queue {name!r} is not the same in all of them")
        directory = ShardDirectory(definitions[0], [shard.url for shard in self.shards.shards])
        return ShardedQueue(directory, self.shards)

    def close(self) -> None:
        """Close all queues that were opened here."""
        for queue in self._queues:
            queue.close()
        for database in self._databases:
            database.close()


def connect_shards(shards: Iterable[Shard | ShardSpec]) -> ShardedDatabase:
    """Return the queue tables of several databases, from pairs of a url and a key range.

    Together the ranges must have every key exactly once. Raises ``ConfigError``.
    """
    return ShardedDatabase(ShardMap.from_shards(shards))
