"""What a queue table is: its name, the user's columns, the key, the options."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from turnlane.units import Duration, format_duration
from turnlane.validation import Contradiction, Problem, config_error

# ── names ──
# Names of queues and columns: which are allowed, and how SQL has them.

MAX_NAME_BYTES: Final = 48
"""Bytes. PostgreSQL cuts names at 63, and the names of indexes are longer than their table's."""


def check_name(name: str) -> str:
    """The name, if a database can have it. Raises ``ValueError``."""
    if not name:
        raise ValueError("a name cannot be empty")
    if not name.isprintable():
        raise ValueError(f"{name!r} is not a name: it has characters that cannot be printed")
    if name != name.strip():
        # MySQL refuses names that end in a space.
        raise ValueError(f"{name!r} is not a name: it begins or ends with a space")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"{name!r} is too long for a name: at most {MAX_NAME_BYTES} bytes")
    if any(ord(character) > 0xFFFF for character in name):
        raise ValueError(f"{name!r} is not a name: MySQL has no such characters in names")
    return name


def quote_identifier(name: str, quote: str = '"') -> str:
    """The name as an identifier that means nothing else, whatever stands in it."""
    return quote + name.replace(quote, quote * 2) + quote


# ── settings ──
# The options of a queue table: what stands in ``WITH (…)``.

MAX_RETRY_SECONDS = 30 * 86_400.0
"""A retry further off than a month is a mistake."""

PositiveDuration = Annotated[Duration, Field(gt=0)]


class TableOrdering(enum.StrEnum):
    """What waits for what."""

    NONE = "none"
    """Nothing: events fire as they become due, side by side."""
    KEY = "key"
    """Events of one key fire one after the other; the key is the queue's ``SHARD BY`` column."""
    QUEUE = "queue"
    """All events of a shard fire one after the other."""


class Layout(enum.StrEnum):
    """What the table's primary key begins with."""

    TIME = "time"
    KEYSPACE = "keyspace"


class TableSettings(BaseModel):
    """The options of one queue table, checked and unchangeable; durations in seconds."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    max_qps: float | None = Field(
        default=None, gt=0, description="The most events fired in a second."
    )
    max_concurrency: int | None = Field(
        default=None,
        ge=1,
        description="The most events that are fired and not settled, at any time.",
    )
    ack_timeout: PositiveDuration = Field(
        default=30.0, description="An event not settled in this time is fired again."
    )
    backoff: Duration = Field(
        default=1.0, description="The wait before the first retry; then it doubles."
    )
    max_backoff: Duration = Field(
        default=600.0, le=MAX_RETRY_SECONDS, description="The longest wait."
    )
    max_attempts: int = Field(
        default=20, ge=1, description="Fired so often without an ack, an event is a dead letter."
    )
    retention: Duration = Field(
        default=0.0,
        description="How long acked events are kept, by their fire time; `0s` deletes at once.",
    )
    window: PositiveDuration = Field(
        default=30.0, description="How far ahead the manager keeps events in memory."
    )
    window_events: int = Field(
        default=10_000, ge=10, description="The most events that wait in the manager's memory."
    )
    ordering: TableOrdering = Field(
        default=TableOrdering.NONE, description="`none`, `key` or `queue`."
    )
    layout: Layout = Field(
        default=Layout.TIME, description="`time` or `keyspace`: the primary key."
    )
    lease: PositiveDuration = Field(
        default=10.0, description="How long a manager that is not heard of keeps the lead."
    )

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Check options. Raises ``ConfigError``, which names the option."""
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            raise config_error(error, cls.model_fields) from None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.backoff > self.max_backoff:
            raise Contradiction([Problem("backoff", "must be at most max_backoff")])
        return self

    def changed(self) -> dict[str, str]:
        """The options that differ from their defaults, as ``WITH (…)`` has them."""
        return {
            name: _written(name, getattr(self, name))
            for name in type(self).model_fields
            if getattr(self, name) != getattr(DEFAULTS, name)
        }


DURATIONS = frozenset({"ack_timeout", "backoff", "max_backoff", "retention", "window", "lease"})


def _written(name: str, value: object) -> str:
    if name in DURATIONS:
        assert isinstance(value, float)
        return format_duration(value)
    return str(value)


DEFAULTS = TableSettings()


# ── types ──
# The types that a queue's own columns may have, and what each database calls them.


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A type by its name in each database; ``arguments`` says how many numbers may follow."""

    sqlite: str
    postgres: str
    mysql: str
    arguments: tuple[int, ...] = (0,)
    passes: bool = True
    """Whether the numbers mean anything; the width of MySQL's integers does not."""
    keyed: bool = False
    """Whether its text is the same in every database, so that a key can be hashed by it."""

    def check(self, arguments: tuple[int, ...]) -> None:
        """Raise ``ValueError`` unless so many numbers may follow."""
        if len(arguments) not in self.arguments:
            allowed = " or ".join(map(str, self.arguments))
            raise ValueError(f"takes {allowed} numbers in parentheses, not {len(arguments)}")

    def written(self, database: str, arguments: tuple[int, ...]) -> str:
        """The type as the database has it."""
        name: str = getattr(self, database)
        if not arguments or not self.passes:
            return name
        return f"{name}({', '.join(map(str, arguments))})"


def _integer(postgres: str, mysql: str) -> ColumnType:
    return ColumnType("INTEGER", postgres, mysql, (0, 1), passes=False, keyed=True)


_DECIMAL: Final = ColumnType("NUMERIC", "NUMERIC", "DECIMAL", (0, 1, 2))
_BYTES: Final = ColumnType("BLOB", "BYTEA", "LONGBLOB")
_INT: Final = _integer("INTEGER", "INT")
_DOUBLE: Final = ColumnType("REAL", "DOUBLE PRECISION", "DOUBLE")

TYPES: Final[Mapping[str, ColumnType]] = {
    "BIGINT": _integer("BIGINT", "BIGINT"),
    "INT": _INT,
    "INTEGER": _INT,
    "SMALLINT": _integer("SMALLINT", "SMALLINT"),
    "BOOLEAN": ColumnType("BOOLEAN", "BOOLEAN", "BOOLEAN"),
    "REAL": ColumnType("REAL", "REAL", "FLOAT"),
    "DOUBLE": _DOUBLE,
    "NUMERIC": _DECIMAL,
    "DECIMAL": _DECIMAL,
    "CHAR": ColumnType("CHAR", "CHAR", "CHAR", (1,)),
    "VARCHAR": ColumnType("VARCHAR", "VARCHAR", "VARCHAR", (1,), keyed=True),
    "TEXT": ColumnType("TEXT", "TEXT", "LONGTEXT", keyed=True),
    "BLOB": _BYTES,
    "BYTEA": _BYTES,
    "DATE": ColumnType("DATE", "DATE", "DATE"),
    "TIMESTAMP": ColumnType("TIMESTAMP", "TIMESTAMPTZ", "DATETIME(6)"),
    "JSON": ColumnType("TEXT", "JSONB", "JSON"),
    "UUID": ColumnType("TEXT", "UUID", "CHAR(36)"),
}


SYSTEM_COLUMNS: Final = (
    "event_id",
    "fire_at",
    "state",
    "attempts",
    "priority",
    "keyspace_id",
    "event_name",
    "event_group",
    "after_group",
    "last_error",
)
"""Every queue table has these; the user's columns have other names."""

INSERT_COLUMNS: Final = ("fire_at", "priority", "event_name", "event_group", "after_group")
"""Those that an insert may set; the rest are turnlane's."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the user's."""

    name: str
    type: str
    arguments: tuple[int, ...] = ()
    required: bool = False

    def __str__(self) -> str:
        numbers = f"({', '.join(map(str, self.arguments))})" if self.arguments else ""
        return f"{quote_identifier(self.name)} {self.type}{numbers}" + (
            " NOT NULL" if self.required else ""
        )


@dataclass(frozen=True, slots=True)
class Definition:
    """A queue as ``CREATE QUEUE`` describes it; as text, it is that statement again."""

    name: str
    columns: tuple[Column, ...]
    shard_by: str | None = None
    settings: TableSettings = field(default_factory=TableSettings)

    def __post_init__(self) -> None:
        if self.name.lower().startswith("turnlane_"):
            raise ValueError("names that begin with turnlane_ are turnlane's own")
        seen: set[str] = set()
        for name in self.names:
            # MySQL and SQLite do not tell columns apart by case.
            if name.lower() in SYSTEM_COLUMNS:
                raise ValueError(f"every queue has a column {name!r} of its own")
            if name.lower() in seen:
                raise ValueError(f"the column {name!r} stands there twice")
            seen.add(name.lower())
        self._check_key()

    def _check_key(self) -> None:
        if self.shard_by is None:
            if self.settings.ordering is TableOrdering.KEY:
                raise ValueError("ordering = key needs SHARD BY (column)")
            return
        column = next((each for each in self.columns if each.name == self.shard_by), None)
        if column is None:
            raise ValueError(f"SHARD BY: there is no column {self.shard_by!r}")
        if not TYPES[column.type].keyed:
            raise ValueError(f"SHARD BY: a column of type {column.type} cannot be the key")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the user's columns."""
        return tuple(column.name for column in self.columns)

    def __str__(self) -> str:
        columns = ", ".join(map(str, self.columns))
        text = f"CREATE QUEUE {quote_identifier(self.name)} ({columns})"
        if self.shard_by is not None:
            text += f" SHARD BY ({quote_identifier(self.shard_by)})"
        options = self.settings.changed()
        if options:
            text += f" WITH ({', '.join(f'{name} = {value}' for name, value in options.items())})"
        return text
