"""The mover: takes the events of a shard to those that have their keys now."""

from __future__ import annotations

from turnlane.table.keyspace import keyspace_id
from turnlane.table.letters import MOVED, Batch, Take
from turnlane.table.schedules import key_in
from turnlane.table.shard_store import BATCH, ShardStore
from turnlane.table.shards import Shard
from turnlane.table.sites import Sites
from turnlane.table.sql.dialect import Row


class Mover:
    """Empties one shard. Any number of movers may be at it; see :mod:`.shard_store`."""

    def __init__(self, sites: Sites, source: Shard) -> None:
        self._sites = sites
        self._source: ShardStore = sites.store(source)
        shard_by = sites.definition.shard_by
        assert shard_by is not None, "a queue with several shards has a key"
        self._shard_by = shard_by
        self._key = len(MOVED) + sites.definition.names.index(shard_by)

    def move(self, what: Take, version: int, *parameters: int) -> int:
        """Move a batch of events, by the map of that version; how many."""
        self.deliver()
        taken = self._source.take(what, version, *parameters)
        if taken:
            self.deliver()
        return taken

    def drain(self, version: int) -> int:
        """Move all there is, from a shard that is shut; how many events.

        Rows that somebody holds stay, and what waits for their groups; more may come for ever.
        Both is moved another time.
        """
        self.move_schedules(version)
        moved = count = self.move(Take.PLAIN, version)
        while count == BATCH:
            count = self.move(Take.PLAIN, version)
            moved += count
        if self._source.has(Take.PLAIN):
            return moved
        return moved + self.move(Take.ALL, version)

    def move_schedules(self, version: int) -> None:
        """Take what recurs along, from a shard that is shut: nobody fires it here meanwhile."""
        for row in self._source.schedules():
            key = key_in(row, self._shard_by)
            shard = self._source.map_of(version).shard_of(keyspace_id(key))
            self._sites.store(shard).keep_schedule(row)
            self._source.drop_schedule(row[1])

    def deliver(self) -> None:
        """Take to their shards what is in the outbox."""
        while (batch := self._source.first_batch()) is not None:
            for shard, rows in self._sorted(batch).items():
                self._sites.store(shard).arrive(self._source.id, batch.number, rows)
            self._source.strike(batch.number)

    def _sorted(self, batch: Batch) -> dict[Shard, list[Row]]:
        """By the map that was in force when they were taken: some may have arrived by it."""
        shards = self._source.map_of(batch.version)
        parts: dict[Shard, list[Row]] = {}
        for row in batch.rows:
            parts.setdefault(shards.shard_of(keyspace_id(row[self._key])), []).append(row)
        return parts
