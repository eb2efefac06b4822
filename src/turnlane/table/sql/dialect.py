"""What a database is to a queue table: how it is reached, what it calls things, how it fails."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, NamedTuple

from turnlane.runtime import Closing
from turnlane.table.definition import TYPES, Column, Definition, quote_identifier

Connection = Any
"""A DB-API connection: the drivers share methods, not types."""

Row = tuple[Any, ...]

MOST_ATTEMPTS: Final = 2**31 - 1
"""What the column holds; there counting ends."""

STATES: Final = ("to_be_fired", "fired", "acked", "dead")


class Failure(enum.Enum):
    """What an error of the driver's means."""

    TRANSIENT = enum.auto()
    """A deadlock, a serialization failure, a busy file: the same transaction may succeed now."""
    LOCKED = enum.auto()
    """Somebody else holds a row: as above, in a while."""
    MADE_TWICE = enum.auto()
    """Somebody else makes the same table now: the same statement may find it there. Or it is not
    ours, and no retry helps."""
    DISCONNECTED = enum.auto()
    READ_ONLY = enum.auto()
    NAME_TAKEN = enum.auto()
    OTHER = enum.auto()


class Verdict(NamedTuple):
    """What becomes of an event that was not acked."""

    event_id: int
    state: str
    """``to_be_fired`` or ``dead``."""
    delay: int
    """Nanoseconds until it fires again."""
    more: int
    """Attempts that its row does not count yet."""
    error: str | None


class Dialect(abc.ABC):
    """One database. Holds no connection."""

    name: ClassVar[str]
    """As in :mod:`turnlane.table.definition`."""
    quote: ClassVar[str] = '"'
    mark: ClassVar[str] = "%s"
    """The driver's sign for a parameter."""
    percent: ClassVar[str] = "%%"
    """A percent sign in a statement that takes parameters."""
    now: ClassVar[str]
    """The database's clock in nanoseconds since the epoch, as an expression."""
    share: ClassVar[str] = ""
    """Ends a SELECT whose rows nobody may change before this transaction is over."""
    lock: ClassVar[str] = ""
    """Ends a SELECT whose rows this transaction is about to change."""
    lock_free: ClassVar[str] = ""
    """The same, without the rows that another transaction is about to change."""
    returning: ClassVar[bool] = True
    """Whether UPDATE can return what it changed."""
    skipping: ClassVar[tuple[str, str]] = ("INSERT INTO", "ON CONFLICT DO NOTHING")
    """How an INSERT begins and ends that leaves out events whose names are taken."""
    fenced_in_one: ClassVar[bool] = False
    """Whether one statement can hold the lease row in place and change other rows."""
    notifies: ClassVar[bool] = False
    """Whether inserts wake the manager if its lease row asks for that."""
    running: ClassVar[str | None] = None
    """Asks for the number of the oldest transaction that writes, and of the next one."""
    idle_poll: ClassVar[float] = 0.5
    """Seconds between looks at a quiet table; longer where something wakes the manager."""

    @abc.abstractmethod
    def connect(self) -> Connection:
        """A connection that commits every statement by itself."""

    def own_connection(self) -> Connection:
        """A connection for turnlane's own statements, which all go by an index."""
        return self.connect()

    def cancel(self, connection: Connection) -> None:  # noqa: B027 - most have nothing that lasts
        """Have the statement that another thread runs on a connection end at once."""

    @abc.abstractmethod
    def transaction(self, connection: Connection) -> AbstractContextManager[None]:
        """A transaction for writing; rolled back by an exception."""

    @abc.abstractmethod
    def failure(self, error: Exception) -> Failure:
        """What an error means."""

    def is_unreadable(self, error: Exception) -> bool:  # noqa: ARG002
        """Whether the driver could not read a value of a row that the database gave."""
        return False

    def raw(self, column: str) -> str:
        """A column whose value is unreadable, as an expression that can be read."""
        return column

    @property
    @abc.abstractmethod
    def error(self) -> type[Exception]:
        """The driver's root of errors."""

    @abc.abstractmethod
    def bookkeeping(self) -> list[str]:
        """Statements that make turnlane's own tables, where they are missing."""

    @abc.abstractmethod
    def table(self, definition: Definition) -> list[str]:
        """Statements that make a queue's table."""

    @abc.abstractmethod
    def number_from(self, table: str, first_id: int) -> list[str]:
        """Statements after which a table gives out ids from ``first_id`` on, or higher ones."""

    @abc.abstractmethod
    def ids(self, ids: Sequence[int]) -> tuple[str, tuple[Any, ...]]:
        """A condition on ``event_id``, as text after the column's name, and its parameters."""

    @abc.abstractmethod
    def put_back(self, table: str, verdicts: Sequence[Verdict]) -> tuple[str, tuple[Any, ...]]:
        """A statement that applies verdicts to the events that are not settled."""

    @abc.abstractmethod
    def insert_many(
        self, connection: Connection, table: str, columns: Sequence[str], rows: Iterable[Row]
    ) -> None:
        """Insert rows the fastest way that the user's transaction allows."""

    def stream(
        self, connection: Connection, statement: str, parameters: Row, size: int
    ) -> Iterator[list[Row]]:
        """The rows of one statement as they are at its start, so many at a time."""
        cursor = connection.cursor()
        cursor.execute(statement, parameters)
        while rows := cursor.fetchmany(size):
            yield list(rows)

    def keyspace(self, definition: Definition) -> str:  # noqa: ARG002
        """Where an event's key lies, as an expression; for connections of :meth:`connect`."""
        return "keyspace_id"

    def watch(self, queue: str, poke: Callable[[], None]) -> Closing | None:  # noqa: ARG002
        """Call ``poke`` from a thread when the table may have new rows, until it is closed."""
        return None

    def vacuum(self, definition: Definition) -> Sequence[str]:  # noqa: ARG002
        """Statements that give the room of deleted rows to new ones, if that needs any."""
        return ()

    def hints(self, definition: Definition) -> tuple[str, str]:  # noqa: ARG002
        """What to write after the table to have it read by fire time, and by id."""
        return "", ""

    def sql(self, template: str, **names: str) -> str:
        """A statement with its names filled in; ``%s`` stands for parameters in templates."""
        placed = template.replace("%s", self.mark)
        locks = {"share": self.share, "lock": self.lock, "lock_free": self.lock_free}
        return placed.format(now=self.now, **locks, **names)

    def identifier(self, name: str) -> str:
        """A name as it stands in a statement that takes parameters."""
        return quote_identifier(name, self.quote).replace("%", "%%")

    def bare(self, name: str) -> str:
        """A name as it stands in a statement without parameters, for people to read."""
        return quote_identifier(name, self.quote)

    def own_columns(self, column: Column) -> str:
        """The declaration of a user's column."""
        kind = TYPES[column.type].written(self.name, column.arguments)
        return f"{self.bare(column.name)} {kind}" + (" NOT NULL" if column.required else "")


def more_attempts(attempts: str, more: str) -> str:
    """The sum of two expressions, as far as the column holds it."""
    return f"{attempts} + CASE WHEN {attempts} < {MOST_ATTEMPTS} THEN {more} ELSE 0 END"


def declared(lines: Iterable[str]) -> str:
    """The inside of a ``CREATE TABLE``, a line for each."""
    return ",\n".join(f"    {line}" for line in lines)


def states() -> str:
    """The states as a list in SQL."""
    return ", ".join(f"'{state}'" for state in STATES)
