"""Sites: the databases of a sharded queue, as one process reaches them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import quote, urlsplit, urlunsplit

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from turnlane.errors import ConfigError, DatabaseDown
from turnlane.runtime import Closing, revealed
from turnlane.table.catalog import QueueCatalog
from turnlane.table.definition import Definition
from turnlane.table.notes import ProgressTable
from turnlane.table.shard_store import ShardStore
from turnlane.table.shards import Shard, ShardMap, ShardSpec, address_of, keyspace_id
from turnlane.table.sql.dialect import Dialect
from turnlane.table.url import EXAMPLES, dialect_of
from turnlane.validation import Contradiction, Problem

log = logging.getLogger(__name__)


class ShardDirectory(Closing):
    """Stores by address, opened when they are needed. Safe to use from any thread.

    ``urls`` are addresses with their passwords: maps are kept without.
    """

    def __init__(self, definition: Definition, urls: Iterable[str]) -> None:
        self.definition = definition
        self._urls = {address_of(url): url for url in urls}
        self._stores: dict[str, ShardStore] = {}
        self._lock = threading.Lock()

    def learn(self, urls: Iterable[str]) -> None:
        """Take note of more addresses with their passwords."""
        self._urls.update({address_of(url): url for url in urls})

    def dialect(self, shard: Shard) -> Dialect:
        """How a shard's database is reached."""
        return dialect_of(self._urls.get(shard.address, shard.url))

    def store(self, shard: Shard) -> ShardStore:
        """What a shard's database keeps."""
        with self._lock:
            store = self._stores.get(shard.address)
            if store is None:
                store = self._stores[shard.address] = ShardStore(
                    self.dialect(shard), self.definition
                )
            return store

    def notes(self, shard: Shard) -> ProgressTable:
        """What is noted in a shard's database; the caller closes it."""
        return ProgressTable(self.dialect(shard), self.definition.name)

    def create(self, shard: Shard) -> None:
        """Make the queue in a shard's database, unless it is there."""
        with QueueCatalog(self.dialect(shard)) as catalog:
            catalog.create(self.definition, if_not_exists=True, first_id=shard.first_id)

    def number(self, shard: Shard) -> None:
        """Have events get ids of the shard's own, in a table that others may have made."""
        with QueueCatalog(self.dialect(shard)) as catalog:
            catalog.number_from(self.definition.name, shard.first_id)

    def newest(self, known: ShardMap) -> ShardMap:
        """The newest map that any database knows; those that do not answer are passed over.

        Raises what the first of them says, usually ``DatabaseDown``, if none answers.
        """
        newest, asked = known, set[str]()
        failures: list[Exception] = []
        while waiting := [
            shard for shard in (*newest.shards, *newest.retired) if shard.address not in asked
        ]:
            for shard in waiting:
                asked.add(shard.address)
                store = self.store(shard)
                try:
                    found = store.newest_map()
                except (DatabaseDown, store.dialect.error) as error:
                    log.debug("shard %s was not asked: %s", shard, error)
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


# ── spread ──
# Where a queue's tables lie: in one database, or in several by key. For reading and writing.


class ShardRouter(Closing):
    """A queue's tables, as they are spread at this moment.

    Raises ``NoSuchQueue``, ``DatabaseDown``, and ``ConfigError`` if shards do not fit.
    """

    def __init__(self, shards: Iterable[Shard | ShardSpec], name: str) -> None:
        self.map = ShardMap.of(shards)
        with QueueCatalog(dialect_of(self.map.shards[0].url)) as catalog:
            self.definition = catalog.definition(name)
        self._sites = ShardDirectory(self.definition, [shard.url for shard in self.map.shards])
        if len(self.map.shards) > 1:
            if self.definition.shard_by is None:
                raise ConfigError("shards", f"{name!r} has no SHARD BY column to choose one by")
            self.map = self._sites.newest(self.map)
        elif self.definition.shard_by is not None:
            self.map = self._followed()

    def _followed(self) -> ShardMap:
        """The newest map, if the one database that is named was resharded."""
        store = self._sites.store(self.map.shards[0])
        try:
            found = store.kept_map()
        except store.dialect.error:
            return self.map  # nobody has kept a map there: it has no such table
        return self.map if found is None else self._sites.newest(found)

    def dialect(self, shard: Shard) -> Dialect:
        """How a shard's database is reached."""
        return self._sites.dialect(shard)

    def numbers(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """For each row, the number of the shard that has its key."""
        shards, column = self.map.shards, self.definition.shard_by
        if len(shards) == 1 or column is None:
            return np.zeros(batch.num_rows, dtype=np.int64)
        there = column in batch.schema.names
        keys = batch.column(column).to_pylist() if there else [None] * batch.num_rows
        numbers = {shard: at for at, shard in enumerate(shards)}
        found = [numbers[self.map.shard_of(keyspace_id(key))] for key in keys]
        return np.array(found, dtype=np.int64)

    def close(self) -> None:
        self._sites.close()


def with_password(url: str, password: str | None) -> str:
    """An address with a password in it."""
    parts = urlsplit(url)
    if password is None or parts.scheme == "sqlite":
        return url
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        raise ConfigError("url", "names no user that the password is for: write user@host")
    name = user.partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{name}:{quote(password, safe='')}@{host}"))


# ── addresses ──
# Where a queue table is, as a configuration says it: a database, or several with key ranges.

_SCHEMES = {"sqlite", "postgresql", "postgres", "mysql", "mariadb"}


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"is not an address such as {EXAMPLES}")
    if parts.password:
        raise ValueError("holds a password; name it with password_env or password_file")
    return url


DatabaseUrl = Annotated[str, AfterValidator(_checked)]


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
    def _one_place(self) -> Self:
        if (self.url is None) == (not self.shards):
            raise Contradiction([Problem("url", "give either url or shards")])
        if self.shards:
            try:
                ShardMap.of((each.url, each.range) for each in self.shards)
            except ConfigError as error:
                raise Contradiction([Problem("shards", str(error))]) from None
        return self

    def databases(self) -> list[Shard]:
        """The databases with their passwords. Raises ``RetryLater`` while those are not there."""
        password = revealed("password", self.password_env, self.password_file)
        given = [(each.url, each.range) for each in self.shards] or [(self.url or "", "-")]
        return [Shard.of((with_password(url, password), range_)) for url, range_ in given]
