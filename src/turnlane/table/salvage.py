"""Salvage: reading on past rows that cannot be read.

A database may hold what its driver cannot give: a text in SQLite that is none, a date in PostgreSQL
after the last year that Python knows. One such row must not stop a queue: it is found by halving
the page that it is on, and set aside as a dead letter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from turnlane.table.fence import Fence
from turnlane.table.sql.dialect import Dialect, Row, Verdict

log = logging.getLogger(__name__)


class Salvage:
    """One queue's reader of pages on which a row may be unreadable. Every read is fenced."""

    def __init__(
        self, fence: Fence, set_aside: Callable[[int, Sequence[Verdict]], set[int]]
    ) -> None:
        self._fence = fence
        self._set_aside = set_aside
        """Applies verdicts; returns the ids of those that it could apply."""
        self.unreadable = 0
        """Rows that were set aside so far."""

    def read(self, token: int, statement: str, parameters: Row) -> list[Row]:
        """The rows of a page, without those that cannot be read."""
        try:
            return self._fence.session.query(statement, parameters)
        except self._fence.dialect.error as error:
            if not self._fence.dialect.is_unreadable(error):
                raise
        ids = [row[0] for row in self._fence.session.query(self._only_ids(statement), parameters)]
        rows, found = halve(self._fence.dialect, lambda some: self._read(token, some), ids)
        broken = [Verdict(event_id, "dead", 0, 0, wrong) for event_id, wrong in found]
        aside = self._set_aside(token, broken) if broken else set()
        for event_id, wrong in found:
            log.error("queue %s: event %d: %s", self._fence.name, event_id, wrong)
        self.unreadable += len(aside)
        if len(aside) == len(broken):  # the page is whole again, with others in their places
            return self.read(token, statement, parameters)
        place = {event_id: at for at, event_id in enumerate(ids)}
        return sorted(rows, key=lambda row: place[row[0]])

    def _read(self, token: int, ids: Sequence[int]) -> list[Row]:
        condition, parameters = self._fence.dialect.ids(ids)
        statement = self._fence.sql.read_standing.where(condition)
        return self._fence.session.query(statement, (*parameters, self._fence.name, token))

    def _only_ids(self, statement: str) -> str:
        """The same page, of which nothing is read that could not be."""
        return statement.replace(f"SELECT {self._fence.sql.columns} ", "SELECT event_id ", 1)


def halve(
    dialect: Dialect, read: Callable[[Sequence[int]], list[Row]], ids: Sequence[int]
) -> tuple[list[Row], list[tuple[int, str]]]:
    """The rows of these ids that can be read; the other ids, each with what is wrong."""
    try:
        return read(ids), []
    except dialect.error as error:
        if not dialect.is_unreadable(error):
            raise
        if len(ids) == 1:
            return [], [(ids[0], f"cannot be read: {error}")]
    middle = len(ids) // 2
    halves = [halve(dialect, read, half) for half in (ids[:middle], ids[middle:])]
    return halves[0][0] + halves[1][0], halves[0][1] + halves[1][1]
