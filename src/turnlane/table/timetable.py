"""The timetable: has recurring events put into the queue when their time comes.

It looks at the schedules every few seconds, so that one that is made or dropped elsewhere is known,
and otherwise when the next of them is due. What was missed while nobody led comes once.
"""

from __future__ import annotations

import logging
from typing import Final

from turnlane.errors import NameTaken
from turnlane.table.store import Store

log = logging.getLogger(__name__)

SECONDS: Final = 5.0
"""Between two looks."""

PAUSE: Final = 60.0
"""Seconds before a schedule is tried again that could not be carried out."""

MOST: Final = 100
"""Schedules that are carried out in one step: each is a transaction."""


class Timetable:
    """One shard's timetable, called by the manager. Times are passed in, monotonic."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next = float("-inf")
        self._failed: dict[str, float] = {}
        """When to try again."""

    def next_time(self) -> float:
        """When there is something to do."""
        return self._next

    def run_once(self, token: int, now: float, database_now: int) -> bool:
        """Carry out what is due; whether the table may have new events."""
        if now < self._next:
            return False
        self._failed = {name: until for name, until in self._failed.items() if until > now}
        try:
            listed = self._store.schedules.soon(SECONDS)
        except self._store.dialect.error as error:
            self._complain(error)
            self._next = now + PAUSE
            return False
        soon = [each for each in listed if each[0] not in self._failed]
        due = [name for name, next_at in soon if next_at <= database_now]
        for name in due[:MOST]:
            self._fire(token, name, now)
        waits = [(next_at - database_now) / 1e9 for _, next_at in soon[len(due) :]]
        self._next = now + min([0.0 if len(due) > MOST else SECONDS, *waits])
        return bool(due)

    def _fire(self, token: int, name: str, now: float) -> None:
        """One that somebody has spoilt holds up no other."""
        try:
            self._store.fire_schedule(token, name)
        except (ValueError, NameTaken, self._store.dialect.error) as error:
            self._complain(error, f" {name}")
            self._failed[name] = now + PAUSE

    def _complain(self, error: Exception, which: str = "s") -> None:
        log.error("queue %s: schedule%s: %s", self._store.definition.name, which, error)
