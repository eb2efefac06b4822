"""Where a queue's tables lie: in one database, or in several by key. For reading and writing."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote, urlsplit, urlunsplit

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turnlane.closing import Closing
from turnlane.errors import ConfigError
from turnlane.table.catalog import Catalog
from turnlane.table.keyspace import keyspace_id
from turnlane.table.shards import Given, Shard, ShardMap
from turnlane.table.sites import Sites
from turnlane.table.sql.dialect import Dialect
from turnlane.table.url import dialect_of


class Spread(Closing):
    """A queue's tables, as they are spread at this moment.

    Raises ``NoSuchQueue``, ``DatabaseDown``, and ``ConfigError`` if shards do not fit.
    """

    def __init__(self, shards: Iterable[Shard | Given], name: str) -> None:
        self.map = ShardMap.of(shards)
        with Catalog(dialect_of(self.map.shards[0].url)) as catalog:
            self.definition = catalog.definition(name)
        self._sites = Sites(self.definition, [shard.url for shard in self.map.shards])
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
