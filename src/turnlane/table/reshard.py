"""Resharding: shards are split or merged while events come and fire.

1. *Begin*: every database saves the plan, which is the next map. Only one plan at a time.
2. *Prepare*: the new shards get their tables. No manager may lead there yet.
3. *Ahead*: events that are due after every manager's window, and acked events, are moved. The old
   shards go on firing.
4. *Switch*: writers that commit each batch once wait while their progress is copied. Every database
   saves the new map, and clients follow it within seconds. The old shards are closed: their
   managers have a few seconds to leave, then they lose their token.
5. *Drain*: all other events are moved. The new shards begin to fire after the switch, or after the
   drain if the queue has an order.
6. *End*: the plan is deleted. The old shards are *retired*: every process that runs managers of the
   queue moves rows that a client with an old map still inserts there.

Every step may be repeated, so a reshard that was killed anywhere is resumed by running it again.
"""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from turnlane.databases import Row
from turnlane.errors import ConfigError, ReshardUnderWay
from turnlane.logs import get_logger
from turnlane.table.batch_commit import ProgressTable, WriterProgress
from turnlane.table.catalog import QueueCatalog
from turnlane.table.definition import TableOrdering
from turnlane.table.schedules import get_schedule_key
from turnlane.table.shard_directory import ShardDirectory
from turnlane.table.shard_store import (
    TRANSFER_BATCH,
    TRANSFERRED_COLUMNS,
    ShardStore,
    TransferFilter,
)
from turnlane.table.shards import Shard, ShardMap, keyspace_id

log = get_logger(__name__)

WINDOW_MARGIN: float = 10.0
"""Seconds after the end of a manager's window; later events are surely not in its memory."""

LEAVE_SECONDS: float = 3.0
"""Seconds that managers of old shards have to leave."""

POLL_SECONDS: float = 0.05


class RowMover:
    """Moves the events of one shard to the shards that have their keys now.

    Several movers may run at once; see :mod:`turnlane.table.shard_store`.
    """

    def __init__(self, directory: ShardDirectory, source: Shard) -> None:
        self._directory = directory
        self._source: ShardStore = directory.get_store(source)
        shard_by = directory.definition.shard_by
        assert shard_by is not None, "a queue with several shards has a key"
        self._shard_by = shard_by
        key_index = directory.definition.column_names.index(shard_by)
        self._key_position = len(TRANSFERRED_COLUMNS) + key_index

    def move_batch(self, wanted: TransferFilter, version: int, *parameters: int) -> int:
        """Move a batch of events by the map of a version; returns how many."""
        self.deliver()
        moved = self._source.move_to_outbox(wanted, version, *parameters)
        if moved:
            self.deliver()
        return moved

    def drain(self, version: int) -> int:
        """Move all events of a closed shard; returns how many.

        Locked rows stay, and the events that wait for their groups; clients may insert more without
        end. Another call moves both.
        """
        self.move_schedules(version)
        total = moved = self.move_batch(TransferFilter.PLAIN, version)
        while moved == TRANSFER_BATCH:
            moved = self.move_batch(TransferFilter.PLAIN, version)
            total += moved
        if self._source.has_rows(TransferFilter.PLAIN):
            return total
        return total + self.move_batch(TransferFilter.ALL, version)

    def move_schedules(self, version: int) -> None:
        """Move the schedules of a closed shard: no manager fires them in between."""
        for row in self._source.read_schedules():
            key = get_schedule_key(row, self._shard_by)
            shard = self._source.read_map(version).find_shard(keyspace_id(key))
            self._directory.get_store(shard).add_schedule(row)
            self._source.remove_schedule(row[1])

    def deliver(self) -> None:
        """Deliver the batches of the outbox to their shards."""
        while (batch := self._source.read_first_batch()) is not None:
            # By the map of the batch: some of its rows may have arrived before, by this map.
            shards = self._source.read_map(batch.version)
            groups: dict[Shard, list[Row]] = {}
            for row in batch.rows:
                shard = shards.find_shard(keyspace_id(row[self._key_position]))
                groups.setdefault(shard, []).append(row)
            for shard, rows in groups.items():
                store = self._directory.get_store(shard)
                store.insert_batch(self._source.id, batch.number, rows)
            self._source.delete_batch(batch.number)


class ReshardStep(enum.StrEnum):
    """The steps of a reshard, as its progress reports them."""

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
    """Events that this run has moved."""


ProgressCallback = Callable[[ReshardProgress], None]


class Resharder:
    """One reshard, from its plan to its end. Run it again if it was interrupted."""

    def __init__(
        self,
        directory: ShardDirectory,
        plan: ShardMap,
        tell: ProgressCallback = lambda _: None,
        leave_seconds: float = LEAVE_SECONDS,
    ) -> None:
        self.plan = plan
        self._directory = directory
        self._tell = tell
        self._leave_seconds = leave_seconds
        self._moved = 0

    @classmethod
    def begin(
        cls,
        directory: ShardDirectory,
        current: ShardMap,
        targets: Sequence[Shard],
        tell: ProgressCallback = lambda _: None,
    ) -> Resharder:
        """Plan a reshard: ``targets`` replace the shards that have their keys.

        With the same targets again, it resumes. Raises ``ConfigError`` if the ranges do not fit,
        and ``ReshardUnderWay`` if another reshard is not finished.
        """
        if directory.definition.shard_by is None:
            raise ConfigError("shards", "the queue has no SHARD BY column to choose one by")
        directory.add_urls(shard.url for shard in targets)
        found = find_plan(directory, current)
        if found is not None:
            if not {shard.address for shard in targets} <= {s.address for s in found.shards}:
                raise ReshardUnderWay("another reshard is not finished; resume it first")
            return cls(directory, found, tell)
        if set(targets) <= set(current.shards):
            return cls(directory, current, tell)  # it was finished, and the caller did not know
        resharder = cls(directory, current.plan_reshard(targets), tell)
        resharder._save_plan(current)  # in a fixed order: of two plans, one fails at once
        return resharder

    def run(self) -> int:
        """Do all steps, also steps that were done before; returns how many events moved."""
        before = self._find_previous_map()
        if before is None:
            return 0  # it was finished before
        sources = [shard for shard in before.shards if shard not in self.plan.shards]
        targets = [shard for shard in self.plan.shards if shard not in before.shards]
        self._save_plan(before)
        self._prepare(targets)
        self._check_writers(sources)
        self._move_ahead(sources)
        self._copy_progress(sources, targets)
        self._switch(before, sources, targets)
        self._drain(sources, targets)
        for store in self._get_stores(before.shards):
            store.delete_plan()
        self._report(ReshardStep.DONE)
        return self._moved

    def _find_previous_map(self) -> ShardMap | None:
        """Return the map before the plan: a database with the plan has it."""
        for shard in (*self.plan.retired, *self.plan.shards):
            store = self._directory.get_store(shard)
            if store.read_plan() is not None:
                return store.read_map(self.plan.version - 1)
        return None

    def _save_plan(self, before: ShardMap) -> None:
        for store in self._get_stores(before.shards):
            newest = store.read_newest_map()
            if newest is None or newest.version < self.plan.version:
                store.save_map(before)
                store.save_plan(self.plan)

    def _prepare(self, targets: Sequence[Shard]) -> None:
        self._report(ReshardStep.PREPARE)
        for shard in targets:
            definition, store = self._directory.definition, self._directory.get_store(shard)
            with QueueCatalog(store.dialect) as catalog:
                catalog.create(definition, if_not_exists=True, first_id=shard.first_id)
                newest = store.read_newest_map()
                if newest is not None and newest.version >= self.plan.version:
                    continue
                store.close_lease()
                # Also in a table that existed before, new events get ids of the shard.
                catalog.set_first_id(definition.name, shard.first_id)
                with self._open_progress(shard) as progress:
                    progress.close_gate()

    def _check_writers(self, sources: Sequence[Shard]) -> None:
        """Raise ``ReshardUnderWay`` if a writer has committed a batch to only some shards.

        Some of its events would be written twice. After the copy it is too late to check.
        """
        recorded: list[WriterProgress] = []
        for shard in sources:
            with self._open_progress(shard) as progress:
                if progress.is_gate_closed():
                    return
                recorded.append(progress.read())
        if any(each.batches != recorded[0].batches for each in recorded):
            raise ReshardUnderWay(
                "a writer has committed a batch to some of the shards: let it finish, then resume"
            )

    def _move_ahead(self, sources: Sequence[Shard]) -> None:
        window = round((self._directory.definition.settings.window + WINDOW_MARGIN) * 1e9)
        for shard in sources:
            mover, store = RowMover(self._directory, shard), self._directory.get_store(shard)
            for wanted in (TransferFilter.FAR, TransferFilter.HISTORY):
                moved = TRANSFER_BATCH
                while moved == TRANSFER_BATCH:  # a partial batch ends it: more may come without end
                    is_far = wanted is TransferFilter.FAR
                    parameters = (store.read_now() + window,) if is_far else ()
                    moved = mover.move_batch(wanted, self.plan.version, *parameters)
                    self._report(ReshardStep.AHEAD, moved)

    def _copy_progress(self, sources: Sequence[Shard], targets: Sequence[Shard]) -> None:
        """Copy the progress of writers that commit each batch once to the new shards."""
        recorded: list[WriterProgress] = []
        for shard in sources:
            with self._open_progress(shard) as progress:
                progress.close_gate()
                recorded.append(progress.read())
        common = functools.reduce(WriterProgress.find_common, recorded)
        for shard in targets:
            with self._open_progress(shard) as progress:
                progress.replace_and_open(common)

    def _switch(self, before: ShardMap, sources: Sequence[Shard], targets: Sequence[Shard]) -> None:
        self._report(ReshardStep.SWITCH)
        others = [shard for shard in before.shards if shard not in sources]
        # The new shards first: a client that hears of them from an old shard finds them ready.
        for store in self._get_stores((*targets, *others, *before.retired, *sources)):
            store.save_map(self.plan)
        until = time.monotonic() + self._leave_seconds
        for store in self._get_stores(sources):
            while store.has_leader() and time.monotonic() < until:
                time.sleep(POLL_SECONDS)  # no signal says that a lease was released
            store.close_lease()
        if self._directory.definition.settings.ordering is TableOrdering.NONE:
            self._open_leases(targets)

    def _drain(self, sources: Sequence[Shard], targets: Sequence[Shard]) -> None:
        self._report(ReshardStep.DRAIN)
        for shard in sources:
            mover, store = RowMover(self._directory, shard), self._directory.get_store(shard)
            last_id = store.read_last_id()
            self._report(ReshardStep.DRAIN, mover.drain(self.plan.version))
            while store.has_rows(TransferFilter.ALL, last_id):
                time.sleep(POLL_SECONDS)  # a transaction has locked a row; no signal says it ended
                self._report(ReshardStep.DRAIN, mover.drain(self.plan.version))
        self._open_leases(targets)

    def _open_progress(self, shard: Shard) -> ProgressTable:
        """Open the recorded progress of a shard's writers; the caller closes it."""
        return ProgressTable(self._directory.get_dialect(shard), self._directory.definition.name)

    def _open_leases(self, targets: Sequence[Shard]) -> None:
        for store in self._get_stores(targets):
            store.open_lease()

    def _get_stores(self, shards: Iterable[Shard]) -> list[ShardStore]:
        return [self._directory.get_store(shard) for shard in shards]

    def _report(self, step: ReshardStep, moved: int = 0) -> None:
        self._moved += moved
        queue = self._directory.definition.name
        log.debug("table.reshard_step", queue=queue, step=step, moved=self._moved)
        self._tell(ReshardProgress(step, self._moved))


def find_plan(directory: ShardDirectory, current: ShardMap) -> ShardMap | None:
    """Return the map that an unfinished reshard leads to."""
    for shard in (*current.shards, *current.retired):
        plan = directory.get_store(shard).read_plan()
        if plan is not None:
            return plan
    return None
