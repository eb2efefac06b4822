"""Resharding: shards are split or merged while events come and fire.

1. *Begin*: the plan, which is the map to come, is kept in every database. One plan at a time.
2. *Prepare*: the new shards get their tables. Nobody may lead there yet.
3. *Ahead*: events that are due later than any manager looks, and acked ones, are moved. The old
   shards go on firing.
4. *Switch*: those who write whole batches, once each, have to wait while their notes are copied.
   The new map is kept everywhere, and clients follow it within seconds. The old shards are shut:
   their managers have a moment to leave in order, then their fencing token is taken.
5. *Drain*: whatever is left is moved. The new shards fire meanwhile, or afterwards if the queue
   keeps an order.
6. *End*: the plan is struck off. The old shards are *retired*: what a client with an old map still
   inserts there is moved on, by every process that runs managers of the queue.

Each step may be repeated, so a reshard that was killed anywhere is resumed by running it again.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from turnlane.errors import ConfigError, ReshardUnderWay
from turnlane.table.definition import TableOrdering
from turnlane.table.notes import find_common_progress
from turnlane.table.row_codec import TRANSFERRED_COLUMNS, TransferBatch, TransferFilter
from turnlane.table.schedules import get_schedule_key
from turnlane.table.shard_directory import ShardDirectory
from turnlane.table.shard_store import TRANSFER_BATCH, ShardStore
from turnlane.table.shards import Shard, ShardMap, keyspace_id
from turnlane.table.sql.dialect import Row

# ── mover ──
# The mover: takes the events of a shard to those that have their keys now.


class RowMover:
    """Empties one shard. Any number of movers may be at it; see :mod:`.shard_store`."""

    def __init__(self, sites: ShardDirectory, source: Shard) -> None:
        self._sites = sites
        self._source: ShardStore = sites.store(source)
        shard_by = sites.definition.shard_by
        assert shard_by is not None, "a queue with several shards has a key"
        self._shard_by = shard_by
        self._key = len(TRANSFERRED_COLUMNS) + sites.definition.names.index(shard_by)

    def move(self, what: TransferFilter, version: int, *parameters: int) -> int:
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
        moved = count = self.move(TransferFilter.PLAIN, version)
        while count == TRANSFER_BATCH:
            count = self.move(TransferFilter.PLAIN, version)
            moved += count
        if self._source.has(TransferFilter.PLAIN):
            return moved
        return moved + self.move(TransferFilter.ALL, version)

    def move_schedules(self, version: int) -> None:
        """Take what recurs along, from a shard that is shut: nobody fires it here meanwhile."""
        for row in self._source.schedules():
            key = get_schedule_key(row, self._shard_by)
            shard = self._source.map_of(version).shard_of(keyspace_id(key))
            self._sites.store(shard).keep_schedule(row)
            self._source.drop_schedule(row[1])

    def deliver(self) -> None:
        """Take to their shards what is in the outbox."""
        while (batch := self._source.first_batch()) is not None:
            for shard, rows in self._sorted(batch).items():
                self._sites.store(shard).arrive(self._source.id, batch.number, rows)
            self._source.strike(batch.number)

    def _sorted(self, batch: TransferBatch) -> dict[Shard, list[Row]]:
        """By the map that was in force when they were taken: some may have arrived by it."""
        shards = self._source.map_of(batch.version)
        parts: dict[Shard, list[Row]] = {}
        for row in batch.rows:
            parts.setdefault(shards.shard_of(keyspace_id(row[self._key])), []).append(row)
        return parts


log = logging.getLogger(__name__)

WINDOW_MARGIN: float = 10.0
"""Seconds beyond a manager's window from which on it surely has no event in memory."""

LEAVE_SECONDS: float = 3.0
"""Seconds that managers of old shards have to leave in order."""

POLL_SECONDS: float = 0.05


class ReshardStep(enum.StrEnum):
    """Where a reshard is."""

    PREPARE = "prepare"
    AHEAD = "ahead"
    SWITCH = "switch"
    DRAIN = "drain"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class ReshardProgress:
    """How far a reshard has come."""

    step: ReshardStep
    moved: int
    """Events moved so far by this run of it."""


ProgressCallback = Callable[[ReshardProgress], None]


class Resharder:
    """One reshard, from its plan to its end. Run it again if it was interrupted."""

    def __init__(
        self,
        sites: ShardDirectory,
        plan: ShardMap,
        tell: ProgressCallback = lambda _: None,
        grace: float = LEAVE_SECONDS,
    ) -> None:
        self.plan = plan
        self._sites = sites
        self._tell = tell
        self._grace = grace
        self._moved = 0

    @classmethod
    def begin(
        cls,
        sites: ShardDirectory,
        current: ShardMap,
        targets: Sequence[Shard],
        tell: ProgressCallback = lambda _: None,
    ) -> Resharder:
        """Plan a reshard: ``targets`` take the place of the shards that have their keys.

        The same targets again resume it. Raises ``ConfigError`` if the ranges do not fit, and
        ``ReshardUnderWay`` if another reshard is not finished.
        """
        if sites.definition.shard_by is None:
            raise ConfigError("shards", "the queue has no SHARD BY column to choose one by")
        sites.learn(shard.url for shard in targets)
        found = find_plan(sites, current)
        if found is not None:
            if not {shard.address for shard in targets} <= {s.address for s in found.shards}:
                raise ReshardUnderWay("another reshard is not finished; resume it first")
            return cls(sites, found, tell)
        if set(targets) <= set(current.shards):
            return cls(sites, current, tell)  # it was finished, and nobody heard of it
        plan = current.resharded(targets)
        made = cls(sites, plan, tell)
        made._make_known(current)  # in one order: of two plans, one is refused at once
        return made

    @classmethod
    def resume(
        cls, sites: ShardDirectory, current: ShardMap, tell: ProgressCallback = lambda _: None
    ) -> Resharder | None:
        """The reshard that was interrupted, if there is one."""
        found = find_plan(sites, current)
        return None if found is None else cls(sites, found, tell)

    def run(self) -> int:
        """Carry it out, whatever of it was done before; how many events were moved."""
        before = self._before()
        if before is None:
            return 0  # it was finished before
        sources = [shard for shard in before.shards if shard not in self.plan.shards]
        targets = [shard for shard in self.plan.shards if shard not in before.shards]
        self._make_known(before)
        self._prepare(targets)
        self._check_notes(sources)
        self._move_ahead(sources)
        self._copy_notes(sources, targets)
        self._switch(before, sources, targets)
        self._drain(sources, targets)
        for store in self._stores(before.shards):
            store.end_plan()
        self._say(ReshardStep.DONE)
        return self._moved

    def _make_known(self, before: ShardMap) -> None:
        for store in self._stores(before.shards):
            newest = store.newest_map()
            if newest is None or newest.version < self.plan.version:
                store.keep_map(before)
                store.set_plan(self.plan)

    def _before(self) -> ShardMap | None:
        """The map that the plan began with: an old shard still has it."""
        for shard in (*self.plan.retired, *self.plan.shards):
            store = self._sites.store(shard)
            if store.plan() is not None:
                return store.map_of(self.plan.version - 1)
        return None

    def _prepare(self, targets: Sequence[Shard]) -> None:
        self._say(ReshardStep.PREPARE)
        for shard in targets:
            self._sites.create(shard)
            store = self._sites.store(shard)
            newest = store.newest_map()
            if newest is None or newest.version < self.plan.version:
                store.shut()
                self._sites.number(shard)
                with self._sites.notes(shard) as notes:
                    notes.shut()

    def _check_notes(self, sources: Sequence[Shard]) -> None:
        """Raise ``ReshardUnderWay`` if a writer is in the middle of a batch: some would come twice.

        From its copy on nobody can do anything about it.
        """
        noted = []
        for shard in sources:
            with self._sites.notes(shard) as notes:
                if notes.are_shut:
                    return
                noted.append(notes.read())
        if any(each.batches != noted[0].batches for each in noted):
            raise ReshardUnderWay(
                "a writer has committed a batch to some of the shards: let it finish, then resume"
            )

    def _copy_notes(self, sources: Sequence[Shard], targets: Sequence[Shard]) -> None:
        """Have those who write each batch once know in the new shards what they wrote."""
        noted = []
        for shard in sources:
            with self._sites.notes(shard) as notes:
                notes.shut()
                noted.append(notes.read())
        for shard in targets:
            with self._sites.notes(shard) as notes:
                notes.arrive(find_common_progress(noted))

    def _move_ahead(self, sources: Sequence[Shard]) -> None:
        window = self._sites.definition.settings.window + WINDOW_MARGIN
        for shard in sources:
            mover, store = RowMover(self._sites, shard), self._sites.store(shard)
            for what in (TransferFilter.FAR, TransferFilter.HISTORY):
                while True:
                    far = (
                        ()
                        if what is TransferFilter.HISTORY
                        else (store.now() + round(window * 1e9),)
                    )
                    count = mover.move(what, self.plan.version, *far)
                    self._say(ReshardStep.AHEAD, count)
                    if count < TRANSFER_BATCH:  # more may come for ever
                        break

    def _switch(self, before: ShardMap, sources: Sequence[Shard], targets: Sequence[Shard]) -> None:
        self._say(ReshardStep.SWITCH)
        others = [shard for shard in before.shards if shard not in sources]
        # The new shards first: who hears of them from an old one finds everything in its place.
        for store in self._stores((*targets, *others, *before.retired, *sources)):
            store.keep_map(self.plan)
        until = time.monotonic() + self._grace
        for store in self._stores(sources):
            while store.is_led() and time.monotonic() < until:
                time.sleep(POLL_SECONDS)  # a lease that is given back announces itself to nobody
            store.shut()
        if self._sites.definition.settings.ordering is TableOrdering.NONE:
            self._open(targets)

    def _drain(self, sources: Sequence[Shard], targets: Sequence[Shard]) -> None:
        self._say(ReshardStep.DRAIN)
        for shard in sources:
            mover, store = RowMover(self._sites, shard), self._sites.store(shard)
            last_id = store.last_id()
            self._say(ReshardStep.DRAIN, mover.drain(self.plan.version))
            while store.has(TransferFilter.ALL, last_id):
                time.sleep(
                    POLL_SECONDS
                )  # somebody's transaction holds a row: nothing tells when it ends
                self._say(ReshardStep.DRAIN, mover.drain(self.plan.version))
        self._open(targets)

    def _open(self, targets: Sequence[Shard]) -> None:
        for store in self._stores(targets):
            store.open()

    def _stores(self, shards: Iterable[Shard]) -> list[ShardStore]:
        return [self._sites.store(shard) for shard in shards]

    def _say(self, step: ReshardStep, moved: int = 0) -> None:
        self._moved += moved
        log.debug("reshard of %s: %s, %d moved", self._sites.definition.name, step, self._moved)
        self._tell(ReshardProgress(step, self._moved))


def find_plan(sites: ShardDirectory, current: ShardMap) -> ShardMap | None:
    """The map that an unfinished reshard leads to."""
    for shard in (*current.shards, *current.retired):
        plan = sites.store(shard).plan()
        if plan is not None:
            return plan
    return None
