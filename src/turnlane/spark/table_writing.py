"""Writing to a queue table with Spark: tasks stage rows, the driver commits them.

A batch is all or nothing in each database, and in each it is committed once.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from turnlane.spark.lasting import lasting
from turnlane.spark.table_options import TableWriteOptions
from turnlane.spark.writers import writer_of
from turnlane.table.columns import fitted, rows_of
from turnlane.table.shards import Shard
from turnlane.table.spread import Spread
from turnlane.table.staging import Staging, job_of


@dataclass
class StagedRows(WriterCommitMessage):
    """The stage that a task has filled, and in which databases: by their addresses."""

    stage: str
    addresses: set[str] = field(default_factory=set)


class TableTask:
    """One task's way of writing."""

    def __init__(self, spread: Spread, job: str, opened: ExitStack) -> None:
        self._spread = spread
        self._opened = opened
        self._staged = StagedRows(f"{job}/{uuid.uuid4().hex}")
        self._stagings: dict[Shard, Staging] = {}
        self._count = 0

    def run(self, batches: Iterator[pa.RecordBatch]) -> StagedRows:
        """Stage everything."""
        for batch in batches:
            if batch.num_rows:
                self._stage(fitted(batch, self._spread.definition))
        return self._staged

    def _stage(self, batch: pa.RecordBatch) -> None:
        for shard, part in self._sorted(batch):
            staging = self._staging(shard)
            staging.add(self._staged.stage, self._count, rows_of(part, staging.dialect))
            self._count += part.num_rows
            self._staged.addresses.add(shard.address)

    def _sorted(self, batch: pa.RecordBatch) -> list[tuple[Shard, pa.RecordBatch]]:
        """The rows by the shard that has their keys."""
        shards, numbers = self._spread.map.shards, self._spread.numbers(batch)
        return [
            (shards[at], batch.take(np.flatnonzero(numbers == at)))
            for at in np.unique(numbers).tolist()
        ]

    def _staging(self, shard: Shard) -> Staging:
        known = self._stagings.get(shard)
        if known is None:
            known = Staging(self._spread.dialect(shard), self._spread.definition)
            self._stagings[shard] = self._opened.enter_context(known)
        return known


class TableWriting:
    """What batch and stream have in common."""

    def __init__(self, options: TableWriteOptions, job: str) -> None:
        self._options = options
        self._job = job

    # Spark's own Arrow writers, too, take batches where their base classes have rows.
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """A task's part: called where the rows are."""
        with lasting("write"), ExitStack() as opened:
            spread = opened.enter_context(self._options.opened())
            return TableTask(spread, self._job, opened).run(iterator)

    def _committed(
        self,
        messages: Sequence[WriterCommitMessage | None],
        epoch: int | None = None,
        writer: str | None = None,
    ) -> None:
        staged = [message for message in messages if isinstance(message, StagedRows)]
        with self._options.opened() as spread:
            addresses = {each for message in staged for each in message.addresses}
            if epoch is not None:  # noted everywhere: shards that are merged have to agree
                addresses |= {shard.address for shard in spread.map.shards}
            for address in sorted(addresses):
                stages = [each.stage for each in staged if address in each.addresses]
                with Staging(spread.dialect(Shard(address)), spread.definition) as staging:
                    staging.commit(self._job, stages, epoch, writer)

    def _aborted(self) -> None:
        with self._options.opened() as spread:
            for shard in spread.map.shards:
                with Staging(spread.dialect(shard), spread.definition) as staging:
                    staging.discard(self._job)


class TableBatchWriter(TableWriting, DataSourceArrowWriter):  # type: ignore[misc]  # write()
    """Schedules events, once."""

    def __init__(self, options: TableWriteOptions) -> None:
        super().__init__(options, job_of(None))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._committed(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        del messages
        self._aborted()


class TableStreamWriter(TableWriting, DataSourceStreamArrowWriter):  # type: ignore[misc]  # write()
    """Schedules events a batch at a time: exactly once if the query has an id."""

    def __init__(self, options: TableWriteOptions) -> None:
        # Tasks, too, find this name: they may not see the checkpoint itself.
        super().__init__(options, job_of(options.writer_id or options.checkpoint_location))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        options = self._options
        writer = writer_of(options.writer_id, options.checkpoint_location)
        self._committed(messages, batchId, writer)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        del messages, batchId
        self._aborted()
