"""The options of ``format("turnlane_table")``, checked before anything is read or written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from turnlane.errors import ConfigError
from turnlane.problems import Contradiction, Problem
from turnlane.secret import revealed
from turnlane.spark.options import Options
from turnlane.table.shards import Shard, ShardMap
from turnlane.table.spread import Spread, with_password
from turnlane.table.sql.dialect import Dialect
from turnlane.table.url import dialect_of


def _shards(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f'is JSON such as {{"-80": "postgresql://…"}}: {error}') from None


class TableOptions(Options):
    """What reading and writing a queue table have in common."""

    table: str = Field(description="The queue table; `load()` and `save()` name it, too.")
    url: str | None = Field(
        default_factory=lambda: os.environ.get("TURNLANE_TABLE_URL"),
        description="The database, such as `postgresql://user@host/db`. Default: the environment "
        "variable `TURNLANE_TABLE_URL`.",
    )
    shards: Annotated[dict[str, str], BeforeValidator(_shards)] = Field(
        default_factory=dict,
        description="Instead of `url`: the databases by key range, as in "
        '`{"-80": "postgresql://…", "80-": "postgresql://…"}`.',
    )
    password: str | None = Field(
        default=None, repr=False, description="The password, if the addresses have none."
    )
    password_env: str | None = Field(
        default=None, description="The environment variable that has it."
    )
    password_file: Path | None = Field(default=None, description="The file that has it.")

    @model_validator(mode="after")
    def _databases_given(self) -> Self:
        if not self.url and not self.shards:
            raise Contradiction([Problem("url", "is required, as in sqlite:////data/queue.db")])
        if self.shards:
            try:
                ShardMap.of((url, key_range) for key_range, url in self.shards.items())
            except ConfigError as error:
                raise Contradiction([Problem("shards", str(error))]) from None
        return self

    def opened(self) -> Spread:
        """The queue's tables. Raises ``NoSuchQueue``, ``DatabaseDown``, ``ConfigError``."""
        return Spread(self._given(), self.table)

    def dialect(self, address: str) -> Dialect:
        """How a shard's database is reached, whose address has no password."""
        known = {shard.address: shard.url for shard in self._given()}
        return dialect_of(known.get(address) or self._with_password(address))

    def _given(self) -> list[Shard]:
        given = self.shards or {"-": self.url or ""}
        return [Shard.of((self._with_password(url), key_range)) for key_range, url in given.items()]

    def _with_password(self, url: str) -> str:
        password = revealed("password", self.password_env, self.password_file) or self.password
        return with_password(url, password)


class TableReadOptions(TableOptions):
    """The options of reading."""

    num_partitions: int = Field(
        default=1, ge=1, description="Partitions of each shard, by key range."
    )
    rows_per_batch: int = Field(
        default=10_000, ge=1, description="Rows of an Arrow batch given to Spark."
    )
    push_filters: bool = Field(
        default=False,
        description="Let filters on `state`, `fire_at`, `event_id`, `event_name` and the key "
        "decide what the database reads. Needs Spark's `spark.sql.python.filterPushdown.enabled`.",
    )


class TableWriteOptions(TableOptions):
    """The options of writing."""

    writer_id: str | None = Field(
        default=None,
        description="Makes a streaming write exactly once: the batch that was committed last under "
        "this id is not written again. Default: by the query to which `checkpointLocation` "
        "belongs.",
    )
    checkpoint_location: str | None = Field(default=None, description="Spark's own.")
    query_name: str | None = Field(default=None, description="Spark's own.")
