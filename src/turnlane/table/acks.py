"""Acks, as they are stored: the rows of settled events are deleted, or kept as acked.

A user's transaction may hold a row for minutes, to ack it or for whatever reason. Nobody waits for
that: such a row is *held*, and its ack has to be stored later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from turnlane.table.fence import Fence, batches
from turnlane.table.sql.dialect import Row
from turnlane.table.sql.session import Execute, RowsLocked


class Stored(NamedTuple):
    """What became of acks."""

    held: set[int]
    """Events that somebody else is about to change: their acks are not stored."""
    released: list[int]
    """Events that waited for a group which is done now."""


class Acks:
    """One queue's acks. Every call is fenced."""

    def __init__(self, fence: Fence, *, keep: bool) -> None:
        self._fence = fence
        self._settle = fence.sql.ack_keep if keep else fence.sql.ack_delete
        self._settle_in_one = fence.sql.fenced_ack_keep if keep else fence.sql.fenced_ack_delete

    def store(
        self, token: int, ids: Sequence[int], groups: Iterable[str] = (), *, wary: bool = False
    ) -> Stored:
        """Settle events, and let go of what waited for the last of their groups.

        ``wary``: their rows are probably held.
        """
        groups = tuple(groups)
        in_one = self._fence.dialect.fenced_in_one and not groups and not wary
        if in_one and self._in_one(token, ids):
            return Stored(set(), [])

        def work(execute: Execute) -> tuple[set[int], list[int]]:
            left = {each for batch in batches(ids) for each in self._free(execute, batch)}
            return left, self.release(execute, groups)

        left, released = self._fence.transact(token, work)
        there = self._fence.query(self._fence.sql.unsettled, list(left)) if left else []
        return Stored({row[0] for row in there}, released)

    def fired(self, token: int, ids: Sequence[int]) -> list[Row]:
        """Those of the events that were fired before and are not settled, with their groups."""
        sql = self._fence.sql

        def work(execute: Execute) -> list[Row]:
            return [
                row
                for batch in batches(ids)
                for row in self._fence.run(execute, sql.fired_before, batch).rows()
            ]

        return self._fence.transact(token, work)

    def release(self, execute: Execute, groups: Iterable[str]) -> list[int]:
        """Let go of the events that waited for groups, as far as those are done; their ids."""
        sql = self._fence.sql
        released: list[int] = []
        for group in groups:
            if execute(sql.unsettled_member, (group,)).rows():
                continue
            waiting = [row[0] for row in execute(sql.lock_waiting, (group,)).rows()]
            if waiting:
                self._fence.run(execute, sql.let_go, waiting)
            released += waiting
        return released

    def _free(self, execute: Execute, ids: Sequence[int]) -> set[int]:
        """Settle what nobody holds; returns the others, which may also be gone."""
        if not self._fence.dialect.lock_free:  # one writer at a time: nobody holds anything
            self._fence.run(execute, self._settle, ids)
            return set()
        locked = self._fence.run(execute, self._fence.sql.lock_unsettled, ids).rows()
        free = [row[0] for row in locked]
        if free:
            self._fence.run(execute, self._settle, free)
        return set(ids).difference(free)

    def _in_one(self, token: int, ids: Sequence[int]) -> bool:
        """Settle events by statements that are fenced themselves: a round trip to a batch.

        False if one met a row that is held: then whatever is left is done otherwise.
        """
        for batch in batches(ids):
            condition, parameters = self._fence.dialect.ids(batch)
            statement = self._settle_in_one.where(condition)
            try:
                rows = self._fence.session.write(
                    statement, (self._fence.name, token, *parameters), patient=False
                )
            except RowsLocked:
                return False
            if not rows:
                raise self._fence.lost()
        return True
