"""The queue tables that a node serves: it runs their managers, and its clients receive."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from turnlane.closing import Closing
from turnlane.errors import DatabaseDown, NoSuchQueue, NoSuchStream, TurnlaneError
from turnlane.node.table_settings import ServedTableSettings
from turnlane.node.table_stream import TableStream
from turnlane.table.keyspace import KeyRange
from turnlane.table.sharded import ShardedQueue, connect_shards

log = logging.getLogger(__name__)

RETRY: Final = 1.0
"""Seconds before a database that did not answer, or had no such queue, is tried again."""


class ServedTable(Closing):
    """One queue table. Its databases may be away when the node starts."""

    def __init__(self, name: str, settings: ServedTableSettings) -> None:
        self.name = name
        self._shards = settings.map()
        self._queue: ShardedQueue | None = None
        self._trouble: str = "it was not reached yet"
        self._over = threading.Event()
        self._opener = threading.Thread(
            target=self._open, name=f"turnlane-table-{name}", daemon=True
        )
        self._opener.start()

    @property
    def is_open(self) -> bool:
        """Whether its databases were reached."""
        return self._queue is not None

    @property
    def queue(self) -> ShardedQueue:
        """The queue. Raises ``DatabaseDown`` until its databases were reached."""
        if self._queue is None:
            raise DatabaseDown(f"queue table {self.name!r}: {self._trouble}", after=RETRY)
        return self._queue

    def close(self) -> None:
        self._over.set()
        self._opener.join()

    def _open(self) -> None:
        """Open it and keep it until the end."""
        # Drivers raise what they like for an address that leads nowhere.
        while not self._over.is_set():
            try:
                self._serve()
            except Exception as error:  # noqa: BLE001 - said, and tried again
                self._trouble = str(error)
                level = logging.WARNING if isinstance(error, TurnlaneError) else logging.ERROR
                log.log(level, "queue table %s: %s", self.name, error)
                self._over.wait(RETRY)

    def _serve(self) -> None:
        with connect_shards(self._shards.shards) as databases:
            queue = databases.queue(self.name)
            queue.manage()
            self._queue = queue
            self._over.wait()


class Tables(Closing):
    """All queue tables of a node, and the streams of their receivers. Safe from any thread."""

    def __init__(self, settings: Mapping[str, ServedTableSettings] | None = None) -> None:
        self._tables = {name: ServedTable(name, each) for name, each in (settings or {}).items()}
        self._streams: dict[str, TableStream] = {}
        self._lock = threading.Lock()

    def all(self) -> dict[str, ServedTable]:
        """The tables by name."""
        return dict(self._tables)

    def table(self, name: str) -> ServedTable:
        """The table of this name. Raises ``NoSuchQueue``."""
        found = self._tables.get(name)
        if found is None:
            known = ", ".join(sorted(self._tables)) or "none"
            raise NoSuchQueue(f"there is no queue table {name!r} here; there are: {known}")
        return found

    @contextmanager
    def stream(self, name: str, key_range: KeyRange, prefetch: int) -> Iterator[TableStream]:
        """A receiver elsewhere, for as long as it is there."""
        queue = self.table(name).queue
        with TableStream(name, queue.receive(str(key_range), prefetch), queue.definition) as made:
            with self._lock:
                self._streams[made.id] = made
            try:
                yield made
            finally:
                with self._lock:
                    del self._streams[made.id]

    def stream_of(self, table: str, stream_id: str) -> TableStream:
        """A stream by its id. Raises ``NoSuchStream``."""
        with self._lock:
            found = self._streams.get(stream_id)
        if found is None or found.table != table:
            raise NoSuchStream(
                f"stream {stream_id[:80]!r} is over: what was not acked fires elsewhere"
            )
        return found

    @property
    def streams(self) -> int:
        """How many receivers elsewhere there are."""
        return len(self._streams)

    def close(self) -> None:
        """Stop the managers; what is out fires again elsewhere."""
        for table in self._tables.values():
            table.close()
