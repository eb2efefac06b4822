"""The vacuum: gives the room of rows that are gone to new ones, where the database does not.

PostgreSQL keeps deleted rows until a vacuum. Its own looks at a table once a minute and takes its
time: by then a queue that is busy has grown to a gigabyte, of which every new row gets a page that
nobody has in memory. Done after every few hundred thousand events, it finds little, all of it in
memory, and the table stays as small as what waits in it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

from turnlane.clock import Clock
from turnlane.closing import Closing
from turnlane.errors import DatabaseDown, DatabaseReadOnly
from turnlane.table.definition import Definition
from turnlane.table.sql.dialect import Dialect
from turnlane.table.sql.session import Session

log = logging.getLogger(__name__)

ENOUGH: Final = 200_000
"""Events that were settled since the last one; for fewer, the database's own is good enough."""

REST: Final = 9
"""So many times as long as one took nothing is done: it goes through the whole table, and finds
nothing to give back while somebody has a transaction open."""


class Vacuum(Closing):
    """One table's vacuum, on a thread and a connection of its own. Called by the manager."""

    def __init__(self, dialect: Dialect, definition: Definition, clock: Clock) -> None:
        self._statements: Sequence[str] = dialect.vacuum(definition)
        self._session = Session(dialect)
        self._clock = clock
        self._name = definition.name
        self._settled = 0
        self._not_before = float("-inf")
        self._closing = False
        self._thread: threading.Thread | None = None

    def run_once(self, settled: int) -> bool:
        """Begin if enough events were settled, of so many in all; whether it did. Does not wait."""
        if (
            not self._statements
            or settled - self._settled < ENOUGH
            or (self._thread is not None and self._thread.is_alive())
            or self._clock.monotonic() < self._not_before
        ):
            return False
        self._settled = settled
        self._thread = threading.Thread(
            target=self._run, name=f"turnlane-vacuum-{self._name}", daemon=True
        )
        self._thread.start()
        return True

    def close(self) -> None:
        """Have one that is under way end at once."""
        while self._thread is not None and self._thread.is_alive():
            self._closing = True
            self._session.cancel()  # again: it may not have begun
            self._thread.join(0.1)
        self._session.close()

    def _run(self) -> None:
        started = self._clock.monotonic()
        try:
            for statement in self._statements:
                self._session.change(statement)
        except (DatabaseDown, DatabaseReadOnly, self._session.dialect.error) as error:
            if not (self._closing and isinstance(error, DatabaseDown)):
                # The database's own comes in any case.
                log.warning("queue %s: no vacuum: %s", self._name, error)
        ended = self._clock.monotonic()
        self._not_before = ended + REST * (ended - started)
