"""A watch: hears of new rows on a connection of its own, so that nobody has to ask for them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Final

from turnlane.retry import doubled
from turnlane.runtime import Closing
from turnlane.table.sql.dialect import Connection, Dialect

log = logging.getLogger(__name__)

RETRIES: Final = (1.0, 30.0)
"""Seconds before the first other connection is made, and the longest between two."""


class Watch(Closing):
    """A thread that listens until it is closed. Meanwhile a manager that hears nothing polls."""

    def __init__(
        self, dialect: Dialect, hear: Callable[[Connection, threading.Event], None]
    ) -> None:
        self._dialect = dialect
        self._hear = hear
        """Listens on a connection until the signal is set, or the connection breaks."""
        self._over = threading.Event()
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="turnlane-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._listen()
            except (self._dialect.error, OSError) as error:
                self._failures += 1
                if self._failures == 1:
                    log.warning("new rows are found by polling until it listens again: %s", error)
                self._over.wait(doubled(*RETRIES, self._failures))

    def _listen(self) -> None:
        with contextlib.closing(self._dialect.connect()) as connection:
            if self._failures:
                log.info("it listens for new rows again")
            self._failures = 0
            self._hear(connection, self._over)
