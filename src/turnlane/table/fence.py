"""The fence: what a manager writes is written only while its token is the one of the lease row.

The transaction first holds the lease row in place and sees that it still carries the token. A
takeover waits for such a transaction, and one that comes after a takeover fails with ``LeadLost``
and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from turnlane.errors import LeadLost
from turnlane.table.definition import Definition
from turnlane.table.sql.dialect import Dialect, Row
from turnlane.table.sql.session import Execute, Executed, Session
from turnlane.table.statements import OfSome, Statements

T = TypeVar("T")

BATCH: Final = 1_000
"""Events to a statement. Larger ones hold locks for longer and are no faster."""


class Fence:
    """One queue's fence, and the session behind it."""

    def __init__(self, dialect: Dialect, definition: Definition) -> None:
        self.dialect = dialect
        self.session = Session(dialect)
        self.sql = Statements.of(dialect, definition)
        self.name = definition.name

    def transact(self, token: int, work: Callable[[Execute], T]) -> T:
        """Run ``work`` as one transaction, behind the fence."""

        def fenced(execute: Execute) -> T:
            if not execute(self.sql.fence, (self.name, token)).rows():
                raise self.lost()
            return work(execute)

        return self.session.transact(fenced)

    def run(self, execute: Execute, statement: OfSome, ids: Sequence[int]) -> Executed:
        """Run a statement about events by their ids, within a transaction."""
        condition, parameters = self.dialect.ids(ids)
        return execute(statement.where(condition), parameters)

    def query(self, statement: OfSome, ids: Sequence[int]) -> list[Row]:
        """The rows of a statement about events by their ids, as they are; there is no fence."""
        found: list[Row] = []
        for batch in batches(ids):
            condition, parameters = self.dialect.ids(batch)
            found += self.session.query(statement.where(condition), parameters)
        return found

    def lost(self) -> LeadLost:
        """What there is to say to who stands before the fence."""
        return LeadLost(f"another manager leads {self.name!r}")


def batches(items: Sequence[T]) -> Iterable[Sequence[T]]:
    """The items, so many at a time as a statement takes."""
    return (items[at : at + BATCH] for at in range(0, len(items), BATCH))
