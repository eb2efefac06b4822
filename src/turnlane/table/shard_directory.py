"""The databases of a queue: how a process reaches its shards, and how settings name them.

:class:`ShardDirectory` opens the stores of shards when they are needed. :class:`ShardRouter` finds
the table of each row, for readers and writers beside the managers. :class:`TableAddress` are the
settings of inputs and outputs that say where a queue table is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from turnlane.databases import (
    URL_EXAMPLES,
    Dialect,
    add_password,
    check_url_setting,
    get_dialect_name,
    remove_password,
)
from turnlane.errors import ConfigError, DatabaseDown
from turnlane.logs import get_logger
from turnlane.runtime import Closeable, read_secret
from turnlane.table.catalog import QueueCatalog
from turnlane.table.definition import Definition
from turnlane.table.queue_sql import load_queue_dialect
from turnlane.table.shard_store import ShardStore
from turnlane.table.shards import Shard, ShardMap, ShardSpec, keyspace_id
from turnlane.validation import ConfigIssue, ContradictorySettings

log = get_logger(__name__)


class ShardDirectory(Closeable):
    """Stores by address, opened when they are needed. Thread-safe.

    ``urls`` have their passwords: databases keep maps without passwords.
    """

    def __init__(self, definition: Definition, urls: Iterable[str]) -> None:
        self.definition = definition
        self._urls = {remove_password(url): url for url in urls}
        self._stores: dict[str, ShardStore] = {}
        self._lock = threading.Lock()

    def add_urls(self, urls: Iterable[str]) -> None:
        """Add urls with their passwords."""
        self._urls.update({remove_password(url): url for url in urls})

    def get_dialect(self, shard: Shard) -> Dialect:
        """Return the dialect of a shard's database."""
        return load_queue_dialect(self._urls.get(shard.address, shard.url))

    def get_store(self, shard: Shard) -> ShardStore:
        """Return the store of a shard's database."""
        with self._lock:
            store = self._stores.get(shard.address)
            if store is None:
                store = ShardStore(self.get_dialect(shard), self.definition)
                self._stores[shard.address] = store
            return store

    def find_newest_map(self, known: ShardMap) -> ShardMap:
        """Return the newest map of all databases; skips databases that do not answer.

        If none answers, raises the error of the first one, usually ``DatabaseDown``.
        """
        newest, asked = known, set[str]()
        failures: list[Exception] = []
        while waiting := [
            shard for shard in (*newest.shards, *newest.retired) if shard.address not in asked
        ]:
            for shard in waiting:
                asked.add(shard.address)
                store = self.get_store(shard)
                try:
                    found = store.read_newest_map()
                except (DatabaseDown, store.dialect.error) as error:
                    log.debug("table.shard_skipped", shard=shard, error=error)
                    failures.append(error)
                    continue
                if found is not None and found.version > newest.version:
                    newest = found
        if len(failures) == len(asked):
            raise failures[0]
        return newest

    def close(self) -> None:
        with self._lock:
            stores, self._stores = self._stores, {}
        for store in stores.values():
            store.close()


class ShardRouter(Closeable):
    """The tables of a queue in one or several databases, by the newest map.

    Raises ``NoSuchQueue``, ``DatabaseDown``, and ``ConfigError`` if the shards do not fit.
    """

    def __init__(self, shards: Iterable[Shard | ShardSpec], name: str) -> None:
        self.map = ShardMap.from_shards(shards)
        with QueueCatalog(load_queue_dialect(self.map.shards[0].url)) as catalog:
            self.definition = catalog.get_definition(name)
        self._directory = ShardDirectory(self.definition, [each.url for each in self.map.shards])
        if len(self.map.shards) > 1:
            if self.definition.shard_by is None:
                raise ConfigError("shards", f"{name!r} has no SHARD BY column to choose one by")
            self.map = self._directory.find_newest_map(self.map)
        elif self.definition.shard_by is not None:
            # The one database that is named may have been resharded.
            store = self._directory.get_store(self.map.shards[0])
            found = None
            with contextlib.suppress(store.dialect.error):  # no table of maps: it never was
                found = store.read_saved_map()
            if found is not None:
                self.map = self._directory.find_newest_map(found)

    def get_dialect(self, shard: Shard) -> Dialect:
        """Return the dialect of a shard's database."""
        return self._directory.get_dialect(shard)

    def find_shard_indexes(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Return for each row the index of the shard that has its key."""
        shards, column = self.map.shards, self.definition.shard_by
        if len(shards) == 1 or column is None:
            return np.zeros(batch.num_rows, dtype=np.int64)
        has_key = column in batch.schema.names
        keys = batch.column(column).to_pylist() if has_key else [None] * batch.num_rows
        indexes = {shard: at for at, shard in enumerate(shards)}
        found = [indexes[self.map.find_shard(keyspace_id(key))] for key in keys]
        return np.array(found, dtype=np.int64)

    def close(self) -> None:
        self._directory.close()


# ── settings ─────────────────────────────────────────────────────────────────────────────────────


def _check_url(url: str) -> str:
    if get_dialect_name(url) is None:
        raise ValueError(f"is not an address such as {URL_EXAMPLES}")
    return check_url_setting(url)


DatabaseUrl = Annotated[str, AfterValidator(_check_url)]


class ShardAddress(BaseModel):
    """A database with a part of the keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: DatabaseUrl = Field(description="The database, without a password.")
    range: str = Field(description="Its key range, such as `-80`, `40-80` or `80-`.")


class TableAddress(BaseModel):
    """The settings that say where a queue table is."""

    url: DatabaseUrl | None = Field(
        default=None,
        description="The database, without a password.",
        examples=["postgresql://user@host/db", "mysql://user@host/db", "sqlite:///file.db"],
    )
    shards: tuple[ShardAddress, ...] = Field(
        default=(), description="Instead of `url`: the databases of a queue that has several."
    )
    password_env: str | None = Field(
        default=None, description="The environment variable that has the password."
    )
    password_file: Path | None = Field(default=None, description="The file that has the password.")
    table: str = Field(min_length=1, description="The queue table, which has to be there.")

    @model_validator(mode="after")
    def _check_databases(self) -> Self:
        if (self.url is None) == (not self.shards):
            raise ContradictorySettings([ConfigIssue("url", "give either url or shards")])
        if self.shards:
            try:
                ShardMap.from_shards((each.url, each.range) for each in self.shards)
            except ConfigError as error:
                raise ContradictorySettings([ConfigIssue("shards", str(error))]) from None
        return self

    def list_databases(self) -> list[Shard]:
        """Return the databases with their passwords. Raises ``RetryLater`` if a secret is missing.

        A queue in one database has one shard with all keys.
        """
        password = read_secret("password", self.password_env, self.password_file)
        specs = [(each.url, each.range) for each in self.shards] or [(self.url or "", "-")]
        return [Shard.from_spec((add_password(url, password), range_)) for url, range_ in specs]
