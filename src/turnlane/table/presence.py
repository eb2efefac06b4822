"""Presence: whether the queue that a manager is for is there at all."""

from __future__ import annotations

import logging
from typing import Final

from turnlane.errors import RetryLater
from turnlane.table.store import Store

log = logging.getLogger(__name__)

PAUSE: Final = 5.0
"""Seconds between looks for a queue that was dropped."""


class Presence:
    """Says once that a queue is gone, and once that it is back. Used by the manager's thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._told: str | None = None

    def why_gone(self) -> str | None:
        """That the queue was dropped, in words, if the database says so."""
        try:
            defined = self._store.defined()
        except RetryLater as error:
            log.debug("nobody can say whether the queue is there: %s", error)
            return None
        except self._store.dialect.error as error:  # not even the list of queues is there
            return f"no queue can be found: {error}"
        return None if defined is not None else str(self._store.missing())

    def miss(self, why: str) -> None:
        """It is not there."""
        if self._told != why:
            self._told = why
            log.warning("%s; nothing fires until it is there again", why)

    def is_same(self) -> bool:
        """It is there, or again; whether it is the one that was there before."""
        if self._told is None:
            return True
        definition = self._store.definition
        if self._store.defined() != str(definition):
            self.miss(f"the queue {definition.name!r} was made anew, otherwise: open it again")
            return False
        self._told = None
        log.info("the queue %r is there again", definition.name)
        return True
