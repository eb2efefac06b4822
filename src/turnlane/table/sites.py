"""Sites: the databases of a sharded queue, as one process reaches them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from turnlane.closing import Closing
from turnlane.errors import DatabaseDown
from turnlane.table.catalog import Catalog
from turnlane.table.definition import Definition
from turnlane.table.notes import Notes
from turnlane.table.shard_store import ShardStore
from turnlane.table.shards import Shard, ShardMap, address_of
from turnlane.table.sql.dialect import Dialect
from turnlane.table.url import dialect_of

log = logging.getLogger(__name__)


class Sites(Closing):
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

    def notes(self, shard: Shard) -> Notes:
        """What is noted in a shard's database; the caller closes it."""
        return Notes(self.dialect(shard), self.definition.name)

    def create(self, shard: Shard) -> None:
        """Make the queue in a shard's database, unless it is there."""
        with Catalog(self.dialect(shard)) as catalog:
            catalog.create(self.definition, if_not_exists=True, first_id=shard.first_id)

    def number(self, shard: Shard) -> None:
        """Have events get ids of the shard's own, in a table that others may have made."""
        with Catalog(self.dialect(shard)) as catalog:
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
