"""Notes of what was delivered, kept by one connection in the transactions that deliver it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

import numpy as np

from turnlane.errors import RetryLater
from turnlane.outputs.sql_delivered import TABLE, Delivered, not_in
from turnlane.outputs.sql_rows import Offsets, Stream

log = logging.getLogger(__name__)

NONE: Final[Offsets] = np.empty(0, dtype=np.int64)


class Notes:
    """Which rows are new, of one target. Used by one thread at a time."""

    def __init__(
        self,
        delivered: Delivered,
        transaction: Callable[[], AbstractContextManager[None]],
        lock_suffix: str,
    ) -> None:
        self._delivered = delivered
        self._transaction = transaction
        self._lock_suffix = lock_suffix
        self._made = False
        self._ready: set[Stream] = set()

    def get_ready(self, streams: Iterable[Stream]) -> None:
        """Have the table, and a row in it to lock for each stream; not within a transaction."""
        delivered = self._delivered
        if not self._made:
            self._ensure(delivered.is_there, delivered.create)
            self._made = True
        for stream in set(streams) - self._ready:
            is_ready = partial(delivered.is_ready, stream)
            self._ensure(is_ready, partial(delivered.make_ready, stream))
            self._ready.add(stream)

    def fresh(self, places: Mapping[Stream, tuple[Offsets, Offsets]]) -> Offsets:
        """The numbers of rows that were not delivered, in order; from now on they are noted."""
        delivered = self._delivered
        wanted = [NONE]
        for stream, (numbers, offsets) in sorted(places.items()):
            if not delivered.lock(stream, self._lock_suffix):
                self._ready.clear()
                raise RetryLater(f"somebody has emptied {TABLE}: once more, from the beginning")
            known = delivered.touching(stream, offsets)
            wanted.append(numbers[not_in(offsets, known)])
            delivered.note(stream, offsets, known)
        chosen: Offsets = np.sort(np.concatenate(wanted))
        return chosen

    def _ensure(self, is_there: Callable[[], bool], make: Callable[[], None]) -> None:
        """Make something, unless it is there, or another makes it at the same time."""
        if self._holds(is_there):
            return
        try:
            with self._transaction():
                make()
        except Exception:
            if not self._holds(is_there):
                raise

    def _holds(self, is_there: Callable[[], bool]) -> bool:
        try:
            with self._transaction():
                return is_there()
        except Exception as error:  # noqa: BLE001 - making it will tell, and fail if it has to
            log.debug("%s: %s", TABLE, error)
            return False
