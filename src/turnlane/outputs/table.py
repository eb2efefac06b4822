"""Output ``table``: schedules events in a queue table."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from turnlane.errors import Never, RetryLater
from turnlane.events import Block
from turnlane.outputs.contract import Output, OutputSettings
from turnlane.outputs.identity import lasting_ids
from turnlane.outputs.once import OnceSettings
from turnlane.outputs.pool import Pool
from turnlane.outputs.sql_rows import Rows, rows_of
from turnlane.outputs.table_places import FIRE_AT, NAME, TablePlace
from turnlane.problems import Contradiction
from turnlane.quantities import Duration
from turnlane.table.addresses import TableAddress
from turnlane.table.columns import check_columns, fitted
from turnlane.table.spread import Spread


class TableOutputSettings(OnceSettings, OutputSettings, TableAddress):
    """The settings of a table output."""

    columns: dict[str, str] = Field(
        min_length=1,
        description="The table's columns, each with where it comes from: a column of the events, "
        "a path such as `headers.team` or `value.user.id` (into JSON), or `event_id`. Beside "
        "yours: `fire_at`, `priority`, `event_name`, `event_group`, `after_group`.",
    )
    delay: Duration = Field(
        default=0.0, description="How long after `fire_at` they fire; without that, after now."
    )

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        problems = self.once_problems()
        if problems:
            raise Contradiction(problems)
        return self


class _Tables:
    """The queue's tables in all databases, as one thread uses them."""

    is_open = True

    def __init__(self, settings: TableOutputSettings) -> None:
        with ExitStack() as opened:
            self._spread = opened.enter_context(Spread(settings.databases(), settings.table))
            self.definition = self._spread.definition
            check_columns(settings.columns, self.definition)
            noted = settings.noted_as(settings.table)
            self._places = [
                opened.enter_context(
                    TablePlace(
                        self._spread.dialect(shard),
                        self.definition,
                        noted,
                        _nanoseconds(settings.delay),
                    )
                )
                for shard in self._spread.map.shards
            ]
            self._opened = opened.pop_all()

    def write(self, rows: Rows) -> None:
        """Schedule all rows; a transaction in each database."""
        numbers = self._spread.numbers(rows.columns)
        for at, place in enumerate(self._places):
            mine = np.flatnonzero(numbers == at)
            if len(mine) or rows.places:
                place.write(rows, mine)

    def cancel(self) -> None:
        """Nothing: statements have time limits of their own."""

    def close(self) -> None:
        """Let go of the connections."""
        self._opened.close()


class TableOutput(Output):
    """Schedules each block, in a transaction of each database."""

    settings_type = TableOutputSettings
    settings: TableOutputSettings

    def __init__(self, settings: TableOutputSettings) -> None:
        super().__init__(settings)
        self._tables: Pool[_Tables] = Pool(self._connect)

    def prepare(self, block: Block) -> Any:  # noqa: ANN401
        """The block's events as rows; named by their ids unless the settings name them."""
        rows = rows_of(block, self.settings.columns, places=self.settings.exactly_once)
        ids = lasting_ids(block)
        if NAME in self.settings.columns or ids is None:
            return rows
        return rows._replace(columns=rows.columns.append_column(NAME, ids))

    def send(self, prepared: Any) -> None:  # noqa: ANN401
        rows: Rows = prepared
        with self._tables.borrowed() as tables:
            batch = self._delayed(fitted(rows.columns, tables.definition))
            tables.write(rows._replace(columns=batch))

    def check(self) -> None:
        """Connect, which looks at the table and its columns."""
        with self._tables.borrowed():
            pass

    def close(self) -> None:
        self._tables.close()

    def _connect(self) -> _Tables:
        try:
            return _Tables(self.settings)
        except Never as error:  # of the settings or the table, which a person can change
            raise RetryLater(f"table {self.settings.table!r}: {error}") from error

    def _delayed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with its fire times as late as they shall be; the others are the table's."""
        at = batch.schema.get_field_index(FIRE_AT)
        if at < 0 or not self.settings.delay:
            return batch
        late: Any = pc.add(batch.column(at), _nanoseconds(self.settings.delay))
        return batch.set_column(at, FIRE_AT, late)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
